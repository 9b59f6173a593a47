"""A framework's own function that shards, with another ``fully_shard()``, while everybody's names stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

from ..errors import MisuseRuntimeError

Function = Callable[..., Any]


def with_functions(function: Function, replaced: Mapping[Function, Function]) -> Function:
    """Return a copy of ``function`` that calls the values of ``replaced`` in place of its keys. So do copies of those
    functions of the same package that it calls by a global name.

    Raises:
        RuntimeError: nothing that it calls is to be replaced.
    """
    package = function.__module__.partition(".")[0]
    results: dict[Function, Function] = {**replaced}

    def copy_of(original: Any) -> Function:
        if original not in results:
            results[original] = original  # for a recursive call
            seen = {name: original.__globals__.get(name) for name in _names_in(original.__code__)}
            changed = {
                name: new
                for name, old in seen.items()
                if isinstance(old, FunctionType)
                and (old in replaced or old.__module__.partition(".")[0] == package)
                and (new := copy_of(old)) is not old
            }
            if changed:
                names = {**original.__globals__, **changed}
                new = FunctionType(original.__code__, names, None, original.__defaults__, original.__closure__)
                new.__kwdefaults__ = original.__kwdefaults__
                results[original] = new
        return results[original]

    if (result := copy_of(function)) is function:
        called = ", ".join(f"{item.__module__}.{item.__qualname__}()" for item in replaced)
        raise MisuseRuntimeError(
            f"{function.__module__}.{function.__qualname__}() calls no {called}, in the place of which "
            f"fsdp_compose would come: this is another {package} than it knows. Call fsdp_compose.drop_in.install() "
            "before models are sharded"
        )
    return result


def _names_in(code: CodeType) -> set[str]:
    inner = [item for item in code.co_consts if isinstance(item, CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))

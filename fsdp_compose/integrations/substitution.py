"""A framework's own function that shards, with another ``fully_shard()``, while everybody's names stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

from ..errors import MisuseRuntimeError

Function = Callable[..., Any]


def with_functions(function: Function, replaced: Mapping[Function, Function]) -> Function:
    """Return a copy of ``function`` that calls the values of ``replaced`` in place of its keys. So do copies of those
    functions of the same package that it calls by a global name. Raises RuntimeError if it calls none of them."""
    package = function.__module__.partition(".")[0]
    seen: dict[Any, dict[str, Any]] = {}  # the functions that each one calls, by its global names

    def look(at: Any) -> None:
        if at in seen or at in replaced:
            return
        named = {name: at.__globals__.get(name) for name in _names_in(at.__code__)}
        seen[at] = {name: found for name, found in named.items() if isinstance(found, FunctionType)}
        for found in seen[at].values():
            if (found.__module__ or "").partition(".")[0] == package:
                look(found)

    look(function)
    results: dict[Any, Function] = {**replaced}
    # Functions may call each other, so all copies are made before one is among the globals of another.
    while new := [
        at for at, called in seen.items() if at not in results and not results.keys().isdisjoint(called.values())
    ]:
        for at in new:
            results[at] = FunctionType(at.__code__, {**at.__globals__}, None, at.__defaults__, at.__closure__)
            results[at].__kwdefaults__ = at.__kwdefaults__
    for at in seen.keys() & results.keys():
        names = {name: results[found] for name, found in seen[at].items() if found in results}
        results[at].__globals__.update(names)
    if function not in results:
        called = ", ".join(f"{item.__module__}.{item.__qualname__}()" for item in replaced)
        raise MisuseRuntimeError(
            f"{function.__module__}.{function.__qualname__}() calls no {called}, which fsdp_compose would "
            f"replace: this version of {package} is not one that it knows. Call fsdp_compose.drop_in.install() before "
            "models are sharded"
        )
    return results[function]


def _names_in(code: CodeType) -> set[str]:
    inner = [item for item in code.co_consts if isinstance(item, CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))

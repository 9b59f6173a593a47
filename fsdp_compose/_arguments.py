"""Arguments of public functions: their types, checked by the annotations, and sizes, which one parser reads."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from inspect import Parameter
from itertools import takewhile
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from typing_extensions import is_protocol

from .errors import MisuseError, MisuseTypeError

_T = TypeVar("_T", bound=Callable[..., Any])


def size_of(size: int | str, what: str, least: int = 1, or_else: str = "") -> int:
    """Return a size in bytes: an int, or a text such as ``"256MB"``, ``"40.5GB"`` or ``"4GiB"``.

    Args:
        size: what the user gave.
        what: the argument in errors, with ``{}`` for the value: ``"full_parameters(bucket_bytes={})"``.
        least: 1, or 0 where that is a size too.
        or_else: in errors, what else would be accepted.

    Raises:
        MisuseTypeError, MisuseError: it is no such size.
    """
    found = int(size) if _is_int(size) else None
    if isinstance(size, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(I?))?B?", size.strip().upper())):
        found = int(Decimal(match[1]) * (1024 if match[3] else 1000) ** (" KMGT".index(match[2] or " ")))
    if found is None or found < least:
        kind = MisuseError if isinstance(size, str) or found is not None else MisuseTypeError
        raise kind(
            f"{what.format(_shown(size))}: expected a {'positive ' if least else ''}number of bytes, or a text such as "
            f"'256MB' or '1.5GiB'{or_else}"
        )
    return found


def checked(**expected: str | None) -> Callable[[_T], _T]:
    """Let a public function, or the constructor of a class, refuse arguments whose types its annotations exclude.
    ``expected``: for parameters that need it, what errors say instead of the annotation; ``None`` for those whose
    mistakes on one rank are told to all."""

    def decorate(target: Any) -> Any:
        if isinstance(target, type):
            target.__init__ = decorate(target.__init__)  # type: ignore[misc]
            return target
        parameters = inspect.signature(target).parameters
        # What comes after *arguments is no position.
        names = [*takewhile(lambda name: parameters[name].kind is not Parameter.VAR_POSITIONAL, parameters)]
        # Not now: annotations name what is made later.
        kinds_of_target = functools.cache(functools.partial(_kinds_of, target, expected))

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return target(*args, **kwargs)
            kinds = kinds_of_target()
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                if name in kinds and not any([fits(value) for fits in kinds[name][0]]):
                    where = f"{target.__qualname__.removesuffix('.__init__')}({name}={_shown(value)})"
                    got = "" if isinstance(value, (type, FunctionType)) else f", got {type(value).__name__}"
                    raise MisuseTypeError(f"{where}: expected {kinds[name][1]}{got}")
            return target(*args, **kwargs)

        return call

    return decorate


_Test = Callable[[Any], bool]


def _kinds_of(function: Callable[..., Any], expected: Mapping[str, str | None]) -> dict[str, tuple[list[_Test], str]]:
    """How to test the arguments, and what is expected in words; without those of which annotations say too little."""
    found = {}
    for name, hint in get_type_hints(function).items():
        hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        tests = [test for item in hints if (test := _test_of(get_origin(item) or item)) is not None]
        if len(tests) == len(hints) and expected.get(name, "") is not None:
            words = " or ".join(dict.fromkeys([text for _, text in tests]))
            found[name] = [fits for fits, _ in tests], expected.get(name) or words
    return found


def _test_of(kind: Any) -> tuple[_Test, str] | None:
    if kind in _TESTS:
        return _TESTS[kind]
    if not isinstance(kind, type) or kind is Any or is_protocol(kind):
        return None
    if kind.__module__ in ("builtins", "collections.abc") and issubclass(kind, Iterable):
        return _TESTS[Mapping] if issubclass(kind, Mapping) else _TESTS[Iterable]
    name = f"torch.{kind.__name__}" if kind.__module__ == "torch" else kind.__qualname__
    words = f"a{'n' if name[0] in 'AEIOU' else ''} {name}"

    def fits(value: object) -> bool:  # by name, too: torch's policies and options are called like ours
        return isinstance(value, kind) or kind.__name__ in [base.__name__ for base in type(value).__mro__]

    return fits, words


def _is_int(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, (bool, torch.Tensor))  # numpy's too


_TESTS: dict[Any, tuple[_Test, str]] = {
    NoneType: (lambda value: value is None, "None"),
    bool: (lambda value: isinstance(value, bool), "True or False"),
    int: (_is_int, "a whole number"),
    float: (lambda value: hasattr(value, "__float__") and not isinstance(value, bool), "a number"),
    str: (lambda value: isinstance(value, str), "a string"),
    Path: (lambda value: isinstance(value, os.PathLike), "a path"),
    Iterable: (lambda value: isinstance(value, Iterable) and not isinstance(value, str), "a list"),
    Mapping: (lambda value: isinstance(value, Mapping), "a dict"),
    Callable: (callable, "a function"),
    torch.dtype: (lambda value: isinstance(value, torch.dtype), "a torch.dtype such as torch.bfloat16"),
    torch.nn.Module: (lambda value: isinstance(value, torch.nn.Module), "an nn.Module"),
}


def _shown(value: object) -> str:
    """A value in an error. The ``repr`` of others takes pages, or communicates."""
    if isinstance(value, FunctionType):
        return value.__qualname__
    is_short = isinstance(value, (type, str, int, float, complex, NoneType, torch.dtype, torch.device, os.PathLike))
    return repr(value) if is_short else "..."

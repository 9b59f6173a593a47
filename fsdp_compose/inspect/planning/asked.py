"""What a plan is asked for, in the words of a command line, checked before anything is built."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16,
}  # fmt: skip
REST = "*"  # of a mesh: what the number of ranks leaves


def load_factory(text: str) -> Callable[..., Any]:
    """The function that ``module:name`` names, or ``path/to/file.py:name``.

    Raises:
        ValueError: there is no such module, file or function. (What the module raises when it is imported goes on.)
    """
    place, colon, name = text.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise ValueError(f"--model {text}: expected module:factory, or path/to/file.py:factory")
    module = _file(Path(place), text) if place.endswith(".py") else _module(place, text)
    found = getattr(module, name, None)
    if not callable(found):
        offered = [key for key, value in vars(module).items() if _can_be_factory(value, module)]
        others = f"; it has {', '.join(offered[:8])}" if offered else ""
        what = "is no function" if hasattr(module, name) else "does not exist"
        raise ValueError(f"--model {text}: {name} {what} in {place}{others}")
    return found


def _can_be_factory(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not value.__name__.startswith("_")


def _module(name: str, text: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module was found, and imports what there is not
        raise ValueError(
            f"--model {text}: there is no module {error.name} on the path of Python, to which the current folder "
            "belongs; a file is named by its path, with .py"
        ) from None


def _file(path: Path, text: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"--model {text}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "it is a file of Python's"
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # as in an import: dataclasses and pickles look for it
    sys.path.insert(0, str(path.parent))  # as when Python runs it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if known is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = known
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def world_sizes_of(text: str) -> tuple[int, ...]:
    """``8,64,1024`` as numbers.

    Raises:
        ValueError: one is none, or less than 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--world-size {text}: expected numbers of ranks, for example 8,64,1024")
    return tuple(map(int, parts))


def mesh_shape_of(text: str | None, world_size: int) -> tuple[int, ...]:
    """The shape of a mesh of ``world_size`` ranks: ``8``, or ``2x4`` for 2 replicas of 4 shards; one number may be
    ``*``, for what is left of the ranks.

    Raises:
        ValueError: it is no such text, or not of so many ranks.
    """
    if text is None:
        return (world_size,)
    parts = text.lower().split("x")
    is_size = [part == REST or (part.isdecimal() and int(part) > 0) for part in parts]
    if len(parts) > 2 or not all(is_size) or parts.count(REST) > 1:
        raise ValueError(
            f"--mesh {text}: expected the number of shards, or RxS for R replicas of S shards, of which one may be * "
            "for what is left of the ranks: *x8"
        )
    given = math.prod(int(part) for part in parts if part != REST)
    if world_size % given or (REST not in parts and given != world_size):
        there = f"a multiple of {given}" if REST in parts else str(given)
        raise ValueError(f"--mesh {text}: it is of {there} ranks, and --world-size is {world_size}")
    return tuple(world_size // given if part == REST else int(part) for part in parts)


def dtype_of(text: str | None, option: str) -> torch.dtype | None:
    """
    Raises:
        ValueError: there is no such dtype.
    """
    if text is None or text in DTYPES:
        return None if text is None else DTYPES[text]
    raise ValueError(f"{option} {text}: expected one of {', '.join(DTYPES)}")

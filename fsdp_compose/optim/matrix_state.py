"""Values in the state of a matrix, in lists and dicts too: what they are, and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..errors import MisuseTypeError
from ..flat import local_of

DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}  # in which numbers are shown
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}

Path = tuple[str | int, ...]
"""Name, and path in lists and dicts, of a value in the state of a matrix."""


class Leaf(NamedTuple):
    """What kind of value is in the state of a matrix.

    Attributes:
        shape: of a tensor, ``()`` of a number.
        dtype: its name; ``None``: ``value`` is a text or ``None`` itself, the same on every rank.
    """

    path: Path
    shape: tuple[int, ...] = ()
    dtype: str | None = None
    value: str | None = None


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


def described(path: Path, leaf: Any) -> Leaf:
    if isinstance(leaf, torch.Tensor):
        return Leaf(path, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
    if type(leaf) in DTYPES:
        return Leaf(path, (), str(DTYPES[type(leaf)]).removeprefix("torch."))
    if leaf is None or type(leaf) is str:
        return Leaf(path, value=leaf)
    raise MisuseTypeError(
        f"Matrixwise: the optimizer keeps a {type(leaf).__name__} in its state, as {'.'.join(map(str, path))}: "
        "expected tensors, numbers, texts and None, also in lists and dicts"
    )


def is_shown(shown: tuple[Any, Any], value: Any) -> bool:
    """Whether a value is still the one that was shown, in the same memory."""
    before, made = shown
    if before is not value or not isinstance(value, torch.Tensor):
        return before is value
    return made.dtype == value.dtype and made.shape == value.shape and local_of(made).data_ptr() == value.data_ptr()


def nested(layout: Sequence[Leaf], values: Sequence[Any]) -> dict[str, Any]:
    """Put values where ``layout`` says, into new lists and dicts."""
    result: dict[str, Any] = {}
    for (path, *_), value in zip(layout, values, strict=True):
        inside: Any = result
        for key, following in pairwise(path):
            if isinstance(inside, list) and len(inside) == key:
                inside.append([] if isinstance(following, int) else {})
            elif isinstance(inside, dict) and key not in inside:
                inside[key] = [] if isinstance(following, int) else {}
            inside = inside[key]
        if isinstance(inside, list):
            inside.append(value)
        else:
            inside[path[-1]] = value
    return result

"""Tensors within lists, tuples and dicts, as some optimizers keep them (``LBFGS``: lists of vectors)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[Any, ...]
"""Indices and keys that lead to a leaf; empty if the value is one itself."""


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything in ``value`` that is no list, tuple or dict, and where."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from leaves_of(item, (*path, i))
    else:
        yield path, value


def map_leaves(function: Callable[[Path, Any], Any], value: Any, path: Path = ()) -> Any:
    """``value`` with ``function(path, leaf)`` in the place of each leaf. Lists, tuples and dicts are new ones."""
    if isinstance(value, dict):
        mapped = copy.copy(value)  # of the same class, also if that is not dict
        mapped.update({key: map_leaves(function, item, (*path, key)) for key, item in value.items()})
        return mapped
    if type(value) in (list, tuple):
        return type(value)([map_leaves(function, item, (*path, i)) for i, item in enumerate(value)])
    return function(path, value)

"""Values nested in lists, tuples and dicts, as some optimizers keep them (``LBFGS``: lists of vectors)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Path = tuple[Any, ...]
"""Indices and keys that lead to a leaf; empty if the value itself is a leaf."""


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of everything in ``value`` that is not a list, tuple or dict."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from leaves_of(item, (*path, i))
    else:
        yield path, value


def map_leaves(function: Callable[[Path, Any], Any], value: Any, path: Path = ()) -> Any:
    """Return ``value`` with each leaf replaced by ``function(path, leaf)``. Lists, tuples and dicts are new objects."""
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps a subclass of dict
        mapped.update({key: map_leaves(function, item, (*path, key)) for key, item in value.items()})
        return mapped
    if type(value) in (list, tuple):
        return type(value)([map_leaves(function, item, (*path, i)) for i, item in enumerate(value)])
    return function(path, value)


def put_leaf(container: Any, path: Sequence[Any], value: Any) -> None:
    """Put a value into nested dicts and lists, which grow as needed, and replace what is in the way: a path has keys of
    dicts and indices of lists."""
    here, *rest = path
    if isinstance(container, list):
        container.extend([None] * (here + 1 - len(container)))
    if not rest:
        container[here] = value
        return
    inside = container[here] if isinstance(container, list) else container.get(here)
    if not isinstance(inside, list if isinstance(rest[0], int) else Mapping):
        inside = container[here] = [] if isinstance(rest[0], int) else {}
    put_leaf(inside, rest, value)


# ---- Optimizer dicts: those of an optimizer's own ``state_dict()``, and flattened to one level of keys


STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def is_flattened(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer dict has one level of keys: ``state.<fqn>.<key>`` and ``param_groups.<fqn>.<key>``."""
    return GROUPS not in state and any(str(key).startswith((f"{STATE}.", f"{GROUPS}.")) for key in state)


def longest_prefix(text: str, known: set[str]) -> str | None:
    """The longest name in ``known`` that ``text`` continues with a dot."""
    end = len(text)
    while (end := text.rfind(".", 0, end)) >= 0:
        if text[:end] in known:
            return text[:end]
    return None

"""Dicts with numbers for keys, of which ``torch.distributed.checkpoint`` makes strings (``MultiStepLR``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ..state.nested import Path


def with_string_keys(value: Any) -> Any:
    """The value with dicts and lists of its own, and strings for keys.

    Raises:
        ValueError: two keys of a dict have one string.
    """
    if isinstance(value, dict):
        made = {str(key): with_string_keys(item) for key, item in value.items()}
        if len(made) != len(value):
            raise ValueError(f"two keys of a dict have one string, among {[*value][:10]}: checkpoints hold strings")
        return made
    return [with_string_keys(item) for item in value] if type(value) is list else value


def paths_of_numbers(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where, by strings and indices, dicts are that have integers for keys."""
    if isinstance(value, dict):
        if any(type(key) is int for key in value):
            yield path
        for key, item in value.items():
            yield from paths_of_numbers(item, (*path, str(key)))
    elif type(value) is list:
        for i, item in enumerate(value):
            yield from paths_of_numbers(item, (*path, i))


def give_back(before: Any, loaded: Any, numbers: Collection[Path], path: Path = ()) -> Any:
    """The values of ``loaded`` in the dicts of ``before``, of which it was made ``with_string_keys``.

    Args:
        numbers: the ``paths_of_numbers`` of what was saved.
    """
    if isinstance(loaded, dict):
        result = before if isinstance(before, dict) else {}
        keys, known = {str(key): key for key in result}, dict(result)
        result.clear()
        for name, item in loaded.items():
            key = keys.get(name, int(name) if path in numbers and name.lstrip("-").isdigit() else name)
            result[key] = give_back(known.get(key), item, numbers, (*path, name))
        return result
    if type(loaded) is list:
        known_items = before if type(before) is list else []
        padded = [*known_items, *[None] * (len(loaded) - len(known_items))]
        return [give_back(padded[i], item, numbers, (*path, i)) for i, item in enumerate(loaded)]
    return loaded

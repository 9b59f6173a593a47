"""``LoadPlanner``: loads optimizer dicts as they were saved, also into other parameter groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .flattened import GROUPS, STATE, is_flattened
from .pending import is_pending


class LoadPlanner(DefaultLoadPlanner):
    """For ``torch.distributed.checkpoint.load(state_dict, planner=LoadPlanner())``.

    What torch's own planner loads is decided by the dict it is given, key by key. This one takes from the checkpoint
    which parameter groups there are and what is in them, and which parameters have state; everything else is the same.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        for path, optimizer in _optimizer_dicts(state_dict, ()):
            _follow(optimizer, path, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _optimizer_dicts(state: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    if not isinstance(state, dict):
        return
    if {STATE, GROUPS} <= state.keys() or is_flattened(state):
        yield path, state
        return
    for key, value in state.items():
        yield from _optimizer_dicts(value, (*path, str(key)))


def _follow(optimizer: dict[str, Any], path: tuple[str, ...], metadata: Metadata) -> None:
    """Give an optimizer dict the groups that were saved, and no state where none was saved."""
    prefix = "".join(f"{part}." for part in path)
    saved = [key for key in metadata.state_dict_metadata if key.startswith(f"{prefix}{GROUPS}.")]
    if GROUPS not in optimizer:
        for key in [key for key in optimizer if key.startswith(f"{GROUPS}.") and prefix + key not in saved]:
            del optimizer[key]
        optimizer.update({key[len(prefix) :]: _place(metadata, key) for key in saved})
        for key in [key for key, value in optimizer.items() if is_pending(value)]:
            if prefix + key not in metadata.state_dict_metadata:
                del optimizer[key]
        return
    if saved:
        optimizer[GROUPS] = _saved_groups(saved, len(path), metadata)
    for fqn, entries in [*optimizer[STATE].items()]:
        kept = {key: value for key, value in entries.items() if _is_saved(f"{prefix}{STATE}.{fqn}.{key}", metadata)}
        if not kept:
            del optimizer[STATE][fqn]
        elif all(is_pending(value) for value in entries.values()):
            optimizer[STATE][fqn] = kept


def _is_saved(key: str, metadata: Metadata) -> bool:
    known: Mapping[str, Any] = metadata.state_dict_metadata
    return key in known or any(other.startswith(f"{key}.") for other in known)


def _saved_groups(keys: list[str], depth: int, metadata: Metadata) -> list[dict[str, Any]]:
    """Groups with a place for everything that was saved in them."""
    groups: dict[int, dict[str, Any]] = {}
    for key in keys:
        _, index, *rest = metadata.planner_data[key][depth:]
        _put(groups.setdefault(int(index), {}), rest, _place(metadata, key))
    return [groups[index] for index in sorted(groups)]


def _put(container: Any, path: list[Any], value: Any) -> None:
    for here, below in pairwise(path):
        if isinstance(container, list):
            container.extend([None] * (here + 1 - len(container)))
            if container[here] is None:
                container[here] = [] if isinstance(below, int) else {}
            container = container[here]
        else:
            container = container.setdefault(here, [] if isinstance(below, int) else {})
    if isinstance(container, list):
        container.extend([None] * (path[-1] + 1 - len(container)))
    container[path[-1]] = value


def _place(metadata: Metadata, key: str) -> Any:
    saved = metadata.state_dict_metadata[key]
    if isinstance(saved, TensorStorageMetadata):
        return torch.empty(saved.size, dtype=saved.properties.dtype)
    return None

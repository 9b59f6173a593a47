"""Groups whose shards are in host memory for a while (``offload()``): their forwards raise.

Looked for where a root is set up. A root that is set up has its picture of what the user changes, which each of its
forwards looks at, exchanged for one that raises: so no forward of a model that is awake asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NoReturn

import torch

from .state import ParameterWatch, _FSDPState

_asleep: weakref.WeakSet[_FSDPState] = weakref.WeakSet()


class _AsleepWatch:
    """In the place of the watch over a root of which some groups are asleep."""

    def __init__(self, original: ParameterWatch, state: _FSDPState) -> None:
        self.original = original
        self._name = state.name

    def _refuse(self) -> NoReturn:
        raise RuntimeError(error_of_sleep(self._name))

    def is_quiet(self) -> bool:
        self._refuse()

    def has_unsharded_grads(self) -> bool:
        self._refuse()

    def backward_has_ended(self) -> None:
        self._refuse()

    def was_toggled(self) -> bool:
        self._refuse()

    def has_grads(self) -> bool:
        self._refuse()

    def newly_kept(self) -> list[tuple[_FSDPState, list[torch.Tensor]]]:
        self._refuse()

    def was_forward_quiet(self) -> bool:
        self._refuse()

    def follow_addresses(self) -> None:
        self._refuse()


def put_to_sleep(states: Iterable[_FSDPState]) -> None:
    """From now on forwards of these groups, and of roots that have them, raise."""
    for state in states:
        _asleep.add(state)
        for owner in _owners(state):
            if owner.watch is not None and not isinstance(owner.watch, _AsleepWatch):
                owner.follow(_AsleepWatch(owner.watch, state))


def wake(states: Iterable[_FSDPState]) -> None:
    """They may run again; their shards have the same elements as before, at other addresses."""
    states = [*states]
    for state in states:
        _asleep.discard(state)
    for state in states:
        for owner in _owners(state):
            if isinstance(owner.watch, _AsleepWatch):
                is_awake = owner.root is None or not any(item in _asleep for item in owner.root.live_states())
                if is_awake:
                    owner.follow(owner.watch.original)
            if owner.watch is not None and not isinstance(owner.watch, _AsleepWatch):
                owner.watch.follow_addresses()


def is_asleep(state: _FSDPState) -> bool:
    return state in _asleep


def refuse_asleep(states: Iterable[_FSDPState]) -> None:
    """Raise RuntimeError if one of them is asleep."""
    for state in states:
        if state in _asleep:
            raise RuntimeError(error_of_sleep(state.name))


def error_of_sleep(name: str) -> str:
    return (
        f"the parameters of the fully_shard group {name} are in host memory since offload(model): call onload(model) "
        "before they are used"
    )


def _owners(state: _FSDPState) -> list[_FSDPState]:
    """Those that hold the watch of the group's root."""
    if state.root is None:
        return []
    found = [part[0]() for part in state.root.parts]
    return [owner for owner in found if owner is not None]

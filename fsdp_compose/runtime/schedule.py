"""Prefetch: the all-gather of the group that comes next starts while this one computes.

Which one comes next, the last iteration tells in forward, and this forward in backward; or the user has said so.
"""

from __future__ import annotations

from collections.abc import Callable

from ..group import ForwardRecord, Modules, Root, _FSDPState, get_state
from .steps import unshard, unshard_again


def prefetch_forward(root: Root, state: _FSDPState) -> None:
    """Start the all-gather of the group that came next in the last iteration, if this one goes the same way."""
    forward, index = root.forward, state.place.index
    begun, previous = forward.record.begun, forward.previous.begun
    i = len(begun)
    begun.append(index)
    if state.options.forward_prefetch is not None:
        _prefetch(root, state.options.forward_prefetch, unshard)
    elif i + 1 < len(previous) and previous[i] == index:
        following = root.states[previous[i + 1]]()
        if following is not None:
            unshard(root, following)


def prefetch_backward(root: Root, state: _FSDPState, record: ForwardRecord, position: int) -> None:
    """Start the all-gather of the group whose forward ended before that of ``state``, which was the one at ``position``
    of those that ``record`` has hooked."""
    hints = state.options.backward_prefetch
    if hints is not None:
        _prefetch(root, hints, unshard_again)
    elif position and record.states is root.states:
        previous = root.states[record.hooked[position - 1]]()
        if previous is not None:
            unshard_again(root, previous)


def before_in_backward(root: Root, state: _FSDPState, record: ForwardRecord, position: int) -> list[_FSDPState]:
    """The groups that ``prefetch_backward`` would gather."""
    if state.options.backward_prefetch is not None:
        return _groups_of(root, state.options.backward_prefetch)
    previous = root.states[record.hooked[position - 1]]() if position and record.states is root.states else None
    return [] if previous is None else [previous]


def _prefetch(root: Root, modules: Modules, start: Callable[[Root, _FSDPState], None]) -> None:
    """Start the all-gathers of the groups that the user wants to be gathered ahead."""
    for other in _groups_of(root, modules):
        start(root, other)


def _groups_of(root: Root, modules: Modules) -> list[_FSDPState]:
    """Those of this root that were made of the modules; but for those that ranks may skip."""
    states = [get_state(module) for ref in modules if (module := ref()) is not None]
    skipped = () if root.rounds is None else root.rounds.hosts
    return [item for item in states if item is not None and item.root is root and item.place.index not in skipped]

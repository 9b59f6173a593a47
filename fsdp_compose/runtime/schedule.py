"""Prefetch: the all-gather of the group that comes next starts while this one computes.

Which one comes next, the last iteration tells in forward, and this forward in backward; or the user has said so.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..group import ForwardRecord, Modules, Root, _FSDPState, get_state
from .steps import unshard, unshard_again


def prefetch_forward(root: Root, state: _FSDPState) -> None:
    """Start the all-gathers of the groups that come next."""
    for following in begin_in_order(root, state):
        unshard(root, following)


def begin_in_order(root: Root, state: _FSDPState) -> Sequence[_FSDPState]:
    """Note that a forward of a group begins; the one that came next in the last iteration, if this one goes the same
    way."""
    forward, index = root.forward, state.place.index
    begun, previous = forward.record.begun, forward.previous.begun
    i = len(begun)
    begun.append(index)
    if state.options.forward_prefetch is not None:
        return _groups_of(root, state.options.forward_prefetch)
    following = root.states[previous[i + 1]]() if i + 1 < len(previous) and previous[i] == index else None
    return () if following is None else (following,)


def prefetch_backward(root: Root, state: _FSDPState, record: ForwardRecord, position: int) -> None:
    """Start the all-gathers of the groups that come next in backward."""
    for previous in before_in_backward(root, state, record, position):
        unshard_again(root, previous)


def before_in_backward(root: Root, state: _FSDPState, record: ForwardRecord, position: int) -> Sequence[_FSDPState]:
    """The group whose forward ended before that of ``state``, which was the one at ``position`` of those that
    ``record`` has hooked."""
    if state.options.backward_prefetch is not None:
        return _groups_of(root, state.options.backward_prefetch)
    previous = root.states[record.hooked[position - 1]]() if position and record.states is root.states else None
    return () if previous is None else (previous,)


def _groups_of(root: Root, modules: Modules) -> list[_FSDPState]:
    """Those of this root that the user wants to be gathered ahead; but for those that ranks may skip."""
    states = [get_state(module) for ref in modules if (module := ref()) is not None]
    skipped = () if root.rounds is None else root.rounds.hosts
    return [item for item in states if item is not None and item.root is root and item.place.index not in skipped]

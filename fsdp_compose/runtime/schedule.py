"""Prefetch: the all-gather of the group that comes next starts while this one computes.

Which one comes next, the last iteration tells in forward, and this forward in backward; or the user has said so.
"""

from __future__ import annotations

from collections.abc import Callable

from ..group import ForwardRecord, Modules, Root, _FSDPState, get_state
from .steps import unshard, unshard_again

Start = Callable[[Root, _FSDPState], None]


def prefetch_forward(root: Root, state: _FSDPState, start: Start = unshard) -> None:
    """Start the all-gather of the group that came next in the last iteration, if this one goes the same way."""
    forward, index = root.forward, state.place.index
    begun, previous = forward.record.begun, forward.previous.begun
    i = len(begun)
    begun.append(index)
    if state.options.forward_prefetch is not None:
        _prefetch(root, state.options.forward_prefetch, start)
    elif i + 1 < len(previous) and previous[i] == index:
        following = root.states[previous[i + 1]]()
        if following is not None:
            start(root, following)


def prefetch_backward(
    root: Root, state: _FSDPState, record: ForwardRecord, position: int, start: Start = unshard_again
) -> None:
    """Start the all-gather of the group whose forward ended before that of ``state``, which was the one at ``position``
    of those that ``record`` has hooked."""
    hints = state.options.backward_prefetch
    if hints is not None:
        _prefetch(root, hints, start)
    elif position and record.states is root.states:
        previous = root.states[record.hooked[position - 1]]()
        if previous is not None:
            start(root, previous)


def following_in_forward(root: Root, state: _FSDPState) -> list[_FSDPState]:
    """The groups that ``prefetch_forward`` would gather; likewise to be called once in a forward of ``state``."""
    found: list[_FSDPState] = []
    prefetch_forward(root, state, lambda _, other: found.append(other))
    return _mandatory(root, found)


def following_in_backward(root: Root, state: _FSDPState, record: ForwardRecord, position: int) -> list[_FSDPState]:
    """The groups that ``prefetch_backward`` would gather."""
    found: list[_FSDPState] = []
    prefetch_backward(root, state, record, position, lambda _, other: found.append(other))
    return _mandatory(root, found)


def _mandatory(root: Root, states: list[_FSDPState]) -> list[_FSDPState]:
    """Those that no rank may skip: the user may have named others."""
    return [state for state in states if root.rounds is None or state.place.index not in root.rounds.hosts]


def _prefetch(root: Root, modules: Modules, start: Start) -> None:
    """Start the all-gathers of the groups that the user wants to be gathered ahead; of this root's alone."""
    for ref in modules:
        module = ref()
        other = None if module is None else get_state(module)
        if other is not None and other.root is root:
            start(root, other)

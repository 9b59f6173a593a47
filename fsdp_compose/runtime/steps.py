"""The steps of one group, each noted in the trace of what its process group carries: unshard, reshard, reduce, and what
follows from a change of ``requires_grad``.
"""

from __future__ import annotations

from ..flat import FlatParamHandle
from ..group import ALL_GATHER, REDUCE_SCATTER, Phase, RootContext, _FSDPState, code_of_flags
from ..ragged import toggles


def unshard(root: RootContext, state: _FSDPState) -> None:
    """Start the all-gathers of a group, if it is not unsharded."""
    for handle in state._handles:
        if not handle.is_unsharded:
            root.trace.append(state.code | ALL_GATHER)
            root.communicator.unshard(handle)


def unshard_for_use(root: RootContext, state: _FSDPState) -> None:
    """As ``unshard``, for a forward that is about to compute: what was gathered ahead, or kept, before the ranks wrote
    to the sharded parameters is gathered again."""
    for handle in state._handles:
        if not handle.is_unsharded:
            root.trace.append(state.code | ALL_GATHER)
            root.communicator.unshard(handle)
        elif (handle.shard._version != handle.gathered_version or handle.segments) and handle.is_stale():
            root.trace.append(state.code | ALL_GATHER)
            root.communicator.refresh(handle)


def wait_for_unshard(root: RootContext, state: _FSDPState) -> None:
    for handle in state._handles:
        if handle.all_gather_work is not None:
            root.communicator.wait(handle)


def reshard(root: RootContext, state: _FSDPState) -> None:
    """Free the unsharded parameters of a group, unless a forward of it is running."""
    for handle in state._handles:
        if handle.is_unsharded and not state.entries:
            root.communicator.reshard(handle)


def reduce(root: RootContext, state: _FSDPState, with_frozen: bool = False) -> None:
    """Take the gradients of a group, reshard it, and reduce (or, without gradient sync, accumulate) them. A group of
    which a forward is running (the backward runs inside it) stays unsharded. ``with_frozen``: also the flat parameters
    of which no part requires grad."""
    if state in root.shown:
        hide_shown(root, state)
    is_running = bool(state.entries)
    state.phase = Phase.POST_BACKWARD
    state.is_reduced = True
    state.has_unsynced = not state.requires_gradient_sync
    for handle in state._handles:
        is_due = handle.is_trainable or with_frozen
        if not (is_due or (handle.accumulation is not None and state.requires_gradient_sync)):
            if not is_running:
                root.communicator.reshard(handle)
        elif state.requires_gradient_sync:
            root.trace.append(state.code | REDUCE_SCATTER)
            root.has_added |= handle.accumulation is not None
            root.communicator.reduce(handle, is_running)
            root.has_added |= handle.is_reduce_added
        else:
            root.has_added = True
            root.communicator.accumulate(handle, is_running)


def hide_shown(root: RootContext, only: _FSDPState | None = None) -> None:
    """No longer show groups that were shown since backward began."""
    for state in [*root.shown] if only is None else [only]:
        del root.shown[state]
        state.swap.show_sharded()


def stays_unsharded(root: RootContext, state: _FSDPState) -> bool:
    """Whether the forward that is running, inside which a backward ends, needs the group as it is."""
    begun, previous = root.record.begun, root.previous.begun
    is_next = len(previous) > len(begun) and previous[len(begun)] == state.index  # forward prefetch
    return bool(is_next or state.entries or state.pending_modules or not state.reshard_after_forward)


def follow_requires_grad(root: RootContext, state: _FSDPState) -> None:
    """Take over what the user did to ``requires_grad`` of the sharded parameters. Noted in the trace: when a rank does
    it alone, ranks differ at the end of backward."""
    for handle in state._handles:
        handle.follow_requires_grad()
        root.trace.append(_code_of_flags(state, handle))


def follow_toggles(root: RootContext, state: _FSDPState) -> None:
    """Before a forward of a group under grad mode, when some ``requires_grad`` was set since its last one."""
    count = toggles.count
    if any([handle.was_toggled() for handle in state._handles]):
        follow_requires_grad(root, state)
    state.num_toggles = count


def follow_toggles_before_backward(root: RootContext) -> None:
    """As autograd does, give no gradient to what was frozen since forward. What is reduced does not change by it."""
    for state in root.live_states():
        for handle in state._handles:
            if handle.was_toggled():
                was_trainable = handle.is_trainable
                follow_requires_grad(root, state)
                handle.is_trainable |= was_trainable


def follow_toggles_of_forward(root: RootContext, states: list[_FSDPState]) -> None:
    for state in states:
        for handle in state._handles:
            if handle.was_toggled_unsharded():
                handle.follow_unsharded_requires_grad()
                root.trace.append(_code_of_flags(state, handle))


def _code_of_flags(state: _FSDPState, handle: FlatParamHandle) -> int:
    return code_of_flags(state.code, f"{handle.prefix}{handle.fqns[0]}{handle.flags}")

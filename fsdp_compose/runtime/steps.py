"""The steps of one group, each noted in the trace of what its process group carries: unshard, reshard, reduce, and what
follows from a change of ``requires_grad``.
"""

from __future__ import annotations

from ..flat import FlatParamHandle, is_stale
from ..group import ALL_GATHER, REDUCE_SCATTER, SCATTER_ALONE, ParameterSwap, Root, _FSDPState, code_of_flags
from ..ragged import toggles


def unshard(root: Root, state: _FSDPState) -> None:
    """Start the all-gathers of a group, if it is not unsharded, ahead of a forward."""
    for handle in state._handles:
        if not handle.unsharded.is_allocated:
            root.order.trace.append(state.code | ALL_GATHER)
            if handle.unsharded.part is None:
                root.communicator.unshard(handle)
            else:
                _unshard_with_parts(root, state, handle)


def unshard_again(root: Root, state: _FSDPState) -> None:
    """As ``unshard``, for a backward: what forward has computed with."""
    for handle in state._handles:
        if not handle.unsharded.is_allocated:
            root.order.trace.append(state.code | ALL_GATHER)
            part = handle.unsharded.part
            if part is not None and part.is_kept:
                root.communicator.unshard_parts(handle)
            else:
                root.communicator.unshard(handle)


def _unshard_with_parts(root: Root, state: _FSDPState, handle: FlatParamHandle) -> None:
    """Gather for a forward what may have stayed in parts: these, if the ranks have written to no shard since."""
    part = handle.unsharded.part
    if part is not None and part.is_kept and state.options.keeps_parts_until_step() and not is_stale(handle):
        root.communicator.unshard_parts(handle)
    else:
        root.communicator.unshard(handle)


def unshard_for_use(root: Root, state: _FSDPState) -> None:
    """As ``unshard``, for a forward that is about to compute: what was gathered ahead, or kept, before the ranks wrote
    to the sharded parameters is gathered again."""
    for handle in state._handles:
        if not handle.unsharded.is_allocated:
            root.order.trace.append(state.code | ALL_GATHER)
            if handle.unsharded.part is None:
                root.communicator.unshard(handle)
            else:
                _unshard_with_parts(root, state, handle)
        elif (handle.shard._version != handle.unsharded.gathered[0] or handle.segments) and is_stale(handle):
            root.order.trace.append(state.code | ALL_GATHER)
            root.communicator.refresh(handle)


def wait_for_unshard(root: Root, state: _FSDPState) -> None:
    for handle in state._handles:
        if handle.unsharded.work is not None:
            root.communicator.wait(handle)


def reshard(root: Root, state: _FSDPState) -> None:
    """Free the unsharded parameters of a group, unless a forward of it is running."""
    for handle in state._handles:
        if handle.unsharded.is_allocated and not state.progress.entries:
            root.communicator.reshard(handle)


def reshard_until_backward(root: Root, state: _FSDPState) -> None:
    """As ``reshard``, between a forward and its backward of a group that keeps parts."""
    for handle in state._handles:
        if handle.unsharded.is_allocated and not state.progress.entries:
            root.communicator.reshard_to_part(handle)


def _drop_parts(state: _FSDPState) -> None:
    """Free what stayed for a backward, unless that of an earlier forward is to come, or a forward before the step."""
    if not state.progress.outstanding and not state.options.keeps_parts_until_step():
        for handle in state._handles:
            handle.unsharded.drop_part()


def reduce(root: Root, state: _FSDPState, with_frozen: bool = False) -> None:
    """Take the gradients of a group, reshard it, and reduce (or, without gradient sync, accumulate) them. A group of
    which a forward is running (the backward runs inside it) stays unsharded. ``with_frozen``: also the flat parameters
    of which no part requires grad."""
    backward, progress, options = root.backward, state.backward, state.options
    assert backward is not None
    if backward.shown and state.swap in backward.shown:
        hide_shown(root, state.swap)
    is_kept = state.place.stays_after_backward or bool(state.progress.entries)
    is_synced = options.requires_gradient_sync
    averages = options.requires_all_reduce or state.mesh.replicate_group is None
    handles = state._handles
    if progress.num_early and not progress.is_reduced:
        handles = handles[progress.num_early :]
    progress.reduce()
    if state.past.has_unsynced is (is_synced and averages):
        state.past.reduce(is_synced and averages)
    if state.mesh.part_transport is not None:
        _drop_parts(state)
    communicator = root.communicator
    for handle in handles:
        contributions = handle.contributions
        has_earlier = contributions.accumulation is not None
        if not (contributions.is_trainable or with_frozen or (has_earlier and is_synced)):
            if not is_kept:
                communicator.reshard(handle)
        elif is_synced:
            root.order.trace.append(state.code | (REDUCE_SCATTER if averages else SCATTER_ALONE))
            if has_earlier or not averages:
                backward.add()  # before it is taken: what raises after that has lost it
            if communicator.reduce(handle, is_kept, averages):
                backward.add()
        else:
            backward.add()
            communicator.accumulate(handle, is_kept)


def reduce_early(root: Root, state: _FSDPState) -> None:
    """Reduce the next flat parameter of a group, all gradients of which are there, before the others. It stays
    unsharded."""
    backward, handle = root.backward, state._handles[state.backward.num_early]
    assert backward is not None
    state.backward.reduce_early()
    if handle.contributions.is_trainable or handle.contributions.accumulation is not None:
        root.order.trace.append(state.code | REDUCE_SCATTER)
        if handle.contributions.accumulation is not None:
            backward.add()  # before it is taken, as above
        if root.communicator.reduce(handle, True, True):
            backward.add()


def hide_shown(root: Root, only: ParameterSwap | None = None) -> None:
    """No longer show groups that were shown since backward began."""
    shown = {} if root.backward is None else root.backward.shown
    for swap in [*shown] if only is None else [only]:
        del shown[swap]
        swap.show_sharded()


def stays_unsharded(root: Root, state: _FSDPState) -> bool:
    """Whether the forward that is running, inside which a backward ends, needs the group as it is."""
    forward, progress = root.forward, state.progress
    begun, previous = forward.record.begun, forward.previous.begun
    is_next = len(previous) > len(begun) and previous[len(begun)] == state.place.index  # forward prefetch
    return bool(is_next or progress.entries or progress.pending_modules or not state.place.reshards_after_forward)


def follow_requires_grad(root: Root, state: _FSDPState) -> None:
    """Take over what the user did to ``requires_grad`` of the sharded parameters. Noted in the trace: when a rank does
    it alone, ranks differ at the end of backward."""
    for handle in state._handles:
        handle.follow_requires_grad()
        root.order.trace.append(_code_of_flags(state, handle))


def follow_toggles(root: Root, state: _FSDPState) -> None:
    """Before a forward of a group under grad mode, when some ``requires_grad`` was set since its last one."""
    count = toggles.count
    if any([handle.was_toggled() for handle in state._handles]):
        follow_requires_grad(root, state)
    state.past.follow_toggles(count)


def follow_toggles_before_backward(root: Root) -> None:
    """As autograd does, give no gradient to what was frozen since forward. What is reduced does not change by it."""
    for state in root.live_states():
        for handle in state._handles:
            if handle.was_toggled():
                was_trainable = handle.contributions.is_trainable
                follow_requires_grad(root, state)
                handle.contributions.train(handle.contributions.is_trainable or was_trainable)


def follow_toggles_of_forward(root: Root, states: list[_FSDPState]) -> None:
    for state in states:
        for handle in state._handles:
            if handle.unsharded.was_toggled():
                handle.follow_unsharded_requires_grad()
                root.order.trace.append(_code_of_flags(state, handle))


def _code_of_flags(state: _FSDPState, handle: FlatParamHandle) -> int:
    return code_of_flags(state.code, f"{handle.name_of(0)}{handle.unsharded.flags}")

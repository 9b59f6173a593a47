"""The steps of one group: unshard, prefetch, reshard, reduce, and the response to changes of ``requires_grad``.

Hooks and modes call these functions, most of them through the root's scheduler: ``FixedOrder``, at the end of this
file, ``SkippingOrder`` if ranks may skip groups, or ``BoundedOrder``. Each function records the collectives that it
issues in the log of the process group, and leaves streams and memory to ``Communicator``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from ..flat import Contribution, FlatParamHandle, is_stale
from ..group import (
    Entry,
    ForwardRecord,
    GroupUse,
    HookedUse,
    Kind,
    Modules,
    ParameterSwap,
    Root,
    Scheduler,
    _FSDPState,
    get_state,
    registrations,
)
from ..ragged import requires_grad_writes

KEPT, SCATTERED, REDUCED = Contribution.KEPT, Contribution.SCATTERED, Contribution.REDUCED


def note_all_gather(root: Root, state: _FSDPState, handle: FlatParamHandle) -> None:
    """Record the all-gather of a flat parameter, which the caller issues next."""
    # One that is whole on every rank is not gathered, and ranks may use it unequally often.
    if not handle.mesh.is_replicated:
        root.order.record(root, state.log.all_gather)


def unshard(root: Root, state: _FSDPState) -> None:
    """Start the all-gathers of a group ahead of a forward, unless it is already unsharded."""
    for handle in state._handles:
        if not handle.unsharded.is_allocated:
            note_all_gather(root, state, handle)
            if handle.unsharded.post_forward is None:
                root.communicator.unshard(handle)
            else:
                _unshard_from_post_forward(root, state, handle)


def unshard_again(root: Root, state: _FSDPState) -> None:
    """Like ``unshard``, for a backward, which needs the parameters that forward has used."""
    if not state.options.gathers_in_backward:
        return
    for handle in state._handles:
        if not handle.unsharded.is_allocated:
            note_all_gather(root, state, handle)
            kept = handle.unsharded.post_forward
            if kept is not None and kept.is_kept:
                root.communicator.unshard_post_forward(handle)
            else:
                root.communicator.unshard(handle)


def _unshard_from_post_forward(root: Root, state: _FSDPState, handle: FlatParamHandle) -> None:
    """Gather a handle that may have kept a post-forward shard, for a forward: from that, if no rank has written."""
    kept = handle.unsharded.post_forward
    if kept is not None and kept.is_kept and state.options.reshards_partially_until_step() and not is_stale(handle):
        root.communicator.unshard_post_forward(handle)
    else:
        root.communicator.unshard(handle)


def unshard_for_use(root: Root, state: _FSDPState) -> None:
    """Like ``unshard``, for a forward that is about to compute. Parameters that were gathered ahead or kept are
    gathered again if the ranks have written to the sharded parameters since."""
    for handle in state._handles:
        if not handle.unsharded.is_allocated:
            note_all_gather(root, state, handle)
            if handle.unsharded.post_forward is None:
                root.communicator.unshard(handle)
            else:
                _unshard_from_post_forward(root, state, handle)
        elif (handle.shard._version != handle.unsharded.gathered[0] or handle.segments) and is_stale(handle):
            note_all_gather(root, state, handle)
            root.communicator.refresh(handle)


def reshard(root: Root, state: _FSDPState) -> None:
    """Free the unsharded parameters of a group, unless a forward of it is running."""
    if state.swap.is_left and not state.progress.running_forwards:
        state.end_left()
    for handle in state._handles:
        if handle.unsharded.is_allocated and not state.progress.running_forwards:
            root.communicator.reshard(handle)


def reshard_until_backward(root: Root, state: _FSDPState) -> None:
    """Like ``reshard``, between a forward and its backward, for a group that keeps post-forward shards."""
    if state.swap.is_left and not state.progress.running_forwards:
        state.end_left()
    for handle in state._handles:
        if handle.unsharded.is_allocated and not state.progress.running_forwards:
            root.communicator.reshard_to_post_forward(handle)


def _drop_post_forward(state: _FSDPState) -> None:
    """Free the shards that were kept for a backward, unless the backward of an earlier forward is still to come or they
    stay until a step."""
    if not state.progress.awaiting_backward and not state.options.reshards_partially_until_step():
        for handle in state._handles:
            handle.unsharded.drop_post_forward()


def reduce(root: Root, state: _FSDPState, with_frozen: bool = False) -> None:
    """Take the gradients of a group, reshard it, and reduce them (without gradient sync: accumulate them). A group
    stays unsharded if the backward runs inside a forward of it. ``with_frozen``: include flat parameters that do
    not require grad."""
    backward, progress, options = root.backward, state.backward, state.options
    assert backward is not None
    if backward.shown and state.swap in backward.shown:
        hide_shown(root, state.swap)
    is_kept = state.position.stays_after_backward or bool(state.progress.running_forwards)
    is_synced = options.requires_gradient_sync
    averages = options.requires_all_reduce or state.mesh.replica_transport is None
    handles = state._handles
    if progress.num_early and not progress.is_reduced:
        handles = handles[progress.num_early :]
    progress.is_reduced = True
    state.persistent.has_unsynced = not (is_synced and averages)
    if state.mesh.post_forward_transport is not None:
        _drop_post_forward(state)
    for handle in handles:
        pending = handle.pending_gradients
        if pending.is_trainable or with_frozen or (is_synced and pending.accumulation is not None):
            # Experts may be spread over the replicas: what there is of them is reduced with each backward.
            is_whole = averages or handle.mesh.replica_transport is None
            _contribute(root, state, handle, (REDUCED if is_whole else SCATTERED) if is_synced else KEPT, is_kept)
        elif not is_kept:
            root.communicator.reshard(handle)


def reduce_early(root: Root, state: _FSDPState) -> None:
    """Reduce the next flat parameter of a group before the others, because all its gradients have arrived. It stays
    unsharded."""
    handle = state._handles[state.backward.num_early]
    state.backward.num_early += 1
    if handle.pending_gradients.is_trainable or handle.pending_gradients.accumulation is not None:
        _contribute(root, state, handle, REDUCED, True)


def _contribute(
    root: Root, state: _FSDPState, handle: FlatParamHandle, contribution: Contribution, is_kept: bool
) -> None:
    backward = root.backward
    assert backward is not None
    if contribution is not KEPT:
        root.order.record(root, state.log.reduce_scatter if contribution is REDUCED else state.log.scatter_alone)
    # Noted before gradients of earlier backwards are taken: if the reduction raises, they are lost.
    if contribution is not REDUCED or handle.pending_gradients.accumulation is not None:
        backward.has_added = True
    if root.communicator.contribute(handle, contribution, is_kept):
        backward.has_added = True


def hide_shown(root: Root, only: ParameterSwap | None = None) -> None:
    """Stop showing the parameters of groups that have shown them since backward began."""
    shown = {} if root.backward is None else root.backward.shown
    for swap in [*shown] if only is None else [only]:
        del shown[swap]
        swap.show_sharded()


def stays_unsharded(root: Root, state: _FSDPState) -> bool:
    """Whether the running forward needs the group unsharded; asked when a backward inside it ends."""
    forward, progress = root.forward, state.progress
    begun, previous = forward.record.begun, forward.previous.begun
    is_next = len(previous) > len(begun) and previous[len(begun)] == state.position.index  # forward prefetch
    return bool(
        is_next or progress.running_forwards or progress.pending_modules or not state.position.reshards_after_forward
    )


def follow_requires_grad(root: Root, state: _FSDPState) -> None:
    """Take over the user's changes to ``requires_grad`` of the sharded parameters. They are recorded in the trace, so
    that ranks differ at the end of backward if one rank changes it alone."""
    for handle in state._handles:
        handle.follow_requires_grad()
        root.order.entries.append(_entry_of_flags(state, handle))


def follow_requires_grad_writes(root: Root, state: _FSDPState) -> None:
    """Take over changes of ``requires_grad`` before a forward of a group under grad mode, if any was set since the last
    one."""
    count = requires_grad_writes.count
    if any([handle.was_toggled() for handle in state._handles]):
        follow_requires_grad(root, state)
    state.persistent.num_toggles = count


def follow_requires_grad_writes_before_backward(root: Root) -> None:
    """Like autograd, give no gradient to parameters that were frozen since forward."""
    for state in root.live_states():
        for handle in state._handles:
            if handle.was_toggled():
                was_trainable = handle.pending_gradients.is_trainable
                follow_requires_grad(root, state)
                # What was trainable in that forward is reduced nevertheless.
                handle.pending_gradients.is_trainable |= was_trainable


def follow_requires_grad_writes_of_forward(root: Root, states: list[_FSDPState]) -> None:
    for state in states:
        for handle in state._handles:
            if handle.unsharded.was_toggled():
                handle.follow_unsharded_requires_grad()
                root.order.entries.append(_entry_of_flags(state, handle))


def _entry_of_flags(state: _FSDPState, handle: FlatParamHandle) -> Entry:
    return state.log.note(Kind.FLAGS, f"{handle.name_of(0)}{handle.unsharded.flags}")


# ---- Prefetch: the all-gather of the next group starts while this one computes.
#
# In forward, the last iteration says which group is next; in backward, this iteration's forward does. The user can also
# name the groups.


Start = Callable[[Root, _FSDPState], None]


def prefetch_forward(root: Root, state: _FSDPState, start: Start = unshard) -> None:
    """Start the all-gather of the group that came next in the last iteration, if the order has been the same so far."""
    forward, index = root.forward, state.position.index
    begun, previous = forward.record.begun, forward.previous.begun
    i = len(begun)
    begun.append(index)
    if state.options.forward_prefetch is not None:
        _prefetch(root, state.options.forward_prefetch, start)
    elif i + 1 < len(previous) and previous[i] == index:
        following = root.states[previous[i + 1]]()
        if following is not None and not following._handles:
            following = _first_with_parameters(root, previous[i + 2 :])
        if following is not None:
            start(root, following)


def prefetch_backward(
    root: Root, state: _FSDPState, record: ForwardRecord, position: int, start: Start = unshard_again
) -> None:
    """Start the all-gather of the group whose forward ended before that of ``state``; ``position`` is the index of
    ``state`` in ``record.hooked``."""
    hints = state.options.backward_prefetch
    if hints is not None:
        _prefetch(root, hints, start)
    elif position and record.states is root.states:
        previous = root.states[record.hooked[position - 1]]()
        if previous is not None and not previous._handles:
            previous = _first_with_parameters(root, reversed(record.hooked[: position - 1]))
        if previous is not None:
            start(root, previous)


def _first_with_parameters(root: Root, indexes: Iterable[int]) -> _FSDPState | None:
    """The first of these groups that has something to gather: modules whose groups inside took everything have not."""
    for index in indexes:
        state = root.states[index]()
        if state is None or state._handles:
            return state
    return None


def _prefetch(root: Root, modules: Modules, start: Start) -> None:
    """Start the all-gathers of groups that the user wants gathered ahead; only groups of this root."""
    for ref in modules:
        module = ref()
        other = None if module is None else get_state(module)
        if other is not None and other.root is root:
            start(root, other)


# ---- The scheduler of most roots


class FixedOrder:
    """The scheduler of a root whose groups all ranks run, in one order. See ``Scheduler`` for what each method is
    for."""

    skips = False
    is_capturable = True

    def reset(self) -> None: ...

    def reset_backward(self) -> None: ...

    def attach_root(self, root: Root) -> None: ...

    def begin_forward(self, root: Root) -> None: ...

    def refresh_kept(self, root: Root, state: _FSDPState, handle: FlatParamHandle) -> None:
        follows = state.options.follows_writes() or handle.unsharded.follows_writes
        if not (follows and handle.unsharded.left_by_forward) or is_stale(handle):
            # Its shard may have been changed on some ranks only, or in ways that leave no trace.
            note_all_gather(root, state, handle)
            root.communicator.refresh(handle)
            handle.unsharded.be_left(state.options.is_held)

    def check_forward(self, root: Root, state: _FSDPState) -> bool:
        return False

    def before_forward(self, root: Root, state: _FSDPState, use: HookedUse | None) -> None:
        unshard_for_use(root, state)
        prefetch_forward(root, state)

    def before_recomputation(self, root: Root, state: _FSDPState, use: HookedUse | None) -> None:
        if state.backward.active_uses:
            unshard_again(root, state)  # a backward of the group is already computing with the gathered parameters
        else:
            unshard_for_use(root, state)

    def after_forward(self, root: Root, state: _FSDPState, use: GroupUse | None) -> bool:
        left = state.progress.uses_left
        left[use is None] -= 1
        return not left[use is None] or (
            registrations.count != root.forward.num_registrations and state.was_unsharded_written()
        )

    def end_group(self, root: Root, state: _FSDPState) -> None: ...

    def announce_failure(self, root: Root) -> None:
        # Groups that are whole on every rank may run on some ranks only: nobody waits for this one.
        handles = [handle for state in root.live_states() for handle in state._handles]
        if root.mesh.has_peers and any([handle.mesh.shard_world_size > 1 for handle in handles]):
            from ...plugins.gloo import tell_failure

            tell_failure(root.mesh.peers, sys.exc_info()[1])

    def begin_backward(self, root: Root) -> None: ...

    def before_backward(self, root: Root, state: _FSDPState, record: ForwardRecord, position: int) -> None:
        unshard_again(root, state)
        prefetch_backward(root, state, record, position)

    def ready_to_reduce(self, root: Root, state: _FSDPState) -> None:
        reduce(root, state)

    def end_backward(self, root: Root) -> None: ...

    def unshard(self, root: Root, state: _FSDPState) -> None:
        unshard(root, state)

    def before_single_gather(self, root: Root, state: _FSDPState) -> None: ...

    def serve_peers(self, root: Root) -> None: ...


FIXED_ORDER: Scheduler = FixedOrder()


def way_to_functional_mode(root: Root | None) -> str:
    """What to do about an operation that only functional mode can do, as a sentence for errors."""
    if root is None or not root.scheduler.skips:
        return "run the forward in functional mode: with functional_mode(model): ..."
    return (
        "run the forward in functional mode (with functional_mode(model): ...) of a model without optional groups, "
        "which that mode cannot run: shard it without optional=True, and let every rank run every group"
    )

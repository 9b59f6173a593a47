"""A backward of a root, from its first hook to the end, when the ranks have exchanged what they did and gradients are
published.
"""

from __future__ import annotations

import hashlib
import weakref
from itertools import count

import torch

from .._torch import queue_end_of_backward
from ..comm import first_difference, last_of_every_rank, meet
from ..flat import follow_profiler
from ..group import END_OF_BACKWARD, Phase, RootContext, _FSDPState, name_models, never_traced
from .recovery import recover_backward
from .steps import follow_toggles_before_backward, hide_shown, reduce, stays_unsharded

_IDLE = Phase.IDLE

_backward_numbers = count(1)  # of all roots: a use may outlive the root that it was made under


def begin_backward(root: RootContext) -> None:
    """Called from the first hook of a root that a backward reaches."""
    refuse_double_backward()
    if root.has_failed_backward:
        recover_backward(root)
    follow_profiler()
    root.is_in_backward = True
    root.backward_number = next(_backward_numbers)
    queue_end_of_backward(_EndOfBackward(root))
    if root.watch is None or root.watch.was_toggled():
        follow_toggles_before_backward(root)
    for state in root.live_states():
        if state.is_unhooked or not state.reshard_after_forward:
            _show_throughout(root, state)


def _show_throughout(root: RootContext, state: _FSDPState) -> None:
    """Show the parameters of a group that has stayed unsharded, until they are reduced: past its outputs the backward
    may come to modules of it, to run them again for activation checkpointing."""
    if all([handle.is_unsharded for handle in state._handles]) and state not in root.shown:
        root.shown[state] = None
        state.swap.show_unsharded()


def refuse_double_backward() -> None:
    if torch.is_grad_enabled():  # autograd says so while it runs
        raise RuntimeError(
            "backward(create_graph=True), or autograd.grad() with it, reached a fully_shard'ed model. Double backward "
            "(a gradient penalty, say) needs the gathered parameters to stay in the graph, which they do not here: "
            "their gradients of the second order would be wrong, or missing. None was published. Run the forward in "
            "functional mode: with functional_mode(model): ..."
        )


def notice_backwards(state: _FSDPState) -> None:
    """From now on let hooks on the unsharded parameters of a group tell that a backward runs: one that passes none of
    the group's outputs, so that its end is reached all the same."""
    if state.has_leaf_hooks:
        return
    state.has_leaf_hooks = True
    reference = weakref.ref(state)

    @never_traced
    def note(_param: torch.Tensor) -> None:
        present = reference()
        if present is not None and present.root is not None and not present.root.is_in_backward:
            begin_backward(present.root)

    for handle in state._handles:
        for param in handle.unsharded_params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(note)


class _EndOfBackward:
    """The callback at the end of a backward. Autograd drops it uncalled when the backward raises: then the modules
    show their sharded parameters again (but in forwards that are running), before the exception reaches anybody."""

    def __init__(self, root: RootContext) -> None:
        self._root: RootContext | None = root

    def __call__(self) -> None:
        root, self._root = self._root, None
        assert root is not None
        try:
            finish_backward(root)
        except BaseException:  # not left to __del__: the traceback holds this object
            _give_up_backward(root)
            raise

    def __del__(self) -> None:
        if self._root is not None:
            _give_up_backward(self._root)


def _give_up_backward(root: RootContext) -> None:
    root.is_in_backward, root.has_failed_backward = False, True
    root.shown.clear()
    for state in root.live_states():
        state.swap.restore(len(state.entries))


@never_traced
def finish_backward(root: RootContext, is_inside: bool = False) -> None:
    """Reduce what has not been reduced, agree with the other ranks, and only then show the gradients. ``is_inside``:
    the backward has run inside a forward of the root, though that may have just ended."""
    states = root.live_states()
    is_inside = is_inside or root.depth > 0 or any([state.entries for state in states])  # or inside a recomputation
    for state in reversed(states):
        if state.is_reduced and not state.active_uses:
            continue
        if not state.ran_backward:
            refuse_unseen_backward(root, state)
        if state.active_uses:
            state.swap.show_sharded()
        is_due = state.ran_backward or state.is_unhooked or (state.has_unsynced and state.requires_gradient_sync)
        if is_due and not state.is_reduced:
            if state.unhooked_versions is not None and not state.ran_backward and _lateness(state):
                # Of a forward that has not ended they are not known yet.
                if not is_inside or (root.depth and state.index in root.record.begun and not state.entries):
                    state.check_versions(state.unhooked_versions)
            reduce(root, state)
    hide_shown(root)
    _exchange(root, states)
    root.has_added = True  # a hook of the user's that raises leaves some gradients shown, on each rank others
    has_others = root.watch is None or root.watch.has_grads()
    for state in states:
        for handle in state._handles:
            if handle.is_unsharded and not (is_inside and stays_unsharded(root, state)):
                root.communicator.reshard(handle)
            if handle.awaits_publication:
                handle.awaits_publication = False
                root.communicator.publish(handle, has_others)
            elif handle.accumulation is not None:
                handle.accumulation.show()
        if state.ran_backward:
            # A use that this backward passed by will not hold up a later reduction; but the backward of the forward
            # that is running is yet to come.
            if state.outstanding:
                last = min(state.last_use, root.num_forwards - 1) if is_inside else state.last_use
                state.outstanding = [number for number in state.outstanding if number > last]
            state.ran_backward = state.is_iterated = False
            state.active_uses = state.last_use = 0
        state.phase = _IDLE
        state.is_reduced = False
    root.is_in_backward = root.has_added = root.has_outside_grads = False
    root.recomputed.clear()
    if root.after_publication:
        calls, root.after_publication = root.after_publication, []
        for call in calls:
            call()


def refuse_unseen_backward(root: RootContext, state: _FSDPState) -> None:
    """As the state's own method, but a backward inside the root's forward may reach the parameters of a group while
    its forward is running."""
    if not state.entries and not (root.depth and state.index in root.record.begun):
        state.refuse_unseen_backward()


def publish_from_inside(root: RootContext) -> None:
    """At the end of an outermost forward: reduce and publish gradients that a backward inside it has left on parameters
    of groups whose own forwards were running, so that no hook told of it. The next time there will be hooks."""
    states = root.live_states()
    begun = {*root.record.begun}
    for state in states:
        if any(handle.has_unsharded_grad() for handle in state._handles):
            if state.index not in begun:
                state.refuse_unseen_backward()
            notice_backwards(state)
    finish_backward(root, is_inside=True)


def _exchange(root: RootContext, states: list[_FSDPState]) -> None:
    """Agree with all ranks on the order of collectives and on who has a gradient; reduce again what came late."""
    exchange = root.exchange
    while True:
        may_be_late = root.has_outside_grads or root.watch is None or root.watch.has_unsharded_grads()
        exchange.late[:] = bytes(len(exchange.late))
        if may_be_late:
            for state in states:
                exchange.late[state.index] = _lateness(state)
        root.communicator.announce_exchange(root, END_OF_BACKWARD)
        exchange.start(root.order.hash(root, END_OF_BACKWARD))
        root.communicator.finish()
        try:
            is_same = exchange.wait()
        except RuntimeError:
            root.order.close()  # as on the other ranks
            raise
        if not is_same:
            raise_different_order(root, END_OF_BACKWARD)
        root.order.close()
        if not any(exchange.late):
            if root.watch is not None and not may_be_late:
                root.watch.backward_has_ended()
            return
        for state in states:
            if exchange.late[state.index]:
                reduce(root, state, exchange.late[state.index] == _LATE_THOUGH_FROZEN)


_LATE, _LATE_THOUGH_FROZEN = 1, 2  # the ranks exchange the greatest


def _lateness(state: _FSDPState) -> int:
    """Whether gradients have come to a group since its reduction; and whether to a flat parameter that needs none as
    far as is known, because forward has just thawed a part of it."""
    late = 0
    for handle in state._handles:
        if handle.has_unsharded_grad() or handle.outside_grads:
            late = max(late, _LATE if handle.is_trainable else _LATE_THOUGH_FROZEN)
    return late


def raise_different_order(root: RootContext, code: int) -> None:
    """Raise, on every rank, an error that names the first collective that differs. Ranks: all, for each knows of it.

    Args:
        code: of what this rank is about to do.
    """
    group = root.live_states()[0].mesh.shard_group
    lasts = last_of_every_rank(group)
    lines = root.order.trace_in_words(root, code)

    def explain(rank: int, ours: str, theirs: str) -> str:
        difference = first_difference(ours.split("\n"), theirs.split("\n"))
        if difference is None:
            return f"the ranks issued different collectives, in a part of the run that is no longer remembered{lasts}"
        position, a, b = difference
        a, b = name_models(a or "nothing", b or "nothing")
        return (
            f"the ranks issued different collectives in this iteration: collective {position} was {a} on "
            f"rank 0 and {b} on rank {rank}. No gradient was published. Ranks must run the same "
            "fully_shard groups in the same order: shard modules that only some ranks use (experts, modalities) in "
            "one group with their parent, or run all of them on every rank; run several models in the same order on "
            f"every rank{lasts}"
        )

    details = "\n".join(lines)
    digest = hashlib.sha256(details.encode()).hexdigest()
    try:
        meet(group, "comparing collectives", digest, lambda _: "", details, explain)
    finally:
        root.order.close()  # all ranks know: other models shall not hear of it again
    raise RuntimeError("the ranks issued different collectives in this iteration; no gradient was published")

"""A backward of a root, from its first hook to its end, where ranks exchange what they did and publish gradients.

Autograd calls this through the hooks of a use."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
import torch.nn as nn

from ..._torch import in_compiled_autograd, queue_end_of_backward
from ...errors import MisuseRuntimeError
from ..flat import follow_profiler
from ..group import (
    END_OF_BACKWARD,
    Backward,
    BackwardState,
    ParameterDetector,
    Root,
    _FSDPState,
    ends_backwards,
    never_traced,
)
from .agreement import agree_with_replicas, begin_exchange, compare_with_replicas, end_exchange, is_whole
from .group_ops import (
    follow_requires_grad_writes_before_backward,
    hide_shown,
    reduce,
    stays_unsharded,
    way_to_functional_mode,
)


def begin_backward(root: Root) -> Backward:
    """Start a backward; called from the first hook of the root that it reaches."""
    refuse_double_backward(root)
    if in_compiled_autograd():
        raise MisuseRuntimeError(
            "a backward of a fully_shard'ed model runs under compiled autograd, which does not call back at the end of "
            "backward, where gradients are reduced and published: none was. Turn it off "
            "(torch._dynamo.config.compiled_autograd); torch.compile of the model captures forward and backward "
            "without it"
        )
    if root.failed_backward is not None:
        from .recovery import recover_backward

        recover_backward(root)
    follow_profiler()
    backward = root.begin_backward()
    queue_end_of_backward(_EndOfBackward(root, backward))
    detector = root.detector
    if detector is None or detector.was_toggled():
        follow_requires_grad_writes_before_backward(root)
    # Activation checkpointing may run modules of these groups again before backward has passed the groups' outputs.
    for state in root.live_states():
        if state.swap.is_left:
            state.swap.is_left = False
            backward.shown[state.swap] = None
        if state.persistent.is_unhooked or not state.position.reshards_after_forward:
            _show_throughout(backward, state)
    root.scheduler.begin_backward(root)
    compare_with_replicas(root)
    return backward


def _show_throughout(backward: Backward, state: _FSDPState) -> None:
    """Show the parameters of a group that has stayed unsharded, until it is reduced."""
    if all([handle.unsharded.is_allocated for handle in state._handles]) and state.swap not in backward.shown:
        backward.shown[state.swap] = None
        state.swap.show_unsharded()


def refuse_double_backward(root: Root) -> None:
    if torch.is_grad_enabled():  # autograd enables it during such a backward
        raise MisuseRuntimeError(
            "backward(create_graph=True), or autograd.grad() with it, reached a fully_shard'ed model. Double backward "
            "(for example, for a gradient penalty) needs the gathered parameters to stay in the graph, but in the "
            "default mode they do not: second-order gradients would be wrong or missing. No gradient was published. "
            f"To get them, {way_to_functional_mode(root)}"
        )


def _notice_backwards(state: _FSDPState) -> None:
    """Hook the unsharded parameters of a group, to notice a backward that passes none of the group's outputs."""
    if state.persistent.has_leaf_hooks:
        return
    state.persistent.has_leaf_hooks = True
    reference = weakref.ref(state)

    @never_traced
    def note(_param: torch.Tensor) -> None:
        present = reference()
        if present is not None and present.root is not None and present.root.backward is None:
            begin_backward(present.root)

    for handle in state._handles:
        for param in handle.unsharded.params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(note)


def leave_shown(state: _FSDPState) -> None:
    """Let the modules of a gathered group show its parameters until it is resharded, if the group does that."""
    if not state.options.shows_gathered or state.root is None or state.root.backward is not None:
        return
    if all([handle.unsharded.is_allocated for handle in state._handles]):  # not after a forward in functional mode
        state.swap.leave_shown()
        _notice_backwards(state)


def keep_unsharded(state: _FSDPState, module: nn.Module, output: Any) -> None:
    """Keep a group unsharded because backward can enter it unnoticed, and hook its parameters to handle the end."""
    if state.persistent.is_unhooked or not state._handles:
        return
    state.persistent.is_unhooked = True
    for handle in state._handles:
        handle.unsharded.keep_allocated(True)
    _notice_backwards(state)
    warnings.warn(
        f"forward of the fully_shard'ed {type(module).__name__} ({state.name}) returned {type(output).__name__}, "
        "through which backward may enter the group unseen (it contains a parameter, a function, an object without "
        "attributes, or no tensor that requires grad): its parameters stay unsharded between forwards. To save that "
        "memory, return tensors that require grad, alone or in collections, dataclasses or objects with attributes",
        stacklevel=2,
    )


class _EndOfBackward:
    """The callback at the end of a backward."""

    def __init__(self, root: Root, backward: Backward) -> None:
        self.root: Root | None = root
        self._backward = backward

    @ends_backwards
    def __call__(self) -> None:
        root, self.root = self.root, None
        assert root is not None
        try:
            finish_backward(root)
        except BaseException:  # do not leave this to __del__: the traceback keeps this object alive
            _give_up_backward(root, self._backward)
            raise

    # If the backward raises, autograd drops the callback without calling it. Then modules show their sharded parameters
    # again (except in running forwards) before the exception reaches the user's code.
    def __del__(self) -> None:
        if self.root is not None:
            _give_up_backward(self.root, self._backward)


def _give_up_backward(root: Root, backward: Backward) -> None:
    if root.backward is not backward:
        return  # it failed earlier, and its remains may have been discarded since
    root.fail_backward(backward)
    backward.shown.clear()
    for state in root.live_states():
        state.swap.restore(len(state.progress.running_forwards))
    root.scheduler.announce_failure(root)


@never_traced
def finish_backward(root: Root, is_inside: bool = False) -> None:
    """Reduce the remaining groups, agree with the other ranks, and publish the gradients. ``is_inside``: the backward
    ran inside a forward of the root, which may have just ended."""
    states, backward = root.live_states(), root.backward
    assert backward is not None
    # ... or inside a recomputation.
    is_inside = is_inside or root.forward.depth > 0 or any([state.progress.running_forwards for state in states])
    _reduce_rest(root, states, is_inside)
    # Gradients are published only after this. ``None`` must mean the same on every rank, and only the exchange tells
    # who has a gradient. It is also the last moment at which a difference between ranks can keep a wrong gradient from
    # an optimizer.
    _exchange(root, states, root.detector)
    _publish(root, states, is_inside)
    root.end_backward()
    try:
        for call in backward.after_publication:
            call()
    except BaseException:  # from a user's hook; the remaining calls are skipped
        root.fail_backward(backward)
        raise


def _reduce_rest(root: Root, states: list[_FSDPState], is_inside: bool) -> None:
    """Start the reductions that are due and that no hook has started, in the order of backward."""
    scheduler = root.scheduler
    for state in reversed(states):
        progress, past = state.backward, state.persistent
        if progress.is_reduced and not progress.active_uses:
            continue
        if not progress.was_reached:
            refuse_unseen_backward(root, state)
        if progress.active_uses:
            state.swap.show_sharded()
            progress.active_uses = 0
        is_due = (
            progress.was_reached or past.is_unhooked or (past.has_unsynced and state.options.requires_gradient_sync)
        )
        if is_due and not progress.is_reduced:
            if past.unhooked_versions is not None and not progress.was_reached and _lateness(state):
                # If the forward has not ended, its versions are not known yet.
                if not is_inside or _has_run_in_forward(root, state):
                    state.check_versions(past.unhooked_versions)
            scheduler.ready_to_reduce(root, state)
    scheduler.end_backward(root)
    hide_shown(root)
    _bring_captured(root, states)


def _publish(root: Root, states: list[_FSDPState], is_inside: bool) -> None:
    """Show the gradients, free what is still gathered, and forget this backward of each group."""
    detector, backward = root.detector, root.backward
    assert backward is not None
    # If a user's hook raises, some gradients are published already, different ones on each rank.
    backward.has_added = True
    has_others = detector is None or detector.has_grads()
    for state in states:
        for handle in state._handles:
            if handle.unsharded.is_allocated and not (is_inside and stays_unsharded(root, state)):
                if state.options.is_held or (state.options.keeps_after_backward() and state.backward.was_reached):
                    root.communicator.wait(handle)
                    handle.unsharded.be_left(not handle.unsharded.never_freed, follows_writes=True)
                else:
                    root.communicator.reshard(handle)
            if handle.pending_gradients.awaits_publication:
                root.communicator.publish(handle, has_others)
            elif handle.pending_gradients.accumulation is not None:
                handle.pending_gradients.accumulation.show()
        progress = state.backward
        if progress.was_reached:
            # A use that this backward skipped must not hold up a later reduction; but the backward of a forward that
            # is still running is yet to come.
            if state.progress.awaiting_backward:
                last = min(progress.last_use, root.num_forwards - 1) if is_inside else progress.last_use
                awaiting = state.progress.awaiting_backward
                state.progress.awaiting_backward = [number for number in awaiting if number > last]
            state.backward = BackwardState()
        elif progress.is_reduced:
            state.backward = BackwardState()


def _bring_captured(root: Root, states: list[_FSDPState]) -> None:
    """Take the gradients that graphs of ``torch.compile`` have delivered, after those that eager hooks have reduced."""
    captured = [(state, state.persistent.captured) for state in states if state.persistent.captured is not None]
    if captured and root.backward is not None:
        root.communicator.finish()
        if root.forward.record.captured is not None:
            root.forward.record.captured.check_backward()
        for state, group in captured:
            has_added, is_due = group.bring()
            if has_added:
                root.backward.has_added = True
            options = state.options
            if is_due and options.requires_gradient_sync and options.requires_all_reduce:
                reduce(root, state)  # the graph was captured when the group was not to be reduced


def _has_run_in_forward(root: Root, state: _FSDPState) -> bool:
    """Whether a forward of the root is running in which the group's own forward has ended."""
    forward = root.forward
    return bool(forward.depth and state.position.index in forward.record.begun and not state.progress.running_forwards)


def refuse_unseen_backward(root: Root, state: _FSDPState) -> None:
    """Like the state's method, but a backward inside the root's forward may reach groups whose forward is running."""
    if not state.progress.running_forwards and not (
        root.forward.depth and state.position.index in root.forward.record.begun
    ):
        state.refuse_unseen_backward()


def publish_from_inside(root: Root) -> None:
    """Reduce and publish gradients that a backward inside an outermost forward, which ends now, has left on parameters.
    From now on these parameters have hooks."""
    states = root.live_states()
    begun = {*root.forward.record.begun}
    for state in states:
        if any(handle.unsharded.has_grad() for handle in state._handles):
            if state.position.index not in begun:
                state.refuse_unseen_backward()
            # Its forward was still running, so its outputs had no hooks, and nothing noticed the backward.
            _notice_backwards(state)
    backward = root.begin_backward()
    try:
        compare_with_replicas(root)
        finish_backward(root, is_inside=True)
    except BaseException:
        _give_up_backward(root, backward)
        raise


def reduce_accumulated(root: Root) -> None:
    """Reduce and publish accumulated gradients, like the end of a backward that has reached no group."""
    if root.failed_backward is not None:
        from .recovery import recover_backward

        recover_backward(root)
    follow_profiler()
    backward = root.begin_backward()
    try:
        compare_with_replicas(root)
        finish_backward(root)
    except BaseException:
        _give_up_backward(root, backward)
        raise


def _exchange(root: Root, states: list[_FSDPState], detector: ParameterDetector | None) -> None:
    """Agree with all ranks on the order of collectives, and on who has a gradient. Reduce late ones on all ranks."""
    exchange, backward = root.exchange, root.backward
    accumulates = not any([state.options.requires_gradient_sync for state in states]) and is_whole(root)
    while True:
        may_be_late = (
            (backward is not None and backward.has_outside_grads) or detector is None or detector.has_unsharded_grads()
        )
        exchange.late[:] = bytes(len(exchange.late))
        if may_be_late:
            for state in states:
                exchange.late[state.position.index] = _lateness(state)
        # Ranks may run unequal numbers of backwards that only accumulate, so none may wait at the end of one.
        if not accumulates:
            begin_exchange(root, exchange, END_OF_BACKWARD)
            root.communicator.finish()
            has_replicas = bool(states) and states[0].mesh.replicas is not None
            issued = [*root.order.entries] if has_replicas else []
            end_exchange(root, exchange, END_OF_BACKWARD)
            if has_replicas:
                agree_with_replicas(root, states, issued)
        if not any(exchange.late):
            if detector is not None and not may_be_late:
                detector.backward_has_ended()
            return
        for state in states:
            if exchange.late[state.position.index]:
                reduce(root, state, exchange.late[state.position.index] == _LATE_THOUGH_FROZEN)


_LATE, _LATE_THOUGH_FROZEN = 1, 2  # the exchange takes the maximum over the ranks


def _lateness(state: _FSDPState) -> int:
    """Whether gradients have arrived in a group since its reduction. ``_LATE_THOUGH_FROZEN``: in a flat parameter that
    counts as frozen, because forward has just thawed a part of it."""
    late = 0
    for handle in state._handles:
        if handle.unsharded.has_grad() or handle.pending_gradients.outside:
            late = max(late, _LATE if handle.pending_gradients.is_trainable else _LATE_THOUGH_FROZEN)
    return late

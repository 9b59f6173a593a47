"""A backward of a root, from its first hook to the end, when the ranks have exchanged what they did and gradients are
published.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
import torch.nn as nn

from .._torch import in_compiled_autograd, queue_end_of_backward
from ..flat import follow_profiler
from ..group import (
    END_OF_BACKWARD,
    Backward,
    Root,
    _FSDPState,
    ends_backwards,
    never_traced,
)
from .exchange import begin_exchange, end_exchange
from .optional import begin_backward as begin_rounds
from .optional import end_backward as end_rounds
from .optional import owe, tell_of_failure
from .recovery import recover_backward
from .steps import follow_toggles_before_backward, hide_shown, reduce, stays_unsharded


def begin_backward(root: Root) -> Backward:
    """Called from the first hook of a root that a backward reaches."""
    refuse_double_backward()
    if in_compiled_autograd():
        raise RuntimeError(
            "a backward of a fully_shard'ed model runs under compiled autograd, which does not come back at its end, "
            "when gradients are reduced and shown: none was. Turn it off (torch._dynamo.config.compiled_autograd); "
            "torch.compile of the model captures forward and backward without it"
        )
    if root.failed_backward is not None:
        recover_backward(root)
    follow_profiler()
    backward = root.begin_backward()
    queue_end_of_backward(_EndOfBackward(root, backward))
    watch = root.watch
    if watch is None or watch.was_toggled():
        follow_toggles_before_backward(root)
    for state in root.live_states():
        if state.past.is_unhooked or not state.place.reshards_after_forward:
            _show_throughout(backward, state)
    if root.rounds is not None:
        begin_rounds(root, root.rounds)
    return backward


def _show_throughout(backward: Backward, state: _FSDPState) -> None:
    """Show the parameters of a group that has stayed unsharded, until they are reduced: past its outputs the backward
    may come to modules of it, to run them again for activation checkpointing."""
    if all([handle.unsharded.is_allocated for handle in state._handles]) and state.swap not in backward.shown:
        backward.shown[state.swap] = None
        state.swap.show_unsharded()


def refuse_double_backward() -> None:
    if torch.is_grad_enabled():  # autograd says so while it runs
        raise RuntimeError(
            "backward(create_graph=True), or autograd.grad() with it, reached a fully_shard'ed model. Double backward "
            "(a gradient penalty, say) needs the gathered parameters to stay in the graph, which they do not here: "
            "their gradients of the second order would be wrong, or missing. None was published. Run the forward in "
            "functional mode: with functional_mode(model): ..."
        )


def _notice_backwards(state: _FSDPState) -> None:
    """From now on let hooks on the unsharded parameters of a group tell that a backward runs: one that passes none of
    the group's outputs, so that its end is reached all the same."""
    if state.past.has_leaf_hooks:
        return
    state.past.hook_leaves()
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


def keep_unsharded(state: _FSDPState, module: nn.Module, output: Any) -> None:
    """Backward can enter the group unnoticed: keep it unsharded, and let its parameters' own hooks make sure that the
    end of backward is reached."""
    if state.past.is_unhooked or not state._handles:
        return
    state.past.stay_unsharded()
    for handle in state._handles:
        handle.unsharded.keep_allocated(True)
    _notice_backwards(state)
    warnings.warn(
        f"forward of the fully_shard'ed {type(module).__name__} ({state.name}) returned {type(output).__name__}, "
        "in which no output that requires grad can be found or hooked: its parameters stay unsharded between forwards. "
        "Return tensors, or a type registered with torch.utils._pytree, to save that memory",
        stacklevel=2,
    )


class _EndOfBackward:
    """The callback at the end of a backward. Autograd drops it uncalled when the backward raises: then the modules
    show their sharded parameters again (but in forwards that are running), before the exception reaches code of the
    user."""

    def __init__(self, root: Root, backward: Backward) -> None:
        self.root: Root | None = root
        self._backward = backward

    @ends_backwards
    def __call__(self) -> None:
        root, self.root = self.root, None
        assert root is not None
        try:
            finish_backward(root)
        except BaseException:  # not left to __del__: the traceback holds this object
            _give_up_backward(root, self._backward)
            raise

    def __del__(self) -> None:
        if self.root is not None:
            _give_up_backward(self.root, self._backward)


def _give_up_backward(root: Root, backward: Backward) -> None:
    if root.backward is not backward:
        return  # it has failed before, and what it left may have been thrown away since
    root.fail_backward(backward)
    backward.shown.clear()
    for state in root.live_states():
        state.swap.restore(len(state.progress.entries))
    tell_of_failure(root)


@never_traced
def finish_backward(root: Root, is_inside: bool = False) -> None:
    """Reduce what has not been reduced, agree with the other ranks, and only then show the gradients. ``is_inside``:
    the backward has run inside a forward of the root, though that may have just ended."""
    states, backward, rounds = root.live_states(), root.backward, root.rounds
    assert backward is not None
    # ... or inside a recomputation.
    is_inside = is_inside or root.forward.depth > 0 or any([state.progress.entries for state in states])
    for state in reversed(states):
        progress, past = state.backward, state.past
        if progress.is_reduced and not progress.active_uses:
            continue
        if not progress.was_reached:
            refuse_unseen_backward(root, state)
        if progress.active_uses:
            state.swap.show_sharded()
            progress.leave_all()
        is_due = (
            progress.was_reached or past.is_unhooked or (past.has_unsynced and state.options.requires_gradient_sync)
        )
        if is_due and not progress.is_reduced:
            if past.unhooked_versions is not None and not progress.was_reached and _lateness(state):
                # Of a forward that has not ended they are not known yet.
                if not is_inside or _has_run_in_forward(root, state):
                    state.check_versions(past.unhooked_versions)
            if rounds is not None and rounds.is_on:
                owe(root, rounds, state)
            else:
                reduce(root, state)
    if rounds is not None:
        end_rounds(root, rounds)
    hide_shown(root)
    _bring_captured(root, states)
    _exchange(root, states)
    backward.add()  # a hook of the user's that raises leaves some gradients shown, on each rank others
    watch = root.watch
    has_others = watch is None or watch.has_grads()
    for state in states:
        for handle in state._handles:
            if handle.unsharded.is_allocated and not (is_inside and stays_unsharded(root, state)):
                if state.options.is_held or (state.options.keeps_after_backward() and state.backward.was_reached):
                    root.communicator.wait(handle)
                    handle.unsharded.be_left(not handle.unsharded.never_freed)
                else:
                    root.communicator.reshard(handle)
            if handle.contributions.awaits_publication:
                root.communicator.publish(handle, has_others)
            elif handle.contributions.accumulation is not None:
                handle.contributions.accumulation.show()
        progress = state.backward
        if progress.was_reached:
            # A use that this backward passed by will not hold up a later reduction; but the backward of the forward
            # that is running is yet to come.
            if state.progress.outstanding:
                state.progress.pass_by(
                    min(progress.last_use, root.num_forwards - 1) if is_inside else progress.last_use
                )
            state.reset_backward()
        elif progress.is_reduced:
            state.reset_backward()
    root.end_backward()
    try:
        for call in backward.after_publication:
            call()
    except BaseException:  # a hook of the user's: the calls after it are not made
        root.fail_backward(backward)
        raise


def _bring_captured(root: Root, states: list[_FSDPState]) -> None:
    """Take the gradients that graphs of ``torch.compile`` have brought, behind those that eager hooks have reduced."""
    captured = [(state, state.past.captured) for state in states if state.past.captured is not None]
    if captured and root.backward is not None:
        root.communicator.finish()
        if root.forward.record.captured is not None:
            root.forward.record.captured.check_backward()
        for state, group in captured:
            has_added, is_due = group.bring()
            if has_added:
                root.backward.add()
            options = state.options
            if is_due and options.requires_gradient_sync and options.requires_all_reduce:
                reduce(root, state)  # it was captured when the group was not to be reduced


def _has_run_in_forward(root: Root, state: _FSDPState) -> bool:
    """Whether the group's forward has ended, in a forward of the root that is running."""
    forward = root.forward
    return bool(forward.depth and state.place.index in forward.record.begun and not state.progress.entries)


def refuse_unseen_backward(root: Root, state: _FSDPState) -> None:
    """As the state's own method, but a backward inside the root's forward may reach the parameters of a group while
    its forward is running."""
    if not state.progress.entries and not (root.forward.depth and state.place.index in root.forward.record.begun):
        state.refuse_unseen_backward()


def publish_from_inside(root: Root) -> None:
    """At the end of an outermost forward: reduce and publish gradients that a backward inside it has left on parameters
    of groups whose own forwards were running, so that no hook told of it. The next time there will be hooks."""
    states = root.live_states()
    begun = {*root.forward.record.begun}
    for state in states:
        if any(handle.unsharded.has_grad() for handle in state._handles):
            if state.place.index not in begun:
                state.refuse_unseen_backward()
            _notice_backwards(state)
    backward = root.begin_backward()
    try:
        finish_backward(root, is_inside=True)
    except BaseException:
        _give_up_backward(root, backward)
        raise


def reduce_accumulated(root: Root) -> None:
    """As the end of a backward that has reached no group: reduce and publish what earlier ones have accumulated."""
    if root.failed_backward is not None:
        recover_backward(root)
    follow_profiler()
    backward = root.begin_backward()
    try:
        finish_backward(root)
    except BaseException:
        _give_up_backward(root, backward)
        raise


def _exchange(root: Root, states: list[_FSDPState]) -> None:
    """Agree with all ranks on the order of collectives and on which parameters have a gradient; reduce again what came
    late."""
    exchange, backward, watch = root.exchange, root.backward, root.watch
    while True:
        may_be_late = (
            (backward is not None and backward.has_outside_grads) or watch is None or watch.has_unsharded_grads()
        )
        exchange.late[:] = bytes(len(exchange.late))
        if may_be_late:
            for state in states:
                exchange.late[state.place.index] = _lateness(state)
        begin_exchange(root, exchange, END_OF_BACKWARD)
        root.communicator.finish()
        end_exchange(root, exchange, END_OF_BACKWARD)
        if not any(exchange.late):
            if watch is not None and not may_be_late:
                watch.backward_has_ended()
            return
        for state in states:
            if exchange.late[state.place.index]:
                reduce(root, state, exchange.late[state.place.index] == _LATE_THOUGH_FROZEN)


_LATE, _LATE_THOUGH_FROZEN = 1, 2  # the ranks exchange the greatest


def _lateness(state: _FSDPState) -> int:
    """Whether gradients have come to a group since its reduction; and whether to a flat parameter that needs none as
    far as is known, because forward has just thawed a part of it."""
    late = 0
    for handle in state._handles:
        if handle.unsharded.has_grad() or handle.contributions.outside:
            late = max(late, _LATE if handle.contributions.is_trainable else _LATE_THOUGH_FROZEN)
    return late

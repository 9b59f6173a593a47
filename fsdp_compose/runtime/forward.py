"""A top-level forward of a root: its start, by a module or by the user's own ``unshard()``, and its end."""

from __future__ import annotations

import sys
from types import FrameType

import torch
import torch.nn as nn

from .._torch import backwards, current_graph_task_id, is_in_functional_call
from ..flat import follow_profiler, is_stale
from ..group import ALL_GATHER, Root, _FSDPState, states_to_run
from .backward import publish_from_inside
from .captures import VersionsBefore
from .first_forward import initialise, is_running, tree
from .given import own_values
from .optional import begin_forward as begin_optional
from .recovery import recover, recover_backward
from .steps import follow_toggles_of_forward
from .user_changes import take_over, watch_again

_PACKAGE = __name__.partition(".")[0]


def enter(state: _FSDPState, module: nn.Module) -> Root:
    """Find the root of a forward that is being entered outside backward; begin an iteration when it is the first."""
    follow_profiler()
    root = state.root
    if root is None:
        with own_values([item for item, _ in states_to_run(module)]):
            root = initialise(state, module)
        _begin_forward(root, state, is_in_functional_call())
    elif root.forward.depth == 0 or (state.place.is_outermost and not is_running(root.forward.caller)):
        if root.is_dead:
            recover(root)
        is_given, watch = False, root.watch
        if watch is None or root.generation != tree.generation:
            root = initialise(state, module)  # the module that was the root is gone, or a group was added somewhere
            is_given = is_in_functional_call()
        elif not watch.is_quiet():
            with own_values(root.live_states()):
                if not watch.is_quiet():
                    root = _follow_user(root, state, module)
            is_given = is_in_functional_call()
        _begin_forward(root, state, is_given)
    return root


def _caller() -> FrameType | None:
    """The frame outside this package that has called a hook."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__package__")).partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return frame


def enter_alone(state: _FSDPState, module: nn.Module) -> Root:
    """The root of a group that the user drives by hand, outside forward and backward; ready to be unsharded."""
    follow_profiler()
    root = state.root
    if root is None or root.watch is None:
        return initialise(state, module)
    if root.forward.depth == 0 and not root.watch.is_quiet():
        return _follow_user(root, state, module)
    return root


def _follow_user(root: Root, state: _FSDPState, module: nn.Module) -> Root:
    """The user has changed something since the last iteration: take it over, or refuse it."""
    states = root.live_states()
    if any(item.swap.children_changed() for item in states):
        return initialise(state, module)
    take_over(root, states)
    return root


def _begin_forward(root: Root, outermost: _FSDPState, is_given: bool) -> None:
    """Free gradients that were dropped, gather again what stayed unsharded, and start a new record."""
    captured: list[_FSDPState] = []
    watch = root.watch
    if root.rounds is not None:
        begin_optional(root, root.rounds)
    may_release = watch is not None and not watch.has_grads()  # one look for all
    for state in root.live_states():
        for handle in state._handles:
            if handle.summoned is not None:
                raise RuntimeError(
                    f"a forward of the fully_shard group {state.name} begins inside summon_full_params(), where its "
                    "parameters are full ones that may have been edited: leave the context first"
                )
            if handle.contributions.accumulation is not None:
                handle.contributions.follow_zero_grad()
            handle.gradient.release_if_dropped(may_release)
            if handle.contributions.accumulation is not None:
                handle.contributions.accumulation.show()
            if handle.unsharded.is_allocated and not handle.unsharded.never_freed and root.rounds is None:
                if state.options.follows_writes() and handle.unsharded.left_by_forward and not is_stale(handle):
                    continue
                # Its shard may have been edited, in ways that leave no trace or on some ranks only.
                root.order.trace.append(state.code | ALL_GATHER)
                root.communicator.refresh(handle)
                handle.unsharded.be_left(state.options.is_held)
        if state.past.captured is not None:
            state.past.captured.follow()
            captured.append(state)
    root.begin_forward(outermost.place.index, _caller(), is_given, current_graph_task_id(), backwards.count)
    if captured:
        root.forward.record.note_captured(VersionsBefore(captured))
    root.order.fold_if_long()


def check_after_forward(root: Root) -> None:
    """Called at the end of an outermost forward: raise if it has changed an unsharded parameter, hook what it has kept
    unexpectedly, and publish what backwards inside it have left."""
    if root.failed_backward is not None:
        recover_backward(root)
    watch = root.watch
    if watch is None or not watch.was_forward_quiet():
        states = root.live_states()
        follow_toggles_of_forward(root, states)
        try:
            for state in states:
                state.check_after_forward()
        finally:
            if watch is not None:
                watch_again(root)
                watch = root.watch
    if root.forward.record.captured is not None and not root.forward.is_region:  # where an optimizer may step
        root.forward.record.captured.check_forward()
    if watch is not None and torch.is_grad_enabled():
        for state, tensors in watch.newly_kept():
            latest = root.forward.latest.get(state.place.index)
            if latest is not None:
                for tensor in tensors:
                    latest.hook_output(tensor)
    if backwards.count != root.forward.num_backwards and watch is not None and watch.has_unsharded_grads():
        publish_from_inside(root)


def end_forward(root: Root, is_hooked: bool) -> None:
    """The outermost forward ends: free prefetches that were not used, and, when no backward will come, everything but
    what ``keep_unsharded`` keeps."""
    root.forward.end()
    for state in root.live_states():
        pending_modules = state.progress.pending_modules
        for handle in state._handles:
            unsharded = handle.unsharded
            if not unsharded.is_allocated:
                continue
            is_needed = is_hooked and not (pending_modules and state.place.reshards_after_forward)
            stays = is_needed or state.options.keeps_unsharded or state.options.is_held
            if not (unsharded.left_by_forward and stays):
                root.communicator.reshard(handle)
        if pending_modules:
            pending_modules.clear()
    for home in root.communicator.homes:
        home.settle()  # from here on the user may write to shards


def abandon_forward(root: Root) -> None:
    """The outermost forward has ended in an exception."""
    root.forward.abandon()
    for home in root.communicator.homes:
        home.settle()
    if root.watch is not None:
        root.watch.newly_kept()  # a backward inside this forward may have needed it: next time it is hooked

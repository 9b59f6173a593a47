"""A top-level forward of a root: its start, by a module or by the user's own ``unshard()``, and its end.

The hooks call this at the outermost module. Code that is compiled together with the forwards of whole models is a
region; the work of a root's hooks around a forward is then done around the region."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
import torch.nn as nn

from .._torch import backwards, current_graph_task_id, is_in_functional_call
from ..errors import MisuseRuntimeError
from ..flat import follow_profiler
from ..group import Root, _FSDPState, find_untied, state_of_hooked, states_to_run
from .agreement import VersionsBefore
from .backward import publish_from_inside
from .functional_call import own_values
from .group_ops import follow_requires_grad_writes_of_forward
from .lazy_init import detect_again, initialise, take_over, tree
from .recovery import is_running, recover, recover_backward

_PACKAGE = __name__.partition(".")[0]


def enter(state: _FSDPState, module: nn.Module) -> Root:
    """Find the root of a forward that is entered outside backward. Begin an iteration if it is the outermost one."""
    follow_profiler()
    root = state.root
    if root is None:
        with own_values([item for item, _ in states_to_run(module)]):
            root = initialise(state, module)
        _begin_forward(root, state, is_in_functional_call())
    elif root.forward.depth == 0 or (state.place.is_outermost and not is_running(root.forward.caller)):
        if root.is_dead:
            recover(root)
        is_given, detector = False, root.detector
        if detector is None or root.generation != tree.generation:
            root = initialise(state, module)  # the root module no longer exists, or a group was added somewhere
            is_given = is_in_functional_call()
        elif not detector.is_unchanged():
            # functional_call() puts other parameters into modules, which looks like a change by the user.
            with own_values(root.live_states()):
                if not detector.is_unchanged():
                    root = _follow_user(root, state, module)
            is_given = is_in_functional_call()
        _begin_forward(root, state, is_given)
    return root


def _caller() -> FrameType | None:
    """The frame outside this package that called a hook."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__package__")).partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return frame


def enter_alone(state: _FSDPState, module: nn.Module) -> Root:
    """The root of a group that the user drives by hand outside forward and backward, ready to be unsharded."""
    follow_profiler()
    root = state.root
    if root is None or root.detector is None:
        return initialise(state, module)
    if root.forward.depth == 0 and not root.detector.is_unchanged():
        return _follow_user(root, state, module)
    return root


def _follow_user(root: Root, state: _FSDPState, module: nn.Module) -> Root:
    """Take over, or refuse, what the user has changed since the last iteration."""
    states = root.live_states()
    if any(item.swap.children_changed() or find_untied(item.swap) for item in states):
        return initialise(state, module)
    take_over(root, states)
    return root


def _begin_forward(root: Root, outermost: _FSDPState, is_given: bool) -> None:
    """Free gradients that the user dropped, gather again groups that stayed unsharded, and start a new record."""
    captured: list[_FSDPState] = []
    detector = root.detector
    root.scheduler.begin_forward(root)
    may_release = detector is not None and not detector.has_grads()  # one check for all groups
    for state in root.live_states():
        for handle in state._handles:
            if handle.summoned is not None:
                raise MisuseRuntimeError(
                    f"a forward of the fully_shard group {state.name} begins inside summon_full_params(), where its "
                    "parameters are full and may have been changed: leave the context first"
                )
            if handle.pending_gradients.accumulation is not None:
                handle.pending_gradients.follow_zero_grad()
            handle.gradient.release_if_dropped(may_release)
            if handle.pending_gradients.accumulation is not None:
                handle.pending_gradients.accumulation.show()
            # An edit through to_local() may leave no trace, or one on some ranks only, and ranks that disagreed about a
            # gather would hang. So what stayed gathered is gathered again, without asking whether it was edited.
            if handle.unsharded.is_allocated and not handle.unsharded.never_freed:
                root.scheduler.refresh_kept(root, state, handle)
        if state.persistent.captured is not None:
            state.persistent.captured.follow()
            captured.append(state)
    root.begin_forward(outermost.place.index, _caller(), is_given, current_graph_task_id(), backwards.count)
    if captured:
        root.forward.record.captured = VersionsBefore(captured)
    root.order.compact()


def check_after_forward(root: Root) -> None:
    """Called at the end of an outermost forward: raise if it has changed an unsharded parameter, hook tensors that it
    has newly kept on modules, and publish gradients of backwards inside it."""
    if root.failed_backward is not None:
        recover_backward(root)
    detector = root.detector
    if detector is None or not detector.was_forward_unchanged():
        states = root.live_states()
        follow_requires_grad_writes_of_forward(root, states)
        try:
            for state in states:
                state.check_after_forward()
        finally:
            # After an error too: a later forward must not report the same change again.
            if detector is not None:
                detect_again(root)
                detector = root.detector
    if root.forward.record.captured is not None and not root.forward.is_region:  # in a region an optimizer may step
        root.forward.record.captured.check_forward()
    if detector is not None and torch.is_grad_enabled():
        for state, tensors in detector.newly_kept():
            latest = root.forward.latest.get(state.place.index)
            if latest is not None:
                for tensor in tensors:
                    latest.hook_output(tensor)
    if backwards.count != root.forward.num_backwards and detector is not None and detector.has_unsharded_grads():
        publish_from_inside(root)


def end_forward(root: Root, is_hooked: bool) -> None:
    """End the outermost forward: free unused prefetches and, if no backward will come, everything except groups that
    ``keep_unsharded`` keeps."""
    root.forward.end()
    for state in root.live_states():
        pending_modules = state.progress.pending_modules
        for handle in state._handles:
            unsharded = handle.unsharded
            if not unsharded.is_allocated:
                continue
            # If no backward follows, nothing stays, even with reshard_after_forward=False: an edit before the next
            # forward may leave no trace.
            is_needed = is_hooked and not (pending_modules and state.place.reshards_after_forward)
            stays = is_needed or state.options.keeps_unsharded or state.options.is_held
            if not (unsharded.left_by_forward and stays):
                root.communicator.reshard(handle)
        if pending_modules:
            pending_modules.clear()
    for storage in root.communicator.storages:
        storage.synchronize()  # from here on the user may write to shards


def abandon_forward(root: Root) -> None:
    """End an outermost forward that raised."""
    root.forward.abandon()
    for storage in root.communicator.storages:
        storage.synchronize()
    if root.detector is not None:
        root.detector.newly_kept()  # a backward inside this forward may have needed them: hook them next time


# ---- Compiled regions: code that is compiled together with the forwards of whole models
#
# The work of a root's hooks around a forward is done around the region, so that the graph can contain the root's group
# too. Within a region the root's hooks are traced like those of other groups (``graph_mode``). If the graph breaks at
# them, they run eagerly, as a forward of the root inside another one.


@contextmanager
def region(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which a compiled region may run forwards of the roots ``modules``."""
    entered: list[Root] = []
    try:
        for module in modules:
            root = enter(state_of_hooked(module), module)
            if root.scheduler.skips:
                raise NotImplementedError(
                    "a compiled region contains a fully_shard'ed model with optional groups, but a graph cannot tell "
                    "which of them a rank will run. Compile modules inside the groups, or shard without optional=True"
                )
            root.forward.is_region = True
            root.forward.enter(None)
            entered.append(root)
        yield
        for root in reversed(entered):
            root.forward.leave(None)
            if not root.forward.depth:
                check_after_forward(root)
                end_forward(root, True)
    except BaseException:
        for root in reversed(entered):
            if root.forward.depth or root.forward.has_failed:
                abandon_forward(root)
        raise

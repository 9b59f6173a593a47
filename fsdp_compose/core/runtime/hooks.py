"""The hooks of forward: where a group's forward begins and ends, in any mode.

::

    pre-forward     choose the mode, find the root; the mode shows full parameters; cast and alias the inputs
    post-forward    show the sharded parameters, look at what forward has done, hook the outputs, reshard
    pre-backward    (gradient of an output)  unshard, prefetch the previous group, wait
    post-backward   (gradients of all aliased inputs)  take gradients, reshard, reduce-scatter

The last two are the hooks of a use in the default mode (``DefaultUse``), which the autograd graph holds; in functional
mode autograd needs none.

The start of this file recognizes forwards that repeat an earlier one inside a backward (activation checkpointing).
Then comes the work around a top-level forward, which the hooks of the outermost module do. The end of the file does it
around code that is compiled together with the forwards of whole models (a region)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch
import torch.nn as nn

from ..._torch import (
    STATE_KEY,
    backwards,
    current_graph_task_id,
    in_transform,
    intercept_backward_inputs,
    is_checkpoint_recomputing,
    is_in_functional_call,
    temporarily_clear_interpreter_stack,
)
from ...errors import MisuseRuntimeError
from ..flat import explain_refused_access, follow_profiler
from ..group import (
    API_KEY,
    GroupUse,
    HookedUse,
    Root,
    _FSDPState,
    find_untied,
    is_running,
    never_traced,
    registrations,
    state_of_hooked,
    states_to_run,
    traced_inside_others,
)
from .backward import keep_unsharded, leave_shown, publish_from_inside
from .default_mode import DEFAULT
from .group_ops import follow_requires_grad_writes_of_forward, reshard, reshard_until_backward
from .inputs_outputs import cast, has_parameter_memory, map_tensors, prepare_inputs
from .lazy_init import detect_again, initialize, take_over, tree, tree_has_changed, warn_of_inputs
from .untracked_writes import forgive_versions, look_for_writes, refuse_untracked_writes

# ---- Forwards inside a backward: repetitions of an earlier forward, as in activation checkpointing, and others


def is_recomputation(state: _FSDPState, task: int) -> bool:
    """Whether a forward that begins inside a backward (of number ``task``) repeats an earlier one for it, as in
    activation checkpointing."""
    # If not, it is treated like a forward outside backward: for example, that of a teacher in a gradient hook.
    root = state.root
    if root is None:
        return is_checkpoint_recomputing()  # it repeats a forward before fully_shard()
    if root.forward.depth and root.forward.task == task:
        return False  # it is part of a forward that began inside that backward
    # While a backward of its own root runs, even a new forward counts as a repetition: it uses parameters that cannot
    # have changed since that backward reached them.
    if root.backward is not None:
        return True
    if not is_checkpoint_recomputing():
        return False
    # The whole model is inside a checkpoint. If no backward of an earlier forward is awaited, this is another forward.
    return state.persistent.was_functional or any(other.progress.awaiting_backward for other in root.live_states())


def enter_recomputation(state: _FSDPState, module: nn.Module) -> Root:
    """The root of a recomputation that begins."""
    root = state.root
    if root is None:
        raise MisuseRuntimeError(
            f"the first forward of the fully_shard'ed {type(module).__name__} runs inside a backward: run its first "
            "forward outside backward"
        )
    if root.recomputed:
        # These were not resharded at their end: until another recomputation begins, their backward may come next.
        for other in root.recomputed:
            if other is not state and not other.backward.active_uses and not other.options.keeps_after_backward():
                (reshard_until_backward if other.position.reshards_partially else reshard)(root, other)
        root.recomputed.clear()
    return root


# ---- The start and the end of a top-level forward: by the outermost module, or by the user's own ``unshard()``


@contextmanager
def own_values(states: Sequence[_FSDPState]) -> Iterator[None]:
    """A context in which the modules hold their own parameters, even inside ``functional_call()``."""
    if not is_in_functional_call():
        yield
        return
    given = [item for state in states if state.is_complete for item in state.swap.take_overrides()]
    try:
        yield
    finally:
        for parameters, name, value in given:
            parameters[name] = value


_PACKAGE = __name__.partition(".")[0]


def enter(state: _FSDPState, module: nn.Module) -> Root:
    """Find the root of a forward that is entered outside backward. Begin an iteration if it is the outermost one."""
    follow_profiler()
    root = state.root
    if root is None:
        with own_values([item for item, _ in states_to_run(module)]):
            root = initialize(state, module)
        _begin_forward(root, state, is_in_functional_call())
    elif root.forward.depth == 0 or (state.position.is_outermost and not is_running(root.forward.caller)):
        if root.is_dead:
            from .recovery import recover

            recover(root)
        is_given, detector = False, root.detector
        if detector is None or root.generation != tree.generation:
            root = initialize(state, module)  # the root module no longer exists, or a group was added somewhere
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
        return initialize(state, module)
    if root.forward.depth == 0 and not root.detector.is_unchanged():
        return _follow_user(root, state, module)
    return root


def _follow_user(root: Root, state: _FSDPState, module: nn.Module) -> Root:
    """Take over, or refuse, what the user has changed since the last iteration."""
    states = root.live_states()
    if any(item.swap.children_changed() or find_untied(item.swap) for item in states):
        return initialize(state, module)
    take_over(root, states)
    return root


def _begin_forward(root: Root, outermost: _FSDPState, is_given: bool) -> None:
    """Free gradients that the user dropped, gather again groups that stayed unsharded, and start a new record."""
    captured: list[_FSDPState] = []
    detector = root.detector
    root.scheduler.begin_forward(root)
    may_release = detector is not None and not detector.has_grads()  # one check for all groups
    for state in root.live_states():
        if state.swap.is_left:
            state.end_left()
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
    root.begin_forward(outermost.position.index, _caller(), is_given, current_graph_task_id(), backwards.count)
    if captured:
        from ...plugins.graphs import VersionsBefore

        root.forward.record.captured = VersionsBefore(captured)
    root.order.compact()


def check_after_forward(root: Root) -> None:
    """Called at the end of an outermost forward: raise if it has changed an unsharded parameter, hook tensors that it
    has newly kept on modules, and publish gradients of backwards inside it."""
    if root.failed_backward is not None:
        from .recovery import recover_backward

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
            latest = root.forward.latest.get(state.position.index)
            if latest is not None:
                for tensor in tensors:
                    latest.hook_output(tensor)
    if backwards.count != root.forward.num_backwards and detector is not None and detector.has_unsharded_grads():
        publish_from_inside(root)


def end_forward(root: Root, is_hooked: bool) -> None:
    """End the outermost forward: free unused prefetches and, if no backward will come, everything except groups that
    ``keep_unsharded`` keeps, or whose parameters modules go on showing."""
    forward = root.forward
    forward.has_failed, forward.caller = False, None
    forward.latest.clear()
    for state in root.live_states():
        pending_modules = state.progress.pending_modules
        for handle in state._handles:
            unsharded = handle.unsharded
            if not unsharded.is_allocated:
                continue
            # If no backward follows, nothing stays, even with reshard_after_forward=False: an edit before the next
            # forward may leave no trace.
            is_needed = is_hooked and not (pending_modules and state.position.reshards_after_forward)
            stays = is_needed or state.options.keeps_unsharded or state.options.is_held
            if not ((unsharded.left_by_forward and stays) or state.swap.is_left):
                root.communicator.reshard(handle)
        if pending_modules:
            pending_modules.clear()
    for storage in root.communicator.storages:
        storage.synchronize()  # from here on the user may write to shards


def abandon_forward(root: Root) -> None:
    """End an outermost forward that raised."""
    forward = root.forward
    forward.has_failed, forward.caller = True, None
    forward.latest.clear()
    for storage in root.communicator.storages:
        storage.synchronize()
    if root.detector is not None:
        root.detector.newly_kept()  # a backward inside this forward may have needed them: hook them next time


# ---- Modes
#
# A mode decides where the parameters of a forward come from, and how its backward finds the group. The hooks choose the
# mode of each forward, in one place, and do what is common to all modes: they find the root, cast and alias the inputs,
# check what forward has done, and reshard. A mode makes modules show full parameters and returns a use, whose methods
# the hooks call to end the forward (see ``GroupUse``). Each mode is one file (``default_mode``, ``functional_mode``,
# ``graph_mode``) and does not refer to the others.


class Mode(Protocol):
    """A way in which groups compute. May be an object made for one forward."""

    def enter(self, root: Root, state: _FSDPState, is_recomputed: bool) -> tuple[GroupUse | None, HookedUse | None]:
        """Make the modules of a group whose forward begins show full parameters (``ParameterSwap``).

        A forward that is not ``is_recomputed`` is counted (``root.forward.depth``), but only after all checks that may
        raise: if a counted forward raises before it has its use, the next forward sees an interrupted iteration.

        Returns:
            The use that ends the forward, or ``None`` if this mode has nothing to do at its end; and the watcher of
            inputs that require grad, if there is one.
        """


# ---- Pre-forward and post-forward


_is_grad_enabled = torch.is_grad_enabled
_is_captured = torch.compiler.is_dynamo_compiling
_exception_in_hand: Callable[[], BaseException | None] = getattr(sys, "exception", lambda: sys.exc_info()[1])  # 3.11


@cache
def notice_inputs() -> None:
    """Called by ``fully_shard``; acts once."""
    intercept_backward_inputs(_with_inputs)


def _with_inputs(*arguments: Any) -> Any:
    from ...plugins.functional import with_inputs

    return with_inputs(*arguments)


def drive(modules: Sequence[nn.Module]) -> None:
    """Register the hooks that drive the modules of a new group."""
    # They find their state through the module that they are called with, never through a closure: a deep copy of the
    # module has the same hooks, and a state of its own.
    before, after = registered
    for module in modules:
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)
    notice_inputs()
    registrations.note()
    tree_has_changed()


@traced_inside_others
def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Make ``module`` show full parameters; see the head of this file."""
    if _is_captured():
        from ...plugins.graphs import can_capture, enter

        if can_capture(module):
            return enter(module, args, kwargs)
        return _enter_untraced(module, args, kwargs)
    state: _FSDPState = module.__dict__[STATE_KEY][API_KEY]  # state_of_hooked(), inline
    task = current_graph_task_id()
    is_recomputed = task != -1 and is_recomputation(state, task)
    past, options = state.persistent, state.options
    # A recomputation runs in the mode of the forward that it repeats, whatever the option says now.
    if not is_recomputed and past.was_functional is not options.is_functional:
        past.was_functional = options.is_functional
    mode: Mode = DEFAULT
    is_given = is_functional_call(state)
    if is_given or (past.was_functional and _is_grad_enabled()) or in_transform():
        from ...plugins.functional import FunctionalMode

        mode = FunctionalMode(state, is_given)
    root = state.root
    if is_recomputed or root is None or not root.forward.depth or state.position.is_outermost:
        root = _find_root(state, module, is_recomputed)
        if root.num_forwards == 1 and not is_recomputed:
            warn_of_inputs(root, args, kwargs)
    use, watcher = mode.enter(root, state, is_recomputed)
    state.progress.running_forwards.append((_exception_in_hand(), use, is_recomputed))
    policy = options.mp_policy
    return prepare_inputs(args, kwargs, policy.param_dtype if policy.cast_forward_inputs else None, watcher)


# The frames of is_functional_call(), of the pre-forward hook that calls it, and of at least two more for the module's
# own call (or a registered method and its caller): no functional_call() can be among these.
_NUM_FRAMES_OF_HOOK = 4


def is_functional_call(state: _FSDPState) -> bool:
    """Whether this forward of the group's modules uses other values than the group's own."""
    # Hot path. The slots of all groups were compared at the start of the outermost forward. So inside it, this first
    # looks at a few stack frames instead of the group's slots, which are no longer in the CPU's caches.
    root = state.root
    forward = None if root is None else root.forward
    if forward is None or not forward.depth or forward.is_given or forward.caller is None:
        swap = state.swap  # None in a copy that has not run
        return swap is not None and swap.is_overridden() and is_in_functional_call()
    return is_in_functional_call(forward.caller, _NUM_FRAMES_OF_HOOK) and state.swap.is_overridden()


@never_traced
def _enter_untraced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return pre_forward(module, args, kwargs)


@traced_inside_others
def post_forward(module: nn.Module, _args: Any, output: Any) -> Any:
    """Hide the unsharded parameters again, whether forward returned or raised, and prepare backward."""
    if _is_captured():
        from ...plugins.graphs import can_capture, leave

        if can_capture(module):
            return leave(module, output)
        return _leave_untraced(module, _args, output)
    state: _FSDPState = module.__dict__[STATE_KEY][API_KEY]  # state_of_hooked(), inline
    progress = state.progress
    if not progress.running_forwards:  # pre-forward itself failed
        root = state.root
        # Not what was refused before the forward was counted, mostly on all ranks: nothing is interrupted then. Ranks
        # that may skip groups have a round of their own for that, which has not begun.
        if state.position.is_outermost and root is not None and root.forward.depth and not root.scheduler.skips:
            root.scheduler.announce_failure(root)
        return None
    entered_with, use, is_recomputed = progress.running_forwards.pop()
    root = state.root
    assert root is not None
    # A forward inside an ``except`` block ends with the exception that it began with, and has not failed.
    scheduler, error = root.scheduler, _exception_in_hand()
    has_failed = error is not None and error is not entered_with
    state.swap.show_sharded_after_forward()
    if use is not None:
        root.forward.innermost = use.outer
    if is_recomputed:
        # torch.nn.utils.parametrize, put on in forward, raises version counters without a write.
        if registrations.count != root.forward.num_registrations and state.was_unsharded_written():
            forgive_versions(state)
    else:
        root.forward.depth -= 1
        if scheduler.after_forward(root, state, use):
            look_for_writes(root, state, module, use)
    if not has_failed:
        try:
            if scheduler.skips and not is_recomputed:
                scheduler.end_group(root, state)
            if use is not None and use.has_check:
                use.check()
            if root.forward.depth == 0 and not is_recomputed:
                if root.forward.written is not None:
                    refuse_untracked_writes(root)
                check_after_forward(root)
        except RuntimeError:
            _abandon(root, state, use, is_recomputed)
            raise
    if has_failed:
        _abandon(root, state, use, is_recomputed)
        if root.forward.depth == 0 and not is_recomputed and isinstance(error, Exception):
            scheduler.announce_failure(root)
        return None
    is_hooked = False
    if use is None:
        if has_parameter_memory(state, output):
            keep_unsharded(state, module, output)
    else:
        is_hooked = use.hook_outputs(module, output, is_recomputed)
    if not is_recomputed:
        _leave(root, state, module, is_hooked)
    elif _is_grad_enabled() or state.backward.active_uses:
        root.recomputed.append(state)
    else:
        reshard(root, state)  # no backward follows
    dtype = state.options.mp_policy.output_dtype
    return None if dtype is None else map_tensors(lambda tensor: cast(tensor, dtype), output)


@never_traced
def _leave_untraced(module: nn.Module, args: Any, output: Any) -> Any:
    return post_forward(module, args, output)


registered: list[Callable[..., Any]] = [pre_forward, post_forward]  # ``unchecked`` replaces them


def _find_root(state: _FSDPState, module: nn.Module, is_recomputed: bool) -> Root:
    """Find the root of a forward that begins, and begin an iteration if needed."""
    find = enter_recomputation if is_recomputed else enter
    if not in_transform():
        return find(state, module)
    with temporarily_clear_interpreter_stack():  # setup must not run under the torch.func transform
        return find(state, module)


def _abandon(root: Root, state: _FSDPState, use: GroupUse | None, is_recomputed: bool) -> None:
    """End a forward that raised."""
    if use is not None:
        use.abandon()
    explain_refused_access(_exception_in_hand())
    # Activation checkpointing stops a recomputation by an exception when it has what it needs; its backward follows.
    if is_recomputed:
        root.recomputed.append(state)
    else:
        if root.forward.depth == 0:
            abandon_forward(root)
        reshard(root, state)


def _leave(root: Root, state: _FSDPState, module: nn.Module, is_hooked: bool) -> None:
    progress = state.progress
    if progress.pending_modules:
        progress.pending_modules.discard(id(module))
    if not progress.running_forwards:
        position = state.position  # does not reshard if the group is held
        stays = progress.pending_modules or not position.reshards_after_forward
        if stays or (state.options.keeps_unsharded and not _is_grad_enabled()):
            for handle in state._handles:
                unsharded = handle.unsharded
                unsharded.be_left(unsharded.is_allocated and not unsharded.never_freed)
            leave_shown(state)
        elif is_hooked and position.reshards_partially:
            reshard_until_backward(root, state)
        else:
            reshard(root, state)
    if root.forward.depth == 0:
        end_forward(root, is_hooked)


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
            if state_of_hooked(module).mesh.replicas is not None:
                raise NotImplementedError(
                    "a compiled region contains a fully_shard'ed model whose gradients are averaged over replica "
                    "groups (set_replicas()), which no graph can contain. Compile modules inside the groups, or the "
                    "model with torch.compile(), whose graphs break where groups begin and end"
                )
            root.forward.is_region = True
            root.forward.depth += 1
            entered.append(root)
        yield
        for root in reversed(entered):
            root.forward.depth -= 1
            if not root.forward.depth:
                check_after_forward(root)
                end_forward(root, True)
    except BaseException:
        for root in reversed(entered):
            if root.forward.depth or root.forward.has_failed:
                abandon_forward(root)
        raise

"""The hooks that drive a group through an iteration: pre/post forward, pre/post backward, and nothing but them.

::

    pre-forward     unshard, prefetch the next group, wait, show the unsharded parameters, alias the inputs
    post-forward    show the sharded parameters, hook the outputs, reshard
    pre-backward    (gradient of an output)  unshard, prefetch the previous group, wait
    post-backward   (gradients of all aliased inputs)  take gradients, reshard, reduce-scatter

A hook finds its state from the module it is called with, never from a closure. One forward of one group is a ``_Use``:
the autograd graph holds it through the hooks on inputs and outputs, so that backward knows which forward it undoes.

Note [When are all gradients there?]. The aliases of the inputs are the first nodes that a use adds to the graph, and
autograd runs ready nodes latest first. So when one of them runs, every other node of the use has run: the first alias
to receive its gradient is the post-backward. (Only aliases on the group's own device count: each device has a queue of
its own.) A group that is used again in the same or an earlier forward waits for that use (``outstanding``). What this
cannot see (no input requires grad, a use that never comes) is reduced at the end of backward, in a fixed order; a
gradient that arrives after the reduction is noticed there and reduced again, on all ranks. Counting accumulated
gradients instead would let ranks that use different parameters issue collectives in different orders.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from .._torch import (
    current_graph_task_id,
    hook_gradient,
    in_transform,
    is_checkpoint_recomputing,
    same_storage,
    temporarily_clear_interpreter_stack,
)
from ..flat import explain_refused_access
from ..group import (
    Backward,
    ForwardRecord,
    GroupUse,
    HookedUse,
    Modules,
    Root,
    _FSDPState,
    get_state,
    never_traced,
    state_of_hooked,
    tensors_requiring_grad,
)
from ..ragged import toggles
from .backward import begin_backward, notice_backwards, refuse_double_backward, refuse_unseen_backward
from .forward import check_after_forward, enter
from .functional import FunctionalUse, refuse_accumulated
from .given import given_values, is_given
from .inputs import ATOMS, cast, map_tensors, prepare_inputs
from .steps import follow_toggles, reduce, reshard, unshard, unshard_for_use, wait_for_unshard
from .unseen_writes import look_for_writes, refuse_unseen_writes

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled


class _Use:
    """One forward of one group under grad mode, as backward sees it."""

    __slots__ = (
        "_active_backward",
        "_backward",
        "_has_ended",
        "_is_outstanding",
        "_outer",
        "_position",
        "_record",
        "_state",
        "containers",
        "has_alias",
        "versions",
    )

    def __init__(self, state: _FSDPState, record: ForwardRecord, outer: HookedUse | None) -> None:
        self._state = state
        self._record = record
        self._outer = outer
        self._has_ended = False
        self.containers: list[tuple[Any, set[int]]] | None = None
        self.has_alias = False  # some input requires grad
        self._position = 0
        self._is_outstanding = False  # the state's list of outstanding uses has, or had, this one
        # The backward that reached this use last, and the one that it has not finished.
        self._backward: Backward | None = None
        self._active_backward: Backward | None = None
        self.versions = state.shard_versions()

    @property
    def device_type(self) -> str:
        return self._state.mesh.device.type

    # ---- forward

    def end(self) -> HookedUse | None:
        self._has_ended = True
        return self._outer

    def check(self) -> None:
        """``check_after_forward`` looks at all groups in the default mode together."""

    def hook_outputs(self, module: nn.Module, output: Any, is_recomputed: bool) -> bool:
        return _hook_outputs(self._state, module, self, output, is_recomputed)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of an input that requires grad, whose gradient tells that this group's backward is done.

        Not the input itself: its gradient may be complete much later (skip connections), and the hook of a leaf can
        come before its gradient is accumulated.
        """
        self.has_alias = True
        # tensor[...] is cheaper than a view, forward and backward; jagged tensors have views alone.
        alias = tensor.view(tensor.shape) if tensor.is_nested else tensor[...]
        hook_gradient(alias, self.post_backward)
        return alias

    def watch_container(self, container: list[Any] | dict[Any, Any]) -> None:
        """Remember a list or dict among the inputs: forward may put tensors in there."""
        if self.containers is None:
            self.containers = []
        self.containers.append((container, {id(item) for item in tree_leaves(container)}))

    def tensors_put_into_inputs(self) -> list[torch.Tensor]:
        """Tensors that require grad and that forward has put into lists or dicts that it was given; asked once."""
        containers, self.containers = self.containers or (), None
        return [
            item
            for container, before in containers
            for item in tree_leaves(container)
            if isinstance(item, _Tensor) and item.grad_fn is not None and id(item) not in before
        ]

    def hook_output(self, tensor: torch.Tensor) -> bool:
        """Hook an output for pre-backward; ``False`` if backward could enter the group past such a hook."""
        base = tensor._base
        if (tensor if base is None else base).is_leaf:
            return False  # a parameter, or a view of one
        hook_gradient(tensor, self.pre_backward)
        if base is not None and base.requires_grad:
            hook_gradient(base, self.pre_backward)  # an in-place operation on a view drops the view's own hook
        return True

    def register(self, is_recomputed: bool) -> None:
        """This use will be reached by backward."""
        if is_recomputed:
            self._position = 0
            return
        self._position = len(self._record.hooked)
        self._record.hooked.append(self._state.place.index)
        self._state.progress.outstanding.append(self._record.number)
        self._is_outstanding = True

    # ---- backward

    @never_traced
    def pre_backward(self, _grad: torch.Tensor) -> None:
        state = self._state
        root = state.root
        assert root is not None
        backward = root.backward
        if backward is None:
            backward = begin_backward(root)
        elif _is_grad_enabled():
            refuse_double_backward()  # of a backward inside the one that is running
        if self._active_backward is backward:
            return
        progress = state.backward
        if self._backward is backward:
            progress.iterate()  # by autograd.grad() in a hook, say: this use had been left already
        self._backward = self._active_backward = backward
        outer = self._outer
        if outer is not None:
            outer.reach(backward, _grad)
        state.check_versions(self.versions)
        if not progress.was_reached:
            if root.forward.depth:
                refuse_unseen_backward(root, state)
            elif not state.progress.entries:
                state.refuse_unseen_backward()
        if progress.reach(self._record.number):
            state.swap.show_unsharded()
        unshard(root, state)
        hints = state.options.backward_prefetch
        if hints is not None:
            _prefetch(root, hints)
        elif self._position and self._record.states is root.states:
            previous = root.states[self._record.hooked[self._position - 1]]()
            if previous is not None:
                unshard(root, previous)
        wait_for_unshard(root, state)

    def reach(self, backward: object, grad: torch.Tensor) -> None:
        """A backward has come to a use inside this one, past its outputs: it may go on to layers before that."""
        if self._active_backward is not backward and self._has_ended:
            self.pre_backward(grad)

    @never_traced
    def post_backward(self, _grad: torch.Tensor) -> None:
        state, number = self._state, self._record.number
        root = state.root
        assert root is not None
        if self._active_backward is None or self._active_backward is not root.backward:
            return  # another alias of this use came before, or no hook of its outputs did
        self._active_backward = None
        outstanding, progress = state.progress.outstanding, state.backward
        if self._is_outstanding:
            self._is_outstanding = False
            if number in outstanding:
                outstanding.remove(number)
        if not progress.leave():
            return
        state.swap.show_sharded()
        if progress.is_iterated:
            return  # stays gathered, to be reduced once, at the end of this backward
        for earlier in outstanding:
            if earlier <= number:
                if not state.options.keeps_after_backward():
                    reshard(root, state)
                return
        reduce(root, state)


# ---- forward


@never_traced
def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Unshard the group and let ``module`` see it; see the module's opening paragraph."""
    state = state_of_hooked(module)
    task = current_graph_task_id()
    is_recomputed = task != -1 and _is_recomputation(state, task)
    past, options = state.past, state.options
    if not is_recomputed and past.was_functional is not options.is_functional:
        past.begin_use(options.is_functional)
    has_grad_mode = _is_grad_enabled()
    if (past.was_functional and has_grad_mode) or in_transform() or is_given(state):
        return _pre_forward_functional(state, module, args, kwargs, is_recomputed)
    if not is_recomputed:
        root = state.root
        if root is None or not root.forward.depth or state.place.is_outermost:
            root = enter(state, module)
        root.forward.enter()
        if has_grad_mode and past.num_toggles != toggles.count:
            follow_toggles(root, state)
        unshard_for_use(root, state)
        _prefetch_forward(root, state)
        if len(state.modules) > 1 and not state.progress.pending_modules:
            state.progress.pending_modules.update([id(ref()) for ref in state.modules])
    else:
        root = _enter_recompute(state, module)
        if state.backward.active_uses:
            unshard(root, state)  # its backward computes with what was gathered
        else:
            unshard_for_use(root, state)
    wait_for_unshard(root, state)
    use = None
    if has_grad_mode:
        forward = root.forward
        use = _Use(state, forward.record, forward.innermost)
        forward.begin_use(use)
    state.progress.entries.append((sys.exc_info()[1], use, is_recomputed))
    state.swap.show_unsharded()
    policy = options.mp_policy
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    # A recomputation for a backward that already waits for this group: the original graph has the hooks.
    if is_recomputed and state.backward.active_uses and is_checkpoint_recomputing():
        use = None
    return prepare_inputs(args, kwargs, dtype, use)


@never_traced
def post_forward(module: nn.Module, _args: Any, output: Any) -> Any:
    """Hide the unsharded parameters again, however forward ended; prepare backward."""
    state = state_of_hooked(module)
    progress = state.progress
    if not progress.entries:
        return None  # pre-forward itself failed
    entered_with, use, is_recomputed = progress.entries.pop()
    root = state.root
    assert root is not None
    if use is not None:
        root.forward.begin_use(use.end())
    error = sys.exc_info()[1]
    has_failed = error is not None and error is not entered_with
    state.swap.show_sharded()
    if not is_recomputed:
        root.forward.leave()
        progress.uses_left[use is None] -= 1
        if not progress.uses_left[use is None]:
            _look_for_writes(root, state, module, use)
    if not has_failed:
        try:
            if use is not None:
                use.check()
            if root.forward.depth == 0 and not is_recomputed:
                if root.forward.written is not None:
                    refuse_unseen_writes(root)
                check_after_forward(root)
        except RuntimeError:
            _abandon(root, state, is_recomputed)
            raise
    if has_failed:
        _abandon(root, state, is_recomputed)
        return None
    is_hooked = False
    if use is None:
        _look_at_outputs(state, module, output)
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


def _pre_forward_functional(
    state: _FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_recomputed: bool
) -> tuple[Any, Any]:
    """``pre_forward`` in functional mode: autograd does by itself what hooks do else. A recomputation is in the mode of
    the group's last forward, wherever the user has left the mode since."""
    given = given_values(state) if is_given(state) else None
    with temporarily_clear_interpreter_stack():  # whatever torch.func makes of the forward, this is none of it
        root = state.root
        if is_recomputed:
            root = _enter_recompute(state, module)
        elif root is None or not root.forward.depth or state.place.is_outermost:
            root = enter(state, module)
        assert root is not None
        refuse_accumulated(state)
        if not is_recomputed:
            root.forward.enter()
            if not state.progress.entries:
                reshard(root, state)  # what unshard() has gathered ahead is of no use here
                wait_for_unshard(root, state)  # nor what stays unsharded
    state.progress.entries.append((sys.exc_info()[1], FunctionalUse(root, state, given), is_recomputed))
    policy = state.options.mp_policy
    return prepare_inputs(args, kwargs, policy.param_dtype if policy.cast_forward_inputs else None, None)


def _abandon(root: Root, state: _FSDPState, is_recomputed: bool) -> None:
    """A forward ended in an exception; in a recomputation this may be activation checkpointing, which stops early."""
    explain_refused_access(sys.exc_info()[1])
    if is_recomputed:
        root.recomputed.append(state)
    else:
        if root.forward.depth == 0:
            root.forward.abandon()
            for other in root.live_states():
                other.progress.note_use(None)
            if root.watch is not None:
                root.watch.newly_kept()  # a backward inside this forward may have needed it: next time it is hooked
        reshard(root, state)


def _look_for_writes(root: Root, state: _FSDPState, module: nn.Module, use: GroupUse | None) -> None:
    """It is time to look whether forward has written to the parameters of the group; if it is at its last module."""
    if in_transform() or state.progress.pending_modules - {id(module)}:
        state.progress.uses_left[use is None] = 1
    else:
        look_for_writes(root, state, use is not None, use if isinstance(use, FunctionalUse) else None)


def _leave(root: Root, state: _FSDPState, module: nn.Module, is_hooked: bool) -> None:
    progress = state.progress
    if progress.pending_modules:
        progress.pending_modules.discard(id(module))
    if not progress.entries:
        is_kept = (state.options.keeps_unsharded or state.options.is_held) and not _is_grad_enabled()
        if is_kept or progress.pending_modules or not state.place.reshards_after_forward:
            for handle in state._handles:
                unsharded = handle.unsharded
                unsharded.be_left(unsharded.is_allocated and not unsharded.never_freed)
        else:
            reshard(root, state)
    if root.forward.depth == 0:
        _end_forward(root, is_hooked)


def _end_forward(root: Root, is_hooked: bool) -> None:
    """The outermost forward ends: free prefetches that were not used, and, when no backward will come, everything but
    what ``keep_unsharded`` keeps."""
    root.forward.end()
    for state in root.live_states():
        progress, options = state.progress, state.options
        stays = options.keeps_unsharded or options.is_held
        for handle in state._handles:
            is_needed = is_hooked and not (progress.pending_modules and state.place.reshards_after_forward)
            unsharded = handle.unsharded
            if unsharded.is_allocated and not (unsharded.left_by_forward and (is_needed or stays)):
                root.communicator.reshard(handle)
        if progress.pending_modules:
            progress.pending_modules.clear()
        progress.note_use(None)


def _prefetch_forward(root: Root, state: _FSDPState) -> None:
    """Start the all-gather of the group that came next in the last iteration, if this one goes the same way."""
    forward, index = root.forward, state.place.index
    begun, previous = forward.record.begun, forward.previous.begun
    i = len(begun)
    begun.append(index)
    if state.options.forward_prefetch is not None:
        _prefetch(root, state.options.forward_prefetch)
    elif i + 1 < len(previous) and previous[i] == index:
        following = root.states[previous[i + 1]]()
        if following is not None:
            unshard(root, following)


def _prefetch(root: Root, modules: Modules) -> None:
    """Start the all-gathers of the groups that the user wants to be gathered ahead; of this root's alone."""
    for ref in modules:
        module = ref()
        other = None if module is None else get_state(module)
        if other is not None and other.root is root:
            unshard(root, other)


def _is_recomputation(state: _FSDPState, task: int) -> bool:
    """Whether a forward that begins inside a backward (of number ``task``) repeats an earlier one for it, as activation
    checkpointing does. Else it is a forward like those outside: of a teacher in a gradient hook, say.

    While a backward of its own root runs, a forward is always treated like a repetition: it computes with parameters
    that cannot have changed since that backward came to them."""
    root = state.root
    if root is None:
        return is_checkpoint_recomputing()  # of a forward before fully_shard()
    if root.forward.depth and root.forward.task == task:
        return False  # a part of a forward that has begun inside that backward
    if root.backward is not None:
        return True
    if not is_checkpoint_recomputing():
        return False
    # The model is wholly inside a checkpoint. Where its forward has left nothing to repeat for, this is another one.
    return state.past.was_functional or any(other.progress.outstanding for other in root.live_states())


def _enter_recompute(state: _FSDPState, module: nn.Module) -> Root:
    """A forward inside backward (activation checkpointing). The groups recomputed before this one are resharded
    unless their backward has begun; the last one stays, since its backward comes next."""
    root = state.root
    if root is None:
        raise RuntimeError(
            f"the first forward of the fully_shard'ed {type(module).__name__} runs inside a backward; run its first "
            "forward outside of backward"
        )
    if root.recomputed:
        for other in root.recomputed:
            if other is not state and not other.backward.active_uses and not other.options.keeps_after_backward():
                reshard(root, other)
        root.recomputed.clear()
    return root


# ---- outputs


def _hook_outputs(state: _FSDPState, module: nn.Module, use: _Use, output: Any, is_recomputed: bool) -> bool:
    """Hook every output that requires grad; whether backward may reach this use."""
    is_tensor, keeper = isinstance(output, _Tensor), state.swap.kept
    kept = [] if keeper.is_quiet else keeper.new_ones()
    if not is_recomputed:
        state.progress.note_use(use)
    if use.containers is not None:
        kept += use.tensors_put_into_inputs()
    if is_tensor and output.requires_grad and not kept and use.hook_output(output):  # the fast path
        use.register(is_recomputed)
        return True
    has_hooks = is_opaque = False
    for leaf in (output,) if isinstance(output, _Tensor) else tree_leaves(output):
        if not isinstance(leaf, _Tensor):
            if not isinstance(leaf, ATOMS):
                is_opaque = True
                kept += tensors_requiring_grad(leaf)  # not all there may be, but backward should not come unawares
        elif not leaf.requires_grad:
            is_opaque |= _is_parameter_memory(state, leaf)
        elif use.hook_output(leaf):
            has_hooks = True
        else:
            is_opaque = True
    # (Forward itself may have frozen all.)
    may_need = use.has_alias or any(p.requires_grad for handle in state._handles for p in handle.unsharded.params)
    if keeper.is_quiet and not has_hooks and may_need:
        kept += keeper.new_ones()
    for tensor in kept:
        has_hooks |= use.hook_output(tensor)
    if not has_hooks:
        # Nothing to hook: what backward needs may have left by another way, such as an attribute.
        is_opaque |= may_need
    if is_opaque:
        _keep_unsharded(state, module, output)
        state.past.note_unhooked(use.versions)
    if has_hooks or is_opaque:
        use.register(is_recomputed)
    return has_hooks or is_opaque


def _look_at_outputs(state: _FSDPState, module: nn.Module, output: Any) -> None:
    """Without grad mode there is nothing to hook; only an output that is a parameter must not be freed."""
    for leaf in (output,) if isinstance(output, _Tensor) else tree_leaves(output):
        if isinstance(leaf, _Tensor) and _is_parameter_memory(state, leaf):
            _keep_unsharded(state, module, output)


def _is_parameter_memory(state: _FSDPState, tensor: torch.Tensor) -> bool:
    """Whether an output is (a view of) an unsharded parameter, which resharding would free under the user's hands."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()
    return any(
        same_storage(storage, handle.unsharded.storage) for handle in state._handles if handle.unsharded.is_allocated
    )


def _keep_unsharded(state: _FSDPState, module: nn.Module, output: Any) -> None:
    """Backward can enter the group unnoticed: keep it unsharded, and let its parameters' own hooks make sure that the
    end of backward is reached."""
    if state.past.is_unhooked or not state._handles:
        return
    state.past.stay_unsharded()
    for handle in state._handles:
        handle.unsharded.keep_allocated(True)
    notice_backwards(state)
    warnings.warn(
        f"forward of the fully_shard'ed {type(module).__name__} ({state.name}) returned {type(output).__name__}, "
        "in which no output that requires grad can be found or hooked: its parameters stay unsharded between forwards. "
        "Return tensors, or a type registered with torch.utils._pytree, to save that memory",
        stacklevel=2,
    )

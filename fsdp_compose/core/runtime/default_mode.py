"""The default mode: a forward fills the group's own memory and frees it at its end; hooks refill it in backward.

The previous group has usually started the all-gather (see ``group_ops``), so the forward only waits for it. Under grad
mode the forward leaves a ``DefaultUse``, whose hooks do the same in backward. Without grad mode there will be no
backward, so it leaves none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from ..._torch import hook_gradient, is_checkpoint_recomputing
from ..flat import FlatParamHandle
from ..group import (
    Backward,
    ForwardRecord,
    HookedUse,
    Root,
    _FSDPState,
    begins_backward,
    begins_forward,
    ends_backward,
    never_traced,
)
from ..ragged import requires_grad_writes
from .backward import begin_backward, keep_unsharded, refuse_double_backward, refuse_unseen_backward
from .group_ops import follow_requires_grad_writes, reshard, reshard_until_backward
from .inputs_outputs import hook_outputs
from .untracked_writes import writes_to_unsharded

# ---- A use in the default mode: one forward of one group under grad mode, and the two hooks of its backward
#
# The autograd graph holds the use through hooks on inputs and outputs, so that backward knows which forward it belongs
# to. The gradient of an output calls ``pre_backward``; the gradients of the aliased inputs call ``post_backward``.
#
# Note [When are all gradients there?]. The aliases of the inputs are the first nodes that a use adds to the graph, and
# of the nodes that are ready, autograd runs the latest first. So when one alias runs, every other node of the use has
# run: the first alias that receives its gradient is the post-backward. (Only aliases on the group's own device count,
# because each device has its own queue.) If the group is also used elsewhere in this forward or an earlier one, it
# waits for those uses (``awaiting_backward``). If none of this works (no input requires grad, a use never comes), the
# group is reduced at the end of backward, in a fixed order. A gradient that arrives after the reduction is noticed
# there and reduced again, on all ranks. Counting accumulated gradients instead would make ranks that use different
# parameters issue collectives in different orders.


_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled


class DefaultUse:
    """One forward of one group under grad mode, as backward sees it."""

    __slots__ = (
        "__weakref__",
        "_backward",
        "_has_ended",
        "_is_outstanding",
        "_position",
        "_record",
        "_state",
        "_versions",
        "active_backward",
        "containers",
        "has_alias",
        "outer",
    )

    has_check = False

    def __init__(self, state: _FSDPState, record: ForwardRecord, outer: HookedUse | None) -> None:
        self._state = state
        self._record = record
        self.outer = outer
        self._has_ended = False
        self.containers: list[tuple[Any, set[int]]] | None = None
        self.has_alias = False  # some input requires grad
        self._position = 0
        self._is_outstanding = False  # this use was added to the state's ``awaiting_backward``
        # The backward that reached this use last, and the one that has not finished it.
        self._backward: Backward | None = None
        self.active_backward: Backward | None = None
        self._versions = state.shard_versions()

    @property
    def state(self) -> _FSDPState:
        """The group."""
        return self._state

    @property
    def device_type(self) -> str:
        return self._state.mesh.device.type

    # ---- Forward

    def abandon(self) -> None:
        self._has_ended = True

    def check(self) -> None:
        """Do nothing: ``check_after_forward`` checks all groups in the default mode together."""

    def find_writes(self) -> dict[FlatParamHandle, list[int]]:
        return writes_to_unsharded(self._state)

    def hook_outputs(self, module: nn.Module, output: Any, is_recomputed: bool) -> bool:
        state, self._has_ended = self._state, True
        root = state.root
        if root is not None and not is_recomputed:
            root.forward.latest[state.position.index] = self
        # The fast path: the output is one tensor, and nothing else leaves the forward.
        is_alone = isinstance(output, _Tensor) and state.swap.kept.is_unchanged and self.containers is None
        if not (is_alone and output.requires_grad and self.hook_output(output)):
            has_hooks, has_gaps = hook_outputs(state, self, output)
            if has_gaps:
                keep_unsharded(state, module, output)
                state.persistent.unhooked_versions = self._versions
            elif not has_hooks:
                return False
        if is_recomputed:
            self._position = 0
            return True
        hooked, progress = self._record.hooked, state.progress
        self._position = len(hooked)
        hooked.append(state.position.index)
        progress.awaiting_backward.append(self._record.number)
        self._is_outstanding = True
        return True

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of an input that requires grad. When its gradient arrives, this group's backward is done."""
        # The input itself would not do: its gradient may be complete much later (skip connections), and the hook of a
        # leaf can run before the leaf's gradient is accumulated.
        self.has_alias = True
        # tensor[...] is cheaper than a view, forward and backward, but jagged tensors only support views.
        alias = tensor.view(tensor.shape) if tensor.is_nested else tensor[...]
        hook_gradient(alias, self.post_backward)
        return alias

    def watch_container(self, container: list[Any] | dict[Any, Any]) -> None:
        """Remember a list or dict among the inputs, because forward may put tensors into it."""
        if self.containers is None:
            self.containers = []
        self.containers.append((container, {id(item) for item in tree_leaves(container)}))

    def tensors_put_into_inputs(self) -> list[torch.Tensor]:
        """Tensors requiring grad that forward has put into lists or dicts among its inputs. Called once."""
        containers, self.containers = self.containers or (), None
        return [
            item
            for container, before in containers
            for item in tree_leaves(container)
            if isinstance(item, _Tensor) and item.grad_fn is not None and id(item) not in before
        ]

    def hook_output(self, tensor: torch.Tensor) -> bool:
        """Hook an output for pre-backward. Returns ``False`` if backward could enter the group without the hook."""
        base = tensor._base
        if tensor.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
            return False  # a parameter or a view of one (to_local() of a DTensor is a view of a base without grad)
        hook_gradient(tensor, self.pre_backward)
        if base is not None and base.requires_grad:
            hook_gradient(base, self.pre_backward)  # an in-place operation on a view drops the view's own hook
        return True

    # ---- Backward

    @begins_backward
    @never_traced
    def pre_backward(self, _grad: torch.Tensor) -> None:
        state = self._state
        root = state.root
        assert root is not None
        backward = root.backward
        if backward is None:
            backward = begin_backward(root)
        elif _is_grad_enabled():
            refuse_double_backward(root)  # there is a backward with create_graph inside the running one
        if self.active_backward is backward:
            return
        progress, number = state.backward, self._record.number
        if self._backward is backward:
            progress.is_iterated = True  # this use was left already; for example, a hook calls autograd.grad()
        self._backward = self.active_backward = backward
        outer = self.outer
        if outer is not None and outer.active_backward is not backward:
            outer.reach(_grad)
        state.check_versions(self._versions)
        if self._record.captured is not None:
            self._record.captured.check_backward()
        if not progress.was_reached:
            if root.forward.depth:
                refuse_unseen_backward(root, state)
            elif not state.progress.running_forwards:
                state.refuse_unseen_backward()
        # Inline, as elsewhere on this path: a small method for each assignment made the host a fifth slower.
        progress.was_reached = True
        if number > progress.last_use:
            progress.last_use = number
        progress.active_uses += 1
        if progress.active_uses == 1:
            state.swap.show_unsharded()
        root.scheduler.before_backward(root, state, self._record, self._position)
        root.communicator.wait_for(state._handles)

    def reach(self, grad: torch.Tensor) -> None:
        """Handle a backward that reached a use inside this one, maybe without passing the outputs of this one."""
        # It may go on to earlier layers of this group. While the forward of this use still runs, its parameters are
        # there anyway.
        if self._has_ended:
            self.pre_backward(grad)

    @ends_backward
    @never_traced
    def post_backward(self, _grad: torch.Tensor) -> None:
        state, number = self._state, self._record.number
        root = state.root
        assert root is not None
        if self.active_backward is None or self.active_backward is not root.backward:
            return  # another alias of this use was first, or backward passed no hook of its outputs
        self.active_backward = None
        awaiting, progress = state.progress.awaiting_backward, state.backward
        if self._is_outstanding:
            self._is_outstanding = False
            if number in awaiting:
                awaiting.remove(number)
        progress.active_uses -= 1
        if progress.active_uses > 0:
            return
        state.swap.show_sharded()
        if progress.is_iterated:
            return  # it stays gathered and is reduced once, at the end of this backward
        if len(state.modules) > 1 and number in awaiting:
            return  # it stays gathered for the group's other modules, as in forward
        for earlier in awaiting:
            if earlier <= number:
                if not state.options.keeps_after_backward():
                    (reshard_until_backward if state.position.reshards_partially else reshard)(root, state)
                return
        root.scheduler.ready_to_reduce(root, state)


# ---- The mode


class DefaultMode:
    """The default mode; see the head of this file."""

    __slots__ = ()

    @begins_forward
    def enter(self, root: Root, state: _FSDPState, is_recomputed: bool) -> tuple[DefaultUse | None, DefaultUse | None]:
        forward, scheduler = root.forward, root.scheduler
        use = DefaultUse(state, forward.record, forward.innermost) if _is_grad_enabled() else None
        if is_recomputed:
            scheduler.before_recomputation(root, state, use)
        else:
            follows = not (scheduler.skips and scheduler.check_forward(root, state))
            # Counted before it gathers: if that raises, the iteration was interrupted, and all ranks recover from it.
            forward.depth += 1
            if follows and use is not None and state.persistent.num_toggles != requires_grad_writes.count:
                follow_requires_grad_writes(root, state)
            scheduler.before_forward(root, state, use)
            if len(state.modules) > 1 and not state.progress.pending_modules:
                state.progress.pending_modules.update([id(ref()) for ref in state.modules])
        root.communicator.wait_for(state._handles)
        watcher = use
        if use is not None:
            forward.innermost = use
            # A backward already waits for this group, so the original graph has the hooks.
            if is_recomputed and state.backward.active_uses and is_checkpoint_recomputing():
                watcher = None
        state.swap.show_unsharded()
        return use, watcher


DEFAULT = DefaultMode()

"""Gradient hooks of sharded parameters.

The gradients of sharded parameters arrive by a reduction, not through autograd, so autograd never calls the hooks that
users register on them. This file stores the hooks instead. The sharded gradient calls them when it is published: once
per backward that reduces, with the sharded gradient. A hook that mixes it with plain tensors (a mask of the weight's
shape) is called again with the whole gradient.

A loss term computed from a sharded parameter itself (a penalty on its weights) produces a gradient through autograd.
Parameters with hooks therefore also have two autograd hooks of ours, which note that gradient. The sum of both
gradients goes through the user's hooks when the group's gradient is published, or otherwise at the end of backward.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from ..._torch import gradient_hooks, is_part_of_multi_grad_hook, queue_end_of_backward, set_leaf_hooks
from ...errors import MisuseError, MisuseRuntimeError
from ..ragged import MixedOperandsError, ParameterOwner, parameter_owners
from .accumulation import behind, put_behind
from .sharded_param import is_sharded_like, like_sharded_param

_REFUSED = (
    "the sharded parameter {}: {} asks for the autograd node that accumulates its gradient, but that node never runs: "
    "the gradient arrives by a reduction, so hooks on the node would never be called. Register them after "
    "fully_shard(), with the parameter's register_post_accumulate_grad_hook() or register_hook(), or in functional "
    "mode (set_functional_mode(model) first)"
)

_Hooks = OrderedDict[int, Callable[[Any], Any]]


class _Arrival(NamedTuple):
    """The gradient that autograd has produced for a parameter in this backward, and a copy of the previous ``.grad``
    (``None`` if there was none, or if no hook needs to see the new gradient separately)."""

    gradient: torch.Tensor
    before: torch.Tensor | None


class HookedFlatParam(Protocol):
    """The flat parameter whose sharded parameters have the hooks."""

    @property
    def segments(self) -> Sequence[object]: ...

    @property
    def is_in_forward(self) -> bool: ...

    @property
    def is_functional(self) -> bool: ...

    def name_of(self, index: int) -> str: ...

    def follow_user(self) -> None: ...

    def show_to_segments(self, sharded_params: Sequence[int]) -> None: ...

    def after_publication(self, call: Callable[[], None]) -> None: ...

    def gather_parameter(self, index: int) -> torch.Tensor | None: ...


class GradientHooks(ParameterOwner):
    """The hooks of the parameters of one handle.

    Args:
        sharded_params: the sharded parameters; from now on, their ``register_hook`` and
            ``register_post_accumulate_grad_hook`` arrive here, even after ``module.to()`` has exchanged everything in a
            parameter but its identity.
        before: for each sharded parameter, the object that has held its hooks so far, or ``None``.
        owner: the handle; its ``after_publication`` tells when the gradients of a backward are complete.

    Attributes:
        on_gradient, after_accumulation: the hooks of either kind, by index of the sharded parameter.
    """

    def __init__(
        self,
        sharded_params: Sequence[nn.Parameter],
        before: Sequence[ParameterOwner | None] = (),
        *,
        owner: HookedFlatParam,
    ) -> None:
        self._sharded_params = sharded_params
        self._owner = weakref.ref(owner)
        self._arrivals: dict[int, _Arrival] = {}  # by index of the sharded parameter
        self._recent: Sequence[int] = ()  # those just accumulated, while flat views copy them
        self._accumulated: set[int] = set()  # the ones that autograd has added to ``.grad`` in this backward
        self.on_gradient: dict[int, _Hooks] = {}
        self.after_accumulation: dict[int, _Hooks] = {}
        for i, earlier in enumerate(before):
            if isinstance(earlier, GradientHooks):
                j = earlier._index(sharded_params[i])
                for mine, theirs in (
                    (self.on_gradient, earlier.on_gradient),
                    (self.after_accumulation, earlier.after_accumulation),
                ):
                    if j in theirs:
                        mine[i] = theirs[j]
        for sharded in sharded_params:
            parameter_owners[id(sharded)] = self
        self.listen_again()

    def move_over(self, index: int, original: nn.Parameter) -> None:
        """Take over the hooks of the parameter that sharded parameter ``index`` replaces. Handles to remove them stay
        valid."""
        if any(map(is_part_of_multi_grad_hook, gradient_hooks(original))):
            raise MisuseError(_REFUSED.format(self.name_of(index), "fully_shard() after register_multi_grad_hook()"))
        if original._backward_hooks:
            self.on_gradient[index] = cast(_Hooks, original._backward_hooks)
        after = getattr(original, "_post_accumulate_grad_hooks", None)
        if after:
            self.after_accumulation[index] = after
        if not self.is_empty:
            self._listen(index)

    def register(self, sharded: nn.Parameter, hook: Callable[[Any], Any], after_accumulation: bool) -> RemovableHandle:
        """Register a hook on a sharded parameter; called by the parameter's own methods."""
        index = self._index(sharded)
        kind = self.after_accumulation if after_accumulation else self.on_gradient
        hooks = kind.setdefault(index, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        self._listen(index)
        return handle

    def is_forward_running(self) -> bool:
        """Whether a forward of the model is running. Whoever has gathered the parameters then does not check where they
        are until the next one."""
        owner = self._owner()
        return owner is not None and owner.is_in_forward

    def refuse_accumulator(self, sharded: nn.Parameter) -> None:
        """Raise RuntimeError if autograd, in the group's mode, does not run the node that accumulates the gradient."""
        owner = self._owner()
        if sharded.requires_grad and sharded.grad_fn is None and owner is not None and not owner.is_functional:
            what = "view_as() or expand_as() of it with itself (as register_multi_grad_hook() calls it)"
            raise MisuseRuntimeError(_REFUSED.format(self.name_of(self._index(sharded)), what))

    def gather(self, sharded: nn.Parameter) -> torch.Tensor | None:
        """Gather the inner tensor of a sharded parameter, differentiably; ``None`` before the group's first
        forward."""
        owner = self._owner()
        return None if owner is None else owner.gather_parameter(self._index(sharded))

    def has_arrived(self, index: int) -> bool:
        """Whether autograd has produced a gradient for a sharded parameter that was not shown yet."""
        return index in self._arrivals or index in self._recent

    def name_of(self, index: int) -> str:
        owner = self._owner()
        return "?" if owner is None else owner.name_of(index)

    def _index(self, sharded: nn.Parameter) -> int:
        return next(i for i, item in enumerate(self._sharded_params) if item is sharded)

    @property
    def want_gradients(self) -> bool:
        """Whether some hook must see the gradient of a backward separately, before it is accumulated."""
        return any(self.on_gradient.values())

    @property
    def is_empty(self) -> bool:
        return not (self.on_gradient or self.after_accumulation)

    # ---- Called when a gradient is published

    def replace(self, index: int, gradient: torch.Tensor) -> None:
        """Call the hooks on a gradient; a gradient that they return is copied over it.

        Ranks: if a hook computes with plain tensors, all of the mesh (it gets the whole gradient).
        """
        with torch.no_grad():
            for hook in [*self.on_gradient.get(index, {}).values()]:
                try:
                    result = hook(gradient)
                except MixedOperandsError:  # on every rank: it depends on types, and on what the ranks compare
                    whole = gradient.full_tensor()  # type: ignore[attr-defined]
                    result = hook(whole)
                    result = whole if result is None else result  # the hook may have changed it in place
                if result is not None:
                    gradient.copy_(result)  # which may be plain: the whole, on every rank

    def accumulated(self, index: int) -> None:
        """Call the hooks that follow the accumulation into ``.grad``."""
        self._arrivals.pop(index, None)
        self._accumulated.discard(index)
        with torch.no_grad():
            for hook in [*self.after_accumulation.get(index, {}).values()]:
                hook(self._sharded_params[index])

    def add_to_grad(self, index: int, reduced: torch.Tensor) -> None:
        """Accumulate a reduced gradient into ``.grad``, with all hooks."""
        sharded = self._sharded_params[index]
        if index in self._accumulated and self.on_gradient.get(index):
            reduced.add_(self._arrivals[index].gradient)
            self._put(index, reduced)
        else:
            self.replace(index, reduced)
            present = sharded.grad
            if present is None:
                sharded.grad = reduced
            elif is_sharded_like(present, sharded):
                present.add_(reduced)
            else:  # autograd produced it before a tied parameter was sharded again
                sharded.grad = like_sharded_param(present, sharded).add_(reduced)
        self.accumulated(index)

    def take_arrival(self, index: int, reduced: torch.Tensor, into: torch.Tensor) -> bool:
        """Add to ``reduced`` the gradient that autograd has produced for a sharded parameter in this backward, and set
        ``into`` to the gradient before it. Return whether there is one, and a hook that must see it."""
        if index not in self._accumulated or not self.on_gradient.get(index):
            return False
        gradient, before = self._arrivals[index]
        reduced.add_(gradient)
        if before is None:
            into.zero_()
        else:
            into.copy_(before)
        return True

    def _put(self, index: int, gradient: torch.Tensor) -> None:
        """Set ``.grad``, to which autograd has already added, to its earlier value plus ``gradient`` as the hooks
        return it."""
        self.replace(index, gradient)
        sharded, before = self._sharded_params[index], self._arrivals[index].before
        with torch.no_grad():
            if before is None:
                put_behind(sharded, gradient)
            else:
                present = behind(sharded.grad)
                assert present is not None
                present.copy_(before.add_(gradient))

    # ---- Gradients produced by autograd

    def listen_again(self) -> None:
        """Register autograd's hooks again."""
        # They are lost when the content of sharded parameters is exchanged.
        owner = self._owner()
        if owner is not None and owner.segments:
            self.listen_to_all()
        else:
            for index in self.on_gradient.keys() | self.after_accumulation.keys():
                self._listen(index)

    def listen_to_all(self) -> None:
        """Listen to all sharded parameters, once there are flat views."""
        # Gradients that autograd produces for sharded parameters belong to those too.
        for index in range(len(self._sharded_params)):
            self._listen(index)

    def _listen(self, index: int) -> None:
        """Register the autograd hooks that note a gradient of a sharded parameter."""
        reference = weakref.ref(self)

        def on_gradient(gradient: torch.Tensor) -> None:
            owner = reference()
            if owner is not None:
                owner._note(index, gradient)

        def after_accumulation(_sharded: torch.Tensor) -> None:
            owner = reference()
            if owner is not None:
                owner._note_accumulated(index)

        set_leaf_hooks(self._sharded_params[index], on_gradient, after_accumulation)

    def _note(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return  # the loss does not use this parameter
        if not self._accumulated:
            self._arrivals.clear()  # left by an autograd.grad(), which accumulates nothing
            owner = self._owner()
            if owner is not None and owner.segments:
                owner.follow_user()  # autograd must not add to a gradient that was dropped through a flat view
        before = behind(self._sharded_params[index].grad)
        if before is not None:
            before = before.clone() if self.on_gradient.get(index) else None
        self._arrivals[index] = _Arrival(gradient, before)

    def _note_accumulated(self, index: int) -> None:
        if index not in self._arrivals:
            return
        if not self._accumulated:
            queue_end_of_backward(_EndOfBackward(self))
        self._accumulated.add(index)

    def _call_for_the_rest(self) -> None:
        """Call the hooks of sharded parameters that have a gradient from autograd that no publication has shown to
        them."""
        accumulated = sorted(self._accumulated)
        for index in accumulated:
            if self.on_gradient.get(index):
                self._put(index, like_sharded_param(self._arrivals[index].gradient, self._sharded_params[index]))
            self.accumulated(index)
        self.forget_arrivals()
        owner = self._owner()
        if accumulated and owner is not None and owner.segments:
            self._recent = accumulated
            try:
                owner.follow_user()
            finally:
                self._recent = ()
            owner.show_to_segments(accumulated)

    def forget(self, is_published: bytes) -> None:
        """Forget the gradients that autograd has produced for these sharded parameters: they were published."""
        for index in [*self._accumulated]:
            if is_published[index]:
                del self._arrivals[index]
                self._accumulated.discard(index)

    def forget_arrivals(self) -> None:
        self._arrivals.clear()
        self._accumulated.clear()


class _EndOfBackward:
    """The callback at the end of a backward; autograd drops it uncalled when the backward raises."""

    def __init__(self, hooks: GradientHooks) -> None:
        self._hooks: GradientHooks | None = hooks

    def __call__(self) -> None:
        hooks, self._hooks = self._hooks, None
        assert hooks is not None
        owner = hooks._owner()
        if owner is not None:
            owner.after_publication(hooks._call_for_the_rest)

    def __del__(self) -> None:
        if self._hooks is not None:
            self._hooks.forget_arrivals()

"""The operation by which autograd differentiates every eager gather, to any order.

A gather turns sharded tensors into whole ones; its derivative shards and averages gradients, and the derivative of that
gathers again. A ``DifferentiableGather`` says what is gathered, how, and where gradients go: for a tensor that belongs
to no group (``dtensor``), for a copy that was gathered before (``ops/operands``), for a group in functional mode, or
for one parameter that a loss uses (both in ``runtime/differentiable_gather``).

Note [Averages]. Each rank differentiates its own loss, and sharded parameters receive the average over the ranks, as
always in data parallel training. A term of the loss that was computed from such an average is the same on every rank,
so its average over the ranks is the term itself. Therefore the derivative of the reduce-scatter is the plain
all-gather, without another division."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..._torch import in_forward_ad, in_transform

Tensors = Sequence["torch.Tensor | None"]
_REFUSED = (
    "a transform of torch.func (grad, vmap, jvp, ...) cannot gather or shard a DTensor that is not a parameter of a "
    "fully_shard group: call full_tensor() before the transform, and compute with the result"
)


def refuse_transforms() -> None:
    """Raise inside a transform of ``torch.func``, whose tensors hide that they are DTensors."""
    if in_transform():
        raise NotImplementedError(_REFUSED)


class DifferentiableGather(ABC):
    """One gather, with the data that its derivatives need."""

    takes_none = False  # a missing tensor arrives as ``None``, not as zeros

    @abstractmethod
    def all_gather(self, sharded: Any) -> Tensors:
        """Make whole tensors of sharded ones."""

    @abstractmethod
    def reduce_scatter(self, grads: Any) -> Tensors:
        """Make gradients of the sharded tensors of those of the whole ones."""

    def apply(self, sharded: Any) -> Any:
        """``all_gather``, for autograd to differentiate."""
        return _Operation.apply(self, True, *sharded)

    def deliver(self, grads: Any) -> Any:
        """Return gradients of sharded tensors to autograd: ``reduce_scatter``, for autograd to differentiate."""
        return _Operation.apply(self, False, *grads)

    def gather_again(self, grads: Any) -> Any:
        """The derivative of ``reduce_scatter``; see Note [Averages]."""
        return self.apply(grads)

    def refuse_batches(self) -> NotImplementedError:
        """The error for a ``vmap`` over sharded tensors or their gradients."""
        return NotImplementedError(_REFUSED)


class _Operation(torch.autograd.Function):
    """``all_gather`` (``gathers``) or ``reduce_scatter``."""

    # In the form that torch.func needs: with a separate setup_context(), a jvp(), and a vmap() (which raises).

    @staticmethod
    def forward(gather: DifferentiableGather, gathers: bool, *tensors: torch.Tensor | None) -> Any:
        return tuple(gather.all_gather(tensors) if gathers else gather.reduce_scatter(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.gather, ctx.gathers = inputs[:2]
        ctx.set_materialize_grads(not ctx.gather.takes_none)
        if ctx.gathers and not in_forward_ad():  # under forward AD, a tensor that needs no gradient may have a tangent
            ctx.mark_non_differentiable(*[item for item, needed in zip(output, ctx.needs_input_grad[2:]) if not needed])

    @staticmethod
    def jvp(ctx: Any, _gather: Any, _gathers: Any, *tangents: torch.Tensor | None) -> Any:
        return _Operation.apply(ctx.gather, ctx.gathers, *tangents)

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, gather: DifferentiableGather, *_: Any) -> Any:
        raise gather.refuse_batches()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.gathers:
            return None, None, *ctx.gather.deliver(grads)
        whole = ctx.gather.gather_again(grads)
        return None, None, *[item if needed else None for item, needed in zip(whole, ctx.needs_input_grad[2:])]

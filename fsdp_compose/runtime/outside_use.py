"""Uses of a sharded parameter outside its group's forward: ``full_tensor()`` or ``redistribute()`` of it, in a loss.

A fused or chunked cross entropy computes with the weight of the output head after the model's forward::

    loss = F.cross_entropy(F.linear(hidden, model.head.weight.full_tensor()), target)

What backward brings to the whole tensor is this rank's own gradient, like that of an unsharded parameter. In the
default mode it goes the same way: it waits on the flat parameter until the group is reduced, in the backward that is
running, with all other gradients of the group; or else at the end of backward, where the control exchange lets all
ranks know that some rank has one. So no rank waits for another one whose loss does not use the weight. In functional
mode, where gradients reach sharded parameters through autograd, it is a reduce-scatter that autograd can differentiate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..flat import FlatParamHandle, handle_of
from ..group import ALL_GATHER, Root, _FSDPState, state_of
from ..ragged import RaggedDTensor, gather_local_shards, gather_parameter, scatter_average
from .backward import begin_backward
from .differentiable_gather import Gather, refuse_accumulated
from .optional import pass_point_before_gather


def _place_of(sharded: torch.Tensor) -> tuple[FlatParamHandle, int, _FSDPState, Root] | None:
    """Where a sharded parameter is; ``None`` if it is not one, or before the first forward."""
    place = handle_of(sharded)
    if place is None:
        return None
    handle, index = place
    state = state_of(handle)
    if state is None or state.root is None:
        return None
    return handle, index, state, state.root


def _gather(sharded: RaggedDTensor) -> torch.Tensor | None:
    place = _place_of(sharded)
    if place is None:
        return None
    handle, index, state, root = place
    if root.rounds is not None:
        pass_point_before_gather(root, state)
    root.order.trace.append(state.code | ALL_GATHER)
    root.communicator.announce(handle, "all-gather of a parameter")
    whole: torch.Tensor
    if state.options.is_functional or state.past.was_functional:
        refuse_accumulated(state)
        whole = _FunctionalWhole.apply(Gather(root, state, [handle]), index, sharded)
    else:
        whole = _Whole.apply(sharded, state.shard_versions())
    return whole


gather_parameter.append(_gather)

_is_through_autograd = False


@contextlib.contextmanager
def gradients_through_autograd() -> Iterator[None]:
    """Within this context, that of an ``autograd.grad()``, gradients are averaged at once and returned to autograd."""
    global _is_through_autograd
    before, _is_through_autograd = _is_through_autograd, True
    try:
        yield
    finally:
        _is_through_autograd = before


class _Whole(torch.autograd.Function):
    """The whole of a sharded parameter, in the default mode."""

    @staticmethod
    def forward(ctx: Any, sharded: RaggedDTensor, versions: Sequence[int]) -> torch.Tensor:
        ctx.sharded, ctx.versions = sharded, versions
        return gather_local_shards(sharded)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        place = _place_of(ctx.sharded)
        if place is None or _is_through_autograd:  # the model is gone, or this is autograd.grad()
            return scatter_average(grad, ctx.sharded), None
        handle, index, state, root = place
        backward = root.backward or begin_backward(root)
        state.check_versions(ctx.versions)
        if ctx.sharded.requires_grad:  # else it was frozen after that forward
            handle.contributions.add_outside(index, grad)
            backward.note_outside_grads()
        return None, None


class _FunctionalWhole(torch.autograd.Function):
    """The whole of a sharded parameter, or of something that is sharded like it, in functional mode."""

    @staticmethod
    def forward(ctx: Any, gather: Gather, index: int, part: RaggedDTensor) -> torch.Tensor:
        ctx.gather, ctx.index = gather, index
        return gather_local_shards(part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, Any]:
        return None, None, _FunctionalReduce.apply(ctx.gather, ctx.index, grad)


class _FunctionalReduce(torch.autograd.Function):
    """The gradient of the whole -> the average over the ranks, sharded. Its derivative: see Note [Averages]."""

    @staticmethod
    def forward(ctx: Any, gather: Gather, index: int, grad: torch.Tensor) -> Any:
        ctx.gather, ctx.index = gather, index
        grads: list[torch.Tensor | None] = [None] * len(gather.sharded_params)
        grads[index] = grad
        return gather.reduce_scatter(grads)[index]

    @staticmethod
    def backward(ctx: Any, grad: RaggedDTensor) -> tuple[None, None, Any]:
        return None, None, _FunctionalWhole.apply(ctx.gather, ctx.index, grad)

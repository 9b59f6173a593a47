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
from ..group import ALL_GATHER, RootContext, _FSDPState
from ..ragged import RaggedDTensor, gather_parameter, gather_runs, scatter_average
from .backward import begin_backward
from .functional import Gather, refuse_accumulated


def _place_of(face: torch.Tensor) -> tuple[FlatParamHandle, int, _FSDPState, RootContext] | None:
    """Where a sharded parameter is; ``None`` if it is not one, or before the first forward."""
    place = handle_of(face)
    if place is None or place[0].group is None:
        return None
    handle, index = place
    state = handle.group()
    if state is None or state.root is None:
        return None
    return handle, index, state, state.root


def _gather(face: RaggedDTensor) -> torch.Tensor | None:
    place = _place_of(face)
    if place is None:
        return None
    handle, index, state, root = place
    root.trace.append(state.code | ALL_GATHER)
    root.communicator.announce(handle, "all-gather of a parameter")
    whole: torch.Tensor
    if state.is_functional or state.was_functional:
        refuse_accumulated(state)
        whole = _FunctionalWhole.apply(Gather(root, state, [handle]), index, face)
    else:
        whole = _Whole.apply(face, state.shard_versions())
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
    def forward(ctx: Any, face: RaggedDTensor, versions: Sequence[int]) -> torch.Tensor:
        ctx.face, ctx.versions = face, versions
        return gather_runs(face)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        place = _place_of(ctx.face)
        if place is None or _is_through_autograd:  # the model is gone, or this is autograd.grad()
            return scatter_average(grad, ctx.face), None
        handle, index, state, root = place
        if not root.is_in_backward:
            begin_backward(root)
        state.check_versions(ctx.versions)
        if ctx.face.requires_grad:  # else it was frozen after that forward
            handle.add_outside(index, grad)
            root.has_outside_grads = True
        return None, None


class _FunctionalWhole(torch.autograd.Function):
    """The whole of a sharded parameter, or of something that is sharded like it, in functional mode."""

    @staticmethod
    def forward(ctx: Any, gather: Gather, index: int, part: RaggedDTensor) -> torch.Tensor:
        ctx.gather, ctx.index = gather, index
        return gather_runs(part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, Any]:
        return None, None, _FunctionalReduce.apply(ctx.gather, ctx.index, grad)


class _FunctionalReduce(torch.autograd.Function):
    """The gradient of the whole -> the average over the ranks, sharded. Its derivative: see Note [Averages]."""

    @staticmethod
    def forward(ctx: Any, gather: Gather, index: int, grad: torch.Tensor) -> Any:
        ctx.gather, ctx.index = gather, index
        grads: list[torch.Tensor | None] = [None] * len(gather.faces)
        grads[index] = grad
        return gather.reduce_scatter(grads)[index]

    @staticmethod
    def backward(ctx: Any, grad: RaggedDTensor) -> tuple[None, None, Any]:
        return None, None, _FunctionalWhole.apply(ctx.gather, ctx.index, grad)

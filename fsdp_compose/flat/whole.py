"""The reduction of a flat gradient that every rank holds whole: nothing is scattered, all is averaged, in one stage.

The gradients go straight to where the average belongs, and are averaged there, unless there is a gradient already, or
they are reduced in another dtype. Large ones go there while backward runs, each as soon as it has come (``place``):
the caches still have it, and its memory serves the next one. The rest goes there when all have come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._torch import foreach_mul_
from .flat_param import FlatParamHandle
from .gradient import ADDED, FRESH, WriteMode
from .reduction import AVERAGE, ReplicaAverage, fill

LARGE_BYTES = 1 << 17  # of a gradient; below, a call by itself costs more than it saves


def place(handle: FlatParamHandle, index: int) -> None:
    """Take the gradient that autograd has just left on an unsharded parameter to where it is averaged, if that is
    possible. The handle is reduced later in this backward."""
    param, contributions = handle.unsharded.params[index], handle.contributions
    if contributions.awaits_publication or not _goes_direct(handle, _prepare(handle)):
        return
    grad = param.grad
    if grad is not None and grad.layout == torch.strided:
        _place(handle, index, grad)
        param.grad = None


def _place(handle: FlatParamHandle, index: int, grad: torch.Tensor) -> None:
    view, share = handle.gradient.buffer.locals[index], 1 / handle.mesh.data_world_size
    placed = handle.contributions.placed
    with torch.no_grad():
        if index in placed:
            view.add_(grad, alpha=share)
        else:
            torch.mul(grad, share, out=view)
            placed.add(index)


def _prepare(handle: FlatParamHandle) -> WriteMode:
    """How the gradient is written that is about to be reduced."""
    gradient = handle.gradient
    if gradient.target is not None and not handle.contributions.awaits_publication:
        return gradient.write_mode  # some was placed there already
    return gradient.prepare()


def _goes_direct(handle: FlatParamHandle, mode: WriteMode) -> bool:
    """Whether gradients go to where the average belongs, each divided by the number of ranks."""
    contributions, dtype = handle.contributions, handle.gradient.buffer.dtype
    return (
        mode is FRESH
        and contributions.accumulation is None
        and contributions.options is AVERAGE
        and contributions.dtype == dtype
        and dtype != torch.float16
        and not handle.home.has_host_gradients
    )


def take_whole(handle: FlatParamHandle, grads: list[torch.Tensor], missing: Sequence[int]) -> ReplicaAverage:
    """The average, not begun, of gradients that were taken from the unsharded parameters (``None`` for those that are
    ``missing``), of what was placed, and of what was accumulated before."""
    contributions, gradient, options = handle.contributions, handle.gradient, handle.contributions.options
    mode = _prepare(handle)
    target, dtype, is_added = gradient.target, contributions.dtype, mode is ADDED
    assert target is not None
    goes_direct = _goes_direct(handle, mode)
    contributions.await_publication()
    if goes_direct:
        _fill(handle, grads, missing)
        return ReplicaAverage(target, target, False, False, 1, None)
    accumulation = contributions.take_accumulation()
    if accumulation is not None and accumulation.flat is not None:
        accumulation.add(grads)
        flat = accumulation.flat
    else:
        flat = torch.zeros(target.numel(), dtype=dtype, device=handle.home.compute_device(handle.shard))
        fill(handle.full_views_of(flat), grads, missing)
    mesh = handle.mesh
    before, is_average, after = options.factors(mesh.data_world_size, mesh.missing_factor, dtype == torch.float16)
    if before != 1:
        flat.div_(before)
    return ReplicaAverage(flat, handle.home.landing(target), is_added, is_average, after, options.hook)


def _fill(handle: FlatParamHandle, grads: list[torch.Tensor], missing: Sequence[int]) -> None:
    """Take to where the average belongs what was not placed there."""
    buffer, placed = handle.gradient.buffer, handle.contributions.placed
    for i in placed:
        if grads[i] is not None:  # it has come after that
            _place(handle, i, grads[i])
    handle.contributions.take_placed()
    rest = [i for i in range(len(grads)) if i not in placed]
    views = [buffer.locals[i] for i in rest]
    fill(views, [grads[i] for i in rest], [j for j, i in enumerate(rest) if grads[i] is None] if missing else ())
    if views:
        with torch.no_grad():
            foreach_mul_(views, 1 / handle.mesh.data_world_size)
    buffer.zero_gaps()

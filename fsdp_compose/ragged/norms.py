"""Norms and extremes of tensors that lie on several ranks: a part on each rank, one collective, the whole."""

from __future__ import annotations

from math import inf, nan

import torch
import torch.distributed as dist

from ..comm import device_for, noticing_loss


def accurate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is summed in fp32: partial results are rounded once, at the end."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def partial_norm(local: torch.Tensor, order: float) -> torch.Tensor:
    """The part of a norm that adds up over the ranks: the sum of powers; for orders inf and -inf the largest
    and the smallest magnitude."""
    if not local.numel():
        return local.abs().new_full((), inf if order == -inf else 0.0)
    if order in (inf, -inf):
        return torch.linalg.vector_norm(local, order)
    if order == 0:
        return torch.linalg.vector_norm(local, 0)
    return torch.linalg.vector_norm(local, order).pow(order)


def combine_norms(partial: torch.Tensor, order: float, group: dist.ProcessGroup) -> None:
    """All-reduce, in place and with one collective, what ``partial_norm`` gave on each rank."""
    moved = partial.to(device_for(group, partial.device))
    if order in (inf, -inf):
        combine_extremes(moved, order == inf, group)
    else:
        with noticing_loss(group, "the sum of a norm over the ranks"):
            dist.all_reduce(moved, dist.ReduceOp.SUM, group=group)
    if moved is not partial:
        partial.copy_(moved)


def combine_extremes(values: torch.Tensor, is_max: bool, group: dist.ProcessGroup) -> None:
    """The largest or smallest of each rank's values, in place. NaN on any rank gives NaN on all: backends differ in
    what their MAX makes of one, so it travels next to them."""
    if not values.dtype.is_floating_point:
        dist.all_reduce(values, dist.ReduceOp.MAX if is_max else dist.ReduceOp.MIN, group=group)
        return
    is_nan = values.isnan()
    signed = (values if is_max else -values).masked_fill(is_nan, -inf)
    both = torch.stack([signed, is_nan.to(values.dtype)])
    with noticing_loss(group, "the extreme of a tensor over the ranks"):
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    values.copy_(torch.where(both[1] > 0, torch.full_like(values, nan), both[0] if is_max else -both[0]))


def finish_norm(combined: torch.Tensor, order: float) -> torch.Tensor:
    return combined if order in (0, inf, -inf) else combined.pow(1.0 / order)

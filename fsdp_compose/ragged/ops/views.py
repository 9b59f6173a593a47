"""Views: ragged ones of contiguous ranges, gathered ones of everything else."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ..._torch import local_tensor, share_versions
from ..placement import RaggedShard
from ..spec import RaggedSpec
from ..tensor import RaggedDTensor, inference_mode_of, make_view
from .gathered_view import GatheredView
from .gathering import gathered_with_warning
from .operands import replicated
from .schema import Args, Kwargs, map_tensors

aten = torch.ops.aten


def alias(func: Any, args: Args, kwargs: Kwargs) -> RaggedDTensor:
    tensor: RaggedDTensor = args[0]
    with inference_mode_of(tensor), share_versions():
        return RaggedDTensor(tensor._local_tensor.view(tensor._local_tensor.shape), tensor._spec)


def view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Reshapes and slices. What is a contiguous range of the flattened tensor is one on every rank too."""
    tensor: RaggedDTensor = args[0]
    spec = tensor._spec
    if func is aten.as_strided.default and tensor.is_part and (len(args) > 3 or "storage_offset" in kwargs):
        raise NotImplementedError(f"{func} with a storage_offset, of a slice of a sharded tensor, is not supported")
    # On meta, where indices count elements, the same view says which elements it takes.
    like = torch.empty(spec.shape, dtype=torch.uint8, device="meta")
    result = func(like, *args[1:], **kwargs)
    if isinstance(result, torch.Tensor):
        view = _range_view(tensor, result)
        return gathered_view(func, args, kwargs) if view is None else view
    views = [_range_view(tensor, item) for item in result]
    return gathered_view(func, args, kwargs) if any(view is None for view in views) else type(result)(views)


def _range_view(tensor: RaggedDTensor, meta: torch.Tensor) -> RaggedDTensor | None:
    """The elements that ``meta``, a view of a tensor on meta of one-byte elements, takes; None if they are not a
    contiguous range."""
    spec, shape = tensor._spec, tuple(meta.shape)
    local = tensor._local_tensor
    if shape == tuple(spec.shape) and meta.is_contiguous():
        with inference_mode_of(tensor), share_versions():
            return RaggedDTensor(local.view(local.shape), spec)
    if not spec.is_only_ragged or not meta.is_contiguous():
        return None
    start = int(meta.storage_offset())
    stop = start + meta.numel()
    whole = tuple(spec.shape)
    counts = spec.ragged.flattened(whole).counts.within(start, stop)
    placement = RaggedShard(counts, flat=True)
    row = prod(shape[1:])
    if not spec.ragged.flat and shape and shape[1:] == whole[1:] and row:
        placement = RaggedShard(counts.divided_by(row))
    placements = tuple(placement if isinstance(item, RaggedShard) else item for item in spec.placements)
    view_spec = RaggedSpec.make(spec.mesh, placements, shape, spec.dtype)
    own_start, own_stop = spec.element_range
    begin = min(max(start, own_start), own_stop) - own_start
    with inference_mode_of(tensor), share_versions():
        mine = local.view(-1)[begin : begin + counts[spec.rank]].view(view_spec.local_shape)
        return make_view(mine, view_spec, True)


def as_real(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A complex tensor as a real one with a last dimension of two, or back: every rank has the same numbers as before.
    (What ``torch.optim`` does to complex parameters.)"""
    tensor: RaggedDTensor = args[0]
    spec, local = tensor._spec, tensor._local_tensor
    to_real = func is aten.view_as_real.default
    if not to_real and tensor.is_part:  # numbers that begin at odd places cannot be seen as complex ones
        return gathered_view(func, args, kwargs)
    result = func(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
    ragged = spec.ragged
    if ragged.flat or not spec.shape or not result.shape:  # rows stay rows
        if not to_real and any(count % 2 for count, _ in ragged.counts.pieces):
            return gathered_view(func, args, kwargs)
        ragged = RaggedShard(ragged.counts.times(2) if to_real else ragged.counts.divided_by(2), flat=True)
    placements = tuple(ragged if isinstance(item, RaggedShard) else item for item in spec.placements)
    view_spec = RaggedSpec.make(spec.mesh, placements, tuple(result.shape), result.dtype)
    with inference_mode_of(tensor), share_versions():
        numbers = func(local if to_real else local.view(-1, 2)).view(view_spec.local_shape)
        return make_view(numbers, view_spec, tensor.is_part)


def gathered_view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A view that is not one of a range on every rank: of a gathered copy."""
    tensor: RaggedDTensor = args[0]
    plain = gathered_with_warning(func)(tensor)
    whole = GatheredView(plain, tensor, local_tensor(plain), [])
    whole.note_version()
    views = func(local_tensor(plain), *args[1:], **kwargs)
    return whole.view_as_well(map_tensors(torch.Tensor, lambda view: replicated(view, tensor._spec), views))

"""Element-wise operations, copies and conversions: done on the local shards."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..edits import note_write_of_all_ranks
from ..tensor import RaggedDTensor, shard_whole
from .gathering import gather_all, write_elsewhere
from .operands import Larger, as_scalar, from_scalar, operand, scalar_operand, touch, wrap_local_shard
from .schema import Args, Kwargs, written


def pointwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if kwargs.get("memory_format") is not None:
        kwargs = {**kwargs, "memory_format": torch.contiguous_format}  # local shards have no other
    targets = written(func, args, kwargs)
    if targets:
        model = targets[0]
        if not isinstance(model, RaggedDTensor):
            return write_elsewhere(func, model, args, kwargs)
    else:
        operands = [item for item in (*args, *kwargs.values()) if isinstance(item, RaggedDTensor)]
        model = operands[0] if len(operands) == 1 else max(operands, key=_size)
    spec = model._spec
    if spec.is_scalar:
        return _pointwise_scalar(func, args, kwargs, model, is_written=bool(targets))
    if kwargs.get("out") is not None:
        shapes = [item.shape for item in args if isinstance(item, torch.Tensor)]
        if torch.broadcast_shapes(*shapes) != spec.shape:
            raise RuntimeError(
                f"{func}: the result does not have the shape of the sharded tensor that it is written to, "
                f"{tuple(model.shape)}"
            )
    read = None if targets else model
    try:
        local_args = [operand(func, item, spec, read) if isinstance(item, torch.Tensor) else item for item in args]
        local_kwargs = {
            key: operand(func, item, spec, read) if isinstance(item, torch.Tensor) else item
            for key, item in kwargs.items()
        }
    except Larger:
        if targets:
            raise RuntimeError(
                f"{func}: the result does not have the shape of the sharded tensor that it is written to, "
                f"{tuple(model.shape)}"
            ) from None
        return gather_all(func, args, kwargs)
    result = func(*local_args, **local_kwargs)
    if targets:
        note_write_of_all_ranks(model._local_tensor)  # inside a dispatch nothing else does
        return model
    if isinstance(result, torch.Tensor):
        return wrap_local_shard(result, spec)
    return type(result)([wrap_local_shard(item, spec) for item in result])


def copy_into(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """As ``pointwise``, also from a plain tensor: the whole values, the same on every rank, of which each takes its
    local shard. (One that autograd must follow would be mixed with a sharded one.)"""
    target, source = args[:2]
    is_recorded = source.requires_grad and torch.is_grad_enabled()
    if isinstance(target, RaggedDTensor) and not isinstance(source, DTensor) and source.dim() and not is_recorded:
        if torch.broadcast_shapes(source.shape, target.shape) != target.shape:
            raise RuntimeError(
                f"{func}: a tensor of shape {tuple(source.shape)} cannot be copied into a sharded one of shape "
                f"{tuple(target.shape)}: give the whole values, the same on every rank"
            )
        local = shard_whole(source.expand(target.shape), target._spec)
        args = (target, wrap_local_shard(local, target._spec), *args[2:])
    if isinstance(target, RaggedDTensor) and target._spec.is_scalar and type(source) is RaggedDTensor:
        if source._spec.is_sharded_like(target._spec):
            # Not through 0-dim views: torch.compile admits no write to a view at the end of its graphs (torch 2.13).
            func(target._local_tensor, source._local_tensor, *args[2:], **kwargs)
            note_write_of_all_ranks(target._local_tensor)
            return target
    return pointwise(func, args, kwargs)


def divide(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """As ``pointwise``, for what raises on a CPU where an integer is divided by zero: on every rank, before anything is
    written, not only on those that hold such an element."""
    dividend, divisor = args[:2]
    is_integer = all(
        not (item.is_floating_point() or item.is_complex()) if isinstance(item, torch.Tensor) else isinstance(item, int)
        for item in (dividend, divisor)
    )
    is_true_division = "div" in func._schema.name and "floor" not in func._schema.name
    if is_integer and not (is_true_division and kwargs.get("rounding_mode") is None):
        sharded = dividend if isinstance(dividend, RaggedDTensor) else divisor
        is_zero = divisor == 0
        if isinstance(is_zero, torch.Tensor):
            is_zero = bool(scalar_operand(is_zero.any()))
        if is_zero and sharded.device.type == "cpu" and math.prod(sharded.shape):
            raise RuntimeError(f"{func} of a sharded tensor of shape {tuple(sharded.shape)}: ZeroDivisionError")
    return pointwise(func, args, kwargs)


def _pointwise_scalar(func: Any, args: Args, kwargs: Kwargs, model: RaggedDTensor, is_written: bool) -> Any:
    """Of 0-dim tensors. Dtype promotion depends on being 0-dim, so that every rank computes with 0-dim tensors; those
    of the ranks that hold nothing have any value."""

    def operand(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if type(item) is RaggedDTensor and item._spec.is_sharded_like(model._spec):
            return as_scalar(item._local_tensor)
        if item.dim() > 0:
            raise Larger
        return scalar_operand(item)

    try:
        result = func(*map(operand, args), **{key: operand(item) for key, item in kwargs.items()})
    except Larger:
        if is_written:
            raise RuntimeError(f"{func}: the result is not 0-dim, as the sharded tensor it is written to is") from None
        return gather_all(func, args, kwargs)
    if is_written:
        touch(model._local_tensor)
        note_write_of_all_ranks(model._local_tensor)
        return model
    if isinstance(result, torch.Tensor):
        return from_scalar(result, model._spec)
    return type(result)([from_scalar(item, model._spec) for item in result])


def _size(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.dim(), tensor.numel()

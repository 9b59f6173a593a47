"""Operands of an operation as local tensors of one layout, and its local result as a tensor of that layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ..._torch import DTensorSpec, TensorMeta, local_tensor, make_dtensor
from ..owned import describe_owner
from ..spec import RaggedSpec
from ..tensor import RaggedDTensor, distribute_ragged, gathered
from .gathered_view import GatheredView


class Larger(Exception):
    """An operand is not broadcast to the layout of the result: the result is larger than any ragged operand."""


def operand(func: Any, tensor: torch.Tensor, spec: RaggedSpec, read: RaggedDTensor | None = None) -> torch.Tensor:
    """The local elements of an operand of an operation whose result is sharded as ``spec`` says. ``read``: a sharded
    one that is only read, for errors."""
    if type(tensor) is RaggedDTensor and tensor._spec.is_sharded_like(spec):
        return tensor._local_tensor
    if tensor.dim() == 0:
        return scalar_operand(tensor)
    tensor = tensor.plain() if isinstance(tensor, GatheredView) else tensor
    if not isinstance(tensor, DTensor):
        raise RuntimeError(
            f"{func}: got mixed a torch.Tensor of shape {tuple(tensor.shape)} and, of shape {tuple(spec.shape)}, "
            f"{describe_owner(read)}"
        )
    if tensor.shape != spec.shape:
        if torch.broadcast_shapes(tensor.shape, spec.shape) != spec.shape:
            raise Larger
        tensor = plain_dtensor(tensor).expand(spec.shape)
    return local_tensor(distribute_ragged(tensor, spec.mesh, spec.placements))


def scalar_operand(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim operand as a plain tensor, complete on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without a layout of ours."""
    if isinstance(tensor, RaggedDTensor):
        return gathered(tensor)
    return tensor.plain() if isinstance(tensor, GatheredView) else tensor


def as_scalar(local: torch.Tensor) -> torch.Tensor:
    return local.view(()) if local.numel() else local.new_ones(())


def touch(local: torch.Tensor) -> None:
    """All ranks have written to a 0-dim tensor, of which this one may have nothing: then what is traced must see that
    it is written to by something that does nothing, as other ranks' graphs see it."""
    if not local.numel():
        local.zero_()


def wrap_local_shard(local: torch.Tensor, spec: RaggedSpec) -> RaggedDTensor:
    return RaggedDTensor(local, spec if local.dtype is spec.dtype else spec.with_dtype(local.dtype))


def from_scalar(result: torch.Tensor, spec: RaggedSpec) -> RaggedDTensor:
    return wrap_local_shard(result.reshape(1)[: spec.local_shape[0]].clone(), spec)


def replicated(result: torch.Tensor, spec: RaggedSpec) -> DTensor:
    """A DTensor of what every rank has."""
    meta = TensorMeta(result.shape, result.stride(), result.dtype)
    plain = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, meta)
    tensor: DTensor = make_dtensor(DTensor, result, plain)
    return tensor

"""``RaggedShard`` placements given to torch's own functions: ``DTensor.from_local``, ``distribute_tensor``, and the
setters of ``torch.distributed.checkpoint.state_dict`` give a ``RaggedDTensor``.

Stock DTensor refuses such a placement, or takes it for an even ``Shard``; code that is given ``parameter.placements``
must get what these say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from .._torch import admit_placements
from .owned import OWNER_ATTRIBUTE
from .placement import RaggedShard
from .spec import RaggedSpec
from .tensor import RaggedDTensor, distribute_ragged, shard_whole


def _is_ours(placements: Any) -> bool:
    return any(map(isinstance, placements, repeat(RaggedShard)))  # every from_local() of torch's asks


def _from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None
) -> torch.Tensor:
    """``DTensor.from_local``, below autograd."""
    spec = RaggedSpec.make(mesh, placements, _whole_shape(local, placements) if shape is None else shape, local.dtype)
    if tuple(local.shape) != spec.local_shape:
        raise ValueError(
            f"DTensor.from_local(): got a local tensor of shape {tuple(local.shape)}; a tensor of shape "
            f"{tuple(spec.shape)} placed {list(placements)} has a local tensor of shape {spec.local_shape} on rank "
            f"{spec.rank}"
        )
    # Contiguous, as everything that a RaggedDTensor holds; a fresh tensor, as autograd wants it.
    local = local.contiguous()
    return RaggedDTensor(local.view_as(local), spec, requires_grad=local.requires_grad)


def _whole_shape(local: torch.Tensor, placements: Sequence[Placement]) -> Sequence[int]:
    """The shape of the whole tensor: what rows say, or that of the tensor whose placements these are.

    Raises:
        ValueError: neither is known.
    """
    ragged = next(item for item in placements if isinstance(item, RaggedShard))
    if not ragged.flat and all(item is ragged or item.is_replicate() for item in placements):
        return (ragged.num_placed, *local.shape[1:])
    if ragged.of_shape is None:
        raise ValueError(
            f"DTensor.from_local(): {list(placements)} do not tell the shape of the whole tensor: give shape= and "
            "stride=, those of the whole tensor"
        )
    return ragged.of_shape


def _as_placed(grad: DTensor, placements: Sequence[Placement]) -> DTensor:
    if grad.placements == tuple(placements):
        return grad
    return distribute_ragged(grad, placements=placements)


def _distribute(
    tensor: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """``distribute_tensor``."""
    if isinstance(tensor, RaggedDTensor) and not _is_ours(placements):
        _, fqn = tensor.__dict__.get(OWNER_ATTRIBUTE, ("", ""))
        raise ValueError(
            f"distribute_tensor(): {f'the parameter {fqn}' if fqn else 'the tensor'} is sharded already, placed "
            f"{list(tensor.placements)}, and cannot be placed {list(placements)} as well: parallelize_module() comes "
            "before fully_shard(), and redistribute() gives a sharded tensor another layout"
        )
    if not tensor.is_leaf:
        raise RuntimeError("distribute_tensor(): expected a leaf tensor, got the result of an operation")
    if isinstance(tensor, DTensor):
        if tensor.placements != tuple(placements) or (mesh is not None and tensor.device_mesh != mesh):
            raise ValueError(
                f"distribute_tensor(): got a DTensor placed {list(tensor.placements)}: use redistribute(), or "
                f"distribute_ragged(), to place it {list(placements)}"
            )
        return tensor
    if mesh is not None and tensor.device.type != mesh.device_type and not tensor.is_meta:
        tensor = tensor.detach().to(mesh.device_type).requires_grad_(tensor.requires_grad)
    made = distribute_ragged(tensor, mesh, placements, src_data_rank=src_data_rank)
    made.requires_grad_(tensor.requires_grad)
    return made


def _fill(sharded: RaggedDTensor, whole: torch.Tensor) -> RaggedDTensor:
    """A whole tensor in the layout of a sharded one: in its memory, or in new memory if it is on the meta device."""
    spec = sharded._spec
    if tuple(whole.shape) != tuple(spec.shape):
        raise ValueError(
            f"a tensor of shape {tuple(whole.shape)} was given for a sharded one of shape {tuple(spec.shape)}"
        )
    local = shard_whole(whole.detach(), spec)
    if sharded.is_meta:
        return RaggedDTensor(local, spec.with_dtype(whole.dtype))
    assert local.numel() == prod(spec.local_shape)
    sharded.to_local().copy_(local)
    return sharded


admit_placements(_is_ours, _from_local, _as_placed, _distribute, _fill)

"""New tensors made like sharded ones, and random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from ..._torch import DTensorSpec, TensorMeta, make_dtensor
from ..edits import note_write_of_all_ranks
from ..spec import RaggedSpec
from ..tensor import RaggedDTensor, shard_whole
from .gathering import first_ragged, gather_all
from .operands import wrap_local_shard
from .schema import Args, Kwargs


def new(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``new_empty(size)`` and the like: sharded like ``self`` if it has its shape, else replicated."""
    tensor, size, *rest = args
    spec = tensor._spec
    if tuple(size) == tuple(spec.shape):
        return wrap_local_shard(func(tensor._local_tensor, spec.local_shape, *rest, **kwargs), spec)
    return _replicated(func(tensor._local_tensor, size, *rest, **kwargs), spec)


def new_strided(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``new_empty_strided(size, stride)``: a local shard has no memory format. Autograd makes a leaf's gradient so when
    something else holds the one that has arrived."""
    tensor, size, stride = args
    spec = tensor._spec
    if tuple(size) == tuple(spec.shape):
        return wrap_local_shard(tensor._local_tensor.new_empty(spec.local_shape, **kwargs), spec)
    return _replicated(func(tensor._local_tensor, size, stride, **kwargs), spec)


def _replicated(local: torch.Tensor, spec: RaggedSpec) -> DTensor:
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    tensor: DTensor = make_dtensor(DTensor, local, DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, meta))
    return tensor


def random(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Draws the whole tensor and keeps this rank's local shard: as on one device, if the ranks' generators agree. What
    is not of the shape of a sharded tensor is drawn on every rank."""
    name = func._schema.name
    tensor = args[0]
    is_in_place = name.endswith("_")
    if not isinstance(tensor, RaggedDTensor) or not (is_in_place or name.endswith("_like")):
        spec = first_ragged((*args, *kwargs.values()))._spec
        _check_generators(func, spec, range(spec.mesh.ndim), kwargs.get("generator"))
        return gather_all(func, args, kwargs)
    if any(isinstance(item, torch.Tensor) for item in args[1:]):
        raise RuntimeError(f"{func} with tensors as arguments is not supported on a sharded tensor")
    spec, local = tensor._spec, tensor._local_tensor
    replicated = [i for i, item in enumerate(spec.placements) if item.is_replicate()]
    _check_generators(func, spec, replicated, kwargs.get("generator"))
    whole = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    drawn = func(whole, *args[1:], **kwargs)
    drawn_shard = shard_whole(drawn, spec)
    if is_in_place:
        local.copy_(drawn_shard)
        note_write_of_all_ranks(local)
        return tensor
    return wrap_local_shard(drawn_shard, spec)


def _check_generators(func: Any, spec: RaggedSpec, dims: Iterable[int], generator: Any) -> None:
    """Ranks along ``dims`` of the mesh must draw the same numbers."""
    dims = [dim for dim in dims if spec.mesh.size(dim) > 1]
    device = torch.device(spec.mesh.device_type)
    if not dims or device.type == "meta":
        return
    if generator is not None:
        state = generator.get_state()
    else:
        state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state()
    own = zlib.crc32(state.cpu().numpy().tobytes())
    bounds = torch.tensor([own, -own], dtype=torch.float64, device=device)
    for dim in dims:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=spec.mesh.get_group(dim))
    if bounds[0] != -bounds[1]:
        raise RuntimeError(
            f"{func} on a sharded tensor of shape {tuple(spec.shape)}: the random generators of the ranks differ, so "
            "replicas of the result would too. Call torch.manual_seed() with the same seed on all ranks first"
        )


def make_out(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``torch.eye(out=p)`` and the like: the whole is made, and sharded."""
    target = kwargs["out"]
    whole = torch.empty(target.shape, dtype=target.dtype, device=target._local_tensor.device)
    func(*args, **{**kwargs, "out": whole})
    target._local_tensor.copy_(shard_whole(whole, target._spec))
    note_write_of_all_ranks(target._local_tensor)
    return target

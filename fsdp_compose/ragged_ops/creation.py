"""New tensors made like sharded ones, and random numbers."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate

from .._torch import DTensorSpec, TensorMeta, make_dtensor
from ..ragged import RaggedDTensor, cut_whole
from ..ragged_spec import RaggedSpec
from .gathering import gather_all
from .operands import wrap_run
from .schema import Args, Kwargs


def new(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``new_empty(size)`` and the like: cut like ``self`` if it has its shape, else replicated."""
    tensor, size, *rest = args
    spec = tensor._spec
    if tuple(size) == tuple(spec.shape):
        return wrap_run(func(tensor._local_tensor, spec.local_shape, *rest, **kwargs), spec)
    local = func(tensor._local_tensor, size, *rest, **kwargs)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return make_dtensor(DTensor, local, DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, meta))


def random(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Draws the whole tensor and keeps this rank's run: as on one device, if the ranks' generators agree."""
    name = func._schema.name
    tensor = args[0]
    is_in_place = name.endswith("_")
    if not isinstance(tensor, RaggedDTensor) or not (is_in_place or name.endswith("_like")):
        return gather_all(func, args, kwargs)
    if any(isinstance(item, torch.Tensor) for item in args[1:]):
        raise RuntimeError(f"{func} with tensors as arguments is not supported on a sharded tensor")
    spec, local = tensor._spec, tensor._local_tensor
    _check_generators(func, spec, local.device, kwargs.get("generator"))
    whole = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    drawn = func(whole, *args[1:], **kwargs)
    run = cut_whole(drawn, spec)
    if is_in_place:
        local.copy_(run)
        increment_version(local)
        return tensor
    return wrap_run(run, spec)


def _check_generators(func: Any, spec: RaggedSpec, device: torch.device, generator: Any) -> None:
    """Replicas must draw the same numbers."""
    replicated = [i for i, item in enumerate(spec.placements) if item.is_replicate() and spec.mesh.size(i) > 1]
    if not replicated or device.type == "meta":
        return
    if generator is not None:
        state = generator.get_state()
    else:
        state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state()
    own = zlib.crc32(state.cpu().numpy().tobytes())
    bounds = torch.tensor([own, -own], dtype=torch.float64, device=device)
    for dim in replicated:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=spec.mesh.get_group(dim))
    if bounds[0] != -bounds[1]:
        raise RuntimeError(
            f"{func} on a replicated, sharded tensor of shape {tuple(spec.shape)}: the random generators of the ranks "
            "differ, so its replicas would too. Call torch.manual_seed() with the same seed on all ranks first"
        )


def make_out(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``torch.eye(out=p)`` and the like: the whole is made, and cut."""
    target = kwargs["out"]
    whole = torch.empty(target.shape, dtype=target.dtype, device=target._local_tensor.device)
    func(*args, **{**kwargs, "out": whole})
    target._local_tensor.copy_(cut_whole(whole, target._spec))
    increment_version(target._local_tensor)
    return target

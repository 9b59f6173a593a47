"""Convert given tensors to the layout of a model or optimizer: shard locally, move, or send from the first rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from ..._nested import map_leaves
from ..._torch import dtensor_spec, local_tensor, make_dtensor
from ...plugins.parameter_classes import CompositeDTensor, with_local
from ..comm import as_transferable
from ..flat import FlatParamHandle
from ..ragged import RaggedDTensor, ReplicatedDTensor, distribute_ragged, inner_of_whole, local_shard_of
from .fqns import Place
from .gathering import Key, full_tensor, is_sharded_like, key_text, layout_of, on_local


@dataclass(frozen=True)
class Described:
    """A tensor that only the first rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Target:
    """The destination of a given value.

    Attributes:
        like: a tensor with the wanted shape, placements and device; its elements are not touched.
        place: the place of the parameter in a flat parameter, if it is sharded like one.
    """

    like: torch.Tensor
    place: Place | None = None

    @property
    def device(self) -> torch.device:
        if self.like.device.type != "meta":
            return self.like.device
        if self.place is not None:
            return self.place[0].storage.device(self.place[0].mesh)
        mesh = self.like.device_mesh if isinstance(self.like, DTensor) else None
        accelerator = torch.accelerator.current_accelerator(True) if mesh is None or mesh.device_type != "cpu" else None
        return torch.device("cpu") if accelerator is None else accelerator

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor with the wanted shape, placements and device."""
        return on_local(self.like, lambda local: torch.empty_like(local, device=self.device))

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a whole tensor, which may share its memory. No communication."""
        like, whole = self.like, whole.detach()
        assert isinstance(like, DTensor)
        if isinstance(like, CompositeDTensor) and like.takes(whole):
            return like.shard_of(whole.to(self.device))
        if not isinstance(like, RaggedDTensor):
            placements = dtensor_spec(like).placements
            return distribute_tensor(whole.to(self.device), like.device_mesh, placements, src_data_rank=None)
        spec = like._spec.with_dtype(whole.dtype)
        local = local_shard_of(inner_of_whole(whole, spec), spec).to(self.device)
        return RaggedDTensor(local, spec)


@dataclass(frozen=True)
class Sender:
    """The first rank of a process group, which sends its tensors to the others.

    Attributes:
        device: where messages of the group live.
    """

    group: dist.ProcessGroup
    device: torch.device

    @property
    def is_here(self) -> bool:
        return self.group.rank() == 0


def fetch(values: Mapping[Key, Any], targets: Mapping[Key, Target], sender: Sender | None) -> dict[Key, torch.Tensor]:
    """Return the values that have a target, in its layout: converted, or sent by ``sender``. Changes nothing.

    Ranks: all ranks of the model, with equal keys and targets.
    """
    with torch.no_grad():
        if sender is not None:
            return _from_first_rank(values, targets, sender)
        return {key: in_layout(values[key], target) for key, target in targets.items()}


def in_layout(value: torch.Tensor, target: Target) -> torch.Tensor:
    """Convert ``value`` to the layout of ``target``, sharing memory if nothing moves. The dtype stays.

    Ranks: if ``value`` is a DTensor that lies otherwise, all ranks of the meshes of ``value`` and of the target.
    """
    placed = _in_placements(value, target)
    if isinstance(target.like, ReplicatedDTensor) and isinstance(placed, DTensor):
        # Of its class, too: a stock DTensor would not compute with the optimizer's plain tensors.
        replicated: torch.Tensor = make_dtensor(ReplicatedDTensor, local_tensor(placed), dtensor_spec(placed))
        return replicated
    return placed


def _in_placements(value: torch.Tensor, target: Target) -> torch.Tensor:
    like = target.like
    if not isinstance(value, DTensor):
        return target.shard(value) if isinstance(like, DTensor) else value.to(target.device)
    if not isinstance(like, DTensor):
        return full_tensor(value).to(target.device)
    if _is_placed_like(value, like):
        local = local_tensor(value).detach().to(target.device)
        if isinstance(value, RaggedDTensor):
            return with_local(value, local)
        placed: torch.Tensor = make_dtensor(DTensor, local, dtensor_spec(value))
        return placed
    if value.device_mesh == like.device_mesh and local_tensor(value).device == target.device:
        if isinstance(like, RaggedDTensor):
            return distribute_ragged(value, like.device_mesh, like.placements)
        with torch.no_grad():
            return value.redistribute(placements=like.placements)
    return target.shard(full_tensor(value))


def fact_of(key: Key, value: Any, target: Target | None, sender: Sender | None) -> str:
    """Return the fact that ranks must agree on before ``value`` is moved to its target.

    Args:
        target: ``None``: the value is not moved, and every rank has it.
        sender: sends the value; ``None``: every rank has it.
    """
    if target is None or not isinstance(value, (torch.Tensor, Described)):
        return key_text(key)
    like = target.like
    if sender is not None:
        movement = "sent in parts" if _is_scattered(target, sender.group) else "sent whole"
    elif not isinstance(value, DTensor) or (isinstance(like, DTensor) and _is_placed_like(value, like)):
        movement = "whole or sharded as it is here"
    else:
        movement = f"{layout_of(value)} (here: {layout_of(like) if isinstance(like, DTensor) else 'whole'})"
    return f"{key_text(key)} of shape {tuple(value.shape)}, {value.dtype}, {movement}"


def _is_placed_like(value: DTensor, like: DTensor) -> bool:
    if isinstance(value, RaggedDTensor) and isinstance(like, RaggedDTensor):
        return value._spec.is_sharded_like(like._spec)
    return (
        type(value) is type(like)
        and value.shape == like.shape
        and value.device_mesh == like.device_mesh
        and value.placements == like.placements
    )


# ---- Sending from the first rank


def _from_first_rank(
    values: Mapping[Key, Any], targets: Mapping[Key, Target], sender: Sender
) -> dict[Key, torch.Tensor]:
    """Distribute the first rank's whole tensors to all ranks, in the layout of their targets. The other ranks have a
    ``Described`` for each.

    There is one scatter for each flat parameter and kind of state, in which every rank receives only its shard. Other
    tensors are broadcast, one at a time.
    """
    parcels: dict[Any, dict[Key, Place]] = {}  # tensors that are sharded like parameters of one flat parameter
    result: dict[Key, torch.Tensor] = {}
    for key, target in targets.items():
        given, place = values[key], target.place
        if not len(given.shape):  # every rank has it already
            result[key] = in_layout(given, target)
        elif place is not None and _is_scattered(target, sender.group):
            parcels.setdefault((place[0], key[1:], given.dtype), {})[key] = place
        else:
            if isinstance(given, torch.Tensor):
                whole = given.detach().to(sender.device).contiguous()
            else:
                whole = torch.empty(given.shape, dtype=given.dtype, device=sender.device)
            if whole.numel():
                dist.broadcast(as_transferable(whole.view(-1)), group=sender.group, group_src=0)
            result[key] = in_layout(whole, target)
    for (handle, _, dtype), places in parcels.items():
        indices = {key: index for key, (_, index) in places.items()}
        result.update(_scatter(handle, dtype, indices, values, is_here=sender.is_here))
    return result


def _is_scattered(target: Target, group: dist.ProcessGroup) -> bool:
    """Whether ``_from_first_rank`` sends each rank only its shard."""
    place = target.place
    if place is None or not is_sharded_like(target.like, place):
        return False
    mesh = place[0].mesh
    if mesh.peers.size() > mesh.data_world_size:
        return False  # tensor parallelism: other ranks hold the same or other shards
    return mesh.peers is group and mesh.first_rank == dist.get_process_group_ranks(group)[0]


def _scatter(
    handle: FlatParamHandle, dtype: torch.dtype, indices: Mapping[Key, int], values: Mapping[Key, Any], is_here: bool
) -> dict[Key, torch.Tensor]:
    mesh = handle.mesh
    shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=mesh.device)
    shards = None
    if is_here:
        flat = torch.zeros(handle.layout.flat_numel, dtype=dtype, device=mesh.device)
        views = handle.full_views_of(flat)
        for key, index in indices.items():
            views[index].copy_(values[key])
        flat = handle.layout.as_shards(flat)
        shards = [as_transferable(chunk) for chunk in flat.chunk(mesh.shard_world_size)] if flat.numel() else []
    if shard.numel() and mesh.is_first_replica:
        dist.scatter(as_transferable(shard), shards, group=mesh.shard_group, group_src=0)
    if shard.numel() and mesh.replicate_group is not None:
        dist.broadcast(as_transferable(shard), group=mesh.replicate_group, group_src=0)
    locals_, sharded = handle.views_of(shard), cast(Any, handle.sharded_params)
    return {key: RaggedDTensor(locals_[i], sharded[i]._spec.with_dtype(dtype)) for key, i in indices.items()}


def describe(value: Any) -> Any:
    """Describe a value, also inside lists and dicts, for the other ranks: shape and dtype of a tensor; numbers and
    other values as they are."""

    def tell(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.dim():
            return Described(tuple(leaf.shape), leaf.dtype)
        return on_cpu(leaf)

    return map_leaves(tell, value)


def on_cpu(value: Any) -> Any:
    """Move the tensors in a value to the CPU, so that it can be pickled."""

    def move(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            raise TypeError("expected whole tensors, got a DTensor")
        return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(move, value)


def share(value: Any, sender: Sender) -> Any:
    """Broadcast a picklable value from the first rank."""
    box = [value]
    dist.broadcast_object_list(box, group=sender.group, group_src=0, device=sender.device)
    return box[0]

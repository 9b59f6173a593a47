"""The ranks that share the shards of a ``fully_shard`` group: a checked view of the user's ``DeviceMesh``.

The runtime asks this object for process groups and ranks and never looks at the mesh itself, so that meshes of more
dimensions (replication, tensor parallelism) can be added here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._torch import backend_name, group_device_types
from .messages import transport_of
from .transport import Transport

SIMULATED_ENV = "FSDP_COMPOSE_SIMULATED"


@dataclass(frozen=True)
class DataParallelMesh:
    """The ranks over which the flat parameters of a ``fully_shard`` group are sharded.

    Attributes:
        mesh: the user's mesh, 1-D.
        shard_group: process group over which shards are gathered and gradients reduced.
        shard_rank, shard_world_size: this rank's place in it.
        device: where shards and unsharded parameters live.
        is_simulated: the process group only pretends (backend ``fake``, or the variable ``FSDP_COMPOSE_SIMULATED=1``):
            there are no ranks to meet, and checks that need other ranks are local.
        transport: how flat tensors move over ``shard_group``.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup
    shard_rank: int
    shard_world_size: int
    device: torch.device
    is_simulated: bool
    transport: Transport

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks that one can really talk to."""
        return self.shard_world_size > 1 and not self.is_simulated


def data_parallel_mesh(mesh: DeviceMesh | None) -> DataParallelMesh:
    """Check ``mesh`` (or make the default one over all ranks) and describe it.

    Raises:
        RuntimeError: there is no mesh and no initialised process group to make one from.
        TypeError: ``mesh`` is no ``DeviceMesh``.
        ValueError: ``mesh`` has more than one dimension, or this rank is not in it.
    """
    if mesh is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "fully_shard() got no mesh, and torch.distributed has no process group to make one from: call "
                "torch.distributed.init_process_group() first (under torchrun), or pass mesh=init_device_mesh(...)"
            )
        mesh = _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard(mesh=...): expected a DeviceMesh, got {type(mesh).__name__}: {mesh!r}")
    if mesh.ndim != 1:
        raise ValueError(
            f"fully_shard(mesh=...): expected a 1-D mesh, got {mesh.ndim} dimensions {mesh.mesh_dim_names or ''} of "
            f"shape {tuple(mesh.mesh.shape)}; pass the sharding dimension alone, for example mesh['shard']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"fully_shard(mesh=...): rank {dist.get_rank()} is not in the mesh {mesh}")
    group, device = mesh.get_group(), _mesh_device(mesh.device_type)
    is_simulated = os.environ.get(SIMULATED_ENV) == "1" or backend_name(group) == "fake"
    return DataParallelMesh(
        mesh=mesh,
        shard_group=group,
        shard_rank=group.rank(),
        shard_world_size=group.size(),
        device=device,
        is_simulated=is_simulated,
        transport=Transport(group) if is_simulated else transport_of(group, device),
    )


def _default_mesh() -> DeviceMesh:
    """All ranks, on the accelerator that the process group serves, else on the CPU."""
    world, device_type = dist.group.WORLD, "cpu"
    assert world is not None, "the caller has checked"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in group_device_types(world) and backend_name(world) != "gloo":
        device_type = accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _mesh_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.get_device_module(device_type).is_available():
        raise ValueError(f"fully_shard(mesh=...): the mesh is on {device_type}, and this machine has no such device")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())

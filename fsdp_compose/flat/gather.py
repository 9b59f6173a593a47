"""The whole of one flat tensor, in memory of its own."""

from __future__ import annotations

import torch

from .flat_param import FlatParamHandle


def wholes_of(handle: FlatParamHandle, flat: torch.Tensor) -> list[torch.Tensor]:
    """The parameters that ``flat``, a whole flat parameter, has: views of it, unless their class makes more of it."""
    views, extension = handle.full_views_of(flat), handle.kind.extension
    return views if extension is None else [extension.whole_of(view) for view in views]


def gather_flat(handle: FlatParamHandle, shard: torch.Tensor, rank0_only: bool, to_cpu: bool) -> torch.Tensor | None:
    """The whole of a flat tensor sharded like the flat parameter of ``handle``, of which this rank has ``shard``;
    ``None`` where it is not wanted. One collective; of replicas, the first alone gathers what one rank wants."""
    mesh, numel, shard_bytes = handle.mesh, shard.numel(), shard.element_size()
    if rank0_only and not mesh.is_first_replica:
        if mesh.shard_world_size > 1 and numel:
            mesh.transport.skip(handle.layout.flat_numel * shard_bytes, handle.label)
        return None
    with torch.no_grad():
        shard = handle.home.on_device(shard)
        flat = None
        if not rank0_only or mesh.shard_rank == 0:
            flat = shard.new_empty(handle.layout.flat_numel)
        if mesh.shard_world_size > 1 and numel:
            ranges = [(rank * numel, rank * numel + numel) for rank in range(mesh.shard_world_size)]
            mesh.transport.gather(flat, shard, ranges, not rank0_only, handle.label)
        elif flat is not None:
            flat.copy_(shard)
        return flat.cpu() if flat is not None and to_cpu else flat

"""The data ranks that hold the same shard of a parameter which expert parallelism has split over other data ranks.

A DTensor on a mesh that has ranks in common with the data-parallel mesh is sharded over the rest of that::

    data-parallel mesh      0 1 2 3
    experts on meshes of    0 1 | 2 3      ranks 0 and 2 hold the same experts, and so do 1 and 3
    sharded over            0 2 | 1 3

``mesh`` asks for this when it meets such a parameter; checks call ``ranks_with_same_shard``, which makes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..._torch import concatenate_meshes, mesh_slices, root_mesh


def ranks_with_same_shard(mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> torch.Tensor:
    """The ranks of ``mesh`` that are at this rank's place on their slices of ``tensor_mesh``, as a grid with the
    dimensions of ``mesh``.

    Raises:
        RuntimeError: they are no grid, or together with the slices they are not all ranks of ``mesh``.
    """
    if tensor_mesh.mesh_dim_names is None:
        raise RuntimeError("the mesh of the DTensor has no names")
    slices, ranks, here = mesh_slices(tensor_mesh), mesh.mesh, dist.get_rank()
    place = (slices == here).nonzero()[0, 1:].tolist()
    has_same = torch.isin(ranks, slices[tuple([slice(None), *place])])
    grid = ranks
    for dim, line in enumerate(_lines(has_same, (ranks == here).nonzero()[0].tolist())):
        grid = grid.index_select(dim, line.nonzero()[:, 0])
    num_shards = int(torch.isin(ranks, tensor_mesh.mesh).sum())
    if grid.numel() != has_same.sum() or grid.numel() * num_shards != ranks.numel():
        raise RuntimeError(
            f"ranks {ranks[has_same].tolist()} of the data-parallel mesh {ranks.tolist()} hold the same part, and the "
            f"parts are on {tensor_mesh.mesh.tolist()}: these are not the rows and columns of one grid"
        )
    return grid


def _lines(grid: torch.Tensor, place: Sequence[int]) -> list[torch.Tensor]:
    """What stands in the grid along each dimension through a place."""
    return [grid.movedim(dim, -1)[tuple(at for i, at in enumerate(place) if i != dim)] for dim in range(grid.ndim)]


def mesh_with_same_shard(
    mesh: DeviceMesh, tensor_mesh: DeviceMesh, make_group: Callable[[list[int], dist.ProcessGroup], dist.ProcessGroup]
) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of these ranks, without a dimension of replicas if there are none, and one that has the dimensions of
    ``tensor_mesh`` too. Both are parts of the mesh that ``tensor_mesh`` is a part of, if that has such dimensions.

    Ranks: those with the same shard, of which ``make_group(ranks, like)`` makes the process groups that are missing.
    """
    grid = ranks_with_same_shard(mesh, tensor_mesh)
    dims = range(int(grid.ndim == 2 and grid.shape[0] == 1), grid.ndim)
    lines = [line.tolist() for line in _lines(grid, (grid == dist.get_rank()).nonzero()[0].tolist())]
    root, own = root_mesh(tensor_mesh), tensor_mesh.mesh_dim_names or ()
    others = {name: root.get_group(name) for name in root.mesh_dim_names or () if name not in own}
    names = [name for dim in dims for name, group in others.items() if _ranks(group) == lines[dim]]
    if len(names) == len(dims) and names == [name for name in others if name in names]:
        found = root[tuple(names)]
        return found, concatenate_meshes([found, tensor_mesh])
    known = [*others.values(), *mesh.get_all_groups()]
    groups = [
        next((group for group in known if _ranks(group) == lines[dim]), None)
        or make_group(lines[dim], mesh.get_group(dim))
        for dim in dims
    ]
    slices, new = mesh_slices(tensor_mesh), tuple(f"same_{'_'.join(own)}_{dim}" for dim in dims)
    ranks = torch.stack([slices[(slices == rank).nonzero()[0, 0]] for rank in grid.flatten().tolist()])
    joined = DeviceMesh.from_group(
        [*groups, *tensor_mesh.get_all_groups()],
        mesh.device_type,
        ranks.view(*grid.shape[dims.start :], *tensor_mesh.shape),
        mesh_dim_names=(*new, *own),
    )
    return joined[new], joined


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)

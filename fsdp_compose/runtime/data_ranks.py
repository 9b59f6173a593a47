"""Whether the gradients of the groups below one root are averaged over the same ranks.

The data ranks of a root are those of the largest data-parallel mesh below it: each has a batch of its own, so every
gradient must be averaged over all of them. A group may be on fewer, if all of its parameters are DTensors on a mesh
that makes up for it (expert parallelism): their gradients have come together over that mesh in backward, as sums. Then
the average over the group's ranks is too large by a factor that is known, and applied by the reduction::

    4 data ranks            0 1 2 3
    experts on meshes of    0 1 | 2 3      tokens go between these in forward, gradients in backward: a sum
    sharded over            0 2 | 1 3      the reduction averages over these, and divides by 4 / 2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ..comm import DataParallelMesh
from ..flat import FlatParamHandle, specs_of
from ..group import _FSDPState, widest_mesh

_Found = Sequence[tuple[_FSDPState, str]]


def mesh_of_root(found: _Found) -> DataParallelMesh:
    """The mesh of the most peers among those of some groups (with their names), which run below one root, for all of
    which the groups work together from now on.

    Raises:
        ValueError: a group is on other ranks than the rest; names a parameter of it.
    """
    data = max((state.mesh.ranks() for state, _ in found), key=len)
    for state, name in found:
        for handle in state._handles:
            _check_data_ranks(handle, name, data)
    widest = widest_mesh([state for state, _ in found])
    peers = {*dist.get_process_group_ranks(widest.peers)}
    for state, name in found:
        if state.mesh.peers is widest.peers:
            continue
        own = {*dist.get_process_group_ranks(state.mesh.peers)}
        if not state.mesh.is_simulated and not own <= peers:
            raise ValueError(
                "the fully_shard groups below one root have meshes of which none contains the others: "
                f"{name or '(root)'} is on the ranks {sorted(own)}, the meshes of its DTensors included, and others "
                f"are on {sorted(peers)}"
            )
    for state, _ in found:
        state.run_among(widest.peers, len(data) // len(state.mesh.ranks()))
    return widest_mesh([state for state, _ in found])


def _check_data_ranks(handle: FlatParamHandle, name: str, data: frozenset[int]) -> None:
    mesh = handle.mesh
    own = mesh.ranks()
    if own == data:
        return
    for fqn, spec in zip(handle.fqns, specs_of(handle.tensor_parallel, len(handle.fqns)), strict=True):
        if spec is None or frozenset(mesh.beside(spec.mesh).mesh.flatten().tolist()) != data:
            where = f"{name}.{fqn}" if name else fqn
            if spec is not None:
                where += f", placed {list(spec.placements)} on the ranks {spec.mesh.mesh.tolist()},"
            raise ValueError(
                f"the fully_shard groups below one root have different meshes: {where} is on the "
                f"ranks {sorted(own)}, so its gradient would be averaged over these, and others are on {sorted(data)}. "
                "Use meshes of the same ranks for all groups of a model (they may be sharded over some of them and "
                "replicated over the rest: a mesh of two dimensions); or make all parameters of the group "
                "DTensors on the rest of the ranks (expert parallelism)"
            )

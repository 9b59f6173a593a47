"""``broadcast_replicas``: make replicas equal."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn

from ..comm import as_transferable, meet, noticing_loss
from ..flat import FlatParamHandle, local_elements
from ..group import _FSDPState, _get_fsdp_states, widest_mesh
from ..ragged import note_write_of_all_ranks


def broadcast_replicas(module: nn.Module) -> None:
    """Copy the first replica's sharded parameters below ``module`` to all other replicas.

    ``fully_shard`` keeps each rank's own values. On a mesh (replicate, shard) the first forward raises if replicas
    differ, for example because ranks used different seeds. This call does not touch groups without replicas, or
    buffers: buffers of different ranks are never compared.

    Ranks: all ranks of the meshes together, between iterations; they first wait for each other, for a bounded time.

    Args:
        module: root of the tree.

    Raises:
        RuntimeError: a rank did not arrive or has another model; a forward or backward is running.
        ValueError: parameters are on the meta device, or nothing below ``module`` is sharded.
    """
    states = _get_fsdp_states(module)
    if not states:
        raise ValueError(f"broadcast_replicas(): there is no fully_shard group below this {type(module).__name__}")
    for state in states:
        _refuse_running(state)
    handles = [handle for state in states for handle in state._handles if handle.mesh.replicate_group is not None]
    for handle in handles:
        if any(local_elements(sharded).is_meta for sharded in handle.sharded_params):
            raise ValueError(
                f"broadcast_replicas(): {handle.names[0]} is on the meta device: call module.to_empty(device=...) and "
                "initialize it first"
            )
    mesh = widest_mesh(states)
    if not handles or not mesh.has_peers:
        return
    _meet(mesh.peers, handles)
    with torch.no_grad(), noticing_loss(mesh.peers, "broadcast_replicas()"):
        for handle in handles:
            _broadcast(handle)


def _refuse_running(state: _FSDPState) -> None:
    root = state.root
    if state.progress.running_forwards or (root is not None and (root.forward.depth or root.backward is not None)):
        raise RuntimeError(
            f"broadcast_replicas(): a forward or backward of the fully_shard group {state.name} is running"
        )


def _meet(peers: dist.ProcessGroup, handles: list[FlatParamHandle]) -> None:
    names = ", ".join(f"{handle.names[0]} ({len(handle.fqns)} parameters)" for handle in handles)

    def explain(rank: int, ours: str, theirs: str) -> str:
        return (
            f"broadcast_replicas(): rank 0 has a model with {ours}, rank {rank} one with {theirs}: call it with the "
            "same model on every rank"
        )

    meet(peers, "broadcast_replicas", names, lambda _: "", names, explain)


def _broadcast(handle: FlatParamHandle) -> None:
    """Broadcast the shard, or parameter by parameter if the user gave parameters other memory: the next forward takes
    that over."""
    tensors = [*map(local_elements, handle.sharded_params)] if handle.was_moved() else [handle.shard]
    for tensor in tensors:
        if tensor.numel():
            moved = tensor.detach().to(handle.mesh.device)
            dist.broadcast(as_transferable(moved), group=handle.mesh.replicate_group, group_src=0)
            if moved.device != tensor.device:
                tensor.copy_(moved)
    note_write_of_all_ranks(tensors)

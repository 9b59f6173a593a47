"""``broadcast_replicas``: make replicas equal; ``set_replicas``: average over replica groups of the user."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..._arguments import checked
from ..._torch import local_tensor
from ...core.comm import Replicas, as_transferable, check_mesh, meet
from ...core.flat import FlatParamHandle, local_elements, plain_tensor
from ...core.group import Kind, _FSDPState, _get_fsdp_states, states_for, widest_mesh
from ...core.ragged import note_write_of_all_ranks
from ...core.runtime import optional_replicas_error
from ...errors import MisuseError, MisuseRuntimeError, MisuseTypeError
from ..gloo import noticing_loss
from ..transports import change_meshes, refuse_unless_between_iterations


@checked()
def broadcast_replicas(module: nn.Module, *, mesh: DeviceMesh | None = None) -> None:
    """Copy the first replica's parameters below ``module`` to all other replicas.

    ``fully_shard`` keeps each rank's own values, and the first forward raises if ranks started from different ones, for
    example because they used different seeds. Before ``fully_shard`` every rank has a replica of the whole model::

        model = Model()  # different seeds on the ranks
        broadcast_replicas(model)  # parameters and buffers of the first rank
        fully_shard(model)

    After ``fully_shard`` it copies the first replica's sharded parameters, on a mesh (replicate, shard). Then it does
    not touch groups without replicas, or buffers: buffers of different ranks are never compared.

    Ranks: all ranks of the meshes together, between iterations; they first wait for each other, for a bounded time.

    Args:
        module: root of the tree.
        mesh: before ``fully_shard``, the data-parallel mesh; default: all ranks.

    Raises:
        RuntimeError: a rank did not arrive or has another model; a forward or backward is running.
        ValueError: parameters are on the meta device; before ``fully_shard``, a parameter is a DTensor and there is no
            ``mesh``; after it, there is a ``mesh``.
    """
    states = _get_fsdp_states(module)
    if not states:
        _broadcast_unsharded(module, mesh)
        return
    if mesh is not None:
        raise MisuseError("broadcast_replicas(mesh=...): the model is sharded already, and its groups have meshes")
    for state in states:
        root = state.root
        if state.progress.running_forwards or (root is not None and (root.forward.depth or root.backward is not None)):
            raise MisuseRuntimeError(
                f"broadcast_replicas(): a forward or backward of the fully_shard group {state.name} is running"
            )
    handles = [handle for state in states for handle in state._handles if handle.mesh.replicate_group is not None]
    for handle in handles:
        if any(local_elements(sharded).is_meta for sharded in handle.sharded_params):
            raise MisuseError(
                f"broadcast_replicas(): {handle.names[0]} is on the meta device: call module.to_empty(device=...) and "
                "initialize it first"
            )
    widest = widest_mesh(states)
    if not handles or not widest.has_peers:
        return
    _meet(widest.peers, ", ".join(f"{handle.names[0]} ({len(handle.fqns)} parameters)" for handle in handles))
    with torch.no_grad(), noticing_loss(widest.peers, "broadcast_replicas()"):
        for handle in handles:
            _broadcast(handle)


@checked()
def set_replicas(module: nn.Module, replicas: Replicas | None) -> None:
    """Average gradients over replica groups in other jobs too, which may come and go.

    A replica group is a job of its own: its own launcher and default process group. Its ranks share the shards. In
    backward each gradient is averaged over the group as usual; then ``replicas.average`` averages the shards over
    the groups, while backward goes on. ``None`` means the same in all groups: at the end of a backward they agree which
    parameters have a gradient, through ``replicas.maximum``. Groups that would reduce other gradients raise an error
    before the first average; groups that have reduced them in another order, before any is shown.

    Losing a group is not an error here: ``replicas.maximum`` returns ``False``, backward ends normally, and the caller
    throws the step away (``zero_grad()`` and another try). Parameters are not compared between groups. Start all with
    equal ones, and let a group that comes later take those of another one, with ``checkpoint.shards``. docs/elastic.md
    has a whole program.

    Ranks: all ranks of the job, between the same two iterations. Local: no communication.

    Args:
        module: the root of the model; call this after ``fully_shard``.
        replicas: an object with the two methods of ``Replicas``. ``None``: no longer average over replica groups.

    Raises:
        MisuseTypeError: ``replicas`` lacks a method.
        MisuseError: there is no ``fully_shard`` group below ``module``; a group is optional, has a mesh with replicas
            of its own or comes from ``replicate()``; graphs of ``torch.compile`` contain it.
        MisuseRuntimeError: a forward or backward is running, or gradients are accumulated that are not reduced yet.
    """
    for method in ("average", "maximum") if replicas is not None else ():
        if not callable(getattr(replicas, method, None)):
            raise MisuseTypeError(
                f"set_replicas(): a {type(replicas).__name__} has no method {method}(): see fsdp_compose.Replicas"
            )
    states = states_for(module, "set_replicas")
    for state in states:
        _refuse_own_replicas(state)
        if state.root is not None and not {*state.root.live_states()} <= {*states}:
            raise MisuseError(
                f"set_replicas(): the model of the fully_shard group {state.name} has groups outside of this "
                f"{type(module).__name__}: call it on the root"
            )
    change_meshes(states, lambda mesh: mesh.with_replicas(replicas))
    for root in {state.root: None for state in states if state.root is not None}:
        state = root.live_states()[0]  # so that ranks which have not called this differ
        root.order.entries.append(state.log.note(Kind.REPLICAS, str(replicas is None)))


def _refuse_own_replicas(state: _FSDPState) -> None:
    name = state.name
    if state.options.is_optional:
        raise MisuseError(optional_replicas_error(name))
    if state.mesh.mesh.ndim > 1:
        raise MisuseError(
            f"set_replicas(): the fully_shard group {name} is on a mesh with replicas of its own, (replicate, shard), "
            "or comes from replicate(): shard it over a mesh with one dimension, whose ranks are one replica group"
        )
    refuse_unless_between_iterations("set_replicas", state)
    if any([handle.pending_gradients.accumulation is not None for handle in state._handles]):
        raise MisuseRuntimeError(
            f"set_replicas(): gradients of the fully_shard group {name} are accumulated and not reduced yet: call it "
            "after optimizer.step() and zero_grad()"
        )


def _broadcast_unsharded(module: nn.Module, mesh: DeviceMesh | None) -> None:
    """Broadcast parameters and buffers over one dimension of the mesh after the other, the innermost first."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta:
            raise MisuseError(
                f"broadcast_replicas(): {name} is on the meta device: call module.to_empty(device=...) and initialize "
                "it first"
            )
        if mesh is None and isinstance(tensor, DTensor):
            raise MisuseError(
                f"broadcast_replicas(): {name} is a DTensor, whose ranks hold different parts: give the mesh of the "
                "ranks that hold the same one, mesh=..."
            )
    names = ", ".join(f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors)
    mesh = check_mesh(mesh)
    with torch.no_grad():
        for group in (mesh.get_group(dim) for dim in reversed(range(mesh.ndim))):
            _meet(group, names)
            with noticing_loss(group, "broadcast_replicas()"):
                for _, tensor in tensors:
                    local = local_tensor(tensor) if isinstance(tensor, DTensor) else plain_tensor(tensor)
                    moved = local.detach().to(mesh.device_type).contiguous()
                    dist.broadcast(as_transferable(moved), group=group, group_src=0)
                    if moved.data_ptr() != local.data_ptr():
                        local.copy_(moved)


def _meet(peers: dist.ProcessGroup, names: str) -> None:
    def explain(rank: int, ours: str, theirs: str) -> str:
        return (
            f"broadcast_replicas(): rank 0 has a model with {ours}, rank {rank} one with {theirs}: call it with the "
            "same model on every rank"
        )

    meet(peers, "broadcast_replicas", names, lambda _: "", names, explain)


def _broadcast(handle: FlatParamHandle) -> None:
    """Broadcast the shard, or parameter by parameter if the user gave parameters other memory."""
    # The next forward copies that memory into the shard, so it must be equal, and the shard need not be.
    tensors = [*map(local_elements, handle.sharded_params)] if handle.was_moved() else [handle.shard]
    for tensor in tensors:
        if tensor.numel():
            moved = tensor.detach().to(handle.mesh.device)
            dist.broadcast(as_transferable(moved), group=handle.mesh.replicate_group, group_src=0)
            if moved.device != tensor.device:
                tensor.copy_(moved)
    note_write_of_all_ranks(tensors)

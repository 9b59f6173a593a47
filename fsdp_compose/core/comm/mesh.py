"""The ranks that a group runs on: a checked view of the user's ``DeviceMesh``, and the peers that run one model.

The runtime asks this object for process groups and ranks, and never looks at the mesh itself. There are four sets of
ranks; on a mesh with one dimension they are the same::

    shard group       share the shards: gather, scatter                            one per group
    replicate group   hold the same shard: average what was scattered              one per group; may be none
    data ranks        have different batches: gradients are averaged over them     per root: the largest
    peers             run the model together: meet, exchange, recover              per root: the widest

Peers that are not data ranks hold other parts of the parameters (tensor parallelism) and get the same batches.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from ..._torch import (
    concatenate_meshes,
    gloo_messages,
    group_device_types,
    group_timeout,
    is_destroyed,
    make_group_of,
)
from ...errors import MisuseError, MisuseRuntimeError, MisuseTypeError, RankLostError
from .context import kept_for
from .failure import fail_together
from .store import agree_on_name
from .transport import TRANSPORT_ENV, Replicas, Transport, TransportRole

# ---- The process group of all ranks that run a model together: its *peers*, which meet, exchange and recover.
#
# On a mesh with one dimension, they are the ranks that share the shards. On a mesh with several, the user has one
# process group per dimension, and the peers are all ranks of the mesh: the default process group if it has just these
# ranks, else one made here. That one uses gloo, because it carries rendezvous, control exchanges and checkpoints, but
# no training.


_GRACE = timedelta(seconds=5)
_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class _Made:
    """What was made once for a process group."""

    # By ranks and backends, process groups of other ranks. Strong references: ranks that drop their models at different
    # times must still agree on the same process groups.
    groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = field(default_factory=dict)
    alone: dist.ProcessGroup | None = None  # of this rank alone
    is_on_cpu: bool = False  # ``default_mesh`` is, in any case
    # Meshes are referred to weakly: a mesh holds its process group, which has connections and threads.
    joined: weakref.WeakValueDictionary[tuple[DeviceMesh, DeviceMesh], DeviceMesh] = field(
        default_factory=weakref.WeakValueDictionary
    )
    # By type of device. All groups of a model share one mesh: making and comparing meshes takes time that grows with
    # the number of ranks.
    default_meshes: weakref.WeakValueDictionary[str, DeviceMesh] = field(default_factory=weakref.WeakValueDictionary)
    # By a data-parallel mesh and one of DTensors: see ``mesh_beside``.
    beside: weakref.WeakValueDictionary[tuple[DeviceMesh, DeviceMesh], DeviceMesh] = field(
        default_factory=weakref.WeakValueDictionary
    )
    # By meshes, replicas and options. Groups on one mesh share one object, which then stays in the CPU caches; the
    # models on it keep it alive.
    described: weakref.WeakValueDictionary[tuple[object, ...], DataParallelMesh] = field(
        default_factory=weakref.WeakValueDictionary
    )


def group_of_ranks(
    ranks: Iterable[int],
    known: Iterable[dist.ProcessGroup] = (),
    like: dist.ProcessGroup | None = None,
    is_simulated: bool = False,
) -> dist.ProcessGroup:
    """Return a process group over ``ranks`` (numbers in the default process group): the default one, one of ``known``,
    or one that is made once.

    Ranks: all of ``ranks``, where it must be made.

    Args:
        like: a process group over other ranks whose backends the result must have (the default process group is then
            not used); default: any backend.
        is_simulated: the other ranks do not exist.

    Raises:
        RuntimeError: some of the ranks did not arrive in time.
    """
    wanted, world = tuple(sorted(ranks)), dist.group.WORLD
    assert world is not None, "there are process groups"
    for group in (world, *known) if like is None else ():
        if tuple(dist.get_process_group_ranks(group)) == wanted:
            return group
    made = kept_for(world, _Made).groups
    key = wanted, "gloo" if like is None else dist.get_backend(like)
    if key not in made or is_destroyed(made[key]):
        made[key] = _make(wanted, world, like, is_simulated)
    return made[key]


def _make(
    ranks: tuple[int, ...], world: dist.ProcessGroup, like: dist.ProcessGroup | None, is_simulated: bool
) -> dist.ProcessGroup:
    timeout = group_timeout(world if like is None else like)

    def absence(absent: Sequence[int]) -> RuntimeError:
        return RankLostError(
            f"making a process group of ranks {[*ranks]}, which run one model together: rank(s) "
            f"{', '.join(str(ranks[i]) for i in absent)} did not arrive within {timeout.total_seconds():g} s. Every "
            "rank of a mesh must call fully_shard()"
        )

    # A name that no earlier initialization has used: torch keeps its own data for the group below that name.
    name = f"peers/{'-'.join(map(str, ranks))}"
    if is_simulated:
        name = f"{name}/{next(_numbers)}"
    else:
        name = agree_on_name(name, ranks.index(world.rank()), len(ranks), timeout, _GRACE, absence)
    return make_group_of(ranks, name, timeout, like)


# ---- The mesh of a group


SIMULATED_ENV = "FSDP_COMPOSE_SIMULATED"


@dataclass(frozen=True)
class DataParallelMesh:
    """The ranks over which the flat parameters of a ``fully_shard`` group are sharded, and replicated.

    Attributes:
        mesh: the user's mesh: one dimension, or (replicate, shard).
        shard_group: process group over which shards are gathered and gradients scattered.
        shard_rank, shard_world_size: this rank's number in it, and its size.
        replicate_group: process group of the ranks that hold the same shard; ``None`` if there are no others.
        replicate_world_size: its size.
        peers: process group of all ranks that run the group together.
        device: where shards and unsharded parameters live.
        is_simulated: the process group only pretends (backend ``fake``, or the variable ``FSDP_COMPOSE_SIMULATED=1``):
            there are no ranks to meet, and checks that need other ranks are local.
        is_replicated: each of several ranks holds all elements: there is nothing to gather or scatter, only to average.
        transport: how flat tensors move over ``shard_group``.
        replica_transport: how they move over ``replicate_group``, or over the user's replica groups (``replicas``).
        missing_factor: the number of data ranks divided by the number of ranks over which collectives average here.
            Backward has already summed gradients over the rest (expert parallelism).
        post_forward_transport: how they move among the adjacent ranks that keep the parameters sharded among themselves
            between forward and backward (``reshard_after_forward=int``); ``None`` without that option.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup
    shard_rank: int
    shard_world_size: int
    replicate_group: dist.ProcessGroup | None
    replicate_world_size: int
    peers: dist.ProcessGroup
    device: torch.device
    is_simulated: bool
    is_replicated: bool
    transport: Transport
    replica_transport: Transport | None
    missing_factor: int = 1
    post_forward_transport: Transport | None = None

    def second_group(self) -> dist.ProcessGroup:
        """Another process group of the ranks that share shards, made once. Ranks: those."""
        ranks, own = dist.get_process_group_ranks(self.shard_group), self.shard_group
        second = group_of_ranks(ranks, like=own, is_simulated=self.is_simulated)
        fail_together([self.peers, own, second])
        return second

    def with_transports(self, change: Callable[[Transport, TransportRole], Transport]) -> DataParallelMesh:
        """A copy with ``change(transport, role)`` instead of each transport."""
        replicas, post_forward = self.replica_transport, self.post_forward_transport
        return replace(
            self,
            transport=self.transport.changed(lambda transport: change(transport, TransportRole.SHARDS)),
            replica_transport=None if replicas is None else change(replicas, TransportRole.REPLICAS),
            post_forward_transport=None if post_forward is None else change(post_forward, TransportRole.PARTS),
        )

    def with_replicas(self, replicas: Replicas | None) -> DataParallelMesh:
        """A copy, of a mesh without a replicate group, that also averages over the user's replica groups."""
        if replicas is None:
            return replace(self, replica_transport=None)
        from ...plugins.replicas import ReplicaTransport

        return replace(self, replica_transport=ReplicaTransport(replicas, self.shard_group))

    @property
    def replicas(self) -> Replicas | None:
        """The user's replica groups (``set_replicas``). They are no ranks of this job, so they are in none of the sets
        of ranks and in no world size."""
        return None if self.replica_transport is None else self.replica_transport.replicas

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks to talk to, not just simulated ones."""
        return self.peers.size() > 1 and not self.is_simulated

    @property
    def rank(self) -> int:
        """This rank's number among the peers; errors print it."""
        return self.peers.rank()

    @property
    def data_world_size(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return self.shard_world_size * self.replicate_world_size

    @property
    def share(self) -> float:
        """What one rank's gradient counts in the average over all data ranks."""
        return 1 / (self.data_world_size * self.missing_factor)

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's shard is the one to use when only one replica is wanted."""
        return self.replicate_group is None or self.replicate_group.rank() == 0

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups whose collectives serve the group."""
        post_forward_group = None if self.post_forward_transport is None else self.post_forward_transport.group
        groups = [self.peers, self.shard_group, self.replicate_group, post_forward_group]
        return [group for group in groups if group is not None]

    @property
    def first_rank(self) -> int:
        """The number, in the default process group, of the rank that holds the first shard of the first replica."""
        return int(self.mesh.mesh.flatten()[0])

    def facts(self) -> dict[str, object]:
        """Facts that must be equal on every rank."""
        facts: dict[str, object] = {}
        if self.mesh.ndim > 1:
            facts |= {"replicas": self.replicate_world_size, "shards": self.shard_world_size}
        if self.replicas is not None:
            facts["replica groups"] = "set_replicas()"
        if self.post_forward_transport is not None:
            facts["ranks that share parts"] = self.post_forward_size
        return facts

    def transport_names(self) -> dict[str, str]:
        """How tensors move, for every role. Must be equal on every rank too."""
        found: dict[str, str] = {}

        def look(transport: Transport, role: TransportRole) -> Transport:
            found[role.value] = transport.unrecorded.name
            return transport

        self.with_transports(look)
        return found

    @property
    def post_forward_size(self) -> int | None:
        """How many ranks share the parameters between forward and backward; ``None`` without that option."""
        return None if self.post_forward_transport is None else self.post_forward_transport.group.size()

    def ranks(self) -> frozenset[int]:
        """The data-parallel ranks, by their numbers in the default process group."""
        return self._ranks

    @cached_property
    def _ranks(self) -> frozenset[int]:
        return frozenset(self.mesh.mesh.flatten().tolist())

    def placements(self, sharded: Placement) -> tuple[Placement, ...]:
        """The placements on ``mesh`` of a tensor that is ``sharded`` over the shard group."""
        return (*[Replicate()] * (self.mesh.ndim - 1), sharded)

    @property
    def data_rank(self) -> int:
        """This rank's position on ``mesh``."""
        place = 0
        for dim, size in enumerate(self.mesh.shape):
            place = place * size + self.mesh.get_local_rank(dim)
        return place

    def shard_mesh(self) -> DeviceMesh:
        """The shard group, as a mesh with one dimension."""
        mesh = self.mesh
        if mesh.ndim == 1:
            return mesh
        if mesh.mesh_dim_names:
            return mesh[mesh.mesh_dim_names[-1]]
        return DeviceMesh.from_group(self.shard_group, mesh.device_type)

    def on(self, mesh: DeviceMesh, tensor_mesh: DeviceMesh | None) -> DataParallelMesh:
        """The mesh of parameters of the group that have a ``mesh`` of their own, and are DTensors on ``tensor_mesh``,
        if any."""
        if mesh == self.mesh:
            return self
        size, num_shards = self.post_forward_size, mesh.size(mesh.ndim - 1)
        if size is not None and (size >= num_shards or num_shards % size):
            size = None  # fewer ranks than are to share the parameters after forward: shards stay
        found = data_parallel_mesh(mesh, [(mesh, tensor_mesh)], size)
        return found.run_among(self.peers, self.missing_factor * self.data_world_size)

    def beside(self, tensor_mesh: DeviceMesh) -> DeviceMesh:
        """The mesh of parameters that were DTensors on ``tensor_mesh`` before: it has the dimensions of both."""
        return joined_mesh(self.mesh, tensor_mesh)

    def run_among(self, peers: dist.ProcessGroup, num_data_ranks: int) -> DataParallelMesh:
        """A copy for use below a root with these peers, and so many data ranks."""
        missing_factor = num_data_ranks // self.data_world_size
        if self.peers is peers and self.missing_factor == missing_factor:
            return self
        fail_together([peers, *self.groups()])
        moved = self.with_transports(lambda transport, _: transport.among(peers))
        return replace(moved, peers=peers, missing_factor=missing_factor)


def joined_mesh(mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the dimensions of both, which must be parts of one mesh; made once.

    Raises:
        RuntimeError: they are not parts of one mesh.
    """
    known = kept_for(mesh.get_group(mesh.ndim - 1), _Made).joined
    joined = known.get((mesh, tensor_mesh))
    if joined is None:
        joined = known[mesh, tensor_mesh] = concatenate_meshes([mesh, tensor_mesh])
    return joined


def mesh_beside(mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> DeviceMesh:
    """The part of a data-parallel mesh over which parameters are sharded that are DTensors on ``tensor_mesh``: those
    ranks that hold the same part of them. All of ``mesh``, unless the two have ranks in common (expert parallelism).

    Ranks: those, the first time, if they have no process group.
    """
    if not has_ranks_in_common(mesh, tensor_mesh):
        return mesh
    group = mesh.get_group(mesh.ndim - 1)
    made = kept_for(group, _Made)
    found = made.beside.get((mesh, tensor_mesh))
    if found is None or _lost_groups(found):
        from .same_shard import mesh_with_same_shard

        def make(ranks: list[int], like: dist.ProcessGroup) -> dist.ProcessGroup:
            return (
                group_of_ranks(ranks, like=like, is_simulated=_is_simulated(group))
                if len(ranks) > 1
                else _group_of_this_rank()
            )

        found, joined = mesh_with_same_shard(mesh, tensor_mesh, make)
        made.beside[mesh, tensor_mesh] = found
        kept_for(found.get_group(found.ndim - 1), _Made).joined[found, tensor_mesh] = joined
    return found


def _lost_groups(mesh: DeviceMesh) -> bool:
    """Whether process groups of a mesh are gone."""
    try:
        return any(map(is_destroyed, mesh.get_all_groups()))
    except RuntimeError:  # their names are, too
        return True


def check_beside(mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> None:
    """Raise RuntimeError if DTensors on ``tensor_mesh`` cannot be sharded over ``mesh``, or a part of it."""
    if has_ranks_in_common(mesh, tensor_mesh):
        from .same_shard import ranks_with_same_shard

        ranks_with_same_shard(mesh, tensor_mesh)
    else:
        joined_mesh(mesh, tensor_mesh)


def has_ranks_in_common(mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> bool:
    """Whether two meshes share more than this rank."""
    return not {*mesh.mesh.flatten().tolist()}.intersection(tensor_mesh.mesh.flatten().tolist()) <= {dist.get_rank()}


def _is_simulated(group: dist.ProcessGroup) -> bool:
    return os.environ.get(SIMULATED_ENV) == "1" or dist.get_backend(group) == "fake"


def replicated_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return a mesh (replicate, shard) over the ranks of ``mesh``, which has one dimension (default: all ranks), for
    holding everything on every rank. No communication.

    Raises:
        RuntimeError, TypeError, ValueError: as ``check_mesh``; and the mesh has two dimensions.
    """
    mesh = _checked(mesh, "replicate", 1, "with one dimension, over which to replicate")
    # A second dimension, in which each rank is alone.
    groups, ranks = [mesh.get_group(0), _group_of_this_rank()], [[rank] for rank in mesh.mesh.tolist()]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def check_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Check ``mesh``, or make the default one over all ranks.

    Raises:
        RuntimeError: there is no mesh and no initialized process group to make one from.
        TypeError: ``mesh`` is no ``DeviceMesh``.
        ValueError: ``mesh`` has more than two dimensions, or this rank is not in it.
    """
    return _checked(mesh, "fully_shard", 2, "with one dimension, or with two, (replicate, shard)")


def _checked(mesh: DeviceMesh | None, caller: str, most_dims: int, expected: str) -> DeviceMesh:
    if mesh is None:
        if not dist.is_initialized():
            raise MisuseRuntimeError(
                f"{caller}() got no mesh, and torch.distributed has no process group to make one from: call "
                "torch.distributed.init_process_group() first (under torchrun), or pass mesh=init_device_mesh(...)"
            )
        mesh = default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise MisuseTypeError(f"{caller}(mesh=...): expected a DeviceMesh, got {type(mesh).__name__}: {mesh!r}")
    if mesh.ndim > most_dims:
        names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        raise MisuseError(
            f"{caller}(mesh=...): expected a mesh {expected}, got one with {mesh.ndim} dimensions{names} of shape "
            f"{tuple(mesh.mesh.shape)}; pass only the data-parallel ones, for example mesh['shard'] or "
            "mesh['replicate', 'shard']"
        )
    if mesh.get_coordinate() is None:
        raise MisuseError(f"{caller}(mesh=...): rank {dist.get_rank()} is not in the mesh {mesh}")
    return mesh


def data_parallel_mesh(
    mesh: DeviceMesh,
    parameter_meshes: Iterable[tuple[DeviceMesh, DeviceMesh | None]] = (),
    post_forward_size: int | None = None,
) -> DataParallelMesh:
    """Describe a mesh that was checked.

    Ranks: all of the mesh and of ``parameter_meshes``, if these are not all ranks of the job or there is a
    ``post_forward_size``.

    Args:
        post_forward_size: how many adjacent ranks of the shard group keep the parameters sharded among themselves
            between forward and backward; it divides the size of the shard group. ``None``: do not do that.
        parameter_meshes: for parameters, the mesh over which they are sharded, and that on which they are already
            DTensors, if they are (tensor parallelism); both are parts of one mesh.

    Raises:
        ValueError: this machine has no device of the mesh, or none of the meshes contains the ranks of the others.
    """
    group, device = mesh.get_group(mesh.ndim - 1), device_of_mesh(mesh)
    replicas = mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None
    is_simulated = _is_simulated(group)
    joined = [own if item is None else joined_mesh(own, item) for own, item in parameter_meshes]
    widest = _widest([*dict.fromkeys([mesh, *joined])])
    key = mesh, widest, replicas, post_forward_size, device, is_simulated, os.environ.get(TRANSPORT_ENV)
    known = kept_for(group, _Made).described
    described = known.get(key)
    if described is None or any(map(is_destroyed, described.groups())):
        described = known[key] = _describe(mesh, widest, group, replicas, device, is_simulated, post_forward_size)
    return described


def _describe(
    mesh: DeviceMesh,
    widest: DeviceMesh,
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None,
    device: torch.device,
    is_simulated: bool,
    post_forward_size: int | None,
) -> DataParallelMesh:
    peers = group
    if not is_simulated and widest.ndim > 1:
        groups = [item for item in (group, replicas) if item is not None]
        peers = group_of_ranks(widest.mesh.flatten().tolist(), groups)
        fail_together([peers, *groups])
    post_forward = None
    if post_forward_size is not None:
        first = group.rank() // post_forward_size * post_forward_size
        ranks = dist.get_process_group_ranks(group)[first : first + post_forward_size]
        post_forward_group = group_of_ranks(ranks, like=group, is_simulated=is_simulated)
        fail_together([peers, post_forward_group])
        post_forward = _transport(post_forward_group, device, peers, is_simulated)
    return DataParallelMesh(
        mesh=mesh,
        shard_group=group,
        shard_rank=group.rank(),
        shard_world_size=group.size(),
        replicate_group=replicas,
        replicate_world_size=1 if replicas is None else replicas.size(),
        peers=peers,
        device=device,
        is_simulated=is_simulated,
        transport=_transport(group, device, peers, is_simulated),
        replica_transport=None if replicas is None else _transport(replicas, device, peers, is_simulated),
        is_replicated=replicas is not None and group.size() == 1,
        post_forward_transport=post_forward,
    )


def _widest(meshes: list[DeviceMesh]) -> DeviceMesh:
    if len(meshes) == 1:
        return meshes[0]
    widest = max(meshes, key=DeviceMesh.size)
    ranks = {*widest.mesh.flatten().tolist()}
    for item in meshes:
        if not ranks.issuperset(item.mesh.flatten().tolist()):
            raise MisuseError(
                f"fully_shard(): the parameters of one group are DTensors on ranks {sorted(ranks)} and "
                f"{sorted(item.mesh.flatten().tolist())} (data-parallel ranks included): one of the meshes must "
                "contain the others"
            )
    return widest


MOST_RANKS = 16  # each rank sends to each: with many ranks, gloo's rings load a network less


def transport_of(group: dist.ProcessGroup, device: torch.device, peers: dist.ProcessGroup | None = None) -> Transport:
    """Choose how tensors on ``device`` move between the ranks of ``group``; the choice is the same on every rank.
    ``peers``: all ranks that issue the same collectives in the same order, each in its own process groups; default:
    ``group``."""
    goes_direct = device.type == "cpu" and 2 <= group.size() <= MOST_RANKS and gloo_messages(group) is not None
    if goes_direct and os.environ.get(TRANSPORT_ENV) != Transport.name:
        from ...plugins.gloo import Messages

        return Messages(group, peers)
    return Transport(group)


def _transport(
    group: dist.ProcessGroup, device: torch.device, peers: dist.ProcessGroup, is_simulated: bool
) -> Transport:
    return Transport(group) if is_simulated else transport_of(group, device, peers)


def _group_of_this_rank() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "there are process groups"
    made = kept_for(world, _Made)
    if made.alone is None or is_destroyed(made.alone):
        # Local synchronization: the other ranks do not take part.
        made.alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return made.alone


def mesh_of_this_rank(device_type: str) -> DeviceMesh:
    """Return a mesh with one dimension, in which this rank is alone."""
    return DeviceMesh.from_group(_group_of_this_rank(), device_type, mesh_dim_names=("alone",))


def default_mesh() -> DeviceMesh:
    """Return a mesh of all ranks, on the accelerator that the process group serves, else on the CPU."""
    world, device_type = dist.group.WORLD, "cpu"
    assert world is not None, "the caller has checked"
    made = kept_for(world, _Made)
    accelerator = None if made.is_on_cpu else torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in group_device_types(world) and dist.get_backend(world) != "gloo":
        device_type = accelerator.type
    mesh = made.default_meshes.get(device_type)
    if mesh is None:
        mesh = made.default_meshes[device_type] = init_device_mesh(device_type, (dist.get_world_size(),))
    return mesh


def stay_on_cpu() -> None:
    """Let ``default_mesh`` be on the CPU in the present process group, whatever this machine has: for simulations."""
    world = dist.group.WORLD
    assert world is not None, "the caller has made it"
    kept_for(world, _Made).is_on_cpu = True


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """Return the device where shards of groups on ``mesh`` live.

    Raises:
        ValueError: this machine has no such device.
    """
    device_type = mesh.device_type
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.get_device_module(device_type).is_available():
        raise MisuseError(f"the given device mesh is on {device_type}, but this machine has no such device")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())

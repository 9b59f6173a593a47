"""The first forward of a root: sets up the root, and compares the models of all ranks.

Called by the outermost forward, and again after ``fully_shard`` calls and changes that a ``ChangeDetector`` has
noticed. In the order of this file: check that gradients are averaged over the same ranks, check that replicas are
equal, give advice about groups that are too small, take over the user's changes, and set up a root."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import accumulate
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ..._torch import DTensorSpec, current_graph_task_id, in_transform
from ...errors import MisuseError, MisuseRuntimeError, RanksDifferError
from ..comm import Carrier, ControlExchange, DataParallelMesh, Names, as_transferable, first_difference, is_on, meet
from ..flat import (
    Communicator,
    FlatParamHandle,
    describe,
    handle_of,
    reflatten,
    refuse_shared_memory,
    regions_of,
    specs_of,
)
from ..group import (
    OTHER_MODEL,
    ChangeDetector,
    CollectiveLog,
    Replacement,
    Root,
    Scheduler,
    _FSDPState,
    compare_starts,
    contexts_of,
    count_steps,
    digest_of,
    find_replacements,
    find_untied,
    group_modules,
    is_running,
    judge_positions,
    left_empty_error,
    modules_to_run,
    prepare_swap,
    rebind_live_optimizers,
    refuse_unwritten_buffers,
    roots_together,
    take_over_assigned,
    unsharded_tensors,
    widest_mesh,
)
from .group_ops import FIXED_ORDER, follow_requires_grad
from .untracked_writes import checksum

if TYPE_CHECKING:
    from ..group import Move

# ---- Check that the gradients of all groups below one root are averaged over the same ranks
#
# The data ranks of a root are those of the largest data-parallel mesh below it. Each has a batch of its own, so every
# gradient must be averaged over all of them. A group may be on fewer ranks if all of its parameters are DTensors on a
# mesh over the missing ones (expert parallelism): backward has already summed their gradients over that mesh. Then the
# average over the group's ranks is too large by a known factor, which the reduction applies::
#
#     4 data ranks            0 1 2 3
#     experts on meshes of    0 1 | 2 3      these exchange tokens in forward and gradients in backward: a sum
#     sharded over            0 2 | 1 3      the reduction averages over these, and divides by 4 / 2


_Found = Sequence[tuple[_FSDPState, str]]


def mesh_of_root(found: _Found) -> DataParallelMesh:
    """The mesh with the most peers among the meshes of all groups (with their names) below one root. From now on the
    groups work together over the ranks of that mesh.

    Raises:
        ValueError: a group is on other ranks than the rest; the message names a parameter of it.
    """
    _check_replicas(found)
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
            raise MisuseError(
                "the fully_shard groups below one root have meshes, none of which contains all the others: "
                f"{name or '(root)'} is on the ranks {sorted(own)} (including the meshes of its DTensors), and others "
                f"are on {sorted(peers)}"
            )
    for state, _ in found:
        state.run_among(widest.peers, len(data))
    return widest_mesh([state for state, _ in found])


def _check_replicas(found: _Found) -> None:
    """Raise if some groups average over replica groups of the user and others do not, or ranks may skip groups."""
    replicas = found[0][0].mesh.replicas
    for state, name in found:
        if state.mesh.replicas is not replicas:
            raise MisuseError(
                f"set_replicas() was called for some of the fully_shard groups below one root only, or with different "
                f"objects: {name or '(root)'} and {found[0][1] or '(root)'} differ. Call it on the root, after all "
                "calls of fully_shard()"
            )
        if replicas is not None and state.options.is_optional:
            raise MisuseError(optional_replicas_error(name or "(root)"))


def optional_replicas_error(name: str) -> str:
    return (
        f"set_replicas(): the fully_shard group {name} is optional, but which ranks skip it is agreed among the ranks "
        "of one replica group, and other replica groups would reduce other gradients: shard it without optional=True"
    )


def _make_up(mesh: DataParallelMesh, spec: DTensorSpec, data: frozenset[int]) -> bool:
    """Whether a group's ranks, together with those over which a DTensor is split, have all data ranks among them. The
    others (tensor parallelism of experts) share a batch with one of these."""
    joined = mesh.beside(spec.mesh)
    place = (joined.get_coordinate() or ())[mesh.mesh.ndim :]
    # Where it is whole, its gradients would differ.
    ways = [i if item.is_replicate() else slice(None) for i, item in zip(place, spec.placements, strict=True)]
    return data <= {*joined.mesh[tuple([..., *ways])].flatten().tolist()}


def _check_data_ranks(handle: FlatParamHandle, name: str, data: frozenset[int]) -> None:
    mesh = handle.mesh
    own = mesh.ranks()
    if own == data:
        return
    for fqn, spec in zip(handle.fqns, specs_of(handle.tensor_parallel, len(handle.fqns)), strict=True):
        if spec is None or not _make_up(mesh, spec, data):
            where = f"{name}.{fqn}" if name else fqn
            if spec is not None:
                where += f", placed {list(spec.placements)} on the ranks {spec.mesh.mesh.tolist()},"
            raise MisuseError(
                f"the fully_shard groups below one root have different meshes: {where} is on the "
                f"ranks {sorted(own)}, so its gradient would be averaged over these only, but others are on "
                f"{sorted(data)}. Use meshes with the same ranks for all groups of a model (a mesh of two dimensions "
                "can shard a group over some ranks and replicate it over the rest), or make all parameters of the "
                "group DTensors on the remaining ranks (expert parallelism)"
            )


# ---- Check that replicas are equal at the first forward; groups made by ``replicate`` get the first rank's values
#
# Several ranks may hold the same elements of a parameter: replicas, and tensor-parallel ranks if tensor parallelism has
# not cut the parameter. They get the same gradients, so a difference at the start remains: each rank would train a
# different model, and a checkpoint would be a mixture of them. The batches of tensor-parallel ranks, which compute one
# forward together, are compared too.


_DIGEST_LENGTH = 32  # characters


def compare_replicas(mesh: DataParallelMesh, states: Sequence[_FSDPState]) -> None:
    """Check that replicas are equal. Ranks: all peers of ``mesh``, with equal groups.

    Raises:
        RuntimeError: on every rank, if replicas differ; the message names the first such parameter and the ranks.
    """
    # Groups made by replicate() cannot differ: broadcast_first_replica() has just given all ranks the same values.
    compared = [state for state in states if state.options.bucket_bytes is None]
    replicated = [*_with_replicas(compared)]
    if not replicated:
        return
    sums: dict[str, list[list[int]]] = {}
    for place, handle, ranges, _ in replicated:
        sums.setdefault(place, []).extend(checksum(handle.shard[start:stop]) for start, stop in ranges)
    purpose = "first forward: comparing replicas"
    digests = [(place, _digest(found)) for place, found in sums.items()]
    difference = meet(mesh.peers, purpose, json.dumps(digests), _first_difference)
    if not difference:
        return
    # One digest covers all parameters at a place. To name one, the ranks that differ compare those by parameter.
    where, *differing = json.loads(difference)
    each = {}
    for place, handle, _, indices in replicated if mesh.rank in differing else ():
        views = handle.locals_of(handle.shard)
        for i in indices if place == where else ():
            each[handle.name_of(i)] = checksum(views[i])
    difference = meet(mesh.peers, purpose, json.dumps([*each.items()]), _first_difference)
    name, first, other = json.loads(difference)
    raise RanksDifferError(
        f"first forward: {name} has different elements on ranks {first} and {other}, which hold "
        "replicas of it: they would train different models. Start from equal parameters: use the same seed on all "
        "ranks, load a checkpoint, or call broadcast_replicas(model) after fully_shard()"
    )


def broadcast_first_replica(states: Sequence[_FSDPState]) -> None:
    """Broadcast the first rank's parameters and buffers of groups made by ``replicate``.

    Ranks: all peers, with equal groups.
    """
    for state in states:
        group = state.mesh.replicate_group
        if state.options.bucket_bytes is None or group is None or state.mesh.is_simulated:
            continue
        for handle in state._handles:
            with torch.no_grad():
                dist.broadcast(as_transferable(handle.shard), group=group, group_src=0)
        for buffer in _buffers(state):
            dist.broadcast(as_transferable(buffer), group=group, group_src=0)


def _buffers(state: _FSDPState) -> Iterator[torch.Tensor]:
    """The buffers of a group's modules, each as contiguous memory. What the caller writes there, the buffer gets."""
    for module in group_modules(state.live_modules()):
        for buffer in module._buffers.values():
            if buffer is None or isinstance(buffer, DTensor) or buffer.layout != torch.strided or not buffer.numel():
                continue
            memory = buffer.detach().contiguous()
            yield memory
            if memory.data_ptr() != buffer.data_ptr():
                with torch.no_grad():
                    buffer.copy_(memory)


_Replicated = tuple[str, FlatParamHandle, list[tuple[int, int]], list[int]]
"""Parameters with their shards on the same ranks: a name for this place (equal on exactly the ranks that must hold the
same elements), the handle, the ranges of the shard that they are in, and their indices."""


def _digest(numbers: object) -> str:
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:_DIGEST_LENGTH]


def _with_replicas(states: Sequence[_FSDPState]) -> Iterator[_Replicated]:
    """The parameters of all groups (the same on all ranks) with replicas; names start with a number for their meshes:
    of two tensor-parallel meshes, dimensions may have one name and other sizes."""
    numbers: dict[tuple[DeviceMesh, DeviceMesh | None], int] = {}
    for state in states:
        for handle in state._handles:
            for place, of, ranges, indices in _replicated_of(handle):
                spec = of.tensor_parallel.specs[indices[0]] if of.tensor_parallel is not None else None
                meshes = handle.mesh.mesh, spec.mesh if spec is not None else None
                yield f"{numbers.setdefault(meshes, len(numbers))} {place}", of, ranges, indices


def _replicated_of(handle: FlatParamHandle) -> Iterator[_Replicated]:
    mesh, own = handle.mesh, handle.tensor_parallel
    if handle.shard.device.type == "meta":
        return
    if own is None:
        if mesh.peers.size() > mesh.shard_world_size:
            everything = [(0, handle.shard.numel())]
            yield f"{mesh.shard_rank}", handle, everything, [*range(len(handle.fqns))]
        return
    by_place: dict[tuple[DeviceMesh | None, str], list[int]] = {}
    for i, spec in enumerate(own.specs):
        by_place.setdefault((spec.mesh if spec is not None else None, own.place(i)), []).append(i)
    for (_, place), indices in by_place.items():
        sharded = prod(device_mesh.size(dim) for device_mesh, dim in own.sharded_dims(indices[0]))
        if mesh.peers.size() > mesh.shard_world_size * sharded:
            ranges = [handle.local_shards[i][:2] for i in indices]
            yield f"{mesh.shard_rank} {place}", handle, ranges, indices


def warn_of_inputs(root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn, on every rank, if ranks that run one forward together (tensor parallelism) were given different tensors, or
    ranks over which experts are spread the same ones.

    Ranks: all peers of the root, at its first forward.
    """
    mesh = root.data_mesh
    has_one_batch = mesh.peers.size() != mesh.data_world_size
    meshes = [handle.mesh for state in root.live_states() for handle in state._handles]
    experts = next((item for item in meshes if item.ranks() < mesh.ranks()), None)
    if not mesh.has_peers or in_transform() or not (has_one_batch or experts):
        return
    given = [
        checksum(leaf)
        for leaf in tree_leaves((args, kwargs))
        if type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_meta
    ]
    # Ranks of one row of the experts' mesh hold the same experts. Those of a column, which has one rank of each row,
    # expect batches of their own.
    column = "" if experts is None or not given else str(experts.data_rank)
    payload = json.dumps([(f"{mesh.data_rank}", _digest(given)), column])
    difference = meet(mesh.peers, "first forward: comparing inputs", payload, _judge_inputs)
    if difference:
        kind, first, other = json.loads(difference)
        text = (
            f"first forward: ranks {first} and {other} were given different inputs. They are tensor-parallel ranks "
            "of one data-parallel rank, which compute one forward together: give all of them the same batch (that "
            "of the data-parallel rank, mesh['dp'].get_local_rank()), unless the model expects parts of a batch "
            "(sequence or context parallelism)"
        )
        if kind == "same":
            text = (
                f"first forward: ranks {first} and {other} were given the same inputs. Parameters are DTensors over "
                "them as experts are, and their gradients are averaged over all data-parallel ranks, as if each had a "
                "batch of its own. If tensor parallelism has split them, pass the data-parallel ranks alone: "
                "fully_shard(module, mesh=mesh['dp'])"
            )
        warnings.warn(text, stacklevel=2)


def _judge_inputs(payloads: list[str]) -> str:
    """Which ranks were given what they should not be, as JSON; empty if there are none."""
    found = [json.loads(payload) for payload in payloads]
    difference = _first_difference([json.dumps([place]) for place, _ in found])
    if difference:
        return json.dumps(["different", *json.loads(difference)[1:]])
    columns: dict[str, dict[str, tuple[int, str]]] = {}
    for rank, ((place, digest), column) in enumerate(found):
        columns.setdefault(column, {}).setdefault(place, (rank, digest))
    pairs = [[*batches.values()][:2] for column, batches in columns.items() if column and len(batches) > 1]
    same = [len({digest for _, digest in batches.values()}) == 1 for column, batches in columns.items() if column]
    return json.dumps(["same", *[rank for rank, _ in pairs[0]]]) if pairs and all(same) else ""


def _first_difference(payloads: list[str]) -> str:
    """The first place where two ranks have different values, with the two ranks, as JSON; empty if there is none."""
    seen: dict[str, tuple[int, object]] = {}
    for rank, payload in enumerate(payloads):
        for place, value in json.loads(payload):
            first, expected = seen.setdefault(place, (rank, value))
            if value != expected:
                return json.dumps([place, first, rank])
    return ""


# ---- Advice at the first forward with very many ranks: groups whose collectives are dominated by their start-up time
#
# An all-gather of a group needs a message from every rank to every other, or as many hops. Below about 1 MiB per rank
# its time no longer shrinks with the size. Then either groups are too small, or too many ranks share each group.


MIN_RANKS = 256  # that share a group; fewer ranks need no advice
SHORT_BYTES = 1 << 20  # per shard
_MOST_UNSHARDED_BYTES = 4 << 30  # limit for merged groups, because they are gathered whole
_FEWEST_RANKS = 8  # a typical machine
_log = logging.getLogger("fsdp_compose")


class GroupSize(NamedTuple):
    """A group, and the size of this rank's shard of it in the dtype in which it is gathered."""

    name: str
    shard_bytes: int


def advise(mesh: DataParallelMesh, states: Sequence[_FSDPState]) -> None:
    """Log advice on the first rank if groups should be merged or sharded over fewer ranks."""
    if mesh.rank != 0:
        return
    by_ranks: dict[int, list[GroupSize]] = {}
    for state in states:
        gathered = [handle for handle in state._handles if handle.mesh.shard_world_size >= MIN_RANKS]
        size = sum(handle.layout.shard_numel * handle.unsharded.dtype.itemsize for handle in gathered)
        if gathered:
            by_ranks.setdefault(gathered[0].mesh.shard_world_size, []).append(GroupSize(state.name, size))
    for num_ranks, groups in by_ranks.items():
        text = advice(groups, num_ranks)
        if text:
            _log.warning("%s", text)


def advice(groups: Sequence[GroupSize], num_ranks: int) -> str:
    """The advice as text; empty if there is none.

    Args:
        groups: all groups that are sharded over the same ``num_ranks`` ranks.
    """
    short = [group for group in groups if group.shard_bytes < SHORT_BYTES]
    if 2 * len(short) < len(groups) or not short:
        return ""  # only a few groups, such as the embeddings or the norm: nothing to gain
    typical = max(1, int(median(group.shard_bytes for group in short)))
    first = short[0]
    text = (
        f"{len(short)} of {len(groups)} fully_shard groups have less than 1 MiB on each of {num_ranks} ranks (half of "
        f"them at most {_in_words(typical)}; {first.name or 'the root'}: {_in_words(first.shard_bytes)}), so their "
        "collectives take longer to start than to move the data"
    )
    remedies = [_hybrid(typical, num_ranks), _merging(typical, num_ranks, len(short))]
    return f"{text}. {' Or '.join(remedy for remedy in remedies if remedy)}"


def _hybrid(shard_bytes: int, num_ranks: int) -> str:
    """Advice to use hybrid sharding over so few ranks that each has 1 MiB."""
    shards = num_ranks
    while shards % 2 == 0 and shards > _FEWEST_RANKS and shard_bytes * num_ranks < SHORT_BYTES * shards:
        shards //= 2
    if shards == num_ranks or shard_bytes * num_ranks < SHORT_BYTES * shards:
        return ""
    return (
        f"Hybrid sharding helps, if memory allows it: a mesh of ({num_ranks // shards}, {shards}), named "
        f"('replicate', 'shard'), gives each rank {_in_words(shard_bytes * num_ranks // shards)} of a group, "
        f"{num_ranks // shards} times as much as now."
    )


def _merging(shard_bytes: int, num_ranks: int, num_short: int) -> str:
    """Advice to merge so many adjacent groups that each rank has 1 MiB, or as many as memory allows."""
    most = max(1, _MOST_UNSHARDED_BYTES // (shard_bytes * num_ranks))
    together = min(-(-SHORT_BYTES // shard_bytes), most, num_short)
    if together < 2:
        return ""
    return (
        f"Merge {together} adjacent groups into one, fully_shard([block, next_block, ...]); gathered, it takes "
        f"{_in_words(together * shard_bytes * num_ranks)}."
    )


def _in_words(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"


# ---- Changes that the user has made between two iterations: take them over into the shards, or refuse them


def take_over(root: Root, states: list[_FSDPState]) -> None:
    for item in states:
        for handle in item._handles:
            if handle.unsharded.has_grad():
                _refuse_stray_gradients(item)
            if handle.was_toggled():
                follow_requires_grad(root, item)
            else:
                handle.follow_requires_grad()
        take_over_assigned(item.swap)
        item.swap.check_slots()
        if any(handle.was_moved() for handle in item._handles):
            _reflatten(root, item)
    _refuse_meta(states)
    detect_again(root)


def detect_again(root: Root) -> None:
    """Replace the change detectors by new ones, which start from the present state."""
    for states in root.by_root_module:
        owner = states[0]()
        if owner is not None:
            owner.detector = ChangeDetector([state for ref in states if (state := ref()) is not None])


def _refuse_meta(states: list[_FSDPState]) -> None:
    for state in states:
        if any(handle.unsharded.is_meta for handle in state._handles):
            raise MisuseRuntimeError(
                f"the parameters of the fully_shard group {state.name} are still on the meta device: call "
                "model.to_empty(device=...) and initialize them before the first forward"
            )


def _refuse_stray_gradients(state: _FSDPState) -> None:
    for handle in state._handles:
        handle.drop_iteration(is_tainted=False)
    raise MisuseRuntimeError(
        f"a backward reached parameters of the fully_shard group {state.name} without passing any of its module's "
        "outputs, so their gradients were not reduced (and are discarded now). Return every tensor that a loss needs "
        "from forward, or keep it as an attribute of the module"
    )


def _reflatten(root: Root, state: _FSDPState) -> None:
    for handle in state._handles:
        if handle.was_moved():
            root.communicator.wait(handle)
            reflatten(handle)
    state.apply_options()
    state.swap.rebuild()
    state.persistent.have_new_parameters()
    _watch_buckets(state)


def _watch_buckets(state: _FSDPState) -> None:
    if state.options.bucket_bytes is not None:
        from .buckets import watch_buckets

        watch_buckets(state)


# ---- Setting up a root


class _Tree:
    """Counts ``fully_shard`` calls. After each call, roots look at their module tree again."""

    generation = 0


tree = _Tree()


def tree_has_changed() -> None:
    """Note that a group was added somewhere."""
    tree.generation += 1


def _call_parameters(found: Sequence[tuple[_FSDPState, str]], roots: Iterable[nn.Module]) -> None:
    """Set the names of the parameters of all groups (given with the names of their modules) to those in their root. In
    a group of several modules, one may be outside the roots."""
    called = {module: name for root in reversed([*roots]) for name, module in root.named_modules()}
    for state, name in found:
        modules = state.live_modules()
        several = [called.get(module, type(module).__name__) for module in modules]
        state.call_parameters(Names((name,) if len(modules) == 1 else tuple(several)))


def initialize(state: _FSDPState, module: nn.Module) -> Root:
    """Make ``state``, whose module begins an outermost forward, the root of the groups below it, together with the
    roots that share groups with it, if there are any.

    All ranks of the mesh call this together and compare their models.

    Raises:
        ValueError: a trainable parameter below the root belongs to no group, or parameters are on the meta device.
        RuntimeError: on every rank, the ranks have different models; or a rank did not come.
    """
    roots = roots_together(module)
    names: dict[_FSDPState, str] = {}
    for top in roots:
        for item, name in top.groups:
            names.setdefault(item, name)
    found, states, owners = list(names.items()), list(names), [top.state for top in roots]
    for item in states:
        item.refuse_sleeping()
    are_optional = any(item.options.is_optional for item in states)
    if are_optional:
        from ...plugins.optional_groups import check_optional

        check_optional(owners, names)
    earlier = contexts_of(states)
    for context in earlier:
        _make_joinable(context, module)
    for item in states:
        if not item.is_complete:
            prepare_swap(item)
        take_over_assigned(item.swap)
    moves: list[Move] = []
    if any(map(_has_ties, states)):
        from ..group import find_moves

        for top in roots:
            known = {sharded for move in moves for sharded in move.sharded_params}
            moves += [move for move in find_moves(top.module, top.states) if known.isdisjoint(move.sharded_params)]
    rebind_live_optimizers()
    below = [submodule for top in roots for _, submodule in modules_to_run(top.module)]
    replacements = find_replacements((item.swap for item in states), below)
    arriving = {param for move in moves for param in move.untied} | {item.given for item in replacements}
    for top in roots:
        _check_everything_is_managed(top.module, top.states, arriving)
        refuse_unwritten_buffers(modules_to_run(top.module))
        _refuse_shared_memory(top.module, top.groups, {item.given for item in replacements})
    mesh = mesh_of_root(found)
    for index, (item, name) in enumerate(found):
        item.set_position(name, index, is_outermost=item in owners)
    _call_parameters(found, (top.module for top in roots))
    order = CollectiveLog.of(mesh.peers)
    # A rank that still requests an optional group of another model would wait for the ranks that meet below.
    if order.serve is not None:
        order.serve(None, OTHER_MODEL)
    model = ""
    if mesh.has_peers:
        model = _meet_first_forward(order, mesh, state, states, moves, replacements)
        compare_starts(mesh, [item for item in states if item.root is None], {item.own for item in replacements})
    elif left_empty := left_empty_error(states):
        raise MisuseRuntimeError(left_empty)
    for replacement in replacements:
        replacement.take_over()
    rebind_live_optimizers()
    if moves:
        from ..group import apply_moves

        apply_moves(moves)
    # Moves have made new flat parameters, whose parameters have no names in the root yet.
    _call_parameters(found, (top.module for top in roots))
    handles = [handle for item in states for handle in item._handles]
    num_params = sum(len(item.fqns) for item in handles)
    carrier = Carrier.of(mesh.peers) if mesh.has_peers else None
    exchange = ControlExchange(num_params, len(states), carrier)
    exchanges = exchange, ControlExchange(num_params, len(states), carrier, end_of="forward")
    scheduler: Scheduler = FIXED_ORDER
    if are_optional:
        from ...plugins.optional_groups import scheduler_of

        scheduler = scheduler_of(states, carrier)
    if any(item.options.limit_unsharded_bytes is not None for item in states):
        from ...plugins.bounded_memory import bounded

        scheduler = bounded(states, scheduler)
    starts = dict(zip(handles, accumulate((len(handle.fqns) for handle in handles), initial=0), strict=False))
    for handle, start in starts.items():
        handle.pending_gradients.write_used_to(exchange.used[start : start + len(handle.fqns)])
    make_communicator = Communicator
    if is_on():
        from ...plugins.debugging import LockstepCommunicator

        make_communicator = LockstepCommunicator
    communicator = make_communicator(mesh.device, handles)
    number = order.register_root(state, states, model)
    if mesh.has_peers:
        from ...plugins.debugging import look_after_standstill

        look_after_standstill()
    advise(mesh, states)
    grouped = [top.states for top in roots]
    num_forwards = max((context.num_forwards for context in earlier), default=0)
    root = Root(
        grouped, communicator, exchanges, tree.generation, order, number, num_forwards, scheduler, _gather_parameter
    )
    root.used_starts.update(starts)
    scheduler.attach_root(root)
    if mesh.has_peers:
        count_steps(root)
    take_over(root, states)  # changes since fully_shard()
    for item in states:
        for handle in item._handles:
            handle.refuse_late_methods()
    broadcast_first_replica([item for item in states if item.root is None])
    if mesh.has_peers:
        compare_replicas(mesh, [item for item in states if item.root is None])
    for item in states:
        _watch_buckets(item)
        item.swap.note_children()
        item.attach_root(root, keeps_awaiting=len(roots) > 1)
    return root


def _has_ties(state: _FSDPState) -> bool:
    """Whether a parameter may have to move to another group: a module of this one shows one that is tied, or untied."""
    own, seen = {*state._handles}, set[nn.Parameter]()
    for module in group_modules(state.live_modules()):
        for param in module._parameters.values():
            place = None if param is None else handle_of(param)
            if param is None or place is None:
                continue
            if place[0] not in own or param in seen:
                return True
            seen.add(param)
    return bool(find_untied(state.swap))


def _gather_parameter(*arguments: Any) -> torch.Tensor:
    from ...plugins.functional import gather_parameter

    return gather_parameter(*arguments)


def _make_joinable(context: Root, module: nn.Module) -> None:
    """Make sure that the groups of a root can move to other roots, which is possible only between iterations."""
    is_in_backward = context.backward is not None and current_graph_task_id() != -1
    if is_in_backward or (context.forward.depth and is_running(context.forward.caller)):
        where = "backward" if is_in_backward else "forward"
        raise MisuseRuntimeError(
            f"the first forward of the fully_shard'ed {type(module).__name__} runs inside the {where} of another "
            "fully_shard'ed module, which shares groups with it but does not contain it: run its first forward "
            "earlier, outside"
        )
    if context.is_dead:
        from .recovery import recover

        recover(context)


def _check_everything_is_managed(module: nn.Module, states: list[_FSDPState], arriving: Set[nn.Parameter]) -> None:
    """Raise if a trainable parameter belongs to no group and is not ``arriving`` in one."""
    handles = {handle for item in states for handle in item._handles}
    ignored = {param for item in states for param in item.ignored} | arriving
    stray = [
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in modules_to_run(module)
        for name, param in submodule._parameters.items()
        if param is not None and param.requires_grad and not _is_held(param, handles) and param not in ignored
    ]
    if stray:
        raise MisuseError(
            f"{len(stray)} trainable parameter(s) below a fully_shard'ed module belong to no group, so their gradients "
            f"would not be reduced: {', '.join(stray[:5])}{' ...' if len(stray) > 5 else ''}. They were added or "
            "replaced after fully_shard(): build the module completely first, or pass them as ignored_params"
        )


def _refuse_shared_memory(
    module: nn.Module, found: Sequence[tuple[_FSDPState, str]], arriving: Set[nn.Parameter]
) -> None:
    """Raise if parameters of some group, or those ``arriving`` in one, share memory with each other or with others."""
    regions = [
        replace(region, name=f"{name}.{region.name}" if name else region.name)
        for state, name in found
        for region in state.persistent.regions
    ]
    if regions or arriving:
        fqns = {submodule: name for name, submodule in modules_to_run(module)}
        others = [*unsharded_tensors(fqns, ())]
        regions += regions_of({id(item): (name, item) for name, item in others if item in arriving}.values(), True)
        refuse_shared_memory([*regions, *regions_of([each for each in others if each[1] not in arriving], False)])
    for state, _ in found:
        state.persistent.regions = []


def _is_held(param: nn.Parameter, handles: set[FlatParamHandle]) -> bool:
    """Whether ``param`` is a sharded parameter of one of the ``handles``."""
    place = handle_of(param)
    return place is not None and place[0] in handles


def _meet_first_forward(
    order: CollectiveLog,
    mesh: DataParallelMesh,
    state: _FSDPState,
    states: list[_FSDPState],
    moves: list[Move],
    replacements: list[Replacement],
) -> str:
    """Compare the models of all ranks. Returns a digest of the model."""
    left_empty = left_empty_error(states)
    lines = [json.dumps(left_empty)]
    for item in states:
        facts = [fact for handle in item._handles for fact in describe(handle)]
        options = {**item.options.facts(item.position.is_outermost), **item.mesh.facts()}
        transports = [handle.transport_names() for handle in item._handles]
        lines += [json.dumps({"group": item.name, **fact}) for fact in (*facts, options, *transports)]
    lines += [
        json.dumps({"group": move.target.name, "tied parameters": [*move.sharded_params.values()]}) for move in moves
    ]
    for replacement in replacements:
        own, given, _ = replacement
        place = handle_of(own)
        assert place is not None
        kind = f"a DTensor, {given.placements}" if isinstance(given, DTensor) else "a plain parameter"
        values = "" if replacement.whole is None else digest_of(replacement.whole)
        fact = {"replaced": place[0].name_of(place[1]), "by": kind, "requires_grad": given.requires_grad}
        lines.append(json.dumps({**fact, "digest": values}))
    details = "\n".join(lines)

    def explain(rank: int, ours: str, theirs: str) -> str:
        difference = first_difference(ours.split("\n"), theirs.split("\n"))
        assert difference is not None, "digests differ"
        if difference[0] == 0:
            raise MisuseRuntimeError(json.loads(difference[1]) or json.loads(difference[2]))
        _, a, b = difference
        first, other = (json.loads(text or "{}") for text in (a, b))
        words = [key for key in first if key in other and first[key] != other[key]]
        return (
            f"first forward: the ranks have different models{': ' * bool(words)}{', '.join(words)}. The first "
            f"difference is between rank 0, which has {a}, "
            f"and rank {rank}, which has {b}. Build the same model and call fully_shard() the same way on every rank"
        )

    digest = hashlib.sha256(details.encode()).hexdigest()

    if is_on():
        from ...plugins.debugging import announce_first_forward

        announce_first_forward(mesh)
    position = order.position_of(state, states, digest)
    verdict = meet(mesh.peers, "first forward", digest, judge_positions, details, explain, aside=position)
    if verdict:
        raise RanksDifferError(verdict)
    if left_empty:
        raise MisuseRuntimeError(left_empty)
    return digest

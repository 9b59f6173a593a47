"""Whole matrices of sharded parameters at owners: which rank computes which, and how its shards get there and back.

Every matrix has one owner among the ranks that share the shards. What the owner lacks of it is sent there, and the
result comes back the same way. What lies whole at its owner does not move::

    rank 0   |A A A|B B|                    A: owner 0, moves nothing
    rank 1             |B B|C C C C C|      B: owner 1; rank 0 sends its shard, and gets its shard of the result
                                            C: owner 1, moves nothing

All ranks plan the same, from shapes alone (``assign``, ``stacks_of``). ``Exchange`` moves some matrices with one
all-to-all in each direction, or with none if nothing moves. Nothing here knows what is computed with the matrices."""

from __future__ import annotations

import heapq
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch import DTensorSpec, StridedShard, compute_local_shape_and_global_offset, dtensor_spec, foreach_copy_
from ..errors import MisuseError
from ..extension import (
    DataParallelMesh,
    FlatParamHandle,
    Label,
    RaggedDTensor,
    RunLengths,
    Transport,
    Work,
    handle_of,
    local_of,
    noticing_loss,
)

_ONE_ROW = (1, 1)  # what has no rows is one row
_MOST_TOGETHER = 1 << 20
_MOST_SETS = 16  # of parameters with gradients, whose exchanges are remembered
SLACK = 0.05  # how much more than the mean an owner may have to do, before a matrix goes elsewhere


@dataclass(frozen=True)
class Matrices:
    """The matrices of one parameter, one after the other.

    Attributes:
        count, rows, cols: number and size of the matrices.
        counts: how many elements of the parameter each rank has, in the order of ranks.
        cost: the work that one of them is.
    """

    count: int
    rows: int
    cols: int
    counts: RunLengths
    cost: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols


def matrices_of(shape: Sequence[int], counts: RunLengths, block_rows: int | None, cost: int | None = None) -> Matrices:
    """The matrices of a parameter: its last two dimensions, or blocks of ``block_rows`` of their rows.

    Args:
        cost: see ``Matrices``; default: that of a product of the matrix and its transpose.
    """
    count, (rows, cols) = prod(shape[:-2]), (*_ONE_ROW, *shape)[-2:]
    if block_rows is not None:
        count, rows = count * (rows // block_rows), block_rows
    return Matrices(count, rows, cols, counts, rows * cols * min(rows, cols) if cost is None else cost)


def assign(
    params: Sequence[Matrices], num_ranks: int, chosen: Callable[[int, int], bool] | None = None
) -> list[list[int]]:
    """Return the owner of each matrix of each parameter; -1 for those (parameter, number) that are not ``chosen``. The
    same on every rank.

    The longest go first, each to the rank that has most of it, unless that then has more than ``SLACK`` above the mean
    to do; else to the rank with the least to do. A matrix that lies whole on one rank stays there, unless ranks would
    be further apart than ``SLACK`` and are closer if it may move."""
    owners, loads = _assign(params, num_ranks, chosen, may_move_whole=False)
    if max(loads) * num_ranks > (1 + SLACK) * sum(loads):
        others, other_loads = _assign(params, num_ranks, chosen, may_move_whole=True)
        if max(other_loads) < max(loads):
            return others
    return owners


def _assign(
    params: Sequence[Matrices], num_ranks: int, chosen: Callable[[int, int], bool] | None, may_move_whole: bool
) -> tuple[list[list[int]], list[int]]:
    owners, loads = [[-1] * item.count for item in params], [0] * num_ranks
    movable: list[tuple[int, int, int, int]] = []  # cost, parameter, matrix, the rank that has most of it
    for i, item in enumerate(params):
        for k, (rank, is_whole) in enumerate(_holders(item)):
            if chosen is not None and not chosen(i, k):
                continue
            if is_whole and not may_move_whole:
                owners[i][k] = rank
                loads[rank] += item.cost
            else:
                movable.append((-item.cost, i, k, rank))
    movable.sort()
    most = (1 + SLACK) * (sum(loads) - sum(cost for cost, _, _, _ in movable)) / num_ranks
    least = [(load, rank) for rank, load in enumerate(loads)]  # a heap, in which old loads stay
    heapq.heapify(least)
    for negative, i, k, holder in movable:
        owner = holder
        if loads[holder] - negative > most:
            load, owner = heapq.heappop(least)
            while load != loads[owner]:
                load, owner = heapq.heappop(least)
        owners[i][k] = owner
        loads[owner] -= negative
        heapq.heappush(least, (loads[owner], owner))
    return owners, loads


def _holders(item: Matrices) -> list[tuple[int, bool]]:
    """For each matrix of a parameter, the (first) rank that has most of it, and whether that has all of it."""
    found, counts, numel = [], item.counts, item.numel
    # Only ranks that have something, which lie next to each other: however many ranks there are, few pieces.
    starts, firsts, position, rank = [], [], 0, 0
    for count, num_ranks in counts.pieces:
        if count:
            starts.append(position)
            firsts.append((rank, count))
        position, rank = position + count * num_ranks, rank + num_ranks
    if not starts:
        return [(0, False)] * item.count
    for k in range(item.count):
        begin, end = k * numel, min((k + 1) * numel, counts.total)
        piece = bisect_right(starts, begin) - 1
        best, most, at = 0, -1, begin
        while at < end:
            if piece + 1 < len(starts) and starts[piece + 1] <= at:
                piece += 1
            first, count = firsts[piece]
            index = (at - starts[piece]) // count
            stop = min(end, starts[piece] + (index + 1) * count)
            if stop - at > most:
                best, most = first + index, stop - at
            if most >= end - stop:  # nobody has more
                break
            at = stop
        found.append((best, most == numel))
    return found


@dataclass(frozen=True)
class Stack:
    """Adjacent matrices of one parameter with one owner.

    Attributes:
        param: the parameter's number.
        start: the first element, counted from the parameter's start.
        count, rows, cols: number and size of the matrices.
        owner: the rank that computes them.
        ranges: the ranks that have elements of it, each with its range, counted from ``start``.
    """

    param: int
    start: int
    count: int
    rows: int
    cols: int
    owner: int
    ranges: tuple[tuple[int, int, int], ...]

    @property
    def numel(self) -> int:
        return self.count * self.rows * self.cols


def stacks_of(param: int, item: Matrices, owners: Sequence[int], chosen: range | None = None) -> list[Stack]:
    """The stacks of one parameter, in order; ``chosen``: of these matrices. Those with the owner -1 are left out."""
    result: list[Stack] = []
    first, end = (0, item.count) if chosen is None else (chosen.start, chosen.stop)
    while first < end:
        last = first + 1
        while last < end and owners[last] == owners[first]:
            last += 1
        start, stop = first * item.numel, last * item.numel
        if owners[first] >= 0:
            ranges, rank, position = [], 0, 0
            for count, num_ranks in item.counts.within(start, stop).pieces:
                if count:
                    ranges += [(rank + i, position + i * count, position + (i + 1) * count) for i in range(num_ranks)]
                rank, position = rank + num_ranks, position + count * num_ranks
            result.append(Stack(param, start, last - first, item.rows, item.cols, owners[first], tuple(ranges)))
        first = last
    return result


@dataclass(frozen=True)
class Piece:
    """Some elements of a stack, and where they are in this rank's shard of the parameter.

    Attributes:
        stack: number of the stack, among those that this rank owns; -1: another rank does.
        start, stop: counted from the start of the stack.
        param: the parameter's number.
        local: the first element in this rank's shard; meaningless for what other ranks have.
    """

    stack: int
    start: int
    stop: int
    param: int
    local: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Route(NamedTuple):
    """How matrices travel: their dtype on the way and at the owner, where they are computed with, what sends them."""

    dtype: torch.dtype
    device: torch.device
    transport: Transport
    label: Label


class Exchange:
    """Moves some stacks to their owners, and results back.

    Args:
        stacks: the same on every rank, in the same order.
        rank, num_ranks: this rank's number, and how many share the shards.
        starts: for each parameter, the first element that this rank has.

    Attributes:
        owned: the stacks that this rank owns; ``num_owned``: their elements.
        num_moved: elements that move from rank to rank, in each direction; the same on every rank.
        num_sent, num_received: elements to and from other ranks, on the way to the owners.
    """

    def __init__(self, stacks: Sequence[Stack], rank: int, num_ranks: int, starts: Sequence[int]) -> None:
        self.owned = [stack for stack in stacks if stack.owner == rank]
        self.num_owned = sum([stack.numel for stack in self.owned])
        self.num_moved = 0
        self._kept: list[Piece] = []  # lie at their owner, which is this rank
        sent: list[list[Piece]] = [[] for _ in range(num_ranks)]
        received: list[list[Piece]] = [[] for _ in range(num_ranks)]
        number = -1
        for stack in stacks:
            number += stack.owner == rank
            for holder, start, stop in stack.ranges:
                self.num_moved += (stop - start) * (holder != stack.owner)
                is_mine = stack.owner == rank
                if not is_mine and holder != rank:
                    continue
                local = stack.start + start - starts[stack.param]
                piece = Piece(number if is_mine else -1, start, stop, stack.param, local)
                if not is_mine:
                    sent[stack.owner].append(piece)
                elif holder == rank:
                    self._kept.append(piece)
                else:
                    received[holder].append(piece)
        self._sent, self._received = [*chain.from_iterable(sent)], [*chain.from_iterable(received)]
        self._sent_sizes, self._received_sizes = (
            [sum(piece.numel for piece in pieces) for pieces in by_rank] for by_rank in (sent, received)
        )
        self.num_sent, self.num_received = sum(self._sent_sizes), sum(self._received_sizes)

    def gather(
        self,
        locals_: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        route: Route,
        starts: Mapping[int, int] | None = None,
    ) -> Callable[[], list[torch.Tensor]]:
        """Start to move this rank's shards to the owners.

        Args:
            locals_: by parameter, this rank's shard, 1-D.
            starts: by parameter, the first element in ``locals_``, if that is not this rank's whole shard.

        Returns:
            A function that waits, and returns the stacks that this rank owns: new tensors of (count, rows, cols).
        """
        bases = starts or {}

        def of(piece: Piece) -> torch.Tensor:
            first = piece.local - bases.get(piece.param, 0)
            return locals_[piece.param][first : first + piece.numel]

        wholes = [torch.empty(stack.numel, dtype=route.dtype, device=route.device) for stack in self.owned]
        _copy([wholes[piece.stack][piece.start : piece.stop] for piece in self._kept], [*map(of, self._kept)])
        sent = torch.empty(self.num_sent, dtype=route.dtype, device=route.device)
        sources = [*map(of, self._sent)]
        _copy(sent.split([source.numel() for source in sources]), sources)
        received, wait = self._move(sent, self._received_sizes, self._sent_sizes, route)

        def finish() -> list[torch.Tensor]:
            wait()
            targets = [wholes[piece.stack][piece.start : piece.stop] for piece in self._received]
            _copy(targets, received.split([target.numel() for target in targets]))
            shaped = zip(wholes, self.owned, strict=True)
            return [whole.view(stack.count, stack.rows, stack.cols) for whole, stack in shaped]

        return finish

    def scatter(
        self, results: Sequence[torch.Tensor], route: Route, with_kept: bool = True
    ) -> Callable[[], list[tuple[int, int, torch.Tensor]]]:
        """Start to move results, shaped like the stacks that this rank owns, to the ranks that have the parameters.

        Returns:
            A function that waits, and returns (parameter, start, elements) of this rank's shards; without
            ``with_kept``, of what other ranks have computed of them.
        """
        flats = [result.reshape(-1) for result in results]
        kept = self.kept_of(results) if with_kept else []
        sources = [flats[piece.stack][piece.start : piece.stop] for piece in self._received]
        sent = torch.cat(sources) if sources else torch.empty(0, dtype=route.dtype, device=route.device)
        received, wait = self._move(sent, self._sent_sizes, self._received_sizes, route)

        def finish() -> list[tuple[int, int, torch.Tensor]]:
            wait()
            arrived = zip(self._sent, received.split([piece.numel for piece in self._sent]), strict=True)
            return kept + [(piece.param, piece.local, elements) for piece, elements in arrived]

        return finish

    def kept_of(self, results: Sequence[torch.Tensor]) -> list[tuple[int, int, torch.Tensor]]:
        """(parameter, start, elements) of what this rank has of the results that it has computed itself; views."""
        flats = [result.reshape(-1) for result in results]
        return [(piece.param, piece.local, flats[piece.stack][piece.start : piece.stop]) for piece in self._kept]

    def _move(
        self, sent: torch.Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int], route: Route
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        received = sent.new_empty(sum(received_sizes))
        if not self.num_moved:
            return received, lambda: None
        what, transport = f"the exchange of {route.label} in an optimizer's step", route.transport
        with noticing_loss(transport.group, what):
            work = transport.all_to_all(received, sent, received_sizes, sent_sizes, self.num_moved, route.label)
        return received, partial(_wait, work, transport.group, what, sent)


def _wait(work: Work, group: dist.ProcessGroup, what: str, _sent: torch.Tensor) -> None:
    # ``_sent`` must live as long: on an accelerator the collective may still read it.
    with noticing_loss(group, what):
        work.wait()


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        foreach_copy_([*targets], [*sources])


def name_of(param: torch.Tensor) -> str:
    place = handle_of(param)
    return "a parameter" if place is None else place[0].name_of(place[1])


def local_gradient(optimizer: str, param: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the gradient of ``param``. Raises ValueError unless it is sharded like the parameter."""
    grad, local = local_of(param.grad), local_of(param)
    if grad.shape != local.shape or grad.is_sparse:
        raise MisuseError(
            f"{optimizer}: the gradient of {name_of(param)} has {tuple(grad.shape)} elements on this rank, and the "
            f"parameter {tuple(local.shape)}: expected a dense gradient that is sharded like the parameter"
        )
    return grad


def refuse_other_shard(what: str, param: torch.Tensor, name: str, value: Any) -> None:
    """Raise ValueError unless loaded state, of the shape of a parameter or 0-dimensional, is this rank's shard."""
    here = tuple(local_of(param).shape)
    there = tuple(local_of(value).shape) if isinstance(value, torch.Tensor) else None
    is_alike = not isinstance(value, DTensor) or value.placements == getattr(param, "placements", None)
    if (name != "step" or there != ()) and not (here == there and is_alike):
        raise MisuseError(
            f"{what}: {name_of(param)} has the shape {here} on this rank, and its {name} {there or 'is missing'}: was "
            "it saved by another rank or optimizer, with other shards, or whole? Load what this rank saved, or use "
            "fsdp_compose.checkpoint.set_optimizer_state_dict(), which shards what it is given. Nothing was changed"
        )


def refuse_block_rows(param: torch.Tensor, block_rows: int) -> None:
    """Raise ValueError if a matrix does not consist of whole blocks."""
    rows = (*_ONE_ROW, *param.shape)[-2]
    if block_rows < 1 or rows % block_rows:
        raise MisuseError(
            f"block_rows={block_rows}, but {name_of(param)} has {rows} rows, which are no whole number of such blocks: "
            "give parameters with other blocks a parameter group of their own"
        )


# ---- How one parameter consists of matrices


class MatrixShape(NamedTuple):
    """How a parameter consists of matrices on this rank.

    Attributes:
        matrices: those that this rank's shard group shares.
        planned: those by which owners are chosen: equal on ranks that compute a matrix together.
        start: the first element that this rank has.
        spec: the placement of a matrix that tensor parallelism has cut: its ranks gather it at the owner.
        rows, cols: size of one of the matrices that are orthogonalized.
    """

    matrices: Matrices
    planned: Matrices
    start: int
    spec: DTensorSpec | None
    rows: int
    cols: int


def shape_of(param: torch.Tensor, block_rows: int | None) -> MatrixShape:
    whole_rows, cols = (*_ONE_ROW, *param.shape)[-2:]
    if block_rows is not None:
        refuse_block_rows(param, block_rows)
    rows = block_rows or whole_rows
    cost = rows * cols * min(rows, cols)
    inner, counts, start, own = _placement_of(param)
    cut = {} if own is None else cut_dims(own)
    num_cuts = prod([own.mesh.size(dim) for dim, cut_dim in cut.items() if own is not None and cut_dim == 1])
    is_in_blocks = block_rows is not None and whole_rows % (block_rows * num_cuts) == 0
    is_cut = any(dim == 2 or (dim == 1 and not is_in_blocks) for dim in cut.values())
    if not is_cut:
        item = matrices_of(inner, counts, block_rows, cost)
        return MatrixShape(item, item, start, None, rows, cols)
    item = matrices_of(inner, counts, None, cost * (whole_rows // rows))
    return MatrixShape(item, _planned_of(param, item), start, own, rows, cols)


def cut_dims(spec: DTensorSpec) -> dict[int, int]:
    """By mesh dimension, the dimension of a stack of matrices over which it cuts: 1 for rows, 2 for columns, less for
    what a stack does not show."""
    missing = 3 - len(spec.shape)
    if any(isinstance(item, StridedShard) for item in spec.placements):
        _refuse_strides(spec)
    return {i: item.dim + missing for i, item in enumerate(spec.placements) if isinstance(item, Shard)}


def _refuse_strides(spec: DTensorSpec) -> None:
    raise MisuseError(
        f"an optimizer of whole matrices cannot step a parameter placed {list(spec.placements)}, of which each rank "
        "has several strides: give it to another optimizer"
    )


def _placement_of(param: torch.Tensor) -> tuple[tuple[int, ...], RunLengths, int, DTensorSpec | None]:
    """The shape that the shard group of a parameter shares, what each rank has of it, where this rank's shard starts,
    and how tensor parallelism has placed it."""
    if isinstance(param, RaggedDTensor):
        place, spec = handle_of(param), param._spec
        if spec.even_dim:
            _refuse_strides(spec)
        own = None if place is None or place[0].tensor_parallel is None else place[0].tensor_parallel.specs[place[1]]
        counts = spec.ragged.counts.times(spec.ragged.unit_numel(tuple(spec.inner_shape)))
        return tuple(spec.inner_shape), counts, spec.element_range[0], own
    local, own = local_of(param), dtensor_spec(param) if isinstance(param, DTensor) else None
    return tuple(local.shape), RunLengths([(local.numel(), 1)]), 0, own


def _planned_of(param: torch.Tensor, item: Matrices) -> Matrices:
    """Ranks of a tensor-parallel mesh may have unequally much of a matrix, but must choose one owner for it. Their flat
    parameters have equal layouts, with padding: by these."""
    place = handle_of(param)
    if place is None or item.count == 0:
        return item
    layout, index = place[0].layout, place[1]
    numel = layout.params[index].numel
    counts = RunLengths([(layout.local_shard(index, rank).numel, 1) for rank in range(layout.world_size)])
    return Matrices(item.count, 1, -(-numel // item.count), counts, item.cost)


# ---- What is planned once for the matrices of one shard group


class Member(NamedTuple):
    """A parameter, the number of its parameter group, and how it consists of matrices."""

    param: torch.Tensor
    group: int
    shape: MatrixShape


def gather_cut(member: Member, content: torch.Tensor) -> torch.Tensor:
    """Gather matrices that tensor parallelism has cut, (count, rows, cols). Ranks: those of its mesh."""
    spec, (placements, shape) = member.shape.spec, _cut_of(member, content.size(0))
    assert spec is not None
    stride = (shape[1] * shape[2], shape[2], 1)
    with noticing_loss(spec.mesh.get_group(0), f"the gathering of {name_of(member.param)} over tensor-parallel ranks"):
        cut = DTensor.from_local(content, spec.mesh, placements, run_check=False, shape=shape, stride=stride)
        whole: torch.Tensor = cut.full_tensor()
    return whole


def own_cut(member: Member, whole: torch.Tensor) -> torch.Tensor:
    """What this rank has of matrices that tensor parallelism has cut. No communication."""
    spec, (placements, shape) = member.shape.spec, _cut_of(member, whole.size(0))
    assert spec is not None
    sizes, offsets = compute_local_shape_and_global_offset(shape, spec.mesh, placements)
    return whole[tuple([slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)])]


def _cut_of(member: Member, count: int) -> tuple[list[Placement], torch.Size]:
    spec = member.shape.spec
    assert spec is not None
    dims = cut_dims(spec)
    placements: list[Placement] = [Shard(dims[i]) if dims.get(i, 0) > 0 else Replicate() for i in range(spec.mesh.ndim)]
    return placements, torch.Size((count, *(*_ONE_ROW, *member.param.shape)[-2:]))


@dataclass(eq=False)
class Bucket:
    """Matrices that travel together."""

    exchange: Exchange  # of this replica's matrices
    # For each replica, the (parameter, start, number of elements) of what this rank gets from it, if replicas share the
    # work.
    by_replica: list[list[tuple[int, int, int]]]
    slices: list[tuple[int, int, int]]  # what this rank has of the parameters: (parameter, start, number of elements)


@dataclass(eq=False)
class Plan:
    """The matrices of parameters whose shards lie on the same ranks.

    ``handle``: one of their flat parameters; ``None`` if every rank has whole parameters."""

    members: list[Member]
    handle: FlatParamHandle | None
    splits_replicas: bool
    bucket_bytes: int
    ns_dtype: torch.dtype
    owners: list[list[int]] = field(default_factory=list)
    replicas: list[list[int]] = field(default_factory=list)
    exchanges: dict[bytes, tuple[Label, list[Bucket]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        planned = [member.shape.planned for member in self.members]
        self.replicas = [[0] * item.count for item in planned]
        mesh = self.mesh
        if mesh is not None and self.splits_replicas and mesh.replicate_group is not None:
            anywhere = RunLengths([(0, mesh.replicate_world_size)])
            items = [Matrices(item.count, item.rows, item.cols, anywhere, item.cost) for item in planned]
            self.replicas = assign(items, mesh.replicate_world_size)
        self.owners = self.owners_in(self.replica)
        _living.add(self)

    def owners_in(self, replica: int) -> list[list[int]]:
        """The owners in a replica, with -1 for what other replicas compute."""
        planned = [member.shape.planned for member in self.members]
        return assign(planned, self.num_ranks, lambda i, k: self.replicas[i][k] == replica)

    @property
    def mesh(self) -> DataParallelMesh | None:
        return None if self.handle is None else self.handle.mesh

    @property
    def replica(self) -> int:
        mesh = self.mesh
        if mesh is None or mesh.replicate_group is None or not self.splits_replicas:
            return 0
        return mesh.replicate_group.rank()

    @property
    def num_replicas(self) -> int:
        """The replicas that share the work."""
        mesh = self.mesh
        return 1 if mesh is None or not self.splits_replicas else mesh.replicate_world_size

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.shard_rank

    @property
    def num_ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.shard_world_size

    @property
    def most_together(self) -> int:
        """How many elements are computed at once where that takes memory beside the buckets."""
        return max(1, min(_MOST_TOGETHER, self.bucket_bytes // self.ns_dtype.itemsize // 16))

    @property
    def device(self) -> torch.device:
        handle = self.handle
        return local_of(self.members[0].param).device if handle is None else handle.storage.compute_device(handle.shard)

    def route(self, label: Label) -> Route:
        # Without a mesh, every rank has whole parameters: nothing moves.
        sender: Any = None if self.mesh is None else self.mesh.transport.exact.among(self.mesh.shard_group)
        return Route(self.ns_dtype, self.device, sender, label)

    def exchanges_of(self, present: bytes) -> tuple[Label, list[Bucket]]:
        """The buckets of the parameters that have a gradient, those with a 1 in ``present``, and their names."""
        found = self.exchanges.get(present)
        if found is None:
            if len(self.exchanges) >= _MOST_SETS:
                self.exchanges.clear()
            label = Label([name_of(member.param) for i, member in enumerate(self.members) if present[i]])
            found = self.exchanges[present] = label, [*self._buckets(present)]
        return found

    def _buckets(self, present: bytes) -> Iterator[Bucket]:
        starts = [member.shape.start for member in self.members]
        for pieces in self._pieces(present):
            stacks: list[Stack] = []
            by_replica: list[list[tuple[int, int, int]]] = [[] for _ in range(self.num_replicas)]
            for i, chosen in pieces:
                shape = self.members[i].shape
                stacks += stacks_of(i, shape.matrices, self.owners[i], chosen)
                for k in chosen if self.num_replicas > 1 else ():
                    start, numel = _slice(shape, range(k, k + 1), self.rank)
                    if numel:
                        by_replica[self.replicas[i][k]].append((i, start, numel))
            exchange = Exchange(stacks, self.rank, self.num_ranks, starts)
            slices = [(i, *_slice(self.members[i].shape, chosen, self.rank)) for i, chosen in pieces]
            yield Bucket(exchange, by_replica, slices)

    def _pieces(self, present: bytes) -> Iterator[list[tuple[int, range]]]:
        """Cut the matrices into buckets: parameters, and which of their matrices."""
        pieces: list[tuple[int, range]] = []
        room = self.bucket_bytes
        for i, member in enumerate(self.members):
            item = member.shape.planned  # ranks that compute a matrix together cut alike
            nbytes, first = max(1, item.numel * self.ns_dtype.itemsize), 0
            while present[i] and first < item.count:
                last = min(item.count, first + max(1, room // nbytes))
                begin = pieces.pop()[1].start if pieces and pieces[-1][0] == i else first
                pieces.append((i, range(begin, last)))
                room -= (last - first) * nbytes
                first = last
                if room <= 0:
                    yield pieces
                    pieces, room = [], self.bucket_bytes
        if pieces:
            yield pieces


_living: weakref.WeakSet[Plan] = weakref.WeakSet()

OwnersByParam = dict[int, list[tuple[tuple[int, ...], int, int]]]
"""By the id of a parameter, its matrices in order: the ranks that compute them, by their numbers in the default process
group, with the first number of a matrix and the one after the last."""


def owners_by_param() -> OwnersByParam:
    """The owners of the matrices of all sharded parameters that living optimizers train, as far as they are planned."""
    found: OwnersByParam = {}
    for plan in [*_living]:
        if plan.mesh is None:
            continue
        by_replica = plan.mesh.mesh.mesh.reshape(-1, plan.num_ranks).tolist()
        is_shared = plan.num_replicas > 1
        owners = [plan.owners_in(replica) for replica in range(plan.num_replicas)]
        for i, member in enumerate(plan.members):
            ranks = []
            for k, replica in enumerate(plan.replicas[i]):
                computing = [by_replica[replica]] if is_shared else by_replica
                ranks.append(tuple([row[owners[replica][i][k]] for row in computing]))
            runs = found[id(member.param)] = []
            for same, numbers in groupby(range(len(ranks)), key=ranks.__getitem__):
                first, *others = numbers
                runs.append((same, first, (others[-1] if others else first) + 1))
    return found


def _slice(shape: MatrixShape, chosen: range, rank: int) -> tuple[int, int]:
    """What this rank has of some adjacent matrices: the first element in its shard, and how many."""
    item, start = shape.matrices, shape.start
    begin, end = (min(max(start, k * item.numel), start + item.counts[rank]) for k in (chosen.start, chosen.stop))
    return begin - start, end - begin

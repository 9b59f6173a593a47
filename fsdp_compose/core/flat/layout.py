"""Where each parameter of a group is in the flat parameter, and which elements of it each rank holds.

A flat parameter is one buffer of `world_size` equal shards. It holds the parameters in registration order, each in one
piece. A shard boundary may fall inside a parameter, but never inside one of its granules. Here `a` of shape (5, 4), `b`
of shape (3,) and `c` of shape (2, 4) are on 3 ranks, aligned to 4 elements, one letter per element:

    flat parameter     |aaaaaaaaaaaa|aaaaaaaabbb.|cccccccc....|      . padding, always zero
    shard              |rank 0      |rank 1      |rank 2      |
    local shards of a  |3 rows      |2 rows      |none        |      the shard boundary lies between two rows

The elements of a parameter inside one shard are a local shard: contiguous in the parameter, in the flat parameter and
in the shard; possibly empty. Every parameter and every shard starts on a multiple of `alignment` elements.

Planning finds the smallest shard length that keeps the granules whole that the user asked for. Then, within a budget of
padding, it looks for a length at which as many of the other parameters as possible are sharded between rows of dim 0:
their local shards keep a natural N-D shape. The rest is sharded between any two elements, which costs no padding beyond
alignment. For a given shard length, it is optimal to place each parameter in turn as early as is legal: a later start
never lets the next parameter start earlier. So only the length needs a search.

The plan is a pure function of shapes and sizes: no tensors, no process groups, no state, and the same answer on every
rank. `fully_shard` plans once per flat parameter; buffers, DTensors and checkpoints only read the plan.

Granules come first in this file, then the plan, then the views of flat tensors that it defines.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor.placement_types import Placement

from ..ragged import RaggedShard, RunLengths

if TYPE_CHECKING:
    from ..comm import DataParallelMesh

# ---- Granules: the pieces of parameters that no shard boundary divides, converted from the user's notation to a number
# of elements
#
# Pure functions of shapes.


Granule: TypeAlias = Literal["elements", "rows", "whole"] | int | tuple[int, ...]
"""The unit that no shard boundary splits: an element (`"elements"`), an index of dim 0 (`"rows"`), the parameter
(`"whole"`), N consecutive elements (an int), or a block of this shape, aligned to the parameter's trailing dims (a
tuple)."""


def row_numel(shape: tuple[int, ...]) -> int:
    """Elements of one index of dim 0, but at least 1, because it is used as a divisor."""
    return max(1, math.prod(shape[1:]))


def expected_granule(granule: Granule | None, ndim: int) -> str:
    """Describe the legal granules of a parameter with so many dimensions; empty if the given one is legal."""
    if granule is None or granule in ("elements", "rows", "whole"):
        return ""
    sizes = granule if isinstance(granule, tuple) else (granule,)
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        return "'elements', 'rows', 'whole', a positive int or a tuple of positive ints"
    return f"a block of at most {ndim} dims" if isinstance(granule, tuple) and len(granule) > ndim else ""


def granule_numel(granule: Granule, shape: tuple[int, ...]) -> int:
    """The distance between adjacent legal shard boundaries, counted from the parameter's start."""
    numel = math.prod(shape)
    if isinstance(granule, tuple):
        wanted = _block_stride(granule, shape)
    elif isinstance(granule, int):
        wanted = granule
    else:
        wanted = {"elements": 1, "rows": row_numel(shape), "whole": numel}[granule]
    return max(1, min(wanted, numel))


def _block_stride(block: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The contiguous elements at whose multiples no block is split.

    Blocks side by side share their rows, so only the block's outermost size above 1 counts: a boundary is legal after
    that many whole indices of its dim. Blocks start anew at every index of the dims before it; if they do not fill the
    dim evenly, their starts are not multiples of one number, and the boundary moves out by one dim.

        block (2, 3) in (4, 6): 2 rows = 12        block (3,) in (4, 6): 3         block (4,) in (4, 6): a row = 6
    """
    dim = next((d for d, size in enumerate(block, len(shape) - len(block)) if size > 1), len(shape))
    if dim == len(shape):
        return 1
    size, inner = block[dim - len(shape)], math.prod(shape[dim + 1 :])
    return size * inner if dim == 0 or shape[dim] % size == 0 else shape[dim] * inner


# ---- Planning


__all__ = ["FlatLayout", "LocalShard", "ParamPlacement", "ParamSpec", "plan_equal_rows", "plan_layout"]


@dataclass(frozen=True)
class ParamSpec:
    """A parameter to place. `granule=None` leaves the choice to the planner: rows if they are nearly free."""

    fqn: str
    shape: tuple[int, ...]
    granule: Granule | None = None

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.fqn}: got shape {tuple(self.shape)}, expected sizes >= 0")
        expected = expected_granule(self.granule, len(self.shape))
        if expected:
            raise ValueError(f"{self.fqn} {tuple(self.shape)}: got granule {self.granule!r}, expected {expected}")


@dataclass(frozen=True)
class LocalShard:
    """The elements of one parameter in one shard: `param.view(-1)[param_start:][:numel]` is
    `shard[shard_start:][:numel]`; a parameter in chunks of another dimension than 0 is counted chunk by chunk. An empty
    local shard has `shard_start` 0."""

    param_start: int
    numel: int
    shard_start: int


@dataclass(frozen=True)
class ParamPlacement:
    """Where a parameter is. Local shards that are not empty start on a multiple of `granule` elements, counted from the
    parameter's start. `row_aligned`: every shard boundary inside the parameter is between two rows of dim 0."""

    fqn: str
    shape: tuple[int, ...]
    numel: int
    offset: int
    granule: int
    row_aligned: bool

    @property
    def row_numel(self) -> int:
        """Elements of one index of dim 0; 0 if there are none."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class FlatLayout:
    """The plan of one flat parameter. All sizes are in elements."""

    world_size: int
    alignment: int
    shard_numel: int
    params: tuple[ParamPlacement, ...]
    granule_padding_numel: int
    """The padding that the granules the user asked for add to the shortest possible flat parameter."""
    in_chunks: ClassVar[bool] = False
    """Each rank holds a chunk of every parameter: see the file ``even_chunks``."""

    @property
    def flat_numel(self) -> int:
        return self.world_size * self.shard_numel

    @property
    def payload_numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def padding_numel(self) -> int:
        return self.flat_numel - self.payload_numel

    @property
    def padding_fraction(self) -> float:
        """Padding relative to the payload; 0 if there is no payload."""
        payload = self.payload_numel
        return (self.flat_numel - payload) / payload if payload else 0.0

    def local_shard(self, index: int, rank: int) -> LocalShard:
        """The local shard of parameter `index` that `rank` holds."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        param = self.params[index]
        shard_offset = rank * self.shard_numel
        start = min(max(shard_offset - param.offset, 0), param.numel)
        stop = min(max(shard_offset + self.shard_numel - param.offset, 0), param.numel)
        return LocalShard(start, stop - start, param.offset + start - shard_offset if stop > start else 0)

    def local_shards(self, rank: int) -> list[LocalShard]:
        """The local shard of each parameter that `rank` holds."""
        return [self.local_shard(index, rank) for index in range(len(self.params))]

    @cached_property
    def placements(self) -> Sequence[Placement]:
        """How each parameter is sharded: between rows if the shard boundaries are, else between elements."""
        placements: list[Placement] = []
        for index, param in enumerate(self.params):
            counts, row = self.counts(index), param.row_numel
            is_rows = param.row_aligned and bool(param.shape) and row > 0
            placements.append(RaggedShard(counts.divided_by(row) if is_rows else counts, flat=not is_rows))
        return placements

    def local_shards_of(self, index: int) -> dict[int, LocalShard]:
        """The local shards of parameter `index`, by rank, for the ranks that hold some of it."""
        return {rank: self.local_shard(index, rank) for rank in self.holders(index)}

    def counts(self, index: int) -> RunLengths:
        """How many elements of parameter `index` each rank holds: at most five runs of equal counts."""
        param = self.params[index]
        return self.counts_of(param.offset, param.offset + param.numel)

    def counts_of(self, start: int, stop: int) -> RunLengths:
        """How many of the elements `start` to `stop` of the flat parameter each rank holds."""
        return RunLengths([(self.shard_numel, self.world_size)]).within(start, stop)

    def range_in_shard(self, start: int, stop: int, rank: int) -> tuple[int, int]:
        """Where the elements ``start`` to ``stop`` of the flat parameter are in a rank's shard; with the padding
        between parameters."""
        before, numel = rank * self.shard_numel, self.shard_numel
        return min(max(start - before, 0), numel), min(max(stop - before, 0), numel)

    def over(self, mesh: DataParallelMesh) -> DataParallelMesh:
        """The mesh for a flat parameter with this layout."""
        return mesh

    def own_shard(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank's shard has of a whole flat tensor."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def own_elements(self, index: int, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank holds of the whole parameter ``index``, flattened."""
        local = self.local_shard(index, rank)
        return whole.reshape(-1)[local.param_start : local.param_start + local.numel]

    def whole_of(self, index: int, elements: torch.Tensor) -> torch.Tensor:
        """The whole parameter ``index``, of which the elements are given one rank's after the other."""
        return elements.view(self.params[index].shape)

    def as_shards(self, flat: torch.Tensor) -> torch.Tensor:
        """The shards of all ranks in a whole flat tensor, one after the other."""
        return flat

    def views_of_range(self, shards: torch.Tensor, indices: range) -> list[torch.Tensor]:
        """The whole parameters of a range, of which all ranks' elements, with the padding after each parameter, are
        given one rank after the other; views if possible."""
        start, params = self.params[indices.start].offset, [self.params[i] for i in indices]
        return [shards[p.offset - start :][: p.numel].view(p.shape) for p in params]

    def positions_in_range(self, positions: torch.Tensor, indices: range) -> torch.Tensor:
        """Where elements of such shards are if the parameters are one after the other, from the first one's start."""
        return positions

    def holders(self, index: int) -> range:
        """The ranks that hold elements of parameter `index`."""
        param, shard = self.params[index], self.shard_numel
        return range(param.offset // shard, -(-(param.offset + param.numel) // shard) if param.numel else 0)

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """The shape of `rank`'s local shard: N-D if the shard boundaries are between rows, else 1-D."""
        param, numel = self.params[index], self.local_shard(index, rank).numel
        if not param.shape:
            return () if numel else (0,)
        if not param.row_aligned:
            return (numel,)
        return (numel // row_numel(param.shape), *param.shape[1:])

    def with_shapes(self, shapes: Sequence[tuple[int, ...]]) -> FlatLayout:
        """Return this layout for a rank that holds less of some parameters than was planned for (uneven tensor
        parallelism): offsets and shard length stay those of all ranks, and what is missing of a parameter is
        padding."""
        if all(param.shape == tuple(shape) for param, shape in zip(self.params, shapes, strict=True)):
            return self
        params = [
            _placement(ParamSpec(param.fqn, tuple(shape)), param.offset, param.granule, self.shard_numel)
            for param, shape in zip(self.params, shapes, strict=True)
        ]
        return replace(self, params=tuple(params))

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding: `(start, stop)` intervals of the flat parameter that belong to no parameter, in order."""
        starts = [0, *(param.offset + param.numel for param in self.params)]
        stops = [*(param.offset for param in self.params), self.flat_numel]
        return tuple((start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)


def plan_equal_rows(fqn: str, shape: tuple[int, ...], world_size: int) -> FlatLayout:
    """Plan one parameter by itself, with equally many rows of dim 0 on every rank; what is missing at the end is
    padding.

        5 rows of 4 elements on 3 ranks    |aaaaaaaa|aaaaaaaa|aaaa....|
    """
    # Not aligned: classes that gather such a parameter compute how many rows a rank has.
    row = row_numel(shape)
    placement = ParamPlacement(fqn, shape, math.prod(shape), 0, row, row_aligned=True)
    return FlatLayout(world_size, 1, -(-shape[0] // world_size) * row, (placement,), 0)


def plan_layout(
    params: Sequence[ParamSpec], world_size: int, alignment: int, padding_budget: float = 0.01
) -> FlatLayout:
    """Place `params`, in this order, in a flat parameter of `world_size` equal shards.

    Args:
        params: the parameters. A granule they name is never split, whatever that costs.
        world_size: number of shards.
        alignment: every parameter and every shard starts on a multiple of this many elements.
        padding_budget: how much padding, as a fraction of the payload, may be spent to shard parameters without a
            granule between rows. Padding that alignment or the named granules cause in any case counts against it.

    >>> plan_layout([ParamSpec("w", (6, 4)), ParamSpec("b", (4,))], world_size=2, alignment=4).shard_numel
    16
    """
    if world_size < 1 or alignment < 1:
        raise ValueError(f"got world_size={world_size}, alignment={alignment}, expected both >= 1")
    if not 0 <= padding_budget < math.inf:
        raise ValueError(f"got padding_budget={padding_budget}, expected a finite number >= 0")

    return _plan(tuple(params), world_size, alignment, padding_budget)


# A model's layers are mostly alike, and planning hundreds of parameters for thousands of ranks takes a tenth of a
# second. Groups whose parameters have the same names share the layout, others only where its parameters are.
@lru_cache(maxsize=256)
def _plan(params: tuple[ParamSpec, ...], world_size: int, alignment: int, padding_budget: float) -> FlatLayout:
    draft, granule_padding_numel = _solve(_Problem(tuple(map(_request, params)), world_size, alignment), padding_budget)
    placed = zip(params, draft.offsets, draft.granules, strict=True)
    return FlatLayout(
        world_size=world_size,
        alignment=alignment,
        shard_numel=draft.shard_numel,
        params=tuple(_placement(spec, offset, granule, draft.shard_numel) for spec, offset, granule in placed),
        granule_padding_numel=granule_padding_numel,
    )


# --- The problem and one attempt at it -------------------------------------------------------------------------------


class _Request(NamedTuple):
    numel: int
    granule: int
    required: bool  # otherwise a wish, dropped if it costs too much


@dataclass(frozen=True)
class _Problem:
    requests: tuple[_Request, ...]
    world_size: int
    alignment: int

    @property
    def packed_numel(self) -> int:
        """The flat parameter's length if nothing but alignment mattered; at least 1."""
        # So shards are never empty, even if all parameters are: a buffer without bytes has no address of its own.
        return max(1, sum(_round_up(request.numel, self.alignment) for request in self.requests))

    @property
    def packed_shard_numel(self) -> int:
        return _round_up(-(-self.packed_numel // self.world_size), self.alignment)


class _Draft(NamedTuple):
    shard_numel: int
    offsets: tuple[int, ...]
    granules: tuple[int, ...]  # 1 where a wish was dropped
    num_wishes_kept: int


@lru_cache(maxsize=256)
def _solve(problem: _Problem, padding_budget: float) -> tuple[_Draft, int]:
    """The best draft, and the padding that required granules cost."""
    payload_numel = sum(request.numel for request in problem.requests)
    smallest = _smallest_shard(problem)
    largest = max(smallest, int((1 + padding_budget) * payload_numel) // problem.world_size)
    draft = _prefer_rows(problem, smallest, largest)
    return draft, problem.world_size * (smallest - problem.packed_shard_numel)


def clear_plans() -> None:
    """Clear the cache of plans, for measurements."""
    _plan.cache_clear()
    _solve.cache_clear()


def _request(spec: ParamSpec) -> _Request:
    """The request that `spec` makes; without a granule of its own it wishes for rows."""
    wanted = "rows" if spec.granule is None else spec.granule
    return _Request(math.prod(spec.shape), granule_numel(wanted, spec.shape), spec.granule is not None)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _placement(spec: ParamSpec, offset: int, granule: int, shard_numel: int) -> ParamPlacement:
    shape, numel = tuple(spec.shape), math.prod(spec.shape)
    first_boundary = shard_numel - offset % shard_numel
    # If one pair of adjacent boundaries between rows is a whole number of rows apart, so are all others.
    boundaries = [boundary for boundary in (first_boundary, first_boundary + shard_numel) if boundary < numel]
    row_aligned = all(boundary % row_numel(shape) == 0 for boundary in boundaries)
    return ParamPlacement(spec.fqn, shape, numel, offset, granule, row_aligned)


def _earliest_start(cursor: int, numel: int, granule: int, shard_numel: int, alignment: int) -> int | None:
    """The first aligned place from `cursor` (aligned) on where no granule is split; None if there is none."""
    boundary = (cursor // shard_numel + 1) * shard_numel
    if granule == 1 or cursor + numel <= boundary:
        return cursor
    step = math.lcm(granule, alignment)
    start = boundary - (boundary - cursor) // step * step
    # With two boundaries inside, the distance between them must hold whole granules as well.
    if shard_numel % granule == 0 or start + numel <= boundary + shard_numel:
        return start
    if cursor % shard_numel == 0:  # nothing fits from here, and every later shard looks the same
        return None
    return _earliest_start(boundary, numel, granule, shard_numel, alignment)


def _place(problem: _Problem, shard_numel: int, max_shift: int) -> _Draft | None:
    """Place everything as early as possible, honouring wishes that move their parameter by at most `max_shift`.
    None if that does not fit."""
    alignment, flat_numel = problem.alignment, problem.world_size * shard_numel
    offsets, granules, num_wishes_kept, cursor = [], [], 0, 0
    for numel, granule, required in problem.requests:
        cursor = _round_up(cursor, alignment)
        start = _earliest_start(cursor, numel, granule, shard_numel, alignment)
        if not required:
            if start is None or start - cursor > max_shift:
                start, granule = cursor, 1
            else:
                num_wishes_kept += 1
        if start is None or start + numel > flat_numel:
            return None
        offsets.append(start)
        granules.append(granule)
        cursor = start + numel
    return _Draft(shard_numel, tuple(offsets), tuple(granules), num_wishes_kept)


# --- The search for a shard length -----------------------------------------------------------------------------------

# Bounds the work for groups of many coprime row sizes; real groups have a handful.
_MAX_STEPS = 24


def _smallest_shard(problem: _Problem) -> int:
    """The smallest shard length (as far as searched) at which everything required fits."""
    lower = problem.packed_shard_numel
    best = _round_up(problem.packed_numel, problem.alignment)  # all in one shard: nothing is split
    required = [request for request in problem.requests if request.required]
    for step in _shard_steps(required, problem.alignment, lower, best):
        best = _first_fitting(problem, range(_round_up(lower, step), best, step), fallback=best)
    return best


def _prefer_rows(problem: _Problem, smallest: int, largest: int) -> _Draft:
    """Honour as many wishes as possible with a shard length in `[smallest, largest]`; among equals the shortest."""
    steps = _shard_steps(problem.requests, problem.alignment, smallest, largest)
    # Multiples at growing distances: a handful, however wide the bounds are.
    lengths = {_round_up(smallest, step) + step * (2**n - 1) for step in steps for n in range(32)}
    num_wishes = sum(not request.required for request in problem.requests)
    best = _place(problem, smallest, max_shift=0)
    assert best is not None, "the smallest shard was found by placing with the same arguments"
    for shard_numel in sorted(length for length in lengths if length <= largest):
        if best.num_wishes_kept < num_wishes:
            best = _keep_most_wishes(problem, shard_numel, best)
    return best


def _keep_most_wishes(problem: _Problem, shard_numel: int, best: _Draft) -> _Draft:
    """`best`, or a draft of this length that honours more wishes; those that move their parameter most go first."""
    alignment, max_shift = problem.alignment, 2 * shard_numel
    possible = sum(
        _earliest_start(0, request.numel, request.granule, shard_numel, alignment) is not None
        for request in problem.requests
        if not request.required
    )
    while possible > best.num_wishes_kept:
        draft = _place(problem, shard_numel, max_shift)
        if draft is not None:
            return draft if draft.num_wishes_kept > best.num_wishes_kept else best
        if max_shift == 0:
            break
        max_shift //= 2
    return best


def _shard_steps(requests: Sequence[_Request], alignment: int, smallest: int, largest: int) -> list[int]:
    """Numbers worth trying multiples of. Required granules first, then the most wanted."""
    # A parameter over three shards or more can only be sharded between granules if the shard length is a multiple of
    # the granule.
    demand = Counter((request.required, request.granule) for request in requests if request.numel > smallest)
    steps = [alignment]
    for _, granule in sorted(demand, key=lambda key: (key[0], demand[key], key[1]), reverse=True):
        for step in [math.lcm(step, granule) for step in steps]:
            if step not in steps and len(steps) < _MAX_STEPS and _round_up(smallest, step) <= largest:
                steps.append(step)
    return steps


def _first_fitting(problem: _Problem, lengths: range, fallback: int) -> int:
    """The first of `lengths` at which everything required fits, else `fallback`."""

    def fits(shard_numel: int) -> bool:
        return _place(problem, shard_numel, max_shift=0) is not None

    # Doubles the distance until one fits, then bisects: exact unless lengths that fit lie below lengths that do not.
    failed, n = -1, 0
    while n < len(lengths) and not fits(lengths[n]):
        failed, n = n, 2 * n + 1
    n = bisect_left(lengths, True, lo=failed + 1, hi=min(n, len(lengths)), key=fits)
    return lengths[n] if n < len(lengths) else fallback


# ---- Views of a whole flat tensor, and of a shard


def full_views(layout: FlatLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of ``flat``, a whole flat parameter, with the parameters' shapes."""
    return [flat[p.offset : p.offset + p.numel].view(p.shape) for p in layout.params]


LocalShards = list[tuple[int, int, tuple[int, ...]]]
"""This rank's range of each parameter: (start, stop, shape) in its shard."""


def local_views(flat: torch.Tensor, local_shards: LocalShards) -> list[torch.Tensor]:
    """Views of ``flat``, which has a shard's elements, with the shapes of the local shards."""
    return [flat[start:stop].view(shape) for start, stop, shape in local_shards]

"""``RaggedShard``: a tensor sharded over one mesh dimension into contiguous, unequal, possibly empty shards.

This file also has ``RunLengths``, which stores the counts of many ranks, and ``RaggedSpec``, which derives what a
placement means for one rank. All of it is arithmetic on shapes: no tensors, no communication.

Shards are counted in rows (indices of dim 0) or in elements of the flattened tensor. Here is a tensor of shape (5, 4)
on 3 ranks, once by rows and once by elements::

    RaggedShard((3, 2, 0))                 rows 0 to 2 | rows 3 and 4 | nothing
    RaggedShard((14, 6, 0), flat=True)     elements 0 to 13 | elements 14 to 19 | nothing

For very many ranks, you write, print and store runs of equal counts, as (count, number of ranks) pairs:
``RaggedShard([(5, 1), (64, 1022), (0, 1)])``. Time and memory here do not grow with the number of ranks.

FSDP2's even chunks are ``RaggedShard((2, 2, 1))`` here: a spec may then have stock ``Shard(0)`` in its place.

On a mesh with several dimensions, a ``RaggedShard`` is always innermost: it shards what is local after all other
placements have been applied, whatever the position of its mesh dimension.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise, product, repeat
from math import prod
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement, Shard

from ..._torch import (
    DTensorSpec,
    StridedShard,
    TensorMeta,
    compute_local_shape_and_global_offset,
    is_shard_of_rows,
    mend_mesh,
    rank_of_mesh,
)
from ...errors import MisuseError, MisuseRuntimeError

# ---- ``RunLengths``: one count per rank, stored as runs of equal counts
#
# A flat parameter has equal shards, so most ranks hold a whole shard of a parameter, or nothing. However many ranks
# there are, the counts of one parameter are at most five runs::
#
#     ranks      0    1    2    3    4    5    6
#     counts     0    5   64   64   64    7    0          nothing, a head, whole shards, a tail, nothing
#     pieces     (0, 1) (5, 1) (64, 3) (7, 1) (0, 1)      a count, and the number of ranks that have it
#
# Adjacent pieces differ and none is empty, so equal sequences have equal pieces, and placements are compared and hashed
# by their pieces alone. Pure arithmetic.


class RunLengths(Sequence[int]):
    """The counts of all ranks, in rank order; equal to a tuple or list of the same counts.

    Args:
        pieces: (count, number of ranks) pairs, in rank order.

    Attributes:
        pieces: the given pieces, merged into as few as possible.
        total: the sum of all counts.
    """

    __slots__ = ("_ends", "_sums", "pieces", "total")

    def __init__(self, pieces: Iterable[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for count, num_ranks in pieces:
            if num_ranks and merged and merged[-1][0] == count:
                merged[-1] = count, merged[-1][1] + num_ranks
            elif num_ranks:
                merged.append((count, num_ranks))
        self.pieces = tuple(merged)
        self._ends = tuple(accumulate(num_ranks for _, num_ranks in merged))
        self._sums = tuple(accumulate((count * num_ranks for count, num_ranks in merged), initial=0))
        self.total = self._sums[-1]

    @classmethod
    def of(cls, counts: Iterable[int]) -> RunLengths:
        """Build one from a sequence of counts."""
        return counts if isinstance(counts, RunLengths) else cls((count, 1) for count in counts)

    def start(self, rank: int) -> int:
        """The sum of the counts of the ranks before ``rank``; for the number of ranks, the total."""
        if rank >= len(self):
            return self.total
        piece = bisect_right(self._ends, rank)
        first = self._ends[piece - 1] if piece else 0
        return self._sums[piece] + (rank - first) * self.pieces[piece][0]

    def times(self, factor: int) -> RunLengths:
        return RunLengths([(count * factor, num_ranks) for count, num_ranks in self.pieces])

    def divided_by(self, divisor: int) -> RunLengths:
        """Each count divided by ``divisor``, rounded down."""
        return RunLengths([(count // divisor, num_ranks) for count, num_ranks in self.pieces])

    def within(self, start: int, stop: int) -> RunLengths:
        """How many of the units from ``start`` to ``stop`` each rank has, if the ranks hold all units one after the
        other."""
        return RunLengths(chain.from_iterable(map(_clipped, self.pieces, self._sums, repeat(start), repeat(stop))))

    def ranges(self) -> list[tuple[int, int]]:
        """Start and stop of each rank's units, if the ranks hold all units one after the other."""
        return [*pairwise(accumulate(self, initial=0))]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        rank = index + len(self) if index < 0 else index
        if not 0 <= rank < len(self):
            raise IndexError(f"rank {index} of {len(self)}")
        return self.pieces[bisect_right(self._ends, rank)][0]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(count, num_ranks) for count, num_ranks in self.pieces)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RunLengths):
            return self.pieces == other.pieces
        return isinstance(other, (tuple, list)) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))  # the tuple's hash, because they are equal; placements hash the pieces instead

    def __reduce__(self) -> Any:
        return RunLengths, (self.pieces,)

    def __repr__(self) -> str:
        return f"RunLengths({list(self.pieces)})"


def _clipped(piece: tuple[int, int], first: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Restrict a piece, whose first rank begins at ``first``, to the units from ``start`` to ``stop``."""
    count, num_ranks = piece
    last = first + count * num_ranks
    if not count or stop <= start or last <= start or stop <= first:
        return [(0, num_ranks)]
    begin, end = max(start, first), min(stop, last)
    head, tail = (begin - first) // count, (end - 1 - first) // count  # the ranks where it begins and ends
    if head == tail:
        held = [(end - begin, 1)]
    else:
        held = [
            (first + (head + 1) * count - begin, 1),
            (count, tail - head - 1),
            (end - first - tail * count, 1),
        ]
    return [(0, head), *held, (0, num_ranks - tail - 1)]


# ---- ``RaggedShard``


_MOST_COUNTS_IN_WORDS = 16  # with more ranks, pieces are shorter


EVEN_CHUNKS = (
    "Code that computes a rank's rows by itself is right under fsdp_compose.drop_in.install(layout='fsdp2'), which "
    "gives every rank FSDP2's even chunks"
)


class RaggedShard(Shard):
    """Rank ``r`` of the mesh dimension holds ``counts[r]`` consecutive units of the tensor.

    It is a subclass of ``Shard``, so ``is_shard()`` is true; but every method of ``Shard`` that would compute even
    chunks raises. It equals only an equal ``RaggedShard``, so caches of stock DTensor cannot confuse two layouts. Stock
    ``DTensorSpec`` refuses it: only a ``RaggedDTensor`` can carry it.

    Args:
        counts: the number of units of each rank; or (count, number of ranks) pairs, where that many consecutive ranks
            have that count.
        flat: a unit is one element of the flattened tensor; otherwise a row, that is an index of dim 0.
    """

    __module__ = "fsdp_compose"  # what pickles name, wherever this file lies

    counts: RunLengths
    """Units of each rank, as a sequence."""
    flat: bool
    of_shape: tuple[int, ...] | None = None
    """The shape of the tensor that has this very object among its placements, for code that wants to place another
    tensor like it. Not part of the placement's meaning: equal placements may differ in it."""

    def __init__(self, counts: Sequence[int] | Sequence[tuple[int, int]], flat: bool = False) -> None:
        super().__init__(0)
        if not isinstance(counts, RunLengths):
            pieces = [item if isinstance(item, tuple) else (item, 1) for item in counts]
            if any(num_ranks < 0 for _, num_ranks in pieces):
                raise ValueError(f"RaggedShard(counts={pieces}): expected (count, number of ranks) pairs, both >= 0")
            counts = RunLengths(pieces)
        self.counts = counts
        self.flat = flat
        if not self.counts.pieces or min(self.counts.pieces)[0] < 0:
            raise ValueError(f"RaggedShard(counts={_in_words(self.counts)}): expected a count >= 0 for each rank")
        self._hash = hash((RaggedShard, self.counts.pieces, flat))

    @property
    def starts(self) -> tuple[int, ...]:
        """The start of each rank's local shard, in units, followed by the number of units; built when it is first asked
        for."""
        return (*(start for start, _ in self.counts.ranges()), self.num_placed)

    @property
    def num_placed(self) -> int:
        """The number of units that all ranks hold together."""
        return self.counts.total

    def unit_range(self, rank: int) -> tuple[int, int]:
        """Start and stop of ``rank``'s local shard, in units."""
        return self.counts.start(rank), self.counts.start(rank + 1)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, RaggedShard) and self.flat == other.flat and self.counts == other.counts

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:  # the base class would pickle and copy only the state it knows: the dim
        return RaggedShard, (self.counts.pieces, self.flat)

    def __repr__(self) -> str:
        return f"RaggedShard({_in_words(self.counts)}{', flat=True' if self.flat else ''})"

    def __str__(self) -> str:
        return f"R{'E' if self.flat else 'S'}{_in_words(self.counts)}"

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"RaggedShard({self.counts.pieces!r}, {self.flat!r})", {"RaggedShard": RaggedShard}

    @staticmethod
    def even(rows: int, num_ranks: int) -> RaggedShard:
        """FSDP2's chunks of so many rows: equal ones for the first ranks, then the rest, then nothing."""
        chunk = -(-rows // num_ranks)
        whole = rows // max(chunk, 1)
        rest = [(rows - whole * chunk, 1)] if rows > whole * chunk else []
        return RaggedShard([(chunk, whole), *rest, (0, num_ranks - whole - len(rest))])

    def with_shape(self, shape: tuple[int, ...]) -> RaggedShard:
        """A copy of this placement that remembers the shape of a tensor."""
        if self.of_shape == tuple(shape):
            return self
        twin = RaggedShard(self.counts, self.flat)
        twin.of_shape = tuple(shape)
        return twin

    def num_units(self, shape: tuple[int, ...]) -> int:
        """The number of units in a tensor of ``shape``, to which the counts must add up."""
        return prod(shape) if self.flat else (shape[0] if shape else 1)

    def unit_numel(self, shape: tuple[int, ...]) -> int:
        """The number of elements in one unit of a tensor of ``shape``."""
        return 1 if self.flat else prod(shape[1:])

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The shape of ``rank``'s local shard of a tensor of ``shape``: 1-D if flat, else rows."""
        return (self.counts[rank],) if self.flat else (self.counts[rank], *shape[1:])

    def element_range(self, shape: tuple[int, ...], rank: int) -> tuple[int, int]:
        """Start and stop of ``rank``'s local shard in the flattened tensor of ``shape``."""
        unit, (start, stop) = self.unit_numel(shape), self.unit_range(rank)
        return start * unit, stop * unit

    def element_ranges(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Start and stop of every rank's local shard in the flattened tensor of ``shape``."""
        return self.counts.times(self.unit_numel(shape)).ranges()

    def flattened(self, shape: tuple[int, ...]) -> RaggedShard:
        """Return these shard boundaries, counted in elements instead of rows."""
        if self.flat:
            return self
        return RaggedShard(self.counts.times(self.unit_numel(shape)), flat=True)

    # ---- Methods that other code may call on a Shard

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:  # type: ignore[override]
        if self.num_placed != curr_local_size or len(self.counts) != num_chunks:
            what = (
                "it splits the tensor between elements, not between rows, so a rank's part is not a box of the "
                "tensor: use distribute_tensor() or DTensor.from_local(), or shard by rows (granularity= of "
                "fully_shard())"
                if self.flat
                else "it is a placement of another tensor"
            )
            raise NotImplementedError(
                f"{self!r} does not shard a dimension of {curr_local_size} over {num_chunks} ranks: {what}"
            )
        return self.counts[rank], self.counts.start(rank)

    def local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:  # type: ignore[override]
        return self._local_shard_size_and_offset(curr_local_size, num_chunks, rank)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"stock DTensor cannot redistribute {self!r}; use RaggedDTensor.redistribute(). {EVEN_CHUNKS}"
        )

    _split_tensor = _select_split_tensor = _shard_tensor = _reduce_shard_tensor = _refuse
    _to_replicate_tensor = _replicate_to_shard = _to_new_shard_dim = _to_partial_tensor = _refuse


def _in_words(counts: RunLengths) -> str:
    return repr([*counts] if len(counts) <= _MOST_COUNTS_IN_WORDS else [*counts.pieces])


class Box(NamedTuple):
    """An axis-aligned piece of a tensor. ``start``: its first element, as an index into the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def range_to_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Split the elements ``start`` to ``stop`` of a flattened tensor of ``shape`` into at most ``2 * ndim - 1`` boxes.

    Every box is contiguous in the range, so its elements can be viewed in place. An empty range has no boxes.

    >>> range_to_boxes((3, 4), 2, 9)
    [Box(offsets=(0, 2), sizes=(1, 2), start=2), Box(offsets=(1, 0), sizes=(1, 4), start=4), \
Box(offsets=(2, 0), sizes=(1, 1), start=8)]
    """
    assert 0 <= start <= stop <= prod(shape), f"range {start}:{stop} of shape {shape}"
    if start == stop:
        return []
    if not shape:
        return [Box((), (), 0)]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:  # inside one row
        return _in_row(shape, first, start, stop)
    boxes: list[Box] = []
    if start % row:
        boxes += _in_row(shape, first, start, (first + 1) * row)
        first += 1
    whole = stop // row - first
    if whole:
        boxes.append(Box((first, *[0] * (len(shape) - 1)), (whole, *shape[1:]), first * row))
    if stop % row:
        boxes += _in_row(shape, last, last * row, stop)
    return boxes


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    row = prod(shape[1:])
    inner = range_to_boxes(shape[1:], start - index * row, stop - index * row)
    return [Box((index, *box.offsets), (1, *box.sizes), index * row + box.start) for box in inner]


def stacked(whole: torch.Tensor, dim: int, num_ranks: int) -> torch.Tensor:
    """The elements of a tensor that is cut evenly along ``dim``, one rank's shard after the other; a view for dim 0."""
    if not dim:
        return whole.reshape(-1)
    return whole.reshape(prod(whole.shape[:dim]), num_ranks, -1).transpose(0, 1).reshape(-1)


def unstacked(elements: torch.Tensor, shape: tuple[int, ...], dim: int, num_ranks: int) -> torch.Tensor:
    """The other way round: the tensor of ``shape``."""
    if not dim:
        return elements.view(shape)
    return elements.view(num_ranks, prod(shape[:dim]), -1).transpose(0, 1).reshape(shape)


# ---- ``RaggedSpec``: mesh, placements, shape and dtype of a ``RaggedDTensor``, and what they mean for one rank
#
# Pure arithmetic, computed once and kept. Tensors that are sharded the same way should share one spec: comparing is
# then fast.


Shape = tuple[int, ...]


class RaggedSpec(DTensorSpec):
    """Mesh, placements, shape and dtype of a ``RaggedDTensor``, and what they mean for this rank."""

    __module__ = "fsdp_compose"  # what pickles name, wherever this file lies
    __hash__ = DTensorSpec.__hash__
    tensor_meta: TensorMeta
    # Sums, means and norms have the placements of stock DTensor: programs written for FSDP2 add up the ranks' terms.
    leaves_partial = False

    @staticmethod
    def make(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> RaggedSpec:
        """Raises ValueError unless exactly one placement is a ``RaggedShard``, and it covers the tensor; or none is,
        and the first one that shards the tensor stands for one of even chunks: ``Shard(0)``, or another dimension."""
        size = torch.Size(shape)
        known = [item.with_shape(size) if isinstance(item, RaggedShard) else item for item in placements]
        spec = RaggedSpec(mesh, tuple(known), TensorMeta(size, torch.empty(size, device="meta").stride(), dtype))
        num_ragged = sum(isinstance(item, RaggedShard) for item in spec.placements) or int(spec.is_even)
        if num_ragged != 1 or len(spec.placements) != mesh.ndim:
            raise ValueError(
                f"a RaggedDTensor on a mesh of {mesh.ndim} dimension(s) needs as many placements, exactly one of them "
                f"a RaggedShard; got {list(spec.placements)}"
            )
        units, inner = spec.ragged.num_units(spec.stacked_shape), tuple(spec.stacked_shape)
        if len(spec.ragged.counts) != mesh.size(spec.ragged_dim) or spec.ragged.num_placed != units:
            raise ValueError(
                f"{spec.ragged} does not shard a tensor of shape {inner}, which has {units} "
                f"{'elements' if spec.ragged.flat else 'rows'}, over {mesh.size(spec.ragged_dim)} ranks"
            )
        return spec

    def _verify_shard_order(self, shard_order: Any) -> None:
        """Does nothing."""
        # Stock DTensor refuses a placement that is not an even Shard, and this class exists to carry one.

    @cached_property
    def is_even(self) -> bool:
        """Whether a stock ``Shard`` stands for the ``RaggedShard``."""
        first = next((item for item in self.placements if not item.is_replicate()), None)
        has_own = any(isinstance(item, RaggedShard) for item in self.placements)
        return bool(self.shape) and not has_own and (is_shard_of_rows(first) or type(first) is Shard)

    @cached_property
    def even_dim(self) -> int:
        """The dimension of the even chunks. If it is not 0, the ``RaggedShard`` shards the rows of the chunks, one
        chunk after the other."""
        placement: Any = self.placements[self.ragged_dim]
        return placement.dim if self.is_even else 0

    @cached_property
    def ragged_dim(self) -> int:
        """The mesh dimension of the ``RaggedShard``."""
        wanted = (lambda item: not item.is_replicate()) if self.is_even else lambda item: isinstance(item, RaggedShard)
        return next(i for i, item in enumerate(self.placements) if wanted(item))

    @cached_property
    def ragged(self) -> RaggedShard:
        placement = self.placements[self.ragged_dim]
        if self.is_even:
            placement = RaggedShard.even(self.stacked_shape[0], self.mesh.size(self.ragged_dim))
        assert isinstance(placement, RaggedShard)
        return placement

    @cached_property
    def rank(self) -> int:
        """This rank's position in the ragged mesh dimension, unless the local shard is another's, from a file."""
        here = f"rank {dist.get_rank()}" if dist.is_initialized() else "a process without a process group"
        made_by = rank_of_mesh(self.mesh)
        if made_by is not None and here != f"rank {made_by}":
            raise MisuseRuntimeError(self._told(f"{here} can only look at the to_local() of"))
        return self.mesh.get_local_rank(self.ragged_dim)

    def _told(self, what: str) -> str:
        return (
            f"{what} rank {rank_of_mesh(self.mesh)}'s part of a tensor of shape {tuple(self.shape)} on "
            f"{self.mesh.size()} ranks. torch.save() of a sharded state dict keeps the part of one rank. For whole "
            "tensors, call get_model_state_dict() with full_state_dict=True on every rank, and torch.save() its result "
            "on one; for any number of ranks, use fsdp_compose.checkpoint.save()"
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks that hold the other local shards."""
        return self.mesh.get_group(self.ragged_dim)

    @cached_property
    def gathered_placements(self) -> tuple[Placement, ...]:
        """The placements after the local shards have been gathered."""
        return tuple(Replicate() if i == self.ragged_dim else item for i, item in enumerate(self.placements))

    def with_ragged(self, placement: RaggedShard) -> tuple[Placement, ...]:
        """The placements with another ``RaggedShard``."""
        return tuple(placement if i == self.ragged_dim else item for i, item in enumerate(self.placements))

    @cached_property
    def _inner(self) -> tuple[Shape, Shape]:
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.gathered_placements)
        return tuple(sizes), tuple(offsets)

    @property
    def inner_shape(self) -> Shape:
        """The shape that the ``RaggedShard`` shards: what is local after all other placements."""
        return self._inner[0]

    @cached_property
    def stacked_shape(self) -> Shape:
        """The inner shape; of chunks of another dimension than 0, if they are put together along dim 0."""
        shape, dim, num_ranks = self.inner_shape, self.even_dim, self.mesh.size(self.ragged_dim)
        return (num_ranks * shape[0], *shape[1:dim], shape[dim] // num_ranks, *shape[dim + 1 :]) if dim else shape

    @cached_property
    def inner_runs(self) -> list[list[tuple[int, int]]]:
        """Where the inner tensor lies in the whole tensor: of each dimension, starts and sizes."""
        runs = [[place] for place in zip(self._inner[1], self._inner[0], strict=True)]
        for dim, item in enumerate(self.placements):
            if isinstance(item, StridedShard) and dim != self.ragged_dim:  # there it is even chunks of such rows
                num_ranks, rank = self.mesh.size(dim), self.mesh.get_local_rank(dim)
                length = self.shape[item.dim] // (item.split_factor * num_ranks)
                runs[item.dim] = [((i * num_ranks + rank) * length, length) for i in range(item.split_factor)]
        return runs

    @cached_property
    def is_only_ragged(self) -> bool:
        """Whether no other placement shards the tensor, and each rank has a range of it: the ``RaggedShard`` then
        shards the whole tensor, on every rank."""
        sizes = self.mesh.shape
        others = zip(self.gathered_placements, sizes, strict=True)
        return not self.even_dim and all(item.is_replicate() or size == 1 for item, size in others)

    @cached_property
    def is_scalar(self) -> bool:
        return not self.shape

    @cached_property
    def reduce_dims(self) -> tuple[int, ...]:
        """The mesh dimensions whose ranks hold different elements."""
        return tuple(i for i, item in enumerate(self.placements) if not item.is_replicate())

    @cached_property
    def local_shape(self) -> Shape:
        return self.ragged.local_shape(self.stacked_shape, self.rank)

    @cached_property
    def element_range(self) -> tuple[int, int]:
        """Start and stop of this rank's local shard in the flattened inner tensor, or stacked chunks."""
        return self.ragged.element_range(self.stacked_shape, self.rank)

    @cached_property
    def _by_dtype(self) -> dict[torch.dtype, RaggedSpec]:
        return {self.dtype: self}

    @cached_property
    def left_partial(self) -> RaggedSpec:
        """The same, with the mark."""
        spec = RaggedSpec(self.mesh, self.placements, self.tensor_meta)
        spec.__dict__["leaves_partial"] = True
        return spec

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor_meta.dtype

    def with_dtype(self, dtype: torch.dtype) -> RaggedSpec:
        spec = self._by_dtype.get(dtype)
        if spec is None:
            meta = TensorMeta(self.tensor_meta.shape, self.tensor_meta.stride, dtype)
            spec = self._by_dtype[dtype] = RaggedSpec(self.mesh, self.placements, meta)
            spec.__dict__.update(_by_dtype=self._by_dtype, leaves_partial=self.leaves_partial)
        return spec

    def is_sharded_like(self, other: RaggedSpec) -> bool:
        """Whether tensors with either spec have their elements at the same places."""
        return self is other or (
            self.shape == other.shape
            and self.placements == other.placements
            and self.mesh == other.mesh
            and self.rank == other.rank  # in a pickle: its writer's
        )

    def boxes(self) -> list[Box]:
        """This rank's local shard as boxes of the inner tensor; an empty tensor is one empty box on the first rank."""
        if prod(self.shape) == 0:
            return [Box((0,) * len(self.shape), tuple(self.shape), 0)] if self.rank == 0 else []
        if self.even_dim:
            offsets = [self.rank * size if i == self.even_dim else 0 for i, size in enumerate(self.local_shape)]
            return [Box(tuple(offsets), self.local_shape, self.element_range[0])]
        return range_to_boxes(self.inner_shape, *self.element_range)

    def boxes_of_whole(self, box: Box) -> list[tuple[Box, tuple[slice, ...]]]:
        """A box of the inner tensor as boxes of the whole tensor, each with its place in that box."""
        found: list[tuple[Box, tuple[slice, ...]]] = []
        for pieces in product(*map(_inside, self.inner_runs, box.offsets, box.sizes)):
            place = tuple([slice(start, start + size) for _, start, size in pieces])
            found.append((Box(tuple([first for first, *_ in pieces]), tuple([size for *_, size in pieces]), 0), place))
        return found

    def __getstate__(self) -> dict[str, Any]:
        if self.mesh.size() > 1 and not _warned:
            # Has the user's code called ``torch.save``? Libraries of checkpoints have all ranks save.
            callers = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe())]
            libraries = ("torch.distributed.checkpoint.", "fsdp_compose.checkpoint.")
            if "torch.serialization" in callers and not any(name.startswith(libraries) for name in callers):
                _warned.append(self)
                warnings.warn(self._told("a file gets only"), stacklevel=2)
        names = ("mesh", "placements", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order")
        return {**{name: self.__dict__[name] for name in names if name in self.__dict__}, "_hash": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        mend_mesh(self.mesh)


def _inside(runs: list[tuple[int, int]], offset: int, size: int) -> Iterator[tuple[int, int, int]]:
    """What a range of an inner dimension holds of its runs: starts in the whole and in the range, and sizes."""
    begin = 0
    for start, length in runs:
        first, last = max(begin, offset), min(begin + length, offset + size)
        if first < last or size == 0:
            yield start + first - begin, first - offset, max(last - first, 0)
        begin += length
        if size == 0:
            return


def refuse_uneven_strides(spec: DTensorSpec, what: str) -> None:
    """Raise ValueError if a dimension is split in strides that are not equally long, or is split twice."""
    dims = [item.dim for item in spec.placements if isinstance(item, (Shard, StridedShard))]
    for mesh_dim, item in enumerate(spec.placements):
        if not isinstance(item, StridedShard):
            continue
        num_strides = int(item.split_factor) * spec.mesh.size(mesh_dim)
        if dims.count(item.dim) > 1 or spec.shape[item.dim] % num_strides:
            raise MisuseError(
                f"{what}: its dimension {item.dim}, of size {spec.shape[item.dim]}, must be split once, into "
                f"{num_strides} strides of one length"
            )


_warned: list[RaggedSpec] = []

"""``RaggedShard``: a tensor sharded over one mesh dimension into contiguous, unequal, possibly empty parts.

A part is counted in rows (indices of dim 0) or in elements of the flattened tensor. Here a tensor of shape (5, 4) lies
on 3 ranks, once by rows and once by elements::

    RaggedShard((3, 2, 0))                 rows 0 to 2 | rows 3 and 4 | nothing
    RaggedShard((14, 6, 0), flat=True)     elements 0 to 13 | elements 14 to 19 | nothing

Among very many ranks one writes, prints and stores runs of equal counts, as (count, number of ranks) pairs:
``RaggedShard([(5, 1), (64, 1022), (0, 1)])``. Whatever their number, nothing here takes more time or memory.

On a mesh of several dimensions a ``RaggedShard`` is always the innermost: it shards what is local after all other
placements have been applied, wherever its mesh dimension stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor.placement_types import Shard

from .run_lengths import RunLengths

_MOST_COUNTS_IN_WORDS = 16  # of more ranks, pieces are shorter


class RaggedShard(Shard):
    """Rank ``r`` of the mesh dimension holds ``counts[r]`` consecutive units of the tensor.

    A ``Shard`` by class, so that code that asks ``is_shard()`` gets the truth; every method of ``Shard`` that would
    compute even chunks raises. It equals nothing but an equal ``RaggedShard``: a cache of stock DTensor can never take
    one layout for another, and stock ``DTensorSpec`` refuses it, so that only a ``RaggedDTensor`` can carry it.

    Args:
        counts: units of each rank; or pairs of units and of how many ranks, one after the other, have so many.
        flat: a unit is one element of the flattened tensor; else a row, an index of dim 0.
    """

    __module__ = "fsdp_compose"  # what pickles name, wherever this file lies

    counts: RunLengths
    """Units of each rank: a sequence."""
    flat: bool
    of_shape: tuple[int, ...] | None = None
    """The shape of the tensor that has this very object among its placements, for code that wants another tensor placed
    like it. No part of what a placement means: equal ones may differ in it."""

    def __init__(self, counts: Sequence[int] | Sequence[tuple[int, int]], flat: bool = False) -> None:
        super().__init__(0)
        self.counts = _run_lengths(counts)
        self.flat = flat
        if not self.counts.pieces or min(self.counts.pieces)[0] < 0:
            raise ValueError(f"RaggedShard(counts={_in_words(self.counts)}): expected a count >= 0 for each rank")
        self._hash = hash((RaggedShard, self.counts.pieces, flat))

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each rank's local shard starts, in units, and at last the number of units: made when asked for."""
        return (*(start for start, _ in self.counts.ranges()), self.num_placed)

    @property
    def num_placed(self) -> int:
        """How many units all ranks hold together."""
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

    def __reduce__(self) -> Any:  # the base class would pickle, and copy, what it knows of: the dim
        return RaggedShard, (self.counts.pieces, self.flat)

    def __repr__(self) -> str:
        return f"RaggedShard({_in_words(self.counts)}{', flat=True' if self.flat else ''})"

    def __str__(self) -> str:
        return f"R{'E' if self.flat else 'S'}{_in_words(self.counts)}"

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"RaggedShard({self.counts.pieces!r}, {self.flat!r})", {"RaggedShard": RaggedShard}

    def with_shape(self, shape: tuple[int, ...]) -> RaggedShard:
        """The same placement, which remembers the shape of a tensor."""
        if self.of_shape == tuple(shape):
            return self
        twin = RaggedShard(self.counts, self.flat)
        twin.of_shape = tuple(shape)
        return twin

    def num_units(self, shape: tuple[int, ...]) -> int:
        """How many units a tensor of ``shape`` has: what the counts must add up to."""
        return prod(shape) if self.flat else (shape[0] if shape else 1)

    def unit_numel(self, shape: tuple[int, ...]) -> int:
        """Elements of one unit of a tensor of ``shape``."""
        return 1 if self.flat else prod(shape[1:])

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The shape of ``rank``'s local shard of a tensor of ``shape``: 1-D if flat, else rows."""
        return (self.counts[rank],) if self.flat else (self.counts[rank], *shape[1:])

    def element_range(self, shape: tuple[int, ...], rank: int) -> tuple[int, int]:
        """Start and stop of ``rank``'s local shard in the flattened tensor of ``shape``."""
        unit, (start, stop) = self.unit_numel(shape), self.unit_range(rank)
        return start * unit, stop * unit

    def element_ranges(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Those of all ranks."""
        return self.counts.times(self.unit_numel(shape)).ranges()

    def flattened(self, shape: tuple[int, ...]) -> RaggedShard:
        """The same shard boundaries, counted in elements."""
        if self.flat:
            return self
        return RaggedShard(self.counts.times(self.unit_numel(shape)), flat=True)

    # ---- methods that other code may call on a Shard

    def _local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        if self.num_placed != curr_local_size or len(self.counts) != num_chunks:
            what = (
                "it shards between elements and not between rows, so that what a rank holds is no box of the tensor: "
                "use distribute_tensor() or DTensor.from_local(), or shard by rows (granularity= of fully_shard())"
                if self.flat
                else "it is a placement of another tensor"
            )
            raise NotImplementedError(
                f"{self!r} does not shard a dimension of {curr_local_size} over {num_chunks} ranks: {what}"
            )
        return self.counts[rank], self.counts.start(rank)

    def local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        return self._local_shard_size_and_offset(curr_local_size, num_chunks, rank)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"stock DTensor cannot redistribute {self!r}; use RaggedDTensor.redistribute()")

    _split_tensor = _select_split_tensor = _shard_tensor = _reduce_shard_tensor = _refuse
    _to_replicate_tensor = _replicate_to_shard = _to_new_shard_dim = _to_partial_tensor = _refuse


torch.serialization.add_safe_globals([RaggedShard])


def _run_lengths(counts: Sequence[int] | Sequence[tuple[int, int]]) -> RunLengths:
    if isinstance(counts, RunLengths):
        return counts
    pieces = [item if isinstance(item, tuple) else (item, 1) for item in counts]
    if any(num_ranks < 0 for _, num_ranks in pieces):
        raise ValueError(f"RaggedShard(counts={pieces}): expected (count, number of ranks) pairs, both >= 0")
    return RunLengths(pieces)


def _in_words(counts: RunLengths) -> str:
    return repr([*counts] if len(counts) <= _MOST_COUNTS_IN_WORDS else [*counts.pieces])


class Box(NamedTuple):
    """An axis-aligned part of a tensor. ``start``: its first element, as an index into the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def range_to_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Split the elements ``start`` to ``stop`` of a flattened tensor of ``shape`` into at most ``2 * ndim - 1`` boxes.

    Every box is contiguous in the range, so its elements are a view of the range's. An empty range has no boxes.

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

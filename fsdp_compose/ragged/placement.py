"""``RaggedShard``: a tensor sharded over one mesh dimension into contiguous, unequal, possibly empty parts.

A part is counted in rows (indices of dim 0) or in elements of the flattened tensor. Here a tensor of shape (5, 4) lies
on 3 ranks, once by rows and once by elements::

    RaggedShard((3, 2, 0))                 rows 0 to 2 | rows 3 and 4 | nothing
    RaggedShard((14, 6, 0), flat=True)     elements 0 to 13 | elements 14 to 19 | nothing

On a mesh of several dimensions a ``RaggedShard`` is always the innermost: it shards what is local after all other
placements have been applied, wherever its mesh dimension stands.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor.placement_types import Shard


class RaggedShard(Shard):
    """Rank ``r`` of the mesh dimension holds ``counts[r]`` consecutive units of the tensor.

    A ``Shard`` by class, so that code that asks ``is_shard()`` gets the truth; every method of ``Shard`` that would
    compute even chunks raises. It equals nothing but an equal ``RaggedShard``: a cache of stock DTensor can never take
    one layout for another, and stock ``DTensorSpec`` refuses it, so that only a ``RaggedDTensor`` can carry it.

    Args:
        counts: units of each rank.
        flat: a unit is one element of the flattened tensor; else a row, an index of dim 0.
    """

    __module__ = "fsdp_compose"  # what pickles name, wherever this file lies

    counts: tuple[int, ...]
    flat: bool
    starts: tuple[int, ...]
    """Where each rank's local shard starts, in units, and at last the number of units."""
    of_shape: tuple[int, ...] | None = None
    """The shape of the tensor that has this very object among its placements, for code that wants another tensor placed
    like it. No part of what a placement means: equal ones may differ in it."""

    def __init__(self, counts: tuple[int, ...], flat: bool = False) -> None:
        super().__init__(0)
        self.counts = tuple(counts)
        self.flat = flat
        if not self.counts or min(self.counts) < 0:
            raise ValueError(f"RaggedShard(counts={self.counts}): expected a count >= 0 for each rank")
        self.starts = (0, *accumulate(self.counts))
        self._hash = hash((RaggedShard, self.counts, flat))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, RaggedShard) and self.flat == other.flat and self.counts == other.counts

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:  # the base class would pickle, and copy, what it knows of: the dim
        return RaggedShard, (self.counts, self.flat)

    def __repr__(self) -> str:
        return f"RaggedShard({list(self.counts)}{', flat=True' if self.flat else ''})"

    def __str__(self) -> str:
        return f"R{'E' if self.flat else 'S'}{list(self.counts)}"

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"RaggedShard({self.counts!r}, {self.flat!r})", {"RaggedShard": RaggedShard}

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
        unit = self.unit_numel(shape)
        return self.starts[rank] * unit, self.starts[rank + 1] * unit

    def flattened(self, shape: tuple[int, ...]) -> RaggedShard:
        """The same shard boundaries, counted in elements."""
        if self.flat:
            return self
        unit = self.unit_numel(shape)
        return RaggedShard(tuple(count * unit for count in self.counts), flat=True)

    # ---- methods that other code may call on a Shard

    def _local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        if self.starts[-1] != curr_local_size or len(self.counts) != num_chunks:
            what = (
                "it shards between elements and not between rows, so that what a rank holds is no box of the tensor: "
                "use distribute_tensor() or DTensor.from_local(), or shard by rows (granularity= of fully_shard())"
                if self.flat
                else "it is a placement of another tensor"
            )
            raise NotImplementedError(
                f"{self!r} does not shard a dimension of {curr_local_size} over {num_chunks} ranks: {what}"
            )
        return self.counts[rank], self.starts[rank]

    def local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        return self._local_shard_size_and_offset(curr_local_size, num_chunks, rank)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"stock DTensor cannot redistribute {self!r}; use RaggedDTensor.redistribute()")

    _split_tensor = _select_split_tensor = _shard_tensor = _reduce_shard_tensor = _refuse
    _to_replicate_tensor = _replicate_to_shard = _to_new_shard_dim = _refuse


torch.serialization.add_safe_globals([RaggedShard])


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

"""``RunLengths``: one count for each rank, kept as runs of equal ones.

A flat parameter has equal shards, so of each parameter most ranks hold a whole shard or nothing. However many they are,
the counts of one parameter are at most five runs::

    ranks      0    1    2    3    4    5    6
    counts     0    5   64   64   64    7    0          nothing, a head, whole shards, a tail, nothing
    pieces     (0, 1) (5, 1) (64, 3) (7, 1) (0, 1)      a count, and of how many ranks it is

Neighbouring pieces differ and none is empty, so equal sequences have equal pieces: to compare and to hash placements
takes the pieces alone. Pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from typing import Any, overload


class RunLengths(Sequence[int]):
    """The counts of all ranks, in their order; equal to a tuple or list of the same counts.

    Args:
        pieces: (count, number of ranks) pairs, in the order of ranks.

    Attributes:
        pieces: the same, as few as possible.
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
        """Those of a sequence of counts."""
        return counts if isinstance(counts, RunLengths) else cls((count, 1) for count in counts)

    def start(self, rank: int) -> int:
        """What the ranks before ``rank`` have together; of one past the last, the total."""
        if rank >= len(self):
            return self.total
        piece = bisect_right(self._ends, rank)
        first = self._ends[piece - 1] if piece else 0
        return self._sums[piece] + (rank - first) * self.pieces[piece][0]

    def times(self, factor: int) -> RunLengths:
        return RunLengths([(count * factor, num_ranks) for count, num_ranks in self.pieces])

    def divided_by(self, divisor: int) -> RunLengths:
        """Rounded down."""
        return RunLengths([(count // divisor, num_ranks) for count, num_ranks in self.pieces])

    def within(self, start: int, stop: int) -> RunLengths:
        """How many of the units ``start`` to ``stop`` of all that the ranks hold, one after the other, each has."""
        return RunLengths(chain.from_iterable(map(_clipped, self.pieces, self._sums, repeat(start), repeat(stop))))

    def ranges(self) -> list[tuple[int, int]]:
        """Where what each rank has starts and stops, of all that the ranks hold, one after the other."""
        stops = [*accumulate(self)]
        return [*zip([0, *stops[:-1]], stops, strict=True)]

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
        return hash(tuple(self))  # that of the tuple, since it is equal to it; placements hash the pieces

    def __reduce__(self) -> Any:
        return RunLengths, (self.pieces,)

    def __repr__(self) -> str:
        return f"RunLengths({list(self.pieces)})"


def _clipped(piece: tuple[int, int], first: int, start: int, stop: int) -> list[tuple[int, int]]:
    """A piece whose first rank begins at ``first``, of which only ``start`` to ``stop`` counts."""
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

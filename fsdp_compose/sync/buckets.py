"""Which tensors go together: a pure plan, alike on every rank.

A *run* is what one collective carries: parameters that lie one after the other in one flat parameter, or one tensor by
itself. A *bucket* is the runs that are gathered between two steps of the loop::

    flat parameters    |a a a a|b b|c c c|   |d d|e e e e e e e e|
    buckets of 6       [a b   ][c      d    ][e                  ]      e is larger: a bucket of its own
    runs                a b     c      d      e
"""

from __future__ import annotations

from collections.abc import Sequence

from .sources import Source

Run = list[Source]
Bucket = list[Run]


def plan_buckets(sources: Sequence[Source], bucket_bytes: int) -> list[Bucket]:
    """Fill buckets in order; one that a tensor would overfill is closed, and a larger tensor has one by itself."""
    filled: list[list[Source]] = []
    left = 0
    for source in sources:
        if source.nbytes > left or not filled:
            filled.append([])
            left = bucket_bytes
        filled[-1].append(source)
        left -= source.nbytes
    return [_runs(bucket) for bucket in filled]


def _runs(sources: Sequence[Source]) -> Bucket:
    runs: Bucket = []
    for source in sources:
        if runs and _follows(source, runs[-1][-1]):
            runs[-1].append(source)
        else:
            runs.append([source])
    return runs


def _follows(source: Source, before: Source) -> bool:
    """Whether it lies behind another one in one flat parameter."""
    if source.place is None or before.place is None or source.dtype != before.dtype:
        return False
    return source.place[0] is before.place[0] and source.place[1] == before.place[1] + 1

"""Which parameters of a group are in one flat parameter: those of one kind, and of a replicated group those of one
bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..flat import ManagedParameter
from .options import GroupOptions

_FIRST_BUCKET_BYTES = 1 << 20  # small: its reduction begins early in backward, when there is nothing else to wait for


def partition(managed: Sequence[ManagedParameter], options: GroupOptions) -> list[list[ManagedParameter]]:
    """The parameters of each flat parameter, in the order in which their gradients are reduced."""
    kinds = by_kind(managed)
    if options.bucket_bytes is None:
        return kinds
    positions = {item.fqn: i for i, item in enumerate(managed)}
    buckets = [bucket for kind in kinds for bucket in _buckets(kind, options.bucket_bytes)]
    # Backward comes to the last parameters first: a bucket is complete when it has come to the bucket's first.
    return sorted(buckets, key=lambda bucket: -positions[bucket[0].fqn])


def by_kind(managed: Sequence[ManagedParameter]) -> list[list[ManagedParameter]]:
    """One part for each (dtype, requires_grad, what else was decided), in the order of their first parameters."""
    kinds: dict[tuple[object, ...], list[ManagedParameter]] = {}
    for item in managed:
        kinds.setdefault((item.parameter.dtype, item.parameter.requires_grad, item.kind), []).append(item)
    return list(kinds.values())


def _buckets(kind: Sequence[ManagedParameter], bucket_bytes: int) -> list[list[ManagedParameter]]:
    """Neighbours together, of about ``bucket_bytes``; the last ones first, of which the first bucket is small."""
    buckets: list[list[ManagedParameter]] = []
    room = 0
    for item in reversed(kind):
        if room <= 0:
            buckets.append([])
            room = bucket_bytes if len(buckets) > 1 else min(bucket_bytes, _FIRST_BUCKET_BYTES)
        buckets[-1].insert(0, item)
        room -= item.parameter.numel() * item.parameter.element_size()
    return buckets

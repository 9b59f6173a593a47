"""Advice at the first forward among very many ranks: groups whose collectives take longer to begin than to move data.

An all-gather of a group needs a message from every rank to every other, or as many hops. Below about 1 MiB a rank the
time of these no longer falls with the size. Then either groups are too small, or too many ranks share each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from ..comm import DataParallelMesh
from ..group import _FSDPState

MIN_RANKS = 256  # sharing a group: fewer do not need advice
SHORT_BYTES = 1 << 20  # of a shard
_MOST_UNSHARDED_BYTES = 4 << 30  # of merged groups: they are gathered whole
_FEWEST_RANKS = 8  # of one machine
_log = logging.getLogger("fsdp_compose")


class GroupSize(NamedTuple):
    """A group, and bytes of this rank's shard of it, as they are gathered."""

    name: str
    shard_bytes: int


def advise(mesh: DataParallelMesh, states: Sequence[_FSDPState]) -> None:
    """Log, on the first rank, what to merge or to shard over fewer ranks, if anything."""
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
    """Empty if there is nothing to say.

    Args:
        groups: all that are sharded over the same ``num_ranks`` ranks.
    """
    short = [group for group in groups if group.shard_bytes < SHORT_BYTES]
    if 2 * len(short) < len(groups) or not short:
        return ""  # the embeddings or the norm of a model alone: nothing to gain
    typical = max(1, int(median(group.shard_bytes for group in short)))
    first = short[0]
    text = (
        f"{len(short)} of {len(groups)} fully_shard groups have less than 1 MiB on each of {num_ranks} ranks (half of "
        f"them at most {_in_words(typical)}; {first.name or 'the root'}: {_in_words(first.shard_bytes)}), so their "
        "collectives take longer to begin than to move data"
    )
    remedies = [_hybrid(typical, num_ranks), _merging(typical, num_ranks, len(short))]
    return f"{text}. {' Or '.join(remedy for remedy in remedies if remedy)}"


def _hybrid(shard_bytes: int, num_ranks: int) -> str:
    """Hybrid sharding over as many ranks as give each 1 MiB."""
    shards = num_ranks
    while shards % 2 == 0 and shards > _FEWEST_RANKS and shard_bytes * num_ranks < SHORT_BYTES * shards:
        shards //= 2
    if shards == num_ranks or shard_bytes * num_ranks < SHORT_BYTES * shards:
        return ""
    return (
        f"Hybrid sharding is due, if memory allows it: a mesh of ({num_ranks // shards}, {shards}), named "
        f"('replicate', 'shard'), gives each rank {_in_words(shard_bytes * num_ranks // shards)} of a group, "
        f"{num_ranks // shards} times as much as now."
    )


def _merging(shard_bytes: int, num_ranks: int, num_short: int) -> str:
    """As many neighbours in one group as give each rank 1 MiB, or as memory allows."""
    most = max(1, _MOST_UNSHARDED_BYTES // (shard_bytes * num_ranks))
    together = min(-(-SHORT_BYTES // shard_bytes), most, num_short)
    if together < 2:
        return ""
    return (
        f"Merge {together} neighbours into one group, fully_shard([block, next_block, ...]): it is gathered whole, in "
        f"{_in_words(together * shard_bytes * num_ranks)}."
    )


def _in_words(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"

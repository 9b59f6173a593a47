"""All-gather, and gathering on one rank, by direct messages: for gloo.

gloo's own collectives pass everything through a buffer of theirs. Messages arrive where they belong, in less than half
the time (``benchmarks/checkpoint.py``), and take no memory. Other backends gather in place already.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ._torch import all_gather_single, backend_name
from .wire import wire

_TAG = 7_501  # of our messages, apart from the user's own


def all_gather(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``flat`` with the shards of all ranks, in their order.

    Ranks: all ranks of ``group``.

    Args:
        flat, shard: contiguous, one-dimensional; equal shards.
    """
    if backend_name(group) != "gloo":
        all_gather_single(wire(flat), wire(shard), group=group)
        return
    works = [*_receive(flat, group), *_send(shard, group, range(group.size()))]
    flat.chunk(group.size())[group.rank()].copy_(shard)
    _wait(works)


def gather(flat: torch.Tensor | None, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """As ``all_gather``, on the first rank; ``flat`` is ``None`` on the others."""
    if backend_name(group) != "gloo":
        parts = None if flat is None else [wire(part) for part in flat.chunk(group.size())]
        dist.gather(wire(shard), parts, group=group, group_dst=0)
    elif flat is None:
        _wait(_send(shard, group, [0]))
    else:
        works = _receive(flat, group)
        flat.chunk(group.size())[0].copy_(shard)
        _wait(works)


def _receive(flat: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work | None]:
    parts = flat.chunk(group.size())
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    return [dist.irecv(wire(parts[rank]), group=group, group_src=rank, tag=_TAG) for rank in others]


def _send(shard: torch.Tensor, group: dist.ProcessGroup, ranks: range | list[int]) -> list[dist.Work | None]:
    others = [rank for rank in ranks if rank != group.rank()]
    return [dist.isend(wire(shard), group=group, group_dst=rank, tag=_TAG) for rank in others]


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()

"""Messages between ranks in the place of collectives: for gloo.

gloo's own collectives pass everything through a buffer of theirs. Messages arrive where they belong, in less than half
the time (``benchmarks/checkpoint.py``), and take no memory. Other backends gather in place already.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from .._torch import all_gather_single, backend_name
from .broken import noticing_loss
from .transferable import as_transferable

_TAG = 7_501  # of our messages, apart from the user's own

Message = tuple[int, torch.Tensor]
"""The other rank of the group, and the contiguous memory that is sent or received."""


def is_better(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on ``device`` should go as messages. The same on every rank of ``group``."""
    return backend_name(group) == "gloo" and device.type == "cpu"


def exchange(sent: Iterable[Message], received: Iterable[Message], group: dist.ProcessGroup) -> None:
    """Send and receive messages. Those from one rank to another arrive in their order.

    Ranks: those concerned.
    """
    with noticing_loss(group, "the exchange of tensors between the ranks"):
        works = [
            dist.irecv(as_transferable(tensor), group=group, group_src=rank, tag=_TAG) for rank, tensor in received
        ]
        works += [dist.isend(as_transferable(tensor), group=group, group_dst=rank, tag=_TAG) for rank, tensor in sent]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()


def others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of the group."""
    return [rank for rank in range(group.size()) if rank != group.rank()]


def all_gather(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``flat`` with the shards of all ranks, in their order.

    Ranks: all ranks of ``group``.

    Args:
        flat, shard: contiguous, one-dimensional; equal shards.
    """
    if not is_better(group, shard.device):
        all_gather_single(as_transferable(flat), as_transferable(shard), group=group)
        return
    parts, peers = flat.chunk(group.size()), others(group)
    parts[group.rank()].copy_(shard)
    exchange([(rank, shard) for rank in peers], [(rank, parts[rank]) for rank in peers], group)


def gather(flat: torch.Tensor | None, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """As ``all_gather``, on the first rank; ``flat`` is ``None`` on the others."""
    parts = None if flat is None else flat.chunk(group.size())
    if not is_better(group, shard.device):
        dist.gather(
            as_transferable(shard), None if parts is None else [*map(as_transferable, parts)], group=group, group_dst=0
        )
    elif parts is None:
        exchange([(0, shard)], [], group)
    else:
        parts[0].copy_(shard)
        exchange([], [(rank, parts[rank]) for rank in others(group)], group)

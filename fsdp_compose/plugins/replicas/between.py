"""Replica groups that live in other jobs, and may come and go: the user's ``Replicas`` as a transport.

Each replica group is a job with a default process group of its own, whose ranks live and die together. So this package
knows one group's ranks only, and asks an object that the user has set for the average over all groups: a fault-tolerant
manager, or a process group between jobs. That takes the place of a mesh's ``replica_transport``, and gradients are
averaged in the same two stages as with hybrid sharding: a reduce-scatter in the group, then the average over groups.

At the beginning of a backward the groups compare what they are going to do, and at its end what they have done, by
maxima of a few bytes. A group that contributes zeros (one that is still fetching its parameters) has no say in it and
follows the others::

    | digest of the reductions | its complement | digest of ``used`` | its complement | late |
    | used | late |                                              only if the first maximum says that groups differ
    | has a reduction | lacks it |   by hash of its name: only if the first maximum says that groups reduce otherwise
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...core.comm import Label, Replicas, Transport, Work


class ReplicaTransport(Transport):
    """Averages over the replica groups; nothing else."""

    name = "replica groups"

    def __init__(self, replicas: Replicas, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._replicas = replicas

    @property
    def replicas(self) -> Replicas:
        return self._replicas

    @property
    def num_ranks(self) -> int:
        return 0  # it changes

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        return self._replicas.average(tensor)  # how many take part is theirs to know


def agree_between(
    replicas: Replicas, reductions: Sequence[str], told: memoryview, is_late: bool, device: torch.device
) -> str:
    """Agree with the other groups at the beginning or at the end of a backward.

    Args:
        reductions: what this group will reduce, or has reduced, as texts; the first one says which of the two.
        told: bytes that become their maximum over the groups, unless one of these was lost.
        is_late: some of these bytes ask all groups to do something.

    Returns:
        How this group differs from others; empty if they reduce the same.
    """
    head = bytes([*_with_complement("\n".join(reductions).encode()), *_with_complement(bytes(told)), is_late])
    maxima = torch.tensor([*head], dtype=torch.uint8, device=device)
    if not replicas.maximum(maxima):
        return ""
    head = bytes(maxima.tolist())
    if not any(head):
        return ""  # no group has a say
    if not _is_same(head[:_LENGTH]):
        return _difference(replicas, reductions, device)
    if head[-1] or not _is_same(head[_LENGTH:-1]):
        maxima = torch.tensor([*told], dtype=torch.uint8, device=device)
        if replicas.maximum(maxima):
            told[:] = bytes(maxima.tolist())
    return ""


def _difference(replicas: Replicas, reductions: Sequence[str], device: torch.device) -> str:
    places = [hashlib.blake2b(text.encode(), digest_size=1).digest()[0] for text in reductions]
    marks = [int(place in places) for place in range(256)]
    maxima = torch.tensor([*marks, *[1 - mark for mark in marks]], dtype=torch.uint8, device=device)
    if not replicas.maximum(maxima):
        return "this group cannot say how: another one was lost"
    others_have, others_lack = maxima[:256].tolist(), maxima[256:].tolist()
    place, *own = [text if others_lack[place] else "" for text, place in zip(reductions, places, strict=True)]
    own, num_missing = [*filter(None, own)], sum(others_have) - sum(marks) - bool(place)
    more = f" and {len(own) - 3} more" if len(own) > 3 else ""
    differences = [
        f"another one is not at {place}" if place else "",
        f"another one lacks {'; '.join(own[:3])}{more}" if own else "",
        f"this group lacks {num_missing} that another one has" if num_missing > 0 else "",
    ]
    return ", and ".join(filter(None, differences)) or "the same ones in another order, or more often"


_DIGEST = 8
_LENGTH = 2 * _DIGEST


def _with_complement(content: bytes) -> bytes:
    digest = hashlib.blake2b(content, digest_size=_DIGEST).digest()
    return digest + bytes([255 - byte for byte in digest])


def _is_same(maxima: bytes) -> bool:
    """Whether all that have contributed a digest have contributed the same one."""
    return all([a + b == 255 for a, b in zip(maxima[:_DIGEST], maxima[_DIGEST:], strict=True)])

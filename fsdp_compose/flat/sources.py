"""What an all-gather reads: the shards of all ranks, or parts of what an earlier all-gather has brought.

Parts (``reshard_after_forward=int``): between forward and backward a few neighbours in the shard group hold the
unsharded parameters together, each an equal part, in the compute dtype. Backward gathers among these few alone. The
idea is FSDP2's; that parts outlive the backward, until a step, is that of hybrid sharding with the optimizer's state
sharded over all ranks (HFSDP, Megatron-FSDP).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..comm import DataParallelMesh, Label, Transport, Work


class ShardSource:
    """The shards of all ranks.

    Args:
        shard: this rank's.
        flat: what the all-gather writes to, which may have no memory now.
        mesh, label: whose.

    Attributes:
        gather: issues the all-gather, on the present stream; its work, or ``None``: it is complete.
    """

    __slots__ = ("_arguments", "_copy", "_is_local", "gather")

    def __init__(self, shard: torch.Tensor, flat: torch.Tensor, mesh: DataParallelMesh, label: Label) -> None:
        rank, numel, is_alone = mesh.shard_rank, shard.numel(), mesh.shard_world_size == 1
        # Without a cast the collective reads the shard itself, else its cast in the buffer (in place).
        own_slice = flat[rank * numel : (rank + 1) * numel]
        self._copy = self._copy_into(own_slice, shard, is_alone)
        # On an accelerator the work of a collective of one rank still orders the copy before compute.
        self._is_local = is_alone and flat.device.type == "cpu"
        self._arguments = (flat, shard if self._copy is None else own_slice, label)
        self.gather_by(mesh.transport)

    def _copy_into(self, own_slice: torch.Tensor, shard: torch.Tensor, is_alone: bool) -> Callable[[], object] | None:
        """Copies the shard to where the all-gather reads it; ``None``: it reads the shard itself."""
        return partial(own_slice.copy_, shard) if own_slice.dtype != shard.dtype or is_alone else None

    def gather_by(self, transport: Transport) -> None:
        """Move shards so from now on."""
        issue = _issue_nothing if self._is_local else transport.prepared_all_gather(*self._arguments)
        # No bound method: nothing that holds a model's memory is in a cycle.
        self.gather: Callable[[], Work | None] = issue if self._copy is None else partial(_in_turn, self._copy, issue)


def _in_turn(copy: Callable[[], object], issue: Callable[[], Work | None]) -> Work | None:
    copy()
    return issue()


def _issue_nothing() -> None:
    """There is no other rank."""


class KeptPart:
    """This rank's part of the unsharded flat parameter, which exists from ``keep`` to ``drop``.

    Args:
        flat: what all-gathers write to, which may have no memory now.
        transport: of the ranks that share the parts.
        label: the parameters.

    Attributes:
        is_kept: it exists.
    """

    __slots__ = ("_arguments", "_memory", "_nbytes", "_range", "_transport", "is_kept")

    def __init__(self, flat: torch.Tensor, transport: Transport, label: Label) -> None:
        rank, numel = transport.group.rank(), flat.numel() // transport.group.size()
        self._range, self._transport = slice(rank * numel, rank * numel + numel), transport
        self._memory = torch.empty(numel, dtype=flat.dtype, device=flat.device)
        self._nbytes = self._memory.nbytes
        self._arguments = (flat, self._memory, label)
        self.is_kept = True
        self.drop()

    def gather_by(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def nbytes(self) -> int:
        """The bytes that are allocated."""
        return self._nbytes if self.is_kept else 0

    def keep(self, shown: torch.Tensor) -> None:
        """Copy this rank's part of the unsharded flat parameter, which is complete."""
        if not self.is_kept:
            self._memory.untyped_storage().resize_(self._nbytes)
            self.is_kept = True
        self._memory.copy_(shown[self._range])

    def gather(self) -> Work:
        """Issue the all-gather of the parts, on the present stream."""
        return self._transport.all_gather(*self._arguments)

    def drop(self) -> None:
        """Free it; nothing that reads it is in flight."""
        if self.is_kept and self._memory.device.type != "meta":
            self._memory.untyped_storage().resize_(0)
        self.is_kept = False

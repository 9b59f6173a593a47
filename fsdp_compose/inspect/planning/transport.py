"""The transport of a dry run: nothing moves, and what would have is noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ...comm import ALL_GATHER, ALL_REDUCE, GATHER, REDUCE_SCATTER, Label, Transport, Work
from .facts import GATHERED, REDUCTIONS, CollectiveFacts
from .ledger import Ledger


class _Done:
    """What is over at once."""

    def wait(self) -> None:
        """There is nothing to wait for."""


class NothingMoves(Transport):
    """Moves nothing over ``group``.

    Args:
        group: the process group.
        name: of the ``fully_shard`` group that it serves.
        ledger: what storages there are.
        take: gets each collective.
    """

    name = "nothing moves"

    def __init__(
        self, group: dist.ProcessGroup, name: str, ledger: Ledger, take: Callable[[CollectiveFacts], None]
    ) -> None:
        super().__init__(group)
        self._of, self._ledger, self._take = name, ledger, take

    def among(self, peers: dist.ProcessGroup) -> Transport:
        return self

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        self._ledger.label(whole, GATHERED)
        return self._note(ALL_GATHER, whole.nbytes, whole)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        self._ledger.label(whole, REDUCTIONS)
        self._ledger.label(shard, REDUCTIONS)  # those that are gradients will be known as such
        return self._note(REDUCE_SCATTER, whole.nbytes, shard)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        self._ledger.label(tensor, REDUCTIONS)
        return self._note(ALL_REDUCE, tensor.nbytes, tensor)

    def gather(
        self,
        whole: torch.Tensor | None,
        part: torch.Tensor,
        ranges: Sequence[tuple[int, int]],
        is_everywhere: bool,
        label: Label,
    ) -> None:
        nbytes = sum(stop - start for start, stop in ranges) * part.element_size()
        self._note(GATHER, nbytes, whole)

    def _note(self, kind: str, nbytes: int, filled: torch.Tensor | None) -> Work:
        if filled is not None:
            self._ledger.lose_values(filled)
        self._take(CollectiveFacts(kind, self._of, nbytes, self.group.size()))
        return _Done()

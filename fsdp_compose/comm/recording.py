"""A transport that notes what goes through another one: what a schedule is, for debugging and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from .label import ALL_GATHER, ALL_REDUCE, GATHER, REDUCE_SCATTER, Label, Work
from .transport import Range, Transport


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective.

    Attributes:
        kind: see ``label``.
        label: the parameters that it is for.
        numel, dtype: of the whole tensor, which each rank has before or after it.
        num_ranks: among how many ranks.
        place: of a gather, the ranks that get the whole tensor, in words.
    """

    kind: str
    label: str
    numel: int
    dtype: torch.dtype
    num_ranks: int
    place: str = ""

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        if self.place:
            return f"{self.kind} {self.label} on {self.place}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} {self.label} ({self.numel} x {dtype} among {self.num_ranks} ranks)"


class CollectiveNotes(Protocol):
    """Hears of each collective, in this order; of one that fails, not to the end."""

    def issue(self, collective: Collective) -> None:
        """It is about to be issued: what raises here leaves nothing under way."""

    def under_way(self, collective: Collective, work: Work) -> None:
        """It was issued, on the present stream."""

    def wait(self, collective: Collective) -> None:
        """Its result is about to be waited for, on the present stream."""

    def done(self, collective: Collective) -> None:
        """What follows sees the result."""


class Recorder(Transport):
    """Does all by ``inner``, and notes each collective when it is issued and when its result is waited for.

    Args:
        inner: a transport.
        notes: hears of them.

    Attributes:
        inner: as given.
    """

    name = "recorder"

    def __init__(self, inner: Transport, notes: CollectiveNotes) -> None:
        super().__init__(inner.group)
        self.inner, self._notes = inner, notes

    @property
    def unrecorded(self) -> Transport:
        return self.inner.unrecorded

    def among(self, peers: dist.ProcessGroup) -> Transport:
        return Recorder(self.inner.among(peers), self._notes)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        collective = self._issue(ALL_GATHER, label, whole)
        return self._under_way(collective, self.inner.all_gather(whole, shard, label))

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        collective = self._issue(REDUCE_SCATTER, label, whole)
        return self._under_way(collective, self.inner.reduce_scatter(shard, whole, is_average, label))

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        collective = self._issue(ALL_REDUCE, label, tensor)
        return self._under_way(collective, self.inner.all_reduce(tensor, is_average, label))

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range], is_everywhere: bool, label: Label
    ) -> None:
        place, numel = "every rank" if is_everywhere else "the first rank", sum(stop - start for start, stop in ranges)
        collective = Collective(GATHER, str(label), numel, part.dtype, self.group.size(), place)
        self._notes.issue(collective)
        self._notes.wait(collective)
        self.inner.gather(whole, part, ranges, is_everywhere, label)
        self._notes.done(collective)

    def skip(self, nbytes: int, label: Label) -> None:
        self.inner.skip(nbytes, label)

    def _issue(self, kind: str, label: Label, whole: torch.Tensor) -> Collective:
        collective = Collective(kind, str(label), whole.numel(), whole.dtype, self.group.size())
        self._notes.issue(collective)
        return collective

    def _under_way(self, collective: Collective, work: Work) -> Work:
        self._notes.under_way(collective, work)
        return _Recorded(work, collective, self._notes)


class _Recorded:
    __slots__ = ("_collective", "_notes", "_work")

    def __init__(self, work: Work, collective: Collective, notes: CollectiveNotes) -> None:
        self._work, self._collective, self._notes = work, collective, notes

    def wait(self) -> None:
        self._notes.wait(self._collective)
        self._work.wait()
        self._notes.done(self._collective)

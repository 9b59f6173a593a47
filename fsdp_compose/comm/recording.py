"""A transport that notes what goes through another one: what a schedule is, for debugging and for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .label import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Label, Work
from .transport import Range, Transport


class Recorder(Transport):
    """Does all by ``inner``, and notes each collective when it is issued and when its result is waited for.

    Args:
        note: called with a line for each.

    Attributes:
        inner: as given.
    """

    name = "recorder"

    def __init__(self, inner: Transport, note: Callable[[str], Any]) -> None:
        super().__init__(inner.group)
        self.inner, self._note = inner, note

    @property
    def unrecorded(self) -> Transport:
        return self.inner.unrecorded

    def among(self, peers: dist.ProcessGroup) -> Transport:
        return Recorder(self.inner.among(peers), self._note)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        what = self._tell(ALL_GATHER, label, whole)
        return _Recorded(self.inner.all_gather(whole, shard, label), what, self._note)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        what = self._tell(REDUCE_SCATTER, label, whole)
        return _Recorded(self.inner.reduce_scatter(shard, whole, is_average, label), what, self._note)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        what = self._tell(ALL_REDUCE, label, tensor)
        return _Recorded(self.inner.all_reduce(tensor, is_average, label), what, self._note)

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range], is_everywhere: bool, label: Label
    ) -> None:
        where = "every rank" if is_everywhere else "the first rank"
        self._note(f"gather {label} on {where}")
        self.inner.gather(whole, part, ranges, is_everywhere, label)

    def skip(self, nbytes: int, label: Label) -> None:
        self.inner.skip(nbytes, label)

    def _tell(self, kind: str, label: Label, whole: torch.Tensor) -> str:
        """Note it, before it is issued: what raises here leaves nothing under way."""
        dtype = str(whole.dtype).removeprefix("torch.")
        self._note(f"{kind} {label} ({whole.numel()} x {dtype} among {self.group.size()} ranks)")
        return f"{kind} {label}"


class _Recorded:
    __slots__ = ("_note", "_what", "_work")

    def __init__(self, work: Work, what: str, note: Callable[[str], Any]) -> None:
        self._work, self._what, self._note = work, what, note

    def wait(self) -> None:
        self._work.wait()
        self._note(f"  wait for {self._what}")

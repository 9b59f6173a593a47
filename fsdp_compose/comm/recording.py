"""A transport that notes what goes through another one: what a schedule is, for debugging and for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .label import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Label
from .transport import Range, Transport, Work


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

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        return self._recorded(self.inner.all_gather(whole, shard, label), ALL_GATHER, label, whole)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        work = self.inner.reduce_scatter(shard, whole, is_average, label)
        return self._recorded(work, REDUCE_SCATTER, label, whole)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        return self._recorded(self.inner.all_reduce(tensor, is_average, label), ALL_REDUCE, label, tensor)

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range], is_everywhere: bool, label: Label
    ) -> None:
        where = "every rank" if is_everywhere else "the first rank"
        self._note(f"gather {label} on {where}")
        self.inner.gather(whole, part, ranges, is_everywhere, label)

    def _recorded(self, work: Work, kind: str, label: Label, whole: torch.Tensor) -> Work:
        dtype = str(whole.dtype).removeprefix("torch.")
        self._note(f"{kind} {label} ({whole.numel()} x {dtype})")
        return _Recorded(work, f"  wait for {kind} {label}", self._note)


class _Recorded:
    __slots__ = ("_line", "_note", "_work")

    def __init__(self, work: Work, line: str, note: Callable[[str], Any]) -> None:
        self._work, self._line, self._note = work, line, note

    def wait(self) -> None:
        self._work.wait()
        self._note(self._line)

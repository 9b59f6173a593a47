"""The loop over buckets: all ranks take each step together, or raise one error.

Before each bucket, and when the context is left, the ranks meet through the store, in bounded time. So no rank is in a
collective that another one will not enter: a rank that has left its loop, or raised, is heard of by the others at their
next step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch.distributed as dist

from ..comm import meet
from .buckets import Bucket

T = TypeVar("T")

_ON, _LEFT, _FAILED = "on", "left", "failed"
_MAX_TEXT = 1000  # characters of an exception's text that the other ranks are told


class Steps(Generic[T]):
    """An iterator over buckets, which all ranks advance together.

    What it gives is the consumer's, except for the list itself: that is emptied when the next one is asked for, so that
    a loop which keeps nothing holds one bucket.
    """

    def __init__(
        self,
        call: str,
        group: dist.ProcessGroup | None,
        buckets: Sequence[Bucket],
        gather: Callable[[Bucket], list[T]],
        problem: Callable[[], str],
    ) -> None:
        """
        Args:
            call: what the user has called, for messages.
            group: the ranks; ``None``: this process alone.
            gather: what a bucket holds, from all ranks.
            problem: why this rank cannot go on; empty if it can. Local.
        """
        self._call, self._group, self._buckets = call, group, buckets
        self._gather, self._problem = gather, problem
        self._num_taken = 0
        self._is_over = False
        self._latest: list[T] = []

    def __len__(self) -> int:
        """How many buckets there are in all."""
        return len(self._buckets)

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        if self._is_over:
            raise RuntimeError(f"{self._call}: its buckets are gathered inside its context, which was left")
        self._latest.clear()
        if self.is_complete:
            raise StopIteration
        self._is_over = True  # unless all goes well: if not, it is over on every rank
        problem = self._problem()
        if problem:
            self._step(_FAILED, problem)
        self._step(_ON, f"asks for bucket {self._num_taken + 1} of {len(self)}")
        self._latest = self._gather(self._buckets[self._num_taken])
        self._num_taken += 1
        self._is_over = False
        return self._latest

    @property
    def is_complete(self) -> bool:
        """Whether all buckets were taken."""
        return self._num_taken == len(self._buckets)

    def leave(self, error: BaseException | None) -> None:
        """End the loop, with all ranks.

        Args:
            error: the exception by which this rank leaves it, and which it goes on to raise.

        Raises:
            RuntimeError: the ranks are not all at the same place.
        """
        self._latest.clear()
        if self._is_over:
            return
        self._is_over = True
        where = f"has left its loop after {self._num_taken} of {len(self)} buckets"
        if error is not None:
            what = f"{where}, by {type(error).__name__}: {str(error)[:_MAX_TEXT]}"
            self._meet(_FAILED, what)  # the others raise what it says; this rank raises ``error``
            return
        problem = self._problem()
        self._step(_FAILED if problem else _LEFT, problem or where)

    def _step(self, kind: str, what: str) -> None:
        verdict = self._meet(kind, what)
        if verdict:
            raise RuntimeError(verdict)

    def _meet(self, kind: str, what: str) -> str:
        """Why the ranks cannot go on together; empty if they can."""
        if self._group is None or self._group.size() == 1:
            return _verdict(self._call, [(kind, what)])
        payload = json.dumps([kind, what])

        def judge(payloads: list[str]) -> str:
            return _verdict(self._call, [tuple(json.loads(text)) for text in payloads])

        return meet(self._group, f"{self._call}: its loop over buckets", payload, judge)


def _verdict(call: str, told: Sequence[tuple[str, str]]) -> str:
    """What is wrong, from what each rank has told: its kind, and what it does; empty if nothing is."""
    if len(set(told)) == 1 and told[0][0] != _FAILED:
        return ""
    ranks: dict[str, list[int]] = {}
    for rank, (_, what) in sorted(enumerate(told), key=lambda item: item[1][0] != _FAILED):
        ranks.setdefault(what, []).append(rank)
    listing = "; ".join(f"rank(s) {', '.join(map(str, found))}: {what}" for what, found in ranks.items())
    return (
        f"{call}: the ranks do not go on together: {listing}. Every rank must take all buckets, also one that does "
        "nothing with them, or all must leave the loop at the same place"
    )

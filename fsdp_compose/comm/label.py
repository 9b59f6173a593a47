"""What collectives are, and what they are for, as errors and schedules name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, SECOND_HALF, MESSAGES, BACKWARD, FORWARD, INTRODUCTION = KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "second half of the all-reduce",
    "exchange of tensors",
    "exchange at the end of backward",
    "exchange at the end of forward",
    "introduction before the first long sum",
)
GATHER = "gather"  # of unequal parts, or to one rank: by several of these, or by calls of torch.distributed


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Let what follows, on the present stream, see the result. After an interruption it may be called again."""


class Label:
    """What collectives are for: some parameters.

    Attributes:
        prefix: what precedes their names.
        text: the label in messages.
    """

    __slots__ = ("_fqns", "prefix", "text")

    def __init__(self, fqns: Sequence[str], prefix: str = "") -> None:
        """``fqns``: the names; at least one."""
        self._fqns = fqns
        self.rename(prefix)

    def rename(self, prefix: str) -> None:
        more = f" and {len(self._fqns) - 1} more" if len(self._fqns) > 1 else ""
        self.prefix, self.text = prefix, f"{prefix}{self._fqns[0]}{more}"

    def of(self, indices: Sequence[int]) -> Label:
        """For some of them."""
        return Label([self._fqns[i] for i in indices], self.prefix)

    def __str__(self) -> str:
        return self.text

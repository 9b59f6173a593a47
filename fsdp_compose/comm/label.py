"""What collectives are, and what they are for, as errors and schedules name them."""

from __future__ import annotations

from collections.abc import Sequence

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, SECOND_PHASE, MESSAGES, BACKWARD, FORWARD = KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "second half of the all-reduce",
    "exchange of tensors",
    "exchange at the end of backward",
    "exchange at the end of forward",
)


class Label:
    """What collectives are for: some parameters.

    Attributes:
        prefix: what precedes their names.
        fqns: the names; at least one.
    """

    __slots__ = ("fqns", "prefix")

    def __init__(self, fqns: Sequence[str], prefix: str = "") -> None:
        self.fqns, self.prefix = fqns, prefix

    def rename(self, prefix: str) -> None:
        self.prefix = prefix

    def __str__(self) -> str:
        more = f" and {len(self.fqns) - 1} more" if len(self.fqns) > 1 else ""
        return f"{self.prefix}{self.fqns[0]}{more}"

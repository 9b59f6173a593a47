"""What collectives are, and what they are for, as errors and schedules name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, SECOND_HALF, MESSAGES, BACKWARD, FORWARD, INTRODUCTION, ROUND = KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "second half of the all-reduce",
    "exchange of tensors",
    "exchange at the end of backward",
    "exchange at the end of forward",
    "introduction before the first long sum",
    "round about optional groups",
)
GATHER = "gather"  # of unequal parts, or to one rank: by several of these, or by calls of torch.distributed


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Let what follows, on the present stream, see the result. After an interruption it may be called again."""


@dataclass(frozen=True)
class Names:
    """How a group's parameters are called in the root. In the group, names begin with the number of the module, where
    it has several.

    Attributes:
        modules: the names of the group's modules in the root.
    """

    modules: tuple[str, ...]

    def __call__(self, fqn: str) -> str:
        module = self.modules[0]
        if len(self.modules) > 1:
            number, _, fqn = fqn.partition(".")
            module = self.modules[int(number)]
        return f"{module}.{fqn}" if module else fqn

    def __str__(self) -> str:
        return ", ".join([name or "the root" for name in self.modules])


IN_GROUP = Names(("",))  # before a root is known


class Label:
    """What collectives are for: some parameters.

    Attributes:
        names: how they are called.
        text: the label in messages.
    """

    __slots__ = ("_fqns", "names", "text")

    def __init__(self, fqns: Sequence[str], names: Names = IN_GROUP) -> None:
        """``fqns``: the names in the group; at least one."""
        self._fqns = fqns
        self.rename(names)

    def rename(self, names: Names) -> None:
        more = f" and {len(self._fqns) - 1} more" if len(self._fqns) > 1 else ""
        self.names, self.text = names, f"{names(self._fqns[0])}{more}"

    def of(self, indices: Sequence[int]) -> Label:
        """For some of them."""
        return Label([self._fqns[i] for i in indices], self.names)

    def __str__(self) -> str:
        return self.text

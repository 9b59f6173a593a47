"""The description of a program: plain data that can be pickled, and printed as it is written in Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields


class _Short:
    """Printed as it is written in Python, without what is as always."""

    def __repr__(self) -> str:
        told = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in told)})"


@dataclass(frozen=True, repr=False)
class Group(_Short):
    """A ``fully_shard`` call, or one of ``replicate``.

    ``way``: over which ranks, see ``WAYS``.
    """

    way: str = ""
    reshard: bool | None = None
    wide_reduction: bool = False  # reduce_dtype float64
    granularity: str | None = None


@dataclass(frozen=True, repr=False)
class Part(_Short):
    """A module: a leaf, or one that calls ``children`` the way ``kind`` says."""

    kind: str
    children: tuple[Part, ...] = ()
    group: Group | None = None
    recompute: bool | None = None  # activation checkpointing: use_reentrant
    frozen: bool = False
    narrow: bool = False  # float32 in a model of float64
    refers_to: int = 0  # of kind "again": which of the parts before it
    together: bool = False  # the first two children are one group


@dataclass(frozen=True, repr=False)
class Action(_Short):
    """Something that a training loop does; which fields matter depends on ``kind``."""

    kind: str
    sync: bool = True
    how: str = ""
    at: int = 0
    term: str = ""  # of the loss, on parameter number ``at`` itself
    root: str = ""  # of several: "other", or "both"
    toggles: bool = False  # requires_grad of parameter number ``at``, between forward and backward


@dataclass(frozen=True, repr=False)
class Program(_Short):
    root: Part
    actions: tuple[Action, ...]
    ties: tuple[tuple[int, int], ...] = ()
    shards_root: bool = True
    second_root: int | None = None  # a second model has this part of the first one too, as a group of its own
    optimizer: str = "sgd"
    input_requires_grad: bool = False
    hooks: tuple[tuple[int, str], ...] = ()  # (number of a parameter, kind); the first half before sharding
    compiled: bool = False  # the sharded model, whole
    ep: int = 1  # over how many data ranks experts are spread, where these are a multiple; else over all


# All ranks share the shards; hybrid sharding with two shards, where the ranks are even in number; with all of them;
# with one; replicate(); all share the shards, and two of them what stays between forward and backward, or until a step
# (where four are even in number; else all of it stays until a step).
WAYS = ("", "hybrid", "one row", "one column", "replicated", "parts", "until a step")
LEAVES = ("linear", "scale", "scalar", "cube", "spare", "nothing", "detach", "experts")
TERMS = ("square", "norm", "square before forward", "product", "product before forward")
# Modules whose forward does something to its last child before it runs it.
EDITORS = ("edits", "edits data", "freezes")
# Modules whose forward runs a backward.
INNER_BACKWARDS = ("forces", "local loss")
# Modules that differ in how they call their children.
CALLS = ("chain", "residual", "twice", "sum", "switch", "container", "opaque", "without grad", "auxiliary")
COMPOUNDS = (*CALLS, "late auxiliary", *EDITORS, *INNER_BACKWARDS)


def parts_of(part: Part) -> Iterator[Part]:
    """Innermost first: in the order in which modules are built."""
    for child in part.children:
        yield from parts_of(child)
    yield part

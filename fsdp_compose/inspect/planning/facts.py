"""The facts of a plan, as plain data: what a training step takes on one rank, for each number of ranks.

Bytes are of one rank. ``advice`` reads these facts, and ``words``, ``picture`` show them; ``step`` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..description.facts import ModelFacts

PARAMETERS, GATHERED, GRADIENTS, REDUCTIONS, OPTIMIZER, ACTIVATIONS, TEMPORARY, OTHER = KINDS = (
    "parameters",
    "gathered",
    "gradients",
    "reductions",
    "optimizer",
    "activations",
    "temporary",
    "other",
)
"""Of memory: shards, and parameters in no group; unsharded parameters; gradients that ``.grad`` shows; what reductions
read; the optimizer's state; what forward, and forwards that are repeated in backward, make; what backward and the
optimizer's step make and need no longer; the batch, buffers and all else."""


@dataclass(frozen=True)
class Moment:
    """The bytes that there are when there are most, while one thing is done.

    Attributes:
        doing: ``building``, ``forward``, ``backward`` or ``optimizer``.
        bytes_by_kind: see ``KINDS``.
    """

    doing: str
    bytes_by_kind: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True)
class CollectiveFacts:
    """One collective of a step.

    Attributes:
        kind: ``all-gather``, ``reduce-scatter``, ``all-reduce`` or ``gather``.
        group: the name of the group that it is for.
        nbytes: of the whole tensor.
        num_ranks: among which it is.
    """

    kind: str
    group: str
    nbytes: int
    num_ranks: int

    @property
    def part_bytes(self) -> int:
        """Of one rank's part."""
        return self.nbytes // self.num_ranks

    @property
    def sent_bytes(self) -> int:
        """What a rank sends at least, in rings: the parts of all others, in an all-reduce twice."""
        return (self.nbytes - self.part_bytes) * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Advice:
    """What could be done better.

    Attributes:
        about: a word for what it is about: ``small shards``, ``one large group``, ``tied``, ``replicate``, ``padding``,
            ``activations``, ``unreduced`` or ``computed``.
        text: it, with the figures that it follows from.
    """

    about: str
    text: str


@dataclass(frozen=True)
class WorldFacts:
    """A training step on one rank of many.

    Attributes:
        world_size: how many ranks.
        layout: where parameters lie, see ``describe``.
        moments: when there are most bytes, in each phase of a step as they are once training runs.
        building: the same, while the model is built and sharded.
        collectives: of flat parameters, in one step, in their order.
        recomputes: forwards were repeated in backward.
        unreduced: trainable parameters whose gradients are not averaged, with why.
        computed: operations of which no shape was known without computing them.
    """

    world_size: int
    layout: ModelFacts
    moments: tuple[Moment, ...]
    building: Moment
    collectives: tuple[CollectiveFacts, ...]
    recomputes: bool
    unreduced: tuple[str, ...]
    computed: tuple[str, ...]
    advice: tuple[Advice, ...] = ()

    @cached_property
    def peak(self) -> Moment:
        """When there are most bytes in a step."""
        return max(self.moments, key=lambda moment: moment.nbytes)


@dataclass(frozen=True)
class PlanFacts:
    """A plan.

    Attributes:
        optimizer, batch: what was asked for, in words.
        worlds: a step for each number of ranks, in the order in which they were asked for.
    """

    optimizer: str
    batch: str
    worlds: tuple[WorldFacts, ...]

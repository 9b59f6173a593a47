"""Strategies of data parallelism as rows of one table, and the options that a row comes to.

A row says, for each dimension of the mesh, what is kept of parameters, gradients and optimizer state between uses:
all of it (*replicated*), or a part (*sharded*). All else follows:

- The optimizer trains shards over the dimensions in which its state is sharded, as ``fully_shard`` on these does; over
  the others gradients are averaged by a second stage of the reduction.
- Where parameters are kept as the optimizer's state is, they are gathered for each use. Where they are kept whole, the
  gather follows a step, and they stay until the next one; where they are sharded over fewer dimensions, parts of them
  stay (``fully_shard(reshard_after_forward=int)``).
- Where gradients are kept whole and the optimizer's state is not, backwards of accumulation run inside ``no_sync``.

ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. Hybrid sharding:
Zhao et al., "PyTorch FSDP", 2023. HFSDP: Megatron-FSDP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Kept(Enum):
    """What one rank keeps of something, over one dimension of the mesh."""

    REPLICATED = "all of it"
    SHARDED = "a part"


R, S = Kept.REPLICATED, Kept.SHARDED
Dims = tuple[Kept, ...]


@dataclass(frozen=True)
class Strategy:
    """One row: what is kept between uses, over each dimension of the mesh, from the outermost on.

    Attributes:
        parameters: from one use to the next.
        gradients: from one backward of accumulation to the next.
        optimizer: from step to step; the parameters that it trains are kept alike.

    Raises:
        ValueError: the tuples differ in length; something is sharded over a dimension in which the optimizer's state is
            replicated; or the dimensions do not stand in the order that ranks are laid out for: replicated ones first.
    """

    parameters: Dims
    gradients: Dims
    optimizer: Dims

    def __post_init__(self) -> None:
        kept = (self.parameters, self.gradients, self.optimizer)
        if len({len(dims) for dims in kept}) != 1 or len(self.optimizer) not in (1, 2):
            raise ValueError(f"{self}: expected one entry for each of one or two dimensions of a mesh")
        for dims in kept:
            if [*dims] != sorted(dims, key=lambda item: item is S):
                raise ValueError(f"{self}: what is replicated over the inner dimension is so over the outer one")
            if any(item is S and optimizer is R for item, optimizer in zip(dims, self.optimizer, strict=True)):
                raise ValueError(f"{self}: where the optimizer's state is replicated, so is all else")
        if self.gradients not in (self.optimizer, (R,) * len(self.optimizer)):
            raise ValueError(f"{self}: gradients are kept as the optimizer's state is, or whole")

    @property
    def num_dims(self) -> int:
        """How many dimensions the mesh has."""
        return len(self.optimizer)

    @property
    def stages(self) -> tuple[str, ...]:
        """The collectives of a reduction, in their order."""
        scattered = ("reduce-scatter",) if S in self.optimizer else ()
        return (*scattered, "all-reduce") if R in self.optimizer else scattered

    @property
    def accumulates_whole(self) -> bool:
        """Whether backwards of accumulation, but the last, run inside ``no_sync``."""
        return self.gradients != self.optimizer

    @property
    def is_replicated(self) -> bool:
        """Whether every rank keeps everything."""
        return S not in self.optimizer

    @property
    def flattens(self) -> bool:
        """Whether the ranks of both dimensions share the shards."""
        return self.optimizer == (S, S)

    def reshards(self, sizes: Sequence[int]) -> bool | int | None:
        """``reshard_after_forward``, and ``_backward``, on a mesh of these ``sizes``; ``None``: as always."""
        if self.parameters == self.optimizer:
            return None
        holders = math.prod(size for size, kept in zip(sizes, self.parameters, strict=True) if kept is S)
        return None if holders == math.prod(sizes) > 1 else holders > 1 and holders


def strategy_named(strategy: str | Strategy, num_dims: int) -> Strategy:
    """The row of this name, or that row, for a mesh of ``num_dims`` dimensions.

    Raises:
        TypeError: ``strategy`` is neither.
        ValueError: there is none of this name, or it is for another number of dimensions.
    """
    row = STRATEGIES.get(strategy) if isinstance(strategy, str) else strategy
    if row is None:
        raise ValueError(f"fully_shard(strategy={strategy!r}): expected one of {', '.join(STRATEGIES)}")
    if not isinstance(row, Strategy):
        raise TypeError(f"fully_shard(strategy={strategy!r}): expected a name or a Strategy")
    if row.num_dims != num_dims:
        raise ValueError(
            f"fully_shard(strategy={strategy!r}): it is over {row.num_dims} dimension(s) of a mesh; this one has "
            f"{num_dims}"
        )
    return row


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "ddp": Strategy(parameters=(R,), gradients=(R,), optimizer=(R,)),
        "zero1": Strategy(parameters=(R,), gradients=(R,), optimizer=(S,)),
        "zero2": Strategy(parameters=(R,), gradients=(S,), optimizer=(S,)),
        "zero3": Strategy(parameters=(S,), gradients=(S,), optimizer=(S,)),
        "hybrid": Strategy(parameters=(R, S), gradients=(R, S), optimizer=(R, S)),
        "hfsdp": Strategy(parameters=(R, S), gradients=(S, S), optimizer=(S, S)),
    }
)
"""The rows that have names."""

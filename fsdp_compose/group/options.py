"""The options of one group: what ``fully_shard`` and the functions of ``controls`` decide. Plain data.

They are copied, compared between ranks and printed as one object; to set one is to replace the object. The strategies
of data parallelism are rows of one table below, and each comes to a set of these options."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch.nn as nn

from ..flat import AVERAGE, CPUOffloadPolicy, Granularity, MixedPrecisionPolicy, ReductionOptions

BUCKET_BYTES = 25 << 20  # as DistributedDataParallel
Modules = tuple["weakref.ref[nn.Module]", ...]


@dataclass(frozen=True, slots=True)
class OptionsForGood:
    """Those that the call of ``fully_shard`` decides for as long as the group lives.

    Attributes:
        mp_policy, granularity, offload: see ``fully_shard``.
        bucket_bytes: of a replicated group, see ``replicate``; ``None``: it is sharded.
        is_optional: each rank may run the group or skip it.
    """

    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    granularity: Granularity | None = None
    offload: CPUOffloadPolicy | None = None
    bucket_bytes: int | None = None
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class GroupOptions(OptionsForGood):
    """The options of one group.

    Attributes:
        reshard_after_forward: see ``fully_shard``; ``None``: the groups that are no root. A number: parts stay, each of
            which is this fraction.
        reshard_after_backward: see ``set_reshard_after_backward``. A number: parts stay until a step.
        requires_gradient_sync: whether backward reduces (``no_sync`` says no).
        requires_all_reduce: whether backward averages over replicas, where it reduces.
        is_functional: whether forwards gather in a way that autograd can differentiate twice.
        keeps_unsharded: whether forwards without grad mode leave the group gathered (``keep_unsharded``).
        keeps_storage: whether unsharded parameters keep their memory while they are sharded.
        is_held: gathered until ``reshard()`` (``unshard(until_reshard=True)``).
        reduction: how gradients are reduced.
        forward_prefetch, backward_prefetch: the modules whose groups are gathered ahead; ``None``: the one that came
            next in the last iteration.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool | int = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    is_functional: bool = False
    keeps_unsharded: bool = False
    keeps_storage: bool = False
    is_held: bool = False
    reduction: ReductionOptions = AVERAGE
    forward_prefetch: Modules | None = None
    backward_prefetch: Modules | None = None

    def of_a_copy(self) -> GroupOptions:
        """The options of a copy of the group: without what ends with a context or a call, or names other modules."""
        return replace(self, keeps_unsharded=False, is_held=False, forward_prefetch=None, backward_prefetch=None)

    def reshards(self, is_outermost: bool) -> bool:
        """Whether a group is resharded between a forward and its backward; ``is_outermost``: it is that of a root."""
        wanted = not is_outermost if self.reshard_after_forward is None else self.reshard_after_forward
        return bool(wanted) and not self.is_held

    @property
    def part_size(self) -> int | None:
        """How many ranks share the parameters between forward and backward, where parts stay."""
        return self.reshard_after_forward if _is_number(self.reshard_after_forward) else None

    def reshards_partially(self) -> bool:
        """Whether a part of the parameters stays when they are freed between a forward and its backward."""
        return _is_number(self.reshard_after_forward) or self.reshards_partially_until_step()

    def reshards_partially_until_step(self) -> bool:
        return _is_number(self.reshard_after_backward)

    def keeps_after_backward(self) -> bool:
        """Whether a group stays gathered after its backward."""
        return self.is_held or not self.reshard_after_backward

    def follows_writes(self) -> bool:
        """Whether a group that is gathered when an iteration begins is gathered again only if the ranks have written to
        its sharded parameters."""
        return self.keeps_unsharded or self.is_held or not self.reshard_after_backward

    def facts(self, is_outermost: bool) -> dict[str, Any]:
        """What must be the same on every rank; without the dtypes of parameters, which these themselves tell, and what
        changes from forward to forward."""
        return {
            "reshard_after_forward": self.reshards(is_outermost),
            "parts stay": "until a step" if self.reshards_partially_until_step() else self.reshards_partially(),
            "reshard_after_backward": self.reshard_after_backward,
            "output_dtype": str(self.mp_policy.output_dtype),
            "cast_forward_inputs": self.mp_policy.cast_forward_inputs,
            "gradient divide factor": self.reduction.divide_factor,
            "sum reduction": self.reduction.forces_sum,
            "offload_policy": self.offload and ("shards and gradients" if self.offload.parameters else "gradients"),
            "post-reduction hook": self.reduction.hook is not None,
            **({"optional": True} if self.is_optional else {}),
        }


def _is_number(option: bool | int | None) -> bool:
    return isinstance(option, int) and not isinstance(option, bool)


# ---- Strategies of data parallelism as rows of one table, and the options that a row comes to.
#
# A row says, for each dimension of the mesh, what is kept of parameters, gradients and optimizer state between uses:
# all of it (*replicated*), or a part (*sharded*). All else follows:
#
# - The optimizer trains shards over the dimensions in which its state is sharded, as ``fully_shard`` on these does;
# over the others gradients are averaged by a second stage of the reduction. - Where parameters are kept as the
# optimizer's state is, they are gathered for each use. Where they are kept whole, the gather follows a step, and they
# stay until the next one; where they are sharded over fewer dimensions, parts of them stay
# (``fully_shard(reshard_after_forward=int)``). - Where gradients are kept whole and the optimizer's state is not,
# backwards of accumulation run inside ``no_sync``.
#
# ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. Hybrid
# sharding: Zhao et al., "PyTorch FSDP", 2023. HFSDP: Megatron-FSDP.


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

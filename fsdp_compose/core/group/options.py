"""The options of one group, set by ``fully_shard`` and the functions of ``controls``. Plain data.

They are copied, compared between ranks and printed as one object; setting an option replaces the object. The strategies
of data parallelism are rows of one table below, and each row translates into a set of these options."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch.nn as nn

from ..._arguments import size_of
from ...errors import MisuseError, MisuseTypeError
from ..flat import AVERAGE, CPUOffloadPolicy, Granularity, MixedPrecisionPolicy, ReductionOptions

BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel
Modules = tuple["weakref.ref[nn.Module]", ...]


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of one group. ``fully_shard`` sets those up to ``limit_unsharded_bytes`` once, for good.

    Attributes:
        mp_policy, granularity, offload: see ``fully_shard``.
        bucket_bytes: bucket size of a replicated group, see ``replicate``; ``None``: the group is sharded.
        is_optional: each rank may run the group or skip it.
        limit_unsharded_bytes: of a root: bytes that its groups may hold for communication; a string: in groups.
        reshard_after_forward: see ``fully_shard``. ``None``: yes, unless the group is a root. A number: the parameters
            stay sharded over this many ranks.
        reshard_after_backward: see ``set_reshard_after_backward``. A number: post-forward shards stay until a step.
        requires_gradient_sync: whether backward reduces (``no_sync`` turns it off).
        requires_all_reduce: whether a backward that reduces also averages over replicas.
        gathers_in_backward: whether backward needs the parameters, and gathers them.
        is_functional: whether forwards gather in a way that autograd can differentiate twice.
        keeps_unsharded: whether forwards without grad mode leave the group gathered (``keep_unsharded``).
        keeps_storage: whether unsharded parameters keep their memory while they are sharded.
        is_held: the group stays gathered until ``reshard()`` (``unshard(until_reshard=True)``).
        shows_gathered: modules show unsharded parameters as long as the group is gathered (FSDP2's layout).
        reduction: how gradients are reduced.
        forward_prefetch, backward_prefetch: the modules whose groups are gathered ahead; ``None``: the group that came
            next in the last iteration.
    """

    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    granularity: Granularity | None = None
    offload: CPUOffloadPolicy | None = None
    bucket_bytes: int | None = None
    is_optional: bool = False
    limit_unsharded_bytes: int | str | None = None
    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool | int = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    gathers_in_backward: bool = True
    is_functional: bool = False
    keeps_unsharded: bool = False
    keeps_storage: bool = False
    is_held: bool = False
    shows_gathered: bool = False
    reduction: ReductionOptions = AVERAGE
    forward_prefetch: Modules | None = None
    backward_prefetch: Modules | None = None

    def of_a_copy(self) -> GroupOptions:
        """The options for a copy of the group: not those that a context or call will undo, or that name modules."""
        return replace(self, keeps_unsharded=False, is_held=False, forward_prefetch=None, backward_prefetch=None)

    def reshards(self, is_outermost: bool) -> bool:
        """Whether a group is resharded between a forward and its backward; ``is_outermost``: it is a root's group."""
        wanted = not is_outermost if self.reshard_after_forward is None else self.reshard_after_forward
        return bool(wanted) and not self.is_held

    @property
    def post_forward_size(self) -> int | None:
        """How many ranks share the parameters between forward and backward; ``None`` without that option."""
        return self.reshard_after_forward if _is_number(self.reshard_after_forward) else None

    def reshards_partially(self) -> bool:
        """Whether a post-forward shard stays when the parameters are freed between a forward and its backward."""
        return _is_number(self.reshard_after_forward) or self.reshards_partially_until_step()

    def reshards_partially_until_step(self) -> bool:
        return _is_number(self.reshard_after_backward)

    def keeps_after_backward(self) -> bool:
        """Whether a group stays gathered after its backward."""
        return self.is_held or not self.reshard_after_backward

    def follows_writes(self) -> bool:
        """Whether a group that an iteration finds gathered is gathered again only if ranks have written to it."""
        return self.keeps_unsharded or self.is_held or not self.reshard_after_backward

    def facts(self, is_outermost: bool) -> dict[str, Any]:
        """The options that must be the same on every rank, except those that may change from forward to forward and the
        parameter dtypes, which are compared with the parameters themselves."""
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
            **({"zeros for unused parameters": True} if self.reduction.fills_unused else {}),
            **({"optional": True} if self.is_optional else {}),
            **({} if self.limit_unsharded_bytes is None else {"limit_unsharded_bytes": self.limit_unsharded_bytes}),
        }


def bytes_of_limit(limit: int | str | None, group_bytes: int = 1) -> int:
    """``limit_unsharded_bytes`` in bytes, if the largest group has ``group_bytes``; ``"2 groups"`` are two of those.

    Raises:
        MisuseError, MisuseTypeError: it is no such limit.
    """
    if isinstance(limit, str):
        number, _, unit = limit.partition(" ")
        if number.isdecimal() and int(number) > 0 and unit in ("group", "groups"):
            return int(number) * group_bytes
    assert limit is not None, "there is one"
    return size_of(limit, "fully_shard(limit_unsharded_bytes={})", or_else=", or of groups: '2 groups'")


def _is_number(option: bool | int | None) -> bool:
    return isinstance(option, int) and not isinstance(option, bool)


# ---- Strategies of data parallelism as rows of one table, and the options that a row translates into
#
# For each dimension of the mesh, a row says how parameters, gradients and optimizer state are kept between uses:
# *replicated* (all of it on every rank) or *sharded* (a shard on each rank). The rest follows:
#
# - The optimizer trains shards over the dimensions that shard its state, as with ``fully_shard`` on these dimensions.
#   Over the other dimensions, a second stage of the reduction averages gradients.
# - Parameters that are kept like the optimizer state are gathered for each use. Parameters that are kept whole are
#   gathered after a step and stay until the next one. Of parameters that are sharded over fewer dimensions,
#   post-forward shards stay (``fully_shard(reshard_after_forward=int)``).
# - If gradients are kept whole and optimizer state is not, the backwards of accumulation run inside ``no_sync``.
#
# ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. Hybrid
# sharding: Zhao et al., "PyTorch FSDP", 2023. HFSDP: Megatron-FSDP.


class Kept(Enum):
    """How much one rank keeps of parameters, gradients or optimizer state, over one dimension of the mesh."""

    REPLICATED = "all of it"
    SHARDED = "a part"


R, S = Kept.REPLICATED, Kept.SHARDED
Dims = tuple[Kept, ...]


@dataclass(frozen=True)
class Strategy:
    """A strategy of data parallelism: how much each rank keeps between uses, for each mesh dimension, outermost first.

    Attributes:
        parameters: kept from one use to the next.
        gradients: kept from one backward of accumulation to the next.
        optimizer: optimizer state, and the parameters that the optimizer trains, kept from step to step.

    Raises:
        ValueError: the tuples differ in length; something is sharded over a dimension that replicates the optimizer
            state; or a sharded dimension comes before a replicated one.
    """

    parameters: Dims
    gradients: Dims
    optimizer: Dims

    def __post_init__(self) -> None:
        kept = (self.parameters, self.gradients, self.optimizer)
        if len({len(dims) for dims in kept}) != 1 or len(self.optimizer) not in (1, 2):
            raise MisuseError(f"{self}: expected one entry per dimension of the mesh, which has one or two")
        for dims in kept:
            if [*dims] != sorted(dims, key=lambda item: item is S):
                raise MisuseError(
                    f"{self}: whatever is replicated over the inner dimension must be replicated over the outer one too"
                )
            if any(item is S and optimizer is R for item, optimizer in zip(dims, self.optimizer, strict=True)):
                raise MisuseError(
                    f"{self}: over a dimension that replicates the optimizer state, parameters and gradients must be "
                    "replicated too"
                )
        if self.gradients not in (self.optimizer, (R,) * len(self.optimizer)):
            raise MisuseError(f"{self}: gradients must be kept like the optimizer state, or whole")

    @property
    def gathers_all(self) -> bool:
        """Whether every rank keeps all parameters between uses."""
        return S not in self.parameters

    @property
    def num_dims(self) -> int:
        """How many dimensions the mesh has."""
        return len(self.optimizer)

    @property
    def stages(self) -> tuple[str, ...]:
        """The collectives of a reduction, in order."""
        scattered = ("reduce-scatter",) if S in self.optimizer else ()
        return (*scattered, "all-reduce") if R in self.optimizer else scattered

    @property
    def accumulates_whole(self) -> bool:
        """Whether all backwards of accumulation except the last run inside ``no_sync``."""
        return self.gradients != self.optimizer

    @property
    def is_replicated(self) -> bool:
        """Whether every rank keeps everything."""
        return S not in self.optimizer

    @staticmethod
    def num_copies(kept: Dims, sizes: Sequence[int]) -> int:
        """How many ranks of a mesh of ``sizes`` have the same of what is kept like this."""
        return math.prod(size for size, item in zip(sizes, kept, strict=True) if item is R)

    @property
    def flattens(self) -> bool:
        """Whether the ranks of both dimensions share the shards."""
        return self.optimizer == (S, S)

    def reshards(self, sizes: Sequence[int]) -> bool | int | None:
        """``reshard_after_forward`` and ``reshard_after_backward`` on a mesh of ``sizes``; ``None``: the defaults."""
        if self.parameters == self.optimizer:
            return None
        holders = math.prod(size for size, kept in zip(sizes, self.parameters, strict=True) if kept is S)
        return None if holders == math.prod(sizes) > 1 else holders > 1 and holders


def strategy_named(strategy: str | Strategy, num_dims: int) -> Strategy:
    """The strategy with this name, or the given one, for a mesh of ``num_dims`` dimensions.

    Raises:
        TypeError: ``strategy`` is neither a name nor a ``Strategy``.
        ValueError: there is no strategy with this name, or it needs another number of dimensions.
    """
    row = STRATEGIES.get(strategy) if isinstance(strategy, str) else strategy
    if row is None:
        raise MisuseError(f"fully_shard(strategy={strategy!r}): expected one of {', '.join(STRATEGIES)}")
    if not isinstance(row, Strategy):
        raise MisuseTypeError(f"fully_shard(strategy={strategy!r}): expected a name or a Strategy")
    if row.num_dims != num_dims:
        raise MisuseError(
            f"fully_shard(strategy={strategy!r}): this strategy needs a mesh of {row.num_dims} dimension(s); this one "
            f"has {num_dims}"
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
"""The named strategies."""

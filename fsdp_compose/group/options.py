"""The options of one group: what a call of ``fully_shard`` and the functions of ``controls`` decide. Plain data.

They are copied, compared between ranks and printed as one object; to set one is to replace the object.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
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

    def keeps_parts(self) -> bool:
        """Whether a part of the parameters stays when they are freed between a forward and its backward."""
        return _is_number(self.reshard_after_forward) or self.keeps_parts_until_step()

    def keeps_parts_until_step(self) -> bool:
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
            "parts stay": "until a step" if self.keeps_parts_until_step() else self.keeps_parts(),
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

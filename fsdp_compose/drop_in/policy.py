"""FSDP2's mixed-precision policy, in the words of the torch that is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.distributed import fsdp

from ..flat import MixedPrecisionPolicy as _OwnPolicy
from ..flat import as_ours

_HAS_OVERRIDE = any(item.name == "param_dtype_override_fn" for item in fields(fsdp.MixedPrecisionPolicy))

if TYPE_CHECKING or _HAS_OVERRIDE:  # torch >= 2.15
    MixedPrecisionPolicy = fsdp.MixedPrecisionPolicy
else:

    @dataclass(frozen=True)
    class MixedPrecisionPolicy(fsdp.MixedPrecisionPolicy):
        """torch's policy, with what torch 2.15 added to it: ``param_dtype_override_fn``, from a parameter to the dtype
        in which forward sees it, or ``None`` for ``param_dtype``."""

        param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)


def own_policy(given: object) -> _OwnPolicy:
    """A policy of torch's, or ours, as ours.

    Before torch 2.15 a ``reduce_dtype`` that is left out means ``param_dtype``, since then the dtype of the gradient;
    ours means the latter on every torch. A policy of torch's keeps its meaning.

    Raises:
        TypeError: it is something else.
    """
    policy = as_ours(_OwnPolicy, given, "fully_shard(mp_policy=...)")
    if isinstance(given, _OwnPolicy) or _HAS_OVERRIDE or policy.reduce_dtype is not None:
        return policy
    return _OwnPolicy(
        **{**{item.name: getattr(policy, item.name) for item in fields(policy)}, "reduce_dtype": policy.param_dtype}
    )

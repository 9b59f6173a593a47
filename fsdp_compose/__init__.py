"""fsdp_compose: fully sharded data parallel training on flat parameters, as functions on ordinary modules."""

from .controls import (
    UnshardHandle,
    no_sync,
    reshard,
    set_requires_gradient_sync,
    set_reshard_after_forward,
    unshard,
)
from .fully_shard import fully_shard
from .policy import MixedPrecisionPolicy

__version__ = "0.1.0"

__all__ = [
    "MixedPrecisionPolicy",
    "UnshardHandle",
    "fully_shard",
    "no_sync",
    "reshard",
    "set_requires_gradient_sync",
    "set_reshard_after_forward",
    "unshard",
]

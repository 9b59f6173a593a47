"""fsdp_compose: fully sharded data parallel training on flat parameters, as functions on ordinary modules."""

from . import _requirements as _requirements  # first: the others need that torch
from . import _shared_store as _shared_store  # before torch's init_process_group() is called
from . import admission as admission  # lets torch's functions take its placements
from . import outside_use as outside_use  # gives sharded parameters gradients of losses that gather them
from . import ragged_ops as ragged_ops  # gives RaggedDTensor its operations
from .check import UnreducedParameter, check
from .clip import clip_grad_norm_
from .controls import (
    UnshardHandle,
    functional_mode,
    keep_unsharded,
    no_sync,
    reshard,
    set_functional_mode,
    set_requires_gradient_sync,
    set_reshard_after_forward,
    unshard,
)
from .forward_methods import register_forward_method
from .fully_shard import fully_shard
from .optim import declare_elementwise, flat_parameters
from .placement import RaggedShard
from .policy import MixedPrecisionPolicy
from .ragged import RaggedDTensor, distribute_ragged
from .ragged_spec import RaggedSpec as RaggedSpec  # pickles name it here
from .summon import summon_full_params

__version__ = "0.1.0"

__all__ = [
    "MixedPrecisionPolicy",
    "RaggedDTensor",
    "RaggedShard",
    "UnreducedParameter",
    "UnshardHandle",
    "check",
    "clip_grad_norm_",
    "declare_elementwise",
    "distribute_ragged",
    "flat_parameters",
    "fully_shard",
    "functional_mode",
    "keep_unsharded",
    "no_sync",
    "register_forward_method",
    "reshard",
    "set_functional_mode",
    "set_requires_gradient_sync",
    "set_reshard_after_forward",
    "summon_full_params",
    "unshard",
]

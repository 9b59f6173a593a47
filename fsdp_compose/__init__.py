"""fsdp_compose: fully sharded data parallel training on flat parameters, as functions on ordinary modules."""

from ._import_checks import explain_missing  # first: the others need that torch

try:
    from . import _torch as _torch  # every private name of torch, before anything is done
except (ImportError, AttributeError) as error:
    raise explain_missing(error) from error
from . import _import_checks as _import_checks  # before torch's init_process_group() is called
from .api import (
    UnshardHandle,
    broadcast_replicas,
    compile,
    fully_shard,
    functional_mode,
    keep_unsharded,
    no_sync,
    offload,
    onload,
    plan,
    reduce_gradients,
    register_forward_method,
    replicate,
    reshard,
    serve_optional,
    set_force_sum_reduction_for_comms,
    set_functional_mode,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_keep_unsharded_storage,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_post_reduction_hook,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_reshard_after_backward,
    set_reshard_after_forward,
    summon_full_params,
    unshard,
)
from .flat import CPUOffloadPolicy, MixedPrecisionPolicy
from .group import STRATEGIES, Kept, Strategy
from .inspect import Plan, Trace, TraceEvent, UnreducedParameter, check, describe, record_collectives, trace
from .optim import clip_grad_norm_, declare_elementwise, flat_parameters, offload_states
from .ragged import RaggedDTensor, RaggedShard, distribute_ragged
from .ragged import RaggedSpec as RaggedSpec  # pickles name it here
from .sync import ChangedElements, ParameterSnapshot, apply_changes, changed_since, full_parameters, snapshot_parameters

__version__ = "0.2.0"

__all__ = [
    "STRATEGIES",
    "CPUOffloadPolicy",
    "ChangedElements",
    "Kept",
    "MixedPrecisionPolicy",
    "ParameterSnapshot",
    "Plan",
    "RaggedDTensor",
    "RaggedShard",
    "Strategy",
    "Trace",
    "TraceEvent",
    "UnreducedParameter",
    "UnshardHandle",
    "apply_changes",
    "broadcast_replicas",
    "changed_since",
    "check",
    "clip_grad_norm_",
    "compile",
    "declare_elementwise",
    "describe",
    "distribute_ragged",
    "flat_parameters",
    "full_parameters",
    "fully_shard",
    "functional_mode",
    "keep_unsharded",
    "no_sync",
    "offload",
    "offload_states",
    "onload",
    "plan",
    "record_collectives",
    "reduce_gradients",
    "register_forward_method",
    "replicate",
    "reshard",
    "serve_optional",
    "set_force_sum_reduction_for_comms",
    "set_functional_mode",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_keep_unsharded_storage",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_reduction_hook",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "snapshot_parameters",
    "summon_full_params",
    "trace",
    "unshard",
]

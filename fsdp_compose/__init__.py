"""fsdp_compose: fully sharded data parallel training on flat parameters, as functions on ordinary modules."""

import sys
import warnings
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from . import _import_checks as _import_checks  # first: the others need that torch
from . import errors as errors
from ._on_demand import on_demand
from .errors import CheckpointDamagedError, FSDPComposeError, MisuseError, RankLostError, RanksDifferError

if _import_checks.is_untested(_import_checks.VERSION):
    try:
        from . import _torch as _torch  # imports every private name of torch: one may be missing
    except (ImportError, AttributeError) as error:
        _import_checks.refuse_if_untested(_import_checks.VERSION, error)
        raise

if TYPE_CHECKING:
    from . import strategies as strategies
    from . import sync as sync
    from .core import (
        UnshardHandle,
        fully_shard,
        functional_mode,
        keep_unsharded,
        no_sync,
        reduce_gradients,
        register_forward_method,
        register_fsdp_forward_method,
        replicate,
        reshard,
        set_all_reduce_hook,
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
        sync_optional_groups,
        unshard,
    )
    from .core.comm import Replicas, Transport, TransportRole, TransportWrapper
    from .core.flat import CPUOffloadPolicy, MixedPrecisionPolicy
    from .core.optimizers import clip_grad_norm_, declare_blockwise, declare_elementwise, flat_parameters
    from .core.ragged import RaggedDTensor, RaggedShard, distribute_ragged
    from .core.ragged import RaggedSpec as RaggedSpec  # pickles name it here
    from .inspect import (
        FSDPGroup,
        Plan,
        Trace,
        TraceEvent,
        UnreducedParameter,
        describe,
        find_unreduced_parameters,
        fsdp_groups,
        plan,
        record_collectives,
        trace,
    )
    from .plugins.graphs import compile
    from .plugins.offloading import (
        CheckpointedInputs,
        offload_checkpointed_inputs,
        offload_model,
        offload_optimizer_states,
        onload_model,
    )
    from .plugins.replicas import broadcast_replicas, set_replicas
    from .plugins.transports import WireFormat, set_transport, set_wire_formats
    from .sync import full_parameters

__version__ = "0.3.0"

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointDamagedError",
    "CheckpointedInputs",
    "FSDPComposeError",
    "FSDPGroup",
    "MisuseError",
    "MixedPrecisionPolicy",
    "Plan",
    "RaggedDTensor",
    "RaggedShard",
    "RankLostError",
    "RanksDifferError",
    "Replicas",
    "Trace",
    "TraceEvent",
    "Transport",
    "TransportRole",
    "TransportWrapper",
    "UnreducedParameter",
    "UnshardHandle",
    "WireFormat",
    "broadcast_replicas",
    "clip_grad_norm_",
    "compile",
    "declare_blockwise",
    "declare_elementwise",
    "describe",
    "distribute_ragged",
    "find_unreduced_parameters",
    "flat_parameters",
    "fsdp_groups",
    "full_parameters",
    "fully_shard",
    "functional_mode",
    "keep_unsharded",
    "no_sync",
    "offload_checkpointed_inputs",
    "offload_model",
    "offload_optimizer_states",
    "onload_model",
    "plan",
    "record_collectives",
    "reduce_gradients",
    "register_forward_method",
    "register_fsdp_forward_method",
    "replicate",
    "reshard",
    "set_all_reduce_hook",
    "set_force_sum_reduction_for_comms",
    "set_functional_mode",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_keep_unsharded_storage",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_reduction_hook",
    "set_replicas",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_transport",
    "set_wire_formats",
    "summon_full_params",
    "sync_optional_groups",
    "trace",
    "unshard",
]

_get = on_demand(
    __name__,
    {
        "core": (
            "UnshardHandle fully_shard functional_mode keep_unsharded no_sync reduce_gradients "
            "register_forward_method register_fsdp_forward_method replicate reshard set_all_reduce_hook "
            "set_force_sum_reduction_for_comms set_functional_mode set_gradient_divide_factor "
            "set_is_last_backward set_keep_unsharded_storage set_modules_to_backward_prefetch "
            "set_modules_to_forward_prefetch set_post_reduction_hook set_requires_all_reduce "
            "set_requires_gradient_sync set_reshard_after_backward set_reshard_after_forward summon_full_params "
            "sync_optional_groups unshard"
        ),
        "core.comm": "Replicas Transport TransportRole TransportWrapper",
        "core.flat": "CPUOffloadPolicy MixedPrecisionPolicy",
        "inspect": (
            "FSDPGroup Plan Trace TraceEvent UnreducedParameter describe find_unreduced_parameters "
            "fsdp_groups plan record_collectives trace"
        ),
        "core.optimizers": ("clip_grad_norm_ declare_blockwise declare_elementwise flat_parameters"),
        "core.ragged": "RaggedDTensor RaggedShard distribute_ragged RaggedSpec",
        "plugins.graphs": "compile",
        "plugins.offloading": (
            "CheckpointedInputs offload_checkpointed_inputs offload_model offload_optimizer_states onload_model"
        ),
        "plugins.replicas": "broadcast_replicas set_replicas",
        "plugins.transports": "WireFormat set_transport set_wire_formats",
        "sync": "full_parameters",
        **dict.fromkeys(("checkpoint", "extension", "optim", "strategies"), ""),
    },
)

# Where the names of 0.2 are now. The old names are removed in 0.4.
_OLD_NAMES = {
    "check": "find_unreduced_parameters",
    "offload": "offload_model",
    "onload": "onload_model",
    "offload_states": "offload_optimizer_states",
    "serve_optional": "sync_optional_groups",
    "STRATEGIES": "strategies.STRATEGIES",
    "Kept": "strategies.Kept",
    "Strategy": "strategies.Strategy",
    "ChangedElements": "sync.ChangedElements",
    "ParameterSnapshot": "sync.ParameterSnapshot",
    "apply_changes": "sync.apply_changes",
    "changed_since": "sync.changed_since",
    "snapshot_parameters": "sync.snapshot_parameters",
}


def __getattr__(name: str) -> Any:
    if name not in _OLD_NAMES:
        return _get(name)
    new = _OLD_NAMES[name]
    warnings.warn(
        f"fsdp_compose.{name} is now fsdp_compose.{new}; the old name works until 0.4", DeprecationWarning, stacklevel=2
    )
    return attrgetter(new)(sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""fsdp_compose: fully sharded data parallel training on flat parameters, as functions on ordinary modules."""

import sys
import warnings
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from . import _import_checks as _import_checks  # first: the others need that torch
from . import errors as errors
from ._on_demand import on_demand
from .errors import CheckpointDamagedError as CheckpointDamagedError
from .errors import FSDPComposeError as FSDPComposeError
from .errors import MisuseError as MisuseError
from .errors import RankLostError as RankLostError
from .errors import RanksDifferError as RanksDifferError

if _import_checks.is_untested(_import_checks.VERSION):
    try:
        from . import _torch as _torch  # imports every private name of torch: one may be missing
    except (ImportError, AttributeError) as error:
        _import_checks.refuse_if_untested(_import_checks.VERSION, error)
        raise

if TYPE_CHECKING:
    from . import strategies as strategies
    from . import sync as sync
    from .core import UnshardHandle as UnshardHandle
    from .core import fully_shard as fully_shard
    from .core import functional_mode as functional_mode
    from .core import keep_unsharded as keep_unsharded
    from .core import no_sync as no_sync
    from .core import reduce_gradients as reduce_gradients
    from .core import register_forward_method as register_forward_method
    from .core import register_fsdp_forward_method as register_fsdp_forward_method
    from .core import replicate as replicate
    from .core import reshard as reshard
    from .core import set_all_reduce_hook as set_all_reduce_hook
    from .core import set_force_sum_reduction_for_comms as set_force_sum_reduction_for_comms
    from .core import set_functional_mode as set_functional_mode
    from .core import set_gradient_divide_factor as set_gradient_divide_factor
    from .core import set_is_last_backward as set_is_last_backward
    from .core import set_keep_unsharded_storage as set_keep_unsharded_storage
    from .core import set_modules_to_backward_prefetch as set_modules_to_backward_prefetch
    from .core import set_modules_to_forward_prefetch as set_modules_to_forward_prefetch
    from .core import set_post_reduction_hook as set_post_reduction_hook
    from .core import set_requires_all_reduce as set_requires_all_reduce
    from .core import set_requires_gradient_sync as set_requires_gradient_sync
    from .core import set_reshard_after_backward as set_reshard_after_backward
    from .core import set_reshard_after_forward as set_reshard_after_forward
    from .core import summon_full_params as summon_full_params
    from .core import sync_optional_groups as sync_optional_groups
    from .core import unshard as unshard
    from .core.comm import Replicas as Replicas
    from .core.comm import Transport as Transport
    from .core.comm import TransportRole as TransportRole
    from .core.comm import TransportWrapper as TransportWrapper
    from .core.flat import CPUOffloadPolicy as CPUOffloadPolicy
    from .core.flat import MixedPrecisionPolicy as MixedPrecisionPolicy
    from .core.optimizers import clip_grad_norm_ as clip_grad_norm_
    from .core.optimizers import declare_blockwise as declare_blockwise
    from .core.optimizers import declare_elementwise as declare_elementwise
    from .core.optimizers import flat_parameters as flat_parameters
    from .core.ragged import RaggedDTensor as RaggedDTensor
    from .core.ragged import RaggedShard as RaggedShard
    from .core.ragged import RaggedSpec as RaggedSpec  # pickles name it here
    from .core.ragged import distribute_ragged as distribute_ragged
    from .inspect import FSDPGroup as FSDPGroup
    from .inspect import Plan as Plan
    from .inspect import Trace as Trace
    from .inspect import TraceEvent as TraceEvent
    from .inspect import UnreducedParameter as UnreducedParameter
    from .inspect import describe as describe
    from .inspect import find_unreduced_parameters as find_unreduced_parameters
    from .inspect import fsdp_groups as fsdp_groups
    from .inspect import plan as plan
    from .inspect import record_collectives as record_collectives
    from .inspect import trace as trace
    from .plugins.graphs import compile as compile
    from .plugins.offloading import CheckpointedInputs as CheckpointedInputs
    from .plugins.offloading import offload_checkpointed_inputs as offload_checkpointed_inputs
    from .plugins.offloading import offload_model as offload_model
    from .plugins.offloading import offload_optimizer_states as offload_optimizer_states
    from .plugins.offloading import onload_model as onload_model
    from .plugins.replicas import broadcast_replicas as broadcast_replicas
    from .plugins.replicas import set_replicas as set_replicas
    from .plugins.transports import WireFormat as WireFormat
    from .plugins.transports import set_transport as set_transport
    from .plugins.transports import set_wire_formats as set_wire_formats
    from .sync import full_parameters as full_parameters

__version__ = "0.3.0"

_ERRORS = "CheckpointDamagedError FSDPComposeError MisuseError RankLostError RanksDifferError"
_HOMES = {  # as for ``on_demand``
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
    "core.optimizers": "clip_grad_norm_ declare_blockwise declare_elementwise flat_parameters",
    "core.ragged": "RaggedDTensor RaggedShard RaggedSpec distribute_ragged",
    "plugins.graphs": "compile",
    "plugins.offloading": (
        "CheckpointedInputs offload_checkpointed_inputs offload_model offload_optimizer_states onload_model"
    ),
    "plugins.replicas": "broadcast_replicas set_replicas",
    "plugins.transports": "WireFormat set_transport set_wire_formats",
    "sync": "full_parameters",
    **dict.fromkeys(("checkpoint", "extension", "optim", "strategies"), ""),
}
__all__ = sorted({*" ".join((_ERRORS, *_HOMES.values())).split()} - {"RaggedSpec"})
_get = on_demand(__name__, _HOMES)

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

"""What trains a model: ``fully_shard``, ``replicate`` and their controls, in the files of this folder, and the wings
that they are made of. The files check arguments and report mistakes in the caller's terms.

The folders beside this one are annexes: features that use the core through ``fsdp_compose.extension`` alone.
"""

from typing import TYPE_CHECKING

from .._on_demand import on_demand

if TYPE_CHECKING:
    from .controls import UnshardHandle as UnshardHandle
    from .controls import fill_unused as fill_unused
    from .controls import functional_mode as functional_mode
    from .controls import keep_unsharded as keep_unsharded
    from .controls import no_sync as no_sync
    from .controls import reduce_as_set as reduce_as_set
    from .controls import reduce_gradients as reduce_gradients
    from .controls import register_forward_method as register_forward_method
    from .controls import register_fsdp_forward_method as register_fsdp_forward_method
    from .controls import reshard as reshard
    from .controls import set_all_reduce_hook as set_all_reduce_hook
    from .controls import set_force_sum_reduction_for_comms as set_force_sum_reduction_for_comms
    from .controls import set_functional_mode as set_functional_mode
    from .controls import set_gradient_divide_factor as set_gradient_divide_factor
    from .controls import set_is_last_backward as set_is_last_backward
    from .controls import set_keep_unsharded_storage as set_keep_unsharded_storage
    from .controls import set_modules_to_backward_prefetch as set_modules_to_backward_prefetch
    from .controls import set_modules_to_forward_prefetch as set_modules_to_forward_prefetch
    from .controls import set_post_reduction_hook as set_post_reduction_hook
    from .controls import set_requires_all_reduce as set_requires_all_reduce
    from .controls import set_requires_gradient_sync as set_requires_gradient_sync
    from .controls import set_reshard_after_backward as set_reshard_after_backward
    from .controls import set_reshard_after_forward as set_reshard_after_forward
    from .controls import sync_optional_groups as sync_optional_groups
    from .controls import unshard as unshard
    from .shard import check_fully_shard as check_fully_shard
    from .shard import check_modules as check_modules
    from .shard import fully_shard as fully_shard
    from .shard import replicate as replicate
    from .summon import summon_full_params as summon_full_params
else:
    __getattr__ = on_demand(
        __name__,
        {
            "controls": (
                "UnshardHandle fill_unused functional_mode keep_unsharded no_sync reduce_as_set reduce_gradients "
                "register_forward_method register_fsdp_forward_method reshard set_all_reduce_hook "
                "set_force_sum_reduction_for_comms set_functional_mode set_gradient_divide_factor "
                "set_is_last_backward set_keep_unsharded_storage set_modules_to_backward_prefetch "
                "set_modules_to_forward_prefetch set_post_reduction_hook set_requires_all_reduce "
                "set_requires_gradient_sync set_reshard_after_backward set_reshard_after_forward "
                "sync_optional_groups unshard"
            ),
            "shard": "check_fully_shard check_modules fully_shard replicate",
            "summon": "summon_full_params",
        },
    )

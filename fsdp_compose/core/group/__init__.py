"""The group that one ``fully_shard`` call makes, what its modules show, and the passes that notice what a user has
changed.

``state`` is the data: one ``_FSDPState`` for each call, one ``Root`` for all groups that run together. Several root
modules that share groups (actor and critic around one encoder) become one ``Root`` at the first forward of the second:
one order of collectives, one exchange, one recovery.

``fully_shard`` replaces each parameter once. Everything that still refers to the replaced one must mean the sharded
one: an optimizer that was built before gets the sharded parameters at the next first forward, or in torch's global hook
before its step; any other reference becomes a proxy (``replaced_params``). ``load_state_dict(assign=True)`` does not
replace sharded parameters: they take over the content, dtype and memory.

The code that watches optimizer steps is here and not in ``optim``, because the first forward looks for optimizers and
the exchange compares the count of steps.
"""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand
from .change_detection import ChangeDetector as ChangeDetector
from .change_detection import Replacement as Replacement
from .change_detection import detect_meta_buffers as detect_meta_buffers
from .change_detection import find_replacements as find_replacements
from .change_detection import find_untied as find_untied
from .change_detection import left_empty_error as left_empty_error
from .change_detection import put_to_sleep as put_to_sleep
from .change_detection import refuse_unwritten_buffers as refuse_unwritten_buffers
from .change_detection import take_over_assigned as take_over_assigned
from .change_detection import wake as wake
from .collective_order import END_OF_BACKWARD as END_OF_BACKWARD
from .collective_order import END_OF_FORWARD as END_OF_FORWARD
from .collective_order import FLAGS_CHANGED as FLAGS_CHANGED
from .collective_order import LOADED as LOADED
from .collective_order import OTHER_MODEL as OTHER_MODEL
from .collective_order import REPLICAS_DIFFER as REPLICAS_DIFFER
from .collective_order import REPLICAS_SET as REPLICAS_SET
from .collective_order import SERVE as SERVE
from .collective_order import START_OF_BACKWARD as START_OF_BACKWARD
from .collective_order import TRANSPORTS_SET as TRANSPORTS_SET
from .collective_order import UNSHARDED_DIFFER as UNSHARDED_DIFFER
from .collective_order import CollectiveLog as CollectiveLog
from .collective_order import Entry as Entry
from .collective_order import Kind as Kind
from .collective_order import OrderedRoot as OrderedRoot
from .collective_order import first_difference_of_entries as first_difference_of_entries
from .collective_order import judge_positions as judge_positions
from .hook_decorators import _annotate_modules_for_dynamo as _annotate_modules_for_dynamo
from .hook_decorators import begins_backward as begins_backward
from .hook_decorators import begins_forward as begins_forward
from .hook_decorators import ends_backward as ends_backward
from .hook_decorators import ends_backwards as ends_backwards
from .hook_decorators import never_traced as never_traced
from .hook_decorators import traced_inside_others as traced_inside_others
from .iteration import Backward as Backward
from .iteration import BackwardState as BackwardState
from .iteration import ForwardRecord as ForwardRecord
from .iteration import GroupUse as GroupUse
from .iteration import HookedUse as HookedUse
from .iteration import is_running as is_running
from .iteration import registrations as registrations
from .kept_tensors import ATOMS as ATOMS
from .kept_tensors import BoundToModule as BoundToModule
from .kept_tensors import search_object as search_object
from .optimizer_steps import after_every_step as after_every_step
from .optimizer_steps import before_every_step as before_every_step
from .optimizer_steps import count_steps as count_steps
from .optimizer_steps import raise_different_steps as raise_different_steps
from .optimizer_steps import steps_to_compare as steps_to_compare
from .optimizer_steps import steps_were_compared as steps_were_compared
from .options import BUCKET_BYTES as BUCKET_BYTES
from .options import STRATEGIES as STRATEGIES
from .options import GroupOptions as GroupOptions
from .options import Kept as Kept
from .options import Modules as Modules
from .options import Strategy as Strategy
from .options import bytes_of_limit as bytes_of_limit
from .options import strategy_named as strategy_named
from .parameter_swap import SHARDED_PARAMS as SHARDED_PARAMS
from .parameter_swap import ParameterSwap as ParameterSwap
from .parameter_swap import SlotView as SlotView
from .parameter_swap import before_load as before_load
from .parameter_swap import caches_parameters as caches_parameters
from .parameter_swap import guard_state_dict as guard_state_dict
from .parameter_swap import sharded_parameters as sharded_parameters
from .registry import API_KEY as API_KEY
from .registry import _get_fsdp_states as _get_fsdp_states
from .registry import contexts_of as contexts_of
from .registry import get_state as get_state
from .registry import group_modules as group_modules
from .registry import managed_parameters as managed_parameters
from .registry import modules_to_run as modules_to_run
from .registry import own_state as own_state
from .registry import partition as partition
from .registry import prepare_swap as prepare_swap
from .registry import roots_together as roots_together
from .registry import state_of_hooked as state_of_hooked
from .registry import states_for as states_for
from .registry import states_to_run as states_to_run
from .registry import ties_with_other_groups as ties_with_other_groups
from .registry import unsharded_tensors as unsharded_tensors
from .replaced_params import make_proxies as make_proxies
from .replaced_params import rebind_live_optimizers as rebind_live_optimizers
from .replaced_params import rebind_optimizer as rebind_optimizer
from .start_values import LOAD_REMEDY as LOAD_REMEDY
from .start_values import compare_starts as compare_starts
from .start_values import digest_of as digest_of
from .start_values import sample_start as sample_start
from .state import ParameterDetector as ParameterDetector
from .state import Root as Root
from .state import Scheduler as Scheduler
from .state import _FSDPState as _FSDPState
from .state import state_of as state_of
from .state import widest_mesh as widest_mesh

if TYPE_CHECKING:
    from .tied_params import Move as Move
    from .tied_params import apply_moves as apply_moves
    from .tied_params import find_moves as find_moves
else:
    __getattr__ = on_demand(
        __name__,
        {
            "tied_params": "Move apply_moves find_moves",
        },
    )

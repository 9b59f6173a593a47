"""The group that one ``fully_shard`` call makes, and what its modules show; the passes that notice what a user has
changed.

``state`` is the data: one ``_FSDPState`` a call, one ``Root`` for all that run together.
"""

from .dynamo import _annotate_modules_for_dynamo as _annotate_modules_for_dynamo
from .dynamo import never_traced as never_traced
from .iteration import Backward as Backward
from .iteration import ForwardRecord as ForwardRecord
from .kept_tensors import tensors_requiring_grad as tensors_requiring_grad
from .lockstep import LockstepCommunicator as LockstepCommunicator
from .lockstep import announce_first_forward as announce_first_forward
from .members import group_modules as group_modules
from .members import managed_parameters as managed_parameters
from .members import prepare_swap as prepare_swap
from .members import ties_with_other_groups as ties_with_other_groups
from .members import unsharded_tensors as unsharded_tensors
from .meta_buffers import refuse_unwritten_buffers as refuse_unwritten_buffers
from .meta_buffers import watch_meta_buffers as watch_meta_buffers
from .options import GroupOptions as GroupOptions
from .options import Modules as Modules
from .order import ALL_GATHER as ALL_GATHER
from .order import END_OF_BACKWARD as END_OF_BACKWARD
from .order import END_OF_FORWARD as END_OF_FORWARD
from .order import REDUCE_SCATTER as REDUCE_SCATTER
from .order import SCATTER_ALONE as SCATTER_ALONE
from .order import CollectiveOrder as CollectiveOrder
from .order import code_of_flags as code_of_flags
from .order import first_difference_of_traces as first_difference_of_traces
from .order import judge_places as judge_places
from .partition import partition as partition
from .progress import GroupUse as GroupUse
from .progress import HookedUse as HookedUse
from .rebind import rebind_live_optimizers as rebind_live_optimizers
from .rebind import rebind_optimizer as rebind_optimizer
from .registry import _get_fsdp_states as _get_fsdp_states
from .registry import get_state as get_state
from .registry import modules_to_run as modules_to_run
from .registry import register_state as register_state
from .registry import state_of_hooked as state_of_hooked
from .registry import states_to_run as states_to_run
from .replaced import stand_in as stand_in
from .roots import contexts_of as contexts_of
from .roots import roots_together as roots_together
from .state import Root as Root
from .state import _FSDPState as _FSDPState
from .state import state_of as state_of
from .state import widest_mesh as widest_mesh
from .step_hooks import after_every_step as after_every_step
from .step_hooks import before_every_step as before_every_step
from .steps_made import count_steps as count_steps
from .steps_made import raise_different_steps as raise_different_steps
from .steps_made import steps_to_compare as steps_to_compare
from .steps_made import steps_were_compared as steps_were_compared
from .swap import ParameterSwap as ParameterSwap
from .swap import SlotView as SlotView
from .swap import before_load as before_load
from .swap import guard_state_dict as guard_state_dict
from .swap import sharded_parameters as sharded_parameters
from .ties import Move as Move
from .ties import apply_moves as apply_moves
from .ties import find_moves as find_moves
from .watch import Watch as Watch

"""The one door between the core and what is built on it: the annexes beside ``core``, and packages of others.

A transport (``Transport``, ``TransportWrapper``), a wire format (``WireFormat``), an optimizer of whole matrices
(``MatrixOptimizer``, ``note_write_of_all_ranks``) or of blocks, a listener (``listen``) and a reader of flat parameters
(``handle_of``, ``FlatParamHandle``) need nothing of this package but these names and the public functions. The names
are stable within a minor release (0.3.0 to 0.3.1), and documented where they are made.
"""

# ---- What users call
from .core import UnshardHandle as UnshardHandle
from .core import check_fully_shard as check_fully_shard
from .core import check_ignored as check_ignored
from .core import check_modules as check_modules
from .core import controls as controls
from .core import fully_shard as fully_shard
from .core import no_sync as no_sync
from .core import reduce_gradients as reduce_gradients
from .core import register_forward_method as register_forward_method

# ---- Ranks and what they send
from .core.comm import ALL_GATHER as ALL_GATHER
from .core.comm import ALL_REDUCE as ALL_REDUCE
from .core.comm import ALL_TO_ALL as ALL_TO_ALL
from .core.comm import GATHER as GATHER
from .core.comm import REDUCE_SCATTER as REDUCE_SCATTER
from .core.comm import Carrier as Carrier
from .core.comm import Collective as Collective
from .core.comm import CollectiveNotes as CollectiveNotes
from .core.comm import DataParallelMesh as DataParallelMesh
from .core.comm import Label as Label
from .core.comm import Recorder as Recorder
from .core.comm import Transport as Transport
from .core.comm import TransportRole as TransportRole
from .core.comm import TransportWrapper as TransportWrapper
from .core.comm import Work as Work
from .core.comm import default_mesh as default_mesh
from .core.comm import first_difference as first_difference
from .core.comm import kept_for as kept_for
from .core.comm import meet as meet
from .core.comm import second_group as second_group
from .core.comm import stay_on_cpu as stay_on_cpu
from .core.comm import streams_of as streams_of
from .core.comm import transport_of as transport_of
from .core.flat import FORWARD_SPEC_ATTRIBUTE as FORWARD_SPEC_ATTRIBUTE
from .core.flat import MESH_ATTRIBUTE as MESH_ATTRIBUTE
from .core.flat import SHARDED_PARAM_ATTRIBUTE as SHARDED_PARAM_ATTRIBUTE

# ---- Flat parameters
from .core.flat import End as End
from .core.flat import FlatLayout as FlatLayout
from .core.flat import FlatParamHandle as FlatParamHandle
from .core.flat import Granularity as Granularity
from .core.flat import Granule as Granule
from .core.flat import Group as Group
from .core.flat import MixedPrecisionPolicy as MixedPrecisionPolicy
from .core.flat import annotations_on as annotations_on
from .core.flat import as_ours as as_ours
from .core.flat import even_chunks as even_chunks
from .core.flat import handle_of as handle_of
from .core.flat import handle_of_segment as handle_of_segment
from .core.flat import is_annotated as is_annotated
from .core.flat import listen as listen
from .core.flat import local_elements as local_elements
from .core.flat import local_of as local_of
from .core.flat import refuse_unreduced as refuse_unreduced
from .core.flat import stop_listening as stop_listening
from .core.group import STRATEGIES as STRATEGIES

# ---- Groups: what one call of fully_shard manages
from .core.group import GroupOptions as GroupOptions
from .core.group import Kept as Kept
from .core.group import Strategy as Strategy
from .core.group import _FSDPState as _FSDPState
from .core.group import bytes_of_limit as bytes_of_limit
from .core.group import get_state as get_state
from .core.group import is_sleeping as is_sleeping
from .core.group import modules_to_run as modules_to_run
from .core.group import never_traced as never_traced
from .core.group import refuse_sleeping as refuse_sleeping
from .core.group import sharded_parameters as sharded_parameters
from .core.group import sleeping_error as sleeping_error
from .core.group import state_of as state_of
from .core.group import states_for as states_for
from .core.group import states_to_run as states_to_run

# ---- Optimizers, and nested state
from .core.optimizers import MatrixOptimizer as MatrixOptimizer
from .core.optimizers import Path as Path
from .core.optimizers import block_of as block_of
from .core.optimizers import clip_grad_norm_ as clip_grad_norm_
from .core.optimizers import declare_blockwise as declare_blockwise
from .core.optimizers import declare_elementwise as declare_elementwise
from .core.optimizers import flat_parameters as flat_parameters
from .core.optimizers import leaves_of as leaves_of
from .core.optimizers import map_leaves as map_leaves
from .core.optimizers import num_blocks as num_blocks
from .core.optimizers import put_leaf as put_leaf
from .core.optimizers import whole_matrices as whole_matrices
from .core.optimizers import zeros_per_block as zeros_per_block
from .core.ragged import RaggedDTensor as RaggedDTensor
from .core.ragged import RaggedShard as RaggedShard
from .core.ragged import RaggedSpec as RaggedSpec
from .core.ragged import RunLengths as RunLengths
from .core.ragged import note_write_of_all_ranks as note_write_of_all_ranks
from .core.state_dicts import GROUPS as GROUPS
from .core.state_dicts import PARAMS as PARAMS
from .core.state_dicts import STATE as STATE

# ---- State dicts, and what ranks agree on
from .core.state_dicts import Described as Described
from .core.state_dicts import ModelNames as ModelNames
from .core.state_dicts import ModelPlan as ModelPlan
from .core.state_dicts import Optimizers as Optimizers
from .core.state_dicts import PlaceState as PlaceState
from .core.state_dicts import StateDictOptions as StateDictOptions
from .core.state_dicts import StateKind as StateKind
from .core.state_dicts import Target as Target
from .core.state_dicts import agree as agree
from .core.state_dicts import as_options as as_options
from .core.state_dicts import ask_all as ask_all
from .core.state_dicts import attempt as attempt
from .core.state_dicts import attempt_together as attempt_together
from .core.state_dicts import commit_model as commit_model
from .core.state_dicts import digests_of as digests_of
from .core.state_dicts import empty_on as empty_on
from .core.state_dicts import entries_of as entries_of
from .core.state_dicts import gather_values as gather_values
from .core.state_dicts import get_model_state_dict as get_model_state_dict
from .core.state_dicts import get_optimizer_state_dict as get_optimizer_state_dict
from .core.state_dicts import get_state_dict as get_state_dict
from .core.state_dicts import group_of as group_of
from .core.state_dicts import has_peers as has_peers
from .core.state_dicts import is_first as is_first
from .core.state_dicts import is_flattened as is_flattened
from .core.state_dicts import is_shared_name as is_shared_name
from .core.state_dicts import list_problems as list_problems
from .core.state_dicts import listed as listed
from .core.state_dicts import load_into as load_into
from .core.state_dicts import longest_prefix as longest_prefix
from .core.state_dicts import patch_model_state_dict as patch_model_state_dict
from .core.state_dicts import patch_optimizer_state_dict as patch_optimizer_state_dict
from .core.state_dicts import pending_state as pending_state
from .core.state_dicts import plan_model as plan_model
from .core.state_dicts import problem_text as problem_text
from .core.state_dicts import refuse_lost_ranks as refuse_lost_ranks
from .core.state_dicts import says_what_it_holds as says_what_it_holds
from .core.state_dicts import set_model_state_dict as set_model_state_dict
from .core.state_dicts import set_optimizer_state_dict as set_optimizer_state_dict
from .core.state_dicts import set_state_dict as set_state_dict
from .core.state_dicts import shard_whole as shard_whole
from .core.state_dicts import state_placer as state_placer
from .core.state_dicts import tell_and_compare as tell_and_compare
from .plugins.debugging import HANG_SECONDS_ENV as HANG_SECONDS_ENV
from .plugins.debugging import POSITION_MARK as POSITION_MARK
from .plugins.debugging import as_ranges as as_ranges
from .plugins.gloo import noticing_loss as noticing_loss
from .plugins.offloading import offload_optimizer_states as offload_optimizer_states

# ---- Sharded tensors
from .plugins.parameter_classes import CompositeDTensor as CompositeDTensor
from .plugins.tensor_parallel import TensorParallel as TensorParallel
from .plugins.tensor_parallel import is_split_evenly as is_split_evenly
from .plugins.transports import WireFormat as WireFormat
from .plugins.transports import finish_with as finish_with
from .plugins.transports import set_transport as set_transport

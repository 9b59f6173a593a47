"""The one door between the core and what is built on it: the annexes beside ``core``, and packages of others.

A transport (``Transport``, ``TransportWrapper``), a wire format (``WireFormat``), an optimizer of whole matrices
(``MatrixOptimizer``, ``note_write_of_all_ranks``) or of blocks, a listener (``listening``), a reader of flat parameters
(``handle_of``, ``FlatParamHandle``) need nothing of this package but these names and the public functions. The names
are stable within a minor release (0.3.0 to 0.3.1), and documented where they are made.
"""

# ---- What users call
from .core import UnshardHandle as UnshardHandle
from .core import check_fully_shard as check_fully_shard
from .core import check_modules as check_modules
from .core import controls as controls
from .core import fully_shard as fully_shard
from .core import no_sync as no_sync
from .core import reduce_gradients as reduce_gradients
from .core import register_forward_method as register_forward_method

# ---- Ranks and what they send
from .core.comm import Carrier as Carrier
from .core.comm import Collective as Collective
from .core.comm import CollectiveKind as CollectiveKind
from .core.comm import CollectiveNotes as CollectiveNotes
from .core.comm import DataParallelMesh as DataParallelMesh
from .core.comm import Label as Label
from .core.comm import Recorder as Recorder
from .core.comm import Transport as Transport
from .core.comm import TransportRole as TransportRole
from .core.comm import TransportWrapper as TransportWrapper
from .core.comm import Work as Work
from .core.comm import default_mesh as default_mesh
from .core.comm import kept_for as kept_for
from .core.comm import meet as meet
from .core.comm import stay_on_cpu as stay_on_cpu
from .core.comm import transport_of as transport_of

# ---- Flat parameters
from .core.flat import FlatParamHandle as FlatParamHandle
from .core.flat import Granularity as Granularity
from .core.flat import MixedPrecisionPolicy as MixedPrecisionPolicy
from .core.flat import ParamAttribute as ParamAttribute
from .core.flat import annotations_on as annotations_on
from .core.flat import as_ours as as_ours
from .core.flat import even_chunks as even_chunks
from .core.flat import handle_of as handle_of
from .core.flat import handle_of_segment as handle_of_segment
from .core.flat import is_annotated as is_annotated
from .core.flat import listening as listening
from .core.flat import local_elements as local_elements
from .core.flat import local_of as local_of
from .core.flat import refuse_unreduced as refuse_unreduced
from .core.group import STRATEGIES as STRATEGIES

# ---- Groups: what one call of fully_shard manages
from .core.group import _FSDPState as _FSDPState
from .core.group import bytes_of_limit as bytes_of_limit
from .core.group import get_state as get_state
from .core.group import modules_to_run as modules_to_run
from .core.group import never_traced as never_traced
from .core.group import sharded_parameters as sharded_parameters
from .core.group import state_of as state_of
from .core.group import states_for as states_for
from .core.group import states_to_run as states_to_run

# ---- Optimizers, and nested state
from .core.optimizers import MatrixOptimizer as MatrixOptimizer
from .core.ragged import RaggedDTensor as RaggedDTensor
from .core.ragged import RaggedShard as RaggedShard
from .core.ragged import RunLengths as RunLengths
from .core.ragged import note_write_of_all_ranks as note_write_of_all_ranks

# ---- State dicts, and what ranks agree on
from .core.state_dicts import Described as Described
from .core.state_dicts import ModelNames as ModelNames
from .core.state_dicts import ModelPlan as ModelPlan
from .core.state_dicts import Optimizers as Optimizers
from .core.state_dicts import Peers as Peers
from .core.state_dicts import PlaceState as PlaceState
from .core.state_dicts import StateDictOptions as StateDictOptions
from .core.state_dicts import Target as Target
from .core.state_dicts import digests_of as digests_of
from .core.state_dicts import gather_values as gather_values
from .core.state_dicts import get_model_state_dict as get_model_state_dict
from .core.state_dicts import get_state_dict as get_state_dict
from .core.state_dicts import is_shared_name as is_shared_name
from .core.state_dicts import listed as listed
from .core.state_dicts import load_into as load_into
from .core.state_dicts import pending_like as pending_like
from .core.state_dicts import says_what_it_holds as says_what_it_holds
from .core.state_dicts import set_model_state_dict as set_model_state_dict
from .core.state_dicts import set_state_dict as set_state_dict
from .core.state_dicts import state_placer as state_placer
from .plugins.debugging import POSITION_MARK as POSITION_MARK
from .plugins.gloo import noticing_loss as noticing_loss

# ---- Sharded tensors
from .plugins.parameter_classes import CompositeDTensor as CompositeDTensor
from .plugins.tensor_parallel import TensorParallel as TensorParallel
from .plugins.tensor_parallel import is_split_evenly as is_split_evenly
from .plugins.transports import finish_with as finish_with
from .plugins.transports import set_transport as set_transport

"""One flat parameter: its layout, its shard, the unsharded buffer, its gradient and their reduction; knows no module.

The parts are built and held by ``FlatParamHandle``; ``communicator`` moves them between ranks when it is told to.
"""

from .accumulation import UnreducedGradient as UnreducedGradient
from .accumulation import refuse_unreduced as refuse_unreduced
from .accumulation import waiting as waiting
from .building import shard_again as shard_again
from .building import shard_params as shard_params
from .communicator import Communicator as Communicator
from .flat_gradient import are_untouched as are_untouched
from .flat_param import FlatParamHandle as FlatParamHandle
from .flat_param import segment_owners as segment_owners
from .flat_param import sharded_param_owners as sharded_param_owners
from .gather import gather_flat as gather_flat
from .gradient import ShardedGradient as ShardedGradient
from .gradient_view import FLAT_ATTRIBUTE as FLAT_ATTRIBUTE
from .gradient_view import FlatSegment as FlatSegment
from .gradient_view import local_of as local_of
from .lookalike import as_ours as as_ours
from .moves import describe as describe
from .moves import is_stale as is_stale
from .moves import reflatten as reflatten
from .policy import Granularity as Granularity
from .policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from .ranges import follow_profiler as follow_profiler
from .reduction import AVERAGE as AVERAGE
from .reduction import Reduction as Reduction
from .reduction import ReductionOptions as ReductionOptions
from .reduction import copy_gradients as copy_gradients
from .registry import handle_of as handle_of
from .registry import handle_of_segment as handle_of_segment
from .registry import mark_owner as mark_owner
from .registry import note_write as note_write
from .registry import owner_of as owner_of
from .segments import add_segment as add_segment
from .segments import check_segments as check_segments
from .segments import segment_over as segment_over
from .sharded_param import SHARDED_PARAM_ATTRIBUTE as SHARDED_PARAM_ATTRIBUTE
from .sharded_param import ManagedParameter as ManagedParameter
from .sharded_param import check_content as check_content
from .sharded_param import like_sharded_param as like_sharded_param
from .sharded_param import local_elements as local_elements
from .sharded_param import make_gradient as make_gradient
from .sharded_param import restore_attributes as restore_attributes
from .sharded_param import sharded_param_of as sharded_param_of
from .sharded_param import take_content as take_content
from .sharded_param import whole_like_original as whole_like_original
from .shared_memory import Region as Region
from .shared_memory import refuse_shared_memory as refuse_shared_memory
from .shared_memory import regions_of as regions_of
from .subclasses import check_class as check_class
from .unsharded import explain_refused_access as explain_refused_access

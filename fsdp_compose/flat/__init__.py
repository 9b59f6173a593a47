"""One flat parameter: its layout, its shard, the unsharded buffer, its gradient and their reduction; knows no module.

The parts are built and held by ``FlatParamHandle``; ``reduction`` moves them between ranks when it is told to.
"""

from .accumulation import UnreducedGradient as UnreducedGradient
from .accumulation import refuse_unreduced as refuse_unreduced
from .accumulation import waiting as waiting
from .flat_param import FlatParamHandle as FlatParamHandle
from .flat_param import Granularity as Granularity
from .flat_param import ManagedParameter as ManagedParameter
from .flat_param import face_owners as face_owners
from .flat_param import handle_of as handle_of
from .flat_param import mark_owner as mark_owner
from .flat_param import note_write as note_write
from .flat_param import owner_of as owner_of
from .flat_param import segment_owners as segment_owners
from .gather import gather_flat as gather_flat
from .gradient import ShardedGradient as ShardedGradient
from .gradient import are_untouched as are_untouched
from .gradient_view import FLAT_ATTRIBUTE as FLAT_ATTRIBUTE
from .gradient_view import FlatSegment as FlatSegment
from .gradient_view import local_of as local_of
from .lookalike import as_ours as as_ours
from .policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from .ranges import follow_profiler as follow_profiler
from .reduction import Communicator as Communicator
from .reduction import copy_gradients as copy_gradients
from .sharded_param import FACE_ATTRIBUTE as FACE_ATTRIBUTE
from .sharded_param import check_content as check_content
from .sharded_param import dress as dress
from .sharded_param import face_local as face_local
from .sharded_param import face_of as face_of
from .sharded_param import like_face as like_face
from .sharded_param import make_gradient as make_gradient
from .sharded_param import take_content as take_content
from .sharded_param import whole_like_original as whole_like_original
from .shared_memory import Region as Region
from .shared_memory import refuse_shared_memory as refuse_shared_memory
from .shared_memory import regions_of as regions_of
from .subclasses import check_class as check_class
from .unsharded import explain_refused_access as explain_refused_access

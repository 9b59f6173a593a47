"""One flat parameter: its layout, its shard, the unsharded buffer, its gradient and reductions; nothing here knows
about modules.

``FlatParamHandle`` (``flat_param``) builds and holds them. ``Communicator`` (``collectives``) moves them between
ranks when the runtime asks for it. Read ``layout`` first, then ``flat_param``, ``unsharded`` and ``gradient``.

Parameters share a flat parameter if they agree in dtype, ``requires_grad`` and ``ParameterKind``. This is decided once,
when ``fully_shard`` is called. So a parameter with a dtype of its own costs its group one more collective, and costs
the others nothing. How parameters are stored and gathered is decided by the kind's codec (``codecs``), where they live
by a ``ShardStorage``; other code asks neither.

Unsharded parameters have a version counter of their own, so refilling their memory never looks to autograd like an
edit: only storages are resized. The flat gradient has one owner, ``ShardedGradient``: ``.grad`` of the sharded
parameters and of the flat views are views of it, and what the user does to one of them reaches the other when it next
matters (before a forward, a backward, an optimizer step or our clipping).
"""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand
from .accumulation import Contribution as Contribution
from .accumulation import UnreducedGradient as UnreducedGradient
from .accumulation import refuse_unreduced as refuse_unreduced
from .accumulation import waiting as waiting
from .build import describe as describe
from .build import is_stale as is_stale
from .build import reflatten as reflatten
from .build import shard_again as shard_again
from .build import shard_params as shard_params
from .collectives import LARGE_BYTES as LARGE_BYTES
from .collectives import Communicator as Communicator
from .collectives import copy_gradients as copy_gradients
from .collectives import move_to_average as move_to_average
from .events import End as End
from .events import begin as begin
from .events import follow_profiler as follow_profiler
from .events import listening as listening
from .events import watched as watched
from .flat_param import FlatParamHandle as FlatParamHandle
from .flat_param import Owner as Owner
from .flat_param import add_segment as add_segment
from .flat_param import check_grad_dtype as check_grad_dtype
from .flat_param import check_segments as check_segments
from .flat_param import forget as forget
from .flat_param import gather_flat as gather_flat
from .flat_param import handle_of as handle_of
from .flat_param import handle_of_segment as handle_of_segment
from .flat_param import know_as as know_as
from .flat_param import mark_owner as mark_owner
from .flat_param import owner_of as owner_of
from .flat_param import segment_over as segment_over
from .flat_param import segment_owners as segment_owners
from .flat_param import sharded_param_owners as sharded_param_owners
from .flat_param import take_over as take_over
from .flat_param import wholes_of as wholes_of
from .gradient import ShardedGradient as ShardedGradient
from .gradient import are_untouched as are_untouched
from .layout import FlatLayout as FlatLayout
from .layout import Granule as Granule
from .param_kind import ParameterKind as ParameterKind
from .param_kind import Region as Region
from .param_kind import check_class as check_class
from .param_kind import expect_gradient as expect_gradient
from .param_kind import kind_of as kind_of
from .param_kind import plain_tensor as plain_tensor
from .param_kind import refuse_shared_memory as refuse_shared_memory
from .param_kind import regions_of as regions_of
from .policy import CPUOffloadPolicy as CPUOffloadPolicy
from .policy import Granularity as Granularity
from .policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from .policy import as_offload_policy as as_offload_policy
from .policy import as_ours as as_ours
from .reduction import AVERAGE as AVERAGE
from .reduction import Reduction as Reduction
from .reduction import ReductionOptions as ReductionOptions
from .shard_storage import ON_DEVICE as ON_DEVICE
from .shard_storage import ShardStorage as ShardStorage
from .shard_storage import host_memory as host_memory
from .sharded_param import ManagedParameter as ManagedParameter
from .sharded_param import ParamAttribute as ParamAttribute
from .sharded_param import annotation_of as annotation_of
from .sharded_param import annotations_on as annotations_on
from .sharded_param import check_content as check_content
from .sharded_param import even_chunks as even_chunks
from .sharded_param import is_annotated as is_annotated
from .sharded_param import is_sharded_like as is_sharded_like
from .sharded_param import like_sharded_param as like_sharded_param
from .sharded_param import local_elements as local_elements
from .sharded_param import local_of as local_of
from .sharded_param import make_gradient as make_gradient
from .sharded_param import meshes_of as meshes_of
from .sharded_param import refuse_meta_content as refuse_meta_content
from .sharded_param import restore_attributes as restore_attributes
from .sharded_param import sharded_param_of as sharded_param_of
from .sharded_param import spec_of as spec_of
from .sharded_param import specs_of as specs_of
from .sharded_param import whole_like_original as whole_like_original
from .unsharded import explain_refused_access as explain_refused_access

if TYPE_CHECKING:
    from .flat_views import FlatSegment as FlatSegment
else:
    __getattr__ = on_demand(
        __name__,
        {
            "flat_views": "FlatSegment",
        },
    )

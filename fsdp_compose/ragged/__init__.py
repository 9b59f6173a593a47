"""``RaggedDTensor``, a DTensor of which each rank holds one contiguous range; it knows nothing about data parallelism.

``placement`` describes how a tensor is sharded and which part this rank holds, ``dtensor`` moves tensors between
layouts, and ``ops`` implements the operations.
"""

from . import dtensor as dtensor  # lets torch's functions accept its placements
from . import ops as ops  # gives RaggedDTensor its operations
from .dtensor import RaggedDTensor as RaggedDTensor
from .dtensor import distribute_ragged as distribute_ragged
from .dtensor import gather_local_shards as gather_local_shards
from .dtensor import gather_parameter as gather_parameter
from .dtensor import inner_of_whole as inner_of_whole
from .dtensor import known_as as known_as
from .dtensor import rebind as rebind
from .dtensor import scatter_average as scatter_average
from .dtensor import shard_inner as shard_inner
from .ops.reductions import accurate_dtype as accurate_dtype
from .ops.reductions import combine_norms as combine_norms
from .ops.reductions import finish_norm as finish_norm
from .ops.reductions import partial_norm as partial_norm
from .ownership import OWNER_ATTRIBUTE as OWNER_ATTRIBUTE
from .ownership import SHOWN_ATTRIBUTE as SHOWN_ATTRIBUTE
from .ownership import hook_owners as hook_owners
from .ownership import note_write_of_all_ranks as note_write_of_all_ranks
from .ownership import requires_grad_writes as requires_grad_writes
from .ownership import writes as writes
from .placement import RaggedShard as RaggedShard
from .placement import RaggedSpec as RaggedSpec
from .placement import RunLengths as RunLengths
from .subclass_views import CompositeClass as CompositeClass
from .subclass_views import CompositeDTensor as CompositeDTensor
from .subclass_views import show_as as show_as
from .subclass_views import with_local as with_local

"""``RaggedDTensor``: a DTensor split into one contiguous range per rank. Nothing here knows data parallelism.

``placement`` says how a tensor is sharded and which shard this rank holds, ``dtensor`` moves it between layouts, and
``ops`` gives it its operations. On a mesh of two dimensions a ``RaggedShard`` shards what is local after the other
placement (``[Replicate(), RaggedShard]``, ``[RaggedShard, Shard(d)]``), so no strided placement is needed.

Stock DTensor must never see a ``RaggedShard``: it would rebuild an even ``Shard`` and give wrong values. So a
``RaggedShard`` equals only an equal one, and stock ``DTensorSpec`` refuses it. An operation that raises because of
elements (an integer division by zero) raises on every rank, before anything is written.

Facts that are easy to miss:

- Inside ``__torch_dispatch__`` version counters stand still, and views do not share them. Both are set by hand: a step
  between forward and backward is seen by the version of the shard.
- ``module.to()`` may exchange parameters attribute by attribute (``swap_tensors``), so a class that shows its local
  tensor as something else must not do so then.
- Full reductions are complete when they return: ``.item()`` on stock DTensor's pending ones gives the local value. A
  NaN travels next to a maximum, because backends may lose it. Under ``drop_in``, sums and norms are pending too.
- ``torch.optim`` and ``clip_grad_norm_`` compare types before their fast paths: the class is added to their lists.
"""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand
from . import ops as ops  # gives RaggedDTensor its operations
from .dtensor import RaggedDTensor as RaggedDTensor
from .dtensor import distribute_ragged as distribute_ragged
from .dtensor import gather_local_shards as gather_local_shards
from .dtensor import inner_of_whole as inner_of_whole
from .dtensor import is_alike as is_alike
from .dtensor import local_shard_of as local_shard_of
from .dtensor import rebind as rebind
from .dtensor import scatter_average as scatter_average
from .dtensor import shard_inner as shard_inner
from .gather import DifferentiableGather as DifferentiableGather
from .ops.operands import ReplicatedDTensor as ReplicatedDTensor
from .ops.operands import map_instances as map_instances
from .ops.pointwise import was_left_empty as was_left_empty
from .ownership import OWNER_ATTRIBUTE as OWNER_ATTRIBUTE
from .ownership import SHOWN_ATTRIBUTE as SHOWN_ATTRIBUTE
from .ownership import MixedOperandsError as MixedOperandsError
from .ownership import ParameterOwner as ParameterOwner
from .ownership import note_write_of_all_ranks as note_write_of_all_ranks
from .ownership import parameter_owners as parameter_owners
from .ownership import requires_grad_writes as requires_grad_writes
from .ownership import writes as writes
from .placement import RaggedShard as RaggedShard
from .placement import RaggedSpec as RaggedSpec
from .placement import RunLengths as RunLengths
from .placement import refuse_uneven_strides as refuse_uneven_strides
from .placement import unstacked as unstacked

if TYPE_CHECKING:
    from .ops.reductions import accurate_dtype as accurate_dtype
    from .ops.reductions import combine_norms as combine_norms
    from .ops.reductions import finish_norm as finish_norm
    from .ops.reductions import partial_norm as partial_norm
else:
    __getattr__ = on_demand(
        __name__,
        {
            "ops.reductions": "accurate_dtype combine_norms finish_norm partial_norm",
        },
    )

"""``RaggedDTensor``, a DTensor of which every rank holds one contiguous range; knows nothing of data parallelism.

``placement`` says how a tensor is sharded, ``spec`` what of it this rank holds, ``tensor`` moves it between layouts,
``ops`` gives it its operations.
"""

from . import admission as admission  # lets torch's functions take its placements
from . import ops as ops  # gives RaggedDTensor its operations
from .classed import CompositeClass as CompositeClass
from .classed import CompositeDTensor as CompositeDTensor
from .classed import show_as as show_as
from .classed import with_local as with_local
from .edits import note_write_of_all_ranks as note_write_of_all_ranks
from .edits import toggles as toggles
from .edits import writes as writes
from .norms import accurate_dtype as accurate_dtype
from .norms import combine_norms as combine_norms
from .norms import finish_norm as finish_norm
from .norms import partial_norm as partial_norm
from .old_names import known_as as known_as
from .owned import OWNER_ATTRIBUTE as OWNER_ATTRIBUTE
from .owned import SHOWN_ATTRIBUTE as SHOWN_ATTRIBUTE
from .owned import hook_owners as hook_owners
from .placement import RaggedShard as RaggedShard
from .run_lengths import RunLengths as RunLengths
from .spec import RaggedSpec as RaggedSpec
from .tensor import RaggedDTensor as RaggedDTensor
from .tensor import distribute_ragged as distribute_ragged
from .tensor import gather_local_shards as gather_local_shards
from .tensor import gather_parameter as gather_parameter
from .tensor import inner_of_whole as inner_of_whole
from .tensor import rebind as rebind
from .tensor import scatter_average as scatter_average
from .tensor import shard_inner as shard_inner

"""Operations on a ``RaggedDTensor``: one handler per kind of operator, chosen once for each operator.

=====================  ==============================================================================================
element-wise, copies   on the local shards; result and other operands are sharded like the (largest) ragged one
foreach, fused         as element-wise, for every element of the lists
full reductions        on the local shards, then one all-reduce; the result is complete, a replicated 0-dim DTensor
dim-0 slices, views    views: a contiguous range of the flattened tensor is a range on every rank
other views            all-gather; a write to the result is written back or raises; using it out of date raises
random                 every rank draws the whole tensor and shards it: values do not depend on the layout
everything else        on the whole tensor, on every rank, with one warning per operator; written tensors are resharded
writes that change     raise, naming the operator
shape or memory
=====================  ==============================================================================================
"""

from ..dtensor import handlers
from .dispatch import choose

handlers.choose = choose

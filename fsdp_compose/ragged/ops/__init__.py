"""Operations on a ``RaggedDTensor``: one handler for each kind of operator, chosen once per operator.

=====================  ==============================================================================================
element-wise, copies   on the local shards; result and other operands are sharded like the (largest) ragged one
foreach, fused         the same for every element of the lists
full reductions        on the local shards, then one all-reduce; the result is complete, a replicated 0-dim DTensor
dim-0 slices, views    views: a contiguous range of the flattened tensor is a range on every rank
other views            all-gather; what is written to the result is written back, or raises; out of date, it raises
random                 the whole tensor is drawn, on every rank, and sharded: values do not depend on the layout
everything else        on the whole tensor, on every rank, with one warning per operator; what is written, sharded again
writes that change     raise, naming the operator
shape or memory
=====================  ==============================================================================================
"""

from ..dtensor import choose_handler
from .dispatch import choose

choose_handler.append(choose)

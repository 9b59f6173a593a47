"""Flat views for optimizers, steps on state in host memory, and clipping of gradients.

A shard is what an even ``Shard(0)`` of a 1-D tensor gives a rank, so a whole flat view is a stock ``DTensor``, and what
torch knows about DTensors (norms, ``GradScaler``) is right on every rank. A selection of parameters is one 1-D
``RaggedDTensor`` for each row of neighbours; so is every flat view of a model with tensor parallelism.

Global hooks surround the steps of every optimizer. The hook before refuses optimizers that are not known to be
element-wise; the hook after raises the shard's version.

``clip_grad_norm_`` uses the whole flat gradient if it got every sharded parameter of it and every ``.grad`` is our
view. Otherwise it goes tensor by tensor, with one collective too. Padding is zero, so norms do not see it.
"""

from .blockwise import block_of as block_of
from .blockwise import num_blocks as num_blocks
from .blockwise import whole_matrices as whole_matrices
from .blockwise import zeros_per_block as zeros_per_block
from .clip_grad import clip_grad_norm_ as clip_grad_norm_
from .flat_parameters import MatrixOptimizer as MatrixOptimizer
from .flat_parameters import declare_blockwise as declare_blockwise
from .flat_parameters import declare_elementwise as declare_elementwise
from .flat_parameters import elementwise_classes as elementwise_classes
from .flat_parameters import flat_parameters as flat_parameters

"""Flat views for optimizers, steps on state in host memory, and clipping of gradients.

A shard is what an even ``Shard(0)`` of a 1-D tensor gives a rank, so a whole flat view is a stock ``DTensor``, and what
torch knows about DTensors (norms, ``GradScaler``) is right on every rank. A selection of parameters is one 1-D
``RaggedDTensor`` for each row of neighbours; so is every flat view of a model with tensor parallelism.
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

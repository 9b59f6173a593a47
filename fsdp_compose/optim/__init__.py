"""Optimizers that step on whole matrices, each on one of the ranks that hold its shards; and what the core has for
other optimizers, under its public names."""

from ..core.optimizers import block_of as block_of
from ..core.optimizers import clip_grad_norm_ as clip_grad_norm_
from ..core.optimizers import declare_blockwise as declare_blockwise
from ..core.optimizers import declare_elementwise as declare_elementwise
from ..core.optimizers import flat_parameters as flat_parameters
from ..core.optimizers import num_blocks as num_blocks
from ..core.optimizers import whole_matrices as whole_matrices
from ..core.optimizers import zeros_per_block as zeros_per_block
from ..core.ragged import note_write_of_all_ranks as note_write_of_all_ranks
from ..plugins.offloading import offload_optimizer_states as offload_optimizer_states
from .matrices import OwnersByParam as OwnersByParam
from .matrices import owners_by_param as owners_by_param
from .matrix_report import MatricesReport as MatricesReport
from .matrixwise import Matrixwise as Matrixwise
from .muon import Muon as Muon
from .muon import muon_groups as muon_groups

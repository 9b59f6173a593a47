"""Optimizers that step on whole matrices, each on one of the ranks that hold its parts; and what the core has for other
optimizers, under its public names."""

from ..extension import block_of as block_of
from ..extension import clip_grad_norm_ as clip_grad_norm_
from ..extension import declare_blockwise as declare_blockwise
from ..extension import declare_elementwise as declare_elementwise
from ..extension import flat_parameters as flat_parameters
from ..extension import note_write_of_all_ranks as note_write_of_all_ranks
from ..extension import num_blocks as num_blocks
from ..extension import offload_optimizer_states as offload_optimizer_states
from ..extension import whole_matrices as whole_matrices
from ..extension import zeros_per_block as zeros_per_block
from .matrices import OwnersByParam as OwnersByParam
from .matrices import owners_by_param as owners_by_param
from .matrix_report import MatricesReport as MatricesReport
from .matrixwise import Matrixwise as Matrixwise
from .muon import Muon as Muon
from .muon import muon_groups as muon_groups

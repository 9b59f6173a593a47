"""Flat views for optimizers, optimizer steps with state in host memory, and gradient clipping."""

from .clip_grad import clip_grad_norm_ as clip_grad_norm_
from .flat_parameters import declare_elementwise as declare_elementwise
from .flat_parameters import elementwise_classes as elementwise_classes
from .flat_parameters import flat_parameters as flat_parameters
from .state_offload import offload_optimizer_states as offload_optimizer_states

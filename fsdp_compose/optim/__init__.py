"""Flat views for optimizers, steps on state in host memory, and clipping of gradients."""

from .clip_grad import clip_grad_norm_ as clip_grad_norm_
from .flat_parameters import declare_elementwise as declare_elementwise
from .flat_parameters import elementwise_classes as elementwise_classes
from .flat_parameters import flat_parameters as flat_parameters
from .state_offload import offload_optimizer_states as offload_optimizer_states

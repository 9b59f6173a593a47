"""Memory of the host: whole models that sleep, states of optimizers, and inputs of checkpointed functions."""

from .checkpointed_inputs import CheckpointedInputs as CheckpointedInputs
from .checkpointed_inputs import offload_checkpointed_inputs as offload_checkpointed_inputs
from .model_offload import offload_model as offload_model
from .model_offload import onload_model as onload_model
from .state_offload import offload_optimizer_states as offload_optimizer_states

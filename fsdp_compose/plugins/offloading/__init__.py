"""Memory of the host: whole models that sleep, states of optimizers, and inputs of checkpointed functions."""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand

if TYPE_CHECKING:
    from .checkpointed_inputs import CheckpointedInputs as CheckpointedInputs
    from .checkpointed_inputs import offload_checkpointed_inputs as offload_checkpointed_inputs
    from .model_offload import offload_model as offload_model
    from .model_offload import onload_model as onload_model
    from .state_offload import offload_optimizer_states as offload_optimizer_states
else:
    __getattr__ = on_demand(
        __name__,
        {
            "checkpointed_inputs": "CheckpointedInputs offload_checkpointed_inputs",
            "model_offload": "offload_model onload_model",
            "state_offload": "offload_optimizer_states",
        },
    )

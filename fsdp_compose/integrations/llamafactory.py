"""LlamaFactory v1, sharded by fsdp_compose: its plugin named fsdp2, registered again. Its launcher, with the plugin::

    torchrun ... -m fsdp_compose.integrations.llamafactory sft config.yaml

In a program of your own, import this file before the trainer is made. Checked with LlamaFactory 0.9.5.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from llamafactory.v1.launcher import main
from llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2 import FSDP2Engine
from llamafactory.v1.plugins.trainer_plugins.distributed.hub import DistributedPlugin
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Replicate

from ..drop_in import fully_shard
from .substitution import with_functions


class Engine(FSDP2Engine):
    """LlamaFactory's engine for FSDP2."""

    def prepare_model(self, model: nn.Module) -> nn.Module:
        result: nn.Module = with_functions(FSDP2Engine.prepare_model, {fsdp.fully_shard: fully_shard})(self, model)
        return result

    def _copy_weights(self, param: torch.Tensor, loaded_tensor: torch.Tensor) -> None:
        if isinstance(param, DTensor):  # LlamaFactory computes by itself which rows a rank has
            mesh = param.device_mesh
            loaded_tensor = DTensor.from_local(loaded_tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        param.detach().copy_(loaded_tensor)


# Not under a name of its own: the trainer saves, and resumes, only what is named fsdp2 or deepspeed.
@DistributedPlugin("fsdp2").register()
def shard_model(model: nn.Module, dist_config: Any, **kwargs: Any) -> nn.Module:
    """Shard a model as ``dist_config`` says."""
    result: nn.Module = Engine(dist_config, bf16=bool(kwargs.get("bf16"))).shard_model(model)
    return result


if __name__ == "__main__":
    main()

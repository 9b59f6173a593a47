"""Restore the shards of a model that each rank kept: verl assumes that all parameters have the placements of one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from verl.utils.fsdp_utils import fsdp2_sharded_load_from_cpu as original

from .._torch import dtensor_spec
from ..extension import ModelNames, Peers

Kept = tuple[torch.Tensor, Any]  # this rank's shard of a parameter, and its spec, None for a plain parameter


# Checked with verl 0.9.1.
def fsdp2_sharded_load_from_cpu(model: nn.Module, cpu_sharded_state: dict[str, Kept], target_spec: Any) -> None:
    """verl's function of this name, which also compares each parameter with its kept shard, on all ranks and before it
    writes to any parameter. Collective.

    Args:
        model: the model, sharded as it was when its shards were kept.
        cpu_sharded_state: the shards kept by verl's ``fsdp2_sharded_save_to_cpu``, by FQN.
        target_spec: the spec that it returned too; its mesh must be that of the parameters.

    Raises:
        RuntimeError: on every rank: a parameter is sharded differently from its kept shard on some rank.
    """
    problems = [
        f"{name}: {_in_words(param)}, but the kept one is {_in_words(*kept)}"
        for name, param in model.named_parameters()
        if (kept := cpu_sharded_state.get(name)) is not None and _in_words(param) != _in_words(*kept)
    ]
    remedy = "; restore it into a model that is sharded in the same way as the kept one" if problems else ""
    Peers.of(ModelNames(model), "fsdp2_sharded_load_from_cpu()").agree([], "; ".join(problems[:5]) + remedy)
    alike = {name: (shard, spec and target_spec) for name, (shard, spec) in cpu_sharded_state.items()}
    original(model, alike, target_spec)


def _in_words(tensor: torch.Tensor, spec: Any = None) -> str:
    """Describe how a tensor is sharded, and this rank's shard of it."""
    if isinstance(tensor, DTensor):
        return _in_words(tensor.to_local(), dtensor_spec(tensor))
    shape = f"a part of shape {list(tensor.shape)}"
    return shape if spec is None else f"{shape} by {spec.placements} of {list(spec.shape)} over {spec.device_mesh}"

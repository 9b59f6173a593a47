"""What each rank has kept of a model comes back: verl takes the placements of one parameter for those of all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from verl.utils.fsdp_utils import fsdp2_sharded_load_from_cpu as original

from .._torch import dtensor_spec
from ..checkpoint import ModelNames, agree, group_of

Kept = tuple[torch.Tensor, Any]  # what this rank holds of a parameter, and the spec that it had, None of a plain one


def fsdp2_sharded_load_from_cpu(model: nn.Module, cpu_sharded_state: dict[str, Kept], target_spec: Any) -> None:
    """verl's function of this name (checked with 0.9.1): each parameter is compared with what was kept of it, on all
    ranks before any is written to. Collective.

    Args:
        model: as it was when its parts were kept.
        cpu_sharded_state: by FQN, what verl's ``fsdp2_sharded_save_to_cpu`` has kept.
        target_spec: what it has returned beside; its mesh must be that of the parameters.

    Raises:
        RuntimeError: on every rank; a parameter is sharded otherwise than what some rank has kept of it.
    """
    problems = [
        f"{name}: {_in_words(param)}, but what was kept has {_in_words(*kept)}"
        for name, param in model.named_parameters()
        if (kept := cpu_sharded_state.get(name)) is not None and _in_words(param) != _in_words(*kept)
    ]
    remedy = "; restore it into a model that is sharded as the one it was kept of" if problems else ""
    agree(group_of(ModelNames(model)), "fsdp2_sharded_load_from_cpu()", [], "; ".join(problems[:5]) + remedy)
    alike = {name: (part, spec and target_spec) for name, (part, spec) in cpu_sharded_state.items()}
    original(model, alike, target_spec)


def _in_words(tensor: torch.Tensor, spec: Any = None) -> str:
    """How it is sharded, and what of it is here."""
    if isinstance(tensor, DTensor):
        return _in_words(tensor.to_local(), dtensor_spec(tensor))
    shape = f"a part of shape {list(tensor.shape)}"
    return shape if spec is None else f"{shape} by {spec.placements} of {list(spec.shape)} over {spec.device_mesh}"

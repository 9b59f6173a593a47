"""The systems under test, under one set of names: fsdp_compose with its checkpoints, torch's FSDP2 with DCP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

import fsdp_compose
from fsdp_compose import checkpoint

OURS, FSDP2 = "fsdp_compose", "FSDP2/DCP"


@dataclass(frozen=True)
class System:
    name: str

    @property
    def is_ours(self) -> bool:
        return self.name == OURS

    def shard(self, model: Any, **options: Any) -> None:
        """Each layer is a group, and what is left."""
        fully_shard = fsdp_compose.fully_shard if self.is_ours else torch_fsdp.fully_shard
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        if self.is_ours:
            with fsdp_compose.no_sync(model):
                yield
            return
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def state_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        functions = checkpoint if self.is_ours else torch_state_dict
        model_state, optimizer_state = functions.get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def set_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        functions = checkpoint if self.is_ours else torch_state_dict
        functions.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def save(self, state: dict[str, Any], folder: Path) -> None:
        if self.is_ours:
            checkpoint.save(state, folder)
        else:
            dcp.save(state, checkpoint_id=folder)

    def load(self, state: dict[str, Any], folder: Path) -> None:
        if self.is_ours:
            checkpoint.load(state, folder)
        else:
            dcp.load(state, checkpoint_id=folder)


SYSTEMS = {name: System(name) for name in (OURS, FSDP2)}

"""A model with everything a state dict can hold, and how its states are saved, loaded and compared."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    load,
    save,
    set_state_dict,
)
from fsdp_compose.core.state_dicts.optimizer_init import is_pending

FULL = StateDictOptions(full_state_dict=True)
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


class Counter(nn.Module):
    """Counts its forwards, outside parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Net(nn.Module):
    """Odd sizes, a scalar, a tie across groups, buffers, extra state, and an expert that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 10)
        self.norm, self.head = nn.BatchNorm1d(10), nn.Linear(10, 6, bias=False)
        self.back = nn.Linear(6, 10, bias=False)
        self.back.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.dead = nn.Linear(3, 3)
        self.counter = Counter()
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    @property
    def layers(self) -> list[nn.Module]:
        """Modules that get a group of their own."""
        return [self.second]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.counter(self.norm(torch.tanh(self.first(x)) + torch.tanh(self.second(self.back(x)))))
        return self.head(x) * self.scale


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int) -> torch.Tensor:
    """Equal rows on every rank, so that replicas and shards see what one process sees."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, amsgrad=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, begin: int = 0) -> None:
    for step in range(begin, begin + steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(state: Any, read: Callable[[Any], torch.Tensor] = methodcaller("full_tensor")) -> Any:
    """A state dict with whole tensors, by torch's own means; without places for state that there is not."""
    if is_pending(state):
        return None
    if isinstance(state, DTensor):
        return read(state.detach())
    if isinstance(state, dict):
        items = {key: whole(value, read) for key, value in state.items()}
        return {key: value for key, value in items.items() if value is not None and value != {}}
    return state


def assert_equal(actual: Any, expected: Any, where: str = "") -> None:
    """Equal to the bit, in keys and values."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict) and actual.keys() == expected.keys(), (where, [*actual], [*expected])
        for key in expected:
            assert_equal(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(a, b, f"{where}.{i}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected) and actual.dtype == expected.dtype, (where, actual, expected)
    else:
        assert actual == expected, (where, actual, expected)


def snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer, value: str = "full_tensor") -> Any:
    """Everything, whole, with memory of its own."""
    states = [whole(get_model_state_dict(model), methodcaller(value))]
    if optimizers:
        states.append(whole(get_optimizer_state_dict(model, optimizers), methodcaller(value)))
    return copy.deepcopy(states)


def own_snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    """What this rank has of everything, to compare with that of a model that is sharded alike: gathered one by one,
    tensors take longer than what most tests do."""
    return snapshot(model, *optimizers, value="to_local")


def shared_folder() -> Path:
    """A new folder that every rank knows."""
    box = [tempfile.mkdtemp(prefix="fsdp_compose_checkpoint_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return Path(str(box[0]))


def state_of(model: nn.Module, optimizer: Any, options: StateDictOptions | None = None) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}


def set_state(model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def through_a_folder(
    model: nn.Module, optimizer: Any, other: nn.Module, its: Any, options: StateDictOptions | None = None
) -> None:
    """Save a model and its optimizer, and load them into others."""
    folder = shared_folder() / "checkpoint"
    save(state_of(model, optimizer, options), folder)
    state = state_of(other, its, options)
    load(state, folder)
    set_state(other, its, state)

"""The training that the faults happen to: the same bits in every run, so that any difference is the fault's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .systems import System

WIDTH, ROWS = 48, 8


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def batch(step: int, width: int = WIDTH) -> torch.Tensor:
    """This rank's rows of the batch of a step."""
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1000 + step))
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


class Trainer:
    """A sharded model, AdamW, and the number of steps taken.

    Args:
        seed: of the model.
    """

    def __init__(self, system: System, seed: int = 0, width: int = WIDTH) -> None:
        torch.manual_seed(seed)
        self.system, self.width, self.step = system, width, 0
        self.model = Net(width)
        system.shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, until: int) -> None:
        while self.step < until:
            self.model(batch(self.step, self.width)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def state(self) -> dict[str, Any]:
        state = self.system.state_of(self.model, self.optimizer) | {"step": self.step}
        if self.system.is_ours:  # DCP makes strings of them
            state["seen"] = self.seen()
        return state

    def save(self, folder: Path) -> None:
        self.system.save(self.state(), folder)

    def load(self, folder: Path) -> None:
        state = self.state()
        self.system.load(state, folder)
        self.system.set_state(self.model, self.optimizer, state)
        self.step = state["step"]
        if self.system.is_ours and state["seen"] != self.seen():
            raise ValueError(f"step {self.step}: a dict came back as {state['seen']}")

    def seen(self) -> dict[int, Any]:
        return {7: f"step {self.step}", 0: {1: self.step / 2}}

    def digest(self) -> str:
        """Return a digest of every bit that this rank holds."""
        total = hashlib.sha256(str(self.step).encode())
        for name, param in self.model.named_parameters():
            state = self.optimizer.state.get(param, {})
            for key, value in [(name, param.detach()), *sorted(state.items())]:
                local = value.to_local() if hasattr(value, "to_local") else value
                total.update(key.encode() + local.reshape(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a folder, as a trainer that resumes finds them."""
    steps = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def digests(system: System, steps: int, seed: int = 0) -> list[str]:
    """A program: this rank's digest after each step, undisturbed."""
    trainer = Trainer(system, seed)
    found = []
    for step in range(1, steps + 1):
        trainer.train(step)
        found.append(trainer.digest())
    return found


def train_and_save(system: System, folder: Path, step: int, seed: int = 0) -> str:
    """A program: a checkpoint after ``step`` steps."""
    trainer = Trainer(system, seed)
    trainer.train(step)
    trainer.save(path_of(folder, step))
    return trainer.digest()

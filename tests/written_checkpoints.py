"""What the checkpoints in ``tests/data/checkpoints`` hold, and how they were written: with each version of torch, on
two ranks, by ``save()`` and by ``torch.distributed.checkpoint.save()``.

    python -m tests.written_checkpoints        # writes those of the torch that runs it, and refuses to overwrite any

``tests/checkpoint/test_written_checkpoints.py`` loads all of them, with the torch that it is run with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_compose.checkpoint as ours
from fsdp_compose import fully_shard
from fsdp_compose.testing import run_on_ranks

DATA = Path(__file__).parent / "data" / "checkpoints"
SHAPES = {"0.weight": (5, 3), "0.bias": (5,), "1.weight": (2, 5), "1.bias": (2,)}
SCALES = {"exp_avg": 2.0, "exp_avg_sq": 3.0}


def numbers(name: str, scale: float = 1.0) -> torch.Tensor:
    """The elements of a parameter; times ``scale``, those of its optimizer state."""
    shape, first = SHAPES[name], 16 * [*SHAPES].index(name)
    return scale * (first + torch.arange(float(torch.Size(shape).numel()))).view(shape)


def values() -> dict[str, Any]:
    """One of every kind that a checkpoint may hold beside models and optimizers."""
    return {
        "step": 7,
        "rate": 0.5,
        "text": "a",
        "bytes": b"b",
        "none": None,
        "list": [1, {"deep": (2, 3)}],
        "numbered": {0: "zero", 1: torch.ones(2)},
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "scalar": torch.tensor(1.5),
        "bf16": torch.arange(3, dtype=torch.bfloat16),
        "float8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "int": torch.arange(4),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "part": torch.arange(9.0)[2:8:2],
        "empty": torch.empty(0, 3),
    }


def placed() -> dict[str, torch.Tensor]:
    """Tensors that torch has sharded, and one that it has not. Ranks: all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(15.0).view(5, 3)
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
    }


def build(shard: Any, scale: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model, and its optimizer. Ranks: all."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model.load_state_dict({name: scale * numbers(name) for name in SHAPES})
    for child in model:
        shard(child)
    shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A whole state dict with the numbers."""
    state = {
        name: {"step": torch.tensor(4.0), **{kind: numbers(name, scale) for kind, scale in SCALES.items()}}
        for name in SHAPES
    }
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return {"state": state, "param_groups": [{**group, "params": [*SHAPES]}]}


def write(folder: str) -> None:
    """What each rank does."""
    whole = StateDictOptions(full_state_dict=True)
    model, optimizer = build(fully_shard, 1.0)
    ours.set_optimizer_state_dict(model, optimizer, optimizer_state(optimizer), options=whole)
    model_state, state = ours.get_state_dict(model, optimizer)
    ours.save({"model": model_state, "optimizer": state, "values": values(), "placed": placed()}, f"{folder}/ours")
    torch.save(model_state, f"{folder}/rank{dist.get_rank()}.pt")
    model, optimizer = build(torchs_fully_shard, 1.0)
    set_model_state_dict(model, {name: numbers(name) for name in SHAPES}, options=whole)
    set_optimizer_state_dict(model, optimizer, optimizer_state(optimizer), options=whole)
    model_state, state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": state, "values": values(), "placed": placed()},
        checkpoint_id=f"{folder}/torchs",
    )


def main() -> None:
    folder = DATA / str(torch.__version__).partition("+")[0]
    folder.mkdir(parents=True)
    run_on_ranks(2, write, str(folder))


if __name__ == "__main__":
    from tests.written_checkpoints import main  # ranks find the function by this name

    sys.exit(main())

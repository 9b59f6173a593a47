"""Lightning Fabric's strategy for models that the user shards: accumulation, clipping, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from tests_integration import llama
from tests_integration.side_by_side import assert_same, results_of


def parallelize(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    for layer in model.model.layers:
        fsdp.fully_shard(layer, mesh=mesh["data_parallel"])
    fsdp.fully_shard(model, mesh=mesh["data_parallel"])
    return model


def train(folder: Path, whole: bool) -> dict[str, Any]:
    strategy = ModelParallelStrategy(
        parallelize, data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=not whole
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(llama.model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3))
    losses, norms = [], []

    def step(ids: torch.Tensor, is_last: bool) -> None:
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(input_ids=ids, labels=ids).loss
            fabric.backward(loss)
        losses.append(llama.mean(loss))
        if is_last:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
            optimizer.step()
            optimizer.zero_grad()

    for i, ids in enumerate(llama.batches(6)):
        step(ids, i % 2 == 1)
    path = str(folder / "checkpoint")
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    before = len(losses)
    for i, ids in enumerate(llama.batches(2)):
        step(ids, i % 2 == 1)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    for i, ids in enumerate(llama.batches(2)):
        step(ids, i % 2 == 1)
    half = (len(losses) - before) // 2
    assert losses[before : before + half] == losses[before + half :]
    groups = sum(isinstance(module, fsdp.FSDPModule) for module in model.modules())
    return {"losses": losses, "norms": norms, "step": state["step"], "groups": groups}


def in_parts(folder: Path) -> dict[str, Any]:
    return train(folder, whole=False)


def whole(folder: Path) -> dict[str, Any]:
    return train(folder, whole=True)


@pytest.mark.parametrize("program", [in_parts, whole])
def test_training(program, tmp_path):
    assert_same(results_of(program, tmp_path))

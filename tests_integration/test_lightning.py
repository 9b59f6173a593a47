"""Lightning's strategy for models that the user shards, of Fabric and of the Trainer: accumulation, clipping,
checkpoints. The user calls this package's ``fully_shard()``; nothing is installed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.nn as nn
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerStrategy
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compose import drop_in
from tests_integration import llama
from tests_integration.side_by_side import assert_same, results_of


def parallelize(model: nn.Module, mesh: DeviceMesh, fully_shard: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def train(folder: Path, fully_shard: Any, whole: bool) -> dict[str, Any]:
    strategy = ModelParallelStrategy(
        partial(parallelize, fully_shard=fully_shard),
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=not whole,
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

    cls = drop_in.FSDPModule if fully_shard is drop_in.fully_shard else fsdp.FSDPModule
    with mock.patch.object(
        cls, "set_requires_gradient_sync", autospec=True, side_effect=cls.set_requires_gradient_sync
    ) as switch:
        for i, ids in enumerate(llama.batches(6)):
            step(ids, i % 2 == 1)
    groups = sum(isinstance(module, fsdp.FSDPModule) for module in model.modules())
    # Each context sets all groups when it begins, and back when it ends.
    flags = [False, True, True, False] * 3
    assert [call.args[1] for call in switch.call_args_list] == [flag for flag in flags for _ in range(groups)]
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
    return {"losses": losses, "norms": norms, "step": state["step"], "groups": groups}


def in_parts(folder: Path, fully_shard: Any) -> dict[str, Any]:
    return train(folder, fully_shard, whole=False)


def whole(folder: Path, fully_shard: Any) -> dict[str, Any]:
    return train(folder, fully_shard, whole=True)


class Module(pl.LightningModule):
    def __init__(self, fully_shard: Any) -> None:
        super().__init__()
        self.net, self.fully_shard = llama.model(), fully_shard
        self.losses: list[float] = []

    def configure_model(self) -> None:
        parallelize(self.net, self.device_mesh, self.fully_shard)

    def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.net(input_ids=ids, labels=ids).loss
        self.losses.append(llama.mean(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-3)


def in_a_trainer(folder: Path, fully_shard: Any) -> dict[str, Any]:
    ids = torch.randint(llama.VOCABULARY, (16, llama.LENGTH), generator=torch.Generator().manual_seed(1))
    model = Module(fully_shard)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TrainerStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, torch.utils.data.DataLoader(ids, batch_size=2))
    assert len(model.losses) == 8
    return {"losses": model.losses}


@pytest.mark.parametrize("program", [in_parts, whole, in_a_trainer])
def test_training(program, tmp_path):
    assert_same(results_of(program, tmp_path))

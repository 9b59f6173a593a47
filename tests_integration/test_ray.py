"""Ray Train's TorchTrainer: one of two workers fails, and the next try goes on from the last checkpoint, which
``async_save`` has written while training went on. FSDP2 trains without a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
import torch.nn as nn
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import drop_in
from fsdp_compose.checkpoint import SaveFuture, async_save, get_state_dict, load, set_state_dict
from tests.harness import ROOT
from tests_integration.side_by_side import SYSTEMS, assert_same, names_of_torch

FAILS_AT, STEPS = 5, 8


def loop(config: dict[str, Any]) -> None:
    """What a worker does. Every second step of ours begins a checkpoint, which is reported after the next step."""
    torch.set_num_threads(1)
    before = names_of_torch()
    is_ours, rank = config["system"] == "drop_in", dist.get_rank()
    fully_shard = drop_in.fully_shard if is_ours else fsdp.fully_shard
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh)
    model = prepare_model(fully_shard(model, mesh=mesh), parallel_strategy=None, move_to_device=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    so_far: dict[str, Any] = {"first": 0, "losses": [], "norms": []}
    given = ray.train.get_checkpoint()
    if given is not None:
        with given.as_directory() as folder:
            so_far = json.loads(Path(folder, "so_far.json").read_text())
            parts = get_state_dict(model, optimizer)
            load({"model": parts[0], "optimizer": parts[1]}, Path(folder, "state"))
            set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])
    begun: tuple[Path, SaveFuture] | None = None
    for step in range(so_far["first"], STEPS):
        if is_ours and step == FAILS_AT and given is None and rank == 1:
            raise RuntimeError("this worker fails once")
        batch = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(batch[rank]).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        if begun is not None:
            folder, saving = begun
            saving.result()
            whole = Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"loss": so_far["losses"][-1]}, checkpoint=whole)
            begun = None
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        so_far["losses"].append(mean.item() / 2)
        so_far["norms"].append(norm)
        if is_ours and step % 2 == 1:
            folder = Path(config["folder"], f"step-{step}-of-{so_far['first']}")
            parts = get_state_dict(model, optimizer)
            begun = folder, async_save({"model": parts[0], "optimizer": parts[1]}, folder / "state")
            if rank == 0:
                folder.mkdir(exist_ok=True)
                (folder / "so_far.json").write_text(json.dumps({**so_far, "first": step + 1}))
    now = names_of_torch()
    assert not [name for name, value in before.items() if now[name] is not value]
    if rank == 0:
        so_far["groups"] = sum(isinstance(item, fsdp.FSDPModule) for item in model.modules())
        Path(config["folder"], "result.json").write_text(json.dumps(so_far))


@pytest.fixture(scope="module")
def _cluster():
    names = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20, runtime_env={"env_vars": names})
    yield
    ray.shutdown()


def test_a_worker_fails_and_training_goes_on(_cluster, tmp_path):
    results = {}
    for system in SYSTEMS:
        folder = tmp_path / system
        folder.mkdir()
        TorchTrainer(
            loop,
            train_loop_config={"system": system, "folder": str(folder)},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)),
        ).fit()
        results[system] = json.loads((folder / "result.json").read_text())
    assert [results[system].pop("first") for system in SYSTEMS] == [0, 4]
    assert len(results["drop_in"]["losses"]) == STEPS
    assert_same(results)

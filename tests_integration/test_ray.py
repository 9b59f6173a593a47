"""Ray Train's TorchTrainer: two workers, one of which fails; the next try goes on from the last checkpoint, which
``async_save`` has written while training went on."""

from __future__ import annotations

import json
import os
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
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import checkpoint, drop_in
from tests.harness import ROOT
from tests_integration.side_by_side import SYSTEMS, assert_same, names_of_torch

FAILS_AT, STEPS = 5, 8


def loop(config: dict[str, Any]) -> None:
    """What a worker does. Every second step begins a checkpoint, which is reported after the next step."""
    torch.set_num_threads(1)
    before = names_of_torch()
    is_ours = config["system"] == "drop_in"
    fully_shard = drop_in.fully_shard if is_ours else fsdp.fully_shard
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh)
    model = prepare_model(fully_shard(model, mesh=mesh), parallel_strategy=None, move_to_device=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    functions = checkpoint if is_ours else torch_state_dict
    first, losses, norms = 0, [], []
    given = ray.train.get_checkpoint()
    if given is not None:
        with given.as_directory() as folder:
            kept = json.loads(Path(folder, "so_far.json").read_text())
            first, losses, norms = kept["step"], kept["losses"], kept["norms"]
            parts = functions.get_state_dict(model, optimizer)
            state = dict(zip(("model", "optimizer"), parts, strict=True))
            if is_ours:
                checkpoint.load(state, Path(folder, "state"))
            else:
                torch.distributed.checkpoint.load(state, checkpoint_id=Path(folder, "state"))
            functions.set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
    begun: tuple[Path, Any] | None = None

    def report() -> None:
        nonlocal begun
        if begun is not None:
            folder, saving = begun
            if saving is not None:
                saving.result()
            dist.barrier()
            whole = Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None
            ray.train.report({"loss": losses[-1]}, checkpoint=whole)
            begun = None

    for step in range(first, STEPS):
        if step == FAILS_AT and given is None and dist.get_rank() == 1:
            raise RuntimeError("this worker fails once")
        batch = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(batch[dist.get_rank()]).square().mean()
        loss.backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item() / 2)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        report()
        if step % 2 == 1:
            folder = Path(config["folder"], f"step-{step}-of-{first}")
            state = dict(zip(("model", "optimizer"), functions.get_state_dict(model, optimizer), strict=True))
            begun = folder, checkpoint.async_save(state, folder / "state") if is_ours else None
            if not is_ours:
                torch.distributed.checkpoint.save(state, checkpoint_id=folder / "state")
            if dist.get_rank() == 0:
                folder.mkdir(exist_ok=True)
                so_far = {"step": step + 1, "losses": losses, "norms": norms}
                (folder / "so_far.json").write_text(json.dumps(so_far))
    report()
    now = names_of_torch()
    assert not [name for name, value in before.items() if now[name] is not value]
    if dist.get_rank() == 0:
        groups = sum(isinstance(item, fsdp.FSDPModule) for item in model.modules())
        result = {"losses": losses, "norms": norms, "first": first, "groups": groups}
        Path(config["folder"], "result.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def _cluster():
    names = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
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
    assert results["drop_in"]["first"] == 4 and len(results["drop_in"]["losses"]) == STEPS
    assert_same(results)

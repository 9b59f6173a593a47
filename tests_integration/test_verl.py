"""verl's functions around FSDP2: sharding, loading, moving, export of weights for rollouts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from verl.utils import fsdp_utils as verl

from tests_integration import llama
from tests_integration.side_by_side import assert_same, results_of


def on_cpu() -> None:
    """verl asks for the current GPU."""
    verl.get_device_id = lambda: "cpu"
    verl.get_torch_device = lambda: SimpleNamespace(empty_cache=lambda: None)


def train(folder: Path, by_dimension: bool) -> dict[str, Any]:
    on_cpu()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = llama.model(seed=dist.get_rank())  # the first rank's values are loaded
    full = model.state_dict() if dist.get_rank() == 0 else {}
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": fsdp.MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=True),
        "offload_policy": None or fsdp.OffloadPolicy(),
        "reshard_after_forward": True,
    }
    if by_dimension:
        options["shard_placement_fn"] = verl.get_shard_placement_fn(2)
    verl.apply_fsdp2(model, options, OmegaConf.create({"forward_prefetch": True}))
    verl.fsdp2_load_full_state_dict(model, full, mesh, None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    losses, norms = [], []
    for step, ids in enumerate(llama.batches(4)):
        if step == 2:
            verl.offload_fsdp_model_to_cpu(model)
            verl.load_fsdp_model_to_gpu(model)
            verl.set_reshard_after_forward(model, False)
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(llama.mean(loss))
        norms.append(float(verl.fsdp2_clip_grad_norm_(model.parameters(), max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
    state = verl.get_fsdp_full_state_dict(model)
    sums = [float(value.float().abs().sum()) for _, value in sorted(state.items())]
    return {"losses": losses, "norms": norms, "sums": sums, "version": verl.fsdp_version(model)}


def keep_and_restore(folder: Path) -> dict[str, Any]:
    """As verl's workers of separated rollouts do: what a rank holds is kept, training goes on, and it comes back."""
    on_cpu()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = llama.model()
    verl.apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, OmegaConf.create({}))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    kept, spec = verl.fsdp2_sharded_save_to_cpu(model)
    kept = {name: (part.clone(), of) for name, (part, of) in kept.items()}  # on a CPU it is the memory itself
    for _ in range(2):
        for ids in llama.batches(2):
            loss = model(ids, labels=ids).loss
            loss.backward()
            losses.append(llama.mean(loss))
            optimizer.step()
            optimizer.zero_grad()
        verl.fsdp2_sharded_load_from_cpu(model, kept, spec)
    assert losses[:2] == losses[2:]
    return {"losses": losses}


def restore_another(folder: Path) -> dict[str, Any]:
    """What was kept of a model that was sharded otherwise."""
    on_cpu()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    models = [llama.model() for _ in range(2)]
    for model, options in zip(models, ({}, {"shard_placement_fn": verl.get_shard_placement_fn(2)}), strict=True):
        verl.apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True, **options}, OmegaConf.create({}))
    kept = verl.fsdp2_sharded_save_to_cpu(models[1])
    before = [param.to_local().clone() for param in models[0].parameters()]
    try:
        verl.fsdp2_sharded_load_from_cpu(models[0], *kept)
        error = ""
    except (RuntimeError, AssertionError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    is_unchanged = all(map(torch.equal, before, (param.to_local() for param in models[0].parameters())))
    return {"error": error, "is_unchanged": is_unchanged}


def plain(folder: Path) -> dict[str, Any]:
    return train(folder, by_dimension=False)


def by_dimension(folder: Path) -> dict[str, Any]:
    return train(folder, by_dimension=True)


@pytest.mark.parametrize("program", [plain, by_dimension])
def test_training(program, tmp_path):
    results = results_of(program, tmp_path)
    assert results["drop_in"]["version"] == 2
    assert_same(results)


def test_what_ranks_have_kept_comes_back(tmp_path):
    assert_same(results_of(keep_and_restore, tmp_path))


def test_what_was_kept_of_other_shards_is_refused_before_anything_is_written(tmp_path):
    found = results_of(restore_another, tmp_path)["drop_in"]
    assert "the kept one is" in found["error"] and "restore it into" in found["error"], found
    assert found["is_unchanged"], found

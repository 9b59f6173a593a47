"""A checkpoint has every element of every tensor: one rank alone cannot save it, and ``load`` checks the parts."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from fsdp_compose import fully_shard
from fsdp_compose.checkpoint import (
    LoadPlanner,
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    load,
    resume,
    save,
    save_hf,
    set_state_dict,
)
from tests.checkpoint.states import adamw, build, train
from tests.harness import distributed

FULL = StateDictOptions(full_state_dict=True)
Save = Callable[[nn.Module, torch.optim.Optimizer, Path], Any]
SAVES: dict[str, Save] = {
    "save": lambda model, optimizer, folder: save({"model": get_model_state_dict(model)}, folder),
    "save-optimizer": lambda model, optimizer, folder: save(
        {"optimizer": get_optimizer_state_dict(model, optimizer)}, folder
    ),
    "save-live": lambda model, optimizer, folder: save(model.state_dict(), folder),
    "save-in-list": lambda model, optimizer, folder: save({"x": [1, {"y": model.second.weight}]}, folder),
    "hf": lambda model, optimizer, folder: save_hf(model.second, folder),
    "full-model": lambda model, optimizer, folder: get_model_state_dict(model, options=FULL),
    "full-optimizer": lambda model, optimizer, folder: get_optimizer_state_dict(model, optimizer, options=FULL),
    "full-both": lambda model, optimizer, folder: get_state_dict(model, optimizer, options=FULL),
    "rank0": lambda model, optimizer, folder: get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    ),
}


@distributed(world_size=2, fresh=True)
def test_nothing_whole_is_saved_without_the_process_group(tmp_path):
    model = build()
    fully_shard(model.second)
    fully_shard(model)
    optimizer = adamw(model.parameters())
    train(model, optimizer, steps=1)
    stock = distribute_tensor(torch.arange(6.0), DeviceMesh("cpu", [0, 1]), [Shard(0)])
    dist.barrier()
    dist.destroy_process_group()
    for how, call in SAVES.items():
        folder = tmp_path / how
        with pytest.raises(RuntimeError, match="is sharded over 2 ranks, but there is no process group any more"):
            call(model, optimizer, folder)
        assert not folder.exists() and not folder.with_name(folder.name + ".partial").exists(), how
    with pytest.raises(RuntimeError, match=r"save\(\): stock is sharded over 2 ranks.*before destroy_process_group"):
        save({"stock": stock}, tmp_path / "stock")
    save({"plain": torch.arange(3)}, tmp_path / f"plain-{os.getpid()}")  # belongs to this process alone


def rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata of a folder that torch wrote, which has no checksums."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def drop_a_part(metadata: Any) -> None:
    metadata.state_dict_metadata["weight"].chunks.pop()


def repeat_a_part(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["weight"].chunks
    chunks[1] = chunks[0]


def shorten_a_part(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["weight"].chunks
    chunks[1] = ChunkStorageMetadata(chunks[1].offsets, torch.Size([1, 3]))


def move_a_part_out(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["weight"].chunks
    chunks[1] = ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([2, 3]))


CHANGES = {
    drop_a_part: "6 of the 12 elements of weight were saved",
    repeat_a_part: "6 of the 12 elements of weight were saved",
    shorten_a_part: "9 of the 12 elements of weight were saved",
    move_a_part_out: r"a part of weight is not in the tensor of shape \(4, 3\)",
}


@pytest.mark.parametrize("change", CHANGES)
@distributed(world_size=2)
def test_a_tensor_that_was_saved_in_part_is_refused(change, tmp_path):
    mesh = DeviceMesh("cpu", [0, 1])
    weight = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    dcp.save({"weight": weight}, checkpoint_id=tmp_path / "whole")
    target = {"weight": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])}
    load(target, tmp_path / "whole")
    assert torch.equal(target["weight"].full_tensor(), torch.arange(12.0).view(4, 3))
    if dist.get_rank() == 0:
        rewrite(tmp_path / "whole", change)
    dist.barrier()
    before = target["weight"].to_local().clone()
    with pytest.raises(RuntimeError, match=CHANGES[change]):
        load(target, tmp_path / "whole")
    assert torch.equal(target["weight"].to_local(), before)


# ---- State that was loaded, and state that an optimizer has


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=0.1),
}


def sharded(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    fully_shard(model.second)
    fully_shard(model)
    return model, make(model)


def saved(make: Callable[[nn.Module], torch.optim.Optimizer], folder: Path) -> dict[str, Any]:
    """Train and save; return parameters after two steps more."""
    model, optimizer = sharded(make)
    train(model, optimizer, steps=2)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    save({"model": of_model, "optimizer": of_optimizer, "step": 2}, folder)
    train(model, optimizer, steps=2, begin=2)
    return get_model_state_dict(model, options=FULL)


def assert_trained(model: nn.Module, optimizer: torch.optim.Optimizer, expected: dict[str, Any]) -> None:
    train(model, optimizer, steps=2, begin=2)
    found = get_model_state_dict(model, options=FULL)
    for fqn, value in expected.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(found[fqn], value), fqn


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("with_dcp", [False, True])
@distributed(world_size=2)
def test_a_step_without_the_state_that_was_loaded_raises(name, with_dcp, tmp_path):
    expected = saved(OPTIMIZERS[name], tmp_path / "saved")
    model, optimizer = sharded(OPTIMIZERS[name])
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "step": 0}
    if with_dcp:
        dcp.load(state, checkpoint_id=tmp_path / "saved", planner=LoadPlanner())
    else:
        load(state, tmp_path / "saved")
    loaded = get_model_state_dict(model, options=FULL)
    with pytest.raises(RuntimeError, match=r"state was loaded for this \w+, but never set.*set_state_dict\(\)"):
        train(model, optimizer, steps=1, begin=2)
    found = get_model_state_dict(model, options=FULL)
    assert all(torch.equal(found[fqn], loaded[fqn]) for fqn in ("first.weight", "second.weight", "scale"))
    optimizer.zero_grad()
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=state["optimizer"])
    dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "saved", planner=LoadPlanner())
    assert_trained(model, optimizer, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=2)
def test_resume_sets_all_that_it_loads(name, tmp_path):
    expected = saved(OPTIMIZERS[name], tmp_path / "saved")
    model, optimizer = sharded(OPTIMIZERS[name])
    optimizer.param_groups[0]["lr"] = 0.5
    assert resume(tmp_path / "saved", model, iter([optimizer]), step=0) == {"step": 2}
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_trained(model, optimizer, expected)
    alone, _ = sharded(OPTIMIZERS[name])
    assert resume(tmp_path / "saved", alone) == {}
    with pytest.raises(TypeError, match=r"pass the optimizer by position"):
        resume(tmp_path / "saved", model, optimizer=optimizer)


@distributed(world_size=2)
def test_a_checkpoint_that_is_only_looked_at_stops_nobody(tmp_path):
    saved(OPTIMIZERS["adamw"], tmp_path / "saved")
    model, optimizer = sharded(OPTIMIZERS["adamw"])
    other, other_optimizer = sharded(OPTIMIZERS["adamw"])
    _, of_optimizer = get_state_dict(other, other_optimizer)
    load({"model": get_model_state_dict(other), "optimizer": of_optimizer}, tmp_path / "saved")
    train(model, optimizer, steps=1)  # another optimizer
    load({"model": get_model_state_dict(model)}, tmp_path / "saved")
    train(model, optimizer, steps=1)  # nothing of its state was loaded
    get_optimizer_state_dict(model, optimizer)
    load(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
        tmp_path / "saved",
    )
    train(model, optimizer, steps=1)  # its state exists, and was loaded in place

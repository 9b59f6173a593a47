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
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    load,
    save,
    save_hf,
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

"""A shard that one rank has pickled: ``if rank == 0: torch.save(model.state_dict())``, and its file read elsewhere."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from fsdp_compose import fully_shard
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict, save
from fsdp_compose.core.ragged import placement
from tests.checkpoint.states import shared_folder
from tests.harness import distributed, run_distributed

PART = r"rank 0's part of a tensor of shape \(4, 4\) on 2 ranks\..*full_state_dict=True.*checkpoint\.save\(\)"


def build() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(nn.Linear(4, 4, bias=False))


def save_on_rank_0(folder: Path) -> None:
    model = build()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "rank 0.pt")
    dist.barrier()


def test_a_process_without_ranks_is_told_what_the_file_has(tmp_path):
    run_distributed(save_on_rank_0, 2, {"folder": tmp_path})
    state = torch.load(tmp_path / "rank 0.pt", weights_only=True)
    assert state["weight"].to_local().numel() == 8  # whoever has the files of all ranks can put them together
    with pytest.raises(
        RuntimeError, match=r"a process without a process group can only look at the to_local\(\) of " + PART
    ):
        nn.Linear(4, 4, bias=False).load_state_dict(state)


@distributed(world_size=2)
def test_another_rank_is_told_what_the_file_has():
    """Its own part has the same shape, and would be replaced silently."""
    folder = shared_folder()
    save_on_rank_0(folder)
    state, model = torch.load(folder / "rank 0.pt", weights_only=True), build()
    before = model.weight.to_local().detach().clone()
    if dist.get_rank() == 0:
        model.load_state_dict(state)
    else:
        for use in (model.load_state_dict, lambda state: state["weight"].full_tensor()):
            with pytest.raises(RuntimeError, match=r"rank 1 can only look at the to_local\(\) of " + PART):
                use(state)
    assert torch.equal(model.weight.to_local(), before)


def warned(do: Any) -> list[str]:
    placement._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        do()
    return [str(item.message) for item in caught if "torch.save()" in str(item.message)]


@distributed(world_size=(1, 2))
def test_a_rank_that_saves_its_part_is_warned_once_and_savers_of_checkpoints_are_not(world_size):
    folder, model = shared_folder(), build()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found = warned(lambda: torch.save(states, io.BytesIO()))
    assert len(found) == (world_size > 1)
    assert all("a file gets only rank" in text for text in found)
    assert not warned(lambda: torch.save(whole, io.BytesIO()))
    assert not warned(lambda: (copy.deepcopy(states), pickle.dumps(states)))
    assert not warned(lambda: (dcp.save(states, checkpoint_id=folder / "dcp"), save(states, folder / "ours")))

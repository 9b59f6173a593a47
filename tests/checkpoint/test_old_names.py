"""Files that name our classes as they were called when the files were written."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_compose
from fsdp_compose import RaggedDTensor, RaggedShard, RaggedSpec, distribute_ragged, fully_shard
from fsdp_compose.checkpoint import get_optimizer_state_dict
from tests import harness
from tests.harness import ROOT, distributed

# Written before the names were fixed, by one rank, with nn.Linear(3, 2) under fully_shard, of numbers 0, 1, 2, ...:
# torch.save(model.state_dict()); torch.save() of a new AdamW's state, by get_state_dict(); and, of the weight,
# pickle.dumps([placements, _spec], 2).
DATA = ROOT / "tests" / "data" / "old_names"


needs_mesh = pytest.mark.skipif(
    harness.TORCH < (2, 13), reason="these files hold meshes as torch >= 2.13 pickles them, which 2.12 cannot read"
)


@needs_mesh
@distributed(world_size=1)
def test_old_files_load():
    saved = torch.load(DATA / "state_dict.pt", weights_only=True)
    assert [type(value) for value in saved.values()] == [RaggedDTensor] * 2
    torch.testing.assert_close(saved["weight"].full_tensor(), torch.arange(6.0).view(2, 3))
    model = fully_shard(nn.Linear(3, 2))
    model.load_state_dict(saved)
    torch.testing.assert_close(model.bias.full_tensor(), torch.arange(2.0))
    placements, spec = pickle.loads((DATA / "placements.pickle").read_bytes())
    assert placements == (RaggedShard((2,)),) == model.weight.placements
    assert type(spec) is RaggedSpec and spec.shape == (2, 3)
    state = torch.load(DATA / "pending.pt", weights_only=True)
    assert state["weight"] == {"step": None, "exp_avg": None, "exp_avg_sq": None}
    assert get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))["state"].keys() == state.keys()


@pytest.mark.parametrize("item", [RaggedDTensor, RaggedShard, RaggedSpec])
def test_new_files_name_what_users_import(item):
    assert item.__module__ == "fsdp_compose" and getattr(fsdp_compose, item.__name__) is item
    assert f"fsdp_compose\n{item.__name__}\n".encode() in pickle.dumps(item, 2)


_FIRST_OF_ALL = """
import torch
import torch.distributed as dist
import fsdp_compose

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
saved = torch.load(FILE, weights_only=True)
print(*sorted(type(value).__name__ for value in saved.values()))
"""


@pytest.mark.parametrize(
    "content",
    [
        "ours first",
        "torch's first",
        "a placement",
        pytest.param("of 0.1", marks=needs_mesh),
        pytest.param("a pending tensor of 0.1", marks=needs_mesh),
    ],
)
@distributed(world_size=1, timeout=100)
def test_files_load_before_anything_else_of_the_package_is_used(content: str, tmp_path: Path) -> None:
    file, expected = tmp_path / "saved.pt", "DTensor RaggedDTensor"
    if content.endswith("of 0.1"):
        file = DATA / ("state_dict.pt" if content == "of 0.1" else "pending.pt")
        expected = "RaggedDTensor RaggedDTensor" if content == "of 0.1" else "dict dict"
    else:
        _save(content, file)
        expected = "RaggedShard Replicate Shard" if content == "a placement" else expected
    program = _FIRST_OF_ALL.replace("FILE", repr(str(file)))
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == expected.split()


def _save(content: str, file: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    stock, ragged = distribute_tensor(torch.ones(2), mesh), distribute_ragged(torch.ones(2), mesh, [RaggedShard((2,))])
    items: dict[str, object] = {"a": ragged, "b": stock} if content == "ours first" else {"a": stock, "b": ragged}
    if content == "a placement":
        items = {"a": Replicate(), "b": Shard(0), "c": RaggedShard((2,))}
    torch.save(items, file)

"""Files that name our classes as they were called when the files were written."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn as nn

import fsdp_compose
from fsdp_compose import RaggedDTensor, RaggedShard, RaggedSpec, fully_shard
from fsdp_compose.checkpoint import get_optimizer_state_dict
from tests import harness
from tests.harness import ROOT, distributed

# Written before the names were fixed, by one rank, with nn.Linear(3, 2) under fully_shard, of numbers 0, 1, 2, ...:
# torch.save(model.state_dict()); torch.save() of a new AdamW's state, by get_state_dict(); and, of the weight,
# pickle.dumps([placements, _spec], 2).
DATA = ROOT / "tests" / "data" / "old_names"


@pytest.mark.skipif(
    harness.TORCH < (2, 13), reason="these files hold meshes as torch >= 2.13 pickles them, which 2.12 cannot read"
)
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

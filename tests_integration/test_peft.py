"""peft's LoRA on a sharded model: trained, its adapters saved and loaded; merged by verl's functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from verl.utils import fsdp_utils as verl

from tests_integration import llama
from tests_integration.side_by_side import assert_same, results_of
from tests_integration.test_verl import on_cpu


def adapted(named: bool) -> PeftModel:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(llama.model(), config)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp" if named else "dp",))
    for layer in model.base_model.model.model.layers:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    return model


def train(model: PeftModel, folder: Path) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, eps=1e-3)
    losses = []
    for ids in llama.batches(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(llama.mean(loss))
        optimizer.step()
        optimizer.zero_grad()
    adapters = get_peft_model_state_dict(model)
    sums = [float(value.full_tensor().abs().sum()) for _, value in sorted(adapters.items())]
    return {"losses": losses, "adapters": sorted(adapters), "sums": sums}


def trained(folder: Path) -> dict[str, Any]:
    return train(adapted(named=True), folder)


def merged(folder: Path) -> dict[str, Any]:
    on_cpu()
    model = adapted(named=True)
    result = train(model, folder)
    merged = verl.collect_merged_lora_params(model)
    ids = next(llama.batches(1))
    with torch.no_grad():
        after = llama.mean(model(input_ids=ids, labels=ids).loss)
        full = llama.model()
        full.load_state_dict({name: value for name, value in merged.items() if "rotary" not in name})
        expected = llama.mean(full(input_ids=ids, labels=ids).loss)
    assert dist.get_world_size() == 2
    return {
        **result,
        "merged": [float(value.abs().sum()) for _, value in sorted(merged.items())],
        "after": [after, expected],
    }


@pytest.mark.parametrize("program", [trained, merged])
def test_training(program, tmp_path):
    assert_same(results_of(program, tmp_path), 2e-5)

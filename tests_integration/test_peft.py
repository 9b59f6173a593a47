"""peft's LoRA on a sharded model: trained, its adapters saved and loaded; merged by verl's functions; on stacked
experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from verl.utils import fsdp_utils as verl

from fsdp_compose import fully_shard
from tests.harness import distributed
from tests.training import full_parameters
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


# ---- Programs of ``fsdp_compose.fully_shard``, without ``drop_in.install()``


class Net(nn.Module):
    """A model that no package's loader knows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def adapted_net() -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(Net(), LoraConfig(r=3, target_modules=["blocks.0", "blocks.1", "head"]))


def sharded(model: PeftModel, blocks: nn.ModuleList) -> PeftModel:
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def train_beside(model: nn.Module, reference: nn.Module, width: int, num_steps: int = 3) -> None:
    """Train with a batch of its own on each rank, and the unsharded model with all of them; compare parameters."""
    ranks = range(dist.get_world_size())
    optimizers = [
        torch.optim.AdamW([p for p in item.parameters() if p.requires_grad], lr=0.05, eps=1e-3)
        for item in (model, reference)
    ]
    for step in range(num_steps):
        batches = [torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
        model(batches[dist.get_rank()]).square().mean().backward()
        sum(reference(batch).square().mean() / len(ranks) for batch in batches).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(reference.named_parameters())
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-5)


@distributed(world_size=(1, 2, 3))
def test_adapters_saved_whole_are_loaded_into_a_sharded_model(tmp_path):
    reference, model = adapted_net(), adapted_net()
    sharded(model, model.base_model.model.blocks)
    train_beside(model, reference, 9)
    whole = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in get_peft_model_state_dict(model).items()
    }
    path = Path(tmp_path, f"{dist.get_rank()}.pt")
    torch.save(whole, path)
    fresh = adapted_net()
    sharded(fresh, fresh.base_model.model.blocks)
    set_peft_model_state_dict(fresh, torch.load(path))
    for key, value in get_peft_model_state_dict(fresh).items():
        assert torch.equal(value.full_tensor(), whole[key]), key
    batch = torch.randn(4, 9, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(fresh(batch), reference(batch))


class Experts(nn.Module):
    """Stacked experts: peft adapts them by a parametrization that it puts on inside forward, and takes off."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 12) / 5)
        self.down = nn.Parameter(torch.randn(4, 12, 8) / 5)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bi,eif->bef", x, self.up).relu()
        return torch.einsum("be,beo->bo", weights, torch.einsum("bef,efo->beo", hidden, self.down))


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(x, self.gate(x).softmax(-1))


class ExpertNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adapted_experts() -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["head"], target_parameters=["experts.up", "experts.down"])
    return get_peft_model(ExpertNet(), config)


@distributed(world_size=(1, 2, 3))
def test_adapters_of_stacked_experts_train_as_unsharded():
    reference, model = adapted_experts(), adapted_experts()
    sharded(model, model.base_model.model.blocks)
    train_beside(model, reference, 8)

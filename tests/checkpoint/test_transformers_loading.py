"""Which part of a whole tensor the loaders of transformers and of peft give to parameters that fsdp_compose has
sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers.distributed.sharding_utils import DtensorShardOperation

from fsdp_compose import RaggedShard, distribute_ragged, fully_shard
from fsdp_compose.plugins.transformers_loader import extend_transformers_loader
from tests.harness import distributed
from tests.training import full_parameters

extend_transformers_loader()  # ``fully_shard`` does this; some tests here do without

PLACEMENTS = {
    "rows": RaggedShard((4, 0, 1)),
    "elements": RaggedShard((7, 20, 3), flat=True),
    "even": Shard(0),
    "dim 1": Shard(1),
    "whole": Replicate(),
}


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@distributed(world_size=3)
def test_a_rank_reads_its_own_part(placement, is_file, tmp_path):
    full = torch.arange(30.0).reshape(5, 6)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
    param = distribute_tensor(full, mesh, [PLACEMENTS[placement]])
    source = full
    if is_file:
        path = Path(tmp_path, f"{dist.get_rank()}.safetensors")
        save_file({"weight": full}, path)
        source = safe_open(path, "pt").get_slice("weight")
    part = DtensorShardOperation(param).shard_tensor(source, dtype=torch.float64)
    assert part.dtype is torch.float64 and torch.equal(part.float(), param.to_local())


@distributed(world_size=4)
def test_beside_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    full = torch.arange(24.0).reshape(4, 6)
    for placement in (RaggedShard((3, 1)), RaggedShard((5, 7), flat=True)):
        param = distribute_ragged(full, mesh, [placement, Shard(1)])
        assert torch.equal(DtensorShardOperation(param).shard_tensor(full), param.to_local())


@distributed(world_size=3)
def test_of_tensors_that_are_stacked_a_rank_reads_those_in_its_rows():
    full = torch.arange(40.0).reshape(5, 2, 4)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
    param = distribute_tensor(full, mesh, [RaggedShard((2, 3, 0))])
    loading = DtensorShardOperation(param)
    parts = [loading.shard_tensor(full[i], tensor_idx=i) for i in range(5)]
    assert torch.equal(torch.stack([part for part in parts if part is not None]), param.to_local())
    flat = DtensorShardOperation(distribute_tensor(full, mesh, [RaggedShard((7, 30, 3), flat=True)]))
    with pytest.raises(NotImplementedError, match="5 stacked tensors between elements"):
        flat.shard_tensor(full[0], tensor_idx=0)


@distributed(world_size=4)
def test_of_experts_that_are_stacked_a_rank_reads_those_in_its_rows_of_its_part():
    full = torch.arange(48.0).reshape(8, 2, 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    for counts in ((1, 3), (0, 4)):
        param = distribute_ragged(full, mesh, [RaggedShard(counts), Shard(0)])
        parts = [DtensorShardOperation(param).shard_tensor(full[i], tensor_idx=i) for i in range(8)]
        stacked = torch.stack([part for part in parts if part is not None])
        assert type(stacked) is torch.Tensor and torch.equal(stacked, param.to_local())


@pytest.mark.parametrize("is_file", [False, True])
@distributed(world_size=2)
def test_a_number_goes_to_the_rank_that_holds_it(is_file, tmp_path):
    full, mesh = torch.tensor(3.0), init_device_mesh("cpu", (2,))
    source = full
    if is_file:
        path = Path(tmp_path, f"{dist.get_rank()}.safetensors")
        save_file({"weight": full}, path)
        source = safe_open(path, "pt").get_slice("weight")
    for placement in (RaggedShard((1, 0)), RaggedShard((0, 1), flat=True)):
        param = distribute_ragged(full, mesh, [placement])
        assert torch.equal(DtensorShardOperation(param).shard_tensor(source), param.to_local())


@distributed(world_size=2)
def test_tensors_of_stock_placements_are_read_as_before():
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(21.0).reshape(7, 3)
    for placement in (Shard(0), Shard(1), Replicate()):
        param = distribute_tensor(full, mesh, [placement])
        assert torch.equal(DtensorShardOperation(param).shard_tensor(full), param.to_local())
    loading = DtensorShardOperation(distribute_tensor(full, mesh, [Shard(0)]))
    kept = [i for i in range(7) if loading.shard_tensor(full[i], tensor_idx=i) is not None]
    assert kept == ([0, 1, 2, 3] if dist.get_rank() == 0 else [4, 5, 6])


class Scaled(nn.Module):
    """A layer to adapt, of sizes that no number of ranks divides, and a number that is trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
        self.head, self.scale = nn.Linear(9, 5), Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.scale(self.head(x))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


GRANULES = {"rows": None, "elements": lambda _fqn, _param: 1}


def adapted(sharded: bool, granules: str = "rows") -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=3, target_modules=["blocks.0", "blocks.1", "head"], modules_to_save=["scale"])
    model = get_peft_model(Scaled(), config)
    if sharded:
        for block in model.base_model.model.blocks:
            fully_shard(block, granularity=GRANULES[granules])
        fully_shard(model, granularity=GRANULES[granules])
    return model


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("granules", GRANULES)
@distributed(world_size=(1, 2, 3))
def test_peft_loads_whole_adapters_into_a_sharded_model(granules, after_a_step):
    model, reference = adapted(sharded=True, granules=granules), adapted(sharded=False)
    batch = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    if after_a_step:
        model(batch).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
    given = {
        key: torch.arange(value.numel(), dtype=torch.float32).reshape(value.shape) / 8 + i
        for i, (key, value) in enumerate(sorted(get_peft_model_state_dict(reference).items()))
    }
    for item in (model, reference):
        result = set_peft_model_state_dict(item, dict(given))
        assert not result.unexpected_keys
    expected = dict(reference.named_parameters())
    for name, value in full_parameters(model).items():
        assert torch.equal(value, expected[name]), name
    torch.testing.assert_close(model(batch), reference(batch))

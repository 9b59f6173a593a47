"""Which part of a checkpoint transformers' loader reads of parameters that are sharded by fsdp_compose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_compose import RaggedShard, distribute_ragged
from fsdp_compose.drop_in.transformers_patch import DtensorShardOperation
from tests.harness import distributed

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
    mine = [part for part in parts if part is not None]
    assert torch.equal(torch.stack(mine) if mine else torch.empty(0, 2, 4), param.to_local())
    flat = DtensorShardOperation(distribute_tensor(full, mesh, [RaggedShard((7, 30, 3), flat=True)]))
    with pytest.raises(NotImplementedError, match="5 stacked tensors between elements"):
        flat.shard_tensor(full[0], tensor_idx=0)

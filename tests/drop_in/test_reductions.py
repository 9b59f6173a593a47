"""Under ``drop_in``, sums, means and norms of sharded tensors have FSDP2's placements: each rank has its part."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp_compose
from fsdp_compose import drop_in
from tests.harness import distributed

REDUCTIONS = {
    "vector_norm": lambda grads: torch.linalg.vector_norm(grads[0]),
    "of order 1": lambda grads: torch.linalg.vector_norm(grads[0], 1),
    "of order 0": lambda grads: torch.linalg.vector_norm(grads[0], 0),
    "of order -1": lambda grads: torch.linalg.vector_norm(grads[0] + 9, -1),
    "norm": lambda grads: grads[0].norm(),
    "_foreach_norm": lambda grads: torch._foreach_norm(grads, 2)[1],
    "stacked": lambda grads: torch.stack(torch._foreach_norm(grads, 2)),
    "sum": lambda grads: grads[0].sum(),
    "mean": lambda grads: grads[0].mean(),
    "count_nonzero": lambda grads: grads[0].count_nonzero(),
    "in bf16": lambda grads: grads[0].bfloat16().norm(),
    "sum in bf16": lambda grads: grads[0].bfloat16().sum(),
}


def gradients(shard, mesh=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    shard(model, mesh=mesh)
    model(torch.arange(16.0).view(2, 8)).sum().backward()
    return [param.grad for param in model.parameters()]


@distributed(world_size=(2, 4))
def test_placements_of_reductions_are_those_of_fsdp2(world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if world_size == 4 else None
    of_torch, ours = gradients(fully_shard_of_torch, mesh), gradients(drop_in.fully_shard, mesh)
    whole = [grad.full_tensor() for grad in ours]
    for name, reduce in REDUCTIONS.items():
        with CommDebugMode() as counted:
            found = reduce(ours)
        assert counted.get_total_counts() == 0, name
        assert found.placements == reduce(of_torch).placements, name
        expected = reduce(whole)
        torch.testing.assert_close(found.full_tensor(), expected, rtol=2e-2 if "bf16" in name else 1e-5, atol=1e-5)
        if not expected.dim():
            assert found.item() == pytest.approx(expected.item(), rel=2e-2 if "bf16" in name else 1e-5)
            (ours[0] / found).full_tensor()
    squares = sum(norm.to_local() ** 2 for norm in torch._foreach_norm(ours, 2))
    torch.distributed.all_reduce(squares, group=ours[0].device_mesh.get_group(ours[0].device_mesh.ndim - 1))
    true = torch.cat([grad.flatten() for grad in whole]).norm()
    torch.testing.assert_close(squares.sqrt(), true)
    torch.testing.assert_close(nn.utils.get_total_norm(ours).full_tensor(), true)


@distributed(world_size=2)
def test_what_autograd_records_is_complete_and_trains():
    torch.manual_seed(0)
    model, whole = nn.Linear(4, 4), nn.Linear(4, 4)
    whole.load_state_dict(model.state_dict())
    drop_in.fully_shard(model)
    inputs = torch.ones(2, 4)
    for net in (model, whole):
        (net(inputs).sum() + 0.1 * sum(param.square().sum() for param in net.parameters())).backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), whole.weight.grad)


@distributed(world_size=2)
def test_without_drop_in_reductions_are_complete():
    for norm in torch._foreach_norm(gradients(fsdp_compose.fully_shard), 2):
        assert isinstance(norm, DTensor) and not any(item.is_partial() for item in norm.placements)

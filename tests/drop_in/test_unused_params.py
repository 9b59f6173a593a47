"""``set_reduce_scatter_unused_params``: which parameters have a gradient, and of what, under FSDP2 and ``drop_in``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import RanksDifferError, drop_in, replicate
from fsdp_compose.core import fill_unused
from tests.harness import distributed

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"), reason="FSDP2 of this torch cannot do it"
)


class Part(nn.Module):
    """Uses ``first``, on rank 0 ``second`` too, and neither ``unused`` nor ``frozen``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Parameter(torch.full((4, 4), 0.5)) for _ in range(3))
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first + (x @ self.second if dist.get_rank() == 0 else 0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.part, self.skipped = nn.Linear(4, 4), Part(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.stem(x))


def gradients_of(shard: Any, schedule: str, mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    """The whole gradients of a model after ``schedule``: a letter for each backward, ``n`` for one without sync."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = Model()
    for module in (*model.children(), model):
        shard(module, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)
    for step, letter in enumerate(schedule):
        model.set_requires_gradient_sync(letter == "s")
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        model(x).sum().backward()
    return {
        name: param.grad if param.grad is None else param.grad.full_tensor() for name, param in model.named_parameters()
    }


@needs_fsdp2
@pytest.mark.parametrize("schedule", ["s", "ss", "ns"])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 1)])
@distributed(world_size=2)
def test_unused_parameters_get_zeros_where_fsdp2_gives_them(schedule, mesh_shape):
    expected = gradients_of(fsdp.fully_shard, schedule, mesh_shape)
    grads = gradients_of(drop_in.fully_shard, schedule, mesh_shape)
    assert {name: grad is None for name, grad in grads.items()} == {
        name: grad is None for name, grad in expected.items()
    }
    assert grads["part.unused"].count_nonzero() == 0
    assert grads["part.frozen"] is None and grads["skipped.weight"] is None
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], msg=name)


@distributed(world_size=2)
def test_unused_parameters_have_no_gradient_by_default_or_when_it_is_switched_off():
    model = drop_in.fully_shard(Part())
    x = torch.ones(2, 4)
    for flag in (None, True, False):
        if flag is not None:
            model.set_reduce_scatter_unused_params(flag)
        model(x).sum().backward()
        assert (model.unused.grad is not None) == (flag is True)
        model.zero_grad()
    with pytest.raises(TypeError, match="set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(1)


@distributed(world_size=2)
def test_parameters_that_stay_whole_get_zeros_too():
    grads = []
    for fills_unused in (False, True):
        model = replicate(Part())
        fill_unused(model, fills_unused)
        for _ in range(2):
            model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
        grads.append([None if param.grad is None else param.grad.full_tensor() for param in model.parameters()])
    (first, second, unused, frozen), filled = grads
    assert unused is None and frozen is None
    torch.testing.assert_close(filled[:2], [first, second])
    assert filled[2].count_nonzero() == 0 and filled[3] is None


@distributed(world_size=2)
def test_ranks_that_set_it_differently_are_told():
    model = drop_in.fully_shard(Part())
    model.set_reduce_scatter_unused_params(dist.get_rank() == 0)
    with pytest.raises(RanksDifferError, match="zeros for unused parameters"):
        model(torch.ones(2, 4))

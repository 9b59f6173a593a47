"""Expert parallelism: experts are DTensors over a part of the data ranks, and sharded over the rest of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fsdp_compose
from fsdp_compose import clip_grad_norm_, fully_shard
from tests.flat.test_tensor_parallel import TORCHS
from tests.harness import distributed, lasting_mesh
from tests.programs.modules import Gathered, Summed
from tests.training import assert_same_parameters

NUM_EXPERTS, DIM = 4, 6


class Experts(nn.Module):
    """Every expert sees every token, weighed by the router: as simple as possible, with the collectives of experts that
    lie on several ranks, whose tokens come together for them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, DIM) / 3)
        self.bias = nn.Parameter(torch.randn(NUM_EXPERTS, DIM) / 3)
        self.mesh: DeviceMesh | None = None
        self.tp: DeviceMesh | None = None  # over which the output features of each expert are spread
        self.sharing: DeviceMesh | None = None  # ranks that have one batch; each sends a slice of it

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return self.mixture(x, weights, self.weight, self.bias)
        if self.sharing is not None:
            x, weights = [
                DTensor.from_local(item, self.sharing, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
                for item in (x, weights)
            ]
        group, rank, num = self.mesh.get_group(), self.mesh.get_local_rank(), self.mesh.size()
        all_x = Gathered.apply(x, group)
        all_weights = Gathered.apply(weights, group).chunk(num, 1)[rank]
        mine = self.mixture(all_x, all_weights, self.weight.to_local(), self.bias.to_local())
        own = Summed.apply(mine, group).chunk(num)[rank]
        return own if self.sharing is None else DTensor.from_local(own, self.sharing, [Shard(0)]).full_tensor()

    def mixture(self, x: torch.Tensor, weights: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            return self.whole(x, weights, weight, bias)
        x, weights = [
            DTensor.from_local(item, self.tp, [Replicate()]).to_local(grad_placements=[Partial()])
            for item in (x, weights)
        ]
        return DTensor.from_local(self.whole(x, weights, weight, bias), self.tp, [Shard(1)]).full_tensor()

    def whole(self, x: torch.Tensor, weights: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.einsum("te,eto->to", weights, torch.einsum("td,edo->eto", x, weight) + bias[:, None])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.experts = nn.Linear(DIM, DIM), nn.Linear(DIM, NUM_EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).tanh()
        return x + self.experts(x, self.router(x).softmax(-1))


def mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture()


def spread(model: Mixture, ep: DeviceMesh) -> None:
    """The experts over the ranks of ``ep``."""
    model.experts.mesh = ep
    for name, param in [*model.experts.named_parameters()]:
        model.experts.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), ep, [Shard(0)])))


def train(model: nn.Module, place: int, num: int, clip: Callable[..., Any], **options: Any) -> list[float]:
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
    for i in range(3):
        x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(i))
        model(x.chunk(num)[place]).square().mean().backward()
        norm = clip(model.parameters(), 0.2)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@distributed(world_size=4)
@pytest.mark.parametrize("clip", [clip_grad_norm_, TORCHS])
@pytest.mark.parametrize(("num_shards", "num_parts"), [(2, 2), (1, 4)])
def test_experts_are_averaged_over_all_data_ranks_without_a_factor_by_hand(num_shards, num_parts, clip):
    mesh = lasting_mesh(("edp", "ep"), (num_shards, num_parts))
    dp = mesh._flatten("dp")
    for policy in (None, fsdp_compose.MixedPrecisionPolicy(reduce_dtype=torch.float16)):
        model, expected = mixture(), mixture()
        spread(model, mesh["ep"])
        fully_shard(model.experts, mesh=mesh["edp"], mp_policy=policy)
        fully_shard(model, mesh=dp)
        norms = train(model, dp.get_local_rank(), 4, clip)
        tolerance = 1e-5 if policy is None else 5e-3
        torch.testing.assert_close(norms, train(expected, 0, 1, TORCHS), rtol=tolerance, atol=tolerance)
        assert_same_parameters(model, expected, tolerance=tolerance)


@distributed(world_size=4)
@pytest.mark.parametrize("clip", [clip_grad_norm_, TORCHS])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_experts_that_tensor_parallelism_cuts_too_train_as_one_process(num_shards, clip):
    """Each expert is cut over two ranks that share a batch, and experts are spread over the data ranks."""
    mesh = lasting_mesh(("edp", "ep", "tp"), (num_shards, 2 // num_shards, 2))
    dp = mesh["edp", "ep"]._flatten("dp")
    model, expected = mixture(), mixture()
    model.experts.mesh, model.experts.tp = mesh["ep"], mesh["tp"]
    for name, param in [*model.experts.named_parameters()]:
        cut = [Shard(0), Shard(param.ndim - 1)]
        model.experts.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh["ep", "tp"], cut)))
    fully_shard(model.experts, mesh=mesh["edp"])
    fully_shard(model, mesh=dp)
    norms = train(model, dp.get_local_rank(), 2, clip)
    torch.testing.assert_close(norms, train(expected, 0, 1, TORCHS), rtol=1e-5, atol=1e-5)
    assert_same_parameters(model, expected, tolerance=1e-5)


@distributed(world_size=4)
@pytest.mark.parametrize("clip", [clip_grad_norm_, TORCHS])
def test_experts_on_all_ranks_of_which_pairs_share_a_batch_train_as_one_process(clip):
    mesh = lasting_mesh(("dp", "tp"))
    experts = lasting_mesh(("edp", "ep"), (1, 4))
    model, expected = mixture(), mixture()
    spread(model, experts["ep"])
    model.experts.sharing = mesh["tp"]
    fully_shard(model.experts, mesh=experts["edp"])
    fully_shard(model, mesh=mesh["dp"])
    norms = train(model, mesh.get_local_rank("dp"), 2, clip)
    torch.testing.assert_close(norms, train(expected, 0, 1, TORCHS), rtol=1e-5, atol=1e-5)
    assert_same_parameters(model, expected, tolerance=1e-5)


@distributed(world_size=4)
def test_sums_and_functional_mode_know_the_missing_factor():
    mesh = lasting_mesh(("edp", "ep"))
    dp = mesh._flatten("dp")
    expected = mixture()
    x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(1))
    expected(x).square().mean().backward()
    for change in (
        lambda model: fsdp_compose.set_force_sum_reduction_for_comms(model, True),
        lambda model: fsdp_compose.set_functional_mode(model),
    ):
        model = mixture()
        spread(model, mesh["ep"])
        fully_shard(model.experts, mesh=mesh["edp"])
        change(fully_shard(model, mesh=dp))
        model(x.chunk(4)[dp.get_local_rank()]).square().mean().backward()
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-5, atol=1e-6)


@distributed(world_size=4)
def test_a_group_on_some_of_the_data_ranks_must_be_of_dtensors_on_the_rest():
    mesh = lasting_mesh(("edp", "ep"))
    dp = mesh._flatten("dp")
    model = mixture()
    spread(model, mesh["ep"])
    fully_shard(model.router, mesh=mesh["edp"])
    fully_shard(model.experts, mesh=mesh["edp"])
    fully_shard(model, mesh=dp)
    with pytest.raises(ValueError, match=r"router\.weight is on the ranks \[.*expert parallelism"):
        model(torch.ones(2, DIM))
    assert dist.get_world_size() == 4

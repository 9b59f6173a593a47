"""Parameters and buffers that share memory are refused by name; views of one storage that do not overlap are not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fsdp_compose import fully_shard
from tests.harness import distributed, fake_process_group
from tests.training import assert_parameters_match, local_part, pair

DIM = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("scale", torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) * self.scale


def of_data(net: Net) -> None:
    net.b.weight = nn.Parameter(net.a.weight.data)


def transposed(net: Net) -> None:
    net.b.weight = nn.Parameter(net.a.weight.data.t())


def partly(net: Net) -> None:
    fused = torch.randn(DIM + 1, DIM)
    net.a.weight, net.b.weight = nn.Parameter(fused[:DIM]), nn.Parameter(fused[1:])


def in_every_second_column(net: Net) -> None:
    fused = torch.randn(DIM, 2 * DIM)
    net.a.weight, net.b.weight = nn.Parameter(fused[:, ::2]), nn.Parameter(fused[:, 2 : DIM + 2])


def of_another_dtype(net: Net) -> None:
    net.b.weight = nn.Parameter(net.a.weight.data.view(torch.int32), requires_grad=False)


def by_load_state_dict(net: Net) -> None:
    net.b.load_state_dict(net.a.state_dict(), assign=True)


def buffer_of_a_parameter(net: Net) -> None:
    net.b.weight.requires_grad_(False)
    net.scale = net.b.weight[0]


SHARED = [
    of_data, transposed, partly, in_every_second_column, of_another_dtype, by_load_state_dict, buffer_of_a_parameter
]  # fmt: skip


@pytest.mark.parametrize("share", SHARED, ids=lambda share: share.__name__)
def test_within_a_group(share: Callable[[Net], None]) -> None:
    with fake_process_group(world_size=2):
        net = Net()
        share(net)
        before = dict(net.named_parameters())
        other = "scale" if share is buffer_of_a_parameter else r"a\.weight"
        with pytest.raises(ValueError, match=rf"b\.weight.*{other}|{other}.*b\.weight") as info:
            fully_shard(net)
        assert "clone()" in str(info.value)
        assert ("tied weights" in str(info.value)) == (share in (of_data, by_load_state_dict))
        assert all(param is before[name] for name, param in net.named_parameters())
        net.b = nn.Linear(DIM, DIM)
        net.scale = torch.ones(DIM)
        fully_shard(net)


@pytest.mark.parametrize("share", [of_data, partly, buffer_of_a_parameter], ids=lambda share: share.__name__)
@distributed(world_size=2)
def test_across_groups(share: Callable[[Net], None]) -> None:
    net = Net()
    share(net)
    fully_shard(net.a)
    fully_shard(net.b)
    with pytest.raises(ValueError, match="in the same memory"):
        fully_shard(net)
        net(torch.ones(2, DIM))


def test_an_ignored_parameter_and_an_expanded_one() -> None:
    with fake_process_group(world_size=2):
        net = Net()
        of_data(net)
        with pytest.raises(ValueError, match=r"a\.weight and .* b\.weight"):
            fully_shard(net, ignored_params=[net.b.weight])
        net.b.weight = nn.Parameter(torch.zeros(DIM, 1).expand(DIM, DIM))
        with pytest.raises(ValueError, match=r"b\.weight share memory with each other"):
            fully_shard(net)


def flat_buffer(net: Net) -> None:
    vector_to_parameters(parameters_to_vector(net.parameters()), net.parameters())


def columns(net: Net) -> None:
    fused = torch.randn(DIM, 2 * DIM)
    net.a.weight, net.b.weight = nn.Parameter(fused[:, :DIM]), nn.Parameter(fused[:, DIM:])


def interleaved(net: Net) -> None:
    fused = torch.randn(DIM, 2 * DIM)
    net.a.weight, net.b.weight = nn.Parameter(fused[:, ::2]), nn.Parameter(fused[:, 1::2])


def buffers_of_buffers(net: Net) -> None:
    net.a.register_buffer("scale", net.scale[1:])


def tied(net: Net) -> None:
    net.b.weight = net.a.weight


def of_nothing(net: Net) -> None:
    net.a.empty = nn.Parameter(torch.zeros(0))
    net.b.empty = nn.Parameter(net.a.empty.data)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("share", [flat_buffer, columns, interleaved, buffers_of_buffers, tied, of_nothing])
@distributed(world_size=2)
def test_what_does_not_overlap_trains(share: Callable[[Net], None], by_layer: bool) -> None:
    torch.manual_seed(0)
    net, reference = pair(Net())
    share(net)
    share(reference)
    reference.load_state_dict(net.state_dict())
    if by_layer:
        fully_shard(net.a)
        fully_shard(net.b)
    fully_shard(net)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, reference))
    for _ in range(2):
        net(local_part(x)).square().mean().backward()
        reference(x).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_parameters_match(net, reference)


@distributed(world_size=2)
def test_parameters_on_meta_and_models_of_one_checkpoint() -> None:
    with torch.device("meta"):
        net = Net()
        net.b.weight = nn.Parameter(net.a.weight.data)  # to_empty() gives each memory of its own
    fully_shard(net.a)
    fully_shard(net)
    loaded = copy.deepcopy(Net().state_dict())
    policy, frozen = Net(), Net()
    for one in (policy, frozen):
        one.load_state_dict(loaded, assign=True)
        fully_shard(one)
        one(torch.ones(2, DIM))


@distributed(world_size=2)
def test_memory_that_is_used_again_is_not_taken_for_shared() -> None:
    for _ in range(5):
        net = Net()
        fully_shard(net.a)
        net.b = nn.Linear(DIM, DIM)  # may get the memory that the weight of a has given up
        fully_shard(net)
        net(torch.ones(2, DIM)).sum().backward()

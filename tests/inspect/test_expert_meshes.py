"""``plan`` and ``tune`` of mixtures whose experts are DTensors over data ranks. (That the peaks are those of real runs:
``tests/whole/test_plan_measured.py``.)"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import fully_shard, plan
from fsdp_compose.inspect import Issue, WorldFacts
from fsdp_compose.tuning import PRESETS, schedule, tune
from tests.mixtures import DIM, Block, choosing, spread_over

WAYS = ["c10d", "functional", "dtensor"]
SENT = 4 * 128 * 64 * 4  # bytes that a rank of ``choosing`` sends: the rows of all its tokens, also to itself


def planned(way: str, ep_size: int, world_size: int = 8) -> WorldFacts:
    return plan(partial(choosing, way, ep_size, num_experts=world_size), world_size).worlds[0]


@pytest.mark.parametrize("way", WAYS)
def test_the_all_to_alls_of_tokens_are_counted_on_the_mesh_of_the_experts(way: str):
    world = planned(way, 4)
    found = [item for item in world.collectives if item.kind == "all-to-all"]
    assert len(found) == 2 * 2 * 2, "in each of two blocks, there and back, forward and backward"
    assert {(item.num_ranks, item.nbytes, item.sent) for item in found} == {(4, 4 * SENT, SENT * 3 // 4)}
    issues = [event for event in world.events if isinstance(event, Issue) and event.kind == "all-to-all"]
    assert {tuple(event.ranks) for event in issues} == {(0, 1, 2, 3)}
    assert Counter(event.phase for event in issues) == {"forward": 4, "backward": 4}


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_holds_its_part_of_the_experts(way: str):
    experts, rest = 2 * 2 * 8 * 64 * 256 * 4, 2 * 8 * 64 * 4 + (2 * 512 * 64 + 512) * 4
    for ep_size in (2, 4, 8):
        world = planned(way, ep_size)
        assert world.peak.bytes_by_kind["parameters"] == pytest.approx((experts + rest) / 8, rel=0.01)
        # What other ranks with the same part have is gathered, once in forward and once in backward; no more.
        gathers = [item for item in world.collectives if (item.kind, item.num_ranks) == ("all-gather", 8 // ep_size)]
        assert sum(item.nbytes for item in gathers) == (2 * experts // ep_size if ep_size < 8 else 0)


def test_all_to_alls_take_the_time_of_the_mesh_s_own_network():
    """A node has 8 ranks: 8 experts' parts inside it, or over two nodes."""
    network, device = PRESETS["h100"].network, PRESETS["h100"].device
    predicted, expected = [], []
    for ep_size in (8, 16):
        events = planned("c10d", ep_size, 16).events
        own = [event for event in events if not isinstance(event, Issue) or event.kind == "all-to-all"]
        predicted.append(schedule(own, device, network))
        sent = SENT - SENT // ep_size
        expected.append(8 * network.seconds("all-to-all", 0, range(ep_size), sent))
    assert [times.communication for times in predicted] == pytest.approx(expected)
    assert predicted[1].exposed > predicted[0].exposed > 0


def test_settings_of_a_mixture_are_compared():
    found = tune(partial(choosing, "functional", 8, False), 16, "h100")
    strategies = {result.setting.strategy for result in found.results}
    assert strategies >= {"zero3", "zero2", "hybrid", "hfsdp"}
    for result in found.results:
        moved = [event for event in result.events if isinstance(event, Issue) and event.kind == "all-to-all"]
        assert len(moved) == 8 and {len(event.ranks) for event in moved} == {8}
    (why,) = {item.why.partition(":")[0] for item in found.rejected}
    assert why == "MisuseError", "those that no rank can share the experts by"
    # Of experts there are as many copies as ranks hold the same part.
    least = min(result.peak for result in found.results)
    tight = tune(partial(choosing, "functional", 8, False), 16, "h100", max_memory=int(1.2 * least) + (2 << 30))
    assert len(tight.results) == len(found.results)


def test_numbers_of_tokens_that_depend_on_the_router_are_refused():
    def factory():
        block, mesh = Block(), init_device_mesh("cpu", (2, 4), mesh_dim_names=("fsdp", "ep"))
        spread_over(block, mesh["ep"])
        fully_shard(block, mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)))
        return block, lambda model: model(torch.ones(4, DIM)).sum()

    with pytest.raises(RuntimeError, match="needs elements of a tensor that a dry run does not compute"):
        plan(factory, 8)


class Parallel(nn.Module):
    """Calls collectives itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        dist.all_reduce(x.detach().sum())
        parts = [torch.empty_like(x) for _ in range(4)]
        dist.all_gather(parts, x.detach())
        gathered = functional.all_gather_tensor(x.detach(), 0, dist.group.WORLD)
        summed = functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD)
        summed += functional.all_reduce(x.detach(), "sum", dist.group.WORLD)
        return x + summed


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_other_collectives_of_a_model_are_counted_too():
    def factory():
        return fully_shard(Parallel()), lambda model: model(torch.ones(4, 8)).sum()

    (world,) = plan(factory, 4).worlds
    own = Counter((item.kind, item.nbytes) for item in world.collectives if item.group != "(root)")
    assert own == {("all-reduce", 4): 1, ("all-reduce", 128): 1, ("all-gather", 512): 2, ("reduce-scatter", 512): 1}

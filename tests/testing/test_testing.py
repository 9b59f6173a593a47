"""``fsdp_compose.testing``, as users call it. (What it does when ranks fail, hang or die: test_harness.)"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import fully_shard
from fsdp_compose.testing import (
    Ranks,
    RanksFailed,
    assert_trains_like_unsharded,
    record_collectives,
    run_on_ranks,
    simulated_ranks,
)
from tests.harness import distributed, preload

preload(__name__)


def rank_and(number: int) -> tuple[int, int]:
    return dist.get_rank(), number * dist.get_world_size()


def fails_on_the_last_rank() -> None:
    assert dist.get_rank() + 1 < dist.get_world_size()


def gives_what_cannot_be_sent() -> object:
    return lambda: None


def test_functions_run_on_ranks_and_give_back_what_they_return():
    assert run_on_ranks(2, rank_and, 10) == [(0, 20), (1, 20)]
    with Ranks(2) as ranks:
        for number in (1, 2):
            assert ranks.run(rank_and, number) == [(0, 2 * number), (1, 2 * number)]
        with pytest.raises(RanksFailed, match=r"gives_what_cannot_be_sent: failed on ranks \[0, 1\] of 2(?s:.*)pickle"):
            ranks.run(gives_what_cannot_be_sent)
        with pytest.raises(RanksFailed, match="start new ones"):
            ranks.run(rank_and, 1)
    with pytest.raises(RanksFailed, match=r"fails_on_the_last_rank: failed on ranks \[1\] of 2(?s:.*)= rank 1 ="):
        run_on_ranks(2, fails_on_the_last_rank)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def shard(model: nn.Module) -> None:
    fully_shard(model[0])
    fully_shard(model)


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def sum_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum() / 12


class Forgets(nn.Linear):
    """Trains on this rank's rows alone: what a gradient that is not reduced looks like."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.shape[0] == 4 else super().forward(x).detach().requires_grad_()


@distributed(world_size=2)
def test_sharded_training_is_compared_with_unsharded_training():
    generator = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(4, 4, generator=generator), "y": torch.randn(4, 3, generator=generator)} for _ in "ab"]
    assert_trains_like_unsharded(net(), shard, batches, mean_loss)
    assert_trains_like_unsharded(net(), shard, batches, mean_loss, lambda params: torch.optim.AdamW(params, lr=1e-3))
    with pytest.raises(AssertionError, match="the loss of step 0"):
        assert_trains_like_unsharded(net(), shard, batches, sum_loss)
    wrong = net()
    wrong[2] = Forgets(8, 3)
    with pytest.raises(AssertionError, match=re.escape("after step 0, the gradient of 0.weight: None")):
        assert_trains_like_unsharded(wrong, shard, batches, mean_loss)
    with pytest.raises(ValueError, match=r"a batch of shape \(3,\) cannot be split equally among 2 ranks"):
        assert_trains_like_unsharded(net(), shard, [torch.ones(3)], mean_loss)


def test_one_process_plays_one_of_many_ranks():
    with simulated_ranks(512, rank=511):
        model = net()
        shard(model)
        with record_collectives(model) as collectives:
            model(torch.randn(2, 4)).sum().backward()
    assert sum(line.startswith("reduce-scatter") for line in collectives) == 2, collectives

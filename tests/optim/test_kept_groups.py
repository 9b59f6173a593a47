"""Optimizers that write to local tensors, where groups stay gathered until a step: every rank gathers again, also one
that holds nothing of what was stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

from fsdp_compose import declare_blockwise, fully_shard, set_reshard_after_backward
from fsdp_compose.core.flat import local_of
from fsdp_compose.optim import Matrixwise, Muon, note_write_of_all_ranks
from tests.harness import distributed
from tests.training import full_values


class ByHand(torch.optim.Optimizer):
    """Gradient descent on local tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in [item for item in group["params"] if item.grad is not None]:
                local_of(param).sub_(local_of(param.grad), alpha=group["lr"])


class InBlocks(ByHand):
    pass


declare_blockwise(InBlocks, 1)


class Saying(ByHand):
    def step(self, closure: Any = None) -> None:
        super().step()
        note_write_of_all_ranks([param for group in self.param_groups for param in group["params"]])


def descent(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


MADE: dict[str, Callable[[Any], Any]] = {
    "Muon": lambda params: Muon(params, lr=0.1, ns_dtype=torch.float64),
    "Muon's AdamW": lambda params: Muon(params, lr=0.1, algorithm="adamw"),
    "Matrixwise": lambda params: Matrixwise(params, descent),
    "declared": InBlocks,
    "saying so": Saying,
}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(16, 16, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def trained(model: Any, params: Any, make: Callable[[Any], Any]) -> None:
    optimizer = make(params)
    for step in range(3):
        model(torch.full((2, 16), 1.0 + step, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("name", MADE)
@distributed(world_size=(1, 2, 3))
def test_groups_that_stay_gathered_follow_the_step(name):
    """Only one of two matrices is trained: of the others' first half, or last third, ranks hold nothing."""
    for kept in ("zero1", "zero2", "reshard_after_backward"):
        for which in ("first", "second"):
            model, expected = Chain(), Chain()
            trained(expected, [getattr(expected, which).weight], MADE[name])
            fully_shard(model, **({} if kept.startswith("reshard") else {"strategy": kept}))
            if kept.startswith("reshard"):
                set_reshard_after_backward(model, False)
            trained(model, [getattr(model, which).weight], MADE[name])
            for fqn, value in full_values(model).items():
                torch.testing.assert_close(value, expected.get_parameter(fqn).detach(), msg=f"{kept} {which} {fqn}")

"""Inputs and outputs that are not plain tensors: nested-jagged ones, and generators that compute after forward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from fsdp_compose import fully_shard, functional_mode
from tests.harness import distributed
from tests.training import assert_gradients_match

DIM = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, [2, DIM // 2]).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("mode", ["default", "functional"])
@distributed(world_size=2)
def test_jagged_inputs_and_outputs(mode: str) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Attention(), nn.Linear(DIM, DIM), Attention())
    model = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for requires_grad in (False, True):
        parts = [torch.randn(n + dist.get_rank(), DIM) for n in (2, 5, 3)]
        inputs = [torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=requires_grad) for _ in "ab"]
        with functional_mode(model) if mode == "functional" else nullcontext():
            outputs = [model(inputs[0]), reference(inputs[1])]
        for output in outputs:
            output.values().square().mean().backward()
        torch.testing.assert_close(outputs[0].values(), outputs[1].values())
        if requires_grad:
            torch.testing.assert_close(inputs[0].grad.values(), inputs[1].grad.values())
    for param in reference.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
    assert_gradients_match(model, reference)


class Lazy(nn.Linear):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(2):
            x = super().forward(x)
            yield x


class Expression(nn.Linear):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        linear = super().forward
        return (linear(row) for row in x)


class Caller(nn.Module):
    def __init__(self, lazy: nn.Module) -> None:
        super().__init__()
        self.enter, self.lazy = nn.Linear(DIM, DIM), lazy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(item.sum() for item in self.lazy(self.enter(x)))


@pytest.mark.filterwarnings("ignore:.*in which no output that requires grad could be found")
@pytest.mark.parametrize("grad", [False, True])
@distributed(world_size=2)
def test_a_generator_that_computes_after_forward_is_refused_by_name(grad: bool) -> None:
    for kind in (Lazy, Expression):
        model = Caller(kind(DIM, DIM))
        fully_shard(model.lazy)
        fully_shard(model)
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match=r"lazy\.\w+ of the fully_shard group lazy"),
        ):
            model(torch.randn(2, DIM))

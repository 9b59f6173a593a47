"""torchao's optimizers whose state has 8 or 4 bits, on sharded parameters and on flat views: they train as unsharded,
and their state is quantised where each rank has whole blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

from fsdp_compose import declare_elementwise, flat_parameters, fully_shard
from tests.harness import distributed
from tests.training import local_part, mean_over_ranks

OPTIMIZERS: dict[str, Any] = {item.__name__: item for item in (AdamW8bit, AdamW4bit, AdamWFp8)}
BLOCK = 256  # what they quantise together: 256, 128 (AdamW4bit), 256
WAYS = {
    "sharded": lambda model: [*model.parameters()],
    "flat views": flat_parameters,
    "local flat views": lambda model: flat_parameters(model, local=True),
}


def train(name: str, way: str, bias: bool, granularity: Any, steps: int) -> tuple[Any, list[Any]]:
    """Losses of both agree at each step; the optimizer, and what it trains."""
    declare_elementwise(OPTIMIZERS[name])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 320, bias=bias), nn.Tanh(), nn.Linear(320, 64, bias=bias))
    reference = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        fully_shard(layer, granularity=granularity)
    fully_shard(model)
    params = WAYS[way](model)
    optimizers = [OPTIMIZERS[name](params, lr=3e-3), OPTIMIZERS[name](reference.parameters(), lr=3e-3)]
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(24, 64, generator=generator), torch.randn(24, 64, generator=generator)
    losses = []
    for _ in range(steps):
        loss = (model(local_part(x)) - local_part(y)).square().mean()
        expected = (reference(x) - y).square().mean()
        for item in (loss, expected):
            item.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(mean_over_ranks(loss)))
        assert losses[-1] == pytest.approx(expected.item(), rel=0.01)
    assert losses[-1] < 0.9 * losses[0]
    return optimizers[0], params


def state_classes(optimizer: Any, param: Any) -> set[str]:
    states = [optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")]
    return {type(getattr(item, "_local_tensor", item)).__name__ for item in states}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=2)
def test_they_train_as_unsharded_with_quantised_state(name, way):
    with torch.compiler.set_stance("force_eager"):
        optimizer, params = train(name, way, bias=False, granularity=None, steps=12)
    assert all("OptimState" in cls for param in params for cls in state_classes(optimizer, param))


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=3)
def test_granularity_keeps_blocks_whole(name):
    with torch.compiler.set_stance("force_eager"):
        optimizer, params = train(name, "sharded", bias=True, granularity=lambda fqn, param: BLOCK, steps=12)
    for param in params:
        local = param.to_local().numel()
        assert param.ndim == 1 or local % BLOCK == 0
        if param.ndim == 2 and local >= 4096:
            assert all("OptimState" in cls for cls in state_classes(optimizer, param))


@distributed(world_size=2)
def test_a_shard_that_is_no_whole_blocks_keeps_exact_state():
    with torch.compiler.set_stance("force_eager"):
        optimizer, params = train("AdamW8bit", "flat views", bias=True, granularity=None, steps=12)
    assert {cls for param in params for cls in state_classes(optimizer, param)} == {"Tensor"}


@distributed(world_size=2, timeout=300)
def test_compiled_as_they_come():
    train("AdamW8bit", "sharded", bias=False, granularity=None, steps=8)

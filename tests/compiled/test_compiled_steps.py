"""``torch.compile(optimizer.step)`` in a process that has sharded a model: for that model, and for others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

from fsdp_compose import flat_parameters, fully_shard
from tests import harness
from tests.harness import fake_process_group
from tests.models import Net, inputs, shard_layers
from tests.training import adamw, assert_close, local_part, mean_square, pair, whole

distributed = functools.partial(harness.distributed, timeout=120)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Counted:
    """A backend that counts its graphs and their operations."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.graphs: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        self.graphs.append(len(graph.graph.nodes))
        return graph


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], share: Any = None) -> None:
    for x in inputs(3):
        mean_square(model, share(x) if share else x).backward()
        step()
        optimizer.zero_grad()


def sharded_parameters(model: nn.Module) -> Any:
    return model.parameters()


def local_flat_views(model: nn.Module) -> Any:
    return flat_parameters(model, local=True)


def flat_in_two_groups(model: nn.Module) -> Any:
    return [
        {"params": flat_parameters(model, lambda _, p: p.ndim > 1), "weight_decay": 0.1},
        {"params": flat_parameters(model, lambda _, p: p.ndim <= 1)},
    ]


def test_compiled_step_of_an_unsharded_model_is_as_if_nothing_were_sharded():
    with fake_process_group(rank=0, world_size=1):
        other = fully_shard(nn.Linear(3, 3))
        first = torch.optim.SGD(flat_parameters(other), lr=0.1)
        other(torch.ones(2, 3)).sum().backward()
        first.step()  # every hook is there, and has run
        model, reference = pair(Net(1))
        counted, optimizer = Counted(), adamw(model.parameters())
        train(model, optimizer, torch.compile(optimizer.step, backend=counted))
        optimizer = adamw(reference.parameters())
        train(reference, optimizer, optimizer.step)
        assert counted.graphs, "nothing was compiled"
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(a.detach(), b.detach(), 1e-6, "a parameter")


@pytest.mark.parametrize(
    ("parameters", "make"),
    [(sharded_parameters, adamw), (flat_parameters, adamw), (local_flat_views, sgd), (flat_in_two_groups, sgd)],
)
@distributed(world_size=2)
def test_compiled_step_of_a_sharded_model(parameters, make):
    torch.manual_seed(0)
    model, eager = pair(Net(1))
    shard_layers(model)
    shard_layers(eager)
    counted, optimizer = Counted(), make(parameters(model))
    train(model, optimizer, torch.compile(optimizer.step, backend=counted), local_part)
    optimizer = make(parameters(eager))
    train(eager, optimizer, optimizer.step, local_part)
    assert counted.graphs, "nothing was compiled"
    ours, theirs = (whole(item, lambda param: param, Net(1)) for item in (model, eager))
    for name, expected in theirs.items():
        assert_close(ours[name], expected, 1e-6, name)


@distributed(world_size=2)
def test_a_compiled_step_between_forward_and_backward_is_noticed():
    model = shard_layers(Net())
    optimizer = sgd(flat_parameters(model))
    step = torch.compile(optimizer.step, backend="eager")
    (x,) = inputs()
    mean_square(model, x).backward()
    loss = mean_square(model, x)
    step()
    with pytest.raises(RuntimeError, match="were modified"):
        loss.backward()


@distributed(world_size=2)
def test_a_compiled_step_of_an_optimizer_that_is_refused():
    model = shard_layers(Net())
    optimizer = torch.optim.Adafactor(flat_parameters(model))
    mean_square(model, next(inputs())).backward()
    with pytest.raises(Exception, match="Adafactor cannot train flat_parameters"):
        torch.compile(optimizer.step, backend="eager")()


@distributed(world_size=2)
def test_a_step_that_was_compiled_before_sharding_trains_the_sharded_parameters():
    torch.manual_seed(0)
    model, reference = pair(Net(1))
    optimizer = sgd(model.parameters())
    step = torch.compile(optimizer.step, backend=Counted())
    train(model, optimizer, step)
    shard_layers(model)
    train(model, optimizer, step, local_part)
    optimizer = sgd(reference.parameters())
    train(reference, optimizer, optimizer.step)
    train(reference, optimizer, optimizer.step)
    ours = whole(model, lambda param: param, reference)
    for name, expected in reference.named_parameters():
        assert_close(ours[name], expected.detach(), 1e-5, name)

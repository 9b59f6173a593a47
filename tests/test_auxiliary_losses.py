"""Losses that a module does not return: kept somewhere in forward, in some iterations only, from a late one on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from fsdp_compose import flat_parameters, fully_shard, set_functional_mode
from tests.harness import distributed

REFUSED = "Cannot access data pointer|while they are sharded|out of bounds for storage of size 0"
_hidden: list[torch.Tensor] = []


class Layer(nn.Module):
    """Has an auxiliary loss in some steps, which it gives to ``keep``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.inner = nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Tanh())
        self.aux: torch.Tensor | None = None
        self.by_name: dict[str, Any] = {"aux": None, "deeper": {"aux": None}}
        self.all: list[torch.Tensor] = []
        self.state = SimpleNamespace(aux=None, size=4)
        self.keep: Callable[[Layer, torch.Tensor, int], Any] = lambda *_: None
        self.step = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        y = self.second(self.inner(self.first(x)))
        if self.step in (4, 5, 7):
            self.keep(self, self.second(torch.relu(self.first(x))).pow(2).mean(), self.step)
        return y


# How a loss is kept, and how the training loop takes it.
KEEPS: dict[str, tuple[Callable[[Layer, torch.Tensor, int], Any], Callable[[Layer, int], Any]]] = {
    "attribute": (lambda m, aux, _: setattr(m, "aux", aux), lambda m, _: m.aux),
    "attribute by step": (lambda m, aux, i: setattr(m, f"aux{i}", aux), lambda m, i: vars(m).pop(f"aux{i}", None)),
    "attribute of an inner module": (
        lambda m, aux, _: setattr(m.inner, "aux", aux),
        lambda m, _: vars(m.inner).pop("aux", None),
    ),
    "dict": (lambda m, aux, _: m.by_name.update(aux=aux), lambda m, _: m.by_name["aux"]),
    "nested dict": (lambda m, aux, _: m.by_name["deeper"].update(aux=aux), lambda m, _: m.by_name["deeper"]["aux"]),
    "list": (lambda m, aux, _: m.all.append(aux), lambda m, _: m.all.pop() if m.all else None),
    "object": (lambda m, aux, _: setattr(m.state, "aux", aux), lambda m, _: m.state.aux),
    "global": (lambda _, aux, __: _hidden.append(aux), lambda *_: _hidden.pop() if _hidden else None),
}


def train(how: str, sharding: str, alone: bool) -> list[torch.Tensor]:
    keep, take = KEEPS[how]
    torch.manual_seed(0)
    layer = Layer()
    layer.keep = keep
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2))
    if sharding != "unsharded":
        fully_shard(layer)
        fully_shard(model)
        if sharding == "functional":
            set_functional_mode(model, True)
    params = flat_parameters(model) if sharding == "flat" else model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(9):
        torch.manual_seed(step)
        loss, aux = model(torch.randn(3, 4)).pow(2).mean(), take(layer, step)
        layer.aux = layer.by_name["aux"] = layer.by_name["deeper"]["aux"] = layer.state.aux = None
        if aux is not None:
            loss = aux if alone else loss + aux
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(p.full_tensor() if sharding != "unsharded" else p).detach() for p in model.parameters()]


@pytest.mark.parametrize("alone", [False, True], ids=["added", "alone"])
@pytest.mark.parametrize("sharding", ["default", "flat", "functional"])
@distributed(world_size=2)
def test_loss_kept_from_the_fifth_forward_on_trains_like_the_unsharded_model(sharding, alone):
    for how in KEEPS:
        if how == "global" and sharding != "functional":
            continue
        expected = train(how, "unsharded", alone)
        for param, other in zip(train(how, sharding, alone), expected, strict=True):
            torch.testing.assert_close(param, other, msg=lambda text, how=how: f"{how}: {text}")


@distributed(world_size=2)
def test_loss_that_cannot_be_found_raises_and_publishes_nothing():
    torch.manual_seed(0)
    layer = Layer()
    layer.keep = KEEPS["global"][0]
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2))
    fully_shard(layer)
    fully_shard(model)
    layer.step = 3
    loss = model(torch.randn(3, 4)).sum()
    with pytest.raises(RuntimeError, match=REFUSED):
        (_hidden.pop() + 0 * loss.detach()).backward()
    assert all(param.grad is None for param in model.parameters())


@distributed(world_size=2)
def test_losses_that_are_never_cleared_are_hooked_once():
    layer = Layer()
    layer.keep = KEEPS["list"][0]
    model = nn.Sequential(nn.Linear(4, 4), layer)
    fully_shard(model)
    for _ in range(8):
        model(torch.randn(3, 4)).sum().backward()
    assert len(layer.all) == 3
    assert [len(loss._backward_hooks) for loss in layer.all] == [1, 1, 1]

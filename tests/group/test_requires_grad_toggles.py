"""requires_grad that changes inside a training step: as autograd has it for the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import fully_shard, no_sync, set_functional_mode
from tests.harness import distributed


class Net(nn.Module):
    """Three layers; ``before`` and ``after`` are called around the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.before: Callable[[Net], object] = lambda _: None
        self.after: Callable[[Net], object] = lambda _: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        self.before(self)
        h = torch.tanh(self.b(h))
        self.after(self)
        return self.c(h)


Call = Callable[[Net], object]
Seen = list[tuple[torch.Tensor | None, torch.Tensor, bool]]  # gradient, parameter and requires_grad, of each step
NOTHING: Call = lambda _: None  # noqa: E731
# By step: what happens before the second layer, after it, between forward and backward, and after backward.
PROGRAMS: dict[str, dict[int, tuple[Call, Call, Call, Call]]] = {
    "frozen before backward, then thawed": {
        1: (NOTHING, NOTHING, lambda m: m.b.requires_grad_(False), lambda m: m.b.requires_grad_(True)),
    },
    "frozen before backward, for good": {1: (NOTHING, NOTHING, lambda m: m.b.requires_grad_(False), NOTHING)},
    "weight frozen before backward": {1: (NOTHING, NOTHING, lambda m: m.b.weight.requires_grad_(False), NOTHING)},
    "frozen, and thawed before backward": {
        0: (NOTHING, NOTHING, NOTHING, lambda m: m.b.requires_grad_(False)),
        2: (NOTHING, NOTHING, lambda m: m.b.requires_grad_(True), NOTHING),
    },
    "all frozen before backward": {
        1: (NOTHING, NOTHING, lambda m: m.requires_grad_(False), lambda m: m.requires_grad_(True)),
    },
    "weight frozen before its layer runs": {
        1: (lambda m: m.b.weight.requires_grad_(False), NOTHING, NOTHING, NOTHING),
        3: (lambda m: m.b.weight.requires_grad_(True), NOTHING, NOTHING, NOTHING),
    },
    "layer frozen before it runs": {
        1: (lambda m: m.b.requires_grad_(False), NOTHING, NOTHING, NOTHING),
        3: (lambda m: m.b.requires_grad_(True), NOTHING, NOTHING, NOTHING),
    },
    "weight frozen after its layer has run": {
        1: (NOTHING, lambda m: m.b.weight.requires_grad_(False), NOTHING, NOTHING),
        3: (NOTHING, lambda m: m.b.weight.requires_grad_(True), NOTHING, NOTHING),
    },
    "two networks in turn": {
        i: (NOTHING, NOTHING, NOTHING, lambda m, i=i: (m.a.requires_grad_(i % 2 == 0), m.c.requires_grad_(i % 2 == 1)))
        for i in range(5)
    },
}


def train(program: str, sharding: str, accumulates: bool = False) -> Seen:
    torch.manual_seed(0)
    model = Net()
    if sharding not in ("unsharded", "root"):
        for layer in (model.a, model.b, model.c):
            fully_shard(layer)
    if sharding != "unsharded":
        fully_shard(model)
        set_functional_mode(model, sharding == "functional")

    def full(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if sharding == "unsharded" else tensor.full_tensor()).detach().clone()

    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(5):
        torch.manual_seed(step)
        model.before, model.after, before_backward, at_the_end = PROGRAMS[program].get(step, (NOTHING,) * 4)
        with no_sync(model) if accumulates and sharding != "unsharded" else nullcontext():
            loss = model(torch.randn(3, 4)).pow(2).mean()
            before_backward(model)
            loss.backward()
        if accumulates and (loss := model(torch.randn(3, 4)).pow(2).mean()).requires_grad:
            loss.backward()
        seen += [(None if p.grad is None else full(p.grad), full(p), p.requires_grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        at_the_end(model)
    return seen


def assert_same(program: str, found: Seen, expected: Seen, num_params: int) -> None:
    pairs = zip(found, expected, strict=True)
    for i, ((grad, param, flag), (grad_expected, param_expected, flag_expected)) in enumerate(pairs):
        where = f"{program}: parameter {i % num_params} at {i // num_params}"
        assert flag == flag_expected, where
        assert (grad is None) == (grad_expected is None), where
        torch.testing.assert_close(param, param_expected, msg=where)
        if grad is not None:
            torch.testing.assert_close(grad, grad_expected, msg=where)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("sharding", ["root", "layers", "functional"])
@distributed(world_size=2)
def test_gradients_and_parameters_are_those_of_the_unsharded_model(sharding, accumulates):
    """``accumulates``: inside ``no_sync``, and then the same once more."""
    for program in PROGRAMS:
        assert_same(program, train(program, sharding, accumulates), train(program, "unsharded", accumulates), 6)


class Toggling(nn.Module):
    """Sets ``requires_grad`` of its own parameters inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.flags: tuple[bool, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param, flag in zip(self.parameters(), self.flags, strict=False):
            param.requires_grad_(flag)
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class LearnsInside(nn.Module):
    """Each layer learns by the backward of a loss of its own, inside forward; ``before`` is called before each of them,
    ``again`` says whether the first layer runs, and learns, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Toggling() for _ in range(3)), nn.Linear(4, 2)
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.layers[: self.again]]:
            y = layer(x.detach())
            if y.requires_grad:
                y.square().mean().backward()
            x = y
        return self.head(x.detach())


THAWED, FROZEN, WEIGHT = (True,) * 4, (False,) * 4, (True, False, False, False)
# By step: the flags that each layer sets; and whether all are frozen before.
INSIDE: dict[str, dict[int, tuple[list[tuple[bool, ...]], bool]]] = {
    "thawed in its own forward": {1: ([THAWED, (), WEIGHT], True), 3: ([(), WEIGHT, WEIGHT], True)},
    "frozen in its own forward": {0: ([FROZEN, WEIGHT, ()], False), 2: ([(), (), FROZEN], False)},
    "in turn": {i: ([THAWED if (i + j) % 2 else FROZEN for j in range(3)], False) for i in range(5)},
    "a weight, of frozen ones": {i: ([WEIGHT, (), (False, False, True)], i == 0) for i in range(4)},
}


def learn_inside(program: str, sharding: str) -> Seen:
    torch.manual_seed(0)
    model = LearnsInside()
    if sharding == "layers":
        for layer in model.layers:
            fully_shard(layer)
    if sharding == "halves":
        for layer in model.layers:
            fully_shard(layer.second)
    if sharding != "unsharded":
        fully_shard(model)

    def full(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if sharding == "unsharded" else tensor.full_tensor()).detach().clone()

    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(5):
        torch.manual_seed(step)
        flags, are_frozen = INSIDE[program].get(step, ([(), (), ()], False))
        if are_frozen:
            model.requires_grad_(False)
        model.again = step == 4
        for layer, new in zip(model.layers, flags, strict=True):
            layer.flags = new
        has_sync = step % 2 == 1 or sharding == "unsharded"
        with nullcontext() if has_sync else no_sync(model):
            loss = model(torch.randn(3, 4)).pow(2).mean()
            if loss.requires_grad:
                loss.backward()
        seen += [(None, full(p), p.requires_grad) for p in model.parameters()]
        if step % 2 == 1:
            seen += [(None if p.grad is None else full(p.grad), full(p), p.requires_grad) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("sharding", ["root", "layers", "halves"])
@distributed(world_size=2)
def test_backward_inside_forward_of_what_that_forward_has_frozen_or_thawed(sharding):
    for program in INSIDE:
        assert_same(program, learn_inside(program, sharding), learn_inside(program, "unsharded"), 14)


@pytest.mark.parametrize("when", ["before forward", "before backward"])
@distributed(world_size=2)
def test_weight_that_one_rank_alone_freezes_is_an_error_on_every_rank(when):
    model = Net()
    fully_shard(model.b)
    fully_shard(model)
    for _ in range(2):  # so that the next forward does not end with an exchange
        model(torch.ones(3, 4)).sum().backward()
    model.zero_grad()
    if when == "before forward" and dist.get_rank() == 1:
        model.b.weight.requires_grad_(False)
    loss = model(torch.ones(3, 4)).sum()
    if when == "before backward" and dist.get_rank() == 1:
        model.b.weight.requires_grad_(False)
    with pytest.raises(
        RuntimeError, match=r"a change of requires_grad in b \(now frozen: b\.weight\) on rank 1.* on every rank"
    ) as error:
        loss.backward()
    assert "optional" not in str(error.value)
    assert all(param.grad is None for param in model.parameters())


@distributed(world_size=1)
def test_an_optional_group_follows_what_forward_sets_too():
    """Alone, a rank runs it as any other group."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.trains = nn.Linear(4, 4), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layer.weight.requires_grad_(self.trains)
            return self.layer(x)

    model = Model()
    fully_shard(model.layer, optional=True)
    fully_shard(model)
    for model.trains in (True, False, True):
        model(torch.ones(2, 4)).sum().backward()
        assert (model.layer.weight.grad is not None) == model.trains
        assert model.layer.bias.grad is not None
        model.zero_grad()

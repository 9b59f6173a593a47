"""Losses that a module does not return: kept somewhere in forward, in some iterations only, from a late one on."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import flat_parameters, fully_shard, set_functional_mode
from fsdp_compose.core.group.registry import get_state
from tests.harness import distributed
from tests.training import assert_same_gradients

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
        self.steps = itertools.count()  # nothing but what is kept changes in the module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = next(self.steps)
        y = self.second(self.inner(self.first(x)))
        if step in (4, 5, 7):
            self.keep(self, self.second(torch.relu(self.first(x))).pow(2).mean(), step)
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
    layer.steps = itertools.count(4)
    loss = model(torch.randn(3, 4)).sum()
    with pytest.raises(RuntimeError, match=REFUSED):
        (_hidden.pop() + 0 * loss.detach()).backward()
    assert all(param.grad is None for param in model.parameters())


# Losses whose backward reads no parameter, only their sizes.
WITHOUT_VALUES: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "bias": lambda linear, x: (x.detach() + linear.bias).sum(),
    "weight": lambda linear, _: linear.weight.mean() * 3,
    "both, and the input": lambda linear, x: (x + linear.bias).mean() - linear.weight.t().sum(),
}


def train_on_hidden(
    loss_of: Callable[..., torch.Tensor], is_sharded: bool, how: str
) -> list[list[torch.Tensor | None]]:
    """Gradients of each step."""
    torch.manual_seed(0)
    layer = Layer()
    layer.keep = lambda layer, *_: _hidden.append(loss_of(layer.second, x.relu()))
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2))
    if is_sharded:
        fully_shard(layer)
        fully_shard(model)
    gradients: list[list[torch.Tensor | None]] = []
    for step in range(8):
        torch.manual_seed(step)
        x = torch.randn(4)
        loss = model(x).pow(2).mean()
        hidden = _hidden.pop() if _hidden else None
        if hidden is not None and how == "before":
            hidden.backward()
        elif hidden is not None:
            loss = hidden if how == "alone" else loss + hidden
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        gradients.append([g.full_tensor() if is_sharded and g is not None else g for g in grads])
        model.zero_grad()
    return gradients


@pytest.mark.parametrize("how", ["added", "before"])
@distributed(world_size=2)
def test_backward_past_all_hooks_that_reads_no_parameter_is_reduced_at_its_end(how):
    for name, loss_of in WITHOUT_VALUES.items():
        got, expected = (train_on_hidden(loss_of, is_sharded, how) for is_sharded in (True, False))
        for step, (ours, others) in enumerate(zip(got, expected, strict=True)):
            for i, (grad, other) in enumerate(zip(ours, others, strict=True)):
                where = (name, step, i)
                assert (grad is None) == (other is None), where
                if grad is not None:
                    torch.testing.assert_close(grad, other, msg=lambda text, where=where: f"{where}: {text}")


@distributed(world_size=2)
def test_backward_that_passes_no_hook_at_all_is_refused_by_the_next_forward():
    for loss_of in (WITHOUT_VALUES["bias"], WITHOUT_VALUES["weight"]):
        with pytest.raises(RuntimeError, match="group 1 without passing any of its module's outputs"):
            train_on_hidden(loss_of, True, "alone")


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


class Keeper(nn.Module):
    """Keeps a loss of its own when it is told to: as an attribute, in a list, or both."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), nn.ModuleList(inner)
        self.how, self.losses = "", []

    def forward(self, x):
        y = self.linear(x).tanh()
        if "attribute" in self.how:
            self.aux = self.linear(y).square().mean()
        if "list" in self.how:
            self.losses.append(self.linear(2 * y).square().mean())
        for module in self.inner:
            y = module(y)
        return x + y


# By step: what each keeper does, how often the model is run, and whether an evaluation, or an exception, comes before.
LATE_KEEPS = {
    5: ({2: "attribute"}, 1, ""),
    6: ({2: "attribute"}, 2, ""),
    9: ({0: "list", 3: "list attribute"}, 1, "evaluation"),
    13: ({1: "list"}, 2, ""),
    14: ({1: "attribute", 4: "list"}, 1, "exception"),
    19: ({0: "attribute", 1: "list", 2: "list", 3: "attribute", 4: "attribute list"}, 2, "evaluation"),
    20: ({}, 1, ""),
}


def late_keeps(is_sharded: bool, is_flat: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    keepers = [Keeper() for _ in range(3)]
    keepers.append(Keeper(keepers[1], keepers[2]))
    keepers.append(keepers[0])  # a module that is run twice
    model = nn.Sequential(keepers[0], keepers[3], keepers[4], nn.Linear(4, 2))
    if is_sharded:
        for keeper in keepers[:4]:
            fully_shard(keeper)
        fully_shard(model)
    params = flat_parameters(model) if is_flat and is_sharded else model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(22):
        torch.manual_seed(step)
        hows, num_runs, before = LATE_KEEPS.get(step, ({}, 1, ""))
        if before == "evaluation":
            with torch.no_grad():
                model(torch.randn(3, 4))
        if before == "exception":
            handle = model[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError), warnings.catch_warnings():
                model(torch.randn(3, 4))
            handle.remove()
        for i, how in hows.items():
            keepers[i].how = how
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was interrupted")
            loss = sum(model(torch.randn(3, 4)).square().mean() for _ in range(num_runs))
        for keeper in keepers:
            kept = [*keeper.losses, *([keeper.aux] if getattr(keeper, "aux", None) is not None else [])]
            loss = loss + sum(kept)
            keeper.losses, keeper.how = [], ""
            if hasattr(keeper, "aux"):
                del keeper.aux
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(p.full_tensor() if is_sharded else p).detach() for p in model.parameters()]


@pytest.mark.parametrize("is_flat", [False, True])
@distributed(world_size=2)
def test_losses_that_appear_late_here_and_there(is_flat):
    for param, other in zip(late_keeps(True, is_flat), late_keeps(False, is_flat), strict=True):
        torch.testing.assert_close(param, other)


@distributed(world_size=2)
def test_quiet_groups_are_looked_at_together_until_one_keeps_something():
    keepers = [Keeper() for _ in range(3)]
    model = fully_shard(nn.Sequential(*[fully_shard(keeper) for keeper in keepers]))
    kept = [get_state(keeper).swap.kept for keeper in keepers]
    for _ in range(5):
        model(torch.randn(3, 4)).sum().backward()
    assert [item.is_unchanged for item in kept] == [True, True, True]
    assert not get_state(model).swap.kept.is_unchanged
    keepers[1].how = "attribute"
    loss = model(torch.randn(3, 4)).sum()
    assert len(keepers[1].aux._backward_hooks) == 1
    (loss + keepers[1].aux).backward()
    assert [item.is_unchanged for item in kept] == [True, False, True]
    for _ in range(2):
        loss = model(torch.randn(3, 4)).sum()
        (loss + keepers[1].aux).backward()
    assert [item.is_unchanged for item in kept] == [True, False, True], "what keeps is looked at after each use"


class LearnsInside(nn.Module):
    """Runs the backward of what its part has kept, in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Keeper(), nn.Linear(4, 2)

    def forward(self, x):
        y = self.part(x)
        if self.part.how:
            self.part.aux.backward()
            del self.part.aux
        return self.head(y.detach())


@distributed(world_size=2)
def test_loss_that_a_quiet_group_keeps_for_a_backward_inside_forward():
    torch.manual_seed(0)
    twin = LearnsInside()
    model = copy.deepcopy(twin)
    fully_shard(model.part)
    fully_shard(model)
    for _ in range(6):
        model(torch.randn(3, 4)).sum().backward()
    model.zero_grad()
    model.part.how = twin.part.how = "attribute"
    with pytest.raises(RuntimeError, match=REFUSED):
        model(torch.randn(3, 4))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was interrupted")
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(3, 4)
            for net in (model, twin):
                net(x).square().mean().backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)


class KeepsFrozen(nn.Module):
    """A group that has frozen parameters only, around one that learns by a loss which the first keeps."""

    def __init__(self, keeps_from: int) -> None:
        super().__init__()
        self.learns, self.gate = nn.Linear(4, 4), nn.Linear(4, 1).requires_grad_(False)
        self.keeps_from, self.step = keeps_from, -1
        self.aux: torch.Tensor | None = None

    def forward(self, x):
        self.step += 1
        y = self.learns(x).tanh()
        self.aux = self.gate(y).square().mean() if self.step >= self.keeps_from else None
        return y.detach()


@pytest.mark.parametrize("keeps_from", [0, 1, 5])
@distributed(world_size=2)
def test_loss_that_a_frozen_group_keeps_of_one_inside_it(keeps_from):
    torch.manual_seed(0)
    twin = nn.Sequential(KeepsFrozen(keeps_from), nn.Linear(4, 2))
    model = copy.deepcopy(twin)
    fully_shard(model[0].learns)
    fully_shard(model[0])
    fully_shard(model)
    for step in range(8):
        torch.manual_seed(step)
        x = torch.randn(3, 4)
        for net in (model, twin):
            loss = net(x).square().mean()
            (loss if net[0].aux is None else loss + net[0].aux).backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), other.grad)


class RunsAgain(nn.Module):
    """Layers of the root's group, run again in backward, before a child that keeps a loss."""

    def __init__(self, use_reentrant: bool, output: str) -> None:
        super().__init__()
        self.first, self.second, self.keeper, self.head = nn.Linear(4, 4), nn.Linear(4, 4), Keeper(), nn.Linear(4, 2)
        self.keeper.how, self.output, self.use_reentrant = "attribute", output, use_reentrant

    def forward(self, x):
        y = checkpoint(self.second, self.first(x).relu(), use_reentrant=self.use_reentrant)
        y = self.head(self.keeper(y))
        return y.detach() if self.output == "detached" else y


@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=2)
def test_backward_that_runs_layers_of_the_root_again_past_its_outputs(use_reentrant):
    for output in ("detached", "kept", "kept in turn"):
        torch.manual_seed(0)
        twin = RunsAgain(use_reentrant, output)
        model = copy.deepcopy(twin)
        fully_shard(model.keeper)
        fully_shard(model)
        shown = []
        model.first.weight.register_hook(lambda _, model=model, shown=shown: shown.append(model.second.weight))
        for step in range(5):
            torch.manual_seed(step)
            x = torch.randn(3, 4)
            for net in (model, twin):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*no output that requires grad")
                    y = net(x)
                loss = net.keeper.aux + (y.square().mean() if output == "kept in turn" and step % 2 else 0)
                loss.backward()
            assert_same_gradients(model, twin, output, step)
        assert all(value is model.second.weight for value in shown), "hooks of gradients see sharded parameters"


class PassesBy(nn.Module):
    """``before`` comes first, then a layer of the outer group, then a child that keeps a loss; what is returned is
    ``detached`` or not. ``frozen``: the parts of which no parameter requires grad."""

    def __init__(self, frozen: str, is_detached: bool) -> None:
        super().__init__()
        self.before, self.inner, self.is_detached = nn.Linear(4, 4), Outer(), is_detached
        for part in (self.inner.layer, self.inner.keeper, self.inner.last):
            part.requires_grad_("all" not in frozen)
        self.inner.layer.requires_grad_("layer" not in frozen and "all" not in frozen)

    def forward(self, x):
        y = self.inner(self.before(x).tanh())
        return y.detach() if self.is_detached else y


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.keeper, self.last = nn.Linear(4, 4), Keeper(), nn.Linear(4, 2)
        self.keeper.how = "attribute"

    def forward(self, x):
        return self.last(self.keeper(self.layer(x).tanh()).detach())


FROZEN, GROUPS = ("none", "layer", "all"), ("all", "outer and keeper", "before and keeper", "keeper")


# Both ways to need no gradient, with every two of what is frozen, the groups, and whether they are resharded.
@pytest.mark.parametrize(
    ("frozen", "groups", "reshard_after_forward"),
    [(f, g, (None, True, False)[(i + j) % 3]) for i, f in enumerate(FROZEN) for j, g in enumerate(GROUPS)],
)
@distributed(world_size=2)
def test_loss_kept_inside_groups_whose_outputs_need_no_gradient(frozen, groups, reshard_after_forward):
    for is_detached in (False, True):
        torch.manual_seed(0)
        twin = PassesBy(frozen, is_detached)
        model = copy.deepcopy(twin)
        for name, part in (("before", model.before), ("keeper", model.inner.keeper), ("outer", model.inner)):
            if groups == "all" or name in groups:
                fully_shard(part, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        for step in range(6):
            torch.manual_seed(step)
            x = torch.randn(3, 4)
            for net in (model, twin):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*no output that requires grad")
                    y = net(x)
                loss = net.inner.keeper.aux + (y.square().mean() if y.requires_grad and step % 2 else 0)
                loss.backward()
            assert_same_gradients(model, twin, step)


@distributed(world_size=1)
def test_models_are_freed_with_their_last_reference_also_after_an_exception():
    for fails in (False, True):
        model = fully_shard(nn.Sequential(*[fully_shard(Keeper()) for _ in range(3)]))
        for _ in range(5):
            model(torch.randn(3, 4)).sum().backward()
        if fails:
            model[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(torch.randn(3, 4))
        gc.collect()
        gc.disable()
        reference = weakref.ref(model)
        del model
        assert reference() is None
        gc.enable()

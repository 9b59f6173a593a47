"""A backward inside the root's forward: forces, guidance, local losses, hooks that run ``autograd.grad``.

Each program runs on a sharded model and on an unsharded copy with this rank's data, whose gradients are averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    flat_parameters,
    fully_shard,
    functional_mode,
    no_sync,
)
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import distributed
from tests.internals import full_gradients
from tests.models import shard_layers

DIM = 4
MODES = ("default", "kept", "functional", "flat")

Output = tuple[torch.Tensor, ...]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    """Groups: the blocks, and the root with its own parameters at both ends."""

    recompute: bool | None = None

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.leave = nn.Linear(DIM, 1)

    def block(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None:
            return self.blocks[i](x)
        return checkpoint(self.blocks[i], x, use_reentrant=self.recompute)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for i in range(len(self.blocks)):
            x = self.block(i, x)
        return self.leave(torch.tanh(x)).square().mean()


def by_value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


class Forces(Net):
    def forward(self, x: torch.Tensor) -> Output:
        x = by_value(x)
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy, x, retain_graph=True)
        return energy, force * energy


class ForcesOfTheInput(Net):
    """The tensor that is differentiated by comes from outside."""

    def forward(self, x: torch.Tensor) -> Output:
        if not x.requires_grad:
            x.requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy, x, retain_graph=True)
        return energy, force * energy


class Guidance(Net):
    """A classifier, the last block, guides the input of the others; in the end also without gradients."""

    def forward(self, x: torch.Tensor) -> Output:
        for i in range(2):
            with torch.enable_grad():
                y = by_value(x)
                (direction,) = torch.autograd.grad(self.block(2, y).square().sum(), y)
            x = self.block(i, x + direction)
        return (self.leave(x).square().mean(),)


class LocalLosses(Net):
    """Each block is trained by a loss of its own, in the middle of the root's forward."""

    def forward(self, x: torch.Tensor) -> Output:
        x = self.enter(x)
        for i in range(len(self.blocks)):
            x = self.block(i, x.detach())
            self.leave(x).square().mean().backward()
        return (self.leave(x.detach()).square().mean(),)


class DeepSupervision(Net):
    """As ``LocalLosses``, and the graph of every loss is a part of that of the next."""

    def forward(self, x: torch.Tensor) -> Output:
        x = self.enter(x)
        for i in range(len(self.blocks)):
            x = self.block(i, x)
            self.leave(x).square().mean().backward(retain_graph=True)
        return (self.leave(x).square().mean(),)


class Greedy(Net):
    """All backwards run inside forward."""

    def forward(self, x: torch.Tensor) -> Output:
        for i in range(len(self.blocks)):
            x = self.block(i, x.detach())
            x.square().mean().backward()
        return (x.detach(),)


class SelfTrained(Block):
    """Its own loss inside its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.square().mean().backward(retain_graph=True)
        return y


class SelfTrainedAlone(Block):
    """Nothing outside ever hears of its graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x.detach())
        y.square().mean().backward()
        return y.detach()


class OfSelfTrained(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), SelfTrained(), SelfTrainedAlone()])

    def forward(self, x: torch.Tensor) -> Output:
        return (self.energy(x),)


class OnlySelfTrained(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SelfTrainedAlone(), SelfTrainedAlone()])

    def forward(self, x: torch.Tensor) -> Output:
        for i in range(len(self.blocks)):
            x = self.block(i, x)
        return (x,)


class OwnParameters(Net):
    """The inner backward reaches parameters of the root only, whose forward is running."""

    def forward(self, x: torch.Tensor) -> Output:
        y = self.enter(x)
        y.square().mean().backward(retain_graph=True)
        return (self.leave(self.block(0, y)).square().mean(),)


class OwnParametersAlone(Net):
    def forward(self, x: torch.Tensor) -> Output:
        y = self.enter(x)
        y.square().mean().backward()
        return (y.detach(),)


class Again(Net):
    """A block that is used on both sides of the inner backward, and twice before it."""

    def forward(self, x: torch.Tensor) -> Output:
        x = self.block(0, self.enter(x))
        y = self.block(0, x.detach())
        y.square().mean().backward()
        z = self.block(0, x)
        return (self.leave(self.block(1, z)).square().mean(),)


class AllAtOnce(Net):
    """Two inner backwards through the same nodes, in both orders of nodes and data."""

    def forward(self, x: torch.Tensor) -> Output:
        first = self.block(0, self.enter(x))
        second = self.block(1, first)
        second.square().mean().backward(retain_graph=True)
        first.square().mean().backward(retain_graph=True)
        return (self.leave(self.block(2, second)).square().mean(),)


class Recursive(Net):
    """The root calls itself."""

    def forward(self, x: torch.Tensor, depth: int = 2) -> Output:
        if depth:
            (inner,) = self(x * 0.5, depth - 1)
            inner.backward(retain_graph=True)
            return (self.energy(x + inner.detach()),)
        return (self.energy(x),)


NETS: dict[str, Callable[[], Net]] = {
    item.__name__: item
    for item in (
        Forces, ForcesOfTheInput, Guidance, LocalLosses, DeepSupervision, Greedy, OfSelfTrained, OnlySelfTrained,
        OwnParameters, OwnParametersAlone, Again, AllAtOnce, Recursive,
    )
}  # fmt: skip


def shard(model: nn.Module, mode: str, **options: Any) -> nn.Module:
    if mode == "kept":
        options["reshard_after_forward"] = False
    return shard_layers(model, **options)


class Twins:
    """A sharded model and an unsharded copy, that do the same."""

    def __init__(self, model: nn.Module, mode: str = "default", **options: Any) -> None:
        model = model.double()
        self.mode, self.reference = mode, copy.deepcopy(model)
        self.model = shard(model, mode, **options)
        params = flat_parameters(self.model) if mode == "flat" else self.model.parameters()
        self.optimizers = [torch.optim.SGD(params, lr=0.1), torch.optim.SGD(self.reference.parameters(), lr=0.1)]
        self.num_batches = 0

    def batch(self) -> torch.Tensor:
        self.num_batches += 1
        generator = torch.Generator().manual_seed(100 * self.num_batches + dist.get_rank())
        return torch.randn(3, DIM, generator=generator, dtype=torch.float64)

    def mode_of(self, model: nn.Module) -> Any:
        return functional_mode(self.model) if self.mode == "functional" and model is self.model else nullcontext()

    def step(self, program: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        """``program`` on both models; what it returns, gradients and parameters must be equal."""
        x = self.batch()
        with self.mode_of(self.model):
            ours = program(self.model, x.clone())
        theirs = program(self.reference, x.clone())
        self.compare(ours, theirs)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.compare_parameters()

    def compare(self, ours: Any, theirs: Any) -> None:
        for got, expected in zip(ours or (), theirs or (), strict=True):
            torch.testing.assert_close(got.detach(), expected.detach())
        for handle in _get_fsdp_handles(self.model):
            assert not any(param.grad is not None for param in handle.unsharded.params), "an unsharded gradient is left"
        for param in self.reference.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        gradients = full_gradients(self.model)
        for name, param in self.reference.named_parameters():
            got, expected = gradients[name], param.grad
            if self.mode == "flat" and expected is None and got is not None:
                expected = torch.zeros_like(got)  # as documented
            assert (got is None) == (expected is None), f"{name}: the gradient is {got}, expected {expected}"
            if got is not None:
                torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"gradient of {name}: {text}")

    def compare_parameters(self) -> None:
        for (name, sharded), param in zip(self.model.named_parameters(), self.reference.parameters(), strict=True):
            whole = sharded.detach().full_tensor()
            torch.testing.assert_close(whole, param.detach(), msg=lambda text, name=name: f"{name}: {text}")


def train(model: nn.Module, x: torch.Tensor) -> Output:
    outputs = model(x)
    loss = sum(item.sum() for item in outputs)
    if loss.requires_grad:
        loss.backward()
    return outputs


def check(names: Iterable[str], mode: str = "default", program: Any = train, steps: int = 2, **attributes: Any) -> None:
    for name in names:
        print(name, mode, flush=True)  # a failure quotes it
        torch.manual_seed(0)
        model = NETS[name]()
        for key, value in attributes.items():
            setattr(model, key, value)
        twins = Twins(model, mode)
        for _ in range(steps):
            twins.step(program)


@pytest.mark.parametrize("mode", MODES)
@distributed(world_size=2)
def test_equals_unsharded_training(mode: str) -> None:
    check(NETS, mode, steps=2)


@distributed(world_size=2)
def test_gradients_accumulate_without_sync() -> None:
    def accumulate(model: nn.Module, x: torch.Tensor) -> Output:
        with no_sync(model) if _get_fsdp_handles(model) else nullcontext():
            train(model, x)
            train(model, -x)
        return train(model, 2 * x)

    for recompute in (None, False):
        check(["LocalLosses", "DeepSupervision", "Again", "Guidance"], program=accumulate, recompute=recompute)


@pytest.mark.parametrize("mode", ["default", "kept", "functional"])
@distributed(world_size=2)
def test_blocks_are_recomputed_inside_forward(mode: str) -> None:
    check(["LocalLosses", "DeepSupervision", "Greedy", "Again", "AllAtOnce"], mode, recompute=False)
    # The others detach the input of a block, where reentrant checkpointing stops gradients.
    check(["DeepSupervision", "AllAtOnce"], mode, recompute=True)


@pytest.mark.parametrize("mode", ["default", "kept", "functional"])
@distributed(world_size=2)
def test_the_whole_forward_is_recomputed(mode: str) -> None:
    """So that the inner backward runs inside the outer one; what it accumulates comes twice, sharded or not."""

    def checkpointed(model: nn.Module, x: torch.Tensor) -> Output:
        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return sum(item.square().sum() for item in model(x))

        loss = checkpoint(loss_of, x.requires_grad_(), use_reentrant=False)
        if loss.requires_grad:
            loss.backward()
        return (loss,)

    check(["Forces", "Guidance", "OfSelfTrained", "Greedy"], mode, checkpointed)


@pytest.mark.parametrize("mode", ["default", "functional"])
@distributed(world_size=2)
def test_gradients_are_dropped_between_forward_and_backward(mode: str) -> None:
    """``zero_grad()`` after forward drops what the inner backwards have brought, of whatever group."""

    def program(model: nn.Module, x: torch.Tensor) -> Output:
        outputs = model(x)
        model.zero_grad()
        if outputs[0].requires_grad:
            sum(item.sum() for item in outputs).backward()
        return outputs

    check(["OwnParameters", "OfSelfTrained", "OnlySelfTrained", "LocalLosses"], mode, program)


@pytest.mark.parametrize("is_early", [False, True], ids=["after sharding", "before sharding"])
@distributed(world_size=2)
def test_hooks_of_modules_run_backwards(is_early: bool) -> None:
    class Plain(Net):
        def forward(self, x: torch.Tensor) -> Output:
            return (self.energy(x),)

    norms: list[torch.Tensor] = []

    def sensitivity(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        (grad,) = torch.autograd.grad(output.square().sum(), args[0], retain_graph=True)
        norms.append(grad.norm())

    def local_loss(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.square().mean().backward(retain_graph=True)

    def local_gradient(module: nn.Module, args: Any) -> Any:
        x = by_value(args[0])
        x.square().sum().backward()
        return (args[0] + x.grad,)

    def register(model: Any) -> None:
        model.blocks[0].register_forward_hook(sensitivity)
        model.blocks[1].register_forward_hook(local_loss)
        model.blocks[2].register_forward_pre_hook(local_gradient)
        model.blocks[2].first.register_forward_hook(local_loss)
        model.leave.register_forward_hook(sensitivity)

    torch.manual_seed(0)
    model = Plain()
    if is_early:
        register(model)
    twins = Twins(model)
    if not is_early:
        register(twins.model)
        register(twins.reference)
    for _ in range(3):
        twins.step(train)
    assert len(norms) == 12


@distributed(world_size=2)
def test_evaluation_and_training_take_turns() -> None:
    torch.manual_seed(0)
    twins = Twins(Guidance())

    def evaluate(model: nn.Module, x: torch.Tensor) -> Output:
        with torch.no_grad():
            return model(x)

    for program in (evaluate, train, evaluate, train):
        twins.step(program)


@distributed(world_size=2)
def test_modules_of_one_group_with_a_backward_between_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor) -> Output:
            x = self.blocks[0](x)
            x.square().mean().backward(retain_graph=True)
            return (self.blocks[1](x),)

    torch.manual_seed(0)
    twins = Twins(Two(), "default")
    model = Two().double()
    model.load_state_dict(twins.reference.state_dict())
    fully_shard([model.blocks[0], model.blocks[1]])
    twins.model = fully_shard(model)
    twins.optimizers[0] = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        twins.step(train)


@pytest.mark.parametrize("where", ["root", "block"])
@distributed(world_size=2)
def test_double_backward_inside_forward(where: str) -> None:
    """Forces that are trained: a named error by default, right in functional mode."""

    class TrainedForces(Net):
        def forward(self, x: torch.Tensor) -> Output:
            x = by_value(x)
            energy = self.energy(x) if where == "block" else self.leave(torch.tanh(self.enter(x))).square().mean()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return energy, force.square()

    torch.manual_seed(0)
    if where == "block":
        twins = Twins(TrainedForces())
        with pytest.raises(RuntimeError, match="functional_mode"):
            twins.model(twins.batch())
        twins.model.zero_grad()
    for mode in ("functional",) if where == "block" else ("functional", "default"):
        twins = Twins(TrainedForces(), mode)
        for _ in range(2):
            twins.step(train)


@pytest.mark.parametrize("mode", ["default", "functional"])
@distributed(world_size=2)
def test_an_inner_backward_that_raises_and_is_caught(mode: str) -> None:
    """Its gradients are thrown away, with a warning; training goes on, and the outer backward is right."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    class Catches(Net):
        fails = True

        def forward(self, x: torch.Tensor) -> Output:
            x = self.block(0, self.enter(x))
            y = by_value(x)
            z = self.block(1, Fails.apply(y) if self.fails else y)
            try:
                (direction,) = torch.autograd.grad(z.square().sum(), y)
            except ValueError:
                direction = torch.zeros_like(y)
            return (self.leave(self.block(2, self.block(1, x + direction))).square().mean(),)

    torch.manual_seed(0)
    twins = Twins(Catches(), mode)
    for fails in (True, False, True):
        twins.model.fails = twins.reference.fails = fails
        # In functional mode it has not come to anything that would have to be thrown away.
        is_told = fails and mode == "default"
        with pytest.warns(UserWarning, match="raised, and the exception was caught") if is_told else nullcontext():
            twins.step(train)


@distributed(world_size=2)
def test_a_backward_that_raised_outside_is_followed_by_another_one() -> None:
    """Without a forward between them."""

    def refuse(grad: torch.Tensor) -> None:
        raise ValueError("on purpose")

    class Plain(Net):
        def forward(self, x: torch.Tensor) -> Output:
            return (self.energy(x),)

    def program(model: nn.Module, x: torch.Tensor) -> Output:
        first, second = model(x), model(-x)
        if model is twins.model:
            y = model.enter.register_forward_hook(lambda module, args, output: output.register_hook(refuse) and None)
            third = model(2 * x)
            y.remove()
            with pytest.raises(ValueError, match="on purpose"):
                third[0].backward()
        second[0].backward()
        first[0].backward()
        return (*first, *second)

    torch.manual_seed(0)
    twins = Twins(Plain())
    for _ in range(2):
        twins.step(program)

"""Forwards that run while autograd runs: evaluations in gradient hooks and in backwards of the user's, and backwards in
there. Only activation checkpointing repeats a forward; all else is a forward like those outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import fully_shard
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import distributed
from tests.runtime.test_backward_inside_forward import DIM, MODES, Block, Net, Output, Twins, by_value

Evaluate = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Plain(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.energy(x)


class InBackward(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad, None


def by_hook(x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    y = x * 1
    if y.requires_grad:  # reentrant checkpointing runs it without
        y.register_hook(lambda grad: call())
    return y


def by_function(x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    return InBackward.apply(x, call)


def without_grad(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)  # inside a backward there is no grad mode


def with_grad(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return model(x)


def trained(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        loss = model(x)
        loss.backward()
        return loss


def edit(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.data.mul_(0.9)


@pytest.mark.parametrize("mode", ["default", "kept", "functional"])
@distributed(world_size=2)
def test_a_teacher_is_evaluated_inside_the_backward_of_a_student(mode: str) -> None:
    """The student is unsharded, or recomputes; the teacher is edited before each time, without a trace."""

    class Student(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.tanh(super().forward(x)))

    for evaluate, by in ((without_grad, by_hook), (with_grad, by_function), (trained, by_hook)):
        for use_reentrant in (None, False, True) if mode == "default" else (None,):
            torch.manual_seed(0)
            twins = Twins(Plain(), mode)
            student = Student(DIM, DIM).double()

            def program(model: nn.Module, x: torch.Tensor, evaluate: Evaluate = evaluate) -> Output:
                seen: list[torch.Tensor] = []

                def call() -> None:
                    edit(model)
                    seen.append(evaluate(model, x))

                def part(x: torch.Tensor) -> torch.Tensor:
                    return student(by(x, call))  # noqa: B023

                x = x.requires_grad_()
                for _ in range(2):
                    y = part(x) if use_reentrant is None else checkpoint(part, x, use_reentrant=use_reentrant)  # noqa: B023
                    y.sum().backward()
                assert len(seen) == 2
                return tuple(seen)

            for _ in range(2):
                twins.step(program)
            if evaluate is without_grad:
                gathered = [item for item in _get_fsdp_handles(twins.model) if item.unsharded.is_allocated]
                assert not gathered, f"{gathered} are left unsharded"


@pytest.mark.parametrize("mode", ["default", "kept"])
@distributed(world_size=2)
def test_a_model_is_evaluated_inside_its_own_backward(mode: str) -> None:
    for evaluate in (without_grad, with_grad, trained):
        for by in (by_hook, by_function) if mode == "default" else (by_hook,):
            for where in (None, 1):
                torch.manual_seed(0)

                class Observed(Net):
                    call: Any = None

                    def forward(self, x: torch.Tensor) -> torch.Tensor:
                        x = self.enter(x)
                        for i in range(len(self.blocks)):
                            x = self.block(i, x)
                            if self.call is not None and i == where:  # noqa: B023
                                x = by(x, self.call)  # noqa: B023
                        return self.leave(x).square().mean()

                twins = Twins(Observed(), mode)

                def program(model: Any, x: torch.Tensor, evaluate: Evaluate = evaluate) -> Output:
                    seen: list[torch.Tensor] = []

                    def call() -> None:
                        model.call = None
                        seen.append(evaluate(model, 2 * x))

                    model.call = call  # noqa: B023
                    loss = model(x)
                    if where is None:  # noqa: B023
                        loss = by(loss, call)  # noqa: B023
                    loss.backward()
                    assert len(seen) == 1
                    return (loss, *seen)

                for _ in range(2):
                    twins.step(program)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mode", ["default", "kept", "functional"])
@distributed(world_size=2)
def test_a_model_wholly_inside_a_checkpoint(mode: str, use_reentrant: bool) -> None:
    """Its forward is repeated before backward comes to any of its outputs."""

    def program(model: nn.Module, x: torch.Tensor) -> Output:
        loss = checkpoint(lambda x: model(x).square(), x.requires_grad_(), use_reentrant=use_reentrant)
        loss.backward()
        return (loss,)

    torch.manual_seed(0)
    twins = Twins(Plain(), mode)
    for _ in range(3):
        twins.step(program)


@distributed(world_size=2)
def test_the_first_forward_runs_inside_a_backward() -> None:
    torch.manual_seed(0)
    twins = Twins(Plain())

    def program(model: nn.Module, x: torch.Tensor) -> Output:
        seen: list[torch.Tensor] = []
        by_hook(x.requires_grad_(), lambda: seen.append(trained(model, x.detach()))).sum().backward()
        return tuple(seen)

    for _ in range(2):
        twins.step(program)


class Implicit(Net):
    """A deep equilibrium: its gradient is found by ``autograd.grad`` in a hook, again and again through one use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(3):
                z = torch.tanh(self.blocks[0](z) * 0.3 + x)
        z = torch.tanh(self.blocks[0](z) * 0.3 + x)
        z0 = by_value(z)
        f0 = torch.tanh(self.blocks[0](z0) * 0.3 + x.detach())

        def solve(grad: torch.Tensor) -> torch.Tensor:
            g = grad
            for _ in range(4):
                g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
            return g

        if z.requires_grad:
            z.register_hook(solve)
        return self.leave(self.blocks[1](z)).square().mean()


class Wrapped(Net):
    """A custom Function that differentiates a block again in its backward, by the inputs alone or by all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[0]

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                with torch.enable_grad():
                    ctx.x = by_value(x)
                    ctx.y = block(ctx.x)
                return ctx.y.detach()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                (first,) = torch.autograd.grad(ctx.y, ctx.x, grad, retain_graph=True)
                ctx.y.backward(first, retain_graph=True)
                (again,) = torch.autograd.grad(ctx.y, ctx.x, first)
                return again + ctx.x.grad

        y = block(Twice.apply(self.enter(x)))
        return self.leave(self.blocks[1](block(y))).square().mean()


class Checkpointed(Net):
    """Activation checkpointing of the user's own: a custom Function that repeats a block in its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        class Repeat(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, block: Block) -> torch.Tensor:
                ctx.save_for_backward(x)
                ctx.block = block
                return block(x)

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
                x = by_value(ctx.saved_tensors[0])
                with torch.enable_grad():
                    y = ctx.block(x)
                torch.autograd.backward(y, grad)
                return x.grad, None

        x = self.enter(x)
        for block in self.blocks:
            x = Repeat.apply(x, block)
        return self.leave(x).square().mean()


@pytest.mark.parametrize("mode", MODES)
@distributed(world_size=2)
def test_backwards_through_one_group_inside_a_backward(mode: str) -> None:
    def train(model: nn.Module, x: torch.Tensor) -> Output:
        loss = model(x)
        loss.backward()
        return (loss,)

    for net in (Implicit, Wrapped, Checkpointed):
        print(net.__name__, flush=True)
        torch.manual_seed(0)
        twins = Twins(net(), mode)
        for _ in range(3):
            twins.step(train)


@distributed(world_size=2)
def test_double_backward_inside_a_backward_is_refused() -> None:
    class Squared(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            point = by_value(x)
            y = self.blocks[0](point)
            z = self.blocks[1](self.enter(x))

            def penalise(grad: torch.Tensor) -> None:
                torch.autograd.grad(y, point, torch.ones_like(y), create_graph=True)

            z.register_hook(penalise)
            return self.leave(z).square().mean()

    torch.manual_seed(0)
    model = fully_shard_blocks(Squared().double())
    x = torch.randn(2, DIM, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="functional_mode"):
        model(x).backward()
    with pytest.warns(UserWarning, match="gradients were discarded"):
        model(x)


def fully_shard_blocks(model: Net) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)

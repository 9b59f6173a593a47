"""Groups that each rank may run or skip: training equals unsharded training on the mean of the ranks' losses."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    CPUOffloadPolicy,
    clip_grad_norm_,
    full_parameters,
    fully_shard,
    functional_mode,
    no_sync,
    replicate,
    serve_optional,
    summon_full_params,
    unshard,
)
from fsdp_compose.group import get_state
from tests.harness import distributed

DIM = 6
Plan = tuple[bool | int, ...]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class VisionLanguage(nn.Module):
    """Text, and on some ranks images, which a tower and a projection bring into it. A plan: (whether there is one,)."""

    optional = ("tower", "projection")

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.tower, self.projection = nn.Sequential(Mlp(), Mlp()), nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.use_reentrant = use_reentrant

    def call(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return module(x)
        return checkpoint(module, x, use_reentrant=self.use_reentrant)

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        if plan[0]:
            h = h + self.projection(self.call(self.tower, x.sin()))
        for block in self.blocks:
            h = self.call(block, h)
        return self.head(h)


class LayerDrop(nn.Module):
    """A plan: of each layer, how often it runs."""

    optional = ("layers.0", "layers.1", "layers.2")

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed, self.last = Mlp(), nn.Linear(DIM, 1)
        self.layers = nn.ModuleList(Mlp() for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        for layer, times in zip(self.layers, plan, strict=True):
            for _ in range(times):
                if self.use_reentrant is None:
                    h = layer(h)
                else:
                    h = checkpoint(layer, h, use_reentrant=self.use_reentrant)
        return self.last(h)


class Experts(LayerDrop):
    """Experts beside each other, in a group around them that is optional too; in the order of the plan."""

    optional = ("layers.0", "layers.1", "layers.2")

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        return self.last(h + sum([self.layers[i](h) * (i + 1) for i in plan], torch.zeros_like(h)))


class EarlyExit(LayerDrop):
    """A plan: (after how many layers to leave,); the model returns what the last one has returned, as it is."""

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers[: plan[0]]:
            h = layer(h)
        return h


PLANS: dict[type[nn.Module], list[tuple[Plan, Plan, Plan]]] = {
    VisionLanguage: [
        ((1,), (0,), (0,)),
        ((0,), (0,), (0,)),
        ((0,), (1,), (1,)),
        ((1,), (1,), (1,)),
        ((0,), (0,), (1,)),
    ],
    LayerDrop: [
        ((1, 0, 2), (0, 1, 1), (0, 0, 0)),
        ((0, 0, 1), (0, 0, 2), (0, 0, 1)),
        ((3, 1, 0), (0, 0, 0), (1, 1, 1)),
    ],
    Experts: [((2, 0), (1,), ()), ((0, 1, 2), (2, 1, 0), (1, 1)), ((), (), ()), ((1, 0), (0, 1), (0,))],
    EarlyExit: [((3,), (1,), (0,)), ((0,), (0,), (0,)), ((1,), (2,), (3,)), ((2,), (2,), (2,))],
}


def made(kind: type[nn.Module], **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return kind(**kwargs).double()


def shard(model: nn.Module, inner: bool = True, **kwargs) -> nn.Module:
    for name, module in reversed([*model.named_modules()][1:]):
        if inner and isinstance(module, Mlp) and name not in model.optional:
            fully_shard(module, **kwargs)
        elif name in model.optional:
            fully_shard(module, optional=True, **kwargs)
    return fully_shard(model, **kwargs)


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, DIM, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return model(x, plan).square().mean()


def mean_loss(reference: nn.Module, step: int, plans: Sequence[Plan]) -> torch.Tensor:
    size = dist.get_world_size()
    return torch.stack([loss_of(reference, batch(step, r), plans[r]) for r in range(size)]).mean()


def assert_equal_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), f"{name}: {ours.grad}, expected {theirs.grad}"
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-12, msg=name)


def assert_equal_parameters(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().full_tensor(), theirs.detach(), rtol=1e-9, atol=1e-11, msg=name)


def train_both(model: nn.Module, reference: nn.Module, plans: Sequence[Sequence[Plan]], rounds: int = 2) -> None:
    rank = dist.get_rank()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, reference)]
    for step, at_step in enumerate([*plans] * rounds):
        loss_of(model, batch(step, rank), at_step[rank]).backward()
        mean_loss(reference, step, at_step).backward()
        assert_equal_gradients(model, reference)
        norms = [clip_grad_norm_(net.parameters(), 0.5) for net in (model, reference)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert torch.isfinite(model(batch(step, rank), at_step[rank - 1])).all()
    assert_equal_parameters(model, reference)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [*PLANS])
@distributed(world_size=(2, 3))
def test_training_equals_unsharded_training(kind, reshard):
    model = shard(made(kind), reshard_after_forward=reshard)
    train_both(model, made(kind), PLANS[kind])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [VisionLanguage, LayerDrop])
@distributed(world_size=(2, 3))
def test_with_activation_checkpointing(kind, use_reentrant):
    model = shard(made(kind, use_reentrant=use_reentrant), inner=not use_reentrant)
    train_both(model, made(kind, use_reentrant=use_reentrant), PLANS[kind])

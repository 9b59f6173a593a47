"""Every option of a reduction, in every mode, at several world sizes, against unsharded training.

A later option is one more row of ``ROWS``; a later way for gradients to come, one more of ``PROGRAMS``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compose import (
    MixedPrecisionPolicy,
    flat_parameters,
    fully_shard,
    no_sync,
    set_force_sum_reduction_for_comms,
    set_functional_mode,
    set_gradient_divide_factor,
    set_post_reduction_hook,
    set_requires_all_reduce,
)
from tests.harness import distributed, lasting_mesh
from tests.training import gathered, local_part, pair


class Net(nn.Module):
    """Layers of odd sizes, one that is not always used, and a head whose weight a loss may use by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.extra = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, with_extra: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.extra(x) if with_extra else x)


@dataclass(frozen=True)
class Row:
    """``option``: set on the sharded model; its gradients are ``scale(world_size)`` times the averages, as exact as
    ``tolerance``."""

    policy: MixedPrecisionPolicy | None = None
    option: Callable[[nn.Module], None] = lambda model: None
    scale: Callable[[int], float] = lambda world_size: 1.0
    tolerance: float = 1e-6


def double(gradient: torch.Tensor) -> None:
    gradient.mul_(2)


ROWS = {
    "average": Row(),
    "in bf16": Row(MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), tolerance=2e-2),
    "in fp16": Row(MixedPrecisionPolicy(reduce_dtype=torch.float16), tolerance=3e-3),
    "in fp64": Row(MixedPrecisionPolicy(reduce_dtype=torch.float64)),
    "divide factor": Row(option=lambda model: set_gradient_divide_factor(model, 3.0), scale=lambda n: n / 3),
    "divide factor in fp16": Row(
        MixedPrecisionPolicy(reduce_dtype=torch.float16),
        lambda model: set_gradient_divide_factor(model, 0.5),
        lambda n: n / 0.5,
        tolerance=1e-2,
    ),
    "sum": Row(option=set_force_sum_reduction_for_comms),
    "sum with divide factor": Row(
        option=lambda model: (set_force_sum_reduction_for_comms(model), set_gradient_divide_factor(model, 1.0))[0],
        scale=lambda n: n,
    ),
    "hook": Row(option=lambda model: set_post_reduction_hook(model, double), scale=lambda n: 2.0),
}


class Both:
    """The sharded model and the unsharded one, with the same backwards."""

    def __init__(self, row: Row, is_functional: bool, is_flat: bool, mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(0)
        self.sharded, self.reference = pair(Net())
        self.row, self.is_functional = row, is_functional
        for module in (*self.sharded.layers, self.sharded.head, self.sharded):
            fully_shard(module, mp_policy=row.policy, mesh=mesh)
        row.option(self.sharded)
        set_functional_mode(self.sharded, is_functional)
        self.flat = flat_parameters(self.sharded) if is_flat else []
        self.generator = torch.Generator().manual_seed(1)

    def backward(
        self, with_extra: bool = True, with_head: bool = False, syncs: bool = True, averages: bool = True
    ) -> None:
        set_requires_all_reduce(self.sharded, averages)
        batch = torch.randn(12, 5, generator=self.generator)
        for model, x in ((self.reference, batch), (self.sharded, local_part(batch))):
            is_ours = model is self.sharded
            with no_sync(model) if is_ours and not syncs else contextlib.nullcontext():
                loss = model(x, with_extra).square().mean()
                if with_head:  # a second use of the weight, outside of the group's forward
                    weight = model.head.weight.full_tensor() if is_ours else model.head.weight
                    loss = loss + (x @ weight.T).square().mean()
                loss.backward()

    def zero(self) -> None:
        self.sharded.zero_grad()
        self.reference.zero_grad()
        for param in self.flat:
            param.grad = None

    def check(self) -> None:
        scale, tolerance = self.row.scale(dist.get_world_size()), self.row.tolerance
        found = {name: param.grad for name, param in self.sharded.named_parameters() if param.grad is not None}
        whole = gathered(found)
        for name, param in self.reference.named_parameters():
            if not self.flat:
                assert (name in whole) == (param.grad is not None), name
            got, expected = whole.get(name, torch.zeros(())), torch.zeros(()) if param.grad is None else param.grad
            difference = (got - expected * scale).abs().max().item()
            assert difference <= tolerance * max(1.0, scale), f"{name} differs by {difference}"


def plain(both: Both) -> None:
    both.backward()
    both.check()
    both.zero()
    both.backward()


def added(both: Both) -> None:
    both.backward()
    both.backward()


def accumulated(both: Both) -> None:
    for _ in range(2):
        both.backward(syncs=False)
    both.backward()
    both.check()
    both.backward(syncs=False)
    both.backward(with_extra=False)


def unused(both: Both) -> None:
    both.backward(with_extra=False)
    both.check()
    both.backward()


def late(both: Both) -> None:
    both.backward(with_head=True)
    both.check()
    both.zero()
    both.backward(with_extra=False, with_head=True)


def scattered(both: Both) -> None:
    """Backwards that leave out the average over replicas, where there are some; mixed with those without sync."""
    both.backward(averages=False)
    both.backward(averages=False, with_head=True)
    both.backward(with_extra=False)
    both.check()
    both.backward(syncs=False)
    both.backward(averages=False)
    both.backward(syncs=False, with_extra=False)
    both.backward()


PROGRAMS = [plain, added, accumulated, unused, late, scattered]


MODES = ["default", "functional", "flat views"]


@pytest.mark.parametrize("mode", MODES)
@distributed(world_size=(1, 2, 3, 4))
def test_every_reduction_equals_unsharded_training(mode):
    check_every_reduction(mode)


@pytest.mark.parametrize("mode", MODES)
@distributed(world_size=(2, 4))
def test_every_reduction_over_replicas_equals_unsharded_training(mode, world_size):
    shape = (2, world_size // 2)
    check_every_reduction(mode, lasting_mesh(("replicate", "shard"), shape))


def check_every_reduction(mode: str, mesh: DeviceMesh | None = None) -> None:
    """Every row, program and mode meet on three ranks; elsewhere every row and program do, in one of the modes."""
    has_all = mesh is None and dist.get_world_size() == 3
    for i, (name, row) in enumerate(ROWS.items()):
        both = Both(row, mode == "functional", mode == "flat views", mesh)
        for k, program in enumerate(PROGRAMS if mesh is not None or name == "average" else PROGRAMS[:-1]):
            if not has_all and (i + k + MODES.index(mode)) % 3:
                continue
            try:
                program(both)
                both.check()
            except AssertionError as error:
                raise AssertionError(f"{name}, {program.__name__}: {error}") from error
            both.zero()

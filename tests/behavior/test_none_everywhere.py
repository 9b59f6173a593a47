"""Invariant 2: a gradient exists on all ranks, or on none."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import (
    fully_shard,
    no_sync,
)
from fsdp_compose.core.flat.accumulation import UnreducedGradient
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests import harness
from tests.internals import assert_nothing_is_unsharded
from tests.models import DIM, IN, rows
from tests.training import (
    assert_gradients_match,
    assert_no_gradients,
    local_part,
    mean_square,
    pair,
    stacks,
)

distributed = functools.partial(harness.distributed, timeout=20)  # seconds; a body takes a fraction of one


class Branches(nn.Module):
    """Parameters that some ranks use and some do not; the small ones have empty local shards on most ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(IN, DIM)
        self.branches = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.full(shape, 1.5)) for shape in [(), (1,), (1, DIM)])
        self.never = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        x = self.always(x)
        return x if chosen < 0 else self.branches[chosen](x) * self.scales[chosen]


def branch_of(rank: int) -> int:
    return 2 if rank == 0 else -1  # one branch on one rank, two branches nowhere


@pytest.mark.parametrize("nested", [False, True])
@distributed(world_size=(2, 3))
def test_parameter_used_on_one_rank_has_gradients_on_all_and_one_used_nowhere_on_none(world_size, nested):
    model, reference = pair(Branches())
    if nested:
        fully_shard(model.always)
    fully_shard(model)
    numels = [stop - start for handle in _get_fsdp_handles(model) for start, stop, _ in handle.local_shards]
    assert 0 in numels, "a local shard should be empty on every rank"
    for step in range(3):
        loss = sum(
            reference(part, branch_of(rank)).square().mean() for rank, part in enumerate(rows(step).chunk(world_size))
        )
        (loss / world_size).backward()
        chosen = branch_of(dist.get_rank())
        model(local_part(rows(step)), chosen).square().mean().backward()
        assert_gradients_match(model, reference, 1e-6)
        for name in ("never", "branches.0.weight", "scales.1"):
            assert model.get_parameter(name).grad is None
        if step < 1:  # and then accumulate, by addition
            model.zero_grad()
            reference.zero_grad()


@distributed(world_size=3)
def test_every_rank_may_use_another_parameter():
    model, reference = pair(Branches())
    fully_shard(model)
    for rank, part in enumerate(rows().chunk(3)):
        (reference(part, rank).square().mean() / 3).backward()
    model(local_part(rows()), dist.get_rank()).square().mean().backward()
    assert_gradients_match(model, reference, 1e-6)
    assert model.never.grad is None and model.branches[0].weight.grad is not None


@distributed(world_size=(2, 3))
def test_parameter_used_in_an_accumulating_backward_of_one_rank_has_gradients_on_all(world_size):
    model, reference = pair(Branches())
    fully_shard(model)
    for step, branches in enumerate([[2] + [-1] * (world_size - 1), [-1] * world_size]):
        for rank, part in enumerate(rows(step).chunk(world_size)):
            (reference(part, branches[rank]).square().mean() / world_size).backward()
        with no_sync(model) if step == 0 else contextlib.nullcontext():
            model(local_part(rows(step)), branches[dist.get_rank()]).square().mean().backward()
        if step == 0:  # the same on every rank, although one rank only has something of it
            unreduced = {name for name, param in model.named_parameters() if type(param.grad) is UnreducedGradient}
            assert unreduced == {name for name, param in reference.named_parameters() if param.grad is not None}
            assert all(param.grad is None for name, param in model.named_parameters() if name not in unreduced)
    assert_gradients_match(model, reference, 1e-6)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(2, 3))
def test_autograd_grad_of_the_input_leaves_gradients_alone(world_size, reshard_after_forward):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)

    def input_gradient(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone().requires_grad_()
        (grad,) = torch.autograd.grad(mean_square(module, batch), batch)
        return grad

    expected = local_part(input_gradient(reference, rows())) * world_size
    torch.testing.assert_close(input_gradient(model, local_part(rows())), expected, rtol=0, atol=1e-6)
    assert_no_gradients(model)
    mean_square(model, local_part(rows())).backward()
    mean_square(reference, rows()).backward()
    grads = [param.grad for param in model.parameters()]
    before = [grad.clone() for grad in grads]
    input_gradient(model, local_part(rows(1)))
    for param, grad, value in zip(model.parameters(), grads, before):
        assert param.grad is grad and torch.equal(grad.full_tensor(), value.full_tensor())
    mean_square(model, local_part(rows(2))).backward()
    mean_square(reference, rows(2)).backward()
    assert_gradients_match(model, reference, 1e-6)
    assert_nothing_is_unsharded(model)

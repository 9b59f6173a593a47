"""A publication, or a reduction, that raises: what it has taken is lost on all ranks alike, and training goes on."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn as nn

from fsdp_compose import fully_shard, no_sync
from fsdp_compose.core.flat.gradient import ShardedGradient
from fsdp_compose.core.group.registry import _get_fsdp_handles, get_state
from tests.harness import distributed
from tests.models import Net, inputs
from tests.training import Twins, local_part, mean_square, plain_sgd


def forward_quietly(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of recovery
        return mean_square(model, batch)


@distributed(world_size=2)
def test_accumulated_gradients_that_a_failed_reduction_has_taken_are_lost_together():
    twins = Twins(Net(), make_optimizer=plain_sgd)
    model = twins.sharded
    first, second, third = (local_part(batch) for batch in inputs(3))
    with no_sync(model):
        mean_square(model, first).backward()
    original = ShardedGradient.prepare

    def fails(gradient: ShardedGradient) -> None:
        raise MemoryError("no room for the flat gradient")

    ShardedGradient.prepare = fails
    try:
        with pytest.raises(MemoryError):
            mean_square(model, second).backward()
    finally:
        ShardedGradient.prepare = original
    with pytest.warns(UserWarning, match="all gradients are None"):
        model(third)
    assert all(param.grad is None for param in model.parameters())
    assert all(handle.pending_gradients.accumulation is None for handle in _get_fsdp_handles(model))
    for batch in inputs(2):
        twins.backward(mean_square, batch)
        twins.step()


class LearnsInside(nn.Module):
    """A backward inside forward, on the group whose forward is running."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.is_inside = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_inside:
            (self.linear.weight.sum() * 2).backward()
        return self.linear(x)


@distributed(world_size=2)
def test_backward_after_a_publication_inside_forward_that_raised():
    model = fully_shard(LearnsInside())
    x = torch.ones(2, 3)
    earlier = model(x).sum()
    model.is_inside, raises = True, [True]

    def hook(grad: torch.Tensor) -> None:
        if raises[0]:
            raise ArithmeticError("a hook of the user's")

    model.linear.weight.register_hook(hook)
    with pytest.raises(ArithmeticError):
        model(x)
    assert get_state(model).root.backward is None
    model.is_inside = raises[0] = False
    with pytest.warns(UserWarning, match="discarded"):
        earlier.backward()
    assert torch.equal(model.linear.weight.grad.full_tensor(), torch.full((3, 3), 2.0))
    model.zero_grad()
    forward_quietly(model, x).backward()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model.linear.weight.grad.full_tensor(), torch.full((3, 3), 2.0))

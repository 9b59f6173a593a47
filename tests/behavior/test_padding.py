"""Invariant 3: padding is zero in shard, gradient and reduce buffer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

from fsdp_compose import (
    MixedPrecisionPolicy,
    fully_shard,
    no_sync,
)
from fsdp_compose.core.group.registry import _get_fsdp_handles, _get_fsdp_states
from tests import harness
from tests.models import DIM, IN, rows
from tests.training import (
    local_part,
    mean_square,
    sgd,
)

distributed = functools.partial(harness.distributed, timeout=20)  # seconds; a body takes a fraction of one


class Bag(nn.Module):
    """Awkward shapes, each used once; ``look`` is called in its backward."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.items = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.look: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = sum((item + 1).square().sum() for item in self.items) * 0.01
        out = x * torch.tanh(scale)
        if out.requires_grad:
            out.register_hook(lambda _: self.look())
        return out


def padding_of(handle: Any, shard: torch.Tensor) -> torch.Tensor:
    """The elements of ``shard``, this rank's slice of a flat tensor, that belong to no parameter."""
    is_padding = torch.zeros(handle.layout.flat_numel, dtype=torch.bool)
    for start, stop in handle.layout.gaps():
        is_padding[start:stop] = True
    return shard[local_part(is_padding)]


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
@distributed(world_size=(2, 3))
def test_padding_stays_zero_while_the_reduce_buffer_changes_between_layouts(world_size, policy):
    torch.manual_seed(0)
    small, large = [(3, 3), (1,), (2,)], [(7, 3), (), (5, 5), (3,)]
    model = nn.Sequential(Bag(*large), Bag(*small), Bag(*large), nn.Linear(IN, DIM), Bag(*small))
    for bag in model:
        fully_shard(bag, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    handles = _get_fsdp_handles(model)
    assert len({handle.layout for handle in handles}) == 3 and all(handle.layout.gaps() for handle in handles)
    seen = []

    def look_at_buffers() -> None:
        for handle, reduction in model_root().communicator._in_flight.values():
            gaps = handle.layout.gaps()
            seen.append(max(reduction.flat[start:stop].abs().max().item() for start, stop in gaps))

    def model_root() -> Any:
        return _get_fsdp_states(model)[0].root

    for bag in model:
        bag.look = look_at_buffers
    optimizer = sgd(model.parameters())
    for step in range(4):
        with no_sync(model) if step == 2 else contextlib.nullcontext():
            mean_square(model, local_part(rows(step))).backward()
        if step != 2:
            for handle in handles:
                assert not padding_of(handle, handle.gradient.memory.flat).any()
            optimizer.step()
            optimizer.zero_grad()
        assert not any(padding_of(handle, handle.shard).any() for handle in handles)
    assert len(seen) > 3 and not any(seen), seen

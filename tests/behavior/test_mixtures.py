"""Mixtures of experts sharded by one call for a block: what they do, compared with one process in float64.

Gradients are compared, not losses alone: Adam's steps hide a gradient of the wrong scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fsdp_compose import clip_grad_norm_
from tests.harness import distributed
from tests.mixtures import EP_LAYOUTS, Layout, Mixture, batch, loss_of, mixture, shard

EXACT = 1e-12


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: nn.Module, expected: nn.Module, tolerance: float = EXACT) -> None:
    """Parameters and gradients."""
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.detach()), theirs.detach(), rtol=0, atol=tolerance, msg=name)
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            message = f"gradient of {name}: {(whole(ours.grad) / theirs.grad).flatten()[:8]} times too large"
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=0, atol=tolerance, msg=message)


def run(model: Mixture, expected: Mixture, layout: Layout, step: int = 0) -> None:
    """Backward of both."""
    parts = batch(step, layout)
    loss_of(model, parts[layout.place]).backward()
    for part in parts:
        (loss_of(expected, part) / layout.num_parts).backward()


@distributed(world_size=4)
@pytest.mark.parametrize("layout", EP_LAYOUTS, ids=str)
def test_one_call_for_a_block_of_both_kinds_trains_as_one_process(layout):
    model, expected = shard(mixture(), layout), mixture()
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.3, momentum=0.9) for item in (model, expected)]
    for step in range(2):
        run(model, expected, layout, step)
        assert_same(model, expected)
        norms = [clip_grad_norm_(item.parameters(), 0.2) for item in (model, expected)]
        torch.testing.assert_close(*map(whole, norms), rtol=0, atol=EXACT)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, expected)

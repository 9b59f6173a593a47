"""torchao's weights that train in int8: each consists of integers and a scale for each row; gradients and states of
optimizers are plain, and every step rounds the weights to integers again, at random."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torchao.prototype.quantized_training.int8 import (
    Int8QuantizedTrainingLinearWeight,
    Int8WeightOnlyQuantizedTrainingConfig,
)
from torchao.quantization import quantize_

from fsdp_compose import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from fsdp_compose.checkpoint import get_state_dict, set_state_dict
from tests.harness import distributed
from tests.training import local_part

DTYPES = torch.bfloat16, torch.float32


def made(how: Any, policy: Any, seed: int = 0, rows: int = 64, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, rows, bias=False), nn.ReLU(), nn.Linear(rows, 32, bias=False))
    quantize_(model, Int8WeightOnlyQuantizedTrainingConfig())
    for layer in (model[0], model[2]):
        how(layer, mp_policy=policy, **options)
    return how(model, mp_policy=policy, **options)


def train(model: nn.Module, make: Any, num_steps: int = 6, clip: Any = None, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or make(model.parameters())
    generator, found = torch.Generator().manual_seed(1), []
    torch.manual_seed(7)  # of rounding
    for _ in range(num_steps):
        loss = model(local_part(torch.randn(24, 32, generator=generator))).float().square().mean()
        loss.backward()
        if clip is not None:
            clip(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("make", [adamw, sgd])
@distributed(world_size=2)
def test_training_is_that_of_fsdp2(make, reshard_after_forward):
    options = {"reshard_after_forward": reshard_after_forward}
    for clips in (False, True):
        ours = made(fully_shard, MixedPrecisionPolicy(*DTYPES), **options)
        theirs = made(torch_fully_shard, TorchPolicy(*DTYPES), **options)
        clip = (clip_grad_norm_, nn.utils.clip_grad_norm_) if clips else (None, None)
        rtol = 1e-6 if clips else 0  # norms are summed in another order
        got, expected = train(ours, make, clip=clip[0]), train(theirs, make, clip=clip[1])
        torch.testing.assert_close(got, expected, rtol=rtol, atol=0)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine, other = mine.to_local(), other.to_local()
            assert type(mine) is type(other) is Int8QuantizedTrainingLinearWeight
            assert torch.equal(mine.int_data, other.int_data)
            torch.testing.assert_close(mine.scale, other.scale, rtol=rtol, atol=0)


@pytest.mark.parametrize("rows", [64, 31])
@distributed(world_size=(1, 2, 3))
def test_checkpoints_continue_and_uneven_rows_train(rows):
    """FSDP2 has neither: one rank, nor uneven rows of this class, are errors."""
    policy = MixedPrecisionPolicy(*DTYPES)
    model = made(fully_shard, policy, rows=rows)
    optimizer = adamw(model.parameters())
    losses = train(model, adamw, 12, optimizer=optimizer)
    assert losses[-1] < losses[0]
    states = copy.deepcopy(get_state_dict(model, optimizer))
    expected = train(model, adamw, 2, optimizer=optimizer)
    other = made(fully_shard, policy, 1, rows)
    its_optimizer = adamw(other.parameters())
    set_state_dict(other, its_optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    assert train(other, adamw, 2, optimizer=its_optimizer) == expected

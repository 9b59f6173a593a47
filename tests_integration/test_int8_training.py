"""torchao's training with matrix products in int8: the weight's class takes all arguments of the protocol, and gathers
what it wraps in ``param_dtype``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig, int8_mixed_precision_training
from torchao.quantization import quantize_

from fsdp_compose import MixedPrecisionPolicy, fully_shard
from tests.harness import distributed
from tests.training import local_part


def losses(how: Any, policy: Any) -> tuple[list[float], set[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
    config = Int8MixedPrecisionTrainingConfig(output=True, grad_input=True, grad_weight=False)
    quantize_(model, int8_mixed_precision_training(config))
    for layer in (model[0], model[2]):
        how(layer, mp_policy=policy)
    how(model, mp_policy=policy)
    seen: set[str] = set()
    model[0].register_forward_pre_hook(lambda module, _: seen.add(type(module.weight).__name__))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(4):
        loss = model(local_part(torch.randn(16, 32, generator=generator))).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, seen


@distributed(world_size=2)
def test_losses_are_those_of_fsdp2():
    got, seen = losses(fully_shard, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    expected, _ = losses(torch_fully_shard, TorchPolicy(torch.bfloat16, torch.float32))
    assert seen == {"Int8MixedPrecisionTrainingLinearWeight"}
    assert got == expected, (got, expected)

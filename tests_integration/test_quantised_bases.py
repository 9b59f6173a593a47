"""Frozen base weights of bitsandbytes, in four bits, below adapters that train (QLoRA): plain bytes with a class on
top, gathered as such. For NF4 tensors of torchao see ``test_nf4``."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.nn as nn

from fsdp_compose import MixedPrecisionPolicy, fully_shard
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict, set_model_state_dict
from fsdp_compose.core.group.registry import get_state
from tests.harness import distributed
from tests.training import adamw, local_part, mean_over_ranks

DIM = 64


class WithAdapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def with_four_bits(double_quantised: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        WithAdapter(
            bnb.nn.Linear4bit(
                DIM,
                DIM,
                bias=False,
                compute_dtype=torch.float32,
                quant_type="nf4",
                compress_statistics=double_quantised,
            )
        )
        for _ in range(2)
    ]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1]).to("cpu")
    model(torch.zeros(1, DIM))
    return model


def trainable(model: nn.Module) -> list[Any]:
    return [param for param in model.parameters() if param.requires_grad]


@pytest.mark.parametrize("double_quantised", [False, True])
@distributed(world_size=(2, 3))
def test_params4bit_are_gathered_in_their_bytes_below_adapters_that_train(double_quantised):
    model = with_four_bits(double_quantised)
    reference = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy())
    fully_shard(model)
    optimizers = [adamw(trainable(item)) for item in (model, reference)]
    seen: list[Any] = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(module.base.weight))
    for _ in range(4):
        batch = torch.randn(12, DIM)
        torch.distributed.broadcast(batch, 0)
        loss, expected = model(local_part(batch)).square().mean(), reference(batch).square().mean()
        for item in (loss, expected):
            item.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert float(mean_over_ranks(loss)) == pytest.approx(expected.item(), abs=1e-6)
    assert all(type(item) is bnb.nn.Params4bit and item.quant_state is not None for item in seen)
    (frozen,) = [handle for handle in get_state(model[0])._handles if handle.shard.dtype == torch.uint8]
    assert frozen.layout.payload_numel == DIM * DIM // 2
    assert all((param.grad is None) for param in model.parameters())


@distributed(world_size=2)
def test_adapters_are_saved_and_loaded():
    model, other = with_four_bits(False), with_four_bits(False)
    for item in (model, other):
        fully_shard(item)
    with torch.no_grad():
        for param in trainable(other):
            param.zero_()
    state = get_model_state_dict(model)
    assert state["0.base.weight"].dtype == torch.uint8
    assert "0.base.weight.absmax" in state  # which bitsandbytes saves, and does not load
    adapters = {name: tensor for name, tensor in state.items() if ".base." not in name}
    set_model_state_dict(other, adapters, options=StateDictOptions(strict=False))
    x = torch.randn(3, DIM)
    assert torch.equal(model(x), other(x))

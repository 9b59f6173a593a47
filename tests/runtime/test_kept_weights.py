"""Parameters that a program keeps inside forward, and reads when they are sharded again."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from fsdp_compose import MixedPrecisionPolicy, fully_shard, unshard
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import distributed

REFUSED = "Cannot access data pointer|while they are sharded|out of bounds for storage of size 0"


KEPT = {
    "parameter": lambda weight: weight,
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "transposed": lambda weight: weight.t(),
    "row": lambda weight: weight[2],
    "flattened": lambda weight: weight.view(-1),
    "subset": lambda weight: weight[1:3, 2:],
}
READS = {
    "add": lambda kept: kept + 1,
    "multiply in place": lambda kept: kept.detach().mul_(2),
    "matmul": lambda kept: kept @ torch.ones(kept.shape[-1], dtype=kept.dtype),
    "sum": lambda kept: kept.sum(),
    "norm": lambda kept: kept.norm().item(),
    "print": repr,
    "list": lambda kept: kept.tolist(),
    "numpy": lambda kept: kept.detach().float().numpy(),
    "copy": lambda kept: torch.empty_like(kept).copy_(kept.detach()),
    "clone": lambda kept: kept.clone(),
    "address": lambda kept: kept.data_ptr(),
}


def build(sharding: str, kept: list[torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model[0].register_forward_hook(lambda module, *_: kept.append(make(module.weight)))  # before ours: sees it whole
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if "bf16" in sharding else MixedPrecisionPolicy()
    if "children" in sharding:
        for layer in (model[0], model[2]):
            fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    return model


@pytest.mark.parametrize("sharding", ["root", "children", "children bf16"])
@pytest.mark.parametrize("grad", [True, False])
@distributed(world_size=(1, 2))
def test_weight_kept_by_a_forward_hook_and_read_later_raises(sharding, grad, world_size):
    for kind, make in KEPT.items():
        kept: list[torch.Tensor] = []
        model = build(sharding, kept, make)
        with torch.set_grad_enabled(grad):
            loss = model(torch.ones(2, 5)).float().sum()
        (weight,) = kept
        for name, read in READS.items():
            if world_size == 1 and "bf16" not in sharding:  # nothing is gathered, and nothing is freed
                assert name == "multiply in place" or read(weight) is not None
                continue
            with pytest.raises(RuntimeError, match=REFUSED):
                read(weight)
        if grad:
            loss.backward()
            kept.clear()
            model(torch.ones(2, 5)).float().sum().backward()  # goes on
            assert all(param.grad is not None for param in model.parameters()), kind


@distributed(world_size=2)
def test_kept_weight_has_its_present_values_whenever_the_group_is_gathered():
    kept: list[torch.Tensor] = []
    model = build("children", kept, lambda weight: weight.detach())
    seen: list[torch.Tensor] = []
    model[0].register_forward_pre_hook(lambda *_: seen.extend(item.clone() for item in kept[:1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        model(torch.ones(2, 5)).sum().backward()
        expected = model[0].weight.full_tensor().detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    assert not seen[-1].equal(seen[0])
    assert seen[-1].equal(expected)


@distributed(world_size=2)
def test_parameters_cannot_be_read_while_an_all_gather_fills_them():
    kept: list[torch.Tensor] = []
    model = build("children", kept, lambda weight: weight)
    model(torch.ones(2, 5)).sum().backward()
    handle = _get_fsdp_handles(model[0])[0]
    waiting = unshard(model[0], async_op=True)
    assert waiting is not None and handle.unsharded.is_allocated
    with pytest.raises(RuntimeError, match=REFUSED):
        kept[0].sum()
    waiting.wait()
    assert kept[0].equal(model[0].weight.full_tensor())


@distributed(world_size=2)
def test_weight_used_by_a_later_module_of_the_same_forward_raises_there():
    class Later(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ kept[0].t()

    kept: list[torch.Tensor] = []
    model = nn.Sequential(nn.Linear(4, 4), Later())
    model[0].register_forward_hook(lambda module, *_: kept.append(module.weight))
    fully_shard(model[0])
    fully_shard(model)
    with pytest.raises(RuntimeError, match=REFUSED) as error:
        model(torch.ones(2, 4))
    if "Storage that is invalid" in str(error.value) and sys.version_info >= (3, 11):
        assert "parameter of a fully_shard'ed module" in "".join(error.value.__notes__)

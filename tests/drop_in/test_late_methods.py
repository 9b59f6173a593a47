"""Methods of FSDP2 that save communication or come with later versions of torch: each has its effect, or is refused."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as of_torch

from fsdp_compose import checkpoint, drop_in, record_collectives
from fsdp_compose.core.group.registry import get_state
from tests.harness import distributed, fake_process_group
from tests.training import adamw, pair


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(ids)).tanh())


def sharded(model: Words) -> Any:
    for module in (model.embedding, model.layer, model):
        drop_in.fully_shard(module, reshard_after_forward=True)
    return model


def step(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids).square().mean().backward()


@distributed(world_size=2)
def test_an_embedding_that_backward_does_not_need_is_gathered_once():
    model, reference = pair(Words())
    ids = torch.arange(8).view(2, 4)
    mine = ids[dist.get_rank() :][:1]
    sharded(model)
    step(model, mine)  # the first iteration knows no order yet
    numbers = []
    for gathers in (True, False):
        model.embedding.set_unshard_in_backward(gathers)
        for item in (model, reference):
            item.zero_grad()
        with record_collectives(model) as recorded:
            step(model, mine)
        step(reference, ids)
        numbers.append([str(item) for item in recorded if str(item).startswith("all-gather")])
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    assert len(numbers[0]) == 6 and len(numbers[1]) == 5
    assert sum("embedding" in text for text in numbers[1]) == 1
    model.layer.set_unshard_in_backward(False)
    with pytest.raises(RuntimeError):  # a Linear needs its weight
        step(model, mine)


@distributed(world_size=(2, 3))
def test_reduce_scatters_have_a_process_group_of_their_own(world_size):
    model, reference = pair(Words())
    sharded(model)
    model.set_separate_reduce_scatter_group()
    group = get_state(model).mesh.shard_group
    others = {get_state(item)._handles[0].mesh.transport.other.group for item in (model, model.layer)}
    (other,) = others
    assert other is not group and dist.get_process_group_ranks(other) == dist.get_process_group_ranks(group)
    optimizers = [adamw(item.parameters()) for item in (model, reference)]
    ids = torch.arange(world_size * 4).view(world_size, 4) % 8
    for _ in range(3):
        step(model, ids[dist.get_rank() :][:1])
        step(reference, ids)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    model.set_separate_reduce_scatter_group(False)
    assert not hasattr(get_state(model)._handles[0].mesh.transport, "other")
    step(model, ids[dist.get_rank() :][:1])


@dataclass
class Later(fsdp.CPUOffloadPolicy):
    offload_after_forward: bool = True


def test_names_of_later_versions_are_refused_by_name():
    with fake_process_group():
        with pytest.raises(ValueError, match="offload_after_forward=False.* is not supported"):
            drop_in.fully_shard(nn.Linear(4, 4), offload_policy=Later(offload_after_forward=False))
        model: Any = drop_in.fully_shard(nn.Linear(4, 4))
        with pytest.raises(NotImplementedError, match="set_all_gather_input_fn.*set_transport"):
            model.set_all_gather_input_fn(lambda tensor: tensor)
        with pytest.raises(TypeError, match="expected True or False"):
            model.set_unshard_in_backward(1)


class Wrapper(nn.Module):
    """Hides itself in names, as ``torch.distributed.checkpoint`` lets modules do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._register_state_dict_hook(_without)
        self.register_load_state_dict_pre_hook(_with)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}


def _without(module: nn.Module, state: Any, prefix: str, _metadata: Any) -> Any:
    for key in [*state]:
        if key.startswith(f"{prefix}inner."):
            state[prefix + key[len(f"{prefix}inner.") :]] = state.pop(key)
    return state


def _with(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for name in ("weight", "bias"):
        if prefix + name in state:
            state[f"{prefix}inner.{name}"] = state.pop(prefix + name)


@distributed(world_size=2)
def test_names_of_modules_that_hide_a_child_are_those_of_torch():
    options = of_torch.StateDictOptions(full_state_dict=True)
    model, reference = pair(nn.Sequential(OrderedDict(a=Wrapper(nn.Linear(4, 3)), b=nn.Linear(3, 2))))
    drop_in.fully_shard(model)
    optimizers = [adamw(item.parameters()) for item in (model, reference)]
    for item, optimizer in zip((model, reference), optimizers, strict=True):
        item(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    ours = checkpoint.get_state_dict(model, optimizers[0], options=checkpoint.StateDictOptions(full_state_dict=True))
    theirs = of_torch.get_model_state_dict(reference, options=options)
    assert ours[0].keys() == theirs.keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert ours[1]["state"].keys() == ours[0].keys()
    changed = {key: value + 1 for key, value in ours[0].items()}
    checkpoint.set_model_state_dict(model, changed, options=checkpoint.StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(model.a.inner.weight.full_tensor(), changed["a.weight"])

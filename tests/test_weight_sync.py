"""``full_parameters``, ``changed_since``: weights for other programs, in buckets that all ranks gather together."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compose import (
    apply_changes,
    changed_since,
    flat_parameters,
    full_parameters,
    fully_shard,
    replicate,
    snapshot_parameters,
    summon_full_params,
)
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict
from fsdp_compose.comm.messages import TRANSPORT_ENV
from fsdp_compose.comm.rendezvous import TIMEOUT_ENV
from tests.harness import distributed
from tests.models import GPT, adamw, batches, gpt_loss, local_part, shard_gpt, train
from tests.test_expert_parallel import mixture, spread
from tests.test_invariants import environment, same_on_every_rank
from tests.test_tensor_parallel import mesh_of, parallel_uneven, sharded_gpt

State = dict[str, torch.Tensor]


class Mixed(nn.Module):
    """Parameters of several dtypes, frozen, tied, empty and 0-dim ones, one that is ignored, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[1].to(torch.bfloat16)
        self.layers[2].weight.requires_grad_(False)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.alone = nn.Parameter(torch.randn(5, 7), requires_grad=False)
        self.numbers = nn.Parameter(torch.arange(9), requires_grad=False)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(ids)) * self.scale
        x = self.layers[1](x.bfloat16()).float()
        return self.head(self.layers[2](x))


def mixed(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    model = Mixed()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, ignored_params={model.alone}, **options)


def shard_some(model: GPT) -> GPT:
    """Some blocks are sharded, one is replicated, and the root is neither."""
    for i, block in enumerate(model.blocks):
        (replicate if i == 1 else fully_shard)(block)
    return model


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def expert_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    data, model = mesh._flatten("dp"), mixture()
    spread(model, mesh["ep"])
    fully_shard(model.experts, mesh=mesh["edp"])
    return fully_shard(model, mesh=data)


# What is made of the ranks there are; those of four ranks alone are listed apart.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: shard_gpt(GPT()),
    "tied": lambda: shard_gpt(GPT(tie=True)),
    "one group": lambda: fully_shard(GPT()),
    "mixed": mixed,
    "not sharded": GPT,
    "replicated": lambda: replicate(GPT()),
    "in part": lambda: shard_some(GPT()),
    "by rows": lambda: shard_gpt(GPT(), granularity=lambda *_: "whole"),
}
MODELS_OF_FOUR: dict[str, Callable[[], nn.Module]] = {
    "hybrid": lambda: shard_gpt(GPT(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))),
    "hfsdp": lambda: shard_gpt(GPT(), reshard_after_forward=2),
    "tensor": lambda: sharded_gpt(mesh_of(2, 2)),
    "tensor, in some blocks": lambda: sharded_gpt(mesh_of(2, 2), "some"),
    "vocabulary": lambda: sharded_gpt(mesh_of(2, 2), "vocabulary"),
    "experts": expert_parallel,
    "uneven": lambda: parallel_uneven(mesh_of(2, 2)),
    "tensor alone": lambda: parallel_uneven(mesh_of(1, 4)),
}


def cast(state: State, dtype: torch.dtype | None) -> State:
    return {k: v.to(dtype) if dtype is not None and v.is_floating_point() else v for k, v in state.items()}


def reference(model: nn.Module, dtype: torch.dtype | None = None) -> State:
    """The full state dict, without buffers."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return cast({name: full[name] for name, _ in model.named_parameters(remove_duplicate=False)}, dtype)


def collected(model: nn.Module, **options: Any) -> State:
    with full_parameters(model, **options) as buckets:
        pairs = [pair for bucket in buckets for pair in bucket]
    assert len(dict(pairs)) == len(pairs), "every name once"
    return dict(pairs)


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert type(found[name]) is torch.Tensor and not found[name].requires_grad, name
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


# ---- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@distributed(world_size=(1, 2, 3))
def test_every_parameter_comes_once_as_in_the_full_state_dict(name):
    check_buckets(seeded(MODELS[name]))


@pytest.mark.parametrize("name", MODELS_OF_FOUR)
@distributed(world_size=4)
def test_every_parameter_comes_once_on_meshes(name):
    check_buckets(seeded(MODELS_OF_FOUR[name]))


@pytest.mark.parametrize("name", ["GPT", "mixed", "by rows"])
@distributed(world_size=3)
def test_every_parameter_comes_once_by_collectives(name):
    with environment(**{TRANSPORT_ENV: "collectives"}):
        check_buckets(seeded(MODELS[name]))


def check_buckets(model: nn.Module) -> None:
    for dtype in (None, torch.bfloat16):
        expected = reference(model, dtype)
        for bucket_bytes in (1, 700, 1 << 20):
            assert_same(collected(model, dtype=dtype, bucket_bytes=bucket_bytes), expected)
            found = collected(model, dtype=dtype, bucket_bytes=bucket_bytes, rank0_only=True)
            assert_same(found, expected if not dist.is_initialized() or dist.get_rank() == 0 else {})

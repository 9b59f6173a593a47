"""Two ranks on one device, over gloo, which copies to and from it: everything but the collectives runs as with NCCL."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    CPUOffloadPolicy,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    offload_checkpointed_inputs,
    replicate,
    set_functional_mode,
    set_wire_formats,
)
from fsdp_compose.checkpoint import get_model_state_dict
from tests.gpu.test_cuda import DEVICE
from tests.harness import distributed
from tests.models import GPT, batches, gpt_loss, shard_layers

pytestmark = pytest.mark.gpu


def mesh_of(*shape: int) -> Any:
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def sharded(**options: Any) -> Callable[[GPT], Any]:
    return lambda model: shard_layers(model, mesh=mesh_of(2), **options)


def replicated(model: GPT) -> Any:
    for block in model.blocks:
        replicate(block, mesh=mesh_of(2))
    return replicate(model, mesh=mesh_of(2))


def limited(model: GPT) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(2))
    return fully_shard(model, mesh=mesh_of(2), limit_unsharded_bytes="1 groups")


def functional(model: GPT) -> Any:
    sharded()(model)
    set_functional_mode(model)
    return model


def blocks_compiled(model: GPT) -> Any:
    for block in model.blocks:
        block.compile()
    return sharded()(model)


def inputs_in_host_memory(model: GPT) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    sharded()(model)
    offload_checkpointed_inputs(model, min_bytes=1)
    return model


# Not tensor parallelism, nor the whole model as a graph: their collectives are operators, which crash with gloo and
# memory of a device (torch 2.13).
WAYS: dict[str, Callable[[GPT], Any]] = {
    "default": sharded(),
    "no resharding": sharded(reshard_after_forward=False),
    "hybrid": lambda model: shard_layers(model, mesh=mesh_of(2, 1)),
    "offload": sharded(offload_policy=CPUOffloadPolicy()),
    "limit": lambda model: (
        [fully_shard(block, mesh=mesh_of(2)) for block in model.blocks]
        and fully_shard(model, mesh=mesh_of(2), limit_unsharded_bytes="1 groups")
    ),
    "replicate": replicated,
    "functional": functional,
    "blocks compiled": blocks_compiled,
    "inputs in host memory": inputs_in_host_memory,
}


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().cpu() for name, value in get_model_state_dict(model).items()}


def steps(model: torch.nn.Module, rank: int, size: int, device: str = DEVICE, num_micro: int = 1) -> list[float]:
    """Mean losses of all ranks, each of which has a part of each batch; ``size`` 1: all of it, without sharding."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(6):
        for micro in range(num_micro):
            part = batch.chunk(num_micro)[micro].chunk(size)[rank].to(device)
            if micro + 1 < num_micro:
                with no_sync(model) if size > 1 else nullcontext():
                    (gpt_loss(model, part) / num_micro).backward()
                continue
            loss = gpt_loss(model, part)
            (loss / num_micro).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double().cpu())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


@distributed(2, timeout=180)
@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_they_train_as_one_without_sharding(way, num_micro):
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    base = GPT().double().to(DEVICE)
    model = WAYS[way](copy.deepcopy(base))
    expected = steps(base, 0, 1, num_micro=num_micro)
    found = steps(model, dist.get_rank(), 2, num_micro=num_micro)
    assert found == pytest.approx(expected, abs=1e-6)  # the loss is fp32
    for name, value in parameters(model).items():
        torch.testing.assert_close(value, base.state_dict()[name].cpu(), atol=1e-9, rtol=0)


@distributed(2, timeout=120)
@pytest.mark.parametrize("formats", [("bf16", None), (None, "bf16"), ("int8", None), ("int8", "int8")], ids=str)
def test_what_is_rounded_on_the_wire_is_rounded_as_on_the_cpu(formats):
    torch.manual_seed(0)
    base, found = GPT(), []
    for device in (DEVICE, "cpu"):
        model = copy.deepcopy(base).to(device)
        shard_layers(model, mesh=init_device_mesh(device, (2,)))
        set_wire_formats(model, all_gather=formats[0], reduce_scatter=formats[1])
        found.append(steps(model, dist.get_rank(), 2, device))
    assert found[0] == pytest.approx(found[1], abs=2e-3)  # an element near the middle of two may be rounded otherwise

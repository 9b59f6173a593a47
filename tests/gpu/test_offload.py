"""Offload where host and device memory differ: page-locked memory, streams, and what is left on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    CPUOffloadPolicy,
    clip_grad_norm_,
    flat_parameters,
    offload_model,
    offload_optimizer_states,
    onload_model,
)
from fsdp_compose.core.flat import local_of
from fsdp_compose.core.flat.shard_storage import HostCopies
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.gpu.test_cuda import CYCLES, DEVICE, PRECISIONS, process_group
from tests.models import GPT, batches, gpt_loss, shard_layers

pytestmark = pytest.mark.gpu

POLICIES = {"state": None, "gradients": CPUOffloadPolicy(parameters=False), "shards": CPUOffloadPolicy()}


def build(precision: str = "fp32", **options: Any) -> GPT:
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    return shard_layers(GPT().to(DEVICE), mesh=mesh, mp_policy=PRECISIONS[precision], **options)


def steps(model: GPT, optimizer: torch.optim.Optimizer, num: int = 4) -> list[float]:
    losses = []
    for batch in batches(num):
        loss = gpt_loss(model, batch.to(DEVICE))
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16/fp32", "fp64"])
def test_shards_in_host_memory_train_as_on_the_device(precision):
    with process_group("nccl"):
        model, twin = build(precision, offload_policy=CPUOffloadPolicy()), build(precision)
        ours = steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert ours == pytest.approx(steps(twin, torch.optim.SGD(twin.parameters(), lr=0.1)), abs=1e-3)
        for mine, theirs in zip(_get_fsdp_handles(model), _get_fsdp_handles(twin), strict=True):
            assert mine.shard.device.type == "cpu" and mine.shard.is_pinned()
            assert mine.gradient.memory.flat.is_pinned()
            torch.testing.assert_close(mine.shard, theirs.shard.cpu(), atol=1e-3, rtol=0)


def test_host_memory_is_not_written_while_it_is_read(monkeypatch):
    """Copies are late, and each forward without grad mode is followed by an edit."""
    original = HostCopies.to_device

    def late(self: HostCopies, target: torch.Tensor, source: torch.Tensor) -> None:
        torch.cuda._sleep(CYCLES)
        original(self, target, source)

    monkeypatch.setattr(HostCopies, "to_device", late)
    with process_group("nccl"):
        model, twin = build(offload_policy=CPUOffloadPolicy()), build()
        for batch in batches(3):
            ids = batch[:, :-1].to(DEVICE)
            with torch.no_grad():
                found, expected = model(ids), twin(ids)
                for item in (model, twin):
                    for param in item.parameters():
                        param.mul_(0.5)
            torch.testing.assert_close(found, expected)


def test_only_what_computes_is_on_the_device():
    with process_group("fake"):
        first = build()
        steps(first, torch.optim.AdamW(first.parameters()), 1)  # what libraries allocate for themselves, once
        del first
        model = build(offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.AdamW(model.parameters())
        before = torch.cuda.memory_allocated()
        steps(model, optimizer, 2)
        shards = sum(handle.shard.nbytes for handle in _get_fsdp_handles(model))
        assert torch.cuda.memory_allocated() < before + shards  # neither gradients nor state


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("arguments", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_streamed_steps_are_the_ordinary_ones_bit_for_bit(arguments, policy):
    with process_group("nccl"):
        model, twin = build(offload_policy=POLICIES[policy]), build()
        params, expected = flat_parameters(model), flat_parameters(twin)
        optimizer = offload_optimizer_states(torch.optim.AdamW(params, lr=1e-2, **arguments), chunk_bytes=1 << 14)
        other = torch.optim.AdamW(expected, lr=1e-2, **arguments)
        for batch in batches(4):
            for item in (model, twin):
                item.zero_grad()
            gpt_loss(twin, batch.to(DEVICE)).backward()
            for param, reference in zip(params, expected, strict=True):  # only steps are compared
                local_of(param).copy_(local_of(reference))
            gpt_loss(model, batch.to(DEVICE)).backward()
            for mine, theirs in zip(_get_fsdp_handles(model), _get_fsdp_handles(twin), strict=True):
                mine.gradient.flat.copy_(theirs.gradient.flat)
            optimizer.step()
            other.step()
            for param, reference in zip(params, expected, strict=True):
                assert torch.equal(local_of(param).cpu(), local_of(reference).cpu())
                state, wanted = optimizer.state[param], other.state[reference]
                assert local_of(state["exp_avg"]).is_pinned()
                assert torch.equal(local_of(state["exp_avg_sq"]), local_of(wanted["exp_avg_sq"]).cpu())


def test_a_model_that_sleeps_leaves_the_device():
    with process_group("nccl"):
        nothing = torch.cuda.memory_allocated()
        model = build("bf16/fp32")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        steps(model, optimizer, 2)
        shards = [handle.shard.clone().cpu() for handle in _get_fsdp_handles(model)]
        awake = torch.cuda.memory_allocated()
        offload_model(model, optimizer)
        assert torch.cuda.memory_allocated() - nothing < (awake - nothing) / 4  # counts of steps, the exchange
        onload_model(model, optimizer)
        for handle, expected in zip(_get_fsdp_handles(model), shards, strict=True):
            assert torch.equal(handle.shard.cpu(), expected)
        steps(model, optimizer, 2)

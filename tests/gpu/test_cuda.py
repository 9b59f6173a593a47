"""Behaviour that only an accelerator can show: streams, the caching allocator, host synchronisation. One GPU is enough.

``nccl`` is a real process group of one rank: with a cast, parameters are copied and gathered on the side stream.
``fake`` plays one of several ranks: memory and the order of work are real, numbers are not.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compose
from fsdp_compose import MixedPrecisionPolicy, trace
from fsdp_compose.core.flat import FlatParamHandle
from fsdp_compose.core.flat.collectives import Communicator
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import sgd

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
GROUPS = {"nccl": 1, "fake": 8}
PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16/fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    # Rounding disappears, so that devices can be compared; and the cast makes one rank gather like several.
    "fp64": MixedPrecisionPolicy(torch.float64),
}
CYCLES = 20_000_000  # of a sleeping kernel: some ten milliseconds, longer than a whole step of these models


@contextlib.contextmanager
def process_group(kind: str) -> Iterator[None]:
    if kind == "fake":
        dist.init_process_group("fake", rank=1, world_size=GROUPS[kind], store=FakeStore())
    else:
        dist.init_process_group(f"cpu:gloo,{DEVICE}:{kind}", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Training:
    """A sharded model and its optimizer on one device."""

    def __init__(self, precision: str, device: str = DEVICE, base: GPT | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        model = copy.deepcopy(base) if base is not None else GPT()
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        self.model = shard_layers(model.to(device), mesh=mesh, mp_policy=PRECISIONS[precision], **options)
        self.optimizer = sgd(self.model.parameters())
        self.batches = [batch.to(device) for batch in batches(4)]

    def step(self, batch: torch.Tensor | None = None) -> torch.Tensor:
        loss = gpt_loss(self.model, self.batches[0] if batch is None else batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self) -> list[float]:
        """Losses; the host looks at the first when all steps have been issued."""
        return [loss.item() for loss in [self.step(batch) for batch in self.batches]]

    def shards(self) -> list[torch.Tensor]:
        return [handle.shard.cpu() for handle in _get_fsdp_handles(self.model)]


def test_training_equals_training_on_the_cpu():
    base = GPT()
    with process_group("nccl"):
        ours, reference = Training("fp64", DEVICE, base), Training("fp64", "cpu", base)
        assert ours.run() == pytest.approx(reference.run(), abs=1e-6)
        for shard, expected in zip(ours.shards(), reference.shards(), strict=True):
            torch.testing.assert_close(shard, expected, atol=1e-6, rtol=0)


def test_a_model_that_is_compiled_as_a_whole_trains_as_on_the_cpu():
    base = GPT()
    with process_group("nccl"):
        ours, reference = Training("fp64", DEVICE, base), Training("fp64", "cpu", base)
        run = fsdp_compose.compile(ours.model)
        for batch, same in zip(ours.batches, reference.batches, strict=True):
            loss = gpt_loss(run, batch)
            loss.backward()
            ours.optimizer.step()
            ours.optimizer.zero_grad()
            assert loss.item() == pytest.approx(reference.step(same).item(), abs=1e-6)
        for shard, expected in zip(ours.shards(), reference.shards(), strict=True):
            torch.testing.assert_close(shard, expected, atol=1e-6, rtol=0)


def slow_down(monkeypatch: pytest.MonkeyPatch, which: str) -> list[str]:
    """Let a kernel sleep on a stream before each all-gather; returns a list that gets an entry each time."""
    original: Callable[..., None] = Communicator.unshard
    delays = []

    def start(self: Communicator, handle: FlatParamHandle) -> None:
        stream = self._all_gather_stream if which == "all-gather" else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
        delays.append(which)
        original(self, handle)

    monkeypatch.setattr(Communicator, "unshard", start)
    return delays


@pytest.mark.parametrize("which", ["all-gather", "compute"])
def test_streams_wait_for_each_other(monkeypatch, which):
    """A slow all-gather must delay what computes with it, and slow compute whatever overwrites its memory."""
    base = GPT()
    with process_group("nccl"):
        expected = Training("fp64", DEVICE, base).run()
        delays = slow_down(monkeypatch, which)
        assert Training("fp64", DEVICE, base).run() == pytest.approx(expected, abs=1e-9)
    assert delays


@pytest.mark.parametrize("precision", ["fp32", "bf16/fp32"])
@pytest.mark.parametrize("group", GROUPS)
class TestAStep:
    def test_calls_no_record_stream(self, monkeypatch, group, precision):
        calls: list[object] = []
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: calls.append(stream))
        with process_group(group):
            training = Training(precision)
            for _ in range(3):
                training.step()
        assert calls == []

    def test_never_waits_for_the_device(self, group, precision):
        with process_group(group):
            training = Training(precision)
            for _ in range(
                4
            ):  # the last of these looks for writes to gathered parameters, the next to do so is the 8th
                training.step()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(3):
                    training.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def test_has_the_same_peak_every_time_and_reserves_nothing_more(self, group, precision):
        peaks, reserved = set(), set()
        with process_group(group):
            training = Training(precision)
            for i in range(23):
                torch.cuda.reset_peak_memory_stats()
                training.step()
                if i >= 3:  # without a synchronisation: the peak must not depend on how far the device has come
                    peaks.add(torch.cuda.max_memory_allocated())
                    reserved.add(torch.cuda.memory_reserved())
        assert len(peaks) == 1 and len(reserved) == 1


def test_unsharded_memory_is_gone_after_a_step():
    with process_group("fake"):
        training = Training("bf16/fp32")
        training.step()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            training.model(training.batches[0][:, :-1])
        assert torch.cuda.memory_allocated() <= before
        assert all(isinstance(param, nn.Parameter) for param in training.model.parameters())


def test_a_trace_has_the_times_of_streams():
    with process_group("fake"):
        training = Training("fp32")
        training.step()
        with trace(training.model) as found:
            torch.cuda._sleep(CYCLES)
            training.step()
    assert all(1e-3 < item.start <= item.stop and not item.was_cut for item in found.events)
    assert {"all-gathers", "compute", "reductions"} == {item.track for item in found.events}

"""On an accelerator communication runs on streams of its own. Everything that touches the same memory is ordered by a
wait: shown without an accelerator, by vector clocks, in each kind of program; and each wait is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    CheckpointedInputs,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    flat_parameters,
    no_sync,
    offload_checkpointed_inputs,
    replicate,
    set_functional_mode,
    summon_full_params,
)
from fsdp_compose.core.flat import even_chunks
from fsdp_compose.core.flat.shard_storage import host_copies
from fsdp_compose.core.group.registry import _get_fsdp_handles
from fsdp_compose.core.runtime import untracked_writes
from fsdp_compose.optim import Muon, muon_groups
from fsdp_compose.plugins.transports import Int8, Wire
from tests.harness import distributed, lasting_mesh
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import local_part, sgd
from tests.vector_clocks import Clocks

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: int = 1,
    unsynced: bool = False,
    params: list[nn.Parameter] | None = None,
) -> None:
    for batch in batches(2):
        for i, part in enumerate(local_part(batch).chunk(microbatches)):
            with no_sync(model) if unsynced and i + 1 < microbatches else nullcontext():
                gpt_loss(model, part).backward()
        clip_grad_norm_([*model.parameters()] if params is None else params, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def model_of(**options: Any) -> GPT:
    torch.manual_seed(0)
    use_reentrant = options.pop("use_reentrant", None)
    return shard_layers(GPT(layers=2, use_reentrant=use_reentrant), **options)


def plain(clocks: Clocks, **options: Any) -> GPT:
    training = {key: options.pop(key) for key in ("microbatches", "unsynced") if key in options}
    model = clocked(clocks, model_of(**options))
    steps(model, sgd(model.parameters()), **training)
    return model


def clocked(clocks: Clocks, model: GPT) -> GPT:
    for handle in _get_fsdp_handles(model):
        handle.change_transports(clocks.transport)
    return model


def hybrid_mesh() -> Any:
    return lasting_mesh(("replicate", "shard"), (2, dist.get_world_size() // 2))


def functional(clocks: Clocks) -> None:
    model = clocked(clocks, model_of())
    set_functional_mode(model)
    steps(model, sgd(model.parameters()))


def flat_views(clocks: Clocks) -> None:
    model = clocked(clocks, model_of(mp_policy=BF16))
    params = flat_parameters(model)
    steps(model, sgd(params), params=params)


def replicated(clocks: Clocks) -> None:
    torch.manual_seed(0)
    model = GPT(layers=2)
    for block in model.blocks:
        replicate(block)
    steps(clocked(clocks, replicate(model)), sgd(model.parameters()))


def interrupted(clocks: Clocks) -> None:
    """An exception in forward, and one in backward, on all ranks."""
    model = clocked(clocks, model_of())
    optimizer = sgd(model.parameters())
    steps(model, optimizer)
    for register in (nn.Module.register_forward_pre_hook, nn.Module.register_full_backward_pre_hook):
        handle = register(model.blocks[1], fail)
        with pytest.raises(ArithmeticError):
            steps(model, optimizer)
        handle.remove()
        steps(model, optimizer)


def fail(*_: Any) -> None:
    raise ArithmeticError


def inference(clocks: Clocks) -> None:
    model = clocked(clocks, model_of())
    with torch.no_grad():
        for batch in batches(2):
            gpt_loss(model, local_part(batch))
    steps(model, sgd(model.parameters()))
    with summon_full_params(model):
        [param.norm() for param in model.parameters()]
    steps(model, sgd(model.parameters()))


def rounded(clocks: Clocks, **options: Any) -> None:
    model = model_of(**options)
    for handle in _get_fsdp_handles(model):
        handle.change_transports(lambda transport, role: Wire(clocks.transport(transport, role), Int8(), Int8()))
    steps(model, sgd(model.parameters()))


def with_muon(clocks: Clocks, **options: Any) -> None:
    """In several buckets, so that one is on its way while another is computed, and results come back."""
    over_replicas = options.pop("over_replicas", False)
    model = clocked(clocks, model_of(**options))
    optimizer = Muon(muon_groups(model), bucket_bytes=1500, over_replicas=over_replicas)
    assert optimizer.describe().num_collectives >= 4
    steps(model, optimizer)


def offloaded_inputs(clocks: Clocks) -> None:
    torch.manual_seed(0)
    model = GPT(layers=4)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    offload_checkpointed_inputs(model, min_bytes=1)
    steps(clocked(clocks, shard_layers(model)), sgd(model.parameters()))


def dropped_inputs(clocks: Clocks) -> None:
    """Backwards that do not come, after one that has fetched for them."""
    inputs = CheckpointedInputs(min_bytes=1)
    layers = [nn.Linear(8, 8) for _ in range(4)]

    def forward() -> torch.Tensor:
        x = torch.randn(4, 8, requires_grad=True) * 1
        for layer in layers:
            with inputs:
                x = checkpoint(lambda x, layer=layer: layer(x).relu(), x, use_reentrant=False)
        return x.sum()

    for _ in range(3):
        first, second = forward(), forward()
        second.backward()
        del first, second
    sharded = clocked(clocks, model_of())  # so that there are ranks, as in all programs
    steps(sharded, sgd(sharded.parameters()))


def from_meta(clocks: Clocks) -> None:
    """Memory that nobody has initialized is looked for in all later models, also in host memory."""
    with torch.device("meta"):
        model = GPT(layers=2)
    model = clocked(clocks, shard_layers(model, offload_policy=CPUOffloadPolicy()))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    steps(model, sgd(model.parameters()))
    plain(clocks, offload_policy=CPUOffloadPolicy())


PROGRAMS: dict[str, Callable[[Clocks], object]] = {
    "resharding": lambda clocks: plain(clocks),
    "no resharding": lambda clocks: plain(clocks, reshard_after_forward=False),
    "parts": lambda clocks: plain(clocks, reshard_after_forward=2),
    "bf16": lambda clocks: plain(clocks, mp_policy=BF16),
    "accumulation": lambda clocks: plain(clocks, microbatches=2),
    "accumulation without sync": lambda clocks: plain(clocks, microbatches=3, unsynced=True),
    "checkpointing": lambda clocks: plain(clocks, use_reentrant=False),
    "reentrant checkpointing": lambda clocks: plain(clocks, use_reentrant=True),
    "hybrid": lambda clocks: plain(clocks, mesh=hybrid_mesh()),
    "hybrid, bf16, without sync": lambda clocks: plain(
        clocks, mesh=hybrid_mesh(), mp_policy=BF16, microbatches=2, unsynced=True
    ),
    "shards of one, without sync": lambda clocks: plain(clocks, mesh=hybrid_mesh(), microbatches=3, unsynced=True),
    "offload": lambda clocks: plain(clocks, offload_policy=CPUOffloadPolicy()),
    "offload, bf16, accumulation": lambda clocks: plain(
        clocks, offload_policy=CPUOffloadPolicy(), mp_policy=BF16, microbatches=2
    ),
    "offload, from meta": from_meta,
    "offloaded inputs": offloaded_inputs,
    "offloaded inputs, dropped": dropped_inputs,
    "functional": functional,
    "flat views": flat_views,
    "replicate": replicated,
    "wire": rounded,
    "wire, bf16": lambda clocks: rounded(clocks, mp_policy=BF16),
    "wire, hybrid": lambda clocks: rounded(clocks, mesh=hybrid_mesh()),
    "even chunks": lambda clocks: plain(clocks, granularity=even_chunks),
    "even chunks, bf16, without sync": lambda clocks: plain(
        clocks, granularity=even_chunks, mp_policy=BF16, microbatches=2, unsynced=True
    ),
    "even chunks, offload": lambda clocks: plain(clocks, granularity=even_chunks, offload_policy=CPUOffloadPolicy()),
    "even chunks, hybrid": lambda clocks: plain(clocks, granularity=even_chunks, mesh=hybrid_mesh()),
    "Muon": with_muon,
    "Muon, hybrid": lambda clocks: with_muon(clocks, mesh=hybrid_mesh(), over_replicas=True),
    "exceptions": interrupted,
    "without gradients": inference,
}
for name in ("resharding", "bf16", "accumulation without sync", "offload", "offload, bf16, accumulation", "flat views"):
    PROGRAMS[f"{name}, alone"] = PROGRAMS[name]


def watch(program: str, skips: str = "") -> Clocks:
    host_copies.cache_clear()
    try:
        with Clocks(skips) as clocks:
            PROGRAMS[program](clocks)
    finally:
        host_copies.cache_clear()
    return clocks


# Each kind of wait, and the programs that go wrong without it.
WAITS = {
    "wait_stream in unshard": ["resharding"],
    "wait in wait": ["resharding"],
    "wait_stream in _start": ["resharding", "replicate"],  # of a reduce-scatter, of an all-reduce
    "wait in _finish_stage": ["resharding", "hybrid", "replicate"],
    "wait_stream in unshard_post_forward": ["parts"],
    "wait_stream in _finish_stage": ["offload, alone"],
    "wait in _go_on": ["hybrid"],
    "wait in all_gather_copy": ["functional"],
    "wait_stream in to_host": ["offload", "offloaded inputs"],
    "wait_event in to_host": ["offload"],
    "wait_event in _let_leave": ["offloaded inputs"],
    "wait_stream in to_device": ["offloaded inputs"],
    "wait_event in wait": ["offloaded inputs", "offloaded inputs, dropped", "wire", "even chunks"],
    # Before decoding, before copying; between the two collectives of a sum over replicas.
    "wait in finish_with": ["wire", "wire, bf16", "even chunks", "wire, hybrid"],
    "wait in finish": ["wire, hybrid"],  # of the second of these
    "synchronize in synchronize": ["offload"],
    "synchronize in __del__": ["offloaded inputs"],
    "wait in _wait": ["Muon", "Muon, hybrid"],  # of the all-to-alls of a step, in either direction
}


def is_for(program: str, world_size: int) -> bool:
    return world_size == (1 if "alone" in program else 4 if "hybrid" in program or program == "parts" else 2)


@distributed(world_size=(1, 2, 4), timeout=120)
def test_everything_is_in_an_order(world_size):
    for program in PROGRAMS:
        if is_for(program, world_size):
            clocks = watch(program)
            assert clocks.accesses > 400 and not clocks.faults, (program, clocks.faults)
            assert clocks.waits <= {*WAITS}, clocks.waits - {*WAITS}


@distributed(world_size=(1, 2, 4), timeout=120)
def test_no_wait_can_be_left_out(world_size):
    found = {
        (wait, program): watch(program, wait).faults
        for wait, programs in WAITS.items()
        for program in programs
        if is_for(program, world_size)
    }
    assert found and all(found.values()), [wait for wait, faults in found.items() if not faults]


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_a_step_keeps_to_what_a_graph_capture_allows(reshard_after_forward):
    """As for a CUDA graph: all of it on streams that take part, nothing waits for what was before, the host waits for
    nothing, and tensors stay where they are. What of this a CPU cannot show: tests/gpu/test_cuda_graphs.py."""
    with Clocks() as clocks:
        model = clocked(clocks, model_of(reshard_after_forward=reshard_after_forward))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batch = local_part(next(batches(1)))

        def step() -> list[int]:
            gpt_loss(model, batch).backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            tensors = [item.to_local() for param in model.parameters() for item in (param, param.grad)]
            optimizer.zero_grad(set_to_none=False)
            return [tensor.data_ptr() for tensor in tensors]

        step()
        places = step()
        with mock.patch.object(untracked_writes, "written", wraps=untracked_writes.written) as looks:  # of the host
            for _ in range(6):
                before = clocks.accesses
                with clocks.captured():
                    assert step() == places
                assert clocks.accesses > before and not clocks.faults, clocks.faults
            assert not looks.called
            assert step() == places and looks.called
        assert not clocks.faults, clocks.faults


@distributed(world_size=2)
def test_what_a_graph_capture_forbids_is_seen():
    with Clocks() as clocks:
        side, event = clocks.Stream(), clocks.Event()
        x = torch.ones(4)
        event.record(clocks.compute)

        def wait_for_earlier_work() -> None:
            clocks.compute.wait_event(event)

        def issue_outside() -> None:
            with clocks.stream(side):
                x.clone()

        def leave_unjoined() -> None:
            side.wait_stream(clocks.compute)
            with clocks.stream(side):
                x.clone()

        for mistake, fault in (
            (wait_for_earlier_work, "outside captures"),
            (issue_outside, "takes no part"),
            (leave_unjoined, "before it has waited"),
            (x.sum().item, "host would wait"),
            (clocks.compute.synchronize, "host waits"),
        ):
            clocks.faults.clear()
            with clocks.captured():
                mistake()
            assert any(fault in line for line in clocks.faults), (fault, clocks.faults)


@pytest.mark.parametrize("place", ["between", "in the block"])
@distributed(world_size=1)
def test_inputs_that_are_written_to_while_they_are_copied_out_are_refused(place):
    with Clocks():
        inputs, layer = CheckpointedInputs(min_bytes=1), nn.Linear(8, 8)
        x = torch.randn(4, 8, requires_grad=True) * 1

        def block(x: torch.Tensor) -> torch.Tensor:
            if place == "in the block":
                with torch.no_grad():
                    x.mul_(2)
            return layer(x)

        with inputs:
            output = checkpoint(block, x, use_reentrant=False)
        if place == "between":
            with torch.no_grad():
                x.mul_(2)
        with pytest.raises(RuntimeError, match="was modified by an inplace operation"):
            output.sum().backward()

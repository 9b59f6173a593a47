"""Collectives made of messages are counted by whoever counts torch's operators, as those of FSDP2 are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compose import fully_shard
from tests.harness import distributed
from tests.models import Net, inputs, shard_layers
from tests.training import full, mean_square

C10D = torch.ops.c10d


@contextmanager
def counted_by_mode() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    with CommDebugMode() as mode:
        yield counts
    counts.update({str(op): count for op, count in mode.get_comm_counts().items()})


@contextmanager
def counted_by_profiler() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield counts
    found = {event.key: event.count for event in profiler.key_averages()}
    names = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
    counts.update({f"c10d.{name}": found[f"c10d::{name}"] for name in names if f"c10d::{name}" in found})


def sharded(shard: Callable[..., Any], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)], nn.Linear(32, 32))
    for block in [*model][:3]:
        shard(block, **options)
    shard(model, **options)
    return model


def one_step(model: nn.Module) -> None:
    model(torch.randn(4, 32)).square().mean().backward()


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "kept after forward": lambda: {"reshard_after_forward": False},
    "hybrid": lambda: {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))},
    "bf16": lambda: {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


@pytest.mark.parametrize("counted", [counted_by_mode, counted_by_profiler])
@pytest.mark.parametrize("options", OPTIONS)
@distributed(world_size=4)
def test_counts_are_those_of_FSDP2(options, counted):
    counts = []
    for shard in (fsdp2.fully_shard, fully_shard):
        model = sharded(shard, **OPTIONS[options]())
        one_step(model)  # the first forward also looks at the model
        one_step(model)
        with counted() as found:
            one_step(model)
        counts.append(found)
    assert counts[0] == counts[1] and counts[0].total() >= 8


@distributed(world_size=2)
def test_one_rank_alone_may_count():
    model = sharded(fully_shard)
    one_step(model)
    if dist.get_rank() == 0:
        with counted_by_mode() as found:
            one_step(model)
        assert found["c10d._allgather_base_"] == 7 and found["c10d._reduce_scatter_base_"] == 4
    else:
        one_step(model)


class Sizes(TorchDispatchMode):
    """Looks at the arguments of collectives, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, torch.dtype, float]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and func._overloadpacket not in (C10D.send, C10D.recv_):
            tensor = args[1] if isinstance(args[1], torch.Tensor) else args[0][0]
            self.seen.append(
                (func._overloadpacket.__name__, tensor.numel(), tensor.dtype, float(tensor.detach().sum()))
            )
        return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@distributed(world_size=2)
def test_a_mode_sees_sizes_dtypes_and_elements(dtype):
    model = fully_shard(nn.Linear(8, 8, bias=False, dtype=dtype))
    batch = torch.ones(2, 8, dtype=dtype)
    model(batch).sum().backward()
    own = float(model.weight.to_local().sum())
    with Sizes() as mode:
        model(batch).sum().backward()
    names = [name for name, *_ in mode.seen]
    assert names == ["_allgather_base_", "_reduce_scatter_base_"]
    gradients = 64.0 if dtype == torch.float16 else 128.0  # divided before they are summed
    for name, numel, seen, total in mode.seen:
        assert seen == dtype
        assert (numel, total) == ((64, gradients) if name == "_reduce_scatter_base_" else (32, own))


@pytest.mark.parametrize("mode", [CommDebugMode, Sizes])
@distributed(world_size=(2, 4))
def test_what_listens_changes_no_bit(mode):
    states = []
    for listens in (False, True):
        torch.manual_seed(0)
        model = Net()
        shard_layers(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch in inputs(3):
            if listens:
                with mode():
                    mean_square(model, batch).backward()
            else:
                mean_square(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append([full(param) for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
@distributed(world_size=2)
def test_selective_checkpointing_sees_the_collectives_too(policy):
    """Its mode is a listener like others, and runs forward twice."""

    def contexts():
        return create_selective_checkpoint_contexts(
            lambda context, op, *args, **kwargs: policy if op == torch.ops.aten.addmm.default else None
        )

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return x

    gradients = []
    for shard in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        if shard:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 16)).square().mean().backward()
        gradients.append([full(param.grad) for param in model.parameters()])
    for expected, got in zip(*gradients, strict=True):
        assert torch.equal(expected, got)

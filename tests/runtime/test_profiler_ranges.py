"""Profilers show what each group does, by the group's name."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_compose import set_functional_mode, trace
from tests.harness import distributed
from tests.inspect.test_trace import Stack, step
from tests.models import Net, inputs, shard_layers
from tests.training import mean_square

PREFIX = "fsdp_compose::"


@pytest.mark.parametrize("is_functional", [False, True])
@distributed(world_size=2)
def test_a_profile_names_every_collective_of_every_group_in_order(is_functional):
    model = shard_layers(Net(2), reshard_after_forward=True)
    set_functional_mode(model, is_functional)
    x = next(inputs())
    mean_square(model, x).backward()  # the order of prefetches is known from here on
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        mean_square(model, x).backward()
    events = [item for item in profiler.events() if PREFIX in item.name]
    events.sort(key=lambda item: item.time_range.start)
    seen = [item.name.removeprefix(PREFIX) for item in events]
    groups, backwards = ["(root)", "layers.0", "layers.1"], ["(root)", "layers.1", "layers.0"]
    gathers = [name for name in seen if name.startswith("all_gather ")]
    assert gathers[:3] == [f"all_gather {name}" for name in groups]
    reductions = [name for name in seen if name.startswith("reduce_scatter ")]
    assert sorted(reductions) == sorted(f"reduce_scatter {name}" for name in groups)
    if is_functional:
        assert not any("publish" in name for name in seen)
        return
    assert len(gathers) == 6
    waits = [name for name in seen if name.startswith("wait all_gather ")]
    assert waits[:3] == [f"wait all_gather {name}" for name in groups]
    assert {name for name in seen if name.startswith("wait reduce_scatter")} == {
        f"wait reduce_scatter {name}" for name in backwards
    }
    assert [name for name in seen if name.startswith("publish")] == [f"publish {name}" for name in groups]
    with torch.no_grad():
        model(x)  # none without a profiler: nothing raises either


@distributed(world_size=2)
def test_a_profile_names_what_every_group_computes_and_when_it_is_resharded():
    model = shard_layers(Stack(checkpoints=True))
    step(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, trace(model) as found:
        step(model)
    events = sorted((item for item in profiler.events() if PREFIX in item.name), key=lambda item: item.time_range.start)
    kinds = ("forward", "recomputation", "backward", "reshard")
    names = [item.name.removeprefix(PREFIX) for item in events]
    names = [name for name in names if name.split()[0] in kinds]
    assert names == [event.name for event in found.events if event.what in kinds]
    blocks = [f"{what} blocks.{i}" for i in range(3) for what in ("forward", "reshard")]
    parts = ("backward", "recomputation", "reshard")
    assert names[:7] == ["forward (root)", *blocks]
    assert names[7:] == ["backward (root)", *(f"{what} blocks.{i}" for i in (2, 1, 0) for what in parts)]
    for outer, inner in (("forward (root)", "forward blocks.1"), ("backward blocks.1", "recomputation blocks.1")):
        spans = [next(item.time_range for item in events if item.name == PREFIX + name) for name in (outer, inner)]
        assert spans[0].start < spans[1].start <= spans[1].end < spans[0].end

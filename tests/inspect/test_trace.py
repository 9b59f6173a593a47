"""``trace``: what overlaps what in a step of each kind of sharding, pinned; and the forms in which it is shown."""

from __future__ import annotations

import contextlib
import copy
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    TraceEvent,
    functional_mode,
    no_sync,
    record_collectives,
    replicate,
    summon_full_params,
    trace,
)
from fsdp_compose.core.comm.transport import CollectiveNotes
from fsdp_compose.core.flat.collectives import Communicator
from fsdp_compose.core.flat.events import _methods
from fsdp_compose.core.group.parameter_swap import ParameterSwap
from fsdp_compose.core.group.registry import _get_fsdp_handles, _get_fsdp_states
from fsdp_compose.inspect.trace import recorded
from fsdp_compose.inspect.trace_formats import lanes
from tests.harness import distributed, fake_process_group
from tests.models import shard_layers
from tests.training import local_part


class Stack(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def schedule(make: Callable[[], nn.Module], run: Callable[[nn.Module], object] = step) -> str:
    """The second iteration, on one of 4 ranks."""
    with fake_process_group(rank=1, world_size=4):
        model = make()
        step(model)
        with trace(model) as found:
            run(model)
        return found.text(times=False)


def test_stack_of_blocks():
    """Each block is gathered while the one before it computes, and reduced while the next one does."""
    assert_expected_inline(
        schedule(lambda: shard_layers(Stack())),
        """\
all-gather blocks.0 (32 x float32 among 4 ranks)
forward (root)
  all-gather blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.0
  forward blocks.0
  reshard blocks.0
  all-gather blocks.2 (32 x float32 among 4 ranks)
  wait for all-gather blocks.1
  forward blocks.1
  reshard blocks.1
  wait for all-gather blocks.2
  forward blocks.2
  reshard blocks.2
all-gather blocks.2 (32 x float32 among 4 ranks)
backward (root)
  all-gather blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.2
  backward blocks.2
  reshard blocks.2
  reduce-scatter blocks.2 (32 x float32 among 4 ranks)
  all-gather blocks.0 (32 x float32 among 4 ranks)
  wait for all-gather blocks.1
  backward blocks.1
  reshard blocks.1
  wait for reduce-scatter blocks.2
  reduce-scatter blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.0
  backward blocks.0
reshard blocks.0
wait for reduce-scatter blocks.1
reduce-scatter blocks.0 (32 x float32 among 4 ranks)
wait for reduce-scatter blocks.0""",
    )


def test_without_resharding_after_forward():
    """Backward gathers nothing."""
    assert_expected_inline(
        schedule(lambda: shard_layers(Stack(), reshard_after_forward=False)),
        """\
all-gather blocks.0 (32 x float32 among 4 ranks)
forward (root)
  all-gather blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.0
  forward blocks.0
  all-gather blocks.2 (32 x float32 among 4 ranks)
  wait for all-gather blocks.1
  forward blocks.1
  wait for all-gather blocks.2
  forward blocks.2
backward (root)
  backward blocks.2
  reshard blocks.2
  reduce-scatter blocks.2 (32 x float32 among 4 ranks)
  backward blocks.1
  reshard blocks.1
  wait for reduce-scatter blocks.2
  reduce-scatter blocks.1 (32 x float32 among 4 ranks)
  backward blocks.0
reshard blocks.0
wait for reduce-scatter blocks.1
reduce-scatter blocks.0 (32 x float32 among 4 ranks)
wait for reduce-scatter blocks.0""",
    )


def test_accumulation():
    """Without gradient sync nothing is reduced: the second backward reduces for both."""

    def two_microbatches(model: nn.Module) -> None:
        with no_sync(model):
            step(model)
        step(model)

    assert_expected_inline(
        schedule(lambda: shard_layers(Stack()), two_microbatches),
        """\
all-gather blocks.0 (32 x float32 among 4 ranks)
forward (root)
  all-gather blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.0
  forward blocks.0
  reshard blocks.0
  all-gather blocks.2 (32 x float32 among 4 ranks)
  wait for all-gather blocks.1
  forward blocks.1
  reshard blocks.1
  wait for all-gather blocks.2
  forward blocks.2
  reshard blocks.2
all-gather blocks.2 (32 x float32 among 4 ranks)
backward (root)
  all-gather blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.2
  backward blocks.2
  reshard blocks.2
  all-gather blocks.0 (32 x float32 among 4 ranks)
  wait for all-gather blocks.1
  backward blocks.1
  reshard blocks.1
  wait for all-gather blocks.0
  backward blocks.0
reshard blocks.0
all-gather blocks.0 (32 x float32 among 4 ranks)
forward (root)
  all-gather blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.0
  forward blocks.0
  reshard blocks.0
  all-gather blocks.2 (32 x float32 among 4 ranks)
  wait for all-gather blocks.1
  forward blocks.1
  reshard blocks.1
  wait for all-gather blocks.2
  forward blocks.2
  reshard blocks.2
all-gather blocks.2 (32 x float32 among 4 ranks)
backward (root)
  all-gather blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.2
  backward blocks.2
  reshard blocks.2
  reduce-scatter blocks.2 (32 x float32 among 4 ranks)
  all-gather blocks.0 (32 x float32 among 4 ranks)
  wait for all-gather blocks.1
  backward blocks.1
  reshard blocks.1
  wait for reduce-scatter blocks.2
  reduce-scatter blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.0
  backward blocks.0
reshard blocks.0
wait for reduce-scatter blocks.1
reduce-scatter blocks.0 (32 x float32 among 4 ranks)
wait for reduce-scatter blocks.0""",
    )


def test_activation_checkpointing():
    """A recomputation inside backward computes with what was gathered for that."""
    assert_expected_inline(
        schedule(lambda: shard_layers(Stack(checkpoints=True))),
        """\
all-gather blocks.0 (32 x float32 among 4 ranks)
forward (root)
  all-gather blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.0
  forward blocks.0
  reshard blocks.0
  all-gather blocks.2 (32 x float32 among 4 ranks)
  wait for all-gather blocks.1
  forward blocks.1
  reshard blocks.1
  wait for all-gather blocks.2
  forward blocks.2
  reshard blocks.2
all-gather blocks.2 (32 x float32 among 4 ranks)
backward (root)
  all-gather blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.2
  backward blocks.2
    recomputation blocks.2
  reshard blocks.2
  reduce-scatter blocks.2 (32 x float32 among 4 ranks)
  all-gather blocks.0 (32 x float32 among 4 ranks)
  wait for all-gather blocks.1
  backward blocks.1
    recomputation blocks.1
  reshard blocks.1
  wait for reduce-scatter blocks.2
  reduce-scatter blocks.1 (32 x float32 among 4 ranks)
  wait for all-gather blocks.0
  backward blocks.0
    recomputation blocks.0
reshard blocks.0
wait for reduce-scatter blocks.1
reduce-scatter blocks.0 (32 x float32 among 4 ranks)
wait for reduce-scatter blocks.0""",
    )


def test_replicate():
    """Nothing is gathered; gradients are averaged in buckets, as soon as backward has filled them."""
    assert_expected_inline(
        schedule(lambda: replicate(Stack(), bucket_bytes=64)),
        """\
forward (root)
backward (root)
  all-reduce blocks.2.weight and 1 more (20 x float32 among 4 ranks)
  all-reduce blocks.1.weight and 1 more (20 x float32 among 4 ranks)
  all-reduce blocks.0.weight and 1 more (20 x float32 among 4 ranks)
wait for all-reduce blocks.2.weight and 1 more
wait for all-reduce blocks.1.weight and 1 more
wait for all-reduce blocks.0.weight and 1 more""",
    )


def test_hybrid():
    """What was scattered over the shard group is averaged over the replicas, while backward goes on."""

    def make() -> nn.Module:
        return shard_layers(Stack(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))

    assert_expected_inline(
        schedule(make),
        """\
all-gather blocks.0 (24 x float32 among 2 ranks)
forward (root)
  all-gather blocks.1 (24 x float32 among 2 ranks)
  wait for all-gather blocks.0
  forward blocks.0
  reshard blocks.0
  all-gather blocks.2 (24 x float32 among 2 ranks)
  wait for all-gather blocks.1
  forward blocks.1
  reshard blocks.1
  wait for all-gather blocks.2
  forward blocks.2
  reshard blocks.2
all-gather blocks.2 (24 x float32 among 2 ranks)
backward (root)
  all-gather blocks.1 (24 x float32 among 2 ranks)
  wait for all-gather blocks.2
  backward blocks.2
  reshard blocks.2
  reduce-scatter blocks.2 (24 x float32 among 2 ranks)
  all-gather blocks.0 (24 x float32 among 2 ranks)
  wait for all-gather blocks.1
  backward blocks.1
  reshard blocks.1
  wait for reduce-scatter blocks.2
  all-reduce blocks.2 (12 x float32 among 2 ranks)
  reduce-scatter blocks.1 (24 x float32 among 2 ranks)
  wait for all-gather blocks.0
  backward blocks.0
reshard blocks.0
wait for reduce-scatter blocks.1
all-reduce blocks.1 (12 x float32 among 2 ranks)
reduce-scatter blocks.0 (24 x float32 among 2 ranks)
wait for reduce-scatter blocks.0
all-reduce blocks.0 (12 x float32 among 2 ranks)
wait for all-reduce blocks.2
wait for all-reduce blocks.1
wait for all-reduce blocks.0""",
    )


def test_functional_mode_and_full_parameters():
    def both(model: nn.Module) -> None:
        with functional_mode(model):
            step(model)
        with summon_full_params(model):
            pass

    text = schedule(lambda: shard_layers(Stack()), both)
    assert "backward" not in text and text.count("forward blocks.") == 3 and text.count("reduce-scatter ") == 6
    assert text.endswith("gather blocks.2 on every rank")


def test_collectives_of_a_compiled_model_are_seen():
    def make() -> nn.Module:
        model = shard_layers(Stack())
        model.compile(backend="aot_eager", fullgraph=True)
        return model

    try:
        text = schedule(make)
    finally:
        torch._dynamo.reset()
    lines = [line.split(" blocks")[0].strip() for line in text.splitlines()]
    assert [line for line in lines if line.startswith(("forward", "backward"))] == ["forward (root)", "backward (root)"]
    counts = {line: lines.count(line) for line in lines}
    assert (counts["all-gather"], counts["reduce-scatter"], counts["wait for reduce-scatter"]) == (5, 3, 3)


def test_chrome_trace_is_what_viewers_expect(tmp_path: Path):
    with fake_process_group(rank=3, world_size=4):
        model = shard_layers(Stack(checkpoints=True))
        with trace(model) as found:
            step(model)
            step(model)
    found.save(tmp_path / "step.json")
    loaded = json.loads((tmp_path / "step.json").read_text())
    assert loaded["displayTimeUnit"] == "ms" and loaded["otherData"]["rank"] == 3
    threads, spans = {}, defaultdict(list)
    for event in loaded["traceEvents"]:
        assert event["ph"] in ("M", "X") and event["pid"] == 3 and type(event["tid"]) is int and event["name"]
        assert type(event["ts"]) in (int, float) and event["ts"] >= 0 and isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert type(event["dur"]) is float and event["dur"] >= 0
            spans[event["tid"]].append(event)
        elif event["name"] == "thread_name":
            threads[event["tid"]] = event["args"]["name"]
    metadata = [event for event in loaded["traceEvents"] if event["ph"] == "M"]
    assert metadata[0]["name"] == "process_name" and metadata[0]["args"] == {"name": "rank 3"}
    assert threads.keys() == spans.keys() and {"compute", "all-gathers", "reductions"} <= {*threads.values()}
    assert sum(map(len, spans.values())) == len(found.events)
    for events in spans.values():
        around: list[dict] = []
        for event in events:  # in the order of the file: of start
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"] + 1e-6:
                around.pop()
            if around:
                assert event["ts"] + event["dur"] <= around[-1]["ts"] + around[-1]["dur"] + 1e-6
            around.append(event)
    names = [event["name"] for events in spans.values() for event in events]
    for name in ("forward blocks.0", "recomputation blocks.1", "backward blocks.2", "all-gather blocks.0"):
        assert name in names
    (gather, *_) = [event for events in spans.values() for event in events if event["cat"] == "all-gather"]
    assert gather["args"]["bytes"] == 32 * 4 and "32 x float32 among 4 ranks" in gather["args"]["collective"]


def test_pictures(tmp_path: Path):
    with fake_process_group(rank=0, world_size=2):
        model = shard_layers(Stack())
        with trace(model) as found:
            step(model)
    found.save(tmp_path / "step.svg")
    found.save(str(tmp_path / "step.png"))
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert root.tag.endswith("svg") and len(list(root.iter())) > len(found.events)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"ends in \.json, \.png or \.svg"):
        found.save(tmp_path / "step.txt")


def event(start: float, stop: float) -> TraceEvent:
    return TraceEvent("forward", "", "compute", start, stop, 0, 1)


def test_events_that_cross_are_in_different_lanes():
    outer, crosses, inside, later = event(0, 4), event(1, 5), event(2, 4), event(4, 6)
    assert lanes([outer, inside, later]) == [[outer, inside, later]]
    assert lanes([crosses, inside, outer, later]) == [[outer, inside, later], [crosses]]


def test_every_collective_is_under_way_between_its_issue_and_its_wait():
    """From then on, an accelerator's clock follows it."""
    steps: defaultdict[object, list[str]] = defaultdict(list)

    class Notes(CollectiveNotes):
        def issue(self, collective):
            steps[collective].append("issue")

        def under_way(self, collective, work):
            steps[collective].append("under way")

        def wait(self, collective):
            steps[collective].append("wait")

        def done(self, collective):
            steps[collective].append("done")

    with fake_process_group(rank=1, world_size=4):
        model = shard_layers(Stack(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
        with recorded(_get_fsdp_states(model), lambda _: Notes()):
            step(model)
    kinds = {collective.kind for collective in steps}
    assert kinds == {"all-gather", "reduce-scatter", "all-reduce"}
    assert {(*found,) for found in steps.values()} == {("issue", "under way", "wait", "done")}


@distributed(world_size=2)
def test_one_rank_alone_may_trace_and_nothing_changes():
    model, other, rank = shard_layers(Stack()), shard_layers(Stack()), dist.get_rank()
    reference = Stack()
    before = [handle.mesh.transport for handle in _get_fsdp_handles(model)]
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for i in range(4):
        with contextlib.ExitStack() as stack:
            if i == 2 or (i == 1 and rank == 1):
                lines = stack.enter_context(record_collectives(model))
                found = stack.enter_context(trace(model))
            model(local_part(x)).square().mean().backward()
            other(local_part(x)).sum().backward()  # not in the trace
        reference(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    assert [handle.mesh.transport for handle in _get_fsdp_handles(model)] == before
    assert all(method._owner.__dict__[method._name] is method._plain for method in _methods) and len(_methods) > 10
    assert ParameterSwap.show_sharded_after_forward is ParameterSwap.show_sharded
    told = [line for line in found.text(times=False).splitlines() if "all-gather" in line or "reduce-scatter" in line]
    assert [line.strip() for line in told] == [line.strip() for line in lines]
    events = found.events
    assert len(events) == len([*told, *range(6 + 2 + 6)]) and not any(item.was_cut for item in events)
    assert all(0 <= item.start <= item.stop and item.begins < item.ends for item in events)
    for wait in (item for item in events if item.what == "wait"):
        (awaited, *_) = [item for item in events if item.detail == wait.detail and item.start < wait.start <= item.stop]
        assert awaited.stop == pytest.approx(wait.stop, abs=0.05)
    root = next(item for item in events if item.name == "forward (root)")
    inside = [item for item in events if item.what == "forward" and item is not root]
    assert all(root.start < item.start <= item.stop < root.stop for item in inside) and len(inside) == 3
    summary = found.text().splitlines()[-2:]
    assert [line.split(" ms")[0].split(" B")[0] for line in summary] == [
        "all-gather: 6 of 576",
        "reduce-scatter: 3 of 288",
    ]


@distributed(world_size=2)
def test_an_exception_ends_a_trace_with_what_had_happened():
    model = shard_layers(Stack())
    with pytest.raises(ZeroDivisionError), trace(model) as found:
        model.blocks[1].register_forward_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(RuntimeError, match="the trace is still running"):
            print(found.events)
        step(model)
    cut = {item.name for item in found.events if item.was_cut}
    assert cut == set() or cut == {"all-gather blocks.2"}, cut
    assert "forward blocks.1" in found.text()
    assert all(method._owner.__dict__[method._name] is method._plain for method in _methods)
    model.blocks[1]._forward_pre_hooks.popitem()
    step(model)
    with trace(model) as found:
        step(model)
    assert not any(item.was_cut for item in found.events)


def test_traces_begin_between_iterations_of_sharded_models():
    with pytest.raises(ValueError, match="nothing below this Linear is sharded"), trace(nn.Linear(1, 1)):
        pass
    with fake_process_group(rank=1, world_size=2):
        model = shard_layers(Stack())
        model.blocks[2].register_forward_hook(lambda *_: trace(model).__enter__())
        with pytest.raises(RuntimeError, match=r"rank 1: trace\(\) starts inside a forward or backward of .*\(root\)"):
            step(model)


def test_a_copy_that_is_made_meanwhile_is_not_traced():
    with fake_process_group(rank=0, world_size=2):
        model = shard_layers(Stack())
        with trace(model) as found:
            step(copy.deepcopy(model))
        assert not found.events and Communicator.reshard.__name__ == "reshard"

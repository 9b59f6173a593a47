"""What ``Muon`` says of its step, ``plan()`` of it, and ``describe(model)`` of owners, is what a real step does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compose import describe, fully_shard, plan, replicate
from fsdp_compose.core.comm import CollectiveKind as Kind
from fsdp_compose.core.comm.transport import Collective, CollectiveNotes, Recorder
from fsdp_compose.core.group.registry import _get_fsdp_handles
from fsdp_compose.inspect.describe import collect
from fsdp_compose.optim import Muon, muon_groups
from tests.harness import distributed, lasting_mesh, run_distributed
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.optim.test_muon import Parameters, give_gradients
from tests.training import local_part

BUCKET = 3000  # bytes: several buckets


def muon_of(model: nn.Module) -> Muon:
    return Muon(muon_groups(model), bucket_bytes=BUCKET)


class AllToAlls(CollectiveNotes):
    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def issue(self, collective: Collective) -> None:
        if collective.kind == Kind.ALL_TO_ALL:
            self.nbytes.append(collective.nbytes)


class Sent(TorchDispatchMode):
    """Counts the bytes of the messages that this rank sends."""

    num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name == "c10d::send":
            self.num += args[0][0].nbytes
        return function(*args, **(kwargs or {}))


def step_as_planned(nbytes: Sequence[int], sent: int) -> None:
    torch.manual_seed(0)
    model = shard_layers(GPT())
    optimizer, notes = muon_of(model), AllToAlls()
    for handle in _get_fsdp_handles(model):
        handle.change_transports(lambda transport, _: Recorder(transport, notes))
    for batch in batches(2):
        gpt_loss(model, local_part(batch)).backward()
        notes.nbytes.clear()
        with Sent() as messages:
            optimizer.step()
        optimizer.zero_grad()
    assert notes.nbytes == nbytes
    assert dist.get_rank() or messages.num == sent
    report = optimizer.describe()
    assert (report.num_collectives, report.bytes_moved) == (len(nbytes), sum(nbytes))
    total = torch.tensor(messages.num)
    dist.all_reduce(total)
    assert int(total) == report.bytes_moved


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_plan_counts_what_a_step_sends(world_size):
    batch = next(batches(1))
    found = plan(lambda: (GPT(), lambda model: gpt_loss(model, batch)), world_size, optimizer_of=muon_of)
    (world,) = found.worlds
    all_to_alls = [item for item in world.collectives if item.kind == Kind.ALL_TO_ALL]
    assert len(all_to_alls) > 4 and all(item.num_ranks == world_size for item in all_to_alls)
    expected = {"nbytes": [item.nbytes for item in all_to_alls], "sent": sum(item.sent_bytes for item in all_to_alls)}
    run_distributed(step_as_planned, world_size, expected)
    report = world.step
    assert report is not None and len(report.owned) == world_size
    text = found.text()
    assert f"{len(all_to_alls)} of" in text and "all-to-alls" in text
    assert f"{world_size} ranks: {report}" in text and f"has {report.balance:.2f} times the mean" in text
    (described,) = json.loads(found.json())["worlds"]
    assert described["step"]["balance"] == report.balance
    assert described["step"]["bytes_moved"] == sum(expected["nbytes"])


def test_a_plan_without_muon_shows_no_all_to_alls():
    (world,) = (found := plan(GPT, 2, batch=2, seq=4)).worlds
    assert world.step is None and "all-to-all" not in found.text() and "optimizer's step" not in found.text()


def test_the_optimizer_of_a_plan_has_a_name():
    planned = plan(lambda: (GPT(), lambda model: gpt_loss(model, next(batches(1)))), 2, optimizer_of=muon_of)
    assert planned.optimizer == "muon_of"


# ---- Owners in describe()


def computed_of(model: nn.Module) -> dict[str, list[tuple[tuple[int, ...], int, int]]]:
    params = collect(model).parameters
    return {item.fqn: [(one.ranks, one.start, one.stop) for one in item.computed] for item in params}


def watch_computing(optimizer: Muon, params: dict[str, Any]) -> dict[str, list[list[int]]]:
    """By parameter and matrix, the ranks that compute it in a real step, in the order of ranks."""
    names = {id(param): name for name, param in params.items()}
    counts: dict[str, list[int]] = {name: [0] * math.prod(param.shape[:-2]) for name, param in params.items()}
    plans = optimizer._plan().plans
    for plan_ in plans:
        _, buckets = plan_.exchanges_of(bytes([1] * len(plan_.members)))
        for bucket in buckets:
            for stack in bucket.exchange.owned:
                member = plan_.members[stack.param]
                first = stack.start // (stack.rows * stack.cols)
                for k in range(first, first + stack.count):
                    counts[names[id(member.param)]][k] += 1
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, counts)
    return {
        name: [[rank for rank, theirs in enumerate(everything) if theirs[name][k]] for k in range(len(counts[name]))]
        for name in counts
    }


SHAPES = [(37, 41), (6, 24, 16), (16, 16), (101, 3)]


@pytest.mark.parametrize("how", ["sharded", "hybrid", "hybrid over replicas", "replicated", "replicated over replicas"])
@distributed(world_size=4)
def test_describe_shows_who_computes_what(how):
    mesh = lasting_mesh(("replicate", "shard")) if "hybrid" in how else None
    model = replicate(Parameters(SHAPES)) if "replicated" in how else fully_shard(Parameters(SHAPES), mesh=mesh)
    params = {f"items.{i}": param for i, param in enumerate(model.items)}
    assert not any(computed_of(model).values()) and "computed by" not in describe(model)
    optimizer = Muon([*model.items], over_replicas="over" in how)
    give_gradients([*model.items], 0)
    optimizer.step()
    found = computed_of(model)
    for name, by_matrix in watch_computing(optimizer, params).items():
        told = [[*ranks] for ranks, start, stop in found[name] for _ in range(start, stop)]
        assert told == by_matrix, name
    text = describe(model)
    assert "matrices computed by" in text
    assert '"computed": [\n' in describe(model, "json") and "matrices computed by" in describe(model, "html")
    del optimizer
    assert not any(computed_of(model).values()), "of living optimizers alone"


@distributed(world_size=2)
def test_equal_groups_are_shown_once_with_owners_too():
    model = shard_layers(GPT(layers=4))
    before = describe(model).count("equal groups")
    optimizer = muon_of(model)
    optimizer.describe()
    assert describe(model).count("equal groups") == before == 1
    lines = [line for line in describe(model).splitlines() if "blocks.0.up.weight" in line]
    assert len(lines) == 1 and lines[0].rstrip()[-1] in "01", lines


@distributed(world_size=4)
def test_replicas_that_share_the_work_are_all_counted():
    for model in (replicate(Parameters(SHAPES)), fully_shard(Parameters(SHAPES), mesh=lasting_mesh(("a", "b")))):
        alone, shared = (Muon([*model.items], over_replicas=flag).describe() for flag in (False, True))
        assert alone.num_matrices == shared.num_matrices == 9
        assert shared.num_workers == 4 and alone.num_workers == len(alone.owned) == len(shared.owned)
        num_own = torch.tensor(sum(shared.owned))
        dist.all_reduce(num_own)  # of each shard group, as often as it has ranks
        assert int(num_own) == 9 * len(shared.owned)
        assert 1.0 <= shared.balance <= max(1.10, 4.01 * shared.largest_share), shared


# ---- Temporary memory


def peak_within(step: Callable[[], object]) -> int:
    """The most bytes that the CPU's allocator has handed out while ``step`` runs, beyond those at its beginning."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        with torch.profiler.record_function("the step"):
            step()
    events = profile.profiler.kineto_results.events()
    span = next(event for event in events if event.name() == "the step")
    begin, end = span.start_ns(), span.start_ns() + span.duration_ns()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    level = highest = 0
    for time, _, nbytes in changes:
        if begin <= time <= end:
            level += nbytes
            highest = max(highest, level)
    return highest


SIZES = [[(64, 64)] * 24, [(16, 48, 32)] * 4, [(96, 128), *[(16, 16)] * 60]]


@pytest.mark.parametrize("shapes", SIZES, ids=["equal", "stacks", "one large"])
@distributed(world_size=(1, 2, 4))
def test_temporary_memory_is_at_most_four_buckets_and_the_largest_matrix(shapes):
    for dtype in (torch.bfloat16, torch.float32):
        bucket = 4 * 64 * 64 * dtype.itemsize
        model = fully_shard(Parameters(shapes))
        params = [*model.items]
        optimizer = Muon(params, bucket_bytes=bucket, ns_dtype=dtype)
        give_gradients(params, 0)
        with torch.backends.mkldnn.flags(enabled=False):  # on some processors, its products of bf16 take memory too
            optimizer.step()
            peak, told = peak_within(optimizer.step), optimizer.describe().temporary_bytes
        largest = max(shape[-2] * shape[-1] for shape in shapes) * dtype.itemsize
        print(f"{shapes[0]}, {dtype}: {peak / bucket:.2f} buckets, {told / bucket:.2f} told, {largest / bucket:.2f}")
        assert peak <= 4 * bucket + largest
        assert 0.9 * peak - largest <= told <= peak + 2 * largest

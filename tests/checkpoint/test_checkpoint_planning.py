"""Saving among thousands of ranks: every rank's plan is built and planned together here, without their processes."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fsdp_compose import fully_shard
from fsdp_compose._torch import plan_errors
from fsdp_compose.checkpoint import SavePlanner, get_model_state_dict, load, save
from fsdp_compose.checkpoint.planner import problems_of
from fsdp_compose.core.flat.layout import ParamSpec, plan_layout
from fsdp_compose.core.ragged.placement import Box, range_to_boxes
from tests.flat.test_layout import properties
from tests.harness import distributed
from tests.internals import executed_lines

EXPERTS = ((32, 5760, 2880), (32, 2880, 2880), (32, 5760), (2880,))  # fused, of one layer
PROPERTIES = TensorProperties(torch.bfloat16)


def item_of(fqn: str, shape: tuple[int, ...], box: Box) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, PROPERTIES, torch.Size(shape))
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def plans_of(num_ranks: int) -> list[SavePlan]:
    """What each rank plans of a layer that is cut between elements."""
    layout = plan_layout([ParamSpec(str(i), shape, "elements") for i, shape in enumerate(EXPERTS)], num_ranks, 8)
    plans: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
    for i, param in enumerate(layout.params):
        for rank, part in layout.local_shards_of(i).items():
            boxes = range_to_boxes(param.shape, part.param_start, part.param_start + part.numel)
            plans[rank] += [item_of(param.fqn, param.shape, box) for box in boxes]
    return [SavePlan(items, planner_data={}) for items in plans]


def test_planning_takes_time_in_proportion_to_the_ranks():
    lines = {}
    for num_ranks in (1024, 4096):
        plans = plans_of(num_ranks)
        assert len(plans) == num_ranks and all(plan.items for plan in plans)
        _, metadata = create_default_global_save_plan(plans)
        assert problems_of(plans, metadata) == []
        lines[num_ranks] = executed_lines(lambda: problems_of(plans, metadata))  # noqa: B023
    assert lines[4096] < 5 * lines[1024], lines  # with the square it would be 16


def test_a_plan_of_4096_ranks_is_made_whole_and_refused_when_a_part_is_missing_or_there_twice():
    plans = plans_of(4096)
    planner = SavePlanner()
    made, metadata = planner.create_global_plan(plans)
    assert len(made) == 4096 and {*metadata.state_dict_metadata} == {"0", "1", "2", "3"}
    missing = [*plans[:2000], SavePlan(plans[2000].items[1:], planner_data={}), *plans[2001:]]
    with pytest.raises(ValueError, match="0: .* elements are written, but the tensor has"):
        SavePlanner().create_global_plan(missing)
    item = plans[2000].items[-1]
    assert item.tensor_data is not None and item.tensor_data.chunk is not None
    longer = Box(tuple(item.tensor_data.chunk.offsets), (1, 1, item.tensor_data.chunk.sizes[2] + 8), 0)
    twice = [*plans[:2000], SavePlan([*plans[2000].items[:-1], item_of("0", EXPERTS[0], longer)], planner_data={})]
    with pytest.raises(ValueError, match="0: two ranks write the elements"):
        SavePlanner().create_global_plan([*twice, *plans[2001:]])


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@properties
@given(shapes, st.data())
def test_the_verdict_is_that_of_comparing_all_boxes(shape, data):
    numel = int(torch.Size(shape).numel())
    cuts = sorted(data.draw(st.sets(st.integers(0, numel), max_size=4)) | {0, numel})
    boxes = [range_to_boxes(shape, a, b) for a, b in itertools.pairwise(cuts)]
    change = data.draw(st.sampled_from(["nothing", "drop", "twice", "shift", "grow"]))
    if boxes and change != "nothing":
        rank = data.draw(st.integers(0, len(boxes) - 1))
        box, dim = boxes[rank][0], data.draw(st.integers(0, len(shape) - 1))
        step = [int(d == dim) for d in range(len(shape))]
        if change == "drop":
            boxes[rank] = boxes[rank][1:]
        elif change == "twice":
            boxes.append([box])
        elif change == "shift":
            offsets = tuple(a + b for a, b in zip(box.offsets, step, strict=True))
            boxes[rank] = [Box(offsets, box.sizes, 0), *boxes[rank][1:]]
        else:
            sizes = tuple(a + b for a, b in zip(box.sizes, step, strict=True))
            boxes[rank] = [Box(box.offsets, sizes, 0), *boxes[rank][1:]]
    plans = [SavePlan([item_of("w", shape, box) for box in part]) for part in boxes]
    _, metadata = create_default_global_save_plan(plans)
    assert bool(problems_of(plans, metadata)) == bool(plan_errors(plans, metadata))


# ---- what all ranks have


def test_entries_that_all_ranks_have_are_planned_by_one_each():
    state = {"step": 3, **{f"{i}.step": torch.tensor(float(i)) for i in range(500)}}
    plans = []
    for rank in range(64):
        planner = SavePlanner(share=(rank, 64))
        planner.set_up_planner(dict(state), is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    planned = [item.index.fqn for plan in plans for item in plan.items]
    assert sorted(planned) == sorted(state)
    assert max(len(plan.items) for plan in plans) < 500 / 8, "not all by one"
    _, metadata = SavePlanner().create_global_plan(plans)
    assert {*metadata.state_dict_metadata} == {*state} == {*(metadata.planner_data or {})}


@distributed(world_size=3)
def test_what_only_some_ranks_have_is_saved_too(tmp_path):
    rank = dist.get_rank()
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    for name, own in (("alike", {}), ("own", {f"rng of {rank}": torch.tensor([float(rank)]), f"text {rank}": rank})):
        model = fully_shard(nn.Linear(5, 7))
        state = {"model": get_model_state_dict(model), "shared": {"a": torch.arange(4.0), "b": "text", **own}}
        save(state, Path(folder[0], name))
        place = {
            "model": get_model_state_dict(fully_shard(nn.Linear(5, 7))),
            "shared": {"a": torch.zeros(4), "b": "", **{key: torch.zeros(1) for key in own if key.startswith("rng")}},
        }
        load(place, Path(folder[0], name))
        assert place["shared"]["a"].tolist() == [0.0, 1.0, 2.0, 3.0] and place["shared"]["b"] == "text"
        torch.testing.assert_close(place["model"]["weight"].full_tensor(), model.weight.full_tensor())
        assert not own or place["shared"][f"rng of {rank}"].tolist() == [rank]


# ---- what ranks read of folders


@distributed(world_size=3, fresh=True)
def test_no_rank_lists_what_all_have_written_and_one_reads_the_list(tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    seen: list[tuple[str, str]] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("os.listdir", "os.scandir", "open") and isinstance(arguments[0], (str, os.PathLike)):
            seen.append((event, os.fspath(arguments[0])))

    sys.addaudithook(note)
    target, model = Path(folder[0], "saved"), fully_shard(nn.Linear(64, 64))
    state = {"model": get_model_state_dict(model)}
    dist.barrier()
    seen.clear()
    save(state, target)
    listed = [path for event, path in seen if event != "open" and path.startswith(folder[0]) and "save-" in path]
    assert not listed, listed
    dist.barrier()
    seen.clear()
    load(state, target)
    read = {Path(path).name for event, path in seen if event == "open" and path.startswith(str(target))}
    lists = {".metadata", "manifest.json"}
    assert read & lists == (lists if dist.get_rank() == 0 else set()), read

"""State that has grown, or is another on each rank: what was saved under a name that is asked for is never lost."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import fully_shard
from fsdp_compose.checkpoint import async_save, get_model_state_dict, get_state_dict, load, resume, save
from tests.checkpoint.states import adamw, assert_equal, shared_folder
from tests.harness import distributed, same_on_every_rank


class Loader:
    """Begins with little state, and has more when it has been used."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def stack(layers: int, value: float, is_sharded: bool = True) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return fully_shard(model) if is_sharded else model


GROWN: dict[str, tuple[Any, Any]] = {  # as it begins, and as it was saved
    "empty": ({}, {"seen": {"a": 1}, "workers": {0: {"at": 3}, 1: {"at": 4}}}),
    "smaller": ({"epoch": 0, "seen": {3: 1}}, {"epoch": 1, "seen": {3: 1, 7: torch.arange(3)}}),
    "in lists": ({"queue": [torch.zeros(2)]}, {"queue": [torch.ones(2), torch.ones(5), {"x": 1}]}),
    "from an empty list": ({"queue": [], "deep": []}, {"queue": [torch.ones(2)], "deep": [{"a": [1, {"b": 2}]}]}),
    "from nothing": ({"best": None, "last": 0}, {"best": {"loss": 0.5}, "last": [torch.ones(2)]}),
    "to less": ({"queue": [torch.ones(2)], "seen": {"a": 1}}, {"queue": [], "seen": 3}),
    "to a tensor": ({"best": None, "seen": {"a": 1}}, {"best": torch.ones(2), "seen": torch.ones(3)}),
    "ordered": (OrderedDict(a=OrderedDict()), OrderedDict(a=OrderedDict(x=1), b=(1, 2))),
}


@pytest.mark.parametrize("how", ["save", "async_save", "dcp.save"])
@distributed(world_size=(1, 2))
def test_what_has_no_place_is_put_there(how):
    folder = shared_folder() / "checkpoint"
    saved = {name: later for name, (_, later) in GROWN.items()}
    objects = {f"{name} object": Loader(later) for name, (_, later) in GROWN.items()}
    if how == "dcp.save":
        dcp.save(saved | objects, checkpoint_id=str(folder))
    elif how == "save":
        save(saved | objects, folder)
    else:
        async_save(saved | objects, folder).result()
    dist.barrier()
    given: dict[str, Any] = {name: early for name, (early, _) in GROWN.items()}
    given |= {f"{name} object": Loader(early) for name, (early, _) in GROWN.items()}
    load(given, folder)
    for name, (early, later) in GROWN.items():
        if how == "dcp.save":  # which saves every key as a string
            later = as_texts(later)
            given[name], given[f"{name} object"].state = as_texts(given[name]), as_texts(given[f"{name} object"].state)
        assert_equal(given[name], later, name)
        assert_equal(given[f"{name} object"].state, later, name)
        assert type(given[name]) is type(early)


def as_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((str(key), as_texts(item)) for key, item in value.items())
    return [as_texts(item) for item in value] if type(value) is list else value


class Table(nn.Linear):
    """Has extra state that grows."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: Any = {}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("seen", [{"a": {"b": 1}}, {3: torch.arange(3)}, torch.arange(4), [1, torch.ones(2)]])
@distributed(world_size=(1, 2))
def test_resume_brings_back_others_and_extra_state_that_have_grown(seen):
    folder = shared_folder() / "checkpoint"
    table = Table()
    table.seen = seen
    model, other = fully_shard(nn.Sequential(table)), fully_shard(nn.Sequential(Table()))
    optimizer = adamw(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state, "others": seen, "loader": Loader({"x": seen})}, folder)
    loader = Loader({})
    found = resume(folder, other, adamw(other.parameters()), others={}, loader=loader)
    for value in (found["others"], loader.state["x"], other[0].seen):
        assert_equal(value, seen)


@distributed(world_size=(1, 2))
def test_parameters_without_a_place_are_an_error_that_names_them():
    folder = shared_folder() / "checkpoint"
    save({"model": get_model_state_dict(stack(3, 1.0)), "step": 1}, folder)
    model = stack(2, 5.0)
    for call in (
        lambda: load({"model": get_model_state_dict(model)}, folder),
        lambda: load({"model": model}, folder),
        lambda: resume(folder, model),
    ):
        with pytest.raises(RuntimeError, match=r"model\.2\.weight.*no place.*DefaultLoadPlanner") as caught:
            call()
        same_on_every_rank(str(caught.value))
        assert "othing was changed" in str(caught.value)
        assert all((parameter.full_tensor() == 5.0).all() for parameter in model.parameters())
    load({"model": get_model_state_dict(model)}, folder, planner=DefaultLoadPlanner())
    assert all((parameter.full_tensor() == 1.0).all() for parameter in model.parameters())
    whole: dict[str, Any] = {"model": {}}
    load(whole, folder)
    assert_equal(whole["model"], stack(3, 1.0, is_sharded=False).state_dict())


@pytest.mark.parametrize("nested", [False, True])
@distributed(world_size=4)
def test_what_another_rank_has_a_place_for_is_not_lost(nested):
    """Two stages of a pipeline, of which each rank has one."""
    folder, stage = shared_folder() / "checkpoint", dist.get_rank() // 2
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def state(value: float) -> tuple[nn.Module, dict[str, Any]]:
        model = fully_shard(stack(2, value, is_sharded=False), mesh=meshes["dp"])
        named = {f"{stage}.{fqn}": tensor for fqn, tensor in get_model_state_dict(model).items()}
        return model, {"app": {f"stage {stage}": named} if nested else named, "rank": {f"{stage}": value}}

    save(state(1.0 + stage)[1], folder)
    model, given = state(5.0)
    load(given, folder)
    assert [*given["app"]] == (
        [f"stage {stage}"] if nested else [f"{stage}.{i}.{of}" for i in (0, 1) for of in ("weight", "bias")]
    )
    assert all((parameter.full_tensor() == 1.0 + stage).all() for parameter in model.parameters())


# ---- Sizes and kinds that are others than when it was saved


@distributed(world_size=(1, 2))
def test_tensors_of_another_size_load_where_their_owner_takes_them():
    folder = shared_folder() / "checkpoint"
    table = Table()
    table.seen = torch.arange(4)
    model = fully_shard(nn.Sequential(table))
    save(
        {
            "model": get_model_state_dict(model),
            "loader": Loader({"x": torch.ones(3)}),
            "l": [torch.ones(3)],
            "t": torch.ones(3),
        },
        folder,
    )
    table.seen = torch.arange(2)
    loader = Loader({"x": torch.zeros(2)})
    found = resume(folder, model, loader=loader, l=[0], t=torch.zeros(2))
    assert torch.equal(table.seen, torch.arange(4)) and torch.equal(loader.state["x"], torch.ones(3))
    assert torch.equal(found["l"][0], torch.ones(3)) and torch.equal(found["t"], torch.ones(3))


@distributed(world_size=(1, 2))
def test_parameters_and_buffers_of_another_size_are_an_error_and_nothing_is_loaded():
    folder = shared_folder() / "checkpoint"
    save({"model": get_model_state_dict(fully_shard(nn.Linear(4, 4)))}, folder)
    model = fully_shard(nn.Linear(4, 3))
    before = [parameter.full_tensor() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"Size mismatch .*4, 4.*3, 4.*model\.weight.*Nothing was changed") as caught:
        resume(folder, model)
    same_on_every_rank(str(caught.value))
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(model.parameters(), before, strict=True))


KINDS = {
    "a value and a tensor": (1, torch.ones(2)),
    "a shard and a value": (None, "shard"),
    "a shard and a tensor": (torch.ones(4), "shard"),
}


@pytest.mark.parametrize("kinds", KINDS)
@distributed(world_size=2)
def test_what_ranks_save_as_different_kinds_is_an_error_that_names_it(kinds):
    folder, rank = shared_folder() / "checkpoint", dist.get_rank()
    value = KINDS[kinds][rank % 2]
    shard = next(iter(fully_shard(nn.Linear(16, 16, bias=False)).parameters())).detach()
    given = {"model": {"w": shard if isinstance(value, str) else value, "other": shard}}
    for call in (lambda: save(given, folder), lambda: async_save(given, folder).result()):
        with pytest.raises(RuntimeError, match=r"(?s)model\.w is .* on rank 0, but .* on rank 1.*every rank") as caught:
            call()
        same_on_every_rank(str(caught.value))
        assert not folder.exists()

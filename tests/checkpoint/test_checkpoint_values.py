"""Values beside models and optimizers: each rank's own, and those of other packages and of Python."""

from __future__ import annotations

import collections
import datetime
import pathlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import DefaultLoadPlanner

from fsdp_compose import fully_shard
from fsdp_compose.checkpoint import async_save, background, get_model_state_dict, load, resume, save
from tests.checkpoint.states import assert_equal, shared_folder
from tests.forked_writers import start_as_users_do
from tests.harness import distributed, run_distributed, run_forked, same_on_every_rank

# ---- What each rank has for itself


def own(rank: int) -> dict[str, Any]:
    """Another state on each rank, in keys, lengths and values."""
    return {
        "rng": torch.arange(4) + rank,
        "python": random.Random(rank).getstate(),
        "step": 7,
        "at": rank,
        "loader": {"workers": {i: {"at": rank + i} for i in range(rank + 1)}, "epoch": 3},
        "queue": [torch.full((2 + rank,), float(rank))] * (rank + 1),
        "seen": {"some"} if rank else set(),
        "deep": {"model": {"a": 1}, "position": rank},
    }


def fresh() -> dict[str, Any]:
    return {name: {} if isinstance(value, dict) else None for name, value in own(0).items()}


def save_own(folder: str) -> None:
    rank, model = dist.get_rank(), fully_shard(nn.Linear(4, 4))
    app = {"model": get_model_state_dict(model), "rng": torch.arange(3) * rank}
    state = {"model": get_model_state_dict(model), "app": app, **own(rank)}
    for name, call in (("save", save), ("async_save", lambda *of: async_save(*of).result())):
        call(state, f"{folder}/{dist.get_world_size()} {name}")


def load_own(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in ("save", "async_save"):
        for saved in (2, 3):
            path = f"{folder}/{saved} {name}"
            model = fully_shard(nn.Linear(4, 4))
            app = {"model": get_model_state_dict(model), "rng": torch.zeros(3, dtype=torch.int64)}
            if saved == size:
                assert_equal(resume(path, model, **fresh()), own(rank))
                load({"app": app}, path)
                assert_equal(app["rng"], torch.arange(3) * rank)
                continue
            text = rf"each of the {saved} ranks.* at, .*rng.*{size} ranks load"
            with pytest.raises(RuntimeError, match=text) as caught:
                resume(path, model, **fresh())
            same_on_every_rank(str(caught.value))
            assert resume(path, model, step=0) == {"step": 7}
            given: dict[str, Any] = {"at": 0, "rng": torch.zeros(4, dtype=torch.int64)}
            load(given, path, planner=DefaultLoadPlanner())
            assert given["at"] in range(saved)
    given = {"at": 0}
    dcp.load(given, checkpoint_id=f"{folder}/2 save")  # torch finds one rank's
    assert given["at"] in (0, 1)


@pytest.mark.timeout(200)
def test_what_each_rank_has_for_itself_comes_back_by_rank(tmp_path):
    for size in (2, 3):
        run_distributed(save_own, size, {"folder": str(tmp_path)})
    for size in (1, 2, 3):
        run_distributed(load_own, size, {"folder": str(tmp_path)})


@distributed(world_size=2)
def test_values_of_a_model_that_differ_are_not_each_ranks():
    """Statistics of batch norm, which other numbers of ranks load too."""
    folder = shared_folder() / "checkpoint"
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(dist.get_rank())
    for name, value in (("plain", model), ("sharded", fully_shard(model))):
        save({"model": get_model_state_dict(value)}, folder / name)
        keys = dcp.FileSystemReader(folder / name).read_metadata().state_dict_metadata
        assert all(key.startswith("model.") for key in keys)


# ---- Values that are read, and those that are refused

HARMLESS: dict[str, Any] = {
    "numbers": np.arange(6.0).reshape(2, 3).T,
    "other bytes": np.arange(3, dtype=">i4"),
    "empty": np.zeros((0, 2), np.float16),
    "no dimension": np.array(3 + 1j),
    "scalars": [np.float64(0.1), np.int8(3), np.bool_(True)],
    "generator": np.random.RandomState(0).get_state(),
    "dtype": np.dtype("float32"),
    "paths": (Path("a/b"), pathlib.PurePosixPath("/c"), pathlib.PureWindowsPath("d")),
    "times": (
        datetime.datetime(2030, 1, 2, tzinfo=datetime.timezone.utc),
        datetime.date(2030, 1, 2),
        datetime.timedelta(3),
        datetime.time(4),
    ),
    "plain": ({1, 2}, frozenset([3]), b"x", bytearray(b"y"), 1 + 2j, torch.float32, torch.Size([2])),
}
Pair = collections.namedtuple("Pair", ["a", "b"])


class Mine:
    pass


REFUSED = {
    "object": Mine(),
    "class": Mine,
    "named tuple": [Pair(1, 2)],
    "objects": np.array([Mine()], dtype=object),
    "fields": np.zeros(2, np.dtype([("a", "i4")])),
    "deque": collections.deque([1]),
    "function": (print,),
}


@pytest.mark.parametrize("how", ["save", "async_save", "dcp.save"])
@distributed(world_size=(1, 2))
def test_harmless_values_come_back(how):
    folder = shared_folder() / "checkpoint"
    if how == "dcp.save":
        dcp.save(HARMLESS, checkpoint_id=str(folder))
        dist.barrier()
    elif how == "save":
        save(HARMLESS, folder)
    else:
        async_save(HARMLESS, folder).result()
    found: dict[str, Any] = dict.fromkeys(HARMLESS)
    load(found, folder)
    compare(found, HARMLESS)


def compare(found: Any, expected: Any) -> None:
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, (list, tuple, dict)):
        pairs = zip(found.values(), expected.values()) if isinstance(expected, dict) else zip(found, expected)
        for pair in pairs:
            compare(*pair)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype and found.flags.writeable
    else:
        assert found == expected


@pytest.mark.parametrize("name", REFUSED)
@distributed(world_size=(1, 2))
def test_what_could_not_be_read_back_is_refused_when_it_is_saved(name):
    folder = shared_folder() / "checkpoint"
    state = {"model": {"a": torch.ones(2)}, "x": {"y": REFUSED[name] if dist.get_rank() == 0 else 1}}
    for call in (lambda: save(state, folder), lambda: async_save(state, folder).result()):
        with pytest.raises(
            RuntimeError, match=r"x\.y is a .*without running code.*add_safe_globals.*Nothing"
        ) as caught:
            call()
        same_on_every_rank(str(caught.value))
        assert not folder.exists() and not folder.with_name("checkpoint.partial").exists()


@distributed(world_size=2)
def test_a_class_that_both_programs_name_is_saved_and_loaded():
    folder, given = shared_folder() / "checkpoint", {"x": None}
    with torch.serialization.safe_globals([Mine]):
        save({"x": Mine()}, folder)
        load(given, folder)
    assert type(given["x"]) is Mine


def save_from_such_a_path(_rank: int, folder: Path) -> None:
    sys.path.insert(0, Path("elsewhere"))  # type: ignore[arg-type]
    background.start_writer = start_as_users_do  # in an interpreter that is given the path
    print(async_save({"t": torch.ones(3)}, folder).result(100))


def test_the_path_of_modules_may_have_entries_that_are_no_texts(tmp_path):
    ((code, said),) = run_forked(1, tmp_path, save_from_such_a_path, tmp_path / "checkpoint", timeout=120)
    assert (code, said.split()) == (0, [str(tmp_path / "checkpoint")]), said

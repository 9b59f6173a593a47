"""Saves while training goes on: what is saved is the state at the call, and a failure is one error on every rank."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import CPUOffloadPolicy, flat_parameters, fully_shard
from fsdp_compose.checkpoint import Saver, async_save, background, keep, latest, load, resume, save, writer
from fsdp_compose.checkpoint.folders import (
    begin_folder,
    finish_folder,
    hold_lock,
    is_lock_held,
    meeting_of,
    new_token,
    partial_of,
    read_lists,
    understood,
)
from fsdp_compose.checkpoint.retention import locks_of_saves
from fsdp_compose.core.comm import known_for
from fsdp_compose.errors import MisuseError, MisuseRuntimeError, RankLostError, RanksDifferError
from tests.checkpoint.states import adamw, assert_equal, build, own_snapshot, set_state, shared_folder, state_of, train
from tests.forked_writers import fork_writers, start_as_users_do
from tests.harness import distributed, run_forked, same_on_every_rank
from tests.models import shard_layers

SHORT = timedelta(seconds=3)

fork_writers()


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shard_layers(build(0))
    optimizer = adamw(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def assert_holds(path: Path, expected: Any, make: Callable[[], tuple[nn.Module, Any]] | None = None) -> None:
    """A checkpoint of model and optimizer loads, by ours and by torch's own function, as what it was."""
    other, fresh = make() if make is not None else trained(1)
    state = state_of(other, fresh)
    load(state, path)
    set_state(other, fresh, state)
    assert_equal(own_snapshot(other, fresh), expected)
    train(other, fresh, 1)  # so that the next one has something to load
    state = state_of(other, fresh)
    dcp.load(state, checkpoint_id=str(path))
    set_state(other, fresh, state)
    assert_equal(own_snapshot(other, fresh), expected)


def contents(path: Path) -> tuple[Any, Any, Any]:
    """What the lists of a checkpoint say, but for places in files, which depend on the order of the items."""
    found = understood(path, read_lists(path), allow_pickle=False)
    entries = {key: repr(value) for key, value in found.metadata.state_dict_metadata.items()}
    places = {repr(index): info.relative_path for index, info in found.metadata.storage_data.items()}
    return entries, {key: tuple(value) for key, value in found.metadata.planner_data.items()}, (places, found.numbers)


# ---- what is saved


@distributed(world_size=(1, 2, 3))
def test_what_is_saved_is_the_state_at_the_call():
    folder = shared_folder()
    model, optimizer = trained()
    expected = own_snapshot(model, optimizer)
    saving = async_save(state_of(model, optimizer), folder / "one")
    train(model, optimizer, 2)
    later = own_snapshot(model, optimizer)
    assert saving.result() == folder / "one"
    again = async_save(state_of(model, optimizer), folder / "two")
    train(model, optimizer, 1)
    assert again.result() == folder / "two"
    assert_holds(folder / "one", expected)
    assert_holds(folder / "two", later)
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]


def hybrid() -> tuple[nn.Module, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_layers(build(0), mesh=mesh)
    return model, adamw(model.parameters())


def offloaded() -> tuple[nn.Module, Any]:
    model = shard_layers(build(0), offload_policy=CPUOffloadPolicy())
    return model, adamw(model.parameters())


def flat() -> tuple[nn.Module, Any]:
    model = shard_layers(build(0))
    return model, adamw(flat_parameters(model))


def unsharded() -> tuple[nn.Module, Any]:
    model = build(0)
    return model, adamw(model.parameters())


@pytest.mark.parametrize("make", [hybrid, offloaded, flat, unsharded])
@distributed(world_size=4)
def test_a_checkpoint_is_the_same_as_that_of_save(make):
    """Metadata, files and values: replicas and whole tensors are written once."""
    folder = shared_folder()
    model, optimizer = make()
    train(model, optimizer, 2)
    state = state_of(model, optimizer) | {"step": 2, "milestones": {3: 0.1, 7: [1, {2: "x"}]}}
    saving = async_save(state, folder / "async")
    saving.result()
    save(state, folder / "sync")
    assert contents(folder / "async") == contents(folder / "sync")
    sizes = [
        {path.name: path.stat().st_size for path in (folder / name).glob("*.distcp")} for name in ("async", "sync")
    ]
    assert sizes[0] == sizes[1]
    assert_holds(folder / "async", own_snapshot(model, optimizer), make)


class Schedule:
    """Has a state dict of its own."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "history": [*range(self.position)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@distributed(world_size=2)
def test_values_of_all_kinds_are_those_at_the_call():
    folder = shared_folder()
    tensors = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "part": torch.arange(10)[3:7],
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j, 3]).conj(),
        "negative": torch.tensor([1j, 2j]).imag,
        "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    schedule, counts, numbers = Schedule(), [1, 2], {1: "a"}
    schedule.position = 4
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    state = {"tensors": tensors, "schedule": schedule, "counts": counts, "numbers": numbers, "none": None}
    saving = async_save(state, folder / "checkpoint")
    for tensor in tensors.values():
        tensor.zero_()
    schedule.position = 0
    counts.append(3)
    numbers[2] = "b"
    saving.result()
    into = {
        "tensors": {key: torch.zeros_like(tensor) for key, tensor in expected.items()},
        "schedule": Schedule(),
        "counts": [0, 0],
        "numbers": {1: ""},
        "none": None,
    }
    load(into, folder / "checkpoint")
    for key, tensor in expected.items():
        assert_equal(into["tensors"][key].resolve_conj().resolve_neg().reshape(-1), tensor.reshape(-1), key)
    assert into["schedule"].position == 4
    assert (into["counts"], into["numbers"], into["none"]) == ([1, 2], {1: "a"}, None)


@distributed(world_size=2)
def test_a_plan_is_kept_while_names_shapes_and_placements_are_the_same():
    folder = shared_folder()
    compared: list[int] = []
    real = background._plan_together
    model, optimizer = trained()
    with pytest.MonkeyPatch.context() as patched, Saver() as saver:
        patched.setattr(background, "_plan_together", lambda *given: compared.append(1) or real(*given))
        for step in range(3):
            train(model, optimizer, 1)
            expected = own_snapshot(model, optimizer)
            saver.save(state_of(model, optimizer) | {"step": 10**step}, folder / f"{step}")
            assert len(compared) == 1
            train(model, optimizer, 1)
            saver.save({"x": torch.full((step + 1, 5), float(step))}, folder / f"x{step}").result()
            del compared[1:]
            saver.save(state_of(model, optimizer), folder / f"again{step}").result()
            assert len(compared) == 2
            del compared[1:]
            into = {"x": torch.zeros(step + 1, 5)}
            load(into, folder / f"x{step}")
            assert into["x"].unique().tolist() == [step]
            assert_holds(folder / f"{step}", expected)
            saver.save(state_of(model, optimizer) | {"step": 0}, folder / f"back{step}").result()
            del compared[1:]


@pytest.mark.parametrize("make", [offloaded, flat, unsharded])
@distributed(world_size=2)
def test_saves_before_and_after_the_first_step(make):
    """No plan is kept from when parameters had no optimizer state yet, nor from when they had."""
    folder, saver = shared_folder(), Saver()
    model, optimizer = make()
    for i in range(4):
        if i == 1 and make is not flat:  # some have a state
            for param in [*model.parameters()][::2]:
                param.grad = torch.zeros_like(param)
            optimizer.step()
            model.zero_grad()
        elif i == 3:
            optimizer.state.clear()
        elif i:
            train(model, optimizer, 1)
        expected = own_snapshot(model, optimizer)
        saver.save(state_of(model, optimizer), folder / f"{i}").result()
        if i == 2:
            assert_holds(folder / f"{i}", expected, make)
    saver.close()


@distributed(world_size=2)
def test_the_copy_is_as_large_as_this_ranks_part_and_made_once():
    folder = shared_folder()
    model = nn.Linear(512, 512, bias=False)
    fully_shard(model)
    state = {"model": model.state_dict()}
    with Saver(state) as saver:
        memory = saver._staging.memory.data_ptr()
        for name in ("one", "two"):
            saver.save(state, folder / name).result()
        assert saver._staging.memory.data_ptr() == memory
        assert saver.staged_bytes == 512 * 512 * 4 // 2


@distributed(world_size=2)
def test_a_soak_of_saves_and_edits():
    """Training, edits in place, moves to other memory and back, and saves of other things while a save is under way."""
    folder = shared_folder()
    model, optimizer = trained()
    generator = torch.Generator().manual_seed(0)
    expected: list[Any] = []
    with Saver() as saver:
        for number in range(12):
            expected.append(own_snapshot(model, optimizer))
            saver.save(state_of(model, optimizer), folder / f"{number}")
            match int(torch.randint(5, (), generator=generator)):
                case 0:
                    train(model, optimizer, 2)
                case 1:
                    with torch.no_grad():
                        for param in model.parameters():
                            param.mul_(0.5)
                case 2:
                    model.to(torch.float64)
                    model.to(torch.float32)
                case 3:
                    with pytest.raises(RuntimeError, match="exists"):
                        saver.save({"x": 1}, folder / "0")
                case 4:
                    save({"x": torch.ones(2)}, folder / f"other{number}")
                    optimizer.zero_grad()
                    train(model, optimizer, 1)
    other, fresh = trained(1)

    def another() -> tuple[nn.Module, Any]:
        train(other, fresh, 1)
        return other, fresh

    for number, values in enumerate(expected):
        assert_holds(folder / f"{number}", values, another)


# ---- one at a time


@contextmanager
def stopped(saver: Saver) -> Iterator[None]:
    """The writer of this rank does nothing in the meantime."""
    pid = saver.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@distributed(world_size=2)
def test_a_call_waits_for_the_last_save_or_raises_on_every_rank():
    folder = shared_folder()
    with Saver() as saver:
        with stopped(saver) if dist.get_rank() else nothing():
            first = saver.save({"x": torch.ones(3)}, folder / "first")
            with pytest.raises(MisuseRuntimeError, match=r"^async_save\(\): .*the last save is still under way"):
                saver.save({"x": torch.ones(3)}, folder / "second", wait=False)
            assert not first.done()
            dist.barrier()
        saver.save({"x": torch.ones(3)}, folder / "second")
        assert first.done()
    dist.barrier()  # until the first rank has deleted where they met
    assert sorted(path.name for path in folder.iterdir()) == ["first", "second"]


@contextmanager
def nothing() -> Iterator[None]:
    yield


# ---- failures


def failure_of(saving: Any) -> str:
    """The text of a save's error, which every rank has."""
    error = saving.exception(timeout=60)
    assert isinstance(error, RuntimeError)
    return same_on_every_rank(f"{type(error).__name__}: {error}")


def assert_empty_soon(folder: Path) -> None:
    """What a refused save leaves is deleted when all ranks have heard."""
    ends = time.monotonic() + 40
    while [*folder.iterdir()] and time.monotonic() < ends:
        time.sleep(0.05)
    assert not [*folder.iterdir()]
    dist.barrier()


@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (1, 2), (0, 1, 2)])
@distributed(world_size=3)
def test_a_writer_that_dies_is_one_error_on_every_rank(victims):
    folder = shared_folder()
    saver = Saver()
    process = saver._underway.running()
    if dist.get_rank() in victims:
        os.kill(process.pid, signal.SIGSTOP)
    saving = saver.save({"x": torch.ones(3)}, folder / "lost")
    assert not saving.done()
    if dist.get_rank() in victims:
        os.kill(process.pid, signal.SIGKILL)
    text = failure_of(saving)
    assert text.startswith(f"RankLostError: async_save(): the process that saves for rank {victims[0]} is gone")
    assert_empty_soon(folder)
    saver.save({"x": torch.full((3,), 2.0)}, folder / "lost").result()
    into = {"x": torch.zeros(3)}
    load(into, folder / "lost")
    assert into["x"].tolist() == [2.0, 2.0, 2.0]
    saver.close()


@distributed(world_size=2)
def test_the_verdict_is_the_folders_not_the_process():
    """A writer that dies after it has told what it wrote has done its part."""
    folder = shared_folder()
    saver = Saver()
    process = saver._underway.running()
    if dist.get_rank() == 0:
        os.kill(process.pid, signal.SIGSTOP)
    saving = saver.save({"x": torch.ones(3)}, folder / "kept")
    if dist.get_rank() == 1:
        while not [*partial_of(folder / "kept").glob("meet-*/1.told")]:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(process.pid, signal.SIGCONT)
    assert saving.result(60) == folder / "kept"
    load({"x": torch.zeros(3)}, folder / "kept")
    saver.close()


@pytest.mark.parametrize("victim", [0, 1])
@distributed(world_size=2)
def test_a_writer_that_hangs_is_one_error_in_time(victim):
    folder = shared_folder()
    saver = Saver(timeout=SHORT)
    saver.save({"x": torch.ones(3)}, folder / "first").result()
    process = saver._underway.running()
    if dist.get_rank() == victim:
        os.kill(process.pid, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(background, "_MARGIN", 2.0)
        text = failure_of(saver.save({"x": torch.ones(3)}, folder / "late"))
    assert text.startswith(
        f"RankLostError: async_save(): the process that saves for rank {victim} has not ended in 3 s"
    )
    assert not process.is_alive or dist.get_rank() != victim
    saver.save({"x": torch.ones(3)}, folder / "next").result(60)
    saver.close()
    ends = time.monotonic() + 40
    while partial_of(folder / "late").exists() and time.monotonic() < ends:
        time.sleep(0.05)
    assert sorted(path.name for path in folder.iterdir()) == ["first", "next"]


@pytest.mark.parametrize("victim", [0, 1])
@distributed(world_size=2)
def test_a_rank_that_cannot_write_is_one_error_on_every_rank(victim):
    folder = shared_folder()
    saver = Saver()
    with stopped(saver):
        saving = saver.save({"x": torch.ones(3), "own": {dist.get_rank(): torch.ones(5)}}, folder / "lost")
        if dist.get_rank() == victim:
            (token,) = partial_of(folder / "lost").glob("save-*")
            (token / f"__{victim}_0.distcp").mkdir()
        dist.barrier()
    text = failure_of(saving)
    assert f"async_save(): on rank {victim}: " in text and "Is a directory" in text and "was not completed" in text
    saver.close()
    assert_empty_soon(folder)


@distributed(world_size=2)
def test_the_next_call_raises_what_nobody_has_heard_and_saves_nothing():
    folder = shared_folder()
    saver = Saver()
    process = saver._underway.running()
    for is_asked in (False, True):
        if dist.get_rank() == 1:
            os.kill(process.pid, signal.SIGSTOP)
        saving = saver.save({"x": 1}, folder / "lost")
        if dist.get_rank() == 1:
            os.kill(process.pid, signal.SIGKILL)
        if is_asked:
            assert isinstance(saving.exception(), RankLostError)
        else:
            with pytest.raises(RankLostError, match=r"^async_save\(\): the process that saves for rank 1 is gone"):
                saver.save({"x": 1}, folder / "next")
            assert not (folder / "next").exists()
        saver.save({"x": 1}, folder / f"next{is_asked}").result()
        process = saver._underway.running()
    saver.close()


@distributed(world_size=2)
def test_a_problem_of_one_rank_is_raised_by_the_call_on_every_rank():
    folder = shared_folder()
    (folder / "there").mkdir(exist_ok=True)
    with Saver() as saver:
        with pytest.raises(MisuseRuntimeError, match=r"async_save\(\): .*there exists"):
            saver.save({"x": 1}, folder / "there")
        with pytest.raises(RanksDifferError):
            saver.save({"x": 1} if dist.get_rank() else {"y": 1}, folder / "other")
        bad = {"x": 1, "own": {dist.get_rank(): (lambda: 0) if dist.get_rank() else 0}}
        with pytest.raises(RuntimeError, match=r"async_save\(\): on rank 1: .*pickle"):
            saver.save(bad, folder / "other")
        with pytest.MonkeyPatch.context() as patched:
            if dist.get_rank():
                patched.setattr(background, "_available_memory", lambda: 1000)
            with pytest.raises(MisuseRuntimeError, match=r"on rank 1: there is no room .*staging"):
                saver.save({"own": {dist.get_rank(): torch.ones(1000)}}, folder / "other")
        with pytest.raises(ValueError, match="not a folder of a file system"):
            saver.save({"x": 1}, "s3://bucket/x")
        saver.save({"x": 1}, folder / "other").result()
    dist.barrier()  # until the first rank has deleted where they met
    assert sorted(path.name for path in folder.iterdir()) == ["other", "there"]


@distributed(world_size=2)
def test_a_writer_knows_what_it_was_sent_not_what_was_planned():
    """A save that another rank ends before it is sent has planned, and taken memory, all the same."""
    folder = shared_folder()
    with Saver() as saver:
        saver.save({"x": torch.ones(3)}, folder / "small").result()
        descriptors: list[int] = []
        for size in (5000, 7000, 9000):
            state: dict[str, Any] = {"own": {dist.get_rank(): torch.arange(size)}, "y": torch.full((7,), size)}
            with pytest.MonkeyPatch.context() as patched, pytest.raises(MisuseRuntimeError, match="no room"):
                if dist.get_rank():
                    patched.setattr(background, "_available_memory", lambda: 1000)
                saver.save(state, folder / f"{size}")
            saver.save(state, folder / f"{size}").result()
            descriptors.append(num_descriptors())
            into: dict[str, Any] = {"own": {dist.get_rank(): torch.zeros(size, dtype=torch.int64)}, "y": torch.zeros(7)}
            load(into, folder / f"{size}")
            assert torch.equal(into["own"][dist.get_rank()], torch.arange(size)) and into["y"].unique().tolist() == [
                size
            ]
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder / f"{size}")
            dist.barrier()
        ends = time.monotonic() + 20  # a thread closes the last one
        while num_descriptors() > descriptors[0] and time.monotonic() < ends:
            time.sleep(0.05)
        assert num_descriptors() <= descriptors[0]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@distributed(world_size=2)
def test_the_copy_may_be_in_a_folder():
    folder = shared_folder()
    staging = shared_folder()
    model, optimizer = trained()
    with Saver(state_of(model, optimizer), staging=staging) as saver:
        expected = own_snapshot(model, optimizer)
        saver.save(state_of(model, optimizer), folder / "one")
        train(model, optimizer, 1)
        assert not [*staging.iterdir()]  # without a name, it goes with the processes
        saver.save({"x": 1}, folder / "two")
    assert_holds(folder / "one", expected)
    with pytest.raises(FileNotFoundError):
        Saver({"x": torch.ones(3)}, staging=staging / "missing")


@distributed(world_size=2)
def test_two_jobs_that_save_to_one_path():
    """The later one replaces the one that is under way, which is an error there, on every rank."""
    folder = shared_folder()
    first, second = Saver(), Saver()
    with stopped(first):
        replaced = first.save({"x": torch.zeros(3)}, folder / "one")
        second.save({"x": torch.ones(3)}, folder / "one").result()
        dist.barrier()
    assert "another job saves to" in failure_of(replaced)
    dist.barrier()
    first.close()
    second.close()
    into = {"x": torch.zeros(3)}
    load(into, folder / "one")
    assert into["x"].tolist() == [1, 1, 1]
    assert [path.name for path in folder.iterdir()] == ["one"]


# ---- calls that are interrupted


@contextmanager
def interrupted_at(step: int, seen: list[Any]) -> Iterator[None]:
    """The call is interrupted before the line of ``background`` that is the ``step``-th new one."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != background.__file__:
            return None
        line = frame.f_code, frame.f_lineno
        if event == "line" and line not in seen:
            seen.append(line)
            if len(seen) == step:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_after_a_call_that_was_interrupted_at_any_line_the_next_one_works_or_says_it(tmp_path):
    step, told = 0, 0
    saver = Saver()
    while True:
        step, seen = step + 1, []
        state = {"x": torch.full((16 * step,), float(step)), "n": step}
        try:
            with interrupted_at(step, seen):
                saver.save(state, tmp_path / f"{step} interrupted")
            break
        except KeyboardInterrupt:
            pass
        try:
            path = saver.save(state, tmp_path / f"{step}").result(60)
        except MisuseRuntimeError as error:
            assert "was interrupted: save again" in str(error)
            told += 1
            path = saver.save(state, tmp_path / f"{step}").result(60)
        into = {"x": torch.zeros(16 * step), "n": 0}
        load(into, path)
        assert torch.equal(into["x"], state["x"]) and into["n"] == step
    assert step > 80 and told  # lines of the call
    saver.close()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("interrupted") and not (path / ".metadata")]


def fail(*_: Any) -> Any:
    raise OSError("there is no more")


@pytest.mark.parametrize("what", ["thread", "process"])
@distributed(world_size=2)
def test_a_rank_that_can_start_no_thread_or_process_is_one_error_of_the_call(what):
    folder = shared_folder()
    with Saver() as saver:
        saver.save({"x": torch.ones(3)}, folder / "first").result()
        with pytest.MonkeyPatch.context() as patched:
            if dist.get_rank():
                if what == "thread":
                    patched.setattr(threading.Thread, "start", fail)
                else:
                    writing = saver._underway.running()
                    os.kill(writing.pid, signal.SIGKILL)
                    writing._process.wait()
                    patched.setattr(background, "start_writer", fail)
            with pytest.raises(RuntimeError, match=r"^async_save\(\): on rank 1: OSError: there is no more") as error:
                saver.save({"x": torch.ones(3)}, folder / "second")
            same_on_every_rank(str(error.value))
        saver.save({"x": torch.ones(3)}, folder / "third").result()
    dist.barrier()  # the first rank has ended its meeting
    assert sorted(path.name for path in folder.iterdir()) == ["first", "third"]


@distributed(world_size=2)
def test_a_rank_that_is_interrupted_while_the_others_go_on_is_told_by_the_next_call():
    folder = shared_folder()
    with pytest.MonkeyPatch.context() as hasty:
        hasty.setattr(writer, "_HEARING", 0.5)  # for the interrupted rank to read the verdict, in vain
        saver = Saver()
    with saver:
        saver.save({"x": torch.ones(3)}, folder / "first").result()
        with pytest.MonkeyPatch.context() as patched:
            if dist.get_rank():
                patched.setattr(background.SaveFuture, "set_running_or_notify_cancel", interrupt)
            with pytest.raises(KeyboardInterrupt) if dist.get_rank() else nothing():
                saver.save({"x": torch.ones(3)}, folder / "second")
        with pytest.raises(
            RankLostError,
            match="^async_save.*the process that saves for rank 1 is gone, or that rank's call was interrupted",
        ) as error:
            saver.save({"x": torch.ones(3)}, folder / "third")
        same_on_every_rank(str(error.value))
        saver.save({"x": torch.ones(3)}, folder / "fourth").result()
    dist.barrier()  # the first rank has ended its meeting
    assert sorted(path.name for path in folder.iterdir()) == ["first", "fourth"]


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


# ---- the end of the trainer


def trainer(_rank: int, folder: Path, how: str) -> None:
    """A program that ends as an interpreter does, after it has printed what it raised."""
    if how in ("killed", "terminated"):
        background.start_writer = start_as_users_do  # in a session of its own, where no SIGTERM ends it
    try:
        train_to_the_end(folder, how)
    except RuntimeError:
        traceback.print_exc()
    ctypes.pythonapi.Py_Exit(int(how == "raises"))


def train_to_the_end(folder: Path, how: str) -> None:
    state = {"x": torch.arange(1000.0)}
    saver = Saver(state)
    pid = saver.pid
    os.kill(pid, signal.SIGSTOP)
    saving = saver.save(state, folder / "one")
    state["x"].zero_()
    if how == "writer":
        os.kill(pid, signal.SIGKILL)
    elif how != "fork":
        os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 1; kill -CONT {pid}"], os.environ)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "terminated":  # with the whole job
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        os.kill(pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "fork":
        if os.fork() == 0:
            saver.save({"x": torch.ones(1000)}, folder / "of the fork").result()
            ctypes.pythonapi.Py_Exit(0)  # at its exit this process does not wait for the parent's
        assert os.wait()[1] == 0 and not saving.done()
        os.kill(pid, signal.SIGCONT)
    if how == "raises":
        raise RuntimeError("of the training")


@pytest.mark.parametrize("how", ["killed", "terminated", "returns", "raises", "writer", "fork"])
def test_the_end_of_a_trainer(how, tmp_path):
    """Killed, it does not lose the save; otherwise it waits for it, and says what nobody has heard. A fork of it saves
    from memory of its own."""
    folder = tmp_path / "folder"
    folder.mkdir()
    ((ended, said),) = run_forked(1, tmp_path, trainer, folder, how)
    code = {"killed": -signal.SIGKILL, "terminated": 7, "raises": 1}.get(how, 0)
    assert ended == code, said
    if how == "writer":
        assert "RankLostError: async_save(): the process that saves for rank 0 is gone" in said
        assert not [*folder.iterdir()]
        return
    if how in ("killed", "terminated"):
        assert latest(folder) == folder / "one"  # which waits for a writer that is at work
    into = {"x": torch.zeros(1000)}
    load(into, folder / "one")
    assert torch.equal(into["x"], torch.arange(1000.0))
    if how == "fork":
        load(into, folder / "of the fork")
        assert torch.equal(into["x"], torch.ones(1000))
    assert "RankLostError" not in said


@distributed(world_size=2)
def test_closing_ends_a_writer_that_is_stopped():
    saver = Saver()
    process = saver._underway.running()
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(background, "_MARGIN", 0.5)
        saver.close()
    assert not process.is_alive


@distributed(world_size=2)
def test_a_saver_that_is_forgotten_ends_its_writer():
    folder = shared_folder()
    group = dist.new_group()
    async_save({"x": 1}, folder / "one", process_group=group).result()
    kept = known_for(group, Saver)
    assert kept is not None
    saver = Saver()
    saver.save({"x": 1}, folder / "two")  # under way: forgotten when it has ended
    processes = [item._underway.running() for item in (kept, saver)]
    dist.destroy_process_group(group)
    del group, kept, saver
    ends = time.monotonic() + 40
    while any(process.is_alive for process in processes) and time.monotonic() < ends:
        gc.collect()
        time.sleep(0.05)
    assert not any(process.is_alive for process in processes)
    assert (folder / "two").exists()


# ---- which is the newest, and which may go


def checkpoint(path: Path, value: float) -> Path:
    save({"x": torch.tensor(value)}, path)
    return path


@distributed(world_size=2)
def test_the_newest_is_the_last_that_was_completed():
    folder = shared_folder()
    assert latest(folder) is None and latest(folder / "missing") is None
    paths = [checkpoint(folder / f"step-{step}", float(step)) for step in (900, 1000, 950)]
    for name in ("notes", "step-2000.partial", "empty-checkpoint"):
        (folder / name).mkdir(exist_ok=True)
    assert latest(folder) == paths[-1]
    dist.barrier()
    if dist.get_rank() == 0:
        os.truncate(max(paths[-1].glob("*.distcp"), key=os.path.getsize), 10)  # damaged
    dist.barrier()
    assert latest(folder) == paths[1]
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(MisuseError, match="at least one"):
            keep(folder, 0)
        assert keep(folder, 2) == []
        assert keep(folder, 1) == [paths[0]]
    dist.barrier()
    names = {"notes", "step-2000.partial", "empty-checkpoint", "step-1000", "step-950"}
    assert {path.name for path in folder.iterdir()} == names


@distributed(world_size=2)
def test_checkpoints_are_kept_as_training_goes_on():
    folder = shared_folder()
    model, optimizer = trained()
    with Saver() as saver:
        for step in range(5):
            train(model, optimizer, 1)
            saver.save(state_of(model, optimizer) | {"step": step}, folder / f"step-{step}")
            keep(folder, last=2)  # on every rank at once
            assert 1 <= len([*folder.glob("step-?")]) <= 3 or step == 0
        expected = own_snapshot(model, optimizer)
    assert latest(folder) == folder / "step-4"
    other, fresh = trained(1)
    found = latest(folder)
    assert found is not None
    assert resume(found, other, fresh, step=0)["step"] == 4
    assert_equal(own_snapshot(other, fresh), expected)


def save_and_vanish(rank: int, folder: Path) -> None:
    """As a rank of a job whose trainers are killed right after the call."""
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    saver = Saver()
    saver.save({"x": 0}, folder / "first").result()  # the writer has begun, in a session of its own
    os.kill(saver.pid, signal.SIGSTOP)
    saver.save({"x": torch.ones(3), "own": {str(rank): torch.tensor(rank)}}, folder / "all" / "one")
    os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 1; kill -CONT {saver.pid}"], os.environ)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_save_counts_as_under_way_until_the_checkpoint_is_there(tmp_path):
    folder, token = tmp_path / "step-1", new_token()
    begin_folder(folder, token)
    lock = hold_lock(meeting_of(folder, token) / "0.lock")
    meeting = writer.Meeting(folder, token, 0, 1, timeout=10)
    meeting.tell({"files": {}})
    answers = []

    def finish(told: list[dict[str, Any]]) -> None:
        def waiting() -> list[bool]:
            return [is_lock_held(path) is True for path in locks_of_saves(tmp_path)]

        assert told == [{"files": {}}] and waiting() == [True]
        finish_folder(folder, token)
        assert folder.is_dir() and waiting() == [True]

    meeting.judge(finish, answers.append)
    os.close(lock)
    assert answers == [writer.COMPLETE]
    assert [*tmp_path.iterdir()] == [folder] and not [*folder.iterdir()]


def test_a_job_that_is_killed_after_the_call_keeps_the_save(tmp_path):
    (tmp_path / "all").mkdir()
    codes = [code for code, _ in run_forked(2, tmp_path, save_and_vanish, tmp_path)]
    assert codes == [-signal.SIGKILL] * 2
    assert latest(tmp_path / "all") == tmp_path / "all" / "one"
    into: dict[str, Any] = {"x": torch.zeros(3), "own": {"0": torch.tensor(9), "1": torch.tensor(9)}}
    load(into, tmp_path / "all" / "one")
    assert into["x"].tolist() == [1, 1, 1] and into["own"] == {"0": torch.tensor(0), "1": torch.tensor(1)}

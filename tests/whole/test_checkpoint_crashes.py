"""A save that is killed at any moment leaves the old or the new checkpoint, and a path that the next save can use; of
two jobs that save to one path one gets an error, and what is there is one job's alone.

Processes are killed, and stopped, where they touch the file system: Python's audit events tell of each such moment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose.checkpoint import load, load_hf, save, save_hf
from tests import harness
from tests.harness import distributed

KILLED = 9
EVENTS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "shutil.rmtree"}

harness.preload(__name__)


def state(value: float) -> dict[str, object]:
    return {"tensor": torch.full((64,), value), "number": value, "nested": {"more": torch.full((3, 2), value)}}


def save_state(value: float, folder: Path) -> None:
    save(state(value), folder)


def save_model(value: float, folder: Path) -> None:
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    save_hf(model, folder, max_file_bytes=36)


def value_in(folder: Path) -> float:
    """Which save has written a checkpoint, all of it."""
    if (folder / "manifest.json").exists():
        loaded = state(0)
        load(loaded, folder)
        tensors = [loaded["tensor"], loaded["nested"]["more"], torch.tensor(loaded["number"])]
    else:
        model = nn.Linear(3, 3)
        load_hf(model, folder)
        tensors = [*model.state_dict().values()]
    (value,) = {value for tensor in tensors for value in tensor.flatten().tolist()}
    return value


def at_event(number: int, action: Callable[[], None]) -> None:
    """Call ``action`` where this process is about to touch the file system for the ``number``-th time from now on."""
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event in EVENTS:
            seen += 1
            if seen == number:
                action()

    sys.addaudithook(hook)


def killed_at(number: int, how: Callable[[float, Path], None], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        how(0.0, Path(other) / "warm")  # what is imported and opened once
    at_event(number, lambda: os._exit(KILLED))
    how(2.0, folder)
    os._exit(0)


def run(target: Callable[..., None], *arguments: object) -> int:
    with tempfile.NamedTemporaryFile() as output:
        process = harness.start_forked(Path(output.name), target, *arguments)
        process.join(60)
        assert process.exitcode in (0, KILLED), Path(output.name).read_text()
        return process.exitcode


def interrupt_by_an_earlier_version(folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir()
    for name in (".unfinished", "__0_0.distcp"):
        (partial / name).write_text("x")


def interrupt(number: int) -> Callable[[Path], None]:
    return lambda folder: None if run(killed_at, number, save_state, folder) == KILLED else pytest.fail("not killed")


BEFORE: dict[str, Callable[[Path], None]] = {
    "nothing": lambda folder: None,
    "an interrupted save": interrupt(6),
    "one of an earlier version": interrupt_by_an_earlier_version,
}


@pytest.mark.parametrize(
    ("before", "how"), [*((before, save_state) for before in BEFORE), ("an interrupted save", save_model)]
)
def test_a_save_killed_at_any_event_leaves_the_old_or_the_new_checkpoint(before, how, tmp_path):
    save(state(1.0), tmp_path / "step-1")
    number, seen = 0, set()
    while True:
        number += 1
        folder = tmp_path / f"run-{number}" / "step-2"
        folder.parent.mkdir()
        BEFORE[before](folder)
        code = run(killed_at, number, how, folder)
        assert value_in(tmp_path / "step-1") == 1.0
        if not folder.exists():
            assert code == KILLED
            how(3.0, folder)  # the path is of use
            seen.add("old")
            assert value_in(folder) == 3.0
        else:
            seen.add("new")
            assert value_in(folder) == 2.0
        if code == 0:
            break
    assert seen == {"old", "new"} and number > 8, "it was killed before and after the decisive step"


def stopped_at(number: int, folder: Path, connection: Connection) -> None:
    with tempfile.TemporaryDirectory() as other:
        save_state(0.0, Path(other) / "warm")

    def wait() -> None:
        connection.send("stopped")
        connection.recv()

    at_event(number, wait)
    try:
        save_state(1.0, folder)
        connection.send("saved")
    except RuntimeError as error:
        connection.send(f"error: {error}")
    connection.recv()
    os._exit(0)


def attempt(value: float, folder: Path) -> str:
    try:
        save_state(value, folder)
        return "saved"
    except RuntimeError as error:
        return f"error: {error}"


@pytest.mark.timeout(120)
def test_of_two_jobs_that_save_to_one_path_one_gets_an_error_wherever_they_collide(tmp_path):
    winners, number = set(), 0
    while True:
        number += 1
        folder = tmp_path / f"run-{number}" / "step"
        folder.parent.mkdir()
        ours, theirs = harness.rank_processes.FORKS.Pipe()
        with tempfile.NamedTemporaryFile() as output:
            process = harness.start_forked(Path(output.name), stopped_at, number, folder, theirs)
            theirs.close()
            try:
                first = ours.recv()
                was_stopped = first == "stopped"
                second = attempt(2.0, folder)  # all of another job's save, between two events of the first one's
                if was_stopped:
                    ours.send("go on")
                    first = ours.recv()
                ours.send("done")
                process.join(30)
            finally:
                harness.end(process)
        outcomes = {1.0: first, 2.0: second}
        (winner,) = [value for value, outcome in outcomes.items() if outcome == "saved"]
        (loser,) = [outcome for outcome in outcomes.values() if outcome != "saved"]
        assert "step" in loser, loser
        assert value_in(folder) == winner
        winners.add(winner)
        assert [path.name for path in folder.parent.iterdir()] == ["step"], "nothing is left behind"
        if not was_stopped:
            break
    assert winners == {1.0, 2.0} and number > 6


def one_folder() -> Path:
    box = [tempfile.mkdtemp(prefix="fsdp_compose_crashes_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return Path(str(box[0]))


@distributed(world_size=4)
def test_two_jobs_of_several_ranks_that_save_to_one_path_at_once():
    jobs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = dist.get_rank() // 2
    parent = one_folder()
    for i in range(4):
        folder = parent / f"step-{i}"
        dist.barrier()
        mine: object = "saved"
        try:
            save({"tensor": torch.full((4096,), float(job)), "more": {f"{dist.get_rank()}": job}},
                 folder, process_group=jobs[job])  # fmt: skip
        except RuntimeError as error:
            mine = str(error)
        outcomes: list[str] = [""] * 4
        dist.all_gather_object(outcomes, mine)
        assert outcomes[0] == outcomes[1] and outcomes[2] == outcomes[3], "one outcome for all ranks of a job"
        winners = [j for j in (0, 1) if outcomes[2 * j] == "saved"]
        assert len(winners) == 1, outcomes
        listed = json.loads((folder / "manifest.json").read_text())["files"]
        assert {path.name for path in folder.iterdir()} == {*listed, "manifest.json"}
        loaded = {"tensor": torch.zeros(4096), "more": {}}
        load(loaded, folder)
        assert loaded["tensor"].unique().tolist() == [winners[0]]


@pytest.mark.parametrize("what", ["file", "link", "empty folder"])
def test_what_takes_the_name_while_it_is_saved_is_left_as_it_is(what, tmp_path):
    folder = tmp_path / "step"

    class Intruder:
        def state_dict(self) -> dict[str, object]:
            return {"value": self}

        def __reduce__(self) -> object:
            if [path.name for path in tmp_path.iterdir()] != ["step.partial"]:
                pass  # the checkpoint is not being written yet
            elif what == "file":
                folder.write_text("mine")
            elif what == "link":
                folder.symlink_to(tmp_path / "nowhere")
            else:
                folder.mkdir()
            return (OrderedDict, ())

    with pytest.raises(RuntimeError, match="step exists now, and was not touched"):
        save({"intruder": Intruder()}, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert not folder.is_dir() or not [*folder.iterdir()]

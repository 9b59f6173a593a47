"""Which checkpoint is the newest, and which may go, whatever became of names and times of files; and what killed saves
and deletions leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdp_compose.checkpoint import async_save, folders, keep, latest, load, save
from tests.checkpoint.states import shared_folder
from tests.harness import distributed, run_forked

WITHOUT_TIMES = shutil.copyfile


def checkpoints(run: Path, *steps: int) -> list[Path]:
    for step in steps:
        save({"x": torch.tensor(float(step))}, run / f"step-{step}")
    return [run / f"step-{step}" for step in steps]


def of_an_earlier_version(path: Path) -> None:
    manifest = json.loads((path / folders.MANIFEST).read_text())
    del manifest["saved"], manifest["checksum"]
    (path / folders.MANIFEST).write_text(folders.as_text(manifest))


def names(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()}


def has_ended(lock: Path) -> bool:
    return folders.is_lock_held(lock) is False


def silently(call: Callable[[], object]) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


# ---- What happens to the folders of steps 8, 9, 10 and 100, saved in that order.


def copied_without_times(run: Path) -> None:
    for path in sorted(run.iterdir(), reverse=True):  # the oldest last
        path.rename(run.parent / "moved")
        shutil.copytree(run.parent / "moved", path, copy_function=WITHOUT_TIMES)
        shutil.rmtree(run.parent / "moved")


def equal_times(run: Path) -> None:
    for path in run.rglob("*"):
        os.utime(path, (1e9, 1e9))


def old_one_brought_back(run: Path) -> None:
    (run / "step-9").rename(run.parent / "archive")
    shutil.copytree(run.parent / "archive", run / "step-9", copy_function=WITHOUT_TIMES)


def other_names(run: Path) -> None:
    for name, new in {"step-8": "z", "step-9": "step-1000", "step-10": "m", "step-100": "a"}.items():
        (run / name).rename(run / new)


def earlier_version(run: Path) -> None:
    equal_times(run)
    for path in run.iterdir():
        of_an_earlier_version(path)


CHANGES = [copied_without_times, equal_times, old_one_brought_back, other_names, earlier_version]


@pytest.mark.parametrize("change", CHANGES)
def test_order_does_not_depend_on_times_and_names_of_folders(change, tmp_path):
    run = tmp_path / "run"
    checkpoints(run, 8, 9, 10, 100)
    change(run)
    newest = run / ("a" if change is other_names else "step-100")
    assert silently(lambda: latest(run)) == newest
    assert len(silently(lambda: keep(run, last=1))) == 3
    assert names(run) == {newest.name}


def test_a_clock_that_is_set_back_changes_nothing(tmp_path, monkeypatch):
    now = time.time_ns()
    for step, clock in ((100, now), (200, now + 3600 * 10**9), (300, now), (250, now - 10**9)):
        monkeypatch.setattr(time, "time_ns", lambda clock=clock: clock)
        checkpoints(tmp_path, step)
    assert silently(lambda: latest(tmp_path)) == tmp_path / "step-250", "completed last: the run had gone back"
    assert {path.name for path in silently(lambda: keep(tmp_path, last=2))} == {"step-100", "step-200"}


def test_copies_take_nobodys_place(tmp_path):
    checkpoints(tmp_path, 1, 2, 3)
    for source, name in (("step-1", "best"), ("step-3", "backup")):
        shutil.copytree(tmp_path / source, tmp_path / name)
    (tmp_path / "newest").symlink_to("step-3")
    assert silently(lambda: latest(tmp_path)) == tmp_path / "step-3"
    assert {path.name for path in silently(lambda: keep(tmp_path, last=2))} == {"best", "step-1"}
    assert names(tmp_path) == {"step-2", "step-3", "backup", "newest"}


def test_a_link_to_another_disk_is_a_checkpoint_that_keep_leaves(tmp_path):
    run, disk = tmp_path / "run", tmp_path / "disk"
    checkpoints(run, 1, 2, 3)
    for step in (1, 3):
        disk.mkdir(exist_ok=True)
        shutil.move(run / f"step-{step}", disk)
        (run / f"step-{step}").symlink_to(disk / f"step-{step}")
    assert latest(run) == run / "step-3"
    with pytest.warns(UserWarning, match=r"does not delete step-1: it is a link"):
        assert keep(run, last=1) == [run / "step-2"]
    shutil.rmtree(disk / "step-3")
    with pytest.warns(UserWarning, match=r"latest\(\) passed over: .*step-3"):
        assert latest(run) == run / "step-1"


def test_saves_of_another_run_count_only_where_names_and_times_agree(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    checkpoints(other, 5, 30)
    checkpoints(run, 10, 20)
    for path in other.iterdir():
        shutil.copytree(path, run / path.name)
    with pytest.warns(UserWarning, match="chose step-30 by its name: nothing proves that step-20 is older"):
        assert latest(run) == run / "step-30"
    with pytest.warns(UserWarning, match=r"keep\(last=1\) does not delete step-20, step-30: "):
        assert {path.name for path in keep(run, last=1)} == {"step-5", "step-10"}


def test_what_torch_wrote_is_a_checkpoint(tmp_path):
    checkpoints(tmp_path, 9)
    for name in ("step-10", "final"):
        dcp.save({"x": torch.tensor(1.0)}, checkpoint_id=tmp_path / name)
    with pytest.warns(UserWarning, match="chose step-10 by its name: nothing proves that final is older"):
        assert latest(tmp_path) == tmp_path / "step-10"
    load({"x": torch.tensor(0.0)}, tmp_path / "step-10")
    with pytest.warns(UserWarning, match="does not delete final, step-10"):
        assert keep(tmp_path, last=1) == [tmp_path / "step-9"]


def test_no_circle_of_proofs_deletes_all(tmp_path):
    checkpoints(tmp_path, 30, 10)  # the run had gone back
    dcp.save({"x": torch.tensor(1.0)}, checkpoint_id=tmp_path / "step-20")
    assert keep(tmp_path, last=1) == [] and latest(tmp_path) == tmp_path / "step-30"


@distributed(world_size=2)
def test_what_is_passed_over_is_said():
    folder = shared_folder()
    checkpoints(folder, 1, 2, 3, 4)
    if dist.get_rank() == 0:
        os.truncate(next((folder / "step-2").glob("*.distcp")), 1)
        (folder / "step-3" / ".metadata").unlink()
        (folder / "step-4" / ".metadata").write_bytes(b"no pickle")
        (folder / "step-5").symlink_to(folder / "nowhere")
        (folder / "notes").mkdir()
        (folder / "log.txt").touch()
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert latest(folder) == folder / "step-1"
    told = [str(item.message) for item in caught if "passed over" in str(item.message)]
    assert len(told) == (dist.get_rank() == 0)
    for text in told:
        assert all(f"step-{step}" in text for step in (2, 3, 4, 5)) and "notes" not in text and "log" not in text


@distributed(world_size=2)
def test_os_chdir_moves_no_save():
    folder, before = shared_folder(), os.getcwd()
    try:
        os.chdir(folder)
        first = async_save({"x": torch.ones(2)}, "one")
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / "sub").mkdir()
        dist.barrier()
        os.chdir("sub")
        assert first.result() == folder / "one"
        assert async_save({"x": torch.ones(2)}, "two").result() == folder / "sub" / "two"
        save({"x": torch.ones(2)}, "three")
        assert latest("..") == Path("../one") and latest(".") == Path("three")
    finally:
        os.chdir(before)


# ---- What was killed


def killed_in_keep(rank: int, folder: Path) -> None:
    """As a process that is killed when it has deleted one file."""

    def delete(path: Path) -> None:
        next(path.glob("*.distcp")).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    folders.shutil = type(sys)("shutil")
    folders.shutil.rmtree = delete
    keep(folder, last=1)


def killed_in_save(rank: int, folder: Path, how: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder.parent}/store")

    class Kills:
        def __reduce__(self) -> str:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
            return ""

    if how == "async":
        future = async_save({"x": torch.ones(3)}, folder / "step-0")
        future.result()
        from fsdp_compose.checkpoint.background import Saver

        saver = Saver()
        os.kill(saver.pid, signal.SIGSTOP)
        saver.save({"x": torch.ones(3)}, folder / "step-9")
        dist.barrier()
        os.kill(saver.pid, signal.SIGKILL)
    else:
        original = folders.SummedFile.write

        def write(self: folders.SummedFile, data: bytes) -> int:
            original(self, data)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        folders.SummedFile.write = write  # type: ignore[method-assign]
        save({"x": {str(rank): torch.ones(3)}}, folder / "step-9")
    os.kill(os.getpid(), signal.SIGKILL)


def test_keep_finishes_what_a_killed_one_has_begun(tmp_path):
    run = tmp_path / "run"
    checkpoints(run, 1, 2)
    run_forked(1, tmp_path, killed_in_keep, run)
    assert names(run) == {"step-2", "step-1.partial"}
    assert keep(run, last=1) == [] and names(run) == {"step-2"}


@pytest.mark.parametrize("how", ["save", "async"])
def test_keep_deletes_what_a_killed_save_has_left(how, tmp_path):
    run = tmp_path / "run"
    checkpoints(run, 1)
    run_forked(2, tmp_path, killed_in_save, run, how)
    assert "step-9.partial" in names(run)
    while not all(map(has_ended, run.glob("step-9.partial/meet-*/*.lock"))):  # the rank does not wait for its writer
        time.sleep(0.01)
    keep(run, last=2)
    assert names(run) <= {"step-0", "step-1"}


def test_keep_leaves_what_somebody_may_still_write(tmp_path):
    taken: list[int] = []
    checkpoints(tmp_path, 1)
    for name, ranks in {"under-way": "0", "other-rank": "1", "no-locks": ""}.items():
        token = folders.new_token()
        folders.begin_folder(tmp_path / name, token)
        for rank in ranks:
            meeting = folders.meeting_of(tmp_path / name, token)
            os.close(folders.hold_lock(meeting / "2.lock"))
            taken.append(folders.hold_lock(meeting / f"{rank}.lock"))
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "notes").touch()
    before = sorted(tmp_path.rglob("*"))
    keep(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    for lock in taken:
        os.close(lock)
    keep(tmp_path)
    assert names(tmp_path) == {"step-1", "no-locks.partial", "mine.partial"}

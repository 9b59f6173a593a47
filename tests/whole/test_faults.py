"""The battery of faults (``make faults``) runs, in its quick form, finds what it is there to find, and says so."""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from benchmarks.faults import battery, elastic_groups
from benchmarks.faults.fault import Fault, Settings, Verdict
from benchmarks.faults.file_events import FileEvents
from benchmarks.faults.jobs import Result
from benchmarks.faults.systems import OURS, SYSTEMS
from tests import harness

harness.preload("benchmarks.faults.battery")


def run_battery(temporary: str, *arguments: str) -> None:
    """In a process of its own, as the command does."""
    tempfile.tempdir = temporary
    sys.argv = ["faults", "--quick", *arguments]
    runpy.run_module("benchmarks.faults", run_name="__main__", alter_sys=True)


def quickly(folder: Path, *arguments: str) -> str:
    """What the quick battery prints, which keeps all promises and leaves no file in the ``temporary`` folder."""
    (folder / "temporary").mkdir()
    process = harness.start_forked(folder / "output", run_battery, str(folder / "temporary"), *arguments)
    try:
        process.join()
    finally:
        harness.end(process)
    printed = (folder / "output").read_text()
    assert printed.splitlines()[-1] == "faults: 1 of 1 as promised", printed
    assert process.exitcode == 0, printed
    assert not list((folder / "temporary").iterdir())
    return printed


@pytest.mark.timeout(300)
def test_the_quick_battery_finds_promises_kept_and_broken_and_leaves_no_file(tmp_path):
    printed = quickly(tmp_path, "--only=flips", "--systems=all")
    (row,) = [line for line in printed.splitlines() if line.startswith("| bit flips")]
    _, _, ours, torchs, _ = row.split("|")
    assert ours.strip().startswith("as promised: ") and "damages noticed" in ours, printed
    noticed, total = map(int, re.search(r"not as promised\W+(\d+) of (\d+) damages noticed", torchs).groups())
    assert noticed < total, "DCP has no checksums: the battery can tell"


@pytest.mark.timeout(300)
def test_replica_groups_go_on_when_one_is_killed_before_during_and_after_its_collectives(tmp_path):
    printed = quickly(tmp_path, "--only=elastic: a replica group")
    assert "after 3 of 3 kills the others went on (1 made the step under way, 2 threw it away" in printed


def logs(**changed: list[list[float]]) -> dict[tuple[int, int], list[list[float]]]:
    """The logs of groups 0 and 2, when group 1 was lost in step 2. ``changed``: others, such as ``group0_rank1``."""
    usual = [[step, True, 3 if step < 2 else 2, float(step)] for step in range(elastic_groups.STEPS)]
    places = [(group, rank) for group in (0, 2) for rank in range(2)]
    return {(group, rank): changed.get(f"group{group}_rank{rank}", usual) for group, rank in places}


def test_logs_of_replica_groups_that_contradict_each_other_are_a_problem():
    usual = logs()[0, 0]
    took_part, problem = elastic_groups.taken(3, logs())
    assert (took_part, problem) == ([[0, 1, 2]] * 2 + [[0, 2]] * (elastic_groups.STEPS - 2), "")
    with_it = [[*line[:2], 3, line[3]] if line[0] == 2 else line for line in usual]
    for other in (usual[:2] + usual[3:], with_it):  # one rank did not make step 2, or did with the lost group
        assert elastic_groups.taken(3, logs(group2_rank1=other))[1].startswith("step 2: ")
        assert elastic_groups.taken(3, logs(group2_rank0=other, group2_rank1=other))[1].startswith("step 2: ")


def results(expected: dict[str, torch.Tensor], log: list[list[float]]) -> list[Result]:
    parameters = {name: value.tolist() for name, value in expected.items()}
    return [Result("returned", {"log": log, "parameters": parameters, "collectives": []}) for _ in range(2)]


def test_groups_that_have_other_parameters_than_an_unsharded_run_are_a_problem(tmp_path):
    (tmp_path / "died").write_text("1.5")
    case, log = elastic_groups.Case(3, victim=1, rank=0, at=4), logs()[0, 0]
    expected = elastic_groups.unsharded(elastic_groups.taken(3, logs())[0])
    fine, dead = results(expected, log), [Result("died")] * 2
    found = elastic_groups.judge(case, [fine, dead, fine], tmp_path)
    assert (found.problem, found.is_made, found.seconds) == ("", False, 0.5)
    apart = results({name: value + 1e-9 for name, value in expected.items()}, log)
    assert "is 1.0e-09 from an unsharded run" in elastic_groups.judge(case, [fine, dead, apart], tmp_path).problem
    hangs = [fine[0], Result("hangs")]
    assert "which is left: hangs" in elastic_groups.judge(case, [hangs, dead, fine], tmp_path).problem
    alone = dataclasses.replace(case, takes_group=False)
    assert "its partner: died" in elastic_groups.judge(alone, [fine, dead, fine], tmp_path).problem


def test_a_broken_promise_of_ours_is_exit_code_1_and_in_the_last_line(monkeypatch, capsys):
    def broken(system, settings):
        return Verdict(not system.is_ours, "something happened")

    monkeypatch.setattr(battery, "FAULTS", [Fault("a fault", broken), Fault("another", lambda *_: Verdict(True, "x"))])
    monkeypatch.setattr(sys, "argv", ["faults", "--systems=all"])
    with pytest.raises(SystemExit) as end:
        battery.main()
    assert end.value.code == 1
    printed = capsys.readouterr().out
    assert "| a fault | **not as promised**: something happened (0 s) | as promised" in printed
    assert printed.splitlines()[-1] == "faults: 1 of 2 as promised"


def test_a_fault_that_cannot_be_done_is_no_promise_kept():
    def fails(system, settings):
        raise OSError("no such thing")

    verdict = battery.judge(Fault("a fault", fails), SYSTEMS[OURS], Settings(True, 1, 0, Path()))
    assert not verdict.is_kept and "no such thing" in verdict.text


def write_and_note(folder: str, notes: str) -> None:
    target = Path(folder)
    events = FileEvents(target)
    with events.counted():
        (target / "new").mkdir()
        with open(target / "new" / "file", "wb") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        (target / "new" / "text").write_text("y")
        (target / "new" / "file").rename(target / "new" / "other")
        (target / "new" / "other").unlink()
        Path(notes).write_text("not below the folder")
    (target / "later").touch()
    Path(notes).write_text("\n".join(events.names))


def test_every_file_event_is_noted(tmp_path):
    (tmp_path / "below").mkdir()
    notes = tmp_path / "notes"
    process = harness.start_forked(tmp_path / "output", write_and_note, str(tmp_path / "below"), str(notes))
    try:
        process.join()
    finally:
        harness.end(process)
    assert process.exitcode == 0, (tmp_path / "output").read_text()
    assert notes.read_text().splitlines() == [
        *("mkdir new", "open file", "write file", "fsync file", "open text", "write text"),
        *("rename file", "remove other"),
    ]

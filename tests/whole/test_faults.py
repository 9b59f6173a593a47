"""The battery of faults (``make faults``) runs, in its quick form, finds what it is there to find, and says so."""

from __future__ import annotations

import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.faults import battery
from benchmarks.faults.fault import Fault, Settings, Verdict
from benchmarks.faults.file_events import FileEvents
from benchmarks.faults.systems import OURS, SYSTEMS
from tests import harness

harness.preload("benchmarks.faults.battery")


def run_battery(temporary: str, *arguments: str) -> None:
    """In a process of its own, as the command does."""
    tempfile.tempdir = temporary
    sys.argv = ["faults", "--quick", *arguments]
    runpy.run_module("benchmarks.faults", run_name="__main__", alter_sys=True)


@pytest.mark.timeout(300)
def test_the_quick_battery_finds_promises_kept_and_broken_and_leaves_no_file(tmp_path):
    (tmp_path / "temporary").mkdir()
    process = harness.start_forked(
        tmp_path / "output", run_battery, str(tmp_path / "temporary"), "--only=flips", "--systems=all"
    )
    try:
        process.join()
    finally:
        harness.end(process)
    printed = (tmp_path / "output").read_text()
    (row,) = [line for line in printed.splitlines() if line.startswith("| bit flips")]
    _, _, ours, torchs, _ = row.split("|")
    assert ours.strip().startswith("as promised: ") and "damages noticed" in ours, printed
    noticed, total = map(int, re.search(r"not as promised\W+(\d+) of (\d+) damages noticed", torchs).groups())
    assert noticed < total, "DCP has no checksums: the battery can tell"
    assert printed.splitlines()[-1] == "faults: 1 of 1 as promised"
    assert process.exitcode == 0, printed
    assert not list((tmp_path / "temporary").iterdir())


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

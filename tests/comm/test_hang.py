"""Ranks that stand still say where they are, and the lines of all of them say who waits for whom."""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compose import fully_shard
from fsdp_compose.__main__ import main
from fsdp_compose._torch import fake_store
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict
from fsdp_compose.core.comm.failure import Meeting, meeting_in
from fsdp_compose.core.group.collective_order import CollectiveLog
from fsdp_compose.inspect import explain_hang, positions_in
from fsdp_compose.plugins.debugging.standstill import HANG_SECONDS_ENV, POSITION_MARK, position
from tests.harness import distributed, fake_process_group


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def blocks_of_three() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def _wait_for_line(lines: Lines, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not any(POSITION_MARK in line for line in lines.lines) and time.monotonic() < end:
        time.sleep(0.05)


def be_late(*_: Any) -> None:
    """Where rank 1 is found."""
    assert _late is not None
    _wait_for_line(_late)
    time.sleep(0.5)  # the others are waiting for as long already, or began to a little later


_late: Lines | None = None


@distributed(3, fresh=True)
def test_ranks_that_wait_say_for_whom(monkeypatch_env: None = None) -> None:
    import os

    global _late
    os.environ[HANG_SECONDS_ENV] = "0.6"
    rank = dist.get_rank()
    shown = Lines()
    logging.getLogger("fsdp_compose").addHandler(shown)
    model = blocks_of_three()
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    assert not shown.lines, shown.lines

    for place in ("forward", "backward", "between iterations"):
        shown.lines.clear()
        _late = shown
        if place == "between iterations":
            if rank == 1:
                be_late()
            model(torch.ones(2, 8)).sum().backward()
        else:
            with _interrupted(model[1], place, rank == 1):
                model(torch.ones(2, 8)).sum().backward()
        gathered: list[Any] = [None] * 3
        dist.all_gather_object(gathered, shown.lines)
        positions = positions_in([line for lines in gathered for line in lines])
        assert {position["rank"] for position in positions} == {0, 1, 2}, gathered
        late = next(position for position in positions if position["rank"] == 1)
        assert "in be_late" in late["program"] or "in _wait_for_line" in late["program"], late
        assert late["phase"].startswith({"forward": "forward", "backward": "the backward"}.get(place, "")), late
        explained = explain_hang(positions)
        assert "rank 1: behind: the others wait for rank 1" in explained, explained
        assert "ranks 0, 2: waiting" in explained, explained


@distributed(2, fresh=True)
def test_a_destroyed_process_group_stops_no_other_from_being_looked_after() -> None:
    import os

    global _late
    os.environ[HANG_SECONDS_ENV] = "0.6"
    _late = shown = Lines()
    logging.getLogger("fsdp_compose").addHandler(shown)
    fake_store()  # registers the backend, whose groups have no timeout of their own to tell
    destroyed = dist.new_group([0, 1], backend="fake")
    first = fully_shard(nn.Linear(8, 8), mesh=DeviceMesh.from_group(destroyed, "cpu"))
    first(torch.ones(2, 8)).sum().backward()
    dist.destroy_process_group(destroyed)
    model = blocks_of_three()
    with _interrupted(model[1], "forward", dist.get_rank() == 1):
        model(torch.ones(2, 8)).sum().backward()
    assert positions_in(shown.lines), shown.lines


class _interrupted:
    """Rank 1 is late in a module's forward or backward."""

    def __init__(self, module: nn.Module, place: str, is_late: bool) -> None:
        self._handle = None
        if is_late and place == "forward":
            self._handle = module.register_forward_pre_hook(be_late)
        elif is_late:
            self._handle = module.register_full_backward_pre_hook(be_late)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()


def _position(rank: int, number: int = 4, **other: object) -> dict[str, object]:
    place = {
        "rank": rank, "size": 4, "ranks": "0-3", "number": number, "last": "all-gather of layers.1",
        "phase": "forward 7", "program": "train.py:10 in main", "waits_in": "", "seconds": 60, "host": "a", "pid": 1,
    }  # fmt: skip
    return place | other


def test_who_waits_for_whom() -> None:
    behind = explain_hang([_position(0), _position(1), _position(2, 3, program="data.py:3 in load"), _position(3)])
    assert "rank 2: behind: the others wait for rank 2" in behind and "data.py:3 in load" in behind
    absent = explain_hang([_position(0), _position(1), _position(3)])
    assert "rank 2: logged nothing" in absent and "they wait for rank 2" in absent
    same = explain_hang([_position(rank) for rank in range(4)])
    assert "none is behind" in same
    differ = explain_hang([_position(0), *[_position(rank, last="all-gather of head") for rank in (1, 2, 3)]])
    assert "different ones" in differ and "layers.1" in differ and "head" in differ
    # What a rank said last counts; each process group is told by itself.
    moved = explain_hang([_position(2, 3), *[_position(rank) for rank in range(4)]])
    assert "none is behind" in moved
    groups = explain_hang([_position(0, ranks="0-1", size=2), _position(0, ranks="2-3", size=2)])
    assert groups.count("process group of ranks") == 2


def test_each_thread_waits_in_meetings_of_its_own() -> None:
    other: list[Meeting] = []
    entered, is_over = threading.Event(), threading.Event()

    def wait() -> None:
        with Meeting(dist.group.WORLD, "in a thread") as meeting:
            other.append(meeting)
            entered.set()
            is_over.wait(20)

    with fake_process_group(0, 2):
        thread, mine = threading.Thread(target=wait), threading.get_ident()
        with Meeting(dist.group.WORLD, "outer") as outer, Meeting(dist.group.WORLD, "inner") as inner:
            thread.start()
            assert entered.wait(20) and meeting_in(mine) is inner and meeting_in(thread.ident or 0) is other[0]
        assert meeting_in(mine) is None and meeting_in(thread.ident or 0) is other[0] is not outer
        is_over.set()
        thread.join(20)


def test_a_place_without_a_line_of_the_package_is_empty() -> None:
    with fake_process_group(0, 2), ThreadPoolExecutor(1) as pool:
        told = pool.submit(position, dist.group.WORLD, CollectiveLog(), [], 60.0)  # while this thread waits, in its own
        assert told.result(20)["waits_in"] == ""


def test_command_puts_logs_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1, 3):
        folder = tmp_path / "logs" / str(rank)
        folder.mkdir(parents=True)
        line = f"[rank{rank}]: {POSITION_MARK}{json.dumps(_position(rank))}"
        (folder / "stderr.log").write_text(f"something\n{line}\nsomething {POSITION_MARK}{{broken\n")
    assert main(["hang", str(tmp_path / "logs")]) == 0
    found = capsys.readouterr().out
    assert "rank 2: logged nothing" in found and "ranks 0, 1, 3:" in found
    assert main(["hang", str(tmp_path / "nothing")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_patience_is_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_compose.plugins.debugging.standstill import patience

    monkeypatch.setenv(HANG_SECONDS_ENV, "soon")
    with pytest.raises(ValueError, match="expected seconds"):
        patience()


@distributed(2, fresh=True)
def test_a_rank_that_waits_between_iterations_says_so_soon_and_so_does_the_late_one() -> None:
    """One waits in a rendezvous, the other one in no call of this package."""
    import os

    os.environ[HANG_SECONDS_ENV] = "2"
    shown = Lines()
    logging.getLogger("fsdp_compose").addHandler(shown)
    model = blocks_of_three()
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    begin = time.monotonic()
    if dist.get_rank():
        while not positions_in(shown.lines) and time.monotonic() - begin < 30:
            time.sleep(0.05)
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    (position,) = positions_in(shown.lines)
    if not dist.get_rank():
        assert position["waits_in"].startswith("core/comm/store.py") and position["phase"] == "", position

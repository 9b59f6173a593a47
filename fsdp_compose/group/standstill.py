"""Ranks that stand still say where, without being asked: what they have issued last, and what their program is at.

A rank that waits for another one in a collective hangs until the process group's timeout, and then is told, at best,
that it was waiting. Which rank is late, and where that one is, no rank knows alone. So a thread of each rank looks, a
few times a minute, whether anything was issued since; if not for long, it logs one line (``fsdp_compose``, WARNING),
which ends in JSON. ``python -m fsdp_compose hang LOGS...`` puts the lines of all ranks together.

The thread reads what the order of collectives notes anyway (``group.order``): training has no more to do, and nothing
is communicated. What a GPU has not done yet is not seen, only what its host has issued.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from .._torch import group_timeout, is_destroyed
from .order import CollectiveOrder

HANG_SECONDS_ENV = "FSDP_COMPOSE_HANG_SECONDS"
SECONDS = 60.0  # inside an iteration, if the variable says nothing; 0 turns it off
BETWEEN = 5  # times as long between iterations, where programs save, evaluate and load
POSITION_MARK = "fsdp_compose position: "  # before the JSON
_LOOKS = 6  # in the time of patience

_logger = logging.getLogger("fsdp_compose")
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_COMPILERS = {f"{_TORCH}{name}" for name in ("_dynamo/convert_frame.py", "_inductor/compile_fx.py")}
_Seen = tuple[tuple[int, int], float, bool]  # what there was, since when, whether that was told


def patience() -> float:
    """Seconds that a rank may stand still inside an iteration."""
    try:
        return max(0.0, float(os.environ.get(HANG_SECONDS_ENV, SECONDS)))
    except ValueError:
        raise ValueError(
            f"{HANG_SECONDS_ENV} is {os.environ[HANG_SECONDS_ENV]!r}: it takes seconds, for example 60, or 0 for never"
        ) from None


class _Watcher(threading.Thread):
    """Looks after all process groups."""

    def __init__(self, seconds: float) -> None:
        super().__init__(name="fsdp_compose: standing still", daemon=True)
        self._seconds = seconds
        self._ends = threading.Event()
        self._seen: weakref.WeakKeyDictionary[CollectiveOrder, _Seen] = weakref.WeakKeyDictionary()

    def end(self) -> None:
        self._ends.set()

    def run(self) -> None:
        while not self._ends.wait(self._seconds / _LOOKS):
            self._look_around()  # which holds no process group while this thread waits

    def _look_around(self) -> None:
        known: list[tuple[dist.ProcessGroup, CollectiveOrder]] = []
        with contextlib.suppress(RuntimeError):  # another thread adds one at this moment
            known = CollectiveOrder.known()
        for group, order in known:
            if not is_destroyed(group):
                with contextlib.suppress(RuntimeError, ValueError):  # it changes, or is destroyed, at this moment
                    self._look(group, order)

    def _look(self, group: dist.ProcessGroup, order: CollectiveOrder) -> None:
        now, issued = time.monotonic(), (order.num_collectives, len(order.trace))
        before, since, is_told = self._seen.get(order, ((-1, -1), now, False))
        if issued != before or _is_compiling():
            self._seen[order] = issued, now, False
            return
        phases = [phase for root in order.roots() if (phase := root.phase())]
        limit = min(self._seconds * (1 if phases else BETWEEN), group_timeout(group).total_seconds() / 2)
        if not is_told and order.num_roots and group.size() > 1 and now - since >= limit:
            self._seen[order] = before, since, True
            _logger.warning(_told(position(group, order, phases, now - since)))


def position(group: dist.ProcessGroup, order: CollectiveOrder, phases: list[str], seconds: float) -> dict[str, object]:
    """Where this rank is, as plain values."""
    frame = _main_frame()
    return {
        "rank": group.rank(),
        "size": group.size(),
        "ranks": _as_ranges(dist.get_process_group_ranks(group)),
        "number": order.count,
        "last": order.last_as_text(),
        "phase": ", ".join(phases),
        "program": _place(frame, is_own=False),
        "waits_in": _place(frame, is_own=True),
        "seconds": round(seconds),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def _told(place: dict[str, object]) -> str:
    last = f"the last was {place['last']}" if place["last"] else "none since the last exchange of all ranks"
    return (
        f"rank {place['rank']} of {place['size']} has issued no collective for {place['seconds']} s, "
        f"{'in ' + str(place['phase']) if place['phase'] else 'between iterations'}: {place['number']} so far, {last}; "
        f"the program is at {place['program']}. If it hangs, put the logs of all ranks together: "
        f"python -m fsdp_compose hang LOGS...\n{POSITION_MARK}{json.dumps(place)}"
    )


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _is_compiling() -> bool:
    """Whether the program waits for ``torch.compile``, which may take minutes."""
    frame = _main_frame()
    while frame is not None:
        if frame.f_code.co_filename in _COMPILERS:
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None, is_own: bool) -> str:
    """The innermost line of a stack that is of this package, or of the user's; empty if there is none."""
    while frame is not None:
        name = frame.f_code.co_filename
        own = name.startswith(_OWN)
        if own == is_own and not name.startswith((_TORCH, "<")):
            shown = name.removeprefix(_OWN) if own else str(Path(*Path(name).parts[-2:]))
            return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _as_ranges(ranks: list[int]) -> str:
    """``0-3,8``."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


_watcher: _Watcher | None = None


def look_after_standstill() -> None:
    """Called when a root is set up: from now on this rank says where it is when it stands still."""
    global _watcher
    seconds = patience()
    if seconds and (_watcher is None or not _watcher.is_alive()):  # a fork has no threads
        _watcher = _Watcher(seconds)
        _watcher.start()
        atexit.register(_watcher.end)

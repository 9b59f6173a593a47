"""A rank that stands still logs its last collective and the line that its program is at.

A rank that waits for another one in a collective hangs until the process group's timeout, and then learns at best
that it was waiting. No rank knows alone which rank is late, or where that rank is. So a thread of each rank checks a
few times a minute whether anything new was issued. If nothing was for long, it logs one line (``fsdp_compose``,
WARNING) that ends in JSON. ``python -m fsdp_compose hang LOGS...`` combines the lines of all ranks.

The thread only reads the record that the order of collectives keeps anyway (``collective_order``): training does no
extra work, and nothing is communicated. It sees what the host has issued, not what the GPU has finished."""

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

from ..._torch import group_timeout, is_destroyed
from ...core.comm import all_kept, known_namespace
from ...core.group import CollectiveLog
from ...errors import MisuseError, as_ranges

HANG_SECONDS_ENV = "FSDP_COMPOSE_HANG_SECONDS"
SECONDS = 60.0  # the default, inside an iteration; 0 turns it off
BETWEEN = 5  # this many times as long between iterations, where programs save, evaluate and load
POSITION_MARK = "fsdp_compose position: "  # before the JSON
_LOOKS = 6  # checks within that time

_logger = logging.getLogger("fsdp_compose")
_OWN = f"{Path(__file__).parents[2]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_COMPILERS = {f"{_TORCH}{name}" for name in ("_dynamo/convert_frame.py", "_inductor/compile_fx.py")}
_Seen = tuple[tuple[int, int], float, bool]  # what was issued, since when nothing was, whether that was logged


def patience() -> float:
    """The number of seconds that a rank may stand still inside an iteration."""
    try:
        return max(0.0, float(os.environ.get(HANG_SECONDS_ENV, SECONDS)))
    except ValueError:
        raise MisuseError(
            f"{HANG_SECONDS_ENV} is {os.environ[HANG_SECONDS_ENV]!r}: expected seconds, for example 60, or 0 for never"
        ) from None


class _Watcher(threading.Thread):
    """The thread that watches the orders of all process groups."""

    def __init__(self, seconds: float) -> None:
        super().__init__(name="fsdp_compose: standing still", daemon=True)
        self._seconds = seconds
        self.ends = threading.Event()
        self._seen: weakref.WeakKeyDictionary[CollectiveLog, _Seen] = weakref.WeakKeyDictionary()

    def run(self) -> None:
        while not self.ends.wait(self._seconds / _LOOKS):
            self._look_around()  # in a frame of its own, so that this thread holds no process group while it waits

    def _look_around(self) -> None:
        known: list[tuple[dist.ProcessGroup, CollectiveLog]] = []
        with contextlib.suppress(RuntimeError):  # another thread may be adding one
            known = all_kept(CollectiveLog)
        for group, order in known:
            if not is_destroyed(group):
                with contextlib.suppress(RuntimeError, ValueError):  # it may be changed or destroyed meanwhile
                    self._look(group, order)

    def _look(self, group: dist.ProcessGroup, order: CollectiveLog) -> None:
        now, issued = time.monotonic(), (order.num_collectives, len(order.entries))
        before, since, is_told = self._seen.get(order, ((-1, -1), now, False))
        if issued != before or _is_compiling():
            self._seen[order] = issued, now, False
            return
        phases = [phase for root in order.roots() if (phase := root.phase())]
        most = group_timeout(group).total_seconds() / 2
        if is_told or not order.num_roots or group.size() == 1 or now - since < min(self._seconds, most):
            return
        namespace = known_namespace(group)
        store = None if namespace is None else dist.PrefixStore("standing", namespace)
        is_waiting = bool(phases) or _place(_main_frame(), is_own=True).startswith("comm")
        is_long = is_waiting or now - since >= min(self._seconds * BETWEEN, most)
        if not is_long and store is not None and store.check([_AFTER]):
            # Another rank waits at this one's last collective, or later.
            is_long = int(store.get(_AFTER)) >= order.count
        if is_long:
            self._seen[order] = before, since, True
            _logger.warning(_told(position(group, order, phases, now - since)))
            # A rank that is late between iterations then logs where it is, without waiting ``BETWEEN`` times as long.
            if is_waiting and store is not None:
                store.set(_AFTER, str(order.count))


_AFTER = "after"  # the key of the number of collectives after which a rank waits


def position(group: dist.ProcessGroup, order: CollectiveLog, phases: list[str], seconds: float) -> dict[str, object]:
    """Where this rank is, as plain values."""
    frame = _main_frame()
    return {
        "rank": group.rank(),
        "size": group.size(),
        "ranks": as_ranges(dist.get_process_group_ranks(group)),
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
    waits = f", which waits in {place['waits_in']}" if place["waits_in"] else ""
    return (
        f"rank {place['rank']} of {place['size']} has issued no collective for {place['seconds']} s, "
        f"{'in ' + str(place['phase']) if place['phase'] else 'between iterations'}: {place['number']} so far, {last}; "
        f"the program is at {place['program']}{waits}. If it hangs, combine the logs of all ranks: "
        f"python -m fsdp_compose hang LOGS...\n{POSITION_MARK}{json.dumps(place)}"
    )


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _is_compiling() -> bool:
    """Whether the program is waiting for ``torch.compile``, which may take minutes."""
    frame = _main_frame()
    while frame is not None:
        if frame.f_code.co_filename in _COMPILERS:
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None, is_own: bool) -> str:
    """The innermost line of a stack in this package (``is_own``) or in the user's code; empty if there is none."""
    while frame is not None:
        name = frame.f_code.co_filename
        own = name.startswith(_OWN)
        if own == is_own and not name.startswith((_TORCH, "<")):
            shown = name.removeprefix(_OWN) if own else str(Path(*Path(name).parts[-2:]))
            return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


_watcher: _Watcher | None = None


def look_after_standstill() -> None:
    """Start the thread that logs this rank's position when it stands still. Called when a root is set up."""
    global _watcher
    seconds = patience()
    if seconds and (_watcher is None or not _watcher.is_alive()):  # a forked process has no threads
        _watcher = _Watcher(seconds)
        _watcher.start()
        atexit.register(_watcher.ends.set)

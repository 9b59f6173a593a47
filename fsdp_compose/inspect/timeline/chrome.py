"""A trace in the Trace Event Format: for Perfetto (ui.perfetto.dev), chrome://tracing, and other viewers.

A process is a rank, a thread a lane of a track: in a lane, events lie inside or beside each other, as viewers expect.
Times are microseconds since the trace began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .events import TRACKS, TraceEvent, lanes


def as_chrome_trace(events: Sequence[TraceEvent], rank: int, began: float) -> dict[str, Any]:
    """The JSON object. ``began``: when, in seconds since 1970; in ``otherData``."""
    found: list[dict[str, Any]] = [
        _metadata("process_name", rank, {"name": f"rank {rank}"}),
        _metadata("process_sort_index", rank, {"sort_index": rank}),
    ]
    thread = 0
    for track in TRACKS:
        for number, lane in enumerate(lanes(item for item in events if item.track == track), 1):
            thread += 1
            name = track if number == 1 else f"{track} {number}"
            found.append(_metadata("thread_name", rank, {"name": name}, thread))
            found.append(_metadata("thread_sort_index", rank, {"sort_index": thread}, thread))
            found += [_complete(event, rank, thread) for event in lane]
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"rank": rank, "began": began}}


def _metadata(name: str, process: int, args: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": args}


def _complete(event: TraceEvent, process: int, thread: int) -> dict[str, Any]:
    args: dict[str, Any] = {"group": event.group}
    if event.detail:
        args["collective"] = event.detail
    if event.nbytes:
        args["bytes"] = event.nbytes
    if event.was_cut:
        args["did not end"] = True
    start, stop = round(event.start * 1e6, 3), round(event.stop * 1e6, 3)
    times = {"ts": start, "dur": round(stop - start, 3)}
    return {"ph": "X", "name": event.name, "cat": event.what, "pid": process, "tid": thread, **times, "args": args}

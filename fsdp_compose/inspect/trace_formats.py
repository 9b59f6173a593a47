"""A trace's events, and their formats: text, the Trace Event Format, a picture.

``trace`` records the events; nothing here needs a model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPUTE, ALL_GATHERS, REDUCTIONS = TRACKS = ("compute", "all-gathers", "reductions")
"""The model's own computation, and two kinds of collectives beside it."""

WAIT = "wait"


@dataclass(frozen=True)
class TraceEvent:
    """An event that took time on one rank.

    Attributes:
        what: ``forward``, ``backward``, ``recomputation`` or ``reshard`` of a group; ``all-gather``,
            ``reduce-scatter``, ``all-reduce`` or ``gather``, from its issue until its result is there; or ``wait``, for
            such a result.
        group: the name of the group.
        track: one of ``TRACKS``.
        start, stop: seconds since the trace began.
        begins, ends: positions of its start and end among those of all events, in program order.
        detail: for a collective or a wait, a description of the collective: its parameters, size and number of ranks.
        nbytes: size of a collective's whole tensor; 0 for other events.
        was_cut: the event had not ended when the trace did, or it raised; ``stop`` is then the end of the trace.
    """

    what: str
    group: str
    track: str
    start: float
    stop: float
    begins: int
    ends: int
    detail: str = ""
    nbytes: int = 0
    was_cut: bool = False

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    @property
    def name(self) -> str:
        """The event and its group, as a title."""
        if self.what == WAIT:
            return f"wait for {self.detail.split(maxsplit=1)[0]} {self.group}"
        return f"{self.what} {self.group}"


def lanes(events: Iterable[TraceEvent]) -> list[list[TraceEvent]]:
    """Distribute a track's events over as few lanes as possible, in each of which events nest or follow each other."""
    found: list[tuple[list[TraceEvent], list[TraceEvent]]] = []  # lanes, each with the events around its next one
    for event in sorted(events, key=lambda item: (item.start, -item.stop, item.begins)):
        for _, around in found:
            _end_before(event, around)
        room = (item for item in found if not item[1] or event.stop <= item[1][-1].stop)
        lane, around = next(room, ([], []))
        if not lane:
            found.append((lane, around))
        lane.append(event)
        around.append(event)
    return [lane for lane, _ in found]


def _end_before(event: TraceEvent, around: list[TraceEvent]) -> None:
    """Remove the events that are over when ``event`` begins; the innermost is the last."""
    while around and around[-1].stop <= event.start:
        around.pop()


# ---- A trace as text: one line for each event, in program order.


def as_text(events: Sequence[TraceEvent], has_times: bool) -> str:
    """Format the lines, indented inside forwards and backwards; a wait's line comes where it is over.

    With ``has_times``, each line begins with its start and duration in milliseconds (a collective lasts until its
    result is there), and a summary follows.
    """
    lines = []
    running: list[TraceEvent] = []  # forwards and backwards
    for event in sorted(events, key=_place):
        running = [item for item in running if item.ends > _place(event)]
        times = f"{event.start * 1e3:10.3f} {event.seconds * 1e3:9.3f}  " if has_times else ""
        cut = " (did not end)" if event.was_cut else ""
        is_wait = event.what == WAIT
        line = f"wait for {event.detail.partition(' (')[0]}" if is_wait else (event.detail or event.name) + cut
        lines.append(times + "  " * len(running) + line)
        if event.track == COMPUTE and event.what not in (WAIT, "reshard"):
            running.append(event)
    if has_times:
        lines = [f"{'ms, at':>10} {'for':>9}", *lines, "", *summary(events)]
    return "\n".join(lines)


def summary(events: Sequence[TraceEvent]) -> list[str]:
    """Summarize each kind of collective: count, bytes, duration, and how much of that was spent waiting."""
    lines = []
    for kind in dict.fromkeys(item.what for item in events if item.track != COMPUTE):
        found = [item for item in events if item.what == kind]
        waits = [item for item in events if item.what == WAIT and item.detail.startswith(f"{kind} ")]
        taken, waited = (sum(item.seconds for item in items) * 1e3 for items in (found, waits))
        nbytes = sum(item.nbytes for item in found)
        lines.append(f"{kind}: {len(found)} of {nbytes:,} B in all, {taken:.3f} ms, {waited:.3f} ms waited for")
    return lines


def _place(event: TraceEvent) -> int:
    return event.ends if event.what == WAIT else event.begins


# ---- A trace in the Trace Event Format: for Perfetto (ui.perfetto.dev), chrome://tracing, and other viewers.
#
# Each rank is a process, each lane of a track a thread: events in a lane nest or follow each other, as viewers expect.
# Times are microseconds since the trace began.


def as_chrome_trace(events: Sequence[TraceEvent], rank: int, began: float) -> dict[str, Any]:
    """Return the JSON object. ``began`` is the start time in seconds since 1970, kept in ``otherData``."""
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
    more = {"collective": event.detail, "bytes": event.nbytes, "did not end": event.was_cut}
    args = {"group": event.group} | {name: value for name, value in more.items() if value}
    start, stop = round(event.start * 1e6, 3), round(event.stop * 1e6, 3)
    times = {"ts": start, "dur": round(stop - start, 3)}
    return {"ph": "X", "name": event.name, "cat": event.what, "pid": process, "tid": thread, **times, "args": args}


# ---- A trace as a picture, by matplotlib: a row for each lane of collectives and for each nesting depth of compute.


_COLORS = {
    "forward": "#7fb3d5",
    "recomputation": "#76d7c4",
    "backward": "#c39bd3",
    "reshard": "#909497",
    "wait": "#e74c3c",
    "all-gather": "#f5b041",
    "reduce-scatter": "#58d68d",
    "all-reduce": "#239b56",
    "gather": "#d4ac0d",
}
_MOST_INCHES = 40.0


def save_picture(events: Sequence[TraceEvent], path: Path, title: str) -> None:
    """Write the picture in the format of ``path``'s suffix. Raises ImportError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            f"saving a trace as {path.suffix} needs matplotlib (pip install matplotlib); .json works without it"
        )
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    found = rows(events)
    height = 1.5 + 0.4 * len(found)
    figure = Figure(figsize=(min(_MOST_INCHES, 12 + len(events) / 60), height), layout="constrained")
    axes = figure.add_subplot()
    longest = max((item.stop for item in events), default=0.0)
    for place, (_, lane) in enumerate(found):
        for event in lane:
            start, length, color = event.start * 1e3, event.seconds * 1e3, _COLORS[event.what]
            axes.barh(place, length, left=start, height=0.8, color=color, edgecolor="white", linewidth=0.3)
            if event.seconds > longest * 0.012 * len(event.group):  # there is room for the name
                middle = start + length / 2
                axes.text(middle, place, event.group, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(found)), [name for name, _ in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize="medium")
    kinds = [kind for kind in _COLORS if any(event.what == kind for event in events)]
    patches = [Patch(color=_COLORS[kind], label=kind) for kind in kinds]
    axes.legend(handles=patches, ncols=len(patches) or 1, loc="lower right", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(path)


def rows(events: Sequence[TraceEvent]) -> list[tuple[str, list[TraceEvent]]]:
    """Return the rows from the top, with titles: compute, outermost events first; then each track of collectives."""
    found: list[tuple[str, list[TraceEvent]]] = []
    for track in TRACKS:
        in_lanes = lanes(item for item in events if item.track == track)
        if track == COMPUTE:
            in_lanes = [level for lane in in_lanes for level in _levels(lane)]
        found += [(track if number == 0 else "", lane) for number, lane in enumerate(in_lanes)]
    return found


def _levels(lane: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """Split the events of a lane by nesting depth."""
    found: list[list[TraceEvent]] = []
    around: list[TraceEvent] = []
    for event in lane:
        _end_before(event, around)
        if len(around) == len(found):
            found.append([])
        found[len(around)].append(event)
        around.append(event)
    return found

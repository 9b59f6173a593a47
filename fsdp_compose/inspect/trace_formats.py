"""A trace as plain data, and its forms: text, the Trace Event Format, a picture.

Nothing here knows a model: ``trace`` makes the data."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPUTE, ALL_GATHERS, REDUCTIONS = TRACKS = ("compute", "all-gathers", "reductions")
"""Where things happen: on the way of the model's own computation, or beside it."""

WAIT = "wait"


@dataclass(frozen=True)
class TraceEvent:
    """Something that took time on one rank.

    Attributes:
        what: ``forward``, ``backward`` or ``recomputation`` of a group; ``reshard`` of one; ``all-gather``,
            ``reduce-scatter``, ``all-reduce`` or ``gather``, from when it is issued until its result is there; or
            ``wait``, for such a result.
        group: the name of the group.
        track: see ``TRACKS``.
        start, stop: seconds since the trace began.
        begins, ends: the places of its start and its end among those of all events, in the order of the program.
        detail: of a collective, and a wait, the collective in words: for which parameters, how large, among how many.
        nbytes: of the whole tensor of a collective; 0 of other events.
        was_cut: it had not ended when the trace did, or ended in an error: ``stop`` is when the trace ended.
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
        """What, and of which group."""
        if self.what == WAIT:
            return f"wait for {self.detail.split(maxsplit=1)[0]} {self.group}"
        return f"{self.what} {self.group}"


@dataclass
class _Lane:
    events: list[TraceEvent]
    around: list[TraceEvent]  # those that were not over when the last one began, the innermost last

    def has_room(self, event: TraceEvent) -> bool:
        while self.around and self.around[-1].stop <= event.start:
            self.around.pop()
        return not self.around or event.stop <= self.around[-1].stop

    def add(self, event: TraceEvent) -> None:
        self.events.append(event)
        self.around.append(event)


def lanes(events: Iterable[TraceEvent]) -> list[list[TraceEvent]]:
    """The events of a track in as few lanes as are needed for those in a lane to lie inside or beside each other."""
    found: list[_Lane] = []
    for event in sorted(events, key=lambda item: (item.start, -item.stop, item.begins)):
        lane = next((item for item in found if item.has_room(event)), None)
        if lane is None:
            found.append(lane := _Lane([], []))
        lane.add(event)
    return [lane.events for lane in found]


# ---- A trace as text: one line for each thing that the program began, or had waited for, in that order.


_INDENT = "  "


def as_text(events: Sequence[TraceEvent], has_times: bool) -> str:
    """The lines. Indented by the forwards and backwards that are running; a wait has its line when it is over.

    ``has_times``: before each line milliseconds: when it began, and how long it took (a collective: until its result
    was there); and a summary at the end.
    """
    lines = []
    running: list[TraceEvent] = []  # forwards and backwards
    for event in sorted(events, key=_place):
        running = [item for item in running if item.ends > _place(event)]
        times = f"{event.start * 1e3:10.3f} {event.seconds * 1e3:9.3f}  " if has_times else ""
        lines.append(times + _INDENT * len(running) + line_of(event))
        if event.track == COMPUTE and event.what not in (WAIT, "reshard"):
            running.append(event)
    if has_times:
        lines = [f"{'ms, at':>10} {'for':>9}", *lines, "", *summary(events)]
    return "\n".join(lines)


def line_of(event: TraceEvent) -> str:
    """One event in words, without times."""
    if event.what == WAIT:
        return f"wait for {event.detail.partition(' (')[0]}"
    cut = " (did not end)" if event.was_cut else ""
    return (event.detail or event.name) + cut


def summary(events: Sequence[TraceEvent]) -> list[str]:
    """For each kind of collective: how many there were, how long they took, and how much of that was waited for."""
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
# A process is a rank, a thread a lane of a track: in a lane, events lie inside or beside each other, as viewers expect.
# Times are microseconds since the trace began.


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


# ---- A trace as a picture, by matplotlib: a row for each lane of collectives, and for each depth of what is computed.


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

Row = tuple[str, list[TraceEvent]]


def save_picture(events: Sequence[TraceEvent], path: Path, title: str) -> None:
    """Write it, in the format that the suffix of ``path`` names.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            f"a trace can be saved as {path.suffix} where matplotlib is installed (pip install matplotlib); as .json "
            "anywhere"
        )
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    found = rows(events)
    height = 1.5 + 0.4 * len(found)
    figure = Figure(figsize=(min(_MOST_INCHES, 12 + len(events) / 60), height), layout="constrained")
    axes = figure.add_subplot()
    for place, (_, lane) in enumerate(found):
        for event in lane:
            _draw(axes, event, place, longest=max((item.stop for item in events), default=0.0))
    axes.set_yticks(range(len(found)), [name for name, _ in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize="medium")
    kinds = [kind for kind in _COLORS if any(event.what == kind for event in events)]
    patches = [Patch(color=_COLORS[kind], label=kind) for kind in kinds]
    axes.legend(handles=patches, ncols=len(patches) or 1, loc="lower right", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(path)


def rows(events: Sequence[TraceEvent]) -> list[Row]:
    """From the top: what is computed, the outermost first; then each track of collectives."""
    found: list[Row] = []
    for track in TRACKS:
        in_lanes = lanes(item for item in events if item.track == track)
        if track == COMPUTE:
            in_lanes = [level for lane in in_lanes for level in _levels(lane)]
        found += [(track if number == 0 else "", lane) for number, lane in enumerate(in_lanes)]
    return found


def _levels(lane: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """The events of a lane, by how many others they lie inside of."""
    found: list[list[TraceEvent]] = []
    around: list[TraceEvent] = []
    for event in lane:
        while around and around[-1].stop <= event.start:
            around.pop()
        if len(around) == len(found):
            found.append([])
        found[len(around)].append(event)
        around.append(event)
    return found


def _draw(axes: Any, event: TraceEvent, place: int, longest: float) -> None:
    start, length = event.start * 1e3, event.seconds * 1e3
    axes.barh(place, length, left=start, height=0.8, color=_COLORS[event.what], edgecolor="white", linewidth=0.3)
    if event.seconds > longest * 0.012 * len(event.group):
        axes.text(start + length / 2, place, event.group, ha="center", va="center", fontsize=7, clip_on=True)

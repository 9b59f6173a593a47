"""A trace as a picture, by matplotlib: a row for each lane of collectives, and for each depth of what is computed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .events import COMPUTE, TRACKS, TraceEvent, lanes

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

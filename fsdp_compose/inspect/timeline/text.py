"""A trace as text: one line for each thing that the program began, or had waited for, in that order."""

from __future__ import annotations

from collections.abc import Sequence

from .events import COMPUTE, WAIT, TraceEvent

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

"""What a trace consists of, as plain data, and in how many rows it can be drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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

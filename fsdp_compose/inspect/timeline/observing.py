"""What the groups of a model do is written down, while they do it: collectives as their transports carry them, the rest
as ranges tell it (``flat.listening``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...comm import ALL_GATHER, GATHER, Collective, Work
from ...flat import End, Group, listen, stop_listening
from ...group import _FSDPState
from ..recorded import recorded
from .clocks import Clock
from .events import ALL_GATHERS, COMPUTE, REDUCTIONS, WAIT, TraceEvent

_RANGES = ("forward", "recomputation", "backward", "reshard")


@dataclass
class _Span:
    """An event that may still be going on. ``start`` and ``stop`` are marks of the clock."""

    what: str
    group: str
    track: str
    start: Any
    begins: int
    detail: str = ""
    nbytes: int = 0
    stop: Any = None
    ends: int | None = None


class Notebook:
    """What has happened so far.

    Args:
        clock: tells when.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._spans: list[_Span] = []
        self._num_marks = 0

    def begin(self, what: str, group: str, track: str = COMPUTE, detail: str = "", nbytes: int = 0) -> _Span:
        span = _Span(what, group, track, self.clock.mark(), self._count(), detail, nbytes)
        self._spans.append(span)
        return span

    def end(self, span: _Span, stop: Any = None) -> None:
        """``stop``: a mark that was made before, if it is not now."""
        if span.ends is None:
            span.stop, span.ends = self.clock.mark() if stop is None else stop, self._count()

    def close(self) -> list[TraceEvent]:
        """All events, in the order in which they began. Nothing comes after it."""
        open_spans = [span for span in self._spans if span.ends is None]
        for span in reversed(open_spans):
            self.end(span)
        self.clock.stop()
        cut = {id(span) for span in open_spans}
        return [self._event(span, id(span) in cut) for span in self._spans]

    def _event(self, span: _Span, was_cut: bool) -> TraceEvent:
        start, stop = self.clock.seconds(span.start), self.clock.seconds(span.stop)
        assert span.ends is not None
        places = span.begins, span.ends
        return TraceEvent(span.what, span.group, span.track, start, stop, *places, span.detail, span.nbytes, was_cut)

    def _count(self) -> int:
        self._num_marks += 1
        return self._num_marks


class _GroupNotes:
    """Writes down the collectives of one group."""

    def __init__(self, notebook: Notebook, state: _FSDPState) -> None:
        self._notebook, self._state = notebook, state
        self._under_way: dict[Collective, tuple[_Span, Any]] = {}  # with when it was complete, if the clock can tell
        self._waits: dict[Collective, _Span] = {}

    def issue(self, collective: Collective) -> None:
        track = ALL_GATHERS if collective.kind in (ALL_GATHER, GATHER) else REDUCTIONS
        about = str(collective), collective.nbytes
        self._under_way[collective] = self._notebook.begin(collective.kind, self._state.name, track, *about), None

    def under_way(self, collective: Collective, work: Work) -> None:
        span, _ = self._under_way[collective]
        self._under_way[collective] = span, self._notebook.clock.mark_end(work)

    def wait(self, collective: Collective) -> None:
        if collective.kind != GATHER and collective in self._under_way:
            self._waits[collective] = self._notebook.begin(WAIT, self._state.name, COMPUTE, str(collective))

    def done(self, collective: Collective) -> None:
        if collective in self._waits:
            self._notebook.end(self._waits.pop(collective))
        if collective in self._under_way:
            self._notebook.end(*self._under_way.pop(collective))


class _RangeNotes:
    """Writes down what some groups compute, and when they are resharded; of other groups nothing."""

    def __init__(self, notebook: Notebook, states: Sequence[_FSDPState]) -> None:
        self._notebook = notebook
        self._states = {id(state) for state in states}

    def begin(self, what: str, group: Group | None, name: str) -> End:
        if what not in _RANGES or id(group) not in self._states:
            return _nothing
        return partial(self._notebook.end, self._notebook.begin(what, name))


def _nothing() -> None:
    """The end of what is not written down."""


@contextmanager
def observed(states: Sequence[_FSDPState], notebook: Notebook) -> Iterator[None]:
    """Within, what the groups do is written into ``notebook``."""
    ranges = _RangeNotes(notebook, states)
    listen(ranges)
    try:
        with recorded(states, lambda state: _GroupNotes(notebook, state)):
            yield
    finally:
        stop_listening(ranges)

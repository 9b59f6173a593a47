"""``trace(model)``, ``record_collectives(model)``: what the groups of this rank do, in which order, and what overlaps.

What groups do is written down while they do it, by listeners that exist only inside these contexts. The result is plain
data, which ``trace_formats`` shows without knowing any model."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn

from ..comm import ALL_GATHER, GATHER, Collective, CollectiveNotes, Recorder, Work
from ..flat import End, Group, listen, stop_listening
from ..group import _FSDPState, states_to_run
from .trace_formats import ALL_GATHERS, COMPUTE, REDUCTIONS, WAIT, TraceEvent, as_chrome_trace, as_text, save_picture

# ---- What time it is, where a model computes: on the host, or in the order of a stream.


class Clock(Protocol):
    """Makes marks, and tells of each afterwards how many seconds it came after the clock was made."""

    def mark(self) -> Any:
        """Now; on an accelerator, when the present stream has come here."""

    def mark_end(self, work: Work) -> Any:
        """When a collective that was issued on the present stream is complete; ``None``: the clock cannot tell before
        it was waited for."""

    def stop(self) -> None:
        """No more marks are made; from here on they can be told."""

    def seconds(self, mark: Any) -> float: ...


class HostClock:
    """Of the host. A collective is complete for it when the wait for it has returned."""

    def __init__(self) -> None:
        self._began = time.perf_counter_ns()

    def mark(self) -> int:
        return time.perf_counter_ns()

    def mark_end(self, work: Work) -> None:
        return None

    def stop(self) -> None:
        """Marks are numbers already."""

    def seconds(self, mark: int) -> float:
        return (mark - self._began) / 1e9


class DeviceClock:
    """Of an accelerator: marks are events on streams, so that times are those at which the device has done things, not
    those at which the host has asked for them. Waits for the device when it is made, and when it stops.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device.type)
        self._device = device
        self._beside = self._module.Stream(device)
        self._module.synchronize(device)
        self._began = self.mark()

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def mark_end(self, work: Work) -> Any:
        self._beside.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._beside):
            work.wait()  # that stream waits, and no other
            return self.mark()

    def stop(self) -> None:
        self._module.synchronize(self._device)

    def seconds(self, mark: Any) -> float:
        return float(self._began.elapsed_time(mark)) / 1e3


def clock_of(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)


# ---- The collectives of some groups are noted for a time: the one way in which anything here looks at them.


@contextmanager
def recorded(states: Sequence[_FSDPState], notes_of: Callable[[_FSDPState], CollectiveNotes]) -> Iterator[None]:
    """Within, the notes of each group hear of its collectives. Between iterations only."""
    handles = [(handle, notes_of(state)) for state in states for handle in state._handles]
    try:
        for handle, notes in handles:
            handle.change_transports(lambda transport, notes=notes: Recorder(transport, notes))  # type: ignore[misc]
        yield
    finally:
        for handle, _ in handles:
            handle.change_transports(lambda item: item.inner if isinstance(item, Recorder) else item)


# ---- What the groups of a model do is written down, while they do it: collectives as their transports carry them, the
# rest as the listeners of ``flat/events`` are told.


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


class _SpanNotes:
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
    spans = _SpanNotes(notebook, states)
    listen(spans)
    try:
        with recorded(states, lambda state: _GroupNotes(notebook, state)):
            yield
    finally:
        stop_listening(spans)


# ---- ``trace()``


_PICTURES = (".png", ".svg")


class Trace:
    """What the groups of a model have done, on this rank. Made by ``trace``; complete when that has ended.

    Attributes:
        rank: of this process.
        began: when, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.began = time.time()
        self._events: list[TraceEvent] | None = None

    def complete(self, events: list[TraceEvent]) -> None:
        """These are all."""
        self._events = events

    @property
    def events(self) -> list[TraceEvent]:
        """All events, in the order in which the program began them.

        Raises:
            RuntimeError: the ``with`` statement of ``trace`` has not ended.
        """
        if self._events is None:
            raise RuntimeError(
                f"rank {self.rank}: the trace is still running: look at it after the with statement of trace()"
            )
        return self._events

    def text(self, *, times: bool = True) -> str:
        """A line for each event, in the order of the program: forwards, recomputations and backwards of groups, with
        what happens meanwhile indented; collectives when they are issued; waits when they are over; reshards.

        Args:
            times: put milliseconds before each line: when it began, and how long it took. A summary follows.
                Without, the text of a step is always the same, for tests of a schedule.
        """
        return as_text(self.events, times)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file: ``.json`` (for Perfetto and chrome://tracing), ``.svg`` or ``.png`` (a picture, by
        matplotlib).

        Raises:
            ValueError: the name ends in something else.
            ImportError: it is to be a picture, and matplotlib is not installed.
        """
        path = Path(path)
        if path.suffix not in (".json", *_PICTURES):
            raise ValueError(f"Trace.save({str(path)!r}): expected a name that ends in .json, .png or .svg")
        if path.suffix == ".json":
            path.write_text(json.dumps(as_chrome_trace(self.events, self.rank, self.began)))
        else:
            save_picture(self.events, path, f"rank {self.rank}")


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Note, within, when the groups below ``model`` compute, gather, wait, reshard and reduce, on this rank.

    Costs nothing while no trace runs, and host time for each event while one runs. Times on the CPU are those of the
    host, where a collective has ended when the wait for it returns. On an accelerator they are those of its streams,
    and the trace waits for the device at its start and end. In functional mode there are no backwards of groups, only
    their collectives; of groups in a graph of ``torch.compile`` at most these. Between iterations only.

    Ranks: any; nothing is communicated by it.

    Args:
        model: a module, of which some submodules are sharded or replicated.

    Yields:
        The trace: complete after the with statement, also when that ends in an exception.

    Raises:
        ValueError: no group is below ``model``.
        RuntimeError: a forward or backward of ``model`` is running.

    Example::

        with trace(model) as steps:
            model(x).sum().backward()
        print(steps.text())
        steps.save("step.json")
    """
    states = [state for state, _ in states_to_run(model)]
    if not states:
        raise ValueError(f"trace(): nothing below this {type(model).__name__} is sharded: call fully_shard() first")
    for state in states:
        if state.progress.running_forwards or (
            state.root is not None and (state.root.forward.depth or state.root.backward)
        ):
            raise RuntimeError(
                f"rank {state.mesh.rank}: trace() begins inside a forward or backward of the fully_shard group "
                f"{state.name}, whose collectives are under way: begin it between iterations"
            )
    found, notebook = Trace(), Notebook(clock_of(states[0].mesh.device))
    try:
        with observed(states, notebook):
            yield found
    finally:
        found.complete(notebook.close())


# ---- ``record_collectives(model)``: the collectives of a part of a run, in their order.


@contextmanager
def record_collectives(model: nn.Module, note: Callable[[str], Any] | None = None) -> Iterator[list[str]]:
    """Note, within, each collective of the ``fully_shard`` groups below ``model``: what it is for, how large it is,
    when it is issued, and when its result is waited for.

    For looking at a schedule, and for tests of it; ``trace`` has what groups compute meanwhile, and times. What is not
    recorded: control exchanges, norms, and what goes between ranks outside flat parameters. Between iterations only.
    Ranks: any; nothing is communicated by it.

    Args:
        model: a module, of which some submodules are sharded.
        note: called with each line, for example ``print``; the list has them too.

    Yields:
        The lines so far.

    Example::

        with record_collectives(model) as lines:
            model(x).sum().backward()
        print(*lines, sep="\\n")
    """
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        if note is not None:
            note(line)

    notes = _Lines(take)

    def notes_of(_: _FSDPState) -> _Lines:
        return notes

    with recorded([state for state, _ in states_to_run(model)], notes_of):
        yield lines


def wait_of(collective: Collective) -> str:
    """The wait for a collective, in words."""
    return f"wait for {collective.kind} {collective.label}"


class _Lines:
    """Says each collective in a line when it is issued, and in another one when its result is there."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take

    def issue(self, collective: Collective) -> None:
        self._take(str(collective))

    def under_way(self, collective: Collective, work: Work) -> None:
        """No line."""

    def wait(self, collective: Collective) -> None:
        """No line."""

    def done(self, collective: Collective) -> None:
        if collective.kind != GATHER:  # which is waited for at once
            self._take(f"  {wait_of(collective)}")

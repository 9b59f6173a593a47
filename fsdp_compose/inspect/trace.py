"""``trace(model)`` and ``record_collectives(model)``: record when groups compute and communicate on this rank.

Listeners record the events; they exist only inside these contexts. The result is plain data, which ``trace_formats``
formats without access to a model."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .._arguments import checked
from ..errors import MisuseError, MisuseRuntimeError
from ..extension import (
    Collective,
    CollectiveKind,
    CollectiveNotes,
    Recorder,
    Work,
    _FSDPState,
    listening,
    states_to_run,
)
from .trace_formats import ALL_GATHERS, COMPUTE, REDUCTIONS, WAIT, TraceEvent, as_chrome_trace, as_text, save_picture

# ---- Clocks: host time, or time on a device's stream.


class Clock:
    """Makes marks. This one's are host times, and a collective counts as complete when the wait for it returns."""

    def __init__(self) -> None:
        self._began = self.mark()

    def mark(self) -> Any:
        """Mark the current time; on an accelerator, the time when the current stream reaches this point."""
        return time.perf_counter_ns()

    def mark_end(self, work: Work) -> Any:
        """Mark the completion of a collective on the current stream; ``None`` if only waiting for it can tell."""

    def stop(self) -> None:
        """End marking; ``seconds()`` may be called from here on."""

    def seconds(self, mark: Any) -> float:
        """Convert a mark to the seconds since the clock was made."""
        return (mark - self._began) / 1e9


class DeviceClock(Clock):
    """An accelerator's clock. Marks are events on streams, so times say when the device did the work, not when the host
    launched it. The clock synchronizes with the device when it is made and when it stops."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device.type)
        self._device = device
        self._beside = self._module.Stream(device)
        self._module.synchronize(device)
        super().__init__()

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def mark_end(self, work: Work) -> Any:
        self._beside.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._beside):
            work.wait()  # only the side stream waits
            return self.mark()

    def stop(self) -> None:
        self._module.synchronize(self._device)

    def seconds(self, mark: Any) -> float:
        return float(self._began.elapsed_time(mark)) / 1e3


# ---- Recording the collectives of groups: every observer in this file uses ``recorded()``.


@contextmanager
def recorded(states: Sequence[_FSDPState], notes_of: Callable[[_FSDPState], CollectiveNotes]) -> Iterator[None]:
    """Inside this context, report each group's collectives to its notes. Enter it between iterations only."""
    handles = [(handle, notes_of(state)) for state in states for handle in state._handles]
    try:
        for handle, notes in handles:
            handle.change_transports(
                lambda transport, _, notes=notes: transport.over(lambda sender: Recorder(sender, notes))  # type: ignore[misc]
            )
        yield
    finally:
        for handle, _ in handles:
            handle.change_transports(
                lambda transport, _: transport.over(lambda one: one.inner if isinstance(one, Recorder) else one)
            )


# ---- Recording events: transports report collectives, and ``core/flat/events`` reports everything else.


@dataclass
class _Span:
    """A ``TraceEvent`` that may not have ended yet. ``start`` and ``stop`` are marks of the clock."""

    what: str
    group: str
    track: str
    start: Any
    begins: int
    detail: str = ""
    nbytes: int = 0
    stop: Any = None
    ends: int | None = None
    was_cut: bool = False


class Notebook:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._spans: list[_Span] = []
        self._marks = itertools.count(1)

    def begin(self, what: str, group: str, track: str = COMPUTE, detail: str = "", nbytes: int = 0) -> _Span:
        span = _Span(what, group, track, self.clock.mark(), next(self._marks), detail, nbytes)
        self._spans.append(span)
        return span

    def end(self, span: _Span) -> None:
        """End ``span``; if its ``stop`` has no mark yet, now."""
        if span.ends is None:
            span.stop, span.ends = self.clock.mark() if span.stop is None else span.stop, next(self._marks)

    def close(self) -> list[TraceEvent]:
        """End recording and return all events, in the order in which they began."""
        cut = [span for span in self._spans if span.ends is None]
        for span in reversed(cut):
            span.was_cut, span.stop = True, None
            self.end(span)
        self.clock.stop()
        for span in self._spans:
            span.start, span.stop = self.clock.seconds(span.start), self.clock.seconds(span.stop)
        return [TraceEvent(**vars(span)) for span in self._spans]


class _GroupNotes(CollectiveNotes):
    def __init__(self, notebook: Notebook, state: _FSDPState) -> None:
        self._notebook, self._state = notebook, state
        self._under_way: dict[Collective, _Span] = {}
        self._waits: dict[Collective, _Span] = {}

    def issue(self, collective: Collective) -> None:
        track = ALL_GATHERS if collective.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER) else REDUCTIONS
        about = collective.kind, self._state.name, track, str(collective), collective.nbytes
        self._under_way[collective] = self._notebook.begin(*about)

    def under_way(self, collective: Collective, work: Work) -> None:
        self._under_way[collective].stop = self._notebook.clock.mark_end(work)

    def wait(self, collective: Collective) -> None:
        if collective.kind != CollectiveKind.GATHER and collective in self._under_way:
            self._waits[collective] = self._notebook.begin(WAIT, self._state.name, COMPUTE, str(collective))

    def done(self, collective: Collective) -> None:
        if collective in self._waits:
            self._notebook.end(self._waits.pop(collective))
        if collective in self._under_way:
            self._notebook.end(self._under_way.pop(collective))


class _SpanNotes:
    """Records forwards, backwards, recomputations and reshards of the given groups."""

    def __init__(self, notebook: Notebook, states: Sequence[_FSDPState]) -> None:
        self._notebook = notebook
        self._states = {id(state) for state in states}

    def begin(self, what: str, group: object, name: str) -> Callable[[], None]:
        if what not in ("forward", "recomputation", "backward", "reshard") or id(group) not in self._states:
            return lambda: None
        return partial(self._notebook.end, self._notebook.begin(what, name))


# ---- ``trace()``


class Trace:
    """A recording of a model's groups on this rank, made by ``trace``. It is complete when that context has ended.

    Attributes:
        rank: the rank of this process.
        began: start time, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.began = time.time()
        self._events: list[TraceEvent] | None = None

    @property
    def events(self) -> list[TraceEvent]:
        """All events, in the order in which the program started them.

        Raises:
            RuntimeError: the ``with`` statement of ``trace`` has not ended.
        """
        if self._events is None:
            raise MisuseRuntimeError(
                f"rank {self.rank}: the trace is still running: read it after the with statement of trace()"
            )
        return self._events

    def text(self, *, times: bool = True) -> str:
        """Format the trace with a line for each event, in program order.

        Events inside a group's forward, recomputation or backward are indented. A collective's line comes where it is
        issued, a wait's line where it is over.

        Args:
            times: begin each line with its start time and duration in milliseconds, and end with a summary. Without
                times, a step always has the same text, which suits tests of a schedule.
        """
        return as_text(self.events, times)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file: ``.json`` (for Perfetto and chrome://tracing), or a picture drawn by matplotlib,
        ``.svg`` or ``.png``.

        Raises:
            ValueError: the name has another suffix.
            ImportError: a picture needs matplotlib, which is not installed.
        """
        path = Path(path)
        if path.suffix not in (".json", ".png", ".svg"):
            raise MisuseError(f"Trace.save({str(path)!r}): expected a name that ends in .json, .png or .svg")
        if path.suffix == ".json":
            path.write_text(json.dumps(as_chrome_trace(self.events, self.rank, self.began)))
        else:
            save_picture(self.events, path, f"rank {self.rank}")


@checked()
@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record when the groups below ``model`` compute, gather, wait, reshard and reduce on this rank.

    Recording costs host time for each event, and nothing outside the context. On the CPU, times are the host's, and a
    collective ends when the wait for it returns. On an accelerator, times are taken on its streams, and the trace
    synchronizes with the device at its start and end. In functional mode the trace shows no backwards of groups, only
    their collectives; of groups in a graph of ``torch.compile`` it shows at most the collectives. Enter the context
    between iterations only.

    Ranks: any rank; no communication.

    Args:
        model: a module with sharded or replicated submodules.

    Yields:
        The trace. It is complete after the with statement, also if that ends in an exception.

    Raises:
        ValueError: there is no group below ``model``.
        RuntimeError: a forward or backward of ``model`` is running.

    Example::

        with trace(model) as steps:
            model(x).sum().backward()
        print(steps.text())
        steps.save("step.json")
    """
    states = [state for state, _ in states_to_run(model)]
    if not states:
        raise MisuseError(f"trace(): nothing below this {type(model).__name__} is sharded: call fully_shard() first")
    for state in states:
        if state.progress.running_forwards or (
            state.root is not None and (state.root.forward.depth or state.root.backward)
        ):
            raise MisuseRuntimeError(
                f"rank {state.mesh.rank}: trace() starts inside a forward or backward of the fully_shard group "
                f"{state.name}, whose collectives are under way: start it between iterations"
            )
    device = states[0].mesh.device
    found, notebook = Trace(), Notebook(Clock() if device.type == "cpu" else DeviceClock(device))
    spans = _SpanNotes(notebook, states)
    try:
        with listening(spans), recorded(states, lambda state: _GroupNotes(notebook, state)):
            yield found
    finally:
        found._events = notebook.close()


# ---- ``record_collectives(model)``: the collectives of a part of a run, in order.


@checked()
@contextmanager
def record_collectives(model: nn.Module, note: Callable[[str], Any] | None = None) -> Iterator[list[str]]:
    """Record each collective of the ``fully_shard`` groups below ``model``: its purpose and size, when it is issued,
    and when its result is waited for.

    Use it to look at a schedule or to test it; ``trace`` also has times and shows what groups compute meanwhile.
    Control exchanges, norms, and other communication outside flat parameters are not recorded. Enter the context
    between iterations only.

    Ranks: any rank; no communication.

    Args:
        model: a module with sharded submodules.
        note: called with each line, in addition to the list; for example ``print``.

    Yields:
        The list of lines, which grows while the context runs.

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
    with recorded([state for state, _ in states_to_run(model)], lambda _: notes):
        yield lines


class _Lines(CollectiveNotes):
    """Writes a line when a collective is issued, and another when its result has been waited for."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take

    def issue(self, collective: Collective) -> None:
        self._take(str(collective))

    def done(self, collective: Collective) -> None:
        if collective.kind != CollectiveKind.GATHER:  # a gather is waited for at once
            self._take(f"  wait for {collective.kind} {collective.label}")

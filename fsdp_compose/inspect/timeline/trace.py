"""``trace(model)``: what the groups of this rank do, in which order, and what overlaps what."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
import torch.nn as nn

from ...group import states_to_run
from .chrome import as_chrome_trace
from .clocks import clock_of
from .events import TraceEvent
from .observing import Notebook, observed
from .picture import save_picture
from .text import as_text

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
        if state.progress.entries or (state.root is not None and (state.root.forward.depth or state.root.backward)):
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

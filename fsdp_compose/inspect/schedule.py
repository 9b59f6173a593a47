"""``record_collectives(model)``: the collectives of a part of a run, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from ..comm import GATHER, Collective, Work
from ..group import _FSDPState, states_to_run
from .recorded import recorded


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

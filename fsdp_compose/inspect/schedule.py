"""``record_collectives(model)``: the collectives of a part of a run, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from ..comm import Recorder
from ..group import states_to_run


@contextmanager
def record_collectives(model: nn.Module, note: Callable[[str], Any] | None = None) -> Iterator[list[str]]:
    """Note, within, each collective of the ``fully_shard`` groups below ``model``: what it is for, how large it is,
    when it is issued, and when its result is waited for.

    For looking at a schedule, and for tests of it. What is not recorded: control exchanges, norms, and what goes
    between ranks outside flat parameters. Between iterations only. Ranks: any; nothing is communicated by it.

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

    handles = [handle for state, _ in states_to_run(model) for handle in state._handles]
    for handle in handles:
        handle.change_transports(lambda transport: Recorder(transport, take))
    try:
        yield lines
    finally:
        for handle in handles:
            handle.change_transports(lambda item: item.inner if isinstance(item, Recorder) else item)

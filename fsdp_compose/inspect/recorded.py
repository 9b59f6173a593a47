"""The collectives of some groups are noted for a time: the one way in which anything here looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..comm import CollectiveNotes, Recorder
from ..group import _FSDPState


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

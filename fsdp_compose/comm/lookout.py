"""A thread that looks, twice a second, after what this process waits for: one for all process groups."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

PERIOD = 0.5  # seconds between looks

Look = Callable[[], None]


class _Lookout(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="fsdp_compose: ranks that wait", daemon=True)
        self._ends = threading.Event()

    def end(self) -> None:
        self._ends.set()
        self.join(2 * PERIOD)

    def run(self) -> None:
        while not self._ends.wait(PERIOD):
            for look in _looks:
                look()


_looks: list[Look] = []
_lookout: _Lookout | None = None


def look_regularly(look: Look) -> None:
    """Call ``look``, which raises nothing, every ``PERIOD`` seconds from now on, in a thread; once, however often this
    is asked for."""
    global _lookout
    if look not in _looks:
        _looks.append(look)
    if _lookout is None or not _lookout.is_alive():  # a fork has no threads
        _lookout = _Lookout()
        _lookout.start()
        atexit.register(_lookout.end)

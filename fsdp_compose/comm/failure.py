"""Failed collectives: process groups that are broken, messages that are still pending, and the thread that watches.

A process group in which a collective failed carries nothing any more: a rank died, or did not come in time. Ranks that
talk to the dead one learn of it at once; a rank that waits for one that has given up would wait for the timeout of the
process group. So a rank that gives up closes its connections, which tells its neighbours, and so on. A rendezvous on
such a process group goes through the store and waits a few seconds only."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from .._torch import close_gloo_connections, group_timeout, has_closed, is_gloo_connection_closed, stop_waiting_for

# Weak both ways: the group of a control group, and the control group of a group.
_partners: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# Process groups of one mesh: a rank that waits in one of them waits for ranks that wait in others.
_families: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
_failures: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def carries(control: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """``control`` carries the exchanges of ``group``: they fail together."""
    _partners[group] = weakref.ref(control)
    _partners[control] = weakref.ref(group)


def fail_together(groups: Sequence[dist.ProcessGroup]) -> None:
    """Where a collective of one of ``groups`` has failed, none of them carries anything more."""
    for group in groups:
        _families.setdefault(group, weakref.WeakSet()).update(groups)


def give_up(group: dist.ProcessGroup, failure: str) -> None:
    """Note that a collective of ``group`` has failed, and close the connections."""
    if group in _failures:
        return
    for item in _together(group):
        _failures[item] = failure
    close_connections(group)


def close_connections(group: dist.ProcessGroup) -> None:
    """Let the other ranks hear that a collective of ``group`` has failed."""
    for item in _together(group):
        close_gloo_connections(item)


def _together(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    found = [group]
    for item in found:  # grows
        found += [other for other in (*_same_ranks(item), *_families.get(item, ())) if other not in found]
    return found


def _same_ranks(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    partner = _partners.get(group)
    return [item for item in (group, None if partner is None else partner()) if item is not None]


def failure_of(group: dist.ProcessGroup) -> str:
    """How the first collective failed; empty if none did."""
    return _failures.get(group, "")


def gone(group: dist.ProcessGroup, ranks: Iterable[int]) -> list[int]:
    """Those of ``ranks`` whose connections are closed: they have died, or given up."""
    return [rank for rank in ranks if any(is_gloo_connection_closed(item, rank) for item in _same_ranks(group))]


@contextmanager
def noticing_loss(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Within, a collective of ``group`` is issued and waited for by functions that raise gloo's own errors."""
    try:
        yield
    except RuntimeError as error:
        if "gloo/transport" not in str(error):  # its source file: others are errors of the call
            raise
        failure = (
            f"rank {group.rank()}: {what} failed: another rank died, or did not enter the same collective. {error}"
        )
        give_up(group, failure)
        raise RuntimeError(failure) from error


# ---- A thread that looks, twice a second, after what this process waits for: one for all process groups.


PERIOD = 0.5  # seconds between looks

Look = Callable[[], None]


class _Watchdog(threading.Thread):
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
_watchdog: _Watchdog | None = None


def look_regularly(look: Look) -> None:
    """Call ``look``, which raises nothing, every ``PERIOD`` seconds from now on, in a thread; once, however often this
    is asked for."""
    global _watchdog
    if look not in _looks:
        _looks.append(look)
    if _watchdog is None or not _watchdog.is_alive():  # a fork has no threads
        _watchdog = _Watchdog()
        _watchdog.start()
        atexit.register(_watchdog.end)


# ---- Messages of gloo's that a rank waits for, no longer than they can still come.
#
# gloo (torch 2.13) tells those who wait when a connection closes, but for one: who waits for the message whose bytes
# were just passing is not told, and waits for the timeout of the process group. So a rank that is killed while it
# sends, or is sent, something long would stop all others for half an hour. A thread (``_Watchdog``) looks after all who
# wait, and lets them go where a connection is closed.


_NO_RANK = -1


class Message(Protocol):
    """One message in flight."""

    def wait(self, timeout: timedelta = ...) -> Any: ...


class Pending:
    """The messages of one collective that are still to be waited for, and the ranks they come from and go to."""

    __slots__ = ("_current", "_group", "_loss", "_messages", "_rest", "_suspect")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # those that no one waits for may be kept for longer
        self._messages: list[tuple[Message, int]] = []
        self._rest = iter(self._messages)
        self._current: tuple[Message, int] | None = None  # the one that is waited for
        self._suspect: tuple[Message, int] | None = None  # the one that was, when the connection was closed already
        self._loss = ""

    def add(self, message: Message, rank: int) -> None:
        self._messages.append((message, rank))

    def fail(self, error: RuntimeError) -> None:
        """None of them will arrive; who waits is told why."""
        self._rest = iter([(_Failed(error.with_traceback(None)), _NO_RANK)])

    def wait(self, limit: timedelta | None = None) -> None:
        """For all of them, each for up to ``limit``, which is by default that of the process group. After an
        interruption (Ctrl-C), for the rest.

        Raises:
            RuntimeError: one did not arrive.
        """
        group = self._group()
        if limit is None and group is not None:
            limit = group_timeout(group)  # as it is now: gloo's messages know that of when the group was made
        _waited_for.add(self)
        try:
            for current in self._rest:
                self._current, message = current, current[0]
                if (message.wait() if limit is None else message.wait(limit)) is False:
                    raise RuntimeError(self._loss)
        finally:
            _waited_for.discard(self)
            self._current = None

    def look(self) -> None:
        """Let a thread that waits go, if it would wait in vain. In another thread. (That others have closed their
        connections says nothing: they may have sent all they had to, and be done.)"""
        group, current, suspect = self._group(), self._current, self._suspect
        self._suspect = None
        if group is None or current is None or not has_closed(group, current[1]):
            return
        if current is not suspect:  # gloo may tell, or it has just arrived, and who waits is about to go on
            self._suspect = current
            return
        self._loss = f"rank {current[1]} has closed its connections"
        stop_waiting_for(current[0])


class _Failed:
    """Messages that will not arrive."""

    __slots__ = ("_error",)

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        raise self._error


_waited_for: set[Pending] = set()


def look_after_pending() -> None:
    """From now on those who wait are looked after. Called where messages will be sent."""
    look_regularly(_look)


def _look() -> None:
    for pending in [*_waited_for]:  # at once: other threads come and go
        pending.look()

"""Failed collectives: broken process groups, pending messages, and the thread that watches over them.

After a collective has failed (a rank died, or did not arrive in time), its process group is unusable. Ranks that talk
to the dead rank learn of it at once, but a rank that waits for one that has given up would wait for the whole timeout
of the process group. So a rank that gives up closes its connections: that tells its neighbors, they give up too, and so
on. A rendezvous on a broken process group goes through the store and waits only a few seconds.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .._torch import close_gloo_connections, group_timeout, has_closed, is_gloo_connection_closed, stop_waiting_for
from ..errors import RankLostError, RanksDifferError
from .context import kept_for, known_for


@dataclass(slots=True, eq=False)
class _Fate:
    """What a process group shares with others: they fail together."""

    # The process group of the same ranks that carries its exchanges, or whose exchanges it carries.
    partner: weakref.ref[dist.ProcessGroup] | None = None
    # The process groups of one mesh: a rank that waits in one of them waits for ranks that wait in the others.
    family: weakref.WeakSet[dist.ProcessGroup] = field(default_factory=weakref.WeakSet)
    # The first failure of a collective: class and text, not the error, which holds the frames that it came through.
    failure: tuple[type[RuntimeError], str] | None = None


def carries(control: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """``control`` carries the exchanges of ``group``: they fail together."""
    kept_for(group, _Fate).partner = weakref.ref(control)
    kept_for(control, _Fate).partner = weakref.ref(group)


def fail_together(groups: Sequence[dist.ProcessGroup]) -> None:
    """Once a collective of one of ``groups`` has failed, all of them are broken."""
    for group in groups:
        kept_for(group, _Fate).family.update(groups)


def give_up(group: dist.ProcessGroup, error: RuntimeError) -> None:
    """Note that a collective of ``group`` has failed, and close the connections."""
    if kept_for(group, _Fate).failure is not None:
        return
    for item in together(group):
        kept_for(item, _Fate).failure = type(error), str(error)
    close_connections(group)


def close_connections(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``, which tells the other ranks that a collective has failed."""
    for item in together(group):
        close_gloo_connections(item)


def together(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    found = [group]
    for item in found:  # grows
        found += [other for other in (*_same_ranks(item), *kept_for(item, _Fate).family) if other not in found]
    return found


def _same_ranks(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    partner = kept_for(group, _Fate).partner
    return [item for item in (group, None if partner is None else partner()) if item is not None]


def failure_of(group: dist.ProcessGroup) -> str:
    """How the first collective failed; empty if none did."""
    fate = known_for(group, _Fate)
    return "" if fate is None or fate.failure is None else fate.failure[1]


def class_of_failure(group: dist.ProcessGroup) -> type[RuntimeError]:
    """The class of the error of the first collective that failed."""
    failure = kept_for(group, _Fate).failure
    assert failure is not None, "the caller has asked"
    return failure[0]


def loss(what: str, difference: str, error: RuntimeError) -> RuntimeError:
    """The error of a collective that has failed. ``difference``: how the ranks differ, if that is known."""
    if difference:
        return RanksDifferError(f"{what} failed: {difference}")
    return RankLostError(f"{what} failed: another rank died, or did not enter the same collective. {error}")


def gone(group: dist.ProcessGroup, ranks: Iterable[int]) -> list[int]:
    """Return those of ``ranks`` whose connections are closed, because they died or gave up."""
    return [rank for rank in ranks if any(is_gloo_connection_closed(item, rank) for item in _same_ranks(group))]


TIMEOUT_ENV = "FSDP_COMPOSE_TIMEOUT"


def limit_of(group: dist.ProcessGroup) -> timedelta:
    """How long a rank waits for the others of ``group``."""
    seconds = os.environ.get(TIMEOUT_ENV)
    return timedelta(seconds=float(seconds)) if seconds else group_timeout(group)


class TimedOut(RuntimeError):
    """Ranks did not come within the limit."""


def all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """``dist.all_reduce``, in which a rank on the CPU waits no longer than ``limit_of(group)``."""
    if tensor.device.type != "cpu" or not os.environ.get(TIMEOUT_ENV):
        dist.all_reduce(tensor, op, group=group)
        return
    work, limit = dist.all_reduce(tensor, op, group=group, async_op=True), limit_of(group)
    begin = time.monotonic()
    try:
        if work is not None:
            work.wait(limit)
    except RuntimeError as error:
        if time.monotonic() - begin < limit.total_seconds():
            raise
        seconds = limit.total_seconds()
        raise TimedOut(f"Not all ranks came within {seconds:g} s ({TIMEOUT_ENV})") from error


# ---- What this rank waits for besides the collectives of a journal: a rendezvous, or a collective of torch's.


class Meeting:
    """A wait for all ranks of ``group`` that has no number in a journal. While it is entered, ``journal`` may find out
    that another rank waits for this one elsewhere.

    Attributes:
        group: the ranks that must come.
        key: the same on every rank for meetings that follow each other.
        number: which of these it is.
        text: for messages.
        thread: the thread that waits.
        difference: how the ranks differ; set by the watchdog, which cannot interrupt this thread.
    """

    __slots__ = ("difference", "group", "key", "number", "text", "thread")

    def __init__(self, group: dist.ProcessGroup, text: str, key: str = "collective", number: int | None = None) -> None:
        self.group, self.text, self.key = group, text, f"{group.group_name} {key}"
        self.number = entered[self.key] if number is None else number
        self.thread, self.difference = threading.get_ident(), ""

    def __enter__(self) -> Meeting:
        entered[self.key] = max(entered[self.key], self.number + 1)
        _meetings.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _meetings.remove(self)


_meetings: list[Meeting] = []
entered: Counter[str] = Counter()  # by key, the number of the next meeting that this rank has not entered


def meeting_in(thread: int) -> Meeting | None:
    """The innermost meeting that a thread waits in."""
    return next((item for item in reversed([*_meetings]) if item.thread == thread), None)


# ---- The watchdog: one thread that checks, twice a second, what this process waits for, in all process groups.


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
    """Have a thread call ``look``, which must not raise, every ``PERIOD`` seconds from now on. Repeated calls register
    it once."""
    global _watchdog
    if look not in _looks:
        _looks.append(look)
    if _watchdog is None or not _watchdog.is_alive():  # a fork has no threads
        _watchdog = _Watchdog()
        _watchdog.start()
        atexit.register(_watchdog.end)


# ---- Pending gloo messages. Waiting stops once the peer's connection is closed.
#
# When a connection closes, gloo (torch 2.13) wakes every waiter but one: whoever waits for the message whose bytes were
# just in transit is not woken, and waits for the timeout of the process group. So a rank that is killed in the middle
# of a long message would stop all others for half an hour. A thread (``_Watchdog``) watches all waits, and ends those
# whose connection is closed.


_NO_RANK = -1


class Message(Protocol):
    """One message in flight."""

    def wait(self, timeout: timedelta = ...) -> Any: ...


class Pending:
    """The messages of one collective that are still to be waited for.

    Attributes:
        messages: each with the rank that it comes from or goes to. Whoever issues one appends it.
    """

    __slots__ = ("_current", "_group", "_loss", "_rest", "_suspect", "messages")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # those that no one waits for may be kept for longer
        self.messages: list[tuple[Message, int]] = []
        self._rest = iter(self.messages)
        self._current: tuple[Message, int] | None = None  # the one that is waited for
        self._suspect: tuple[Message, int] | None = None  # the one that was, when the connection was closed already
        self._loss = ""

    def fail(self, error: RuntimeError) -> None:
        """Mark all of them as failed, and tell the waiter why."""
        self._rest = iter([(_Failed(error.with_traceback(None)), _NO_RANK)])

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for all of them, each up to ``limit`` (default: ``limit_of`` the process group). After an interruption
        (Ctrl-C), a second call waits for the rest.

        Raises:
            RuntimeError: a message did not arrive.
        """
        group = self._group()
        if limit is None and group is not None:
            limit = limit_of(group)  # as it is now: gloo's messages know that of when the group was made
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
        """End a wait that cannot succeed; called in the watchdog's thread. A closed connection alone proves nothing:
        the peer may have sent everything and be done."""
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
    """Start the watchdog for messages; call this before any are sent."""
    look_regularly(_look)


def _look() -> None:
    for pending in [*_waited_for]:  # at once: other threads come and go
        pending.look()

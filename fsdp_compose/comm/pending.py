"""Messages of gloo's that a rank waits for, no longer than they can still come.

gloo (torch 2.13) tells those who wait when a connection closes, but for one: who waits for the message whose bytes were
just passing is not told, and waits for the timeout of the process group. So a rank that is killed while it sends, or
is sent, something long would stop all others for half an hour. A thread (``lookout``) looks after all who wait, and
lets them go where a connection is closed.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from .._torch import group_timeout, has_closed, stop_waiting_for
from .lookout import look_regularly

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

"""Failed collectives: broken process groups, how long ranks wait, and the thread that watches over waits.

After a collective has failed (a rank died, or did not arrive in time), its process group is unusable, and its ranks
give up one after the other. A rendezvous on a broken process group goes through the store, and waits a few seconds.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..._torch import close_gloo_connections, group_timeout, is_gloo_connection_closed
from ...errors import RankLostError, RanksDifferError
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
    # In a control group, whose ranks connect when they first send to each other: those that this one is connected to.
    connected: tuple[int, ...] | None = None


def fate_of(group: dist.ProcessGroup) -> _Fate:
    """Where the first failure of ``group`` will be noted; outlives the group."""
    return kept_for(group, _Fate)


def carries(control: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """``control`` carries the exchanges of ``group``: they fail together."""
    kept_for(group, _Fate).partner = weakref.ref(control)
    kept_for(control, _Fate).partner = weakref.ref(group)


def connects(control: dist.ProcessGroup, ranks: Iterable[int]) -> None:
    """This rank has sent to, and received from, these ranks of ``control``, and will with no others."""
    kept_for(control, _Fate).connected = tuple(dict.fromkeys(ranks))


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
    # Ranks that talk to a dead rank learn of it at once, but one that waits for this rank would wait for the whole
    # timeout of the process group. A closed connection tells it; then it gives up too, and so on.
    close_connections(group)


def close_connections(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``, which tells the other ranks that a collective has failed."""
    for item in together(group):
        close_gloo_connections(item, kept_for(item, _Fate).connected)


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


def class_of_difference(difference: str) -> type[RuntimeError]:
    """The class of the error that tells how ranks differ: one has raised and does not come, or they run different
    programs."""
    return RankLostError if re.match(r"rank \d+ has raised ", difference) else RanksDifferError


def plain_text(error: RuntimeError) -> str:
    """What an error says, without gloo's own text: a place in its source, addresses, and a wish."""
    words = str(error)
    if "gloo/" not in words:
        return words
    return "not all ranks have come within the timeout of the process group" if "imed out" in words else ""


def is_of_user(error: BaseException | None) -> bool:
    """Whether an error that came out of a collective is one of a user's transport or format."""
    return not isinstance(error, (PartnerGone, dist.DistError)) and "gloo/" not in str(error)


def closed_by(group: dist.ProcessGroup, error: RuntimeError) -> str:
    """Name the other ranks that have closed their connections; empty if none is known to have."""
    # A connection that has timed out was closed by this rank, as are all once it has given up.
    if failure_of(group) or "imed out" in str(error):
        return ""
    lost = gone(group, [rank for rank in range(group.size()) if rank != group.rank()])
    ranks = f"ranks {', '.join(map(str, lost))} have" if len(lost) > 1 else f"rank {lost[0]} has" if lost else ""
    return ranks and f"{ranks} ended, or given up because of an error: the connections are closed"


def gone(group: dist.ProcessGroup, ranks: Iterable[int]) -> list[int]:
    """Return those of ``ranks`` whose connections are closed, because they have ended or given up."""
    known = [(item, kept_for(item, _Fate).connected) for item in _same_ranks(group)]
    return [rank for rank in ranks if any(is_gloo_connection_closed(item, rank, others) for item, others in known)]


TIMEOUT_ENV = "FSDP_COMPOSE_TIMEOUT"


def limit_of(group: dist.ProcessGroup) -> timedelta:
    """How long a rank waits for the others of ``group``."""
    seconds = os.environ.get(TIMEOUT_ENV)
    return timedelta(seconds=float(seconds)) if seconds else group_timeout(group)


class PartnerGone(RuntimeError):
    """Nothing more will come from another rank."""


class TimedOut(PartnerGone):
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
        # gloo raises the same class for every failure: one before the limit is no timeout.
        if time.monotonic() - begin < limit.total_seconds():
            raise
        seconds = limit.total_seconds()
        raise TimedOut(f"Not all ranks came within {seconds:g} s ({TIMEOUT_ENV})") from error


# ---- What this rank waits for besides the collectives of a journal: a rendezvous, or a collective of torch's.


class Meeting:
    """A wait for all ranks of ``group`` that has no number in a journal. While it is entered, the journal may find out
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


_looks: list[Look] = []  # what the thread calls


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


_watchdog: _Watchdog | None = None


def look_regularly(look: Look) -> None:
    """Have a thread call ``look``, which must not raise, every ``PERIOD`` seconds from now on. Registers it once."""
    global _watchdog
    if look not in _looks:
        _looks.append(look)
    if _watchdog is None or not _watchdog.is_alive():  # a fork has no threads
        _watchdog = _Watchdog()
        _watchdog.start()
        atexit.register(_watchdog.end)

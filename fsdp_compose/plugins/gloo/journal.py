"""What process groups have carried, in order, when ranks talk by messages; and the check of ranks that wait too long.

Every collective made of messages (``messages``), and every control exchange, takes the next number of its journal. The
process groups of one mesh share one journal for training: all its ranks issue the same collectives in the same order,
each in its own process groups. A message's tag combines number, kind and size, so it cannot be mistaken for a message
of an earlier or later collective. (The exchange at the end of backward compares which parameters a collective was for,
as it does on every backend.)

So ranks whose programs diverge end up waiting. A thread watches for that: a rank that has waited for ``STALL_SECONDS``
writes its last entries to the key-value store and reads those of the other ranks. If two ranks have entered different
collectives under one number, connections are closed, and every rank raises the same error, which says what each of the
two was doing. Ranks that never wait that long pay nothing.

A rank may also wait in a meeting (``failure.Meeting``): a rendezvous, or a collective of torch's. Meetings have no
number here, because a rank that waits in vain may catch the error and go on. Two ranks are told apart if each waits for
the other.

The journal holds the messages of each collective until somebody has waited for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from ..._torch import group_timeout
from ...core.comm import Label, Work, all_kept, failure_of, give_up, kept_for, known_for, known_namespace
from ...core.comm.failure import (
    PERIOD,
    Meeting,
    PartnerGone,
    class_of_difference,
    close_connections,
    closed_by,
    entered,
    fate_of,
    is_of_user,
    look_regularly,
    meeting_in,
    plain_text,
    together,
)
from ...core.comm.store import record_of
from ...core.comm.transport import KINDS
from ...errors import RankLostError, RanksDifferError

STALL_SECONDS = 3.0  # of waiting, after which a rank tells the others what it waits for
_NUM_KEPT = 64  # entries that a rank can report: more than are ever in flight
_FIRST_TAG, _NUMBER_BITS, _WHAT_BITS = 1 << 30, 10, 20  # tags have 31 bits; those from _FIRST_TAG on are ours
# Set by torchrun, whose own process then holds the store. If a rank's process holds it, the store may be gone when the
# others end, and torch writes to the log about each call.
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_GRACE = 0.5  # seconds in which other ranks may report what they wait for, once a collective has failed
_DIFFERENCE = "difference"  # the key under which the first difference is stored

_KINDS = {kind: number for number, kind in enumerate(KINDS)}
_get_ident = threading.get_ident


class Journal:
    """The order of what one process group carries; or, for several process groups of one mesh, of what they do
    together."""

    __slots__ = (
        "_entries", "count", "difference", "dropped", "failure", "num_backwards", "patience", "stays_at",
        "thread", "under_way", "waits_for",
    )  # fmt: skip

    def __init__(self, timeout: float) -> None:
        self.count = 0  # how many collectives and exchanges this rank has entered
        self.num_backwards = 0  # how many backwards have ended with an exchange
        self.waits_for = 0  # the number of the collective that this rank waits for; 0 if it does not wait
        self.thread = 0  # the thread that has entered the last one; 0 before the first
        self.patience = min(STALL_SECONDS, timeout / 2)  # seconds, after which this rank reports what it waits for
        self._entries: deque[tuple[int, str, str, int]] = deque(maxlen=_NUM_KEPT)
        self.under_way: dict[int, Work] = {}  # by number, the messages that nobody has waited for yet
        self.dropped: set[int] = set()  # the numbers of collectives that nobody will wait for
        self.difference = ""  # how the ranks differ, once that is known
        self.failure = ""  # see ``tell_failure``
        # What this rank waited for at the last look, and at how many looks before; ``None`` if it did not wait.
        self.stays_at: tuple[tuple[str, int], int] | None = None

    def enter(self, kind: str, label: Label | None, nbytes: int) -> int:
        """Enter the next collective (``kind``: one of ``KINDS``) and return the tag of its messages."""
        self.count += 1
        self.thread = _get_ident()
        # Stores the name as it is now: labels are renamed when a root is known, and others may have reported the old
        # one.
        self._entries.append((self.count, kind, "" if label is None else label.text, nbytes))
        what = hash((_KINDS[kind], nbytes)) & ((1 << _WHAT_BITS) - 1)  # a hash of integers is the same in every process
        return _FIRST_TAG | (self.count & ((1 << _NUMBER_BITS) - 1)) << _WHAT_BITS | what

    def forget(self, number: int) -> None:
        """Drop a collective whose messages have all arrived, or never will."""
        self.under_way.pop(number, None)
        self.dropped.discard(number)

    def finish(self, numbers: Iterable[int]) -> None:
        """Wait for the messages of some collectives whose results are not needed."""
        for number in numbers:
            messages = self.under_way.get(number)
            if messages is not None:
                messages.wait()
            self.forget(number)

    def finish_dropped(self) -> None:
        """Called before this rank waits for another collective."""
        # The other ranks may wait for the dropped ones first.
        self.finish([*self.dropped])

    def finish_all(self) -> None:
        """Wait for all messages, so that their memory may be freed."""
        self.finish([*self.under_way])

    def restart(self, count: int) -> None:
        """Continue from a number that all ranks agree on, after they have thrown away everything in flight."""
        self.count, self.waits_for = count, 0
        self._entries.clear()

    def entries(self) -> list[tuple[int, str]]:
        """The last entries: numbers with descriptions."""
        entries = [*self._entries]  # at once: another thread may read them while this one goes on
        return [
            (number, f"{kind} of {text}, {nbytes} bytes" if text else kind) for number, kind, text, nbytes in entries
        ]


def journal_of(group: dist.ProcessGroup) -> Journal:
    """The journal of ``group``; made at the first call, which all ranks make."""
    journal = known_for(group, Journal)
    if journal is None:
        journal = kept_for(group, Journal, lambda: Journal(group_timeout(group).total_seconds()))
        if os.environ.get(_AGENT) == "True":
            weakref.finalize(group, _leave, record_of(group), fate_of(group), journal, group.rank())
        look_regularly(_look)
    return journal


def known_journal(group: dist.ProcessGroup) -> Journal | None:
    return known_for(group, Journal)


# ---- Ranks that wait for each other


def difference_of(group: dist.ProcessGroup) -> str:
    """Say how the ranks differ, after a collective of ``group`` has failed. Empty if no other rank reports a difference
    within a moment. Closes the connections of ``group``."""
    journal = known_journal(group)
    if journal is None:
        return ""
    close_connections(group)  # so that the other ranks notice, and report where they are
    deadline = time.monotonic() + _GRACE
    with contextlib.suppress(RuntimeError):  # the process that holds the store is gone
        while not _compare(group, journal, has_failed=True) and time.monotonic() < deadline:
            time.sleep(_GRACE / 10)
    return journal.difference


def loss(group: dist.ProcessGroup, what: str, error: RuntimeError, difference: str = "") -> RuntimeError:
    """The error of a failed collective of ``group``. ``difference``: how the ranks differ, if that is known."""
    tell_failure(group, error)
    closed = closed_by(group, error)  # before this rank closes its own
    differences = [difference_of(owner) for owner, _ in all_kept(Journal) if group in together(owner)]
    difference = difference or next(filter(None, differences), "")
    if difference:
        return class_of_difference(difference)(f"{what} failed: {difference}")
    why = who_left(group) or closed or plain_text(error) or "not all ranks have entered the same collective"
    return RankLostError(f"{what} failed: {why}")


def tell_failure(group: dist.ProcessGroup, error: BaseException | None) -> None:
    """Let ranks that will wait for this one know that it does not come, because it has raised ``error``; until
    ``take_back_failure``. ``None``: an error that autograd has not shown yet."""
    journal = known_journal(group)
    # Not what comes of another rank's failure.
    is_own = not isinstance(error, (RankLostError, RanksDifferError)) and is_of_user(error) and not failure_of(group)
    if journal is not None and not journal.failure and is_own:
        journal.failure = "an error in backward" if error is None else f"{type(error).__name__}: {error}"
        _retract(group, journal)


def take_back_failure(group: dist.ProcessGroup) -> None:
    """Called when this rank goes on."""
    journal = known_journal(group)
    if journal is not None and journal.failure:
        journal.failure = ""
        _retract(group, journal)


def _leave(record: Any, fate: Any, journal: Journal, rank: int) -> None:
    """Note that this rank needs the process group no more: its program ends, or has dropped it."""
    has_failed = fate.failure is not None or getattr(sys, "last_value", None) is not None  # what the program ends by
    with contextlib.suppress(RuntimeError):  # the process that holds the store is gone
        if record.namespace is not None and not has_failed:
            dist.PrefixStore("left", record.namespace).set(str(rank), str(journal.num_backwards))


def who_left(group: dist.ProcessGroup) -> str:
    """Name the ranks whose programs have ended normally, and say how many iterations they made."""
    namespace, journal = known_namespace(group), known_journal(group)
    if namespace is None or journal is None or os.environ.get(_AGENT) != "True":
        return ""
    store, others = dist.PrefixStore("left", namespace), [rank for rank in range(group.size()) if rank != group.rank()]
    deadline, left = time.monotonic() + _GRACE, list[str]()
    with contextlib.suppress(RuntimeError):  # the process that holds the store is gone
        while not left and time.monotonic() < deadline:  # connections are closed a moment before a program has ended
            time.sleep(PERIOD / 10)
            counts = {rank: store.get(str(rank)).decode() for rank in others if store.check([str(rank)])}
            left = [f"rank {rank} has ended normally after {count} iterations" for rank, count in counts.items()]
    if not left:
        return ""
    return (
        f"{', '.join(left)}, and rank {group.rank()} is in iteration {journal.num_backwards + 1}: the loops of all "
        "ranks must make equally many iterations (drop the last batches, or let all ranks decide together when to stop)"
    )


@contextlib.contextmanager
def noticing_loss(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Report gloo's own errors: for code that issues a collective of ``group`` and waits for it by other functions."""
    meeting = Meeting(group, what)
    try:
        with meeting:
            yield
    except (RankLostError, RanksDifferError):
        raise
    except RuntimeError as error:
        # A file of gloo's source: other errors are of the call.
        is_lost = isinstance(error, PartnerGone) or "gloo/transport" in str(error)
        if not (is_lost or meeting.difference):
            raise
        failure = loss(group, f"rank {group.rank()}: {what}", error, meeting.difference)
        give_up(group, failure)
        raise failure from None


class Report(NamedTuple):
    """What a rank that waits tells the others, as JSON."""

    entries: list[tuple[int, str]]  # the last that it has entered: numbers with descriptions
    num_entered: int  # how many it has entered
    waits_for: int = 0  # the number that it waits for; 0 if it waits in a meeting, or does not wait
    # The key, number and text of the meeting that it waits in, and the ranks that it needs.
    meeting: tuple[str, int, str, list[int]] | None = None
    entered: dict[str, int] = {}  # by key, the number of the next meeting that it has not entered
    failure: str = ""  # the error that it has raised, if it has raised one and not gone on since

    @staticmethod
    def of(journal: Journal) -> Report:
        meeting = _meeting_beside(journal)
        place = None
        if meeting is not None:
            place = (meeting.key, meeting.number, meeting.text, dist.get_process_group_ranks(meeting.group))
        waits_for = journal.waits_for if meeting is None else 0
        return Report(journal.entries(), journal.count, waits_for, place, {**entered}, journal.failure)

    def has_entered(self, other: Report) -> bool:
        """Whether this rank has entered what the other one waits in."""
        if other.waits_for:
            return self.num_entered >= other.waits_for
        return other.meeting is None or self.entered.get(other.meeting[0], 0) > other.meeting[1]

    def needs(self, rank: int) -> bool:
        return self.meeting is None or rank in self.meeting[3]

    def place(self) -> str:
        if self.waits_for:
            return f"the {dict(self.entries).get(self.waits_for, f'collective number {self.waits_for}')}"
        return "" if self.meeting is None else self.meeting[2]


def _meeting_beside(journal: Journal) -> Meeting | None:
    """The meeting that the thread of a journal waits in."""
    # A meeting in another thread does not hold up the collectives of this journal.
    return meeting_in(journal.thread or threading.main_thread().ident or 0)


def _compare(group: dist.ProcessGroup, journal: Journal, has_failed: bool = False) -> bool:
    """Report where this rank is and read what other waiting ranks have reported. Return whether everything is known.
    ``has_failed``: a collective has, so that this rank waits no longer."""
    namespace = known_namespace(group)
    if namespace is None:
        return True
    store, rank, ours = dist.PrefixStore("waiting", namespace), group.rank(), Report.of(journal)
    store.set(str(rank), json.dumps(ours))
    if not journal.difference and store.check([_DIFFERENCE]):
        journal.difference = store.get(_DIFFERENCE).decode()
    ranks = dist.get_process_group_ranks(group)
    others = [other for other in range(group.size()) if other != rank and store.check([str(other)])]
    for other in others:
        if not journal.difference:
            theirs = Report(*json.loads(store.get(str(other))))
            journal.difference = first_difference_of(rank, ours.entries, other, theirs.entries)
            # Ranks that have raised too wait for it in recovery, however long that takes.
            is_awaited = not ours.failure and ours.place() and ours.needs(ranks[other]) and not theirs.has_entered(ours)
            if not journal.difference and theirs.failure and (is_awaited or has_failed):
                where = f", and does not come to {ours.place()}, where rank {rank} waits" if is_awaited else ""
                journal.difference = f"rank {other} has raised {theirs.failure}{where}. {_LOST}"
            if not journal.difference and _wait_for_each_other(group, journal, ours, other, theirs):
                (first, here), (second, there) = sorted([(rank, ours.place()), (other, theirs.place())])
                journal.difference = (
                    f"the ranks run different programs, and wait for each other: rank {first} in {here}, rank {second} "
                    f"in {there}. {_REMEDY}"
                )
            if journal.difference:
                store.set(_DIFFERENCE, journal.difference)
    return bool(journal.difference) or len(others) == group.size() - 1


def _wait_for_each_other(group: dist.ProcessGroup, journal: Journal, ours: Report, other: int, theirs: Report) -> bool:
    """Whether this rank and another one will never go on. ``ours``: from before ``theirs`` was read."""
    if not (ours.place() and theirs.place()):
        return False
    # They wait for each other only if both waits need both ranks, and neither has entered what the other waits in. Its
    # report may be old, but the other one leaves its wait only when this rank has come, or by an error of its own.
    ranks = dist.get_process_group_ranks(group)
    if not (ours.needs(ranks[other]) and theirs.needs(ranks[group.rank()])):
        return False
    now = Report.of(journal)  # after theirs: as long as this rank is here, the other one cannot leave
    is_here = (now.waits_for, now.meeting) == (ours.waits_for, ours.meeting)
    return is_here and not now.has_entered(theirs) and not theirs.has_entered(now)


def first_difference_of(rank: int, ours: list[tuple[int, str]], other: int, theirs: list[tuple[int, str]]) -> str:
    """How two ranks differ in what they have entered; empty if they do not."""
    if other < rank:
        rank, ours, other, theirs = other, theirs, rank, ours
    # A report may be old, which does no harm: entries never change afterwards.
    names = dict(theirs)
    for number, name in ours:
        other_name = names.get(number, name)
        if name != other_name:
            return (
                f"the ranks run different programs: as collective number {number} of their process group, rank {rank} "
                f"has entered the {name}, rank {other} the {other_name}. {_REMEDY}"
            )
    return ""


_LOST = "The current iteration is lost: restart the processes from a checkpoint"
_REMEDY = (
    "Every rank must run the same forwards and backwards, and make the same calls, in the same order: if one rank "
    "wants to skip one (a NaN loss, an empty batch) or to run an extra one (for logging), let all ranks decide "
    "together, by all-reducing a flag. Shard modules that only some ranks use (experts, modalities) with "
    f"fully_shard(optional=True). {_LOST}"
)


def _look() -> None:
    for group, journal in all_kept(Journal):
        meeting, (previous, looks) = _meeting_beside(journal), journal.stays_at or (None, 0)
        place = ("", journal.waits_for) if journal.waits_for else None
        if meeting is not None:
            place = meeting.key, meeting.number
        if previous is not None and previous != place and looks * PERIOD >= journal.patience:
            _retract(group, journal)
        if place is None:
            journal.stays_at = None
            continue
        looks = looks + 1 if previous == place else 0
        journal.stays_at = place, looks
        if not journal.difference and looks * PERIOD >= journal.patience:
            _compare_while_waiting(group, journal)


def _retract(group: dist.ProcessGroup, journal: Journal) -> None:
    """Report that this rank waits no longer where it said."""
    # It may have left by an error, and be on its way to where the others wait.
    namespace = known_namespace(group)
    with contextlib.suppress(RuntimeError):  # the process that holds the store is gone
        if namespace is not None:
            report = Report(journal.entries(), journal.count, 0, None, {**entered}, journal.failure)
            dist.PrefixStore("waiting", namespace).set(str(group.rank()), json.dumps(report))


def _compare_while_waiting(group: dist.ProcessGroup, journal: Journal) -> None:
    # The process that holds the store is gone, and gloo will tell; or a group has just been destroyed.
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        _compare(group, journal)
    if journal.difference:
        meeting = _meeting_beside(journal)
        if meeting is not None:
            meeting.difference = journal.difference
        give_up(group, class_of_difference(journal.difference)(journal.difference))  # which ends the waiting

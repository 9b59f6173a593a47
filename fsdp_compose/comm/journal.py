"""What process groups have carried, in order, when ranks talk by messages; and the check of ranks that wait too long.

Every collective made of messages (``gloo``), and every control exchange, takes the next number of its journal. The
process groups of one mesh share one journal for training: all its ranks issue the same collectives in the same order,
each in its own process groups. A message's tag combines number, kind and size, so it cannot be mistaken for a message
of an earlier or later collective. (The exchange at the end of backward compares which parameters a collective was for,
as it does on every backend.)

So ranks whose programs diverge end up waiting. A thread watches for that: a rank that has waited for ``STALL_SECONDS``
writes its last entries to the key-value store and reads those of the other ranks. If two ranks have entered different
collectives under one number, connections are closed, and every rank raises the same error, which says what each of the
two was doing. Ranks that never wait that long pay nothing.

If a pending message is dropped before it arrives, gloo (torch 2.13) carries nothing more to or from that rank, and
reads and writes the freed memory. So the journal holds all messages until somebody has waited for them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable

import torch.distributed as dist

from .._torch import group_timeout
from .failure import PERIOD, Pending, close_connections, give_up, look_regularly
from .store import known_namespace
from .transport import KINDS, Label

STALL_SECONDS = 3.0  # of waiting, after which a rank tells the others what it waits for
_NUM_KEPT = 64  # entries that a rank can report: more than are ever in flight
_FIRST_TAG, _NUMBER_BITS, _WHAT_BITS = 1 << 30, 10, 20  # tags have 31 bits; those from _FIRST_TAG on are ours
_GRACE = 0.5  # seconds in which other ranks may report what they wait for, once a collective has failed
_DIFFERENCE = "difference"  # the key under which the first difference is stored

_KINDS = {kind: number for number, kind in enumerate(KINDS)}


class Journal:
    """The order of what one process group carries; or, for several process groups of one mesh, of what they do
    together.

    Attributes:
        count: how many collectives and exchanges this rank has entered.
        under_way: by number, the messages of a collective that nobody has waited for yet.
        dropped: the numbers of collectives that nobody will wait for.
        waits_for: the number of the collective that this rank waits for; 0 if it does not wait.
        patience: seconds of waiting after which this rank reports what it waits for.
        difference: how the ranks differ, once that is known.
    """

    __slots__ = (
        "_entries", "count", "difference", "dropped", "patience", "under_way", "waits_for",
    )  # fmt: skip

    def __init__(self, timeout: float) -> None:
        self.count = self.waits_for = 0
        self.patience = min(STALL_SECONDS, timeout / 2)
        self._entries: deque[tuple[int, str, str, int]] = deque(maxlen=_NUM_KEPT)
        self.under_way: dict[int, Pending] = {}
        self.dropped: set[int] = set()
        self.difference = ""

    def enter(self, kind: str, label: Label | None, nbytes: int) -> int:
        """Enter the next collective (``kind``: one of ``KINDS``) and return the tag of its messages."""
        self.count += 1
        # Stores the name as it is now: labels are renamed when a root is known, and others may have reported the old
        # one.
        self._entries.append((self.count, kind, "" if label is None else label.text, nbytes))
        what = hash((_KINDS[kind], nbytes)) & ((1 << _WHAT_BITS) - 1)  # a hash of integers is the same in every process
        return _FIRST_TAG | (self.count & ((1 << _NUMBER_BITS) - 1)) << _WHAT_BITS | what

    def wait(self, number: int) -> None:
        """Note that this rank waits for a collective. First finishes dropped collectives: the other ranks may wait for
        those."""
        self.waits_for = number
        if self.dropped:
            self.finish([*self.dropped])

    def go_on(self) -> None:
        """Note that this rank no longer waits."""
        self.waits_for = 0

    def forget(self, number: int) -> None:
        """Drop a collective whose messages have all arrived, or never will."""
        self.under_way.pop(number, None)
        self.dropped.discard(number)

    def finish(self, numbers: Iterable[int]) -> None:
        """Wait for the messages of some collectives whose results are not needed."""
        for number in numbers:
            pending = self.under_way.get(number)
            if pending is not None:
                pending.wait()
            self.forget(number)

    def finish_all(self) -> None:
        """Wait for all messages, so that their memory may be freed."""
        self.finish([*self.under_way])

    def restart(self, count: int) -> None:
        """Continue from a number that all ranks agree on, after they have thrown away everything in flight."""
        self.count, self.waits_for = count, 0
        self._entries.clear()

    def as_text(self) -> str:
        """The last entries, as JSON for other ranks: numbers with descriptions."""
        entries = [*self._entries]  # at once: another thread may read them while this one goes on
        return json.dumps(
            [(number, f"{kind} of {text}, {nbytes} bytes" if text else kind) for number, kind, text, nbytes in entries]
        )


_journals: weakref.WeakKeyDictionary[dist.ProcessGroup, Journal] = weakref.WeakKeyDictionary()


def journal_of(group: dist.ProcessGroup) -> Journal:
    """The journal of ``group``; made at the first call, which all ranks make."""
    journal = _journals.get(group)
    if journal is None:
        journal = _journals[group] = Journal(group_timeout(group).total_seconds())
        _look_after(group, journal)
    return journal


def known_journal(group: dist.ProcessGroup) -> Journal | None:
    """The journal of ``group``, if it has one."""
    return _journals.get(group)


# ---- Ranks that wait for each other


def difference_of(group: dist.ProcessGroup) -> str:
    """Say how the ranks differ, after a collective of ``group`` has failed. Empty if no other rank reports a difference
    within a moment. Closes the connections of ``group``, so that the other ranks notice."""
    journal = known_journal(group)
    if journal is None:
        return ""
    close_connections(group)
    deadline = time.monotonic() + _GRACE
    with contextlib.suppress(RuntimeError):  # the process that holds the store is gone
        while not _compare(group, journal) and time.monotonic() < deadline:
            time.sleep(_GRACE / 10)
    return journal.difference


def _compare(group: dist.ProcessGroup, journal: Journal) -> bool:
    """Report what this rank has entered and read what other waiting ranks have reported. Return whether everything is
    known."""
    namespace = known_namespace(group)
    if namespace is None:
        return True
    store, rank, ours = dist.PrefixStore("waiting", namespace), group.rank(), journal.as_text()
    store.set(str(rank), ours)
    if not journal.difference and store.check([_DIFFERENCE]):
        journal.difference = store.get(_DIFFERENCE).decode()
    others = [other for other in range(group.size()) if other != rank and store.check([str(other)])]
    for other in others:
        if not journal.difference:
            journal.difference = first_difference_of(rank, ours, other, store.get(str(other)).decode())
            if journal.difference:
                store.set(_DIFFERENCE, journal.difference)
    return bool(journal.difference) or len(others) == group.size() - 1


def first_difference_of(rank: int, ours: str, other: int, theirs: str) -> str:
    """How two ranks differ in what they have entered; empty if they do not. Reports may be old, which does no harm:
    entries never change afterwards."""
    if other < rank:
        rank, ours, other, theirs = other, theirs, rank, ours
    names = dict(json.loads(theirs))
    for number, name in json.loads(ours):
        other_name = names.get(number, name)
        if name != other_name:
            return (
                f"the ranks run different programs: as collective number {number} of their process group, rank {rank} "
                f"has entered the {name}, rank {other} the {other_name}. Every rank must run the same forwards and "
                "backwards in the same order: if one rank wants to skip one (a NaN loss, an empty batch) or to run "
                "an extra one (for logging), let all ranks decide together, by all-reducing a flag. Shard modules that "
                "only some ranks use (experts, modalities) with fully_shard(optional=True). The current "
                "iteration is lost: restart the processes from a checkpoint"
            )
    return ""


_Item = tuple["weakref.ref[dist.ProcessGroup]", Journal]
_items: list[_Item] = []
_lock = threading.Lock()  # of the list
_since: dict[int, tuple[int, int]] = {}  # by journal: what it waits for, and for how many looks


def _look_after(group: dist.ProcessGroup, journal: Journal) -> None:
    with _lock:
        _items[:] = [item for item in _items if item[0]() is not None]
        _items.append((weakref.ref(group), journal))
    look_regularly(_look)


def _look() -> None:
    global _since
    with _lock:
        _items[:] = [item for item in _items if item[0]() is not None]
        waiting = [item for item in _items if item[1].waits_for]
    before, _since = _since, {}
    for reference, journal in waiting:
        number = journal.waits_for
        previous, looks = before.get(id(journal), (0, 0))
        _since[id(journal)] = number, looks + 1 if previous == number else 0
        group = reference()
        if group is not None and not journal.difference and _since[id(journal)][1] * PERIOD >= journal.patience:
            _compare_while_waiting(group, journal)


def _compare_while_waiting(group: dist.ProcessGroup, journal: Journal) -> None:
    with contextlib.suppress(RuntimeError):  # the process that holds the store is gone: gloo will tell
        _compare(group, journal)
    if journal.difference:
        give_up(group, journal.difference)  # which ends the waiting

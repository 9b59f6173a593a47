"""Direct messages between ranks instead of collectives: for gloo.

gloo's own all-gather and reduce-scatter copy everything through a buffer as large as the tensor. Messages arrive where
they belong, or next to what they are added to, and are faster (``benchmarks/transport.py``). If all ranks are on one
machine, longer sums go through shared memory (``shared_memory``).

A tag ties each message to its collective (``journal``). While somebody counts torch's operators, the operator that the
messages replace is called besides, for show.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..._torch import Shown, group_timeout_reader, has_closed, is_profiling, num_dispatch_modes, stop_waiting_for
from ...core.comm import CollectiveKind, Label, Transport, Work, failure_of, give_up, kept_for
from ...core.comm.failure import TIMEOUT_ENV, PartnerGone, gone, limit_of, look_regularly
from ...core.comm.transport import TRANSPORT_ENV, Range
from .journal import journal_of, loss
from .shared_memory import Descriptor, SharedMemory

# an all-reduce shorter than this, times the number of ranks, is not worth splitting in two halves
_SHORT_BYTES = 1 << 16
# Sums from this size on go through shared memory, if all ranks are on one machine: in less than half the time.
_LONG_BYTES = 1 << 14
_TAG_BITS = 31

Message = tuple[int, torch.Tensor]
"""The other rank of the group, and the contiguous memory that is sent or received."""


@dataclass(slots=True, eq=False)
class MemoryOfRanks:
    """Kept for the owner of a journal, whose numbers the memory uses."""

    # By process group, which lives equally long on all ranks: a transport may be freed at different times.
    by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def begin_maximum(self, group: dist.ProcessGroup, number: int, tag: int, tensor: torch.Tensor) -> Work | None:
        """Start replacing ``tensor``, which is short, by its elementwise maximum over the ranks of ``group``;
        ``number`` and ``tag`` are those of its journal entry. Return ``None`` if these ranks do not share memory, or
        have not found out yet."""
        shared = self.by_group.get(group)
        return None if shared is None else _Maximum(group, shared, number, tag, tensor)


def _is_listened_to() -> bool:
    """Whether somebody counts the operators that are called: a dispatch mode (``CommDebugMode``), or a profiler."""
    return bool(num_dispatch_modes()) or is_profiling()


class Messages(Transport):
    """Collectives made of direct messages, for every dtype. Sums are added in rank order."""

    name = "messages"

    def __init__(self, group: dist.ProcessGroup, peers: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._owner = group if peers is None else peers  # of the journal
        rank, size = group.rank(), group.size()
        self._rank = rank
        self._peers = [(rank + i) % size for i in range(1, size)]  # not all ranks send to one at a time
        self._journal = journal_of(self._owner)
        look_after_pending()
        self._timeout = group_timeout_reader(group)
        self._memory: list[torch.Tensor] = []  # of all-reduces, for what other ranks send
        self._shared: SharedMemory | None = None  # where all ranks are on one machine
        self._has_met = False

    def among(self, peers: dist.ProcessGroup) -> Transport:
        return Messages(self.group, peers)

    def limit(self) -> timedelta:
        """How long a rank waits for a message."""
        # As it is now: gloo's own messages keep the timeout from when the group was made.
        return limit_of(self.group) if os.environ.get(TIMEOUT_ENV) else self._timeout()

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        if _is_listened_to():
            super().all_gather(Shown(whole), Shown(shard), label)
        numel = shard.numel()
        flight = _InFlight(self, self._journal.enter(CollectiveKind.ALL_GATHER, label, shard.nbytes))
        received = [(rank, whole[rank * numel : rank * numel + numel]) for rank in self._peers]
        flight.issue(received, [(rank, shard) for rank in self._peers])
        own = whole[self._rank * numel : self._rank * numel + numel]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return flight

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        if _is_listened_to():
            super().reduce_scatter(Shown(shard), Shown(whole), is_average, label)
        shared = self._shared_for(whole.nbytes, label)
        flight = _Sum(self, self._journal.enter(CollectiveKind.REDUCE_SCATTER, label, whole.nbytes), shared)
        chunks = [*whole.chunk(self.group.size())]
        return flight.begin(chunks[self._rank], [(rank, chunks[rank]) for rank in self._peers], shard, is_average)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        """With two ranks, or a short tensor, each rank sends everything to every other. Otherwise each rank sums up one
        chunk, and sends the sum to every other."""
        if _is_listened_to():
            super().all_reduce(Shown(tensor), is_average, label)
        # No faster than gloo's own, but gloo's aborts the processes when ranks disagree.
        journal, size, shared = self._journal, self.group.size(), self._shared_for(tensor.nbytes, label)
        flight = _Sum(self, journal.enter(CollectiveKind.ALL_REDUCE, label, tensor.nbytes), shared, self._memory)
        if size == 2 or size * tensor.nbytes <= _SHORT_BYTES:
            return flight.begin(tensor, [(rank, tensor) for rank in self._peers], tensor, is_average)
        second = _InFlight(self, journal.enter(CollectiveKind.SECOND_HALF, label, tensor.nbytes))
        chunks = tensor.tensor_split(size)
        own, others = chunks[self._rank], [(rank, chunks[rank]) for rank in self._peers]

        def begin_second() -> None:
            second.issue(others, [(rank, own) for rank in self._peers])

        # The second half begins in wait(), which all ranks call in the same order.
        return _InTurn(flight.begin(own, others, own, is_average), begin_second, second)

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range], is_everywhere: bool, label: Label
    ) -> None:
        received = []
        if whole is not None and is_everywhere and _is_listened_to():
            super().all_gather(Shown(whole), Shown(part), label)
        if whole is not None:
            received = [(rank, whole[start:stop]) for rank, (start, stop) in enumerate(ranges) if rank != self._rank]
            whole[slice(*ranges[self._rank])] = part
        receivers = self._peers if is_everywhere else [] if self._rank == 0 else [0]
        nbytes = sum(stop - start for start, stop in ranges) * part.element_size()
        self.exchange([(rank, part) for rank in receivers], received, nbytes, label)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        num_moved: int,
        label: Label,
    ) -> Work:
        if _is_listened_to():
            super().all_to_all(Shown(received), Shown(sent), received_sizes, sent_sizes, num_moved, label)
        flight = _InFlight(self, self._journal.enter(CollectiveKind.ALL_TO_ALL, label, num_moved * sent.element_size()))
        flight.issue(enumerate(received.split([*received_sizes])), enumerate(sent.split([*sent_sizes])))
        return flight

    def skip(self, nbytes: int, label: Label) -> None:
        # Other ranks of the mesh enter a gather, and all share one journal, whose numbers must stay equal.
        self._journal.enter(CollectiveKind.MESSAGES, label, nbytes)

    def _shared_for(self, nbytes: int, label: Label) -> SharedMemory | None:
        """The shared memory for a sum of ``nbytes``; ``None`` for a short sum, or on several machines."""
        if nbytes < _LONG_BYTES:
            return None
        if not self._has_met:
            known = kept_for(self._owner, MemoryOfRanks).by_group
            if self.group not in known:
                known[self.group] = self._introduce(label)
            self._shared, self._has_met = known[self.group], True
        return self._shared

    def _introduce(self, label: Label) -> SharedMemory | None:
        """Find out whether all ranks are on one machine, and want to share memory."""
        shared = None
        if os.environ.get(TRANSPORT_ENV) != self.name:
            with suppress(OSError, AttributeError):  # the system has no such memory
                shared = SharedMemory(self._rank, self.group.size())
        numbers = self._tell_all(-1 if shared is None else shared.introduction, label)
        can_share = shared is not None and all(number >= 0 for _, number in numbers) and shared.connect_to(numbers)
        # All or none: any rank may have it turned off, or not find another one.
        answers = self._tell_all(int(can_share), label)
        if shared is not None and can_share and all(answer for _, answer in answers):
            limit = limit_of(self.group)
            with self._noticing_failure(label):
                shared.begin(limit, partial(_failure_of, self.group, self._peers))
            return shared
        return None

    def _tell_all(self, number: int, label: Label) -> list[tuple[int, int]]:
        """Send a number to the other ranks and return theirs."""
        own, theirs = torch.tensor([number]), [(rank, torch.zeros(1, dtype=torch.int64)) for rank in self._peers]
        self.exchange([(rank, own) for rank in self._peers], theirs, own.nbytes, label, CollectiveKind.INTRODUCTION)
        return [(rank, int(item)) for rank, item in theirs]

    def exchange(
        self,
        sent: Iterable[Message],
        received: Iterable[Message],
        nbytes: int,
        label: Label,
        kind: str = CollectiveKind.MESSAGES,
    ) -> None:
        """Send and receive messages, and wait for them. Messages from one rank to another arrive in order; empty ones
        are not sent. ``nbytes``: a size for the whole exchange that is the same on every rank; ``kind``: its kind."""
        flight = _InFlight(self, self._journal.enter(kind, label, nbytes))
        flight.issue(received, sent)
        with self._noticing_failure(label):
            flight.wait()

    @contextmanager
    def _noticing_failure(self, label: Label) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            what = f"rank {self._rank}: the exchange of {label} between the ranks"
            failure = loss(self._owner, what, error)
            give_up(self._owner, failure)
            raise failure from None


# ---- Pending gloo messages. Waiting stops once the peer's connection is closed.
#
# When a connection closes, gloo (torch 2.13) wakes every waiter but one: whoever waits for the message whose bytes were
# just in transit is not woken, and waits for the timeout of the process group. So a rank that is killed in the middle
# of a long message would stop all others for half an hour. A thread (``_Watchdog``) watches all waits, and ends those
# whose connection is closed.


class Waitable(Protocol):
    """One message in flight."""

    def wait(self, timeout: timedelta = ...) -> Any: ...


class Pending:
    """The messages of one collective that are still to be waited for."""

    __slots__ = ("_current", "_error", "_group", "_loss", "_rest", "_suspect", "messages")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # those that no one waits for may be kept for longer
        # Each with the rank that it comes from or goes to. Whoever issues one appends it.
        self.messages: list[tuple[Waitable, int]] = []
        self._rest = iter(self.messages)
        self._current: tuple[Waitable, int] | None = None  # the one that is waited for
        self._suspect: tuple[Waitable, int] | None = None  # the one that was, when the connection was closed already
        self._loss = ""
        self._error: RuntimeError | None = None  # by which all have failed

    def fail(self, error: RuntimeError) -> None:
        """Mark all of them as failed, and tell the waiter why."""
        self._error = error.with_traceback(None)

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for all of them, each up to ``limit`` (default: ``limit_of`` the process group). After an interruption
        (Ctrl-C), a second call waits for the rest. Raises RuntimeError if a message did not arrive."""
        if self._error is not None:
            raise self._error
        group = self._group()
        if limit is None and group is not None:
            limit = limit_of(group)  # as it is now: gloo's messages know that of when the group was made
        _waited_for.add(self)
        try:
            for current in self._rest:
                self._current, message = current, current[0]
                if (message.wait() if limit is None else message.wait(limit)) is False:
                    raise PartnerGone(self._loss)
        finally:
            _waited_for.discard(self)
            self._current = None

    def look(self) -> None:
        """End a wait that cannot succeed; called in the watchdog's thread."""
        group, current, suspect = self._group(), self._current, self._suspect
        self._suspect = None
        if group is None or current is None or not has_closed(group, current[1]):
            return
        # A closed connection alone proves nothing: the peer may have sent everything and be done. Then the message has
        # just arrived, and the waiter is about to go on; or gloo is about to wake it. So look twice.
        if current is not suspect:
            self._suspect = current
            return
        self._loss = f"rank {current[1]} has closed its connections"
        stop_waiting_for(current[0])


_waited_for: set[Pending] = set()


def look_after_pending() -> None:
    """Start the watchdog for messages; call this before any are sent."""
    look_regularly(_look)


def _look() -> None:
    for pending in [*_waited_for]:  # at once: other threads come and go
        pending.look()


# ---- The messages of one collective


class _InFlight:
    """The messages of one collective. If an exception (Ctrl-C) interrupts it between two messages, a later ``wait()``
    finishes the rest."""

    __slots__ = ("_group", "_journal", "_limit", "_number", "_pending", "_tag")

    def __init__(self, transport: Messages, tag: int) -> None:
        self._group, self._journal, self._limit, self._tag = transport.group, transport._journal, transport.limit, tag
        self._number = self._journal.count
        # The journal holds the messages too, until somebody has waited for them. If one is dropped before it arrives,
        # gloo (torch 2.13) reads and writes its freed memory, and carries nothing more to or from that rank.
        self._pending = self._journal.under_way[self._number] = Pending(transport.group)

    def issue(self, received: Iterable[Message], sent: Iterable[Message]) -> None:
        """Start receiving and sending all messages that are not empty. Errors are raised by ``wait()``."""
        group, tag, messages = self._group, self._tag, self._pending.messages
        try:
            for rank, item in received:
                if item.numel():
                    messages.append((group.recv([item], rank, tag), rank))
            for rank, item in sent:
                if item.numel():
                    messages.append((group.send([item], rank, tag), rank))
        except RuntimeError as error:  # the other rank has closed its connections
            self._fail(error)

    def _fail(self, error: RuntimeError) -> None:
        """Mark the remaining messages as lost."""
        self._pending.fail(error)
        self._journal.forget(self._number)

    def wait(self) -> None:
        journal = self._journal
        journal.waits_for = self._number
        if journal.dropped:
            journal.finish_dropped()
        try:
            self._pending.wait(self._limit())
        except RuntimeError as error:
            self._fail(error)
            raise
        finally:
            journal.waits_for = 0
        journal.under_way.pop(self._number, None)  # Journal.forget, of one that was not dropped

    def __del__(self) -> None:
        # The model of an interrupted iteration was deleted, so nobody waits for these messages: the journal will.
        if self._number in self._journal.under_way:
            self._journal.dropped.add(self._number)


class _Note:
    """A note from another rank that says where its chunk of a collective is."""

    __slots__ = ("_group", "_shared", "_tag", "note", "rank")

    def __init__(self, group: dist.ProcessGroup, shared: SharedMemory, tag: int, rank: int) -> None:
        self._group, self._shared, self._tag, self.rank = group, shared, tag, rank
        self.note: Descriptor = (0, 0, 0)  # until the note arrives: memory is numbered from 1

    def wait(self, timeout: timedelta | None = None) -> None:
        group = self._group
        if self.note[0]:
            return
        failure = partial(_failure_of, group, [self.rank])
        self.note = self._shared.wait(self._tag, self.rank, timeout or limit_of(group), failure)


def _failure_of(group: dist.ProcessGroup, ranks: Sequence[int]) -> str:
    """Return why nothing more will come from these ranks, if that is known; else an empty string."""
    lost = gone(group, ranks)
    return failure_of(group) or (f"rank {lost[0]} has closed its connections" if lost else "")


class _Maximum:
    """The elementwise maximum of a short tensor over the ranks, through shared memory."""

    __slots__ = ("_failure", "_notes", "_number", "_shared", "_tensor")

    def __init__(self, group: dist.ProcessGroup, shared: SharedMemory, number: int, tag: int, tensor: torch.Tensor):
        peers = [rank for rank in range(group.size()) if rank != group.rank()]
        tag |= number << _TAG_BITS
        self._shared, self._number, self._tensor = shared, number, tensor
        self._notes = [_Note(group, shared, tag, peer) for peer in peers]
        self._failure: RuntimeError | None = None
        limit, failure = limit_of(group), partial(_failure_of, group, peers)
        try:
            shared.put(number, tag, [(peer, tensor) for peer in peers], limit, failure)
        except RuntimeError as error:  # raised by wait(), as with messages
            self._failure = error.with_traceback(None)

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        while self._notes:
            note = self._notes[-1]
            note.wait()
            torch.maximum(self._tensor, self._shared.read(note.rank, note.note, self._tensor.dtype), out=self._tensor)
            self._notes.pop()
        self._shared.end(self._number)

    def __del__(self) -> None:
        self._shared.end(self._number)


class _Sum(_InFlight):
    """A reduction: adds what the other ranks send to this rank's own chunk, in rank order."""

    __slots__ = ("_divisor", "_memory", "_notes", "_own", "_pool", "_result", "_shared", "_terms")

    def __init__(
        self, transport: Messages, tag: int, shared: SharedMemory | None, pool: list[torch.Tensor] | None = None
    ) -> None:
        """``shared``: the memory through which ranks read the terms; ``None``: they are sent as messages. ``pool``:
        reusable buffers for received terms, returned after the sum: allocating memory takes longer than adding."""
        super().__init__(transport, tag)
        self._shared, self._pool = shared, pool
        self._notes: list[_Note] = []

    def begin(self, own: torch.Tensor, sent: Sequence[Message], result: torch.Tensor, is_average: bool) -> _Sum:
        """Send each other rank what it has to add. The sum or average of ``own`` and of what they send goes to
        ``result``, which may be ``own``."""
        rank, size = self._group.rank(), self._group.size()
        self._own, self._result, self._divisor = own, result, size if is_average else 1
        if self._shared is not None:
            self._terms = [own] * size
            self._put(self._shared, sent)
            return self
        memory = self._memory = _taken_from(self._pool or [], own, (size - 1) * own.numel())
        received = dict(zip((peer for peer, _ in sent), memory.view(size - 1, own.numel()), strict=True))
        self._terms = [own if i == rank else received[i] for i in range(size)]
        self.issue(received.items(), sent)
        return self

    def _put(self, shared: SharedMemory, sent: Sequence[Message]) -> None:
        """Like ``issue``, but through shared memory."""
        group, peers = self._group, [peer for peer, _ in sent]
        tag = self._number << _TAG_BITS | self._tag  # tags of messages repeat, so the number goes in front
        self._notes = [_Note(group, shared, tag, peer) for peer in peers]
        self._pending.messages.extend([(note, note.rank) for note in self._notes])
        try:
            shared.put(self._number, tag, sent, limit_of(group), partial(_failure_of, group, peers))
        except RuntimeError as error:
            self._fail(error)

    def wait(self) -> None:
        super().wait()
        if not self._terms:
            return
        for note in self._notes:
            assert self._shared is not None
            self._terms[note.rank] = self._shared.read(note.rank, note.note, self._own.dtype)
        self._add_up(self._terms)
        self._terms = []
        if self._shared is not None:
            self._shared.end(self._number)
        elif self._pool is not None:
            self._pool.append(self._memory)
            del self._memory

    def _add_up(self, terms: Sequence[torch.Tensor]) -> None:
        total = terms[0]
        # In rank order, so that the bits do not depend on which rank holds which chunk.
        for i, term in enumerate(terms[1:-1]):
            if i > 0:
                total.add_(term)
            elif self._shared is not None:  # do not write to what other ranks have put in shared memory
                total = total + term
            else:
                total = torch.add(total, term, out=term if total is self._own else total)
        torch.add(total, terms[-1], out=self._result)
        if self._divisor > 1:
            self._result.div_(self._divisor)

    def __del__(self) -> None:
        super().__del__()
        if self._shared is not None:
            self._shared.end(self._number)  # in case it was dropped without wait()


def _taken_from(pool: list[torch.Tensor], like: torch.Tensor, numel: int) -> torch.Tensor:
    """Memory for ``numel`` elements of the dtype and device of ``like``, from the pool if it has some."""
    for i, memory in enumerate(pool):
        if (memory.numel(), memory.dtype, memory.device) == (numel, like.dtype, like.device):
            return pool.pop(i)
    return like.new_empty(numel)


class _InTurn:
    """Two collectives; the second begins when the first is done."""

    __slots__ = ("_begin", "_first", "_second")

    def __init__(self, first: Work, begin: Callable[[], None], second: Work) -> None:
        self._first, self._second = first, second
        self._begin: Callable[[], None] | None = begin

    def wait(self) -> None:
        self._first.wait()
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()
        self._second.wait()

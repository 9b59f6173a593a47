"""Direct messages between ranks in the place of collectives: for gloo.

gloo's own all-gather and reduce-scatter pass everything through a buffer of theirs, as large as the tensor. Messages
arrive where they belong, or next to what they are added to, sooner (``benchmarks/transport.py``). An all-reduce of
messages takes about as long as gloo's; but where ranks differ, gloo's ends the processes.

Each message belongs to one collective, by its tag (``journal``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .._torch import group_timeout, has_gloo_on_cpu
from .broken import give_up
from .journal import difference_of, journal_of
from .label import ALL_GATHER, ALL_REDUCE, MESSAGES, REDUCE_SCATTER, SECOND_HALF, Label, Work
from .transport import Range, Transport

TRANSPORT_ENV = "FSDP_COMPOSE_TRANSPORT"
_SHORT_BYTES = 1 << 16  # of an all-reduce that is not worth two halves, times the number of ranks
MOST_RANKS = 16  # each rank sends to each: with many, gloo's rings ask less of a network

Message = tuple[int, torch.Tensor]
"""The other rank of the group, and the contiguous memory that is sent or received."""


def transport_of(group: dist.ProcessGroup, device: torch.device, peers: dist.ProcessGroup | None = None) -> Transport:
    """How tensors on ``device`` move between the ranks of ``group``: the same on every rank. ``peers``: all ranks that
    issue the same collectives in the same order, each in the process groups that it is in; default: ``group``."""
    goes_direct = device.type == "cpu" and 2 <= group.size() <= MOST_RANKS and has_gloo_on_cpu(group)
    if goes_direct and os.environ.get(TRANSPORT_ENV) != Transport.name:
        return Messages(group, peers)
    return Transport(group)


class Messages(Transport):
    """Collectives that are made of direct messages, of dtypes of all kinds. Sums are made in the order of the ranks:
    they do not depend on which rank has which part."""

    name = "messages"

    def __init__(self, group: dist.ProcessGroup, peers: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._owner = group if peers is None else peers  # of the journal
        rank, size = group.rank(), group.size()
        self._rank = rank
        self._peers = [(rank + i) % size for i in range(1, size)]  # not all ranks send to one at a time
        self._journal = journal_of(self._owner)
        self._memory: list[torch.Tensor] = []  # of all-reduces, for what other ranks send

    def among(self, peers: dist.ProcessGroup) -> Transport:
        return Messages(self.group, peers)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        numel = shard.numel()
        flight = _InFlight(self, self._journal.enter(ALL_GATHER, label, shard.nbytes))
        received = [(rank, whole[rank * numel : rank * numel + numel]) for rank in self._peers]
        flight.issue(received, [(rank, shard) for rank in self._peers])
        own = whole[self._rank * numel : self._rank * numel + numel]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return flight

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        flight = _Sum(self, self._journal.enter(REDUCE_SCATTER, label, whole.nbytes))
        parts = [*whole.chunk(self.group.size())]
        return flight.begin(parts[self._rank], [(rank, parts[rank]) for rank in self._peers], shard, is_average)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        """Between two ranks, and where it is short, each rank sends all it has to each; else each sums up a part, and
        the second half begins in ``wait()``: all ranks wait in one order."""
        journal, size = self._journal, self.group.size()
        flight = _Sum(self, journal.enter(ALL_REDUCE, label, tensor.nbytes), self._memory)
        if size == 2 or size * tensor.nbytes <= _SHORT_BYTES:
            return flight.begin(tensor, [(rank, tensor) for rank in self._peers], tensor, is_average)
        second = _InFlight(self, journal.enter(SECOND_HALF, label, tensor.nbytes))
        parts = tensor.tensor_split(size)
        own, others = parts[self._rank], [(rank, parts[rank]) for rank in self._peers]

        def begin_second() -> None:
            second.issue(others, [(rank, own) for rank in self._peers])

        return _InTurn(flight.begin(own, others, own, is_average), begin_second, second)

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range], is_everywhere: bool, label: Label
    ) -> None:
        received = []
        if whole is not None:
            received = [(rank, whole[start:stop]) for rank, (start, stop) in enumerate(ranges) if rank != self._rank]
            whole[slice(*ranges[self._rank])] = part
        receivers = self._peers if is_everywhere else [] if self._rank == 0 else [0]
        nbytes = sum(stop - start for start, stop in ranges) * part.element_size()
        self.exchange([(rank, part) for rank in receivers], received, nbytes, label)

    def skip(self, nbytes: int, label: Label) -> None:
        self._journal.enter(MESSAGES, label, nbytes)

    def exchange(self, sent: Iterable[Message], received: Iterable[Message], nbytes: int, label: Label) -> None:
        """Send and receive messages, and wait for them. Those from one rank to another arrive in their order, empty
        ones are left out. ``nbytes``: a size of it all that is the same on every rank."""
        flight = _InFlight(self, self._journal.enter(MESSAGES, label, nbytes))
        flight.issue(received, sent)
        try:
            flight.wait()
        except RuntimeError as error:
            failure = f"rank {self._rank}: the exchange of {label} between the ranks failed: " + (
                difference_of(self._owner) or f"another rank died, or did not enter the same collective. {error}"
            )
            give_up(self._owner, failure)
            raise RuntimeError(failure) from error


class _InFlight:
    """The messages of one collective. An exception of the user's (Ctrl-C) between two of them leaves the rest to be
    waited for; where no one does (an iteration was interrupted, and its model deleted), the journal will."""

    __slots__ = ("_group", "_journal", "_messages", "_number", "_rest", "_tag")

    def __init__(self, transport: Messages, tag: int) -> None:
        self._group, self._journal, self._tag = transport.group, transport._journal, tag
        self._number = self._journal.count
        self._messages: list[_Message] = []
        self._rest: Iterator[_Message] = iter(self._messages)
        self._journal.under_way[self._number] = self._rest

    def issue(self, received: Iterable[Message], sent: Iterable[Message]) -> None:
        """Begin to receive and to send, all but empty messages. What fails fails when it is waited for."""
        group, tag, messages = self._group, self._tag, self._messages
        try:
            for rank, item in received:
                if item.numel():
                    messages.append(group.recv([item], rank, tag))
            for rank, item in sent:
                if item.numel():
                    messages.append(group.send([item], rank, tag))
        except RuntimeError as error:  # the other rank has closed its connections
            self._fail(error)

    def _fail(self, error: RuntimeError) -> None:
        """Nothing will arrive any more."""
        self._rest = iter([_Failed(error.with_traceback(None))])
        self._journal.forget(self._number)

    def wait(self) -> None:
        journal = self._journal
        journal.wait(self._number)
        try:
            limit = group_timeout(self._group)  # as it is now: gloo's messages know that of when the group was made
            for message in self._rest:
                message.wait(limit)
        except RuntimeError as error:
            self._fail(error)
            raise
        journal.forget(self._number)
        journal.go_on()

    def __del__(self) -> None:
        if self._number in self._journal.under_way:
            self._journal.dropped.add(self._number)


class _Message(Protocol):
    """One message in flight."""

    def wait(self, timeout: timedelta = ...) -> Any: ...


class _Failed:
    """Messages that will not arrive."""

    __slots__ = ("_error",)

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        raise self._error


class _Sum(_InFlight):
    """A reduction: what the other ranks send is added to this rank's own part, in the order of the ranks."""

    __slots__ = ("_divisor", "_memory", "_own", "_pool", "_result", "_terms")

    def __init__(self, transport: Messages, tag: int, pool: list[torch.Tensor] | None = None) -> None:
        """``pool``: has memory for what arrives, and takes it back when the sum is made: new memory takes longer to get
        than to add up."""
        super().__init__(transport, tag)
        self._pool = pool

    def begin(self, own: torch.Tensor, sent: Sequence[Message], result: torch.Tensor, is_average: bool) -> _Sum:
        """Send each of the others what it is to add; ``result``, which may be ``own``, takes the sum, or average, of
        ``own`` and of what they send."""
        rank, size = self._group.rank(), self._group.size()
        memory = self._memory = _taken_from(self._pool or [], own, (size - 1) * own.numel())
        received = dict(zip((peer for peer, _ in sent), memory.view(size - 1, own.numel()), strict=True))
        self._terms = [own if i == rank else received[i] for i in range(size)]
        self._own, self._result, self._divisor = own, result, size if is_average else 1
        self.issue(received.items(), sent)
        return self

    def wait(self) -> None:
        super().wait()
        terms = self._terms
        if not terms:
            return
        total = terms[0]
        for term in terms[1:-1]:
            total = torch.add(total, term, out=term if total is self._own else total)
        torch.add(total, terms[-1], out=self._result)
        if self._divisor > 1:
            self._result.div_(self._divisor)
        self._terms = []
        if self._pool is not None:
            self._pool.append(self._memory)
        del self._memory


def _taken_from(pool: list[torch.Tensor], like: torch.Tensor, numel: int) -> torch.Tensor:
    """Memory for so many elements of a dtype: some of the pool's, if it has such."""
    for i, memory in enumerate(pool):
        if (memory.numel(), memory.dtype, memory.device) == (numel, like.dtype, like.device):
            return pool.pop(i)
    return like.new_empty(numel)


class _InTurn:
    """Two collectives, of which the second begins when the first is done."""

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

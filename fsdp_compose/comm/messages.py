"""Direct messages between ranks in the place of collectives: for gloo.

gloo's own collectives pass everything through a buffer of theirs, as large as the tensor. Messages arrive where they
belong, or next to what they are added to, in a third to a half of the time (``benchmarks/transport.py``).

Each message belongs to one collective, by its tag (``journal``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from .._torch import backend_name
from .broken import noticing_loss
from .journal import Journal, journal_of
from .label import ALL_GATHER, ALL_REDUCE, MESSAGES, REDUCE_SCATTER, SECOND_PHASE, Label
from .transport import Range, Transport, Work

TRANSPORT_ENV = "FSDP_COMPOSE_TRANSPORT"
MOST_RANKS = 16  # each rank sends to each: with many, gloo's rings ask less of a network

Message = tuple[int, torch.Tensor]
"""The other rank of the group, and the contiguous memory that is sent or received."""


def transport_of(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """How tensors on ``device`` move between the ranks of ``group``: the same on every rank."""
    goes_direct = backend_name(group) == "gloo" and device.type == "cpu" and 2 <= group.size() <= MOST_RANKS
    if goes_direct and os.environ.get(TRANSPORT_ENV) != Transport.name:
        return Messages(group)
    return Transport(group)


class Messages(Transport):
    """Collectives that are made of direct messages, of dtypes of all kinds. Sums are made in the order of the ranks:
    they do not depend on which rank has which part."""

    name = "messages"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        rank, size = group.rank(), group.size()
        self._rank = rank
        self._peers = [(rank + i) % size for i in range(1, size)]  # not all ranks send to one at a time
        self._journal = journal_of(group)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        numel = shard.numel()
        tag = self._journal.enter(ALL_GATHER, label, shard.nbytes)
        received = [(rank, whole[rank * numel : rank * numel + numel]) for rank in self._peers]
        works = self._issue(received, [(rank, shard) for rank in self._peers], tag)
        own = whole[self._rank * numel : self._rank * numel + numel]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return _InFlight(self._journal, works)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        tag = self._journal.enter(REDUCE_SCATTER, label, whole.nbytes)
        return self._reduce([*whole.chunk(self.group.size())], shard, is_average, tag)

    def _reduce(self, parts: Sequence[torch.Tensor], result: torch.Tensor, is_average: bool, tag: int) -> _Sum:
        """Send each rank its part, and add what the others send to this rank's own."""
        size, own = len(parts), parts[self._rank]
        memory = own.new_empty(len(self._peers) * own.numel())
        received = dict(zip(self._peers, memory.chunk(len(self._peers)), strict=True)) if own.numel() else {}
        works = self._issue(received.items(), [(rank, parts[rank]) for rank in self._peers], tag)
        terms = [own if rank == self._rank else received[rank] for rank in range(size)] if received else []
        return _Sum(self._journal, works, terms, own, result, size if is_average else 1)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        """As a reduce-scatter, and an all-gather, which begins in ``wait()``."""
        journal = self._journal
        tags = [journal.enter(kind, label, tensor.nbytes) for kind in (ALL_REDUCE, SECOND_PHASE)]
        parts = tensor.tensor_split(self.group.size())
        return _Phases(iter(self._all_reduce(parts, is_average, *tags)))

    def _all_reduce(self, parts: Sequence[torch.Tensor], is_average: bool, tag: int, next_tag: int) -> Iterator[Work]:
        own = parts[self._rank]
        yield self._reduce(parts, own, is_average, tag)
        received = [(rank, part) for rank, part in enumerate(parts) if rank != self._rank]
        yield _InFlight(self._journal, self._issue(received, [(rank, own) for rank in self._peers], next_tag))

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range], is_everywhere: bool, label: Label
    ) -> None:
        received = []
        if whole is not None:
            received = [(rank, whole[start:stop]) for rank, (start, stop) in enumerate(ranges) if rank != self._rank]
            whole[slice(*ranges[self._rank])] = part
        receivers = self._peers if is_everywhere else [] if self._rank == 0 else [0]
        self.exchange([(rank, part) for rank in receivers], received, label)

    def exchange(self, sent: Iterable[Message], received: Iterable[Message], label: Label) -> None:
        """Send and receive messages, and wait for them. Those from one rank to another arrive in their order, empty
        ones are left out."""
        tag = self._journal.enter(MESSAGES, label, 0)
        with noticing_loss(self.group, f"the exchange of {label} between the ranks"):
            _InFlight(self._journal, self._issue(received, sent, tag)).wait()

    def _issue(self, received: Iterable[Message], sent: Iterable[Message], tag: int) -> list[Work]:
        """Begin to receive and to send, all but empty messages. What fails fails when it is waited for."""
        group = self.group
        works: list[Work] = []
        try:
            for rank, item in received:
                if item.numel():
                    works.append(group.recv([item], rank, tag))
            for rank, item in sent:
                if item.numel():
                    works.append(group.send([item], rank, tag))
        except RuntimeError as error:  # the other rank has closed its connections
            works = [_Failed(error)]
        return works


class _Failed:
    """Messages that could not be issued."""

    __slots__ = ("_error",)

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


class _InFlight:
    """Messages under way. An exception of the user's (Ctrl-C) between two of them leaves the rest to be waited for.

    gloo (torch 2.13) carries nothing more to or from a rank whose message was dropped before it arrived. So what is
    not waited for (an iteration was interrupted, and its model deleted) is left to the journal, and waited for before
    a later collective.
    """

    __slots__ = ("_journal", "_number", "_works")

    def __init__(self, journal: Journal, works: list[Work]) -> None:
        self._journal, self._number = journal, journal.count
        self._works = iter(works)

    def wait(self) -> None:
        journal = self._journal
        journal.wait(self._number)
        if journal.dropped:
            journal.wait_for_dropped()
        for work in self._works:
            work.wait()
        journal.go_on()

    def __del__(self) -> None:
        self._journal.dropped.extend(self._works)


class _Sum(_InFlight):
    """A reduction under way: ``result`` is to be the sum of ``terms``, in their order, over ``divisor``. All terms but
    ``own`` may be overwritten."""

    __slots__ = ("_divisor", "_own", "_result", "_terms")

    def __init__(
        self,
        journal: Journal,
        works: list[Work],
        terms: Sequence[torch.Tensor],
        own: torch.Tensor,
        result: torch.Tensor,
        divisor: int,
    ) -> None:
        super().__init__(journal, works)
        self._terms, self._own, self._result, self._divisor = terms, own, result, divisor

    def wait(self) -> None:
        super().wait()
        terms, self._terms = self._terms, ()
        if not terms:
            return
        total = terms[0]
        for term in terms[1:-1]:
            total = torch.add(total, term, out=term if total is self._own else total)
        torch.add(total, terms[-1], out=self._result)
        if self._divisor > 1:
            self._result.div_(self._divisor)


class _Phases:
    """Work that is done one after the other, each begun when the one before is done."""

    __slots__ = ("_present", "_rest")

    def __init__(self, works: Iterator[Work]) -> None:
        self._rest = works
        self._present: Work | None = next(works)

    def wait(self) -> None:
        while self._present is not None:
            self._present.wait()
            self._present = next(self._rest, None)

"""The elementwise maximum of a few bytes over all ranks, by messages between partners: recursive doubling.

In each round two partners tell each other what they know: after round ``k`` each knows what ``2 ** (k + 1)`` have.
Ranks beyond the largest power of two tell a partner below it first, and hear the result from it. Six ranks::

    before     4 -> 0     5 -> 1
    round 0    0 <-> 1    2 <-> 3
    round 1    0 <-> 2    1 <-> 3
    after      0 -> 4     1 -> 5

So a rank has at most ``log2(N) + 1`` connections, made once, and its wait is that of as many messages. A ring has
``2 * (N - 1)`` hops. Partners are pairs, for good reason: over connections that are made when they are first used, a
message to one rank and one from another wait for each other in a circle (gloo, torch 2.13, at 3 and 4 ranks).
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from .._torch import gloo_messages, group_timeout, remember_connected
from .pending import Pending, look_after_pending

_TAG = 1  # each pair talks once in an exchange, and messages of a pair arrive in their order


class Round(NamedTuple):
    """What a rank does in one round, with one partner."""

    partner: int
    sends: bool
    receives: bool


def rounds_of(rank: int, size: int) -> list[Round]:
    """The rounds of ``rank``, of ``size`` ranks, in order."""
    power = 1 << (size.bit_length() - 1)
    if rank >= power:
        return [Round(rank - power, sends=True, receives=True)]
    rounds = [Round(rank ^ (1 << bit), sends=True, receives=True) for bit in range(power.bit_length() - 1)]
    if rank + power < size:
        other = rank + power
        rounds = [Round(other, sends=False, receives=True), *rounds, Round(other, sends=True, receives=False)]
    return rounds


class Doubling:
    """Exchanges over ``control``, a process group on gloo whose connections are made when they are first used; those of
    this rank are made here, with all ranks together. ``group``: the one whose timeout holds.

    Raises:
        PartnerLost: one did not come.
    """

    def __init__(self, control: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
        self.rounds = rounds_of(control.rank(), control.size())
        self.control, self.messages = control, gloo_messages(control)
        look_after_pending()
        self._group = weakref.ref(group)
        self.begin(torch.zeros(1, dtype=torch.uint8)).wait()
        remember_connected(control, [item.partner for item in self.rounds])

    def begin(self, tensor: torch.Tensor) -> Flight:
        """Begin to replace ``tensor``, on the CPU, by its maximum; all ranks, with equally many elements."""
        return Flight(self, tensor, torch.empty_like(tensor))

    def limit(self) -> timedelta:
        """How long a rank waits for a message: gloo's messages know the timeout of when the group was made."""
        group = self._group()
        return timedelta(0) if group is None else group_timeout(group)


class PartnerLost(RuntimeError):
    """No message came from a partner, or none could be sent to it."""

    def __init__(self, partner: int, round_: int, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.partner, self.round = partner, round_


class Flight:
    """One exchange under way. The messages of the first round are on their way; ``wait`` sees to the others. After an
    interruption (Ctrl-C) it goes on where it was."""

    __slots__ = ("_doubling", "_failure", "_incoming", "_index", "_num_begun", "_pending", "_tensor")

    def __init__(self, doubling: Doubling, tensor: torch.Tensor, incoming: torch.Tensor) -> None:
        self._doubling, self._tensor, self._incoming = doubling, tensor, incoming
        self._index = self._num_begun = 0
        self._failure: PartnerLost | None = None
        if doubling.rounds:
            try:
                self._begin_round()
            except PartnerLost as error:  # raised by who waits for it
                self._failure = error

    def _begin_round(self) -> None:
        partner, sends, receives = self._doubling.rounds[self._index]
        messages, pending = self._doubling.messages, Pending(self._doubling.control)
        self._pending = pending
        try:
            if receives:
                pending.add(messages.recv([self._incoming], partner, _TAG), partner)
            if sends:
                pending.add(messages.send([self._tensor], partner, _TAG), partner)
        except RuntimeError as error:
            raise PartnerLost(partner, self._index, error) from None
        self._num_begun = self._index + 1

    def wait(self) -> None:
        """Until the maximum is there.

        Raises:
            PartnerLost: a partner has closed its connection, or did not answer in time.
        """
        if self._failure is not None:
            raise self._failure
        rounds, tensor, limit = self._doubling.rounds, self._tensor, self._doubling.limit()
        while self._index < len(rounds):
            if self._num_begun <= self._index:
                self._begin_round()
            try:
                self._pending.wait(limit)
            except RuntimeError as error:
                raise PartnerLost(rounds[self._index].partner, self._index, error) from None
            if rounds[self._index].receives:
                torch.maximum(tensor, self._incoming, out=tensor)
            self._index += 1

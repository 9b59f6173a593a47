"""The control exchange: once per backward, every rank learns whether all ranks did the same.

The runtime starts it at the end of each backward. It takes the maximum over all ranks of a small buffer, whose head has
the same length for every model. The buffer travels in messages between partners (recursive doubling, below) or through
memory that the ranks share::

    | hash of the order | its complement | hash of used | its complement | steps | complement | late | kind | its
    complement | padding |

The maxima of a hash and of its complement add up to all ones only if all ranks have the same hash. Equal hashes of the
order mean that every rank issued the same collectives in the same order. If ranks run different models, their exchanges
still meet, and differ. ``steps`` counts optimizer steps since the last exchange. ``late`` says whether groups of this
rank received gradients after they had been reduced. ``used`` has one byte per parameter. With it, ranks agree which
parameters have a gradient, so ``None`` is the same everywhere.

``kind`` tells exchanges that ranks make elsewhere from that at the end of a backward or forward: rounds about optional
groups (``runtime/skip_protocol``; marks then follow the head, and all exchanges of the process group have that length),
and the start of an optimizer's step (``optim/step_agreement``).
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..._torch import gloo_messages, is_destroyed, make_gloo_group, outside_modes
from ...errors import RankLostError
from .context import all_kept, forget_for, kept_for, known_for
from .failure import carries, class_of_difference, close_connections, connects, give_up, limit_of, plain_text
from .store import known_namespace, own_store, wait_for
from .transport import CollectiveKind, Work

# ---- The elementwise maximum of a few bytes over all ranks, by messages between partners: recursive doubling.
#
# In each round, two partners exchange what they know: after round ``k``, each has the maximum of ``2 ** (k + 1)``
# ranks. A rank beyond the largest power of two first tells a partner below it, and gets the result from that partner at
# the end. Six ranks::
#
#     before     4 -> 0     5 -> 1
#     round 0    0 <-> 1    2 <-> 3
#     round 1    0 <-> 2    1 <-> 3
#     after      0 -> 4     1 -> 5
#
# So a rank has at most ``log2(N) + 1`` connections, made once, and waits for that many messages; a ring has ``2 * (N -
# 1)`` hops. Partners must be pairs: gloo makes a connection at its first message, and then a message to one rank and a
# message from another can wait for each other in a circle (torch 2.13, seen with 3 and 4 ranks).


_TAG = 1  # each pair exchanges one message per exchange and direction, and a pair's messages arrive in order


class Round(NamedTuple):
    """What a rank does in one round, with one partner."""

    partner: int
    sends: bool
    receives: bool


def rounds_of(rank: int, size: int) -> list[Round]:
    """The rounds of ``rank`` out of ``size`` ranks, in order."""
    power = 1 << (size.bit_length() - 1)
    if rank >= power:
        return [Round(rank - power, sends=True, receives=True)]
    rounds = [Round(rank ^ (1 << bit), sends=True, receives=True) for bit in range(power.bit_length() - 1)]
    if rank + power < size:
        other = rank + power
        rounds = [Round(other, sends=False, receives=True), *rounds, Round(other, sends=True, receives=False)]
    return rounds


class Doubling:
    """Exchanges over ``control``, a gloo process group that makes its connections on first use; creating this object
    makes those of this rank, together with all ranks. ``group``: the one whose timeout applies.

    Raises:
        PartnerLost: a partner did not answer.
    """

    def __init__(self, control: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
        from ...plugins.gloo import Pending, look_after_pending

        self.rounds = rounds_of(control.rank(), control.size())
        self.messages = gloo_messages(control)
        look_after_pending()
        self.pending = partial(Pending, control)
        self.group = weakref.ref(group)
        # Makes the connections in the order of the rounds, pair by pair: made later, out of order, they can deadlock.
        self.begin(torch.zeros(1, dtype=torch.uint8)).wait()
        connects(control, [item.partner for item in self.rounds])

    def begin(self, tensor: torch.Tensor) -> Flight:
        """Start replacing ``tensor``, on the CPU, by its maximum. Ranks: all, with equally many elements."""
        return Flight(self, tensor, torch.empty_like(tensor))


class PartnerLost(RuntimeError):
    """No message came from a partner, or none could be sent to it."""

    def __init__(self, partner: int, round_: int, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.partner, self.round = partner, round_


class Flight:
    """One exchange in flight. The messages of the first round have been started; ``wait`` does the rest. After an
    interruption (Ctrl-C), another ``wait`` continues where it stopped."""

    __slots__ = ("_doubling", "_failure", "_incoming", "_index", "_num_begun", "_pending", "_tensor")

    def __init__(self, doubling: Doubling, tensor: torch.Tensor, incoming: torch.Tensor) -> None:
        self._doubling, self._tensor, self._incoming = doubling, tensor, incoming
        self._index = self._num_begun = 0
        self._failure: PartnerLost | None = None
        if doubling.rounds:
            try:
                self._begin_round()
            except PartnerLost as error:  # raised by wait()
                self._failure = error

    def _begin_round(self) -> None:
        partner, sends, receives = self._doubling.rounds[self._index]
        messages, pending = self._doubling.messages, self._doubling.pending()
        self._pending = pending
        try:
            if receives:
                pending.messages.append((messages.recv([self._incoming], partner, _TAG), partner))
            if sends:
                pending.messages.append((messages.send([self._tensor], partner, _TAG), partner))
        except RuntimeError as error:
            raise PartnerLost(partner, self._index, error) from None
        self._num_begun = self._index + 1

    def wait(self) -> None:
        """Wait for the maximum.

        Raises:
            PartnerLost: a partner has closed its connection, or did not answer in time.
        """
        if self._failure is not None:
            raise self._failure
        rounds, tensor, group = self._doubling.rounds, self._tensor, self._doubling.group()
        # As it is now: gloo's own messages keep the timeout from when the group was made.
        limit = timedelta(0) if group is None else limit_of(group)
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


# ---- The exchange


_HEAD = struct.Struct("<QQQQBBBBB3x")
_ALL_ONES = (1 << 64) - 1
_PER_BYTE = 0x9E3779B97F4A7C15  # mixes the number of bytes into the hash
_IS_END, _IS_ROUND, _IS_STEP = range(3)  # kinds
# The kind of an exchange, by what ends with it, or else by its name.
_KINDS = {
    "backward": CollectiveKind.BACKWARD,
    "forward": CollectiveKind.FORWARD,
    **{kind: kind for kind in (CollectiveKind.ROUND, CollectiveKind.STEP)},
}
_GRACE = timedelta(seconds=2)  # in which partners report whom they waited for, once an exchange has failed


@dataclass(slots=True, eq=False)
class _Control:
    """The process group that carries the exchanges of another one."""

    group: dist.ProcessGroup
    is_destroyable: bool  # torch knew the other one


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group that carries the exchanges of ``group``; made once, by all ranks of ``group``. Its ``Carrier``
    makes its connections."""
    control = known_for(group, _Control)
    if control is None:
        # torch's own caches may keep destroyed process groups forever, through the meshes of DTensors, and each control
        # group has connections and threads.
        for other, known in all_kept(_Control):
            if known.is_destroyable and is_destroyed(other):
                forget_for(other, _Control)
                forget_for(other, Carrier)
        store = dist.PrefixStore("control", own_store(group, "making the control group"))
        made = _Control(make_gloo_group(group, store), not is_destroyed(group))
        control = kept_for(group, _Control, lambda: made)
        connects(control.group, ())
        carries(control.group, group)
    return control.group


class Carrier:
    """Carries all exchanges of one process group, one after the other.

    Attributes:
        num_exchanges: how many it has started.
        num_whole: how many of them exchanged all bytes, because ranks differed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        from ...plugins.gloo import MemoryOfRanks, known_journal

        self._group, self._control = weakref.ref(group), control_group(group)
        self._journal = known_journal(group)
        self._memory = kept_for(group, MemoryOfRanks)  # shared by ranks, once these have found out that they can
        self._head = bytearray(_HEAD.size)
        with outside_modes():
            self._head_tensor = torch.frombuffer(self._head, dtype=torch.uint8)
        self._bytes = bytearray()  # behind the hashes: all ranks' bytes, if they were needed
        self._whole: torch.Tensor | None = None  # over the same memory, if there are bytes
        self._work: Work | None = None
        self._end_of = ""
        self.num_exchanges = self.num_whole = 0
        try:
            with outside_modes():
                self._doubling = Doubling(self._control, group)
        except PartnerLost as error:
            raise RankLostError(
                f"setting up the control exchange: rank {error.partner} did not connect to rank {group.rank()} in "
                f"time. {plain_text(error)}".rstrip()
            ) from None

    @staticmethod
    def of(group: dist.ProcessGroup) -> Carrier:
        """The carrier of ``group``'s control group; see there."""
        return kept_for(group, Carrier, lambda: Carrier(group))

    def make_room(self, num_marks: int) -> None:
        """Make room for this many marks in every later exchange. Ranks: all, between the same two exchanges."""
        missing = _HEAD.size + num_marks - len(self._head)
        if missing > 0:
            self.abandon()
            self._head = self._head + bytes(missing)  # not in place: a tensor lies over it
            with outside_modes():
                self._head_tensor = torch.frombuffer(self._head, dtype=torch.uint8)

    def make_round(self, digest: int | None, marks: memoryview) -> bool:
        """Replace ``marks`` by the maximum over all ranks. Return whether all ranks that give a digest give the same
        one, and none is at another exchange instead."""
        known = (0, 0) if digest is None else (digest & _ALL_ONES, _ALL_ONES - (digest & _ALL_ONES))
        self.send(_HEAD.pack(*known, 0, 0, 0, 0, 0, _IS_ROUND, 255 - _IS_ROUND) + marks, b"", CollectiveKind.ROUND)
        self.abandon()
        marks[:] = self._head[_HEAD.size : _HEAD.size + len(marks)]
        order, complement = _HEAD.unpack_from(self._head)[:2]
        return _are_of_one_kind(self._head) and order + complement in (0, _ALL_ONES)

    def begin_step(self, digest: int) -> tuple[bool, bool]:
        """Ranks: all, at the start of an optimizer's step.

        Returns:
            Whether all ranks are there, and whether they also give the same digest (of 64 bits).
        """
        self.send(
            _HEAD.pack(digest, _ALL_ONES - digest, 0, 0, 0, 0, 0, _IS_STEP, 255 - _IS_STEP), b"", CollectiveKind.STEP
        )
        self.abandon()
        order, complement = _HEAD.unpack_from(self._head)[:2]
        are_all_here = _are_of_one_kind(self._head)
        return are_all_here, are_all_here and order + complement == _ALL_ONES

    def send(self, head: bytes, whole: bytes | bytearray, end_of: str) -> None:
        """Start an exchange. ``whole``: the bytes to exchange if the heads turn out to differ."""
        self.abandon()
        self._end_of = end_of
        self._head[:] = head.ljust(len(self._head), b"\0")
        self._bytes = bytearray(whole)
        self.num_exchanges += 1
        with outside_modes():
            self._whole = torch.frombuffer(self._bytes, dtype=torch.uint8) if whole else None
            self._work = self._begin(self._head_tensor)

    def _begin(self, tensor: torch.Tensor) -> Work:
        if self._journal is not None:
            tag = self._journal.enter(_KINDS[self._end_of], None, tensor.numel())
            group = self._group()
            work = None if group is None else self._memory.begin_maximum(group, self._journal.count, tag, tensor)
            if work is not None:
                return work
        return self._doubling.begin(tensor)

    def receive(self, whole: memoryview) -> bytearray:
        """Wait for the heads of all ranks and, if ranks differ, for all bytes, which are written to ``whole``."""
        assert self._work is not None
        if self.abandon():
            whole[:] = self._bytes
        return self._head

    def abandon(self) -> bool:
        """Wait for an exchange that an exception has left in flight, if any; return whether it exchanged all bytes."""
        work, self._work = self._work, None
        if work is None:
            return False
        with outside_modes():
            self._finish(work)
            if self._end_of == "backward" and self._journal is not None:
                self._journal.num_backwards += 1
            order, complement, used, other, _, _, is_late, *_ = _HEAD.unpack_from(self._head)
            # Usually all ranks have the same bytes, and the hash is enough. All ranks see the same maxima, so they
            # agree here; and if they issued the same collectives, they have equally many bytes.
            is_same_order = order + complement == _ALL_ONES and _are_of_one_kind(self._head)
            if self._whole is None or not is_same_order or not (is_late or used + other != _ALL_ONES):
                return False
            self.num_whole += 1
            self._finish(self._begin(self._whole))
        return True

    def _finish(self, work: Work) -> None:
        journal = self._journal
        if journal is not None:
            journal.waits_for = journal.count
            journal.finish_dropped()
        try:
            work.wait()
        except RuntimeError as error:
            from ...plugins.gloo import difference_of, who_left

            group = self._group()
            is_at_end = self._end_of in ("backward", "forward")
            what = f"control exchange at the end of {self._end_of}" if is_at_end else self._end_of
            difference = "" if group is None else difference_of(group)
            if group is not None and difference:
                failure = class_of_difference(difference)(f"the {what} failed: {difference}")
            else:
                why = "" if group is None else who_left(group)
                why = why or f"not all ranks have reached it{self._absent(error)}"
                failure = RankLostError(f"the {what} failed: {why}. {plain_text(error)}".rstrip())
            give_up(self._control, failure)
            raise failure from None
        finally:
            if journal is not None:
                journal.waits_for = 0

    def _absent(self, error: RuntimeError) -> str:
        """Name the rank that held up this one."""
        group = self._group()
        store = None if group is None else known_namespace(group)
        if group is None or store is None or not isinstance(error, PartnerLost):
            return ""
        close_connections(self._control)  # wakes the ranks that wait for this one
        store, seen, rank = dist.PrefixStore("lost", store), {group.rank()}, error.partner
        deadline = time.monotonic() + _GRACE.total_seconds()
        # The partner may itself have been waiting for another rank. Ranks whose exchange fails report whom they waited
        # for, so the rank at the end of this chain, which has reported nothing, is the one.
        with contextlib.suppress(dist.DistNetworkError):  # the process that holds the store is gone
            store.set(str(group.rank()), str(rank))
            while rank not in seen:
                seen.add(rank)
                left = timedelta(seconds=max(0.01, deadline - time.monotonic()))
                if not wait_for(store, [str(rank)], left):
                    break
                rank = int(store.get(str(rank)))
        return f": rank {rank} did not answer"


def maximum_of_all_ranks(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace ``tensor``, on the CPU, by its elementwise maximum over ``group``, whose own backend does not take CPU
    tensors. Ranks: all of ``group``, between two exchanges."""
    Carrier.of(group)._doubling.begin(tensor).wait()


class ControlExchange:
    """The exchanges of one root. ``carrier`` is ``None`` if there is no other rank; ``end_of``, for messages: backward
    or forward."""

    def __init__(self, num_params: int, num_groups: int, carrier: Carrier | None, *, end_of: str = "backward") -> None:
        self._carrier = carrier
        self._buffer = bytearray(num_params + num_groups)
        self.told = memoryview(self._buffer)  # used and late
        self.used = self.told[:num_params]
        self.late = self.told[num_params:]
        self.steps_agree = True
        self._end_of = end_of

    def start(self, order_hash: int, steps: int | None) -> None:
        """Send this rank's ``used`` and ``late``, which the caller has filled in, with the hash and the number of
        optimizer steps it has made (up to 255; ``None`` if that says nothing)."""
        if self._carrier is None:
            return
        order = (order_hash + len(self._buffer) * _PER_BYTE) & _ALL_ONES  # so that equal ones have equally many bytes
        used = int.from_bytes(hashlib.blake2b(self.used, digest_size=8).digest(), "little")
        # Zeros: a rank that has nothing to train agrees with any number of steps.
        step, complement = (0, 0) if steps is None else (steps, 255 - steps)
        is_late = any(self.late)
        kinds = _IS_END, 255 - _IS_END
        head = _HEAD.pack(order, _ALL_ONES - order, used, _ALL_ONES - used, step, complement, is_late, *kinds)
        self._carrier.send(head, self._buffer, self._end_of)

    def wait(self) -> bool:
        """Wait for the answer; then ``used`` and ``late`` hold the maximum over all ranks.

        Returns:
            Whether all ranks issued the same collectives in the same order. ``steps_agree`` says whether all ranks have
            made the same number of steps.

        Raises:
            RuntimeError: a rank did not take part.
        """
        if self._carrier is None:
            return True
        head = self._carrier.receive(self.told)
        order, complement, _, _, step, other, *_ = _HEAD.unpack_from(head)
        self.steps_agree = step + other <= 255
        # Without this check, different collectives of equal size would have paired silently.
        return _are_of_one_kind(head) and order + complement == _ALL_ONES

    def abandon(self) -> None:
        """Wait for an exchange that an exception left in flight and forget it."""
        if self._carrier is not None:
            self._carrier.abandon()


def _are_of_one_kind(head: bytearray) -> bool:
    """Whether all ranks made the same kind of exchange."""
    kind, complement = _HEAD.unpack_from(head)[7:]
    return bool(kind + complement == 255)

"""The control exchange: once per backward, every rank learns whether all ranks did the same.

A maximum over all ranks of a few bytes, the same number for every model and of any size, by messages between partners
(``doubling``) or through memory that the ranks share::

    | hash of the order | its complement | hash of used | its complement | steps | complement | late | round | padding |

Of a hash and its complement the greatest of all ranks add up to all ones only if all ranks have the same. Equal hashes
of the order mean that every rank issued the same collectives in the same order: collectives of equal size pair silently
otherwise. Where ranks run different models, their exchanges meet and differ. ``steps`` are those of optimizers since
the last exchange; both bytes are zero where a rank has nothing to train. ``late``: whether groups of this rank received
gradients after they had been reduced.

``used``, one byte for each parameter, is how ranks agree which parameters have a gradient (``None`` is the same
everywhere). Mostly they all have the same; only where the hashes differ, or a group is late, all ranks exchange the
bytes themselves, at once. All know of it, and whether it was needed they know alike.

``round`` is 1 in what ranks tell each other elsewhere (``group.rounds``), so that it is not taken for the end of a
backward: there are marks behind the head then, and all exchanges of the process group are as long.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from .._torch import is_destroyed, make_gloo_group, outside_modes
from .broken import carries, close_connections, give_up
from .doubling import Doubling, PartnerLost
from .journal import Journal, difference_of, known_journal
from .label import BACKWARD, FORWARD, ROUND, Work
from .messages import begin_maximum
from .namespace import known_namespace, wait_for
from .rendezvous import own_store

_HEAD = struct.Struct("<QQQQBBBB4x")
_ALL_ONES = (1 << 64) - 1
_PER_BYTE = 0x9E3779B97F4A7C15  # spreads the number of bytes over the hash
_KINDS = {"backward": BACKWARD, "forward": FORWARD, ROUND: ROUND}  # by what an exchange is at the end of
_GRACE = timedelta(seconds=2)  # in which partners tell whom they have waited for, once an exchange has failed


_control_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_destroyable: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # those of them that torch knew


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group that carries the exchanges of ``group``; made once, by all ranks of ``group``. Its connections
    are made by its ``Carrier``."""
    control = _control_groups.get(group)
    if control is None:
        _forget_destroyed()
        if not is_destroyed(group):
            _destroyable.add(group)
        store = dist.PrefixStore("control", own_store(group, "making the control group"))
        control = make_gloo_group(group, store)
        _control_groups[group] = control
        carries(control, group)
    return control


def _forget_destroyed() -> None:
    """Close the control groups of process groups that were destroyed: torch's own caches may keep these for ever, by
    the meshes of DTensors, and each control group has connections and threads."""
    for group in [*_destroyable]:
        if is_destroyed(group):
            _destroyable.discard(group)
            _control_groups.pop(group, None)
            _carriers.pop(group, None)


class Carrier:
    """What carries all exchanges of one process group, one after the other.

    Attributes:
        num_exchanges: how many it has begun.
        num_whole: of how many all bytes were exchanged, because ranks differed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._control = weakref.ref(group), control_group(group)
        self._journal: Journal | None = known_journal(group)
        self._head = bytearray(_HEAD.size)
        with outside_modes():
            self._head_tensor = torch.frombuffer(self._head, dtype=torch.uint8)
        self._bytes = bytearray()  # behind the hashes, of all ranks if they were needed
        self._whole: torch.Tensor | None = None  # over the same memory, if there are any
        self._work: Work | None = None
        self._end_of = ""
        self.num_exchanges = self.num_whole = 0
        try:
            with outside_modes():
                self._doubling = Doubling(self._control, group)
        except PartnerLost as error:
            raise RuntimeError(
                f"making the connections of the control exchange: rank {error.partner} did not connect to rank "
                f"{group.rank()} in time: it has died, hangs, or took another path. {error}"
            ) from error

    @staticmethod
    def of(group: dist.ProcessGroup) -> Carrier:
        """That of the control group of ``group``; see there."""
        carrier = _carriers.get(group)
        if carrier is None:
            carrier = _carriers[group] = Carrier(group)
        return carrier

    def make_room(self, num_marks: int) -> None:
        """Rounds of as many marks will come: all ranks call this between the same two exchanges."""
        missing = _HEAD.size + num_marks - len(self._head)
        if missing > 0:
            self.abandon()
            self._head = self._head + bytes(missing)  # not in place: a tensor lies over it
            with outside_modes():
                self._head_tensor = torch.frombuffer(self._head, dtype=torch.uint8)

    def make_round(self, digest: int | None, marks: memoryview) -> bool:
        """Replace ``marks`` by the greatest of all ranks; whether those that give a digest give the same, and none is
        at an exchange instead."""
        known = (0, 0) if digest is None else (digest & _ALL_ONES, _ALL_ONES - (digest & _ALL_ONES))
        self.send(_HEAD.pack(*known, 0, 0, 0, 0, 0, 1) + marks, b"", ROUND)
        self.abandon()
        marks[:] = self._head[_HEAD.size : _HEAD.size + len(marks)]
        order, complement, used, *_ = _HEAD.unpack_from(self._head)
        return used == 0 and order + complement in (0, _ALL_ONES)

    def send(self, head: bytes, whole: bytes | bytearray, end_of: str) -> None:
        """Begin an exchange. ``whole``: what all bytes are exchanged of, if ``head`` turns out to differ."""
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
            work = None if group is None else begin_maximum(group, self._journal.count, tag, tensor)
            if work is not None:
                return work
        return self._doubling.begin(tensor)

    def receive(self, whole: memoryview) -> bytearray:
        """Wait for the head of all ranks, and for all bytes if ranks differ; these are written to ``whole``."""
        assert self._work is not None
        if self.abandon():
            whole[:] = self._bytes
        return self._head

    def abandon(self) -> bool:
        """Wait for an exchange in flight, if there is one, such as an exception has left; whether all bytes were
        exchanged."""
        work, self._work = self._work, None
        if work is None:
            return False
        with outside_modes():
            self._finish(work)
            if self._whole is None or not _asks_for_all(self._head):
                return False
            self.num_whole += 1
            self._finish(self._begin(self._whole))
        return True

    def _finish(self, work: Work) -> None:
        journal = self._journal
        if journal is not None:
            journal.wait(journal.count)
        try:
            work.wait()
        except RuntimeError as error:
            group = self._group()
            what, died = f"control exchange at the end of {self._end_of}", f"did not run this {self._end_of}"
            if self._end_of == ROUND:
                what, died = ROUND, "did not come to it"
            failure = f"the {what} failed: " + (
                ("" if group is None else difference_of(group))
                or f"another rank died, or {died}{self._absent(error)}. {error}"
            )
            give_up(self._control, failure)
            raise RuntimeError(failure) from error
        if journal is not None:
            journal.go_on()

    def _absent(self, error: RuntimeError) -> str:
        """Name the rank that held up this one. Its partner may have waited for another one itself: ranks whose exchange
        fails tell in the store whom they waited for. The one at the end of the line has told nothing."""
        group = self._group()
        store = None if group is None else known_namespace(group)
        if group is None or store is None or not isinstance(error, PartnerLost):
            return ""
        close_connections(self._control)  # those that wait for this rank hear of it
        store, seen, rank = dist.PrefixStore("lost", store), {group.rank()}, error.partner
        deadline = time.monotonic() + _GRACE.total_seconds()
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
    """Replace ``tensor``, on the CPU, by its elementwise maximum over ``group``, whose own backend does not take such.
    Ranks: all of ``group``, between two exchanges."""
    Carrier.of(group)._doubling.begin(tensor).wait()


_carriers: weakref.WeakKeyDictionary[dist.ProcessGroup, Carrier] = weakref.WeakKeyDictionary()


class ControlExchange:
    """The exchanges of one root. ``carrier`` is ``None`` where there is no other rank; ``end_of``: a backward or a
    forward, for messages."""

    def __init__(self, num_params: int, num_groups: int, carrier: Carrier | None, *, end_of: str = "backward") -> None:
        self._carrier = carrier
        self._buffer = bytearray(num_params + num_groups)
        self._view = memoryview(self._buffer)
        self.used = self._view[:num_params]
        self.late = self._view[num_params:]
        self.steps_agree = True
        self._num_params, self._end_of = num_params, end_of

    def start(self, order_hash: int, steps: int | None) -> None:
        """Send off this rank's ``used`` and ``late``, which the caller has filled in, the hash, and how many optimizer
        steps it has made (up to 255); ``None`` where that tells nothing."""
        if self._carrier is None:
            return
        order = (order_hash + len(self._buffer) * _PER_BYTE) & _ALL_ONES  # so that equal ones have equally many bytes
        used = int.from_bytes(hashlib.blake2b(self.used, digest_size=8).digest(), "little")
        step, complement = (0, 0) if steps is None else (steps, 255 - steps)
        is_late = any(self.late)
        head = _HEAD.pack(order, _ALL_ONES - order, used, _ALL_ONES - used, step, complement, is_late, 0)
        self._carrier.send(head, self._buffer, self._end_of)

    def wait(self) -> bool:
        """Wait for the answer, after which ``used`` and ``late`` are every rank's together.

        Returns:
            Whether all ranks issued the same collectives in the same order. ``steps_agree`` tells whether they have
            made the same number of steps.

        Raises:
            RuntimeError: a rank did not take part.
        """
        if self._carrier is None:
            return True
        order, complement, _, _, step, other, _, is_round = _HEAD.unpack_from(self._carrier.receive(self._view))
        self.steps_agree = step + other <= 255
        is_same: bool = order + complement == _ALL_ONES and not is_round
        return is_same

    def abandon(self) -> None:
        """Wait for an exchange that an exception left in flight and forget it."""
        if self._carrier is not None:
            self._carrier.abandon()


def _asks_for_all(head: bytearray) -> bool:
    """Whether the greatest bytes of all ranks say that all bytes must be exchanged, which are equally many."""
    order, complement, used, other, _, _, is_late, is_round = _HEAD.unpack_from(head)
    is_same_order: bool = order + complement == _ALL_ONES and not is_round
    return is_same_order and (bool(is_late) or used + other != _ALL_ONES)

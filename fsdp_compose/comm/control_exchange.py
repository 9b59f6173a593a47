"""The control exchange: once per backward, every rank learns whether all ranks did the same.

One all-reduce (MAX, bytes) on a CPU process group of its own, or through memory that the ranks share::

    | hash of the order | its complement | steps | complement | used, 1 byte a parameter | late, 1 a group | padding |

All exchanges of a process group have one size, that of the largest model on it: where ranks run different models, their
exchanges meet and differ, instead of failing by their size, which ends the process.

Equal hashes mean that every rank issued the same collectives in the same order: collectives of equal size pair
silently otherwise. ``used`` is how ranks agree which parameters have a gradient (``None`` is the same everywhere).
``late`` marks ``fully_shard`` groups that received gradients after they had been reduced on some rank. ``steps`` are
those of optimizers since the last exchange; both bytes are zero where a rank has nothing to train.

``FSDP_COMPOSE_EXCHANGE=first`` stops exchanging after the first ``FIRST_BACKWARDS`` backwards of a root: from then on
the set of used parameters is taken to be what was seen until then, and a rank that sees another one raises.
"""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist

from .._torch import AllreduceOptions, is_destroyed, make_gloo_group
from .broken import carries, give_up
from .journal import Journal, difference_of, known_journal
from .label import BACKWARD, FORWARD, Work
from .messages import begin_maximum
from .rendezvous import own_store

EXCHANGE_ENV = "FSDP_COMPOSE_EXCHANGE"
FIRST_BACKWARDS = 10
_HASH_BYTES = 8
_ALL_ONES = 2 ** (8 * _HASH_BYTES) - 1
_HEAD_BYTES = 2 * _HASH_BYTES + 2

_control_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_destroyable: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # those of them that torch knew


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The gloo process group that carries the exchanges of ``group``; made once, by all ranks of ``group``."""
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
    """The memory that all exchanges over one control group go through, one after the other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._control = weakref.ref(group), control_group(group)
        self._journal: Journal | None = known_journal(group)
        self._options = AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._options.asyncOp = True
        self._work: Work | None = None
        self._end_of = ""
        self.nbytes = 0

    @staticmethod
    def of(group: dist.ProcessGroup) -> Carrier:
        """That of the control group of ``group``; see there."""
        carrier = _carriers.get(group)
        if carrier is None:
            carrier = _carriers[group] = Carrier(group)
        return carrier

    def make_room(self, nbytes: int) -> None:
        """Exchanges of ``nbytes`` will come: all ranks call this between the same two exchanges."""
        if nbytes > self.nbytes:
            self.abandon()
            self.nbytes = nbytes
            self._memory = memoryview(bytearray(nbytes))
            self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def send(self, view: memoryview, end_of: str) -> None:
        self.abandon()
        self._end_of = end_of
        self._memory[: len(view)] = view
        if len(view) < self.nbytes:
            self._memory[len(view) :] = bytes(self.nbytes - len(view))
        if self._journal is not None:
            tag = self._journal.enter(FORWARD if end_of == "forward" else BACKWARD, None, self.nbytes)
            group = self._group()
            self._work = None if group is None else begin_maximum(group, self._journal.count, tag, self._tensor)
        if self._work is None:
            self._work = self._control.allreduce([self._tensor], self._options)

    def receive(self, view: memoryview) -> None:
        assert self._work is not None
        self.abandon()
        view[:] = self._memory[: len(view)]

    def abandon(self) -> None:
        """Wait for an exchange in flight, if there is one, such as an exception has left."""
        work, self._work = self._work, None
        if work is None:
            return
        journal = self._journal
        if journal is not None:
            journal.wait(journal.count)
        try:
            work.wait()
        except RuntimeError as error:
            group = self._group()
            failure = f"the control exchange at the end of {self._end_of} failed: " + (
                ("" if group is None else difference_of(group))
                or f"another rank died, or did not run this {self._end_of}. {error}"
            )
            give_up(self._control, failure)
            raise RuntimeError(failure) from error
        if journal is not None:
            journal.go_on()


_carriers: weakref.WeakKeyDictionary[dist.ProcessGroup, Carrier] = weakref.WeakKeyDictionary()


def exchanges_stop() -> bool:
    """Whether the environment says that only the first backwards exchange."""
    return os.environ.get(EXCHANGE_ENV) == "first"


class ControlExchange:
    """The exchanges of one root. ``carrier`` is ``None`` where there is no other rank; ``may_stop``: the environment
    may say that only the first backwards exchange; ``end_of``: a backward or a forward, for messages."""

    def __init__(
        self,
        num_params: int,
        num_groups: int,
        carrier: Carrier | None,
        *,
        may_stop: bool = True,
        end_of: str = "backward",
    ) -> None:
        self._carrier = carrier
        self._buffer = bytearray(_HEAD_BYTES + num_params + num_groups)
        self._view = memoryview(self._buffer)
        if carrier is not None:
            carrier.make_room(len(self._buffer))
        self.used = self._view[_HEAD_BYTES : _HEAD_BYTES + num_params]
        self.late = self._view[_HEAD_BYTES + num_params :]
        self.steps_agree = True
        self._num_backwards = 0
        self._end_of = end_of
        self._stops = may_stop and exchanges_stop()
        self._learned = bytearray(num_params)

    @property
    def is_on(self) -> bool:
        """Whether this backward exchanges (with real peers or by itself)."""
        return not (self._stops and self._num_backwards >= FIRST_BACKWARDS)

    def start(self, order_hash: int, steps: int | None) -> None:
        """Send off this rank's ``used`` and ``late``, which the caller has filled in, the hash, and how many optimizer
        steps it has made (up to 255); ``None`` where that tells nothing."""
        digest = order_hash & _ALL_ONES
        self._view[:_HASH_BYTES] = digest.to_bytes(_HASH_BYTES, "little")
        self._view[_HASH_BYTES : 2 * _HASH_BYTES] = (_ALL_ONES - digest).to_bytes(_HASH_BYTES, "little")
        self._view[2 * _HASH_BYTES : _HEAD_BYTES] = bytes(2) if steps is None else bytes((steps, 255 - steps))
        if self._carrier is not None and self.is_on:
            self._carrier.send(self._view, self._end_of)

    def wait(self) -> bool:
        """Wait for the answer, after which ``used`` and ``late`` are every rank's together.

        Returns:
            Whether all ranks issued the same collectives in the same order. ``steps_agree`` tells whether they have
            made the same number of steps.

        Raises:
            RuntimeError: a rank did not take part; or exchanges have stopped and this rank uses other parameters.
        """
        if not self.is_on:
            self._check_learned()
            return True
        if self._carrier is not None:
            self._carrier.receive(self._view)
        if self._stops:
            self._learned[:] = bytes(a | b for a, b in zip(self._learned, self.used, strict=True))
        self._num_backwards += 1
        head = self._view
        self.steps_agree = head[2 * _HASH_BYTES] + head[2 * _HASH_BYTES + 1] <= 255
        # Of each byte and its complement the greatest of all ranks add up to 255, or to more where ranks differ.
        digest = int.from_bytes(head[:_HASH_BYTES], "little")
        complement = int.from_bytes(head[_HASH_BYTES : 2 * _HASH_BYTES], "little")
        return digest + complement == _ALL_ONES

    def abandon(self) -> None:
        """Wait for an exchange that an exception left in flight and forget it."""
        if self._carrier is not None:
            self._carrier.abandon()

    def _check_learned(self) -> None:
        if any(used and not learned for used, learned in zip(self.used, self._learned, strict=True)):
            raise RuntimeError(
                "a parameter received a gradient that had none in the first "
                f"{FIRST_BACKWARDS} backwards, and control exchanges are off ({EXCHANGE_ENV}=first), so the ranks "
                f"cannot agree on it; unset {EXCHANGE_ENV}"
            )
        self.used[:] = self._learned

"""What the ranks tell each other in rounds, in a root some groups of which each rank may run or skip.

A round is one small maximum over the ranks, of bytes::

    | hash of the order, and of the point | its complement | 0 0 | failed | live | demanded | pending | owed |

the last three one byte for each ``fully_shard`` group. Ranks that demand a group give no hash, but zeros; where no rank
demands anything, all have given one, and hash and complement tell whether all are at the same point. A control exchange
(see ``comm``), which has its steps where rounds have zeros, is told from a round by them. ``runtime.optional`` makes
the rounds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from ..comm import Carrier
from .progress import HookedUse, Progress

_HASH_BYTES = 8
_ALL_ONES = 2 ** (8 * _HASH_BYTES) - 1
_FAILED = 2 * _HASH_BYTES + 2
_LIVE = _FAILED + 1
_HEAD = _LIVE + 1


class RoundGroup(Protocol):
    """The part of an ``_FSDPState`` that is remembered here."""

    @property
    def progress(self) -> Progress: ...


class Rounds:
    """The rounds of one root.

    Attributes:
        hosts: by the index of each optional group, that of its host: the nearest group around it that is not optional.
        running: indexes of the groups that are not optional and whose forwards are running, the innermost one last.
        served: groups that were gathered on this rank only because another rank has demanded them.
        owes: groups whose gradients wait, on this rank, for their reduction.
        live: forwards of which a graph is alive in which this rank has run an optional group.
        is_on: rounds are made: always, but in a backward in which no rank can come to an optional group.
        last_number: of the latest forward that the backward has reached.
        has_failed: a round has raised, on all ranks, or this rank has told the others that it failed.
        count: rounds made.
        demanded, pending, owed: after a round, of all ranks together.
    """

    __slots__ = (
        "_carrier", "_view", "count", "demanded", "has_failed", "hosts", "is_on", "last_number", "live", "owed", "owes",
        "pending", "running", "served",
    )  # fmt: skip

    def __init__(self, hosts: dict[int, int], num_groups: int, carrier: Carrier) -> None:
        self.hosts = hosts
        self._carrier = carrier
        self._view = memoryview(bytearray(_HEAD + 3 * num_groups))
        carrier.make_room(len(self._view))
        self.demanded, self.pending, self.owed = (
            self._view[_HEAD + part * num_groups : _HEAD + (part + 1) * num_groups] for part in range(3)
        )
        self.count = 0
        self.live: weakref.WeakSet[HookedUse] = weakref.WeakSet()
        self.served: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget the iteration that was going on."""
        self.running: list[int] = []
        self.live.clear()
        self.has_failed = False
        self.served.clear()
        self.rest()

    def rest(self) -> None:
        """No backward is running."""
        self.owes: set[int] = set()
        self.is_on, self.last_number = True, 0

    def reset_backward(self) -> None:
        """Forget the backward that was going on, while a forward may."""
        self.has_failed = False
        self.rest()

    def fail(self) -> None:
        self.has_failed = True

    def begin_backward(self, is_on: bool) -> None:
        self.is_on = is_on

    def reach(self, number: int) -> None:
        """The backward has come to the forward of this number."""
        self.last_number = max(self.last_number, number)

    def keep(self, index: int) -> None:
        """This rank itself needs a group that another one may have demanded before."""
        if index in self.served:
            self.served.remove(index)

    def make(
        self, digest: int | None, is_live: bool, marks: tuple[Sequence[bool], ...], failed: int = 0
    ) -> tuple[int, bool]:
        """Make one round; then ``demanded``, ``pending`` and ``owed`` are those of all ranks together.

        Args:
            digest: of the order and of the point at which this rank is; ``None``: it is at none, but demands groups.
            is_live: this rank can come to an optional group in the backward that begins.
            marks: whether this rank demands each group, has it pending, owes it.
            failed: one more than the number of this rank, if it has failed.

        Returns:
            The greatest ``failed``, and whether those that gave a digest gave the same.
        """
        known = b"" if digest is None else (digest & _ALL_ONES).to_bytes(_HASH_BYTES, "little")
        head = known + bytes(255 - byte for byte in known)
        self._view[:_FAILED] = head.ljust(_FAILED, b"\0")
        self._view[_FAILED], self._view[_LIVE] = min(failed, 255), is_live
        for place, values in zip((self.demanded, self.pending, self.owed), marks, strict=True):
            place[:] = bytes(values)
        self.count += 1
        maximum_over_ranks(self._carrier, self._view)
        view = self._view
        pairs = zip(view[:_HASH_BYTES], view[_HASH_BYTES : 2 * _HASH_BYTES], strict=True)
        is_same = not any(view[2 * _HASH_BYTES : _FAILED]) and all(a + b in (0, 255) for a, b in pairs)
        return view[_FAILED], is_same

    @property
    def is_live(self) -> bool:
        """Whether some rank, in the last round, could come to an optional group."""
        return bool(self._view[_LIVE])


def maximum_over_ranks(carrier: Carrier, view: memoryview) -> None:
    """Replace bytes by the greatest that a rank has. Ranks: all of the carrier's process group."""
    carrier.send(view, "a round about optional groups")
    carrier.receive(view)

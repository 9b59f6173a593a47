"""What the ranks tell each other in rounds, in a root some groups of which each rank may run or skip.

A round is one small maximum over the ranks, like a control exchange (see ``comm``): of a hash of the order and of the
point at which a rank is, its complement, and marks::

    | failed | complement | live | padding | demanded | missing | pending | owed |

the last four one byte for each ``fully_shard`` group. Ranks that demand a group give no hash; where no rank demands
anything, all have given one, and hash and complement tell whether all are at the same point. ``runtime.optional`` makes
the rounds.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from ..comm import Carrier
from .progress import HookedUse

_HEAD = struct.Struct("<IIB3x")
_NUM_MARKS = 4  # of each group
_MOST = (1 << 32) - 1
SEVERAL_FAILED = -1  # in the place of the number of a rank


class Marks(NamedTuple):
    """What one rank, or all ranks together, say of each group, by index.

    Attributes:
        demanded: a rank needs it, and others may not.
        missing: of what all ranks need at a point: a rank does not have it.
        pending: its backward is under way, or to come in the backward that is running.
        owed: its gradients wait for their reduction.
    """

    demanded: Sequence[int]
    missing: Sequence[int]
    pending: Sequence[int]
    owed: Sequence[int]


class Rounds:
    """The rounds of one root.

    Attributes:
        hosts: by the index of each optional group, that of its host: the nearest group around it that is not optional.
        running: indexes of the groups that are not optional and whose forwards are running, the innermost one last.
        served: groups that were gathered on this rank only because another rank has demanded them.
        old: groups that have stayed gathered since before this forward, to be gathered again before they are used.
        owes: groups whose gradients wait, on this rank, for their reduction.
        live: forwards of which a graph is alive in which this rank has run an optional group.
        is_on: rounds are made: always, but in a backward in which no rank can come to an optional group.
        last_number: of the latest forward that the backward has reached.
        has_failed: a round has raised, on all ranks, or this rank has told the others that it failed.
        count: rounds made.
        marks: after a round, of all ranks together.
    """

    __slots__ = (
        "_carrier", "_view", "count", "has_failed", "hosts", "is_on", "last_number", "live", "marks", "old", "owes",
        "running", "served",
    )  # fmt: skip

    def __init__(self, hosts: dict[int, int], num_groups: int, carrier: Carrier) -> None:
        self.hosts = hosts
        self._carrier = carrier
        self._view = memoryview(bytearray(_HEAD.size + _NUM_MARKS * num_groups))
        carrier.make_room(len(self._view))
        starts = range(_HEAD.size, len(self._view), num_groups)
        self.marks = Marks(*(self._view[start : start + num_groups] for start in starts))
        self.count = 0
        self.live: weakref.WeakSet[HookedUse] = weakref.WeakSet()
        self.served: list[int] = []
        self.old: set[int] = set()
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

    def make(self, digest: int | None, is_live: bool, marks: Marks, failed: int | None = None) -> bool:
        """Make one round; then ``marks`` are those of all ranks together.

        Args:
            digest: of the order and of the point at which this rank is; ``None``: it is at none, but demands groups.
            is_live: this rank can come to an optional group in the backward that begins.
            marks: those of this rank.
            failed: its number, if it has failed.

        Returns:
            Whether those that gave a digest gave the same.
        """
        number = (0, 0) if failed is None else (failed, _MOST - failed)
        self._view[: _HEAD.size] = _HEAD.pack(*number, is_live)
        self._view[_HEAD.size :] = b"".join([bytes(values) for values in marks])
        self.count += 1
        return self._carrier.make_round(digest, self._view)

    @property
    def is_live(self) -> bool:
        """Whether some rank, in the last round, could come to an optional group."""
        return bool(_HEAD.unpack_from(self._view)[2])

    @property
    def failed(self) -> int | None:
        """The rank that has failed, or ``SEVERAL_FAILED``, by the last round; ``None`` if none has."""
        number, complement, _ = _HEAD.unpack_from(self._view)
        if not complement:
            return None
        return int(number) if number + complement == _MOST else SEVERAL_FAILED

"""What lasts for one forward, one backward or one iteration, of a root and of each of its groups. Plain data.

The runtime drives these objects, and they end with what they describe. ``ForwardState``, ``BackwardState`` and
``PersistentState`` say how far a group has come; ``Rounds`` is what the ranks tell each other in a root some of whose
groups each rank may run or skip."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from ..comm import Carrier
from ..flat import FlatParamHandle, Region

# ---- How far one group has come: in the iteration and in the backward that are running, and what earlier ones have
# left.
#
# Each object lives as long as what it tells of: to forget an iteration is to make a new one.


class GroupUse(Protocol):
    """One forward of one group, in any mode; in the default mode, one under grad mode.

    Attributes:
        outer: the use around this one that is in the default mode.
        has_check: ``check`` does something.
    """

    @property
    def outer(self) -> HookedUse | None: ...

    @property
    def has_check(self) -> bool: ...

    def abandon(self) -> None:
        """Forward has ended in an exception; if it has not, ``hook_outputs`` comes."""

    def check(self) -> None:
        """Raise if forward has changed a parameter, in a way that this mode can tell."""

    def find_writes(self) -> dict[FlatParamHandle, list[int]]:
        """The parameters that forward has written to in a way that raises no version, by index."""

    def hook_outputs(self, module: torch.nn.Module, output: Any, is_recomputed: bool) -> bool:
        """Let backward find this use; whether it may come to groups that wait for one."""


class HookedUse(GroupUse, Protocol):
    """One in the default mode, which hooks tell of its backward.

    Attributes:
        active_backward: the backward that has reached it, and has not finished it.
    """

    @property
    def active_backward(self) -> object: ...

    def reach(self, grad: torch.Tensor) -> None:
        """Another backward has come to a use inside this one, by a gradient; perhaps past its outputs."""

    def hook_output(self, tensor: torch.Tensor) -> bool:
        """Hook a tensor for pre-backward; ``False`` if backward could enter the group past such a hook."""


class Shown(Protocol):
    """What shows parameters on modules."""

    def show_sharded(self) -> None: ...


class Captured(Protocol):
    """What graphs know of a group, and bring to it; see ``group/graph``."""

    def follow(self) -> None: ...

    def knows(self, place: torch.Tensor) -> bool: ...

    def bring(self) -> tuple[bool, bool]: ...

    def drop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TreePosition:
    """Where a group stands below its root.

    Attributes:
        index: its position in the root's order.
        is_outermost: its module begins iterations: a root.
        reshards_after_forward: what the root has made of the option.
        keeps_parts: a part stays of what is resharded then.
        stays_after_backward: it is not resharded after a backward.
    """

    index: int
    is_outermost: bool
    reshards_after_forward: bool
    reshards_partially: bool = False
    stays_after_backward: bool = False


NOWHERE = TreePosition(-1, False, True)  # before the first forward


class ForwardState:
    """The iteration that is running.

    Attributes:
        running_forwards: for each forward of the group's modules that was entered and not left, the exception that was
            being handled when it was entered, its use, and whether it is a recomputation.
        awaiting_backward: number of the forward of each use whose backward has not come yet, in order.
        pending_modules: of several modules, how many have yet to run before the group is resharded.
        uses_left: how many uses, under grad mode and without, until one ends with a look for unseen writes;
            ``look_gaps`` how many there will be after it.
    """

    __slots__ = ("awaiting_backward", "look_gaps", "pending_modules", "running_forwards", "uses_left")

    def __init__(self, awaiting_backward: Sequence[int] = ()) -> None:
        self.running_forwards: list[tuple[BaseException | None, GroupUse | None, bool]] = []
        self.awaiting_backward = [*awaiting_backward]
        self.pending_modules: set[int] = set()
        self.uses_left, self.look_gaps = [1, 1], [1, 1]

    def pass_by(self, last: int) -> None:
        """A backward has ended that has come to the forward of number ``last``: a use that it has passed by will not
        hold up a later reduction."""
        self.awaiting_backward = [number for number in self.awaiting_backward if number > last]


class BackwardState:
    """The backward that is running, as far as the group is concerned.

    Attributes:
        was_reached: a pre-backward came.
        active_uses: uses between their pre-backward and their post-backward: the group is unsharded for them.
        is_iterated: this backward has come to a use a second time: it may come any number of times.
        last_use: number of the latest forward that it has reached.
        is_reduced: the reduction came.
        num_early: how many flat parameters were reduced before that, by themselves; the first ones.
    """

    __slots__ = ("active_uses", "is_iterated", "is_reduced", "last_use", "num_early", "was_reached")

    def __init__(self) -> None:
        self.was_reached = self.is_iterated = self.is_reduced = False
        self.active_uses = self.last_use = self.num_early = 0

    def reach(self, number: int) -> bool:
        """A use of the forward of this number is reached; whether no other one was active."""
        self.was_reached = True
        self.active_uses += 1
        if number > self.last_use:
            self.last_use = number
        return self.active_uses == 1

    def leave(self) -> bool:
        """The backward of a use is done; whether no other one is active."""
        self.active_uses -= 1
        return self.active_uses <= 0

    def leave_all(self) -> None:
        self.active_uses = 0

    def iterate(self) -> None:
        self.is_iterated = True

    def reduce(self) -> None:
        self.is_reduced = True

    def reduce_early(self) -> None:
        self.num_early += 1


class PersistentState:
    """What earlier iterations have left to know, until something changes it.

    Attributes:
        was_functional: the last forward was one in functional mode.
        num_toggles: how often ``requires_grad`` of any sharded parameter had been set at the last forward.
        has_unsynced: a backward without gradient sync has run since the last reduction.
        is_unhooked: a forward returned something that cannot be hooked: the group stays unsharded, and is reduced at
            the end of any backward; ``unhooked_versions``: of the shards, at that forward.
        has_leaf_hooks: of the unsharded parameters, which tell that a backward runs.
        has_bucket_hooks: of theirs, which tell that buckets are complete.
        regions: where the parameters' memory was, until the first forward.
        captured: what graphs of ``torch.compile`` know of the group; ``None`` if none was captured.
    """

    __slots__ = (
        "captured", "has_bucket_hooks", "has_leaf_hooks", "has_unsynced", "is_unhooked", "num_toggles", "regions",
        "unhooked_versions", "was_functional",
    )  # fmt: skip

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self.was_functional = self.has_unsynced = False
        self.num_toggles = -1
        self.regions = [*regions]
        self.unhooked_versions: list[int] | None = None
        self.captured: Captured | None = None
        self.have_new_parameters()

    def have_new_parameters(self) -> None:
        """The unsharded parameters are new ones, which have no hooks yet."""
        self.is_unhooked = self.has_leaf_hooks = self.has_bucket_hooks = False

    def begin_use(self, is_functional: bool) -> None:
        self.was_functional = is_functional

    def follow_toggles(self, count: int) -> None:
        self.num_toggles = count

    def reduce(self, is_synced: bool) -> None:
        self.has_unsynced = not is_synced

    def stay_unsharded(self) -> None:
        self.is_unhooked = True

    def note_unhooked(self, versions: list[int]) -> None:
        self.unhooked_versions = versions

    def hook_leaves(self) -> None:
        self.has_leaf_hooks = True

    def hook_buckets(self) -> None:
        self.has_bucket_hooks = True

    def capture(self, captured: Captured) -> None:
        self.captured = captured

    def forget_regions(self) -> None:
        self.regions = []


# ---- Of a root: its forward, its backward


class CapturedVersions(Protocol):
    """Those of groups that graphs of ``torch.compile`` may have run in a forward, when it began."""

    def check_forward(self) -> None:
        """Raise if the forward has changed parameters of theirs, after graphs had read them or before."""

    def check_backward(self) -> None:
        """Raise if they were changed before the forward's backward."""


class ForwardRecord:
    """The groups that one top-level forward ran, by index.

    Attributes:
        number: of the forward, counting from 1.
        states: those of the root, by the index that the other attributes hold: a root may be another one in backward.
        begun: in the order in which their forwards began: drives forward prefetch in the next forward.
        hooked: in the order in which their forwards ended, those that backward will reach: drives backward prefetch.
        outermost: the group of the module that was called.
        captured: the versions of groups that graphs may have run; ``None`` if there are none.
    """

    __slots__ = ("begun", "captured", "hooked", "number", "outermost", "states")

    def __init__(self, number: int, states: object, outermost: int = 0) -> None:
        self.number = number
        self.outermost = outermost
        self.states = states
        self.begun: list[int] = []
        self.hooked: list[int] = []
        self.captured: CapturedVersions | None = None

    def note_captured(self, versions: CapturedVersions) -> None:
        self.captured = versions


class Forward:
    """A top-level forward; after it, the last one.

    Attributes:
        record: what it has run; ``previous``: what the last one of the same module has, which drives prefetch.
        depth: forwards entered and not left.
        innermost: of the uses whose forwards are running, in the default mode under grad mode.
        latest: of those that have ended, the last one of each group, by its index; until the outermost one has ended.
        caller: the frame that has called the outermost module, while it runs.
        is_given: it began with other values than its own (see ``functional_call``) in some slots of parameters.
        task: number of the backward inside which it began, as autograd counts them; -1 outside of backward.
        num_backwards: backwards of this process when it began.
        is_region: it is a compiled region, of which graphs may have the outermost group in them too.
        has_failed: it ended in an exception that no enclosing forward handled.
        written: by flat parameter, what it has written to unseen on this rank, by index; ``None`` if it has not looked.
    """

    __slots__ = (
        "caller", "depth", "has_failed", "innermost", "is_given", "is_region", "latest", "num_backwards", "previous",
        "record", "task", "written",
    )  # fmt: skip

    def __init__(
        self,
        record: ForwardRecord,
        previous: ForwardRecord,
        caller: FrameType | None = None,
        is_given: bool = False,
        task: int = -1,
        num_backwards: int = 0,
    ) -> None:
        self.record, self.previous = record, previous
        self.depth = 0
        self.innermost: HookedUse | None = None
        self.latest: dict[int, HookedUse] = {}
        self.caller, self.is_given = caller, is_given
        self.task, self.num_backwards = task, num_backwards
        self.has_failed = self.is_region = False
        self.written: dict[FlatParamHandle, set[int]] | None = None

    def enter(self, use: HookedUse | None) -> None:
        """A forward of a group begins; ``use``: its own, if it is in the default mode under grad mode."""
        self.depth += 1
        if use is not None:
            self.innermost = use

    def leave(self, use: GroupUse | None) -> None:
        """A forward of a group ends, however it does."""
        self.depth -= 1
        if use is not None:
            self.innermost = use.outer

    def begin_region(self) -> None:
        self.is_region = True

    def begin_use(self, use: HookedUse | None) -> None:
        """``use`` is the innermost one from now on."""
        self.innermost = use

    def end(self) -> None:
        """The outermost one has ended, without an error."""
        self.has_failed, self.caller = False, None
        self.latest.clear()

    def fail(self) -> None:
        """It has ended, or must end, in an exception."""
        self.has_failed = True

    def abandon(self) -> None:
        """The outermost one has ended in an exception."""
        self.has_failed, self.caller = True, None
        self.latest.clear()

    def note_written(self, handle: FlatParamHandle | None = None, indexes: Sequence[int] = ()) -> None:
        """It has looked for unseen writes, and has found some to these parameters of ``handle``."""
        if self.written is None:
            self.written = {}
        if handle is not None and indexes:
            self.written.setdefault(handle, set()).update(indexes)

    def take_written(self) -> dict[FlatParamHandle, set[int]]:
        written, self.written = self.written, None
        return written or {}


class Backward:
    """A backward, from its first hook until its gradients are published.

    Attributes:
        has_added: it has added to a gradient that was there before, or has begun to show its own.
        has_outside_grads: it has brought gradients of uses outside a group's forward (``differentiable_gather``).
        after_publication: what to call when its gradients have been published.
        shown: groups that have been shown since it began, because they had stayed unsharded; by their swap.
        has_only_buckets: the process group carries nothing meanwhile but the buckets of one replicated group; ``None``
            if that is not known yet.
    """

    __slots__ = ("after_publication", "has_added", "has_only_buckets", "has_outside_grads", "shown")

    def __init__(self, has_added: bool = False) -> None:
        self.has_added = has_added
        self.has_outside_grads = False
        self.after_publication: list[Callable[[], None]] = []
        self.shown: dict[Shown, None] = {}
        self.has_only_buckets: bool | None = None

    def judge(self, has_only_buckets: bool) -> None:
        self.has_only_buckets = has_only_buckets

    def add(self) -> None:
        self.has_added = True

    def note_outside_grads(self) -> None:
        self.has_outside_grads = True


# ---- What the ranks tell each other in rounds, in a root some groups of which each rank may run or skip.
#
# A round is one small maximum over the ranks, like a control exchange (see ``comm``): of a hash of the order and of the
# point at which a rank is, its complement, and marks::
#
#     | failed | complement | live | padding | demanded | missing | pending | owed |
#
# the last four one byte for each ``fully_shard`` group. Ranks that demand a group give no hash; where no rank demands
# anything, all have given one, and hash and complement tell whether all are at the same point. ``runtime.optional``
# makes the rounds.


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
        enclosing_groups: by the index of each optional group, that of its host: the nearest group around it that is not
            optional.
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
        "_carrier",
        "_view",
        "count",
        "enclosing_groups",
        "has_failed",
        "is_on",
        "last_number",
        "live",
        "marks",
        "old",
        "owes",
        "running",
        "served",
    )  # fmt: skip

    def __init__(self, enclosing_groups: dict[int, int], num_groups: int, carrier: Carrier) -> None:
        self.enclosing_groups = enclosing_groups
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

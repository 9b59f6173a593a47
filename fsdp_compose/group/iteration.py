"""State that lasts for one forward, one backward or one iteration, for a root and for each of its groups. Plain data.

The runtime drives these objects, and each lives as long as what it describes. ``ForwardState``, ``BackwardState`` and
``PersistentState`` record the progress of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch

from .._torch import backwards
from ..flat import FlatParamHandle, Region

# ---- The progress of one group: in the running iteration, in the running backward, and carried over from earlier ones
#
# Each object lives as long as what it describes. To forget an iteration, make a new object.


class GroupUse(Protocol):
    """One forward of one group, in any mode. In the default mode only forwards under grad mode have one.

    Attributes:
        outer: the use around this one that is in the default mode.
        has_check: whether ``check`` does anything.
    """

    @property
    def outer(self) -> HookedUse | None: ...

    @property
    def has_check(self) -> bool: ...

    def abandon(self) -> None:
        """Called instead of ``hook_outputs`` if forward ended in an exception."""

    def check(self) -> None:
        """Raise if forward has changed a parameter in a way that this mode can detect."""

    def find_writes(self) -> dict[FlatParamHandle, list[int]]:
        """The indexes of parameters that forward has written to without raising a version."""

    def hook_outputs(self, module: torch.nn.Module, output: Any, is_recomputed: bool) -> bool:
        """Hook the outputs, so that backward finds this use. Returns whether a backward may come to waiting groups."""


class HookedUse(GroupUse, Protocol):
    """A use in the default mode, whose backward is driven by hooks.

    Attributes:
        active_backward: the backward that has reached the use and has not finished it.
    """

    @property
    def active_backward(self) -> object: ...

    def reach(self, grad: torch.Tensor) -> None:
        """A backward has reached a use inside this one by a gradient, maybe without passing the outputs of this one."""

    def hook_output(self, tensor: torch.Tensor) -> bool:
        """Hook a tensor for pre-backward. Returns ``False`` if backward could enter the group without the hook."""


class Shown(Protocol):
    """The part of a ``ParameterSwap`` that a backward uses."""

    def show_sharded(self) -> None: ...


class Captured(Protocol):
    """The data and gradients of a group that graphs use; see ``CapturedGroup``."""

    def follow(self) -> None: ...

    def knows(self, place: torch.Tensor) -> bool: ...

    def bring(self) -> tuple[bool, bool]: ...

    def drop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TreePosition:
    """Where a group stands below its root.

    Attributes:
        index: its position in the root's order.
        is_outermost: its module is a root, which begins iterations.
        reshards_after_forward: the option's value below this root (the default depends on ``is_outermost``).
        reshards_partially: a part of the parameters stays gathered when the group is resharded.
        stays_after_backward: the group is not resharded after a backward.
    """

    index: int
    is_outermost: bool
    reshards_after_forward: bool
    reshards_partially: bool = False
    stays_after_backward: bool = False


NOWHERE = TreePosition(-1, False, True)  # before the first forward


class ForwardState:
    """The state of a group in the running iteration.

    Attributes:
        running_forwards: for each forward of the group's modules that was entered and not left, the exception that was
            being handled when it was entered, its use, and whether it is a recomputation.
        awaiting_backward: number of the forward of each use whose backward has not come yet, in order.
        pending_modules: in a group of several modules, those that have yet to run before the group is resharded.
        uses_left: how many uses, under grad mode and without it, until one ends with a check for untracked writes.
        look_gaps: how many uses lie between that check and the next one.
    """

    __slots__ = ("awaiting_backward", "look_gaps", "pending_modules", "running_forwards", "uses_left")

    def __init__(self, awaiting_backward: Sequence[int] = ()) -> None:
        self.running_forwards: list[tuple[BaseException | None, GroupUse | None, bool]] = []
        self.awaiting_backward = [*awaiting_backward]
        self.pending_modules: set[int] = set()
        self.uses_left, self.look_gaps = [1, 1], [1, 1]

    def pass_by(self, last: int) -> None:
        """Forget uses up to forward number ``last``, after a backward that got that far: a use that it skipped must not
        hold up a later reduction."""
        self.awaiting_backward = [number for number in self.awaiting_backward if number > last]


class BackwardState:
    """The state of a group in the running backward.

    Attributes:
        was_reached: whether a pre-backward has run.
        active_uses: number of uses between their pre-backward and their post-backward; the group is unsharded for them.
        is_iterated: this backward has reached a use a second time, so it may reach it any number of times.
        last_use: number of the latest forward that it has reached.
        is_reduced: whether the group was reduced.
        num_early: how many flat parameters, counted from the first, were reduced before that, each by itself.
    """

    __slots__ = ("active_uses", "is_iterated", "is_reduced", "last_use", "num_early", "was_reached")

    def __init__(self) -> None:
        self.was_reached = self.is_iterated = self.is_reduced = False
        self.active_uses = self.last_use = self.num_early = 0

    def reach(self, number: int) -> bool:
        """Note that a use in the forward of this number was reached. Returns whether no other use was active."""
        self.was_reached = True
        self.active_uses += 1
        if number > self.last_use:
            self.last_use = number
        return self.active_uses == 1

    def leave(self) -> bool:
        """Note that the backward of a use is done. Returns whether no other use is active."""
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
    """State carried over from earlier iterations.

    Attributes:
        was_functional: the last forward ran in functional mode.
        num_toggles: how often ``requires_grad`` of any sharded parameter had been set at the last forward.
        has_unsynced: a backward without gradient sync has run since the last reduction.
        is_unhooked: a forward returned something that cannot be hooked, so the group stays unsharded and is reduced at
            the end of every backward.
        unhooked_versions: versions of the shards at that forward.
        has_leaf_hooks: the unsharded parameters have hooks that notice a backward.
        has_bucket_hooks: the unsharded parameters have hooks that notice complete buckets.
        regions: where the parameters' memory was; kept until the first forward.
        captured: the group as graphs of ``torch.compile`` see it; ``None`` if no graph was captured.
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
        """Note that the unsharded parameters are new ones, which have no hooks yet."""
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


# ---- The forward and the backward of a root


class CapturedVersions(Protocol):
    """Parameter versions, at the start of a forward, of groups that graphs of ``torch.compile`` may run in it."""

    def check_forward(self) -> None:
        """Raise if the forward has changed parameters of these groups, before or after graphs read them."""

    def check_backward(self) -> None:
        """Raise if parameters of these groups were changed between the forward and its backward."""


class ForwardRecord:
    """The groups that one top-level forward ran, by index.

    Attributes:
        number: number of the forward, counting from 1.
        states: the root's states at that time, which the indexes refer to: by backward, the root may be another one.
        begun: groups in the order in which their forwards began; drives forward prefetch in the next forward.
        hooked: groups that backward will reach, in the order in which their forwards ended; drives backward prefetch.
        outermost: the group of the module that was called.
        captured: versions of groups that graphs may have run; ``None`` if there are none.
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
    """The current top-level forward, or the most recent one if none is running.

    Attributes:
        record: the groups that it has run.
        previous: the groups that the last forward of the same module ran; drives prefetch.
        depth: number of forwards entered and not left.
        innermost: the innermost running use in the default mode under grad mode.
        latest: the last ended use of each group, by index; cleared when the outermost forward ends.
        caller: the frame that called the outermost module, while it runs.
        is_given: it began with values of ``functional_call`` in some parameter slots.
        task: autograd's number of the backward inside which it began; -1 outside backward.
        num_backwards: how many backwards this process had run when it began.
        is_region: it is a compiled region, whose graphs may contain the outermost group too.
        has_failed: it ended in an exception that no enclosing forward handled.
        written: for each flat parameter, the indexes of parameters that this rank has written to without raising a
            version; ``None`` if it has not checked.
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
        """Note that a forward of a group begins; ``use`` is set in the default mode under grad mode."""
        self.depth += 1
        if use is not None:
            self.innermost = use

    def leave(self, use: GroupUse | None) -> None:
        """Note that a forward of a group ends, normally or by an exception."""
        self.depth -= 1
        if use is not None:
            self.innermost = use.outer

    def begin_region(self) -> None:
        self.is_region = True

    def begin_use(self, use: HookedUse | None) -> None:
        """Make ``use`` the innermost one."""
        self.innermost = use

    def end(self) -> None:
        """Note that the outermost forward has ended without an error."""
        self.has_failed, self.caller = False, None
        self.latest.clear()

    def fail(self) -> None:
        """Note that this forward has ended, or must end, in an exception."""
        self.has_failed = True

    def abandon(self) -> None:
        """Note that the outermost forward has ended in an exception."""
        self.has_failed, self.caller = True, None
        self.latest.clear()

    def note_written(self, handle: FlatParamHandle | None = None, indexes: Sequence[int] = ()) -> None:
        """Note that this forward has checked for untracked writes, and found some to these parameters of ``handle``."""
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
        number: which of this process's outermost backwards it runs in.
        has_added: it has added to a gradient that existed before, or has begun to publish its own.
        has_outside_grads: it has produced gradients for uses outside a group's forward (``differentiable_gather``).
        after_publication: functions to call when its gradients have been published.
        shown: swaps of groups that show their parameters since it began, because they had stayed unsharded.
        has_only_buckets: the process group carries nothing but buckets of one replicated group during this backward
            (see Note [Only buckets]); ``None`` if not known yet.
    """

    __slots__ = ("after_publication", "has_added", "has_only_buckets", "has_outside_grads", "number", "shown")

    def __init__(self, has_added: bool = False) -> None:
        self.number = backwards.num_outermost
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

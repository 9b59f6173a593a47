"""How far one group has come: in the iteration and in the backward that are running, and what earlier ones have left.

Each object lives as long as what it tells of: to forget an iteration is to make a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..flat import FlatParamHandle, Region


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
    """What graphs know of a group, and bring to it; see ``captured``."""

    def follow(self) -> None: ...

    def knows(self, place: torch.Tensor) -> bool: ...

    def bring(self) -> tuple[bool, bool]: ...

    def drop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
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
    keeps_parts: bool = False
    stays_after_backward: bool = False


NOWHERE = Place(-1, False, True)  # before the first forward


class Progress:
    """The iteration that is running.

    Attributes:
        entries: for each forward of the group's modules that was entered and not left, the exception that was being
            handled when it was entered, its use, and whether it is a recomputation.
        outstanding: number of the forward of each use whose backward has not come yet, in order.
        pending_modules: of several modules, how many have yet to run before the group is resharded.
        uses_left: how many uses, under grad mode and without, until one ends with a look for unseen writes;
            ``look_gaps`` how many there will be after it.
    """

    __slots__ = ("entries", "look_gaps", "outstanding", "pending_modules", "uses_left")

    def __init__(self, outstanding: Sequence[int] = ()) -> None:
        self.entries: list[tuple[BaseException | None, GroupUse | None, bool]] = []
        self.outstanding = [*outstanding]
        self.pending_modules: set[int] = set()
        self.uses_left, self.look_gaps = [1, 1], [1, 1]

    def pass_by(self, last: int) -> None:
        """A backward has ended that has come to the forward of number ``last``: a use that it has passed by will not
        hold up a later reduction."""
        self.outstanding = [number for number in self.outstanding if number > last]


class GroupBackward:
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


class GroupHistory:
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

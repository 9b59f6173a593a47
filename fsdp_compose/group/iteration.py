"""A top-level forward and a backward of a root, as objects that end with them: plain data, driven by ``runtime``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Protocol

from ..flat import FlatParamHandle
from .progress import GroupUse, HookedUse, Shown


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
        is_given: it began with other values than its own (see ``given``) in some slots of parameters.
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
        has_outside_grads: it has brought gradients of uses outside a group's forward (``outside_use``).
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

"""State that lasts for one forward, one backward or one iteration, for a root and for each of its groups. Plain data.

The runtime drives these objects, and each lives as long as what it describes. ``ForwardState``, ``BackwardState`` and
``PersistentState`` record the progress of a group."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from ..._torch import backwards

if TYPE_CHECKING:
    from ...plugins.graphs import CapturedShard
    from ..flat import FlatParamHandle, Region
    from .collective_order import Group
    from .parameter_swap import ParameterSwap

# ---- The progress of one group: in the running iteration, in the running backward, and carried over from earlier ones
#
# Each object lives as long as what it describes. To forget an iteration, make a new object.


class GroupUse(Protocol):
    """One forward of one group, in any mode. In the default mode only forwards under grad mode have one.

    Attributes:
        outer: the use around this one that is in the default mode.
        has_check: whether ``check`` does anything.
    """

    has_check: bool

    @property
    def outer(self) -> HookedUse | None: ...

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
        state: the group.
        device_type: the device of the group.
        active_backward: the backward that has reached the use and has not finished it.
        has_alias: some input requires grad.
        containers: the lists and dicts among the inputs, each with the ids of the tensors in it before forward.
    """

    containers: list[tuple[Any, set[int]]] | None
    has_alias: bool

    @property
    def state(self) -> Group: ...

    @property
    def device_type(self) -> str: ...

    @property
    def active_backward(self) -> object: ...

    def alias(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def watch_container(self, container: list[Any] | dict[Any, Any]) -> None: ...

    def tensors_put_into_inputs(self) -> list[torch.Tensor]: ...

    def reach(self, grad: torch.Tensor) -> None:
        """A backward has reached a use inside this one by a gradient, maybe without passing the outputs of this one."""

    def hook_output(self, tensor: torch.Tensor) -> bool:
        """Hook a tensor for pre-backward. Returns ``False`` if backward could enter the group without the hook."""


class Captured(Protocol):
    """A group as graphs of ``torch.compile`` see it; see ``graph.CapturedGroup``."""

    shards: list[CapturedShard]

    def follow(self) -> None: ...

    def knows(self, place: torch.Tensor) -> bool: ...

    def bring(self) -> tuple[bool, bool]: ...

    def drop(self) -> None: ...


class CapturedVersions(Protocol):
    """Parameter versions of groups that graphs may run; see ``graph.VersionsBefore``."""

    def check_forward(self) -> None: ...

    def check_backward(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TreePosition:
    """Where a group stands below its root.

    Attributes:
        index: its position in the root's order.
        is_outermost: its module is a root, which begins iterations.
        reshards_after_forward: the option's value below this root (the default depends on ``is_outermost``).
        reshards_partially: a post-forward shard stays when the group is resharded.
        stays_after_backward: the group is not resharded after a backward.
    """

    index: int
    is_outermost: bool
    reshards_after_forward: bool
    reshards_partially: bool = False
    stays_after_backward: bool = False


NOWHERE = TreePosition(-1, False, True)  # before the first forward


@dataclass(slots=True, eq=False)
class ForwardState:
    """The state of a group in the running iteration."""

    # The number of the forward of each use whose backward has not come yet, in order.
    awaiting_backward: list[int] = field(default_factory=list)
    # For each forward of the group's modules that was entered and not left: the exception that was being handled when
    # it was entered, its use, and whether it is a recomputation.
    running_forwards: list[tuple[BaseException | None, GroupUse | None, bool]] = field(default_factory=list)
    # In a group of several modules, those that have yet to run before the group is resharded.
    pending_modules: set[int] = field(default_factory=set)
    # How many uses, under grad mode and without it, until one ends with a check for untracked writes; and how many lie
    # between that check and the next one.
    uses_left: list[int] = field(default_factory=lambda: [1, 1])
    look_gaps: list[int] = field(default_factory=lambda: [1, 1])


@dataclass(slots=True, eq=False)
class BackwardState:
    """The state of a group in the running backward."""

    was_reached: bool = False  # a pre-backward has run
    active_uses: int = 0  # uses between their pre-backward and their post-backward; the group is unsharded for them
    is_iterated: bool = False  # this backward has reached a use a second time, so it may reach it any number of times
    last_use: int = 0  # number of the latest forward that it has reached
    is_reduced: bool = False
    num_early: int = 0  # how many flat parameters, counted from the first, were reduced before that, each by itself


@dataclass(slots=True, eq=False)
class PersistentState:
    """State carried over from earlier iterations."""

    regions: Sequence[Region] = ()  # where the parameters' memory was; kept until the first forward
    was_functional: bool = False  # the last forward ran in functional mode
    num_toggles: int = -1  # how often ``requires_grad`` of any sharded parameter had been set at the last forward
    has_unsynced: bool = False  # a backward without gradient sync has run since the last reduction
    # A forward returned something that cannot be hooked, so the group stays unsharded and is reduced at the end of
    # every backward; and the versions of the shards at that forward.
    is_unhooked: bool = False
    unhooked_versions: list[int] | None = None
    has_leaf_hooks: bool = False  # the unsharded parameters have hooks that notice a backward,
    has_bucket_hooks: bool = False  # ... and hooks that notice complete buckets
    captured: Captured | None = None  # the group as graphs of ``torch.compile`` see it, if any was captured
    is_asleep: bool = False  # its shards are in host memory (``offload_model()``)

    def have_new_parameters(self) -> None:
        """Note that the unsharded parameters are new ones, which have no hooks yet."""
        self.is_unhooked = self.has_leaf_hooks = self.has_bucket_hooks = False


# ---- The forward and the backward of a root


@dataclass(slots=True, eq=False)
class StepCounts:
    """Optimizer steps on one root's parameters."""

    total: int = 0
    recent: Counter[object] = field(default_factory=Counter)  # by optimizer, since the last exchange


@dataclass(slots=True, eq=False)
class ForwardRecord:
    """The groups that one top-level forward ran, by index."""

    number: int  # of the forward, counting from 1
    states: object  # the root's states then, which the indexes refer to: by backward, the root may be another one
    outermost: int = 0  # the group of the module that was called
    # Groups in the order in which their forwards began; drives forward prefetch in the next forward.
    begun: list[int] = field(default_factory=list)
    # Groups that backward will reach, in the order in which their forwards ended; drives backward prefetch.
    hooked: list[int] = field(default_factory=list)
    captured: CapturedVersions | None = None  # versions of groups that graphs may have run, if there are any


class _Registrations:
    """Counts the parameters that any module of this process was given under a name (``register_parameter``), from the
    first ``note`` on. Forwards seldom give any; ``torch.nn.utils.parametrize`` does, and raises version counters
    without a write."""

    count = 0
    _handle: RemovableHandle | None = None

    def note(self) -> None:
        if self._handle is None:
            self._handle = register_module_parameter_registration_hook(self._add)

    def _add(self, _module: torch.nn.Module, _name: str, _param: torch.nn.Parameter | None) -> None:
        self.count += 1


registrations = _Registrations()


@dataclass(slots=True, eq=False)
class Forward:
    """The current top-level forward, or the most recent one if none is running."""

    record: ForwardRecord  # the groups that it has run
    previous: ForwardRecord  # the groups that the last forward of the same module ran; drives prefetch
    caller: FrameType | None = None  # the frame that called the outermost module, while it runs
    is_given: bool = False  # it began with values of ``functional_call`` in some parameter slots
    task: int = -1  # autograd's number of the backward inside which it began; -1 outside backward
    num_backwards: int = 0  # how many backwards this process had run when it began
    thread: int = field(default_factory=get_ident)  # the thread in which it began
    depth: int = 0  # number of forwards entered and not left
    innermost: HookedUse | None = None  # the innermost running use in the default mode under grad mode
    # The last ended use of each group, by index; cleared when the outermost forward ends.
    latest: dict[int, HookedUse] = field(default_factory=dict)
    is_region: bool = False  # it is a compiled region, whose graphs may contain the outermost group too
    has_failed: bool = False  # it has ended, or must end, in an exception that no enclosing forward handled
    num_registrations: int = field(default_factory=lambda: registrations.count)  # when it began
    # For each flat parameter, the indexes of parameters that this rank has written to without raising a version;
    # ``None`` if it has not checked.
    written: dict[FlatParamHandle, set[int]] | None = None

    def note_written(self, handle: FlatParamHandle | None = None, indexes: Sequence[int] = ()) -> None:
        """Note that this forward has checked for untracked writes, and found some to these parameters of ``handle``."""
        if self.written is None:
            self.written = {}
        if handle is not None and indexes:
            self.written.setdefault(handle, set()).update(indexes)

    def take_written(self) -> dict[FlatParamHandle, set[int]]:
        written, self.written = self.written, None
        return written or {}


@dataclass(slots=True, eq=False)
class Backward:
    """A backward, from its first hook until its gradients are published."""

    # Which of this process's outermost backwards it runs in.
    number: int = field(default_factory=lambda: backwards.num_outermost)
    thread: int = field(default_factory=get_ident)  # the thread in which it began; autograd has some of its own
    has_added: bool = False  # it has added to a gradient that existed before, or has begun to publish its own
    has_outside_grads: bool = False  # ... produced gradients for uses outside a forward (``differentiable_gather``)
    after_publication: list[Callable[[], None]] = field(default_factory=list)  # called when gradients are published
    # Swaps of groups that show their parameters since it began, because they had stayed unsharded.
    shown: dict[ParameterSwap, None] = field(default_factory=dict)
    # The process group carries nothing but buckets of one replicated group during this backward (see Note [Only
    # buckets]); ``None`` if not known yet.
    has_only_buckets: bool | None = None


def is_running(frame: FrameType | None) -> bool:
    """Whether ``frame`` is on the stack. If not, a forward from there that has not ended was interrupted."""
    current: FrameType | None = sys._getframe() if frame is not None else None
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None

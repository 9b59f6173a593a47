"""The state of one ``fully_shard`` call, and how to find states in a module tree.

A ``_FSDPState`` is registered on its module(s) through torch's composable contract, so that torch's own composable
APIs and ``fully_shard.state(module)`` see it. It refers to modules weakly: a model is freed with its last reference.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import count
from operator import attrgetter
from types import FrameType
from typing import Any, cast

import torch.nn as nn

from .._torch import STATE_KEY, ComposableState, composable_registry, composable_states, contract, drop_composable_state
from ..comm import ControlExchange, DataParallelMesh
from ..flat import Communicator, FlatParamHandle, Granularity, MixedPrecisionPolicy, Region, mark_owner, segment_owners
from .order import CollectiveOrder
from .swap import ParameterSwap


class Phase(Enum):
    """Where a group stands in backward."""

    IDLE = "outside backward"
    PRE_BACKWARD = "unsharded for backward"
    POST_BACKWARD = "its gradients have been taken in this backward"


_shard_version = attrgetter("shard._version")
_serials = count()


class _FSDPState(ComposableState):
    """What ``fully_shard`` keeps for one group.

    Attributes:
        modules: weak references to the module, or modules, given to the call.
        fqn: name of the (first) module, relative to the root, once a root is known; a class name before.
        mesh, mp_policy, reshard_option: as given to the call; ``reshard_after_forward`` is what the root made of it.
        requires_gradient_sync: whether backward reduces (``no_sync`` says no).
        is_functional: whether forwards gather in a way that autograd can differentiate twice; ``was_functional``:
            whether the last one did.
        keeps_unsharded: whether forwards without grad mode leave the group gathered (``keep_unsharded``).
        regions: where the parameters' memory was, until the first forward.
        root: what the groups below one root share; ``None`` before the first forward.
        index: position of the state in the root's order.
        is_outermost: the state's module begins iterations: a root.
        code: what the order of collectives knows the group by: its number there, shifted by one; negative before.
        serial: grows from group to group in the order in which this process makes them; copies keep theirs.
        phase: where the group stands in backward.
        entries: for each forward of the group's modules that was entered and not left, the exception that was being
            handled when it was entered, its use, and whether it is a recomputation.
        latest_use: of the outermost forward that is running, in the default mode under grad mode.
        outstanding: number of the forward of each use whose backward has not come yet, in order.
        pending_modules: of several modules, how many have yet to run before the group is resharded.
        num_toggles: how often ``requires_grad`` of any sharded parameter had been set at the group's last forward.
        uses_left: how many uses, under grad mode and without, until one ends with a look for unseen writes;
            ``look_gaps`` how many there will be after it.
    """

    __slots__ = (
        "_handles", "active_uses", "code", "entries", "fqn", "granularity", "has_leaf_hooks", "has_unsynced",
        "ignored", "index", "is_functional", "is_iterated", "is_outermost", "is_reduced", "is_unhooked",
        "keeps_unsharded", "last_use", "latest_use", "look_gaps", "mesh", "modules", "mp_policy", "num_toggles",
        "outstanding", "pending_modules", "phase", "ran_backward", "regions", "requires_gradient_sync",
        "reshard_after_forward", "reshard_option", "root", "serial", "swap", "unhooked_versions", "uses_left",
        "was_functional", "watch",
    )  # fmt: skip

    def __init__(self) -> None:
        self.modules: tuple[weakref.ref[nn.Module], ...] = ()
        self.fqn = ""
        self.mesh: DataParallelMesh = cast(DataParallelMesh, None)
        self.mp_policy = MixedPrecisionPolicy()
        self.reshard_option: bool | None = None
        self.reshard_after_forward = True
        self.requires_gradient_sync = True
        self.is_functional = self.was_functional = False
        self.keeps_unsharded = False
        self.granularity: Granularity | None = None
        self.regions: list[Region] = []
        self.num_toggles = -1
        self._handles: list[FlatParamHandle] = []
        self.swap: ParameterSwap = cast(ParameterSwap, None)
        self.ignored: weakref.WeakSet[Any] | set[int] = set()
        self.root: RootContext | None = None
        self.watch: Any = None  # of the whole root, on the root's own state
        self.index = -1
        self.is_outermost = False
        self.code = -1
        self.serial = next(_serials)
        # A forward returned something that cannot be hooked: stays unsharded, is reduced at the end of any backward.
        self.is_unhooked = False
        self.unhooked_versions: list[int] | None = None  # of the shards, at that forward
        self.has_leaf_hooks = False  # of the unsharded parameters, which tell that a backward runs
        self.has_unsynced = False  # a backward without gradient sync has run since the last reduction
        self.reset()

    def reset(self) -> None:
        """Forget the iteration that was going on."""
        self.entries: list[tuple[BaseException | None, Any, bool]] = []
        self.latest_use: Any = None
        self.outstanding: list[int] = []
        self.pending_modules: set[int] = set()
        self.uses_left, self.look_gaps = [1, 1], [1, 1]
        self.reset_backward()

    def reset_backward(self) -> None:
        """Forget the backward that was going on."""
        self.phase = Phase.IDLE
        self.active_uses = 0  # uses between their pre-backward and their post-backward
        self.is_iterated = False  # this backward has come to a use a second time: it may come any number of times
        self.last_use = 0  # number of the latest forward that this backward has reached
        self.ran_backward = False  # pre-backward came in this backward
        self.is_reduced = False  # ... and so did the reduction

    @property
    def is_complete(self) -> bool:
        """Whether the modules can show the group's parameters: a copy's are prepared at its first forward."""
        return bool(self.swap)

    @property
    def is_root(self) -> bool:
        """Whether this state's module is the one whose forward begins the iteration."""
        return self.root is not None and self.is_outermost

    @property
    def is_trainable(self) -> bool:
        return any(handle.is_trainable for handle in self._handles)

    @property
    def name(self) -> str:
        """The name of the group in messages."""
        return self.fqn or "(root)"

    def shard_versions(self) -> list[int]:
        """Changes with every write to a sharded parameter; see Note [Version counters]."""
        versions = [*map(_shard_version, self._handles)]
        if segment_owners:  # a write to a flat parameter that is a DTensor does not count at the shard
            versions += [item.parameter._version for handle in self._handles for item in handle.segments]
        return versions

    def check_versions(self, versions: list[int]) -> None:
        """Raise if a shard was written to since a forward, when they had ``versions``."""
        if self.shard_versions() != versions:
            raise RuntimeError(
                f"parameters of the fully_shard group {self.name} were modified (optimizer.step()?) between a "
                "forward and its backward, whose gradients would be wrong: run backward before the step, or "
                "forward again after it"
            )

    def refuse_unseen_backward(self) -> None:
        """Raise if backward has entered the group before any of its hooks: it may have computed with memory that was
        freed, or that an all-gather was still filling. Where such memory refuses access, it has not: what it computed
        without the parameters (the gradient of a bias) is right."""
        if self.is_unhooked or not self.reshard_after_forward:
            return
        for handle in self._handles:
            if not (handle.memory.is_guarded or handle.is_resident) and handle.has_unsharded_grad():
                raise RuntimeError(
                    f"a backward entered the fully_shard group {self.name} past its module's outputs, where its "
                    "parameters were not gathered: its gradients are wrong, and none was published. Let forward return "
                    "every tensor that a loss is computed from, or keep it as an attribute of the module"
                )

    def set_prefix(self, prefix: str) -> None:
        """What precedes the names of the group's parameters in the root, for messages."""
        self.swap.prefix = prefix
        for handle in self._handles:
            handle.set_prefix(prefix)
            for face, fqn in zip(handle.faces, handle.fqns, strict=True):
                mark_owner(face, self.name, prefix + fqn)

    def check_after_forward(self) -> None:
        """Raise if ``forward`` replaced, added or removed a parameter, or wrote to an unsharded one: the change would
        be lost when the group is resharded."""
        self.swap.check_unsharded_slots()
        for handle in self._handles:
            if handle.was_edited_unsharded():
                handle.forgive_unsharded_edit()
                names = ", ".join(handle.prefix + fqn for fqn in handle.fqns)
                raise RuntimeError(
                    f"a parameter of the fully_shard group {self.name} was modified in place inside forward; the edit "
                    "would be lost when the group is resharded. It is one of "
                    f"{names}. Modify parameters outside forward (the sharded parameters are "
                    "authoritative), or keep what changes in forward in a buffer"
                )

    def live_modules(self) -> list[nn.Module]:
        """The modules given to the call."""
        return [module for ref in self.modules if (module := ref()) is not None]

    def adopt(self, handles: list[FlatParamHandle]) -> None:
        """Make ``handles`` the group's flat parameters."""
        self._handles = handles
        for handle in handles:
            handle.group = weakref.ref(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _FSDPState:
        """The state of a copy of the group's modules, which are being copied: a group of its own, that has run nothing.
        ``swap`` is prepared when the copies are complete: at their first forward."""
        root = self.root
        is_in_backward = root is not None and (root.is_in_backward or root.has_failed_backward)
        if self.entries or self.active_uses or is_in_backward:
            raise RuntimeError(
                f"copy.deepcopy(): a forward or backward of the fully_shard group {self.name} is running (or was "
                "interrupted): copy the model between iterations"
            )
        twin = _FSDPState()
        memo[id(self)] = twin
        twin.fqn, twin.mesh, twin.mp_policy = self.fqn, self.mesh, self.mp_policy
        twin.reshard_option, twin.requires_gradient_sync = self.reshard_option, self.requires_gradient_sync
        twin.is_functional = self.is_functional
        twin.serial = self.serial
        twin.adopt([copy.deepcopy(handle, memo) for handle in self._handles])
        twin.ignored = weakref.WeakSet(copy.deepcopy(param, memo) for param in self.ignored)
        twin.granularity = self.granularity
        twin.modules = tuple(weakref.ref(copy.deepcopy(module, memo)) for module in self.live_modules())
        return twin

    def __reduce__(self) -> Any:
        raise NotImplementedError(
            f"a module with the fully_shard group {self.name} cannot be pickled, nor saved whole by torch.save(): its "
            "process groups exist in this process only. Save model.state_dict(), with torch.distributed.checkpoint"
        )

    def __repr__(self) -> str:
        return f"_FSDPState({self.name}, {self._handles})"


class ForwardRecord:
    """The groups that one top-level forward ran, by index.

    Attributes:
        number: of the forward, counting from 1.
        states: the root's, by the index that the other attributes hold. A root may be another one in backward.
        begun: in the order in which their forwards began: drives forward prefetch in the next forward.
        hooked: in the order in which their forwards ended, those that backward will reach: drives backward prefetch.
        outermost: the group of the module that was called.
    """

    __slots__ = ("begun", "hooked", "number", "outermost", "states")

    def __init__(self, number: int, states: list[weakref.ref[_FSDPState]], outermost: int = 0) -> None:
        self.number = number
        self.outermost = outermost
        self.states = states
        self.begun: list[int] = []
        self.hooked: list[int] = []


class _Watches:
    """Those of several roots, as one."""

    def __init__(self, watches: list[Any]) -> None:
        self._watches = watches

    def is_quiet(self) -> bool:
        return all([watch.is_quiet() for watch in self._watches])

    def has_unsharded_grads(self) -> bool:
        return any([watch.has_unsharded_grads() for watch in self._watches])

    def backward_has_ended(self) -> None:
        for watch in self._watches:
            watch.backward_has_ended()

    def was_toggled(self) -> bool:
        return any([watch.was_toggled() for watch in self._watches])

    def has_grads(self) -> bool:
        return any([watch.has_grads() for watch in self._watches])

    def newly_kept(self) -> list[Any]:
        return [item for watch in self._watches for item in watch.newly_kept()]

    def was_forward_quiet(self) -> bool:
        return all([watch.was_forward_quiet() for watch in self._watches])


class RootContext:
    """What the groups below one root share: plain data, driven by the runtime.

    Each state refers to its context; the context refers to its states weakly, so that nothing here keeps a model.

    Attributes:
        states: every group of the root, by index; the root's own is first.
        parts: the same, by root: several roots that share groups have one context (see ``roots``).
        communicator: streams and reduce buffers.
        exchange: the control exchange; ``used_starts``: where in its ``used`` the parameters of each handle begin.
        generation: of the module tree, when ``states`` was collected.
        depth: forwards entered and not left.
        record: what the present (or last) top-level forward has run; ``previous`` the last one of the same module,
            which drives prefetch; ``records`` those of all modules, by the index of their group.
        num_forwards: top-level forwards so far; ``num_backwards``: backwards of this process when the last one began.
        backward_number: of the present (or last) backward; 0 before the first.
        innermost: of the uses whose forwards are running, in the default mode under grad mode.
        caller: the frame that has called the outermost module, while its forward runs.
        is_given: that forward began with other values than its own (see ``given``) in some slots of parameters.
        order: of the collectives of its process group; ``trace``: what was issued since the last exchange, the list of
            that order itself.
        number: of the root among those of its process group, from 1.
        forward_task: number of the backward inside which the present (or last) top-level forward began, as autograd
            counts them; -1 outside of backward.
        is_in_backward: a backward has begun and its final callback has not come.
        has_failed_backward: a backward ended in an exception, and what it left has not been thrown away yet.
        has_failed: a forward ended in an exception that no enclosing forward handled.
        has_added: this backward has added to a gradient that was there before, or has begun to show its own.
        has_outside_grads: this backward has brought gradients of uses outside a group's forward (``outside_use``).
        after_publication: what to call when the gradients of this backward have been published.
        shown: groups that have been shown since this backward began, because they had stayed unsharded.
        recomputed: groups that activation checkpointing has just run again, left unsharded for their backward.
        forward_exchange: the exchange at the end of forwards that have looked for unseen writes, of the size of the
            other one, so that the two meet where ranks differ; ``has_looked`` says that the present one has, and
            ``written`` what it has found on this rank, by index.
    """

    __slots__ = (
        "__weakref__", "after_publication", "backward_number", "caller", "communicator", "depth", "exchange",
        "forward_exchange", "forward_task", "generation", "has_added", "has_failed", "has_failed_backward",
        "has_looked", "has_outside_grads", "innermost", "is_given", "is_in_backward", "num_backwards",
        "num_forwards", "number", "order", "parts", "previous", "recomputed", "record", "records", "shown",
        "states", "trace", "used_starts", "written",
    )  # fmt: skip

    def __init__(
        self,
        states: list[_FSDPState],
        communicator: Communicator,
        exchange: ControlExchange,
        forward_exchange: ControlExchange,
        generation: int,
        parts: list[list[_FSDPState]],
        order: CollectiveOrder,
        number: int,
    ) -> None:
        self.states = [weakref.ref(state) for state in states]
        self.parts = [[weakref.ref(state) for state in part] for part in parts]
        self.communicator = communicator
        self.exchange, self.forward_exchange = exchange, forward_exchange
        self.used_starts: weakref.WeakKeyDictionary[FlatParamHandle, int] = weakref.WeakKeyDictionary()
        self.generation = generation
        self.num_forwards = self.num_backwards = 0
        self.backward_number = 0
        self.previous = ForwardRecord(0, self.states)
        self.records: dict[int, ForwardRecord] = {}
        self.caller: FrameType | None = None
        self.order = order
        self.trace = order.trace
        self.number = number
        self.reset()

    def reset(self) -> None:
        """Forget the iteration that was going on."""
        self.depth = 0
        self.innermost: Any = None
        self.caller = None
        self.is_given = False
        self.forward_task = -1
        self.record = ForwardRecord(self.num_forwards, self.states)
        self.has_failed = False
        self.has_looked = False
        self.written: dict[FlatParamHandle, set[int]] = {}
        self.reset_backward()

    def reset_backward(self) -> None:
        """Forget the backward that was going on."""
        self.is_in_backward = False
        self.has_failed_backward = False
        self.has_added = False
        self.has_outside_grads = False
        self.after_publication: list[Callable[[], None]] = []
        self.recomputed: list[_FSDPState] = []
        self.shown: dict[_FSDPState, None] = {}

    @property
    def watch(self) -> Any:
        """What the user may change between iterations, a ``Watch``; ``None`` when the root module is gone. The root's
        own state keeps it: it refers to modules, which refer to their states, which refer to this context."""
        if len(self.parts) == 1:
            owner = self.states[0]()
            return None if owner is None else owner.watch
        watches = [owner.watch for part in self.parts if (owner := part[0]()) is not None]
        return _Watches(watches) if watches else None

    @property
    def label(self) -> str:
        """The name of the root in messages, where there are several."""
        owner = self.states[0]()
        names = [] if owner is None else [type(module).__name__ for module in owner.live_modules()]
        return f"model {self.number} ({', '.join(names)})"

    @property
    def is_dead(self) -> bool:
        """Whether an iteration was interrupted, at a moment when no forward and no backward is running."""
        return self.depth > 0 or self.has_failed or self.is_in_backward or self.has_failed_backward

    def live_states(self) -> list[_FSDPState]:
        return [state for ref in self.states if (state := ref()) is not None]


# ---- registry


def fully_shard(module: list[nn.Module], install: Callable[[_FSDPState], None]) -> Any:
    """The function known to torch's registry; its name is the API's name there."""
    install(_registered.state(module[0]))
    return module


_API = fully_shard
_registered: Any = contract(state_cls=_FSDPState)(fully_shard)


def register_state(modules: list[nn.Module], install: Callable[[_FSDPState], None]) -> None:
    """Register one new state on ``modules``, of which none is inside another, and let ``install`` fill it in.

    A failure leaves no trace in the registry.
    """
    try:
        _registered(modules, install)
    except BaseException:
        for module in modules:
            drop_composable_state(module, _API)
        raise


def get_state(module: nn.Module) -> _FSDPState | None:
    """The state of the ``fully_shard`` call made on ``module`` itself, if there was one."""
    return cast("_FSDPState | None", composable_states(module).get(_API))


def state_of_hooked(module: nn.Module) -> _FSDPState:
    """As ``get_state``, for a module that has our hooks and therefore a state: on the hot path."""
    state: _FSDPState = module.__dict__[STATE_KEY][_API]  # cast() would be a call
    return state


# ---- traversal


def is_compatible(module: nn.Module) -> bool:
    return "replicate" not in composable_registry(module)


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[_FSDPState], list[nn.Module]]:
    """The states in the tree under ``module`` and the module of each.

    Depth first, in the order of ``module.modules()``; each state and each module once, however often it is shared;
    not descending into a module that an incompatible API manages (torch's ``replicate``).
    """
    states: list[_FSDPState] = []
    modules: list[nn.Module] = []
    for submodule in _walk(module, stop_at_incompatible=True):
        state = get_state(submodule)
        if state is not None and state not in states:
            states.append(state)
            modules.append(submodule)
    return states, modules


def _get_fsdp_states(module: nn.Module) -> list[_FSDPState]:
    """The states in the tree under ``module``; see ``_get_fsdp_states_with_modules``."""
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_root_states(module: nn.Module) -> list[_FSDPState]:
    """Those of ``_get_fsdp_states(module)`` whose module begins iterations; none before the first forward."""
    return [state for state in _get_fsdp_states(module) if state.is_root]


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    """The flat parameters of ``_get_fsdp_states(module)``, in that order."""
    return [handle for state in _get_fsdp_states(module) for handle in state._handles]


def states_to_run(module: nn.Module) -> list[tuple[_FSDPState, str]]:
    """Every state under ``module`` with the name of its module: what the runtime drives. Unlike
    ``_get_fsdp_states`` it goes everywhere: a sharded child of a replicated parent must run."""
    names = {submodule: name for name, submodule in module.named_modules()}
    found: dict[_FSDPState, str] = {}
    for submodule in _walk(module, stop_at_incompatible=False):
        state = get_state(submodule)
        if state is not None and state not in found:
            found[state] = names[submodule]
    return list(found.items())


def modules_to_run(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module under ``module`` with its name, except those that an incompatible API (torch's ``replicate``)
    manages: that API is responsible for their parameters."""
    names = {submodule: name for name, submodule in module.named_modules()}
    return [(names[submodule], submodule) for submodule in _walk(module, stop_at_incompatible=True)]


def _walk(module: nn.Module, stop_at_incompatible: bool) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if current in seen or (stop_at_incompatible and not is_compatible(current)):
            continue
        seen.add(current)
        yield current
        stack.extend(reversed(list(current.children())))

"""The state of one ``fully_shard`` call, and what the groups below one root share.

A ``_FSDPState`` is registered on its module(s) through torch's composable contract, so that torch's own composable
APIs and ``fully_shard.state(module)`` see it. It refers to modules weakly: a model is freed with its last reference.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from operator import attrgetter
from types import FrameType
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn as nn

from .._torch import ComposableState
from ..comm import ControlExchange, DataParallelMesh, Names
from ..flat import Communicator, FlatParamHandle, Region, mark_owner, segment_owners
from .collective_order import CollectiveLog
from .iteration import (
    NOWHERE,
    Backward,
    BackwardState,
    Forward,
    ForwardRecord,
    ForwardState,
    PersistentState,
    Rounds,
    TreePosition,
)
from .options import GroupOptions
from .parameter_swap import ParameterSwap

_shard_version = attrgetter("shard._version")
_serials = count()


class _FSDPState(ComposableState):
    """The data that ``fully_shard`` keeps for one group.

    Attributes:
        modules: weak references to the module, or modules, given to the call.
        fqn: name of the (first) module, relative to the root, once a root is known; a class name before.
        mesh: the ranks.
        options: what the user decides.
        ignored: parameters below the modules that stay as they are.
        swap: what the modules show.
        root: what the groups below one root share; ``None`` before the first forward.
        place: where the group stands below that root.
        detector: of the whole root, on the root's own state.
        code: what the order of collectives knows the group by: its number there, shifted by one; negative before.
        serial: grows from group to group in the order in which this process makes them; copies keep theirs.
        progress: of the iteration that is running; ``backward``: of the backward.
        persistent: what earlier iterations have left to know.
    """

    __slots__ = (
        "_handles",
        "backward",
        "code",
        "detector",
        "fqn",
        "ignored",
        "mesh",
        "modules",
        "options",
        "persistent",
        "place",
        "progress",
        "root",
        "serial",
        "swap",
    )  # fmt: skip

    def __init__(self) -> None:
        self.modules: tuple[weakref.ref[nn.Module], ...] = ()
        self.fqn = ""
        self.mesh: DataParallelMesh = cast(DataParallelMesh, None)
        self.options = GroupOptions()
        self._handles: list[FlatParamHandle] = []
        self.swap: ParameterSwap = cast(ParameterSwap, None)
        self.ignored: weakref.WeakSet[nn.Parameter] = weakref.WeakSet()
        self.root: Root | None = None
        self.place = NOWHERE
        self.detector: ParameterDetector | None = None
        self.code = -1
        self.serial = next(_serials)
        self.persistent = PersistentState()
        self.reset()

    def initialize(
        self,
        modules: Sequence[nn.Module],
        fqn: str,
        mesh: DataParallelMesh,
        options: GroupOptions,
        handles: list[FlatParamHandle],
        ignored: Iterable[nn.Parameter],
        regions: Sequence[Region],
    ) -> None:
        """Fill in a new state, all but its ``swap``."""
        self.modules = tuple(weakref.ref(module) for module in modules)
        self.fqn, self.mesh, self.options = fqn, mesh, options
        self.ignored = weakref.WeakSet(ignored)
        self.persistent = PersistentState(regions)
        self.set_flat_params(handles)
        CollectiveLog.of(mesh.peers).register_group(self)

    def set_swap(self, swap: ParameterSwap) -> None:
        """Let the modules show parameters by ``swap`` from now on."""
        self.swap = swap

    def set_options(self, **changes: Any) -> None:
        """Replace some of the options (see ``GroupOptions``)."""
        self.options = replace(self.options, **changes)
        self.set_position(self.fqn, self.place.index, self.place.is_outermost)
        self.apply_options()

    def apply_options(self) -> None:
        """Let the flat parameters follow the options."""
        for handle in self._handles:
            handle.pending_gradients.apply_options(self.options.reduction)
            handle.unsharded.keep_storage(self.options.keeps_storage)

    def run_among(self, peers: dist.ProcessGroup, missing_factor: int) -> None:
        """Run below a root of these peers; see ``DataParallelMesh.run_among``."""
        self.mesh = self.mesh.run_among(peers, missing_factor)
        for handle in self._handles:
            handle.run_on(handle.mesh.run_among(peers, missing_factor))

    def set_position(self, fqn: str, index: int, is_outermost: bool) -> None:
        """The group is ``fqn`` below a root now, and the one of this index there."""
        self.fqn, options = fqn, self.options
        reshards, stays = options.reshards(is_outermost), options.keeps_after_backward()
        self.place = TreePosition(index, is_outermost, reshards, options.reshards_partially(), stays)

    def take_number(self, code: int) -> None:
        """The order of collectives knows the group by ``code`` from now on."""
        self.code = code

    def attach_root(self, root: Root, keeps_awaiting: bool) -> None:
        """Run under ``root`` from now on. ``keeps_awaiting``: backwards of earlier forwards are to come."""
        self.root = root
        self.reset(self.progress.awaiting_backward if keeps_awaiting else ())

    def set_detector(self, detector: ParameterDetector) -> None:
        """Have a new picture of what the user may change in the whole root."""
        self.detector = detector

    def reset(self, awaiting_backward: Sequence[int] = ()) -> None:
        """Forget the iteration that was going on."""
        self.progress = ForwardState(awaiting_backward)
        self.reset_backward()

    def reset_backward(self) -> None:
        """Forget the backward that was going on."""
        self.backward = BackwardState()

    @property
    def is_complete(self) -> bool:
        """Whether the modules can show the group's parameters: a copy's are prepared at its first forward."""
        return bool(self.swap)

    @property
    def is_root(self) -> bool:
        """Whether this state's module is the one whose forward begins the iteration."""
        return self.root is not None and self.place.is_outermost

    @property
    def is_functional(self) -> bool:
        return self.options.is_functional

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the root is running."""
        return self.root is not None and self.root.forward.depth > 0

    def after_publication(self, call: Callable[[], None]) -> None:
        """Make ``call`` when the gradients of the backward that is running are published; now if no backward of the
        root is running."""
        backward = None if self.root is None else self.root.backward
        if backward is None:
            call()
        else:
            backward.after_publication.append(call)

    @property
    def is_trainable(self) -> bool:
        return any(handle.pending_gradients.is_trainable for handle in self._handles)

    @property
    def name(self) -> str:
        """The name of the group in messages."""
        return self.fqn or "(root)"

    def shard_versions(self) -> list[int]:
        """Changes with every write to a sharded parameter; see Note [Version counters]."""
        versions = [*map(_shard_version, self._handles)]
        if segment_owners:  # a write to a flat view that is a DTensor does not count at the shard
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
        if self.persistent.is_unhooked or not self.place.reshards_after_forward:
            return
        for handle in self._handles:
            if not (handle.unsharded.memory.is_guarded or handle.unsharded.never_freed) and handle.unsharded.has_grad():
                raise RuntimeError(
                    f"a backward entered the fully_shard group {self.name} past its module's outputs, where its "
                    "parameters were not gathered: its gradients are wrong, and none was published. Let forward return "
                    "every tensor that a loss is computed from, or keep it as an attribute of the module"
                )

    def call_parameters(self, names: Names) -> None:
        """``names``: how the group's parameters are called in the root, for messages."""
        self.swap.call_parameters(names)
        whole_group = self.name if len(self._handles) == 1 else ""
        for handle in self._handles:
            handle.call_parameters(names, whole_group)
            for sharded, name in zip(handle.sharded_params, handle.names, strict=True):
                mark_owner(sharded, self.name, name)

    def check_after_forward(self) -> None:
        """Raise if ``forward`` replaced, added or removed a parameter, or wrote to an unsharded one: the change would
        be lost when the group is resharded."""
        self.swap.check_unsharded_slots()
        for handle in self._handles:
            if handle.unsharded.was_written():
                handle.unsharded.forgive_write()
                names = ", ".join(handle.names)
                raise RuntimeError(
                    f"a parameter of the fully_shard group {self.name} was modified in place inside forward; the edit "
                    "would be lost when the group is resharded. It is one of "
                    f"{names}. Modify parameters outside forward (the sharded parameters are "
                    "authoritative), or keep what changes in forward in a buffer"
                )

    def live_modules(self) -> list[nn.Module]:
        """The modules given to the call."""
        return [module for ref in self.modules if (module := ref()) is not None]

    def set_flat_params(self, handles: list[FlatParamHandle]) -> None:
        """Make ``handles`` the group's flat parameters."""
        self._handles = handles
        for handle in handles:
            handle.belong_to(self)
        self.apply_options()

    def __deepcopy__(self, memo: dict[int, Any]) -> _FSDPState:
        """The state of a copy of the group's modules, which are being copied: a group of its own, that has run nothing.
        ``swap`` is prepared when the copies are complete: at their first forward."""
        root = self.root
        is_in_backward = root is not None and (root.backward is not None or root.failed_backward is not None)
        if self.progress.running_forwards or self.backward.active_uses or is_in_backward:
            raise RuntimeError(
                f"copy.deepcopy(): a forward or backward of the fully_shard group {self.name} is running (or was "
                "interrupted): copy the model between iterations"
            )
        twin = _FSDPState()
        memo[id(self)] = twin
        twin.fqn, twin.mesh, twin.serial = self.fqn, self.mesh, self.serial
        twin.options = self.options.of_a_copy()
        twin.set_flat_params([copy.deepcopy(handle, memo) for handle in self._handles])
        twin.ignored = weakref.WeakSet(copy.deepcopy(param, memo) for param in self.ignored)
        twin.modules = tuple(weakref.ref(copy.deepcopy(module, memo)) for module in self.live_modules())
        return twin

    def __reduce__(self) -> Any:
        raise NotImplementedError(
            f"a module with the fully_shard group {self.name} cannot be pickled, nor saved whole by torch.save(): its "
            "process groups exist in this process only. Save model.state_dict(), with torch.distributed.checkpoint"
        )

    def __repr__(self) -> str:
        return f"_FSDPState({self.name}, {self._handles})"


class ParameterDetector(Protocol):
    """What the user may change between iterations, or inside forward; see ``change_detection``."""

    def is_unchanged(self) -> bool: ...

    def has_unsharded_grads(self) -> bool: ...

    def backward_has_ended(self) -> None: ...

    def was_toggled(self) -> bool: ...

    def has_grads(self) -> bool: ...

    def newly_kept(self) -> list[tuple[_FSDPState, list[torch.Tensor]]]: ...

    def was_forward_unchanged(self) -> bool: ...

    def follow_addresses(self) -> None: ...


class _Detectors:
    """Those of several roots, as one."""

    def __init__(self, detectors: list[ParameterDetector]) -> None:
        self._detectors = detectors

    def is_unchanged(self) -> bool:
        return all([detector.is_unchanged() for detector in self._detectors])

    def has_unsharded_grads(self) -> bool:
        return any([detector.has_unsharded_grads() for detector in self._detectors])

    def backward_has_ended(self) -> None:
        for detector in self._detectors:
            detector.backward_has_ended()

    def was_toggled(self) -> bool:
        return any([detector.was_toggled() for detector in self._detectors])

    def has_grads(self) -> bool:
        return any([detector.has_grads() for detector in self._detectors])

    def newly_kept(self) -> list[tuple[_FSDPState, list[torch.Tensor]]]:
        return [item for detector in self._detectors for item in detector.newly_kept()]

    def was_forward_unchanged(self) -> bool:
        return all([detector.was_forward_unchanged() for detector in self._detectors])

    def follow_addresses(self) -> None:
        for detector in self._detectors:
            detector.follow_addresses()


class Root:
    """The data that the groups below one root share, driven by the runtime.

    Each state refers to its root; the root refers to its states weakly, so that nothing here keeps a model.

    Attributes:
        states: every group of the root, by index; the root's own is first.
        parts: the same, by root: several roots that share groups are one here (see ``registry``).
        communicator: streams and reduce buffers.
        exchange: the control exchange; ``used_starts``: where in its ``used`` the parameters of each handle begin.
        forward_exchange: the exchange at the end of forwards that have looked for unseen writes, of the size of the
            other one, so that the two meet where ranks differ.
        generation: of the module tree, when ``states`` was collected.
        order: of the collectives of its process group.
        number: of the root among those of its process group, from 1.
        num_forwards: top-level forwards so far.
        records: of the last forward of each module, by the index of its group.
        forward: the present (or last) top-level forward.
        backward: the one that is running, if one is.
        failed_backward: one that ended in an exception, until what it left has been thrown away.
        recomputed: groups that activation checkpointing has just run again, left unsharded for their backward.
        rounds: where ranks agree on groups that they may skip; ``None`` if there are no such groups.
    """

    __slots__ = (
        "__weakref__", "_exchanges", "backward", "communicator", "failed_backward", "forward", "generation",
        "num_forwards", "number", "order", "parts", "recomputed", "records", "rounds", "states", "used_starts",
    )  # fmt: skip

    def __init__(
        self,
        parts: list[list[_FSDPState]],
        communicator: Communicator,
        exchange: ControlExchange,
        forward_exchange: ControlExchange,
        generation: int,
        order: CollectiveLog,
        number: int,
        num_forwards: int,
        rounds: Rounds | None = None,
    ) -> None:
        states = dict.fromkeys(state for part in parts for state in part)
        self.states = [weakref.ref(state) for state in states]
        self.parts = [[weakref.ref(state) for state in part] for part in parts]
        self.communicator = communicator
        self._exchanges, self.rounds = (exchange, forward_exchange), rounds
        self.used_starts: weakref.WeakKeyDictionary[FlatParamHandle, int] = weakref.WeakKeyDictionary()
        self.generation = generation
        self.order = order
        self.number = number
        self.num_forwards = num_forwards
        self.records: dict[int, ForwardRecord] = {}
        self.backward: Backward | None = None
        self.failed_backward: Backward | None = None
        nothing = ForwardRecord(num_forwards, self.states)
        self.forward = Forward(nothing, nothing)
        self.recomputed: list[_FSDPState] = []

    @property
    def exchange(self) -> ControlExchange:
        return self._exchanges[0]

    @property
    def forward_exchange(self) -> ControlExchange:
        return self._exchanges[1]

    def reset(self) -> None:
        """Forget the iteration that was going on."""
        if self.rounds is not None:
            self.rounds.reset()
        self.forward = Forward(ForwardRecord(self.num_forwards, self.states), self.forward.previous)
        self.reset_backward()

    def reset_backward(self) -> None:
        """Forget the backward that was going on."""
        if self.rounds is not None:
            self.rounds.reset_backward()
        self.backward = self.failed_backward = None
        self.recomputed = []

    def begin_forward(
        self, outermost: int, caller: FrameType | None, is_given: bool, task: int, num_backwards: int
    ) -> None:
        """Begin a top-level forward of the group of index ``outermost``; for the others see ``Forward``."""
        record, previous = self.forward.record, self.forward.previous
        self.num_forwards += 1
        if record.begun:
            previous = self.records[record.outermost] = record
        if previous.outermost != outermost:
            previous = self.records.get(outermost, previous)
        record = ForwardRecord(self.num_forwards, self.states, outermost)
        self.forward = Forward(record, previous, caller, is_given, task, num_backwards)

    def begin_backward(self) -> Backward:
        self.backward = Backward()
        return self.backward

    def end_backward(self) -> Backward:
        """The backward that was running, which has ended."""
        assert self.backward is not None
        backward, self.backward = self.backward, None
        self.recomputed.clear()
        if self.rounds is not None:
            self.rounds.rest()
        return backward

    def fail_backward(self, backward: Backward) -> None:
        """``backward`` has ended in an exception: what it has left is to be thrown away."""
        if self.backward is backward:
            self.backward = None
        if self.failed_backward is not None:
            if self.failed_backward.has_added:
                backward.add()
        self.failed_backward = backward

    def has_one_group(self) -> bool:
        """Whether one group has all the parameters."""
        return len([state for state in self.live_states() if state._handles]) == 1

    def has_backward_to_come(self) -> bool:
        """Whether a backward is running, or may come to a forward that has run."""
        return self.backward is not None or any([state.progress.awaiting_backward for state in self.live_states()])

    def phase(self) -> str:
        """What it is in, as text; empty between iterations."""
        if self.backward is not None:
            return f"the backward after forward {self.num_forwards}"
        return f"forward {self.num_forwards}" if self.forward.depth > 0 else ""

    @property
    def has_added(self) -> bool:
        """Whether older gradients are lost with those of a backward that is running, or has failed."""
        return any(item is not None and item.has_added for item in (self.backward, self.failed_backward))

    @property
    def detector(self) -> ParameterDetector | None:
        """A ``ChangeDetector`` over what the user may change between iterations; ``None`` when the root module is gone.
        The root's own state keeps it: it refers to modules, which refer to their states, which refer to this root."""
        if len(self.parts) == 1:
            owner = self.states[0]()
            return None if owner is None else owner.detector
        owners = [part[0]() for part in self.parts]
        detectors = [owner.detector for owner in owners if owner is not None and owner.detector is not None]
        return _Detectors(detectors) if detectors else None

    @property
    def mesh(self) -> DataParallelMesh:
        """That of the most peers: all ranks that run the root together."""
        return widest_mesh(self.live_states())

    @property
    def data_mesh(self) -> DataParallelMesh:
        """That of the most data ranks: all that have a batch of their own."""
        return max((state.mesh for state in self.live_states()), key=attrgetter("data_world_size"))

    @property
    def label(self) -> str:
        """The name of the root in messages, where there are several."""
        owner = self.states[0]()
        names = [] if owner is None else [type(module).__name__ for module in owner.live_modules()]
        return f"model {self.number} ({', '.join(names)})"

    @property
    def is_dead(self) -> bool:
        """Whether an iteration was interrupted, at a moment when no forward and no backward is running."""
        forward = self.forward
        return bool(forward.depth > 0 or forward.has_failed or self.backward or self.failed_backward)

    def live_states(self) -> list[_FSDPState]:
        return [state for ref in self.states if (state := ref()) is not None]


def widest_mesh(states: Sequence[_FSDPState]) -> DataParallelMesh:
    """The mesh, among those of some groups, of the most peers; the first of several."""
    return max((state.mesh for state in states), key=lambda mesh: mesh.peers.size())


def state_of(handle: FlatParamHandle) -> _FSDPState | None:
    """The group that a flat parameter belongs to."""
    return cast("_FSDPState | None", None if handle.owner is None else handle.owner())

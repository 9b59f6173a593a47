"""The state of one ``fully_shard`` call (``_FSDPState``), and the data that the groups below one root share (``Root``).

A ``_FSDPState`` is in the composable registry of its module(s), so that torch's own composable APIs and
``fully_shard.state(module)`` see it. It refers to modules weakly: a model is freed with its last reference.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from operator import attrgetter
from threading import get_ident
from types import FrameType
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn as nn

from ..._torch import ComposableState
from ...errors import MisuseRuntimeError
from ..comm import ControlExchange, DataParallelMesh, Names
from ..flat import Communicator, FlatParamHandle, Region, mark_owner, segment_owners
from ..ragged import RaggedDTensor, gather_local_shards
from .collective_order import UNNUMBERED, CollectiveLog
from .iteration import (
    NOWHERE,
    Backward,
    BackwardState,
    Forward,
    ForwardRecord,
    ForwardState,
    GroupUse,
    HookedUse,
    PersistentState,
    StepCounts,
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
        fqn: name of the (first) module in the root, once a root is known; before that, a class name.
        mesh: the ranks.
        options: the options that the user sets.
        ignored: parameters below the modules that are left as they are.
        swap: decides which parameters the modules show.
        root: the data shared by all groups below one root; ``None`` before the first forward.
        position: the group's position below that root.
        detector: change detector of the whole root; only on the root's own state.
        log: the group's entries in the order of collectives.
        serial: increases from group to group in the order in which this process makes them; copies keep it.
        progress: state in the running iteration.
        backward: state in the running backward.
        persistent: state carried over from earlier iterations.
    """

    __slots__ = (
        "_handles",
        "backward",
        "detector",
        "fqn",
        "ignored",
        "log",
        "mesh",
        "modules",
        "options",
        "persistent",
        "position",
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
        self.position = NOWHERE
        self.detector: ParameterDetector | None = None
        self.log = UNNUMBERED
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
        """Fill in a new state, except for its ``swap``."""
        self.modules = tuple(weakref.ref(module) for module in modules)
        self.fqn, self.mesh, self.options = fqn, mesh, options
        self.ignored = weakref.WeakSet(ignored)
        self.persistent = PersistentState(regions)
        self.set_flat_params(handles)
        CollectiveLog.of(mesh.peers).register_group(self)

    def set_options(self, **changes: Any) -> None:
        """Replace some of the options (see ``GroupOptions``)."""
        self.options = replace(self.options, **changes)
        self.set_position(self.fqn, self.position.index, self.position.is_outermost)
        self.apply_options()

    def apply_options(self) -> None:
        """Apply the options to the flat parameters."""
        for handle in self._handles:
            handle.pending_gradients.options = self.options.reduction
            handle.unsharded.keep_storage(self.options.keeps_storage)

    def run_among(self, peers: dist.ProcessGroup, num_data_ranks: int) -> None:
        """Run below a root with these peers; see ``DataParallelMesh.run_among``."""
        self.mesh = self.mesh.run_among(peers, num_data_ranks)
        for handle in self._handles:
            handle.run_on(handle.mesh.run_among(peers, num_data_ranks))

    def set_position(self, fqn: str, index: int, is_outermost: bool) -> None:
        """Set the group's name and index below its root."""
        self.fqn, options = fqn, self.options
        reshards, stays = options.reshards(is_outermost), options.keeps_after_backward()
        self.position = TreePosition(index, is_outermost, reshards, options.reshards_partially(), stays)

    def attach_root(self, root: Root, keeps_awaiting: bool) -> None:
        """Run under ``root`` from now on. ``keeps_awaiting``: backwards of earlier forwards are still to come."""
        self.root = root
        self.reset(self.progress.awaiting_backward if keeps_awaiting else ())

    def reset(self, awaiting_backward: Sequence[int] = ()) -> None:
        """Forget the iteration that was going on."""
        self.progress, self.backward = ForwardState([*awaiting_backward]), BackwardState()

    @property
    def is_complete(self) -> bool:
        """Whether the modules can show the group's parameters; a copy is prepared only at its first forward."""
        return bool(self.swap)

    @property
    def is_root(self) -> bool:
        """Whether this state's module is the one whose forward begins the iteration."""
        return self.root is not None and self.position.is_outermost

    @property
    def is_functional(self) -> bool:
        return self.options.is_functional

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the root is running."""
        return self.root is not None and self.root.forward.depth > 0

    def after_publication(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the gradients of the running backward are published, or now if no backward is running."""
        backward = None if self.root is None else self.root.backward
        if backward is None:
            call()
        else:
            backward.after_publication.append(call)

    def gather_parameter(self, handle: FlatParamHandle, index: int) -> torch.Tensor | None:
        """Gather a parameter that is used outside the group's forward; ``None`` before the first forward."""
        # Over the ranks on which experts are spread, the gather would take gradients for equal: the tensor may be read
        # (weights sent to an engine), but a loss must say how gradients differ.
        if handle.mesh.missing_factor > 1 or handle.mesh.ranks() < self.mesh.ranks():
            error = MisuseRuntimeError(
                f"full_tensor() of {handle.name_of(index)}, of which other data-parallel ranks hold others (expert "
                "parallelism), in a loss: say how gradients differ between ranks. For a term that is the same on all "
                "ranks: full_tensor(grad_placements=[Replicate()] * param.device_mesh.ndim)"
            )

            def refuse(_: torch.Tensor) -> None:
                raise error

            with torch.no_grad():
                inner = gather_local_shards(cast(RaggedDTensor, handle.sharded_params[index]))
            inner.requires_grad_().register_hook(refuse)
            return inner
        return None if self.root is None else self.root.gather_parameter(self.root, self, handle, index)

    @property
    def name(self) -> str:
        """The name of the group in messages."""
        return self.fqn or "(root)"

    def shard_versions(self) -> list[int]:
        """Version counters that change with every write to a sharded parameter; see Note [Version counters]."""
        versions = [*map(_shard_version, self._handles)]
        if segment_owners:  # a write to a flat view that is a DTensor does not raise the version of the shard
            versions += [item.parameter._version for handle in self._handles for item in handle.segments]
        return versions

    def check_versions(self, versions: list[int]) -> None:
        """Raise if a shard was written to since a forward, when the shards had these ``versions``."""
        if self.shard_versions() != versions:
            raise MisuseRuntimeError(
                f"parameters of the fully_shard group {self.name} were modified (optimizer.step()?) between a "
                "forward and its backward, so the gradients would be wrong: run backward before the step, or "
                "run forward again after it"
            )

    def refuse_unseen_backward(self) -> None:
        """Raise if backward has entered the group before any of the group's hooks ran, and may have computed with
        memory that was freed, or that an all-gather was still filling."""
        if self.persistent.is_unhooked or not self.position.reshards_after_forward:
            return
        if self.root is not None and self.root.backward is not None and self.swap in self.root.backward.shown:
            return  # gathered by hand, and gathered ever since
        for handle in self._handles:
            # Guarded memory refuses such access, so the gradients that are there needed no parameters (that of a bias).
            if not (handle.unsharded.memory.is_guarded or handle.unsharded.never_freed) and handle.unsharded.has_grad():
                raise MisuseRuntimeError(
                    f"a backward entered the fully_shard group {self.name} without passing its module's outputs, while "
                    "its parameters were not gathered: its gradients are wrong, and none was published. Return every "
                    "tensor that a loss needs from forward, or keep it as an attribute of the module"
                )

    @property
    def sleeping_error(self) -> str:
        """What a use of the parameters raises while ``offload_model()`` keeps them in host memory."""
        return (
            f"the parameters of the fully_shard group {self.name} have been in host memory since offload_model(): call "
            "onload_model(model) before using them"
        )

    def refuse_sleeping(self) -> None:
        """Raise if ``offload_model()`` has moved the parameters to host memory."""
        if self.persistent.is_asleep:
            raise MisuseRuntimeError(self.sleeping_error)

    def call_parameters(self, names: Names) -> None:
        """Set the names of the group's parameters in the root, for messages."""
        self.swap.called = names
        whole_group = self.name if len(self._handles) == 1 else ""
        for handle in self._handles:
            handle.call_parameters(names, whole_group)
            for sharded, name in zip(handle.sharded_params, handle.names, strict=True):
                mark_owner(sharded, self.name, name)

    def was_unsharded_written(self) -> bool:
        """Whether the version counter of an unsharded parameter has moved."""
        return any([handle.unsharded.was_written() for handle in self._handles])

    def check_after_forward(self, when: str = "inside forward") -> None:
        """Raise if ``forward`` replaced, added or removed a parameter, or wrote to an unsharded one."""
        self.swap.check_unsharded_slots()
        for handle in self._handles:
            if handle.unsharded.was_written():
                handle.unsharded.forgive_write()
                names = ", ".join(handle.names)
                raise MisuseRuntimeError(
                    f"a parameter of the fully_shard group {self.name} was modified in place {when}; the "
                    f"change would be lost when the group is resharded. It is one of {names}. Modify the (sharded) "
                    "parameters outside forward (after reshard()), or keep values that change in forward in a buffer"
                )

    def end_left(self) -> None:
        """Show the sharded parameters between forwards again; raise if the unsharded ones were changed."""
        if self.is_complete and self.swap.is_left:
            self.swap.end_left()
            self.check_after_forward("while it was gathered, between forwards")

    @property
    def is_busy(self) -> bool:
        """Whether a forward or backward of the group, or of its root, is running or was interrupted."""
        root = self.root
        is_in_root = root is not None and (
            root.forward.depth or root.backward is not None or root.failed_backward is not None
        )
        return bool(self.progress.running_forwards or self.backward.active_uses or is_in_root)

    @property
    def is_of_another_thread(self) -> bool:
        """Whether this is neither the thread of the root's last forward nor that of its running backward."""
        root, here = self.root, get_ident()
        if root is None or root.forward.thread == here:
            return False
        backward = root.backward
        return backward is None or backward.thread != here

    def live_modules(self) -> list[nn.Module]:
        """The modules given to the call."""
        return [module for ref in self.modules if (module := ref()) is not None]

    def set_flat_params(self, handles: list[FlatParamHandle]) -> None:
        self._handles = handles
        for handle in handles:
            handle.owner = weakref.ref(self)
        self.apply_options()

    def __deepcopy__(self, memo: dict[int, Any]) -> _FSDPState:
        """The state for the copies of the group's modules: a group of its own that has not run yet."""
        root = self.root
        is_in_backward = root is not None and (root.backward is not None or root.failed_backward is not None)
        is_left = self.is_complete and self.swap.is_left
        if self.progress.running_forwards or self.backward.active_uses or is_in_backward or is_left:
            raise MisuseRuntimeError(
                f"copy.deepcopy(): a forward or backward of the fully_shard group {self.name} is running (or was "
                "interrupted): copy the model between iterations"
            )
        # Without a ``swap``, which is prepared at the first forward: the copies of the modules are not complete yet.
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
            f"a module with the fully_shard group {self.name} cannot be pickled or saved whole by torch.save(): its "
            "process groups exist only in this process. Save model.state_dict() with torch.distributed.checkpoint"
        )

    def __repr__(self) -> str:
        return f"_FSDPState({self.name}, {self._handles})"


class ParameterDetector(Protocol):
    """Detects the user's changes between iterations or inside forward; see ``change_detection``."""

    def is_unchanged(self) -> bool: ...

    def has_unsharded_grads(self) -> bool: ...

    def backward_has_ended(self) -> None: ...

    def was_toggled(self) -> bool: ...

    def has_grads(self) -> bool: ...

    def newly_kept(self) -> list[tuple[_FSDPState, list[torch.Tensor]]]: ...

    def was_forward_unchanged(self) -> bool: ...

    def follow_addresses(self) -> None: ...


class _Detectors:
    """The detectors of several roots, as one."""

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


class Scheduler(Protocol):
    """When the groups of a root gather and reduce. ``FixedOrder``: all ranks run all groups; ``SkippingOrder``: each
    rank may skip some (``fully_shard(optional=True)``). Hooks report where they are, and nothing else in the package
    knows whether this rank must agree with the others on the next collective.

    Attributes:
        skips: ranks may skip groups, which functional mode cannot gather.
        is_capturable: graphs may contain the groups, whose gathers the compiler then places.
    """

    skips: bool
    is_capturable: bool

    def reset(self) -> None:
        """Forget the iteration that was going on."""

    def reset_backward(self) -> None:
        """Forget the backward that was going on, or has ended; a forward may go on."""

    def attach_root(self, root: Root) -> None:
        """Called once, when ``root`` is set up."""

    def begin_forward(self, root: Root) -> None:
        """An outermost forward begins."""

    def refresh_kept(self, root: Root, state: _FSDPState, handle: FlatParamHandle) -> None:
        """An outermost forward begins, with a flat parameter still gathered: gather again if it may be out of date."""

    def check_forward(self, root: Root, state: _FSDPState) -> bool:
        """Called before a forward of a group is counted, if the scheduler ``skips``: an error here is one of a forward
        that has not begun. Returns whether the scheduler follows ``requires_grad`` in the group itself, on all
        ranks."""

    def before_forward(self, root: Root, state: _FSDPState, use: HookedUse | None) -> None:
        """A forward of a group begins: gather the group, and prefetch the next one."""

    def before_recomputation(self, root: Root, state: _FSDPState, use: HookedUse | None) -> None:
        """Activation checkpointing repeats a forward of a group: gather the group."""

    def after_forward(self, root: Root, state: _FSDPState, use: GroupUse | None) -> bool:
        """A forward of a group has ended, normally or by an exception. Returns whether to look for untracked writes now
        (before ``end_group``, which may gather over them)."""

    def end_group(self, root: Root, state: _FSDPState) -> None:
        """Called when a forward of a group has ended normally, if the scheduler ``skips``."""

    def announce_failure(self, root: Root) -> None:
        """An iteration of the root has failed on this rank."""

    def begin_backward(self, root: Root) -> None: ...

    def before_backward(self, root: Root, state: _FSDPState, record: ForwardRecord, position: int) -> None:
        """A backward has reached the forward of a group in ``record``, at this position in ``record.hooked``: gather
        the group, and prefetch the previous one."""

    def ready_to_reduce(self, root: Root, state: _FSDPState) -> None:
        """This rank has all gradients of a group."""

    def end_backward(self, root: Root) -> None:
        """All groups are ready. Gradients are published next."""

    def unshard(self, root: Root, state: _FSDPState) -> None:
        """The user unshards a group."""

    def before_single_gather(self, root: Root, state: _FSDPState) -> None:
        """All ranks are about to gather a parameter of a group outside the group's hooks."""

    def serve_peers(self, root: Root) -> None:
        """See ``controls.sync_optional_groups``."""


class Root:
    """The data that the groups below one root share, driven by the runtime.

    Each state refers to its root. The root refers to its states weakly, so that it does not keep a model alive.

    Attributes:
        states: every group of the root, by index; the root's own is first.
        by_root_module: the same groups, by root module: roots that share groups have one ``Root`` (see ``registry``).
        communicator: streams and reduce buffers.
        exchange: the control exchange at the end of backward.
        used_starts: where the parameters of each handle begin in the exchange's ``used``.
        forward_exchange: the exchange at the end of forwards that have checked for untracked writes. It has the size of
            ``exchange``, so that the two pair up if ranks differ.
        generation: generation of the module tree when ``states`` was collected.
        order: the order of collectives on its process group.
        number: number of the root on its process group, from 1.
        num_forwards: number of top-level forwards so far.
        records: record of the last forward of each module, by the index of its group.
        forward: the current (or most recent) top-level forward.
        backward: the running backward, if there is one.
        failed_backward: a backward that ended in an exception, until its remains are discarded.
        recomputed: groups that activation checkpointing has just run again, left unsharded for their backward.
        scheduler: when the groups gather and reduce.
        gather_parameter: gathers one parameter of a group for a use outside its forward, differentiably.
        steps: of optimizers; ``None`` before they are counted.
        compared_graphs: digests of the captured graphs that all ranks have compared.
    """

    __slots__ = (
        "__weakref__", "backward", "by_root_module", "communicator", "compared_graphs", "exchange", "failed_backward",
        "forward", "forward_exchange", "gather_parameter", "generation", "num_forwards", "number", "order",
        "recomputed", "records", "scheduler", "states", "steps", "used_starts",
    )  # fmt: skip

    def __init__(
        self,
        by_root_module: list[list[_FSDPState]],
        communicator: Communicator,
        exchanges: tuple[ControlExchange, ControlExchange],
        generation: int,
        order: CollectiveLog,
        number: int,
        num_forwards: int,
        scheduler: Scheduler,
        gather_parameter: Callable[[Root, _FSDPState, FlatParamHandle, int], torch.Tensor],
    ) -> None:
        states = dict.fromkeys(state for below in by_root_module for state in below)
        self.states = [weakref.ref(state) for state in states]
        self.by_root_module = [[weakref.ref(state) for state in below] for below in by_root_module]
        self.communicator = communicator
        self.exchange, self.forward_exchange = exchanges
        self.scheduler = scheduler
        self.gather_parameter = gather_parameter
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
        self.steps: StepCounts | None = None
        self.compared_graphs: set[str] = set()

    def reset(self) -> None:
        """Forget the iteration that was going on."""
        self.scheduler.reset()
        self.forward = Forward(ForwardRecord(self.num_forwards, self.states), self.forward.previous)
        self.reset_backward()

    def reset_backward(self) -> None:
        """Forget the backward that was going on."""
        self.scheduler.reset_backward()
        self.backward = self.failed_backward = None
        self.recomputed = []

    def begin_forward(
        self, outermost: int, caller: FrameType | None, is_given: bool, task: int, num_backwards: int
    ) -> None:
        """Begin a top-level forward of the group with index ``outermost``; for the other arguments see ``Forward``."""
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
        assert self.backward is not None
        backward, self.backward = self.backward, None
        self.recomputed.clear()
        self.scheduler.reset_backward()
        return backward

    def fail_backward(self, backward: Backward) -> None:
        """Note that ``backward`` has ended in an exception and its remains must be discarded."""
        if self.backward is backward:
            self.backward = None
        if self.failed_backward is not None and self.failed_backward.has_added:
            backward.has_added = True
        self.failed_backward = backward

    def has_one_group(self) -> bool:
        """Whether a single group has all the parameters."""
        return len([state for state in self.live_states() if state._handles]) == 1

    def has_backward_to_come(self) -> bool:
        """Whether a backward is running, or may still reach a forward that has run."""
        return self.backward is not None or any([state.progress.awaiting_backward for state in self.live_states()])

    def phase(self) -> str:
        """The phase that the root is in, as text; empty between iterations."""
        if self.backward is not None:
            return f"the backward after forward {self.num_forwards}"
        return f"forward {self.num_forwards}" if self.forward.depth > 0 else ""

    @property
    def has_added(self) -> bool:
        """Whether discarding the running or failed backward also loses older gradients."""
        return any(item is not None and item.has_added for item in (self.backward, self.failed_backward))

    @property
    def detector(self) -> ParameterDetector | None:
        """The ``ChangeDetector`` of all groups; ``None`` if the root module no longer exists."""
        # It is kept on the root's own state, not here: it refers to modules, which refer to their states, which refer
        # to this root, and the cycle would keep the model alive.
        if len(self.by_root_module) == 1:
            owner = self.states[0]()
            return None if owner is None else owner.detector
        owners = [states[0]() for states in self.by_root_module]
        detectors = [owner.detector for owner in owners if owner is not None and owner.detector is not None]
        return _Detectors(detectors) if detectors else None

    @property
    def mesh(self) -> DataParallelMesh:
        """The mesh with the most peers: all ranks that run the root together."""
        return widest_mesh(self.live_states())

    @property
    def data_mesh(self) -> DataParallelMesh:
        """The mesh with the most data ranks: all ranks that have a batch of their own."""
        return max((state.mesh for state in self.live_states()), key=attrgetter("data_world_size"))

    @property
    def label(self) -> str:
        """The name of the root in messages, for programs that have several."""
        owner = self.states[0]()
        names = [] if owner is None else [type(module).__name__ for module in owner.live_modules()]
        return f"model {self.number} ({', '.join(names)})"

    @property
    def is_dead(self) -> bool:
        """Whether an iteration was interrupted; only meaningful while no forward and no backward is running."""
        forward = self.forward
        return bool(forward.depth > 0 or forward.has_failed or self.backward or self.failed_backward)

    def live_states(self) -> list[_FSDPState]:
        return [state for ref in self.states if (state := ref()) is not None]


def widest_mesh(states: Sequence[_FSDPState]) -> DataParallelMesh:
    """The mesh with the most peers among the meshes of some groups; the first of several."""
    return max((state.mesh for state in states), key=lambda mesh: mesh.peers.size())


def state_of(handle: FlatParamHandle) -> _FSDPState | None:
    """The group that owns a flat parameter."""
    return cast("_FSDPState | None", None if handle.owner is None else handle.owner())

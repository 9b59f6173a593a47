"""The data that graphs captured by ``torch.compile`` read from a group, and the gradients that they deliver to it.

A graph reads everything from one plain object in the ``__dict__`` of the group's modules: the tensors that it takes as
inputs, and one string. The graph is guarded on that string alone; it names what the graph does (``GraphPlan``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ..._torch import DTensorSpec
from ...core.flat import FlatParamHandle, specs_of
from ...core.group import _FSDPState, state_of
from ...errors import MisuseRuntimeError
from .captured_shards import CapturedShard, GatherPlan, GraphInputs, captured_flat, deliver_gradients, plan_id

CAPTURED = "_fsdp_compose_captured"  # in the module's __dict__

Slots = tuple[tuple[tuple[str, ...], tuple[tuple[str, int, int], ...]], ...]
"""For each module (a path from the group's module): the name of each parameter, its flat parameter, its index there."""


Placed = tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]]
"""Mesh, placements, shape and stride of a DTensor."""


class GraphPlan(NamedTuple):
    """What a graph does for one module of a group, in plain constants."""

    numbers: tuple[int, ...]  # the ``plan_id`` of each flat parameter
    reshards: bool  # whether the gather is repeated in backward
    # The dtypes that inputs and outputs are cast to; ``None``: no cast.
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    slots: Slots  # where parameters are shown
    others: tuple[int, ...]  # indexes of the group's other modules
    gathered: tuple[bool, ...]  # for each flat parameter, whether its parameters are in memory of their own


_plans: dict[tuple[GraphPlan, ...], str] = {}  # the key of each


class CapturedGroup:
    """One group, as graphs see it."""

    def __init__(self, state: _FSDPState, note: Callable[[torch.Tensor], None]) -> None:
        """``note`` is called when a graph has delivered a gradient."""
        self.shards: list[CapturedShard] = []  # the leaves, by flat parameter
        self.inputs: tuple[GraphInputs, ...] = ()  # of graphs, by flat parameter
        self.key = ""  # names the plans, one for each module
        # By flat parameter, the arguments of ``DTensor.from_local`` for each parameter that tensor parallelism has cut,
        # and ``None`` for the others; empty if it has cut none.
        self.placed: tuple[tuple[Placed | None, ...], ...] = ()
        # In a group of several modules, during a capture: the parameters that the first module has gathered for the
        # others, and the indexes of those that have yet to run.
        self.held: Any = None
        self.pending: tuple[int, ...] = ()
        self._slots = [_slots_below(module, state) for module in state.live_modules()]
        self._followed: object = None
        self._plans: list[tuple[object, list[GatherPlan], str]] = []
        self._state = weakref.ref(state)
        self._note = note
        self.follow()

    def __deepcopy__(self, _memo: dict[int, Any]) -> None:
        """Not copied: a copy of the module makes its own ``CapturedGroup`` when it is captured."""

    def follow(self) -> None:
        """Update the plans and inputs of the next graphs to the group's present options, parameters and root."""
        state = self._state()
        if state is None:
            return
        handles = state._handles
        shards = [id(handle.shard) for handle in handles]
        flags = [handle.unsharded.flags for handle in handles]
        present = (state.options, state.position, [handle.mesh for handle in handles], shards, flags)
        if present == self._followed:
            return
        self._followed = present
        has_same_shards = [id(shard.shard) for shard in self.shards] == shards
        if not has_same_shards:
            self._plans = []
        plan = next((item for item in self._plans if item[0] == present), None)  # accumulation alternates between two
        if plan is None:
            plan = (present, *self._plan(state))
            self._plans = [*self._plans[-3:], plan]
        _, flats, self.key = plan
        if has_same_shards:
            for shard, flat in zip(self.shards, flats, strict=True):
                shard.follow(flat)
        else:
            self.shards = [CapturedShard(handle, flat, self._note) for handle, flat in zip(handles, flats, strict=True)]
        self.placed = ()
        if any(handle.tensor_parallel is not None for handle in handles):
            self.placed = tuple(
                tuple(map(_placed, specs_of(handle.tensor_parallel, len(handle.fqns)))) for handle in handles
            )
        self.inputs = tuple(shard.inputs for shard in self.shards)

    def _plan(self, state: _FSDPState) -> tuple[list[GatherPlan], str]:
        """What the next graphs do with each flat parameter, and the key for it."""
        options = state.options
        flats = [
            captured_flat(handle, options.requires_gradient_sync, options.requires_all_reduce, options.reduction)
            for handle in state._handles
        ]
        policy = options.mp_policy
        plans = tuple(
            GraphPlan(
                tuple(map(plan_id, flats)),
                state.position.reshards_after_forward,
                policy.param_dtype if policy.cast_forward_inputs else None,
                policy.output_dtype,
                slots,
                tuple(other for other in range(len(self._slots)) if other != index),
                tuple(flat.is_gathered for flat in flats),
            )
            for index, slots in enumerate(self._slots)
        )
        return flats, _plans.setdefault(plans, str(len(_plans)))

    def knows(self, place: torch.Tensor) -> bool:
        """Whether a gradient that a graph has delivered to ``place`` will be used."""
        return any([place is known for shard in self.shards for known in shard.places()])

    def bring(self) -> tuple[bool, bool]:
        """Move the gradients that graphs have delivered to where an eager backward puts them.

        No reduction of the group may be in flight. Returns whether this changed gradients of earlier backwards, and
        whether something is still to be reduced."""
        has_added = is_due = False
        state = self._state()
        for handle, shard in zip([] if state is None else state._handles, self.shards, strict=True):
            if shard.has_grad():
                added, due = deliver_gradients(handle, shard)
                has_added, is_due = has_added or added, is_due or due
        if is_due and state is not None:
            state.persistent.has_unsynced = True
        return has_added, is_due

    def drop(self) -> None:
        for shard in self.shards:
            shard.drop()


def hold(group: CapturedGroup, views: Any, pending: tuple[int, ...]) -> None:
    """Keep ``views``, which the first of several modules has gathered, for the ``pending`` modules; ``None`` frees
    them. Traced."""
    group.held, group.pending = views, pending


def _placed(spec: DTensorSpec | None) -> Placed | None:
    if spec is None:
        return None
    assert spec.tensor_meta is not None
    return spec.mesh, spec.placements, spec.tensor_meta.shape, spec.tensor_meta.stride


def graph_plan_of(key: str, index: int) -> GraphPlan:
    """The plan for the module with this index in its group."""
    return next(plans for plans, known in _plans.items() if known == key)[index]


def _slots_below(module: nn.Module, state: _FSDPState) -> Slots:
    paths = {id(item._parameters): tuple(name.split(".")) if name else () for name, item in module.named_modules()}
    handles = {handle: number for number, handle in enumerate(state._handles)}
    found: dict[tuple[str, ...], list[tuple[str, int, int]]] = {}
    for parameters, name, handle, index in state.swap.slots():
        path = paths.get(id(parameters))
        if path is not None:
            found.setdefault(path, []).append((name, handles[handle], index))
    return tuple((path, tuple(entries)) for path, entries in found.items())


def captured_leaves(handle: FlatParamHandle) -> list[nn.Parameter]:
    """The leaves to which graphs deliver gradients of a flat parameter."""
    state = state_of(handle)
    captured = None if state is None else state.persistent.captured
    if state is None or captured is None:
        return []
    return captured.shards[state._handles.index(handle)].places()


def is_capturable(handles: Sequence[FlatParamHandle]) -> bool:
    """Whether graphs can do everything that these handles need."""
    return all(
        handle.unsharded.shows_shards
        and not handle.storage.has_host_gradients
        and (handle.tensor_parallel is None or handle.tensor_parallel.is_shown_as_stored)
        for handle in handles
    )


class VersionsBefore:
    """Parameter versions of groups that graphs may run, taken before they run."""

    def __init__(self, states: Iterable[_FSDPState]) -> None:
        self._before = [(weakref.ref(state), state.shard_versions()) for state in states]

    def add(self, state: _FSDPState) -> None:
        """Add a group that a graph is about to run for the first time."""
        if state not in [ref() for ref, _ in self._before]:
            self._before.append((weakref.ref(state), state.shard_versions()))

    def check_forward(self) -> None:
        """Raise if the forward has written to sharded parameters."""
        # A graph does not know that the parameters that it gathers share memory with those that forward writes to, so
        # it may read them before or after the write.
        for ref, versions in self._before:
            state = ref()
            if state is not None and state.shard_versions() != versions:
                raise MisuseRuntimeError(
                    f"a forward has written to sharded parameters of the fully_shard group {state.name}, which "
                    "torch.compile runs in a graph: the graph may have computed with the old values. Write to "
                    "parameters outside forward, or exclude the module that writes from the graph "
                    "(torch.compiler.disable) and compile the sharded modules one by one"
                )

    def check_backward(self) -> None:
        for ref, versions in self._before:
            state = ref()
            if state is not None:
                state.check_versions(versions)

"""The captured mode: forwards that ``torch.compile`` traces as part of a larger graph.

The hooks of such a group are traced: the graph itself gathers, shows views of the gathered parameters, and reduces in
its backward. The work for the iteration as a whole (the root's hooks, the checks, the exchange, the publication of
gradients) stays outside the graph, in eager code. A group that reshards repeats its gather in backward, as activation
checkpointing repeats a forward, so the graph keeps no whole parameter in between.

Dynamo traces ``enter`` and ``leave``. They read a ``GraphPlan``, which plain Python computes during tracing.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import Counter
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ..._torch import (
    call_after_compilation,
    change_modules_while_traced,
    mark_constant,
    tracing_attempt,
)
from ...core.comm import first_difference, meet
from ...core.group import SHARDED_PARAMS, _FSDPState, caches_parameters, never_traced, state_of_hooked
from ...core.runtime.backward import begin_backward
from ...core.runtime.inputs_outputs import cast, map_tensors, prepare_inputs
from ...errors import MisuseRuntimeError
from .captured_group import CAPTURED, CapturedGroup, GraphPlan, VersionsBefore, graph_plan_of, hold, is_capturable
from .captured_shards import GraphInputs, gather_captured, refuse_written, summary_of


@mark_constant
def can_capture(module: nn.Module) -> bool:
    """Whether graphs can contain a forward of ``module``; if so, prepares the group for them."""
    state = state_of_hooked(module)
    root, options = state.root, state.options
    if (
        root is None
        or not root.forward.depth
        or (state.position.is_outermost and not root.forward.is_region)
        or options.is_functional
        or state.mesh.replicas is not None  # whose object averages in Python
        or not root.scheduler.is_capturable
        or not is_capturable(state._handles)
        or caches_parameters(state.swap)
    ):
        return False
    if state.persistent.captured is None:
        torch.compiler.allow_in_graph(gather_captured)
        torch.compiler.allow_in_graph(refuse_written)
        state.persistent.captured = CapturedGroup(state, functools.partial(_note_gradient, weakref.ref(state)))
    for one in state.live_modules():
        one.__dict__[CAPTURED] = state.persistent.captured
    return True


@mark_constant
def _plan(module: nn.Module, key: str) -> tuple[Any, ...]:
    """The ``GraphPlan`` for ``module``, as a plain tuple."""
    return (*graph_plan_of(key, _place(module)),)


def _place(module: nn.Module) -> int:
    """The index of a module in its group."""
    return [id(item) for item in state_of_hooked(module).live_modules()].index(id(module))


@never_traced
def _note_gradient(reference: weakref.ref[_FSDPState], place: torch.Tensor) -> None:
    """Called when a graph has delivered a gradient. The backward may have passed none of the root's outputs."""
    state = reference()
    if state is None or state.root is None:
        return
    if state.persistent.captured is None or not state.persistent.captured.knows(place):
        raise MisuseRuntimeError(
            f"parameters of the fully_shard group {state.name} were moved (module.to()?) between a forward that "
            "torch.compile runs in a graph and its backward: run backward before the move, or run forward again after "
            "it"
        )
    if state.root.backward is None:
        begin_backward(state.root)


def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """What a graph does before a forward of ``module``."""
    group = module.__dict__[CAPTURED]
    _note_capture(module, group.key)
    numbers, reshards, input_dtype, _, slots, others, _ = _plan(module, group.key)
    views = group.held
    if views is None:
        views = [_gathered(number, inputs, reshards) for number, inputs in zip(numbers, group.inputs)]
        if group.placed:
            views = [_place_views(locals_, placed) for locals_, placed in zip(views, group.placed)]
        if others:
            change_modules_while_traced(hold, group, views, others)
    else:
        change_modules_while_traced(hold, group, views, tuple([i for i in group.pending if i in others]))
    change_modules_while_traced(_show, module, slots, views)
    return prepare_inputs(args, kwargs, input_dtype, None)


def leave(module: nn.Module, output: Any) -> Any:
    """What a graph does after a forward of ``module``."""
    group = module.__dict__[CAPTURED]
    _, _, _, output_dtype, slots, _, gathered = _plan(module, group.key)
    if group.held is not None and not group.pending:
        change_modules_while_traced(hold, group, None, ())
    shown = [(path, name) for path, entries in slots for name, flat, _ in entries if gathered[flat]]
    names = ", ".join([".".join((*path, name)) for path, name in shown])
    refuse_written(names, *[_below(module, path).__dict__["_parameters"][name] for path, name in shown])
    change_modules_while_traced(_hide, module, slots)
    return None if output_dtype is None else map_tensors(lambda tensor: cast(tensor, output_dtype), output)


def _gathered(number: int, inputs: GraphInputs, reshards: bool) -> tuple[torch.Tensor, ...]:
    leaf, grad_leaf, unused_mask = inputs
    if reshards and torch.is_grad_enabled():
        views: tuple[torch.Tensor, ...] = checkpoint(_gather, number, leaf, grad_leaf, unused_mask, use_reentrant=False)
        return views
    return gather_captured(number, leaf, grad_leaf, unused_mask)


def _gather(
    number: int, leaf: torch.Tensor, grad_leaf: torch.Tensor | None, unused_mask: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return gather_captured(number, leaf, grad_leaf, unused_mask)


def _place_views(views: tuple[torch.Tensor, ...], placed: Any) -> tuple[torch.Tensor, ...]:
    """Wrap the views of parameters that tensor parallelism has cut in DTensors."""
    found = []
    for view, place in zip(views, placed):
        if place is not None:
            mesh, placements, shape, stride = place
            view = DTensor.from_local(view, mesh, placements, run_check=False, shape=shape, stride=stride)
        found.append(view)
    return tuple(found)


def _show(module: nn.Module, slots: Any, views: list[tuple[torch.Tensor, ...]]) -> None:
    for path, entries in slots:
        target = _below(module, path)
        shown = dict(target.__dict__["_parameters"])
        for name, flat, index in entries:
            shown[name] = views[flat][index]
        target.__dict__["_parameters"] = shown


def _hide(module: nn.Module, slots: Any) -> None:
    for path, _ in slots:
        target = _below(module, path)
        target.__dict__["_parameters"] = target.__dict__[SHARDED_PARAMS]


def _below(module: nn.Module, path: tuple[str, ...]) -> nn.Module:
    for name in path:
        module = getattr(module, name)
    return module


# ---- Captured collectives are compared when a newly compiled graph has others than before, before it runs.
#
# The collectives of graphs are not in the order that is exchanged at the end of a backward. Ranks with different graphs
# would wait for each other in different collectives, so they compare their graphs first. Graphs that differ only in
# shapes are not compared, because ranks may compile those at different times.


# A traced forward: the group, the key of its plans, the module's index in the group, and whether gradients are needed.
_Traced = tuple[_FSDPState, str, int, bool]
_capture: tuple[object, list[_Traced]] = (None, [])  # Dynamo's latest attempt to trace a frame, if any; what is in it


@mark_constant
def _note_capture(module: nn.Module, key: str) -> None:
    """Called while Dynamo traces a forward of ``module``."""
    global _capture
    state, attempt = state_of_hooked(module), tracing_attempt()
    if _capture[0] is not attempt:  # Dynamo starts a new attempt after each graph break
        _capture = attempt, []
        call_after_compilation(_compare)
    root = state.root
    if root is not None:
        versions = root.forward.record.captured
        if not isinstance(versions, VersionsBefore):
            versions = VersionsBefore(())
            root.forward.record.captured = versions
        versions.add(state)
    _capture[1].append((state, key, _place(module), torch.is_grad_enabled()))


def _compare() -> None:
    """Raise, on every rank, if ranks have captured different collectives. Also raise if only some modules of a group
    were traced."""
    global _capture
    (_, traced), _capture = _capture, (None, [])
    if not traced:
        return
    _check_complete(traced)
    root = traced[0][0].root
    if root is None or not root.mesh.has_peers or root.mesh.is_simulated:
        return
    lines = [_line(state, graph_plan_of(key, index), has_grad) for state, key, index, has_grad in traced]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if digest in root.compared_graphs:
        return

    def explain(rank: int, ours: str, theirs: str) -> str:
        difference = first_difference(ours.split("\n"), theirs.split("\n"))
        assert difference is not None, "digests differ"
        number, a, b = difference
        return (
            f"torch.compile: the ranks have captured graphs with different collectives: group {number} is {a} on rank "
            f"0 and {b} on rank {rank}. They would wait for each other, so none was run. Make forward take the same "
            "path through the fully_shard'ed modules on every rank"
        )

    meet(root.mesh.peers, "comparing captured graphs", digest, lambda _: "", "\n".join(lines), explain)
    root.compared_graphs.add(digest)


def _check_complete(traced: list[_Traced]) -> None:
    counts: dict[_FSDPState, Counter[int]] = {}
    for state, _, index, _ in traced:
        counts.setdefault(state, Counter())[index] += 1
    for state, found in counts.items():
        modules = state.live_modules()
        if len({found[index] for index in range(len(modules))}) > 1:
            names = ", ".join(type(module).__name__ for module in modules)
            raise MisuseRuntimeError(
                f"torch.compile: a graph runs only some of the modules of the fully_shard group {state.name} ({names}),"
                " or runs some more often than others; the parameters gathered for them could not be freed. Call "
                "fully_shard() separately for modules that do not always run together"
            )


def _line(state: _FSDPState, plan: GraphPlan, has_grad: bool) -> str:
    what = "; ".join(summary_of(number) for number in plan.numbers)
    return (
        f"{state.name} ({what}{', gathered again in backward' if plan.reshards and has_grad else ''}"
        f"{'' if has_grad else ', without gradients'})"
    )

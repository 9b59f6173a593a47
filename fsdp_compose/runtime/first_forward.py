"""The first forward of a root: it is set up, and the ranks compare what they have."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from types import FrameType

import torch.nn as nn

from .._torch import current_graph_task_id
from ..comm import Carrier, ControlExchange, DataParallelMesh, Names, first_difference, is_on, meet
from ..flat import Communicator, FlatParamHandle, describe, handle_of, refuse_shared_memory, regions_of
from ..group import (
    CollectiveOrder,
    LockstepCommunicator,
    Move,
    Root,
    _FSDPState,
    announce_first_forward,
    apply_moves,
    contexts_of,
    count_steps,
    find_moves,
    judge_places,
    look_after_standstill,
    modules_to_run,
    prepare_swap,
    rebind_live_optimizers,
    refuse_asleep,
    refuse_unwritten_buffers,
    roots_together,
    take_assigned,
    unsharded_tensors,
)
from .advice import advise
from .buckets import watch_buckets
from .data_ranks import mesh_of_root
from .finding_hosts import check_optional, rounds_of
from .recovery import recover
from .replicas import broadcast_first_replica, compare_replicas
from .user_changes import refuse_late_grad_dtype, take_over


class _Tree:
    """Counts the ``fully_shard`` calls: after each, roots look at their module tree again."""

    generation = 0


tree = _Tree()


def tree_has_changed() -> None:
    """Called when a group was added somewhere."""
    tree.generation += 1


def _call_parameters(found: Sequence[tuple[_FSDPState, str]], roots: Iterable[nn.Module]) -> None:
    """Call the parameters of groups, of which the modules have these names, as in their root; of a group of several
    modules one may be outside the roots."""
    called = {module: name for root in reversed([*roots]) for name, module in root.named_modules()}
    for state, name in found:
        modules = state.live_modules()
        several = [called.get(module, type(module).__name__) for module in modules]
        state.call_parameters(Names((name,) if len(modules) == 1 else tuple(several)))


def initialise(state: _FSDPState, module: nn.Module) -> Root:
    """Make ``state``, whose module begins a forward outside every other, the root of the groups below it; together with
    the roots that share groups with it, if there are some.

    All ranks of the mesh call this together; they compare what they have.

    Raises:
        ValueError: a trainable parameter below the root belongs to no group, or parameters are on the meta device.
        RuntimeError: on every rank, the ranks have different models; or a rank did not come.
    """
    roots = roots_together(module)
    names: dict[_FSDPState, str] = {}
    for part in roots:
        for item, name in part.groups:
            names.setdefault(item, name)
    found, states, owners = list(names.items()), list(names), [part.state for part in roots]
    refuse_asleep(states)
    check_optional(owners, names)
    earlier = contexts_of(states)
    for context in earlier:
        _make_joinable(context, module)
    for item in states:
        if not item.is_complete:
            prepare_swap(item)
        take_assigned(item.swap)
    moves: list[Move] = []
    for part in roots:
        known = {sharded for move in moves for sharded in move.sharded_params}
        moves += [move for move in find_moves(part.module, part.states) if known.isdisjoint(move.sharded_params)]
    rebind_live_optimizers()
    for part in roots:
        _check_everything_is_managed(part.module, part.states)
        refuse_unwritten_buffers(modules_to_run(part.module))
        _refuse_shared_memory(part.module, part.groups)
    mesh = mesh_of_root(found)
    for index, (item, name) in enumerate(found):
        item.take_place(name, index, is_outermost=item in owners)
    _call_parameters(found, (part.module for part in roots))
    order = CollectiveOrder.of(mesh.peers)
    model = ""
    if mesh.has_peers:
        model = _meet_first_forward(order, mesh, state, states, moves)
    apply_moves(moves)
    _call_parameters(found, (part.module for part in roots))
    handles = [handle for item in states for handle in item._handles]
    num_params = sum(len(item.fqns) for item in handles)
    carrier = Carrier.of(mesh.peers) if mesh.has_peers else None
    exchange = ControlExchange(num_params, len(states), carrier)
    forward_exchange = ControlExchange(num_params, len(states), carrier, end_of="forward")
    rounds = rounds_of(states, carrier)
    starts = dict(zip(handles, accumulate((len(handle.fqns) for handle in handles), initial=0), strict=False))
    for handle, start in starts.items():
        handle.contributions.write_used_to(exchange.used[start : start + len(handle.fqns)])
    communicator = LockstepCommunicator(mesh.device) if is_on() else Communicator(mesh.device)
    communicator.serve(handles)
    number = order.admit(state, states, model)
    look_after_standstill()
    advise(mesh, states)
    parts = [part.states for part in roots]
    num_forwards = max((context.num_forwards for context in earlier), default=0)
    root = Root(parts, communicator, exchange, forward_exchange, tree.generation, order, number, num_forwards, rounds)
    root.used_starts.update(starts)
    if mesh.has_peers:
        count_steps(root)
    take_over(root, states)  # what was changed since fully_shard()
    refuse_late_grad_dtype(states)
    broadcast_first_replica([item for item in states if item.root is None])
    if mesh.has_peers:
        compare_replicas(mesh, [item for item in states if item.root is None])
    for item in states:
        watch_buckets(item)
        item.swap.note_children()
        item.join(root, keeps_outstanding=len(roots) > 1)
    return root


def _make_joinable(context: Root, module: nn.Module) -> None:
    """The groups of a root are about to be those of another one, or of several together: between iterations only."""
    is_in_backward = context.backward is not None and current_graph_task_id() != -1
    if is_in_backward or (context.forward.depth and is_running(context.forward.caller)):
        where = "backward" if is_in_backward else "forward"
        raise RuntimeError(
            f"the first forward of the fully_shard'ed {type(module).__name__} runs inside the {where} of another "
            "fully_shard'ed module, which is not around it and shares groups with it: run one forward of it before, "
            "outside"
        )
    if context.is_dead:
        recover(context)


def is_running(frame: FrameType | None) -> bool:
    """Whether ``frame`` is on the stack: tells a root that calls itself from a forward that was interrupted."""
    current: FrameType | None = sys._getframe() if frame is not None else None
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def _check_everything_is_managed(module: nn.Module, states: list[_FSDPState]) -> None:
    handles = {handle for item in states for handle in item._handles}
    ignored = {param for item in states for param in item.ignored}
    stray = [
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in modules_to_run(module)
        for name, param in submodule._parameters.items()
        if param is not None and param.requires_grad and not _is_held(param, handles) and param not in ignored
    ]
    if stray:
        raise ValueError(
            f"{len(stray)} trainable parameter(s) below a fully_shard'ed module belong to no group, so their gradients "
            f"would not be reduced: {', '.join(stray[:5])}{' ...' if len(stray) > 5 else ''}. They were added or "
            "replaced after fully_shard(): build the module first, or pass them as ignored_params"
        )


def _refuse_shared_memory(module: nn.Module, found: Sequence[tuple[_FSDPState, str]]) -> None:
    """Compare where the parameters of all groups were, and where all other tensors are."""
    regions = [
        replace(region, name=f"{name}.{region.name}" if name else region.name)
        for state, name in found
        for region in state.past.regions
    ]
    if regions:
        fqns = {submodule: name for name, submodule in modules_to_run(module)}
        refuse_shared_memory([*regions, *regions_of(unsharded_tensors(fqns, ()), are_sharded=False)])
    for state, _ in found:
        state.past.forget_regions()


def _is_held(param: nn.Parameter, handles: set[FlatParamHandle]) -> bool:
    """Whether ``param`` is one of the sharded parameters, or stands in the place of one."""
    place = handle_of(param)
    return place is not None and place[0] in handles


def _meet_first_forward(
    order: CollectiveOrder, mesh: DataParallelMesh, state: _FSDPState, states: list[_FSDPState], moves: list[Move]
) -> str:
    """Compare the models of all ranks; a digest of it."""
    lines = []
    for item in states:
        facts = [fact for handle in item._handles for fact in describe(handle)]
        options = {**item.options.facts(item.place.is_outermost), **item.mesh.facts()}
        lines += [json.dumps({"group": item.name, **fact}) for fact in (*facts, options)]
    lines += [
        json.dumps({"group": move.target.name, "tied parameters": [*move.sharded_params.values()]}) for move in moves
    ]
    details = "\n".join(lines)

    def explain(rank: int, ours: str, theirs: str) -> str:
        difference = first_difference(ours.split("\n"), theirs.split("\n"))
        assert difference is not None, "digests differ"
        _, a, b = difference
        return (
            f"first forward: the ranks have different models. The first difference is between rank 0, which has {a}, "
            f"and rank {rank}, which has {b}. Build the same model and call fully_shard() the same way on every rank"
        )

    digest = hashlib.sha256(details.encode()).hexdigest()

    announce_first_forward(mesh)
    place = order.place_of(state, states, digest)
    verdict = meet(mesh.peers, "first forward", digest, judge_places, details, explain, aside=place)
    if verdict:
        raise RuntimeError(verdict)
    return digest

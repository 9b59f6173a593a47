"""What happens once per iteration of a root: its first forward, the begin of a forward, the end of a backward, and
healing after an iteration that was interrupted. The per-group steps are in ``runtime``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from types import FrameType

import torch
import torch.nn as nn

from ._torch import backwards, current_graph_task_id, queue_end_of_backward
from .broken import failure_of
from .collectives import Communicator
from .dynamo import never_traced
from .edits import toggles
from .exchange import Carrier, ControlExchange
from .flat_param import FlatParamHandle, handle_of
from .given import own_values
from .groups import prepare_swap, unsharded_tensors
from .lockstep import LockstepCommunicator, announce_first_forward
from .meeting import RECOVERY_TIMEOUT, first_difference, meet
from .meta_buffers import refuse_unwritten_buffers
from .order import (
    ALL_GATHER,
    END_OF_BACKWARD,
    REDUCE_SCATTER,
    CollectiveOrder,
    code_of_flags,
    judge_places,
    name_models,
)
from .ranges import follow_profiler
from .rebind import rebind_live_optimizers
from .records import is_on, last_of_every_rank
from .roots import contexts_of, roots_together
from .shared_memory import refuse_shared_memory, regions_of
from .state import ForwardRecord, Phase, RootContext, _FSDPState, modules_to_run, states_to_run
from .ties import Move, carry_out, find_moves
from .watch import Watch

_IDLE = Phase.IDLE

_backward_numbers = count(1)  # of all roots: a use may outlive the root that it was made under

# Raised by every fully_shard call: tells roots to look at their module tree again.
_generation = 0


def tree_has_changed() -> None:
    """Called when a group was added somewhere."""
    global _generation
    _generation += 1


# ---- collectives of a group, each noted in the trace


def unshard(root: RootContext, state: _FSDPState) -> None:
    """Start the all-gathers of a group, if it is not unsharded."""
    for handle in state._handles:
        if not handle.is_unsharded:
            root.trace.append(state.code | ALL_GATHER)
            root.communicator.unshard(handle)


def unshard_for_use(root: RootContext, state: _FSDPState) -> None:
    """As ``unshard``, for a forward that is about to compute: what was gathered ahead, or kept, before the ranks wrote
    to the sharded parameters is gathered again."""
    for handle in state._handles:
        if not handle.is_unsharded:
            root.trace.append(state.code | ALL_GATHER)
            root.communicator.unshard(handle)
        elif (handle.shard._version != handle.gathered_version or handle.segments) and handle.is_stale():
            root.trace.append(state.code | ALL_GATHER)
            root.communicator.refresh(handle)


def wait_for_unshard(root: RootContext, state: _FSDPState) -> None:
    for handle in state._handles:
        if handle.all_gather_work is not None:
            root.communicator.wait(handle)


def reshard(root: RootContext, state: _FSDPState) -> None:
    """Free the unsharded parameters of a group, unless a forward of it is running."""
    for handle in state._handles:
        if handle.is_unsharded and not state.entries:
            root.communicator.reshard(handle)


def reduce(root: RootContext, state: _FSDPState) -> None:
    """Take the gradients of a group, reshard it, and reduce (or, without gradient sync, accumulate) them. A group of
    which a forward is running (the backward runs inside it) stays unsharded."""
    is_running = bool(state.entries)
    state.phase = Phase.POST_BACKWARD
    state.is_reduced = True
    state.has_unsynced = not state.requires_gradient_sync
    for handle in state._handles:
        if not (handle.is_trainable or (handle.accumulation is not None and state.requires_gradient_sync)):
            if not is_running:
                root.communicator.reshard(handle)
        elif state.requires_gradient_sync:
            root.trace.append(state.code | REDUCE_SCATTER)
            root.has_added |= handle.accumulation is not None
            root.communicator.reduce(handle, is_running)
            root.has_added |= handle.is_reduce_added
        else:
            root.has_added = True
            root.communicator.accumulate(handle, is_running)


# ---- requires_grad


def follow_requires_grad(root: RootContext, state: _FSDPState) -> None:
    """Take over what the user did to ``requires_grad`` of the sharded parameters. Noted in the trace: when a rank does
    it alone, ranks differ at the end of backward."""
    for handle in state._handles:
        handle.follow_requires_grad()
        root.trace.append(_code_of_flags(state, handle))


def follow_toggles(root: RootContext, state: _FSDPState) -> None:
    """Before a forward of a group under grad mode, when some ``requires_grad`` was set since its last one."""
    count = toggles.count
    if any([handle.was_toggled() for handle in state._handles]):
        follow_requires_grad(root, state)
    state.num_toggles = count


def follow_toggles_before_backward(root: RootContext) -> None:
    """As autograd does, give no gradient to what was frozen since forward. What is reduced does not change by it."""
    for state in root.live_states():
        for handle in state._handles:
            if handle.was_toggled():
                was_trainable = handle.is_trainable
                follow_requires_grad(root, state)
                handle.is_trainable |= was_trainable


def _follow_toggles_of_forward(root: RootContext, states: list[_FSDPState]) -> None:
    for state in states:
        for handle in state._handles:
            if handle.was_toggled_unsharded():
                handle.follow_unsharded_requires_grad()
                root.trace.append(_code_of_flags(state, handle))


def _code_of_flags(state: _FSDPState, handle: FlatParamHandle) -> int:
    return code_of_flags(state.code, f"{handle.prefix}{handle.fqns[0]}{handle.flags}")


# ---- first forward


def initialise(state: _FSDPState, module: nn.Module) -> RootContext:
    """Make ``state``, whose module begins a forward outside every other, the root of the groups below it; together with
    the roots that share groups with it, if there are some.

    All ranks of the mesh call this together; they compare what they have.

    Raises:
        ValueError: a trainable parameter below the root belongs to nobody, or parameters are on the meta device.
        RuntimeError: on every rank, the ranks have different models; or a rank did not come.
    """
    roots = roots_together(module)
    names: dict[_FSDPState, str] = {}
    for part in roots:
        for item, name in part.groups:
            names.setdefault(item, name)
    found, states, owners = list(names.items()), list(names), [part.state for part in roots]
    earlier = contexts_of(states)
    for context in earlier:
        _make_joinable(context, module)
    for item in states:
        if not item.is_complete:
            prepare_swap(item)
    moves: list[Move] = []
    for part in roots:
        known = {face for move in moves for face in move.faces}
        moves += [move for move in find_moves(part.module, part.states) if known.isdisjoint(move.faces)]
    rebind_live_optimizers()
    for part in roots:
        _check_everything_is_managed(part.module, part.states)
        refuse_unwritten_buffers(modules_to_run(part.module))
        _refuse_shared_memory(part.module, part.groups)
    mesh = state.mesh
    for item, name in found:
        if item.mesh.shard_group is not mesh.shard_group:
            raise ValueError(
                f"the fully_shard groups {name or '(root)'} and {state.name} below one root have different meshes "
                f"({item.mesh.mesh} and {mesh.mesh}): use one mesh for all groups of a model"
            )
    for index, (item, name) in enumerate(found):
        item.fqn, item.index = name, index
        item.set_prefix(f"{name}." if name else "")
        item.is_outermost = item in owners
        item.reshard_after_forward = not item.is_outermost if item.reshard_option is None else item.reshard_option
    order = CollectiveOrder.of(mesh.shard_group)
    model = _meet_first_forward(order, state, states, moves) if mesh.has_peers else ""
    carry_out(moves)
    for item, name in found:
        item.set_prefix(f"{name}." if name else "")
    handles = [handle for item in states for handle in item._handles]
    num_params = sum(len(item.fqns) for item in handles)
    carrier = Carrier.of(mesh.shard_group) if mesh.has_peers else None
    exchange = ControlExchange(num_params, len(states), carrier)
    forward_exchange = ControlExchange(num_params, len(states), carrier, may_stop=False, end_of="forward")
    start = 0
    for handle in handles:
        handle.write_used_to(exchange.used[start : (start := start + len(handle.fqns))])
    communicator = LockstepCommunicator(mesh.device) if is_on() else Communicator(mesh.device)
    number = order.admit(state, states, model)
    parts = [part.states for part in roots]
    root = RootContext(states, communicator, exchange, forward_exchange, _generation, parts, order, number)
    root.num_forwards = max((context.num_forwards for context in earlier), default=0)
    _take_over(root, states)  # what was changed since fully_shard()
    for item in states:
        item.root = root
        item.swap.note_children()
        outstanding = item.outstanding
        item.reset()
        if len(roots) > 1:
            item.outstanding = outstanding  # of another root's forward, whose backward is to come
    return root


def _make_joinable(context: RootContext, module: nn.Module) -> None:
    """The groups of a root are about to be those of another one, or of several together: between iterations only."""
    is_in_backward = context.is_in_backward and current_graph_task_id() != -1
    if is_in_backward or (context.depth and _is_running(context.caller)):
        where = "backward" if is_in_backward else "forward"
        raise RuntimeError(
            f"the first forward of the fully_shard'ed {type(module).__name__} runs inside the {where} of another "
            "fully_shard'ed module, which is not around it and shares groups with it: run one forward of it before, "
            "outside"
        )
    if context.is_dead:
        heal(context)


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
            f"{len(stray)} trainable parameter(s) below a fully_shard'ed module belong to no group, so nobody would "
            f"reduce their gradients: {', '.join(stray[:5])}{' ...' if len(stray) > 5 else ''}. They were added or "
            "replaced after fully_shard(): build the module first, or pass them as ignored_params"
        )


def _refuse_shared_memory(module: nn.Module, found: Sequence[tuple[_FSDPState, str]]) -> None:
    """Compare where the parameters of all groups were, and where all other tensors are."""
    regions = [
        replace(region, name=f"{name}.{region.name}" if name else region.name)
        for state, name in found
        for region in state.regions
    ]
    if regions:
        fqns = {submodule: name for name, submodule in modules_to_run(module)}
        refuse_shared_memory([*regions, *regions_of(unsharded_tensors(fqns, ()), are_sharded=False)])
    for state, _ in found:
        state.regions = []


def _is_held(param: nn.Parameter, handles: set[FlatParamHandle]) -> bool:
    """Whether ``param`` is one of the sharded parameters, or stands in the place of one."""
    place = handle_of(param)
    return place is not None and place[0] in handles


def _meet_first_forward(order: CollectiveOrder, state: _FSDPState, states: list[_FSDPState], moves: list[Move]) -> str:
    """Compare the models of all ranks; a digest of it."""
    lines = [
        json.dumps({"group": item.name, "reshard_after_forward": item.reshard_after_forward, **fact})
        for item in states
        for handle in item._handles
        for fact in handle.describe()
    ]
    lines += [json.dumps({"group": move.target.name, "tied parameters": [*move.faces.values()]}) for move in moves]
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

    announce_first_forward(state.mesh)
    place = order.place_of(state, states, digest)
    verdict = meet(state.mesh.shard_group, "first forward", digest, judge_places, details, explain, aside=place)
    if verdict:
        raise RuntimeError(verdict)
    return digest


# ---- begin of a top-level forward


def enter(state: _FSDPState, module: nn.Module) -> RootContext:
    """Find the root of a forward that is being entered outside backward; begin an iteration when it is the first."""
    follow_profiler()
    root = state.root
    if root is None:
        with own_values([item for item, _ in states_to_run(module)]):
            root = initialise(state, module)
        _begin_forward(root, state)
    elif root.depth == 0 or (state.is_outermost and not _is_running(root.caller)):
        if root.is_dead:
            heal(root)
        if root.watch is None or root.generation != _generation:
            root = initialise(state, module)  # the module that was the root is gone, or a group was added somewhere
        elif not root.watch.is_quiet():
            with own_values(root.live_states()):
                if not root.watch.is_quiet():
                    root = _follow_user(root, state, module)
        _begin_forward(root, state)
    return root


def _caller() -> FrameType | None:
    """The frame outside this package that has called a hook."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    return frame


def _is_running(frame: FrameType | None) -> bool:
    """Whether ``frame`` is on the stack: tells a root that calls itself from a forward that was interrupted."""
    current: FrameType | None = sys._getframe() if frame is not None else None
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def enter_alone(state: _FSDPState, module: nn.Module) -> RootContext:
    """The root of a group that the user drives by hand, outside forward and backward; ready to be unsharded."""
    follow_profiler()
    root = state.root
    if root is None or root.watch is None:
        return initialise(state, module)
    if root.depth == 0 and not root.watch.is_quiet():
        return _follow_user(root, state, module)
    return root


def _follow_user(root: RootContext, state: _FSDPState, module: nn.Module) -> RootContext:
    """The user has changed something since the last iteration: take it over, or refuse it."""
    states = root.live_states()
    if any(item.swap.children_changed() for item in states):
        return initialise(state, module)
    _take_over(root, states)
    return root


def _take_over(root: RootContext, states: list[_FSDPState]) -> None:
    for item in states:
        for handle in item._handles:
            if handle.has_unsharded_grad():
                _refuse_stray_gradients(item)
            if handle.was_toggled():
                follow_requires_grad(root, item)
            else:
                handle.follow_requires_grad()
        item.swap.check_slots()
        if any(handle.faces_moved() for handle in item._handles):
            _reflatten(root, item)
    _refuse_meta(states)
    watch_again(root)


def watch_again(root: RootContext) -> None:
    """Take a new picture of what the user may change."""
    for part in root.parts:
        owner = part[0]()
        if owner is not None:
            owner.watch = Watch([state for ref in part if (state := ref()) is not None])


def _begin_forward(root: RootContext, outermost: _FSDPState) -> None:
    """Free gradients that were dropped, gather again what stayed unsharded, and start a new record."""
    may_release = not root.watch.has_grads()  # one look for all
    for state in root.live_states():
        for handle in state._handles:
            if handle.summoned is not None:
                raise RuntimeError(
                    f"a forward of the fully_shard group {state.name} begins inside summon_full_params(), where its "
                    "parameters are full ones that may have been edited: leave the context first"
                )
            if handle.accumulation is not None:
                handle.settle_accumulation()
            handle.gradient.release_if_dropped(may_release)
            if handle.accumulation is not None:
                handle.accumulation.show()
            if handle.is_unsharded and not handle.is_resident:
                if state.keeps_unsharded and handle.is_kept and not handle.is_stale():
                    continue
                # Its shard may have been edited, in ways that leave no trace or on some ranks only.
                root.trace.append(state.code | ALL_GATHER)
                root.communicator.refresh(handle)
                handle.is_kept = False
    root.caller, root.num_backwards = _caller(), backwards.count
    root.forward_task = current_graph_task_id()
    root.num_forwards += 1
    if root.record.begun:
        root.previous = root.records[root.record.outermost] = root.record
    if root.previous.outermost != outermost.index:
        root.previous = root.records.get(outermost.index, root.previous)
    root.record = ForwardRecord(root.num_forwards, root.states, outermost.index)
    root.order.fold_if_long()


def check_after_forward(root: RootContext) -> None:
    """Called at the end of an outermost forward: raise if it has changed an unsharded parameter, and publish what
    backwards inside it have left."""
    if root.has_failed_backward:
        recover_backward(root)
    watch = root.watch
    if watch is None or not watch.was_forward_quiet():
        states = root.live_states()
        _follow_toggles_of_forward(root, states)
        try:
            for state in states:
                state.check_after_forward()
        finally:
            if watch is not None:
                watch_again(root)
    if backwards.count != root.num_backwards and watch is not None and watch.has_unsharded_grads():
        publish_from_inside(root)


def _refuse_meta(states: list[_FSDPState]) -> None:
    for state in states:
        if any(handle.is_meta for handle in state._handles):
            raise ValueError(
                f"the parameters of the fully_shard group {state.name} are still on the meta device: call "
                "model.to_empty(device=...) and initialise them before the first forward"
            )


def _refuse_stray_gradients(state: _FSDPState) -> None:
    for handle in state._handles:
        handle.drop_iteration(is_tainted=False)
    raise RuntimeError(
        f"a backward reached parameters of the fully_shard group {state.name} without passing any of its module's "
        "outputs, and their gradients were not reduced (they are thrown away now). Let forward return every tensor "
        "that a loss is computed from, or keep it as an attribute of the module"
    )


def _reflatten(root: RootContext, state: _FSDPState) -> None:
    for handle in state._handles:
        if handle.faces_moved():
            root.communicator.wait(handle)
            handle.reflatten()
    state.swap.rebuild()
    state.is_unhooked = state.has_leaf_hooks = False  # the new unsharded parameters have no hooks yet


# ---- backward


def begin_backward(root: RootContext) -> None:
    """Called from the first hook of a root that a backward reaches."""
    refuse_double_backward()
    if root.has_failed_backward:
        recover_backward(root)
    follow_profiler()
    root.is_in_backward = True
    root.backward_number = next(_backward_numbers)
    queue_end_of_backward(_EndOfBackward(root))
    if root.watch is None or root.watch.was_toggled():
        follow_toggles_before_backward(root)


def refuse_double_backward() -> None:
    if torch.is_grad_enabled():  # autograd says so while it runs
        raise RuntimeError(
            "backward(create_graph=True), or autograd.grad() with it, reached a fully_shard'ed model. Double backward "
            "(a gradient penalty, say) needs the gathered parameters to stay in the graph, which they do not here: "
            "their gradients of the second order would be wrong, or missing. None was published. Run the forward in "
            "functional mode: with functional_mode(model): ..."
        )


def notice_backwards(state: _FSDPState) -> None:
    """From now on let hooks on the unsharded parameters of a group tell that a backward runs: one that passes none of
    the group's outputs, so that its end is reached all the same."""
    if state.has_leaf_hooks:
        return
    state.has_leaf_hooks = True
    reference = weakref.ref(state)

    @never_traced
    def note(_param: torch.Tensor) -> None:
        present = reference()
        if present is not None and present.root is not None and not present.root.is_in_backward:
            begin_backward(present.root)

    for handle in state._handles:
        for param in handle.unsharded_params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(note)


class _EndOfBackward:
    """The callback at the end of a backward. Autograd drops it uncalled when the backward raises: then the modules
    show their sharded parameters again (but in forwards that are running), before the exception reaches anybody."""

    def __init__(self, root: RootContext) -> None:
        self._root: RootContext | None = root

    def __call__(self) -> None:
        root, self._root = self._root, None
        assert root is not None
        try:
            finish_backward(root)
        except BaseException:  # not left to __del__: the traceback holds this object
            _give_up_backward(root)
            raise

    def __del__(self) -> None:
        if self._root is not None:
            _give_up_backward(self._root)


def _give_up_backward(root: RootContext) -> None:
    root.is_in_backward, root.has_failed_backward = False, True
    for state in root.live_states():
        state.swap.restore(len(state.entries))


@never_traced
def finish_backward(root: RootContext, is_inside: bool = False) -> None:
    """Reduce what has not been reduced, agree with the other ranks, and only then show the gradients. ``is_inside``:
    the backward has run inside a forward of the root, though that may have just ended."""
    states = root.live_states()
    is_inside = is_inside or root.depth > 0 or any([state.entries for state in states])  # or inside a recomputation
    for state in reversed(states):
        if state.is_reduced and not state.active_uses:
            continue
        if not state.ran_backward:
            refuse_unseen_backward(root, state)
        if state.active_uses:
            state.swap.show_sharded()
        is_due = state.ran_backward or state.is_unhooked or (state.has_unsynced and state.requires_gradient_sync)
        if is_due and not state.is_reduced:
            if state.unhooked_versions is not None and not state.ran_backward:
                # Of a forward that has not ended they are not known yet.
                if not is_inside or (root.depth and state.index in root.record.begun and not state.entries):
                    state.check_versions(state.unhooked_versions)
            reduce(root, state)
    _exchange(root, states)
    root.has_added = True  # a hook of the user's that raises leaves some gradients shown, on each rank others
    has_others = root.watch is None or root.watch.has_grads()
    for state in states:
        for handle in state._handles:
            if handle.is_unsharded and not (is_inside and _stays_unsharded(root, state)):
                root.communicator.reshard(handle)
            if handle.awaits_publication:
                handle.awaits_publication = False
                root.communicator.publish(handle, has_others)
            elif handle.accumulation is not None:
                handle.accumulation.show()
        if state.ran_backward:
            # A use that this backward passed by will not hold up a later reduction; but the backward of the forward
            # that is running is yet to come.
            if state.outstanding:
                last = min(state.last_use, root.num_forwards - 1) if is_inside else state.last_use
                state.outstanding = [number for number in state.outstanding if number > last]
            state.ran_backward = state.is_iterated = False
            state.active_uses = state.last_use = 0
        state.phase = _IDLE
        state.is_reduced = False
    root.is_in_backward = root.has_added = root.has_outside_grads = False
    root.recomputed.clear()
    if root.after_publication:
        calls, root.after_publication = root.after_publication, []
        for call in calls:
            call()


def refuse_unseen_backward(root: RootContext, state: _FSDPState) -> None:
    """As the state's own method, but a backward inside the root's forward may reach the parameters of a group while
    its forward is running."""
    if not state.entries and not (root.depth and state.index in root.record.begun):
        state.refuse_unseen_backward()


def _stays_unsharded(root: RootContext, state: _FSDPState) -> bool:
    """Whether the forward that is running, inside which a backward ends, needs the group as it is."""
    begun, previous = root.record.begun, root.previous.begun
    is_next = len(previous) > len(begun) and previous[len(begun)] == state.index  # forward prefetch
    return bool(is_next or state.entries or state.pending_modules or not state.reshard_after_forward)


def publish_from_inside(root: RootContext) -> None:
    """At the end of an outermost forward: reduce and publish gradients that a backward inside it has left on parameters
    of groups whose own forwards were running, so that no hook told of it. The next time there will be hooks."""
    states = root.live_states()
    begun = {*root.record.begun}
    for state in states:
        if any(handle.has_unsharded_grad() for handle in state._handles):
            if state.index not in begun:
                state.refuse_unseen_backward()
            notice_backwards(state)
    finish_backward(root, is_inside=True)


def _exchange(root: RootContext, states: list[_FSDPState]) -> None:
    """Agree with all ranks on the order of collectives and on who has a gradient; reduce again what came late."""
    exchange = root.exchange
    while True:
        may_be_late = root.has_outside_grads or root.watch is None or root.watch.has_unsharded_grads()
        exchange.late[:] = bytes(len(exchange.late))
        if may_be_late:
            for state in states:
                exchange.late[state.index] = any(
                    handle.has_unsharded_grad() or handle.outside_grads for handle in state._handles
                )
        root.communicator.announce_exchange(root, END_OF_BACKWARD)
        exchange.start(root.order.hash(root, END_OF_BACKWARD))
        root.communicator.finish()
        try:
            is_same = exchange.wait()
        except RuntimeError:
            root.order.close()  # as on the other ranks
            raise
        if not is_same:
            raise_different_order(root, END_OF_BACKWARD)
        root.order.close()
        if not any(exchange.late):
            return
        for state in states:
            if exchange.late[state.index]:
                reduce(root, state)


def raise_different_order(root: RootContext, code: int) -> None:
    """Raise, on every rank, an error that names the first collective that differs. Ranks: all, for each knows of it.

    Args:
        code: of what this rank is about to do.
    """
    group = root.live_states()[0].mesh.shard_group
    lasts = last_of_every_rank(group)
    lines = root.order.trace_in_words(root, code)

    def explain(rank: int, ours: str, theirs: str) -> str:
        difference = first_difference(ours.split("\n"), theirs.split("\n"))
        if difference is None:
            return f"the ranks issued different collectives, in a part of the run that is no longer remembered{lasts}"
        position, a, b = difference
        a, b = name_models(a or "nothing", b or "nothing")
        return (
            f"the ranks issued different collectives in this iteration: collective {position} was {a} on "
            f"rank 0 and {b} on rank {rank}. No gradient was published. Ranks must run the same "
            "fully_shard groups in the same order: shard modules that only some ranks use (experts, modalities) in "
            "one group with their parent, or run all of them on every rank; run several models in the same order on "
            f"every rank{lasts}"
        )

    details = "\n".join(lines)
    digest = hashlib.sha256(details.encode()).hexdigest()
    try:
        meet(group, "comparing collectives", digest, lambda _: "", details, explain)
    finally:
        root.order.close()  # all ranks know: other models shall not hear of it again
    raise RuntimeError("the ranks issued different collectives in this iteration; no gradient was published")


# ---- healing


def heal(root: RootContext) -> None:
    """Throw away what an interrupted iteration left, together with all ranks.

    Raises:
        RuntimeError: a rank did not come to the meeting (it may hang in a collective of the interrupted iteration), or
            the ranks were interrupted at different places, so that collectives are left without a partner.
    """
    states = root.live_states()
    for state in states:
        state.swap.restore()
    is_tainted = _agree_to_heal(root, states)
    for state in states:
        for handle in state._handles:
            root.communicator.wait(handle)
            handle.drop_iteration(is_tainted)
            handle.forgive_unsharded_edit()
            root.communicator.reshard(handle)
        state.reset()
    # The watch stays the old one: what the user has changed since the interruption is yet to be noticed.
    root.reset()
    _tell_of_healing(
        "the last iteration of a fully_shard'ed model was interrupted (an exception in forward or backward): its",
        is_tainted,
    )


def recover_backward(root: RootContext) -> None:
    """Throw away what a backward that raised has left, together with all ranks, while a forward goes on, or before
    another backward.

    Raises:
        RuntimeError: as ``heal``.
    """
    states = root.live_states()
    is_tainted = _agree_to_heal(root, states)
    for state in states:
        for handle in state._handles:
            handle.drop_iteration(is_tainted)
            if not _stays_unsharded(root, state):
                root.communicator.reshard(handle)
        state.reset_backward()
    root.reset_backward()
    _tell_of_healing("a backward of a fully_shard'ed model raised, and the exception was caught: its", is_tainted)


def _agree_to_heal(root: RootContext, states: list[_FSDPState]) -> bool:
    """Meet all ranks, and end what is in flight; whether older gradients are lost too."""
    root.communicator.announce_recovery(root)
    mesh, count = states[0].mesh, root.order.count
    is_tainted = root.has_added
    if mesh.has_peers:
        verdict = meet(
            mesh.shard_group,
            "healing after an interrupted iteration",
            f"{count} {int(is_tainted)}",
            _judge,
            timeout=RECOVERY_TIMEOUT,
        )
        failure = failure_of(mesh.shard_group)
        if failure:
            raise RuntimeError(
                "an iteration was interrupted by a collective that failed, and its process group carries nothing any "
                f"more: restart the processes from a checkpoint. It was this: {failure}"
            )
        if verdict not in ("0", "1"):
            raise RuntimeError(verdict + last_of_every_rank(mesh.shard_group))
        is_tainted = verdict == "1"
    root.exchange.abandon()
    root.forward_exchange.abandon()
    root.communicator.finish()
    root.order.close()
    return is_tainted


def _tell_of_healing(what: str, is_tainted: bool) -> None:
    lost = ", and so was what had been accumulated before it: all gradients are None" if is_tainted else ""
    warnings.warn(f"{what} gradients were thrown away{lost}", stacklevel=3)


def _judge(payloads: list[str]) -> str:
    counts = [int(payload.split()[0]) for payload in payloads]
    if len(set(counts)) > 1:
        listing = ", ".join(f"rank {rank} after {count}" for rank, count in enumerate(counts[:16]))
        return (
            "an iteration was interrupted at different places on different ranks, and cannot be healed: collectives "
            f"are left without a partner ({listing} collectives). Restart the processes from a checkpoint"
        )
    return str(max(int(payload.split()[1]) for payload in payloads))

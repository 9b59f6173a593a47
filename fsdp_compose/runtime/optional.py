"""Optional groups (``fully_shard(optional=True)``), which each rank may run or skip: how all ranks gather and reduce
them.

Hooks and modes call this. A root without optional groups makes no rounds. The last section finds out, at a root's first
forward, which groups ranks may skip and which groups enclose them.

A *point* is a place that every rank passes, in the same order: the start of the forward of a non-optional group inside
another one; the end of the forward of a *host* (the nearest non-optional group around an optional one) and of the
outermost group; the start and the end of a backward. A *round* is one small maximum over the ranks (``Rounds``). A rank
that needs an optional group *demands* it in a round. A rank at a point makes rounds until no rank demands anything. In
every round all ranks gather each group that any of them demands, in the order of the groups' indexes. At its next
round, a rank frees the groups that it did not need itself. When all ranks begin a non-optional group, they also say, in
the last round of that point, which groups they *miss*, because a rank may have kept a group alone.

No rank waits for another one forever. A rank blocks only in a round, or in a collective that all ranks issue after the
same round. A rank that is not in a round computes, and reaches its next demand or its next point, each of which is a
round. It makes finitely many demands before a point, so a round without a demand will come, and until then no rank
passes the point.

In a backward every gather is a demand, also that of non-optional groups. If only some ranks reach a vision tower, only
these may have to go back through frozen layers, or learn from an input's gradient that a group is done. So reductions
are agreed on as well: all ranks reduce a group after a round in which some rank *owes* it (its backward has come) and
none has it *pending* (its backward is still to come). At the end, all owed groups are reduced. The round at the start
of a backward says whether any rank can reach an optional group in it. If none can, no further rounds are made, and the
backward runs like that of any other root."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch.nn as nn

from .._torch import backwards, current_graph_task_id
from ..comm import Carrier
from ..flat import is_stale
from ..group import (
    ALL_GATHER,
    END_OF_BACKWARD,
    END_OF_FORWARD,
    OTHER_MODEL,
    SERVE,
    SEVERAL_FAILED,
    START_OF_BACKWARD,
    GroupUse,
    HookedUse,
    Marks,
    OrderedRoot,
    Root,
    Rounds,
    _FSDPState,
    entry_of_end,
)
from .agreement import raise_different_order
from .group_ops import follow_requires_grad, hide_shown, reduce, reshard, unshard, unshard_again, unshard_for_use
from .recovery import is_running

# ---- Forward


def begin_forward(root: Root, rounds: Rounds) -> None:
    """Begin an outermost forward: reshard all groups, because groups that are gathered may be so on some ranks only.
    (Groups that an earlier forward has left unhooked stay, for a backward that may reach them unnoticed.)"""
    for other, its_rounds in _running_beside(root):
        sync_point(other, its_rounds, OTHER_MODEL)
    for state in root.live_states():
        for handle in state._handles:
            if handle.unsharded.is_allocated and not handle.unsharded.never_freed:
                if state.persistent.is_unhooked:
                    rounds.old.add(state.place.index)
                else:
                    handle.unsharded.keep_allocated(False)
                    root.communicator.reshard(handle)
        if state.place.index in rounds.enclosing_groups and any([handle.was_toggled() for handle in state._handles]):
            follow_requires_grad(root, state)  # on all ranks, not only on those that run the group


def check_place(root: Root, rounds: Rounds, state: _FSDPState) -> None:
    """Raise if an optional group begins its forward at a place where other ranks may not be ready to gather it."""
    host = rounds.enclosing_groups.get(state.place.index)
    if host is None or (rounds.running and rounds.running[-1] == host):
        return
    states = root.states
    expected = states[host]()
    found = states[rounds.running[-1]]() if rounds.running else None
    where = "outside of any forward" if found is None else f"inside the forward of {found.name}"
    raise RuntimeError(
        f"the optional fully_shard group {state.name} runs {where} on rank {root.mesh.peers.rank()}; expected: inside "
        f"the forward of {'?' if expected is None else expected.name}, the nearest group around it that is "
        "not optional, and in no other group. Call it from there, or make the groups in between optional too"
    )


def gather_for_forward(root: Root, rounds: Rounds, state: _FSDPState, ahead: Sequence[_FSDPState]) -> None:
    """Start the all-gathers of a non-optional group whose forward begins, and of the groups that come next.

    Some ranks may have these groups already, because a forward left something that cannot be hooked, or was repeated.
    So ranks exchange at this point which groups they miss, and all gather the groups that any rank misses. When an
    outermost forward begins, no rank has any."""
    needed = [state, *ahead]
    if rounds.running:
        sync_point(root, rounds, state.log_code | ALL_GATHER, needed)
    else:
        _gather(root, rounds, [item for item in root.live_states() if item in needed], needed)
    rounds.running.append(state.place.index)
    unshard_for_use(root, state)
    for following in ahead:
        unshard(root, following)


def gather_optional(root: Root, rounds: Rounds, state: _FSDPState, use: HookedUse | None) -> None:
    """Start the all-gathers of an optional group whose forward begins."""
    _note_live(root, rounds, use)
    request_unshard(root, rounds, state)


def gather_for_recomputation(root: Root, rounds: Rounds, state: _FSDPState, use: HookedUse | None) -> None:
    """Start the all-gathers of a group whose forward activation checkpointing repeats, while rounds are made."""
    if state.place.index in rounds.enclosing_groups:
        _note_live(root, rounds, use)
    request_unshard(root, rounds, state)


def _note_live(root: Root, rounds: Rounds, use: HookedUse | None) -> None:
    """Remember that a backward may reach an optional group: as long as the graph of this forward is alive, or that of
    the forward around it, which may run the group again."""
    for item in (use, root.forward.innermost if use is None else use.outer):
        if item is not None:
            rounds.live.add(item)


def leave_forward(rounds: Rounds, state: _FSDPState, use: GroupUse | None) -> None:
    """Note that a forward of a group has ended, normally or by an exception."""
    if state.place.index in rounds.enclosing_groups:
        state.progress.uses_left[use is None] += 1  # not counted: all ranks must check for untracked writes together
    if rounds.running and rounds.running[-1] == state.place.index:
        rounds.running.pop()


def end_group(root: Root, rounds: Rounds, state: _FSDPState) -> None:
    """Pass the point at the end of a forward that did not raise, if the group is a host or the outermost one. Raises as
    ``sync_point`` does."""
    if root.forward.depth == 0:
        sync_point(root, rounds, END_OF_FORWARD)
    elif state.place.index in rounds.enclosing_groups.values():
        sync_point(root, rounds, entry_of_end(state.log_code))


# ---- Backward


def begin_backward(root: Root, rounds: Rounds) -> None:
    """Begin a backward: find out whether some rank may reach an optional group in it.

    If another root makes rounds in the same backward, it must have nothing more to demand on any rank: ranks that made
    rounds of different roots at the same time would wait for each other."""
    others = _running_beside(root)
    for other, its_rounds in others:
        sync_point(other, its_rounds, OTHER_MODEL)
    waiting = [other for other, its_rounds in others if its_rounds.is_live]
    rounds.begin_backward(True)
    sync_point(root, rounds, START_OF_BACKWARD)
    rounds.begin_backward(rounds.is_live)
    if not rounds.is_on:
        return
    for other, its_rounds in others:
        if other in waiting:
            its_rounds.fail()
            rounds.fail()
            raise RuntimeError(
                f"a backward reaches optional fully_shard groups of {root.label} and, before and after that, of "
                f"{other.label}. Ranks cannot agree on both at once. Call fully_shard() on one module that contains "
                "both models, so that they share a root, or run a backward for each"
            )
        its_rounds.give_way()


def gather_for_backward(
    root: Root, rounds: Rounds, state: _FSDPState, number: int, ahead: Sequence[_FSDPState]
) -> None:
    """Start the all-gathers of a group whose backward has reached the forward of this number, and of the groups that
    come next."""
    if rounds.is_on:
        rounds.reach(number)
        request_unshard(root, rounds, state, () if state.place.index in rounds.enclosing_groups else ahead)
        return
    refuse_unannounced(rounds, state)
    for item in (state, *ahead):
        unshard_again(root, item)


def refuse_unannounced(rounds: Rounds, state: _FSDPState) -> None:
    """Raise if a backward has reached an optional group although no rank expected one at its start."""
    if state.place.index in rounds.enclosing_groups:
        raise RuntimeError(
            f"a backward came to the optional fully_shard group {state.name}, but no rank had a graph with an optional "
            "group when the backward began: a forward inside a backward must not run an optional group, unless it "
            "repeats a forward that has run it (as activation checkpointing does)"
        )


def mark_ready_to_reduce(root: Root, rounds: Rounds, state: _FSDPState) -> None:
    """Note that the backward of a group is done on this rank. The group is reduced when it is done on all ranks."""
    backward = root.backward
    assert backward is not None
    if state.swap in backward.shown:
        hide_shown(root, state.swap)
    if not state.place.stays_after_backward:
        reshard(root, state)
    rounds.owes.add(state.place.index)


def end_backward(root: Root, rounds: Rounds) -> None:
    """End a backward: serve other ranks until all are here, and reduce all owed groups. No rounds follow."""
    if rounds.is_on:
        for other, its_rounds in _running_beside(root):
            sync_point(other, its_rounds, OTHER_MODEL)
        sync_point(root, rounds, END_OF_BACKWARD)
        rounds.begin_backward(False)  # later errors are reported by the exchange, or do not concern the other ranks


# ---- Several models
#
# Other models on the same ranks have collectives of their own, and while a rank waits in one of these, it cannot serve
# a rank that demands an optional group. So all of them are points of each root that makes rounds at that time.


class _Server:
    """The roots with optional groups on one process group."""

    __slots__ = ("roots",)

    def __init__(self) -> None:
        self.roots: list[weakref.ref[Root]] = []

    def running(self) -> list[tuple[Root, Rounds]]:
        """The roots that make rounds now, in a forward or a backward that is running.

        An interrupted one is not: only some ranks may still have its model."""
        found = []
        is_in_backward = current_graph_task_id() != -1
        for ref in self.roots:
            root = ref()
            if root is None:
                continue
            backward = root.backward
            in_backward = is_in_backward and backward is not None and backward.number == backwards.num_outermost
            if in_backward or (root.forward.depth and is_running(root.forward.caller)):
                rounds = root.rounds
                if rounds is not None and rounds.is_on and not rounds.is_over and not rounds.has_failed:
                    found.append((root, rounds))
        return found

    def __call__(self, root: OrderedRoot | None, code: int) -> None:
        """Make a point of each root that makes rounds now, before all ranks issue a collective of ``root``.

        A root that makes rounds itself has points enough."""
        running = self.running()
        if not any([other is root for other, _ in running]):
            for other, rounds in running:
                sync_point(other, rounds, code)


def serve_beside_others(root: Root) -> None:
    """Make points of this root, which has optional groups, where other roots on its process group have collectives."""
    order = root.order
    if not isinstance(order.serve, _Server):
        order.serve = _Server()
    order.serve.roots = [ref for ref in order.serve.roots if ref() is not None]
    order.serve.roots.append(weakref.ref(root))


def _running_beside(root: Root) -> list[tuple[Root, Rounds]]:
    serve = root.order.serve
    return [item for item in serve.running() if item[0] is not root] if isinstance(serve, _Server) else []


# ---- Rounds


def serve_peers(root: Root) -> None:
    """See ``api.sync_optional_groups``."""
    if root.rounds is not None:
        sync_point(root, root.rounds, SERVE)


def unshard_in_rounds(root: Root, state: _FSDPState) -> None:
    """Start the all-gathers of a group that the user unshards: by a demand if it is optional, otherwise at a point.

    Raises:
        RuntimeError: the group is optional and no forward is running; or as ``sync_point`` does.
    """
    rounds = root.rounds
    assert rounds is not None
    if state.place.index in rounds.enclosing_groups:
        if not root.forward.depth and root.backward is None:
            raise RuntimeError(
                f"unshard(): the optional fully_shard group {state.name} can be gathered ahead only inside the forward "
                "of the model, where ranks that skip it take part too"
            )
        if not rounds.is_on:
            refuse_unannounced(rounds, state)
        check_place(root, rounds, state)
        request_unshard(root, rounds, state)
    elif root.backward is not None and rounds.is_on:
        request_unshard(root, rounds, state)
    else:
        if root.forward.depth or root.backward is not None:
            sync_point(root, rounds, state.log_code | ALL_GATHER, [state])
        unshard(root, state)


def sync_point_before_gather(root: Root, state: _FSDPState) -> None:
    """Make a point before all ranks gather a parameter of a group outside the group's hooks."""
    rounds = root.rounds
    if rounds is not None and (root.forward.depth or root.backward is not None):
        sync_point(root, rounds, state.log_code | ALL_GATHER)


def sync_point(root: Root, rounds: Rounds, code: int, needed: Sequence[_FSDPState] = ()) -> None:
    """Serve the other ranks until all are at this point, which ``code`` names. Then gather the groups that all need.

    Raises:
        RuntimeError: on every rank, if ranks are at different points, if one has failed, or if one did not come.
    """
    if rounds.is_on:
        while _make_round(root, rounds, code, needed=needed):
            pass


def request_unshard(root: Root, rounds: Rounds, state: _FSDPState, ahead: Sequence[_FSDPState] = ()) -> None:
    """Start the all-gathers of a group, on all ranks, unless this rank already has it; also of the groups that it needs
    next. Raises as ``sync_point`` does."""
    rounds.keep(state.place.index)
    wanted = [item for item in (state, *ahead) if _is_missing(rounds, item)]
    if wanted and rounds.is_over:
        raise RuntimeError(
            f"a backward comes back to the fully_shard group {state.name} of {root.label} after it has reached "
            "optional groups of another model. Ranks cannot agree on both at once. Call fully_shard() on one module "
            "that contains both models, so that they share a root, or run a backward for each"
        )
    if wanted:
        _make_round(root, rounds, None, wanted=wanted)


def announce_failure(root: Root) -> None:
    """Tell the other ranks, once, that this rank has failed: it would no longer come to rounds in which they wait."""
    rounds = root.rounds
    if rounds is None or rounds.has_failed or not rounds.is_on or rounds.is_over:
        return
    rounds.fail()
    nothing = [False] * len(root.states)
    rounds.make(None, False, Marks(nothing, nothing, nothing, nothing), root.mesh.peers.rank())


def _is_missing(rounds: Rounds, state: _FSDPState) -> bool:
    is_old = state.place.index in rounds.old
    return is_old or any([not item.unsharded.is_allocated or is_stale(item) for item in state._handles])


def _make_round(
    root: Root,
    rounds: Rounds,
    code: int | None,
    *,
    wanted: Sequence[_FSDPState] = (),
    needed: Sequence[_FSDPState] = (),
) -> bool:
    """Make one round, and gather and reduce accordingly. Returns whether any rank demanded a group.

    ``wanted``: the groups that this rank demands; ``needed``: the groups that all need once all are at this point."""
    if rounds.has_failed:
        raise RuntimeError("an earlier round about optional fully_shard groups has failed: this iteration is over")
    _drop_served(root, rounds)
    states = root.live_states()
    marks = Marks(
        [state in wanted for state in states],
        [state in needed and _is_missing(rounds, state) for state in states],
        [_is_pending(rounds, state) for state in states],
        [state.place.index in rounds.owes for state in states],
    )
    if code == OTHER_MODEL:
        is_live = any([_may_demand(rounds, state) for state in states])
    else:
        # A forward that cannot be hooked leaves its group unsharded, to be reduced at the end; maybe on this rank only.
        is_live = bool(rounds.live) or any(
            [state.persistent.has_unsynced or state.persistent.is_unhooked for state in states]
        )
    digest = None if code is None else root.order.hash(root, code)
    try:
        is_same = rounds.make(digest, is_live, marks)
    except RuntimeError as error:
        rounds.fail()
        root.forward.fail()
        what = f"needs {wanted[0].name}" if wanted else f"waits at {root.order.name_of(code or 0)}"
        raise type(error)(
            f"rank {root.mesh.peers.rank()} {what}, but another rank did not come to its next sync point: it died, ran "
            "a different number of forwards or backwards, or waits for this rank in a collective that is not "
            "fully_shard's. Call sync_optional_groups(model), on all ranks, before such a collective. Details: "
            f"{error}"
        ) from None
    failed = rounds.failed
    if failed is not None:
        _raise_failed(root, rounds, failed)
    if not is_same:  # gather nothing that was demanded: a rank cannot know which others would gather it
        rounds.fail()
        root.forward.fail()
        raise_different_order(root, wanted[0].log_code | ALL_GATHER if code is None else code)
    marks = rounds.marks
    is_last = not any(marks.demanded)
    marked = marks.missing if is_last else marks.demanded
    _gather(root, rounds, [item for item in states if marked[item.place.index]], states if is_last else wanted)
    if root.backward is not None and rounds.is_on:
        _reduce_ready(root, rounds, states, is_end=is_last and code == END_OF_BACKWARD)
    return not is_last


def _raise_failed(root: Root, rounds: Rounds, rank: int) -> None:
    rounds.fail()
    root.forward.fail()
    which = "some ranks" if rank == SEVERAL_FAILED else f"rank {rank}"
    raise RuntimeError(
        f"{which} raised an exception in this iteration, which ends it on all ranks (see the error there). The next "
        "forward continues from here if all ranks run it"
    )


def _is_pending(rounds: Rounds, state: _FSDPState) -> bool:
    """Whether, on this rank, the backward of a group is running or is still to come in the running backward."""
    progress, backward = state.progress, state.backward
    return bool(
        backward.active_uses
        or backward.is_iterated
        or progress.running_forwards
        or any([number <= rounds.last_number for number in progress.awaiting_backward])
    )


def _may_demand(rounds: Rounds, state: _FSDPState) -> bool:
    """Whether, on this rank, the running backward may still gather a group: for a forward that it has not reached."""
    numbers = [number for number in state.progress.awaiting_backward if number <= rounds.last_number]
    return len(numbers) > state.backward.active_uses


def _drop_served(root: Root, rounds: Rounds) -> None:
    for index in rounds.served:
        state = root.states[index]()
        if state is not None and not state.backward.active_uses:
            reshard(root, state)
    rounds.served.clear()


def _gather(root: Root, rounds: Rounds, states: Sequence[_FSDPState], kept: Sequence[_FSDPState]) -> None:
    """Start the all-gathers of groups, on all ranks, in the order of their indexes. A group that this rank does not
    need itself (one that is not in ``kept``) is freed before the next one is gathered, so that the rank holds one such
    group at a time."""
    for state in states:
        is_new = False
        _drop_served(root, rounds)
        rounds.old.discard(state.place.index)
        for handle in state._handles:
            if handle.unsharded.never_freed:
                continue
            root.order.entries.append(state.log_code | ALL_GATHER)
            if handle.unsharded.is_allocated:
                root.communicator.wait(handle)
                root.communicator.refresh(handle)  # mostly with the same elements again
                root.communicator.wait(handle)  # this rank may be computing with it
            else:
                is_new = True
                root.communicator.unshard(handle)
        if is_new and state not in kept:
            rounds.served.append(state.place.index)


def _reduce_ready(root: Root, rounds: Rounds, states: Sequence[_FSDPState], is_end: bool) -> None:
    for state in reversed(states):
        index = state.place.index
        is_wanted = rounds.marks.pending[index] or rounds.marks.demanded[index]
        if rounds.marks.owed[index] and (is_end or not is_wanted):
            rounds.owes.discard(index)
            rounds.keep(index)
            reduce(root, state)


# ---- Finding the optional groups of a root and their hosts, at its first forward


def check_optional(owners: Sequence[_FSDPState], names: Mapping[_FSDPState, str]) -> None:
    """Raise, before anything is set up, if groups are optional that cannot be. No communication.
    ``names``: the names of all groups of the root, which the groups do not have yet."""
    if not any(state.options.is_optional for state in names):
        return
    for state in owners:
        if state.options.is_optional:
            raise ValueError(
                f"the fully_shard group of {_class_of(state)} is optional, but its forward is the outermost one, which "
                "every rank runs: call fully_shard(optional=True) on modules inside it"
            )
    problem = ""
    if len(owners) > 1:
        problem = "several models share groups, and some of these are optional"
    for state, name in names.items():
        name = name or "the root"
        if state.options.bucket_bytes is not None:
            problem = f"{name} is made by replicate(), whose buckets are reduced in the order of one rank"
        elif state.options.reshards_partially() or state.mesh.part_transport is not None:  # it may be set to keep them
            problem = (
                f"{name} keeps parts of its parameters (it was made with a number as reshard_after_forward), which "
                "ranks that skip a group do not have: pass True or False"
            )
        elif state.options.offload is not None:
            problem = f"{name} is offloaded (offload_policy)"
        elif any(handle.tensor_parallel is not None for handle in state._handles):
            problem = f"{name} has parameters that are DTensors, whose gradients are summed over their own ranks"
        elif any(handle.kind.extension is not None for handle in state._handles):
            problem = f"{name} has parameters that their class gathers (fsdp_pre_all_gather)"
    if problem:
        raise NotImplementedError(f"fully_shard(optional=True) does not support this model: {problem}")


def way_to_functional_mode(root: Root | None) -> str:
    """What to do about an operation that only functional mode can do, as a sentence for errors."""
    if root is None or root.rounds is None:
        return "run the forward in functional mode: with functional_mode(model): ..."
    return (
        "run the forward in functional mode (with functional_mode(model): ...) of a model without optional groups, "
        "which that mode cannot run: shard it without optional=True, and let every rank run every group"
    )


def rounds_of(states: Sequence[_FSDPState], carrier: Carrier | None) -> Rounds | None:
    """The ``Rounds`` of a root with these groups; ``None`` if there are no optional groups or no other ranks."""
    if carrier is None or not any(state.options.is_optional for state in states):
        return None
    inside = {module for state in states if state.options.is_optional for module in _modules_of(state)}
    optional = [state for state in states if all(module in inside for module in state.live_modules())]
    around = [(state, _modules_of(state)) for state in states if state not in optional]
    hosts: dict[int, int] = {}
    for state in optional:
        own = {*state.live_modules()}
        found = [(len(modules), other.place.index) for other, modules in around if own <= modules]
        if not found:
            raise ValueError(
                f"the modules of the optional fully_shard group {state.name} are not all inside the module of "
                "one group that is not optional: make each of them a group of its own"
            )
        hosts[state.place.index] = min(found)[1]
    return Rounds(hosts, len(states), carrier)


def _modules_of(state: _FSDPState) -> set[nn.Module]:
    return {module for one in state.live_modules() for module in one.modules()}


def _class_of(state: _FSDPState) -> str:
    return ", ".join(type(module).__name__ for module in state.live_modules())

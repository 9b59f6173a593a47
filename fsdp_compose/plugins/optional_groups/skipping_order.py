"""Optional groups (``fully_shard(optional=True)``), which each rank may run or skip: how ranks gather and reduce them.

Hooks and modes call ``SkippingOrder``, the scheduler of a root with optional groups, instead of ``FixedOrder``. The
last section finds out, at a root's first forward, which groups ranks may skip and which groups enclose them.

A *sync point* is a place that every rank passes, in the same order: the start of the forward of a non-optional group
inside another one; the end of the forward of an *enclosing group* (the nearest non-optional group around an optional
one) and of the outermost group; the start and the end of a backward. A *round* is one small maximum over the ranks
(``SkipProtocol``). A rank that needs an optional group *requests* it in a round. A rank at a sync point makes rounds
until no rank requests anything. In every round all ranks gather each group that any of them requests, in the order of
the groups' indexes. At its next round, a rank frees the groups that it did not need itself. When all ranks begin a
non-optional group, they also say, in the last round of that point, which groups they *miss*, because a rank may have
kept a group alone.

No rank waits for another one forever. A rank blocks only in a round, or in a collective that all ranks issue after the
same round. A rank that is not in a round computes, and reaches its next request or its next point, each of which is a
round. It makes finitely many requests before a point, so a round without a request will come, and until then no rank
passes the point.

In a backward every gather is a request, also that of non-optional groups. If only some ranks reach a vision tower, only
these may have to go back through frozen layers, or learn from an input's gradient that a group is done. So reductions
are agreed on as well: all ranks reduce a group after a round in which some rank has it *ready* (its backward has come)
and none has it *pending* (its backward is still to come). At the end, all groups that are ready are reduced. The round
at the start of a backward says whether any rank can reach an optional group in it. If none can, no further rounds are
made, and the backward runs like that of any other root."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.nn as nn

from ..._torch import backwards, current_graph_task_id
from ...core.comm import Carrier
from ...core.flat import FlatParamHandle
from ...core.group import (
    END_OF_BACKWARD,
    END_OF_FORWARD,
    OTHER_MODEL,
    SERVE,
    START_OF_BACKWARD,
    Entry,
    ForwardRecord,
    GroupUse,
    HookedUse,
    OrderedRoot,
    Root,
    Scheduler,
    _FSDPState,
    is_running,
)
from ...core.runtime import reshard
from ...core.runtime.group_ops import (
    FIXED_ORDER,
    FixedOrder,
    follow_requires_grad,
    hide_shown,
    prefetch_backward,
    prefetch_forward,
    unshard,
    unshard_again,
    unshard_for_use,
)
from .skip_protocol import SkipProtocol


class SkippingOrder(FixedOrder):
    """The scheduler of a root with optional groups."""

    skips = True
    is_capturable = False

    def __init__(self, enclosing_groups: dict[int, int], num_groups: int, carrier: Carrier) -> None:
        self.protocol = SkipProtocol(num_groups, carrier)
        # For the index of each optional group, that of the nearest group around it that is not optional.
        self.enclosing_groups = enclosing_groups
        self.running: list[int] = []  # indexes of other groups whose forwards are running, innermost last

    def reset(self) -> None:
        self.running.clear()
        self.protocol.reset()

    def reset_backward(self) -> None:
        self.protocol.reset_backward()

    def attach_root(self, root: Root) -> None:
        """Make sync points of this root where other roots on its process group have collectives."""
        order = root.order
        if not isinstance(order.serve, _Server):
            order.serve = _Server()
        order.serve.roots = [(ref, other) for ref, other in order.serve.roots if ref() is not None]
        order.serve.roots.append((weakref.ref(root), self.protocol))

    # ---- Forward

    def begin_forward(self, root: Root) -> None:
        """Reshard all groups, except those that an earlier forward has left unhooked."""
        for other, protocol in _running_beside(root):
            protocol.sync_point(other, OTHER_MODEL)
        for state in root.live_states():
            for handle in state._handles:
                # A group that is gathered may be so on some ranks only.
                if handle.unsharded.is_allocated and not handle.unsharded.never_freed:
                    # A backward may reach this one unnoticed, so it keeps its memory, and is gathered again before use.
                    if state.persistent.is_unhooked:
                        self.protocol.old.add(state.position.index)
                    else:
                        handle.unsharded.keep_allocated(False)
                        root.communicator.reshard(handle)
            if self._is_optional(state) and any([handle.was_toggled() for handle in state._handles]):
                follow_requires_grad(root, state)  # on all ranks, not only on those that run the group

    def refresh_kept(self, root: Root, state: _FSDPState, handle: FlatParamHandle) -> None:
        """Do nothing: ``begin_forward`` has resharded the groups, or noted that they are old."""

    def check_forward(self, root: Root, state: _FSDPState) -> bool:
        self._check_place(root, state)
        self._refuse_unannounced(state)
        return self._is_optional(state)

    def before_forward(self, root: Root, state: _FSDPState, use: HookedUse | None) -> None:
        """Request an optional group; gather any other one at a sync point, with the groups that come next."""
        if self._is_optional(state):
            self._note_live(root, use)
            self.protocol.request_unshard(root, state)
            return
        found: list[_FSDPState] = []
        prefetch_forward(root, state, lambda _, other: found.append(other))
        ahead = [other for other in found if not self._is_optional(other)]
        needed = [state, *ahead]
        # Some ranks may have these groups already, because a forward left something that cannot be hooked, or was
        # repeated. So they exchange which groups they miss, and all gather the groups that any rank misses.
        if self.running:
            self.protocol.sync_point(root, state.log.all_gather, needed)
        else:  # an outermost forward begins: no rank has any
            self.protocol.gather(root, [item for item in root.live_states() if item in needed], needed)
        self.running.append(state.position.index)
        unshard_for_use(root, state)
        for following in ahead:
            unshard(root, following)

    def before_recomputation(self, root: Root, state: _FSDPState, use: HookedUse | None) -> None:
        self._refuse_unannounced(state)
        if not self.protocol.is_on:
            super().before_recomputation(root, state, use)
            return
        if self._is_optional(state):
            self._note_live(root, use)
        self.protocol.request_unshard(root, state)

    def after_forward(self, root: Root, state: _FSDPState, use: GroupUse | None) -> bool:
        if self.running and self.running[-1] == state.position.index:
            self.running.pop()
        # Optional groups are not looked at: all ranks must check for untracked writes together.
        return not self._is_optional(state) and super().after_forward(root, state, use)

    def end_group(self, root: Root, state: _FSDPState) -> None:
        """Pass the sync point at the end of a forward, if the group is an enclosing or the outermost one."""
        if root.forward.depth == 0:
            self.protocol.sync_point(root, END_OF_FORWARD)
        elif state.position.index in self.enclosing_groups.values():
            self.protocol.sync_point(root, state.log.end_of_forward)

    def announce_failure(self, root: Root) -> None:
        self.protocol.announce_failure(root)

    def _is_optional(self, state: _FSDPState) -> bool:
        return state.position.index in self.enclosing_groups

    def _check_place(self, root: Root, state: _FSDPState) -> None:
        """Raise if an optional group begins its forward at a place where other ranks may not be ready to gather it."""
        enclosing = self.enclosing_groups.get(state.position.index)
        if enclosing is None or (self.running and self.running[-1] == enclosing):
            return
        states = root.states
        expected = states[enclosing]()
        found = states[self.running[-1]]() if self.running else None
        where = "outside of any forward" if found is None else f"inside the forward of {found.name}"
        raise RuntimeError(
            f"the optional fully_shard group {state.name} runs {where} on rank {root.mesh.peers.rank()}; expected: "
            f"inside the forward of {'?' if expected is None else expected.name}, the nearest group around it that is "
            "not optional, and in no other group. Call it from there, or make the groups in between optional too"
        )

    def _note_live(self, root: Root, use: HookedUse | None) -> None:
        """Remember that a backward may reach an optional group as long as the graph of this forward is alive."""
        # The forward around it may be repeated in backward, and would run the group again.
        for item in (use, root.forward.innermost if use is None else use.outer):
            if item is not None:
                self.protocol.live.add(item)

    # ---- Backward

    def begin_backward(self, root: Root) -> None:
        """Find out whether some rank may reach an optional group in this backward. Raises RuntimeError if another root
        makes rounds in the same backward, and may still request groups on some rank."""
        protocol, others = self.protocol, _running_beside(root)
        for other, its_protocol in others:
            its_protocol.sync_point(other, OTHER_MODEL)
        waiting = [other for other, its_protocol in others if its_protocol.is_live]
        protocol.is_on = True
        protocol.sync_point(root, START_OF_BACKWARD)
        protocol.is_on = protocol.is_live
        if not protocol.is_on:
            return
        for other, its_protocol in others:
            # Ranks that make rounds of different roots at the same time would wait for each other.
            if other in waiting:
                its_protocol.has_failed = protocol.has_failed = True
                raise RuntimeError(
                    f"a backward reaches optional fully_shard groups of {root.label} and, before and after that, of "
                    f"{other.label}. Ranks cannot agree on both at once. Call fully_shard() on one module that "
                    "contains both models, so that they share a root, or run a backward for each"
                )
            its_protocol.is_over = True

    def before_backward(self, root: Root, state: _FSDPState, record: ForwardRecord, position: int) -> None:
        protocol, ahead = self.protocol, self._following_in_backward(root, state, record, position)
        if protocol.is_on:
            protocol.last_number = max(protocol.last_number, record.number)
            protocol.request_unshard(root, state, () if self._is_optional(state) else ahead)
            return
        self._refuse_unannounced(state)
        for item in (state, *ahead):
            unshard_again(root, item)

    def ready_to_reduce(self, root: Root, state: _FSDPState) -> None:
        """Note that this rank has the group's gradients. The group is reduced when no rank has its backward to come."""
        if not self.protocol.is_on:
            super().ready_to_reduce(root, state)
            return
        backward = root.backward
        assert backward is not None
        if state.swap in backward.shown:
            hide_shown(root, state.swap)
        if not state.position.stays_after_backward:
            reshard(root, state)
        self.protocol.ready.add(state.position.index)

    def end_backward(self, root: Root) -> None:
        """Serve other ranks until all are here, and reduce all groups that are ready. No rounds follow."""
        if self.protocol.is_on:
            for other, protocol in _running_beside(root):
                protocol.sync_point(other, OTHER_MODEL)
            self.protocol.sync_point(root, END_OF_BACKWARD)
            self.protocol.is_on = False  # later errors are reported by the exchange, or do not concern the other ranks

    def _following_in_backward(
        self, root: Root, state: _FSDPState, record: ForwardRecord, position: int
    ) -> list[_FSDPState]:
        """The groups that ``prefetch_backward`` would gather if no optional group had run."""
        while position and self._is_passed_over(root, record.hooked[position - 1]):
            position -= 1
        found: list[_FSDPState] = []
        prefetch_backward(root, state, record, position, lambda _, other: found.append(other))
        return [other for other in found if not self._is_optional(other)]

    def _is_passed_over(self, root: Root, index: int) -> bool:
        """Whether a group is optional, or has no parameters of its own: before it, no rank may find an optional one."""
        state = root.states[index]()
        return index in self.enclosing_groups or (state is not None and not state._handles)

    def _refuse_unannounced(self, state: _FSDPState) -> None:
        """Raise if a backward has reached an optional group although no rank expected one at its start."""
        if not self.protocol.is_on and self._is_optional(state):
            raise RuntimeError(
                f"a backward came to the optional fully_shard group {state.name}, but no rank had a graph with an "
                "optional group when the backward began: a forward inside a backward must not run an optional group, "
                "unless it repeats a forward that has run it (as activation checkpointing does)"
            )

    # ---- Explicit calls

    def unshard(self, root: Root, state: _FSDPState) -> None:
        """Start the all-gathers of a group: by a request if it is optional, otherwise at a sync point. Raises
        RuntimeError if the group is optional and no forward is running; or as ``SkipProtocol.sync_point`` does."""
        if self._is_optional(state):
            if not root.forward.depth and root.backward is None:
                raise RuntimeError(
                    f"unshard(): the optional fully_shard group {state.name} can be gathered ahead only inside the "
                    "forward of the model, where ranks that skip it take part too"
                )
            self._refuse_unannounced(state)
            self._check_place(root, state)
            self.protocol.request_unshard(root, state)
        elif root.backward is not None and self.protocol.is_on:
            self.protocol.request_unshard(root, state)
        else:
            if root.forward.depth or root.backward is not None:
                self.protocol.sync_point(root, state.log.all_gather, [state])
            unshard(root, state)

    def before_single_gather(self, root: Root, state: _FSDPState) -> None:
        if root.forward.depth or root.backward is not None:
            self.protocol.sync_point(root, state.log.all_gather)

    def serve_peers(self, root: Root) -> None:
        self.protocol.sync_point(root, SERVE)


# ---- Several models
#
# Other models on the same ranks have collectives of their own, and while a rank waits in one of these, it cannot serve
# a rank that requests an optional group. So all of them are sync points of each root that makes rounds at that time.


@dataclass(slots=True, eq=False)
class _Server:
    """The roots with optional groups on one process group."""

    roots: list[tuple[weakref.ref[Root], SkipProtocol]] = field(default_factory=list)

    def running(self) -> list[tuple[Root, SkipProtocol]]:
        """The roots that make rounds now, in a forward or a backward that is running."""
        found = []
        is_in_backward = current_graph_task_id() != -1
        for ref, protocol in self.roots:
            root = ref()
            if root is None:
                continue
            backward = root.backward
            # Not an interrupted forward or backward, which looks alike: only some ranks may still have its model.
            in_backward = is_in_backward and backward is not None and backward.number == backwards.num_outermost
            if in_backward or (root.forward.depth and is_running(root.forward.caller)):
                if protocol.is_on and not protocol.is_over and not protocol.has_failed:
                    found.append((root, protocol))
        return found

    def __call__(self, root: OrderedRoot | None, place: Entry) -> None:
        """Make a sync point of each root that makes rounds now, before all ranks issue a collective of ``root``."""
        running = self.running()
        # A root that makes rounds itself has sync points enough.
        if not any([other is root for other, _ in running]):
            for other, protocol in running:
                protocol.sync_point(other, place)


def _running_beside(root: Root) -> list[tuple[Root, SkipProtocol]]:
    serve = root.order.serve
    return [item for item in serve.running() if item[0] is not root] if isinstance(serve, _Server) else []


# ---- Finding the optional groups of a root and their enclosing groups, at its first forward


def check_optional(owners: Sequence[_FSDPState], names: Mapping[_FSDPState, str]) -> None:
    """Raise, before anything is set up, if groups are optional that cannot be. No communication.
    ``names``: the names of all groups of the root, which the groups do not have yet."""
    if not any(state.options.is_optional for state in names):
        return
    for state in owners:
        if state.options.is_optional:
            classes = ", ".join(type(module).__name__ for module in state.live_modules())
            raise ValueError(
                f"the fully_shard group of {classes} is optional, but its forward is the outermost one, which "
                "every rank runs: call fully_shard(optional=True) on modules inside it"
            )
    problem = ""
    if len(owners) > 1:
        problem = "several models share groups, and some of these are optional"
    for state, name in names.items():
        name = name or "the root"
        if state.options.bucket_bytes is not None:
            problem = f"{name} is made by replicate(), whose buckets are reduced in the order of one rank"
        # A group that does not reshard to fewer ranks now, but has their transport, may be set to do so later.
        elif state.options.reshards_partially() or state.mesh.post_forward_transport is not None:
            problem = (
                f"{name} keeps parts of its parameters (it was made with a number as reshard_after_forward), which "
                "ranks that skip a group do not have: pass True or False"
            )
        elif state.options.offload is not None:
            problem = f"{name} is offloaded (offload_policy)"
        elif any(handle.tensor_parallel is not None for handle in state._handles):
            problem = f"{name} has parameters that are DTensors, whose gradients are summed over their own ranks"
        elif any(handle.kind.codec.gathered_by for handle in state._handles):
            problem = f"{name} has parameters that their class gathers (fsdp_pre_all_gather)"
    if problem:
        raise NotImplementedError(f"fully_shard(optional=True) does not support this model: {problem}")


def scheduler_of(states: Sequence[_FSDPState], carrier: Carrier | None) -> Scheduler:
    """The scheduler of a root with these groups: a fixed order if there are no optional groups or no other ranks."""
    if carrier is None or not any(state.options.is_optional for state in states):
        return FIXED_ORDER
    inside = {module for state in states if state.options.is_optional for module in _modules_of(state)}
    optional = [state for state in states if all(module in inside for module in state.live_modules())]
    around = [(state, _modules_of(state)) for state in states if state not in optional]
    enclosing_groups: dict[int, int] = {}
    for state in optional:
        own = {*state.live_modules()}
        found = [(len(modules), other.position.index) for other, modules in around if own <= modules]
        if not found:
            raise ValueError(
                f"the modules of the optional fully_shard group {state.name} are not all inside the module of "
                "one group that is not optional: make each of them a group of its own"
            )
        enclosing_groups[state.position.index] = min(found)[1]
    return SkippingOrder(enclosing_groups, len(states), carrier)


def _modules_of(state: _FSDPState) -> set[nn.Module]:
    return {module for one in state.live_modules() for module in one.modules()}

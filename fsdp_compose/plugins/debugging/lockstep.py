"""An aid for jobs that hang: agreement before every collective.

``FSDP_COMPOSE_DEBUG=1`` turns it on; set it on all ranks before the first forward.

A rank that leaves the common path (it skips a step or the backward of a NaN loss, or runs an extra forward for its log)
enters a different collective than the others. gloo ends the process if the sizes differ, pairs the collectives silently
if they are equal, and waits if there is no partner. So under this variable all ranks meet before each collective and
before each control exchange, through the key-value store. Each rank says what it is about to do and how many optimizer
steps it has made. If ranks differ, nothing is issued, and every rank raises the same error, which lists what each of
them was about to do. Everything issued before had been agreed on, so the next forward can continue from there.

An iteration that was interrupted on some ranks only is a difference too. Ranks that are about to discard it
(``recovery``) come to the same rendezvous first, so that the others do not wait for them in vain."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from ...core.comm import RECOVERY_TIMEOUT, DataParallelMesh, Transport, is_on, last_of_every_rank, meet, note
from ...core.flat import Communicator, Contribution, FlatParamHandle, Reduction
from ...core.group import Entry, Root, state_of
from ...core.group.collective_order import MOMENTS
from ...core.group.iteration import StepCounts
from ...core.group.optimizer_steps import STEPS_DIFFER, num_steps
from ...core.group.start_values import name_ranks
from ...errors import RanksDifferError

Sum = tuple[list[int], list[str]]
"""Some ranks, and the parameters whose gradients they sum."""

_HINT = (
    "Every rank must run the same forwards, backwards and optimizer steps in the same order. If one rank may skip some "
    "(a NaN loss, an empty batch) or run more (a forward for its log), let all ranks decide together, by all-reducing "
    "a flag. Shard modules that only some ranks use (experts, modalities) with fully_shard(optional=True)"
)


class LockstepCommunicator(Communicator):
    """Records each collective, and agrees on it with the other ranks, before it is issued."""

    __slots__ = ()

    def unshard(self, handle: FlatParamHandle) -> None:
        if not handle.mesh.is_replicated:
            self.announce(handle, "all-gather")
        super().unshard(handle)

    def unshard_post_forward(self, handle: FlatParamHandle) -> None:
        self.announce(handle, "all-gather of parts")
        super().unshard_post_forward(handle)

    def refresh(self, handle: FlatParamHandle) -> None:
        if not handle.unsharded.never_freed and not handle.mesh.is_replicated:
            self.announce(handle, "all-gather")
        super().refresh(handle)

    def contribute(self, handle: FlatParamHandle, contribution: Contribution, is_kept: bool = False) -> bool:
        if contribution is Contribution.KEPT:
            # It communicates only sums over tensor-parallel ranks, on which their ranks alone agree: the others may
            # have used other groups.
            state = state_of(handle)
            for group, terms in _sums_of(handle):
                _agree(group, _describe(handle, "accumulation"), None if state is None else state.root, [terms])
        else:
            averages = contribution is Contribution.REDUCED
            if handle.mesh.is_replicated:
                what = "all-reduce" if averages else "accumulation"
            else:
                what = "reduce-scatter" if averages else "reduce-scatter without all-reduce"
            self.announce(handle, what, [terms for _, terms in _sums_of(handle)])
        return super().contribute(handle, contribution, is_kept)

    def _add_up(self, handle: FlatParamHandle, transport: Transport, flat: torch.Tensor, indices: list[int]) -> None:
        note(handle.mesh.peers, f"all-reduce over tensor-parallel ranks of {handle.label.of(indices)}")
        super()._add_up(handle, transport, flat, indices)

    def all_gather_copy(self, handle: FlatParamHandle, shard: torch.Tensor) -> torch.Tensor:
        self.announce(handle, "all-gather")
        return super().all_gather_copy(handle, shard)

    def reduce_copy(self, handle: FlatParamHandle, reduction: Reduction) -> torch.Tensor:
        self.announce(handle, "reduce-scatter")
        return super().reduce_copy(handle, reduction)

    def announce(self, handle: FlatParamHandle, what: str, sums: Sequence[Sum] = ()) -> None:
        """Agree on a collective that was just recorded in the order, and on the ``sums`` that are issued before it."""
        if not handle.mesh.has_peers:
            return
        text, state = _describe(handle, what), state_of(handle)
        root: Root | None = None if state is None else state.root
        label = "" if root is None else f" of {root.label}"
        note(handle.mesh.peers, text if root is None else f"{text}, collective {root.order.count}")
        try:
            _agree((handle.mesh if root is None else root.mesh).peers, f"{text}{label}", root, sums)
        except RuntimeError:
            if root is not None:
                root.order.entries.pop()  # it is not issued
            raise

    def announce_exchange(self, root: object, moment: object) -> None:
        assert isinstance(root, Root) and isinstance(moment, Entry)
        mesh = root.mesh
        if mesh.has_peers:
            what = MOMENTS.get(moment, "a reduction in functional mode")
            _agree(mesh.peers, f"{what} of {root.label}", root)

    def announce_recovery(self, root: object) -> None:
        """Meet all ranks before they discard an iteration that was interrupted on this rank."""
        assert isinstance(root, Root)
        mesh = root.mesh
        # Ranks that are elsewhere learn of the interruption here and raise. Meet again until they come to recover too.
        what = "discarding an interrupted iteration"
        while mesh.has_peers and _compare(mesh.peers, what, None, timeout=RECOVERY_TIMEOUT):
            pass

    def _failure(self, what: str, handle: FlatParamHandle, error: RuntimeError) -> RuntimeError:
        failure = super()._failure(what, handle, error)
        return type(failure)(f"{failure}{last_of_every_rank(handle.mesh.peers)}")


def _describe(handle: FlatParamHandle, what: str) -> str:
    """A collective of a handle as text, which is the same on every rank that is about to issue it."""
    state = state_of(handle)
    root, phase = None if state is None else state.root, "outside forward"
    if root is not None and root.backward is not None:
        phase = "backward"
    elif root is not None and (root.forward.depth or root.scheduler.skips):  # it may serve others after its own end
        phase = "forward"
    name, label = "?" if state is None else state.name, handle.label
    return f"{what} of {name if label.whole_group else f'{name} ({label})'} in {phase}"


def announce_first_forward(mesh: DataParallelMesh) -> None:
    """Agree that all ranks are about to compare a model at its first forward."""
    if is_on():
        _agree(mesh.peers, "the first forward of a model", None)


def _sums_of(handle: FlatParamHandle) -> list[tuple[dist.ProcessGroup, Sum]]:
    """The gradients that are about to be summed over tensor-parallel ranks; a group is listed even if it sums none."""
    own = handle.tensor_parallel
    if own is None:
        return []
    found = own.terms([param.grad for param in handle.unsharded.params])
    groups = [(transport.group, [handle.name_of(i) for i in indices]) for transport, indices in found]
    return [(group, (dist.get_process_group_ranks(group), names)) for group, names in groups if group.size() > 1]


def _agree(group: dist.ProcessGroup, what: str, root: Root | None, sums: Sequence[Sum] = ()) -> None:
    try:
        verdict = _compare(group, what, root, sums)
        if verdict:
            raise RanksDifferError(verdict)
    except RuntimeError:
        if root is not None:
            root.forward.has_failed = True
        raise


def _compare(
    group: dist.ProcessGroup,
    what: str,
    root: Root | None,
    sums: Sequence[Sum] = (),
    timeout: timedelta | None = None,
) -> str:
    """Meet all ranks of ``group`` and compare what each is about to do. Returns the difference as text, or ``""``."""
    steps = None if root is None else num_steps(root)
    payload = json.dumps([what, steps, sums])
    verdict = meet(group, "agreeing on the next collective", payload, _judge, where=f" ({what})", timeout=timeout)
    if verdict.startswith(STEPS_DIFFER) and root is not None:
        root.steps = StepCounts()  # on all ranks, so that each difference is reported once
    return verdict


def _judge(payloads: list[str]) -> str:
    whats, steps, sums = zip(*[json.loads(payload) for payload in payloads], strict=True)
    if len(set(whats)) > 1:
        return (
            f"the ranks are about to do different things, and nothing was started: {_listing(whats)}. {_HINT}. The "
            "next forward continues from here if all ranks run it"
        )
    if len({count for count in steps if count is not None}) > 1:
        counts = [f"{count} optimizer step(s)" for count in steps]
        return (
            f"{STEPS_DIFFER} before {whats[0]}: {_listing(counts)} (counted "
            "since the first forward or the last such error, for optimizers with sharded parameters). The parameter "
            f"shards now belong to different steps: load a checkpoint. {_HINT}"
        )
    return next(filter(None, map(_difference_of_sums, sums, repeat(sums))), "")


def _difference_of_sums(ours: Sequence[Sum], all_sums: Sequence[Sequence[Sum]]) -> str:
    """How other ranks differ in the sums that they make together with a rank that is about to make ``ours``."""
    for ranks, names in ours:
        others = [other_names for sums in all_sums for other_ranks, other_names in sums if other_ranks == ranks]
        differing = [item for item in others if item != names]
        if differing:
            return (
                "gradients are about to be summed over the tensor-parallel ranks "
                f"{ranks}, but of different parameters, and nothing was started: of {names or 'none'} on one rank, of "
                f"{differing[0] or 'none'} on another. These ranks must get the same batch and run the same modules. "
                f"{_HINT}"
            )
    return ""


def _listing(texts: Sequence[Any]) -> str:
    """Which ranks have which text, the rarest text first."""
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(texts):
        ranks[text].append(rank)
    order = sorted(Counter(texts).items(), key=lambda item: item[1])
    return "; ".join(f"{name_ranks(ranks[text])}: {text}" for text, _ in order)

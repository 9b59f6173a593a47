"""Agreement before every collective: on with ``FSDP_COMPOSE_DEBUG=1``, set on all ranks before the first forward.

A rank that leaves the common path (it skips the backward of a NaN loss, or a step; it runs one forward more, for its
log) enters another collective than the others. gloo ends the process where their sizes differ, pairs them without a
word where they do not, and waits where there is no partner. So ranks that run under this variable meet before each
collective, and before each control exchange, through the key-value store: each tells what it is about to do, and how
many optimizer steps it has made. If these differ, nothing is issued, and every rank raises one error, which tells what
each of them was about to do. Since whatever was issued had been agreed on, the next forward can go on from there.

An iteration that was interrupted on some ranks only is a difference too: ranks that are about to throw away what it
left (``recovery``) come to the same rendezvous first, so that the others do not wait for them in vain.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from ..comm import RECOVERY_TIMEOUT, DataParallelMesh, Transport, is_on, last_of_every_rank, meet, note
from ..flat import Communicator, FlatParamHandle, Reduction
from .order import ENDS
from .state import Root, state_of
from .steps_made import STEPS_DIFFER, begin_again, name_ranks, num_steps

Sum = tuple[list[int], list[str]]
"""The ranks, and the parameters of whose gradients each of them has a term."""

_PURPOSE = "agreeing on the next collective"
_RECOVERY = "throwing away what an interrupted iteration left"
_HINT = (
    "Every rank must run the same forwards, backwards and optimizer steps in the same order: where one rank would skip "
    "(a loss that is NaN, an empty batch) or do more (a forward for its log), let all ranks decide together, by "
    "all-reducing a flag"
)


class LockstepCommunicator(Communicator):
    """Notes each collective, and agrees on it with the other ranks, before it is issued."""

    __slots__ = ()

    def unshard(self, handle: FlatParamHandle) -> None:
        self.announce(handle, "all-gather")
        super().unshard(handle)

    def unshard_parts(self, handle: FlatParamHandle) -> None:
        self.announce(handle, "all-gather of parts")
        super().unshard_parts(handle)

    def refresh(self, handle: FlatParamHandle) -> None:
        if not handle.unsharded.never_freed:
            self.announce(handle, "all-gather")
        super().refresh(handle)

    def reduce(self, handle: FlatParamHandle, is_kept: bool = False, averages: bool = True) -> bool:
        sums = [terms for _, terms in _sums_of(handle)]
        if handle.mesh.has_whole:
            self.announce(handle, "all-reduce" if averages else "accumulation", sums)
        else:
            self.announce(handle, "reduce-scatter" if averages else "reduce-scatter without all-reduce", sums)
        return super().reduce(handle, is_kept, averages)

    def accumulate(self, handle: FlatParamHandle, is_kept: bool = False) -> None:
        """Nothing is communicated, but sums over tensor-parallel ranks; these alone agree, for others may have used
        other groups."""
        state = state_of(handle)
        root: Root | None = None if state is None else state.root
        for group, terms in _sums_of(handle):
            try:
                _agree(group, f"{_describe(handle, 'accumulation')}", root, [terms])
            except RuntimeError:
                if root is not None:
                    root.forward.fail()
                raise
        super().accumulate(handle, is_kept)

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
        """A collective, just noted in the order, is about to be issued, and before it ``sums``."""
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
                root.order.trace.pop()  # it is not issued
                root.forward.fail()
            raise

    def announce_exchange(self, root: object, code: int) -> None:
        assert isinstance(root, Root)
        mesh = root.mesh
        if mesh.has_peers:
            what = ENDS.get(code, "a reduction in functional mode")
            try:
                _agree(mesh.peers, f"{what} of {root.label}", root)
            except RuntimeError:
                root.forward.fail()
                raise

    def announce_recovery(self, root: object) -> None:
        """Before all ranks throw away what an iteration left that was interrupted on this one: those that are
        elsewhere learn of it, and raise; then they are expected here."""
        assert isinstance(root, Root)
        mesh = root.mesh
        while mesh.has_peers and _compare(mesh.peers, _RECOVERY, None, timeout=RECOVERY_TIMEOUT):
            pass

    def _failure(self, what: str, handle: FlatParamHandle, error: RuntimeError) -> RuntimeError:
        failure = super()._failure(what, handle, error)
        return RuntimeError(f"{failure}{last_of_every_rank(handle.mesh.peers)}")


def _describe(handle: FlatParamHandle, what: str) -> str:
    """A collective of a handle, as text: the same on every rank that is about to issue it."""
    state = state_of(handle)
    root, phase = None if state is None else state.root, "outside forward"
    if root is not None and root.backward is not None:
        phase = "backward"
    elif root is not None and (root.forward.depth or root.rounds is not None):  # a rank at its end serves others
        phase = "forward"
    names, name = handle.names, "?" if state is None else state.name
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{what} of {name} ({names[0]}{others}) in {phase}"


def announce_first_forward(mesh: DataParallelMesh) -> None:
    """Before the ranks compare a model that runs for the first time."""
    if is_on():
        _agree(mesh.peers, "the first forward of a model", None)


def _sums_of(handle: FlatParamHandle) -> list[tuple[dist.ProcessGroup, Sum]]:
    """Which gradients are about to be summed over tensor-parallel ranks, also where none are."""
    own = handle.tensor_parallel
    if own is None:
        return []
    found = own.terms([param.grad for param in handle.unsharded.params])
    groups = [(transport.group, [handle.name_of(i) for i in indices]) for transport, indices in found]
    return [(group, (dist.get_process_group_ranks(group), names)) for group, names in groups if group.size() > 1]


def _agree(group: dist.ProcessGroup, what: str, root: Root | None, sums: Sequence[Sum] = ()) -> None:
    verdict = _compare(group, what, root, sums)
    if verdict:
        raise RuntimeError(verdict)


def _compare(
    group: dist.ProcessGroup,
    what: str,
    root: Root | None,
    sums: Sequence[Sum] = (),
    timeout: timedelta | None = None,
) -> str:
    """Meet all ranks of ``group``, each of which is about to do something; return, as text, how they differ."""
    steps = None if root is None else num_steps(root)
    payload = json.dumps([what, steps, sums])
    verdict = meet(group, _PURPOSE, payload, _judge, where=f" ({what})", timeout=timeout)
    if verdict.startswith(STEPS_DIFFER) and root is not None:
        begin_again(root)  # on all ranks: each difference is told once
    return verdict


def _judge(payloads: list[str]) -> str:
    whats, steps, sums = zip(*[json.loads(payload) for payload in payloads], strict=True)
    if len(set(whats)) > 1:
        return (
            f"the ranks are about to do different things, and nothing of it was begun: {_listing(whats)}. {_HINT}. The "
            "next forward goes on from here, if all ranks run it"
        )
    if len({count for count in steps if count is not None}) > 1:
        counts = [f"{count} optimizer step(s)" for count in steps]
        return (
            f"{STEPS_DIFFER} before {whats[0]}: {_listing(counts)} (of those "
            "since the first forward, or since the last such error, of optimizers with sharded parameters). The shards "
            f"of the parameters are no longer of one step: load a checkpoint. {_HINT}"
        )
    return next(filter(None, map(_difference_of_sums, sums, repeat(sums))), "")


def _difference_of_sums(ours: Sequence[Sum], all_sums: Sequence[Sequence[Sum]]) -> str:
    """How other ranks differ in what they sum together with a rank that is about to make these sums."""
    for ranks, names in ours:
        others = [other_names for sums in all_sums for other_ranks, other_names in sums if other_ranks == ranks]
        differing = [item for item in others if item != names]
        if differing:
            return (
                "gradients are about to be summed over the tensor-parallel ranks "
                f"{ranks}, of other parameters on some of them, and nothing of it was begun: of {names or 'none'}, and "
                f"of {differing[0] or 'none'}. These ranks must get the same batch and run the same modules. {_HINT}"
            )
    return ""


def _listing(texts: Sequence[Any]) -> str:
    """Which ranks have which text: those that few ranks have first."""
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(texts):
        ranks[text].append(rank)
    order = sorted(Counter(texts).items(), key=lambda item: item[1])
    return "; ".join(f"{name_ranks(ranks[text])}: {text}" for text, _ in order)

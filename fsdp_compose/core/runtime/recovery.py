"""Recovery: all ranks together discard the remains of an interrupted iteration, or of a backward that raised."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from ...errors import RanksDifferError
from ...plugins.gloo import Journal, known_journal, take_back_failure
from ..comm import RECOVERY_TIMEOUT, class_of_failure, failure_of, last_of_every_rank, meet
from ..group import BackwardState, Root, _FSDPState, steps_were_compared
from .group_ops import stays_unsharded


def recover(root: Root) -> None:
    """Discard the remains of an interrupted iteration, together with all ranks.

    Raises:
        RuntimeError: a rank did not come to the rendezvous (it may hang in a collective of the interrupted iteration),
            or the ranks were interrupted at different places, so that some collectives have no partner.
    """
    states = root.live_states()
    # Before ranks meet: users must see sharded parameters even if one does not come.
    for state in states:
        state.swap.restore()
    is_tainted = _agree_to_recover(root, states)
    for state in states:
        for handle in state._handles:
            root.communicator.wait(handle)
            handle.drop_iteration(is_tainted)
            handle.unsharded.forgive_write()
            handle.unsharded.drop_post_forward()
            root.communicator.reshard(handle)
        _drop_captured(state)
        state.reset()
    # Keep the old detector: it has yet to notice what the user has changed since the interruption.
    root.reset()
    _warn_of_recovery(
        "the last iteration of a fully_shard'ed model was interrupted (an exception in forward or backward): its",
        is_tainted,
    )


def recover_backward(root: Root) -> None:
    """Discard the remains of a backward that raised, together with all ranks, while a forward is running or before
    another backward.

    Raises:
        RuntimeError: as in ``recover``.
    """
    states = root.live_states()
    is_tainted = _agree_to_recover(root, states)
    for state in states:
        for handle in state._handles:
            handle.drop_iteration(is_tainted)
            if not stays_unsharded(root, state):
                root.communicator.reshard(handle)
        _drop_captured(state)
        state.backward = BackwardState()
    root.reset_backward()
    _warn_of_recovery("a backward of a fully_shard'ed model raised, and the exception was caught: its", is_tainted)


def _drop_captured(state: _FSDPState) -> None:
    if state.persistent.captured is not None:
        state.persistent.captured.drop()


def _agree_to_recover(root: Root, states: list[_FSDPState]) -> bool:
    """Meet all ranks, and end collectives in flight. Returns whether older gradients are lost too."""
    root.communicator.announce_recovery(root)
    mesh, count = root.mesh, root.order.count
    # What was added to gradients of earlier backwards cannot be taken out again. If that happened on one rank, all
    # ranks drop them, because ``None`` must mean the same everywhere.
    is_tainted = root.has_added
    if mesh.has_peers:
        journals = _journals_of(mesh.peers, states)
        verdict = meet(
            mesh.peers,
            "recovery after an interrupted iteration",
            f"{count} {int(is_tainted)} {max((journal.count for journal in journals), default=0)}",
            _judge,
            timeout=RECOVERY_TIMEOUT,
        )
        take_back_failure(mesh.peers)
        failure = failure_of(mesh.peers)
        if failure:
            raise class_of_failure(mesh.peers)(
                "an iteration was interrupted by a collective that failed, and its process group can no longer be "
                f"used: restart the processes from a checkpoint. The failure was: {failure}"
            )
        tainted, _, number = verdict.partition(" ")
        if tainted not in ("0", "1"):
            raise RanksDifferError(verdict + last_of_every_rank(mesh.peers))
        is_tainted = tainted == "1"
    root.exchange.abandon()
    root.forward_exchange.abandon()
    root.communicator.finish(discards=True)
    for journal in journals if mesh.has_peers else ():
        journal.finish_all()  # before memory is freed
        journal.restart(int(number))
    root.order.close()
    steps_were_compared(root)
    return is_tainted


def _journals_of(peers: dist.ProcessGroup, states: list[_FSDPState]) -> list[Journal]:
    groups = [peers, *(group for state in states for group in state.mesh.groups())]
    return [*dict.fromkeys(journal for group in groups if (journal := known_journal(group)) is not None)]


def _warn_of_recovery(what: str, is_tainted: bool) -> None:
    lost = ", together with those accumulated before: all gradients are None" if is_tainted else ""
    warnings.warn(f"{what} gradients were discarded{lost}", stacklevel=3)


def _judge(payloads: list[str]) -> str:
    counts = [int(payload.split()[0]) for payload in payloads]
    if len(set(counts)) > 1:
        listing = ", ".join(f"rank {rank} after {count}" for rank, count in enumerate(counts[:16]))
        return (
            "an iteration was interrupted at different places on different ranks, and cannot be recovered: some "
            f"collectives have no partner ({listing} collectives). Restart the processes from a checkpoint"
        )
    return " ".join(str(max(int(payload.split()[place]) for payload in payloads)) for place in (1, 2))

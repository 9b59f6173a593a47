"""The control exchange, which checks that all ranks have done the same, and the error that all raise if they have not.

The exchange takes place at the end of a backward, at the end of a forward that has checked for untracked writes, and
before each reduction in functional mode. ``group/collective_order`` provides the data to compare;
``comm/control_exchange`` transports it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ...errors import RanksDifferError
from ..comm import ControlExchange, last_of_every_rank, meet
from ..group import (
    END_OF_BACKWARD,
    FLAGS_CHANGED,
    LOAD_REMEDY,
    LOADED,
    OTHER_MODEL,
    REPLICAS_DIFFER,
    REPLICAS_SET,
    TRANSPORTS_SET,
    UNSHARDED_DIFFER,
    Entry,
    Kind,
    Root,
    _FSDPState,
    first_difference_of_entries,
    raise_different_steps,
    steps_to_compare,
    steps_were_compared,
)

# ---- The error that all ranks raise together when they have issued different collectives


def raise_different_order(root: Root, moment: Entry) -> None:
    """Raise, on every rank, an error that names the first difference. Ranks: all, which know that they differ.

    Args:
        moment: where this rank is.
    """
    group = root.mesh.peers
    lasts = last_of_every_rank(group)
    lines = root.order.entries_as_text(root, moment)
    sent = [name for state in root.live_states() for name in state.mesh.transport_names().values()]

    def explain(rank: int, ours: str, theirs: str) -> str:
        (ours, _, own_sent), (theirs, _, other_sent) = (text.rpartition("\n") for text in (ours, theirs))
        difference = first_difference_of_entries(ours, theirs)
        assert difference is not None, "digests of the entries differ"
        position, a, b = difference
        if FLAGS_CHANGED in a or FLAGS_CHANGED in b:
            return (
                f"requires_grad of a parameter has changed on some ranks only: instead of collective {position} of "
                f"this iteration there was {a} on rank 0 and {b} on rank {rank}. No gradient was published. Freeze and "
                "thaw the same parameters, at the same place of the program, on every rank"
            )
        if UNSHARDED_DIFFER in a or UNSHARDED_DIFFER in b:
            return (
                "in a forward that puts a parametrization on parameters of a fully_shard group, some ranks have "
                f"modified unsharded parameters in place, or put none on: instead of collective {position} of this "
                f"iteration there was {a} on rank 0 and {b} on rank {rank}. The writes are lost when the group is "
                "resharded, and no gradient was published. Let every rank do the same, and modify parameters outside "
                "forward"
            )
        if REPLICAS_SET in a or REPLICAS_SET in b:
            return (
                "set_replicas() was called on some ranks only: instead of collective "
                f"{position} of this iteration there was {a} on rank 0 and {b} on rank {rank}. No gradient was "
                "published. Call it on every rank, between the same two iterations"
            )
        if TRANSPORTS_SET in a or TRANSPORTS_SET in b:
            return (
                "set_transport() or set_wire_formats() was called on some ranks only, or with other transports: "
                f"instead of collective {position} of this iteration there was {a} on rank 0 and {b} on rank {rank}. "
                f"Rank 0 now sends by {own_sent}, rank {rank} by {other_sent}. "
                "No gradient was published. Call it the same way on every rank, between the same two iterations"
            )
        if REPLICAS_DIFFER in a or REPLICAS_DIFFER in b:
            return _other_replicas(root)
        if LOADED in a or LOADED in b:
            return (
                "load_state_dict() got other whole tensors on some ranks, or ran on some ranks only: instead of "
                f"collective {position} of this iteration there was {a} on rank 0 and {b} on rank {rank}. No gradient "
                f"was published. {LOAD_REMEDY}"
            )
        return (
            f"the ranks issued different collectives in this iteration: collective {position} was {a} on "
            f"rank 0 and {b} on rank {rank}. No gradient was published. Ranks must run the same "
            "fully_shard groups in the same order. Shard modules that only some ranks use (experts, modalities) with "
            "fully_shard(optional=True) or in one group with their parent, or run all of them on every rank. Run "
            f"several models in the same order on every rank{lasts}"
        )

    details = "\n".join([*lines, "; ".join(dict.fromkeys(sent))])
    entries = [line.partition("\t")[0] for line in lines]  # names may differ: a model may be gone on some ranks only
    digest = hashlib.sha256("\n".join(entries).encode()).hexdigest()
    from ...plugins.gloo import known_journal

    journal = known_journal(group)
    if journal is not None:
        journal.waits_for = journal.count  # another rank may wait for a collective of ours: say what this rank entered
        journal.finish_dropped()
    try:
        meet(group, "comparing collectives", digest, lambda _: "", details, explain)
    except RuntimeError:
        if journal is not None and journal.difference:
            raise RanksDifferError(journal.difference) from None
        raise
    finally:
        if journal is not None:
            journal.waits_for = 0
        root.order.close()  # all ranks know the difference: do not report it again for other models
    raise RanksDifferError("the ranks issued different collectives in this iteration; no gradient was published")


# ---- The exchange


def is_whole(root: Root) -> bool:
    """Whether every rank holds all parameters of the root, so that only reductions communicate."""
    # Then ranks may run unequal numbers of forwards, and of backwards that reduce nothing. An exchange at the end of
    # these would wait for ranks that run fewer; what it would compare is compared at the next one.
    return all(
        handle.mesh.is_replicated and handle.tensor_parallel is None
        for state in root.live_states()
        for handle in state._handles
    )


def begin_exchange(root: Root, exchange: ControlExchange, moment: Entry) -> None:
    """Send what this rank has done, and the ``moment`` that it is at. Ranks: all."""
    # While a rank waits in the exchange it cannot serve one that requests an optional group of another model.
    if root.order.serve is not None:
        root.order.serve(root, OTHER_MODEL)
    root.communicator.announce_exchange(root, moment)
    exchange.start(root.order.hash(root, moment), steps_to_compare(root))


def end_exchange(root: Root, exchange: ControlExchange, moment: Entry) -> None:
    """Wait for the other ranks.

    Raises:
        RuntimeError: on every rank, if ranks have issued different collectives or made different numbers of optimizer
            steps, or if a rank did not come.
    """
    try:
        is_same = exchange.wait()
    except RuntimeError:
        root.order.close()  # as on the other ranks
        raise
    if not is_same:
        raise_different_order(root, moment)
    if not exchange.steps_agree:
        raise_different_steps(root)
    root.order.close()
    steps_were_compared(root)


# ---- Agreement with the other replica groups (``set_replicas``)


def compare_with_replicas(root: Root) -> None:
    """Compare with the other replica groups what a backward is to reduce. Ranks: all of all groups, when it begins.

    Raises:
        RanksDifferError: on all ranks, the groups are at other places, or have run other groups.
    """
    # Before the first average: averages of other sizes would meet, or meet a maximum, and what happens then is up to
    # the user's object.
    states = root.live_states()
    replicas = states[0].mesh.replicas if states else None
    if replicas is None or not _averages(states):
        return
    from ...plugins.replicas import agree_between

    due = sorted(
        _reduction_of(state)
        for state in states
        if (state.progress.awaiting_backward or state.persistent.has_unsynced)
        and any([handle.pending_gradients.is_trainable for handle in state._handles])
    )
    text = [f"the beginning of a backward with {len(root.exchange.used)} parameters", *due]
    difference = agree_between(replicas, text, memoryview(bytearray()), False, states[0].mesh.device)
    if difference:
        raise RanksDifferError(_other_replicas(root, "would reduce", difference))


def agree_with_replicas(root: Root, states: Sequence[_FSDPState], issued: Sequence[Entry]) -> None:
    """Take over from the other replica groups which parameters have a gradient, and which groups have late ones. Ranks:
    all of all groups, at the end of a backward, after the exchange of the ranks of this group.

    Args:
        issued: what this rank has issued in the backward, which is what the others of its group have.

    Raises:
        RanksDifferError: on all ranks, the groups have reduced other gradients.
    """
    replicas, exchange = states[0].mesh.replicas, root.exchange
    if replicas is None or not _averages(states):
        return  # groups may run unequal numbers of backwards that only accumulate
    from ...plugins.replicas import agree_between

    by_entry = {state.log.reduce_scatter: state for state in states}
    # Names, because numbers depend on which model ran first since the job began. And no gathers, which come in another
    # order in a job that has just begun.
    reduced = [_reduction_of(by_entry[entry]) for entry in issued if entry in by_entry]
    text = [f"the end of a backward with {len(exchange.used)} parameters", *reduced]
    difference = agree_between(replicas, text, exchange.told, any(exchange.late), states[0].mesh.device)
    if difference:
        root.order.entries.append(states[0].log.note(Kind.REPLICAS_DIFFER, "\n".join(text)))
    # Some ranks of this group may have lost the ranks that they stand beside, and know less than the others.
    begin_exchange(root, exchange, END_OF_BACKWARD)
    end_exchange(root, exchange, END_OF_BACKWARD)
    if difference:
        raise RanksDifferError(_other_replicas(root, how=difference))


def _averages(states: Sequence[_FSDPState]) -> bool:
    options = [state.options for state in states]
    return any([item.requires_gradient_sync and item.requires_all_reduce for item in options])


def _reduction_of(state: _FSDPState) -> str:
    sizes = [f"{handle.layout.flat_numel} x {handle.pending_gradients.dtype}" for handle in state._handles]
    return f"{state.name}: {', '.join(sizes)}"


def _other_replicas(root: Root, what: str = "have reduced", how: str = "") -> str:
    return (
        f"the replica groups (set_replicas()) {what} other gradients in this backward of {root.label}, or in another "
        f"order, so their averages would be of different parameters{how and f': {how}'}. No gradient was published. "
        "All replica groups must run the same fully_shard groups in the same order, on equally many ranks"
    )

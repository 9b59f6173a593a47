"""The messages of a root with optional groups, by which all ranks agree on which groups to gather and reduce next.

Only ``skipping_order`` calls this; its head describes sync points, requests and rounds.

A round is one small maximum over the ranks, like a control exchange (see ``comm``). It covers a hash of the order and
of the rank's sync point, the complement of that hash, and marks::

    | failed | complement | live | padding | requested | missing | pending | ready |

The last four have one byte for each ``fully_shard`` group. Ranks that request a group send no hash. If no rank requests
anything, all have sent one, and hash and complement show whether all are at the same point."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from ...core.comm import Carrier
from ...core.flat import is_stale
from ...core.group import END_OF_BACKWARD, OTHER_MODEL, Entry, HookedUse, Root, _FSDPState
from ...core.runtime import reshard
from ...core.runtime.agreement import raise_different_order
from ...core.runtime.group_ops import reduce

_HEAD = struct.Struct("<IIB3x")
_MOST = (1 << 32) - 1
_SEVERAL_FAILED = -1  # instead of the number of a rank


class Marks(NamedTuple):
    """Facts about each group, by index, as one rank sends them or as the maximum over all ranks."""

    requested: Sequence[int]  # a rank needs the group, and others may not
    missing: Sequence[int]  # all ranks need the group at this point, and a rank does not have it gathered
    pending: Sequence[int]  # its backward is running, or is still to come in the running backward
    ready: Sequence[int]  # its gradients are ready to be reduced


class SkipProtocol:
    """The rounds of one root."""

    def __init__(self, num_groups: int, carrier: Carrier) -> None:
        self._carrier = carrier
        self._view = memoryview(bytearray(_HEAD.size + len(Marks.__annotations__) * num_groups))
        carrier.make_room(len(self._view))
        starts = range(_HEAD.size, len(self._view), num_groups)
        # After a round, those of all ranks together.
        self.marks = Marks(*(self._view[start : start + num_groups] for start in starts))
        self.count = 0  # of rounds made
        # Forwards in which this rank has run an optional group and whose graph is alive.
        self.live: weakref.WeakSet[HookedUse] = weakref.WeakSet()
        self.served: list[int] = []  # groups gathered on this rank only because another rank requested them
        self.old: set[int] = set()  # groups gathered since before this forward: to be gathered again before use
        self.reset()

    def reset(self) -> None:
        """Forget the iteration that was going on."""
        self.live.clear()
        self.served.clear()
        self.reset_backward()

    def reset_backward(self) -> None:
        """Forget the backward that was going on, or has ended; a forward may go on."""
        self.ready: set[int] = set()  # groups whose gradients are ready, on this rank, to be reduced
        self.is_on = True  # rounds are made; false only in a backward in which no rank can reach an optional group
        # Another root with optional groups makes rounds in this backward now: no group may be requested here.
        self.is_over = False
        self.has_failed = False  # a round has raised on all ranks, or this rank has announced its failure
        self.last_number = 0  # of the latest forward that the backward has reached

    # ---- Sync points and requests

    def sync_point(self, root: Root, place: Entry, needed: Sequence[_FSDPState] = ()) -> None:
        """Serve the other ranks until all are at this place. Then gather the groups that all need. Raises RuntimeError
        on every rank, if ranks are at different points, if one has failed, or if one did not come."""
        if self.is_on:
            while self._make_round(root, place, needed=needed):
                pass

    def request_unshard(self, root: Root, state: _FSDPState, ahead: Sequence[_FSDPState] = ()) -> None:
        """Start the all-gathers of a group, on all ranks, unless this rank already has it; also of the groups that it
        needs next. Raises as ``sync_point`` does."""
        self._keep(state)
        wanted = [item for item in (state, *ahead) if self._is_missing(item)]
        if wanted and self.is_over:
            raise RuntimeError(
                f"a backward comes back to the fully_shard group {state.name} of {root.label} after it has reached "
                "optional groups of another model. Ranks cannot agree on both at once. Call fully_shard() on one "
                "module that contains both models, so that they share a root, or run a backward for each"
            )
        if wanted:
            self._make_round(root, None, wanted=wanted)

    def announce_failure(self, root: Root) -> None:
        """Tell the other ranks, once, that this rank has failed."""
        # It would no longer come to rounds in which they wait.
        if self.has_failed or not self.is_on or self.is_over:
            return
        self.has_failed = True
        nothing = [False] * len(root.states)
        self._exchange(None, False, Marks(nothing, nothing, nothing, nothing), root.mesh.peers.rank())

    def gather(self, root: Root, states: Sequence[_FSDPState], kept: Sequence[_FSDPState]) -> None:
        """Start the all-gathers of groups, on all ranks, in the order of their indexes. This rank keeps those in
        ``kept``; any other one it frees before it gathers the next."""
        for state in states:
            is_new = False
            self._drop_served(root)  # so a rank holds one group at a time that it does not need itself
            self.old.discard(state.position.index)
            for handle in state._handles:
                if handle.unsharded.never_freed:
                    continue
                root.order.entries.append(state.log.all_gather)
                if handle.unsharded.is_allocated:
                    root.communicator.wait(handle)
                    root.communicator.refresh(handle)  # mostly with the same elements again
                    root.communicator.wait(handle)  # this rank may be computing with it
                else:
                    is_new = True
                    root.communicator.unshard(handle)
            if is_new and state not in kept:
                self.served.append(state.position.index)

    def _keep(self, state: _FSDPState) -> None:
        """Note that this rank itself needs a group, even if it was gathered for another rank."""
        if state.position.index in self.served:
            self.served.remove(state.position.index)

    def _drop_served(self, root: Root) -> None:
        for index in self.served:
            state = root.states[index]()
            if state is not None and not state.backward.active_uses:
                reshard(root, state)
        self.served.clear()

    # ---- One round

    def _make_round(
        self,
        root: Root,
        place: Entry | None,
        *,
        wanted: Sequence[_FSDPState] = (),
        needed: Sequence[_FSDPState] = (),
    ) -> bool:
        """Make one round, and gather and reduce accordingly. Returns whether any rank requested a group.

        ``wanted``: the groups that this rank requests; ``needed``: the groups that all need once all are at this
        point."""
        if self.has_failed:
            raise RuntimeError("an earlier round about optional fully_shard groups has failed: this iteration is over")
        self._drop_served(root)
        states = root.live_states()
        marks = Marks(
            [state in wanted for state in states],
            [state in needed and self._is_missing(state) for state in states],
            [self._is_pending(state) for state in states],
            [state.position.index in self.ready for state in states],
        )
        if place == OTHER_MODEL:
            is_live = any([self._may_request(state) for state in states])
        else:
            # A forward that cannot be hooked leaves its group unsharded, to be reduced at the end; maybe on this rank
            # only.
            is_live = bool(self.live) or any(
                [state.persistent.has_unsynced or state.persistent.is_unhooked for state in states]
            )
        digest = None if place is None else root.order.hash(root, place)
        try:
            is_same = self._exchange(digest, is_live, marks)
        except RuntimeError as error:
            self.has_failed = True
            root.forward.has_failed = True
            what = f"needs {wanted[0].name}" if place is None else f"waits at {root.order.name_of(place)}"
            raise type(error)(  # of the exchange that failed
                f"rank {root.mesh.peers.rank()} {what}, but another rank did not come to its next sync point. It may "
                "have run a different number of forwards or backwards, or wait for this rank in a collective that is "
                "not fully_shard's. Call sync_optional_groups(model), on all ranks, before such a collective. Details: "
                f"{error}"
            ) from None
        if self._failed_rank is not None:
            self._raise_failed(root, self._failed_rank)
        if not is_same:  # gather nothing that was requested: a rank cannot know which others would gather it
            self.has_failed = True
            root.forward.has_failed = True
            raise_different_order(root, wanted[0].log.all_gather if place is None else place)
        is_last = not any(self.marks.requested)
        marked = self.marks.missing if is_last else self.marks.requested
        self.gather(root, [item for item in states if marked[item.position.index]], states if is_last else wanted)
        if root.backward is not None and self.is_on:
            self._reduce_ready(root, states, is_end=is_last and place == END_OF_BACKWARD)
        return not is_last

    def _exchange(self, digest: int | None, is_live: bool, marks: Marks, failed: int | None = None) -> bool:
        """Exchange with all ranks; afterwards ``self.marks`` has the marks of all ranks together.

        Args:
            digest: of the order and of this rank's sync point; ``None`` if it is at none but requests groups.
            is_live: this rank can reach an optional group in the backward that begins.
            marks: the marks of this rank.
            failed: this rank's number, if it has failed.

        Returns:
            Whether all ranks that gave a digest gave the same one.
        """
        number = (0, 0) if failed is None else (failed, _MOST - failed)
        self._view[: _HEAD.size] = _HEAD.pack(*number, is_live)
        self._view[_HEAD.size :] = b"".join([bytes(values) for values in marks])
        self.count += 1
        return self._carrier.make_round(digest, self._view)

    @property
    def is_live(self) -> bool:
        """Whether, in the last round, some rank could reach an optional group."""
        return bool(_HEAD.unpack_from(self._view)[2])

    @property
    def _failed_rank(self) -> int | None:
        """The rank that had failed in the last round, or ``_SEVERAL_FAILED``; ``None`` if none had."""
        number, complement, _ = _HEAD.unpack_from(self._view)
        if not complement:
            return None
        return int(number) if number + complement == _MOST else _SEVERAL_FAILED

    def _raise_failed(self, root: Root, rank: int) -> None:
        self.has_failed = True
        root.forward.has_failed = True
        which = "some ranks" if rank == _SEVERAL_FAILED else f"rank {rank}"
        raise RuntimeError(
            f"{which} raised an exception in this iteration, which ends it on all ranks (see the error there). The "
            "next forward continues from here if all ranks run it"
        )

    def _reduce_ready(self, root: Root, states: Sequence[_FSDPState], is_end: bool) -> None:
        for state in reversed(states):
            index = state.position.index
            is_wanted = self.marks.pending[index] or self.marks.requested[index]
            if self.marks.ready[index] and (is_end or not is_wanted):
                self.ready.discard(index)
                self._keep(state)
                reduce(root, state)

    # ---- What this rank says about each group

    def _is_missing(self, state: _FSDPState) -> bool:
        is_old = state.position.index in self.old
        return is_old or any([not item.unsharded.is_allocated or is_stale(item) for item in state._handles])

    def _is_pending(self, state: _FSDPState) -> bool:
        """Whether, on this rank, the backward of a group is running or is still to come in the running backward."""
        progress, backward = state.progress, state.backward
        return bool(
            backward.active_uses
            or backward.is_iterated
            or progress.running_forwards
            or any([number <= self.last_number for number in progress.awaiting_backward])
        )

    def _may_request(self, state: _FSDPState) -> bool:
        """Whether the running backward may still gather a group on this rank, for a forward that it has not reached."""
        numbers = [number for number in state.progress.awaiting_backward if number <= self.last_number]
        return len(numbers) > state.backward.active_uses

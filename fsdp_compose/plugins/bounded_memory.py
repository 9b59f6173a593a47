"""A bound on the memory that communication takes (``fully_shard(limit_unsharded_bytes=...)``).

``BoundedOrder`` is the scheduler of a root with such a limit. It changes what is in flight at a time, never the order
of the groups that compute: a group is gathered ahead only if there is room, and reductions in flight are waited for
before a group is gathered that would not fit beside their buffers. What one group needs is always taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ..core.flat import FlatParamHandle
from ..core.group import ForwardRecord, HookedUse, Root, Scheduler, _FSDPState, bytes_of_limit
from ..core.runtime.group_ops import (
    FixedOrder,
    prefetch_backward,
    prefetch_forward,
    reduce,
    unshard,
    unshard_again,
    unshard_for_use,
)
from ..errors import MisuseError


class BoundedOrder(FixedOrder):
    """The scheduler of a root with a limit: bytes of gathered parameters and of gradients on their way, at a time.
    Groups that stay gathered between forward and backward do not count."""

    is_capturable = False

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # What is in flight by the order of calls, not by what there is: a rank whose earlier gradients accumulate in
        # memory of their own reduces them there, and all ranks must decide alike.
        self._reducing: dict[torch.dtype, int] = {}

    def reset_backward(self) -> None:
        self._reducing.clear()

    def end_backward(self, root: Root) -> None:
        self._reducing.clear()

    def before_forward(self, root: Root, state: _FSDPState, use: HookedUse | None) -> None:
        self._make_room(root, _bytes_to_gather(state))
        unshard_for_use(root, state)
        prefetch_forward(root, state, self._unshard_if_room)

    def before_recomputation(self, root: Root, state: _FSDPState, use: HookedUse | None) -> None:
        self._make_room(root, _bytes_to_gather(state))
        super().before_recomputation(root, state, use)

    def before_backward(self, root: Root, state: _FSDPState, record: ForwardRecord, position: int) -> None:
        self._make_room(root, _bytes_to_gather(state))
        unshard_again(root, state)
        prefetch_backward(root, state, record, position, partial(self._unshard_again_if_room, state))

    def ready_to_reduce(self, root: Root, state: _FSDPState) -> None:
        sizes = _bytes_to_reduce(state) if state.options.requires_gradient_sync else {}
        self._make_room(root, sum(sizes.values()) - _gathered_bytes([state]))  # it is resharded before
        reduce(root, state)
        for dtype, nbytes in sizes.items():
            self._reducing[dtype] = max(nbytes, self._reducing.get(dtype, 0))

    def _make_room(self, root: Root, nbytes: int) -> None:
        """Wait for the reductions in flight if ``nbytes`` more would not fit beside them."""
        buffers = sum(self._reducing.values())
        if buffers and buffers + _gathered_bytes(root.live_states()) + nbytes > self._limit:
            root.communicator.finish_reductions()
            self._reducing.clear()

    def _unshard_if_room(self, root: Root, state: _FSDPState) -> None:
        held = sum(self._reducing.values()) + _gathered_bytes(root.live_states())
        if held + _bytes_to_gather(state) <= self._limit:
            unshard(root, state)

    def _unshard_again_if_room(self, current: _FSDPState, root: Root, state: _FSDPState) -> None:
        """Gather ``state`` ahead during the backward of ``current``, if there is room until that is reduced."""
        gathered = _gathered_bytes(root.live_states())
        then = gathered - _gathered_bytes([current]) + sum(_bytes_to_reduce(current).values())
        if max(sum(self._reducing.values()) + gathered, then) + _bytes_to_gather(state) <= self._limit:
            unshard_again(root, state)


def _resharded(states: Sequence[_FSDPState]) -> Iterator[FlatParamHandle]:
    """The flat parameters whose memory comes and goes."""
    return (
        handle
        for state in states
        if state.position.reshards_after_forward
        for handle in state._handles
        if not (handle.unsharded.keep or handle.mesh.is_replicated)
    )


def _bytes_of(handle: FlatParamHandle) -> int:
    return handle.layout.flat_numel * handle.unsharded.dtype.itemsize


def _gathered_bytes(states: Sequence[_FSDPState]) -> int:
    return sum([_bytes_of(handle) for handle in _resharded(states) if handle.unsharded.is_allocated])


def _bytes_to_gather(state: _FSDPState) -> int:
    return sum([_bytes_of(handle) for handle in _resharded([state]) if not handle.unsharded.is_allocated])


def _bytes_to_reduce(state: _FSDPState) -> dict[torch.dtype, int]:
    """What reductions of the group take at a time, by dtype: those of one dtype follow each other."""
    sizes: dict[torch.dtype, int] = {}
    for handle in state._handles:
        pending = handle.pending_gradients
        if pending.is_trainable and not handle.mesh.is_replicated:
            nbytes = handle.layout.flat_numel * pending.dtype.itemsize
            sizes[pending.dtype] = max(nbytes, sizes.get(pending.dtype, 0))
    return sizes


def bounded(states: Sequence[_FSDPState], scheduler: Scheduler) -> Scheduler:
    """The scheduler of a root with these groups, in place of ``scheduler`` if their root has a limit.

    Raises:
        MisuseError: a group that is not the root has one.
        NotImplementedError: there are optional groups, whose ranks gather what others need.
    """
    limited = [state for state in states if state.options.limit_unsharded_bytes is not None]
    inner = [state for state in limited if not state.position.is_outermost]
    if inner:
        raise MisuseError(
            f"fully_shard(limit_unsharded_bytes=...): {inner[0].name} is not the root, whose forward is outermost, and "
            "the limit is for all groups together: pass it with the root's call"
        )
    if not limited:
        return scheduler
    if scheduler.skips:
        raise NotImplementedError(
            "fully_shard(limit_unsharded_bytes=...) does not support models with optional groups: ranks also gather "
            "what other ranks need. Leave out the limit, or optional=True"
        )
    sizes = [[_bytes_of(item) for item in state._handles if not item.mesh.is_replicated] for state in states]
    largest = max(map(sum, sizes))
    return BoundedOrder(min(bytes_of_limit(state.options.limit_unsharded_bytes, largest) for state in limited))

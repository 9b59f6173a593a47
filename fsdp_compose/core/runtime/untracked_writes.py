"""Writes to unsharded parameters inside forward that raise no version: through ``.data``, NumPy or an address.

An unsharded parameter is a copy, so a write to it inside forward is lost when the group is resharded. If the write
raises torch's version counter, ``ChangeDetector`` sees it. A write through ``.data`` (initialization from the first
batch, weight clipping of a critic, codebooks from moving averages) changes only memory, and an assignment to ``.data``
silently gives the parameter other memory. Both are found by checking where the parameters are, and whether this rank's
slice of the gathered memory still equals its shard bit for bit. Together, the slices of all ranks cover all elements.

The check runs at the 1st, 2nd, 4th, 8th, ... use of a group and later at every ``_MAX_GAP``-th, with and without grad
mode apart, and at all uses if ``FSDP_COMPOSE_DEBUG=1``. A forward that has checked a group ends with an exchange.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn as nn

from ..._torch import in_transform, same_storage, without_modes
from ...errors import MisuseRuntimeError
from ..comm import is_capturing, is_on
from ..flat import ON_DEVICE, FlatParamHandle, ShardStorage, local_of
from ..group import (
    END_OF_FORWARD,
    GroupUse,
    Kind,
    Root,
    _FSDPState,
    registrations,
    state_of,
)
from .agreement import begin_exchange, end_exchange, is_whole

_MAX_GAP = 97  # uses between two checks; a prime, so that it does not stay out of phase with periodic writes
_CHUNK = 1 << 20  # elements compared at a time, so that temporaries stay small
_PERIOD = 65_521  # the weights of elements repeat after this many; they make the checksum depend on the order
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def look_for_writes(root: Root, state: _FSDPState, module: nn.Module, use: GroupUse | None) -> None:
    """Find the parameters that forward has written to, at the end of a use that is due for the check.

    Args:
        use: ``None`` in the default mode without grad mode.
    """
    progress, mode = state.progress, use is None
    # Inside a torch.func transform, while a graph is captured, and before the last of the group's modules, the check
    # moves to the next use.
    if in_transform() or is_capturing(state.mesh.device) or progress.pending_modules - {id(module)}:
        progress.uses_left[mode] = 1
        return
    # Reading a shard at every use would cost too much. All ranks count alike, from the first forward and again from an
    # interruption, so they check at the same uses and come to the exchange together.
    if not progress.uses_left[mode]:  # else a version counter has moved
        gap = progress.look_gaps[mode]
        progress.uses_left[mode], progress.look_gaps[mode] = gap, 1 if is_on() else min(2 * gap, _MAX_GAP)
    if state.mesh.is_simulated:
        return  # nothing is gathered
    root.forward.note_written()
    with torch.no_grad(), without_modes():
        found = writes_to_unsharded(state) if use is None else use.find_writes()
    for handle, indexes in found.items():
        root.forward.note_written(handle, indexes)
    if registrations.count != root.forward.num_registrations and (use is None or not use.has_check):
        _forgive(found)


def forgive_versions(state: _FSDPState) -> None:
    """Forgive version counters of ``state`` that moved without a write, in a repetition of a forward inside
    backward."""
    # Ranks do not meet there, so each looks at its own slice.
    with torch.no_grad(), without_modes():
        _forgive(writes_to_unsharded(state))


def _forgive(found: dict[FlatParamHandle, list[int]]) -> None:
    """Forgive what ``torch.nn.utils.parametrize`` does."""
    # It sets a parameter to its own memory, which raises the version and writes nothing.
    for handle, indexes in found.items():
        # A write of the only rank to its only copy is a write to the sharded parameter, as if unsharded.
        is_only = handle.unsharded.never_freed and handle.mesh.data_world_size == 1
        # Where there is no shard to compare the gathered memory with, the version alone decides.
        if is_only or _is_comparable(handle):
            _note_memory(handle)
            if not indexes:
                handle.unsharded.forgive_write()


def _note_memory(handle: FlatParamHandle) -> None:
    """Let the next exchange compare what the ranks have gathered."""
    # Each rank has compared only its own slice with its shard, but it may have written to the others. (Without a
    # parametrization such a write, of one rank alone, is missed.) Tensor-parallel ranks gather different memory.
    state = state_of(handle)
    if state is not None and state.root is not None and state.root.mesh.has_peers and handle.tensor_parallel is None:
        text = str(checksum(handle.unsharded.memory.shown))
        state.root.order.entries.append(state.log.note(Kind.UNSHARDED, f"{handle.name_of(0)}{text}"))


def writes_to_unsharded(state: _FSDPState) -> dict[FlatParamHandle, list[int]]:
    """The indexes of unsharded parameters that forward has written to. Those that it gave other memory are put back."""
    unsharded = [(item, item.unsharded) for item in state._handles if item.unsharded.shows_shards]
    present = [handle for handle, item in unsharded if item.is_allocated and item.work is None]
    return {handle: [*_put_back(handle), *_written_to_memory(handle)] for handle in present}


def refuse_untracked_writes(root: Root) -> None:
    """Raise, on every rank, if a rank has found a write. Called at the end of a top-level forward that has checked."""
    states, exchange = root.live_states(), root.forward_exchange
    written = root.forward.take_written()
    used, starts = exchange.used, root.used_starts
    used[:] = bytes(len(used))
    for handle, indexes in written.items():
        for i in indexes:
            used[starts[handle] + i] = 1
    # If no forward communicates, ranks may run unequal numbers of them, and each raises for itself.
    if not is_whole(root):
        begin_exchange(root, exchange, END_OF_FORWARD)
        end_exchange(root, exchange, END_OF_FORWARD)
    if not any(used):
        return
    names = [
        f"{handle.label.names(fqn)}"
        for handle, start in starts.items()
        for fqn, is_written in zip(handle.fqns, used[start:], strict=False)
        if is_written
    ]
    groups = [state.name for state in states if not written.keys().isdisjoint(state._handles)]
    where = f"on this rank in group {', '.join(groups)}" if groups else "seen on another rank"
    raise MisuseRuntimeError(
        f"rank {states[0].mesh.rank}: unsharded parameters were modified in place inside forward, through .data "
        f"or an address, or .data was assigned to: {', '.join(names)} ({where}). The change would be lost when "
        "their groups are resharded. Modify the (sharded) parameters outside forward, under torch.no_grad() or in "
        "summon_full_params(); keep values that change in forward (codebooks, averages) in buffers; "
        "and run the first forward of modules that initialize themselves from data before fully_shard()"
    )


def _put_back(handle: FlatParamHandle) -> list[int]:
    """Find parameters that are no longer views of their place in the gathered memory, and make them so again."""
    present = map(local_of, handle.unsharded.params)
    displaced = [
        i
        for i, (param, place) in enumerate(zip(present, handle.layout.params, strict=True))
        if not same_storage(param.untyped_storage(), handle.unsharded.storage)
        or param.storage_offset() != place.offset
        or param.shape != place.shape
        or not param.is_contiguous()
    ]
    if displaced:
        views = handle.full_views_of(handle.unsharded.memory.shown)
        for i in displaced:
            handle.unsharded.put_back(i, views[i])
    return displaced


def _written_to_memory(handle: FlatParamHandle) -> list[int]:
    return written(handle, handle.unsharded.memory.shown) if _is_comparable(handle) else []


def _is_comparable(handle: FlatParamHandle) -> bool:
    """Whether its gathered memory is a copy of the shard, and has not been told apart from it by a write to the shard,
    which is tracked and handled elsewhere."""
    segments = handle.segment_version() if handle.segments else handle.unsharded.gathered[1]
    return not (handle.unsharded.never_freed or handle.unsharded.was_written_since_gather(segments))


def written(handle: FlatParamHandle, flat: torch.Tensor) -> list[int]:
    """The parameters whose elements in this rank's slice of ``flat`` differ from those gathered from the shard."""
    own = handle.layout.own_shard(flat, handle.mesh.shard_rank)
    shard, storage, transport = handle.shard, handle.storage, handle.mesh.transport
    if transport.rounds:
        gathered = transport.as_gathered(storage.on_device(shard), own.dtype)
        if gathered is None:
            return []
        shard, storage = gathered, ON_DEVICE
    if not any(_differ(own, shard, storage)):
        return []
    # Compare per parameter: padding between parameters belongs to none.
    return [
        i
        for i, (start, stop, _) in enumerate(handle.local_shards)
        if any(_differ(own[start:stop], shard[start:stop], storage))
    ]


def _differ(own: torch.Tensor, shard: torch.Tensor, storage: ShardStorage) -> Iterator[bool]:
    """Whether each chunk differs in some bit. NaNs that were cast count as equal."""
    for mine, source in zip(own.split(_CHUNK), shard.split(_CHUNK), strict=True):
        expected = storage.on_device(source).to(mine.dtype)
        bits = _INTEGERS[mine.dtype.itemsize]
        if torch.equal(mine.view(bits), expected.view(bits)):
            continue
        if mine.dtype == shard.dtype:
            yield True
        else:
            # The bits that a cast gives a NaN depend on its position in memory.
            both_nan = mine.isnan() & expected.isnan()
            yield bool(((mine.view(bits) != expected.view(bits)) & ~both_nan).any())


def checksum(elements: torch.Tensor) -> list[int]:
    """Two sums over the bits of ``elements``, one of them weighted by position."""
    total, weighed = 0, 0
    with torch.no_grad():
        for chunk in _integers(elements):
            total += int(chunk.sum())
            weights = torch.ones_like(chunk).cumsum_(0).remainder_(_PERIOD)
            weighed = weighed * 31 + int(weights.mul_(chunk).sum())
    mask = (1 << 64) - 1
    return [total & mask, weighed & mask]


def _integers(elements: torch.Tensor) -> Iterator[torch.Tensor]:
    bits = elements.detach().reshape(-1).view(_INTEGERS[elements.element_size()])
    for chunk in bits.split(_CHUNK):
        yield chunk.long()

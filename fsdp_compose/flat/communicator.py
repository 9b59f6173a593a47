"""All-gathers and reductions of flat parameters, on their streams: the gathers of forward and backward, and the one
reduction of every mode.

Called by ``runtime``; works on one ``FlatParamHandle`` at a time and never looks at modules.

Note [Memory and streams]. On an accelerator two side streams carry the communication. One rule makes memory safe
without ``record_stream``: all memory belongs to the compute stream, which allocates and frees it; a side stream waits
for compute when its work is issued; compute waits for the work before it uses *or frees* what the work touches
(``Work.wait()`` makes the current stream wait and does not block the host). The caching allocator's own order then
does the rest. On the CPU the same code runs without streams and ``wait()`` blocks.
"""

from __future__ import annotations

from typing import Any

import torch

from ..comm import difference_of, give_up
from .flat_param import FlatParamHandle
from .gradient import WriteMode
from .ranges import in_range
from .reduction import ReduceBuffer, Reduction, pool_ids


class Communicator:
    """Streams and reduce buffers that the groups below one root share."""

    __slots__ = (
        "__weakref__", "_all_gather_stream", "_buffers", "_device", "_in_flight", "_module", "_pool_id",
        "_reduce_stream",
    )  # fmt: skip

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._all_gather_stream = self._module.Stream(device, priority=-1) if self._module else None
        self._reduce_stream = self._module.Stream(device, priority=-1) if self._module else None
        self._buffers: dict[tuple[torch.dtype, torch.device], ReduceBuffer] = {}
        self._in_flight: dict[ReduceBuffer, tuple[FlatParamHandle, Reduction]] = {}
        self._pool_id = next(pool_ids)

    # ---- for agreement before collectives, which another class has (see ``lockstep``); here they do nothing

    def announce(self, handle: FlatParamHandle, what: str) -> None:
        """A collective is about to be issued that the other methods do not issue."""

    def announce_exchange(self, root: object, code: int) -> None:
        """A control exchange is about to begin."""

    def announce_recovery(self, root: object) -> None:
        """All ranks are about to throw away what an interrupted iteration left."""

    # ---- parameters

    def unshard(self, handle: FlatParamHandle) -> None:
        """Allocate the unsharded memory of a handle that has none, and start the all-gather into it."""
        handle.unsharded.allocate()
        self._start_all_gather(handle)

    def refresh(self, handle: FlatParamHandle) -> None:
        """Gather again into the storage of a handle that was left unsharded; its shard may have changed."""
        if handle.unsharded.never_freed:
            return
        self.wait(handle)
        handle.unsharded.memory.hide()
        self._start_all_gather(handle)

    @in_range("all_gather")
    def _start_all_gather(self, handle: FlatParamHandle) -> None:
        unsharded = handle.unsharded
        unsharded.note_gather(handle.segment_version() if handle.segments else 0)
        if self._all_gather_stream is None:
            unsharded.gather()
            return
        self._all_gather_stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._all_gather_stream):
            unsharded.gather()

    @in_range("wait all_gather")
    def wait(self, handle: FlatParamHandle) -> None:
        """Make the unsharded parameters usable by what is issued from here on."""
        work = handle.unsharded.work
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure("all-gather", handle, error) from error
            if self._all_gather_stream is not None and handle.mesh.is_simulated:
                self._wait_for_stream(self._all_gather_stream)
            handle.unsharded.arrive()

    def reshard(self, handle: FlatParamHandle) -> None:
        """Free the unsharded memory, if it may be freed; nothing is in flight then."""
        unsharded = handle.unsharded
        if unsharded.work is not None:
            self.wait(handle)
        if unsharded.keep or not unsharded.is_allocated:
            return
        try:
            unsharded.free()
        except RuntimeError as error:
            raise self._refuse_exported(handle, error) from error

    @in_range("all_gather")
    def all_gather_copy(self, handle: FlatParamHandle, shard: torch.Tensor) -> torch.Tensor:
        """The whole flat parameter in its compute dtype, gathered from ``shard``, a tensor like the handle's own, into
        memory of its own and waited for: for functional mode."""
        mesh, shard = handle.mesh, shard.to(handle.unsharded.dtype)
        if mesh.shard_world_size == 1:
            return shard.clone()
        flat = torch.empty(handle.layout.flat_numel, dtype=shard.dtype, device=shard.device)
        try:
            mesh.transport.all_gather(flat, shard, handle.label).wait()
        except RuntimeError as error:
            raise self._failure("all-gather", handle, error) from error
        return flat

    # ---- gradients

    def accumulate(self, handle: FlatParamHandle, is_kept: bool = False) -> None:
        """Take the gradients into the handle's unsharded accumulation buffer (reduce dtype), without communication.
        ``is_kept``: the group stays unsharded, for a forward that is running or for the next one."""
        handle.contributions.follow_zero_grad()
        grads, _ = handle.contributions.take(handle.unsharded.params)
        if not is_kept:
            self.reshard(handle)
        handle.accumulate(grads)

    def reduce(self, handle: FlatParamHandle, is_kept: bool = False) -> bool:
        """Take the gradients and start their reduce-scatter; every rank calls this for the same handles in one order.

        Parameters without a gradient on this rank contribute zeros. ``is_kept``: as for ``accumulate``.

        Returns:
            Whether the result is added to a gradient that was there before.
        """
        contributions = handle.contributions
        if contributions.accumulation is not None:
            contributions.follow_zero_grad()
        grads, missing = contributions.take(handle.unsharded.params)
        if not is_kept:
            self.reshard(handle)  # before the reduce buffer is taken: the peak is one of the two, not both
        reduction = contributions.reduction
        if reduction is None or reduction.buffer is None or reduction.buffer.pool_id != self._pool_id:
            reduction = handle.prepare_reduction(self._buffer_for(handle))
        buffer = reduction.buffer
        assert buffer is not None
        if buffer in self._in_flight:
            self._finish_reduction(buffer)
        accumulation = contributions.take_accumulation()
        if accumulation is not None:
            accumulation.add(grads)
            buffer.free()  # nothing is in flight in it, and this reduction brings its own memory
            reduction = Reduction(handle.layout, handle.mesh, handle.label, handle.shard.dtype, accumulation.flat)
        else:
            buffer.take(reduction)
            reduction.fill(grads, missing)
        del grads, accumulation
        contributions.await_publication()
        is_added = handle.gradient.prepare() is WriteMode.ADDED
        assert handle.gradient.target is not None
        reduction.aim(handle.gradient.target, is_added, contributions.options)
        self._in_flight[buffer] = handle, reduction
        self._start_reduce_scatter(handle, reduction)
        return is_added

    @in_range("reduce_scatter")
    def _start_reduce_scatter(self, handle: FlatParamHandle, reduction: Reduction) -> None:
        if self._reduce_stream is None:
            reduction.issue()
            return
        self._reduce_stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._reduce_stream):
            reduction.issue()

    def _finish_reduction(self, buffer: ReduceBuffer, discards: bool = False) -> None:
        """Wait for the reduction that is in flight in ``buffer``; the result goes to the flat gradient."""
        handle, reduction = self._in_flight[buffer]
        try:
            self._wait_reduction(handle, reduction, discards)
        except Exception:  # after others (Ctrl-C) it may still be in flight
            del self._in_flight[buffer]
            raise
        del self._in_flight[buffer]

    @in_range("wait reduce_scatter")
    def _wait_reduction(self, handle: FlatParamHandle, reduction: Reduction, discards: bool = False) -> None:
        if reduction.work is not None:
            try:
                reduction.work.wait()
            except RuntimeError as error:
                raise self._failure("reduce-scatter", handle, error) from error
            if self._reduce_stream is not None and handle.mesh.is_simulated:
                self._wait_for_stream(self._reduce_stream)
        if discards:
            reduction.discard()
        else:
            reduction.finish()

    def reduce_copy(self, handle: FlatParamHandle, reduction: Reduction) -> torch.Tensor:
        """Do ``reduction``, which has memory of its own, at once, and return this rank's part of the average in the
        dtype of the shard: for functional mode."""
        result = torch.empty(handle.layout.shard_numel, dtype=handle.shard.dtype, device=handle.shard.device)
        reduction.aim(result, is_added=False, options=handle.contributions.options)
        self._start_reduce_scatter(handle, reduction)
        self._wait_reduction(handle, reduction)
        return result

    @in_range("publish")
    def publish(self, handle: FlatParamHandle, has_others: bool) -> None:
        """Show the gradients that were reduced to the user."""
        handle.gradient.publish(handle.contributions.take_used(), has_others)

    def _wait_for_stream(self, stream: Any) -> None:
        """Let compute wait for all of a side stream. The work of a simulated group does not wait: what it copies are
        kernels of the stream it was issued on."""
        self._module.current_stream(self._device).wait_stream(stream)

    def finish(self, discards: bool = False) -> None:
        """Wait for every reduction in flight and free the buffers; ``discards``: the results are of no use."""
        for buffer in self._buffers.values():
            if buffer in self._in_flight:
                self._finish_reduction(buffer, discards)
            buffer.free()

    def _failure(self, what: str, handle: FlatParamHandle, error: RuntimeError) -> RuntimeError:
        group = handle.mesh.shard_group
        failure = (
            f"rank {handle.mesh.shard_rank}: the {what} of the fully_shard group with {handle.prefix}{handle.fqns[0]} "
            f"({len(handle.fqns)} parameters) failed: "
        )
        failure += difference_of(group) or f"another rank died, or did not enter the same collective. {error}"
        give_up(group, failure)
        return RuntimeError(failure)

    def _refuse_exported(self, handle: FlatParamHandle, error: RuntimeError) -> RuntimeError:
        names = ", ".join(handle.prefix + fqn for fqn in handle.fqns)
        return RuntimeError(
            f"rank {handle.mesh.shard_rank}: the memory of unsharded parameters cannot be freed, since forward has "
            f"given it to NumPy, which torch then cannot take away. It is one of {names}. Call .numpy() on a clone() "
            "of the parameter, or outside forward on .full_tensor() of the sharded one; this model cannot go on: build "
            f"it anew ({error})"
        )

    def _buffer_for(self, handle: FlatParamHandle) -> ReduceBuffer:
        key = (handle.contributions.dtype, handle.shard.device)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = ReduceBuffer(*key, self._pool_id)
        elif buffer in self._in_flight:
            self._finish_reduction(buffer)
        return buffer

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

from functools import partial

import torch

from ..comm import Transport, noticing_loss
from .accumulating import accumulate, keep_scattered
from .all_gathers import AllGathers
from .flat_param import FlatParamHandle
from .gradient import ADDED
from .ranges import in_range
from .reduction import AVERAGE_REPLICAS, FINISH, ReduceBuffer, Reduction, ReplicaAverage, copy_gradients, fill, pool_ids
from .whole import take_whole


class Communicator(AllGathers):
    """Streams and reduce buffers that the groups below one root share."""

    __slots__ = ("_averages", "_buffers", "_in_flight", "_pool_id", "_reduce_stream")

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._reduce_stream = self._module.Stream(device, priority=-1) if self._module else None
        self._buffers: dict[tuple[torch.dtype, torch.device], ReduceBuffer] = {}
        self._in_flight: dict[ReduceBuffer, tuple[FlatParamHandle, Reduction]] = {}
        self._averages: list[tuple[FlatParamHandle, ReplicaAverage]] = []
        self._pool_id = next(pool_ids)

    def accumulate(self, handle: FlatParamHandle, is_kept: bool = False) -> None:
        """Take the gradients into the handle's unsharded accumulation buffer (reduce dtype), without communication.
        ``is_kept``: the group stays unsharded, for a forward that is running or for the next one."""
        handle.contributions.follow_zero_grad()
        grads, _ = self._take(handle, False)
        if not is_kept:
            self.reshard(handle)
        accumulate(handle, grads)

    def _take(self, handle: FlatParamHandle, awaits_publication: bool) -> tuple[list[torch.Tensor], list[int]]:
        """The gradients, and which are missing; see ``Contributions.take``."""
        contributions = handle.contributions
        add_up = None if contributions.tensor_parallel is None else partial(self._add_up, handle)
        return contributions.take(handle.unsharded.params, awaits_publication, add_up)

    @in_range("all_reduce over tensor-parallel ranks of")
    def _add_up(self, handle: FlatParamHandle, transport: Transport, flat: torch.Tensor, indices: list[int]) -> None:
        """Sum gradients over tensor-parallel ranks, before they are reduced or kept."""
        with noticing_loss(transport.group, "the sum of gradients over tensor-parallel ranks"):
            transport.all_reduce(flat, False, handle.label.of(indices)).wait()

    def reduce(self, handle: FlatParamHandle, is_kept: bool = False, averages: bool = True) -> bool:
        """Take the gradients and start their reduction; every rank calls this for the same handles in one order.

        Parameters without a gradient on this rank contribute zeros. ``is_kept``: as for ``accumulate``. ``averages``:
        over the replicas too, if there are any; else what is scattered waits for a reduction that does.

        Returns:
            Whether the result is added to a gradient that was there before.
        """
        if handle.mesh.has_whole:
            return self._reduce_whole(handle, is_kept, averages)
        contributions = handle.contributions
        if contributions.accumulation is not None:
            contributions.follow_zero_grad()
        grads, missing = self._take(handle, averages)
        if not is_kept:
            self.reshard(handle)  # before the reduce buffer is taken: the peak is one of the two, not both
        reduction = contributions.reduction
        buffer = None if reduction is None else reduction.buffer
        if reduction is None or buffer is None or buffer.pool_id != self._pool_id:
            buffer = self._buffer_for(handle)
            reduction = handle.prepare_reduction(buffer)
        if buffer in self._in_flight:
            self._finish(buffer)
        accumulation, earlier = contributions.accumulation, None
        if accumulation is not None:
            contributions.take_accumulation()
            earlier = accumulation.scattered
        if accumulation is not None and accumulation.flat is not None:
            accumulation.add(grads)
            buffer.free()  # nothing is in flight in it, and this reduction brings its own memory
            reduction = handle.reduction_of(accumulation.flat)
        else:
            buffer.take(reduction)
            if missing:
                fill(reduction.views, grads, missing)
            else:
                copy_gradients(reduction.views, grads)
        del grads, accumulation
        if averages:
            is_added = handle.gradient.prepare() is ADDED
            reduction.aim(contributions.options, (handle.gradient.target, is_added, earlier))
        else:
            is_added = earlier is not None
            reduction.aim(contributions.options, (None, False, earlier))
        self._in_flight[buffer] = handle, reduction
        self._start_reduce_scatter(handle, reduction)
        if self._reduce_stream is not None and reduction.then is AVERAGE_REPLICAS:
            self._go_on_with_replicas(handle, reduction)
        return is_added

    def _reduce_whole(self, handle: FlatParamHandle, is_kept: bool, averages: bool) -> bool:
        """``reduce`` of a handle that every rank holds whole."""
        if not averages:
            self.accumulate(handle, is_kept)
            return False
        contributions = handle.contributions
        if contributions.accumulation is not None:
            contributions.follow_zero_grad()
        grads, missing = self._take(handle, False)
        if not is_kept:
            self.reshard(handle)
        average = take_whole(handle, grads, missing)
        self._start_average(handle, average)
        self._averages.append((handle, average))
        return average.is_added

    @in_range("all_reduce")
    def _start_average(self, handle: FlatParamHandle, average: ReplicaAverage) -> None:
        if self._reduce_stream is None:
            average.issue(handle.mesh, handle.label)
            return
        self._reduce_stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._reduce_stream):
            average.issue(handle.mesh, handle.label)

    def _go_on_with_replicas(self, handle: FlatParamHandle, reduction: Reduction) -> None:
        """Issue the second stage behind the first, on the same stream."""
        with self._module.stream(self._reduce_stream):
            if reduction.work is not None:
                reduction.work.wait()  # that stream waits, not the host
            self._average_replicas(handle, reduction)

    @in_range("reduce_scatter")
    def _start_reduce_scatter(self, handle: FlatParamHandle, reduction: Reduction) -> None:
        if self._reduce_stream is None:
            reduction.issue()
            return
        self._reduce_stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._reduce_stream):
            reduction.issue()

    @in_range("all_reduce")
    def _average_replicas(self, handle: FlatParamHandle, reduction: Reduction) -> None:
        self._averages.append((handle, reduction.average_replicas()))

    def _finish(self, buffer: ReduceBuffer, discards: bool = False) -> None:
        """End the reduction that is in flight in ``buffer``."""
        handle, reduction = pair = self._in_flight.pop(buffer)
        try:
            self._finish_reduction(handle, reduction, discards)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: it may still be in flight
            self._in_flight[buffer] = pair
            raise

    @in_range("wait reduce_scatter")
    def _finish_reduction(self, handle: FlatParamHandle, reduction: Reduction, discards: bool = False) -> None:
        """Wait for a reduction; the result goes on to the replicas, or to where it is to go."""
        work = reduction.work
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure("reduce-scatter", handle, error) from error
            if self._reduce_stream is not None and handle.mesh.is_simulated:
                self._wait_for_stream(self._reduce_stream)
        if reduction.then is FINISH and not discards:
            reduction.finish()
        elif discards or reduction.output is None:  # it may have gone on to the replicas as soon as it was issued
            reduction.discard()
        elif reduction.then is AVERAGE_REPLICAS:
            self._average_replicas(handle, reduction)
        else:
            keep_scattered(handle, reduction.leave())

    @in_range("wait all_reduce")
    def _finish_average(self, handle: FlatParamHandle, average: ReplicaAverage, discards: bool = False) -> None:
        if average.work is not None:
            try:
                average.work.wait()
            except RuntimeError as error:
                raise self._failure("all-reduce", handle, error) from error
            if self._reduce_stream is not None and handle.mesh.is_simulated:
                self._wait_for_stream(self._reduce_stream)
        if not discards:
            average.finish()

    def reduce_copy(self, handle: FlatParamHandle, reduction: Reduction) -> torch.Tensor:
        """Do ``reduction``, which has memory of its own, at once, and return this rank's part of the average in the
        dtype of the gradient: for functional mode."""
        result = torch.empty_like(handle.shard, dtype=handle.gradient.dtype)
        reduction.aim(handle.contributions.options, (result, False, None))
        self._start_reduce_scatter(handle, reduction)
        if self._reduce_stream is not None and reduction.then is AVERAGE_REPLICAS:
            self._go_on_with_replicas(handle, reduction)
        self._finish_reduction(handle, reduction)
        self._finish_averages()
        handle.home.settle()
        return result

    @in_range("publish")
    def publish(self, handle: FlatParamHandle, has_others: bool) -> None:
        """Show the gradients that were reduced to the user."""
        handle.gradient.publish(handle.contributions.take_used(), has_others)

    def finish(self, discards: bool = False) -> None:
        """Wait for every reduction in flight and free the buffers; ``discards``: the results are of no use."""
        for buffer in self._buffers.values():
            if buffer in self._in_flight:
                self._finish(buffer, discards)
            buffer.free()
        if self._averages:
            self._finish_averages(discards)

    def _finish_averages(self, discards: bool = False) -> None:
        """Wait for the replicas' averages that are in flight, in their order."""
        while self._averages:
            try:
                self._finish_average(*self._averages[0], discards)
            except Exception:  # as in ``_finish_reduction``
                del self._averages[0]
                raise
            del self._averages[0]

    def _buffer_for(self, handle: FlatParamHandle) -> ReduceBuffer:
        key = (handle.contributions.dtype, handle.home.compute_device(handle.shard))
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = ReduceBuffer(*key, self._pool_id)
        elif buffer in self._in_flight:
            self._finish(buffer)
        return buffer

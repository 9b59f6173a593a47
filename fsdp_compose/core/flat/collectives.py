"""``Communicator``: the all-gathers and reductions of flat parameters, on their streams.

There is one per root; the runtime's steps (``runtime/group_ops``) call it in every mode. It decides streams and order,
never when a group is due. Before it come the input of reductions, the reductions of gradients that every rank holds
whole, and the handling of gradients that are not yet reduced over all data ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ..._torch import foreach_copy_, foreach_mul_, foreach_zero_
from ..comm import Transport, give_up, streams_of
from .accumulation import Accumulation, Contribution
from .events import in_range
from .flat_param import FlatParamHandle
from .gradient import ADDED, FRESH, WriteMode
from .reduction import AVERAGE, ReduceBuffer, Reduction, ReplicaAverage, average_replicas

KEPT, REDUCED = Contribution.KEPT, Contribution.REDUCED


# ---- The input of a reduction: pooled memory, and the gradients that are copied there


def fill(views: list[torch.Tensor], grads: list[torch.Tensor], missing: Sequence[int]) -> None:
    """Copy the gradients into ``views``, with zeros for missing ones (``None`` in the list)."""
    if not missing:
        copy_gradients(views, grads)
        return
    foreach_zero_([views[i] for i in missing])
    present = [i for i, grad in enumerate(grads) if grad is not None]
    if present:
        copy_gradients([views[i] for i in present], [grads[i] for i in present])


def copy_gradients(views: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    try:
        foreach_copy_(views, grads)
    except RuntimeError:
        if all(grad.layout == torch.strided for grad in grads):
            raise
        foreach_copy_(views, [grad.to_dense() for grad in grads])  # sparse, from nn.Embedding(sparse=True)


# ---- Reductions of a flat gradient that every rank holds whole: nothing is scattered, everything is averaged, in one
# stage
#
# The gradients go straight to the memory of the average, and are averaged there, unless that already holds a gradient,
# or they are reduced in another dtype. Large gradients go there during backward, each as soon as it arrives
# (``move_to_average``): it is still in the caches, and its memory serves the next one. The rest follow once all have
# arrived.


LARGE_BYTES = 1 << 17  # of a gradient; below this size, a separate call costs more than it saves


def move_to_average(handle: FlatParamHandle, index: int) -> None:
    """Move the gradient that autograd has just left on an unsharded parameter to where it is averaged, if possible. The
    handle is reduced later in this backward."""
    param, pending = handle.unsharded.params[index], handle.pending_gradients
    if pending.awaits_publication or not _goes_direct(handle, _prepare(handle)):
        return
    grad = param.grad
    if grad is not None and grad.layout == torch.strided:
        _place(handle, index, grad)
        param.grad = None


def _place(handle: FlatParamHandle, index: int, grad: torch.Tensor) -> None:
    view, share = handle.gradient.memory.locals[index], handle.mesh.share
    placed = handle.pending_gradients.placed
    with torch.no_grad():
        if index in placed:
            view.add_(grad, alpha=share)
        else:
            torch.mul(grad, share, out=view)
            placed.add(index)


def _prepare(handle: FlatParamHandle) -> WriteMode:
    """Decide how the gradient that is about to be reduced is written."""
    gradient = handle.gradient
    if gradient.target is not None and not handle.pending_gradients.awaits_publication:
        return gradient.write_mode  # some gradients were already placed there
    return gradient.prepare()


def _goes_direct(handle: FlatParamHandle, mode: WriteMode) -> bool:
    """Whether gradients go straight to the memory of the average, each divided by the number of ranks."""
    return mode is FRESH and handle.pending_gradients.accumulation is None and _divides_first(handle)


def _divides_first(handle: FlatParamHandle) -> bool:
    """Whether each rank divides its gradients by the number of ranks before they are summed. The same on every rank,
    whatever a rank has accumulated."""
    pending, dtype = handle.pending_gradients, handle.gradient.dtype
    return (
        pending.options is AVERAGE
        and pending.dtype == dtype
        and dtype != torch.float16
        and not handle.storage.has_host_gradients
    )


def take_average(handle: FlatParamHandle, grads: list[torch.Tensor], missing: Sequence[int]) -> ReplicaAverage:
    """Return the average, not yet started, of the gradients taken from the unsharded parameters (``None`` for
    ``missing`` ones), of the placed ones, and of what was accumulated before."""
    pending, gradient, options = handle.pending_gradients, handle.gradient, handle.pending_gradients.options
    mode = _prepare(handle)
    target, dtype, is_added = gradient.target, pending.dtype, mode is ADDED
    assert target is not None
    goes_direct = _goes_direct(handle, mode)
    pending.awaits_publication = True
    if goes_direct:
        _fill(handle, grads, missing)
        return ReplicaAverage(target, target, False, False, 1, None)
    accumulation, pending.accumulation = pending.accumulation, None
    if accumulation is not None and accumulation.flat is not None:
        accumulation.add(grads)
        flat = accumulation.flat
    else:
        flat = torch.zeros(target.numel(), dtype=dtype, device=handle.storage.compute_device(handle.shard))
        fill(handle.full_views_of(flat), grads, missing)
    mesh = handle.mesh
    if _divides_first(handle):
        flat.mul_(mesh.share)
        return ReplicaAverage(flat, handle.storage.landing(target), is_added, False, 1, None)
    before, is_average, after = options.factors(mesh.data_world_size, mesh.missing_factor, dtype == torch.float16)
    if before != 1:
        flat.div_(before)
    return ReplicaAverage(flat, handle.storage.landing(target), is_added, is_average, after, options.hook)


def _fill(handle: FlatParamHandle, grads: list[torch.Tensor], missing: Sequence[int]) -> None:
    """Move the gradients that were not placed to the memory of the average."""
    memory, placed = handle.gradient.memory, handle.pending_gradients.placed
    for i in placed:
        if grads[i] is not None:  # it arrived after placing
            _place(handle, i, grads[i])
    handle.pending_gradients.take_placed()
    rest = [i for i in range(len(grads)) if i not in placed]
    views = [memory.locals[i] for i in rest]
    if views:  # not all were placed
        fill(views, [grads[i] for i in rest], [j for j, i in enumerate(rest) if grads[i] is None] if missing else ())
        with torch.no_grad():
            foreach_mul_(views, handle.mesh.share)
    memory.zero_gaps()


# ---- Gradients that are not reduced over all data ranks yet: the accumulation of a handle


def accumulate(handle: FlatParamHandle, grads: Sequence[torch.Tensor | None]) -> None:
    """Add gradients that were taken from the unsharded parameters to what was accumulated before."""
    accumulation = _accumulation_of(handle)
    if accumulation.flat is None:
        dtype, device = handle.pending_gradients.dtype, handle.storage.compute_device(handle.shard)
        if handle.mesh.is_replicated:  # the all-reduce is in this memory, so it may be wider, as in ``add_scattered``
            dtype = torch.promote_types(dtype, handle.gradient.dtype)
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.zeros(handle.layout.flat_numel, dtype=dtype, device=device)
        accumulation.flat, accumulation.views = flat, handle.full_views_of(flat)
    accumulation.add(grads)


def keep_scattered(handle: FlatParamHandle, scattered: torch.Tensor) -> None:
    """Keep the scattered result of a reduction until it is averaged over the replicas."""
    accumulation = _accumulation_of(handle)
    accumulation.scattered, accumulation.scattered_views = scattered, handle.views_of(scattered)


def keep_result(handle: FlatParamHandle, reduction: Reduction) -> None:
    """What follows the first stage of a reduction without the average over replicas."""
    keep_scattered(handle, reduction.take_scattered())


def _accumulation_of(handle: FlatParamHandle) -> Accumulation:
    """The handle's accumulation, made if there is none."""
    pending = handle.pending_gradients
    if pending.accumulation is None:
        places = [(sharded, range(i, i + 1)) for i, sharded in enumerate(handle.sharded_params)]
        places += [(segment.parameter, segment.sharded_params) for segment in handle.segments]
        pending.accumulation = Accumulation(handle.names, pending.is_used, handle.mesh.mesh, places)
    return pending.accumulation


# ---- All-gathers and reductions of flat parameters, on their streams: the gathers of forward and backward, and the one
# reduction of every mode
#
# ``runtime`` calls this; it works on one ``FlatParamHandle`` at a time and never looks at modules.
#
# Note [Memory and streams]. On an accelerator, two side streams carry the communication. One rule makes memory safe
# without ``record_stream``: all memory belongs to the compute stream, which allocates and frees it. A side stream waits
# for compute when its work is issued, and compute waits for the work before it uses *or frees* what the work touches.
# (``Work.wait()`` makes the current stream wait and does not block the host.) The caching allocator's own order does
# the rest. What a wire encodes (``plugins/transports``) is the exception: its memory is allocated, used and freed on
# the side stream, behind the collective. On the CPU, the same code runs without streams, and ``wait()`` blocks.


class Communicator:
    """The streams and reduce buffers that all groups below one root share.

    Attributes:
        storages: where shards or gradients live, if not on the device. The end of a top-level forward waits for their
            copies.
    """

    __slots__ = (
        "__weakref__", "_all_gather_stream", "_averages", "_buffers", "_device", "_in_flight", "_module", "_pool",
        "_reduce_stream", "storages",
    )  # fmt: skip

    def __init__(self, device: torch.device, handles: Iterable[FlatParamHandle]) -> None:
        """``handles``: the flat parameters that it serves."""
        self._device = device
        self._module: Any = streams_of(device)
        self.storages = tuple({handle.storage for handle in handles if handle.storage.has_host_gradients})
        self._all_gather_stream = self._module.Stream(device, priority=-1) if self._module else None
        self._reduce_stream = self._module.Stream(device, priority=-1) if self._module else None
        self._buffers: dict[tuple[torch.dtype, torch.device], ReduceBuffer] = {}
        self._in_flight: dict[ReduceBuffer, tuple[FlatParamHandle, Reduction]] = {}
        self._averages: list[tuple[FlatParamHandle, ReplicaAverage]] = []
        self._pool = object()

    # ---- Hooks for the agreement before collectives; another class implements them (see ``plugins/debugging``)

    def announce(self, handle: FlatParamHandle, what: str) -> None:
        """Called before a collective that the other methods do not issue."""

    def announce_exchange(self, root: object, moment: object) -> None:
        """Called before a control exchange."""

    def announce_recovery(self, root: object) -> None:
        """Called before all ranks throw away what an interrupted iteration has left."""

    # ---- Parameters

    @in_range("all_gather")
    def unshard(self, handle: FlatParamHandle) -> None:
        """Allocate the unsharded memory of a handle, if it has none, and start the all-gather into it."""
        segments = handle.segment_version() if handle.segments else 0
        if self._all_gather_stream is None:
            handle.unsharded.gather(segments)
            return
        if not handle.unsharded.is_allocated:
            handle.unsharded.allocate()
        self._all_gather_stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._all_gather_stream):
            handle.unsharded.gather(segments)

    @in_range("all_gather")
    def unshard_post_forward(self, handle: FlatParamHandle) -> None:
        """Like ``unshard``, from the shards that ``reshard_to_post_forward`` has kept, among these ranks."""
        handle.unsharded.allocate()
        if self._all_gather_stream is None:
            handle.unsharded.gather_post_forward()
            return
        self._all_gather_stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._all_gather_stream):
            handle.unsharded.gather_post_forward()

    def refresh(self, handle: FlatParamHandle) -> None:
        """Gather again into the memory of a handle that was left unsharded; its shard may have changed."""
        if handle.unsharded.never_freed:
            return
        self.wait(handle)
        handle.unsharded.hide()
        Communicator.unshard(self, handle)  # not a subclass's, which announces it: that is done

    def wait_for(self, handles: Iterable[FlatParamHandle]) -> None:
        """``wait`` for those whose all-gathers are in flight."""
        for handle in handles:
            if handle.unsharded.work is not None:
                self.wait(handle)

    @in_range("wait all_gather")
    def wait(self, handle: FlatParamHandle) -> None:
        """Make the unsharded parameters usable by later work on the current stream."""
        work = handle.unsharded.work
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure("all-gather", handle, error) from None
            if self._all_gather_stream is not None and handle.mesh.is_simulated:  # wait() did nothing
                self._wait_for_stream(self._all_gather_stream)
            handle.unsharded.arrive()

    @in_range("reshard", when=attrgetter("unsharded.may_be_freed"))
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

    def reshard_to_post_forward(self, handle: FlatParamHandle) -> None:
        """Like ``reshard``, but keep this rank's post-forward shard, if it has one to keep."""
        unsharded = handle.unsharded
        if unsharded.post_forward is not None and unsharded.is_allocated and not unsharded.keep:
            if unsharded.work is not None:
                self.wait(handle)
            unsharded.keep_post_forward()
        self.reshard(handle)

    @in_range("all_gather")
    def all_gather_copy(self, handle: FlatParamHandle, shard: torch.Tensor) -> torch.Tensor:
        """Gather the whole flat parameter, in its compute dtype, from ``shard`` (a tensor like the handle's own) into
        memory of its own, and wait for it: for functional mode."""
        mesh, shard, dtype = handle.mesh, handle.storage.on_device(shard), handle.unsharded.dtype
        if not mesh.transport.rounds or mesh.shard_world_size == 1:
            shard = shard.to(dtype)
        if mesh.shard_world_size == 1:
            return shard.clone()
        flat = torch.empty(handle.layout.flat_numel, dtype=dtype, device=shard.device)
        try:
            mesh.transport.all_gather(flat, shard, handle.label).wait()
        except RuntimeError as error:
            raise self._failure("all-gather", handle, error) from None
        return flat

    # ---- Gradients

    @in_range("all_reduce over tensor-parallel ranks of")
    def _add_up(self, handle: FlatParamHandle, transport: Transport, flat: torch.Tensor, indices: list[int]) -> None:
        """Sum gradients over tensor-parallel ranks, before they are reduced or kept."""
        from ...plugins.gloo import noticing_loss

        with noticing_loss(transport.group, "the sum of gradients over tensor-parallel ranks"):
            transport.all_reduce(flat, False, handle.label.of(indices)).wait()

    def contribute(self, handle: FlatParamHandle, contribution: Contribution, is_kept: bool = False) -> bool:
        """Take the gradients and do with them what ``contribution`` says; a reduction is started. Every rank calls this
        for the same handles in the same order.

        Parameters without a gradient on this rank contribute zeros to a reduction. ``is_kept``: the group stays
        unsharded, for a running forward or for the next one.

        Returns:
            Whether the result of a reduction is added to a gradient that was there before.
        """
        pending = handle.pending_gradients
        if pending.accumulation is not None:
            pending.follow_zero_grad()
        add_up = None if pending.tensor_parallel is None else partial(self._add_up, handle)
        grads, missing = pending.take(handle.unsharded.params, add_up)
        if not is_kept:
            self.reshard(handle)  # before the reduce buffer is taken: the peak has one of the two, not both
        if contribution is not REDUCED and (contribution is KEPT or handle.mesh.is_replicated):
            accumulate(handle, grads)
            return False
        if handle.mesh.is_replicated:
            average = take_average(handle, grads, missing)
            self._start(handle, average)
            self._averages.append((handle, average))
            return average.is_added
        if contribution is REDUCED:
            pending.awaits_publication = True
        reduction = pending.reduction
        if reduction is None or reduction.buffer is None or reduction.buffer.pool is not self._pool:
            reduction = self._new_reduction(handle)
        buffer = reduction.buffer
        assert buffer is not None
        if buffer in self._in_flight:
            self._finish(buffer)
        accumulation, earlier = pending.accumulation, None
        if accumulation is not None:
            pending.accumulation = None
            earlier = accumulation.scattered
        if accumulation is not None and accumulation.flat is not None:
            accumulation.add(grads)
            buffer.free()  # nothing is in flight in it, and this reduction has memory of its own
            reduction = handle.reduction_of(accumulation.flat)
        else:
            buffer.take(reduction)
            if missing:
                fill(reduction.views, grads, missing)
            else:
                copy_gradients(reduction.views, grads)
        del grads, accumulation
        if contribution is REDUCED:
            is_added = handle.gradient.prepare() is ADDED
            reduction.set_target(pending.options, handle.gradient.target, is_added, earlier)
        else:
            is_added = earlier is not None
            reduction.set_keeper(pending.options, keep_result, earlier)
        self._in_flight[buffer] = handle, reduction
        self._start(handle, reduction)
        if self._reduce_stream is not None:
            self._go_on(handle, reduction)
        return is_added

    def _new_reduction(self, handle: FlatParamHandle) -> Reduction:
        buffer = self._buffer_for(handle)
        reduction = handle.reduction_of(buffer.view(handle.layout.flat_numel), buffer)
        handle.pending_gradients.reduction = reduction
        return reduction

    @in_range(attrgetter("span"))
    def _start(self, handle: FlatParamHandle, stage: Reduction | ReplicaAverage) -> None:
        """Issue the first stage of a reduction."""
        if self._reduce_stream is None:
            self._issue(handle, stage)
            return
        self._reduce_stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._reduce_stream):
            self._issue(handle, stage)

    def _issue(self, handle: FlatParamHandle, stage: Reduction | ReplicaAverage) -> None:
        try:
            stage.issue(handle.mesh, handle.label)
        except Exception as error:  # of a user's transport; autograd shows it only when the backward has ended
            from ...plugins.gloo import tell_failure

            tell_failure(handle.mesh.peers, error)
            raise

    def _go_on(self, handle: FlatParamHandle, reduction: Reduction) -> None:
        """With streams, issue the second stage as soon as the first one is."""
        if reduction.then is average_replicas:
            with self._module.stream(self._reduce_stream):
                if reduction.work is not None:
                    reduction.work.wait()  # that stream waits, not the host
                self._follow(handle, average_replicas(handle, reduction))

    @in_range(attrgetter("span"))
    def _follow(self, handle: FlatParamHandle, stage: ReplicaAverage) -> None:
        """Issue the stage after another one, on the same stream."""
        self._issue(handle, stage)
        self._averages.append((handle, stage))

    def _finish(self, buffer: ReduceBuffer, discards: bool = False) -> None:
        """Finish the reduction that is in flight in ``buffer``."""
        handle, reduction = pair = self._in_flight.pop(buffer)
        try:
            self._finish_stage(handle, reduction, discards)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: it may still be in flight
            self._in_flight[buffer] = pair
            raise

    @in_range(lambda stage, discards=False: f"wait {stage.span}")
    def _finish_stage(self, handle: FlatParamHandle, stage: Reduction | ReplicaAverage, discards: bool = False) -> None:
        """Wait for a stage of a reduction, and go on with what follows."""
        work = stage.work
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(stage.what, handle, error) from None
            except Exception as error:
                from ...plugins.gloo import tell_failure

                tell_failure(handle.mesh.peers, error)
                raise
        # A stage without work, of one rank, has copied there. The wait() of a simulated group did nothing.
        if self._reduce_stream is not None and (work is None or handle.mesh.is_simulated):
            self._wait_for_stream(self._reduce_stream)
        if discards:
            stage.discard()
            return
        following = stage.then(handle, stage)
        if following is not None:
            self._follow(handle, following)

    def reduce_copy(self, handle: FlatParamHandle, reduction: Reduction) -> torch.Tensor:
        """Run ``reduction``, which has memory of its own, at once, and return this rank's shard of the average in the
        dtype of the gradient: for functional mode."""
        result = torch.empty_like(handle.shard, dtype=handle.gradient.dtype)
        reduction.set_target(handle.pending_gradients.options, result, False, None)
        self._start(handle, reduction)
        if self._reduce_stream is not None:
            self._go_on(handle, reduction)
        self._finish_stage(handle, reduction)
        self._finish_averages()
        handle.storage.synchronize()
        return result

    @in_range("publish")
    def publish(self, handle: FlatParamHandle, has_others: bool) -> None:
        """Show the reduced gradients to the user."""
        handle.gradient.publish(handle.pending_gradients.take_used(handle.unsharded.flags), has_others)

    def finish(self, discards: bool = False) -> None:
        """Wait for every reduction in flight and free the buffers. ``discards``: throw the results away."""
        self.finish_reductions(discards)
        if self._averages:
            self._finish_averages(discards)

    def finish_reductions(self, discards: bool = False) -> None:
        """Wait for the first stages in flight and free the buffers."""
        for buffer in self._buffers.values():
            if buffer in self._in_flight:
                self._finish(buffer, discards)
            buffer.free()

    def _finish_averages(self, discards: bool = False) -> None:
        """Wait for the averages over replicas that are in flight, in order."""
        while self._averages:
            try:
                self._finish_stage(*self._averages[0], discards)
            except Exception:  # as in ``_finish``
                del self._averages[0]
                raise
            del self._averages[0]

    def _buffer_for(self, handle: FlatParamHandle) -> ReduceBuffer:
        key = (handle.pending_gradients.dtype, handle.storage.compute_device(handle.shard))
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = ReduceBuffer(*key, self._pool)
        elif buffer in self._in_flight:
            self._finish(buffer)
        return buffer

    # ---- Helpers for both kinds of collectives

    def _wait_for_stream(self, stream: Any) -> None:
        """Make compute wait for everything on a side stream."""
        # The wait() of a simulated group does nothing: its copies are kernels on the stream that issued them.
        self._module.current_stream(self._device).wait_stream(stream)

    def _failure(self, what: str, handle: FlatParamHandle, error: RuntimeError) -> RuntimeError:
        from ...plugins.gloo import loss

        group = handle.mesh.peers
        failure = loss(group, f"rank {handle.mesh.rank}: the {what} of {handle.label.group}", error)
        give_up(group, failure)
        return failure

    def _refuse_exported(self, handle: FlatParamHandle, error: RuntimeError) -> RuntimeError:
        names = ", ".join(handle.names)
        return RuntimeError(
            f"rank {handle.mesh.rank}: the memory of unsharded parameters cannot be freed, because forward has passed "
            f"it to NumPy, and torch cannot take it back. It is one of {names}. Call .numpy() on a clone() of the "
            "parameter, or outside forward on .full_tensor() of the sharded one; this model cannot continue: build "
            f"it again ({error})"
        )

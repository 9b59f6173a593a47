"""All-gather and reduce-scatter of flat parameters: the only code that moves parameters or gradients between ranks.

Called by ``runtime`` and ``controls``; works on one ``FlatParamHandle`` at a time and never looks at modules.

Note [Memory and streams]. On an accelerator two side streams carry the communication. One rule makes memory safe
without ``record_stream``: all memory belongs to the compute stream, which allocates and frees it; a side stream waits
for compute when its work is issued; compute waits for the work before it uses *or frees* what the work touches
(``Work.wait()`` makes the current stream wait and does not block the host). The caching allocator's own order then
does the rest. On the CPU the same code runs without streams and ``wait()`` blocks.

Note [Padding is zero]. Shards and flat gradients are padded with zeros. The reduce buffer is shared by handles of
different layouts, so whoever takes it over from another layout zeroes its own padding first.
"""

from __future__ import annotations

from itertools import count
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from .._torch import AllgatherOptions, ReduceScatterOptions, foreach_copy_, foreach_zero_
from ..comm import give_up, wire
from ..ragged import writes
from .flat_param import FlatParamHandle
from .gradient import Arrival
from .ranges import in_range

_grad = attrgetter("grad")

_ALL_GATHER_OPTIONS = AllgatherOptions()
_ALL_GATHER_OPTIONS.asyncOp = True


class ReduceBuffer:
    """The pooled input of reduce-scatters of one dtype on one device: a storage that grows to the largest layout.

    There is one slot: a second reduce-scatter in flight cost a block of memory and gained no time when measured.
    """

    __slots__ = ("device", "dtype", "nbytes", "owner", "pool_id", "storage", "zeroed_gaps")

    def __init__(self, dtype: torch.dtype, device: torch.device, pool_id: int) -> None:
        self.dtype, self.device = dtype, device
        self.pool_id = pool_id  # of the communicator that owns it
        self.storage = torch.empty(0, dtype=dtype, device=device).untyped_storage()
        self.nbytes = 0  # of the storage as it is now
        self.owner: FlatParamHandle | None = None  # whose reduce-scatter is in flight
        self.zeroed_gaps: object = None  # the padding that is known to be zero

    def take(self, plan: ReducePlan) -> None:
        """Make room for ``plan``, with zeros in its padding."""
        if self.nbytes < plan.nbytes:
            self.storage.resize_(0)  # the content is not worth a copy
            self.storage.resize_(plan.nbytes)
            self.nbytes = plan.nbytes
            self.zeroed_gaps = None
        if self.zeroed_gaps is not plan.gap_bounds:
            if plan.gaps:
                foreach_zero_(plan.gaps)
            self.zeroed_gaps = plan.gap_bounds

    def free(self) -> None:
        self.storage.resize_(0)
        self.nbytes = 0
        self.zeroed_gaps = None


class ReducePlan:
    """How one handle reduces: views of a buffer, made once, and the arguments of the collective."""

    __slots__ = (
        "average_by_hand", "buffer", "flat", "gap_bounds", "gaps", "goes_direct", "is_wired", "nbytes", "options",
        "own_slice", "views",
    )  # fmt: skip

    def __init__(self, handle: FlatParamHandle, buffer: ReduceBuffer, flat: torch.Tensor | None = None) -> None:
        mesh, numel = handle.mesh, handle.layout.shard_numel
        self.buffer = buffer
        with torch.inference_mode(False), torch.no_grad():
            if flat is None:
                flat = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
                nbytes = handle.layout.flat_numel * buffer.dtype.itemsize
                if buffer.nbytes < nbytes:
                    buffer.storage.resize_(0)
                    buffer.storage.resize_(nbytes)
                    buffer.nbytes, buffer.zeroed_gaps = nbytes, None
                flat.set_(buffer.storage, 0, (handle.layout.flat_numel,), (1,))
            self.flat = flat
            self.views = handle.full_views_of(flat)
            bounds = handle.layout.gaps()
            self.gap_bounds = _same_bounds.setdefault((handle.layout.flat_numel, bounds), (bounds,))
            self.gaps = [flat[start:stop] for start, stop in bounds]
            self.own_slice = flat[mesh.shard_rank * numel : (mesh.shard_rank + 1) * numel]
        self.nbytes = flat.numel() * flat.element_size()
        self.is_wired = wire(flat) is not flat
        self.average_by_hand = flat.dtype == torch.float16
        self.options = _SUM if self.average_by_hand else _AVERAGE
        # The result can arrive in the flat gradient itself.
        self.goes_direct = flat.dtype == handle.shard.dtype and mesh.shard_world_size > 1


_pool_ids = count()

# Equal paddings are one object, so that "whose zeros are in the buffer" is a comparison of identities.
_same_bounds: dict[object, object] = {}


class Communicator:
    """Streams and reduce buffers that the groups below one root share."""

    __slots__ = ("__weakref__", "_all_gather_stream", "_buffers", "_device", "_module", "_pool_id", "_reduce_stream")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._all_gather_stream = self._module.Stream(device, priority=-1) if self._module else None
        self._reduce_stream = self._module.Stream(device, priority=-1) if self._module else None
        self._buffers: dict[tuple[torch.dtype, torch.device], ReduceBuffer] = {}
        self._pool_id = next(_pool_ids)

    # ---- for agreement before collectives, which another class has (see ``lockstep``); here they do nothing

    def announce(self, handle: FlatParamHandle, what: str) -> None:
        """A collective is about to be issued that the other methods do not issue."""

    def announce_exchange(self, root: Any, code: int) -> None:
        """A control exchange is about to begin."""

    def announce_recovery(self, root: Any) -> None:
        """All ranks are about to throw away what an interrupted iteration left."""

    # ---- parameters

    def unshard(self, handle: FlatParamHandle) -> None:
        """Allocate the unsharded memory of a handle that has none, and start the all-gather into it."""
        handle.memory.allocate()
        handle.is_unsharded = True
        self._start_all_gather(handle)

    def refresh(self, handle: FlatParamHandle) -> None:
        """Gather again into the storage of a handle that was left unsharded; its shard may have changed."""
        if handle.is_resident:
            return
        self.wait(handle)
        handle.memory.hide()
        self._start_all_gather(handle)

    @in_range("all_gather")
    def _start_all_gather(self, handle: FlatParamHandle) -> None:
        handle.gathered_version, handle.gathered_writes = handle.shard._version, writes.count
        if handle.segments:
            handle.note_gathered_segments()
        if self._all_gather_stream is None:
            if handle.cast_shard is not None:
                handle.cast_shard.copy_(handle.shard)
            mesh = handle.mesh
            if mesh.shard_world_size > 1:
                handle.all_gather_work = mesh.shard_group._allgather_base(*handle.gather_wires, _ALL_GATHER_OPTIONS)
            else:
                handle.memory.show()
            return
        self._all_gather_stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._all_gather_stream):
            if handle.cast_shard is not None:
                handle.cast_shard.copy_(handle.shard)
            # At world size 1 NCCL's collective is an ordinary no-op whose work still orders the copy before compute.
            handle.all_gather_work = handle.mesh.shard_group._allgather_base(*handle.gather_wires, _ALL_GATHER_OPTIONS)

    @in_range("wait all_gather")
    def wait(self, handle: FlatParamHandle) -> None:
        """Make the unsharded parameters usable by what is issued from here on."""
        work = handle.all_gather_work
        if work is not None:
            handle.all_gather_work = None
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure("all-gather", handle, error) from error
            if self._all_gather_stream is not None and handle.mesh.is_simulated:
                self._wait_for_stream(self._all_gather_stream)
            handle.memory.show()

    def reshard(self, handle: FlatParamHandle) -> None:
        """Free the unsharded memory, if it may be freed; nothing is in flight then."""
        if handle.all_gather_work is not None:
            self.wait(handle)
        if handle.is_pinned or not handle.is_unsharded:
            return
        try:
            handle.memory.free()
        except RuntimeError as error:
            raise self._refuse_exported(handle, error) from error
        handle.is_unsharded = handle.is_kept = False

    # ---- gradients

    def accumulate(self, handle: FlatParamHandle, is_running: bool = False) -> None:
        """Take the gradients into the handle's unsharded accumulation buffer (reduce dtype), without communication.
        ``is_running``: a forward of the group is, which goes on to use its parameters."""
        handle.settle_accumulation()
        grads, _ = _take_gradients(handle)
        if not is_running:
            self.reshard(handle)
        handle.accumulate(grads)

    def reduce(self, handle: FlatParamHandle, is_running: bool = False) -> None:
        """Take the gradients and start their reduce-scatter; every rank calls this for the same handles in one order.

        Parameters without a gradient on this rank contribute zeros. ``is_running``: as for ``accumulate``.
        """
        if handle.accumulation is not None:
            handle.settle_accumulation()
        grads, missing = _take_gradients(handle)
        if not is_running:
            self.reshard(handle)  # before the reduce buffer is taken: the peak is one of the two, not both
        plan = handle.reduce_plan
        if plan is None or plan.buffer.pool_id != self._pool_id:
            plan = handle.reduce_plan = ReducePlan(handle, self._buffer_for(handle))
        buffer = plan.buffer
        if buffer.owner is not None:
            self._finish_reduction(buffer.owner)
        if handle.accumulation is not None:
            handle.accumulation.add(grads)
            buffer.free()  # nobody is in flight in it, and this reduction brings its own memory
            plan = ReducePlan(handle, buffer, handle.accumulation.flat)
            handle.accumulation = None
        else:
            buffer.take(plan)
            if missing:
                _fill(plan.views, grads, missing)
            else:
                copy_gradients(plan.views, grads)
        del grads
        handle.awaits_publication = True
        self._start_reduce_scatter(handle, plan)

    @in_range("reduce_scatter")
    def _start_reduce_scatter(self, handle: FlatParamHandle, plan: ReducePlan) -> None:
        arrival = handle.gradient.prepare()
        handle.is_reduce_added = arrival is Arrival.ADDED
        output = plan.own_slice if handle.is_reduce_added or not plan.goes_direct else handle.gradient.target
        assert output is not None
        handle.reduce_output, handle.reduce_input, plan.buffer.owner = output, plan, handle
        mesh = handle.mesh
        if mesh.shard_world_size == 1:
            return
        flat = plan.flat
        if plan.average_by_hand:
            flat.div_(_divide_factors(mesh.shard_world_size)[0])
        if plan.is_wired:
            flat, output = wire(flat), wire(output)
        if self._reduce_stream is None:
            handle.reduce_work = mesh.shard_group._reduce_scatter_base(output, flat, plan.options)
        else:
            self._reduce_stream.wait_stream(self._module.current_stream(self._device))
            with self._module.stream(self._reduce_stream):
                handle.reduce_work = mesh.shard_group._reduce_scatter_base(output, flat, plan.options)

    @in_range("wait reduce_scatter")
    def _finish_reduction(self, handle: FlatParamHandle) -> None:
        """Wait for the reduce-scatter of ``handle``, the owner of its buffer; the result goes to the flat gradient."""
        plan, output, work = handle.reduce_input, handle.reduce_output, handle.reduce_work
        assert plan is not None and output is not None
        plan.buffer.owner = handle.reduce_work = None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure("reduce-scatter", handle, error) from error
            if self._reduce_stream is not None and handle.mesh.is_simulated:
                self._wait_for_stream(self._reduce_stream)
        target = handle.gradient.target
        assert target is not None
        if plan.average_by_hand:
            output.div_(_divide_factors(handle.mesh.shard_world_size)[1])
        if handle.is_reduce_added:
            target.add_(output)
        elif output is not target:
            target.copy_(output)
        handle.reduce_output = handle.reduce_input = None

    @in_range("publish")
    def publish(self, handle: FlatParamHandle, has_others: bool) -> None:
        """Show the gradients that were reduced to the user."""
        handle.gradient.publish(bytes(handle.is_used), has_others)
        handle.is_used[:] = handle.none_used

    def _wait_for_stream(self, stream: Any) -> None:
        """Let compute wait for all of a side stream. The work of a simulated group does not wait: what it copies are
        kernels of the stream it was issued on."""
        self._module.current_stream(self._device).wait_stream(stream)

    def finish(self) -> None:
        """Wait for every reduction in flight and free the buffers."""
        for buffer in self._buffers.values():
            if buffer.owner is not None:
                self._finish_reduction(buffer.owner)
            buffer.free()

    def _failure(self, what: str, handle: FlatParamHandle, error: RuntimeError) -> RuntimeError:
        group = handle.mesh.shard_group
        failure = (
            f"rank {handle.mesh.shard_rank}: the {what} of the fully_shard group with {handle.prefix}{handle.fqns[0]} "
            f"({len(handle.fqns)} parameters) failed: another rank died, or did not enter the same collective. {error}"
        )
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

    # ---- for functional mode: into memory of their own, waited for

    @in_range("all_gather")
    def all_gather_copy(self, handle: FlatParamHandle, shard: torch.Tensor) -> torch.Tensor:
        """The whole flat parameter in its compute dtype, gathered from ``shard``, a tensor like the handle's own."""
        mesh, shard = handle.mesh, shard.to(handle.param_dtype)
        if mesh.shard_world_size == 1:
            return shard.clone()
        flat = torch.empty(handle.layout.flat_numel, dtype=shard.dtype, device=shard.device)
        try:
            mesh.shard_group._allgather_base(wire(flat), wire(shard), _ALL_GATHER_OPTIONS).wait()
        except RuntimeError as error:
            raise self._failure("all-gather", handle, error) from error
        return flat

    @in_range("reduce_scatter")
    def reduce_scatter_copy(self, handle: FlatParamHandle, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of the average of ``flat`` (reduce dtype, overwritten), in the dtype of the shard."""
        mesh = handle.mesh
        if mesh.shard_world_size == 1:
            return flat.to(handle.shard.dtype)
        is_half = flat.dtype == torch.float16
        before, after = _divide_factors(mesh.shard_world_size)
        if is_half:
            flat.div_(before)
        output = torch.empty(handle.layout.shard_numel, dtype=flat.dtype, device=flat.device)
        try:
            mesh.shard_group._reduce_scatter_base(wire(output), wire(flat), _SUM if is_half else _AVERAGE).wait()
        except RuntimeError as error:
            raise self._failure("reduce-scatter", handle, error) from error
        return (output.div_(after) if is_half else output).to(handle.shard.dtype)

    def _buffer_for(self, handle: FlatParamHandle) -> ReduceBuffer:
        key = (handle.reduce_dtype, handle.shard.device)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = ReduceBuffer(*key, self._pool_id)
        elif buffer.owner is not None:
            self._finish_reduction(buffer.owner)
        return buffer


def _reduce_scatter_options(op: Any) -> Any:
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = True
    return options


_AVERAGE = _reduce_scatter_options(dist.ReduceOp.AVG)
_SUM = _reduce_scatter_options(dist.ReduceOp.SUM)


def _divide_factors(world_size: int) -> tuple[int, float]:
    """What fp16 gradients are divided by before and after a sum that makes their average: a plain sum can overflow,
    so about the square root of the world size goes first."""
    before = 1
    while world_size % (before * 2) == 0 and before * before < world_size:
        before *= 2
    return before, world_size / before


def _take_gradients(handle: FlatParamHandle) -> tuple[list[torch.Tensor], list[int]]:
    """Move the gradients out of the unsharded parameters; which are missing (None in the list)."""
    params = handle.unsharded_params
    grads = [*map(_grad, params)]
    for param in params:
        param.grad = None
    if handle.outside_grads:
        for i, outside in handle.outside_grads.items():
            grads[i] = outside if grads[i] is None else outside + grads[i]
        handle.outside_grads = {}
    missing = [i for i, grad in enumerate(grads) if grad is None]
    if missing:
        for i, grad in enumerate(grads):
            if grad is not None:
                handle.is_used[i] = 1
    else:
        handle.is_used[:] = handle.all_used
    return grads, missing


def _fill(views: list[torch.Tensor], grads: list[torch.Tensor], missing: list[int]) -> None:
    """Copy the gradients there are into ``views``, and zeros for those that are missing."""
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
        foreach_copy_(views, [grad.to_dense() for grad in grads])  # of nn.Embedding(sparse=True)

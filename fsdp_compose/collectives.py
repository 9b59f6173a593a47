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

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ._torch import AllgatherOptions, ReduceScatterOptions, foreach_add_, foreach_copy_, foreach_zero_
from .flat_grad import Arrival
from .flat_param import FlatParamHandle, wire

_ALL_GATHER_OPTIONS = AllgatherOptions()
_ALL_GATHER_OPTIONS.asyncOp = True


class ReduceBuffer:
    """The pooled input of reduce-scatters of one dtype on one device: a storage that grows to the largest layout.

    There is one slot: a second reduce-scatter in flight cost a block of memory and gained no time when measured.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(0, dtype=dtype, device=device)
        self.storage = self.flat.untyped_storage()
        self.owner: FlatParamHandle | None = None  # whose reduce-scatter is in flight
        self.content: object = None  # the layout that wrote last: its padding is zero

    def views_for(self, handle: FlatParamHandle) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """The buffer with room for ``handle``, and its views by parameter; allocates, and zeroes the padding."""
        numel = handle.layout.flat_numel
        nbytes = numel * self.flat.element_size()
        if self.storage.nbytes() < nbytes:
            self.storage.resize_(0)  # the content is not worth a copy
            self.storage.resize_(nbytes)
            self.content = None
        if handle.reduce_views is None or handle.reduce_views[0] is not self:
            with torch.inference_mode(False), torch.no_grad():
                flat = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
                flat.set_(self.storage, 0, (numel,))
                handle.reduce_views = (self, [flat, *handle.full_views_of(flat)], handle.gaps_of(flat))
        _, (flat, *views), gaps = handle.reduce_views
        if self.content is not handle.layout:
            if gaps:
                foreach_zero_(gaps)
            self.content = handle.layout
        return flat, views, gaps

    def free(self) -> None:
        self.storage.resize_(0)
        self.content = None


class Communicator:
    """Streams and reduce buffers that the groups below one root share."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._all_gather_stream = self._module.Stream(device, priority=-1) if self._module else None
        self._reduce_stream = self._module.Stream(device, priority=-1) if self._module else None
        self._buffers: dict[tuple[torch.dtype, torch.device], ReduceBuffer] = {}

    # ---- parameters

    def unshard(self, handle: FlatParamHandle) -> None:
        """Allocate the unsharded storage and start the all-gather into it; nothing when it is there already."""
        if handle.is_unsharded:
            return
        handle.storage.resize_(handle.storage_nbytes)
        handle.is_unsharded = True
        self._start_all_gather(handle)

    def refresh(self, handle: FlatParamHandle) -> None:
        """Gather again into the storage of a handle that was left unsharded; its shard may have changed."""
        if handle.is_resident:
            return
        self.wait(handle)
        self._start_all_gather(handle)

    def _start_all_gather(self, handle: FlatParamHandle) -> None:
        if self._all_gather_stream is None:
            handle.gather_input.copy_(handle.shard)  # the only copy of an unshard; casts
            if handle.mesh.shard_world_size > 1:
                handle.all_gather_work = handle.mesh.shard_group._allgather_base(*handle.gather_wires, _ALL_GATHER_OPTIONS)
            return
        self._all_gather_stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._all_gather_stream):
            handle.gather_input.copy_(handle.shard)
            # At world size 1 NCCL's collective is an ordinary no-op whose work still orders the copy before compute.
            handle.all_gather_work = handle.mesh.shard_group._allgather_base(*handle.gather_wires, _ALL_GATHER_OPTIONS)

    def wait(self, handle: FlatParamHandle) -> None:
        """Make the unsharded parameters usable by what is issued from here on."""
        work = handle.all_gather_work
        if work is not None:
            handle.all_gather_work = None
            _wait(work, "all-gather", handle)

    def reshard(self, handle: FlatParamHandle) -> None:
        """Free the unsharded storage."""
        if handle.is_resident or not handle.is_unsharded or handle.is_pinned:
            return
        if handle.all_gather_work is not None:
            self.wait(handle)
        handle.storage.resize_(0)
        handle.is_unsharded = handle.is_kept = False

    # ---- gradients

    def accumulate(self, handle: FlatParamHandle) -> None:
        """Take the gradients into the handle's unsharded accumulation buffer (reduce dtype), without communication."""
        grads, missing = _take_gradients(handle)
        self.reshard(handle)
        if len(missing) == len(grads):
            return
        _add_to_accumulated(handle, grads)

    def reduce(self, handle: FlatParamHandle) -> None:
        """Take the gradients and start their reduce-scatter; every rank calls this for the same handles in one order.

        Parameters without a gradient on this rank contribute zeros.
        """
        grads, missing = _take_gradients(handle)
        self.reshard(handle)  # before the reduce buffer is taken: the peak is one of the two, not both
        buffer = self._buffer_for(handle)
        if handle.accumulated_grad is not None:
            if len(missing) < len(grads):
                _add_to_accumulated(handle, grads)
            flat, handle.accumulated_grad = handle.accumulated_grad, None
            buffer.free()  # nobody is in flight in it, and this reduction brings its own memory
            handle.reduce_input = flat
        else:
            flat, views, _ = buffer.views_for(handle)
            if missing:
                foreach_zero_([views[i] for i in missing])
                present = [i for i, grad in enumerate(grads) if grad is not None]
                if present:
                    foreach_copy_([views[i] for i in present], [grads[i] for i in present])
            else:
                foreach_copy_(views, grads)
        del grads
        buffer.owner = handle
        handle.awaits_publication = True
        self._start_reduce_scatter(handle, flat)

    def _start_reduce_scatter(self, handle: FlatParamHandle, flat: torch.Tensor) -> None:
        mesh, numel = handle.mesh, handle.layout.shard_numel
        arrival = handle.gradient.prepare()
        own_slice = flat[mesh.shard_rank * numel : (mesh.shard_rank + 1) * numel]
        goes_direct = (
            arrival is not Arrival.ADDED and handle.reduce_dtype == handle.shard.dtype and mesh.shard_world_size > 1
        )
        handle.reduce_output = handle.gradient.target if goes_direct else own_slice
        handle.is_reduce_added = arrival is Arrival.ADDED
        if mesh.shard_world_size > 1:
            predivide, _ = _divide_factors(flat.dtype, mesh.shard_world_size)
            if predivide != 1:
                flat.div_(predivide)
            options = _AVERAGE if predivide == 1 else _SUM
            with self._on_reduce_stream():
                handle.reduce_work = mesh.shard_group._reduce_scatter_base(
                    wire(handle.reduce_output), wire(flat), options
                )

    def finish_reduce(self, handle: FlatParamHandle) -> None:
        """Wait for the handle's reduce-scatter and put the result into its flat gradient."""
        output = handle.reduce_output
        if output is None:
            return
        work, handle.reduce_work = handle.reduce_work, None
        if work is not None:
            _wait(work, "reduce-scatter", handle)
        _, postdivide = _divide_factors(output.dtype, handle.mesh.shard_world_size)
        if postdivide != 1:
            output.div_(postdivide)
        target = handle.gradient.target
        if handle.is_reduce_added:
            target.add_(output)
        elif output is not target:
            target.copy_(output)
        handle.reduce_output = handle.reduce_input = None

    def finish(self) -> None:
        """Wait for every reduction in flight and free the buffers."""
        for buffer in self._buffers.values():
            if buffer.owner is not None:
                owner, buffer.owner = buffer.owner, None
                self.finish_reduce(owner)
            buffer.free()

    def _buffer_for(self, handle: FlatParamHandle) -> ReduceBuffer:
        key = (handle.reduce_dtype, handle.shard.device)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = ReduceBuffer(*key)
        if buffer.owner is not None:
            owner, buffer.owner = buffer.owner, None
            self.finish_reduce(owner)
        return buffer

    def _on_reduce_stream(self) -> AbstractContextManager[Any]:
        if self._reduce_stream is None:
            return nullcontext()
        self._reduce_stream.wait_stream(self._module.current_stream())
        return self._module.stream(self._reduce_stream)  # type: ignore[no-any-return]


def _reduce_scatter_options(op: Any) -> Any:
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = True
    return options


_AVERAGE = _reduce_scatter_options(dist.ReduceOp.AVG)
_SUM = _reduce_scatter_options(dist.ReduceOp.SUM)


def _divide_factors(dtype: torch.dtype, world_size: int) -> tuple[int, float]:
    """What gradients of ``dtype`` are divided by before and after a sum that makes their average; (1, 1) where the
    collective averages by itself. A sum of fp16 gradients can overflow: about the square root goes first."""
    if dtype != torch.float16:
        return 1, 1
    before = 1
    while world_size % (before * 2) == 0 and before * before < world_size:
        before *= 2
    return max(before, 1), world_size / before


def _take_gradients(handle: FlatParamHandle) -> tuple[list[torch.Tensor], list[int]]:
    """Move the gradients out of the unsharded parameters; which are missing (None in the list)."""
    params = handle.unsharded_params
    grads = [param.grad for param in params]
    missing = [i for i, grad in enumerate(grads) if grad is None]
    if missing:
        for i, grad in enumerate(grads):
            if grad is not None:
                handle.is_used[i] = 1
    else:
        handle.is_used[:] = b"\x01" * len(params)
    for param in params:
        param.grad = None
    return grads, missing  # type: ignore[return-value]


def _add_to_accumulated(handle: FlatParamHandle, grads: list[torch.Tensor]) -> None:
    flat = handle.accumulated_grad
    if flat is None:
        with torch.inference_mode(False), torch.no_grad():
            flat = handle.accumulated_grad = torch.zeros(
                handle.layout.flat_numel, dtype=handle.reduce_dtype, device=handle.shard.device
            )
    views = handle.full_views_of(flat)
    present = [i for i, grad in enumerate(grads) if grad is not None]
    foreach_add_([views[i] for i in present], [grads[i] for i in present])


def _wait(work: dist.Work, what: str, handle: FlatParamHandle) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {handle.mesh.shard_rank}: the {what} of the fully_shard group with {handle.fqns[0]} "
            f"({len(handle.fqns)} parameters) failed: another rank died, or did not enter the same collective. {error}"
        ) from error

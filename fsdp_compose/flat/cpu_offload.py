"""Flat parameters whose shard and gradient live in host memory.

These classes replace those of ordinary models, so the code paths of ordinary models never ask where a shard is::

    host     shard ------.                          .-> (added to) flat gradient     optimizer steps here
             one copy    |                          |   one copy, in the dtype of the shard
    device   [staging, cast] -> unsharded -> ... -> reduced
                         all-gather, in place       reduce-scatter [, all-reduce]

Casts happen on the device. Casting in host memory first would halve the bytes to copy, but takes a CPU pass over all
elements, for which the host would have to wait. When the host may read and write: Note [Host memory].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..comm import DataParallelMesh, Label
from .flat_param import FlatParamHandle
from .gradient import GradientMemory, ShardedGradient
from .gradient_hooks import GradientHooks
from .layout import FlatLayout
from .reduction import ReduceBuffer, Reduction, ReductionOptions
from .shard_storage import HostCopies, HostShardStorage, host_copies
from .unsharded import ShardSource, Unsharded

# ---- To the device


class _HostSource(ShardSource):
    """Shards in host memory: each rank copies its own shard into its slice of the buffer, and gathers in place.

    Attributes:
        allocate, free: the memory in which a shard waits on the device to be cast.
    """

    __slots__ = ("_staging",)

    def _copy_into(self, own_slice: torch.Tensor, shard: torch.Tensor, is_alone: bool) -> Callable[[], object]:
        self._staging: torch.Tensor | None = None
        if shard.is_meta:
            return partial(own_slice.copy_, shard)
        copies = host_copies(own_slice.device)
        if own_slice.dtype == shard.dtype:
            return partial(copies.to_device, own_slice, shard)
        self._staging = torch.empty(shard.numel(), dtype=shard.dtype, device=own_slice.device)
        self._staging.untyped_storage().resize_(0)
        return partial(_copy_and_cast, copies, self._staging, own_slice, shard)

    def allocate(self) -> None:
        if self._staging is not None and not self._staging.untyped_storage().nbytes():
            self._staging.untyped_storage().resize_(self._staging.numel() * self._staging.element_size())

    def free(self) -> None:
        if self._staging is not None:
            self._staging.untyped_storage().resize_(0)


def _copy_and_cast(copies: HostCopies, staging: torch.Tensor, own_slice: torch.Tensor, shard: torch.Tensor) -> None:
    copies.to_device(staging, shard)
    own_slice.copy_(staging)


class _UnshardedFromHost(Unsharded):
    """Unsharded parameters whose shards are in host memory."""

    __slots__ = ()

    _source: _HostSource

    def _needs_no_gather(self, shard: torch.Tensor, layout: FlatLayout, mesh: DataParallelMesh) -> bool:
        return layout.shard_numel == 0

    def _compute_device(self, shard: torch.Tensor, mesh: DataParallelMesh) -> torch.device:
        return shard.device if shard.device.type == "meta" else mesh.device

    def _source_of(self, shard: torch.Tensor, flat: torch.Tensor, mesh: DataParallelMesh, label: Label) -> ShardSource:
        return _HostSource(shard, flat, mesh, label)

    def allocate(self) -> None:
        super().allocate()
        self._source.allocate()

    def hide(self) -> None:
        super().hide()
        self._source.allocate()

    def gather(self, segments: int) -> None:
        self._source.allocate()  # unless the caller already has, on the compute stream
        super().gather(segments)
        if self.work is None:
            self._source.free()

    def arrive(self) -> None:
        super().arrive()
        self._source.free()


# ---- To the host


class _GradientOnHost(ShardedGradient):
    """A flat gradient in host memory, shown once all reduced gradients have arrived there."""

    __slots__ = ("_storage",)

    def __init__(self, memory: GradientMemory, hooks: GradientHooks, storage: HostShardStorage) -> None:
        super().__init__(memory, hooks, keeps_memory=True)  # page-locked memory is slow to allocate
        self._storage = storage

    def publish(self, is_used: bytes, has_others: bool = True) -> None:
        self._storage.synchronize()
        super().publish(is_used, has_others)

    def forget_result(self) -> None:
        self._storage.synchronize()
        super().forget_result()

    def discard(self) -> None:
        self._storage.synchronize()
        super().discard()


class _ReductionToHost(Reduction):
    """A reduction whose result goes to host memory, through memory of its own: the pooled buffer serves the next
    reduction while the copy runs."""

    __slots__ = ("_storage",)

    _storage: HostShardStorage

    def land_in(self, storage: HostShardStorage) -> Reduction:
        self._storage, self.goes_direct, self.has_own_output = storage, False, True
        return self

    def set_target(
        self, options: ReductionOptions, target: torch.Tensor | None, is_added: bool, earlier: torch.Tensor | None
    ) -> None:
        assert target is not None
        super().set_target(options, self._storage.landing(target), is_added, earlier)


class OffloadedFlatParamHandle(FlatParamHandle):
    """A flat parameter whose shard and gradient, or gradient alone, live in host memory, in ``storage``; ``live_in``
    sets that."""

    __slots__ = ("storage",)

    storage: HostShardStorage

    def live_in(self, storage: HostShardStorage) -> OffloadedFlatParamHandle:
        self.storage = storage
        return self

    def _empty_twin(self, mesh: DataParallelMesh) -> FlatParamHandle:
        arguments = self.layout, mesh, self.kind, self.local_shards, self.tensor_parallel
        return OffloadedFlatParamHandle(*arguments).live_in(self.storage)

    def _build(self, shard: torch.Tensor) -> tuple[Unsharded, ShardedGradient]:
        dtype, cls = self.kind.compute_dtype(shard.dtype), _UnshardedFromHost if self.storage.is_host else Unsharded
        unsharded = cls(shard, self.layout, self.mesh, dtype, self.label, self.tensor_parallel)
        where = (shard.device,) if shard.is_meta else (torch.device("cpu"), self.storage.memory)
        parts, dtype = (self.sharded_params, self.local_shards, self.segments), self.kind.gradient_dtype(shard.dtype)
        memory = GradientMemory(*parts, shard.numel(), dtype, *where)
        return unsharded, _GradientOnHost(memory, self.hooks, self.storage)

    def reduction_of(self, flat: torch.Tensor, buffer: ReduceBuffer | None = None) -> Reduction:
        return _ReductionToHost(self.layout, self.mesh, self.gradient.dtype, flat, buffer).land_in(self.storage)

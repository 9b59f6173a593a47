"""Where a shard and its gradient live: on the device that computes, or in host memory (offload).

A flat parameter asks its ``ShardStorage`` for memory, for its elements on the device, and for the parts whose code
depends on where these are; so no other code asks. In host memory::

    host     shard ------.                          .-> (added to) flat gradient     optimizer steps here
             one copy    |                          |   one copy, in the dtype of the shard
    device   [staging, cast] -> unsharded -> ... -> reduced
                         all-gather, in place       reduce-scatter [, all-reduce]

Casts happen on the device. Casting in host memory first would halve the bytes to copy, but takes a CPU pass over all
elements, for which the host would have to wait. The ordered copies between host and device are only here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..comm import DataParallelMesh, Label, streams_of
from .gradient import GradientMemory, ShardedGradient
from .gradient_hooks import GradientHooks
from .layout import FlatLayout
from .policy import CPUOffloadPolicy
from .reduction import Reduction, ReductionOptions
from .unsharded import Unsharded

if TYPE_CHECKING:
    from ...plugins.tensor_parallel import TensorParallel

# ---- Copies between host memory and the device that computes: their stream, their order, and when the host may look
#
# ``ShardStorage`` uses one object per device. Note [Host memory]. The host reads and writes host memory whenever the
# user likes, so every copy that was issued must be complete before the user gets control. ``synchronize`` waits on the
# host for all copies. It is called at the end of a top-level forward, and before gradients are shown at the end of a
# backward; not in between, so copies overlap compute. Device memory follows Note [Memory and streams]: it belongs to
# the compute stream, which waits for a copy before it frees the memory that the copy reads. At most two results of
# reductions wait on the device to be copied out. Without streams (the CPU computes), every copy is complete when it
# returns.


class HostCopies:
    """Copies between host memory and ``device``, which computes."""

    __slots__ = ("_additions", "_leaving", "_module", "_readings", "_stream", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = streams_of(device)
        self._stream: Any = self._module.Stream(device) if self._module else None  # for copies to the host
        self._readings: dict[Any, Any] = {}  # by stream, an event after the last copy from the host
        self._leaving: list[tuple[Any, torch.Tensor]] = []  # copies to the host: an event after each, and what it reads
        # pairs of a target and what is added to it, once it has arrived
        self._additions: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source``, in host memory, on the current stream. Both have the same dtype."""
        target.copy_(source, non_blocking=True)
        if self._module is not None:
            stream = self._module.current_stream(self.device)
            event = self._readings.get(stream)
            if event is None:
                event = self._readings[stream] = self._module.Event()
            event.record(stream)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to the host. Only the compute stream, which is current, may still write to it. Both have the
        same dtype."""
        if self._module is None:
            target.copy_(source)
            return
        compute = self._module.current_stream(self.device)
        self._stream.wait_stream(compute)
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        self._leaving.append((event, source))
        # The third result would wait too. Compute waits for the first copy here, so that its memory can be freed.
        if len(self._leaving) > 2:
            event, _ = self._leaving.pop(0)
            compute.wait_event(event)

    def add_to_host(self, target: torch.Tensor, landing: torch.Tensor, source: torch.Tensor) -> None:
        """Like ``to_host``, into ``landing``; ``synchronize`` adds that to ``target``."""
        self.to_host(landing, source)
        self._additions.append((target, landing))

    def synchronize(self) -> None:
        """Wait, on the host, for all copies that were issued."""
        for event in self._readings.values():
            event.synchronize()
        for event, _ in self._leaving:
            event.synchronize()
        self._leaving.clear()
        while self._additions:
            target, landing = self._additions.pop(0)
            with torch.no_grad():
                target.add_(landing)


@cache  # one object, so ``synchronize`` waits for all copies of a device
def host_copies(device: torch.device) -> HostCopies:
    """The copies of a device."""
    return HostCopies(device)


def host_memory(numel: int, dtype: torch.dtype, pins: bool) -> torch.Tensor:
    """Allocate host memory, uninitialized; page-locked if ``pins``. The only place that does so."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pins)


# ---- Device or host


@dataclass(frozen=True, slots=True, eq=False)
class ShardStorage:
    """Where shards and gradients live; without arguments, on the device that computes."""

    is_host: bool = False  # shards live in host memory
    has_host_gradients: bool = False  # gradients do, as they always do with the shards
    pins: bool = False  # host memory is page-locked
    copies: HostCopies = None  # type: ignore[assignment]  # those to and from host memory, if anything lives there

    @staticmethod
    def of(policy: CPUOffloadPolicy, device: torch.device) -> ShardStorage:
        """Make the storage for the user's policy; ``device``: that computes."""
        pins = policy.pin_memory and device.type != "cpu"
        return ShardStorage(policy.parameters, True, pins, host_copies(device))

    def device(self, mesh: DataParallelMesh) -> torch.device:
        """Where shards live."""
        return torch.device("cpu") if self.is_host else mesh.device

    def compute_device(self, shard: torch.Tensor) -> torch.device:
        """The device that computes with a flat parameter that has this shard, and reduces its gradient."""
        return shard.device if not self.is_host or shard.is_meta else self.copies.device

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory, uninitialized."""
        return host_memory(numel, dtype, self.pins)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make a new shard. ``device``: where its elements are now; if that is the meta device, so is the shard."""
        if self.is_host and device.type != "meta":
            return self.memory(numel, dtype).zero_()
        return torch.zeros(numel, dtype=dtype, device=device)

    def landing(self, target: torch.Tensor) -> torch.Tensor:
        """What receives the result of a reduction for ``target``, a flat gradient."""
        if not self.has_host_gradients:
            return target
        return _HostGradientCopy(target, self)  # type: ignore[return-value]  # it has what a reduction asks of a target

    def on_device(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor with the shard's elements, on the device that computes."""
        if not self.is_host or local.is_meta:
            return local
        moved = torch.empty(local.shape, dtype=local.dtype, device=self.copies.device)
        self.copies.to_device(moved, local)
        return moved

    def synchronize(self) -> None:
        """Wait, on the host, until no issued work for shards and gradients touches host memory."""
        if self.has_host_gradients:
            self.copies.synchronize()

    # ---- The parts of a flat parameter

    def unsharded(
        self,
        shard: torch.Tensor,
        layout: FlatLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        label: Label,
        tensor_parallel: TensorParallel | None,
    ) -> Unsharded:
        """Make the unsharded side of a flat parameter; for the arguments see ``Unsharded``."""
        copy_in = self.copies.to_device if self.is_host else None
        cls = _StagedUnsharded if self.is_host and dtype != shard.dtype else Unsharded
        return cls(shard, layout, mesh, dtype, label, tensor_parallel, copy_in)

    def gradient_memory(self, device: torch.device, *arguments: Any) -> GradientMemory:
        """Make the memory of a flat gradient; ``device``: that of the shard; for the others see ``GradientMemory``."""
        is_host = self.has_host_gradients and device.type != "meta"
        return GradientMemory(*arguments, *((torch.device("cpu"), self.memory) if is_host else (device,)))

    def gradient(self, memory: GradientMemory, hooks: GradientHooks, keeps_memory: bool) -> ShardedGradient:
        """Make the flat gradient; for the arguments see ``ShardedGradient``."""
        if not self.has_host_gradients:
            return ShardedGradient(memory, hooks, keeps_memory)
        return _GradientOnHost(memory, hooks, self)

    def reduction(self, *arguments: Any) -> Reduction:
        """Make a reduction; for the arguments see ``Reduction``."""
        return _ReductionToHost(self, *arguments) if self.has_host_gradients else Reduction(*arguments)


ON_DEVICE = ShardStorage()


# ---- To the device


class _StagedUnsharded(Unsharded):
    """Unsharded parameters whose shards are in host memory, in another dtype. Each waits to be cast in memory of its
    own on the device (``staging``), which exists during the all-gather."""

    __slots__ = ()

    def allocate(self) -> None:
        super().allocate()
        self._allocate_staging()

    def hide(self) -> None:
        super().hide()
        self._allocate_staging()

    def gather(self, segments: int) -> None:
        # With streams this does nothing: the caller has already allocated it, on the compute stream, which owns it.
        self._allocate_staging()
        super().gather(segments)
        if self.work is None:
            self._free_staging()

    def arrive(self) -> None:
        super().arrive()
        self._free_staging()

    def _allocate_staging(self) -> None:
        staging = self._source.staging
        if staging is not None and not staging.untyped_storage().nbytes():
            staging.untyped_storage().resize_(staging.numel() * staging.element_size())

    def _free_staging(self) -> None:
        if self._source.staging is not None:
            self._source.staging.untyped_storage().resize_(0)


# ---- To the host


class _GradientOnHost(ShardedGradient):
    """A flat gradient in host memory, shown once all reduced gradients have arrived there."""

    __slots__ = ("_storage",)

    def __init__(self, memory: GradientMemory, hooks: GradientHooks, storage: ShardStorage) -> None:
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
    """A reduction whose result goes to host memory."""

    __slots__ = ("_storage",)

    def __init__(self, storage: ShardStorage, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._storage, self.goes_direct = storage, False
        self.has_own_output = True  # the pooled buffer serves the next reduction while the copy runs

    def set_target(
        self, options: ReductionOptions, target: torch.Tensor | None, is_added: bool, earlier: torch.Tensor | None
    ) -> None:
        assert target is not None
        super().set_target(options, self._storage.landing(target), is_added, earlier)


@dataclass(slots=True, eq=False)
class _HostGradientCopy:
    """A flat gradient in host memory, in the form of a target for reductions."""

    target: torch.Tensor
    storage: ShardStorage

    def copy_(self, output: torch.Tensor) -> None:
        self.storage.copies.to_host(self.target, output.to(self.target.dtype))

    def add_(self, output: torch.Tensor) -> None:
        target = self.target
        landing = self.storage.memory(target.numel(), target.dtype)
        self.storage.copies.add_to_host(target, landing, output.to(target.dtype))

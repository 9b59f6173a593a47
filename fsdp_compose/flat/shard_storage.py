"""Where a shard and its gradient live: on the device that computes, or in host memory (offload).

A flat parameter asks its ``ShardStorage`` for memory, and for its elements on the device. ``cpu_offload`` has the
classes that differ for host memory. Streams and events, and the ordered copies between host and device, are only here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..comm import DataParallelMesh
from .policy import CPUOffloadPolicy

# ---- Streams and events: the one place they come from, which a test can replace


def streams_of(device: torch.device) -> Any:
    """The module with ``Stream``, ``Event``, ``stream`` and ``current_stream`` for a device (``torch.cuda``); ``None``
    for the CPU, where everything is done once it is issued."""
    return None if device.type == "cpu" else torch.get_device_module(device.type)


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
    """Copies between host memory and ``device``.

    Attributes:
        device: that computes.
    """

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


@cache
def host_copies(device: torch.device) -> HostCopies:
    """The copies of a device: one object, so ``synchronize`` waits for all of them."""
    return HostCopies(device)


def host_memory(numel: int, dtype: torch.dtype, pins: bool) -> torch.Tensor:
    """Allocate host memory, uninitialized; page-locked if ``pins``. The only place that does so."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pins)


# ---- Device or host: ``ShardStorage`` and ``HostShardStorage``


class ShardStorage:
    """Shards and gradients live on the device that computes.

    Attributes:
        is_host: shards live in host memory.
        has_host_gradients: gradients do.
    """

    is_host = has_host_gradients = False

    def device(self, mesh: DataParallelMesh) -> torch.device:
        """Where shards live."""
        return mesh.device

    def compute_device(self, shard: torch.Tensor) -> torch.device:
        """The device that computes with a flat parameter that has this shard, and reduces its gradient."""
        return shard.device

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make a new shard. ``device``: where its elements are now; if that is the meta device, so is the shard."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def landing(self, target: torch.Tensor) -> torch.Tensor:
        """What receives the result of a reduction for ``target``, a flat gradient."""
        return target

    def on_device(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor with the shard's elements, on the device that computes."""
        return local

    def synchronize(self) -> None:
        """Wait, on the host, until no issued work for shards and gradients touches host memory."""


ON_DEVICE = ShardStorage()


class HostShardStorage(ShardStorage):
    """Shards and their gradients live in host memory.

    Args:
        policy: the user's policy.
        device: the device that computes.

    Attributes:
        copies: the copies between the two.
    """

    is_host = has_host_gradients = True

    def __init__(self, policy: CPUOffloadPolicy, device: torch.device) -> None:
        self.copies = host_copies(device)
        self._pins = policy.pin_memory and device.type != "cpu"

    def device(self, mesh: DataParallelMesh) -> torch.device:
        return torch.device("cpu")

    def compute_device(self, shard: torch.Tensor) -> torch.device:
        return shard.device if shard.is_meta else self.copies.device

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory, uninitialized."""
        return host_memory(numel, dtype, self._pins)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "meta":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self.memory(numel, dtype).zero_()

    def landing(self, target: torch.Tensor) -> torch.Tensor:
        return HostGradientCopy(target, self)  # type: ignore[return-value]  # it has what a reduction asks of a target

    def on_device(self, local: torch.Tensor) -> torch.Tensor:
        if local.is_meta:
            return local
        moved = torch.empty(local.shape, dtype=local.dtype, device=self.copies.device)
        self.copies.to_device(moved, local)
        return moved

    def synchronize(self) -> None:
        self.copies.synchronize()


class HostGradientStorage(HostShardStorage):
    """Shards live on the device that computes, and gradients in host memory."""

    is_host = False

    device = ShardStorage.device
    compute_device = ShardStorage.compute_device
    zeros = ShardStorage.zeros
    on_device = ShardStorage.on_device


class HostGradientCopy:
    """A flat gradient in host memory, in the form of a target for reductions."""

    __slots__ = ("_storage", "_target")

    def __init__(self, target: torch.Tensor, storage: HostShardStorage) -> None:
        self._target, self._storage = target, storage

    def copy_(self, output: torch.Tensor) -> None:
        self._storage.copies.to_host(self._target, output.to(self._target.dtype))

    def add_(self, output: torch.Tensor) -> None:
        target = self._target
        landing = self._storage.memory(target.numel(), target.dtype)
        self._storage.copies.add_to_host(target, landing, output.to(target.dtype))

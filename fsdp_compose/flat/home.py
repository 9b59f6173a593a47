"""Where a shard and its gradient live: on the device that computes, or in host memory (offload).

A flat parameter asks its ``Home`` for memory, and for its elements on the device. ``offloaded`` has the parts that
differ where that is host memory.
"""

from __future__ import annotations

import torch

from ..comm import DataParallelMesh
from .host_copies import host_copies, host_memory
from .policy import CPUOffloadPolicy


class Home:
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
        """Where a flat parameter with this shard is computed with, and reduced."""
        return shard.device

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new shard. ``device``: where the elements are that it is for; of the meta device, it is there too."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def landing(self, target: torch.Tensor) -> torch.Tensor:
        """What takes the result of a reduction for ``target``, a flat gradient."""
        return target

    def on_device(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor of the shard's elements, where they are computed with."""
        return local

    def settle(self) -> None:
        """Wait, on the host, until what was issued for shards and gradients no longer touches host memory."""


ON_DEVICE = Home()


class HostHome(Home):
    """Shards and their gradients live in host memory.

    Args:
        policy: the user's.
        device: that computes.

    Attributes:
        copies: between the two.
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
        """New host memory, of any content."""
        return host_memory(numel, dtype, self._pins)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "meta":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self.memory(numel, dtype).zero_()

    def landing(self, target: torch.Tensor) -> torch.Tensor:
        return _Landing(target, self)  # type: ignore[return-value]  # it has what a reduction asks of a target

    def on_device(self, local: torch.Tensor) -> torch.Tensor:
        if local.is_meta:
            return local
        moved = torch.empty(local.shape, dtype=local.dtype, device=self.copies.device)
        self.copies.to_device(moved, local)
        return moved

    def settle(self) -> None:
        self.copies.settle()


class GradientHome(HostHome):
    """Shards live on the device that computes, and gradients in host memory."""

    is_host = False

    device = Home.device
    compute_device = Home.compute_device
    zeros = Home.zeros
    on_device = Home.on_device


class _Landing:
    """A flat gradient in host memory, as what a reduction writes its result to."""

    __slots__ = ("_home", "_target")

    def __init__(self, target: torch.Tensor, home: HostHome) -> None:
        self._target, self._home = target, home

    def copy_(self, output: torch.Tensor) -> None:
        self._home.copies.to_host(self._target, output.to(self._target.dtype))

    def add_(self, output: torch.Tensor) -> None:
        target = self._target
        landing = self._home.memory(target.numel(), target.dtype)
        self._home.copies.add_to_host(target, landing, output.to(target.dtype))

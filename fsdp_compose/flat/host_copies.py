"""Copies between host memory and the device that computes: their stream, their order, and when the host may look.

Used by ``home``, one object for each device. Note [Host memory]. Host memory is read and written by the host, whenever
the user likes; so a copy of it that was issued must be complete before the user gets control. ``settle`` waits on the
host for all there are. It is called where a top-level forward ends, and before gradients are shown at the end of a
backward: not in between, so that copies overlap compute. Device memory follows Note [Memory and streams]: it belongs to
the compute stream, which waits for a copy before it frees what the copy reads; at most two results of reductions wait
on the device to be copied out. Without streams (the compute device is the CPU) every copy is complete when it returns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .streams import streams_of


class HostCopies:
    """Copies between host memory and ``device``.

    Attributes:
        device: that computes.
    """

    __slots__ = ("_additions", "_leaving", "_module", "_readings", "_stream", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = streams_of(device)
        self._stream: Any = self._module.Stream(device) if self._module else None  # for what goes to the host
        self._readings: dict[Any, Any] = {}  # by stream, an event after the last copy from the host
        self._leaving: list[tuple[Any, torch.Tensor]] = []  # copies to the host: an event after each, what it reads
        self._additions: list[tuple[torch.Tensor, torch.Tensor]] = []  # what is added to where, once it has come

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source``, in host memory, on the present stream. Both have one dtype."""
        target.copy_(source, non_blocking=True)
        if self._module is not None:
            stream = self._module.current_stream(self.device)
            event = self._readings.get(stream)
            if event is None:
                event = self._readings[stream] = self._module.Event()
            event.record(stream)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source``, which no other stream than the compute stream, the present one, writes to any more. Both
        have one dtype."""
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
        """As ``to_host``, into ``landing``, which is added to ``target`` when copies are settled."""
        self.to_host(landing, source)
        self._additions.append((target, landing))

    def settle(self) -> None:
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
    """Those of a device: one object, so that ``settle`` waits for all of them."""
    return HostCopies(device)


def host_memory(numel: int, dtype: torch.dtype, pins: bool) -> torch.Tensor:
    """New host memory, of any content; page-locked if it ``pins``. The one place where it is made."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pins)

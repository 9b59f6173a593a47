"""What time it is, where a model computes: on the host, or in the order of a stream."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from ...comm import Work


class Clock(Protocol):
    """Makes marks, and tells of each afterwards how many seconds it came after the clock was made."""

    def mark(self) -> Any:
        """Now; on an accelerator, when the present stream has come here."""

    def mark_end(self, work: Work) -> Any:
        """When a collective that was issued on the present stream is complete; ``None``: the clock cannot tell before
        it was waited for."""

    def stop(self) -> None:
        """No more marks are made; from here on they can be told."""

    def seconds(self, mark: Any) -> float: ...


class HostClock:
    """Of the host. A collective is complete for it when the wait for it has returned."""

    def __init__(self) -> None:
        self._began = time.perf_counter_ns()

    def mark(self) -> int:
        return time.perf_counter_ns()

    def mark_end(self, work: Work) -> None:
        return None

    def stop(self) -> None:
        """Marks are numbers already."""

    def seconds(self, mark: int) -> float:
        return (mark - self._began) / 1e9


class DeviceClock:
    """Of an accelerator: marks are events on streams, so that times are those at which the device has done things, not
    those at which the host has asked for them. Waits for the device when it is made, and when it stops.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device.type)
        self._device = device
        self._beside = self._module.Stream(device)
        self._module.synchronize(device)
        self._began = self.mark()

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def mark_end(self, work: Work) -> Any:
        self._beside.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._beside):
            work.wait()  # that stream waits, and no other
            return self.mark()

    def stop(self) -> None:
        self._module.synchronize(self._device)

    def seconds(self, mark: Any) -> float:
        return float(self._began.elapsed_time(mark)) / 1e3


def clock_of(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)

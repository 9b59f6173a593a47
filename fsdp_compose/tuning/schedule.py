"""How long a step takes: its events on a device and a network.

The host issues operations to a stream that computes, and collectives to a queue for each process group, where each
begins when the earlier ones of its group have ended, but not before what the stream that computes has been given so
far: that is how the package's streams wait for each other. On a CPU the host computes, and collectives take its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._arguments import checked
from ..extension import CollectiveKind
from ..inspect import BACKWARD, FORWARD, STEP, Issue, Operation, StepEvent
from .hardware import Device, Network

COMPUTE, LINK = "compute", "copies between host and device"


@dataclass(frozen=True)
class Span:
    """Something that takes time.

    Attributes:
        lane: ``compute``, a kind of collective, or ``copies between host and device``.
        name: an operation, or a group.
        start, end: seconds from the start of the step.
    """

    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The predicted times of a step, in seconds.

    Attributes:
        seconds: of the step.
        compute: of operations.
        communication: of collectives.
        exposed: the stream that computes waits for collectives or copies.
        host: of the host, to issue everything.
        optimizer: of the optimizer's step.
        flops: floating-point operations of the model, without what is recomputed.
        mfu: those a second, relative to the device's peak; 0: the peak is unknown.
        spans: everything that took time, if asked for.
    """

    seconds: float
    compute: float
    communication: float
    exposed: float
    host: float
    optimizer: float
    flops: float
    mfu: float
    spans: tuple[Span, ...] = ()

    def stretched(self, factor: float) -> Schedule:
        """Return a schedule in which everything takes ``factor`` times as long."""
        names = ("seconds", "compute", "communication", "exposed", "host", "optimizer")
        spans = [replace(span, start=factor * span.start, end=factor * span.end) for span in self.spans]
        times = {name: factor * getattr(self, name) for name in names}
        return replace(self, mfu=self.mfu / factor, spans=(*spans,), **times)


@checked()
def schedule(
    events: Sequence[StepEvent],
    device: Device,
    network: Network,
    *,
    num_batches: int = 1,
    is_offloaded: bool = False,
    is_compiled: bool = False,
    keeps_spans: bool = False,
) -> Schedule:
    """Predict how long a step takes.

    Args:
        events: of a step with one micro-batch, see ``WorldFacts``; or with two, if earlier ones differ from the last.
        device, network: the hardware.
        num_batches: micro-batches of a step.
        is_offloaded: parameters, gradients and optimizer state are in host memory.
        is_compiled: blocks are compiled: operations that are no products move fewer bytes.
        keeps_spans: note everything that takes time.

    Returns:
        The times.

    Raises:
        ValueError: the device does not say how fast products in some dtype are.
    """
    clock = (_Streams if device.overlaps else _Core)(device, network, is_offloaded, is_compiled, keeps_spans)
    phases = [getattr(event, "phase", "") for event in events]
    start = phases.index(STEP) if STEP in phases else len(events)
    backward = phases.index(BACKWARD) if BACKWARD in phases else start
    last = next((i for i in range(backward, start) if phases[i] == FORWARD), 0)  # the second micro-batch begins
    for number in range(num_batches, 0, -1):
        for event in events[:start] if not last else events[last:start] if number == 1 else events[:last]:
            clock.take(event)
    begun = clock.finish()
    for event in events[start:]:
        clock.take(event)
    return clock.result(begun)


class _Core:
    """Takes the events of a step in order, as a CPU does: collectives take the time of the core that computes; on a
    slow network, bytes travel beside."""

    def __init__(self, device: Device, network: Network, is_offloaded: bool, is_compiled: bool, keeps_spans: bool):
        self._device, self._network, self._is_offloaded, self._keeps_spans = device, network, is_offloaded, keeps_spans
        self._is_compiled = is_compiled
        self._now = 0.0  # when what computes is free
        self._sent = 0.0  # when the network is free
        self._host = self._compute = self._communication = self._exposed = self._flops = self._peak_seconds = 0.0
        self._ends: dict[int, float] = {}  # of collectives that nobody has waited for
        self._spans: list[Span] = []

    def take(self, event: StepEvent) -> None:
        if isinstance(event, Operation):
            if event.flops and not event.is_repeated and event.phase != STEP:
                self._flops += event.flops
                peak = self._device.peak.get(str(event.dtype).removeprefix("torch."))
                self._peak_seconds += event.flops / peak if peak else 0.0
            self._operation(event, self._is_compiled and event.phase != STEP)
        elif isinstance(event, Issue):
            self._issue(event)
        else:
            self._wait(event.number)

    def finish(self) -> float:
        """Wait for everything. Returns the time."""
        for number in [*self._ends]:
            self._wait(number)
        return self._now

    def _operation(self, event: Operation, is_compiled: bool) -> None:
        seconds, host = self._device.seconds(event, is_compiled), self._device.host_seconds(is_compiled)
        self._host += host
        self._compute += seconds
        self._now = self._note(COMPUTE, event.name, self._now, self._now + seconds + host)

    def _issue(self, event: Issue) -> None:
        curve = self._device.collectives.get(event.kind)
        seconds = curve.at(event.nbytes) if curve is not None and len(event.ranks) > 1 else 0.0
        self._host += self._device.collective
        self._communication += seconds
        self._now = self._note(event.kind, event.group, self._now, self._now + seconds + self._device.collective)
        travels = self._network.seconds(event.kind, event.nbytes, event.ranks, event.sent)
        self._sent = max(self._sent, self._now) + travels
        self._ends[event.number] = self._sent

    def _wait(self, number: int) -> None:
        self._wait_until(self._ends.pop(number, 0.0))

    def _wait_until(self, end: float) -> None:
        if end > self._now:
            self._exposed += end - self._now
            self._now = end

    def _note(self, lane: str, name: str, start: float, end: float) -> float:
        if self._keeps_spans and end > start:
            self._spans.append(Span(lane, name, start, end))
        return end

    def result(self, optimizer: float) -> Schedule:
        """Return the times of a step whose optimizer began at ``optimizer``, in seconds."""
        seconds = self.finish()
        mfu = self._peak_seconds / seconds if seconds else 0.0
        times = self._compute, self._communication, self._exposed, self._host, seconds - optimizer
        return Schedule(seconds, *times, self._flops, mfu, tuple(self._spans))


class _Streams(_Core):
    """An accelerator."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._queues: dict[tuple[int, ...], float] = {}
        self._first_stages: dict[int, str] = {}  # reductions that nobody has waited for, and their groups
        self._reduced: dict[str, float] = {}  # when the reduce-scatter of a group had ended
        self._link = 0.0  # when the connection to the host is free

    def _operation(self, event: Operation, is_compiled: bool) -> None:
        if self._is_offloaded and event.phase == STEP:  # the host computes
            seconds = event.nbytes / self._device.host_memory
            start = max(self._now, self._host)
            self._host = start + seconds
        else:
            seconds = self._device.seconds(event, is_compiled)
            self._host += self._device.host_seconds(is_compiled)
            start = max(self._now, self._host)
            busy, factor = max(self._queues.values(), default=0.0) - start, self._device.beside
            if busy > 0.0:
                seconds = min(seconds * factor, seconds + busy * (1 - 1 / factor))
        self._compute += seconds
        self._now = self._note(COMPUTE, event.name, start, start + seconds)

    def _issue(self, event: Issue) -> None:
        self._host += self._device.collective
        queue = tuple(event.ranks)
        start = max(self._now, self._host)
        shard = event.nbytes / len(queue)
        if self._is_offloaded and event.kind == CollectiveKind.ALL_GATHER:
            start = self._copy(event.group, shard, start)
        if event.kind == CollectiveKind.ALL_REDUCE:
            # The second stage of a hybrid reduction is issued on the stream of the first one. The events are those of
            # a CPU, which issues it when it has waited for the first stage.
            start = self._reduced.pop(event.group, start)
        seconds = self._network.seconds(event.kind, event.nbytes, event.ranks, event.sent)
        start = max(start, self._queues.get(queue, 0.0))
        end = self._note(event.kind, event.group, start, start + seconds)
        self._queues[queue] = self._ends[event.number] = end
        self._communication += seconds
        if event.kind == CollectiveKind.REDUCE_SCATTER:
            self._first_stages[event.number] = event.group
            if self._is_offloaded:
                self._copy(event.group, shard, end)

    def _copy(self, group: str, nbytes: float, start: float) -> float:
        start = max(start, self._link)
        self._link = self._note(LINK, group, start, start + nbytes / self._device.host_link)
        return self._link

    def _wait(self, number: int) -> None:
        group = self._first_stages.pop(number, None)
        if group is not None:
            self._reduced[group] = self._ends[number]
        super()._wait(number)

    def finish(self) -> float:
        super().finish()
        self._reduced.clear()
        self._wait_until(self._link)
        return self._now

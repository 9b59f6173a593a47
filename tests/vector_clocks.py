"""Streams without an accelerator: what is issued runs at once, and clocks tell what a device might have run in another
order, or at the same time.

``Clocks`` stands in for the module of a device (``torch.cuda``): it has ``Stream``, ``Event``, ``stream`` and
``current_stream``. Each stream has a vector clock: how far it has come, and how far each other stream had come, at
least, when it went on. Waiting is the element-wise maximum. While entered it watches

- each operator that reaches the dispatcher: which bytes of which storages it reads and writes, on which stream;
- collectives (``Clocks.transport``): they run on a stream of their own, which waits for the stream they were issued on;
  who waits for the work waits for that stream;
- memory: it belongs to the stream that was current when it was made, and may be given to something else as soon as it
  is freed, in that stream's order (the rule of CUDA's caching allocator; nothing calls ``record_stream``).

``faults`` has a line for each pair of accesses to the same bytes, of which one writes, that no waiting has put in an
order, and for each access that memory's next owner could overtake. (The clocks are those of C. Fidge, "Timestamps in
message-passing systems that preserve the partial ordering", 1988, and F. Mattern, "Virtual time and global states of
distributed systems", 1989.)

Memory that ``host_memory`` has made is on the host: the host's own operators on it are in the host's order, and the
host knows what it has synchronised with. All that is issued comes after what the host knows.

What it cannot see: kernels of other devices and libraries, what reaches no dispatcher, the order inside a collective.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compose._torch import is_wrapper
from fsdp_compose.core.comm.transport import Label, Transport, TransportRole, Work
from tests.internals import import_all, tensors_of

import_all()

Clock = dict[int, int]


class Stream:
    """Work in one order.

    Attributes:
        clock: how far it, and what it has waited for, has come.
        capture: the number of the capture that it takes part in; 0: of none.
    """

    def __init__(self, clocks: Clocks, name: str) -> None:
        self.number, self.name, self.clock, self.capture = len(clocks.streams), name, {}, 0
        self._clocks = clocks
        clocks.streams.append(self)

    def tick(self) -> None:
        """Something is issued, after what the host knows."""
        self._clocks.check_issue(self)
        _join(self.clock, self._clocks.host.clock)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1

    def has_seen(self, access: Access) -> bool:
        return self.clock.get(access.stream.number, 0) >= access.tick

    def wait_stream(self, other: Stream) -> None:
        if self._clocks.is_waiting():
            self._clocks.let_wait(self, other.clock, other.capture)

    def wait_event(self, event: Event) -> None:
        if self._clocks.is_waiting():
            self._clocks.let_wait(self, event.clock, event.capture)

    def record_event(self) -> Event:
        event = Event(self._clocks)
        event.record(self)
        return event

    def synchronize(self) -> None:
        if self._clocks.is_waiting():
            self._clocks.let_host_wait(self.clock)


class Event:
    """How far a stream had come."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks, self.clock, self.capture = clocks, {}, 0

    def record(self, stream: Stream) -> None:
        self.clock, self.capture = dict(stream.clock), stream.capture

    def synchronize(self) -> None:
        if self._clocks.is_waiting():
            self._clocks.let_host_wait(self.clock)


@dataclass
class Access:
    """Bytes from ``start`` to before ``stop`` of a storage."""

    stream: Stream
    tick: int
    start: int
    stop: int
    is_write: bool
    what: str

    def conflicts(self, other: Access) -> bool:
        return (self.is_write or other.is_write) and self.start < other.stop and other.start < self.stop

    def covers(self, other: Access) -> bool:
        return self.start <= other.start and other.stop <= self.stop and self.is_write >= other.is_write


@dataclass
class Memory:
    """What has happened to a storage since it was made."""

    owner: Stream
    is_host: bool
    dies: Any
    accesses: list[Access] = field(default_factory=list)


class Clocks(TorchDispatchMode):
    """A device with streams, as long as it is entered.

    Args:
        skips: the function of the package (its name and the kind of wait, as ``waits`` tells them) in which waits are
            left out: a mistake that ``faults`` should have.

    Attributes:
        faults: see above.
        capture_number: of the capture that is going on; 0: none is.
        waits: the functions in which something waits, with the kind of wait.
        accesses: how many were looked at.
    """

    def __init__(self, skips: str = "") -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.host, self.compute = Stream(self, "host"), Stream(self, "compute")
        self._current, self._skips = self.compute, skips
        self.faults: list[str] = []
        self.waits: set[str] = set()
        self.accesses = 0
        self._memory: dict[int, Memory] = {}
        self._communication: dict[dist.ProcessGroup, Stream] = {}
        self._is_paused = False
        self._captures = self.capture_number = 0

    # ---- what the package sees of a device

    def Stream(self, device: torch.device | None = None, priority: int = 0) -> Stream:
        frame = sys._getframe(1)
        return Stream(self, f"stream of {frame.f_code.co_qualname if hasattr(frame.f_code, 'co_qualname') else 'side'}")

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def is_waiting(self) -> bool:
        """Whether a wait of the calling function of the package takes place; notes it."""
        kind = sys._getframe(1).f_code.co_name
        frame = sys._getframe(2)
        while frame.f_back is not None and (
            f"fsdp_compose{'/'}" not in frame.f_code.co_filename or frame.f_code.co_name == "_wait_for_stream"
        ):
            frame = frame.f_back
        site = f"{kind} in {frame.f_code.co_name}"
        self.waits.add(site)
        return site != self._skips

    def let_wait(self, stream: Stream, clock: Clock, capture: int) -> None:
        """``stream`` waits for what had come as far as ``clock``, as part of a capture or not."""
        _join(stream.clock, clock)
        if capture != stream.capture:
            if capture and capture == self.capture_number:
                stream.capture = capture  # it takes part from here on
            else:
                self._fault(f"{stream.name} waits, {_about(stream.capture)}, for what was issued {_about(capture)}")

    def let_host_wait(self, clock: Clock) -> None:
        _join(self.host.clock, clock)
        if self.capture_number:
            self._fault("the host waits for the device during a capture")

    def check_issue(self, stream: Stream) -> None:
        if self.capture_number and stream.capture != self.capture_number and stream is not self.host:
            self._fault(f"something is issued on {stream.name} during a capture in which it takes no part")

    @contextmanager
    def captured(self) -> Iterator[None]:
        """What is issued is captured as a graph (CUDA's): ``faults`` gets what such a capture forbids. Streams take
        part that wait for one that does; all must have been waited for, in the end, by the one that began."""
        self._captures += 1
        self.capture_number = self.compute.capture = self._captures
        before = [dict(stream.clock) for stream in self.streams]
        yield
        for stream in self.streams:
            had = before[stream.number].get(stream.number, 0) if stream.number < len(before) else 0
            now = stream.clock.get(stream.number, 0)
            if stream.capture and now > had and self.compute.clock.get(stream.number, 0) < now:
                self._fault(f"the capture ends before it has waited for {stream.name}")
            stream.capture = 0
        self.capture_number = 0

    def is_current_stream_capturing(self) -> bool:
        return self._current.capture != 0

    def transport(self, inner: Transport, _: TransportRole) -> Transport:
        """Collectives of ``inner`` on a stream of their own."""
        return _Clocked(inner, self)

    # ---- watching

    def __enter__(self) -> Clocks:
        self._stack = ExitStack()
        for module in [*sys.modules.values()]:
            if getattr(module, "__name__", "").startswith("fsdp_compose") and hasattr(module, "streams_of"):
                self._stack.enter_context(mock.patch.object(module, "streams_of", lambda device: self))
            if getattr(module, "__name__", "").startswith("fsdp_compose") and hasattr(module, "host_memory"):
                made = self._host_memory(module.host_memory)
                self._stack.enter_context(mock.patch.object(module, "host_memory", made))
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            if nbytes != storage.nbytes():
                self._end(storage._cdata, "is freed")
            result = resize(storage, nbytes)
            if nbytes:
                self._begin(storage)
            return result

        self._stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _host_memory(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any) -> torch.Tensor:
            memory = make(*args)
            self._begin(memory.untyped_storage(), is_host=True)
            return memory

        return made

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs now is not looked at."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _begin(self, storage: torch.UntypedStorage, is_host: bool = False) -> Memory:
        number = storage._cdata
        dies = weakref.finalize(storage, self._end, number, "dies")
        dies.atexit = False
        memory = self._memory[number] = Memory(self.host if is_host else self._current, is_host, dies)
        return memory

    def _end(self, number: int, how: str) -> None:
        """A storage's memory goes back to its owner."""
        memory = self._memory.pop(number, None)
        if memory is None:
            return
        memory.dies.detach()
        for access in memory.accesses:
            if not memory.owner.has_seen(access) and not self.host.has_seen(access):
                self._fault(f"{_text(access)}: its memory {how}, and {memory.owner.name} has not waited for that")

    def touch(self, tensor: torch.Tensor, is_write: bool, what: str, stream: Stream | None = None) -> None:
        """Bytes of ``tensor`` are read or written by what has just been issued on ``stream``."""
        if tensor.layout != torch.strided or not tensor.numel() or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata) or self._begin(storage)
        stream = stream or self._current
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
        new = Access(stream, stream.clock.get(stream.number, 0), start, start + extent * size, is_write, what)
        self.accesses += 1
        kept = []
        for old in memory.accesses:
            is_seen = stream.has_seen(old)
            if old.conflicts(new) and not is_seen:
                self._fault(f"{_text(old)} and {_text(new)} are in no order")
            elif not (is_seen and new.covers(old)):
                kept.append(old)
        memory.accesses = [*kept, new]

    def _fault(self, line: str) -> None:
        if line not in self.faults:
            self.faults.append(line)
        if self._skips:  # one is enough: it has been seen what the mistake leads to
            self._is_paused = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of(*args, *kwargs.values())
        if any(map(is_wrapper, given)):
            return NotImplemented  # what the subclass does inside comes here again
        name = func._schema.name
        if self._is_paused or func.is_view or name.startswith("c10d::") or name in _ABOUT_MEMORY:
            return func(*args, **kwargs)
        if self.capture_number and name in _READ_BY_HOST:
            self._fault(f"{name} during a capture: the host would wait for the device")
        known = {id(item) for item in given}
        stream = self._stream_of(given)
        stream.tick()
        for argument, value in zip(func._schema.arguments, args):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            self._touch_all(value, is_write, name, stream)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                is_write = argument.alias_info is not None and argument.alias_info.is_write
                self._touch_all(kwargs[argument.name], is_write, name, stream)
        if name == "aten::copy_" and stream is not self.host and not any(args[2:]):
            target = self._memory.get(args[0].untyped_storage()._cdata)
            if target and target.is_host:  # unless asked not to, such a copy returns when it has ended
                self.let_host_wait(stream.clock)
        result = func(*args, **kwargs)
        for made in tensors_of(result):
            if id(made) not in known:
                if stream is self.host and made.layout == torch.strided:
                    self._begin(made.untyped_storage(), is_host=True)
                self.touch(made, name not in _EMPTY, name, stream)
        return result

    def _touch_all(self, value: Any, is_write: bool, name: str, stream: Stream) -> None:
        for leaf in tensors_of(value):
            self.touch(leaf, is_write, name, stream)

    def _stream_of(self, given: list[torch.Tensor]) -> Stream:
        """That of an operator: the host's, if all it has is there (but numbers)."""
        dense = [item for item in given if item.layout == torch.strided]
        tensors = [item for item in dense if item.dim()] or dense
        memories = [self._memory.get(item.untyped_storage()._cdata) for item in tensors]
        return self.host if memories and all(item and item.is_host for item in memories) else self._current

    def collective(
        self, group: dist.ProcessGroup, what: str, reads: torch.Tensor, writes: torch.Tensor, run: Callable[[], Work]
    ) -> Work:
        stream = self._communication.get(group)
        if stream is None:
            stream = self._communication[group] = Stream(self, "collectives")
        self.let_wait(stream, self._current.clock, self._current.capture)
        stream.tick()
        self.touch(reads, False, what, stream)
        self.touch(writes, True, what, stream)
        with self.paused():
            run().wait()
        return _ClockedWork(self, dict(stream.clock), stream.capture)


_ABOUT_MEMORY = {"aten::set_", "aten::set_data", "aten::resize_", "aten::_has_compatible_shallow_copy_type"}
_READ_BY_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}


class _ClockedWork:
    def __init__(self, clocks: Clocks, clock: Clock, capture: int) -> None:
        self._clocks, self._clock, self._capture = clocks, clock, capture

    def wait(self) -> None:
        if self._clocks.is_waiting():
            self._clocks.let_wait(self._clocks.current_stream(), self._clock, self._capture)


class _Clocked(Transport):
    """Transport ``inner``, as on a stream of its own."""

    name = "clocked"

    def __init__(self, inner: Transport, clocks: Clocks) -> None:
        super().__init__(inner.group)
        self._inner, self._clocks = inner, clocks

    def among(self, peers: dist.ProcessGroup) -> Transport:
        return _Clocked(self._inner.among(peers), self._clocks)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        run = lambda: self._inner.all_gather(whole, shard, label)  # noqa: E731
        return self._clocks.collective(self.group, f"all-gather of {label}", shard, whole, run)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        run = lambda: self._inner.reduce_scatter(shard, whole, is_average, label)  # noqa: E731
        return self._clocks.collective(self.group, f"reduce-scatter of {label}", whole, shard, run)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        run = lambda: self._inner.all_reduce(tensor, is_average, label)  # noqa: E731
        return self._clocks.collective(self.group, f"all-reduce of {label}", tensor, tensor, run)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        num_moved: int,
        label: Label,
    ) -> Work:
        run = lambda: self._inner.all_to_all(received, sent, received_sizes, sent_sizes, num_moved, label)  # noqa: E731
        return self._clocks.collective(self.group, f"all-to-all of {label}", sent, received, run)

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Any, is_everywhere: bool, label: Label
    ) -> None:
        with self._clocks.paused():
            self._inner.gather(whole, part, ranges, is_everywhere, label)

    def skip(self, nbytes: int, label: Label) -> None:
        self._inner.skip(nbytes, label)


def _join(clock: Clock, other: Clock) -> None:
    for number, tick in other.items():
        if clock.get(number, 0) < tick:
            clock[number] = tick


def _about(capture: int) -> str:
    return f"in capture {capture}" if capture else "outside captures"


def _text(access: Access) -> str:
    return f"{access.what} ({'writes' if access.is_write else 'reads'} on {access.stream.name})"

"""Memory that the ranks of one machine share: sums use it instead of messages through gloo.

``messages`` is the only caller. A rank copies what it sends into memory of its own that the other ranks can map, and
sends a descriptor of where it is; they read it there. A message would instead be copied into the kernel and out again,
piece by piece. The other ranks receive the memory with the first note that mentions it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch

from ...core.comm.failure import PartnerGone

# ---- Short notes between two processes on one machine, over a local socket instead of messages through gloo.
#
# Each gloo message takes three trips (both sides announce that they are ready first). And while one thread writes,
# holding the connection's lock, gloo's own thread spins. A note is one write and one read.
#
# A note may carry a file descriptor. The system keeps what was sent until it is read, even after the sender has ended.
# Notes of several collectives may be in flight; tags tell them apart.


_FORMAT = struct.Struct("=4q")
_PERIOD = 0.2  # seconds between checks whether waiting still makes sense

Descriptor = tuple[int, int, int]
Failure = Callable[[], str]
"""Return why nothing more will come, if that is known; else an empty string."""


class Connection:
    """The notes between this process and another."""

    __slots__ = ("_arrived", "_poll", "_socket", "files")

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._poll = connected, select.poll()
        connected.setblocking(False)
        self._poll.register(connected, select.POLLIN)
        self._arrived: dict[int, Descriptor] = {}  # by tag
        self.files: dict[int, int] = {}  # file descriptors received with notes, by the first number of the note

    def try_to_send(self, tag: int, note: Descriptor, file: int = -1) -> bool:
        """Send a note if there is room, and return whether it was sent. ``file``: a descriptor; -1 for none. Raises
        RuntimeError if the other process has ended."""
        try:
            socket.send_fds(self._socket, [_FORMAT.pack(tag, *note)], [] if file < 0 else [file])
        except BlockingIOError:
            return False
        except OSError as error:
            raise PartnerGone(f"the process of the other rank has ended: {error}") from error
        return True

    def wait(self, tag: int, limit: timedelta, failure: Failure) -> Descriptor:
        """Wait for the note with this tag, and return it. Raises RuntimeError if it did not arrive."""
        deadline = time.monotonic() + limit.total_seconds()
        while not (tag in self._arrived or (self.read() and tag in self._arrived)):
            left = deadline - time.monotonic()
            if not self._poll.poll(max(0, min(left, _PERIOD)) * 1e3):
                if message := failure():
                    raise PartnerGone(message)
                if left <= 0:
                    raise PartnerGone(f"the other rank did not arrive within {limit.total_seconds():g} s")
        return self._arrived.pop(tag)

    def read(self) -> bool:
        """Read the notes that have arrived, and return whether there were any. Raises RuntimeError if there are none,
        and the other process has ended."""
        for count in range(1 << 30):
            try:
                data, files, _, _ = socket.recv_fds(self._socket, _FORMAT.size, 1)
            except BlockingIOError:
                return count > 0
            except OSError as error:
                raise PartnerGone(f"the process of the other rank has ended: {error}") from error
            if not data:
                if count:
                    return True
                raise PartnerGone("the process of the other rank has ended")
            tag, *note = _FORMAT.unpack(data)
            self._arrived[tag] = (note[0], note[1], note[2])
            if files:
                self.files[note[0]] = files[0]
        raise AssertionError

    def __del__(self) -> None:
        for file in self.files.values():
            os.close(file)
        self._socket.close()


def connect(number: int, rank: int) -> Connection:
    """Connect, as ``rank``, to the rank with this number. Raises OSError if it is not on this machine."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.connect(_address(number))
        connected.send(rank.to_bytes(8, "little"))
    except OSError:
        connected.close()
        raise
    return Connection(connected)


def _address(number: int) -> str:
    return f"\0fsdp_compose-{number:x}"  # the leading zero: an abstract address, without a name in a file system


# ---- The memory
#
# Note [When memory is free again]. The other ranks may read what a rank has sent until each of them has ended that
# collective. So each rank publishes, in a page of its own, the number up to which it has ended all collectives. Memory
# used for a later one is not reused yet; if none is free, more is allocated.


_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_PAGE_TAG = 0  # tag of the first notes; tags of collectives are larger
_ROOM_PERIOD = 1e-3  # seconds between checks whether there is room for a note


class _Mapped:
    """One piece of shared memory, this rank's or another's."""

    __slots__ = ("__weakref__", "bytes", "file", "number", "words")

    def __init__(self, file: int) -> None:
        memory = mmap.mmap(file, os.fstat(file).st_size)
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.words = memoryview(memory)[:_PAGE].cast("q")  # its beginning, as integers
        self.file = file  # its descriptor until all other ranks have it, then -1
        self.number = 0  # of the collective that used it last

    @staticmethod
    def new(nbytes: int) -> _Mapped:
        # Without a name in a file system, it vanishes with the last process that maps it, however that process ends.
        file = os.memfd_create("fsdp_compose")
        os.ftruncate(file, -(-nbytes // _PAGE) * _PAGE)
        return _Mapped(file)

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __del__(self) -> None:
        if getattr(self, "file", -1) >= 0:
            os.close(self.file)


class SharedMemory:
    """The memory that one rank of a process group shares with the others, all on one machine.

    Collectives have increasing numbers, the same on every rank.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._others = rank, [other for other in range(size) if other != rank]
        # By this number the other ranks find this one: whoever has it is on this machine and was told.
        self.introduction = secrets.randbits(62)
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # until all of them have connected
        self._door.bind(_address(self.introduction))
        self._door.listen(128)
        self._channels: dict[int, Connection] = {}
        self._page = _Mapped.new(_PAGE)  # publishes the number up to which all collectives are ended
        self._own: dict[int, _Mapped] = {}
        self._pages: list[_Mapped] = []
        self._theirs: dict[tuple[int, int], _Mapped] = {}
        self._under_way: dict[int, None] = {}
        self._last = 0
        self._fence = threading.Lock()

    # ---- Setup, in this order

    def connect_to(self, introductions: Iterable[tuple[int, int]]) -> bool:
        """Connect to all lower ranks, by the numbers they gave. Returns whether all ranks are on this host."""
        # It fails between machines, and between containers with separate networks.
        with suppress(OSError):
            for rank, number in introductions:
                if rank < self._rank:
                    self._channels[rank] = connect(number, self._rank)
            return True
        return False

    def begin(self, limit: timedelta, failure: Failure) -> None:
        """Accept the connections of all higher ranks, and exchange pages. Raises RuntimeError if one has ended."""
        try:
            self._door.settimeout(limit.total_seconds())
            while len(self._channels) < len(self._others):
                connected, _ = self._door.accept()
                connected.settimeout(limit.total_seconds())
                rank = int.from_bytes(connected.recv(8), "little")
                self._channels[rank] = Connection(connected)
        except OSError as error:
            raise PartnerGone(f"the process of another rank has ended: {error}") from error
        self._door.close()
        for channel in self._channels.values():
            channel.try_to_send(_PAGE_TAG, (0, 0, 0), self._page.file)
        for channel in self._channels.values():
            channel.wait(_PAGE_TAG, limit, failure)
            self._pages.append(_Mapped(channel.files.pop(0)))
            self._pages[-1].close()

    # ---- Collectives

    def put(
        self, number: int, tag: int, sent: Sequence[tuple[int, torch.Tensor]], limit: timedelta, failure: Failure
    ) -> None:
        """Let each rank read what is sent to it in collective ``number``, from now on. ``tag``: the tag of the notes.
        Raises RuntimeError if one of the processes has ended."""
        places: dict[tuple[int, int], int] = {}
        nbytes = 0
        for _, item in sent:
            if (item.data_ptr(), item.nbytes) not in places:
                places[item.data_ptr(), item.nbytes] = nbytes
                nbytes += -(-item.nbytes // _ALIGNMENT) * _ALIGNMENT
        serial, memory = self._free(nbytes)
        memory.number = number
        self._last = number
        self._under_way[number] = None
        copied = set[int]()
        for rank, item in sent:
            start = places[item.data_ptr(), item.nbytes]
            if start not in copied:
                copied.add(start)
                memory.bytes[start : start + item.nbytes].view(item.dtype).copy_(item)
            note = serial, start, item.nbytes
            if not self._channels[rank].try_to_send(tag, note, memory.file):
                self._send_later(rank, tag, note, memory.file, time.monotonic() + limit.total_seconds(), failure)
        memory.close()

    def _send_later(self, rank: int, tag: int, note: Descriptor, file: int, deadline: float, failure: Failure) -> None:
        """Wait for room, and send the note."""
        while not self._channels[rank].try_to_send(tag, note, file):
            # The other ranks may be waiting for room too.
            for channel in self._channels.values():
                channel.read()
            if message := failure():
                raise PartnerGone(message)
            if time.monotonic() > deadline:
                raise PartnerGone(f"rank {rank} does not read its notes")
            time.sleep(_ROOM_PERIOD)

    def wait(self, tag: int, rank: int, limit: timedelta, failure: Failure) -> Descriptor:
        """Wait for the note of a rank; see ``Connection.wait``."""
        return self._channels[rank].wait(tag, limit, failure)

    def read(self, rank: int, note: Descriptor, dtype: torch.dtype) -> torch.Tensor:
        """The elements that a rank's note refers to; valid until this collective is ended."""
        serial, start, nbytes = note
        memory, files = self._theirs.get((rank, serial)), self._channels[rank].files
        if memory is None:
            memory = self._theirs[rank, serial] = _Mapped(files.pop(serial))
            memory.close()
        return memory.bytes[start : start + nbytes].view(dtype)

    def end(self, number: int) -> None:
        """Declare that this rank reads nothing more of what was sent in that collective."""
        if self._under_way.pop(number, 0) is None:
            ended = min(self._under_way, default=self._last + 1) - 1
            with self._fence:  # all reads come before the second one, on every processor
                pass
            with self._fence:
                self._page.words[0] = ended

    def _free(self, nbytes: int) -> tuple[int, _Mapped]:
        """Return memory of at least ``nbytes`` that no rank reads, with its number."""
        # What a rank has not ended yet, it may still read: see Note [When memory is free again].
        ended = min(page.words[0] for page in self._pages)
        fitting = [item for item in self._own.items() if item[1].number <= ended and item[1].bytes.numel() >= nbytes]
        if fitting:
            return min(fitting, key=lambda item: item[1].bytes.numel())
        serial = len(self._own) + 1
        self._own[serial] = _Mapped.new(nbytes)
        return serial, self._own[serial]

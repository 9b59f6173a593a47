"""Short notes between two processes of one machine, by a local socket: in the place of messages through gloo.

Each message of gloo's takes three on the way (both sides tell that they are ready), and while one thread writes, with
the lock of the connection, the thread that looks after connections spins. A note is one write and one read.

A note may bring a file descriptor. The system keeps what was sent until it is read, also when the sender has ended.
Notes of several collectives may be under way, and are told apart by their tags.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta

_FORMAT = struct.Struct("=4q")
_PERIOD = 0.2  # seconds between looks at whether waiting is of any use

Note = tuple[int, int, int]
Failure = Callable[[], str]
"""Why nothing will come any more, as far as is known; empty if nothing is."""


class Channel:
    """The notes between this process and another one.

    Attributes:
        files: descriptors that notes have brought, by their first number.
    """

    __slots__ = ("_arrived", "_poll", "_socket", "files")

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._poll = connected, select.poll()
        connected.setblocking(False)
        self._poll.register(connected, select.POLLIN)
        self._arrived: dict[int, Note] = {}  # by tag
        self.files: dict[int, int] = {}

    def try_to_send(self, tag: int, note: Note, file: int = -1) -> bool:
        """Whether there is room for it, and it is sent. ``file``: a descriptor, -1 for none.

        Raises:
            RuntimeError: the other process has ended.
        """
        try:
            socket.send_fds(self._socket, [_FORMAT.pack(tag, *note)], [] if file < 0 else [file])
        except BlockingIOError:
            return False
        except OSError as error:
            raise RuntimeError(f"the process of the other rank has ended: {error}") from error
        return True

    def wait(self, tag: int, limit: timedelta, failure: Failure) -> Note:
        """The note of a tag, when it has arrived.

        Raises:
            RuntimeError: it has not.
        """
        deadline = time.monotonic() + limit.total_seconds()
        while not (tag in self._arrived or (self.read() and tag in self._arrived)):
            left = deadline - time.monotonic()
            if not self._poll.poll(max(0, min(left, _PERIOD)) * 1e3):
                if message := failure():
                    raise RuntimeError(message)
                if left <= 0:
                    raise RuntimeError(f"the other rank did not come within {limit.total_seconds():g} s")
        return self._arrived.pop(tag)

    def read(self) -> bool:
        """Take in the notes that have arrived; whether there were any.

        Raises:
            RuntimeError: there is none, and the other process has ended.
        """
        for count in range(1 << 30):
            try:
                data, files, _, _ = socket.recv_fds(self._socket, _FORMAT.size, 1)
            except BlockingIOError:
                return count > 0
            except OSError as error:
                raise RuntimeError(f"the process of the other rank has ended: {error}") from error
            if not data:
                if count:
                    return True
                raise RuntimeError("the process of the other rank has ended")
            tag, *note = _FORMAT.unpack(data)
            self._arrived[tag] = (note[0], note[1], note[2])
            if files:
                self.files[note[0]] = files[0]
        raise AssertionError

    def __del__(self) -> None:
        for file in self.files.values():
            os.close(file)
        self._socket.close()


class Door:
    """Where the others find this process, until all have come.

    Attributes:
        number: a part of its address, which no one can guess: so whoever has it is on this machine, and was told.
    """

    __slots__ = ("_listener", "number")

    def __init__(self) -> None:
        self.number = secrets.randbits(62)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_address(self.number))
        self._listener.listen(128)

    def accept(self, limit: timedelta) -> tuple[int, Channel]:
        """The next rank that has come, by ``come``. Raises OSError."""
        self._listener.settimeout(limit.total_seconds())
        connected, _ = self._listener.accept()
        connected.settimeout(limit.total_seconds())
        return int.from_bytes(connected.recv(8), "little"), Channel(connected)

    def close(self) -> None:
        self._listener.close()


def come(number: int, rank: int) -> Channel:
    """Come, as a rank, to the door of a number. Raises OSError if it is not on this machine."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.connect(_address(number))
        connected.send(rank.to_bytes(8, "little"))
    except OSError:
        connected.close()
        raise
    return Channel(connected)


def _address(number: int) -> str:
    return f"\0fsdp_compose-{number:x}"  # of the zero: without a name in a file system

"""Processes that write asynchronous saves, forked.

An interpreter that begins takes seconds to import torch, longer than most of what is tried. So ranks fork their writers
from a process that has. Programs that are started as users start them do not."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess

from fsdp_compose.checkpoint import background, writer

start_as_users_do = background.start_writer
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([writer.__name__])


class ForkedWriter:
    """What ``Popen`` has of a process."""

    def __init__(self, channel: socket.socket) -> None:
        self._process = _forks.Process(target=_write, args=(channel, writer._HEARING))
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("writer", timeout or 0)


def _write(channel: socket.socket, hearing: float) -> None:
    os.setsid()
    writer._HEARING = hearing  # which a test may have made shorter
    writer.main(channel.detach())


def fork_writers() -> None:
    """From now on, in this process."""
    background.start_writer = ForkedWriter  # type: ignore[assignment]

"""Processes that start fast and are sure to end.

Importing torch is what starting a process costs, so processes are forked from a server that has imported it, and
whatever modules ``preload`` names, and has run nothing."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

FORKS = multiprocessing.get_context("forkserver")
_preloaded = ["torch", "torch._dynamo"]  # the first checkpoint() of a process imports dynamo


def preload(module: str, *, first: bool = False) -> None:
    """Let processes find a module imported when they start.

    Args:
        module: its name. What it does on import must not start threads.
        first: before the others.
    """
    if module not in _preloaded:
        _preloaded.insert(0 if first else len(_preloaded), module)


def preload_nothing() -> None:
    """Let each process import what it needs."""
    _preloaded.clear()


def start(output: Path, target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Call ``target(*arguments)``, which can be pickled, in another process, which prints to the file ``output``. To be
    ended by ``end``. The first call starts the server, with the environment and the modules that there are then."""
    environment = {  # of the server, which passes it on
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",  # also because a process with threads must not be forked
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    FORKS.set_forkserver_preload(_preloaded)
    process = FORKS.Process(target=_main, args=(str(output), target, *arguments))
    with mock.patch.dict(os.environ, environment):
        process.start()
    return process


def _main(output: str, target: Callable[..., None], *arguments: Any) -> None:
    os.setsid()  # Ctrl-C is for the process that started this one, and what this one starts is ended together with it
    with open(output, "wb") as file:
        for standard in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), standard.fileno())
    if hasattr(os, "SCHED_BATCH"):
        # A message wakes a thread of another rank. Were it to run at once, in the place of the thread that sends and
        # holds gloo's lock, this rank's own loop would spin until that thread runs again, for milliseconds.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.freeze()  # what importing torch has left is not looked at by every collection
    target(*arguments)


def end(process: ForkServerProcess) -> None:
    """End ``process``, and what it has started, if it runs."""
    if process.pid is not None and process.exitcode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no session yet, or ends by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()

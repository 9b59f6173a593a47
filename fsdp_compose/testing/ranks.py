"""Run functions on several ranks of a gloo process group, with one readable failure if they fail.

For tests, and for measurements of a machine. The processes are forked from a server that has imported torch, so
they start fast, and they always end. A single process can also simulate one rank of many (``simulated_ranks``).

``Ranks`` starts its processes once, sends each its tasks through a pipe, and reads reports back. The process that
starts them never joins a process group. If one rank fails, all of these ranks are ended, and none is reused."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from .._arguments import checked
from .._torch import fake_store, set_group_timeout

# ---- Processes that start fast and always end.
#
# Importing torch dominates the start of a process, so processes are forked from a server that has imported torch and
# the modules named by ``preload``, and has run nothing else.


FORKS = multiprocessing.get_context("forkserver")
_preloaded = ["torch", "torch._dynamo"]  # the first checkpoint() of a process imports dynamo


@checked()
def preload(module: str, *, first: bool = False) -> None:
    """Import a module once, in the server from which the processes of ranks are forked.

    Args:
        module: its name. Importing it must not start threads.
        first: import it before the others.
    """
    if module not in _preloaded:
        _preloaded.insert(0 if first else len(_preloaded), module)


def start(output: Path, target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Call ``target(*arguments)``, which must be picklable, in another process that prints to the file ``output``.

    End it by ``end``. The first call starts the server, with the current environment and preloaded modules.
    """
    environment = {  # the server's, which its processes inherit
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and isinstance(path, str)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",  # also because a process with threads must not be forked
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    FORKS.set_forkserver_preload(_preloaded)
    process = FORKS.Process(target=_process_main, args=(str(output), target, *arguments))
    # Ctrl-C goes to all processes of a terminal. The server and its processes inherit that it is blocked; the process
    # that tracks resources would unblock it if it were started in between.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with mock.patch.dict(os.environ, environment):
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return process


def _process_main(output: str, target: Callable[..., None], *arguments: Any) -> None:
    os.setsid()  # Ctrl-C does not reach this process, and ``end`` ends it together with its children
    if not Path(output).parent.is_dir():  # the start was interrupted, and nobody knows this process
        os._exit(1)
    with open(output, "wb") as file:
        for standard in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), standard.fileno())
    if hasattr(os, "SCHED_BATCH"):
        # A message wakes a thread of another rank. If that thread preempted the sender, which holds gloo's lock, this
        # rank's own loop would spin for milliseconds until the sender runs again.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.freeze()  # keeps collections from scanning the objects of torch's import
    target(*arguments)


def end(process: ForkServerProcess) -> None:
    """End ``process`` and its children, if it runs."""
    if process.pid is not None and process.exitcode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no session yet, or has just ended
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


# ---- ``Ranks``


START_TIMEOUT = 90.0  # seconds for ranks to import torch and form their process group
GRACE = 2.0  # seconds that the other ranks get after the first failure, to report their own
GROUP_TIMEOUT = 600.0  # gloo's; far beyond the timeouts of functions, so that a hang is reported with stacks
_END = b""  # sent instead of a task
_MAX_OUTPUT = 20_000  # characters of one rank's output or stacks that a failure quotes

Hook = Callable[[], None]


class RanksFailed(AssertionError):
    """Some ranks failed or did not finish in time. The text has a section for each rank: its traceback or its current
    stacks, and its output."""


class _Report(NamedTuple):
    """A report from a rank. ``is_last`` is False between the end of the function and the barrier after it."""

    error: str = ""
    result: Any = None
    is_last: bool = True


class _Rank:
    """A rank's process, the pipe to it, and the two files that it writes."""

    def __init__(self, rank: int, directory: str, *arguments: Any) -> None:
        self.rank = rank
        self.output = Path(directory, f"rank{rank}.output")
        self.stacks = Path(directory, f"rank{rank}.stacks")
        self.stacks.touch()
        self._num_seen = 0
        self.connection, theirs = FORKS.Pipe()
        with theirs:
            self.process = start(self.output, _main, theirs, rank, str(self.stacks), *arguments)

    def receive(self) -> _Report:
        try:
            report: _Report = self.connection.recv()
            return report
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode or 0
            return _Report(f"the process exited, {f'signal {-code}' if code < 0 else f'exit code {code}'}\n")

    def new_output(self) -> str:
        """Return the text that the rank has printed since the last call."""
        text = self.output.read_bytes()[self._num_seen :]
        self._num_seen += len(text)
        return text.decode(errors="replace")[-_MAX_OUTPUT:]


@checked()
class Ranks:
    """Runs functions on the ranks of one gloo process group on this machine. It owns the ranks' processes, their store
    and the files they write.

    Args:
        num_ranks: the number of ranks.
        pg_timeout: timeout of collectives, in seconds.
        before: called on each rank before each function; must be picklable.
        after: called on each rank after the barrier that follows each successful function.

    Raises:
        RanksFailed: the ranks could not be started.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        pg_timeout: float = GROUP_TIMEOUT,
        before: Hook | None = None,
        after: Hook | None = None,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fsdp_compose_ranks_", ignore_cleanup_errors=True)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: a free one
        self.ranks: list[_Rank] = []
        self.is_usable = True
        rest = num_ranks, self._store.port, pg_timeout, before, after
        try:
            for rank in range(num_ranks):
                self.ranks.append(_Rank(rank, self._directory.name, *rest))
            self._collect("start of the ranks", START_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 60.0,
        name: str | None = None,
        barrier_after: bool = True,
    ) -> list[Any]:
        """Call ``function(*arguments)`` on every rank.

        Args:
            function: a picklable function (at the top level of a module) with a picklable result.
            timeout: seconds until the ranks are ended and their Python stacks are reported.
            name: the name in the error; default: the function's.
            barrier_after: run a barrier afterwards, so that unmatched collectives fail here and not in the next
                function.

        Returns:
            The result of each rank, in rank order.

        Raises:
            RanksFailed: a rank raised (including ``SystemExit``), died or did not finish in time. No rank can be used
                afterwards.
        """
        if not self.is_usable:
            raise RanksFailed("these ranks have ended, or one of them failed earlier: start new ones")
        task = pickle.dumps((function, arguments, barrier_after))
        self.is_usable = False  # also after KeyboardInterrupt: the ranks are then still running the function
        try:
            for rank in self.ranks:
                rank.new_output()  # skip output from between functions
            self._send(task)
            results = self._collect(name or function.__qualname__, timeout)
            self.is_usable = True
        finally:
            if not self.is_usable:
                self.kill()
        return results

    def close(self) -> None:
        """Let idle ranks pass a last barrier and exit; end ranks that do not."""
        if self.is_usable:
            self._send(_END)
            for rank in self.ranks:
                rank.connection.poll(5)  # becomes readable when the process ends
        self.kill()

    def kill(self) -> None:
        """End all ranks now."""
        self.is_usable = False
        for rank in self.ranks:
            end(rank.process)
            rank.connection.close()
        self._directory.cleanup()

    def _send(self, task: bytes) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ConnectionError):  # a rank that is gone is reported by _collect
                rank.connection.send_bytes(task)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """Wait for the last report of each rank. Return the results, or raise RanksFailed."""
        deadline = time.monotonic() + timeout
        pending = {rank.connection: rank for rank in self.ranks}
        have_returned: set[int] = set()
        errors: dict[int, str] = {}
        results: dict[int, Any] = {}
        while pending and (ready := wait([*pending], max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                report = rank.receive()
                if not report.is_last:
                    have_returned.add(rank.rank)
                    continue
                del pending[rank.connection]
                results[rank.rank] = report.result
                if report.error:
                    errors[rank.rank] = report.error
                    deadline = min(deadline, time.monotonic() + GRACE)
        if not pending and not errors:
            return [results[rank.rank] for rank in self.ranks]
        unfinished = sorted({rank.rank for rank in pending.values()} - have_returned)
        if errors:
            outcome = f"failed on ranks {sorted(errors)} of {len(self.ranks)}"
        elif unfinished:
            outcome = f"ranks {unfinished} of {len(self.ranks)} did not finish within {timeout:g} s"
        else:
            outcome = "every rank finished, but the barrier afterwards hangs: some collectives did not match"
        for number, stacks in _stacks_of([rank for rank in self.ranks if rank.rank not in errors]).items():
            state = "finished, waiting for the others" if number in have_returned else "still running"
            errors[number] = f"{state}; its Python stacks:\n{stacks}"
        failure = [f"{what}: {outcome}"]
        for rank in self.ranks:
            failure.append(f"{f' rank {rank.rank} ':=^100}\n{errors[rank.rank].rstrip()}")
            if output := rank.new_output().rstrip():
                failure.append(f"{f' output of rank {rank.rank} ':-^100}\n{output}")
        raise RanksFailed("\n".join(failure))


@checked()
def run_on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``function(*arguments)`` on the ranks of a gloo process group, each in its own process on this machine.

    To run several functions, use ``Ranks``, which keeps the processes and is faster.

    Args:
        num_ranks: the number of ranks.
        function: a picklable function (at the top level of a module) with a picklable result.
        timeout: seconds until the ranks are ended.

    Returns:
        The result of each rank, in rank order.

    Raises:
        RanksFailed: a rank raised, died or did not finish in time. No process is left behind.
    """
    with Ranks(num_ranks) as ranks:
        return ranks.run(function, *arguments, timeout=timeout)


def _stacks_of(ranks: Sequence[_Rank]) -> dict[int, str]:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
    time.sleep(0.5)  # faulthandler writes in the signal handler: microseconds once the process is scheduled
    return {rank.rank: rank.stacks.read_text(errors="replace")[-_MAX_OUTPUT:] for rank in ranks}


# ---- On the ranks


def _main(
    connection: Connection,
    rank: int,
    stacks: str,
    num_ranks: int,
    port: int,
    pg_timeout: float,
    before: Hook | None,
    after: Hook | None,
) -> None:
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)
    tasks = _received_in_background(connection)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    dist.barrier()
    set_group_timeout(timedelta(seconds=pg_timeout))  # only now: ranks may start further apart than a test may wait
    connection.send(_Report())
    while (task := tasks.get()) != _END:
        connection.send(_run(task, connection, before, after))
    dist.barrier()
    os._exit(0)  # nothing is buffered; taking gloo's threads down at interpreter exit aborts now and then


def _received_in_background(connection: Connection) -> queue.SimpleQueue[bytes]:
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                tasks.put(connection.recv_bytes())
        # The parent is gone, which the main thread would not notice while it is stuck in a collective.
        os._exit(1)

    threading.Thread(target=receive, name="receive tasks", daemon=True).start()
    return tasks


def _run(pickled: bytes, connection: Connection, before: Hook | None, after: Hook | None) -> _Report:
    try:
        if before is not None:
            before()
        function, arguments, barrier_after = pickle.loads(pickled)
        result = function(*arguments)
        pickle.dumps(result)  # an unpicklable result is an error of this function
        connection.send(_Report(is_last=False))
        if barrier_after:
            dist.barrier()  # if the ranks' collectives did not match, it fails or hangs here, not in the next function
            if after is not None:
                after()
        return _Report(result=result)
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        frame = error.__traceback__
        while frame and frame.tb_next and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        return _Report("".join(traceback.format_exception(type(error), error, frame)))


# ---- One process that simulates one rank of many.


@checked()
@contextmanager
def simulated_ranks(world_size: int = 64, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a process group whose collectives return at once and move no data.

    Shapes, layouts, memory and the order of collectives are those of real ranks; numerical results are not.

    Args:
        world_size: the simulated number of ranks.
        rank: the rank of this process.
    """
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()

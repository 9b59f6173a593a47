"""Functions on several ranks of a gloo process group, and one readable failure when they fail.

For tests; nothing else in the package imports it. The processes are forked from a server that has imported torch, so
they start fast, and they are sure to end. One process can also stand for one rank of many (``simulated_ranks``).

``Ranks`` are processes, started once; what each is to do goes through a pipe to it, and a report comes back. The
process that has started them never joins a process group. Ranks of which one has failed are not trusted again: all of
them, and only they, are ended."""

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
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from .._torch import fake_store, set_group_timeout

# ---- Processes that start fast and are sure to end.
#
# Importing torch is what starting a process costs, so processes are forked from a server that has imported it, and
# whatever modules ``preload`` names, and has run nothing.


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
    process = FORKS.Process(target=_process_main, args=(str(output), target, *arguments))
    with mock.patch.dict(os.environ, environment):
        process.start()
    return process


def _process_main(output: str, target: Callable[..., None], *arguments: Any) -> None:
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


# ---- ``Ranks``


START_TIMEOUT = 90.0  # seconds for ranks to import torch and form their process group
GRACE = 2.0  # seconds the other ranks get after the first failure, to fail in their own words
GROUP_TIMEOUT = 600.0  # of gloo; far beyond what functions get, so that a hang is reported with stacks
_END = b""  # in the place of a task
_MAX_OUTPUT = 20_000  # characters of one rank's output or stacks that a failure quotes

Hook = Callable[[], None]


class RanksFailed(AssertionError):
    """Some ranks have failed, or did not end in time. The text has a part for each: its traceback or where it is, and
    what it has printed."""


class _Task(NamedTuple):
    function: Callable[..., Any]
    arguments: Sequence[Any]
    barrier_after: bool


class _Report(NamedTuple):
    """What a rank tells. ``is_last``: False between the function's end and the barrier behind it."""

    error: str = ""
    result: Any = None
    is_last: bool = True


class _Rank:
    """One rank as the process that has started it sees it: a process, a pipe, and two files it writes to."""

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
            return _Report(f"the process ended by itself, {f'signal {-code}' if code < 0 else f'exit code {code}'}\n")

    def new_output(self) -> str:
        """The text that the rank has printed since the last call."""
        text = self.output.read_bytes()[self._num_seen :]
        self._num_seen += len(text)
        return text.decode(errors="replace")[-_MAX_OUTPUT:]

    def kill(self) -> None:
        end(self.process)
        self.connection.close()


class Ranks:
    """The ranks of one gloo process group, on this machine. Owns their processes, the store they share and the files
    they write.

    Args:
        num_ranks: how many.
        pg_timeout: seconds that collectives may take.
        before: called on each rank before each function; can be pickled.
        after: called on each rank behind the barrier after each function that went well.

    Raises:
        RanksFailed: they could not be started.
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
            function: can be pickled (a function of a module, found there by its name), and so can what it returns.
            timeout: seconds until the ranks are ended, and their Python stacks reported.
            name: for the error; default: the function's.
            barrier_after: whether the ranks meet in a barrier afterwards: collectives that did not pair fail here, not
                in what runs next.

        Returns:
            What each rank has returned, by rank.

        Raises:
            RanksFailed: a rank has raised (also ``SystemExit``), died or not ended in time. No rank is usable then.
        """
        if not self.is_usable:
            raise RanksFailed("these ranks have ended, or one of them has failed before: start others")
        task = pickle.dumps(_Task(function, arguments, barrier_after))
        self.is_usable = False  # also after KeyboardInterrupt: whatever the ranks were doing, they still do it
        try:
            for rank in self.ranks:
                rank.new_output()  # skip what came between functions
            self._send(task)
            results = self._collect(name or function.__qualname__, timeout)
            self.is_usable = True
        finally:
            if not self.is_usable:
                self.kill()
        return results

    def num_threads(self) -> int:
        """Of the first rank; 0 where the system does not tell. Those of process groups that functions have left behind
        wake up a hundred times a second each."""
        tasks = Path(f"/proc/{self.ranks[0].process.pid}/task")
        return len(os.listdir(tasks)) if tasks.exists() else 0

    def close(self) -> None:
        """Let idle ranks pass a last barrier and exit; end those that do not."""
        if self.is_usable:
            self._send(_END)
            for rank in self.ranks:
                rank.connection.poll(5)  # becomes readable when the process ends
        self.kill()

    def kill(self) -> None:
        """End all ranks now."""
        self.is_usable = False
        for rank in self.ranks:
            rank.kill()
        self._directory.cleanup()

    def _send(self, task: bytes) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ConnectionError):  # a rank that is gone is reported by _collect
                rank.connection.send_bytes(task)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """Wait for the last report of each rank; its results, or RanksFailed."""
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
            outcome = "every rank finished, but the barrier behind it hangs: some collectives did not pair"
        for number, stacks in _stacks_of([rank for rank in self.ranks if rank.rank not in errors]).items():
            state = "finished, waiting for the others" if number in have_returned else "still running"
            errors[number] = f"{state}; its Python stacks:\n{stacks}"
        failure = [f"{what}: {outcome}"]
        for rank in self.ranks:
            failure.append(f"{f' rank {rank.rank} ':=^100}\n{errors[rank.rank].rstrip()}")
            if output := rank.new_output().rstrip():
                failure.append(f"{f' output of rank {rank.rank} ':-^100}\n{output}")
        raise RanksFailed("\n".join(failure))


def run_on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``function(*arguments)`` on the ranks of a gloo process group, each a process of its own on this machine.

    For several functions ``Ranks`` are faster, which stay.

    Args:
        num_ranks: how many.
        function: of a module, found there by its name; it and what it returns can be pickled.
        timeout: seconds until the ranks are ended.

    Returns:
        What each rank has returned, by rank.

    Raises:
        RanksFailed: see there; no process is left.
    """
    with Ranks(num_ranks) as ranks:
        return ranks.run(function, *arguments, timeout=timeout)


def _stacks_of(ranks: Sequence[_Rank]) -> dict[int, str]:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
    time.sleep(0.5)  # faulthandler writes in the signal handler: microseconds once the process is scheduled
    return {rank.rank: rank.stacks.read_text(errors="replace")[-_MAX_OUTPUT:] for rank in ranks}


# ---- on the ranks ----------------------------------------------------------------------------------------------------


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
    """Tasks arrive on a thread, so that a rank stuck in a collective still notices that its parent is gone."""
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                tasks.put(connection.recv_bytes())
        os._exit(1)

    threading.Thread(target=receive, name="receive tasks", daemon=True).start()
    return tasks


def _run(pickled: bytes, connection: Connection, before: Hook | None, after: Hook | None) -> _Report:
    try:
        if before is not None:
            before()
        task: _Task = pickle.loads(pickled)
        result = task.function(*task.arguments)
        pickle.dumps(result)  # what cannot be sent is an error of this function
        connection.send(_Report(is_last=False))
        if task.barrier_after:
            dist.barrier()  # fails or hangs here, not in what runs next, if the ranks' collectives did not pair
            if after is not None:
                after()
        return _Report(result=result)
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        frame = error.__traceback__
        while frame and frame.tb_next and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        return _Report("".join(traceback.format_exception(type(error), error, frame)))


# ---- One process as one rank of many.


@contextmanager
def simulated_ranks(world_size: int = 64, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a process group whose collectives return at once and move nothing.

    What depends on shapes, layouts, memory and the order of collectives is as with real ranks; numbers are not.

    Args:
        world_size: how many ranks there seem to be.
        rank: which one this is.
    """
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()

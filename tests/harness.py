"""Runs test bodies on several ranks, in processes that live as long as the pytest run.

    from tests.harness import distributed

    @distributed(world_size=(1, 2, 4))
    def test_something():
        ...                                  # every rank runs this; torch.distributed (gloo) is initialised

Importing torch is what a multi-process test costs, so ranks are forked from a server process that has imported it, and
the test modules, and has run nothing; and the ranks of one world size form a pool that is started once and reused. A
test travels as (file, module, qualified name, arguments); each rank looks it up in the module and calls it.
The pytest process itself never joins a process group: it sends tasks, collects one report per rank, and turns them into
one failure that names each rank. A pool in which something went wrong is not trusted again: its processes, and only
they, are ended, and the next test starts others. Tests that need one process only use `fake_process_group`, and those
that run a program of their own `start_forked`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT = 90.0  # seconds for a pool to import torch and form its process group
GRACE = 2.0  # seconds the other ranks get after the first failure, to fail in their own words
GROUP_TIMEOUT = 600.0  # of gloo; far beyond a test's, so that a hang is reported with stacks and not as a gloo error
MAX_OUTPUT = 20_000  # characters of one rank's output or stacks that a failure quotes
BODY_DONE = "body done"  # the report between a test body and the barrier that ends the test

Body = Callable[..., None]
_rank: int | None = None  # set in a worker, None in the pytest process
_environment: dict[str, str] = {}  # of a worker, when it begins


def distributed(
    world_size: int | Sequence[int], *, timeout: float = 60, fresh: bool = False, pg_timeout: float | None = None
) -> Callable[[Body], Body]:
    """Runs the decorated test body on every rank of a gloo process group.

    Args:
        world_size: number of ranks; a sequence parametrizes the test over it. A body with an argument named
            ``world_size`` is given it.
        timeout: seconds until the test fails with the Python stacks of every rank.
        fresh: use a pool that is thrown away after the test, for a body that breaks the process group on purpose.
        pg_timeout: timeout of the process group's collectives in seconds, for tests of bounded waiting. Implies fresh.

    Arguments from ``pytest.mark.parametrize`` and fixtures reach the body if they can be pickled. The body must be
    found by its name in its module (a nested function is not). Skips belong in a mark: raised inside, they fail.
    """
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)

    def decorate(body: Body) -> Body:
        preload(body.__module__)
        signature = inspect.signature(body)
        wants_size = "world_size" in signature.parameters

        @functools.wraps(body)
        def test(*args: Any, **arguments: Any) -> None:
            if _rank is None:
                size = arguments["world_size"]
                run_distributed(body, size, arguments, timeout=timeout, fresh=fresh, pg_timeout=pg_timeout)
            else:
                body(*args, **{name: arg for name, arg in arguments.items() if name != "world_size" or wants_size})

        if not wants_size:
            extra = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
            signature = signature.replace(parameters=[*signature.parameters.values(), extra])
        test.__signature__ = signature  # type: ignore[attr-defined]
        test = pytest.mark.parametrize("world_size", sizes, ids=[f"{size}ranks" for size in sizes])(test)
        return pytest.mark.timeout(timeout + START_TIMEOUT + 30)(test)  # the net under our own timeout

    return decorate


def run_distributed(
    body: Body,
    world_size: int,
    arguments: dict[str, Any] | None = None,
    *,
    timeout: float = 60,
    fresh: bool = False,
    pg_timeout: float | None = None,
) -> None:
    """Runs ``body(**arguments)`` on ``world_size`` ranks; fails the calling test if any rank fails."""
    throw_away = fresh or pg_timeout is not None
    file = str(sys.modules[body.__module__].__file__)
    task = _Task(file, body.__module__, body.__qualname__, arguments or {}, barrier_after=not throw_away)
    pool = None if throw_away else _pools.pop(world_size, None)
    pool = pool or WorkerPool(world_size, pg_timeout or GROUP_TIMEOUT)
    try:
        pool.run(task, timeout)
        if not throw_away:
            _pools[world_size] = pool
    finally:  # also after KeyboardInterrupt and pytest-timeout: whatever the ranks were doing, they still do it
        if _pools.get(world_size) is not pool:
            pool.kill()


@contextlib.contextmanager
def fake_process_group(rank: int = 0, world_size: int = 64) -> Iterator[None]:
    """Makes this process ``rank`` of a process group whose collectives return at once and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- the server that processes are forked from -----------------------------------------------------------------------

_forks = multiprocessing.get_context("forkserver")
_preloaded = ["tests.rewriting", "torch._dynamo"]  # the first checkpoint() of a process imports dynamo


def preload(module: str) -> None:
    """Lets forked processes find ``module`` imported. Called while tests are collected: the server starts later."""
    if module not in _preloaded:
        _preloaded.append(module)


def start_forked(output: Path, target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Calls ``target(*arguments)`` in another process, which prints to the file ``output``. To be ended by ``end``."""
    environment = {  # of the server, which the first call starts, and which passes it on
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",  # also because a process with threads must not be forked
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    _forks.set_forkserver_preload(_preloaded)
    process = _forks.Process(target=_forked_main, args=(str(output), target, *arguments))
    with mock.patch.dict(os.environ, environment):
        process.start()
    return process


def _forked_main(output: str, target: Callable[..., None], *arguments: Any) -> None:
    os.setsid()  # Ctrl-C is for the pytest process, and what this one starts is ended together with it
    with open(output, "wb") as file:
        for standard in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), standard.fileno())
    gc.freeze()  # what importing torch has left is not looked at by every collection
    target(*arguments)


def end(process: ForkServerProcess) -> None:
    """Ends ``process``, and what it has started, if it runs."""
    if process.exitcode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no session yet, or ends by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def run_forked(
    num_ranks: int, folder: Path, target: Callable[..., None], *arguments: Any, timeout: float = 60
) -> list[tuple[int | None, str]]:
    """Calls ``target(rank, *arguments)`` in processes of their own, for what ranks of a pool cannot do, such as to die.
    Returns the exit code of each, ``None`` if it had to be ended after ``timeout`` seconds, and what it has printed."""
    outputs = [folder / f"{target.__name__}.{rank}" for rank in range(num_ranks)]
    processes = [start_forked(output, target, rank, *arguments) for rank, output in enumerate(outputs)]
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            end(process)
    return [*zip(codes, (output.read_text(errors="replace") for output in outputs), strict=True)]


def run_torchrun(folder: Path, *arguments: str, timeout: float = 60, **environment: str) -> tuple[int | None, str]:
    """Runs torchrun; returns its exit code and all that was said. With ``--run-path --start-method=fork`` its workers
    are forked as well: interpreters that begin are longer at importing torch than at all that tests do."""
    ((code, said),) = run_forked(1, folder, _torchrun, arguments, environment, timeout=timeout)
    return code, said


def _torchrun(_rank: int, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.distributed.run.main(arguments)


# ---- the pytest process: pools of workers ----------------------------------------------------------------------------


class _Task(NamedTuple):
    file: str
    module: str
    qualname: str
    arguments: dict[str, Any]
    barrier_after: bool


class _Worker:
    """One rank as the pytest process sees it: a process, a pipe, and two files it writes to."""

    def __init__(self, rank: int, world_size: int, port: int, pg_timeout: float, directory: str):
        self.rank = rank
        self.output = Path(directory, f"rank{rank}.output")
        self.stacks = Path(directory, f"rank{rank}.stacks")
        self.stacks.touch()
        self.output_seen = 0
        self.connection, theirs = _forks.Pipe()
        with theirs:
            arguments = (theirs, rank, world_size, port, pg_timeout, str(self.stacks))
            self.process = start_forked(self.output, _worker_main, *arguments)

    def receive(self) -> str | None:
        """None when all went well, BODY_DONE on the way there, otherwise what went wrong."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            return f"the process ended by itself, {f'signal {-code}' if code < 0 else f'exit code {code}'}\n"

    def new_output(self) -> str:
        """The text that the rank printed since the last call."""
        text = self.output.read_bytes()[self.output_seen :]
        self.output_seen += len(text)
        return text.decode(errors="replace")[-MAX_OUTPUT:]

    def kill(self) -> None:
        end(self.process)
        self.connection.close()


class WorkerPool:
    """The ranks of one process group. Owns their processes, the store they share and the files they write."""

    def __init__(self, world_size: int, pg_timeout: float = GROUP_TIMEOUT):
        self._directory = tempfile.TemporaryDirectory(prefix="fsdp_compose_tests_", ignore_cleanup_errors=True)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: a free one
        self.workers: list[_Worker] = []
        try:
            for rank in range(world_size):
                self.workers.append(_Worker(rank, world_size, self._store.port, pg_timeout, self._directory.name))
            self._collect("start of the worker pool", START_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def run(self, task: _Task, timeout: float) -> None:
        for worker in self.workers:
            worker.new_output()  # skip what came between tests
        self._send(task)
        self._collect(task.qualname, timeout)

    def shutdown(self) -> None:
        """Lets idle ranks pass a last barrier and exit; ends those that do not."""
        self._send(None)
        for worker in self.workers:
            worker.connection.poll(5)  # becomes readable when the process ends
        self.kill()

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        self._directory.cleanup()

    def _send(self, task: _Task | None) -> None:
        for worker in self.workers:
            with contextlib.suppress(ConnectionError):  # a rank that is gone is reported by _collect
                worker.connection.send(task)

    def _collect(self, what: str, timeout: float) -> None:
        """Waits for every rank's final report and fails the calling test unless all are good."""
        deadline = time.monotonic() + timeout
        pending = {worker.connection: worker for worker in self.workers}
        body_done: set[int] = set()
        errors: dict[int, str] = {}
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                worker = pending[connection]  # type: ignore[index]
                report = worker.receive()
                if report == BODY_DONE:
                    body_done.add(worker.rank)
                    continue
                del pending[worker.connection]
                if report is not None:
                    errors[worker.rank] = report
                    deadline = min(deadline, time.monotonic() + GRACE)
        if not pending and not errors:
            return
        unfinished = sorted({worker.rank for worker in pending.values()} - body_done)
        if errors:
            outcome = f"failed on ranks {sorted(errors)} of {len(self.workers)}"
        elif unfinished:
            outcome = f"ranks {unfinished} of {len(self.workers)} did not finish within {timeout:g} s"
        else:
            outcome = "every rank finished, but the barrier behind the test hangs: some collectives did not pair"
        for rank, stacks in self._dump_stacks([w for w in self.workers if w.rank not in errors]).items():
            state = "finished, waiting for the others" if rank in body_done else "still running"
            errors[rank] = f"{state}; its Python stacks:\n{stacks}"
        failure = [f"{what}: {outcome}"]
        for worker in self.workers:
            failure.append(f"{f' rank {worker.rank} ':=^100}\n{errors[worker.rank].rstrip()}")
            if output := worker.new_output().rstrip():
                failure.append(f"{f' output of rank {worker.rank} ':-^100}\n{output}")
        pytest.fail("\n".join(failure), pytrace=False)

    def _dump_stacks(self, workers: Sequence[_Worker]) -> dict[int, str]:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # faulthandler writes in the signal handler: microseconds once the process is scheduled
        return {worker.rank: worker.stacks.read_text(errors="replace")[-MAX_OUTPUT:] for worker in workers}


_pools: dict[int, WorkerPool] = {}


@atexit.register
def shutdown_pools() -> None:
    """Ends every worker this process started. Called at the end of the pytest session, or of the process."""
    while _pools:
        _pools.popitem()[1].shutdown()


# ---- the workers -----------------------------------------------------------------------------------------------------


def _worker_main(connection: Connection, rank: int, world_size: int, port: int, pg_timeout: float, stacks: str) -> None:
    global _rank
    _rank = rank
    _environment.update(os.environ)
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)
    tasks = _receive_in_background(connection)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    _set_pg_timeout(timedelta(seconds=pg_timeout))  # only now: ranks may start further apart than a test may wait
    connection.send(None)
    while (task := tasks.get()) is not None:
        connection.send(_run_task(task, connection))
    dist.barrier()
    os._exit(0)  # nothing is buffered; taking gloo's threads down at interpreter exit aborts now and then


def _receive_in_background(connection: Connection) -> queue.SimpleQueue[_Task | None]:
    """Tasks arrive on a thread, so that a rank stuck in a collective still notices that the pytest process is gone."""
    tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                tasks.put(connection.recv())
        os._exit(1)

    threading.Thread(target=receive, name="receive tasks", daemon=True).start()
    return tasks


def _run_task(task: _Task, connection: Connection) -> str | None:
    try:
        _reset()
        _resolve(task)(**task.arguments)
        connection.send(BODY_DONE)
        if task.barrier_after:
            dist.barrier()  # fails or hangs here, not in the next test, if the ranks' collectives did not pair
            _end_groups()
    except BaseException as error:  # pytest.skip and sys.exit too: a rank that leaves early has failed
        frame = error.__traceback__
        while frame and frame.tb_next and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        return "".join(traceback.format_exception(type(error), error, frame))
    return None


lasting_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # that bodies share with those of later tests


def _end_groups() -> None:
    """Ends the process groups that a test has made: a thread of each would wake up a hundred times a second."""
    made = [group for group in _world.pg_map if group is not dist.group.WORLD and group not in lasting_groups]
    if made:
        while made:
            dist.destroy_process_group(made.pop())
        _clear_sharding_prop_cache()  # it has meshes, which hold groups, and gives them to the next that is equal
        gc.collect()  # models that have not been freed yet


def _reset() -> None:
    """Undoes what one test may have changed for the next."""
    os.environ.clear()
    os.environ.update(_environment)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def _resolve(task: _Task) -> Body:
    found: Any = importlib.import_module(task.module)
    if Path(found.__file__).resolve() != Path(task.file).resolve():
        raise ImportError(f"{task.module} is {found.__file__} in this worker, but the test lives in {task.file}")
    for name in task.qualname.split("."):  # Class.method, or a function
        found = getattr(found() if inspect.isclass(found) else found, name)
    return found

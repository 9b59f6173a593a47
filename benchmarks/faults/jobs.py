"""Jobs: several ranks, each a process, that may die, stop or hang without harm to the one that judges.

The store lives in the process that starts the job, as under torchrun. Whatever happens, what was started is ended, and
only that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests import harness

LIMIT = 240.0  # seconds for what ends in a few, on a machine that has other work too
LONG = 3600.0  # and for what ends in a minute
PATIENCE = timedelta(seconds=600)  # of process groups whose timeout is not what is tested
harness.preload("benchmarks.faults")
harness.preload("benchmarks.faults.systems")


@dataclass(frozen=True)
class Result:
    """How a rank has ended.

    Attributes:
        kind: ``returned``; ``raised``; ``died``, by a signal or otherwise without a word; ``hangs``, and was ended.
        value: what the program has returned.
        error: what it has raised, type and text.
    """

    kind: str
    value: Any = None
    error: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.error}".strip()


class Job:
    """Calls ``program(*arguments)`` on every rank of a gloo process group; a context manager.

    Args:
        timeout: of the process group, once its ranks are connected; and of what fsdp_compose waits for.
        before: called with the rank while its process has one thread, before the ranks connect.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        world_size: int = 2,
        timeout: timedelta = PATIENCE,
        before: Callable[[int], None] | None = None,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="faults_", ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[Any] = []
        settings = _Settings(world_size, self._store.port, timeout, before, str(self._folder))
        try:
            for rank in range(world_size):
                output = self._folder / f"output-{rank}"
                self._processes.append(harness.start_forked(output, _main, settings, rank, program, arguments))
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def end(self) -> None:
        for process in self._processes:
            harness.end(process)
        self._temporary.cleanup()

    def send(self, rank: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, number)

    def finish(self, ranks: tuple[int, ...] | None = None, limit: float = LIMIT) -> list[Result]:
        """The results of ``ranks`` (default: all) when they have ended, or ``limit`` seconds are over."""
        chosen = range(len(self._processes)) if ranks is None else ranks
        deadline = time.monotonic() + limit
        pending = {self._processes[rank].sentinel for rank in chosen}
        while pending and (ended := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            pending -= set(ended)
        return [self._result(rank) for rank in chosen]

    def _result(self, rank: int) -> Result:
        path = self._folder / f"result-{rank}"
        if path.exists():
            return Result(**json.loads(path.read_text()))
        code = self._processes[rank].exitcode
        if code is None:
            return Result("hangs")
        output = (self._folder / f"output-{rank}").read_text(errors="replace").strip()
        return Result("died", error=f"(signal {-code})" if code < 0 else f"(exit code {code}): {output[-2000:]}")


def run(program: Callable[..., Any], *arguments: Any, limit: float = LIMIT, **options: Any) -> list[Result]:
    """The results of a job that is left to itself."""
    with Job(program, *arguments, **options) as job:
        return job.finish(limit=limit)


def values(results: list[Result]) -> list[Any]:
    """The values that the ranks returned, where nothing else is expected: the battery itself is broken otherwise."""
    if any(result.kind != "returned" for result in results):
        raise RuntimeError("; ".join(f"rank {rank}: {result}" for rank, result in enumerate(results)))
    return [result.value for result in results]


# ---- in the processes


@dataclass(frozen=True)
class _Settings:
    world_size: int
    port: int
    timeout: timedelta
    before: Callable[[int], None] | None
    folder: str


def _main(settings: _Settings, rank: int, program: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    report: dict[str, Any]
    try:
        if settings.before is not None:
            settings.before(rank)
        _connect(settings, rank)
        report = {"kind": "returned", "value": program(*arguments)}
    except BaseException as error:  # DCP's own error is no Exception
        traceback.print_exc()
        report = {"kind": "raised", "error": as_text(error)}
    path = Path(settings.folder, f"result-{rank}")
    path.with_suffix(".new").write_text(json.dumps(report))
    path.with_suffix(".new").rename(path)
    sys.stdout.flush()
    os._exit(0)  # taking gloo's threads down at interpreter exit aborts now and then


def _connect(settings: _Settings, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", settings.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.world_size, timeout=PATIENCE)
    dist.barrier()
    _set_pg_timeout(settings.timeout)  # only now: ranks may start further apart than a fault may last
    if settings.timeout != PATIENCE:
        os.environ["FSDP_COMPOSE_TIMEOUT"] = str(settings.timeout.total_seconds())


def as_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def results_as_text(results: list[Result]) -> str:
    return "; ".join(f"rank {rank} {result}" for rank, result in enumerate(results))

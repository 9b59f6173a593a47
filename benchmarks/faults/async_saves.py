"""Faults of a save that is written while training goes on: of the trainers, and of the processes that write.

The trainers die by SIGKILL just before the k-th file event of one of them, or the writer of a rank does, for every k of
both ranks. (DCP writes in a thread of the trainer.) After the first, a job that is started again loads the newest
checkpoint, trains and saves again. After the second, the job itself hears one error on every rank, or none and has the
checkpoint; either way it saves again. Then a writer that may write no longer files, one that is stopped, and a rank
that is lost before the save.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdp_compose.checkpoint import Saver, background, latest
from fsdp_compose.checkpoint import writer as product

from .fault import Fault, Settings, Verdict, verdict
from .file_events import FileEvents
from .jobs import as_text, results_as_text, run, values
from .killed_saves import FIRST, NEXT, SURVIVOR, Kill, Killing, resume
from .systems import System
from .training import Trainer, path_of

TIMEOUT = timedelta(seconds=8)  # of a save whose writer is stopped
_LIMIT = 2000  # bytes
_LOOKS = re.compile(r"open (\d+\.(lock|told)|verdict)")


@dataclass(frozen=True)
class WriterKill:
    """Before which file event of a rank's writer."""

    rank: int
    event: int

    def __str__(self) -> str:
        return f"the writer of rank {self.rank} killed at its event {self.event}"


def write_and_die(descriptor: int, folder: str, event: int, counted: str) -> None:
    """A writer that dies just before its ``event``-th file event below ``folder``; 0: it lists them in ``counted``."""

    names: list[str] = []

    def on_event(_: int, name: str) -> None:
        if not _LOOKS.fullmatch(name):  # as many as there is time for
            names.append(name)
            if len(names) == event:
                os.kill(os.getpid(), signal.SIGKILL)

    with FileEvents(Path(folder), on_event).counted():
        product.main(descriptor)
    Path(counted).write_text("\n".join(names))


class _WatchedWriter:
    """Starts a writer of ``write_and_die``."""

    def __init__(self, folder: Path, event: int, counted: Path) -> None:
        self._call = f"write_and_die(int(sys.argv[1]), {str(folder)!r}, {event}, {str(counted)!r})"

    def __call__(self, channel: Any) -> subprocess.Popen[bytes]:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import write_and_die; {self._call}"
        return subprocess.Popen(
            [sys.executable, "-c", code, str(channel.fileno())],
            pass_fds=[channel.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


class _Saving:
    """One system's saves in the background."""

    def __init__(self, system: System, timeout: timedelta = timedelta(minutes=5)) -> None:
        self._saver = Saver(timeout=timeout) if system.is_ours else None
        self._group = None if system.is_ours else dist.new_group(backend="gloo")

    @property
    def writer(self) -> int:
        assert self._saver is not None
        return self._saver.pid

    def begin(self, trainer: Trainer, folder: Path) -> Any:
        if self._saver is not None:
            return self._saver.save(trainer.state(), folder)
        return dcp.async_save(trainer.state(), checkpoint_id=str(folder), process_group=self._group)

    def close(self) -> None:
        if self._saver is not None:
            with suppress(RuntimeError):
                self._saver.close()


def _error_of(saving: Any) -> str:
    try:
        saving.result()
    except BaseException as error:  # DCP's own is no Exception
        return as_text(error)
    return ""


def save_while_training(system: System, folder: Path, kill: Kill | None, onto: int) -> list[str]:
    """A program: the checkpoint after ``NEXT`` steps, in the background of another step; all trainers die at an event
    of one of them. Returns the events of this rank."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    trainer, saving = Trainer(system), _Saving(system)
    trainer.train(NEXT)

    def on_event(number: int, name: str) -> None:
        if kill is not None and kill.rank == dist.get_rank() and number == kill.event:
            for pid in pids:
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    events = FileEvents(folder, on_event)
    with events.counted():
        future = saving.begin(trainer, path_of(folder, onto))
        trainer.train(NEXT + 1)
        future.result()
    saving.close()
    return events.names


def resume_from_the_latest(system: System, folder: Path) -> list[Any]:
    """A program: as ``resume``, when what writers of dead trainers still do is done."""
    if system.is_ours:
        latest(folder)
    return resume(system, folder)


class _Killing(Killing):
    program, again = staticmethod(save_while_training), staticmethod(resume_from_the_latest)


def lose_a_writer(system: System, folder: Path, kill: WriterKill | None, counted: Path) -> list[Any]:
    """A program: a writer dies; the error, what is wrong with what is left, and what a further save raises."""
    mine = kill is not None and kill.rank == dist.get_rank()
    background.start_writer = _WatchedWriter(folder, kill.event if mine else 0, counted)  # type: ignore[assignment]
    trainer, saving = Trainer(system), _Saving(system)
    background.start_writer = _WatchedWriter(folder, 0, counted)  # type: ignore[assignment]
    trainer.train(NEXT)
    future = saving.begin(trainer, path_of(folder, NEXT))
    at_the_call = trainer.digest()
    trainer.train(NEXT + 1)
    outcome = _outcome(trainer, future, path_of(folder, NEXT), at_the_call)
    if kill is None:
        saving.close()
        return [*outcome, ""]
    return [*outcome, _save_again(saving, trainer, folder)]


def _outcome(trainer: Trainer, future: Any, path: Path, expected: str) -> tuple[str, str]:
    """The error of a save, and what is wrong with what it left."""
    error = _error_of(future)
    dist.barrier()
    if not path.exists():
        return error, "" if error else "no error, and no checkpoint"
    other = Trainer(trainer.system)
    other.load(path)
    return error, ("an error, and a checkpoint" if error else "") if other.digest() == expected else "other bits"


def _save_again(saving: _Saving, trainer: Trainer, folder: Path) -> str:
    error = _attempt(saving, trainer, path_of(folder, trainer.step))
    saving.close()
    if not error:
        other = Trainer(trainer.system)
        other.load(path_of(folder, trainer.step))
        error = "" if other.digest() == trainer.digest() else "other bits"
    return error


def _attempt(saving: _Saving, trainer: Trainer, path: Path) -> str:
    try:
        saving.begin(trainer, path).result()
    except BaseException as error:  # DCP's own is no Exception
        return as_text(error)
    return ""


def _problems(what: object, results: list[Any]) -> list[str]:
    if any(result.kind != "returned" for result in results):
        return [f"{what}: {results_as_text(results)}"]
    errors, left, further = (([*column]) for column in zip(*(result.value for result in results), strict=True))
    found = [f"{what}: ranks hear {errors}"] if len({*errors}) > 1 else []
    found += [f"{what}: {item}" for item in {*left} - {""}]
    return found + [f"{what}: the next save: {item}" for item in {*further} - {""}]


def kill_trainers_and_writers(system: System, settings: Settings) -> Verdict:
    killing = _Killing(system, settings)
    before = killing.folder / "before"
    text, problems = f"trainers: {killing.kill_all_at_every_event(before)}", killing.problems
    if system.is_ours:
        counts = [settings.folder / f"events-{rank}" for rank in range(2)]
        values(run(_each(lose_a_writer, counts), system, settings.folder / "undisturbed", None))
        num_events = [len(path.read_text().splitlines()) for path in counts]
        kills = [WriterKill(rank, k) for rank in range(2) for k in settings.some(range(1, num_events[rank] + 1))]
        for kill in kills:
            with killing.copy_of(before) as folder:
                problems += _problems(kill, run(_each(lose_a_writer, counts), system, folder, kill))
        text += f"; writers: {len(kills)} kills, each one error on every rank, or none"
    return verdict(text, problems)


class _each:
    """A program that gets a path of its rank's own."""

    def __init__(self, program: Any, paths: list[Path]) -> None:
        self._program, self._paths = program, paths

    def __call__(self, *arguments: Any) -> Any:
        return self._program(*arguments, self._paths[dist.get_rank()])


def disturbed(system: System, folder: Path, how: str) -> list[Any]:
    """A program: a save that cannot be completed because of rank 1."""
    trainer, saving = Trainer(system), _Saving(system, TIMEOUT)
    trainer.train(1)
    saving.begin(trainer, path_of(folder, 1)).result()
    trainer.train(NEXT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    pid = (saving.writer if system.is_ours else os.getpid()) if dist.get_rank() == 1 else 0
    if pid and how == "stopped":
        os.kill(pid, signal.SIGSTOP)
    if pid and how == "full":
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LIMIT, limits[1]))
    future = saving.begin(trainer, path_of(folder, NEXT))
    at_the_call = trainer.digest()
    outcome = _outcome(trainer, future, path_of(folder, NEXT), at_the_call)
    if pid and how == "full":
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    trainer.train(NEXT + 1)
    saving.close()
    return [*outcome, _save_again(_Saving(system), trainer, folder)]


def save_without_a_rank(system: System, folder: Path) -> str:
    """A program: rank 1 dies while the first save is under way; what the second one raises."""
    trainer, saving = Trainer(system), _Saving(system)
    trainer.train(1)
    future = saving.begin(trainer, path_of(folder, 1))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = _error_of(future)
    error = error or _attempt(saving, trainer, path_of(folder, NEXT))
    saving.close()
    return error


def disturb(system: System, settings: Settings) -> Verdict:
    problems: list[str] = []
    ways = ("full", "stopped") if system.is_ours else ("full",)  # DCP's writer is the trainer itself
    for how in ways:
        results = run(disturbed, system, settings.folder / how, how)
        problems += _problems(f"rank 1's writer is {how}", results)
        if all(result.kind == "returned" for result in results) and not all(result.value[0] for result in results):
            problems.append(f"{how}: no error")
    folder = settings.folder / "lost"
    first, second = run(save_without_a_rank, system, folder, timeout=SURVIVOR)
    if second.kind != "died" or first.kind != "returned" or not first.value:
        problems.append(f"rank 1 dies: {first} {first.value}, {second}")
    if system.is_ours:  # its writer has completed what was begun
        (digest, *_), _ = values(run(resume_and_tell, system, folder))
        if digest != FIRST:
            problems.append(f"rank 1 dies: what was copied is lost, {digest} was loaded")
    return verdict(f"writer without room{', stopped' * system.is_ours}, a rank lost after the call", problems)


def resume_and_tell(system: System, folder: Path) -> list[Any]:
    """A program: the step of the newest checkpoint."""
    return [resume_from_the_latest(system, folder)[0]]


FAULTS = [
    Fault("kill -9 at every file event of an asynchronous save", kill_trainers_and_writers),
    Fault("a writer without room or stopped, a rank lost, in an asynchronous save", disturb),
]

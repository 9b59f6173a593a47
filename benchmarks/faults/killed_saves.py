"""kill -9 at every file event of a save.

A job of two ranks that has a checkpoint trains on, saves the next one, and dies by SIGKILL just before the k-th file
event of one rank: all of it, or that rank alone. Then another job does what a trainer does that was started again: the
newest checkpoint that loads, one more step, the next save. Also with what an earlier interrupted save has left, and
where the folder to save to is that of the checkpoint there is.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .fault import Fault, Settings, Verdict, verdict
from .file_events import FileEvents
from .jobs import Result, results_as_text, run, values
from .systems import System
from .training import Trainer, digests, newest_first, path_of, train_and_save

FIRST, NEXT = 1, 2  # steps after which is saved
SURVIVOR = timedelta(seconds=3)  # that it waits for the dead
ALONE = 4  # one rank alone dies at every so many events, since its survivor takes its time


@dataclass(frozen=True)
class Kill:
    """Before which event; of ``rank`` alone, or of all."""

    rank: int
    event: int
    takes_all: bool

    def __str__(self) -> str:
        return (
            f"{'the job' if self.takes_all else f'rank {self.rank}'} killed at event {self.event} of rank {self.rank}"
        )


def save_and_die(system: System, folder: Path, kill: Kill | None, onto: int) -> list[str]:
    """A program: the checkpoint after ``NEXT`` steps, saved as number ``onto``, or a part of it; the file events of
    this rank."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    trainer = Trainer(system)
    trainer.train(NEXT)

    def on_event(number: int, name: str) -> None:
        if kill is not None and kill.rank == dist.get_rank() and number == kill.event:
            for pid in pids if kill.takes_all else ():
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    events = FileEvents(folder, on_event)
    with events.counted():
        trainer.save(path_of(folder, onto))
    return events.names


def resume(system: System, folder: Path) -> list[Any]:
    """A program: load the newest that loads, train a step, save, load that. Returns the steps of the two, and this
    rank's digests."""
    trainer = Trainer(system)
    for path in newest_first(folder):
        try:
            trainer.load(path)
            break
        except Exception as error:
            print(path, error)
        except BaseException as error:  # DCP's own
            print(path, error)
    loaded = trainer.step, trainer.digest()
    trainer.train(trainer.step + 1)
    trainer.save(path_of(folder, trainer.step))
    again = Trainer(system)
    again.load(path_of(folder, trainer.step))
    return [*loaded, again.step, again.digest()]


class Killing:
    """The kills of one system's saves, and what was left by each.

    Attributes:
        program: saves, with a ``Kill`` or ``None``; returns the file events of its rank.
        again: what the job does that is started afterwards.
    """

    program: Callable[..., list[str]] = staticmethod(save_and_die)
    again: Callable[..., list[Any]] = staticmethod(resume)

    def __init__(self, system: System, settings: Settings, onto: int = NEXT) -> None:
        self.system, self.settings, self.onto = system, settings, onto
        self.folder = settings.folder
        values(run(train_and_save, system, self.folder / "before", FIRST))
        self.expected = [["", *per_rank] for per_rank in values(run(digests, system, NEXT + 1))]
        self.found: Counter[str] = Counter()
        self.problems: list[str] = []
        self.survivors: Counter[str] = Counter()

    def events(self, before: Path) -> list[list[str]]:
        """Return the file events of each rank in an undisturbed save."""
        with self.copy_of(before) as folder:
            return values(run(self.program, self.system, folder, None, self.onto))

    def copy_of(self, before: Path) -> Any:
        return _Copy(before, self.folder / "case")

    def kill(self, before: Path, kill: Kill) -> None:
        with self.copy_of(before) as folder:
            self.die(folder, kill)
            results = run(self.again, self.system, folder)
            self.judge(kill, results)

    def kill_all_at_every_event(self, before: Path) -> str:
        """Kill the whole job at every event of each rank. Return what was loaded afterwards, in words."""
        num_kills = 0
        for rank, names in enumerate(self.events(before)):
            for event in self.settings.some(range(1, len(names) + 1)):
                self.kill(before, Kill(rank, event, takes_all=True))
                num_kills += 1
        found = ", ".join(f"{count // 2} loaded {which}" for which, count in sorted(self.found.items()))
        return f"{num_kills} kills: {found or 'nothing loaded'}"

    def die(self, folder: Path, kill: Kill) -> None:
        results = run(self.program, self.system, folder, kill, self.onto, timeout=SURVIVOR)
        for rank, result in enumerate(results):
            if rank != kill.rank and not kill.takes_all:
                self.survivors[result.kind] += 1
                if result.kind in ("hangs", "died"):
                    self.problems.append(f"{kill}: rank {rank} {result}")

    def judge(self, kill: Kill, results: list[Result]) -> None:
        if any(result.kind != "returned" for result in results):
            self.problems.append(f"{kill}: cannot go on: {results_as_text(results)}")
            return
        for rank, (step, digest, next_step, next_digest) in enumerate(result.value for result in results):
            expected = self.expected[rank]
            if not step:
                self.problems.append(f"{kill}: no checkpoint loads")
            elif digest != expected[step] or next_digest != expected[next_step]:
                self.problems.append(f"{kill}: other bits than those of step {step} were loaded")
            else:
                self.found["the old one" if step == FIRST else "the new one"] += 1
                continue
            return


class _Copy:
    """A copy of a folder, for one case."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source, self._target = source, target

    def __enter__(self) -> Path:
        shutil.copytree(self._source, self._target)
        return self._target

    def __exit__(self, *_: Any) -> None:
        shutil.rmtree(self._target)


def at_every_event(system: System, settings: Settings) -> Verdict:
    killing = Killing(system, settings)
    before = killing.folder / "before"
    num_events = [len(names) for names in killing.events(before)]
    interrupted = killing.folder / "interrupted"
    shutil.copytree(before, interrupted)
    killing.die(interrupted, Kill(0, num_events[0] // 2, takes_all=True))
    num_kills = 0
    starts = ((before, (True,)),) if settings.quick else ((before, (True, False)), (interrupted, (True,)))
    for start, ways in starts:
        num_events = [len(names) for names in killing.events(start)]
        for takes_all in ways:
            for rank in range(len(num_events)):
                events = range(1, num_events[rank] + 1, 1 if takes_all else ALONE)
                for event in settings.some(events):
                    killing.kill(start, Kill(rank, event, takes_all))
                    num_kills += 1
    found = ", ".join(f"{count // 2} loaded {which}" for which, count in sorted(killing.found.items()))
    return verdict(f"{num_kills} kills: {found or 'nothing loaded'}", killing.problems)


def over_an_existing_one(system: System, settings: Settings) -> Verdict:
    killing = Killing(system, settings, onto=FIRST)
    before = killing.folder / "before"
    with killing.copy_of(before) as folder:
        results = run(save_and_die, system, folder, None, FIRST)
        if all(result.kind == "raised" for result in results):
            refused = all("exists" in result.error for result in results)
            killing.judge(Kill(0, 0, True), run(resume, system, folder))
            problems = killing.problems + ([] if refused else [f"no named error: {results_as_text(results)}"])
            return verdict("refused by name, the old one loads", problems)
    return verdict(killing.kill_all_at_every_event(before), killing.problems)


FAULTS = [
    Fault("kill -9 at every file event of a save", at_every_event),
    Fault("kill -9 while saving over a checkpoint", over_an_existing_one),
]

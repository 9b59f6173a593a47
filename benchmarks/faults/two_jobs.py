"""Two jobs that save to one path.

One job stops just before the k-th file event of one of its ranks, for every k; the other saves to the same path
meanwhile; then the first goes on. After that, both at the same time, several times. One of them must have its
checkpoint there, whole, and the other an error, on all its ranks.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch.distributed as dist

from .fault import Fault, Settings, Verdict, verdict
from .file_events import FileEvents
from .jobs import LIMIT, LONG, Job, as_text, run, values
from .systems import System
from .training import Trainer

_Case = tuple[int, int]  # before which event of which rank the first job waits; event 0: it does not


class _Signals:
    """Files that the jobs tell each other by."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def give(self, name: str) -> None:
        (self._folder / name).touch()

    def wait(self, *names: str) -> None:
        """For any of them."""
        deadline = time.monotonic() + LIMIT / 2
        while not any((self._folder / name).exists() for name in names):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {names}")
            time.sleep(0.002)


def race(system: System, folder: Path, job: int, cases: list[_Case]) -> list[list[str]]:
    """A program, of each of the two jobs: of each case what save() raised, and the digest of what is there at last."""
    trainer = Trainer(system, seed=job)
    trainer.train(1)
    rank, found = dist.get_rank(), []
    for i, (where, event) in enumerate(cases):
        target, signals, is_first = folder / f"case-{i}", _Signals(folder), job == 0

        pause = partial(_pause, signals, i, event) if is_first and rank == where else None
        if event and not is_first:
            signals.wait(f"waits-{i}", f"saved-{i}-0")
        elif not event:
            signals.give(f"ready-{i}-{job}-{rank}")
            for other in range(4):
                signals.wait(f"ready-{i}-{other // 2}-{other % 2}")
        error = ""
        try:
            with FileEvents(target, pause).counted():
                trainer.save(target)
        except BaseException as problem:  # DCP's own error is no Exception
            error = as_text(problem)
        dist.barrier()
        if rank == 0:
            signals.give(f"saved-{i}-{job}")
        for other in range(2):
            signals.wait(f"saved-{i}-{other}")
        found.append([error, _digest_of(system, target)])
    return [["", trainer.digest()], *found]


def _pause(signals: _Signals, case: int, event: int, number: int, _: str) -> None:
    if number == event:
        signals.give(f"waits-{case}")
        signals.wait(f"saved-{case}-1")


def _digest_of(system: System, target: Path) -> str:
    other = Trainer(system, seed=2)
    try:
        other.load(target)
    except BaseException as problem:  # DCP's own error is no Exception
        return as_text(problem)
    return other.digest()


def count_events(system: System, folder: Path) -> int:
    """A program: the number of file events of a save of this rank."""
    trainer = Trainer(system)
    trainer.train(1)
    events = FileEvents(folder)
    with events.counted():
        trainer.save(folder / "counted")
    return len(events.names)


def two_jobs(system: System, settings: Settings) -> Verdict:
    num_events = values(run(count_events, system, settings.folder))
    cases = [(rank, event) for rank in range(2) for event in settings.some(range(1, num_events[rank] + 1))]
    cases += [(0, 0)] * (2 if settings.quick else 12)
    with (
        Job(race, system, settings.folder, 0, cases) as first,
        Job(race, system, settings.folder, 1, cases) as second,
    ):
        jobs = [values(first.finish(limit=LONG)), values(second.finish(limit=LONG))]
    own = [[found[0][1] for found in job] for job in jobs]
    problems = []
    for i, (rank, event) in enumerate(cases, start=1):
        where = f"one waits before event {event} of rank {rank}" if event else "both at once"
        errors = [[found[i][0] for found in job] for job in jobs]
        loaded = [found[i][1] for found in jobs[0]]
        if any(all(job) != any(job) for job in errors):
            problems.append(f"{where}: the ranks of a job differ: {errors}"[:400])
        winners = [job for job in range(2) if not any(errors[job])]
        if len(winners) != 1:
            told = f": {errors[0][0][:150]} / {errors[1][0][:150]}" if not winners else ""
            problems.append(f"{where}: {'both' if winners else 'none'} saved, as they think{told}")
        if loaded not in own:
            what = loaded[0][:150] if ":" in loaded[0] else "a mixture"
            problems.append(f"{where}: what loads is {what}")
        elif len(winners) == 1 and loaded != own[winners[0]]:
            problems.append(f"{where}: what loads is the loser's")
    return verdict(f"{len(cases)} races: one is there, whole, and the other has an error", problems)


FAULTS = [Fault("two jobs save to one path", two_jobs)]

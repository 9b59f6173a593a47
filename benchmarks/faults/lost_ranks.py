"""A rank that stops for a while (SIGSTOP, SIGCONT), stops for longer than the others wait, or dies (SIGKILL), at one
place of training after another.

Shorter than the timeout: everything goes on, to the same bits. Longer, or forever: every rank that is left raises an
error in bounded time, at its next try too; the one that wakes up raises one too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .fault import Fault, Settings, Verdict, verdict
from .file_events import FileEvents
from .jobs import LIMIT, PATIENCE, Job, Result, as_text, run, values
from .systems import System
from .training import Trainer, digests, path_of

PLACES = ["forward", "backward", "step", "save", "load"]
STEPS, AT = 5, 2  # steps in all; the rank is lost in the one after AT
TIMEOUT = timedelta(seconds=5)  # of the others, where the rank stays away
SECOND_TRY = 120.0  # seconds; the default timeout is half an hour


class _Lost(torch.autograd.Function):
    """Loses the rank in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lose: Callable[[], None]) -> torch.Tensor:
        ctx.lose = lose
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.lose()
        return grad, None


def arm(trainer: Trainer, place: str, lose: Callable[[], None]) -> None:
    """Rank 1 is lost there, once, in the next step."""
    if dist.get_rank() != 1:
        return
    once = [lose]

    def lose_once(*_: Any) -> None:
        if once:
            once.pop()()

    if place == "forward":
        trainer.model.layers[1].register_forward_hook(lose_once)
    elif place == "backward":
        trainer.model.layers[1].register_forward_hook(lambda module, args, output: _Lost.apply(output, lose_once))
    elif place == "step":
        trainer.optimizer.register_step_pre_hook(lose_once)


def work(trainer: Trainer, folder: Path, place: str, lose: Callable[[], None]) -> None:
    """A step, save and load, in one of which rank 1 is lost; the other steps."""
    trainer.train(AT)
    arm(trainer, place, lose)
    trainer.train(AT + 1)
    for name, call in (("save", trainer.save), ("load", trainer.load)):
        is_here = name == place and dist.get_rank() == 1
        with (
            FileEvents(folder, lambda number, _: lose() if number == 1 else None).counted()
            if is_here
            else nullcontext()
        ):
            call(path_of(folder, AT + 1))
    trainer.train(STEPS)


def lose_a_rank(system: System, folder: Path, place: str, number: signal.Signals) -> list[Any]:
    """A program: the digest at the end; or what was raised, what the next step raised, and after how many seconds."""
    trainer = Trainer(system)

    def lose() -> None:
        (folder / "lost").touch()
        os.kill(os.getpid(), number)

    try:
        work(trainer, folder, place, lose)
        return [trainer.digest()]
    except BaseException as error:  # DCP's own error is no Exception
        first = as_text(error)
    start = time.monotonic()
    try:
        trainer.train(trainer.step + 1)
        second = ""
    except Exception as error:
        second = as_text(error)
    return [None, first, second, time.monotonic() - start]


def start(
    system: System, settings: Settings, place: str, number: signal.Signals, timeout: timedelta
) -> tuple[Job, Path]:
    folder = settings.folder / f"{place}-{number.name}-{timeout.total_seconds():g}"
    folder.mkdir()
    return Job(lose_a_rank, system, folder, place, number, timeout=timeout), folder


def wait_until_lost(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not (folder / "lost").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def stopped_for_a_while(system: System, settings: Settings) -> Verdict:
    expected, problems = values(run(digests, system, STEPS)), []
    places = PLACES[1:2] if settings.quick else PLACES
    for place in places:
        job, folder = start(system, settings, place, signal.SIGSTOP, PATIENCE)
        with job:
            wait_until_lost(folder)
            time.sleep(0.5)
            job.send(1, signal.SIGCONT)
            results = job.finish()
        if [result.kind for result in results] != ["returned"] * 2 or any(len(result.value) > 1 for result in results):
            problems.append(f"in {place}: {told(results)}")
        elif [result.value[0] for result in results] != [found[-1] for found in expected]:
            problems.append(f"in {place}: other bits")
    return verdict(f"stopped in {', '.join(places)}: goes on to the same bits", problems)


def stopped_for_longer(system: System, settings: Settings) -> Verdict:
    """All places at once: most of it is waiting."""
    with ExitStack() as stack:
        places = PLACES[:1] if settings.quick else PLACES
        jobs = [start(system, settings, place, signal.SIGSTOP, TIMEOUT) for place in places]
        for job, _ in jobs:
            stack.enter_context(job)
        problems = []
        for place, (job, _) in zip(places, jobs, strict=True):
            results = job.finish((0,))
            job.send(1, signal.SIGCONT)
            results += job.finish((1,))
            problems += judge(system, place, results)
    return verdict(
        f"longer than the timeout, in {', '.join(places)}: every rank raises, the one that wakes up too", problems
    )


def dead(system: System, settings: Settings) -> Verdict:
    """All places at once: one that hangs takes its time."""
    places = PLACES[:2] if settings.quick else PLACES
    with ExitStack() as stack:
        jobs = [start(system, settings, place, signal.SIGKILL, PATIENCE)[0] for place in places]
        for job in jobs:
            stack.enter_context(job)
        problems = [text for place, job in zip(places, jobs) for text in judge(system, place, job.finish((0,)))]
    return verdict(f"killed in {', '.join(places)}: the others raise, at their next try too", problems)


def judge(system: System, place: str, results: list[Result]) -> list[str]:
    problems = []
    for rank, result in enumerate(results):
        if result.kind != "returned" or result.value[0] is not None:
            return [f"in {place}: {told(results)}"]
        _, first, second, seconds = result.value
        if seconds > SECOND_TRY:
            problems.append(f"in {place}, rank {rank}: the second try took {seconds:.0f} s")
        if not second:
            problems.append(f"in {place}, rank {rank}: the second try went through, alone")
        unnamed = [error for error in (first, second) if system.is_ours and "rank" not in error]
        problems += [f"in {place}, rank {rank}: the error names no rank: {error[:200]}" for error in unnamed]
    return problems


def told(results: list[Result]) -> str:
    words = {"returned": "went through", "hangs": f"no end within {LIMIT:g} s"}
    return "; ".join(
        f"rank {rank} "
        + (result.value[1][:200] if result.value and len(result.value) > 1 else words.get(result.kind, str(result)))
        for rank, result in enumerate(results)
    )


FAULTS = [
    Fault("a rank is stopped for a while (SIGSTOP, SIGCONT)", stopped_for_a_while),
    Fault("a rank is stopped for longer than the timeout", stopped_for_longer),
    Fault("a rank dies in training (kill -9)", dead),
]

"""No memory for a batch: the trainer catches the error, frees what it has, and tries again with half batches.

The error is torch's, Python's, or the RuntimeError of a CUDA call, raised in forward, between forward and backward, in
backward, or before the optimizer's step. On all ranks: the numbers at the end are those of a run that used half batches
there. On one rank, which then does something else than the others: these numbers, or an error on every rank in bounded
time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .fault import Fault, Settings, Verdict, verdict
from .jobs import LONG, Job, as_text, run, values
from .systems import System
from .training import Trainer, batch

PLACES = ["forward", "loss", "backward", "step"]
ERRORS: dict[str, Callable[[], Exception]] = {
    "torch.OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "MemoryError": MemoryError,
    "RuntimeError": lambda: RuntimeError("CUDA error: out of memory"),
}
CAUGHT = (torch.OutOfMemoryError, MemoryError)
TIMEOUT = timedelta(seconds=6)
STEPS = 3  # after the one that fails


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run_out: Callable[[], None]) -> torch.Tensor:
        ctx.run_out = run_out
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.run_out()
        return grad, None


class Memory:
    """Runs out, once, at one place."""

    def __init__(self, trainer: Trainer) -> None:
        self.place, self.error = "", ""
        layer = trainer.model.layers[1]
        layer.register_forward_hook(lambda *_: self.needed("forward"))
        layer.register_forward_hook(lambda module, args, output: _Raises.apply(output, lambda: self.needed("backward")))

    def needed(self, place: str) -> None:
        if place == self.place:
            self.place = ""
            raise ERRORS[self.error]()


def step(trainer: Trainer, memory: Memory, in_halves: bool) -> None:
    """As a careful trainer does it."""
    try:
        _try(trainer, memory, in_halves)
    except CAUGHT + (RuntimeError,) as error:
        if not isinstance(error, CAUGHT) and "out of memory" not in str(error):
            raise
        trainer.optimizer.zero_grad()
        _try(trainer, memory, in_halves=True)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.step += 1


def _try(trainer: Trainer, memory: Memory, in_halves: bool) -> None:
    parts = batch(trainer.step).chunk(2 if in_halves else 1)
    for i, part in enumerate(parts):
        with trainer.system.no_sync(trainer.model) if i + 1 < len(parts) else contextlib.nullcontext():
            loss = trainer.model(part).square().mean() / len(parts)
            memory.needed("loss")
            loss.backward()
    memory.needed("step")


def run_out(system: System, cases: list[tuple[str, str]], on_all: bool) -> list[list[Any]]:
    """A program: of each case what was raised, and whether the numbers at the end are those of a run that used half
    batches."""
    found = []
    for place, error in cases:
        trainers = [Trainer(system) for _ in range(2)]
        memory, none = (Memory(trainer) for trainer in trainers)
        for i in range(1 + STEPS):
            if i == 1 and (on_all or dist.get_rank() == 1):
                memory.place, memory.error = place, error
            if not on_all:
                try:
                    step(trainers[0], memory, False)
                except Exception as problem:
                    return [[place, error, as_text(problem), False]]
                continue
            step(trainers[0], memory, False)
            step(trainers[1], none, i == 1)
        is_right = trainers[0].digest() == trainers[1].digest()
        found.append([place, error, "", is_right])
    return found


def on_all_ranks(system: System, settings: Settings) -> Verdict:
    cases = [(place, error) for place in PLACES for error in ERRORS]
    cases = [cases[i] for i in settings.some(range(len(cases)), 4)]
    results = run(run_out, system, cases, True, limit=LONG)
    if any(result.kind != "returned" for result in results):
        return verdict(f"{len(cases)} cases", ["; ".join(str(result)[:300] for result in results)])
    problems = [
        f"{error} in {place}: other numbers"
        for found in values(results)
        for place, error, _, right in found
        if not right
    ]
    return verdict(f"{len(cases)} cases: the bits of a run in half batches", problems)


def on_one_rank(system: System, settings: Settings) -> Verdict:
    """All places at once: most of it is waiting. Without an error, the ranks have done different numbers of backwards:
    right is then only what a run of one rank in halves gives, which no system here does."""
    places = PLACES[1:2] if settings.quick else PLACES
    problems = []
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(Job(run_out, system, [(place, "MemoryError")], False, timeout=TIMEOUT))
            for place in places
        ]
        for place, job in zip(places, jobs, strict=True):
            results = job.finish()
            if any(result.kind != "returned" for result in results):
                problems.append(
                    f"in {place}: " + "; ".join(f"rank {r} {result}"[:200] for r, result in enumerate(results))
                )
                continue
            errors = [result.value[0][2] for result in results]
            if not all(errors):
                problems.append(
                    f"in {place}: rank(s) {[r for r, e in enumerate(errors) if not e]} went on without a word"
                )
            unnamed = [error for error in errors if system.is_ours and "rank" not in error]
            problems += [f"in {place}: the error names no rank: {error[:200]}" for error in unnamed]
    return verdict(f"in {', '.join(places)}: an error on every rank", problems)


FAULTS = [
    Fault("out of memory on all ranks, and again with half batches", on_all_ranks),
    Fault("out of memory on one rank, which tries again alone", on_one_rank),
]

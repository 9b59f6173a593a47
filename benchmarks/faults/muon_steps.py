"""A rank dies before a step of Muon or at some operation in it, leaves the step out, or has no gradient for a matrix.

Every rank that is left raises an error that names a rank, in bounded time. Nothing has changed then, unless the rank
died in the middle of the step; and ranks whose gradients differ go on when they agree again."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compose.optim import Muon, muon_groups

from .fault import Fault, Settings, Verdict, verdict
from .jobs import Job, Result, as_text, run, values
from .systems import System
from .training import Trainer, batch

BEFORE, SKIPPED, DIFFERENT = "dies before the step", "leaves the step out", "has no gradient for a matrix"
WITHIN = "dies at operation {} of the step"
AT = 2  # steps before
LONGEST = 120.0  # seconds until a rank that is left raises; the default timeout is half an hour


class _Operations(TorchDispatchMode):
    """Counts operations, and kills the process at the one with this number."""

    def __init__(self, last: int = 0) -> None:
        super().__init__()
        self.num, self._last = 0, last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(item.__torch_dispatch__ != torch.Tensor.__torch_dispatch__ for item in types):
            return NotImplemented  # what they do inside comes here again
        self.num += 1
        if self.num == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **(kwargs or {}))


def trainer_of(system: System) -> Trainer:
    trainer = Trainer(system)
    matrices = [param for param in trainer.model.parameters() if param.dim() == 2]
    trainer.optimizer = Muon(muon_groups(trainer.model)) if system.is_ours else torch.optim.Muon(matrices)
    trainer.train(AT)
    return trainer


def backward(trainer: Trainer) -> None:
    trainer.model(batch(trainer.step)).square().mean().backward()


def count_operations(system: System) -> int:
    """A program: how many operations a step is on this rank."""
    trainer = trainer_of(system)
    backward(trainer)
    with _Operations() as operations:
        trainer.optimizer.step()
    return operations.num


def disturbed(system: System, case: str, last: int) -> list[Any]:
    """A program: what was raised, after how many seconds, whether anything had changed, and whether training went on
    when all ranks dropped their gradients."""
    trainer = trainer_of(system)
    backward(trainer)
    before, is_odd, begun, error = trainer.digest(), dist.get_rank() == 1, time.monotonic(), ""
    if is_odd and case == DIFFERENT:
        trainer.model.layers[0].weight.grad = None
    try:
        if is_odd and case == BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        if not (is_odd and case == SKIPPED):
            with _Operations(last if is_odd else 0):
                trainer.optimizer.step()
        backward(trainer)  # a rank that needed nothing of the dead one learns of it here
    except Exception as caught:
        error = as_text(caught)
    seconds, is_unchanged = time.monotonic() - begun, trainer.digest() == before
    goes_on = True
    try:
        trainer.optimizer.zero_grad()
        trainer.train(AT + 1)
    except Exception:
        goes_on = False
    return [error, seconds, is_unchanged, goes_on]


def problem_of(system: System, case: str, rank: int, result: Result) -> str:
    if result.kind != "returned":
        return f"it {case}: rank {rank} {result}"[:300]
    error, seconds, is_unchanged, goes_on = result.value
    if not error:
        return f"it {case}: rank {rank} raised nothing"
    if seconds > LONGEST:
        return f"it {case}: rank {rank} raised after {seconds:.0f} s"
    if "rank" not in error:
        return f"it {case}: the error on rank {rank} names none: {error[:200]}"
    if case in (BEFORE, SKIPPED, DIFFERENT) and not is_unchanged:
        return f"it {case}: rank {rank} had changed something"
    if goes_on != (case == DIFFERENT):
        return f"it {case}: rank {rank} {'went on alone' if goes_on else 'could not go on'}"
    return ""


def lost_in_muon(system: System, settings: Settings) -> Verdict:
    """All cases at once: most of it is waiting."""
    num = values(run(count_operations, system))[1]
    numbers = settings.some(range(1, num + 1, max(1, num // 6)), 2)
    cases = [(WITHIN.format(number), number) for number in numbers]
    cases += [(case, 0) for case in (BEFORE, SKIPPED, DIFFERENT)]
    with ExitStack() as stack:
        jobs = [(case, stack.enter_context(Job(disturbed, system, case, last))) for case, last in cases]
        problems = []
        for case, job in jobs:
            for rank, result in enumerate(job.finish((0,) if "dies" in case else None)):
                problems.append(problem_of(system, case, rank, result))
    done = (
        f"a rank dies before a step, at {len(numbers)} of its {num} operations, leaves it out or lacks a gradient: the "
        "others raise, with nothing changed unless it died in the step"
    )
    return verdict(done, [problem for problem in problems if problem])


FAULTS = [Fault("a rank is lost in a step of Muon", lost_in_muon)]

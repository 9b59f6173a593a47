"""Thousands of steps with random events, next to an unsharded twin; memory stays flat.

Every rank has the sharded model and an unsharded twin, which trains on the batches of all ranks. The events are drawn
alike on all ranks: exceptions in forward, in backward and in hooks, caught; evaluation; checkpoints saved and loaded
back; accumulation without sync; parameters frozen and trained again; gradients kept, zeroed or dropped; clipping; edits
of parameters; graphs that are thrown away; copies of the model; collections. In float64, where sums in another order
differ by 1e-15: a difference of 1e-8 is a fault.

RSS, storages alive, Python objects and open files are counted every so many steps, after a collection.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp_compose

from .fault import Fault, Settings, Verdict, verdict
from .jobs import LONG, run
from .systems import System
from .training import Net

WIDTH, ROWS, TOLERANCE = 12, 4, 1e-8
NUM_SAMPLES = 12  # of what is alive
WARM_UP = 4  # samples, while caches fill
SLACK_MIB = 16.0  # of the resident set, in which freed memory stays where the allocator likes


class _Raised(Exception):
    """By the soak."""


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise _Raised("in backward")


@dataclass
class Alive:
    """The resources that a process holds."""

    rss_mib: float
    storages: int
    objects: int
    files: int

    @staticmethod
    def now() -> Alive:
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        found = gc.get_objects()
        tensors = [x for x in found if issubclass(type(x), torch.Tensor) and type(x) in (torch.Tensor, nn.Parameter)]
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        return Alive(
            pages * os.sysconf("SC_PAGESIZE") / 2**20, len(storages), len(found), len(os.listdir("/proc/self/fd"))
        )


@dataclass
class Soak:
    """A sharded model, its twin, and what can happen to both."""

    system: System
    folder: Path
    draw: random.Random
    step: int = 0
    history: Counter[str] = field(default_factory=Counter)
    latest: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.twin = Net(WIDTH).double()
        self.model = copy.deepcopy(self.twin)
        self.system.shard(self.model)
        self.optimizer, self.twin_optimizer = (
            torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (self.model, self.twin)
        )
        self.saved: tuple[Path, Any] | None = None
        self.events: list[Callable[[], None]] = [
            *(self.raise_in_forward, self.raise_in_backward, self.raise_in_gradient_hook, self.evaluate, self.collect),
            *(self.save, self.load_back, self.freeze, self.accumulate, self.keep_gradients, self.zero_gradients),
            *(self.clip, self.edit, self.abandon_a_graph, self.read_full_state),
        ]
        if self.system.is_ours:  # FSDP2 has none of these
            self.events += [self.copy_the_model, self.functional_step, self.summon]

    def parts(self) -> list[torch.Tensor]:
        """A batch, in as many parts as there are ranks."""
        generator = torch.Generator().manual_seed(self.draw.randrange(2**31))
        rows = torch.randn(ROWS * dist.get_world_size(), WIDTH, generator=generator, dtype=torch.float64)
        return list(rows.chunk(dist.get_world_size()))

    def backward(self) -> None:
        """On both, of one batch."""
        parts = self.parts()
        self.model(parts[dist.get_rank()]).square().mean().backward()
        for part in parts:
            (self.twin(part).square().mean() / len(parts)).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.twin_optimizer.step()

    def zero(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        self.twin_optimizer.zero_grad(set_to_none)

    def train(self) -> None:
        self.backward()
        self.update()
        self.zero()

    def go_on(self) -> None:
        """A step, before some of which something happens."""
        name = "a step"
        if self.draw.random() < 0.4:
            event = self.draw.choice(self.events)
            name = event.__name__.replace("_", " ")
            self.latest = [*self.latest[-5:], f"{name} before step {self.step + 1}"]
            event()
        self.train()
        self.step += 1
        self.history[name] += 1

    # ---- events

    def _expect_raised(self, hooked: Callable[[Any], Any]) -> None:
        layer = self.draw.choice([*self.model.layers, self.model.head])
        handle = hooked(layer)
        try:
            with contextlib.suppress(_Raised):
                self.model(self.parts()[dist.get_rank()]).square().mean().backward()
                raise RuntimeError("the error that a hook raised did not reach the caller")
        finally:
            handle.remove()
        self.zero()

    def raise_in_forward(self) -> None:
        def raise_it(*_: Any) -> None:
            raise _Raised("in forward")

        self._expect_raised(lambda layer: layer.register_forward_hook(raise_it))

    def raise_in_backward(self) -> None:
        self._expect_raised(
            lambda layer: layer.register_forward_hook(lambda m, args, out: _RaisesInBackward.apply(out))
        )

    def raise_in_gradient_hook(self) -> None:
        def raise_it(module: nn.Module, grads: Any) -> None:
            raise _Raised("in a hook of backward")

        self._expect_raised(lambda layer: layer.register_full_backward_pre_hook(raise_it))

    def evaluate(self) -> None:
        part = self.parts()[0]
        with self.draw.choice((torch.no_grad, torch.inference_mode))():
            found, expected = self.model(part), self.twin(part)
        self._same(found, expected, "an evaluation")

    def collect(self) -> None:
        gc.collect()

    def save(self) -> None:
        if self.saved is not None and dist.get_rank() == 0:
            shutil.rmtree(self.saved[0])
        target = self.folder / f"step-{self.step}-{sum(self.history.values())}"
        self.system.save(self.system.state_of(self.model, self.optimizer), target)
        self.saved = target, copy.deepcopy((self.twin.state_dict(), self.twin_optimizer.state_dict()))

    def load_back(self) -> None:
        if self.saved is None:
            return
        state = self.system.state_of(self.model, self.optimizer)
        self.system.load(state, self.saved[0])
        self.system.set_state(self.model, self.optimizer, state)
        self.twin.load_state_dict(self.saved[1][0])
        self.twin_optimizer.load_state_dict(copy.deepcopy(self.saved[1][1]))  # it keeps what it is given

    def freeze(self) -> None:
        """A layer, for a step."""
        number = self.draw.randrange(2)
        layers = self.model.layers[number], self.twin.layers[number]
        for layer in layers:
            layer.requires_grad_(False)
        self.train()
        for layer in layers:
            layer.requires_grad_(True)

    def accumulate(self) -> None:
        with self.system.no_sync(self.model):
            for _ in range(self.draw.randrange(1, 3)):
                self.backward()

    def keep_gradients(self) -> None:
        self.backward()

    def zero_gradients(self) -> None:
        """To zeros, from a backward that has counted, or without sync."""
        self.backward()
        if self.draw.random() < 0.5:
            self.update()
        self.zero(set_to_none=False)

    def clip(self) -> None:
        self.backward()
        clip = fsdp_compose.clip_grad_norm_ if self.system.is_ours else nn.utils.clip_grad_norm_
        clip(self.model.parameters(), 0.1)
        nn.utils.clip_grad_norm_(self.twin.parameters(), 0.1)
        self.update()
        self.zero()

    def edit(self) -> None:
        with torch.no_grad():
            for model in (self.model, self.twin):
                for param in model.parameters():
                    param.mul_(0.999)

    def abandon_a_graph(self) -> None:
        self.model(self.parts()[dist.get_rank()])

    def read_full_state(self) -> None:
        for name, param in self.model.state_dict().items():
            self._same(param.full_tensor(), self.twin.state_dict()[name], f"{name} in state_dict()")

    def copy_the_model(self) -> None:
        part = self.parts()[0]
        with torch.no_grad():
            self._same(copy.deepcopy(self.model)(part), self.twin(part), "a copy of the model")

    def functional_step(self) -> None:
        with fsdp_compose.functional_mode(self.model):
            self.train()

    def summon(self) -> None:
        with fsdp_compose.summon_full_params(self.model):
            for param, expected in zip(self.model.parameters(), self.twin.parameters(), strict=True):
                self._same(param.detach(), expected.detach(), "summoned parameters")

    # ---- judging

    def difference(self) -> float:
        pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        return max((a.detach().full_tensor() - b.detach()).abs().max().item() for a, b in pairs)

    def _same(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        worst = torch.tensor((found.detach() - expected.detach()).abs().max().item(), dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if not worst.item() <= TOLERANCE:
            raise ValueError(f"{what} differs by {worst.item():.1e}")


def soak(system: System, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """A program: what went wrong first, and what was alive from time to time."""
    warnings.simplefilter("ignore")
    run_of_both = Soak(system, folder, random.Random(seed))
    samples, problem, start = [], "", time.monotonic()
    for step in range(steps):
        try:
            run_of_both.go_on()
            if step == 0:
                run_of_both.save()  # what it keeps for the next save is there from the beginning
            if step % 10 == 0 or step == steps - 1:
                difference = run_of_both.difference()
                problem = "" if difference <= TOLERANCE else f"parameters differ by {difference:.1e}"
        except BaseException as error:  # DCP's own error is no Exception
            problem = f"{type(error).__name__}: {error}"
        if problem:
            problem = f"step {step + 1} of {steps}: {problem}; events: {', '.join(run_of_both.latest)}"
            break
        if (step + 1) % max(1, steps // NUM_SAMPLES) == 0:
            samples.append(vars(Alive.now()))
    return {
        "problem": problem,
        "samples": samples,
        "seconds": time.monotonic() - start,
        "events": sum(run_of_both.history.values()) - run_of_both.history["a step"],
    }


def long_run(system: System, settings: Settings) -> Verdict:
    results = run(soak, system, settings.folder, settings.steps, settings.seed, limit=LONG)
    if any(result.kind != "returned" for result in results):
        return verdict("", [f"rank {rank} {result}" for rank, result in enumerate(results)])
    found = [result.value for result in results]
    problems = list(dict.fromkeys(value["problem"] for value in found if value["problem"]))
    growth = [text for rank, value in enumerate(found) for text in _growth(rank, value["samples"])]
    seconds = max(value["seconds"] for value in found) / settings.steps * 1000
    done = f"{settings.steps} steps, {found[0]['events']} events, {seconds:.0f} s per 1000 steps"
    if found[0]["samples"]:
        first, last = found[0]["samples"][0], found[0]["samples"][-1]
        done += f"; rank 0: RSS {first['rss_mib']:.0f} to {last['rss_mib']:.0f} MiB, {last['storages']} storages"
        done += f", {last['files']} files"
    return verdict(done, problems + ([] if problems else growth))


def _growth(rank: int, samples: list[dict[str, float]]) -> list[str]:
    """The resources of which there are more at the end than when caches had filled."""
    if len(samples) <= WARM_UP + 2:
        return []
    warm, last = samples[WARM_UP : WARM_UP + 2], samples[-1]
    found = []
    for what, slack in (("rss_mib", SLACK_MIB), ("storages", 0), ("objects", 200), ("files", 0)):
        before = max(sample[what] for sample in warm)
        if last[what] > before + slack:
            found.append(f"rank {rank}: {what} grew from {before:.0f} to {last[what]:.0f}")
    return found


FAULTS = [Fault("a soak of random events", long_run)]

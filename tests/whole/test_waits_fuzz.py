"""One rank leaves the common path at any call, so that ranks wait in any two of the places where ranks wait: the
rendezvous of many calls, the exchange at the end of a backward, collectives, sums of norms, rounds of optional groups.
Every rank raises within seconds, though the timeout of the process group is ten minutes."""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import clip_grad_norm_, fully_shard, no_sync, summon_full_params
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict, save
from tests.harness import run_forked
from tests.internals import impatient

SECONDS = 15
TOLERANCE = 15  # more, on a busy machine
NUM_PROGRAMS = int(os.environ.get("FSDP_COMPOSE_FUZZ", "3"))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.tower, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses_tower: bool = True) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.tower(x) if uses_tower else x).square().mean()


class Program:
    """A model, and the calls that a program makes of it, all of which wait for the other ranks."""

    def __init__(self, is_optional: bool, folder: str) -> None:
        self.folder, self.num_saved, self.is_optional = folder, 0, is_optional
        self.model, self.others = self._made(), []
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def _made(self) -> nn.Module:
        torch.manual_seed(0)
        model = Towers()
        fully_shard(model.tower, optional=self.is_optional)
        return fully_shard(model)

    def forward(self) -> torch.Tensor:
        rank = dist.get_rank()
        return self.model(torch.ones(2, 8), not self.is_optional or rank > 0)

    def train(self) -> None:
        self.forward().backward()
        self.optimizer.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.forward()

    def accumulate(self) -> None:
        with no_sync(self.model):
            self.forward().backward()

    def clip(self) -> None:
        clip_grad_norm_(self.model.parameters(), 1.0)

    def norm(self) -> None:
        self.model.first.weight.grad.norm()

    def gather(self) -> None:
        self.model.first.weight.full_tensor()

    def state_dict(self) -> None:
        get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))

    def save(self) -> None:
        self.num_saved += 1
        save(get_model_state_dict(self.model), os.path.join(self.folder, str(self.num_saved)))

    def summon(self) -> None:
        with summon_full_params(self.model):
            pass

    def first_forward(self) -> None:
        self.others.append(self._made())
        self.others[-1](torch.ones(2, 8))

    def fail(self) -> None:
        """Raises in a forward, which the rank catches; its next forward recovers."""
        hook = self.model.last.register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            self.forward()
        except ZeroDivisionError:
            pass
        except RuntimeError as error:
            if "raised an exception in this iteration" not in str(error):  # on another rank, in a round
                raise
        hook.remove()
        self.forward()


CALLS = [
    "train", "evaluate", "clip", "norm", "gather", "state_dict", "save", "summon", "first_forward", "fail",
]  # fmt: skip


def run(rank: int, size: int, port: int, calls: list[list[str]], is_optional: bool, folder: str) -> None:
    """All ranks train; then each makes its own calls, and says when and how it ends."""
    sys.stderr = sys.stdout
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    program = Program(is_optional, folder)
    for _ in range(2):
        program.train()
    program.forward().backward()
    dist.barrier()
    begin = time.monotonic()
    try:
        for name in calls[rank]:
            getattr(program, name)()
        print(f"END {time.monotonic() - begin:.1f} no error", flush=True)
        time.sleep(60)
    except RuntimeError as error:
        print(f"END {time.monotonic() - begin:.1f} {error}".replace("\n", " "), flush=True)
    time.sleep(1)
    os._exit(0)


def ends_of(folder: Path, calls: list[list[str]], is_optional: bool) -> list[tuple[float, str]]:
    """After how many seconds the program of each rank ended, and how."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder.mkdir()
    ends = []
    for _, said in run_forked(len(calls), folder, run, len(calls), store.port, calls, is_optional, str(folder)):
        line = next((line for line in said.splitlines() if line.startswith("END ")), f"END 999 it did not end: {said}")
        _, seconds, text = line.split(" ", 2)
        ends.append((float(seconds), text))
    return ends


def random_calls(choose: random.Random, size: int) -> list[list[str]]:
    """All ranks make the same calls, except that at one place one rank makes another call, or leaves the call out."""
    common = [choose.choice(CALLS) for _ in range(choose.randint(0, 2))]
    here, there = choose.sample(CALLS, 2)
    calls = [[*common, here, "train", "train"] for _ in range(size)]
    different = [there, here] if choose.random() < 0.5 else [there]
    calls[choose.randrange(size)] = [*common, *different, "train", "train"]
    return calls


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_optional", [False, True])
def test_wherever_one_rank_leaves_all_ranks_are_told_within_seconds(tmp_path, is_optional, size):
    choose = random.Random(f"{is_optional} {size}")
    for number in range(NUM_PROGRAMS):
        calls = random_calls(choose, size)
        ends = ends_of(tmp_path / str(number), calls, is_optional)
        shown = f"{calls}: {ends}"
        assert all(text != "no error" for _, text in ends), shown
        assert all(seconds < SECONDS + TOLERANCE for seconds, _ in ends), shown


# ---- ranks that are late, but do the same


def be_late(rank: int, size: int, port: int, calls: list[str], is_optional: bool, folder: str, seed: int) -> None:
    """Each rank comes to each call later than others, by times that are long for the thread that watches."""
    sys.stderr = sys.stdout
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    late = random.Random(seed * size + rank)
    with impatient(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of recovery
        program = Program(is_optional, folder)
        program.train()
        for name in calls:
            time.sleep(late.choice([0, 0, 0.3, 0.6, 1.0]))
            if name == "fail" and late.random() < 0.5:
                time.sleep(0.5)
            getattr(program, name)()
            if name in ("train", "fail"):
                program.forward().backward()
    print("END no error", flush=True)
    dist.barrier()
    os._exit(0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_optional", [False, True])
def test_ranks_that_are_late_are_not_taken_for_ranks_that_differ(tmp_path, is_optional, size):
    calls = random.Random(size).choices(CALLS, k=20)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_forked(size, tmp_path, be_late, size, store.port, calls, is_optional, str(tmp_path), 1, timeout=240)
    assert all("END no error" in said for _, said in ranks), [said[-3000:] for _, said in ranks]

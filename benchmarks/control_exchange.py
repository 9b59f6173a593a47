"""What the control exchange costs: one all-reduce of a few bytes at the end of every backward, on real gloo.

Two copies of one model train in the same processes, step by step in turn: one exchanges in every backward (the
default), the other has stopped after its first backwards (``FSDP_COMPOSE_EXCHANGE=first``). ``direct`` is the time
that the first copy spends inside the exchange (sending off, and waiting for the answer), of the slowest rank.

    python benchmarks/control_exchange.py                  # 2 processes, a minute
    python benchmarks/control_exchange.py --processes 4
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from models import GPT, TinyBlocks, num_groups
from systems import ours

from fsdp_compose import exchange

MODELS: dict[str, Callable[[], nn.Module]] = {"tiny blocks (48)": TinyBlocks, "GPT (8 x 256)": GPT}
MODES = {"every backward": None, "first backwards": "first"}


class ExchangeClock:
    """While entered, adds up the time that this process spends in exchanges."""

    def __init__(self) -> None:
        self.nanoseconds = 0
        self._originals = {name: getattr(exchange.ControlExchange, name) for name in ("start", "wait")}

    def __enter__(self) -> ExchangeClock:
        for name, original in self._originals.items():
            setattr(exchange.ControlExchange, name, self._timed(original))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(exchange.ControlExchange, name, original)

    def _timed(self, method: Callable[..., bool | None]) -> Callable[..., bool | None]:
        def timed(*args: object) -> bool | None:
            start = perf_counter_ns()
            result = method(*args)
            self.nanoseconds += perf_counter_ns() - start
            return result

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80, help="timed steps of each copy (default: 80)")
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_worker, (options.processes, server.port, options.steps), nprocs=options.processes)


def _worker(rank: int, world_size: int, port: int, num_steps: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size=world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if rank == 0:
        print(f"{world_size} processes, {num_steps} steps of each copy, medians.\n")
        print("| model | groups | step, every backward us | first backwards us | difference us | direct us |")
        print("|---|--:|--:|--:|--:|--:|")
    for name, build in MODELS.items():
        torch.manual_seed(0)
        base = build()
        every, first, direct = _measure(base, num_steps)
        if rank == 0:
            print(
                f"| {name} | {num_groups(base)} | {every:.0f} | {first:.0f} | {every - first:.0f} "
                f"({(every - first) / first:+.1%}) | {direct:.0f} |"
            )
    dist.destroy_process_group()


def _measure(base: nn.Module, num_steps: int) -> tuple[float, float, float]:
    """Median microseconds of a step in each of ``MODES``, and inside the exchanges of the first."""
    steps = []
    for setting in MODES.values():
        os.environ.pop(exchange.EXCHANGE_ENV, None)
        if setting is not None:
            os.environ[exchange.EXCHANGE_ENV] = setting
        model, optimizer = ours(base, False)
        data = base.example_input()

        def step(
            model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer, data: torch.Tensor = data
        ) -> None:
            model(data).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(exchange.FIRST_BACKWARDS + 5):
            step()
        steps.append(step)
    times: list[list[int]] = [[] for _ in steps]
    inside: list[int] = []
    for i in range(num_steps):
        for which in (0, 1) if i % 2 else (1, 0):
            dist.barrier()
            start = perf_counter_ns()
            if which == 0 and i % 4 < 2:  # half of them with the clock, which costs a little itself
                with ExchangeClock() as clock:
                    steps[which]()
                inside.append(clock.nanoseconds)
            else:
                steps[which]()
                times[which].append(perf_counter_ns() - start)
    slowest = torch.tensor([median(inside), *map(median, times)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    direct, every, first = (slowest / 1e3).tolist()
    return every, first, direct


if __name__ == "__main__":
    main()

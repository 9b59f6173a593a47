"""The cost of the control exchange: one all-reduce of a few bytes at the end of every backward, on real gloo.

Two copies of one model train in the same processes, step by step in turn: one exchanges in every backward (the
default), the other has stopped after its first backwards (``FSDP_COMPOSE_EXCHANGE=first``). ``direct`` is the time
that the first copy spends inside the exchange (sending off, and waiting for the answer), of the slowest rank.

    python benchmarks/control_exchange.py                  # 2 processes, a minute
    python benchmarks/control_exchange.py --processes 4
    python benchmarks/control_exchange.py --quick
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import report
import torch
import torch.distributed as dist
import torch.nn as nn
from models import GPT, TinyBlocks, num_groups
from processes import run_on_ranks
from report import column
from systems import OURS, ours

from fsdp_compose.comm import control_exchange as exchange

MODELS: dict[str, Callable[[], nn.Module]] = {"tiny blocks (48)": TinyBlocks, "GPT (8 x 256)": GPT}
QUICK_MODELS: dict[str, Callable[[], nn.Module]] = {"tiny blocks (2)": lambda: TinyBlocks(2)}
MODES = {"every backward": None, "first backwards": "first"}


@dataclass(frozen=True)
class Row:
    """Medians, in microseconds, of the slowest rank."""

    model: str = column("model")
    system: str = column("system")
    num_groups: int = column("groups")
    every_exchanges: int = column("exchanges in a step, every backward")
    first_exchanges: int = column("first backwards")
    every_us: float = column("step, every backward us", ".0f")
    first_us: float = column("first backwards us", ".0f")
    difference: float = column("difference", "+.1%")
    direct_us: float = column("direct us", ".0f")


class ExchangeClock:
    """While entered, counts the exchanges of this process, and adds up the time that it spends in them."""

    def __init__(self) -> None:
        self.nanoseconds = self.num_exchanges = 0
        self._originals = {name: getattr(exchange.ControlExchange, name) for name in ("start", "wait")}

    def __enter__(self) -> ExchangeClock:
        for name, original in self._originals.items():
            setattr(exchange.ControlExchange, name, self._timed(original, is_start=name == "start"))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(exchange.ControlExchange, name, original)

    def _timed(self, method: Callable[..., bool | None], is_start: bool) -> Callable[..., bool | None]:
        def timed(control: exchange.ControlExchange, *args: object) -> bool | None:
            start = perf_counter_ns()
            result = method(control, *args)
            self.nanoseconds += perf_counter_ns() - start
            self.num_exchanges += is_start and control.is_on
            return result

        return timed


def _worker(names: list[str], num_steps: int, path: Path) -> None:
    rows = []
    for name in names:
        torch.manual_seed(0)
        rows.append(_measure(name, num_steps))
    if dist.get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))


def _measure(name: str, num_steps: int) -> Row:
    base = (MODELS | QUICK_MODELS)[name]()
    steps = [_build_step(base, setting) for setting in MODES.values()]
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
    counts = [_count_exchanges(step) for step in steps]
    slowest = torch.tensor([median(inside), *map(median, times)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    direct, every, first = (slowest / 1e3).tolist()
    return Row(
        model=name,
        system=OURS,
        num_groups=num_groups(base),
        every_exchanges=counts[0],
        first_exchanges=counts[1],
        every_us=every,
        first_us=first,
        difference=(every - first) / first,
        direct_us=direct,
    )


def _build_step(base: nn.Module, setting: str | None) -> Callable[[], None]:
    """A training step of a copy of ``base`` that exchanges as ``setting`` says, after those in which all do."""
    os.environ.pop(exchange.EXCHANGE_ENV, None)
    if setting is not None:
        os.environ[exchange.EXCHANGE_ENV] = setting
    model, optimizer = ours(base, False)
    data = base.example_input()

    def step() -> None:
        model(data).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(exchange.FIRST_BACKWARDS + 5):
        step()
    return step


def _count_exchanges(step: Callable[[], None]) -> int:
    with ExchangeClock() as clock:
        step()
    return clock.num_exchanges


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, help="timed steps of each copy (default: 80; --quick: 8)")
    options = parser.parse_args()
    num_steps = options.steps or (8 if options.quick else 80)
    names = [*(QUICK_MODELS if options.quick else MODELS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        run_on_ranks(options.processes, _worker, names, num_steps, path)
        rows = [Row(**row) for row in json.loads(path.read_text())]
    settings = {"processes": options.processes, "steps": num_steps}
    result = report.Report("control_exchange", settings, rows)
    print(f"{options.processes} processes, {num_steps} steps of each copy, medians.\n\n{result.table()}")
    result.write(
        options.out,
        report.bars("model", "difference", unit="step with an exchange / without - 1"),
        report.bars("model", "direct_us", unit="us inside an exchange"),
    )


if __name__ == "__main__":
    main()

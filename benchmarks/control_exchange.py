"""The cost of the control exchange: a few bytes between all ranks at the end of every backward, on real gloo.

Two copies of one model train in the same processes, step by step in turn: one exchanges in every backward, in the other
the exchange is replaced by nothing. ``direct`` is the time that the first copy spends inside the exchange (sending off,
and waiting for the answer, also for ranks that come late), of the slowest rank. ``alone`` is that of exchanges one
after the other, without a model between them, and ``ring`` that of gloo's own all-reduce of as many bytes.

    python benchmarks/control_exchange.py                  # 2 processes, a minute
    python benchmarks/control_exchange.py --processes 4
    python benchmarks/control_exchange.py --quick
"""

from __future__ import annotations

import json
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

from fsdp_compose import fully_shard
from fsdp_compose.core.comm import control_exchange as exchange

MODELS: dict[str, Callable[[], nn.Module]] = {"tiny blocks (48)": TinyBlocks, "GPT (8 x 256)": GPT}
QUICK_MODELS: dict[str, Callable[[], nn.Module]] = {"tiny blocks (2)": lambda: TinyBlocks(2)}
WARM_UP = 15


@dataclass(frozen=True)
class Row:
    """Medians, in microseconds, of the slowest rank."""

    model: str = column("model")
    system: str = column("system")
    num_groups: int = column("groups")
    exchanges: int = column("exchanges in a step")
    with_us: float = column("step with us", ".0f")
    without_us: float = column("without us", ".0f")
    difference: float = column("difference", "+.1%")
    direct_us: float = column("direct us", ".0f")
    alone_us: float = column("alone us", ".0f")
    ring_us: float = column("ring us", ".0f")


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
            self.num_exchanges += is_start and control._carrier is not None
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
    steps = [_build_step(base, exchanges) for exchanges in (True, False)]
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
    alone, ring = _time_alone(num_steps)
    slowest = torch.tensor([median(inside), *map(median, times), alone, ring], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    direct, every, first, alone, ring = (slowest / 1e3).tolist()
    return Row(
        model=name,
        system=OURS,
        num_groups=num_groups(base),
        exchanges=counts[0],
        with_us=every,
        without_us=first,
        difference=(every - first) / first,
        direct_us=direct,
        alone_us=alone,
        ring_us=ring,
    )


def _time_alone(num_times: int) -> tuple[float, float]:
    """Medians, in nanoseconds, of an exchange, and of gloo's all-reduce of as many bytes, ranks being in step."""
    control = exchange.ControlExchange(1000, 50, exchange.Carrier.of(dist.group.WORLD))
    head = torch.zeros(exchange._HEAD.size, dtype=torch.uint8)
    times: dict[bool, list[int]] = {True: [], False: []}
    for i in range(10 * num_times):
        start = perf_counter_ns()
        if i % 2:
            control.start(i, None)
            control.wait()
        else:
            dist.all_reduce(head, dist.ReduceOp.MAX)
        times[bool(i % 2)].append(perf_counter_ns() - start)
    return median(times[True]), median(times[False])


def _build_step(base: nn.Module, exchanges: bool) -> Callable[[], None]:
    """A training step of a copy of ``base``; ``exchanges``: whether it exchanges, after its first step."""
    model, optimizer = ours(base, False)
    data = base.example_input()

    def step() -> None:
        model(data).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    if not exchanges:
        root = fully_shard.state(model).root
        assert root is not None
        root.exchange._carrier = root.forward_exchange._carrier = None
    for _ in range(WARM_UP):
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

"""Wall time of a training step on real gloo processes: DDP, FSDP1, FSDP2 and fsdp_compose on the same work.

Every rank of this machine is a process that the script starts. All systems train copies of one transformer, step by
step in turn, in another random order each round, the same on all ranks; a step is forward, backward, optimizer step and
``zero_grad``, between two barriers, and its time is that of the slowest rank. Medians; ratios to FSDP2 and to DDP, with
the quartiles of the ratios of single rounds.

Sharding gathers parameters that DDP keeps: its all-reduce is a reduce-scatter and an all-gather, and resharding adds
another all-gather of the blocks. So the same run times collectives of those sizes alone: what fsdp_compose may take
longer than DDP is that extra all-gather.

    python benchmarks/throughput.py                                   # 2 processes
    python benchmarks/throughput.py --processes 4
    python benchmarks/throughput.py --quick
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import report
import torch
import torch.distributed as dist
import torch.nn as nn
from models import GPT
from processes import run_on_ranks, time_in_turn
from report import column
from systems import DDP, FLAT, FSDP1, FSDP2, OURS, wrap

from fsdp_compose import flat_parameters

STEP_SYSTEMS = (DDP, FSDP1, FSDP2, OURS)
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather of the blocks alone", "reduce-scatter alone", "all-reduce alone"
GOAL = 0.70  # of FSDP2's step time
SEQUENCE = 64


@dataclass(frozen=True)
class Case:
    """A model and its input, per rank."""

    width: int
    tokens: int
    num_blocks: int = 8

    def __str__(self) -> str:
        return f"{self.width}x{self.tokens}"


FULL = (Case(512, 128), Case(768, 128), Case(512, 512), Case(768, 512))
QUICK = (Case(64, 64, num_blocks=3),)


@dataclass(frozen=True)
class Row:
    """Milliseconds are medians of the slowest rank's; rows of collectives have nothing but a time."""

    case: str = column("width x tokens")
    system: str = column("system")
    step_ms: float = column("step ms", ".1f")
    forward_ms: float | None = column("forward", ".1f")
    backward_ms: float | None = column("backward", ".1f")
    optimizer_ms: float | None = column("optimizer", ".1f")
    to_fsdp2: float | None = column("to FSDP2", ".3f")
    to_fsdp2_quartiles: tuple[float, float] | None = column("quartiles")
    to_ddp: float | None = column("to DDP", ".3f")
    loss: float | None = column("last loss", ".5f")


# ---- one rank


def _worker(cases: Sequence[Case], rounds: int, path: Path) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch, about its own use of its own functions
    rows: list[Row] = []
    for case in cases:
        rows += _measure(case, rounds)
        if dist.get_rank() == 0:
            path.write_text(json.dumps([asdict(row) for row in rows]))
            print(verdicts(rows)[-1], flush=True)


Action = Callable[[], tuple[float, ...]]  # returns the seconds of its parts


def _measure(case: Case, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    base = GPT(case.num_blocks, case.width, num_heads=8)
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(base.vocabulary, (case.tokens // SEQUENCE, SEQUENCE))
    steps = {system: TrainingStep(base, system, tokens) for system in STEP_SYSTEMS}
    actions: dict[str, Action] = {**steps, **_collectives(base)}
    return _rows(case, time_in_turn(actions, rounds), steps)


class TrainingStep:
    """One system at work."""

    def __init__(self, base: GPT, system: str, tokens: torch.Tensor) -> None:
        self.model = wrap(copy.deepcopy(base), system.removesuffix(FLAT))
        params = flat_parameters(self.model) if system.endswith(FLAT) else self.model.parameters()
        self.optimizer = torch.optim.AdamW(params, lr=1e-3, foreach=True)
        self.tokens = tokens
        self.loss = 0.0

    def __call__(self) -> tuple[float, float, float]:
        """Seconds of forward, of backward, and of optimizer step and ``zero_grad`` together."""
        start = perf_counter()
        logits = self.model(self.tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten())
        forward = perf_counter()
        loss.backward()
        backward = perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()
        return forward - start, backward - forward, perf_counter() - backward


def _collectives(base: GPT) -> dict[str, Action]:
    """One collective for each group, with the group's size, and nothing to compute meanwhile."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    blocks = [sum(param.numel() for param in block.parameters()) for block in base.blocks]
    groups = [*blocks, sum(param.numel() for param in base.parameters()) - sum(blocks)]
    # One buffer for all: collectives on it follow each other, and its memory is there already.
    shard = -(-max(groups) // world_size)
    flat = torch.zeros(shard * world_size)
    own = flat[rank * shard : (rank + 1) * shard]

    def all_gather() -> tuple[float, ...]:
        for numel in blocks:
            numel //= world_size
            dist.all_gather_into_tensor(flat[: numel * world_size], own[:numel])
        return ()

    def reduce_scatter() -> tuple[float, ...]:
        for numel in groups:
            numel //= world_size
            dist.reduce_scatter_tensor(own[:numel], flat[: numel * world_size])
        return ()

    def all_reduce() -> tuple[float, ...]:
        for numel in groups:
            dist.all_reduce(flat[:numel])
        return ()

    return {ALL_GATHER: all_gather, REDUCE_SCATTER: reduce_scatter, ALL_REDUCE: all_reduce}


def _rows(case: Case, times: dict[str, list[list[float]]], steps: dict[str, TrainingStep]) -> list[Row]:
    medians = {name: [median(part) for part in zip(*runs, strict=True)] for name, runs in times.items()}
    rows = []
    for name, (whole, *parts) in medians.items():
        is_step = name in steps
        rows.append(
            Row(
                case=str(case),
                system=name,
                step_ms=whole,
                forward_ms=parts[0] if is_step else None,
                backward_ms=parts[1] if is_step else None,
                optimizer_ms=parts[2] if is_step else None,
                to_fsdp2=whole / medians[FSDP2][0] if is_step else None,
                to_fsdp2_quartiles=_quartiles(times[name], times[FSDP2]) if is_step else None,
                to_ddp=whole / medians[DDP][0] if is_step else None,
                loss=steps[name].loss if is_step else None,
            )
        )
    return rows


def _quartiles(runs: list[list[float]], references: list[list[float]]) -> tuple[float, float]:
    ratios = [run[0] / reference[0] for run, reference in zip(runs, references, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return round(low, 3), round(high, 3)


# ---- the parent


def verdicts(rows: list[Row]) -> list[str]:
    """For each case, a sentence on the goals."""
    sentences = []
    for case in dict.fromkeys(row.case for row in rows):
        ms = {row.system: row.step_ms for row in rows if row.case == case}
        ratio, excess, extra = ms[OURS] / ms[FSDP2], ms[OURS] - ms[DDP], ms[ALL_GATHER]
        split = ms[REDUCE_SCATTER] + ms[ALL_GATHER] - ms[ALL_REDUCE]
        sentences.append(
            f"{case}: {ratio:.3f} of FSDP2's step (goal {GOAL}: {'met' if ratio <= GOAL else 'missed'}); "
            f"{excess:+.1f} ms beyond DDP, of which the extra all-gather explains {extra:.1f} ms "
            f"({'met' if excess <= extra else 'missed'}), and that a reduce-scatter and an all-gather take longer than "
            f"an all-reduce {split:.1f} ms"
        )
    return sentences


def _case(name: str) -> Case:
    width, tokens = map(int, name.split("x"))
    return Case(width, tokens)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="timed steps of each system (default: 20; --quick: 4)")
    parser.add_argument("--cases", nargs="+", help=f"width x tokens: {' '.join(map(str, FULL))} (default: all)")
    options = parser.parse_args()
    cases = QUICK if options.quick else FULL if options.cases is None else [_case(name) for name in options.cases]
    rounds = options.rounds or (4 if options.quick else 20)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        run_on_ranks(options.processes, _worker, cases, rounds, path)
        rows = [Row(**row) for row in json.loads(path.read_text())]
    settings = {"processes": options.processes, "rounds": rounds, "num_blocks": cases[0].num_blocks}
    result = report.Report(f"throughput_{options.processes}", settings, rows)
    print(
        f"{options.processes} gloo processes, {rounds} rounds, {settings['num_blocks']} blocks; wall time, medians.\n"
    )
    print(result.table())
    result.write(options.out, report.bars("case", "to_fsdp2", unit="step time / FSDP2's", line=GOAL))


if __name__ == "__main__":
    main()

"""Wall time of a training step in which every rank holds all parameters: DDP with its gradients in buckets
(``gradient_as_bucket_view``), torch's ``replicate`` of FSDP2's machinery, and fsdp_compose's, also with an optimizer
over flat views.

As ``throughput.py`` measures: all systems train copies of one model, step by step in turn, in another random order
each round, the same on all ranks; the time of a step is that of the slowest rank. Medians of the ratios of single
rounds, in each of which the load of the machine was about the same, with their quartiles. CPU time is that of all
threads of a rank, the larger one: what a step takes where every core has something to do; what else runs changes it
little.

    python benchmarks/replicate.py                                    # 2 processes
    python benchmarks/replicate.py --sizes 13
    python benchmarks/replicate.py --quick
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import process_time

import report
import torch
import torch.distributed as dist
from models import GPT
from processes import run_on_ranks, time_in_turn
from report import column
from systems import DDP, FLAT, OURS_REPLICATE, TORCH_REPLICATE
from throughput import TrainingStep

OURS_FLAT = OURS_REPLICATE + FLAT
SYSTEMS = (DDP, TORCH_REPLICATE, OURS_REPLICATE, OURS_FLAT)
GOALS = {DDP: 1.0, TORCH_REPLICATE: 0.7}
SIZES = {"0.1": (2, 64), "3.4": (4, 256), "13": (4, 512)}  # millions of parameters: blocks, width
SEQUENCE = 64


@dataclass(frozen=True)
class Row:
    parameters: int = column("parameters", ",")
    system: str = column("system")
    step_ms: float = column("step ms", ".2f")
    forward_ms: float = column("forward", ".2f")
    backward_ms: float = column("backward", ".2f")
    optimizer_ms: float = column("optimizer", ".2f")
    to_ddp: float = column("to DDP", ".3f")
    to_ddp_quartiles: tuple[float, float] = column("quartiles")
    to_torch: float = column("to torch's replicate", ".3f")
    cpu_ms: float = column("CPU ms", ".2f")
    cpu_to_ddp: float = column("to DDP", ".3f")
    load: float = column("load", ".1f")


def _worker(sizes: Sequence[str], rounds: int, tokens: int, path: Path) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    rows: list[Row] = []
    for size in sizes:
        rows += _measure(size, rounds, tokens)
        if dist.get_rank() == 0:
            path.write_text(json.dumps([asdict(row) for row in rows]))


def _measure(size: str, rounds: int, num_tokens: int) -> list[Row]:
    torch.manual_seed(0)
    num_blocks, width = SIZES[size]
    base = GPT(num_blocks, width, num_heads=8)
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(base.vocabulary, (max(1, num_tokens // SEQUENCE), SEQUENCE))
    steps = {system: TrainingStep(base, system, tokens) for system in SYSTEMS}
    slowest = time_in_turn({system: partial(_with_cpu_time, step) for system, step in steps.items()}, rounds)
    losses = {system: step.loss for system, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-2, losses
    numel = sum(param.numel() for param in base.parameters())
    return [_row(numel, system, slowest) for system in SYSTEMS]


def _with_cpu_time(step: TrainingStep) -> tuple[float, ...]:
    begun = process_time()
    parts = step()
    return *parts, process_time() - begun


def _row(numel: int, system: str, slowest: dict[str, list[list[float]]]) -> Row:
    whole, forward, backward, optimizer, cpu = (median(part) for part in zip(*slowest[system], strict=True))
    to_ddp, to_torch = (
        [run[0] / reference[0] for run, reference in zip(slowest[system], slowest[other], strict=True)]
        for other in (DDP, TORCH_REPLICATE)
    )
    low, _, high = quantiles(to_ddp, n=4)
    cpu_to_ddp = [run[-1] / reference[-1] for run, reference in zip(slowest[system], slowest[DDP], strict=True)]
    return Row(
        numel,
        system,
        whole,
        forward,
        backward,
        optimizer,
        median(to_ddp),
        (round(low, 3), round(high, 3)),
        median(to_torch),
        cpu,
        median(cpu_to_ddp),
        os.getloadavg()[0],
    )


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="timed steps of each system (default: 60; --quick: 4)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES], help="millions of parameters")
    parser.add_argument("--tokens", type=int, default=128, help="of a rank's batch")
    options = parser.parse_args()
    sizes = ["0.1"] if options.quick else options.sizes
    rounds = options.rounds or (4 if options.quick else 60)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        run_on_ranks(options.processes, _worker, sizes, rounds, options.tokens, path)
        rows = [Row(**row) for row in json.loads(path.read_text())]
    settings = {"processes": options.processes, "rounds": rounds, "tokens": options.tokens}
    result = report.Report(f"replicate_{options.processes}", settings, rows)
    print(f"{options.processes} gloo processes, {rounds} rounds, {options.tokens} tokens; wall time, medians.\n")
    print(result.table())
    for row in rows:
        if row.system in (OURS_REPLICATE, OURS_FLAT):
            print(
                f"{row.system}, {row.parameters:,} parameters: {row.to_ddp:.3f} of DDP's step (goal {GOALS[DDP]}), ",
                end="",
            )
            print(f"{row.to_torch:.3f} of torch's replicate's (goal {GOALS[TORCH_REPLICATE]}), ", end="")
            print(f"{row.cpu_to_ddp:.3f} of DDP's CPU time")
    result.write(options.out, report.bars("parameters", "to_ddp", unit="step time / DDP's", line=GOALS[DDP]))


if __name__ == "__main__":
    main()

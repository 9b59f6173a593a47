"""What the number of ranks costs the host of one of them, from 8 to 16,384: ours beside FSDP2.

One process plays a rank of many under a process group whose collectives do nothing; each system and number of ranks in
a process of its own. CPU time of one thread, per group of 12 tiny parameters: of a step (forward and backward), of the
``fully_shard`` calls, the first forward, an AdamW step, ``clip_grad_norm_`` and ``state_dict()``; and the memory that a
parameter takes once it is sharded. Besides, from plans alone: the padding of a block with fused experts, and what the
exchange at the end of a backward needs (messages in a row, and connections).

    python benchmarks/scale.py                     # about ten minutes, most of it FSDP2 among 16,384 ranks
    python benchmarks/scale.py --ranks 8 1024
    python benchmarks/scale.py --quick
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from time import process_time_ns

import null_process_group
import report
import torch
import torch.distributed as dist
from models import TinyBlocks, num_groups
from report import column
from shapes import MODELS
from systems import FSDP2, OURS, SYSTEMS

from fsdp_compose import clip_grad_norm_
from fsdp_compose.core.comm.control_exchange import rounds_of
from fsdp_compose.core.flat.layout import ParamSpec, plan_layout

RANKS, QUICK_RANKS = (8, 64, 512, 4096, 16384), (8, 512)
GROUPS, QUICK_GROUPS = 24, 4
REPEATS, QUICK_REPEATS = 20, 4
PARAMS_OF_GROUP = 12
ALIGNMENT = 8  # elements of bf16
SIMULATED_ENV = "FSDP_COMPOSE_SIMULATED"


@dataclass(frozen=True)
class Row:
    """Microseconds per group; bytes per parameter; fractions of the model."""

    num_ranks: int = column("ranks")
    system: str = column("system")
    step_us: float = column("step us", ".0f")
    fully_shard_us: float = column("fully_shard us", ".0f")
    first_forward_us: float = column("first forward us", ".0f")
    adamw_us: float = column("AdamW us", ".0f")
    clip_us: float = column("clip us", ".0f")
    state_dict_us: float = column("state_dict us", ".0f")
    param_bytes: float = column("bytes / parameter", ".0f")
    padding: float = column("padding", ".2%")
    exchange_hops: int | None = column("messages in a row")
    connections: int | None = column("connections")


def measure(num_ranks: int, system: str, num_blocks: int, repeats: int) -> Row:
    """In a process of its own."""
    os.environ[SIMULATED_ENV] = "1"
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # simulated collectives leave arbitrary numbers behind
    torch.manual_seed(0)
    null_process_group.init(min(3, num_ranks - 1), num_ranks)
    SYSTEMS[system](TinyBlocks(2), False)  # what only the first model costs
    base = TinyBlocks(num_blocks)
    groups, data = num_groups(base), base.example_input()
    model = copy.deepcopy(base)
    gc.collect()
    gc.disable()
    before = _resident_bytes()
    made: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = []
    in_call = _timed(lambda: made.append(SYSTEMS[system](model, False)))
    param_bytes = (_resident_bytes() - before) / (groups * PARAMS_OF_GROUP)
    sharded, optimizer = made[0]
    first = _timed(lambda: sharded(data))
    clip = clip_grad_norm_ if system == OURS else torch.nn.utils.clip_grad_norm_

    def step() -> None:
        sharded(data).sum().backward()

    def iteration() -> tuple[int, int, int, int]:
        times = (
            _timed(step),
            _timed(lambda: clip(sharded.parameters(), 1.0)),
            _timed(optimizer.step),
            _timed(sharded.state_dict),
        )
        optimizer.zero_grad()
        return times

    for _ in range(3):
        iteration()
    steps, clips, adamws, dicts = (median(times) for times in zip(*(iteration() for _ in range(repeats)), strict=True))
    dist.destroy_process_group()
    rounds, is_ours = rounds_of(num_ranks - 1, num_ranks), system == OURS
    return Row(
        num_ranks=num_ranks,
        system=system,
        step_us=steps / groups / 1e3,
        fully_shard_us=in_call / groups / 1e3,
        first_forward_us=first / groups / 1e3,
        adamw_us=adamws / groups / 1e3,
        clip_us=clips / groups / 1e3,
        state_dict_us=dicts / groups / 1e3,
        param_bytes=param_bytes,
        padding=padding_of(system, num_ranks),
        exchange_hops=len(rounds) if is_ours else None,
        connections=len({item.partner for item in rounds}) if is_ours else None,
    )


def padding_of(system: str, num_ranks: int) -> float:
    """Padding of a block with few, large experts, whose rows are long, relative to its payload."""
    shapes = MODELS["128 fused experts"]
    if system == OURS:
        specs = [ParamSpec(str(i), shape) for i, shape in enumerate(shapes)]
        return plan_layout(specs, num_ranks, ALIGNMENT).padding_fraction
    payload = sum(map(prod, shapes))
    held = sum(-(-shape[0] // num_ranks) * num_ranks * prod(shape[1:]) for shape in shapes)  # rows of dim 0
    return held / payload - 1


def _timed(action: Callable[[], object]) -> int:
    """Nanoseconds of this process."""
    start = process_time_ns()
    action()
    return process_time_ns() - start


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help=f"default: {RANKS}")
    parser.add_argument("--systems", nargs="+", default=[FSDP2, OURS], choices=[FSDP2, OURS])
    options = parser.parse_args()
    ranks = options.ranks or (QUICK_RANKS if options.quick else RANKS)
    blocks, repeats = (QUICK_GROUPS, QUICK_REPEATS) if options.quick else (GROUPS, REPEATS)
    cases = [(num_ranks, system, blocks, repeats) for num_ranks in ranks for system in options.systems]
    rows = []
    for case in cases:
        with multiprocessing.get_context("fork").Pool(1) as pool:  # this process has not used torch
            rows.append(pool.apply(measure, case))
    settings = {"blocks": blocks, "repeats": repeats, "parameters of a group": PARAMS_OF_GROUP}
    result = report.Report("scale", settings, rows)
    print(f"One rank of many, {blocks} blocks, medians of {repeats} steps.\n\n{result.table()}")
    result.write(
        options.out,
        report.lines("num_ranks", "step_us", unit="step, us a group"),
        report.lines("num_ranks", "fully_shard_us", unit="fully_shard, us a group"),
        report.lines("num_ranks", "param_bytes", unit="bytes a parameter"),
    )


if __name__ == "__main__":
    main()

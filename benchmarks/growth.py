"""How the host's cost of sharding grows with the number of groups and with the number of ranks.

For each size, under a simulated process group (one process plays one rank):

- step: what a forward and backward costs beyond the plain model's, per group. It should not grow.
- first forward: what the first forward costs beyond a later one (lazy initialisation), per group.
- fully_shard: the calls themselves, per group; besides, on a model on the meta device, where no elements are copied.

CPU time of this process on one thread. Models of 12 tiny parameters a group leave the kernels almost nothing to do.

    python benchmarks/growth.py    # 12 to 384 groups at 64 ranks; 8 to 4096 ranks at 48 groups; 100, 1000 on meta
    python benchmarks/growth.py --part "groups on meta"
    python benchmarks/growth.py --quick
"""

from __future__ import annotations

import copy
import gc
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import process_time_ns

import null_process_group
import report
import torch
import torch.distributed as dist
import torch.nn as nn
from models import TinyBlocks, num_groups
from report import column
from systems import FSDP2, OURS, PLAIN, wrap

SYSTEMS = (PLAIN, FSDP2, OURS)
GROUPS, RANKS = (12, 24, 48, 96, 192, 384), (8, 64, 512, 4096)
RANKS_FOR_GROUPS, GROUPS_FOR_RANKS = 64, 48
GROUPS_ON_META, RANKS_ON_META = (100, 1000), 8  # among more ranks FSDP2's calls take longer
PARTS = BY_GROUPS, BY_RANKS, ON_META = ("groups", "ranks", "groups on meta")
QUICK_GROUPS, QUICK_RANKS = (3, 12), (8, 512)


@dataclass(frozen=True)
class Row:
    """Microseconds per group."""

    varied: str = column("varied")
    num_groups: int = column("groups")
    num_ranks: int = column("ranks")
    system: str = column("system")
    step_us: float | None = column("step us", ".1f")
    first_forward_us: float | None = column("first forward us", ".0f")
    fully_shard_us: float = column("fully_shard us", ".0f")
    step_growth: float | None = column("step growth", ".2f")
    first_forward_growth: float | None = column("first forward growth", ".2f")
    fully_shard_growth: float = column("fully_shard growth", ".2f")


@dataclass
class Times:
    """Nanoseconds, one of each repeat."""

    fully_shard: list[int]
    first_forward: list[int]
    forward: list[int]
    step: list[int]


def timed(action: Callable[[], object]) -> int:
    start = process_time_ns()
    action()
    return process_time_ns() - start


def measure(groups: int, ranks: int, repeats: int, rebuilds: int) -> dict[str, tuple[float, float, float]]:
    """For each sharding system, microseconds per group of a step, of lazy initialisation, and of ``fully_shard``."""
    null_process_group.init(min(3, ranks - 1), ranks)
    base = TinyBlocks(groups - 1)
    assert num_groups(base) == groups
    data = base.example_input()
    times = {system: Times([], [], [], []) for system in SYSTEMS}
    models: dict[str, nn.Module] = {}
    for _ in range(rebuilds):
        for system in random.sample(SYSTEMS, len(SYSTEMS)):
            models[system] = model = copy.deepcopy(base)
            gc.collect()
            times[system].fully_shard.append(timed(lambda model=model, system=system: wrap(model, system)))
            times[system].first_forward.append(timed(lambda model=model: model(data)))
            model(data).sum().backward()  # the backward side of lazy initialisation, and the order to prefetch in
            model(data)
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(repeats):
        for system in random.sample(SYSTEMS, len(SYSTEMS)):
            model = models[system]
            model.zero_grad()
            _step(model, data)  # now the caches hold this system's code and data, not its predecessor's
            model.zero_grad()
            forward, whole = _step(model, data)
            times[system].forward.append(forward)
            times[system].step.append(whole)
    gc.enable()
    gc.unfreeze()
    dist.destroy_process_group()
    return {system: _per_group(times[system], times[PLAIN], groups) for system in SYSTEMS if system != PLAIN}


def _step(model: nn.Module, data: torch.Tensor) -> tuple[int, int]:
    start = process_time_ns()
    loss = model(data).sum()
    forward = process_time_ns()
    loss.backward()
    return forward - start, process_time_ns() - start


def _per_group(times: Times, plain: Times, groups: int) -> tuple[float, float, float]:
    in_us = 1e3 * groups
    return (
        (median(times.step) - median(plain.step)) / in_us,
        (median(times.first_forward) - median(times.forward)) / in_us,
        median(times.fully_shard) / in_us,
    )


def sweep(varied: str, sizes: list[tuple[int, int]], repeats: int, rebuilds: int) -> list[Row]:
    """Rows for each (groups, ranks); growth is to the first of them."""
    rows = []
    first: dict[str, tuple[float, float, float]] = {}
    for groups, ranks in sizes:
        for system, figures in measure(groups, ranks, repeats, rebuilds).items():
            origin = first.setdefault(system, figures)
            growth = [figure / before for figure, before in zip(figures, origin, strict=True)]
            rows.append(Row(varied, groups, ranks, system, *figures, *growth))
    return rows


def on_meta(sizes: tuple[int, ...], ranks: int, rebuilds: int) -> list[Row]:
    """Rows of the calls alone, for models on the meta device. Python's garbage collector runs, as in a program."""
    rows = []
    first: dict[str, float] = {}
    null_process_group.init(min(3, ranks - 1), ranks)
    for groups in sizes:
        times: dict[str, list[int]] = {FSDP2: [], OURS: []}
        for _ in range(rebuilds):
            for system in random.sample([*times], len(times)):
                with torch.device("meta"):
                    model = TinyBlocks(groups - 1)
                gc.collect()
                times[system].append(timed(lambda model=model, system=system: wrap(model, system)))
        for system, of_system in times.items():
            figure = median(of_system) / 1e3 / groups
            growth = figure / first.setdefault(system, figure)
            rows.append(Row(ON_META, groups, ranks, system, None, None, figure, None, None, growth))
    dist.destroy_process_group()
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, help="timed steps of each system and size (default: 15; --quick: 3)")
    parser.add_argument("--rebuilds", type=int, help="models built of each system and size (default: 3; --quick: 1)")
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS, help="what to vary (default: each)")
    options = parser.parse_args()
    repeats = options.repeats or (3 if options.quick else 15)
    rebuilds = options.rebuilds or (1 if options.quick else 3)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # FSDP2, about the head's output
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch, about its own use of its own functions
    os.environ["FSDP_COMPOSE_SIMULATED"] = "1"  # no other rank exists
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # simulated collectives leave arbitrary numbers behind; denormal ones are slow
    torch.manual_seed(0)
    random.seed(0)
    groups, ranks = (QUICK_GROUPS, QUICK_RANKS) if options.quick else (GROUPS, RANKS)
    fixed_groups = QUICK_GROUPS[0] if options.quick else GROUPS_FOR_RANKS
    measure(groups[0], ranks[0], 1, 1)  # what a process pays once: imports, caches
    rows = []
    if BY_GROUPS in options.part:
        rows += sweep(BY_GROUPS, [(number, RANKS_FOR_GROUPS) for number in groups], repeats, rebuilds)
    if BY_RANKS in options.part:
        rows += sweep(BY_RANKS, [(fixed_groups, number) for number in ranks], repeats, rebuilds)
    if ON_META in options.part:
        rows += on_meta(QUICK_GROUPS if options.quick else GROUPS_ON_META, RANKS_ON_META, rebuilds)
    result = report.Report("growth", {"repeats": repeats, "rebuilds": rebuilds}, rows)
    print(
        f"CPU time per group, null process group, medians of {repeats} steps and {rebuilds} models. Step: beyond "
        "plain's. First forward: beyond a later one. Growth: to the first size.\n"
    )
    print(result.table())
    result.write(
        options.out,
        report.lines("num_groups", "step_us", unit="step us per group", only=lambda row: row.varied == BY_GROUPS),
        report.lines(
            "num_groups",
            "first_forward_us",
            unit="first forward us per group",
            only=lambda row: row.varied == BY_GROUPS,
        ),
        report.lines("num_ranks", "step_us", unit="step us per group", only=lambda row: row.varied == BY_RANKS),
        report.lines(
            "num_ranks", "fully_shard_us", unit="fully_shard us per group", only=lambda row: row.varied == BY_RANKS
        ),
    )


if __name__ == "__main__":
    main()

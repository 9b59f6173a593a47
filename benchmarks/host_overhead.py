"""The cost of sharding on the host: CPU time that a training step spends beyond the same step of the plain model.

48 blocks of 12 tiny parameters leave the kernels almost nothing to do, so the difference to the plain model, divided
by the number of groups, is what one group costs the host per forward and backward. The figure of merit is

    ratio = (system - plain) / (FSDP2 - plain)

of forward and backward, and of whole steps. With ``--experts`` gradients are clipped in each step, and the experts of a
block are on a mesh of their own: 8 ranks have different ones, and those that have the same share the shards.

How it is measured: one process plays one of ``--world`` ranks under a simulated process group; process CPU time on one
thread, so that waiting and other processes do not count. Each system is measured in a process of its own, next to the
plain model and FSDP2 (a training process has one model; the more of them, the less of each is in the caches): in turn,
each repeat in another random order, an untimed step directly before each timed one, the garbage collector off, medians
over the repeats. (``--quick``: all in one process.)

Two simulated process groups:

- ``null`` does nothing (``null_process_group.py``).
- ``fake`` is torch's. Its all-gather copies the shard into each rank's place, one small copy per rank, which no real
  backend does on the host. So the time inside the process group's methods is measured too (in a step of its own);
  "net ratio" has it subtracted from both sides.

    python benchmarks/host_overhead.py                # both process groups, 8 and 64 ranks, fp32 and bf16 parameters
    python benchmarks/host_overhead.py --backend null --world 64
    python benchmarks/host_overhead.py --backend null --world 64 --compiled    # blocks compiled one by one
    python benchmarks/host_overhead.py --backend null --world 64 --layout hybrid --systems fsdp_compose    # or tensor
    python benchmarks/host_overhead.py --backend null --world 64 --blocks 4 --experts 128    # as DeepSeek-V3's
    python benchmarks/host_overhead.py --quick
    python benchmarks/host_overhead.py --ablate       # what each check of fsdp_compose costs
    python benchmarks/host_overhead.py --against ../before --rounds 11    # this checkout and another one, in turn
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import process_time_ns
from typing import Any

import null_process_group
import report
import torch
import torch.distributed as dist
from models import Block, TinyBlocks, TinyMixtures, num_groups
from report import column
from systems import (
    FLAT_MESH,
    FSDP2,
    HYBRID_MESH,
    NO_COPIES,
    NO_COPY_OUT,
    OURS,
    PLAIN,
    SYSTEMS,
    TENSOR_MESH,
    clip,
    lay_out,
)  # fmt: skip
from torch.testing._internal.distributed.fake_pg import FakeStore

BACKENDS, WORLDS = ("null", "fake"), (64, 8)
PRECISIONS = {"fp32": False, "bf16/fp32": True}  # parameter/reduction dtype; whether that is mixed precision
OTHERS = [system for system in SYSTEMS if system not in (PLAIN, FSDP2)]
SIMULATED_ENV = "FSDP_COMPOSE_SIMULATED"
GOAL = 0.10  # of FSDP2's overhead, and of its optimizer step over flat views

Case = tuple[str, str]  # precision, system
_CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Setting:
    """The conditions under which one process measures its cases."""

    backend: str
    world: int
    is_compiled: bool
    num_blocks: int
    repeats: int
    takes_lowest: bool = False  # of the repeats, not their median: noise only adds
    layout: str = FLAT_MESH
    num_experts: int = 0  # of each block


@dataclass(frozen=True)
class Row:
    """One system at one precision. Overheads are microseconds per group, for one forward and backward, beyond plain;
    ``collectives_us`` is what the process group's own collectives take of them. Ratios are to FSDP2."""

    backend: str = column("group")
    world: int = column("ranks")
    blocks: str = column("blocks")
    precision: str = column("precision")
    system: str = column("system")
    forward_ms: float = column("forward ms", ".2f")
    backward_ms: float = column("backward", ".2f")
    clip_ms: float = column("clip", ".2f")
    optimizer_ms: float = column("optimizer + zero_grad", ".2f")
    overhead_us: float | None = column("overhead us", ".1f")
    collectives_us: float | None = column("of it collectives", ".1f")
    ratio: float | None = column("ratio", ".3f")
    net_ratio: float | None = column("net ratio", ".3f")
    optimizer_ratio: float | None = column("optimizer ratio", ".3f")
    step_ratio: float | None = column("ratio of whole steps", ".3f")

    @property
    def case(self) -> str:
        return f"{self.backend} {self.world} {self.precision}"


# ---- what is timed


class TrainingStep:
    """One system at one precision."""

    def __init__(self, base: TinyBlocks, precision: str, system: str, is_compiled: bool) -> None:
        is_mixed = PRECISIONS[precision]
        self.model, self.optimizer = SYSTEMS[system](base, is_mixed)
        self.system, self.clips = system, isinstance(base, TinyMixtures)
        if is_compiled:
            for module in self.model.modules():
                if isinstance(module, Block):  # the block itself, not FSDP1's wrapper around it
                    module.compile()
        self.input = base.example_input()
        if is_mixed and system == PLAIN:
            self.input = self.input.bfloat16()  # the sharded systems cast by themselves

    def run(self) -> tuple[int, int, int, int]:
        """Nanoseconds of forward, of backward, of clipping, and of optimizer step and ``zero_grad`` together."""
        start = process_time_ns()
        loss = self.model(self.input).sum()
        forward_end = process_time_ns()
        loss.backward()
        backward_end = process_time_ns()
        if self.clips:
            clip(self.system, self.model, self.optimizer)
        clip_end = process_time_ns()
        self.optimizer.step()
        self.optimizer.zero_grad()
        times = forward_end - start, backward_end - forward_end, clip_end - backward_end
        return *times, process_time_ns() - clip_end


class CollectiveClock:
    """While entered, adds up the time that this process spends inside the methods of process groups.

    In place, because the same calls in a loop of their own, with warm caches, take only two thirds of the time.
    """

    METHODS = (
        *("allgather", "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"),
        *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    )

    def __init__(self) -> None:
        self.nanoseconds = 0
        # From vars(), not by getattr(), which unwraps what makes these C++ functions methods.
        self._originals = {
            name: vars(dist.ProcessGroup)[name] for name in self.METHODS if hasattr(dist.ProcessGroup, name)
        }

    def __enter__(self) -> CollectiveClock:
        for name in self._originals:
            setattr(dist.ProcessGroup, name, self._timed(getattr(dist.ProcessGroup, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)

    def _timed(self, method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        def timed(*args: Any, **kwargs: Any) -> dist.Work:
            start = process_time_ns()
            work = method(*args, **kwargs)
            self.nanoseconds += process_time_ns() - start
            return work

        return timed


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one training step; ``collectives`` are part of forward and backward."""

    forward: float
    backward: float
    clip: float
    optimizer: float
    collectives: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward + self.clip + self.optimizer


def time_steps(
    steps: Mapping[Case, TrainingStep],
    repeats: int,
    turn: Callable[[], AbstractContextManager[None]],
    summarise: Callable[[Sequence[int]], float],
) -> dict[Case, StepTime]:
    """Each repeat is timed within ``turn``."""
    times: dict[Case, list[tuple[int, ...]]] = {case: [] for case in steps}
    order = list(steps.items())
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        random.shuffle(order)
        gc.collect()
        with turn():
            gc.disable()
            for case, step in order:
                step.run()  # now the caches hold this system's code and data, not its predecessor's
                phases = step.run()
                with CollectiveClock() as clock:
                    step.run()
                times[case].append((*phases, clock.nanoseconds))
            gc.enable()
    gc.unfreeze()
    return {
        case: StepTime(*(summarise(phase) / 1e6 for phase in zip(*runs, strict=True))) for case, runs in times.items()
    }


# ---- one measurement in this process


def measure(
    setting: Setting, cases: Sequence[Case], turn: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[Row]:
    """Time ``cases`` under a simulated process group, torch's default one for that time; each repeat within ``turn``.

    Every precision among the cases needs plain; without FSDP2 there are no ratios to it.
    """
    _use_simulated_group(setting.backend, setting.world)
    lay_out(setting.layout)
    base = (
        TinyMixtures(setting.num_blocks, setting.num_experts) if setting.num_experts else TinyBlocks(setting.num_blocks)
    )
    steps = {case: TrainingStep(base, *case, setting.is_compiled) for case in cases}
    for step in steps.values():
        for _ in range(4):  # lazy initialisation, and the order that prefetching follows
            step.run()
    times = time_steps(steps, setting.repeats, turn, min if setting.takes_lowest else median)
    dist.destroy_process_group()
    return [_row(setting, times, *case, num_groups(base)) for case in cases]


def _use_simulated_group(backend: str, world_size: int) -> None:
    os.environ[SIMULATED_ENV] = "1"  # fsdp_compose: no other rank exists
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # simulated collectives leave arbitrary numbers behind; denormal ones are slow
    torch.manual_seed(0)
    random.seed(0)
    rank = min(3, world_size - 1)
    if backend == "fake":
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    else:
        null_process_group.init(rank, world_size)


def _row(setting: Setting, times: Mapping[Case, StepTime], precision: str, system: str, groups: int) -> Row:
    plain, reference, time = times[precision, PLAIN], times.get((precision, FSDP2)), times[precision, system]
    is_sharded = system != PLAIN

    def overhead_us(time: StepTime) -> float:
        return ((time.forward - plain.forward) + (time.backward - plain.backward)) / groups * 1e3

    def net_overhead_us(time: StepTime) -> float:
        return overhead_us(time) - time.collectives / groups * 1e3

    return Row(
        backend=setting.backend,
        world=setting.world,
        blocks="compiled" if setting.is_compiled else "eager",
        precision=precision,
        system=system,
        forward_ms=time.forward,
        backward_ms=time.backward,
        clip_ms=time.clip,
        optimizer_ms=time.optimizer,
        overhead_us=overhead_us(time) if is_sharded else None,
        collectives_us=time.collectives / groups * 1e3 if is_sharded else None,
        ratio=overhead_us(time) / overhead_us(reference) if is_sharded and reference else None,
        net_ratio=net_overhead_us(time) / net_overhead_us(reference) if is_sharded and reference else None,
        optimizer_ratio=time.optimizer / reference.optimizer if reference else None,
        step_ratio=(time.whole - plain.whole) / (reference.whole - plain.whole) if is_sharded and reference else None,
    )


# ---- measurements in processes of their own


class Child:
    """A process that measures one system next to others, by the fsdp_compose of a checkout.

    ``in_turn``: it waits before each repeat until it is given its turn, so that two of them can be measured together.
    """

    def __init__(
        self,
        setting: Setting,
        cases: Sequence[Case],
        *,
        ablation: str = "",
        checkout: Path = _CHECKOUT,
        in_turn: bool = False,
    ) -> None:
        given = {"setting": asdict(setting), "cases": cases, "ablation": ablation, "in_turn": in_turn}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(given)],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take_turn(self) -> None:
        """Let it measure one repeat."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._answer()

    def rows(self) -> dict[str, Row]:
        """The rows it measured, by system; waits until it has ended."""
        rows = [Row(**row) for row in self._answer()]
        if self.process.wait() != 0:
            raise RuntimeError(f"the measuring process ended with {self.process.returncode}")
        return {row.system: row for row in rows}

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the measuring process ended early, with {self.process.wait()}")
        return json.loads(line)


def _run_child(setting: dict[str, Any], cases: list[Case], ablation: str, in_turn: bool) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anything else prints is no answer

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    @contextmanager
    def turn() -> Iterator[None]:
        sys.stdin.readline()
        yield
        answer(None)

    if ablation:
        import ablations  # what it changes, another checkout may not have

        ablations.ablate(ablation)
    given = [(precision, system) for precision, system in cases]
    answer([asdict(row) for row in measure(Setting(**setting), given, turn if in_turn else nullcontext)])


def measure_in_child(setting: Setting, precision: str, system: str, ablation: str = "") -> dict[str, Row]:
    """The rows of plain, FSDP2 and one more system."""
    return Child(setting, [(precision, name) for name in (PLAIN, FSDP2, system)], ablation=ablation).rows()


def measure_in_children(setting: Setting, systems: Sequence[str]) -> list[Row]:
    """Plain, FSDP2 and ``systems`` at every precision; plain and FSDP2 as they were measured next to fsdp_compose."""
    rows: list[Row] = []
    for precision in PRECISIONS:
        found: dict[str, Row] = {}
        for system in sorted(systems, key=lambda name: name == OURS):
            found |= measure_in_child(setting, precision, system)
        rows += [found[system] for system in SYSTEMS if system in found]
    return rows


@dataclass(frozen=True)
class CheckRow:
    """fsdp_compose without one check; microseconds of overhead per group, for one forward and backward."""

    check: str = column("fsdp_compose")
    overhead_us: float = column("overhead us", ".1f")
    lowest_us: float = column("lowest", ".1f")
    highest_us: float = column("highest", ".1f")
    cost_us: float = column("the check costs us", ".1f")
    reference_us: float = column("FSDP2's overhead us", ".1f")
    ratio: float = column("ratio", ".3f")

    @property
    def system(self) -> str:
        return OURS


def measure_checks(setting: Setting, rounds: int) -> list[CheckRow]:
    """fsdp_compose with all checks, then without each of ``ablations.ABLATIONS``; every time in a fresh process."""
    import ablations

    names = ["", *ablations.ABLATIONS]
    overheads: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            rows = measure_in_child(setting, "fp32", OURS, ablation=name)
            overheads[name].append((rows[OURS].overhead_us or 0.0, rows[FSDP2].overhead_us or 0.0))
    with_all = median(ours for ours, _ in overheads[""])
    result = []
    for name, measured in overheads.items():
        ours, theirs = zip(*measured, strict=True)
        result.append(
            CheckRow(
                check=f"without: {name}" if name else "all checks",
                overhead_us=median(ours),
                lowest_us=min(ours),
                highest_us=max(ours),
                cost_us=with_all - median(ours),
                reference_us=median(theirs),
                ratio=median(ours) / median(theirs),
            )
        )
    return result


@dataclass(frozen=True)
class CheckoutRow:
    """fsdp_compose of one checkout; microseconds of overhead per group, for one forward and backward."""

    checkout: str = column("checkout")
    precision: str = column("precision")
    overhead_us: float = column("overhead us", ".1f")
    lowest_us: float = column("lowest", ".1f")
    highest_us: float = column("highest", ".1f")
    optimizer_ms: float = column("optimizer + zero_grad ms", ".2f")
    ratio: float = column("overhead / the other's", ".3f")  # the median of the rounds' ratios

    @property
    def case(self) -> str:
        return f"{self.checkout} {self.precision}"

    @property
    def system(self) -> str:
        return OURS


def measure_checkouts(setting: Setting, rounds: int, other: Path) -> list[CheckoutRow]:
    """This checkout and another one: in each round a fresh process for each, whose repeats are measured in turn; of
    each process the fastest forward and backward, since what else the machine does only adds."""
    setting = replace(setting, takes_lowest=True)
    checkouts = {"this": _CHECKOUT, "other": other.resolve()}
    rows: list[CheckoutRow] = []
    for precision in PRECISIONS:
        rounds_measured = [_measure_in_turn(setting, precision, checkouts) for _ in range(rounds)]
        for name in checkouts:
            measured = [found[name] for found in rounds_measured]
            overheads = [row.overhead_us or 0.0 for row in measured]
            others = [found["other"].overhead_us or 0.0 for found in rounds_measured]
            rows.append(
                CheckoutRow(
                    checkout=name,
                    precision=precision,
                    overhead_us=median(overheads),
                    lowest_us=min(overheads),
                    highest_us=max(overheads),
                    optimizer_ms=median(row.optimizer_ms for row in measured),
                    ratio=median(one / another for one, another in zip(overheads, others, strict=True)),
                )
            )
    return rows


def _measure_in_turn(setting: Setting, precision: str, checkouts: Mapping[str, Path]) -> dict[str, Row]:
    cases = [(precision, system) for system in (PLAIN, OURS)]
    children = {
        name: Child(setting, cases, checkout=checkout, in_turn=True)
        for name, checkout in random.sample([*checkouts.items()], len(checkouts))
    }
    for _ in range(setting.repeats):
        for child in random.sample([*children.values()], len(children)):
            child.take_turn()
    return {name: child.rows()[OURS] for name, child in children.items()}


# ---- command line


def main() -> None:
    options = _parse_arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch, about its own use of its own functions
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # FSDP2, about the head's output
    if options.child is not None:
        _run_child(**json.loads(options.child))
        return
    sizes = {"num_blocks": options.blocks, "repeats": options.repeats, "layout": options.layout}
    sizes["num_experts"] = options.experts
    settings = [
        Setting(backend, world, options.compiled, **sizes) for backend in options.backend for world in options.world
    ]
    print(f"{options.blocks} blocks, medians of {options.repeats} repeats. Overhead: beyond plain, per group.\n")
    if options.ablate:
        where = f"{settings[0].world} ranks, process group {settings[0].backend}"
        print(f"{where}, fp32, {options.rounds} processes for each.\n")
        checks = report.Report("host_overhead_checks", asdict(settings[0]), measure_checks(settings[0], options.rounds))
        print(checks.table())
        checks.write(options.out, report.bars("check", "overhead_us", unit="us per group"))
        return
    if options.against is not None:
        print(f"{settings[0].world} ranks, process group {settings[0].backend}, {options.rounds} processes for each.\n")
        rows_of_checkouts = measure_checkouts(settings[0], options.rounds, options.against)
        compared = report.Report("host_overhead_checkouts", asdict(settings[0]), rows_of_checkouts)
        print(compared.table())
        compared.write(options.out, report.bars("case", "overhead_us", unit="us per group"))
        return
    rows: list[Row] = []
    for setting in settings:
        every = [(precision, system) for precision in PRECISIONS for system in (PLAIN, FSDP2, *options.systems)]
        rows += measure(setting, every) if options.quick else measure_in_children(setting, options.systems)
    result = report.Report("host_overhead_compiled" if options.compiled else "host_overhead", sizes, rows)
    print(result.table())
    result.write(
        options.out,
        report.bars("case", "ratio", unit="overhead / FSDP2's", line=GOAL),
        report.bars("case", "optimizer_ratio", unit="optimizer step / FSDP2's", line=GOAL),
    )


def _parse_arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--backend", choices=BACKENDS, nargs="+", help="default: both; --quick: null")
    parser.add_argument("--world", type=int, nargs="+", help="simulated ranks (default: 64 8; --quick: 64)")
    parser.add_argument("--systems", choices=OTHERS, nargs="+", help="next to plain and FSDP2 (default: all)")
    parser.add_argument("--blocks", type=int, help="blocks of the model (default: 48; --quick: 3)")
    parser.add_argument("--experts", type=int, default=0, help="in each block; it is then of DeepSeek-V3's kind")
    parser.add_argument("--repeats", type=int, help="timed steps per system (default: 25; --quick: 3)")
    parser.add_argument(
        "--layout",
        choices=(FLAT_MESH, HYBRID_MESH, TENSOR_MESH),
        default=FLAT_MESH,
        help="one dimension; (replicate, shard) with 8 shards; (dp, tp) with 2 ranks of tensor parallelism",
    )
    parser.add_argument("--compiled", action="store_true", help="compile each block (torch.compile)")
    parser.add_argument("--ablate", action="store_true", help="what each check of fsdp_compose costs")
    parser.add_argument("--against", type=Path, help="another checkout, whose overhead is measured next to this one's")
    parser.add_argument(
        "--rounds", type=int, help="--ablate, --against: processes per check, or checkout (default: 3; --quick: 1)"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.systems is None:  # the proposals exclude experts that are DTensors
        options.systems = [name for name in OTHERS if not (options.experts and name in (NO_COPY_OUT, NO_COPIES))]
    for name, usual, quick in (
        ("backend", BACKENDS, BACKENDS[:1]),
        ("world", WORLDS, WORLDS[:1]),
        ("blocks", 48, 3),
        ("repeats", 25, 3),
        ("rounds", 3, 1),
    ):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    return options


if __name__ == "__main__":
    main()

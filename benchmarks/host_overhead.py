"""What sharding costs the host: CPU time that a training step spends beyond the same step of the plain model.

48 blocks of 12 tiny parameters leave the kernels almost nothing to do, so the difference to the plain model, divided
by the number of groups, is what one group costs the host per forward and backward. The figure of merit is

    ratio = (system - plain) / (FSDP2 - plain)

How it is measured: one process plays one rank of ``--world`` under a simulated process group; process CPU time on one
thread, so that waiting and other processes do not count. Each system is measured in a process of its own, beside the
plain model and FSDP2 (a training process has one model; the more of them, the less of each is in the caches): in turn,
each repeat in another random order, an untimed step directly before each timed one, the garbage collector off, medians
over the repeats.

Two simulated groups:

- ``null`` does nothing (``null_process_group.py``).
- ``fake`` is torch's. Its all-gather copies the shard into each rank's place, one small copy per rank, which no real
  backend does on the host. So the time inside the process group's methods is measured too (in a step of its own);
  "net ratio" has it subtracted from both sides.

    python benchmarks/host_overhead.py                     # both groups, fp32 and bf16 parameters
    python benchmarks/host_overhead.py --backend null --world 8
    python benchmarks/host_overhead.py --backend null --compiled    # blocks compiled one by one
    python benchmarks/host_overhead.py --quick             # rough
    python benchmarks/host_overhead.py --ablate            # what each check of fsdp_compose costs
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import process_time_ns
from typing import Any

import null_process_group
import torch
import torch.distributed as dist
from models import TinyBlocks, num_groups
from systems import SYSTEMS
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compose import exchange, grad_buffer, state, watch

BASELINE, REFERENCE, OURS = "plain", "FSDP2", "fsdp_compose"
PRECISIONS = {"fp32": False, "bf16/fp32": True}  # parameter/reduction dtype; whether that is mixed precision
SIMULATED_ENV = "FSDP_COMPOSE_SIMULATED"

Case = tuple[str, str]  # precision, system

# How to switch single checks of fsdp_compose off, for ``--ablate`` only: name -> a function that is called once, in a
# process of its own, before any model is built (set an environment variable, or replace a module attribute).
ABLATIONS: dict[str, Callable[[], None]] = {
    "what the user changed since (slots, memory, requires_grad)": lambda: _replace(watch.Watch, "is_quiet", True),
    "gradients that came late, or past the outputs": lambda: _replace(watch.Watch, "has_unsharded_grads", False),
    "gradients put on the sharded parameters meanwhile": lambda: _replace(watch.Watch, "has_grads", False),
    "backward that entered past the outputs": lambda: _replace(state._FSDPState, "refuse_unseen_backward", None),
    "step between forward and backward": lambda: _replace(state._FSDPState, "check_versions", None),
    "parameter edited or replaced inside forward": lambda: _replace(watch.Watch, "was_forward_quiet", True),
    "gradient that the user holds": lambda: _replace(grad_buffer.GradientBuffer, "_is_held_elsewhere", False),
    "control exchange (its bytes only: there are no ranks to talk to)": lambda: (
        _replace(exchange.ControlExchange, "start", None),
        _replace(exchange.ControlExchange, "wait", True),
    )[0],
}


def _replace(owner: Any, name: str, answer: Any) -> None:
    setattr(owner, name, lambda *_: answer)


# ---- what is timed


class TrainingStep:
    """One system at one precision."""

    def __init__(self, base: TinyBlocks, precision: str, system: str, is_compiled: bool) -> None:
        is_mixed = PRECISIONS[precision]
        self.model, self.optimizer = SYSTEMS[system](base, is_mixed)
        if is_compiled:
            for block in self.model.blocks:
                block.compile()
        self.input = base.example_input()
        if is_mixed and system == BASELINE:
            self.input = self.input.bfloat16()  # the sharded systems cast by themselves

    def run(self) -> tuple[int, int, int]:
        """Nanoseconds of forward, of backward, and of optimizer step and ``zero_grad`` together."""
        start = process_time_ns()
        loss = self.model(self.input).sum()
        forward_end = process_time_ns()
        loss.backward()
        backward_end = process_time_ns()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return forward_end - start, backward_end - forward_end, process_time_ns() - backward_end


class CollectiveClock:
    """While entered, adds up the time that this process spends inside the methods of process groups.

    In place, because the same calls in a loop of their own, with warm caches, take only two thirds of the time.
    """

    METHODS = ("allgather", "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single")

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
    optimizer: float
    collectives: float


def median_times(steps: Mapping[Case, TrainingStep], repeats: int) -> dict[Case, StepTime]:
    times: dict[Case, list[tuple[int, ...]]] = {case: [] for case in steps}
    order = list(steps.items())
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        random.shuffle(order)
        gc.collect()
        gc.disable()
        for case, step in order:
            step.run()  # now the caches hold this system's code and data, not its predecessor's
            phases = step.run()
            with CollectiveClock() as clock:
                step.run()
            times[case].append((*phases, clock.nanoseconds))
        gc.enable()
    gc.unfreeze()
    return {case: StepTime(*(median(phase) / 1e6 for phase in zip(*runs, strict=True))) for case, runs in times.items()}


# ---- one measurement in this process


@dataclass(frozen=True)
class Row:
    """One system at one precision. Overheads are microseconds per group, for one forward and backward, beyond plain;
    ``collectives_us`` is what the process group's own collectives take of them."""

    precision: str
    system: str
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    overhead_us: float
    collectives_us: float
    ratio: float
    net_ratio: float
    optimizer_ratio: float


def measure(
    backend: str, world_size: int, num_blocks: int, repeats: int, cases: Sequence[Case], is_compiled: bool
) -> list[Row]:
    """Time ``cases`` under ``backend``, which becomes the default group.

    Every precision among the cases needs its baseline and its reference.
    """
    _use_simulated_group(backend, world_size)
    base = TinyBlocks(num_blocks)
    steps = {case: TrainingStep(base, *case, is_compiled) for case in cases}
    for step in steps.values():
        for _ in range(4):  # lazy initialisation, and the order that prefetching follows
            step.run()
    times = median_times(steps, repeats)
    dist.destroy_process_group()
    return [_row(times, *case, num_groups(base)) for case in cases]


def _use_simulated_group(backend: str, world_size: int) -> None:
    os.environ[SIMULATED_ENV] = "1"  # fsdp_compose: there is nobody to meet
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # simulated collectives leave arbitrary numbers behind; denormal ones are slow
    torch.manual_seed(0)
    random.seed(0)
    rank = min(3, world_size - 1)
    if backend == "fake":
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    else:
        null_process_group.init(rank, world_size)


def _row(times: Mapping[Case, StepTime], precision: str, system: str, groups: int) -> Row:
    plain, reference, time = times[precision, BASELINE], times[precision, REFERENCE], times[precision, system]

    def overhead_us(time: StepTime) -> float:
        return ((time.forward - plain.forward) + (time.backward - plain.backward)) / groups * 1e3

    def net_overhead_us(time: StepTime) -> float:
        return overhead_us(time) - time.collectives / groups * 1e3

    return Row(
        precision=precision,
        system=system,
        forward_ms=time.forward,
        backward_ms=time.backward,
        optimizer_ms=time.optimizer,
        overhead_us=overhead_us(time),
        collectives_us=time.collectives / groups * 1e3,
        ratio=overhead_us(time) / overhead_us(reference),
        net_ratio=net_overhead_us(time) / net_overhead_us(reference),
        optimizer_ratio=time.optimizer / reference.optimizer,
    )


# ---- reports


def print_table(backend: str, options: argparse.Namespace, rows: Sequence[Row]) -> None:
    print(
        f"\nProcess group `{backend}`, {options.world} ranks, {options.blocks} "
        f"{'compiled ' if options.compiled else ''}blocks, medians of {options.repeats} repeats. "
        "Overhead: beyond plain, per group, forward and backward. Ratios: to FSDP2.\n"
    )
    print("| precision | system | fwd ms | bwd ms | overhead us | of it collectives us | ratio | net ratio ", end="")
    print("| optimizer ms | optimizer ratio |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row.precision} | {row.system} | {row.forward_ms:.2f} | {row.backward_ms:.2f} | {row.overhead_us:.1f} "
            f"| {row.collectives_us:.1f} | {row.ratio:.3f} | {row.net_ratio:.3f} | {row.optimizer_ms:.2f} "
            f"| {row.optimizer_ratio:.3f} |"
        )
    sys.stdout.flush()


def run_ablations(options: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Measure fsdp_compose with all checks, then without each of ``ABLATIONS``; every time in a fresh process."""
    names = ["", *ABLATIONS]
    overheads: dict[str, dict[str, list[float]]] = {name: {OURS: [], REFERENCE: []} for name in names}
    for _ in range(options.rounds):
        for name in random.sample(names, len(names)):
            for row in _measure_in_child(options, backend, "fp32", OURS, ablation=name):
                if row["system"] in overheads[name]:
                    overheads[name][row["system"]].append(row["overhead_us"])
    with_all = median(overheads[""][OURS])
    print(
        f"\nProcess group `{backend}`, {options.world} ranks, {options.blocks} blocks, fp32: overhead in us per group, "
        f"forward and backward, medians of {options.rounds} processes (lowest to highest).\n"
    )
    print("| fsdp_compose | overhead us | the check costs us | FSDP2's overhead us | ratio |")
    print("|---|--:|--:|--:|--:|")
    for name, by_system in overheads.items():
        ours, reference = median(by_system[OURS]), median(by_system[REFERENCE])
        spread = f"{min(by_system[OURS]):.1f} to {max(by_system[OURS]):.1f}"
        print(
            f"| {'without ' + name if name else 'all checks'} | {ours:.1f} ({spread}) "
            f"| {with_all - ours:.1f} | {reference:.1f} | {ours / reference:.3f} |"
        )
    return {"backend": backend, "overheads_us": {name or "all checks": by for name, by in overheads.items()}}


def measure_all(options: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Every system at every precision; plain and FSDP2 as they were beside fsdp_compose."""
    rows: list[Row] = []
    for precision in PRECISIONS:
        found: dict[str, Row] = {}
        for system in SYSTEMS:
            if system not in (BASELINE, REFERENCE):
                measured = {row["system"]: Row(**row) for row in _measure_in_child(options, backend, precision, system)}
                found |= measured if system == OURS else {system: measured[system]}
        rows += [found[system] for system in SYSTEMS]
    print_table(backend, options, rows)
    return {
        "backend": backend,
        "world_size": options.world,
        "num_blocks": options.blocks,
        "repeats": options.repeats,
        "compiled": options.compiled,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [asdict(row) for row in rows],
    }


def _measure_in_child(
    options: argparse.Namespace, backend: str, precision: str, system: str, ablation: str = ""
) -> list[dict[str, Any]]:
    """The rows of one system, plain and FSDP2, from a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, __file__, f"--backend={backend}", f"--world={options.world}"]
        command += [f"--blocks={options.blocks}", f"--repeats={options.repeats}", f"--json={report}"]
        command += [f"--case={precision},{system}", f"--ablation={ablation}"]
        command += ["--compiled"] if options.compiled else []
        subprocess.run(command, check=True)
        return json.loads(report.read_text())


# ---- command line


def main() -> None:
    options = _parse_arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch, about its own use of its own functions
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # FSDP2, about the head's output
    backends = ["null", "fake"] if options.backend == "both" else [options.backend]
    if options.case:
        precision, system = options.case.split(",")
        if options.ablation:
            ABLATIONS[options.ablation]()
        cases = [(precision, name) for name in (BASELINE, REFERENCE, system)]
        rows = measure(backends[0], options.world, options.blocks, options.repeats, cases, options.compiled)
        report: Any = [asdict(row) for row in rows]
    elif options.ablate:
        report = run_ablations(options, backends[0])
    else:
        report = [measure_all(options, backend) for backend in backends]
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["null", "fake", "both"], default="both", help="--ablate: both means null")
    parser.add_argument("--world", type=int, default=64, help="number of simulated ranks (default: 64)")
    parser.add_argument("--blocks", type=int, help="blocks of the model (default: 48; --quick: 12)")
    parser.add_argument("--repeats", type=int, help="timed steps per system (default: 25; --quick: 7)")
    parser.add_argument("--quick", action="store_true", help="a small model and few repeats")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here too")
    parser.add_argument("--ablate", action="store_true", help="what each check of fsdp_compose costs")
    parser.add_argument("--rounds", type=int, help="--ablate: processes per check (default: 3; --quick: 1)")
    parser.add_argument("--compiled", action="store_true", help="compile each block (torch.compile)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--ablation", choices=["", *ABLATIONS], default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, usual, quick in (("blocks", 48, 12), ("repeats", 25, 7), ("rounds", 3, 1)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    return options


if __name__ == "__main__":
    main()

"""Training steps on one accelerator, fsdp_compose and FSDP2: tokens per second, memory, the share of copies.

Llama-3-like blocks in bf16, reduction in fp32, under two process groups: ``fake`` with 64 ranks (one GPU does what one
of 64 would, but waits for no other), and the real backend with one rank. Eager, and compiled block by block. With
``--systems`` also ours with a limit to what is unsharded at a time, and with gathers and reductions in int8: that shows
what encoding takes on the device, since nothing is sent.

- tokens/s: all systems in one process, step by step in turn, medians, each step between device synchronisations.
- memory: each system in a process of its own, so that the caching allocator sees nothing else: peak allocated bytes,
  and reserved bytes, which must not move between the first and the last of ``--steps`` steps.
- copies: the share of the device time of a step that goes to copying operators, by torch's profiler.

Without an accelerator the same code runs on the CPU with gloo and tiny sizes: a smoke test. Memory is then what the CPU
allocator hands out in a step (``memory.py``), and nothing is reserved.

    python benchmarks/gpu.py                       # sequences 2048 and 8192, eager and compiled
    python benchmarks/gpu.py --sequences 4096 --modes eager
    python benchmarks/gpu.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.nn as nn
from copied_bytes import COPIES
from memory import AllocatedBytes
from models import Llama
from report import column
from systems import FSDP2, OURS, PRECISIONS, wrap
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compose import set_wire_formats

OURS_INT8 = f"{OURS} int8"
LIMITS = {f"{OURS} limit {number}": f"{number} groups" for number in (1, 2)}
SYSTEMS = (FSDP2, OURS, OURS_INT8, *LIMITS)
GROUPS = {"fake": 64, "real": 1}  # process group: ranks
MODES = ("eager", "compiled")
SPEED_GOAL, MEMORY_GOAL, COPY_GOAL = 1.05, 0.95, 0.4
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Case:
    group: str
    mode: str
    sequence: int
    dim: int
    num_blocks: int
    vocabulary: int
    steps: int
    systems: Sequence[str]


@dataclass(frozen=True)
class Row:
    """Ratios are to FSDP2; ``reserved_growth`` is what the later steps have added to the reserved bytes."""

    group: str = column("group")
    mode: str = column("mode")
    sequence: int = column("sequence")
    system: str = column("system")
    tokens_per_s: float = column("tokens/s", ".0f")
    speed_ratio: float = column("ratio", ".3f")
    peak_mib: float = column("peak allocated MiB", ".1f")
    memory_ratio: float = column("ratio", ".3f")
    peaks_differ: int = column("peaks differ by, bytes", "d")
    reserved_mib: float | None = column("reserved MiB", ".1f")
    reserved_growth: int | None = column("reserved grew by, bytes", "d")
    copy_share: float = column("copies' share", ".4f")
    copy_ratio: float | None = column("copies' time ratio", ".3f")

    @property
    def case(self) -> str:
        return f"{self.group}, {self.mode}, {self.sequence}"


# ---- one process: a system, or several in turn


class Training:
    """One system at work on one device."""

    def __init__(self, system: str, case: Case) -> None:
        torch.manual_seed(0)
        with DEVICE:
            model = Llama(case.dim, case.num_blocks, case.vocabulary)
        if case.mode == "compiled":
            for block in model.blocks:
                block.compile()
        options = {"limit_unsharded_bytes": LIMITS[system]} if system in LIMITS else {}
        self.model = wrap(model, FSDP2 if system == FSDP2 else OURS, PRECISIONS["bf16/fp32"], **options)
        if system == OURS_INT8:
            set_wire_formats(self.model, all_gather="int8", reduce_scatter="int8")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.tokens = torch.randint(case.vocabulary, (1, case.sequence), device=DEVICE)

    def step(self) -> None:
        logits = self.model(self.tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def measure_speed(case: Case) -> dict[str, Any]:
    """Median seconds of a step, and the device time of copies and of everything, for each system."""
    trainings = {system: Training(system, case) for system in case.systems}
    for training in trainings.values():
        for _ in range(WARM_UP_STEPS):
            training.step()
    seconds: dict[str, list[float]] = {system: [] for system in trainings}
    for _ in range(case.steps):
        for system in random.sample([*trainings], len(trainings)):
            synchronize()
            start = perf_counter()
            trainings[system].step()
            synchronize()
            seconds[system].append(perf_counter() - start)
    return {
        system: {"seconds": median(seconds[system]), **_device_time(training)} for system, training in trainings.items()
    }


def _device_time(training: Training) -> dict[str, float]:
    """Microseconds that one step's operators take on the device, and those of operators that only copy."""
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if HAS_GPU else [])]
    with torch.profiler.profile(activities=activities) as profile:
        training.step()
        synchronize()
    times = {
        event.key: event.self_device_time_total if HAS_GPU else event.self_cpu_time_total
        for event in profile.key_averages()
    }
    if HAS_GPU:  # kernels appear by their own names too: only operators, and kernels that no operator launched
        times = {key: time for key, time in times.items() if "::" in key or key.startswith("triton")}
    return {"copies_us": sum(time for key, time in times.items() if key in COPIES), "all_us": sum(times.values())}


def measure_memory(case: Case, system: str) -> dict[str, Any]:
    """Peak and reserved bytes of every step after the warm-up."""
    training = Training(system, case)
    if HAS_GPU:
        torch.cuda.empty_cache()  # where the whole model was before it was sharded
    for _ in range(WARM_UP_STEPS):
        training.step()
    peaks, reserved = [], []
    if HAS_GPU:
        for _ in range(case.steps):
            torch.cuda.reset_peak_memory_stats()
            training.step()
            synchronize()
            stats = torch.cuda.memory_stats()
            peaks.append(stats["allocated_bytes.all.peak"])
            reserved.append(stats["reserved_bytes.all.current"])
    else:
        with AllocatedBytes() as allocated:
            training.step()
            for i in range(case.steps):
                with allocated.section(f"step {i}"):
                    training.step()
        peaks = [*allocated.peak.values()]
    return {"peaks": peaks, "reserved": reserved}


def run_child(case: Case, whats: list[str]) -> dict[str, Any]:
    """In a process of its own, with a GPU: each of ``whats`` is "speed", or the system whose memory is measured."""
    random.seed(0)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch, about its own use of its own functions
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # FSDP2, about the head's output
    if HAS_GPU:
        torch.cuda.set_device(DEVICE)
    else:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # the fake process group leaves arbitrary numbers behind
    if case.group == "fake":
        dist.init_process_group("fake", rank=1, world_size=GROUPS["fake"], store=FakeStore())
    else:
        backend = "cpu:gloo,cuda:nccl" if HAS_GPU else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    answers = {what: measure_speed(case) if what == "speed" else measure_memory(case, what) for what in whats}
    dist.destroy_process_group()
    return answers


# ---- the parent


def measure(case: Case) -> list[Row]:
    whats = ["speed", *case.systems]
    # The CPU allocator is asked about single steps, so there this process will do.
    runs = [_in_child(case, [what]) for what in whats] if HAS_GPU else [run_child(case, whats)]
    speed, *memories = [answers[what] for answers in runs for what in answers]
    memory = dict(zip(case.systems, memories, strict=True))

    def row(system: str) -> Row:
        ours, reference = speed[system], speed[FSDP2]
        peaks, reserved = memory[system]["peaks"], memory[system]["reserved"]
        return Row(
            group=case.group,
            mode=case.mode,
            sequence=case.sequence,
            system=system,
            tokens_per_s=case.sequence / ours["seconds"],
            speed_ratio=reference["seconds"] / ours["seconds"],
            peak_mib=max(peaks) / 2**20,
            memory_ratio=max(peaks) / max(memory[FSDP2]["peaks"]),
            peaks_differ=max(peaks) - min(peaks),
            reserved_mib=max(reserved) / 2**20 if reserved else None,
            reserved_growth=reserved[-1] - reserved[0] if reserved else None,
            copy_share=ours["copies_us"] / ours["all_us"],
            copy_ratio=ours["copies_us"] / reference["copies_us"] if reference["copies_us"] else None,
        )

    return [row(system) for system in case.systems]


def _in_child(case: Case, whats: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        arguments = json.dumps({**vars(case), "whats": whats, "answer": str(answer)})
        subprocess.run([sys.executable, __file__, "--child", arguments], check=True)
        return json.loads(answer.read_text())


def _parse_arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", help="tokens of a step (default: 2048 8192)")
    parser.add_argument("--groups", choices=GROUPS, nargs="+", default=[*GROUPS])
    parser.add_argument(
        "--systems", choices=SYSTEMS[1:], nargs="+", default=[OURS], help=f"beside {FSDP2} (default: {OURS})"
    )
    parser.add_argument("--modes", choices=MODES, nargs="+", help="default: eager and compiled; --quick: eager")
    parser.add_argument("--dim", type=int, help="width of the model (default: 4096)")
    parser.add_argument("--blocks", type=int, help="of the model (default: 8)")
    parser.add_argument("--steps", type=int, help="measured steps of each kind (default: 50)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    is_quick = options.quick or not HAS_GPU
    for name, usual, quick in (
        ("sequences", [2048, 8192], [16]),
        ("modes", [*MODES], ["eager"]),
        ("dim", 4096, 64),
        ("blocks", 8, 2),
        ("steps", 50, 3),
    ):
        if getattr(options, name) is None:
            setattr(options, name, quick if is_quick else usual)
    options.vocabulary = 64 if is_quick else 8192
    return options


def main() -> None:
    options = _parse_arguments()
    if options.child is not None:
        given = json.loads(options.child)
        whats, answer = given.pop("whats"), Path(given.pop("answer"))
        answer.write_text(json.dumps(run_child(Case(**given), whats)))
        return
    systems = [FSDP2, *options.systems]
    first = Case("", "", 0, options.dim, options.blocks, options.vocabulary, options.steps, systems)
    rows = []
    for group, mode, sequence in itertools.product(options.groups, options.modes, options.sequences):
        rows += measure(replace(first, group=group, mode=mode, sequence=sequence))
    sizes = {"dim": options.dim, "num_blocks": options.blocks, "vocabulary": options.vocabulary}
    result = report.Report("gpu", {"device": DEVICE.type, **sizes}, rows)
    print(
        f"{torch.cuda.get_device_name() if HAS_GPU else 'CPU, a smoke test: its times mean nothing'}; "
        f"{options.blocks} blocks of width {options.dim}, {options.steps} steps. Goals, to FSDP2: tokens/s >= "
        f"{SPEED_GOAL}, peak allocated <= {MEMORY_GOAL}, time of copies <= {COPY_GOAL}; reserved grows by 0.\n"
    )
    print(result.table())
    result.write(
        options.out,
        report.bars("case", "speed_ratio", unit="tokens/s / FSDP2's", line=SPEED_GOAL),
        report.bars("case", "memory_ratio", unit="peak allocated / FSDP2's", line=MEMORY_GOAL),
    )


if __name__ == "__main__":
    os.environ["FSDP_COMPOSE_TIMEOUT"] = os.environ.get("FSDP_COMPOSE_TIMEOUT", "60")
    main()

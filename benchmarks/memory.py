"""How much memory a forward and a training step take at their peak: fsdp_compose, FSDP1, FSDP2, FSDP2 without copies
(the prototype of ``fsdp2_views.py``) and plain.

Counted: the bytes that the CPU allocator hands out, minus those it takes back, since the start of the step; their
maximum. Nothing escapes that count (storages that are resized, temporaries inside operators), and it is the same count
for every system. The parameters' shards and the optimizer's state are there before the step, so they are not in it.

One process plays one of ``--world`` ranks under torch's ``fake`` process group. The model is large for its input, so
that parameters and gradients are what the peak consists of; ``plain`` shows what the rest is.

    python benchmarks/memory.py                      # fp32, bf16/fp32, bf16/bf16; with and without resharding
    python benchmarks/memory.py --quick
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

os.environ["KINETO_LOG_LEVEL"] = "99"  # read when torch is loaded: no line on the terminal for each profile
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # likewise: what kernels take for themselves differs

import report
import torch
import torch.distributed as dist
from models import GPT, parameter_bytes
from report import column
from systems import FSDP1, FSDP2, IN_CHUNKS, NO_COPIES, OURS, PLAIN, PRECISIONS, wrap
from torch.testing._internal.distributed.fake_pg import FakeStore

RESHARDING = {"default": True, "never": False}
LIMITS = ("2 groups", "1 group")  # limit_unsharded_bytes
LIMITED_GOAL = 0.8  # a training step with a limit of 2 groups, to FSDP2's
FORWARD_GOAL, STEP_GOAL = 0.75, 1.0
MIB = 2**20


class AllocatedBytes:
    """Counts what the CPU allocator hands out and takes back, in named sections of a ``with`` block.

    Allocations are remembered from the start of the block: the allocator does not say how large a block of memory was
    that it takes back and that it gave out before. So a training step should come before the first section.

    Attributes:
        peak: by section, the most bytes at a time, beyond those that were there when it began.
        end: by section, the bytes when it ended, beyond those when it began (negative: some were freed).
    """

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self.end: dict[str, int] = {}

    def __enter__(self) -> AllocatedBytes:
        gc.collect()
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def section(self, name: str) -> torch.profiler.record_function:
        self.peak[name] = self.end[name] = 0
        return torch.profiler.record_function(name)

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
        spans = {e.name(): (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() in self.peak}
        for name, (begin, end) in spans.items():
            for time, _, num_bytes in changes:
                if begin <= time <= end:
                    self.end[name] += num_bytes
                    self.peak[name] = max(self.peak[name], self.end[name])


@dataclass(frozen=True)
class Row:
    precision: str = column("precision")
    resharding: str = column("resharding")
    system: str = column("system")
    forward_mib: float = column("no_grad forward MiB", ".1f")
    forward_blocks: float = column("in blocks", ".2f")
    forward_ratio: float | None = column("to FSDP2", ".3f")
    step_mib: float = column("training step MiB", ".1f")
    step_blocks: float = column("in blocks", ".2f")
    step_ratio: float | None = column("to FSDP2", ".3f")
    left_bytes: int = column("left after the step, bytes", "d")

    @property
    def case(self) -> str:
        return f"{self.precision}, {self.resharding}"


def peaks(base: GPT, system: str, precision: str, resharding: str, tokens: torch.Tensor) -> tuple[int, int, int]:
    """The peak of a forward without gradients, the peak of a training step, and what that step leaves allocated."""
    system, _, limit = system.partition(", ")
    of_root = {"limit_unsharded_bytes": limit} if limit else {}
    model = wrap(copy.deepcopy(base), system, PRECISIONS[precision], RESHARDING[resharding], **of_root)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        model(tokens).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def forward() -> None:
        with torch.no_grad():
            model(tokens)

    for _ in range(2):  # lazy initialisation, and the order that prefetching follows
        step()
    with AllocatedBytes() as allocated:
        step()  # each section begins as in training: sharded, without gradients
        with allocated.section("forward"):
            forward()
        step()
        with allocated.section("step"):
            step()
    return allocated.peak["forward"], allocated.peak["step"], allocated.end["step"]


def measure(base: GPT, tokens: torch.Tensor, world_size: int, precisions: Iterable[str]) -> list[Row]:
    """Every system and resharding at ``precisions``; makes a fake process group torch's default for that time."""
    dist.init_process_group("fake", rank=1, world_size=world_size, store=FakeStore())
    block_numel = sum(param.numel() for param in base.blocks[0].parameters())
    rows = []
    for precision in precisions:
        block_bytes = block_numel * (PRECISIONS[precision].param_dtype or torch.float32).itemsize
        for resharding in RESHARDING:
            counted = {}
            for system in (PLAIN, FSDP1, FSDP2, NO_COPIES, OURS, IN_CHUNKS, *[f"{OURS}, {limit}" for limit in LIMITS]):
                if system in (FSDP1, FSDP2, NO_COPIES, OURS, IN_CHUNKS) or resharding == "default":
                    counted[system] = peaks(base, system, precision, resharding, tokens)
            for system, (forward, step, left) in counted.items():
                reference = counted[FSDP2]
                rows.append(
                    Row(
                        precision=precision,
                        resharding=resharding if system != PLAIN else "",
                        system=system,
                        forward_mib=forward / MIB,
                        forward_blocks=forward / block_bytes,
                        forward_ratio=forward / reference[0] if system != PLAIN else None,
                        step_mib=step / MIB,
                        step_blocks=step / block_bytes,
                        step_ratio=step / reference[1] if system != PLAIN else None,
                        left_bytes=left,
                    )
                )
    dist.destroy_process_group()
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--world", type=int, default=64, help="ranks, simulated (default: 64)")
    parser.add_argument("--width", type=int, help="of the model (default: 384; --quick: 128)")
    parser.add_argument("--blocks", type=int, help="of the model (default: 6; --quick: 2)")
    parser.add_argument("--tokens", type=int, help="of the input (default: 32; --quick: 16)")
    options = parser.parse_args()
    for name, usual, quick in (("width", 384, 128), ("blocks", 6, 2), ("tokens", 32, 16)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # simulated collectives leave arbitrary numbers behind; denormal ones are slow
    torch.manual_seed(0)
    gc.freeze()  # what the imports have made: collections before each measurement need not look at it
    base = GPT(options.blocks, options.width)
    tokens = torch.randint(base.vocabulary, (1, options.tokens))
    rows = measure(base, tokens, options.world, [*PRECISIONS][: 2 if options.quick else None])
    block = parameter_bytes(base.blocks[0]) / MIB
    print(
        f"Peak of allocated bytes above the start; {options.world} ranks, {options.blocks} blocks of width "
        f"{options.width} ({block:.1f} MiB each in fp32), {options.tokens} tokens.\n"
        f"Goals, to FSDP2: forward <= {FORWARD_GOAL}, training step <= {STEP_GOAL} ({LIMITED_GOAL} with a "
        "limit of 2 groups). 'In blocks': of the gathered "
        "dtype.\n"
    )
    settings = {name: getattr(options, name) for name in ("world", "width", "blocks", "tokens")}
    result = report.Report("memory", {**settings, "block_bytes": parameter_bytes(base.blocks[0])}, rows)
    print(result.table())
    result.write(
        options.out,
        report.bars("case", "forward_ratio", unit="no_grad forward peak / FSDP2's", line=FORWARD_GOAL),
        report.bars("case", "step_ratio", unit="training step peak / FSDP2's", line=STEP_GOAL),
    )


if __name__ == "__main__":
    main()

"""Records the bits that random programs of ``test_fuzz`` compute, to compare two versions of the package.

    python -m tests.whole.bits record /tmp/before --programs 2000       # with the old code
    python -m tests.whole.bits record /tmp/after --programs 2000        # with the new one
    python -m tests.whole.bits compare /tmp/before /tmp/after

A record has one line for each program: a digest over the losses, and over parameters, gradients and optimizer state of
every rank after every action, or the class and the text of the error that refuses the program. The programs depend on
their number alone, and bits on the processor: compare records of one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.distributed.tensor import DTensor

from fsdp_compose.core.flat.accumulation import UnreducedGradient
from tests.harness import run_distributed
from tests.programs import Program, runner
from tests.whole.test_fuzz import _programs, compilable

_MOST = 2000


class Recorder(runner.Runner):
    """A ``Runner`` that computes a digest of all that it compares."""

    latest: Recorder | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hash = hashlib.blake2b(digest_size=12)
        Recorder.latest = self

    def compare(self, what: str) -> None:
        super().compare(what)
        for name, param in self.model.named_parameters():
            self.add(f"{what} {name}", param)
            self.add("gradient", "unreduced" if type(param.grad) is UnreducedGradient else param.grad)
        for state in self.optimizers[0].state.values():
            for key in sorted(state):
                self.add(key, state[key])

    def check_close(self, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        super().check_close(got, expected, what)
        self.add(what, got)

    def add(self, what: str, value: Any) -> None:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        self.hash.update(what.encode() + (value if isinstance(value, bytes) else repr(value).encode()))


def record_on_every_rank(program: Program, generation: int, report: str) -> None:
    runner.Runner, Recorder.latest = Recorder, None  # type: ignore[misc]
    runner.run_on_every_rank(program, generation, report)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, Recorder.latest.hash.hexdigest() if Recorder.latest is not None else "")
    if dist.get_rank() == 0:
        Path(report).write_text(json.dumps([digests, Path(report).read_text()]))


def programs(count: int, compiled: bool) -> list[Program]:
    found: list[Program] = []

    # As many each time: which examples are made depends on how many are wanted.
    @seed(35)
    @settings(
        max_examples=max(count, _MOST), suppress_health_check=list(HealthCheck), phases=[Phase.generate], database=None
    )
    @given(_programs)
    def collect(program: Program) -> None:
        wanted = compilable(program) if compiled else program
        if wanted is not None:
            found.append(wanted)

    collect()
    return found[:count]


def record(folder: Path, count: int, world_size: int, compiled: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report, generation = Path(tempfile.mkdtemp()) / "report", 0
    with open(folder / f"{world_size}{'-compiled' if compiled else ''}", "w") as lines:
        for number, program in enumerate(programs(count, compiled)):
            arguments = {"program": program, "generation": generation, "report": str(report)}
            try:
                run_distributed(record_on_every_rank, world_size, arguments, timeout=300 if compiled else 60)
                digests, outcome = json.loads(report.read_text())
                outcome = outcome.strip().rpartition("\n")[2]  # of a traceback, the error
            except pytest.fail.Exception as failure:
                digests, outcome, generation = [], f"failed: {str(failure)[:200]!r}", generation + 1
            lines.write(json.dumps([number, digests, outcome, repr(program)]) + "\n")
            lines.flush()


def compare(before: Path, after: Path) -> int:
    num_different = 0
    for path in sorted(before.iterdir()):
        old, new = (list(map(json.loads, (folder / path.name).read_text().splitlines())) for folder in (before, after))
        differences = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
        num_failed = sum(bool(item[2]) and item[2] != "refused" for item in new)
        print(f"{path.name}: {len(new)} programs, {len(differences)} differ, {num_failed} fail")
        for a, b in differences[:5]:
            print(f"  {a[0]}: {a[1]} {a[2]}\n     {b[1]} {b[2]}\n     {b[3]}")
        num_different += len(differences)
    return int(num_different > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--programs", type=int, default=2000)
    recording.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    recording.add_argument("--compiled", action="store_true", help="compile whole models with torch.compile")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return compare(arguments.before, arguments.after)
    for world_size in arguments.ranks:
        record(arguments.folder, arguments.programs, world_size, arguments.compiled)
    return 0


if __name__ == "__main__":
    sys.exit(main())

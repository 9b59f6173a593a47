"""How many files a training step enters, and how many calls go from file to file: what a reader has to follow.

A profile hook counts the calls of Python functions on the first of two gloo ranks, in one step: those of fsdp_compose
in its package, those of FSDP2 in ``torch.distributed``, where its transport is. Comprehensions and finalizers do not
count. Exact: nothing is timed.

    python benchmarks/calls.py                 # seconds, also without --quick, which changes nothing
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import report
import torch
import torch.distributed as dist
from models import TinyBlocks, num_groups
from processes import run_on_ranks
from report import column
from systems import FSDP2, OURS, SYSTEMS

import fsdp_compose

FOLDERS = {FSDP2: Path(dist.__file__).parent, OURS: Path(fsdp_compose.__file__).parent}
NUM_BLOCKS = 4
WARM_UP = 5  # after them, steps are alike: fsdp_compose's look for untracked writes is due in the 4th


@dataclass(frozen=True)
class Row:
    """The calls of one part of a step; ``calls`` and ``crossings`` are per group."""

    part: str = column("part of the step")
    system: str = column("system")
    num_files: int = column("files entered")
    calls: float = column("calls per group", ".1f")
    crossings: float = column("from file to file", ".1f")


def count_calls(folder: Path, action: Callable[[], object]) -> tuple[int, int, int]:
    """The files of ``folder`` that ``action`` enters, the calls of their functions, and those from another file of
    ``folder``, directly or through other code."""
    start, entered, crossings = f"{folder}/", Counter[str](), 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal crossings
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(start) or code.co_name.startswith(("<", "__del__")):
            return
        entered[code.co_filename] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(start):
            caller = caller.f_back
        crossings += caller is not None and caller.f_code.co_filename != code.co_filename

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return len(entered), entered.total(), crossings


def _worker(path: Path) -> None:
    torch.manual_seed(0)
    base, rows = TinyBlocks(NUM_BLOCKS), []
    groups = num_groups(base)
    for system, folder in FOLDERS.items():
        model, _ = SYSTEMS[system](base, False)
        optimizer = torch.optim.AdamW(model.parameters())
        data = base.example_input()
        parts: dict[str, Callable[[], object]] = {
            "forward, backward": lambda model=model, data=data: model(data).sum().backward(),  # type: ignore[misc]
            "step, zero_grad": lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()),  # type: ignore[misc]
        }
        for _ in range(WARM_UP):
            for action in parts.values():
                action()
        for part, action in parts.items():
            files, calls, crossings = count_calls(folder, action)
            rows.append(Row(part, system, files, calls / groups, crossings / groups))
    if dist.get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))


def main() -> None:
    options = report.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        run_on_ranks(2, _worker, path)
        rows = [Row(**row) for row in json.loads(path.read_text())]
    result = report.Report("calls", {"processes": 2, "num_blocks": NUM_BLOCKS}, rows)
    print(f"2 gloo processes, {NUM_BLOCKS} blocks and the root.\n\n{result.table()}")
    result.write(options.out, report.bars("part", "crossings", unit="calls from file to file, per group"))


if __name__ == "__main__":
    main()

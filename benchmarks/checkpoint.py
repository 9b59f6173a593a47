"""Time and memory of state dicts and checkpoints: fsdp_compose and FSDP2 with torch's functions, on real processes.

Both hold copies of one GPT and an AdamW that has stepped. Timed, in turn, between two barriers: making sharded state
dicts of model and optimizer, and full ones (on every rank; on the CPU of the first rank only), saving the sharded ones
with torch.distributed.checkpoint, and loading them into a model and an optimizer that have not stepped. A time is that
of the slowest rank; medians over rounds, and ratios to FSDP2.

Memory is counted in runs of their own: the most bytes that the allocator had handed out at one time since the operation
began, on the rank where that is most. The result of an operation is part of that.

    python benchmarks/checkpoint.py                                   # 200 M parameters, 2 processes
    python benchmarks/checkpoint.py --quick
"""

from __future__ import annotations

import copy
import gc
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from memory import MIB, AllocatedBytes
from models import GPT, parameter_bytes
from processes import run_on_ranks
from report import column
from systems import FSDP2, OURS, wrap
from torch.distributed.checkpoint import state_dict as torch_state_dict

from fsdp_compose import checkpoint

FUNCTIONS: dict[str, ModuleType] = {FSDP2: torch_state_dict, OURS: checkpoint}
SHARDED, FULL, OFFLOADED = "get, sharded", "get, full", "get, full on one CPU"
SAVE, LOAD, OWN_SAVE, OWN_LOAD = "DCP save", "DCP load and set", "save", "load and set"
GOALS = {SHARDED: 1.0, FULL: 0.5, OFFLOADED: 0.5, SAVE: 1.0, LOAD: 1.0, OWN_SAVE: 1.0, OWN_LOAD: 1.0}


@dataclass(frozen=True)
class Size:
    width: int
    num_blocks: int


USUAL, QUICK = Size(1024, 16), Size(128, 2)


@dataclass(frozen=True)
class Row:
    operation: str = column("operation")
    system: str = column("system")
    ms: float = column("ms", ".1f")
    time_ratio: float = column("to FSDP2", ".3f")
    peak_mib: float = column("peak MiB", ".1f")
    peak_ratio: float | None = column("to FSDP2", ".3f")
    goal: float = column("goal", ".1f")


class Subject:
    """One system's model and optimizer, and what is done with them."""

    def __init__(self, base: GPT, system: str, folder: Path) -> None:
        self.functions, self.is_ours = FUNCTIONS[system], system == OURS
        self.model, self.optimizer = self._make(base, system)
        for param in self.model.parameters():
            param.grad = torch.full_like(param, 0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._make_fresh: Callable[[], tuple[nn.Module, torch.optim.Optimizer]] = partial(self._make, base, system)
        self.folder = folder / system
        self._target: tuple[nn.Module, torch.optim.Optimizer] | None = None

    def _make(self, base: GPT, system: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = wrap(copy.deepcopy(base), system)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def get(self, **options: bool) -> dict[str, Any]:
        chosen = self.functions.StateDictOptions(**options)
        model_state, optimizer_state = self.functions.get_state_dict(self.model, self.optimizer, options=chosen)
        return {"model": model_state, "optimizer": optimizer_state}

    def save(self, with_own: bool) -> None:
        if with_own and self.is_ours:
            checkpoint.save(self.get(), self.folder)
        else:
            dcp.save(self.get(), checkpoint_id=str(self.folder))

    def load(self, with_own: bool) -> None:
        assert self._target is not None
        model, optimizer = self._target
        model_state, optimizer_state = self.functions.get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        if with_own and self.is_ours:
            checkpoint.load(state, self.folder)
        else:
            dcp.load(state, checkpoint_id=str(self.folder))
        self.functions.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def prepare(self, operation: str) -> None:
        """Do what is not part of the operation."""
        self._target = None
        gc.collect()
        if operation in (LOAD, OWN_LOAD):
            self._target = self._make_fresh()
        if operation in (SAVE, OWN_SAVE) and dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def operations(self) -> dict[str, Callable[[], Any]]:
        return {
            SHARDED: self.get,
            FULL: partial(self.get, full_state_dict=True),
            OFFLOADED: partial(self.get, full_state_dict=True, cpu_offload=True),
            SAVE: partial(self.save, with_own=False),
            LOAD: partial(self.load, with_own=False),
            OWN_SAVE: partial(self.save, with_own=True),
            OWN_LOAD: partial(self.load, with_own=True),
        }


def _worker(size: Size, rounds: int, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    base = GPT(size.num_blocks, size.width, num_heads=8)
    subjects = {system: Subject(base, system, folder) for system in (FSDP2, OURS)}
    seconds = {(operation, system): _times(subjects, operation, system, rounds) for operation, system in _cases()}
    peaks = {(operation, system): _peak(subjects[system], operation) for operation, system in _cases()}
    if dist.get_rank() == 0:
        rows = [_row(operation, system, seconds, peaks) for operation, system in _cases()]
        (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
        (folder / "bytes.json").write_text(json.dumps(parameter_bytes(base)))


def _cases() -> list[tuple[str, str]]:
    return [(operation, system) for operation in GOALS for system in (FSDP2, OURS)]


def _times(subjects: dict[str, Subject], operation: str, system: str, rounds: int) -> list[float]:
    subject = subjects[system]
    runs = []
    for i in range(-1, rounds):
        subject.prepare(operation)
        dist.barrier()
        start = perf_counter()
        result = subject.operations()[operation]()
        dist.barrier()
        if i >= 0:
            runs.append(perf_counter() - start)
        del result
    return _over_ranks(runs)


def _peak(subject: Subject, operation: str) -> float:
    subject.prepare(operation)
    dist.barrier()
    with AllocatedBytes() as allocated:
        with allocated.section("operation"):
            result = subject.operations()[operation]()
    del result
    return _over_ranks([float(allocated.peak["operation"])])[0]


def _over_ranks(values: list[float]) -> list[float]:
    """The largest of all ranks, one by one."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def _row(operation: str, system: str, seconds: dict[Any, list[float]], peaks: dict[Any, float]) -> Row:
    ms, peak, reference = median(seconds[operation, system]) * 1e3, peaks[operation, system], peaks[operation, FSDP2]
    return Row(
        operation=operation,
        system=system,
        ms=ms,
        time_ratio=ms / (median(seconds[operation, FSDP2]) * 1e3),
        peak_mib=peak / MIB,
        peak_ratio=peak / reference if reference else None,
        goal=GOALS[operation],
    )


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="timed runs of each operation (default: 3; --quick: 1)")
    options = parser.parse_args()
    size = QUICK if options.quick else USUAL
    rounds = options.rounds or (1 if options.quick else 3)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run_on_ranks(options.processes, _worker, size, rounds, folder)
        rows = [Row(**row) for row in json.loads((folder / "rows.json").read_text())]
        model_bytes = json.loads((folder / "bytes.json").read_text())
    settings = {"processes": options.processes, "rounds": rounds, **asdict(size), "parameter_bytes": model_bytes}
    result = report.Report("checkpoint", settings, rows)
    print(
        f"{options.processes} gloo processes, {rounds} rounds, {model_bytes / 4e6:.1f} M parameters (fp32), AdamW. "
        "Goals are for both ratios.\n"
    )
    print(result.table())
    result.write(
        options.out,
        report.bars("operation", "time_ratio", unit="time / FSDP2's", line=1.0),
        report.bars("operation", "peak_ratio", unit="peak memory / FSDP2's", line=1.0),
    )


if __name__ == "__main__":
    main()

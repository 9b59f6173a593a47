"""How long does a save hold up training? fsdp_compose's save and async_save beside dcp.async_save, on real processes.

All save the sharded state dicts of one GPT and an AdamW that has stepped. In turn, in every round: the call, and then
waiting until the checkpoint is durable (torch's writer synchronizes its files too). CPU time of the call is that of the
calling thread; until durable, that of the trainer and of the process that writes. The slowest rank counts; medians over
rounds. The first call of each is left out: it starts processes and touches memory. "Staged" is what the copy takes, and
the last column is the CPU time of a plain copy of as many bytes from tensor to tensor in the same rounds.

    python benchmarks/async_save.py                                   # 200 M parameters, 2 processes
    python benchmarks/async_save.py --quick
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import GPT, parameter_bytes
from processes import run_on_ranks
from report import column
from systems import OURS, wrap

from fsdp_compose.checkpoint import Saver, get_state_dict, save

SAVE, ASYNC, THREAD = f"{OURS}, save", f"{OURS}, async_save", "dcp.async_save"
WIDTHS = {True: (128, 2), False: (1024, 16)}
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    system: str = column("system")
    call_cpu: float = column("call, CPU ms", ".1f")
    to_save: float = column("to save", ".3f")
    to_thread: float = column("to dcp.async_save", ".3f")
    call_wall: float = column("call, wall ms", ".1f")
    durable_cpu: float = column("until durable, CPU ms", ".1f")
    durable_ratio: float = column("to save", ".3f")
    durable_wall: float = column("until durable, wall ms", ".1f")
    staged: float | None = column("staged, to this rank's part", ".3f")
    copy_cpu: float | None = column("plain copy, CPU ms", ".1f")


class Clocks:
    """CPU time of the calling thread, of this process and the writer, and time that passes."""

    def __init__(self, writer: int) -> None:
        self._stat = Path(f"/proc/{writer}/stat")

    def read(self) -> list[float]:
        fields = self._stat.read_text().rpartition(")")[2].split()
        written = (int(fields[11]) + int(fields[12])) * _TICK
        return [time.thread_time(), time.process_time() + written, time.perf_counter()]


def _worker(is_quick: bool, rounds: int, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    width, num_blocks = WIDTHS[is_quick]
    base = GPT(num_blocks, width, num_heads=8)
    model = wrap(base, OURS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.01)
    optimizer.step()

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    group = dist.new_group(backend="gloo")
    saver = Saver(state())
    clocks = Clocks(saver.pid)
    systems: dict[str, Callable[[dict[str, Any], Path], Any]] = {
        SAVE: save,
        ASYNC: saver.save,
        THREAD: lambda state, path: dcp.async_save(state, checkpoint_id=str(path), process_group=group),
    }
    took: dict[str, list[list[float]]] = {name: [] for name in systems}
    copies: list[list[float]] = []
    sources = [param.to_local().detach() for param in model.parameters() for _ in range(3)]  # type: ignore[attr-defined]
    targets = [torch.zeros_like(source) for source in sources]
    for i in range(-1, rounds):
        dist.barrier()
        start = clocks.read()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        copied = _slowest([clocks.read()[0] - start[0]])
        if i >= 0:
            copies.append(copied)
        for name, begin in systems.items():
            path, given = folder / "checkpoint", state()
            dist.barrier()
            start = clocks.read()
            saving = begin(given, path)
            called = clocks.read()
            if saving is not None:
                saving.result()
            durable = clocks.read()
            if i >= 0:
                took[name].append(
                    _slowest([called[0] - start[0], called[2] - start[2], durable[1] - start[1], durable[2] - start[2]])
                )
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
    part = sum(source.nbytes for source in sources)
    if dist.get_rank() == 0:
        medians = {name: [1e3 * median(column) for column in zip(*runs, strict=True)] for name, runs in took.items()}
        copy_cpu = 1e3 * median(copied for (copied,) in copies)
        rows = [_row(name, medians, saver.staged_bytes / part, copy_cpu) for name in systems]
        (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
        (folder / "bytes.json").write_text(json.dumps(parameter_bytes(base)))
    saver.close()


def _slowest(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def _row(name: str, medians: dict[str, list[float]], staged: float, copy_cpu: float) -> Row:
    call_cpu, call_wall, durable_cpu, durable_wall = medians[name]
    return Row(
        system=name,
        call_cpu=call_cpu,
        to_save=call_cpu / medians[SAVE][0],
        to_thread=call_cpu / medians[THREAD][0],
        call_wall=call_wall,
        durable_cpu=durable_cpu,
        durable_ratio=durable_cpu / medians[SAVE][2],
        durable_wall=durable_wall,
        staged=staged if name == ASYNC else None,
        copy_cpu=copy_cpu if name == ASYNC else None,
    )


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="timed saves of each kind (default: 5; --quick: 1)")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run_on_ranks(options.processes, _worker, options.quick, rounds, folder)
        rows = [Row(**row) for row in json.loads((folder / "rows.json").read_text())]
        model_bytes = json.loads((folder / "bytes.json").read_text())
    settings = {"processes": options.processes, "rounds": rounds, "parameter_bytes": model_bytes}
    result = report.Report("async_save", {**settings, "load": os.getloadavg()[0]}, rows)
    print(f"{options.processes} gloo processes, {rounds} rounds, {model_bytes / 4e6:.1f} M parameters (fp32), AdamW.\n")
    print(result.table())
    result.write(options.out, report.bars("system", "call_cpu", unit="CPU ms of the call"))


if __name__ == "__main__":
    main()

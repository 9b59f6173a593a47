"""Generation: forwards of batch 1 without grad mode, one after another, in real processes on gloo.

Every system does the same work in the same processes, forward by forward in turn. FSDP2 keeps its parameters gathered
with ``set_reshard_after_forward(False)``; here that takes ``keep_unsharded()``, which follows edits of the parameters.

    python benchmarks/generation.py                  # 2 processes, half a minute
    python benchmarks/generation.py --processes 4
    python benchmarks/generation.py --quick
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import report
import torch
import torch.distributed as dist
import torch.nn as nn
from models import GPT
from processes import run_on_ranks
from report import column
from systems import FSDP2, OURS, PLAIN
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_compose import fully_shard, keep_unsharded

SIZES = {"num_blocks": 8, "width": 256}
QUICK_SIZES = {"num_blocks": 2, "width": 16}
DEFAULT, KEPT = "default", "kept"


@dataclass(frozen=True)
class Row:
    """Medians over forwards, of the slowest rank."""

    system: str = column("system")
    setting: str = column("setting")
    forward_ms: float = column("forward ms", ".2f")
    to_plain: float = column("to plain", ".2f")
    to_fsdp2: float = column("to FSDP2 that keeps", ".2f")
    is_equal: bool = column("logits equal")


def _build(base: nn.Module, stack: ExitStack) -> dict[tuple[str, str], nn.Module]:
    models = {(PLAIN, DEFAULT): base}
    for system, setting in ((FSDP2, DEFAULT), (FSDP2, KEPT), (OURS, DEFAULT), (OURS, KEPT)):
        model = models[system, setting] = copy.deepcopy(base)
        shard = fully_shard if system == OURS else torch_fully_shard
        for block in model.blocks:
            shard(block)
        shard(model)
        if setting == KEPT and system == OURS:
            stack.enter_context(keep_unsharded(model))
        elif setting == KEPT:
            model.set_reshard_after_forward(False)
    return models


def _worker(sizes: dict[str, int], num_forwards: int, path: Path) -> None:
    torch.manual_seed(0)
    base = GPT(**sizes)
    data = base.example_input()[:1]
    with ExitStack() as stack, torch.no_grad():
        models = _build(base, stack)
        expected = base(data)
        is_equal = {key: torch.allclose(model(data), expected, atol=1e-4) for key, model in models.items()}
        times: dict[tuple[str, str], list[int]] = {key: [] for key in models}
        for i in range(num_forwards):
            for key in [*models] if i % 2 else [*models][::-1]:
                times[key].append(_time(models[key], data))
    slowest = torch.tensor([median(values) for values in times.values()], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found = dict(zip(models, (slowest / 1e6).tolist(), strict=True))
    rows = [
        Row(*key, value, value / found[PLAIN, DEFAULT], value / found[FSDP2, KEPT], is_equal[key])
        for key, value in found.items()
    ]
    if dist.get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))


def _time(model: Callable[[torch.Tensor], torch.Tensor], data: torch.Tensor) -> int:
    dist.barrier()
    start = perf_counter_ns()
    model(data)
    return perf_counter_ns() - start


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--forwards", type=int, help="timed forwards of each model (default: 60; --quick: 4)")
    options = parser.parse_args()
    num_forwards = options.forwards or (4 if options.quick else 60)
    sizes = QUICK_SIZES if options.quick else SIZES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        run_on_ranks(options.processes, _worker, sizes, num_forwards, path)
        rows = [Row(**row) for row in json.loads(path.read_text())]
    result = report.Report("generation", {"processes": options.processes, "forwards": num_forwards, **sizes}, rows)
    print(f"{options.processes} processes, {num_forwards} forwards of each, medians.\n\n{result.table()}")
    result.write(options.out, report.bars("setting", "forward_ms", unit="ms"))


if __name__ == "__main__":
    main()

"""What each row of the table of strategies keeps, moves and takes, with what is next to it in FSDP2 beside it.

Every rank of this machine is a process that the script starts. All strategies train copies of one transformer on the
same mesh of ranks, step by step in turn, in another random order each round, the same on all ranks. A step is forward,
backward, optimizer step and ``zero_grad``, between two barriers, and its time is that of the slowest rank; medians, and
ratios to FSDP2 on the same mesh, with the quartiles of those of single rounds. Bytes are ours, on the first rank:

- kept: parameters and optimizer state, between steps, with what stays gathered;
- received: by all-gathers, reduce-scatters and all-reduces in a step, if each sends as little as possible.

    python benchmarks/meshes.py               # 4 processes
    python benchmarks/meshes.py --quick
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

import report
import torch
import torch.distributed as dist
import torch.nn as nn
from models import GPT
from processes import run_on_ranks, time_in_turn
from report import column
from systems import FSDP2, LIBRARIES, OURS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_compose

MIB, SEQUENCE = 2**20, 64
HYBRID_GOAL = 0.75  # of FSDP2's step time
DTYPES = {"float32": 4}


@dataclass(frozen=True)
class Case:
    """A row of ``fsdp_compose.strategies.STRATEGIES``, and what FSDP2 has for it.

    Attributes:
        shape: of our mesh.
        theirs: of FSDP2's; and its ``reshard_after_forward``. (It frees in backward, and never keeps until a step.)
    """

    shape: tuple[int, ...]
    theirs: tuple[tuple[int, ...], bool | int | None]


def cases(processes: int) -> dict[str, Case]:
    whole, halves = (processes,), (processes // 2, 2)
    return {
        "zero3": Case(whole, (whole, None)),
        "zero2": Case(whole, (whole, False)),
        "hybrid": Case(halves, (halves, None)),
        "hfsdp": Case(halves, (whole, 2)),
        "ddp": Case(whole, ((processes, 1), None)),
    }


@dataclass(frozen=True)
class Row:
    strategy: str = column("strategy")
    system: str = column("system")
    kept_mib: float | None = column("kept MiB", ".2f")
    received_mib: float | None = column("received MiB", ".2f")
    step_ms: float = column("step ms", ".1f")
    to_fsdp2: float = column("to FSDP2", ".3f")
    quartiles: tuple[float, float] = column("quartiles")
    loss: float = column("last loss", ".5f")


# ---- one rank


class TrainingStep:
    """One system under one strategy."""

    def __init__(self, base: GPT, system: str, strategy: str, case: Case, tokens: torch.Tensor) -> None:
        self.model = copy.deepcopy(base)
        if system == OURS:
            mesh = _mesh(case.shape)
            for module in (*self.model.blocks, self.model):
                fsdp_compose.fully_shard(module, mesh=mesh, strategy=strategy)
        else:
            shape, reshard = case.theirs
            mesh = _mesh(shape)
            for block in self.model.blocks:
                LIBRARIES[system].fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
            LIBRARIES[system].fully_shard(
                self.model, mesh=mesh, reshard_after_forward=False if reshard is False else None
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.tokens, self.loss = tokens, 0.0

    def __call__(self) -> None:
        logits = self.model(self.tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()

    def kept_bytes(self) -> int:
        tensors = [*self.model.parameters()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values() if value.dim()]
        kept = sum(tensor.to_local().nbytes for tensor in tensors)
        for module in [*self.model.blocks, self.model]:
            for handle in fsdp_compose.fully_shard.state(module)._handles:
                unsharded = handle.unsharded
                if not unsharded.never_freed:
                    kept += unsharded.memory.nbytes() + (unsharded.post_forward.nbytes if unsharded.post_forward else 0)
        return kept

    def received_bytes(self) -> float:
        total = 0.0
        with fsdp_compose.record_collectives(self.model) as lines:
            self()
        for line in lines:
            found = re.match(r"(all-gather|reduce-scatter|all-reduce) .*\((\d+) x (\w+) among (\d+) ranks\)", line)
            if found:
                kind, numel, dtype, ranks = found.groups()
                rounds = 2 if kind == "all-reduce" else 1
                total += rounds * int(numel) * DTYPES[dtype] * (int(ranks) - 1) / int(ranks)
        return total


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _worker(processes: int, sizes: tuple[int, int, int], rounds: int, path: Path) -> None:
    num_blocks, width, num_tokens = sizes
    torch.manual_seed(0)
    base = GPT(num_blocks, width, num_heads=8)
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(base.vocabulary, (num_tokens // SEQUENCE, SEQUENCE))
    steps = {
        (name, system): TrainingStep(base, system, name, case, tokens)
        for name, case in cases(processes).items()
        for system in (FSDP2, OURS)
    }
    times = time_in_turn(steps, rounds)
    rows, losses = [], {key: step.loss for key, step in steps.items()}
    for (name, system), step in steps.items():
        ms, theirs = ([whole for (whole,) in times[name, item]] for item in (system, FSDP2))
        ratios = [ours / reference for ours, reference in zip(ms, theirs, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        rows.append(
            Row(
                strategy=name,
                system=system,
                kept_mib=step.kept_bytes() / MIB if system == OURS else None,
                received_mib=step.received_bytes() / MIB if system == OURS else None,
                step_ms=median(ms),
                to_fsdp2=median(ms) / median(theirs),
                quartiles=(round(low, 3), round(high, 3)),
                loss=losses[name, system],
            )
        )
    if dist.get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))


# ---- the parent


def verdict(rows: list[Row]) -> str:
    row = next(row for row in rows if row.strategy == "hybrid" and row.system == OURS)
    outcome = "met" if row.to_fsdp2 <= HYBRID_GOAL else "missed"
    return f"{row.strategy}: {row.to_fsdp2:.3f} of FSDP2's step (goal {HYBRID_GOAL}: {outcome})"


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=4, help="an even number, of at least 4")
    parser.add_argument("--rounds", type=int, help="timed steps of each (default: 9; --quick: 2)")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 9)
    sizes = (2, 64, SEQUENCE) if options.quick else (8, 512, 128)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        run_on_ranks(options.processes, _worker, options.processes, sizes, rounds, path)
        rows = [Row(**row) for row in json.loads(path.read_text())]
    settings = {"processes": options.processes, "rounds": rounds, "sizes": sizes}
    result = report.Report("meshes", settings, rows)
    print(result.table())
    print(verdict(rows))
    result.write(options.out, report.bars("strategy", "to_fsdp2", unit="step time / FSDP2's", line=HYBRID_GOAL))


if __name__ == "__main__":
    main()

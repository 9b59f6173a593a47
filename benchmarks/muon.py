"""A step of Muon on matrices of a Llama: CPU time of all ranks, wall time, and bytes that travel.

Next to ours: FSDP2 with ``full_tensor()`` of each update, orthogonalized on every rank, as users write it; ``torch``'s
Muon on FSDP2's parameters and on ours; and owners with an all-to-all of FSDP2's even shards, written from what
torchtitan says of its DistMuon (with our planning and our collectives, so that only the layout differs). All step in
turn, in another random order each round, with the same gradients; medians of ratios of single rounds. Then ours where
no matrix is cut (granularity "whole"), to which exchanging compares. On an even number of processes from four on also
hybrid sharding in two replicas, that do the same work twice, or share it (``over_replicas``). ``peak MiB`` is the most
that the first rank's allocator gives out during a step.

    python benchmarks/muon.py                            # 2 processes
    python benchmarks/muon.py --processes 4
    python benchmarks/muon.py --ns-dtype float32         # where the processor has no bfloat16 instructions
    python benchmarks/muon.py --quick

torch's Muon computes in bfloat16 alone, and is left out in other dtypes. Without instructions for bfloat16 its products
take nearly all the time, minutes for the larger matrices, and say nothing of anything else.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.nn as nn
from memory import MIB, AllocatedBytes
from models import Llama
from processes import run_on_ranks, time_in_turn
from report import column
from systems import FSDP2, OURS, wrap
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compose import fully_shard
from fsdp_compose._torch import Shown
from fsdp_compose.core.comm import Label, transport_of
from fsdp_compose.core.ragged import RunLengths
from fsdp_compose.optim import Muon
from fsdp_compose.optim.matrices import Exchange, Route, assign, matrices_of, stacks_of
from fsdp_compose.optim.muon import NS_COEFFICIENTS, orthogonalize

FULL_TENSOR, ALL_TO_ALL = f"{FSDP2} + full_tensor()", f"{FSDP2} + all-to-all"
TORCH_ON_FSDP2, TORCH_ON_OURS = f"{FSDP2}, torch's Muon", f"{OURS}, torch's Muon"
WHOLE, TWICE, SHARED = f"{OURS}, whole matrices", f"{OURS}, 2 replicas", f"{OURS}, over_replicas"
SIZES = {"tiny": (64, 16), "small": (256, 6), "medium": (512, 3)}  # width, blocks
LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1


@dataclass(frozen=True)
class Row:
    matrices: str = column("matrices")
    system: str = column("system")
    cpu_ms: float = column("CPU ms", ".1f")
    to_full_tensor: float = column("to full_tensor()", ".3f")
    wall_ms: float = column("wall ms", ".1f")
    wall_ratio: float = column("to full_tensor()", ".3f")
    sent_mb: float = column("sent MB", ".2f")
    sent_ratio: float = column("to full_tensor()", ".3f")
    sent_to_all_to_all: float = column("to all-to-all", ".3f")
    collectives: int = column("collectives")
    peak_mib: float = column("peak MiB", ".2f")


class _Written(torch.optim.Optimizer):
    """The parts of Muon that the two on FSDP2 share."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": LR})
        self.params = self.param_groups[0]["params"]

    def update(self, param: Any) -> Any:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)
        state["momentum_buffer"].lerp_(param.grad, 1 - MOMENTUM)
        return param.grad.lerp(state["momentum_buffer"], MOMENTUM)

    def apply(self, param: torch.Tensor, target: torch.Tensor, part: torch.Tensor) -> None:
        target.mul_(1 - LR * DECAY).add_(part, alpha=-LR * sqrt(max(1, param.shape[0] / param.shape[1])))


class FullTensor(_Written):
    """Every rank gathers and orthogonalizes each update, and keeps its rows."""

    def __init__(self, params: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(params)
        self._dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        rank, size = dist.get_rank(), dist.get_world_size()
        for param in self.params:
            whole = self.update(param).full_tensor().to(self._dtype, copy=True)
            result = orthogonalize(whole[None], NS_COEFFICIENTS, 5, 1e-7)[0]
            rows = -(-param.shape[0] // size)
            self.apply(param, param.to_local(), result[rank * rows : (rank + 1) * rows])


class AllToAll(_Written):
    """Owners of matrices whose rows are sharded evenly, one bucket for each block."""

    def __init__(self, params: Iterable[nn.Parameter], per_bucket: int, dtype: torch.dtype) -> None:
        super().__init__(params)
        self._dtype = dtype
        self._rank, size = dist.get_rank(), dist.get_world_size()
        group = self.params[0].device_mesh.get_group()
        self._transport = transport_of(group, torch.device("cpu"))
        items = []
        for param in self.params:
            rows = -(-param.shape[0] // size)
            held = [max(0, min(param.shape[0] - rank * rows, rows)) for rank in range(size)]
            items.append(matrices_of(param.shape, RunLengths.of(held).times(param.shape[1]), None))
        owners = assign(items, size)
        starts = [item.counts.start(self._rank) for item in items]
        self._exchanges = []
        for first in range(0, len(items), per_bucket):
            chosen = range(first, min(first + per_bucket, len(items)))
            stacks = [stack for i in chosen for stack in stacks_of(i, items[i], owners[i])]
            self._exchanges.append(Exchange(stacks, self._rank, size, starts))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        updates = [self.update(param).to_local().reshape(-1) for param in self.params]
        route = Route(self._dtype, torch.device("cpu"), self._transport, Label(["matrices"]))
        for exchange in self._exchanges:
            stacks = exchange.gather(updates, route)()
            results = [orthogonalize(stack, NS_COEFFICIENTS, 5, 1e-7) for stack in stacks]
            for i, start, part in exchange.scatter(results, route)():
                param = self.params[i]
                self.apply(param, param.to_local().view(-1)[start : start + part.numel()], part)


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends, and the calls for it: of messages each other rank is one."""

    def __init__(self) -> None:
        super().__init__()
        self.num = self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        if Shown in types:  # what messages stand for: those are counted
            return function(*args, **(kwargs or {}))
        name, others = function._schema.name, dist.get_world_size() - 1
        self.calls += "::" in name and name.split("::")[0] in ("c10d", "_c10d_functional") and not name.endswith(_WAITS)
        if name == "c10d::send":
            self.num += args[0][0].nbytes
        elif name == "_c10d_functional::all_gather_into_tensor":
            self.num += args[0].nbytes * others
        elif name == "c10d::_allgather_base_":
            self.num += args[1].nbytes * others
        elif name.startswith(("c10d::allreduce", "_c10d_functional::all_reduce")):
            tensor = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            self.num += 2 * tensor.nbytes * others // (others + 1)
        elif name.startswith(("_c10d_functional::", "c10d::")) and not name.endswith(_WAITS):
            raise NotImplementedError(f"{name} is not counted")
        return function(*args, **(kwargs or {}))


_WAITS = ("recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier")


def _ours(model: nn.Module, replicas: int = 1, is_whole: bool = False) -> nn.Module:
    """Put a model under ours, in two replicas or with whole matrices on each rank."""
    mesh = None if replicas == 1 else init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
    granularity = (lambda _name, _param: "whole") if is_whole else None
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, granularity=granularity)
    return fully_shard(model, mesh=mesh)


def _made(
    base: Llama,
    shard: Callable[[nn.Module], nn.Module],
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> Any:
    model = shard(copy.deepcopy(base))
    params = [param for name, param in model.named_parameters() if name.startswith("blocks") and param.dim() == 2]
    return model, make(params)


def _measure(size: str, rounds: int, dtype: torch.dtype) -> list[Row]:
    torch.manual_seed(0)
    width, num_blocks = SIZES[size]
    base = Llama(width, num_blocks, vocabulary=512)
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(512, (2, 32))
    per_block = sum(param.dim() == 2 for param in base.blocks[0].parameters())
    fsdp2, ours, twice = partial(wrap, system=FSDP2), partial(wrap, system=OURS), partial(_ours, replicas=2)
    muon = partial(Muon, lr=LR, ns_dtype=dtype)
    makes: dict[str, tuple[Any, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
        FULL_TENSOR: (fsdp2, partial(FullTensor, dtype=dtype)),
        TORCH_ON_FSDP2: (fsdp2, partial(torch.optim.Muon, lr=LR)),
        ALL_TO_ALL: (fsdp2, partial(AllToAll, per_bucket=per_block, dtype=dtype)),
        TORCH_ON_OURS: (ours, partial(torch.optim.Muon, lr=LR)),
        OURS: (ours, muon),
        WHOLE: (partial(_ours, is_whole=True), muon),
    }
    if dtype != torch.bfloat16:
        del makes[TORCH_ON_FSDP2], makes[TORCH_ON_OURS]
    if dist.get_world_size() % 2 == 0 and dist.get_world_size() > 2:
        makes |= {TWICE: (twice, muon), SHARED: (twice, partial(muon, over_replicas=True))}
    steps, counts = {}, {}
    for name, (shard, make) in makes.items():
        model, optimizer = _made(base, shard, make)
        model(tokens).float().square().mean().backward()
        optimizer.step()
        with SentBytes() as counted:
            optimizer.step()
        total = torch.tensor(counted.num)
        dist.all_reduce(total)
        with AllocatedBytes() as allocated, allocated.section("step"):
            optimizer.step()
        steps[name] = partial(_step, optimizer)
        counts[name] = int(total), counted.calls, allocated.peak["step"] / MIB
    slowest = time_in_turn(steps, rounds)
    numel = sum(param.numel() for param in base.blocks.parameters() if param.dim() == 2)
    title = f"{num_blocks * per_block} of {numel / 1e6:.1f} M"
    return [_row(title, name, slowest, counts) for name in makes]


def _step(optimizer: torch.optim.Optimizer) -> tuple[float]:
    begun = process_time()
    optimizer.step()
    seconds = torch.tensor(process_time() - begun, dtype=torch.float64)
    dist.all_reduce(seconds)
    return (float(seconds),)


def _row(
    title: str, name: str, slowest: dict[str, list[list[float]]], counts: dict[str, tuple[int, int, float]]
) -> Row:
    pairs = list(zip(slowest[name], slowest[FULL_TENSOR], strict=True))
    wall, cpu = (median([run[i] for run in slowest[name]]) for i in (0, 1))
    wall_ratio, cpu_ratio = (median([run[i] / other[i] for run, other in pairs]) for i in (0, 1))
    sent, calls, peak = counts[name]
    ratios = [sent / counts[other][0] for other in (FULL_TENSOR, ALL_TO_ALL)]
    return Row(title, name, cpu, cpu_ratio, wall, wall_ratio, sent / 1e6, *ratios, calls, peak)


def _worker(sizes: Sequence[str], rounds: int, dtype: str, path: Path) -> None:
    warnings.filterwarnings("ignore")
    rows = [row for size in sizes for row in _measure(size, rounds, getattr(torch, dtype))]
    if dist.get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="timed steps of each system (default: 15; --quick: 2)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--ns-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the iterations")
    options = parser.parse_args()
    sizes = ["tiny"] if options.quick else options.sizes
    rounds = options.rounds or (2 if options.quick else 15)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        run_on_ranks(options.processes, _worker, sizes, rounds, options.ns_dtype, path)
        rows = [Row(**row) for row in json.loads(path.read_text())]
    settings = {"processes": options.processes, "rounds": rounds, "dtype": options.ns_dtype, "load": os.getloadavg()[0]}
    result = report.Report(f"muon_{options.processes}", settings, rows)
    print(f"{options.processes} gloo processes, {rounds} rounds; medians, CPU time of all ranks.\n")
    print(result.table())
    result.write(options.out, report.bars("matrices", "to_full_tensor", unit="CPU time / FSDP2 + full_tensor()'s"))


if __name__ == "__main__":
    main()

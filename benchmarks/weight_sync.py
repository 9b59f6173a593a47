"""Weights for an inference engine, in bfloat16, after every training step in fp32: all of them, or what has changed.

``full_tensor()`` is what is done with FSDP2: each parameter gathered by itself, then cast. ``changed_since`` gives what
one step of AdamW has changed of the bfloat16 weights, with the learning rates that reinforcement learning takes. Bytes
are what all ranks send together.

    python benchmarks/weight_sync.py                  # 2 processes, 13 M parameters
    python benchmarks/weight_sync.py --quick
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.nn as nn
from models import GPT
from processes import run_on_ranks, time_in_turn
from report import column
from systems import FSDP2, OURS, wrap
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compose import full_parameters
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict
from fsdp_compose.sync import apply_changes, changed_since, snapshot_parameters

SENT = torch.bfloat16
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
MIB = 2**20

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """Medians of the slowest rank; bytes are those of the last round."""

    system: str = column("system")
    operation: str = column("operation")
    learning_rate: float | None = column("learning rate", ".0e")
    milliseconds: float = column("ms", ".0f")
    sent_mib: float = column("MiB sent", ".2f")
    changed: float | None = column("elements changed", ".2%")
    is_equal: bool = False  # to FSDP2's weights, or to all of ours


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends: messages, and its part of an all-gather to each of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name == "c10d::send":
            self.num += sum(tensor.nbytes for tensor in args[0])
        elif "all_gather_into_tensor" in function._schema.name:
            self.num += args[0].nbytes * (dist.get_world_size() - 1)
        return function(*args, **(kwargs or {}))


def each_by_itself(model: nn.Module) -> State:
    return {name: param.detach().full_tensor().to(SENT) for name, param in model.named_parameters()}


def full_state_dict(model: nn.Module) -> State:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: tensor.to(SENT) for name, tensor in state.items()}


def all_of_them(model: nn.Module) -> State:
    with full_parameters(model, dtype=SENT, bucket_bytes=8 * MIB) as buckets:
        return {name: tensor for bucket in buckets for name, tensor in bucket}


FULL: dict[tuple[str, str], Callable[[nn.Module], State]] = {
    (FSDP2, "full_tensor() of each"): each_by_itself,
    (OURS, "full state dict"): full_state_dict,
    (OURS, "full_parameters"): all_of_them,
}


class Updates:
    """A model that trains with one learning rate, and weights that are kept up to date with it.

    Attributes:
        share: of the elements, how many the last step has changed.
    """

    def __init__(self, model: nn.Module, learning_rate: float, tokens: torch.Tensor) -> None:
        self.model, self.tokens, self.share = model, tokens, 0.0
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        for _ in range(3):
            self._step()
        self._snapshot, self.weights = snapshot_parameters(model, dtype=SENT), all_of_them(model)

    def _step(self) -> None:
        self.model(self.tokens).float().logsumexp(-1).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def update(self, around: AbstractContextManager[Any] = nullcontext()) -> tuple[float]:  # noqa: B008
        """Train for a step; the seconds that the weights took then, within ``around``."""
        self._step()
        before = {name: tensor.clone() for name, tensor in self.weights.items()}
        start = perf_counter()
        with around, changed_since(self.model, self._snapshot, bucket_bytes=8 * MIB) as buckets:
            for bucket in buckets:
                apply_changes(self.weights, bucket)
        seconds = perf_counter() - start
        changed = sum(int((before[name] != tensor).sum()) for name, tensor in self.weights.items())
        self.share = changed / sum(tensor.numel() for tensor in before.values())
        return (seconds,)


def _worker(num_blocks: int, width: int, rounds: int, path: Path) -> None:
    torch.manual_seed(0)
    base = GPT(num_blocks, width)
    tokens = base.example_input()
    models = {system: wrap(copy.deepcopy(base), system) for system in (FSDP2, OURS)}
    updates = {rate: Updates(wrap(copy.deepcopy(base), OURS), rate, tokens) for rate in LEARNING_RATES}
    actions: dict[Any, Callable[[], Any]] = {key: _timed(make, models[key[0]]) for key, make in FULL.items()}
    actions |= {rate: item.update for rate, item in updates.items()}
    times = {key: median(run[1] for run in runs) for key, runs in time_in_turn(actions, rounds).items()}
    expected = each_by_itself(models[FSDP2])
    rows = []
    for key, make in FULL.items():
        with SentBytes() as sent:
            state = make(models[key[0]])
        is_equal = all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        rows.append(Row(*key, None, times[key], _mib_of_all_ranks(sent), None, is_equal))
    for rate, item in updates.items():
        sent = SentBytes()
        item.update(sent)
        state = all_of_them(item.model)
        is_equal = all(torch.equal(item.weights[name], tensor) for name, tensor in state.items())
        rows.append(Row(OURS, "changed_since", rate, times[rate], _mib_of_all_ranks(sent), item.share, is_equal))
    if dist.get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))


def _timed(make: Callable[[nn.Module], State], model: nn.Module) -> Callable[[], tuple[float]]:
    def action() -> tuple[float]:
        start = perf_counter()
        make(model)
        return (perf_counter() - start,)

    return action


def _mib_of_all_ranks(sent: SentBytes) -> float:
    total = torch.tensor(sent.num)
    dist.all_reduce(total)
    return int(total) / MIB


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 15; --quick: 2)")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 15)
    num_blocks, width = (2, 64) if options.quick else (8, 368)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        run_on_ranks(options.processes, _worker, num_blocks, width, rounds, path)
        rows = [Row(**row) for row in json.loads(path.read_text())]
    settings = {"processes": options.processes, "rounds": rounds, "blocks": num_blocks, "width": width}
    result = report.Report("weight_sync", settings, rows)
    print(f"{options.processes} processes, {rounds} rounds, medians.\n\n{result.table()}")
    result.write(options.out, report.bars("operation", "sent_mib", unit="MiB sent"))


if __name__ == "__main__":
    main()

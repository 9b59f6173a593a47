"""The cost of optimizer steps and gradient clipping on the host: many small parameters, plain, FSDP2's (stock
DTensors), fsdp_compose's, and its flat views.

All in one process, in random order: of each the best of three runs, directly after an untimed one (short actions suffer
most from other processes), and of these the median over the repeats. A step is ``step()`` and ``zero_grad()``. The
parameters are so small that nothing but the way to the kernels is measured. Ratios are to FSDP2's, in the same run; our
own ``clip_grad_norm_`` is compared with torch's on FSDP2.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --quick
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import process_time_ns

import report
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from report import column
from systems import FSDP2, OURS, PLAIN
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compose

OURS_FLAT = "fsdp_compose flat"
SYSTEMS = (PLAIN, FSDP2, OURS, OURS_FLAT)
WORLD_SIZE, NUMEL_PER_RANK, COLUMNS = 8, 128, 8
IN_A_GROUP = 12  # parameters in a group of ``fully_shard``, of the model of many groups
MODES: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
TORCH_CLIP, OUR_CLIP = "torch's clip_grad_norm_", "our clip_grad_norm_"
GOALS = {  # to FSDP2
    ("AdamW fused", OURS): 0.5,
    ("AdamW foreach", OURS): 1.05,
    ("AdamW fused", OURS_FLAT): 0.1,
    ("AdamW foreach", OURS_FLAT): 0.1,
    (OUR_CLIP, OURS): 0.02,
    (OUR_CLIP, OURS_FLAT): 0.02,
}


@dataclass(frozen=True)
class Row:
    action: str = column("action")
    num_parameters: int = column("parameters")
    num_groups: int = column("groups")
    system: str = column("system")
    ms: float = column("ms", ".2f")
    ratio: float = column("to FSDP2", ".3f")
    goal: float | None = column("goal")

    @property
    def case(self) -> str:
        return f"{self.action}, {self.num_parameters} in {self.num_groups}"


Key = tuple[str, int, int, str]  # the first four fields of a row


class ManyParameters(nn.Module):
    def __init__(self, num_parameters: int, rows: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.randn(rows, COLUMNS)) for _ in range(num_parameters))

    def forward(self) -> torch.Tensor:
        return torch.stack([param.sum() for param in self.params]).sum()


class ManyGroups(nn.Module):
    def __init__(self, num_groups: int, num_parameters: int, rows: int) -> None:
        super().__init__()
        self.groups = nn.ModuleList(ManyParameters(num_parameters // num_groups, rows) for _ in range(num_groups))

    def forward(self) -> torch.Tensor:
        return torch.stack([group() for group in self.groups]).sum()


def trained(
    system: str, num_groups: int, num_parameters: int, mesh: DeviceMesh
) -> tuple[nn.Module, list[nn.Parameter]]:
    """A model after one backward, and what an optimizer of this system is given."""
    rows = NUMEL_PER_RANK // COLUMNS * (1 if system == PLAIN else WORLD_SIZE)
    model = ManyGroups(num_groups, num_parameters, rows)
    if system != PLAIN:
        library = torch_fsdp if system == FSDP2 else fsdp_compose
        for module in (*model.groups, model):
            library.fully_shard(module, mesh=mesh)
    flat = fsdp_compose.flat_parameters(model) if system == OURS_FLAT else None
    model().backward()
    return model, list(model.parameters()) if flat is None else flat


class Step:
    """``step()`` and ``zero_grad()`` of one optimizer; the gradients are put back before, untimed."""

    def __init__(self, model: nn.Module, params: list[nn.Parameter], flags: dict[str, bool]) -> None:
        self.model = model  # flat views have an owner only as long as it lives
        self.optimizer = torch.optim.AdamW(params, lr=1e-3, **flags)
        self.grads = [(param, param.grad) for param in {*params, *model.parameters()}]

    def prepare(self) -> None:
        for param, grad in self.grads:
            param.grad = grad

    def __call__(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Clip:
    """One of the functions that clip."""

    def __init__(
        self, model: nn.Module, params: list[nn.Parameter], function: Callable[[list[nn.Parameter], float], object]
    ) -> None:
        self.model, self.params, self.function = model, params, function  # alive: see Step

    def __call__(self) -> None:
        self.function(self.params, 1e9)


Action = Step | Clip


def build_actions(num_parameters: int, num_groups: int, num_clipped: int, mesh: DeviceMesh) -> dict[Key, Action]:
    """The actions that are timed: steps on parameters in one group of ``fully_shard`` and in many, and clipping."""
    actions: dict[Key, Action] = {}
    for system in SYSTEMS:
        model, params = trained(system, 1, num_parameters, mesh)
        for name, flags in MODES.items():
            actions[f"AdamW {name}", num_parameters, 1, system] = Step(model, params, flags)
    in_groups = num_groups * IN_A_GROUP
    for system in SYSTEMS:
        model, params = trained(system, num_groups, in_groups, mesh)
        for name in ("fused", "foreach"):
            actions[f"AdamW {name}", in_groups, num_groups, system] = Step(model, params, MODES[name])
    for system in SYSTEMS:
        model, params = trained(system, 1, num_clipped, mesh)
        torchs = Clip(model, params, nn.utils.clip_grad_norm_)
        actions[TORCH_CLIP, num_clipped, 1, system] = torchs
        if system != PLAIN:
            ours = Clip(model, params, fsdp_compose.clip_grad_norm_)
            actions[OUR_CLIP, num_clipped, 1, system] = torchs if system == FSDP2 else ours
    return actions


def median_ms(actions: dict[Key, Action], repeats: int) -> dict[Key, float]:
    times: dict[Key, list[int]] = {key: [] for key in actions}
    order = list(actions.items())
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        random.shuffle(order)
        gc.collect()
        gc.disable()
        for key, action in order:
            elapsed = []
            for _ in range(4):
                if isinstance(action, Step):
                    action.prepare()
                start = process_time_ns()
                action()
                elapsed.append(process_time_ns() - start)
            times[key].append(min(elapsed[1:]))
        gc.enable()
    return {key: median(runs) / 1e6 for key, runs in times.items()}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--parameters", type=int, help="of steps on one group of fully_shard (default: 300; --quick: 12)"
    )
    parser.add_argument("--groups", type=int, help=f"of {IN_A_GROUP} parameters (default: 49; --quick: 2)")
    parser.add_argument(
        "--clipped", type=int, help="parameters whose gradients are clipped (default: 2000; --quick: 24)"
    )
    parser.add_argument("--repeats", type=int, help="(default: 40; --quick: 2)")
    options = parser.parse_args()
    for name, usual, quick in (("parameters", 300, 12), ("groups", 49, 2), ("clipped", 2000, 24), ("repeats", 40, 2)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    os.environ["FSDP_COMPOSE_SIMULATED"] = "1"  # no other rank exists
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    dist.init_process_group("fake", rank=1, world_size=WORLD_SIZE, store=FakeStore())
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    times = median_ms(build_actions(options.parameters, options.groups, options.clipped, mesh), options.repeats)
    dist.destroy_process_group()
    rows = [
        Row(*key, ms=ms, ratio=ms / times[(*key[:3], FSDP2)], goal=GOALS.get((key[0], key[3])))
        for key, ms in sorted(times.items(), key=lambda item: (item[0][:3], SYSTEMS.index(item[0][3])))
    ]
    settings = {"ranks": WORLD_SIZE, "numel_per_rank": NUMEL_PER_RANK, "repeats": options.repeats}
    result = report.Report("optimizers", settings, rows)
    print(f"{NUMEL_PER_RANK} elements a parameter and rank, medians of {options.repeats}; ratios to FSDP2.\n")
    print(result.table())
    result.write(options.out, report.bars("case", "ratio", unit="time / FSDP2's"))


if __name__ == "__main__":
    main()

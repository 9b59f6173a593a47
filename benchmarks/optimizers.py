"""What optimizer steps and gradient clipping cost the host: many small parameters, plain, FSDP2's (stock DTensors),
fsdp_compose's, and its flat parameters.

All in one process, in random order: of each the best of three runs, directly after an untimed one (short actions suffer
most from other processes), and of these the median over the repeats. A step is ``step()`` and ``zero_grad()``. The
parameters are so small that nothing but the way to the kernels is measured. Ratios are to FSDP2's, in the same run.

    python benchmarks/optimizers.py
"""

from __future__ import annotations

import argparse
import gc
import os
import random
from collections.abc import Callable
from statistics import median
from time import process_time_ns

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compose

WORLD_SIZE, NUMEL_PER_RANK = 8, 128
ROWS = WORLD_SIZE * NUMEL_PER_RANK // 8


class ManyParameters(nn.Module):
    def __init__(self, num_parameters: int, rows: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.randn(rows, 8)) for _ in range(num_parameters))

    def forward(self) -> torch.Tensor:
        return torch.stack([param.sum() for param in self.params]).sum()


KINDS = ("plain", "FSDP2", "fsdp_compose", "fsdp_compose flat")
MODES: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}


def trained(kind: str, num_parameters: int, mesh: DeviceMesh) -> tuple[nn.Module, list[nn.Parameter]]:
    """A model after one backward, and what an optimizer of this kind is given."""
    model = ManyParameters(num_parameters, ROWS // WORLD_SIZE if kind == "plain" else ROWS)
    if kind == "FSDP2":
        torch_fsdp.fully_shard(model, mesh=mesh)
    elif kind != "plain":
        fsdp_compose.fully_shard(model, mesh=mesh)
    flat = fsdp_compose.flat_parameters(model) if kind == "fsdp_compose flat" else None
    model().backward()
    return model, list(model.parameters()) if flat is None else flat


class Step:
    """``step()`` and ``zero_grad()`` of one optimizer; the gradients are put back before, untimed."""

    def __init__(self, model: nn.Module, params: list[nn.Parameter], flags: dict[str, bool]) -> None:
        self.optimizer = torch.optim.AdamW(params, lr=1e-3, **flags)
        self.grads = [(param, param.grad) for param in {*params, *model.parameters()}]

    def prepare(self) -> None:
        for param, grad in self.grads:
            param.grad = grad

    def __call__(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def build_actions(
    options: argparse.Namespace, mesh: DeviceMesh, models: list[nn.Module]
) -> dict[tuple[str, str], Callable[[], object]]:
    """What is timed, by what it does and for whom; ``models`` keeps the models alive."""
    actions: dict[tuple[str, str], Callable[[], object]] = {}
    for kind in KINDS:
        model, params = trained(kind, options.parameters, mesh)
        models.append(model)
        for name, flags in MODES.items():
            actions[f"AdamW {name}, {options.parameters}", kind] = Step(model, params, flags)
    for kind in KINDS:
        model, params = trained(kind, options.clipped, mesh)
        models.append(model)
        what = f"{options.clipped} parameters"
        actions[f"torch's clip, {what}", kind] = lambda params=params: nn.utils.clip_grad_norm_(params, 1e9)
        if kind != "plain":
            clip = nn.utils.clip_grad_norm_ if kind == "FSDP2" else fsdp_compose.clip_grad_norm_
            actions[f"our clip, torch's for FSDP2, {what}", kind] = lambda params=params, clip=clip: clip(params, 1e9)
    return actions


def median_ms(actions: dict[tuple[str, str], Callable[[], object]], repeats: int) -> dict[tuple[str, str], float]:
    times: dict[tuple[str, str], list[int]] = {key: [] for key in actions}
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=300, help="of the optimizer steps")
    parser.add_argument("--clipped", type=int, default=2000, help="parameters whose gradients are clipped")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    os.environ["FSDP_COMPOSE_SIMULATED"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=1, world_size=WORLD_SIZE, store=FakeStore())
    models: list[nn.Module] = []
    times = median_ms(build_actions(options, init_device_mesh("cpu", (WORLD_SIZE,)), models), options.repeats)
    print(f"{NUMEL_PER_RANK} elements a parameter and rank, medians of {options.repeats}, ms (share of FSDP2's)\n")
    print("| | " + " | ".join(KINDS) + " |")
    print("|---" * (len(KINDS) + 1) + "|")
    for what in dict.fromkeys(what for what, _ in times):
        reference = times[what, "FSDP2"]
        columns = [times.get((what, kind)) for kind in KINDS]
        print(
            f"| {what} | "
            + " | ".join("" if ms is None else f"{ms:.2f} ({ms / reference:.3f})" for ms in columns)
            + " |"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

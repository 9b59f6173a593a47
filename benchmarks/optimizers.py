"""What an optimizer step costs the host: 300 small parameters, plain, FSDP2's (stock DTensors), and fsdp_compose's.

All in one process, in turn, medians. The parameters are so small that nothing but the way to the kernels is measured.

    python benchmarks/optimizers.py
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from statistics import median
from time import process_time_ns

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    os.environ["FSDP_COMPOSE_SIMULATED"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=1, world_size=WORLD_SIZE, store=FakeStore())
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    kinds: dict[str, Callable[[nn.Module], object]] = {
        "plain": lambda model: model,
        "FSDP2": lambda model: torch_fsdp.fully_shard(model, mesh=mesh),
        "fsdp_compose": lambda model: fsdp_compose.fully_shard(model, mesh=mesh),
    }
    actions: dict[tuple[str, str], Callable[[], object]] = {}
    for kind, make in kinds.items():
        model = ManyParameters(options.parameters, ROWS // WORLD_SIZE if kind == "plain" else ROWS)
        make(model)
        model().backward()
        params = list(model.parameters())
        for name, flags in (("fused", {"fused": True}), ("foreach", {"foreach": True}), ("loop", {"foreach": False})):
            optimizer = torch.optim.AdamW(params, lr=1e-3, **flags)
            actions[f"AdamW {name}", kind] = optimizer.step
        actions["clip_grad_norm_", kind] = lambda params=params: torch.nn.utils.clip_grad_norm_(params, 1e9)
        if kind == "fsdp_compose":
            actions["clip_grad_norm_", "fsdp_compose's own"] = lambda params=params: fsdp_compose.clip_grad_norm_(
                params, 1e9
            )
    for action in actions.values():
        for _ in range(3):
            action()
    times: dict[tuple[str, str], list[int]] = {key: [] for key in actions}
    order = list(actions.items())
    for _ in range(options.repeats):
        random.shuffle(order)
        for key, action in order:
            start = process_time_ns()
            action()
            times[key].append(process_time_ns() - start)
    medians = {key: median(runs) / 1e6 for key, runs in times.items()}
    print(f"{options.parameters} parameters, {NUMEL_PER_RANK} elements a rank, medians of {options.repeats}, ms\n")
    print("| | " + " | ".join([*kinds, "fsdp_compose's own", "fsdp_compose / FSDP2"]) + " |")
    print("|---" * (len(kinds) + 3) + "|")
    for what in dict.fromkeys(what for what, _ in actions):
        columns = [medians.get((what, kind)) for kind in (*kinds, "fsdp_compose's own")]
        ratio = medians[what, "fsdp_compose"] / medians[what, "FSDP2"]
        print(f"| {what} | " + " | ".join("" if ms is None else f"{ms:.2f}" for ms in columns) + f" | {ratio:.2f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A small trainer with checkpoints that can be killed anywhere; as a program, under torchrun: kills itself at random
places, in each attempt but the last. torchrun runs it in forked processes (--run-path --start-method=fork)."""

from __future__ import annotations

import os
import random
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import fully_shard
from fsdp_compose.checkpoint import get_state_dict, load, save, set_state_dict

NUM_STEPS = 6


def build(mesh=None, width=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3))
    if mesh is not None:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train_step(model, optimizer, step):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(num_steps):
    model, optimizer = build()
    for step in range(num_steps):
        train_step(model, optimizer, step)
    return model.state_dict()


def assert_equal(model, expected):
    whole = {name: param.full_tensor() for name, param in model.named_parameters()}
    for name, value in expected.items():
        assert torch.equal(whole[name], value), name


def forget_torch_keys(store):
    for key in store.list_keys():
        if "fsdp_compose" not in key:
            store.delete_key(key.removeprefix("/"))


class Trainer:
    """Trains to ``NUM_STEPS`` with a checkpoint after every step, from the last one there is; may be killed before a
    step, in forward, in backward, in the step of the optimizer, or in save()."""

    places = ("before", "forward", "backward", "step", "save", "after")

    def __init__(self, folder, death):
        self.folder, self.death = Path(folder), death
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model, self.optimizer = build(self.mesh)
        self.step = 0
        names = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
        if names:
            state = self.state()
            load(state, self.folder / str(max(names)))
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            self.step = max(names)
        self.model[2].register_forward_hook(lambda *_: self.die("forward"))
        self.model[2].register_full_backward_hook(lambda *_: self.die("backward"))
        self.optimizer.register_step_pre_hook(lambda *_: self.die("step"))

    def die(self, place):
        if self.death == (dist.get_rank(), self.step, place):
            os.kill(os.getpid(), signal.SIGKILL)

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def run(self):
        while self.step < NUM_STEPS:
            self.die("before")
            train_step(self.model, self.optimizer, self.step)
            state = self.state()
            self.die("save")
            save(state, self.folder / str(self.step + 1))
            self.die("after")
            self.step += 1
        assert_equal(self.model, trained(NUM_STEPS))


def draw_death(draw: random.Random, attempt: int, size: int):
    return draw.randrange(size), draw.randrange(attempt, attempt + 2), draw.choice(Trainer.places)


if __name__ == "__main__":
    rank, size, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        forget_torch_keys(store)
        store.set(f"fsdp_compose_test/{attempt}", "")
    store.wait([f"fsdp_compose_test/{attempt}"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    is_last = attempt == int(os.environ["TORCHELASTIC_MAX_RESTARTS"])
    Trainer(sys.argv[1], None if is_last else draw_death(random.Random(attempt), attempt, size)).run()
    print(f"rank {rank} finished in attempt {attempt}", flush=True)

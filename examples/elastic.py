"""Trains in replica groups that may come and go, with torchft (`pip install torchft`): each group is a job of its own.

A lighthouse tells the groups who is there:

    torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1 --join_timeout_ms 5000

Each of these commands, in a terminal or on a node of its own, is a group of two processes that share the shards:

    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone \
        --nproc_per_node 2 --max-restarts 9 examples/elastic.py --group 0
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone \
        --nproc_per_node 2 --max-restarts 9 examples/elastic.py --group 1

Kill the processes of one group: the other group goes on alone, and the one that torchrun starts again takes over its
parameters and optimizer. A batch is made from (step, group, rank), so what was trained is known from the log of who
took part in which step: --out gets that log, and the parameters. docs/elastic.md explains the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from fsdp_compose import fully_shard, set_replicas
from fsdp_compose.checkpoint import shards

DIM, CLASSES, ROWS = 16, 5, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def batch_of(step: int, group: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_000 * group + 1_000 * rank + step)
    return tuple(torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (DIM, CLASSES))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def learning_rate(step: int) -> float:
    return 1e-3 / (1 + step / 50)  # a function of the committed step: there is no schedule that a group could miss


class Torchft:
    """What `set_replicas` takes, made of torchft's manager."""

    def __init__(self, manager: Manager, pg: ProcessGroupGloo):
        self.manager, self.pg = manager, pg

    def average(self, tensor: Tensor):
        return self.manager.allreduce(tensor)

    def maximum(self, tensor: Tensor) -> bool:
        self.manager.allreduce(tensor, reduce_op=dist.ReduceOp.MAX).wait()
        if self.manager.errored() is None:
            return True
        close_connections(self.pg.parent)
        return False


def close_connections(group: dist.ProcessGroup) -> None:
    """Let groups that wait for this one hear that it has given up: of three, one may not be connected to the lost one
    where it waits, and would wait for the whole timeout."""
    for rank in range(group.size()):
        if rank != group.rank():
            with suppress(RuntimeError):  # gloo closes a connection when something is late on it
                group.recv([torch.empty(1)], rank, 1).wait(timedelta(milliseconds=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=0, help="number of this replica group")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.05, help="each step takes at least")
    parser.add_argument("--timeout", type=float, default=10, help="seconds after which another group counts as lost")
    parser.add_argument("--out", type=Path, default=Path("runs/elastic"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(0)  # all groups start equal
    model = Model().double()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = optimizer_of(model)

    held = shards(model, optimizer)
    timeout = timedelta(seconds=options.timeout)
    pg = ProcessGroupGloo(timeout=timeout)
    manager = Manager(
        pg=pg,
        min_replica_size=1,
        state_dict=held.state,  # called on a thread, while the next step runs
        load_state_dict=held.load,  # called by should_commit()
        replica_id=f"group_{options.group}",
        timeout=timeout,
        quorum_timeout=timeout * 3,
        connect_timeout=timeout,
        hostname="127.0.0.1",
        init_sync=False,  # equal already
    )
    set_replicas(model, Torchft(manager, pg))

    log = open(options.out / f"group-{options.group}-rank-{rank}.jsonl", "a", buffering=1)
    print(json.dumps({"pid": os.getpid()}), file=log)
    while manager.current_step() < options.steps:
        began, step = time.monotonic(), manager.current_step()
        manager.start_quorum()  # who takes part in this step is found out while forward runs
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(step, options.group, rank))
        loss.backward()
        takes_part, num_groups = manager.is_participating(), manager.num_participants()
        if manager.should_commit():
            step = manager.current_step() - 1  # that of the others, if this group has just taken over their parameters
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            optimizer.step()
            facts = {"step": step, "takes_part": takes_part, "groups": num_groups, "time": time.time()}
            print(json.dumps(facts), file=log)
            if rank == 0 and step % 20 == 0:
                print(f"group {options.group}, step {step}: loss {loss.item():.4f}, {num_groups} groups", flush=True)
        else:
            print(json.dumps({"refused": step, "time": time.time()}), file=log)
        time.sleep(max(0, options.seconds - (time.monotonic() - began)))

    whole = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    if rank == 0:
        torch.save(whole, options.out / f"group-{options.group}.pt")
    dist.barrier()
    manager.shutdown(wait=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: a thread of torchft's would keep this process until the quorum times out

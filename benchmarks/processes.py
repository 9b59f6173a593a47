"""Several processes that train together."""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(world_size: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call ``function(*arguments)`` on every rank of a gloo process group, and raise what a rank raises.

    The ranks are forked, so that they need not import torch again: call it before this process has used torch or has
    started a thread. That is why the store gets the socket, whose port the ranks must know, when they have been forked.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ranks = mp.start_processes(
            _run, (world_size, port, function, arguments), world_size, join=False, start_method="fork"
        )
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    while not ranks.join():
        pass
    del store


def time_in_turn(
    actions: Mapping[Any, Callable[[], Sequence[float] | None]], rounds: int
) -> dict[Any, list[list[float]]]:
    """Milliseconds of the slowest rank, by action: in each round the whole, between two barriers, and the parts whose
    seconds the action returns. In each round in another random order, the same on all ranks. Ranks: all."""
    order, shuffled = [*actions], random.Random(0)
    times: dict[Any, list[list[float]]] = {name: [] for name in actions}
    for i in range(-3, rounds):  # the first rounds: lazy initialisation, and the order that prefetching follows
        shuffled.shuffle(order)
        for name in order:
            dist.barrier()
            start = perf_counter()
            parts = actions[name]() or ()
            dist.barrier()
            if i >= 0:
                times[name].append([perf_counter() - start, *parts])
    return {name: _slowest(runs) for name, runs in times.items()}


def _slowest(runs: list[list[float]]) -> list[list[float]]:
    slowest = torch.tensor(runs, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return (slowest * 1e3).tolist()


def _run(rank: int, world_size: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a collection need not look at what importing torch has left
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()

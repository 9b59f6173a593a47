"""A rank is killed while groups may be skipped, or in a loop over buckets of weights: the survivors get a named error
within seconds, though the timeout of the process group is ten minutes."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.harness import end, run_forked, start_forked
from tests.models import GPT, shard_layers
from tests.runtime.test_optional import Failing, batch, loss_of, made, shard
from tests.sync.test_weight_sync import collected, consume, seeded


class Mortal(Failing):
    """Where others raise, it dies."""

    def at(self, where: str, h: torch.Tensor) -> torch.Tensor:
        if self.fails == where:
            os.kill(os.getpid(), signal.SIGKILL)
        return h


def survive(rank: int, size: int, port: int, place: str, demands: bool) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    model = shard(made(Mortal))
    loss_of(model, batch(0, rank), (1, 1, 0) if rank else (0, 0, 0)).backward()
    model.fails = place if rank == 1 else ""
    begin = time.monotonic()
    try:
        loss_of(model, batch(1, rank), (1, 1, 1) if demands and rank == 0 else (int(rank == 1), 0, 0)).backward()
    except RuntimeError as error:
        print(f"{time.monotonic() - begin:.1f} {error}".replace("\n", " "), flush=True)
    os._exit(0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["before the layers", "between the layers", "behind the layers"])
def test_survivors_of_a_dead_rank_get_a_named_error_in_seconds(tmp_path, place):
    """Where another rank demands and where not, at once."""
    size, stores, outputs, processes = 3, [], [], []
    try:
        for demands in (True, False):
            stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            for rank in range(size):
                outputs.append(tmp_path / f"{demands} {rank}")
                processes.append(start_forked(outputs[-1], survive, rank, size, stores[-1].port, place, demands))
        for process in processes:
            process.join(90)
    finally:
        for process in processes:
            end(process)
    for i, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        rank, said = i % size, output.read_text()
        if rank == 1:
            assert process.exitcode == -signal.SIGKILL, said
            continue
        (line,) = [line for line in said.splitlines() if line[:1].isdigit()] or [said]
        assert re.match(rf"\d+\.\d rank {rank}.*(not all ranks|did not arrive|rank 1)", line), said
        assert float(line.split()[0]) < 45


def die_in_the_loop(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=600))
    model = shard_layers(seeded(lambda: GPT(layers=1)))
    collected(model)
    try:
        consume(model, lambda i: os.kill(os.getpid(), signal.SIGKILL) if (i, rank) == (2, 1) else None, bucket_bytes=1)
        print("no error")
    except RuntimeError as error:
        print(f"error: {error}".replace("\n", " "))
    sys.stdout.flush()
    os._exit(0)


def test_a_rank_that_dies_in_its_loop_is_named_long_before_the_timeout(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_forked(3, tmp_path, die_in_the_loop, store.port, timeout=90)
    assert ranks[1][0] == -signal.SIGKILL
    for rank in (0, 2):
        code, said = ranks[rank]
        assert code == 0 and "error: full_parameters(): its loop over buckets: rank(s) 1 have ended" in said, said

"""A rank dies or stops in any round of a control exchange: the others name it, in bounded time."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from fsdp_compose.core.comm import control_exchange
from fsdp_compose.core.comm.control_exchange import Carrier, ControlExchange, rounds_of
from fsdp_compose.core.comm.store import meet
from tests.comm.test_control_exchange import exchanged
from tests.harness import end, start_forked


def take_part(rank: int, size: int, port: int, victim: int, number: int, action: str) -> None:
    """All but ``victim``, which dies or stops at the beginning of one of its rounds, print what they raise."""
    limit = 2 if action == "stop" else 600
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit))
    meet(dist.group.WORLD, "begin", "", lambda _: "")
    exchange = ControlExchange(4, 1, Carrier.of(dist.group.WORLD))
    for turn in range(3):
        assert exchanged(exchange, order=turn)
    if rank == victim:
        begin_round = control_exchange.Flight._begin_round

        def begin_or_end(flight: control_exchange.Flight) -> None:
            if flight._index == number:
                os.kill(os.getpid(), signal.SIGKILL if action == "die" else signal.SIGSTOP)
            begin_round(flight)

        control_exchange.Flight._begin_round = begin_or_end  # type: ignore[method-assign]
    begin = time.monotonic()
    try:
        exchanged(exchange)
        print("TOLD no error")
    except RuntimeError as error:
        print(f"TOLD {time.monotonic() - begin:.1f} {error}".replace("\n", " "))
    begin = time.monotonic()
    try:
        exchanged(exchange)
    except RuntimeError as error:
        print(f"THEN {time.monotonic() - begin:.1f} {error}".replace("\n", " "))
    sys.stdout.flush()
    time.sleep(1)  # the connections stay open, where they are: it is not the end of a process that the others notice
    os._exit(0)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("action", ["die", "stop"])
@pytest.mark.parametrize("size, victim", [(2, 1), (3, 2), (5, 0), (8, 5)])
def test_a_rank_that_dies_or_stops_in_any_round_is_named_in_bounded_time(tmp_path, size, victim, action):
    """In each round, at once, in process groups of their own: mostly they wait."""
    processes, outputs, stores = [], [], []
    try:
        for number in range(len(rounds_of(victim, size))):
            stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            outputs.append([tmp_path / f"{number}.{rank}" for rank in range(size)])
            processes.append([])
            for rank in range(size):
                arguments = rank, size, stores[-1].port, victim, number, action
                processes[-1].append(start_forked(outputs[-1][rank], take_part, *arguments))
        survivors = [rank for rank in range(size) if rank != victim]
        for item in processes:
            for rank in survivors:
                item[rank].join(60)
    finally:
        for process in [process for item in processes for process in item]:
            end(process)
    for item in outputs:
        check_what_survivors_said([item[rank].read_text() for rank in survivors], victim)


def check_what_survivors_said(texts: list[str], victim: int) -> None:
    num_finished = 0
    for said in texts:
        told = next((line for line in said.splitlines() if line.startswith("TOLD")), said)
        then = next((line for line in said.splitlines() if line.startswith("THEN")), said)
        is_finished = told == "TOLD no error"  # it had heard of all before, and the next exchange fails
        if is_finished:
            num_finished += 1
            told = then
        assert "the control exchange at the end of backward failed: not all ranks have reached it" in told, said
        assert float(told.split()[1]) < 12 and float(then.split()[1]) < 12, said
        assert is_finished or f": rank {victim} did not answer" in told, said
    assert num_finished < len(texts)

"""No rank waits forever: a rendezvous of which one rank is gone raises in bounded time, and names it.

One rank alone in a first forward: ``test_bad_input``; in recovery: ``test_recovery``; in
``summon_full_params``: ``test_summon``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import sys
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from fsdp_compose import RankLostError, clip_grad_norm_, fully_shard
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict
from fsdp_compose.core.comm.failure import PartnerGone
from fsdp_compose.core.comm.store import TIMEOUT_ENV
from fsdp_compose.plugins.gloo.journal import noticing_loss
from tests.harness import distributed, run_forked
from tests.models import Stack, rows
from tests.training import mean_square


def train_until_one_dies(rank: int, port: int) -> None:
    os.environ[TIMEOUT_ENV] = "2"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        mean_square(model, rows()).backward()
        model.zero_grad()
    loss = mean_square(model, rows())
    if rank == 1:
        model.blocks[1].trip.arm("backward", KeyboardInterrupt())
        try:
            loss.backward()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    for attempt in (loss.backward, lambda: model(rows())):
        begin = time.monotonic()
        try:
            attempt()
            print("no error")
        except RuntimeError as error:
            print(f"after {time.monotonic() - begin:.1f} s: {error}".replace("\n", " "))
    sys.stdout.flush()
    os._exit(0)


def trained_on_two(rank: int, port: int, seconds: int) -> tuple[dist.Store, Stack]:
    """The store and a model that two ranks have trained; ``seconds``: the timeout of their process group."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=seconds))
    torch.manual_seed(0)
    model = fully_shard(Stack())
    for _ in range(2):
        mean_square(model, rows()).backward()
    return store, model


def wait_for_one_that_stays_away(rank: int, port: int) -> None:
    store, model = trained_on_two(rank, port, seconds=600)
    _set_pg_timeout(timedelta(seconds=2))
    if rank == 1:
        with contextlib.suppress(RuntimeError):
            store.wait(["raised"], timedelta(seconds=70))
        os._exit(0)
    begin = time.monotonic()
    try:
        model(rows())
        print("no error")
    except RuntimeError as error:
        print(f"after {time.monotonic() - begin:.1f} s: {error}".replace("\n", " "))
        store.set("raised", "")
    sys.stdout.flush()
    os._exit(0)


def test_a_timeout_that_is_set_later_holds_for_messages_too(tmp_path):
    """gloo's messages know the timeout of when the group was made."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_forked(2, tmp_path, wait_for_one_that_stays_away, store.port, timeout=80)
    told = next(line for line in ranks[0][1].splitlines() if line.startswith(("after ", "no error")))
    assert "rank 0: the all-gather" in told and float(told.split()[1]) < 60, told


def test_rank_that_dies_in_backward_makes_the_others_raise_and_names_itself_at_the_next_forward(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_forked(3, tmp_path, train_until_one_dies, store.port, timeout=80)
    assert ranks[1][0] == -signal.SIGKILL
    for rank in (0, 2):
        text = ranks[rank][1]
        told = [line for line in text.splitlines() if line.startswith(("after ", "no error"))]
        first, second = told or [text, ""]
        # Rank 1 has raised before it dies: it is told which comes first.
        told_of = "rank 1 has ended, or given up", "rank 1 has raised an error in backward", "ranks "
        assert f"rank {rank}: the" in first and any(text in first for text in told_of), first
        assert "recovery after an interrupted iteration: rank(s)" in second and "did not arrive" in second, second
        # The first rank tells who is absent. The other one may be, too: in the collective, waiting for the first rank's
        # part, which never comes, until that one's connection is gone as well.
        assert rank != 0 or re.search(r"rank\(s\) 1(, 2)? did", second), second


def call_alone(rank: int, port: int, name: str) -> None:
    """Rank 0 makes a call; rank 1 waits for something else."""
    os.environ[TIMEOUT_ENV] = "2"
    store, model = trained_on_two(rank, port, seconds=600)
    if rank == 1:
        with contextlib.suppress(RuntimeError):
            store.wait(["raised"], timedelta(seconds=70))
        os._exit(0)
    calls = {
        "forward": lambda: model(rows()),
        "clip": lambda: clip_grad_norm_(model.parameters(), 1.0),
        "torch's clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "inf": lambda: clip_grad_norm_(model.parameters(), 1.0, float("inf")),
        "full_tensor": lambda: next(model.parameters()).full_tensor(),
        "state dict": lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
    }
    begin = time.monotonic()
    try:
        calls[name]()
        print("no error")
    except RuntimeError as error:
        text = "".join(traceback.format_exception(error))
        print(f"after {time.monotonic() - begin:.1f} s: {text.count('Traceback')} {error}".replace("\n", " "))
        store.set("raised", "")
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["forward", "clip", "torch's clip", "inf", "full_tensor", "state dict"])
def test_the_variable_bounds_every_wait_whatever_the_other_rank_does(tmp_path, name):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_forked(2, tmp_path, call_alone, store.port, name, timeout=60)
    said = ranks[0][1]
    told = next((line for line in said.splitlines() if line.startswith(("after ", "no error"))), said)
    assert told.startswith("after "), said
    assert told.split()[3] == "1", said  # traceback
    assert re.search("failed: |did not arrive", told), said
    assert "waitForInput" not in said, said


SHORT, LONG = 2, 4  # iterations


def run_a_loop(rank: int, port: int, size: int, short: int, how: str) -> None:
    """Rank ``short`` makes fewer iterations than the others."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if "torchrun" in how:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store outlives the ranks
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    torch.manual_seed(0)
    model = fully_shard(Stack(), reshard_after_forward="gather" in how)
    begin = time.monotonic()
    try:
        for _ in range(SHORT if rank == short else LONG):
            begin = time.monotonic()
            mean_square(model, rows()).backward()
    except RuntimeError as error:
        print(f"after {time.monotonic() - begin:.1f} s: {type(error).__name__}: {error}".replace("\n", " "))
    if "killed" in how and rank == short:
        os.kill(os.getpid(), signal.SIGKILL)
    if "destroyed" in how:
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # as a program ends that is no fork
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.parametrize(
    "how, size, short",
    [
        ("torchrun", 2, 1),
        ("torchrun, destroyed", 3, 0),
        ("torchrun, gather", 4, 2),
        ("torchrun, killed", 2, 0),
        ("alone, gather", 3, 2),
    ],
)
def test_a_loop_that_is_shorter_on_one_rank_says_how_many_iterations_each_made(tmp_path, size, short, how):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_forked(size, tmp_path, run_a_loop, store.port, size, short, how, timeout=80)
    for rank, (_, text) in enumerate(ranks):
        told = [line for line in text.splitlines() if line.startswith("after ")]
        if rank == short:
            assert not told, told
            continue
        assert len(told) == 1 and "RankLostError" in told[0] and float(told[0].split()[1]) < 12, text
        if how.startswith("torchrun") and "killed" not in how:
            assert (
                f"rank {short} has ended normally after {SHORT} iterations, and rank {rank} is in iteration" in told[0]
            )
            assert told[0].count("ended normally") == 1 and f"in iteration {SHORT + 1}: the loops of all" in told[0]
        else:
            assert re.search(rf"failed: ranks? .*\b{short}\b.* ended, or given up because of an error", told[0]), told
        assert "gloo/" not in text and "died" not in told[0], text


@distributed(2, fresh=True)
def test_a_rank_that_the_watchdog_finds_gone_is_lost():
    """gloo's own error, which has its source in it, comes first most of the time."""
    expected = "rank 0: the exchange of a bucket failed"
    if dist.get_rank() == 0:
        with pytest.raises(RankLostError, match=expected), noticing_loss(dist.group.WORLD, expected[8:-7]):
            raise PartnerGone("rank 1 has closed its connections")

"""Sums through memory that the ranks of one machine share: what those of messages give, to the bit, and as safe."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import fully_shard, replicate
from fsdp_compose._torch import close_gloo_connections
from fsdp_compose.core.comm import Label, all_kept
from fsdp_compose.plugins.gloo import shared_memory
from fsdp_compose.plugins.gloo.journal import journal_of
from fsdp_compose.plugins.gloo.messages import MemoryOfRanks, Messages, _Sum
from fsdp_compose.plugins.gloo.shared_memory import Connection, SharedMemory
from tests.harness import distributed, environment, run_forked
from tests.internals import world

LABEL = Label(["some.weight"])
NUMEL = 1 << 14


def of_ranks(numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What each rank has, known to all."""
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(dist.get_world_size())]


def by_messages() -> Messages:
    moved = Messages(world())
    moved._has_met = True
    return moved


def shared_by(moved: Messages) -> SharedMemory:
    assert moved._shared is not None
    return moved._shared


@pytest.mark.parametrize("is_average", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@distributed(world_size=(2, 3, 4))
def test_sums_have_the_bits_of_sums_of_messages(dtype, is_average, world_size):
    rank, transports = dist.get_rank(), (Messages(world()), by_messages())
    for numel in (NUMEL, 3 * NUMEL + 1, NUMEL, 5 * NUMEL, NUMEL + 1):
        wholes = of_ranks(numel * world_size, dtype)
        results = []
        for moved in transports:
            whole, tensor = wholes[rank].clone(), wholes[rank][:numel].clone()
            shard = torch.zeros(numel, dtype=dtype)
            moved.reduce_scatter(shard, whole, is_average, LABEL).wait()
            moved.all_reduce(tensor, is_average, LABEL).wait()
            results.append((shard, tensor))
        assert all(map(torch.equal, *results))
    assert shared_by(transports[0]) and transports[1]._shared is None


@distributed(world_size=(2, 3), fresh=True)
def test_memory_is_used_again_and_never_while_a_rank_reads_it(world_size):
    rank, moved = dist.get_rank(), Messages(world())
    for i in range(60):
        if (i + rank) % 7 == 0:
            time.sleep(0.002)  # each rank is late now and then
        tensors = [torch.full((NUMEL,), float(10 * i + j + rank)) for j in range(3)]
        works = [moved.all_reduce(tensor, False, LABEL) for tensor in tensors]
        if rank == 0:
            time.sleep(0.001)
        order = [1, 2, 0] if rank else [2, 0, 1]
        for j in order if world_size == 2 else range(3):  # halves begin in wait()
            works[j].wait()
            expected = float(sum(10 * i + j + other for other in range(world_size)))
            assert torch.equal(tensors[j], torch.full((NUMEL,), expected))
    assert len(shared_by(moved)._own) <= 6


@distributed(world_size=2)
def test_more_notes_than_a_socket_holds_may_be_under_way():
    rank, moved = dist.get_rank(), Messages(world())
    tensors = [torch.full((1 << 12,), float(i + rank)) for i in range(600)]
    works = [moved.all_reduce(tensor, False, LABEL) for tensor in tensors]
    for i, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        assert tensor[0] == tensor[-1] == 2 * i + 1


@distributed(world_size=2, fresh=True)
def test_what_a_rank_has_sent_can_be_read_when_it_has_closed_all():
    rank, moved = dist.get_rank(), Messages(world())
    tensor, other = torch.full((NUMEL,), 1.0 + rank), torch.full((4 * NUMEL,), 1.0 + rank)
    moved.all_reduce(tensor, False, LABEL).wait()
    work = moved.all_reduce(other, False, LABEL)  # in memory that the other rank has not seen
    if rank:
        time.sleep(0.5)
    work.wait()
    if rank == 0:
        for channel in shared_by(moved)._channels.values():
            channel.__del__()
        del work
        moved._shared = None
        gc.collect()
    assert tensor[0] == other[-1] == 3
    dist.barrier()


@distributed(world_size=(2, 3), fresh=True)
def test_what_was_dropped_keeps_nothing_from_arriving(world_size):
    rank, moved = dist.get_rank(), Messages(world())
    for late in range(world_size):
        if rank == late:
            time.sleep(0.1)
        moved.all_reduce(torch.ones(NUMEL), False, LABEL)
        shard = torch.zeros(NUMEL)
        moved.reduce_scatter(shard, torch.full((NUMEL * world_size,), float(rank)), False, LABEL).wait()
        assert shard[0] == shard[-1] == sum(range(world_size))
    assert not shared_by(moved)._under_way and not journal_of(world()).under_way
    assert len(shared_by(moved)._own) <= 6


@distributed(world_size=2)
def test_an_interruption_right_after_memory_was_filled_leaves_the_notes_to_the_journal():
    rank, moved, journal, put = dist.get_rank(), Messages(world()), journal_of(world()), _Sum._put
    moved.all_reduce(torch.ones(NUMEL), False, LABEL).wait()

    def interrupted(flight, shared, sent):
        put(flight, shared, sent)
        raise KeyboardInterrupt

    for _ in range(4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Sum, "_put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                moved.all_reduce(torch.ones(NUMEL), False, LABEL)
        tensor = torch.full((NUMEL,), float(rank))
        moved.all_reduce(tensor, False, LABEL).wait()
        assert tensor[0] == 1
    gc.collect()
    journal.finish_all()
    assert not journal.under_way and not journal.dropped


@distributed(world_size=2, fresh=True)
def test_a_rank_that_wants_none_is_obeyed_by_all():
    with environment(**({"FSDP_COMPOSE_TRANSPORT": "messages"} if dist.get_rank() else {})):
        moved, tensor = Messages(world()), torch.ones(NUMEL)
        moved.all_reduce(tensor, False, LABEL).wait()
    assert moved._shared is None and tensor[0] == 2


@distributed(world_size=2, fresh=True)
def test_ranks_that_do_not_find_each_other_send_messages():
    """As on two machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_address", lambda number: f"\0{dist.get_rank()} {number:x}")
        moved, tensor = Messages(world()), torch.ones(NUMEL)
        moved.all_reduce(tensor, False, LABEL).wait()
    assert moved._shared is None and tensor[0] == 2


@distributed(world_size=2)
def test_transports_of_one_process_group_share_one_memory():
    """One that is made anew on some ranks only: the other was collected there."""
    rank, first = dist.get_rank(), Messages(world())
    first.all_reduce(torch.ones(NUMEL), False, LABEL).wait()
    second = Messages(world()) if rank else first
    tensor = torch.ones(NUMEL)
    second.all_reduce(tensor, False, LABEL).wait()
    assert tensor[0] == 2 and second._shared is first._shared


@distributed(world_size=2, fresh=True)
@pytest.mark.parametrize("closes", ["connections", "channel"])
def test_a_rank_that_gives_up_is_noticed_by_the_other(closes):
    rank, moved = dist.get_rank(), Messages(world())
    moved.all_reduce(torch.ones(NUMEL), False, LABEL).wait()
    if rank:
        if closes == "connections":
            close_gloo_connections(world())
        else:
            shared_by(moved)._channels[0].__del__()
        return
    work = moved.all_reduce(torch.ones(NUMEL), False, LABEL)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="has closed its connections|has ended"):
            work.wait()
    assert not journal_of(world()).under_way


@distributed(world_size=2, fresh=True)
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_process_group_says():
    rank, moved = dist.get_rank(), Messages(world())
    moved.all_reduce(torch.ones(NUMEL), False, LABEL).wait()
    if rank == 0:
        channel = shared_by(moved)._channels[1]
        with pytest.raises(RuntimeError, match=r"did not arrive within 0\.3 s"):
            channel.wait(1 << 60, timedelta(seconds=0.3), lambda: "")
    dist.barrier()


def build(kind: str, width: int = 200) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    if kind == "replicate":
        return replicate(model)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


@distributed(world_size=2, fresh=True)
@pytest.mark.parametrize("kind", ["replicate", "fully_shard"])
def test_ranks_that_differ_get_one_error(kind):
    models = [build(kind, width) for width in (200, 240)]
    for _ in range(2):
        for model in models:
            model(torch.ones(2, model[0].in_features)).sum().backward()
    model = models[dist.get_rank()]  # another one on each rank
    with pytest.raises(RuntimeError, match="run different programs|issued different collectives"):
        model(torch.ones(2, model[0].in_features)).sum().backward()


def _survive(rank: int, port: int, kind: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
    model = build(kind)
    x = torch.ones(2, 200)
    for i in range(3):
        loss = model(x).sum()
        if i == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss.backward()
        except RuntimeError as error:
            assert i == 2 and "failed" in str(error), error
            os._exit(0)
    os._exit(1)


@pytest.mark.parametrize("kind", ["replicate", "fully_shard"])
def test_a_rank_that_was_killed_is_told_of_in_seconds(kind, tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (code, text), _ = run_forked(2, tmp_path, _survive, store.port, kind)
    assert code == 0, text


def _destroy(rank: int, port: int) -> None:
    store, before = dist.TCPStore("127.0.0.1", port, is_master=False), 0
    for i in range(3):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(i), store), rank=rank, world_size=2)
        model = build("replicate")
        for _ in range(2):
            model(torch.ones(2, 200)).sum().backward()
        assert all_kept(MemoryOfRanks)
        group = weakref.ref(world())
        del model
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        assert group() is None and not all_kept(MemoryOfRanks)
        now = len(os.listdir("/proc/self/fd"))
        assert not before or now <= before, (before, now)
        before = now


def test_memory_goes_with_the_process_group(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for code, text in run_forked(2, tmp_path, _destroy, store.port):
        assert code == 0, text


def test_notes_of_several_collectives_come_in_any_order():
    ours, theirs = map(Connection, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    for tag in (7, 5, 6):
        assert ours.try_to_send(tag, (tag, 0, 0))
    for tag in (6, 5, 7):
        assert theirs.wait(tag, timedelta(seconds=5), lambda: "") == (tag, 0, 0)
    with pytest.raises(RuntimeError, match="why"):
        theirs.wait(8, timedelta(seconds=5), lambda: "why")
    del ours
    with pytest.raises(RuntimeError, match="has ended"):
        theirs.wait(8, timedelta(seconds=5), lambda: "")

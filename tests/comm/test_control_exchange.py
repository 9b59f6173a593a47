"""The control exchange: 2 log2 N messages a rank, exact about who has a gradient. What it is for:
``test_collectives_pair`` and ``test_none_everywhere``. Ranks that die in it: ``whole/test_dead_partners``."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compose import fully_shard
from fsdp_compose._torch import make_gloo_group
from fsdp_compose.core.comm import control_exchange
from fsdp_compose.core.comm import control_exchange as doubling
from fsdp_compose.core.comm.control_exchange import Carrier, ControlExchange, Round, maximum_of_all_ranks, rounds_of
from tests.harness import distributed, same_on_every_rank

# ---- rounds


def known_after(size: int) -> list[set[int]]:
    """What each rank knows at the end, by playing all rounds in the order of messages; fails where ranks would hang."""
    plans = [rounds_of(rank, size) for rank in range(size)]
    known, place, inbox = [{rank} for rank in range(size)], [0] * size, dict[tuple[int, int], list[set[int]]]()
    sent = [False] * size
    while any(place[rank] < len(plans[rank]) for rank in range(size)):
        moved = False
        for rank in range(size):
            if place[rank] == len(plans[rank]):
                continue
            item = plans[rank][place[rank]]
            if item.sends and not sent[rank]:
                inbox.setdefault((rank, item.partner), []).append(set(known[rank]))
                sent[rank] = moved = True
            box = inbox.get((item.partner, rank), [])
            if item.receives and not box:
                continue
            if item.receives:
                known[rank] |= box.pop(0)
            place[rank], sent[rank], moved = place[rank] + 1, False, True
        assert moved, f"{size} ranks wait for each other"
    assert not any(inbox.values()), "messages that no rank receives"
    return known


@pytest.mark.parametrize("size", [*range(1, 20), 31, 32, 33, 100, 1000])
def test_after_all_rounds_each_rank_knows_what_every_rank_has(size):
    assert known_after(size) == [set(range(size))] * size


@pytest.mark.parametrize("size", [1024, 4096, 16384, 16383])
def test_connections_and_rounds_grow_with_the_logarithm(size):
    power = size.bit_length() - 1
    for rank in (0, 1, size // 2, size - 1):
        rounds = rounds_of(rank, size)
        partners = {item.partner for item in rounds}
        assert len(partners) <= power + 1 and len(rounds) <= power + 2
        for partner in partners:
            assert rank in {item.partner for item in rounds_of(partner, size)}, "both open a connection"


# ---- what ranks agree on


def exchanged(exchange: ControlExchange, order: int = 1, steps: int | None = 3) -> bool:
    exchange.start(order, steps)
    return exchange.wait()


@distributed(world_size=(1, 2, 3, 4, 5, 6, 7, 8, 9), timeout=120)
def test_every_number_of_ranks_agrees_exactly(world_size):
    rank, group = dist.get_rank(), dist.group.WORLD
    carrier = Carrier.of(group)
    exchange = ControlExchange(40, 3, carrier)
    draw = random.Random(7)  # alike on all ranks
    num_whole = carrier.num_whole
    for _ in range(30):
        used = [[draw.random() < 0.5 for _ in range(40)]] * world_size
        late, is_odd = [[0] * 3 for _ in range(world_size)], draw.random() < 0.5
        if is_odd:  # one rank uses one parameter more, or less; or found a group late
            odd = draw.randrange(world_size)
            if draw.random() < 0.7:
                used = [[*item] for item in used]
                used[odd][draw.randrange(40)] ^= True
            else:
                late[odd][draw.randrange(3)] = draw.choice([1, 2])
        exchange.used[:], exchange.late[:] = bytes(used[rank]), bytes(late[rank])
        assert exchanged(exchange) and exchange.steps_agree
        assert [*exchange.used] == [max(item) for item in zip(*used, strict=True)]
        assert [*exchange.late] == [max(item) for item in zip(*late, strict=True)]
        is_different = any(item != used[0] for item in used) or any(map(any, late))
        assert carrier.num_whole - num_whole == is_different, "all bytes only where ranks differ"
        num_whole = carrier.num_whole


@distributed(world_size=(2, 3, 5, 8), timeout=90)
def test_one_rank_with_another_order_or_other_steps_is_known_on_all(world_size):
    rank = dist.get_rank()
    exchange = ControlExchange(5, 2, Carrier.of(dist.group.WORLD))
    for odd in range(world_size):
        exchange.used[:], exchange.late[:] = bytes([rank == odd] * 5), bytes([rank == odd] * 2)
        assert not exchanged(exchange, order=(1 << 63) + (rank == odd))
        assert exchanged(exchange, steps=250 + (rank == odd)) and not exchange.steps_agree
        assert exchanged(exchange, steps=None if rank == odd else 250) and exchange.steps_agree
        longer = ControlExchange(5 + (rank == odd), 2, Carrier.of(dist.group.WORLD))  # of another model
        assert not exchanged(longer)


@distributed(world_size=(2, 3, 5), fresh=True)
def test_rounds_beside_exchanges(world_size):
    """Marks of all ranks together, and whether all are at one point; a round is not taken for an exchange. On a process
    group without shared memory: with it, the two do not meet, and the journal ends the wait after three seconds."""
    rank, carrier = dist.get_rank(), Carrier.of(dist.group.WORLD)
    exchange = ControlExchange(5, 2, carrier)
    assert exchanged(exchange)
    carrier.make_room(world_size)
    exchange.used[:], exchange.late[:] = bytes(5), bytes(2)

    def made(digest: int | None) -> bool:
        marks = memoryview(bytearray(rank == other for other in range(world_size)))
        is_same = carrier.make_round(digest, marks)
        assert [*marks] == [1] * world_size
        return is_same

    for _ in range(2):
        num_whole = carrier.num_whole
        assert made(-5) and made(None) and made(7 if rank else None)
        assert not made(7 + (rank == 1))
        assert exchanged(exchange), "as long as the rounds"
        exchange.used[0] = rank > 0  # so that those in an exchange would exchange all bytes
        met = not exchanged(exchange) if rank else not carrier.make_round(None, memoryview(bytearray(world_size)))
        assert met and carrier.num_whole == num_whole
        met = not exchanged(exchange) if rank else not carrier.make_round(3, memoryview(bytearray(world_size)))
        assert met and carrier.num_whole == num_whole
        assert carrier.begin_step(9) == (True, True) and carrier.begin_step(9 + (rank == 1)) == (True, False)
        met = not exchanged(exchange) if rank else carrier.begin_step(9) == (False, False)
        assert met and carrier.num_whole == num_whole, "no start of a step is taken for an exchange"
        for digest in (None, 9):
            marks = memoryview(bytearray(world_size))
            assert not carrier.make_round(digest, marks) if rank else carrier.begin_step(9) == (False, False)
        exchange.used[0] = 0


@distributed(world_size=(3, 4))
def test_an_exchange_that_an_exception_left_does_not_disturb_the_next(world_size):
    rank = dist.get_rank()
    exchange = ControlExchange(4, 1, Carrier.of(dist.group.WORLD))
    for turn in range(4):
        exchange.used[:] = bytes([rank == turn % world_size, 0, 1, 0])
        exchange.start(turn, None)
        if rank == turn % world_size:
            exchange.abandon()
        else:
            assert exchange.wait() and [*exchange.used] == [1, 0, 1, 0]
        exchange.used[:] = bytes(4)
        assert exchanged(exchange) and not any(exchange.used)


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of ours in the user's mode")


@distributed(world_size=(2, 3), fresh=True)
def test_an_exchange_has_nothing_to_do_with_the_modes_of_the_user(world_size):
    """Also the one that makes what later ones use; with all bytes, and by shared memory."""

    def exchange_once(number: int) -> None:
        exchange.used[:] = bytes([number % 2 == dist.get_rank(), 0, 1, 0])
        assert exchanged(exchange) and [*exchange.used] == [1, 0, 1, 0]

    with torch.inference_mode():
        exchange = ControlExchange(4, 0, Carrier.of(dist.group.WORLD))
        exchange_once(0)
    for shares_memory in (False, True):
        if shares_memory:
            model = fully_shard(nn.Linear(256, 256))
            for _ in range(2):  # the first long sum finds out
                model(torch.ones(2, 256)).sum().backward()
        for mode in (contextlib.nullcontext(), torch.inference_mode(), _Refusing()):
            with mode:
                exchange_once(1)
        x = torch.ones(3)
        torch.func.grad(lambda x: (exchange_once(0), x.sum())[1])(x)
        torch.func.vmap(lambda x: (exchange_once(1), x)[1])(x)


@distributed(world_size=(2, 3, 6))
def test_the_maximum_of_tensors_for_groups_that_do_not_take_those_of_the_cpu(world_size):
    tensor = torch.full((1000,), dist.get_rank(), dtype=torch.uint8)
    tensor[dist.get_rank()] = 77
    maximum_of_all_ranks(dist.group.WORLD, tensor)
    assert tensor.tolist() == [77] * world_size + [world_size - 1] * (1000 - world_size)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches, self.choice = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[self.choice](x)


@distributed(world_size=(2, 3))
def test_a_gradient_is_on_all_ranks_or_on_none_when_ranks_use_different_parameters():
    torch.manual_seed(0)
    model = fully_shard(Branches())
    for choices in ((0, 0, 0), (0, 1, 0), (2, 2, 2), (1, 1, 2)):
        model.choice = choices[dist.get_rank()]
        model(torch.ones(2, 4)).sum().backward()
        there = [branch.weight.grad is not None for branch in model.branches]
        assert same_on_every_rank(there) == [i in choices[: dist.get_world_size()] for i in range(3)]
        model.zero_grad()


# ---- what it costs


def num_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@distributed(world_size=9, fresh=True, timeout=90)
def test_a_rank_opens_connections_to_its_partners_only():
    dist.barrier()
    before = num_descriptors()
    group = dist.group.WORLD
    control = make_gloo_group(group, dist.PrefixStore("descriptors", dist.distributed_c10d._get_default_store()))
    listening = num_descriptors() - before
    dist.barrier()  # partners that are ahead would connect before this rank has counted
    doubling.Doubling(control, group)
    dist.barrier()
    partners = {item.partner for item in rounds_of(dist.get_rank(), 9)}
    assert listening <= 6
    assert num_descriptors() - before - listening <= 2 * len(partners) <= 8


def test_rounds_are_read_as_documented():
    assert rounds_of(0, 6) == [
        Round(4, sends=False, receives=True),
        Round(1, sends=True, receives=True),
        Round(2, sends=True, receives=True),
        Round(4, sends=True, receives=False),
    ]
    assert rounds_of(5, 6) == [Round(1, sends=True, receives=True)]
    assert control_exchange._HEAD.size == 40

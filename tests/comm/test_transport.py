"""The ways in which tensors move between ranks: the same results by all, on every rank."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import fully_shard
from fsdp_compose._torch import close_gloo_connections
from fsdp_compose.core.comm import Label, Names, Transport, transport_of
from fsdp_compose.core.comm.transport import CollectiveKind as Kind
from fsdp_compose.plugins.gloo.journal import Journal, first_difference_of, journal_of
from fsdp_compose.plugins.gloo.messages import Messages, _InFlight
from tests.harness import distributed
from tests.internals import world

LABEL = Label(["some.weight"])
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int16]
TRANSPORTS = [Messages, Transport]


def of_ranks(numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What each rank has, known to all: integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-9, 9, (numel,), generator=generator).to(dtype) for _ in range(dist.get_world_size())]


@distributed(world_size=(1, 2, 4))
def test_gloo_on_the_cpu_has_messages_unless_they_are_switched_off(world_size):
    chosen = transport_of(world(), torch.device("cpu"))
    assert type(chosen) is (Messages if world_size > 1 else Transport)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FSDP_COMPOSE_TRANSPORT", "collectives")
        assert type(transport_of(world(), torch.device("cpu"))) is Transport


@distributed(world_size=2)
def test_ranks_of_which_one_has_them_switched_off_are_told_at_the_first_forward():
    with pytest.MonkeyPatch.context() as environment:
        if dist.get_rank():
            environment.setenv("FSDP_COMPOSE_TRANSPORT", "collectives")
        model = fully_shard(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match=r'"shards": "messages".* rank 1, which has .*"shards": "collectives"'):
        model(torch.ones(1, 3))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=(1, 2, 3, 4))
def test_shards_arrive_in_the_order_of_ranks(dtype, transport, world_size):
    rank = dist.get_rank()
    if world_size == 1 and transport is Messages:
        return
    shards, moved = of_ranks(5, dtype), transport(world())
    expected = torch.cat(shards)
    for is_part in (False, True, False):
        whole = torch.zeros_like(expected)
        own = whole[5 * rank : 5 * rank + 5].copy_(shards[rank]) if is_part else shards[rank].clone()
        moved.all_gather(whole, own, LABEL).wait()
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [0, 3, 1, 4], [0, 0, 7, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=(2, 3, 4))
def test_parts_arrive_where_they_belong(dtype, lengths, transport, world_size):
    rank, moved = dist.get_rank(), transport(world())
    parts = [part[:length] for part, length in zip(of_ranks(7, dtype), lengths, strict=False)]
    stops = torch.tensor([part.numel() for part in parts]).cumsum(0).tolist()
    ranges = [*zip([0, *stops], stops, strict=False)]
    expected = torch.cat(parts)
    whole = torch.zeros_like(expected)
    moved.gather(whole, parts[rank].clone(), ranges, True, LABEL)
    assert torch.equal(whole, expected)
    if len({*lengths[:world_size]}) == 1:
        first = torch.zeros_like(expected) if rank == 0 else None
        moved.gather(first, parts[rank].clone(), ranges, False, LABEL)
        assert first is None or torch.equal(first, expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("is_average", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@distributed(world_size=(2, 3, 4))
def test_sums_and_averages(dtype, is_average, transport, world_size):
    rank, moved = dist.get_rank(), transport(world())
    wholes = of_ranks(5 * world_size, dtype)
    total = torch.stack(wholes).sum(0)
    expected = total / world_size if is_average else total
    for is_part in (False, True):
        whole = wholes[rank].clone()
        own = whole[5 * rank : 5 * rank + 5]
        shard = own if is_part else torch.zeros_like(own)
        moved.reduce_scatter(shard, whole, is_average, LABEL).wait()
        torch.testing.assert_close(shard, expected[5 * rank : 5 * rank + 5])
    for numel in (5 * world_size, 5, 1):  # also where some ranks have nothing to add up
        tensor = wholes[rank][:numel].clone()
        moved.all_reduce(tensor, is_average, LABEL).wait()
        torch.testing.assert_close(tensor, expected[:numel])


@distributed(world_size=(2, 3, 4))
def test_sums_of_messages_are_made_in_the_order_of_ranks(world_size):
    """Whatever rank has them: shards of other bounds have the same bits."""
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(12 * world_size, generator=generator) for _ in range(world_size)]
    expected = wholes[0].clone()
    for whole in wholes[1:]:
        expected += whole
    shard, rank = torch.zeros(12), dist.get_rank()
    Messages(world()).reduce_scatter(shard, wholes[rank].clone(), False, LABEL).wait()
    assert torch.equal(shard, expected.chunk(world_size)[rank])


def test_all_parameters_of_a_group_are_called_by_its_name():
    label = Label(["0.weight", "0.bias", "1.weight"])
    assert (label.text, label.group) == ("0.weight and 2 more", "the fully_shard group with 0.weight and 2 more")
    names = Names(("norm", "head"))
    label.rename(names)  # some of them
    assert (label.text, label.group) == ("norm.weight and 2 more", "the fully_shard group with norm.weight and 2 more")
    label.rename(names, "norm")
    assert (label.text, label.group) == ("norm", "the fully_shard group norm")
    assert (label.of([1]).text, label.of([1, 2]).text) == ("norm.bias", "norm.bias and 1 more")
    assert label.names("1.weight") == "head.weight"
    alone = Label(["weight"], Names(("head",)), "head")
    assert (alone.text, alone.group) == ("head.weight", "the fully_shard group head")


@distributed(world_size=(2, 3))
def test_many_in_flight_are_waited_for_in_any_order(world_size):
    rank, moved = dist.get_rank(), Messages(world())
    wholes = [torch.zeros(4 * world_size) for _ in range(6)]
    works = [moved.all_gather(whole, torch.full((4,), float(10 * i + rank)), LABEL) for i, whole in enumerate(wholes)]
    order = [3, 0, 5, 1, 4, 2] if rank else [5, 4, 3, 2, 1, 0]
    for i in order:
        works[i].wait()
        expected = torch.arange(world_size).repeat_interleave(4) + 10.0 * i
        assert torch.equal(wholes[i], expected)


@distributed(world_size=(2, 3))
def test_messages_that_were_dropped_do_not_keep_later_ones_from_arriving(world_size):
    """gloo would carry nothing more between the two ranks."""
    rank, moved = dist.get_rank(), Messages(world())
    for late in range(world_size):
        whole, shard = torch.zeros(1 << 20), torch.zeros((1 << 20) // world_size)
        if rank == late:
            time.sleep(0.2)
        moved.all_gather(whole[: shard.numel() * world_size], shard, LABEL)
        del whole, shard
        dist.barrier()
        result = torch.zeros(4 * world_size)
        moved.all_gather(result, torch.full((4,), float(rank)), LABEL).wait()
        assert result.tolist() == torch.arange(world_size).repeat_interleave(4).tolist()


@distributed(world_size=(2, 3))
def test_an_interruption_right_after_messages_were_issued_leaves_them_to_the_journal(world_size):
    """As Ctrl-C does: their memory may be freed when the journal has waited for them."""
    rank, group = dist.get_rank(), world()
    moved, journal, issue = Messages(group), journal_of(group), _InFlight.issue

    def interrupted(flight, received, sent):
        issue(flight, received, sent)
        raise KeyboardInterrupt

    whole, held = torch.zeros(1 << 18), []
    for call in range(4):
        shard = torch.full(((1 << 18) // world_size,), float(rank))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_InFlight, "issue", interrupted)
            try:
                if call % 2:
                    moved.reduce_scatter(shard, whole[: shard.numel() * world_size], True, LABEL)
                else:
                    moved.all_gather(whole[: shard.numel() * world_size], shard, LABEL)
            except KeyboardInterrupt as error:
                held = [error] if call < 2 else []  # a notebook keeps it, with its frames
        assert len(journal.under_way) == 1
        journal.finish_all()
        assert not journal.under_way and not journal.dropped
        whole.untyped_storage().resize_(0)
        whole.untyped_storage().resize_(4 << 18)
        result = torch.zeros(4 * world_size)
        moved.all_gather(result, torch.full((4,), float(rank)), LABEL).wait()
        assert result.tolist() == torch.arange(world_size).repeat_interleave(4).tolist()
    del held


@distributed(world_size=3, fresh=True)
def test_what_has_failed_fails_at_every_wait():
    rank, moved = dist.get_rank(), Messages(world())
    if rank == 2:
        close_gloo_connections(world())
        return
    whole = torch.zeros(12)
    work = moved.all_gather(whole, torch.ones(4), LABEL)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            work.wait()
        close_gloo_connections(world())  # as a rank that gives up does: the other one may wait for what was not sent
    assert not journal_of(world()).under_way


def test_what_a_rank_has_told_is_not_changed_by_a_label_that_gets_another_name():
    label = Label(["weight", "bias"])
    ours, theirs = Journal(60), Journal(60)
    for journal in (ours, theirs):
        journal.enter(Kind.ALL_GATHER, label, 8)
    told = ours.entries()
    label.rename(Names(("layers.0",)))
    for journal in (ours, theirs):
        journal.enter(Kind.ALL_GATHER, label, 8)
    assert first_difference_of(0, told, 1, theirs.entries()) == ""
    assert first_difference_of(0, ours.entries(), 1, theirs.entries()) == ""
    ours.enter(Kind.ALL_GATHER, label, 8)
    theirs.enter(Kind.REDUCE_SCATTER, label, 8)
    assert "number 3" in first_difference_of(1, theirs.entries(), 0, ours.entries())
    assert "rank 0 has entered the all-gather of layers.0.weight and 1 more" in first_difference_of(
        1, theirs.entries(), 0, ours.entries()
    )


def test_tags_of_messages_have_the_number_of_the_collective_beside_what_it_is():
    journal = Journal(60)
    tags = [
        journal.enter(kind, None, nbytes)
        for nbytes in range(0, 1 << 22, 9973)
        for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE)
    ]
    assert len(tags) > 800 and max(tags) < 1 << 31
    assert [tag >> 20 for tag in tags] == [1024 + number for number in range(1, len(tags) + 1)]
    assert len({tag & (1 << 20) - 1 for tag in tags}) > 0.99 * len(tags)


@distributed(world_size=4)
def test_a_part_of_the_ranks_gathers_next_to_messages_of_the_users():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group, peer = groups[rank % 2], (rank + 2) % 4
    mine, theirs = torch.full((3,), float(rank)), torch.zeros(3)
    works = [dist.irecv(theirs, peer, group), dist.isend(mine, peer, group)]  # under way
    flat = torch.zeros(4)
    Messages(group).all_gather(flat, torch.full((2,), float(rank) + 10), LABEL).wait()
    for work in works:
        work.wait()
    first = rank % 2 + 10
    assert flat.tolist() == [first, first, first + 2, first + 2] and theirs.tolist() == [peer] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("lengths", [[5, 5, 5], [4, 1, 3], [0, 0, 7]], ids=str)
@pytest.mark.parametrize("mark", ["conjugate", "negative"])
@distributed(world_size=(2, 3))
def test_parts_that_are_only_marked_as_conjugate_or_negative_arrive_computed(mark, lengths, transport, world_size):
    rank, moved = dist.get_rank(), transport(world())
    plain = [torch.complex(part, part + 1)[:length] for part, length in zip(of_ranks(7), lengths, strict=False)]
    marked = [part.conj() if mark == "conjugate" else torch._neg_view(part.real.clone()) for part in plain]
    assert all(part.is_conj() or part.is_neg() for part in marked)
    stops = torch.tensor([part.numel() for part in plain]).cumsum(0).tolist()
    ranges = [*zip([0, *stops], stops, strict=False)]
    expected = torch.cat([part.resolve_conj().resolve_neg() for part in marked])
    for is_everywhere in (True, False):
        whole = torch.zeros_like(expected) if is_everywhere or rank == 0 else None
        moved.gather(whole, marked[rank], ranges, is_everywhere, LABEL)
        assert whole is None or torch.equal(whole, expected)

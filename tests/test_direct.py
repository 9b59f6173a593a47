"""Messages in the place of gloo's collectives: the same tensors, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp_compose.comm import point_to_point as direct
from fsdp_compose.comm.point_to_point import all_gather, gather
from tests.harness import distributed


@pytest.mark.parametrize("by_messages", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int16])
@distributed(world_size=(1, 2, 4))
def test_shards_arrive_in_the_order_of_ranks(dtype, by_messages):
    assert direct.is_better(dist.group.WORLD, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as chosen:
        chosen.setattr(direct, "is_better", lambda *_: by_messages)
        check_gathering(dtype)


def check_gathering(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = torch.randn(5 * size, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    shard = expected.chunk(size)[rank].clone()
    for _ in range(3):
        flat = torch.zeros_like(expected)
        all_gather(flat, shard, dist.group.WORLD)
        assert torch.equal(flat, expected)
        flat = torch.zeros_like(expected) if rank == 0 else None
        gather(flat, shard, dist.group.WORLD)
        assert flat is None or torch.equal(flat, expected)


@distributed(world_size=4)
def test_a_part_of_the_ranks_gathers_next_to_messages_of_the_users():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group, peer = groups[rank % 2], (rank + 2) % 4
    mine, theirs = torch.full((3,), float(rank)), torch.zeros(3)
    works = [dist.irecv(theirs, peer, group), dist.isend(mine, peer, group)]  # under way
    flat = torch.zeros(4)
    all_gather(flat, torch.full((2,), float(rank) + 10), group)
    for work in works:
        work.wait()
    first = rank % 2 + 10
    assert flat.tolist() == [first, first, first + 2, first + 2] and theirs.tolist() == [peer] * 3

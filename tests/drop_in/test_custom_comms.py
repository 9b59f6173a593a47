"""FSDP2's custom collectives, the same objects under FSDP2 and under ``drop_in``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp

from fsdp_compose import MixedPrecisionPolicy, RanksDifferError, drop_in
from tests.harness import distributed
from tests.models import Stack, rows
from tests.training import adamw, mean_square


class Comm:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class RoundedAllGather(Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls.append((output_tensor.dtype, async_op))
        parts = [torch.empty_like(input_tensor, dtype=torch.bfloat16) for _ in range(group.size())]
        dist.all_gather(parts, input_tensor.bfloat16(), group=group)
        output_tensor.copy_(torch.cat(parts))


class WideSums(Comm):
    """bf16 on the wire, sums in fp32."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls.append((input_tensor.dtype, op, async_op))
        received = torch.empty_like(input_tensor, dtype=torch.bfloat16)
        dist.all_to_all_single(received, input_tensor.bfloat16(), group=group)
        total = received.float().view(group.size(), -1).sum(0)
        output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)


def losses_of(shard: Any, policy: Any, gathers: bool, steps: int = 4) -> tuple[list[float], list[Any], list[Any]]:
    torch.manual_seed(0)
    model, gather, reduce = Stack(), RoundedAllGather(), WideSums()
    for block in model.blocks:
        shard(block, mp_policy=policy)
    shard(model, mp_policy=policy)
    for module in (*model.blocks, model):
        module.set_custom_reduce_scatter(reduce)
        if gathers:
            module.set_custom_all_gather(gather)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(steps):
        loss = mean_square(model, rows(10 * step + dist.get_rank()))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, gather.calls, reduce.calls


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("gathers", [False, True])
@distributed(world_size=(2, 3))
def test_it_trains_as_fsdp2_does(gathers, dtype, world_size):
    theirs = losses_of(fsdp.fully_shard, fsdp.MixedPrecisionPolicy(dtype, dtype), gathers)
    ours = losses_of(drop_in.fully_shard, MixedPrecisionPolicy(dtype, dtype), gathers)
    assert ours[0] == theirs[0]
    assert [{*calls} for calls in ours[1:]] == [{*calls} for calls in theirs[1:]]
    assert len(ours[2]) == len(theirs[2]) and bool(ours[1]) == gathers


@distributed(world_size=2)
def test_ranks_with_other_comms_are_told():
    torch.manual_seed(0)
    model: Any = drop_in.fully_shard(Stack())
    if dist.get_rank():
        model.set_custom_reduce_scatter(WideSums())
    with pytest.raises(RanksDifferError, match="WideSums"):
        model(rows(0))

"""torchao's training in float8, on CPU by emulation: the weights' own all-gather, in one byte an element, and losses
that are those of FSDP2, step by step."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fsdp_compose import MixedPrecisionPolicy, clip_grad_norm_, flat_parameters, fully_shard, record_collectives
from tests.harness import distributed, lasting_mesh
from tests.programs.modules import mixed
from tests.training import local_part

DIM, HIDDEN = 32, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def float8_model(gathers_float8: bool = True) -> Model:
    torch.manual_seed(0)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_float8, emulate=True)
    return convert_to_float8_training(Model(), config=config, module_filter_fn=lambda _, fqn: fqn != "head")


def shard(model: Model, how: Any, **options: Any) -> Model:
    for block in model.blocks:
        how(block, **options)
    return how(model, **options)


def losses(model: Model, params: Any, steps: int = 5, clips: Any = None, after_step: Any = None) -> list[float]:
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        batch = torch.randn(16, DIM, generator=generator)
        loss = model(local_part(batch)).float().square().mean()
        loss.backward()
        if clips is not None:
            clips(params, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
        found.append(loss.item())
    return found


POLICIES = {"fp32": (), "bf16": (torch.bfloat16, torch.float32)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshards", [True, False])
@distributed(world_size=2)
def test_losses_are_those_of_fsdp2(policy, reshards):
    dtypes = POLICIES[policy]
    ours = shard(float8_model(), fully_shard, mp_policy=MixedPrecisionPolicy(*dtypes), reshard_after_forward=reshards)
    theirs = shard(float8_model(), torch_fully_shard, mp_policy=TorchPolicy(*dtypes), reshard_after_forward=reshards)
    seen: list[Any] = []
    ours.blocks[0].register_forward_pre_hook(lambda module, _: seen.append(type(module.up.weight)))
    got, expected = losses(ours, [*ours.parameters()]), losses(theirs, [*theirs.parameters()])
    assert {*seen} == {Float8TrainingTensor}
    assert got[-1] < got[0]
    assert got == expected, (got, expected)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), other.full_tensor())
        assert mine.grad is None and mine.dtype == torch.float32


class AllReduces(TorchDispatchMode):
    """Counts the all-reduces of which torch's dispatcher hears: those of the scales among them."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += "allreduce" in str(func) or "all_reduce" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=2)
def test_scales_that_are_computed_ahead_are_used(policy):
    found, counts = {}, {}
    for how, make_policy in ((fully_shard, MixedPrecisionPolicy), (torch_fully_shard, TorchPolicy)):
        for is_ahead in (True, False):
            model = shard(float8_model(), how, mp_policy=make_policy(*POLICIES[policy]), reshard_after_forward=False)
            params, after = [*model.parameters()], precompute_float8_dynamic_scale_for_fsdp if is_ahead else None
            losses(model, params, steps=1, after_step=after)
            with AllReduces() as counted:
                found[how, is_ahead] = losses(model, params, after_step=after)
            counts[how, is_ahead] = counted.num
    assert found[fully_shard, True] == found[torch_fully_shard, True]
    assert found[fully_shard, False] == found[torch_fully_shard, False]
    weights, steps = 2 * 3, 5
    for how in (fully_shard, torch_fully_shard):
        assert counts[how, False] - counts[how, True] == weights * steps, counts


@distributed(world_size=2)
def test_flat_views_train_alike():
    ours = shard(float8_model(), fully_shard)
    theirs = shard(float8_model(), torch_fully_shard)
    got, expected = losses(ours, flat_parameters(ours)), losses(theirs, [*theirs.parameters()])
    torch.testing.assert_close(got, expected)


@distributed(world_size=2)
def test_clipping_trains_alike():
    ours = shard(float8_model(), fully_shard)
    theirs = shard(float8_model(), torch_fully_shard)
    got = losses(ours, [*ours.parameters()], clips=clip_grad_norm_)
    expected = losses(theirs, [*theirs.parameters()], clips=nn.utils.clip_grad_norm_)
    torch.testing.assert_close(got, expected)


@distributed(world_size=2)
def test_a_weight_travels_in_one_byte_an_element_where_its_elements_have_four():
    def bytes_gathered(gathers_float8: bool) -> int:
        model = shard(float8_model(gathers_float8), fully_shard)
        model(torch.randn(2, DIM))
        with record_collectives(model) as lines:
            model(torch.randn(2, DIM))
        found = 0
        for line in lines:
            if line.startswith("all-gather blocks."):
                numel, dtype = re.search(r"\((\d+) x (\w+)", line).groups()
                found += int(numel) * getattr(torch, dtype).itemsize
        return found

    weights = 3 * 2 * DIM * HIDDEN
    others = 3 * (2 * DIM + DIM)
    low, high = bytes_gathered(True), bytes_gathered(False)
    assert weights + 4 * others <= low <= 1.02 * (weights + 4 * others), low
    assert 4 * (weights + others) <= high <= 1.02 * 4 * (weights + others), high


@distributed(world_size=4)
def test_more_ranks_than_divide_the_rows():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    torch.manual_seed(0)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    plain = Odd()
    reference = convert_to_float8_training(copy.deepcopy(plain), config=Float8LinearConfig(emulate=True))
    model = fully_shard(convert_to_float8_training(plain, config=config))
    batch = torch.randn(8, DIM)
    model(local_part(batch)).square().mean().backward()
    for share in batch.chunk(dist.get_world_size()):
        (reference(share).square().mean() / dist.get_world_size()).backward()
    torch.testing.assert_close(model.linear.weight.grad.full_tensor(), reference.linear.weight.grad)


@distributed(world_size=2)
def test_checkpoints_and_copies():
    model = shard(float8_model(), fully_shard)
    before = losses(model, [*model.parameters()], steps=2)
    clone = copy.deepcopy(model)
    a, b = losses(model, [*model.parameters()], steps=2), losses(clone, [*clone.parameters()], steps=2)
    assert a == b and before[0] > a[0]
    assert all(
        torch.equal(x.full_tensor(), y.full_tensor())
        for x, y in itertools.zip_longest(model.parameters(), clone.parameters())
    )


class MixtureBlock(Block):
    """Routed experts in fp32 beside projections in float8."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 4), nn.Parameter(torch.randn(4, DIM, DIM) / 8)
        self.ep: DeviceMesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + mixed(x, self.router(x).softmax(-1), self.experts, self.ep)

    def spread(self, ep: DeviceMesh) -> None:
        self.ep = ep
        self.experts = nn.Parameter(distribute_tensor(self.experts.detach(), ep, [Shard(0)]))


@distributed(world_size=4)
def test_float8_blocks_have_the_same_gradients_whether_or_not_their_experts_are_spread():
    x = torch.randn(16, DIM, generator=torch.Generator().manual_seed(1))
    found = []
    for ep in (1, 2, 4):
        torch.manual_seed(0)
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        model = nn.Sequential(MixtureBlock(), MixtureBlock())
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: not fqn.endswith("router"))
        for block in model:
            if ep > 1:
                block.spread(lasting_mesh(("edp", "ep"), (4 // ep, ep))["ep"])
            fully_shard(block, mesh=lasting_mesh(("dp",), (4,)))
        fully_shard(model, mesh=lasting_mesh(("dp",), (4,)))
        model(local_part(x)).square().mean().backward()
        found.append([param.grad.full_tensor() for param in model.parameters()])
        norm = clip_grad_norm_(model.parameters(), 0.1)
        found[-1].append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    for spread in found[1:]:
        for ours, expected in zip(spread, found[0], strict=True):
            assert (ours - expected).norm() <= 1e-5 * expected.norm()

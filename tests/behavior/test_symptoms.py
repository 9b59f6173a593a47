"""Training that goes wrong silently under other sharded data parallel systems, symptom by symptom.

Each is shown right, or refused by a named error, on at least two ranks. What other files show already is not repeated:

==================================================================  ===================================================
symptom                                                             shown by
==================================================================  ===================================================
forward returns an object of the user's or keeps its output on      test_every_group_reduced: test_block_that_...,
self: gradients are never reduced                                   test_root_that_returns_no_plain_tensor_is_reduced
an exception was caught, and the optimizer never updates again      test_recovery: test_training_goes_on_after_an_
                                                                    interruption, ...; here: out of memory
reentrant checkpointing and two forwards before one backward        here
an optimizer built after an evaluation trains nothing               test_sharded_params: test_an_optimizer_built_after_
                                                                    a_warm_up_...; here: identity of parameters
an optimizer built before sharding trains nothing                   test_sharded_params: test_an_optimizer_built_bef...
ranks use different parameters: gradients of different parameters   test_collectives_pair, test_none_everywhere; here:
are mixed                                                           three ways to shard the same experts
an edit of parameters after a forward is lost                       test_edits; here: state_dict
modules added later, ignored parameters, plain ones next to         test_summon: test_check_lists_...; test_registry:
sharded ones: gradients are never reduced                           test_sharded_child_of_a_replicated_parent_trains
a mesh with a degenerate dimension switches gradient sync off       here
norms of gradients differ from rank to rank                         here; test_sharded_params and test_optim: clipping
non-persistent buffers are garbage after meta and to_empty          here
reduce_dtype is not honoured                                        here
==================================================================  ===================================================
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import MixedPrecisionPolicy, clip_grad_norm_, distribute_ragged, fully_shard, no_sync
from tests.behavior.test_features import Checkpointed
from tests.harness import distributed, our_warnings, same_on_every_rank
from tests.internals import assert_nothing_is_unsharded, states_of
from tests.models import Experts, Net, inputs, rows, shard_layers
from tests.training import (
    Twins,
    assert_gradients_match,
    assert_parameters_match,
    local_part,
    mean_square,
    pair,
    plain_sgd,
    sgd,
    stacks,
    train_step,
)

# ---- exceptions


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulates", [False, True])
@distributed(world_size=(2, 3))
def test_optimizer_updates_again_after_a_caught_out_of_memory_error(accumulates, where):
    """As training scripts do it: catch, drop the gradients, take the next batch."""
    model, reference = stacks()
    optimizers = sgd(model.parameters()), sgd(reference.parameters())
    for step in range(4):
        if step == 1:
            if accumulates:
                mean_square(model, local_part(rows(70))).backward()
            model.blocks[1].trip.arm(where, torch.OutOfMemoryError("simulated"))
            with pytest.raises(torch.OutOfMemoryError):
                mean_square(model, local_part(rows(71))).backward()
            optimizers[0].zero_grad()
        before = [param.to_local().clone() for param in model.parameters()]
        with our_warnings() as texts:
            train_step(model, optimizers[0], local_part(rows(step)))
        train_step(reference, optimizers[1], rows(step))
        assert len(texts) == (step == 1)
        moved = [not torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters()) if a.numel()]
        assert all(moved), f"step {step}: {moved}"
        assert_parameters_match(model, reference, 1e-6)
    assert_nothing_is_unsharded(model)


# ---- activation checkpointing


@pytest.mark.parametrize("accumulation", ["none", "sync", "no_sync"])
@pytest.mark.parametrize("num_forwards", [1, 2])
@pytest.mark.parametrize("groups", ["nested", "flat"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=2)
def test_checkpointing_with_several_forwards_before_one_backward(use_reentrant, groups, num_forwards, accumulation):
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return sum(mean_square(model, x * (i + 1)) for i in range(num_forwards))

    twins = Twins(Checkpointed("block", use_reentrant), shard_layers if groups == "nested" else fully_shard)
    for first, second in zip(inputs(2), inputs(2), strict=True):
        if accumulation != "none":
            with no_sync(twins.sharded) if accumulation == "no_sync" else contextlib.nullcontext():
                twins.backward(loss, first)
        twins.backward(loss, second * 2)
        twins.step()


# ---- parameters keep their identity


@distributed(world_size=2)
def test_parameters_are_the_same_objects_after_whatever_happens():
    model, _ = stacks()
    ids = [id(param) for param in model.parameters()]

    def check() -> None:
        assert [id(param) for param in model.parameters()] == ids
        assert [id(param) for param in torch.optim.SGD(model.parameters(), lr=0.1).param_groups[0]["params"]] == ids

    batch = local_part(rows())
    with torch.no_grad():
        model(batch)
    check()
    loss = mean_square(model, batch)
    check()
    loss.backward()
    check()
    for where in ("forward", "backward"):
        model.blocks[0].trip.arm(where, ValueError("by the user"))
        with pytest.raises(ValueError, match="by the user"):
            mean_square(model, batch).backward()
        check()
    model.double()
    check()
    with our_warnings():
        mean_square(model, batch.double()).backward()
    check()


# ---- experts


def shard_together(model: Experts) -> None:
    fully_shard(model)


def shard_experts_together(model: Experts) -> None:
    fully_shard(list(model.experts))
    fully_shard(model)


def shard_each_expert(model: Experts) -> None:
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)


@pytest.mark.parametrize("shard", [shard_together, shard_experts_together, shard_each_expert])
@distributed(world_size=2)
def test_ranks_that_use_different_experts_get_right_gradients_or_an_error_that_names_them(shard):
    torch.manual_seed(0)
    model, reference = pair(Experts())
    shard(model)
    for rank, part in enumerate(rows().chunk(2)):
        reference.choice = rank
        (mean_square(reference, part) / 2).backward()
    model.choice = dist.get_rank()
    if shard is shard_each_expert:
        with pytest.raises(RuntimeError, match=r"experts\.0 on rank 0.*experts\.1 on rank 1") as error:
            mean_square(model, local_part(rows())).backward()
        same_on_every_rank(str(error.value))
        assert all(param.grad is None for param in model.parameters())
    else:
        mean_square(model, local_part(rows())).backward()
        assert_gradients_match(model, reference, 1e-6)


# ---- edits


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("is_training", [True, False])
@distributed(world_size=2)
def test_zeroing_parameters_after_a_forward_shows_in_state_dict_and_in_the_next_forward(
    is_training, reshard_after_forward
):
    model, _ = stacks(reshard_after_forward=reshard_after_forward)
    with torch.set_grad_enabled(is_training):
        assert model(rows()).abs().sum() > 0
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert all(not value.full_tensor().any() for value in model.state_dict().values())
    assert not model(rows()).any()


# ---- meshes


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@distributed(world_size=2)
def test_mesh_with_a_dimension_of_replicas_is_not_left_without_sync(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model, reference = pair(Net())
    shard_layers(model, mesh=mesh)
    for x in inputs(2):
        mean_square(model, local_part(x)).backward()
        mean_square(reference, x).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-6)


@distributed(world_size=2)
def test_mesh_of_one_rank_trains_as_that_rank_alone():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))["shard"]
    model, reference = pair(Net())
    shard_layers(model, mesh=mesh)
    optimizers = plain_sgd(model.parameters()), plain_sgd(reference.parameters())
    for x in inputs(2):
        for twin, optimizer in zip((model, reference), optimizers):
            mean_square(twin, local_part(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)


# ---- norms


@distributed(world_size=(2, 3))
def test_norm_of_gradients_of_sharded_frozen_and_plain_parameters_is_one_number_on_every_rank():
    model, reference = pair(Net())
    ignored = [model.head.weight, model.head.bias]
    shard_layers(model, ignored_params=ignored)
    for twin, whole in ((model, False), (reference, True)):
        (x,) = inputs()
        mean_square(twin, x if whole else local_part(x)).backward()
    for param in ignored:
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    norm = clip_grad_norm_(model.parameters(), 0.01)
    assert type(norm) is torch.Tensor
    same_on_every_rank(f"{norm:.9f}")
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        whole = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        torch.testing.assert_close(whole, theirs.grad)


# ---- the meta device


class Rotary(nn.Module):
    """Its frequencies are in a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.zeros(4), persistent=False)
        self.register_buffer("order", torch.zeros(4, dtype=torch.long), persistent=False)
        self.register_buffer("saved", torch.ones(4))
        self.compute()

    def compute(self) -> None:
        self.frequencies = 10.0 ** -torch.arange(4.0, device=self.linear.weight.device)
        self.order.copy_(torch.tensor([3, 1, 2, 0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.frequencies * self.saved)[:, self.order]


def write_in_place(module: Rotary) -> None:
    module.frequencies.data.copy_(10.0 ** -torch.arange(4.0))
    module.order.copy_(torch.tensor([3, 1, 2, 0]))


@pytest.mark.parametrize("remedy", [Rotary.compute, write_in_place])
@pytest.mark.parametrize("groups", ["root", "inner"])
@distributed(world_size=2)
def test_non_persistent_buffers_left_empty_after_the_meta_device_are_named(remedy, groups):
    torch.manual_seed(0)
    reference = nn.Sequential(Rotary(), Rotary())
    with torch.device("meta"):
        model = nn.Sequential(Rotary(), Rotary())
    for part in model if groups == "inner" else ():
        fully_shard(part)
    fully_shard(model)
    copied = copy.deepcopy(model)
    for twin in (model, copied):
        twin.to_empty(device="cpu")
        state = {name: value.detach() for name, value in reference.state_dict().items()}
        with torch.no_grad():
            for name, param in twin.named_parameters():
                param.copy_(distribute_ragged(state[name], param.device_mesh, param.placements))
            for i in range(2):
                twin[i].saved.copy_(state[f"{i}.saved"])
        x = torch.randn(6, 4)
        words = r"4 non-persistent buffer\(s\).*0\.frequencies, 0\.order, 1\.frequencies, 1\.order"
        with pytest.raises(ValueError, match=words) as error:
            twin(x)
        same_on_every_rank(str(error.value))
        for i in range(2):
            remedy(twin[i])
        torch.testing.assert_close(twin(x), reference(x))


class Masked(nn.Module):
    """Its buffers are legitimately what an unwritten one is filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.zeros(4, dtype=torch.uint8), persistent=False)
        self.register_buffer("least", torch.full((4,), -128, dtype=torch.int8), persistent=False)
        self.register_buffer("last", torch.full((4,), torch.nan), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1 - self.mask)


@distributed(world_size=2)
def test_non_persistent_buffers_written_with_any_value_are_not_refused():
    with torch.device("meta"):
        model = fully_shard(Masked())
    model.to_empty(device="cpu")
    x = torch.ones(2, 4)
    for twin in (copy.deepcopy(model), model):
        with pytest.raises(ValueError, match=r"3 non-persistent buffer\(s\).*mask, least, last"):
            twin(x)
        twin.mask.data.zero_()
        with pytest.raises(ValueError, match=r"2 non-persistent buffer\(s\).*least, last"):
            twin(x)
        twin.mask.zero_()
        twin.least.fill_(-128)
        twin.last.fill_(torch.nan)
        twin.linear.reset_parameters()
        twin(x)


@distributed(world_size=1)
def test_non_persistent_meta_buffers_keep_their_attributes():
    with torch.device("meta"):
        model = Rotary()
    model.frequencies.base = {"theta": 10}
    fully_shard(model)
    assert model.frequencies.base == {"theta": 10}
    copied = copy.deepcopy(model).frequencies
    assert copied.base == {"theta": 10} and copied.base is not model.frequencies.base


# ---- dtypes of gradients


class WideGradient(torch.autograd.Function):
    """A matrix product whose gradients are computed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.float().T @ x.float()


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WideGradient.apply(x, self.weight)


@distributed(world_size=2)
def test_gradients_are_summed_in_reduce_dtype_from_what_autograd_made_of_them():
    """Autograd rounds a gradient to the dtype of the (bf16) parameter; every hop after that is in fp32."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(Product(), mp_policy=policy)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(5, 4, generator=generator) * 10.0**i for i in range(4)]
    wanted = torch.zeros(3, 4)
    for step in range(2):  # accumulated, without sync and with it
        with no_sync(model) if step == 0 else contextlib.nullcontext():
            model(parts[2 * step + dist.get_rank()]).sum().backward()
        for part in parts[2 * step : 2 * step + 2]:
            rounded = torch.ones(5, 3).T @ part.bfloat16().float()
            wanted += rounded.bfloat16().float() / 2
    assert model.weight.grad.dtype == torch.float32
    torch.testing.assert_close(model.weight.grad.full_tensor(), wanted, rtol=1e-6, atol=0)
    assert states_of(model)[0]._handles[0].pending_gradients.dtype == torch.float32

"""Functional mode: derivatives of any order equal those of the unsharded model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecisionPolicy,
    RaggedDTensor,
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
    functional_mode,
    no_sync,
    set_functional_mode,
    unshard,
)
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import distributed, same_on_every_rank
from tests.models import Net, inputs, shard_layers
from tests.training import Twins, adamw, full, local_part, mean_square, plain_sgd


def smooth_net() -> Net:
    """In double precision: second derivatives are compared closely."""
    torch.manual_seed(0)
    net = Net().double()
    net.unused = nn.Linear(2, 2).double()
    net.embed.bias.requires_grad_(False)
    return net


def functional_layers(model: nn.Module) -> nn.Module:
    shard_layers(model)
    set_functional_mode(model)
    return model


def batches(steps: int) -> list[torch.Tensor]:
    return [batch.double() for batch in inputs(steps)]


def twins() -> Twins:
    return Twins(smooth_net(), functional_layers, plain_sgd, tolerance=1e-12)


def slope_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As a critic of a Wasserstein GAN is trained: its slope at each input shall be one."""
    x = x.clone().requires_grad_()
    score = model(x).sum(1)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if param.requires_grad and "unused" not in name]


def gradient_norm_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradients of the parameters are in the loss: what is differentiated are averages over the ranks."""
    loss = mean_square(model, x)
    grads = torch.autograd.grad(loss, trainable(model), create_graph=True)
    return loss + 0.1 * sum(full(grad).square().sum() for grad in grads)


def curvature_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Third derivatives: a Hessian-vector product in the loss."""
    params = trainable(model)
    grads = torch.autograd.grad(mean_square(model, x), params, create_graph=True)
    along = sum(full(grad).sum() for grad in grads)
    products = torch.autograd.grad(along, params, create_graph=True)
    return 1e-3 * sum(full(product).square().sum() for product in products)


@pytest.mark.parametrize("loss", [mean_square, slope_penalty, gradient_norm_penalty, curvature_penalty])
@distributed(world_size=(1, 2, 3))
def test_derivatives_of_every_order_equal_those_of_the_unsharded_model(loss):
    both = twins()
    for batch in batches(2):
        both.backward(loss, batch)
        both.step()


@distributed(world_size=(2, 3))
def test_gradients_of_parameters_can_be_asked_for():
    both = twins()
    (batch,) = batches(1)
    expected = torch.autograd.grad(mean_square(both.reference, batch), trainable(both.reference))
    got = torch.autograd.grad(mean_square(both.sharded, local_part(batch)), trainable(both.sharded))
    for grad, wanted in zip(got, expected, strict=True):
        assert isinstance(grad, RaggedDTensor)
        torch.testing.assert_close(grad.full_tensor(), wanted, atol=1e-12, rtol=0)
    assert all(param.grad is None for param in both.sharded.parameters())
    x = local_part(batch).requires_grad_()
    (slope,) = torch.autograd.grad(mean_square(both.sharded, x), x)
    y = batch.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(mean_square(both.reference, y), y)
    torch.testing.assert_close(slope / dist.get_world_size(), local_part(wanted))
    assert all(param.grad is None for param in both.sharded.parameters())


@distributed(world_size=2)
def test_double_backward_in_the_default_mode_names_the_functional_one_and_training_goes_on():
    twins = Twins(smooth_net())
    (batch,) = batches(1)
    x = local_part(batch).clone().requires_grad_()
    output = twins.sharded(x)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*fully_shard'ed model.*with functional_mode\(model\)"):
        torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="whose forward ran in the default mode"):
        torch.autograd.grad(mean_square(twins.sharded, x), trainable(twins.sharded))
    with functional_mode(twins.sharded):
        score = twins.sharded(x)
    torch.autograd.grad(score.sum(), x, create_graph=True)
    twins.sharded.zero_grad()
    twins.backward(mean_square, batch)
    twins.step()


def checkpointed(use_reentrant: bool) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x.square().mean()

    return loss


@pytest.mark.parametrize("use_reentrant", [True, False])
@distributed(world_size=2)
def test_activation_checkpointing_recomputes_the_gather(use_reentrant):
    both = Twins(
        smooth_net(),
        lambda model: [set_functional_mode(fully_shard(layer)) for layer in model.layers],
        lambda params: plain_sgd([*params][1:]),  # the first is frozen, and is in no optimizer
        tolerance=1e-12,
    )
    for batch in batches(2):
        both.backward(checkpointed(use_reentrant), batch)
        for layer, wanted in zip(both.sharded.layers, both.reference.layers, strict=True):
            for param, reference in zip(layer.parameters(), wanted.parameters(), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), reference.grad)
                param.grad = reference.grad = None


@distributed(world_size=3)
def test_modes_alternate_and_mix_also_with_flat_views_and_clipping():
    both = Twins(smooth_net(), shard_layers, adamw, tolerance=1e-9)
    flat = torch.optim.AdamW(flat_parameters(both.sharded), lr=1e-2, eps=1e-3, weight_decay=0)
    reference = torch.optim.AdamW(both.reference.parameters(), lr=1e-2, eps=1e-3, weight_decay=0)
    model = both.sharded
    for step, batch in enumerate(batches(6)):
        set_functional_mode(model, step % 3 == 1)
        if step % 3 == 2:
            set_functional_mode(model.layers[1])
        for part in batch.chunk(2):  # accumulates
            both.backward(mean_square, part)
        both.check_gradients()
        expected = nn.utils.clip_grad_norm_(both.reference.parameters(), 0.1)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), expected)
        for optimizer in (flat, reference):
            optimizer.step()
            optimizer.zero_grad()
        both.check_parameters()


@distributed(world_size=2)
def test_gradient_hooks_and_optimizers_in_backward_work():
    both, seen = twins(), {}
    for name, model in (("reference", both.reference), ("sharded", both.sharded)):
        weight = model.layers[0].linear.weight
        weight.register_hook(lambda grad: grad * 2)
        weight.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.setdefault(name, []).append(full(p.grad).clone())
        )
    for batch in batches(2):
        both.backward(mean_square, batch)
    assert len(seen["sharded"]) == 2
    torch.testing.assert_close(seen["sharded"], seen["reference"])
    both.check_gradients()


@distributed(world_size=2)
def test_gradients_are_sharded_like_their_parameters_also_where_hooks_look_at_them():
    model = functional_layers(smooth_net())
    weight, seen = model.layers[0].linear.weight, []
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(type(param.grad)))
    mean_square(model, batches(1)[0]).backward()
    assert seen == [RaggedDTensor] and weight.grad.placements == weight.placements


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@distributed(world_size=2)
def test_parameters_beside_frozen_ones_have_gradients(frozen):
    model, seen = nn.Linear(3, 3), []
    getattr(model, frozen).requires_grad_(False)
    set_functional_mode(fully_shard(model))
    model.register_forward_pre_hook(lambda item, _: seen.extend([item.weight.requires_grad, item.bias.requires_grad]))
    model(torch.ones(2, 3)).sum().backward()
    assert seen == [param.grad is not None for param in model.parameters()] == [frozen != "weight", frozen != "bias"]


@distributed(world_size=2)
def test_a_parameter_used_on_one_rank_has_a_gradient_on_all_and_one_used_nowhere_on_none():
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            return self.experts[which](x)

    both = Twins(Choice(), lambda model: set_functional_mode(fully_shard(model)))
    both.backward_by_rank(lambda model, share, rank: model(share, rank).square().mean(), next(inputs(1, 3)))
    got = both.check_gradients()
    assert got["experts.2.weight"] is None and got["experts.1.weight"] is not None


@distributed(world_size=2)
def test_ranks_that_run_different_groups_raise_the_same_error():
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model = nn.Module()
    model.layers = layers
    model.forward = lambda x: layers[dist.get_rank()](x)
    for layer in layers:
        fully_shard(layer)
    set_functional_mode(fully_shard(model))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4)).sum().backward()
    text = same_on_every_rank(str(caught.value))
    assert "all-gather of layers.0 on rank 0" in text and "all-gather of layers.1 on rank 1" in text
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("policy", [(torch.bfloat16, torch.float32), (torch.float16, torch.float16), (None, None)])
@distributed(world_size=2)
def test_both_modes_compute_the_same_bits(policy):
    models = []
    for is_functional in (False, True):
        torch.manual_seed(0)
        model = shard_layers(Net(), mp_policy=MixedPrecisionPolicy(*policy))
        set_functional_mode(model, is_functional)
        for batch in inputs(2):
            model(local_part(batch)).float().square().mean().backward()
        models.append(model)
    for default, functional in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(default.grad.to_local(), functional.grad.to_local())


@distributed(world_size=2)
def test_what_would_be_lost_raises():
    model = functional_layers(smooth_net())
    x = local_part(batches(1)[0])

    def forward_that(change: Callable[[nn.Module], None]) -> None:
        def change_inputs(layer: nn.Module, args: Any) -> None:
            change(layer.linear)

        handle = model.layers[0].register_forward_pre_hook(change_inputs)
        try:
            model(x)
        finally:
            handle.remove()

    with pytest.raises(RuntimeError, match=r"layers\.0 was modified in place inside forward"):
        forward_that(lambda linear: linear.weight.detach().zero_())
    with pytest.raises(RuntimeError, match=r"replaced, added or removed parameters.*layers\.0"):
        forward_that(lambda linear: setattr(linear, "bias", nn.Parameter(torch.zeros(linear.out_features).double())))
    with pytest.warns(UserWarning, match="was interrupted"):
        loss = mean_square(model, x)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        model.layers[0].linear.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"layers\.0 were modified .* between a forward and its backward"):
        loss.backward()


@distributed(world_size=2)
def test_gradients_accumulated_without_sync_are_not_forgotten():
    both = Twins(smooth_net(), shard_layers, plain_sgd, tolerance=1e-12)
    first, second, third = batches(3)
    with no_sync(both.sharded):
        both.backward(mean_square, first)
    with functional_mode(both.sharded), pytest.raises(RuntimeError, match="accumulated without sync"):
        both.sharded(local_part(second))
    both.backward(mean_square, second)
    both.step()
    with functional_mode(both.sharded), no_sync(both.sharded):  # every backward reduces
        both.backward(mean_square, third)
        both.step()


@distributed(world_size=2)
def test_gradients_accumulated_without_sync_that_were_dropped():
    """Known to be when a term of the loss is computed from a parameter, before any forward has looked."""
    both = Twins(smooth_net(), shard_layers, plain_sgd, tolerance=1e-12)
    with no_sync(both.sharded):
        both.backward(mean_square, batches(1)[0])
    for twin in both.both:
        twin.zero_grad()
    set_functional_mode(both.sharded)
    both.backward(_with_weight_decay, batches(2)[1])
    both.step()


def _with_weight_decay(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = model.layers[0].linear.weight
    return full(weight).square().mean() + mean_square(model, x)


@distributed(world_size=2)
def test_training_goes_on_after_an_exception():
    both = twins()
    fails = both.sharded.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        both.sharded(local_part(batches(1)[0]))
    fails.remove()
    assert all(isinstance(param, RaggedDTensor) for param in both.sharded.parameters())
    with pytest.warns(UserWarning, match="was interrupted"):
        both.backward(slope_penalty, batches(1)[0])
    both.step()


@distributed(world_size=2)
def test_gradients_of_a_backward_that_raised_are_thrown_away():
    both = twins()
    first, second = batches(2)
    for reduced_first in (False, True):
        if reduced_first:
            both.backward(mean_square, first)
        fails = both.sharded.layers[0].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mean_square(both.sharded, local_part(first)).backward()
        fails.remove()
        both.reference.zero_grad()
        with pytest.warns(UserWarning, match="was interrupted.*all gradients are None"):
            both.backward(mean_square, second)
        both.step()


@distributed(world_size=2)
def test_gathered_memory_and_the_model_are_freed_without_the_garbage_collector():
    model = functional_layers(smooth_net())
    gathered: list[StorageWeakRef] = []
    model.layers[1].linear.register_forward_pre_hook(
        lambda linear, _: gathered.append(StorageWeakRef(linear.weight.untyped_storage()))
    )
    ids = [id(param) for param in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        loss = slope_penalty(model, local_part(batches(1)[0]))
        assert not gathered[0].expired()
        loss.backward()
        del loss
        assert gathered[0].expired()
        assert [id(param) for param in model.parameters()] == ids
        for param in model.parameters():
            param.grad = None
        reference = weakref.ref(model)
        del model, param
        assert reference() is None
    finally:
        gc.enable()


@distributed(world_size=2)
def test_flat_views_have_what_backward_brings():
    """``zero_grad()``, clipping and hooks of flat views know of gradients that come through autograd."""
    both, seen = twins(), []
    flat = flat_parameters(both.sharded)
    optimizers = plain_sgd(flat), plain_sgd(both.reference.parameters())
    for param in flat:
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    penalty = lambda model, x: full(model.head.weight).square().sum() + 0 * x.sum()  # noqa: E731
    for loss in (mean_square, slope_penalty, penalty):
        both.backward(loss, batches(1)[0])
        assert {*map(id, seen)} <= {*map(id, flat)} and len(seen) == len({*map(id, seen)}) > 0
        for optimizer in optimizers:
            optimizer.zero_grad()  # drops all of it
        both.backward(loss, batches(1)[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        both.check_parameters()
        seen.clear()
    for batch in batches(2):
        both.backward(slope_penalty, batch)
        expected = nn.utils.clip_grad_norm_(both.reference.parameters(), 0.1)
        torch.testing.assert_close(full(nn.utils.clip_grad_norm_(flat, 0.1)), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        both.check_parameters()
    flat[0].register_hook(lambda grad: grad * 2)
    with pytest.raises(RuntimeError, match="flat view has a register_hook"):
        mean_square(both.sharded, local_part(batches(1)[0])).backward()


class Experts(nn.Module):
    """In one group: parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(5, 5), nn.Linear(5, 5).double(), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        if rank % 2:
            return self.second(x.double()).float()
        return self.first(x) * self.first.weight.scale


@distributed(world_size=2)
def test_ranks_may_use_parameters_of_different_dtypes_and_attributes_are_there():
    both, seen = Twins(Experts(), lambda model: set_functional_mode(fully_shard(model))), []
    for model in both.both:
        model.first.weight.scale = 3.0
    both.sharded.unused.weight.register_hook(seen.append)
    both.sharded.unused.weight.register_post_accumulate_grad_hook(seen.append)
    both.backward_by_rank(lambda model, share, rank: model(share, rank).square().mean(), next(inputs(1, 5)))
    both.check_gradients()
    assert not seen, "hooks of a parameter without a gradient"


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


@distributed(world_size=2)
def test_backward_may_come_after_the_context():
    both = Twins(Recomputed().double(), shard_layers, plain_sgd, tolerance=1e-12)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        with functional_mode(model) if model is both.sharded else nullcontext():
            score = model(x).sum(1)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + slope.square().sum(1).mean()

    for batch in inputs(2, 5):
        both.backward(loss, batch.double())
        both.step()


@pytest.mark.parametrize("reached", ["second", "first"])
@distributed(world_size=2)
def test_ranks_whose_losses_reach_different_groups_raise_the_same_error(reached):
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(7, 7)})
    model.forward = lambda x: {"first": model["first"](x), "second": model["second"](x.new_ones(2, 7))}
    for layer in model.values():
        fully_shard(layer)
    set_functional_mode(fully_shard(model))
    outputs = model(torch.ones(2, 4))
    loss = outputs["first"].sum() + outputs["second"].sum() if dist.get_rank() == 0 else outputs[reached].sum()
    with pytest.raises(RuntimeError, match="the ranks issued different collectives") as caught:
        loss.backward()
    assert "first on rank 0" in same_on_every_rank(str(caught.value)) or reached == "first"


@distributed(world_size=2)
def test_a_recomputed_part_of_a_group_is_an_error_that_says_so():
    net = fully_shard(Recomputed())
    with functional_mode(net):
        output = net(torch.ones(2, 5, requires_grad=True))
    with pytest.raises(RuntimeError, match="activation checkpointing must recompute whole groups"):
        output.sum().backward()


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_parameters_unsharded_ahead_of_a_functional_forward_are_freed(reshard_after_forward):
    model = shard_layers(smooth_net(), reshard_after_forward=reshard_after_forward)
    (batch,) = batches(1)
    mean_square(model, batch)
    for handle in _get_fsdp_handles(model):
        unshard(handle.owner().live_modules()[0], async_op=True)
    with functional_mode(model):
        model(batch)
    assert not any(handle.unsharded.is_allocated or handle.unsharded.work for handle in _get_fsdp_handles(model))


@distributed(world_size=2)
def test_dropped_gradients_do_not_keep_the_mode_from_changing():
    both = Twins(smooth_net(), shard_layers, plain_sgd, tolerance=1e-12)
    first, second = batches(2)
    with no_sync(both.sharded):
        mean_square(both.sharded, local_part(first)).backward()
    both.optimizers[1].zero_grad()
    with functional_mode(both.sharded):
        both.backward(mean_square, second)
    both.step()

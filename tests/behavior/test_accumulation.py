"""Invariant 7: accumulation without gradient sync obeys the user, and what is not reduced yet cannot be read."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from fsdp_compose import MixedPrecisionPolicy, RaggedDTensor, clip_grad_norm_, flat_parameters, fully_shard, no_sync
from fsdp_compose.core.flat.accumulation import UnreducedGradient
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import distributed
from tests.models import Branches, Net, inputs, shard_branches, shard_layers
from tests.training import Twins, local_part, mean_square, plain_sgd

DROPS: dict[str, Callable[[nn.Module], None]] = {
    "zero_grad()": lambda model: model.zero_grad(),
    "zero_grad(set_to_none=False)": lambda model: model.zero_grad(set_to_none=False),
    "foreach": lambda model: torch._foreach_zero_([param.grad for param in model.parameters()]),
    "a gradient of the user's": lambda model: [
        setattr(param, "grad", torch.zeros_like(param)) for param in model.parameters()
    ],
}


def backward_without_sync(twins: Twins, batch: torch.Tensor) -> None:
    with no_sync(twins.sharded):
        twins.backward(mean_square, batch)


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("when", ["between backwards", "between forward and backward", "after an evaluation"])
@distributed(world_size=3)
def test_zero_grad_drops_what_was_accumulated_without_sync(drop, when):
    twins = Twins(Net(), make_optimizer=plain_sgd)
    for first, second in zip(inputs(3), inputs(3), strict=True):
        backward_without_sync(twins, first)

        def drop_and_backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if when == "after an evaluation":
                with torch.inference_mode():
                    model(x)
            if when != "between forward and backward":
                DROPS[drop](model)
            loss = mean_square(model, x)
            if when == "between forward and backward":
                DROPS[drop](model)
            loss.backward()
            return loss

        twins.run(drop_and_backward, second * 2)
        twins.step()


@distributed(world_size=2)
def test_zero_grad_drops_reduced_and_unreduced_gradients_together():
    twins = Twins(Net(), make_optimizer=plain_sgd)
    first, second, third = inputs(3)
    twins.backward(mean_square, first)
    backward_without_sync(twins, second)
    for model in twins.both:
        model.zero_grad()
    twins.backward(mean_square, third)
    twins.step()


@distributed(world_size=3)
def test_gradient_reduced_before_an_accumulation_is_part_of_the_sum():
    twins = Twins(Net(), make_optimizer=plain_sgd)
    for batch in inputs(2):
        twins.backward(mean_square, batch)
        backward_without_sync(twins, batch * 2)
        backward_without_sync(twins, batch * 3)
        twins.backward(mean_square, batch)
        twins.step()


@distributed(world_size=2)
def test_dropping_one_parameters_gradient_keeps_the_others():
    twins = Twins(Net(), make_optimizer=plain_sgd)
    first, second = inputs(2)
    backward_without_sync(twins, first)
    for model in twins.both:
        model.layers[1].linear.weight.grad = None
    twins.backward(mean_square, second)
    twins.step()


@distributed(world_size=2)
def test_dropped_gradients_without_sync_free_their_memory_at_the_next_forward():
    twins = Twins(Net(), make_optimizer=plain_sgd)
    (batch,) = inputs()
    backward_without_sync(twins, batch)
    assert all(handle.pending_gradients.accumulation is not None for handle in _get_fsdp_handles(twins.sharded))
    twins.sharded.zero_grad()
    twins.sharded(local_part(batch))
    assert all(handle.pending_gradients.accumulation is None for handle in _get_fsdp_handles(twins.sharded))


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "add": lambda param: param.grad + 1,
    "add a number": lambda param: param.grad.add_(1),
    "scale": lambda param: param.grad.mul_(0.5),
    "norm": lambda param: param.grad.norm(),
    "item": lambda param: param.grad.sum().item(),
    "clone": lambda param: param.grad.clone(),
    "to_local": lambda param: param.grad.to_local(),
    "full_tensor": lambda param: param.grad.full_tensor(),
    "deepcopy": lambda param: copy.deepcopy(param.grad),
    "save": lambda param: torch.save(param.grad, io.BytesIO()),
    "torch's clip_grad_norm_": lambda param: torch.nn.utils.clip_grad_norm_([param], 1.0),
    "clip_grad_norm_": lambda param: clip_grad_norm_([param], 1.0),
    "SGD": lambda param: torch.optim.SGD([param], lr=0.1).step(),
    "AdamW, foreach": lambda param: torch.optim.AdamW([param], foreach=True).step(),
    "AdamW, fused": lambda param: torch.optim.AdamW([param], fused=True).step(),
    "copy into the parameter": lambda param: param.data.copy_(param.grad),
    "add_() of another shape": lambda param: param.grad.add_(torch.ones(param.numel() + 1)),
}


@distributed(world_size=2)
def test_gradient_that_is_not_reduced_yet_raises_when_it_is_read():
    twins = Twins(Net())
    first, second = inputs(2)
    backward_without_sync(twins, first)
    param = twins.sharded.layers[1].linear.weight
    before = param.to_local().clone()
    assert type(param.grad) is UnreducedGradient and param.grad.shape == param.shape
    assert "layers.1.linear.weight" in repr(param.grad)
    for what, read in READS.items():
        with pytest.raises(RuntimeError, match=r"layers\.1\.linear\.weight has not been reduced.*no_sync"):
            read(param)
            pytest.fail(what)
    assert torch.equal(param.to_local(), before)
    twins.backward(mean_square, second)
    twins.step()


@distributed(world_size=2)
def test_parameter_that_no_rank_used_has_no_gradient_without_sync():
    twins = Twins(Branches(), shard_branches)
    (batch,) = inputs()
    with no_sync(twins.sharded):
        twins.backward(lambda model, x: model(x, "a").square().mean(), batch)
    got = {name: param.grad for name, param in twins.sharded.named_parameters()}
    for name, param in twins.reference.named_parameters():
        assert (got[name] is None) == (param.grad is None), name


@pytest.mark.parametrize("frozen_again", [False, True])
@distributed(world_size=2)
def test_group_that_is_frozen_during_an_accumulation_keeps_its_gradient(frozen_again):
    twins = Twins(Net(), make_optimizer=plain_sgd)
    for _ in range(2):
        first, second, third = inputs(3)
        backward_without_sync(twins, first)
        for model in twins.both:
            model.layers[1].requires_grad_(False)
        if frozen_again:
            backward_without_sync(twins, second)
        twins.backward(mean_square, second)
        twins.check_gradients()
        twins.backward(mean_square, third)  # of frozen parameters it changes nothing
        twins.step()
        for model in twins.both:
            model.layers[1].requires_grad_(True)


def term(model: nn.Module) -> torch.Tensor:
    """A term of the loss that is computed from a parameter itself, of the same value on every rank."""
    weight = model.layers[1].linear.weight
    return (weight.full_tensor() if isinstance(weight, RaggedDTensor) else weight).square().sum()


TERMS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "before forward": lambda model, x: term(model) + mean_square(model, x),
    "after forward": lambda model, x: mean_square(model, x) + term(model),
    "alone": lambda model, x: term(model),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("name", TERMS)
@distributed(world_size=2)
def test_terms_of_the_loss_on_a_parameter_join_what_is_not_reduced_yet(name, hook, flat):
    twins = Twins(Net(), make_optimizer=plain_sgd)
    if flat:
        twins.optimizers[1] = plain_sgd(flat_parameters(twins.sharded))
    for model in twins.both if hook else ():
        model.layers[1].linear.weight.register_hook(lambda grad: grad * 0.5)
    for reduced_first in (False, True):
        first, second, third = inputs(3)
        if reduced_first:
            twins.backward(mean_square, first)
        with no_sync(twins.sharded):
            twins.backward(TERMS[name], first)
            twins.backward(TERMS[name], second)
        if name != "alone":
            with pytest.raises(RuntimeError, match="has not been reduced"):
                twins.sharded.layers[1].linear.weight.grad.clone()
        twins.backward(TERMS[name], third)
        twins.backward(mean_square, third)
        twins.step()


@distributed(world_size=2)
def test_gradients_accumulate_in_reduce_dtype():
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(4, 4), mp_policy=policy)
    x = torch.ones(1, 4)
    with no_sync(model):
        for scale in (256.0, 1.0):  # in bf16 their sum would be 256
            (model(x) * scale).sum().backward()
    (model(x) * 0.0).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 257.0))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@distributed(world_size=2)
def test_flat_views_show_and_drop_what_is_not_reduced_too(local, set_to_none):
    twins = Twins(Net(), make_optimizer=plain_sgd)
    flat = flat_parameters(twins.sharded, local=local)
    twins.optimizers[1] = plain_sgd(flat)
    for first, second in zip(inputs(2), inputs(2), strict=True):
        twins.backward(mean_square, first)
        backward_without_sync(twins, first)
        assert all(type(param.grad) is UnreducedGradient for param in flat)
        with pytest.raises(RuntimeError, match="has not been reduced"):
            twins.optimizers[1].step()
        for optimizer in twins.optimizers:
            optimizer.zero_grad(set_to_none)
        twins.backward(mean_square, second * 2)
        backward_without_sync(twins, first)
        twins.backward(mean_square, second)
        twins.step()


@pytest.mark.parametrize("how", ["all", "all but one"])
@distributed(world_size=2)
def test_flat_optimizers_step_after_all_of_what_is_not_reduced_was_dropped_from_the_model(how):
    model = fully_shard(nn.Linear(4, 4))
    optimizer = plain_sgd(flat_parameters(model))
    before = copy.deepcopy(model.state_dict())
    with no_sync(model):
        model(torch.ones(2, 4)).sum().backward()
    if how == "all":
        model.zero_grad()
    else:
        model.bias.grad = None
        with pytest.raises(RuntimeError, match="has not been reduced"):
            optimizer.step()
        optimizer.zero_grad()
    optimizer.step()  # of nothing
    assert torch.equal(model.weight.full_tensor(), before["weight"].full_tensor())
    assert clip_grad_norm_(model.parameters(), 1.0) == 0


@distributed(world_size=2)
def test_model_with_unreduced_gradients_is_freed_without_the_garbage_collector():
    (batch,) = inputs()
    model = shard_layers(Net())
    with no_sync(model):
        mean_square(model, local_part(batch)).backward()
    dead = weakref.ref(model), weakref.ref(_get_fsdp_handles(model)[0])
    gc.disable()
    try:
        del model
        assert dead[0]() is None and dead[1]() is None
    finally:
        gc.enable()


@distributed(world_size=2)
def test_dropping_what_was_accumulated_says_so_also_when_its_reduction_had_begun():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("user error")

    model, x = fully_shard(nn.Linear(3, 3)), torch.ones(2, 3, requires_grad=True)
    with no_sync(model):
        model(x).sum().backward()
    with pytest.raises(ValueError, match="user error"):
        model(Fails.apply(x)).sum().backward()
    with pytest.warns(UserWarning, match="together with those accumulated before: all gradients are None"):
        model(x)
    assert all(param.grad is None for param in model.parameters())

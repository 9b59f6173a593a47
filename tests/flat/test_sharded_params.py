"""Sharded parameters as optimizers, users and checkpoints see them."""

from __future__ import annotations

import copy
import functools
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp_compose
from fsdp_compose import RaggedDTensor, clip_grad_norm_, distribute_ragged, flat_parameters, fully_shard, no_sync
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import distributed
from tests.models import inputs, shard_layers
from tests.training import Twins, full_values, local_part, mean_square, plain_sgd

STEPS = 4


class Net(nn.Module):
    """Rows, odd sizes, a scalar, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 10)
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    @property
    def layers(self) -> list[nn.Module]:
        """Modules that get a group of their own."""
        return [self.second]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.head(self.norm(x + torch.tanh(self.second(x)))) * self.scale


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int) -> torch.Tensor:
    """The rows of all ranks; each takes its own."""
    return torch.randn(dist.get_world_size() * 2, 6, generator=torch.Generator().manual_seed(step))


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        try:
            torch.testing.assert_close(actual[name], expected[name], rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# ---- optimizers

Make = Callable[[Any], torch.optim.Optimizer]


def kinds(name: str, cls: Any, *modes: str, **options: Any) -> dict[str, Make]:
    def make(mode: str) -> Make:
        flags = {"foreach": False} if mode == "loop" else {mode: True}
        return lambda params: cls(params, **options, **flags)

    return {f"{name} {mode}": make(mode) for mode in modes}


OPTIMIZERS: dict[str, Make] = {
    **kinds("SGD", torch.optim.SGD, "foreach", "fused", "loop", lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    **kinds("Adam", torch.optim.Adam, "foreach", "fused", "loop", lr=0.01, eps=1e-3, amsgrad=True),
    **kinds("AdamW", torch.optim.AdamW, "foreach", "fused", "loop", lr=0.01, eps=1e-3),
    **kinds("Adagrad", torch.optim.Adagrad, "foreach", "fused", "loop", lr=0.1),
    **kinds("Adadelta", torch.optim.Adadelta, "foreach", "loop", lr=1.0),
    **kinds("Adamax", torch.optim.Adamax, "foreach", "loop", lr=0.01, eps=1e-3),
    **kinds("NAdam", torch.optim.NAdam, "foreach", "loop", lr=0.01, eps=1e-3),
    **kinds("RAdam", torch.optim.RAdam, "foreach", "loop", lr=0.01, eps=1e-3),
    **kinds("ASGD", torch.optim.ASGD, "foreach", "loop", lr=0.01),
    **kinds("RMSprop", torch.optim.RMSprop, "foreach", "loop", lr=0.01, eps=1e-3, momentum=0.5, centered=True),
    **kinds("Rprop", torch.optim.Rprop, "foreach", "loop", lr=0.01),
    **kinds("Adafactor", torch.optim.Adafactor, "foreach", "loop", lr=0.01),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=3, timeout=60)
def test_every_optimizer_equals_unsharded_training(name):
    warnings.simplefilter("ignore")
    reference = build()
    model = shard_layers(build())
    optimizers = [OPTIMIZERS[name](list(item.parameters())) for item in (reference, model)]
    for step in range(STEPS):
        rows = batch(step)
        for item, optimizer, data in zip((reference, model), optimizers, (rows, local_part(rows)), strict=True):

            def closure(item=item, optimizer=optimizer, data=data):
                optimizer.zero_grad()
                loss = mean_square(item, data)
                loss.backward()
                if item is model:  # what a line search looks at must be the same on all ranks
                    loss = loss.detach()
                    dist.all_reduce(loss)
                    loss /= dist.get_world_size()
                return loss

            if name == "LBFGS":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    # Rprop follows the signs of gradients, which rounding may flip where they are nearly zero.
    assert_close(full_values(model), full_values(reference), 1e-4)
    for param, state in optimizers[1].state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and param.dim():
                assert isinstance(value, RaggedDTensor) and value.placements == param.placements, key


@distributed(world_size=3, timeout=60)
def test_muon_equals_unsharded_training():
    warnings.simplefilter("ignore")
    reference, model = build(), shard_layers(build())
    pairs = []
    for item in (reference, model):
        matrices = [param for param in item.parameters() if param.ndim == 2]
        others = [param for param in item.parameters() if param.ndim != 2]
        pairs.append((torch.optim.Muon(matrices, lr=0.01), torch.optim.SGD(others, lr=0.01)))
    for step in range(STEPS):
        rows = batch(step)
        for item, optimizers, data in zip((reference, model), pairs, (rows, local_part(rows)), strict=True):
            mean_square(item, data).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_close(full_values(model), full_values(reference), 2e-2)  # Newton-Schulz runs in bf16


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("order", [0.0, 1.0, 2.0, math.inf])
@distributed(world_size=3, timeout=60)
def test_clipping_equals_that_of_unsharded_training(order, foreach):
    rows = batch(0)
    reference = build()
    mean_square(reference, rows).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, order)
    for clip in ("torch", "ours"):
        model = shard_layers(build())
        mean_square(model, local_part(rows)).backward()
        if clip == "torch":
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.05, order, foreach=foreach)
            total = total.full_tensor() if isinstance(total, DTensor) else total
        else:
            total = clip_grad_norm_(model.parameters(), 0.05, order)
        torch.testing.assert_close(total, expected)
        totals = [torch.empty(()) for _ in range(3)]
        dist.all_gather(totals, total)
        assert totals[0] == totals[1] == totals[2]
        grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        assert_close(grads, {name: param.grad for name, param in reference.named_parameters()})


@distributed(world_size=3, timeout=60)
def test_memory_formats_are_ignored_by_sharded_parameters():
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    model = fully_shard(copy.deepcopy(reference))
    before = [param.full_tensor() for param in model.parameters()]
    x = torch.randn(2, 3, 6, 6)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype=dtype, memory_format=torch.channels_last)
        expected = reference.to(dtype)(x.to(dtype))
        actual = model(x.to(dtype).contiguous(memory_format=torch.channels_last))
        torch.testing.assert_close(actual, expected)
        actual.sum().backward()
        for param, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(param.full_tensor(), value.to(dtype)) and param.to_local().is_contiguous()


@distributed(world_size=2, timeout=60)
def test_our_clipping_uses_one_collective_and_counts_other_parameters():
    model = build()
    fully_shard(model, ignored_params=[model.scale])
    rows = torch.ones(2, 6)
    mean_square(model, rows).backward()
    reference = build()
    mean_square(reference, rows).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    calls, original = [], dist.all_reduce

    def counted(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    dist.all_reduce = counted
    try:
        total = clip_grad_norm_(model.parameters(), 0.05)
    finally:
        dist.all_reduce = original
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(model.scale.grad, reference.scale.grad)
    assert len(calls) == 1
    assert clip_grad_norm_(iter(()), 1.0) == 0
    model.scale.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="nan"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@distributed(world_size=3, timeout=60)
def test_grad_scaler_finds_an_inf_on_any_rank():
    model = shard_layers(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = full_values(model)
    scaler.scale(mean_square(model, local_part(batch(0)))).backward()
    expected = {name: param.grad.full_tensor() / 4 for name, param in model.named_parameters()}
    if dist.get_rank() == 1:
        next(param for param in model.parameters() if param.grad.to_local().numel()).grad.to_local()[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert_close(full_values(model), before, 0)
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale(mean_square(model, local_part(batch(0)))).backward()
    scaler.unscale_(optimizer)
    assert_close({name: param.grad.full_tensor() for name, param in model.named_parameters()}, expected)
    scaler.step(optimizer)
    assert any(not torch.equal(a, b) for a, b in zip(full_values(model).values(), before.values(), strict=True))


# ---- gradient hooks


@pytest.mark.parametrize("when", ["before fully_shard", "after", "after module.to"])
@distributed(world_size=2, timeout=60)
def test_gradient_hooks_fire_once_per_reducing_backward_with_the_sharded_gradient(when):
    reference, model = build(), build()
    seen: list[tuple[str, torch.Tensor]] = []

    def register(item: nn.Module) -> list[Any]:
        return [
            item.second.weight.register_hook(lambda grad: seen.append(("gradient", grad.clone()))),
            item.second.weight.register_hook(lambda grad: grad * 2),
            item.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.clone()))),
        ]

    register(reference)
    if when == "before fully_shard":
        handles = register(model)
    shard_layers(model)
    if when == "after module.to":
        model.double()
        reference.double()
    if when != "before fully_shard":
        handles = register(model)
    kind = torch.float64 if when == "after module.to" else torch.float32
    for step in range(3):  # accumulates: hooks must see the new gradient, and then the sum
        rows = batch(step).to(kind)
        seen.clear()
        mean_square(reference, rows).backward()
        expected = list(seen)
        seen.clear()
        mean_square(model, local_part(rows)).backward()
        assert [name for name, _ in seen] == ["gradient", "after"] == [name for name, _ in expected]
        for (_, actual), (_, wanted) in zip(seen, expected, strict=True):
            assert isinstance(actual, RaggedDTensor)
            torch.testing.assert_close(actual.full_tensor(), wanted)
        torch.testing.assert_close(model.second.weight.grad.full_tensor(), reference.second.weight.grad)
    for handle in handles:
        handle.remove()
    seen.clear()
    mean_square(model, local_part(batch(9)).to(kind)).backward()
    assert not seen


def _in_place(mask: torch.Tensor, grad: torch.Tensor) -> None:
    grad.mul_(mask)


def _of_the_whole(mask: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return whole * mask


MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]] = {
    "mul": lambda mask, grad: grad * mask,
    "rmul": lambda mask, grad: mask * grad,
    "where": lambda mask, grad: torch.where(mask > 0, grad, torch.zeros_like(grad)),
    "in place": _in_place,
    "of the whole": _of_the_whole,
}


@pytest.mark.parametrize("way", MASKS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("is_whole_shape", [True, False])
@distributed(world_size=3)
def test_gradient_hooks_may_compute_with_plain_tensors(way, when, is_whole_shape):
    reference = build()
    model = copy.deepcopy(reference)

    def add(item: nn.Module) -> None:
        for param in item.parameters():
            mask = (torch.arange(param.numel()) % 3 < 2).view(param.shape).float()
            if param.dim() == 2 and not is_whole_shape:
                mask = mask[:, :1]
            param.register_hook(functools.partial(MASKS[way], mask))

    add(reference)
    if when == "before":
        add(model)
    fully_shard(model)
    if when == "after":
        add(model)
    optimizers = [torch.optim.SGD(item.parameters(), 0.1, momentum=0.9) for item in (model, reference)]
    for step in range(3):
        rows = batch(step)
        for item, optimizer, x in zip((model, reference), optimizers, (local_part(rows), rows), strict=True):
            mean_square(item, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, own in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), own.detach(), rtol=1e-5, atol=1e-6)


@distributed(world_size=2, timeout=60)
def test_hooks_wait_for_the_backward_that_reduces():
    model, seen = shard_layers(build()), []
    model.head.weight.register_hook(lambda grad: seen.append(grad))
    with no_sync(model):
        mean_square(model, local_part(batch(0))).backward()
        assert not seen
    mean_square(model, local_part(batch(1))).backward()
    assert len(seen) == 1


def penalty(model: nn.Module) -> torch.Tensor:
    """Terms of the loss that are computed from parameters themselves: of the same value on every rank."""
    weights = (model.second.weight, model.head.bias)
    whole = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]
    return sum(weight.square().sum() for weight in whole)


LOSSES = {
    "penalty alone": lambda model, rows: penalty(model),
    "penalty and model": lambda model, rows: penalty(model) + mean_square(model, rows),
    "model and penalty": lambda model, rows: mean_square(model, rows) + penalty(model),
    "another group": lambda model, rows: model.second(rows @ torch.ones(6, 10).to(rows)).sum() * 0 + penalty(model),
}


@pytest.mark.parametrize("when", ["before fully_shard", "after module.to"])
@distributed(world_size=2, timeout=60)
def test_gradient_hooks_see_gradients_that_reach_a_parameter_by_itself(when):
    for name, loss in LOSSES.items():
        reference, model = build(), build()
        seen: list[tuple[str, torch.Tensor]] = []

        def register(item: nn.Module, seen: list[Any] = seen) -> None:
            for weight in (item.second.weight, item.head.bias):
                weight.register_hook(lambda grad: seen.append(("gradient", grad.clone())))
                weight.register_hook(lambda grad: grad * 2)
                weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.clone())))

        register(reference)
        if when == "before fully_shard":
            register(model)
        shard_layers(model)
        if when == "after module.to":
            mean_square(model, local_part(batch(0))).backward()
            model.zero_grad()
            register(model)
            model.double()
            reference.double()
            model(local_part(batch(0)).double())  # takes the conversion over
        kind = next(reference.parameters()).dtype
        for step in range(3):  # accumulates
            rows = batch(step).to(kind)
            seen.clear()
            loss(reference, rows).backward()
            expected = sorted(seen, key=lambda item: (item[0], item[1].shape))
            seen.clear()
            loss(model, local_part(rows)).backward()
            actual = sorted(seen, key=lambda item: (item[0], item[1].shape))
            assert [kind for kind, _ in actual] == [kind for kind, _ in expected], (name, step)
            for (_, value), (_, wanted) in zip(actual, expected, strict=True):
                assert isinstance(value, RaggedDTensor), name
                torch.testing.assert_close(value.full_tensor(), wanted)
            for param, wanted in (
                (model.second.weight, reference.second.weight),
                (model.head.bias, reference.head.bias),
            ):
                if wanted.grad is not None:
                    torch.testing.assert_close(param.grad.full_tensor(), wanted.grad)


@distributed(world_size=2, timeout=60)
def test_gradient_hooks_forget_what_an_interrupted_backward_brought():
    model, seen = shard_layers(build()), []
    model.head.bias.register_hook(lambda grad: seen.append(grad.full_tensor()))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("user error")

    leaf = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="user error"):
        (Fails.apply(leaf) + penalty(model)).backward()  # the penalty's nodes are later ones: they run first
    assert not seen and model.head.bias.grad is not None
    assert (
        torch.autograd.grad(penalty(model), model.head.bias)[0].full_tensor().equal(2 * model.head.bias.full_tensor())
    )
    model.zero_grad()
    model.head.bias.grad = distribute_ragged(torch.ones(3), model.head.bias.device_mesh, model.head.bias.placements)
    mean_square(model, local_part(batch(1))).backward()
    reference = build()
    mean_square(reference, batch(1)).backward()
    torch.testing.assert_close(seen, [reference.head.bias.grad])
    torch.testing.assert_close(model.head.bias.grad.full_tensor(), reference.head.bias.grad + 1)


class Pair(nn.Module):
    """Two layers in one flat parameter, of which a forward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
        y = self.a(x)
        return y + self.b(x) if "b" in use else y


def decay(model: nn.Module) -> torch.Tensor:
    """A term of the loss on one parameter, of the same value on every rank."""
    weight = model.b.weight
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).square().sum()


def gradient_of_its_own(model: Pair) -> None:
    weight = model.b.weight
    ours = torch.arange(25.0).view(5, 5)
    is_sharded = isinstance(weight, RaggedDTensor)
    weight.grad = distribute_ragged(ours, weight.device_mesh, weight.placements) if is_sharded else ours


def pair_loss(model: Pair, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
    # An input that requires grad: the group is reduced before the terms that were computed before its forward.
    return model(x.detach().requires_grad_(), use).square().mean()


TERMS: dict[str, Callable[[Pair, torch.Tensor], None]] = {
    "before forward": lambda model, x: (decay(model) + pair_loss(model, x)).backward(),
    "after forward": lambda model, x: (pair_loss(model, x) + decay(model)).backward(),
    "next to an unused parameter": lambda model, x: (decay(model) + pair_loss(model, x, "a")).backward(),
    "by a backward of its own between": lambda model, x: [
        loss.backward() for loss in (pair_loss(model, x), decay(model))[::-1]
    ],
    "as a gradient of the user's between": lambda model, x: [
        item() for loss in (pair_loss(model, x),) for item in (lambda: gradient_of_its_own(model), loss.backward)
    ],
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("hook", [False, True])
@distributed(world_size=2, timeout=60)
def test_terms_of_the_loss_are_added_once_whatever_the_gradient_was_before(hook, flat):
    for name, backward in TERMS.items():
        if flat and "of the user's" in name:
            continue  # refused: see test_a_gradient_assigned_to_a_sharded_parameter_of_a_flat_view_is_refused
        for first in ("nothing", "a", "ab", name):
            twins = Twins(Pair(), fully_shard, plain_sgd)
            if flat:
                flat_parameters(twins.sharded)
            for model in twins.both if hook else ():
                model.b.weight.register_hook(lambda grad: grad * 0.5)
            (x,) = inputs()
            try:
                for model, share in zip(twins.both, (x, local_part(x)), strict=True):
                    if first in ("a", "ab"):
                        pair_loss(model, share, first).backward()
                    elif first == name:
                        backward(model, share)
                    backward(model, share)
                if flat:
                    ours, theirs = (model.parameters() for model in (twins.sharded, twins.reference))
                    for param, expected in zip(ours, theirs, strict=True):
                        if expected.grad is None and param.grad is not None:
                            expected.grad = torch.zeros_like(expected)  # of an unused one next to others
                twins.check_gradients()
            except Exception as error:
                raise AssertionError(f"{name}, after {first}: {error}") from error


@distributed(world_size=2, timeout=60)
def test_an_optimizer_step_inside_a_post_accumulate_hook():
    reference, model = build(), shard_layers(build())
    for item in (reference, model):
        for param in item.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)

            def step(p, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(step)
    for step in range(STEPS):
        rows = batch(step)
        mean_square(reference, rows).backward()
        mean_square(model, local_part(rows)).backward()
    assert_close(full_values(model), full_values(reference))
    assert all(param.grad is None for param in model.parameters())


@distributed(world_size=2, timeout=60)
def test_attributes_of_parameters_move_over_and_survive_conversions():
    model = build()
    model.head.weight.is_special = "yes"
    weight = shard_layers(model).head.weight
    assert weight.is_special == "yes" and model.head.weight is weight
    model.double()
    mean_square(model, local_part(batch(0)).double()).backward()
    assert model.head.weight is weight and weight.is_special == "yes" and weight.dtype == torch.float64


# ---- optimizers built too early


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", ["SGD foreach", "AdamW foreach", "AdamW fused", "Adam loop"])
@distributed(world_size=2, timeout=60)
def test_an_optimizer_built_before_fully_shard_trains(name, steps_before):
    reference, model = build(), build()
    optimizers = [OPTIMIZERS[name](item.parameters()) for item in (reference, model)]

    def train(steps, is_sharded):
        for step in steps:
            rows = batch(step)
            for item, optimizer in zip((reference, model), optimizers, strict=True):
                mean_square(item, local_part(rows) if item is model and is_sharded else rows).backward()
                optimizer.step()
                item.zero_grad()

    train(range(steps_before), is_sharded=False)
    shard_layers(model)
    train(range(steps_before, steps_before + 3), is_sharded=True)
    assert_close(full_values(model), full_values(reference))
    ids = {id(param) for param in model.parameters()}
    assert {id(param) for group in optimizers[1].param_groups for param in group["params"]} == ids
    assert {id(param) for param in optimizers[1].state} == ids


@distributed(world_size=2, timeout=60)
def test_zero_grad_and_grad_scaler_before_the_first_step_of_an_optimizer_built_early():
    reference, model = build(), build()
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (reference, model)]
    shard_layers(model)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(3):
        rows = batch(step)
        parts = zip((reference, model), optimizers, scalers, (rows, local_part(rows)), strict=True)
        for item, optimizer, scaler, data in parts:
            scaler.scale(mean_square(item, data)).backward()
            if step == 0:
                optimizer.zero_grad()
                scaler.scale(mean_square(item, data)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_close(full_values(model), full_values(reference))


@distributed(world_size=2, timeout=60)
def test_old_parameters_added_to_an_optimizer_later_train():
    reference, model = build(), build()
    optimizers, heads = [], []
    for item in (reference, model):
        heads.append(list(item.head.parameters()))
        others = [param for param in item.parameters() if not any(param is other for other in heads[-1])]
        optimizers.append(torch.optim.SGD(others, lr=0.1))
    shard_layers(model)
    for step in range(3):
        rows = batch(step)
        for item, optimizer, head, data in zip(
            (reference, model), optimizers, heads, (rows, local_part(rows)), strict=True
        ):
            if step == 1:
                optimizer.add_param_group({"params": head})
            mean_square(item, data).backward()
            optimizer.step()
            item.zero_grad()
    assert_close(full_values(model), full_values(reference))


@distributed(world_size=2, timeout=60)
def test_an_optimizer_built_before_with_state_that_cannot_be_sharded_raises():
    model = build()
    optimizer = torch.optim.Adafactor(model.parameters())
    mean_square(model, batch(0)).backward()
    optimizer.step()
    model.zero_grad()
    before = [param for group in optimizer.param_groups for param in group["params"]]
    shard_layers(model)
    mean_square(model, local_part(batch(1))).backward()
    with pytest.raises(ValueError, match=r"Adafactor.*first.weight|second.weight"):
        optimizer.step()
    after = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(a is b for a, b in zip(before, after, strict=True))


@distributed(world_size=2, timeout=60)
def test_an_optimizer_built_after_a_warm_up_forward_trains():
    reference, model = build(), shard_layers(build())
    with torch.no_grad():
        model(local_part(batch(0)))
    mean_square(model, local_part(batch(0)))
    optimizers = [torch.optim.AdamW(item.parameters(), lr=0.01, eps=1e-3) for item in (reference, model)]
    for step in range(3):
        rows = batch(step)
        for item, optimizer, data in zip((reference, model), optimizers, (rows, local_part(rows)), strict=True):
            mean_square(item, data).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(full_values(model), full_values(reference))


# ---- meta device, conversions, loading


@pytest.mark.parametrize("build_optimizer", ["before to_empty", "after"])
@distributed(world_size=3, timeout=60)
def test_meta_device_to_empty_initialize_train(build_optimizer):
    reference = build()
    with torch.device("meta"):
        model = Net()
    shard_layers(model)
    assert all(param.is_meta for param in model.parameters())
    ids = [id(param) for param in model.parameters()]
    if build_optimizer == "before to_empty":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with torch.no_grad():
        model.scale.fill_(1.5)
    assert_close(full_values(model), full_values(reference), 0)
    if build_optimizer == "after":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    other = torch.optim.AdamW(reference.parameters(), lr=0.01, eps=1e-3)
    for step in range(3):
        rows = batch(step)
        for item, one, data in ((reference, other, rows), (model, optimizer, local_part(rows))):
            mean_square(item, data).backward()
            one.step()
            one.zero_grad()
    assert_close(full_values(model), full_values(reference))
    assert [id(param) for param in model.parameters()] == ids


def in_even_shards(tensor: DTensor) -> DTensor:
    return distribute_tensor(tensor.full_tensor(), tensor.device_mesh, [Shard(0)]) if tensor.dim() else tensor


@pytest.mark.parametrize("form", ["same", "even shards", "clones", "after to(bf16)"])
@pytest.mark.parametrize("assign", [False, True])
@distributed(world_size=2, timeout=60)
def test_load_state_dict_between_steps(assign, form):
    model, other = shard_layers(build(0)), shard_layers(build(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ids = [id(param) for param in model.parameters()]
    for step in range(4):
        if step == 2:
            if form == "after to(bf16)":
                model.to(torch.bfloat16).to(torch.float32)
            state = other.state_dict()
            if form == "even shards":
                state = {
                    name: distribute_tensor(value.full_tensor(), value.device_mesh, [Shard(0)])
                    if value.dim()
                    else value
                    for name, value in state.items()
                }
            elif form == "clones":
                state = {name: value.clone() for name, value in state.items()}
            model.load_state_dict(state, assign=assign)
            assert [id(param) for param in model.parameters()] == ids
            assert_close(full_values(model), full_values(other), 0)
        mean_square(model, local_part(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    reference = build(1)
    assert not any(
        torch.equal(a, b) for a, b in zip(full_values(model).values(), full_values(reference).values(), strict=True)
    )
    # What training does after the load equals what it does from there in one process, with the momentum there was.
    assert_close(full_values(other), full_values(reference), 0)  # loading did not tie the models together
    twin, start = build(1), build(0)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    start_optimizer = torch.optim.SGD(start.parameters(), lr=0.1, momentum=0.9)
    if form != "after to(bf16)":
        for step in range(4):
            item, one = (start, start_optimizer) if step < 2 else (twin, twin_optimizer)
            if step == 2:
                for a, b in zip(start.parameters(), twin.parameters(), strict=True):
                    twin_optimizer.state[b] = start_optimizer.state[a]
            mean_square(item, batch(step)).backward()
            one.step()
            one.zero_grad()
        assert_close(full_values(model), full_values(twin))


@pytest.mark.parametrize("assign", [False, True])
@distributed(world_size=2, timeout=60)
def test_loading_plain_tensors_takes_whole_values(assign):
    model = shard_layers(build(0))
    ids = [id(param) for param in model.parameters()]
    model.load_state_dict(build(1).state_dict(), assign=assign)
    assert_close(full_values(model), full_values(build(1)), 0)
    assert [id(param) for param in model.parameters()] == ids
    mean_square(model, local_part(batch(0))).backward()


@distributed(world_size=2, timeout=60)
def test_model_to_dtype_between_steps():
    reference, model = build(), shard_layers(build())
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (reference, model)]
    for step in range(4):
        rows = batch(step)
        if step == 2:
            reference.double()
            model.double()
        kind = torch.float64 if step >= 2 else torch.float32
        for item, optimizer, data in zip((reference, model), optimizers, (rows, local_part(rows)), strict=True):
            mean_square(item, data.to(kind)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(full_values(model), full_values(reference))


# ---- state dicts and checkpoints


@distributed(world_size=2, timeout=60)
def test_state_dict_holds_dtensors_over_the_live_shards_without_communication():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FSDP_COMPOSE_TRANSPORT", "collectives")  # which are what is counted
        check_that_a_state_dict_is_without_communication()


def check_that_a_state_dict_is_without_communication():
    model = shard_layers(build())
    with CommDebugMode() as comm:
        state = model.state_dict()
    assert comm.get_total_counts() == 0
    with CommDebugMode() as comm:
        model.second.weight.full_tensor()
    assert comm.get_total_counts() > 0, "it would have been seen"
    for name, param in model.named_parameters():
        assert isinstance(state[name], DTensor) and not state[name].requires_grad
        assert state[name].to_local().data_ptr() == param.to_local().data_ptr()
        assert state[name].shape == build().state_dict()[name].shape


GRANULARITY = {"planner's choice": None, "rows": lambda fqn, param: "rows", "elements": lambda fqn, param: 4}


@pytest.mark.parametrize("granularity", GRANULARITY)
@pytest.mark.parametrize("how", ["save", "async_save", "plain state dicts"])
@distributed(world_size=4, timeout=90)
def test_checkpoints_load_at_another_world_size_bit_exact(how, granularity):
    if dist.get_rank() == 0:
        folder = [tempfile.mkdtemp()]
    else:
        folder = [None]
    dist.broadcast_object_list(folder)
    path = Path(folder[0])
    rule = GRANULARITY[granularity]
    trained, optimizer = _train_on(init_device_mesh("cpu", (4,)), rule, seed=0, steps=2)
    expected = full_values(trained)
    expected_state = {
        (name, key): value.full_tensor() if isinstance(value, DTensor) else value
        for name, param in trained.named_parameters()
        for key, value in optimizer.state[param].items()
    }
    if how == "plain state dicts":
        dcp.save({"model": trained.state_dict()}, checkpoint_id=path)
    else:
        model_state, optimizer_state = get_state_dict(trained, optimizer)
        if how == "save":
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
        else:
            future = dcp.async_save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
            future.result()
    dist.barrier()
    # Two ranks, other shards: the process groups of ranks 0 and 1, and of 2 and 3, load independently.
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("which", "shard"))
    mesh = pairs["shard"]
    model, other = _train_on(mesh, rule, seed=1, steps=1)
    group = mesh.get_group()
    if how == "plain state dicts":
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path, process_group=group)
        model.load_state_dict(state["model"])
    else:
        model_state, optimizer_state = get_state_dict(model, other)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path, process_group=group)
        set_state_dict(model, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loaded = {
            (name, key): value.full_tensor() if isinstance(value, DTensor) else value
            for name, param in model.named_parameters()
            for key, value in other.state[param].items()
        }
        assert loaded.keys() == expected_state.keys()
        for key, value in expected_state.items():
            assert torch.equal(loaded[key], value), key
        for param, entries in other.state.items():
            assert isinstance(entries["exp_avg"], RaggedDTensor) and entries["exp_avg"].placements == param.placements
    actual = full_values(model)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def _train_on(mesh, granularity, seed, steps):
    model = build(seed)
    fully_shard(model.second, mesh=mesh, granularity=granularity)
    fully_shard(model, mesh=mesh, granularity=granularity)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        mean_square(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@distributed(world_size=2, timeout=60)
def test_full_state_dicts_of_torch_load():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, source = shard_layers(build(0)), build(1)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    for name, value in build(0).state_dict().items():
        assert torch.equal(state[name], value), name
    matrices = {name: value for name, value in source.state_dict().items() if value.dim()}
    set_model_state_dict(model, matrices, options=StateDictOptions(full_state_dict=True, strict=False))
    actual = full_values(model)
    for name, value in build(1).state_dict().items():
        assert torch.equal(actual[name], value), name


@distributed(world_size=3, timeout=60)
def test_parameters_gradients_and_optimizer_state_are_ragged_and_views_of_the_flat_shard():
    model = shard_layers(build())
    optimizer = torch.optim.AdamW(model.parameters())
    mean_square(model, local_part(batch(0))).backward()
    optimizer.step()
    for handle in _get_fsdp_handles(model):
        shard_memory, gradients = handle.shard.untyped_storage().data_ptr(), set()
        for sharded in handle.sharded_params:
            assert type(sharded) is type(sharded.grad) is RaggedDTensor
            assert sharded.to_local().untyped_storage().data_ptr() == shard_memory
            gradients.add(sharded.grad.to_local().untyped_storage().data_ptr())
            for key in ("exp_avg", "exp_avg_sq"):
                assert type(optimizer.state[sharded][key]) is RaggedDTensor
        assert len(gradients) == 1  # one flat gradient
    before = {id(param.grad) for param in model.parameters()}
    optimizer.zero_grad()
    mean_square(model, local_part(batch(0))).backward()
    assert {id(param.grad) for param in model.parameters()} == before  # recycled: they were not held


@distributed(world_size=2, timeout=60)
def test_a_parameter_can_be_copied_and_is_a_parameter():
    model = shard_layers(build())
    weight = model.head.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, DTensor) and type(weight) is RaggedDTensor
    assert weight.shape == (3, 10) and weight.is_leaf and weight.requires_grad
    twin = copy.deepcopy(weight)
    assert isinstance(twin, nn.Parameter) and torch.equal(twin.full_tensor(), weight.full_tensor())
    with torch.no_grad():
        weight.copy_(distribute_ragged(torch.ones(3, 10), weight.device_mesh, weight.placements))
    assert twin.full_tensor().abs().max() < 1
    mean_square(model, local_part(batch(0))).backward()
    assert isinstance(weight.grad, RaggedDTensor) and weight.grad.placements == weight.placements
    assert fsdp_compose.RaggedDTensor is RaggedDTensor

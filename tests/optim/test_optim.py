"""Flat views: optimizers over whole shards, and clipping over whole flat gradients."""

from __future__ import annotations

import copy
import gc
import math
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_compose import (
    MixedPrecisionPolicy,
    RaggedDTensor,
    clip_grad_norm_,
    declare_elementwise,
    flat_parameters,
    fully_shard,
    no_sync,
    replicate,
)
from fsdp_compose.core.group.registry import _get_fsdp_handles
from fsdp_compose.core.optimizers import clip_grad
from tests.harness import distributed, fake_process_group
from tests.models import shard_layers
from tests.training import assert_same_parameters, full_values

STEPS = 2


class Net(nn.Module):
    """Rows, odd sizes, a scalar, and parameters that are used only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 10)
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.extra, self.aside = nn.Linear(10, 3), nn.Linear(10, 3)

    @property
    def layers(self) -> list[nn.Module]:
        """Modules that get a group of their own."""
        return [self.second, self.aside]

    def forward(self, x: torch.Tensor, with_extra: bool = True, with_aside: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.norm(x + torch.tanh(self.second(x)))
        y = self.head(x) * self.scale
        y = y + self.extra(x) if with_extra else y
        return y + self.aside(x) if with_aside else y


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def mine(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """This rank's two rows of a batch."""
    return batch(step).to(dtype).chunk(dist.get_world_size())[dist.get_rank()]


def batch(step: int) -> torch.Tensor:
    return torch.randn(dist.get_world_size() * 2, 6, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, rows: torch.Tensor, **used: bool) -> None:
    model(rows, **used).square().mean().backward()


def agree(value: torch.Tensor) -> bool:
    """Whether all ranks have this very number."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return all(torch.equal(item, value) for item in values)


def is_matrix(_fqn: str, param: nn.Parameter) -> bool:
    return param.ndim > 1


def is_no_matrix(_fqn: str, param: nn.Parameter) -> bool:
    return param.ndim <= 1


# ---- training

Make = Callable[..., torch.optim.Optimizer]

ELEMENTWISE: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, ("fused",)),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3, "amsgrad": True}, ("fused",)),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}, ("fused",)),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, ("fused",)),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}, ()),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01, "eps": 1e-3}, ()),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-3}, ()),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01, "eps": 1e-3}, ()),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}, ()),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "momentum": 0.5, "centered": True}, ()),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}, ()),
}


@distributed(world_size=(2, 3), timeout=240)
def test_flat_training_equals_training_of_sharded_parameters_bit_for_bit(world_size):
    warnings.simplefilter("ignore")
    for name in ELEMENTWISE if world_size == 3 else ("SGD", "AdamW"):
        cls, options, more = ELEMENTWISE[name]
        for mode in ("foreach", "loop", *more):
            flags = {"foreach": False} if mode == "loop" else {mode: True}
            # torch 2.13 has no rules for these on stock DTensors.
            local = name == "Rprop" or (mode == "fused" and name in ("SGD", "Adagrad"))
            reference, sharded, flat = build(), shard_layers(build()), shard_layers(build())
            tensors = [list(sharded.parameters()), flat_parameters(flat, local=local), list(reference.parameters())]
            models = [sharded, flat, reference] if mode == "foreach" else [sharded, flat]
            optimizers = [cls(item, **options, **flags) for item in tensors]
            for step in range(STEPS):
                for model, optimizer in zip(models, optimizers, strict=False):
                    backward(model, batch(step) if model is reference else mine(step))
                    optimizer.step()
                    optimizer.zero_grad()
            try:
                # Fused CPU kernels round the last few elements of a tensor in another way than the others.
                tolerance = 1e-6 if mode == "fused" else 0.0
                assert_same_parameters(flat, sharded, tolerance, relative=tolerance)
                # Rprop follows the signs of gradients, which rounding may flip where they are nearly zero.
                if mode == "foreach":
                    assert_same_parameters(flat, reference, tolerance=1e-4, relative=1e-4)
            except AssertionError as error:
                raise AssertionError(f"{name} {mode}: {error}") from error
            for handle in _get_fsdp_handles(flat):
                assert torch.equal(handle.shard, padded_with_zeros(handle))


def padded_with_zeros(handle: Any) -> torch.Tensor:
    result = torch.zeros_like(handle.shard)
    for start, stop, _ in handle.local_shards:
        result[start:stop] = handle.shard[start:stop]
    return result


@distributed(world_size=3)
def test_flat_views_are_few_leaves_over_the_shards():
    model = shard_layers(build())
    flat = flat_parameters(model)
    handles = _get_fsdp_handles(model)
    assert len(flat) == len(handles) == 3
    for param, handle in zip(flat, handles, strict=True):
        assert type(param) is DTensor and isinstance(param, nn.Parameter) and param.is_leaf and param.requires_grad
        assert param.placements == (Shard(0),) and param.shape == (handle.layout.flat_numel,)
        assert param.to_local().data_ptr() == handle.shard.data_ptr()
        first = handle.sharded_params[0]
        assert torch.equal(param.full_tensor()[: first.numel()], first.full_tensor().flatten())
    assert all(a is b for a, b in zip(flat, flat_parameters(model), strict=True))
    backward(model, mine(0))
    assert all(a is b for a, b in zip(flat, flat_parameters(model), strict=True))
    for param, handle in zip(flat, handles, strict=True):
        for sharded, (start, stop, _) in zip(handle.sharded_params, handle.local_shards, strict=True):
            local = sharded.grad.to_local()
            assert torch.equal(local.flatten(), param.grad.to_local()[start:stop])
            assert local.untyped_storage().data_ptr() == param.grad.to_local().untyped_storage().data_ptr()
    (part,) = flat_parameters(shard_layers(build()).second)
    assert part.shape == (flat[1].shape)


@distributed(world_size=(2, 3))
def test_parameter_groups_are_ragged_rows_of_neighbours():
    reference, model = build(), shard_layers(build())
    groups = [flat_parameters(model, where) for where in (is_matrix, is_no_matrix)]
    assert all(isinstance(item, RaggedDTensor) and item.ndim == 1 for group in groups for item in group)
    selected = sum(item.numel() for item in groups[0])
    assert selected == sum(param.numel() for param in model.parameters() if param.ndim > 1)  # no padding inside
    assert len(groups[1]) < sum(param.ndim <= 1 for param in model.parameters())
    assert groups[0] == [] or all(a is b for a, b in zip(groups[0], flat_parameters(model, is_matrix), strict=True))
    assert flat_parameters(model, lambda fqn, param: False) == []
    with pytest.raises(ValueError, match=r"first\.weight is already in a flat view.*other neighbors"):
        flat_parameters(model)
    with pytest.raises(ValueError, match=r"first\.weight is already .*local=False"):
        flat_parameters(model, is_matrix, local=True)
    optimizers = [
        torch.optim.AdamW([{"params": a}, {"params": b, "weight_decay": 0.0}], lr=0.01, eps=1e-3, weight_decay=0.5)
        for a, b in (
            groups,
            [[p for p in reference.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False)],
        )
    ]
    for step in range(STEPS):
        for item, optimizer, rows in zip((model, reference), optimizers, (mine(step), batch(step)), strict=True):
            backward(item, rows)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, tolerance=1e-5, relative=1e-5)


@distributed(world_size=3)
def test_mixed_dtypes_frozen_and_unmanaged_parameters_train():
    def make() -> Net:
        model = build()
        model.second.bfloat16()
        model.first.weight.requires_grad_(False)
        model.head.bias.requires_grad_(False)
        model.second.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        return model

    models, tensors = [], []
    for is_flat in (True, False):
        model = make()
        fully_shard(model, ignored_params=[model.scale])
        model.norm.bias.requires_grad_(False)  # of a handle whose other parameters are trained
        models.append(model)
        tensors.append(flat_parameters(model) if is_flat else [p for p in model.parameters() if p.requires_grad])
    flat, sharded = models
    assert sum(item is flat.scale for item in tensors[0]) == 1
    assert {item.dtype for item in tensors[0]} == {torch.float32, torch.bfloat16}
    assert sum(type(item) is DTensor for item in tensors[0]) == 1  # the bfloat16 one, whole
    optimizers = [torch.optim.AdamW(item, lr=0.01, foreach=True) for item in tensors]
    frozen = [full_values(flat)[name] for name in ("first.weight", "norm.bias")]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, mine(step))
            dist.all_reduce(model.scale.grad)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(flat, sharded, tolerance=0)
    assert all(
        torch.equal(a, full_values(flat)[name]) for a, name in zip(frozen, ("first.weight", "norm.bias"), strict=True)
    )


@distributed(world_size=2)
def test_an_unused_part_has_no_gradient_or_zeros_next_to_others():
    model = shard_layers(build())
    flat = flat_parameters(model)
    optimizer = torch.optim.AdamW(flat, lr=0.01, weight_decay=0.1)
    before = full_values(model)
    backward(model, mine(0), with_extra=dist.get_rank() == 1, with_aside=False)  # one rank is enough
    assert model.extra.weight.grad is not None
    optimizer.zero_grad()
    backward(model, mine(0), with_extra=False, with_aside=False)
    root, _, aside = flat
    assert aside.grad is None and model.aside.weight.grad is None
    assert model.extra.weight.grad is None and root.grad is not None
    optimizer.step()
    after = full_values(model)
    assert torch.equal(after["aside.weight"], before["aside.weight"])
    assert not torch.equal(after["extra.weight"], before["extra.weight"])  # weight decay
    torch.testing.assert_close(after["extra.weight"], before["extra.weight"] * (1 - 0.01 * 0.1))


# ---- one owner of the gradient


@distributed(world_size=2)
def test_zero_grad_of_either_side_drops_both():
    expected = {}
    reference = shard_layers(build())
    backward(reference, mine(1))
    expected = {name: param.grad.full_tensor() for name, param in reference.named_parameters()}
    for side in ("flat", "model", "between", "by hand"):
        model = shard_layers(build())
        flat = flat_parameters(model)
        optimizer = torch.optim.SGD(flat, lr=0.1)
        backward(model, mine(0))
        loss = model(mine(1)).square().mean() if side == "between" else None
        if side in ("flat", "between"):
            optimizer.zero_grad()
        elif side == "model":
            model.zero_grad()
            before = full_values(model)
            optimizer.step()  # of nothing
            assert all(torch.equal(a, b) for a, b in zip(full_values(model).values(), before.values(), strict=True))
            assert all(item.grad is None for item in flat)
        else:
            for param in [*model.parameters(), *flat]:
                param.grad = None
        if loss is None:
            loss = model(mine(1)).square().mean()
            assert all(param.grad is None for param in [*model.parameters(), *flat]), side
        loss.backward()
        for name, param in model.named_parameters():
            assert torch.equal(param.grad.full_tensor(), expected[name]), (side, name)


@pytest.mark.parametrize("how", ["whole model", "another root", "without sync", "alone"])
@distributed(world_size=2)
def test_zero_grad_drops_terms_of_the_loss_on_parameters_whose_group_was_not_reduced(how):
    model, expected = shard_layers(build()), shard_layers(build())
    flat = flat_parameters(model)
    optimizer = torch.optim.SGD(flat, lr=0.1)
    for step in range(2):  # the second adds to what there is
        term = model.aside.weight.full_tensor().square().sum()
        with no_sync(model) if how == "without sync" else nullcontext():
            if how == "another root":
                term = term + model.second(torch.ones(2, 10)).sum()
            elif how != "alone":
                term = term + model(mine(step), with_aside=False).square().mean()
            term.backward()
        assert model.aside.weight.grad is not None and flat[2].grad is not None
    optimizer.zero_grad()
    if how == "another root":
        model.second(torch.ones(2, 10)).sum().backward()
        optimizer.zero_grad()
    for each in (model, expected):
        backward(each, mine(9))
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad.full_tensor())


@distributed(world_size=2)
def test_one_dropped_parameter_contributes_nothing():
    models = [shard_layers(build()) for _ in range(2)]
    tensors = [flat_parameters(models[0]), list(models[1].parameters())]
    for model, item in zip(models, tensors, strict=True):
        optimizer = torch.optim.SGD(item, lr=0.1)
        backward(model, mine(0))
        model.first.weight.grad = None
        model.head.weight.grad.mul_(2)  # an edit in place
        optimizer.step()
    assert_same_parameters(*models, tolerance=0)
    assert models[0].first.weight.grad is None


@distributed(world_size=2)
def test_accumulation_with_and_without_no_sync():
    for without_sync in (False, True):
        models = [shard_layers(build()) for _ in range(2)]
        tensors = [flat_parameters(models[0]), list(models[1].parameters())]
        for model, item in zip(models, tensors, strict=True):
            optimizer = torch.optim.AdamW(item, lr=0.01, eps=1e-3)
            for step in range(4):
                if without_sync and step % 2 == 0:
                    with no_sync(model):
                        backward(model, mine(step), with_extra=False)
                else:
                    backward(model, mine(step), with_extra=step % 2 == 1)
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        assert_same_parameters(*models, tolerance=0)


@distributed(world_size=2)
def test_a_gradient_that_the_user_holds_stays_his():
    model = shard_layers(build())
    flat = flat_parameters(model)
    for hold in (lambda: flat[0].grad, lambda: flat[0].grad.to_local(), lambda: model.first.weight.grad):
        backward(model, mine(0))
        held = hold()
        expected = copy.deepcopy(held.full_tensor() if isinstance(held, DTensor) else held)
        for param in flat:
            param.grad = None
        backward(model, mine(1))
        assert torch.equal(held.full_tensor() if isinstance(held, DTensor) else held, expected)
        assert flat[0].grad is not held
        model.zero_grad()
    del held
    backward(model, mine(0))
    memory = flat[0].grad.to_local().data_ptr()
    for _ in range(2):  # nothing is held: recycled
        grad = id(flat[0].grad)
        model.zero_grad()
        backward(model, mine(1))
        assert id(flat[0].grad) == grad
    assert memory


@distributed(world_size=2)
def test_gradients_that_the_user_puts_in_place_are_honoured():
    def replace_data(model: Net, flat: list[Any] | None) -> None:
        model.first.weight.grad.data = model.first.weight.grad.data * 3

    def replace_flat(model: Net, flat: list[Any] | None) -> None:
        for param in flat if flat is not None else model.parameters():
            param.grad = param.grad * 2

    for replace in (replace_data, replace_flat):
        for then_accumulate in (False, True):
            models = [shard_layers(build()) for _ in range(2)]
            for model in models:
                flat = flat_parameters(model) if model is models[0] else None
                optimizer = torch.optim.SGD(flat or model.parameters(), lr=0.1)
                for step in range(2):
                    backward(model, mine(step))
                    replace(model, flat)
                    if then_accumulate:
                        backward(model, mine(9))
                    optimizer.step()
                    optimizer.zero_grad()
            try:
                assert_same_parameters(*models, tolerance=0)
            except AssertionError as error:
                raise AssertionError(f"{replace.__name__}, accumulating {then_accumulate}: {error}") from error


@pytest.mark.parametrize("look", ["forward", "backward", "step", "clipping"])
@pytest.mark.parametrize("how", ["next to ours", "with none of ours", "next to one given to the flat view"])
@distributed(world_size=2)
def test_a_gradient_assigned_to_a_sharded_parameter_of_a_flat_view_is_refused(look, how):
    """What looks at the flat view before the step would pass it by: ``GradScaler.unscale_()``, torch's clipping."""
    model = shard_layers(build())
    flat = flat_parameters(model)
    optimizer = torch.optim.SGD(flat, lr=0.1)
    backward(model, mine(0))
    loss = model(mine(1)).square().mean()
    before = [param.full_tensor().detach().clone() for param in flat]
    grad = model.first.weight.grad * 2
    if how == "with none of ours":
        for param in flat:
            param.grad = None
    elif how != "next to ours":
        flat[0].grad = flat[0].grad * 2
    model.first.weight.grad = grad
    looks = {
        "forward": lambda: model(mine(2)),
        "backward": loss.backward,
        "step": optimizer.step,
        "clipping": lambda: clip_grad_norm_(flat, 0.1),
    }
    with pytest.raises(RuntimeError, match=r"first\.weight was assigned to.*begins with scale"):
        looks[look]()
    assert all(torch.equal(param.full_tensor(), old) for param, old in zip(flat, before, strict=True))
    assert model.first.weight.grad is grad


@distributed(world_size=2)
def test_gradients_changed_in_place_reach_the_grad_scaler_and_clipping_of_torch():
    models = [build(), shard_layers(build())]
    flat = flat_parameters(models[1])
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in (models[0].parameters(), flat)]
    for model, optimizer, rows in zip(models, optimizers, (batch(0), mine(0)), strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(rows).square().mean()).backward()
        model.first.weight.grad.mul_(3)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(flat if optimizer is optimizers[1] else model.parameters(), 0.5)
        scaler.step(optimizer)
    assert_same_parameters(models[1], models[0], tolerance=1e-5, relative=1e-5)


@distributed(world_size=2)
def test_terms_of_the_loss_on_a_flat_view():
    models = [shard_layers(build()) for _ in range(2)]
    flat = flat_parameters(models[0])
    optimizers = [torch.optim.SGD(item, lr=0.1) for item in (flat, models[1].parameters())]
    for step in range(4):
        loss = models[0](mine(step)).square().mean()
        (loss + sum(param.square().sum().full_tensor() for param in flat)).backward()
        loss = models[1](mine(step)).square().mean()
        (loss + sum(param.square().sum().full_tensor() for param in models[1].parameters())).backward()
        if step != 1:  # once accumulating
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_parameters(*models, tolerance=1e-5, relative=1e-5)


@distributed(world_size=2)
def test_hooks_on_flat_views_run_once_per_reducing_backward():
    models = [shard_layers(build()) for _ in range(2)]
    flat, seen = flat_parameters(models[0]), []
    for param in flat:
        param.register_hook(lambda grad: seen.append("gradient") or grad * 2)
        param.register_post_accumulate_grad_hook(lambda param: seen.append("after"))
    models[0].first.weight.register_hook(lambda grad: seen.append("sharded parameter"))
    for step in range(2):  # the second accumulates
        seen.clear()
        backward(models[0], mine(step))
        assert sorted(seen) == ["after"] * 3 + ["gradient"] * 3 + ["sharded parameter"]
        backward(models[1], mine(step))
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad.full_tensor() * 2)
    seen.clear()
    with no_sync(models[0]):
        backward(models[0], mine(0))
    assert seen == []


@pytest.mark.parametrize("hooked", ["weight", "bias"])
@distributed(world_size=2)
def test_terms_of_the_loss_on_parameters_of_a_flat_view_that_is_being_reduced(hooked):
    reference, model = build(), shard_layers(build())
    views, terms = flat_parameters(model), {}
    for item in (reference, model):
        getattr(item.aside, hooked).register_hook(lambda grad: grad * 2)

        def note(*_: Any, item: Net = item) -> None:
            params = [param.to_local() if item is model else param for param in item.aside.parameters()]
            terms[item] = sum(param.square().sum() for param in params)

        item.extra.register_forward_pre_hook(note)  # backward comes to the terms when that layer's own is over
    for step in range(3):
        for item, rows in ((reference, batch(step)), (model, mine(step))):
            (item(rows).square().mean() + terms[item]).backward()
        for (name, param), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert torch.allclose(param.grad.full_tensor(), wanted.grad, atol=1e-5), (name, step)
        reference.aside.weight.grad = model.aside.weight.grad = None  # the gradients beside it accumulate
    assert all(view.grad is not None for view in views)


@distributed(world_size=2)
def test_an_optimizer_step_inside_a_post_accumulate_hook():
    models = [shard_layers(build()) for _ in range(2)]
    for param in flat_parameters(models[0]):
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)

        def step(_param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    for index in range(STEPS):
        backward(models[0], mine(index))
        backward(models[1], mine(index))
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(*models, tolerance=0)


# ---- edits, moves, freezing


@distributed(world_size=2)
def test_a_step_between_forward_and_backward_raises():
    for local in (False, True):
        for flags in ({"fused": True}, {"foreach": True}, {"foreach": False}):
            model = shard_layers(build())
            flat = flat_parameters(model, local=local)
            optimizer = torch.optim.AdamW(flat, lr=0.01, **flags)
            backward(model, mine(0))
            loss = model(mine(1)).square().mean()
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified .*between a forward and its backward"):
                loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of recovery
            loss = model(mine(1)).square().mean()
        with torch.no_grad():
            flat[0].mul_(0.5)
        with pytest.raises(RuntimeError, match="modified .*between a forward and its backward"):
            loss.backward()


@distributed(world_size=2)
def test_flat_views_follow_a_model_that_is_moved_or_loaded():
    def assign(model: Net) -> None:
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)

    def materialise(model: Net) -> None:
        model.to_empty(device="cpu")
        with torch.no_grad():
            for i, param in enumerate(model.parameters()):
                param.fill_(0.01 * i)

    for change, dtype in ((lambda model: model.double(), torch.float64), (assign, None), (materialise, None)):
        for local in (False, True):
            models = []
            for is_flat in (True, False):
                with torch.device("meta" if change is materialise else "cpu"):
                    model = build()
                models.append(shard_layers(model))
                flat = flat_parameters(model, local=local) if is_flat else list(model.parameters())
                ids, calls = [*map(id, flat)], []
                flat[0].register_post_accumulate_grad_hook(lambda _, calls=calls: calls.append(1))
                optimizer = torch.optim.SGD(flat, lr=0.1, momentum=0.9)
                rows = mine(0)
                if change is not materialise:
                    backward(model, rows)
                    optimizer.step()
                    optimizer.state.clear()  # of the old dtype
                    optimizer.zero_grad()
                change(model)
                if is_flat:
                    with pytest.raises(RuntimeError, match=r"moved, converted or assigned.*next forward: run one"):
                        optimizer.step()
                for step in range(2):
                    backward(model, rows.to(dtype or torch.float32), with_extra=bool(step))
                    optimizer.step()
                    optimizer.zero_grad()
                assert [*map(id, flat)] == ids and all(param.grad is None for param in flat)
                assert len(calls) == (2 if change is materialise else 3)
                if is_flat:
                    assert all(a is b for a, b in zip(flat, flat_parameters(model, local=local), strict=True))
                    assert dtype is None or flat[0].dtype == dtype
            assert_same_parameters(*models, tolerance=0)


@distributed(world_size=2)
def test_a_step_after_loading_by_assignment_where_a_rank_has_no_elements():
    models = [fully_shard(nn.Linear(3, 3, bias=False), granularity=lambda *_: "whole") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, params in zip(models, (models[0].parameters(), flat_parameters(models[1])), strict=True):
        optimizer = torch.optim.SGD(params, lr=0.1)
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert_same_parameters(*models, tolerance=0)


@distributed(world_size=2)
def test_freezing_a_part_of_a_flat_view_is_refused_and_freezing_all_of_it_is_not():
    model = shard_layers(build())
    optimizer = torch.optim.AdamW(flat_parameters(model), lr=0.1)
    model.second.requires_grad_(False)
    before = full_values(model)
    backward(model, mine(0))
    optimizer.step()
    optimizer.zero_grad()
    after = full_values(model)
    assert torch.equal(after["second.weight"], before["second.weight"])
    assert not torch.equal(after["first.weight"], before["first.weight"])
    model.first.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad of first\.bias is now False and that of .* is True"):
        model(mine(0))
    model.first.bias.requires_grad_(True)
    backward(model, mine(0))
    optimizer.step()


@distributed(world_size=2)
def test_local_flat_views_are_plain_tensors():
    models = [shard_layers(build()) for _ in range(2)]
    flat = flat_parameters(models[0], local=True)
    assert all(type(param) is nn.Parameter for param in flat)
    for model, item in zip(models, (flat, list(models[1].parameters())), strict=True):
        optimizer = torch.optim.AdamW(item, lr=0.01, fused=True)
        for step in range(STEPS):
            backward(model, mine(step))
            total = clip_grad_norm_(item, 0.1)
            assert agree(total)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(*models, tolerance=1e-6, relative=1e-6)


# ---- refusals


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad.sign(), alpha=-group["lr"])


class MyAdamW(torch.optim.AdamW):
    pass


def test_optimizers_that_need_shapes_are_refused_before_anything_changes():
    with fake_process_group(world_size=2):
        model = shard_layers(build())
        flat = flat_parameters(model)
        backward(model, torch.ones(2, 6))
        before = [handle.shard.clone() for handle in _get_fsdp_handles(model)]

        class Undeclared(Lion):
            pass

        refused = [
            (lambda: torch.optim.Adafactor(flat), "rows and columns"),
            (lambda: torch.optim.LBFGS(flat), "inner products"),
            (lambda: Undeclared(flat), r"declare_elementwise\(Undeclared\)"),
        ]
        for make, reason in refused:
            optimizer = make()
            with pytest.raises(TypeError, match=reason):
                optimizer.step() if not isinstance(optimizer, torch.optim.LBFGS) else optimizer.step(lambda: 0.0)
            assert not optimizer.state
        for handle, content in zip(_get_fsdp_handles(model), before, strict=True):
            assert torch.equal(handle.shard, content)
        MyAdamW(flat).step()
        assert declare_elementwise(Undeclared) is Undeclared
        Undeclared(flat).step()
        with pytest.raises(ValueError, match="orthogonalizes"):
            declare_elementwise(torch.optim.Muon)
        with pytest.raises(TypeError, match="Optimizer"):
            declare_elementwise(Net)


def test_wrong_arguments_say_what_was_expected():
    with fake_process_group(world_size=2):
        with pytest.raises(ValueError, match=r"no parameter of this Net is sharded"):
            flat_parameters(build())
        with pytest.raises(TypeError, match=r"expected an nn\.Module, got list"):
            flat_parameters([build()])
        model = shard_layers(build())
        with pytest.raises(TypeError, match="where="):
            flat_parameters(model, where="bias")
        model.head.register_forward_hook(lambda *_: flat_parameters(model))
        with pytest.raises(RuntimeError, match="inside forward"):
            model(torch.ones(2, 6))
        flat = flat_parameters(shard_layers(build()))
        backward(model := shard_layers(build()), torch.ones(2, 6))
        flat = flat_parameters(model, local=True)
        flat[0].data = flat[0].data.clone()
        with pytest.raises(RuntimeError, match=r"\.data of a flat view over scale and"):
            torch.optim.SGD(flat).step()


# ---- clipping, scaling, checkpoints


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf, 0.0, 3.5, -math.inf])
@distributed(world_size=3)
def test_clipping_is_the_same_by_sharded_parameters_by_flat_views_and_unsharded(order):
    reference = build()
    backward(reference, batch(0), with_aside=False, with_extra=False)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, order)
    ways = ["sharded"] if order == 0 else ["sharded", "flat", "local", "groups", "torch's, flat"]  # 0 counts tensors
    for way in ways:
        model = shard_layers(build())
        items: list[Any] = list(model.parameters())
        if way == "groups":
            items = [*flat_parameters(model, is_matrix), *flat_parameters(model, is_no_matrix)]
        elif way != "sharded":
            items = flat_parameters(model, local=way == "local")
        backward(model, mine(0), with_aside=False, with_extra=False)
        if way == "torch's, flat":
            if order < 0:
                continue  # to torch, padding is an element
            total = nn.utils.clip_grad_norm_(items, 0.05, order).full_tensor()
        else:
            with CommDebugMode() as communication:
                total = clip_grad_norm_(items, 0.05, order)
            assert communication.get_total_counts() == 1, (way, communication.get_comm_counts())
        assert agree(total)
        torch.testing.assert_close(total, expected, msg=way)
        for (name, param), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (wanted.grad is None)
            if wanted.grad is not None:
                torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, msg=f"{way} {name}")


def test_clipping_scales_whole_flat_gradients(monkeypatch):
    scaled = []
    original = clip_grad.foreach_mul_
    monkeypatch.setattr(clip_grad, "foreach_mul_", lambda tensors, by: scaled.extend(tensors) or original(tensors, by))
    with fake_process_group(world_size=2):
        model = shard_layers(build())
        backward(model, torch.ones(2, 6), with_aside=False)
        params = list(model.parameters())
        for items in (params, params[::-1], [*params, nn.Parameter(torch.ones(3))]):
            scaled.clear()
            clip_grad_norm_(items, 1.0)
            used = _get_fsdp_handles(model)[:2]
            assert sorted(item.numel() for item in scaled) == sorted(item.layout.shard_numel for item in used)
        scaled.clear()
        clip_grad_norm_(params[1:], 1.0)
        assert len(scaled) > 2


@pytest.mark.parametrize("flat", [False, True])
@distributed(world_size=2)
def test_clipping_without_gradients_whose_memory_was_freed(flat):
    """``zero_grad()`` and a forward, whose backward never comes: the flat gradient has no memory then."""
    model = shard_layers(build())
    items = flat_parameters(model) if flat else list(model.parameters())
    backward(model, mine(0))
    model.zero_grad()
    with torch.no_grad():
        model(mine(0))
    assert not any(handle.gradient.memory.is_allocated for handle in _get_fsdp_handles(model))
    assert clip_grad_norm_(items, 0.1) == 0
    backward(model, mine(0))
    assert clip_grad_norm_(items, 0.1) > 0


@distributed(world_size=2)
def test_clipping_falls_back_where_gradients_are_not_all_ours():
    reference = build()
    backward(reference, batch(0))
    for case in ("some", "twice", "replaced", "data"):
        model, expected = shard_layers(build()), copy.deepcopy(reference)
        backward(model, mine(0))
        for grads, params in ((False, model), (True, expected)):
            for source, param in zip(reference.parameters(), params.parameters(), strict=True):
                if grads:
                    param.grad = source.grad.clone()
        if dist.get_rank() == 0 and case == "replaced":  # on one rank: the collectives are the same
            model.first.weight.grad = model.first.weight.grad.clone()
        elif case == "data":
            model.first.weight.grad.data = model.first.weight.grad.data * 3
            expected.first.weight.grad *= 3
        chosen = [
            [p for p in item.parameters() if case != "some" or p.ndim > 1] * (1 + (case == "twice"))
            for item in (model, expected)
        ]
        totals = [
            clip(item, 0.1) for clip, item in zip((clip_grad_norm_, nn.utils.clip_grad_norm_), chosen, strict=True)
        ]
        torch.testing.assert_close(*totals)
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@distributed(world_size=2)
def test_clipping_finds_the_gradients_of_parameters_that_fully_shard_has_replaced():
    reference, model = build(), build()
    old, kept = list(model.parameters()), list(reference.parameters())
    shard_layers(model)
    for max_norm in (1e-3, 2e-3):
        backward(reference, batch(0))
        backward(model, mine(0))
        expected = clip_grad_norm_(kept, max_norm)
        got = clip_grad_norm_(old, max_norm)
        torch.testing.assert_close(got, expected)
        for ours, theirs in zip(model.parameters(), kept, strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    with no_sync(model):
        backward(model, mine(0))
    with pytest.raises(RuntimeError, match="has not been reduced"):
        clip_grad_norm_(old, 1.0)


@distributed(world_size=2)
def test_clipping_of_nan_and_inf():
    for value in (math.nan, math.inf):
        for is_flat in (False, True):
            model = shard_layers(build())
            items = flat_parameters(model) if is_flat else list(model.parameters())
            backward(model, mine(0), with_extra=False)
            if dist.get_rank() == 1:
                next(p.grad for p in model.parameters() if p.grad.to_local().numel()).to_local().view(-1)[0] = value
            items = [param for param in items if param.grad is not None]
            before = [param.grad.full_tensor() for param in items]
            with pytest.raises(RuntimeError, match="norm of order"):
                clip_grad_norm_(items, 1.0, error_if_nonfinite=True)
            for param, grad in zip(items, before, strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), grad, rtol=0, atol=0, equal_nan=True)
            total = clip_grad_norm_(items, 1.0)
            assert total.isnan() if math.isnan(value) else total.isinf()
            # What is no gradient stays zero.
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.nan_to_num_(0.0, 0.0, 0.0)
            assert clip_grad_norm_(items, 1.0).isfinite()
            backward(model, mine(0))
            assert model.extra.weight.grad.full_tensor().isfinite().all()


def test_large_gradients_have_accurate_norms():
    param = nn.Parameter(torch.empty(30_000_000))
    param.grad = torch.rand_like(param) + 0.5
    for order in (1.0, 2.0, 3.5):
        exact = param.grad.double().pow(order).sum().pow(1 / order)
        torch.testing.assert_close(clip_grad_norm_(param, 1e30, order).double(), exact, rtol=1e-6, atol=0)


@distributed(world_size=3)
def test_grad_scaler_finds_an_inf_on_any_rank():
    model = shard_layers(build(), mp_policy=MixedPrecisionPolicy())
    flat = [*flat_parameters(model, lambda fqn, _: not fqn.startswith("head")), *flat_parameters(model.head)]
    assert {type(param) for param in flat} == {DTensor, RaggedDTensor}
    optimizer = torch.optim.SGD(flat, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = full_values(model)
    for is_bad in (True, False):
        scaler.scale(model(mine(0)).square().mean()).backward()
        if is_bad and dist.get_rank() == 1:
            flat[0].grad.to_local()[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = all(torch.equal(a, b) for a, b in zip(full_values(model).values(), before.values(), strict=True))
        assert same == is_bad
        assert scaler.get_scale() == 2.0


@distributed(world_size=2)
def test_checkpoints_are_those_of_the_sharded_parameters():
    model, other = shard_layers(build()), shard_layers(build(1))
    flats = [flat_parameters(item) for item in (model, other)]
    optimizers = [torch.optim.AdamW(item, lr=0.01) for item in flats]
    for item, optimizer in zip((model, other), optimizers, strict=True):
        backward(item, mine(0))
        optimizer.step()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    state = get_model_state_dict(model)
    assert list(state) == list(build().state_dict())
    dcp.save({"model": state}, checkpoint_id=str(Path(folder[0], "checkpoint")))
    state = get_model_state_dict(other)
    dcp.load({"model": state}, checkpoint_id=str(Path(folder[0], "checkpoint")))
    assert_same_parameters(other, model, tolerance=0)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for item, optimizer in zip((model, other), optimizers, strict=True):
        optimizer.zero_grad()
        backward(item, mine(1))
        optimizer.step()
    assert_same_parameters(other, model, tolerance=0)


# ---- parameters of no group in an optimizer of groups


class Forgetful(nn.Module):
    def __init__(self, freezes=False):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))
        if freezes:
            self.embed.requires_grad_(False)
            self.scale.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).tanh()
        return x * self.scale


def shard_without_root(model, way):
    ignored = {model.scale, model.embed.weight} if way == "ignored" else None
    for i, block in enumerate(model.blocks):
        if way == "replicated" and i:
            replicate(block)
        else:
            fully_shard(block, ignored_params=ignored)
    if way == "with root":
        fully_shard(model)
    return model


def warnings_of_two_steps(model, optimizer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.arange(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(item.message) for item in caught if "of no group" in str(item.message)]


@pytest.mark.parametrize("way", ["sharded", "replicated", "flat views", "parameter groups", "in a wrapper"])
@distributed(world_size=2)
def test_a_forgotten_root_is_told_once_at_the_first_step_of_an_optimizer(way):
    torch.manual_seed(0)
    model = shard_without_root(Forgetful(), way)
    wrapper = nn.ModuleDict({"model": model})
    params = flat_parameters(model) if way == "flat views" else [*model.parameters()]
    if way == "parameter groups":
        params = [{"params": [param], "lr": 0.1} for param in params]
    (text,) = warnings_of_two_steps(model, torch.optim.AdamW(params))
    assert "the AdamW trains parameters of fully_shard groups, and 2 trainable parameter(s) of no group" in text
    assert "model.embed.weight" in text and "model.scale" in text and "Call fully_shard() on the model too" in text, (
        text
    )
    (again,) = warnings_of_two_steps(model, torch.optim.SGD(params, 0.1))
    assert "the SGD" in again
    del wrapper


@pytest.mark.parametrize("way", ["with root", "ignored", "frozen"])
@distributed(world_size=2)
def test_nothing_is_told_where_every_parameter_is_reduced_or_meant(way):
    torch.manual_seed(0)
    model = shard_without_root(Forgetful(freezes=way == "frozen"), way)
    with mock.patch.object(gc, "get_objects", side_effect=AssertionError("all objects were searched")):
        assert not warnings_of_two_steps(model, torch.optim.AdamW(model.parameters()))


@distributed(world_size=2)
def test_nothing_is_told_of_a_model_that_ddp_reduces():
    torch.manual_seed(0)
    generator, critic = fully_shard(nn.Linear(4, 4)), nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    both = nn.Sequential(nn.Embedding(8, 4).requires_grad_(False), generator, critic)
    assert not warnings_of_two_steps(both, torch.optim.SGD(both.parameters(), 0.1))

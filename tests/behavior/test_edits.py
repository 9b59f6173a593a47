"""Invariant 5: no edit of parameters is lost."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import (
    RaggedDTensor,
    RaggedShard,
    distribute_ragged,
    flat_parameters,
    fully_shard,
    set_functional_mode,
    unshard,
)
from fsdp_compose.core.group.registry import _get_fsdp_handles
from fsdp_compose.errors import MisuseRuntimeError
from tests import harness
from tests.harness import breakable_mesh, our_warnings
from tests.internals import local_of
from tests.models import DIM, Stack, rows
from tests.training import (
    after_training,
    assert_gradients_match,
    assert_parameters_match,
    assert_trains_on,
    edit_load_state_dict,
    edit_mul,
    local_part,
    mean_square,
    sgd,
    stacks,
    train_step,
)

distributed = functools.partial(harness.distributed, timeout=20)  # seconds; a body takes a fraction of one


def edit_data_copy(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.copy_(param.data * 1.5)


def edit_replace_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 1.5


def after_nothing(model: nn.Module) -> None:
    """The edit comes before the first forward."""


def after_backward(model: nn.Module) -> None:
    mean_square(model, rows()).backward()
    model.zero_grad()


def after_eval(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(rows())
    model.train()


def after_inference(model: nn.Module) -> None:
    with torch.inference_mode():
        model(rows())


def after_forward_without_backward(model: nn.Module) -> None:
    model(rows())


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize(
    "before",
    [after_nothing, after_training, after_backward, after_eval, after_inference, after_forward_without_backward],
)
@pytest.mark.parametrize("edit", [edit_mul, edit_data_copy, edit_replace_data, edit_load_state_dict])
@distributed(world_size=2)
def test_edit_outside_forward_takes_effect_in_the_next_forward(edit, before, reshard_after_forward):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    for module in (model, reference):
        before(module)
        edit(module)
    with torch.no_grad():
        torch.testing.assert_close(model(rows()), reference(rows()), rtol=0, atol=1e-6)
    for module in (model, reference):  # and again, after the eval forward that has just been
        edit(module)
    torch.testing.assert_close(model(rows()), reference(rows()), rtol=0, atol=1e-5)
    assert_trains_on(model, reference)


@pytest.mark.parametrize("edit", [edit_mul, edit_replace_data])  # an edit through p.data leaves no trace: documented
@distributed(world_size=2)
def test_edit_after_an_explicit_unshard_takes_effect(edit):
    model, reference = stacks()
    for module in (model, model.blocks[1]):
        unshard(module)
    edit(model)
    edit(reference)
    torch.testing.assert_close(model(rows()), reference(rows()), rtol=0, atol=1e-6)
    assert_trains_on(model, reference)


@pytest.mark.parametrize(
    "before, edit",
    [
        ("a forward without backward", "p.data = ..."),
        ("a forward without backward", "p.mul_ where there are elements"),
        ("an explicit unshard", "p.data = ..."),
    ],
)
@distributed(world_size=(2, 3))
def test_edit_that_only_some_ranks_can_see_takes_effect_on_all(world_size, before, edit):
    """Small parameters have elements on one rank only: what a rank does about an edit must not depend on seeing it."""
    model, reference = stacks(reshard_after_forward=False, mesh=breakable_mesh())
    model(rows())
    if before == "an explicit unshard":
        with torch.no_grad():
            model(rows())
        for module in [*model.blocks, model]:
            unshard(module)
    for name in ("embed.bias", "blocks.0.norm.weight", "blocks.1.down.bias"):
        for param in (model.get_parameter(name), reference.get_parameter(name)):
            if edit == "p.data = ...":
                param.data = param.data * 3
            elif local_of(param).numel():
                with torch.no_grad():
                    param.mul_(3)
    with torch.no_grad():
        torch.testing.assert_close(model(rows()), reference(rows()), rtol=0, atol=1e-5)
    assert_trains_on(model, reference)


@distributed(world_size=2)
def test_an_edit_without_a_trace_shows_in_the_next_forward_where_parameters_stay_gathered():
    model, x = fully_shard(nn.Linear(4, 4), reshard_after_forward=False), torch.ones(2, 4)
    before = model(x)
    assert _get_fsdp_handles(model)[0].unsharded.is_allocated
    model.weight.detach().to_local().numpy()[...] += 1.0
    torch.testing.assert_close(model(x), before + 4)


@pytest.mark.parametrize("edit", [edit_replace_data, torch.nn.Module.double])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_other_memory_between_a_forward_and_its_backward_raises(reshard_after_forward, edit):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    first = mean_square(model, local_part(rows(0)))
    edit(model)
    dtype = model.embed.weight.dtype
    second = mean_square(model, local_part(rows(1)).to(dtype))
    with pytest.raises(RuntimeError, match="modified.*between a forward and its backward"):
        (first + second).backward()
    edit(reference)
    with our_warnings():
        mean_square(model, local_part(rows(2)).to(dtype)).backward()
    mean_square(reference, rows(2).to(dtype)).backward()
    assert_gradients_match(model, reference, 1e-6)


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "p.data = ...": edit_replace_data,
    "double()": nn.Module.double,
    "there and back": lambda model: model.double().float(),
    "to_empty()": lambda model: model.to_empty(device="cpu"),
    "_apply()": lambda model: model._apply(lambda tensor: tensor * 2),
    "load by assignment": lambda model: model.load_state_dict(
        {name: value * 2 for name, value in model.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("registered", ["before", "afterwards"])
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("move", MOVES)
@distributed(world_size=2)
def test_hooks_on_gradients_outlive_a_move_of_their_parameter(move, trained, registered):
    """The loss uses the parameter itself, so its gradient does not come with those of its group."""
    model, _ = stacks()
    if trained:
        mean_square(model, local_part(rows(0))).backward()
        model.zero_grad()
    param, calls = model.embed.weight, []

    def register() -> None:
        param.register_hook(lambda grad: calls.append("gradient") or grad * 2)
        param.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))

    if registered == "before":
        register()
    MOVES[move](model)
    assert model.embed.weight is param
    if registered == "afterwards":
        register()
    if move != "load by assignment":
        # After module.to() and the like it takes a forward: until then it is as with any tensor subclass.
        model(local_part(rows(0)).to(param.dtype))
    for _ in range(2):
        param.norm().full_tensor().backward()
        assert calls == ["gradient", "accumulated"]
        if move != "to_empty()":
            expected = torch.nn.functional.normalize(param.full_tensor().flatten(), dim=0).view(param.shape) * 2
            assert torch.allclose(param.grad.full_tensor(), expected)
        param.grad = None
        calls.clear()


@pytest.mark.parametrize("kind", ["default", "not resharded", "functional", "flat views"])
@pytest.mark.parametrize("move", MOVES)
@distributed(world_size=3)
def test_gradients_are_those_of_the_forward_or_backward_raises_when_parameters_move_in_between(move, kind):
    model, reference = stacks(reshard_after_forward=False if kind == "not resharded" else None)
    if kind == "flat views":
        flat_parameters(model)
    set_functional_mode(model, kind == "functional")
    mean_square(reference, rows(0)).backward()
    loss = mean_square(model, local_part(rows(0)))
    MOVES[move](model)
    try:
        loss.backward()
    except RuntimeError:
        pass
    else:
        assert_gradients_match(model, reference, 1e-6)
    model.zero_grad()
    with torch.no_grad():
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            param.copy_(distribute_ragged(expected.to(param.dtype), param.device_mesh, param.placements))
    dtype = model.embed.weight.dtype
    with our_warnings():
        model(local_part(rows(1)).to(dtype)).square().mean().backward()
    reference.zero_grad()
    reference.to(dtype)(rows(1).to(dtype)).square().mean().backward()
    assert_gradients_match(model, reference, 1e-6)


@pytest.mark.parametrize("place", ["block", "root"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_edit_inside_forward_raises_with_the_name_and_is_undone(reshard_after_forward, place):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    edited = model.blocks[1].up if place == "block" else model.head
    after_training(model)
    after_training(reference)

    def edit() -> None:
        with torch.no_grad():
            edited.weight.add_(1)

    trip = model.blocks[1].trip if place == "block" else model.trip
    trip.look = edit
    name = r"blocks\.1\b.*\bup\.weight" if place == "block" else r"head\.weight"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{name}.*outside forward") as error:
            model(rows())
        error.match("modified in place inside forward")
    trip.look = lambda: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(model(rows()), reference(rows()), rtol=0, atol=1e-6)
    assert_trains_on(model, reference)


def replace(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.randn(7, DIM))


def remove(module: nn.Module) -> None:
    del module.weight


def set_to_none(module: nn.Module) -> None:
    module.weight = None


def add(module: nn.Module) -> None:
    module.extra = nn.Parameter(torch.randn(7))


@pytest.mark.parametrize(
    ("change", "when"),
    [
        # Before the first forward a replacement is taken over: tests/group/test_assigned_parameters.py.
        *[(change, "before the first forward") for change in (remove, set_to_none, add)],
        *[(change, "after training") for change in (replace, remove, set_to_none, add)],
    ],
)
@distributed(world_size=2)
def test_replaced_removed_or_added_parameter_raises_with_its_name(change, when):
    model, reference = stacks()
    if when == "after training":
        after_training(model)
        after_training(reference)
    module = model.blocks[1].up
    before = dict(module._parameters)
    change(module)
    name = r"\bextra\b" if change is add else r"\bweight\b"
    for _ in range(2):  # it does not go through by trying again
        with pytest.raises((RuntimeError, ValueError), match=rf"blocks\.1\b.*\bup\.{name}.*fully_shard\(\)"):
            mean_square(model, local_part(rows())).backward()
    module._parameters.clear()
    module._parameters.update(before)
    assert_trains_on(model, reference)


@distributed(world_size=2)
def test_trainable_module_added_after_training_raises_with_its_name():
    model, _ = stacks()
    after_training(model)
    model.blocks[1].extra = nn.Linear(2, 2)
    with pytest.raises((RuntimeError, ValueError), match=r"blocks\.1\.extra\.weight"):
        mean_square(model, local_part(rows())).backward()


@distributed(world_size=2)
def test_frozen_parameter_added_after_training_is_left_alone():
    model, reference = stacks()
    for module in (model, reference):
        after_training(module)
        module.blocks[1].up.extra = nn.Parameter(torch.ones(7), requires_grad=False)
    model(rows())
    assert torch.equal(model.blocks[1].up.extra, torch.ones(7))
    after_training(model)
    after_training(reference)
    model.blocks[1].up.extra = reference.blocks[1].up.extra = None
    del model.blocks[1].up.extra, reference.blocks[1].up.extra
    assert_trains_on(model, reference)


DTYPE_CHANGES = {
    "to": lambda model: model.to(torch.float64),
    "cpu()": lambda model: model.cpu(),
    "there and back": lambda model: model.double().float(),
    "half and double": lambda model: model.half().double(),
}


@pytest.mark.parametrize("change", DTYPE_CHANGES)
@pytest.mark.parametrize("before", [after_nothing, after_training, after_eval])
@distributed(world_size=2)
def test_change_of_dtype_after_sharding(before, change):
    model, reference = stacks(reshard_after_forward=False)
    params = list(model.parameters())
    for module in (model, reference):
        before(module)
        DTYPE_CHANGES[change](module)
    assert all(ours is sharded for ours, sharded in zip(model.parameters(), params))
    dtype = params[0].dtype
    mean_square(model, local_part(rows()).to(dtype)).backward()
    mean_square(reference, rows().to(dtype)).backward()
    assert all(param.grad.dtype == dtype for param in params)
    assert_gradients_match(model, reference, 1e-6)
    for optimizer in (sgd(reference.parameters()), torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)):
        optimizer.step()
        optimizer.zero_grad()
    assert_parameters_match(model, reference, 1e-6)


@distributed(world_size=2)
def test_model_moved_to_a_device_that_is_not_its_meshs_raises_at_the_next_forward_and_comes_back():
    model, reference = stacks()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    with pytest.raises(ValueError, match=r"parameters of the fully_shard group .* are still on the meta device"):
        model(rows())
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    with our_warnings():
        assert_trains_on(model, reference)


@pytest.mark.parametrize("optimizer_is_built", ["before to_empty", "after to_empty"])
@distributed(world_size=(2, 3))
def test_model_is_sharded_on_the_meta_device_and_filled_by_to_empty(world_size, optimizer_is_built):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Stack()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"meta device.*to_empty"):
        model(rows())
    params = list(model.parameters())
    optimizer = sgd(model.parameters()) if optimizer_is_built == "before to_empty" else None
    model.to_empty(device="cpu")
    assert all(ours is sharded for ours, sharded in zip(model.parameters(), params, strict=True))
    optimizer = optimizer or sgd(model.parameters())
    reference = Stack()
    with torch.no_grad():
        for module in (model, reference):
            for i, param in enumerate(module.parameters()):
                param.fill_(0.01 * (i + 1))
    assert_parameters_match(model, reference, 0)
    theirs = sgd(reference.parameters())
    for step in range(2):
        train_step(model, optimizer, local_part(rows(step)))
        train_step(reference, theirs, rows(step))
    assert_parameters_match(model, reference, 1e-6)


def sharded_otherwise(weight: RaggedDTensor) -> RaggedDTensor:
    """A tensor like ``weight``, of which rank 0 holds everything."""
    counts = (weight.numel(), 0)
    placement = RaggedShard(counts, flat=True)
    local = torch.zeros(counts[dist.get_rank()])
    return RaggedDTensor.from_local(local, weight.device_mesh, [placement], shape=weight.shape)


REFUSED_DATA: dict[str, tuple[Callable[[RaggedDTensor], torch.Tensor], str]] = {
    "another shape": (lambda weight: torch.zeros(3), r"\(7, 5\).*\(3,\) tensor"),
    "some rows": (lambda weight: torch.zeros(4, DIM), r"\(7, 5\).*\(4, 5\) tensor"),
    "the full shape in another dtype": (lambda weight: torch.zeros(7, DIM).double(), "float32.*float64.*module.to"),
    "other shards": (sharded_otherwise, r"\(7, 5\).*\(7, 5\) tensor.*35, 0"),
    "another dtype": (lambda weight: weight.detach().double(), "float32.*float64.*module.to"),
    "another device": (lambda weight: weight.detach().to("meta"), "cpu.*meta.*module.to"),
}


@pytest.mark.parametrize("case", REFUSED_DATA)
@pytest.mark.parametrize("before", [after_nothing, after_training])
@distributed(world_size=2)
def test_data_that_does_not_fit_raises_at_once_and_changes_nothing(before, case):
    model, reference = stacks()
    before(model)
    before(reference)
    weight = model.blocks[1].up.weight
    local, address = weight.to_local().detach(), weight.to_local().data_ptr()
    value, (make, words) = local.clone(), REFUSED_DATA[case]
    with pytest.raises(TypeError, match=words):
        weight.data = make(weight)
    assert weight.to_local().data_ptr() == address and torch.equal(weight.to_local(), value)
    assert weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.shape == (7, DIM)
    assert_trains_on(model, reference)


@distributed(world_size=(1, 3))
def test_memory_of_another_sharded_model_is_refused_and_copies_are_right():
    """In plain torch the two would share memory from then on."""
    torch.manual_seed(0)
    source, target = (fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))) for _ in range(2))
    before = [param.full_tensor() for param in target.parameters()]
    for given in (lambda param: param.data, lambda param: param.detach(), lambda param: param):
        with pytest.raises(MisuseRuntimeError, match=r"\.data of the parameter 0.weight .* cannot be set to that"):
            target[0].weight.data = given(source[0].weight)
    for param, old in zip(target.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), old)
        param.data = param.data  # its own
    for param, other in zip(target.parameters(), source.parameters(), strict=True):
        param.data = other.data.clone()
    inputs = torch.ones(2, 3)
    assert torch.equal(target(inputs), source(inputs))

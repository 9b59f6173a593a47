"""Invariant 9: sharded parameters are in place whenever the user looks."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn

from fsdp_compose import (
    RaggedDTensor,
)
from tests import harness
from tests.harness import our_warnings
from tests.internals import local_of, sharded_params
from tests.models import DIM, rows
from tests.training import (
    after_training,
    assert_trains_on,
    edit_load_state_dict,
    edit_mul,
    interrupt,
    local_part,
    mean_square,
    stacks,
)

distributed = functools.partial(harness.distributed, timeout=20)  # seconds; a body takes a fraction of one


def assert_shows_sharded(module: nn.Module, expected: list[nn.Parameter]) -> None:
    entries = list(module.state_dict().values())
    assert all(isinstance(entry, RaggedDTensor) for entry in entries)
    assert [entry.placements for entry in entries] == [sharded.placements for sharded in expected]
    assert [entry.shape for entry in entries] == [sharded.shape for sharded in expected]
    locals_, expected_locals = [*map(local_of, entries)], [*map(local_of, expected)]
    assert [local.shape for local in locals_] == [local.shape for local in expected_locals]
    assert [local.data_ptr() for local in locals_] == [local.data_ptr() for local in expected_locals]
    assert all(a is b for a, b in zip(module.state_dict(keep_vars=True).values(), expected, strict=True))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(2, 3))
def test_parameters_are_sharded_after_an_exception_in_forward(world_size, reshard_after_forward):
    model, _ = stacks(reshard_after_forward=reshard_after_forward)
    params = list(model.parameters())
    for place in (0, 1, 2):
        for _ in range(2):
            interrupt(model, "forward", place, ValueError("by the user"))
            assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
            assert_shows_sharded(model, params)
    assert {id(param) for param in params} == {id(sharded) for sharded in sharded_params(model)}


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("is_training", [True, False])
@distributed(world_size=(2, 3))
def test_state_dict_inside_forward_sees_sharded_parameters(world_size, is_training, reshard_after_forward):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    params, block_params = list(model.parameters()), list(model.blocks[1].parameters())
    looks = []

    def look() -> None:
        weight = model.blocks[1].up.weight
        assert_shows_sharded(model, params)
        assert_shows_sharded(model.blocks[1], block_params)
        assert model.blocks[1].up.weight is weight  # the running forward goes on with what it had
        looks.append(weight)

    for trip in (model.trip, model.blocks[0].trip, model.blocks[1].trip):
        trip.look = look
    with torch.set_grad_enabled(is_training):
        torch.testing.assert_close(model(rows()), reference(rows()), rtol=0, atol=1e-6)
    assert looks[0] is looks[1] is block_params[2] and looks[2] is not block_params[2]
    assert not isinstance(looks[2], RaggedDTensor) and looks[2].shape == (7, DIM)
    assert_trains_on(model, reference)


@pytest.mark.parametrize("when", ["inside forward", "after a KeyboardInterrupt"])
@distributed(world_size=2)
def test_state_dict_of_an_inner_module_of_a_group_sees_sharded_parameters(when):
    model, _ = stacks()
    up, params = model.blocks[1].up, list(model.blocks[1].up.parameters())
    if when == "inside forward":
        model.blocks[1].trip.look = lambda: assert_shows_sharded(up, params)
        model(rows())
    else:
        interrupt(model, "forward", 1, KeyboardInterrupt("by the user"))
        assert_shows_sharded(up, params)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_load_state_dict_inside_forward_takes_effect_in_the_next(reshard_after_forward):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    model.blocks[1].trip.look = lambda: edit_load_state_dict(model)
    with torch.no_grad():
        model(rows())
    model.blocks[1].trip.look = lambda: None
    edit_mul(reference)
    torch.testing.assert_close(model(rows()), reference(rows()), rtol=0, atol=1e-6)
    assert_trains_on(model, reference)


@distributed(world_size=2)
def test_load_state_dict_between_forward_and_backward_raises_there():
    model, _ = stacks()
    model.blocks[1].trip.look = lambda: edit_load_state_dict(model)
    with pytest.raises(RuntimeError, match="modified.*between a forward and its backward"):
        mean_square(model, local_part(rows())).backward()


@pytest.mark.parametrize("where", ["forward", "backward", "recomputation"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(2, 3))
def test_state_dicts_after_a_keyboard_interrupt_see_sharded_parameters(world_size, reshard_after_forward, where):
    options = {"use_reentrant": False} if where == "recomputation" else {}
    model, reference = stacks(reshard_after_forward=reshard_after_forward, **options)
    params, block_params = list(model.parameters()), list(model.blocks[1].parameters())
    after_training(model)
    after_training(reference)
    in_forward = where != "backward"
    model.blocks[1].trip.arm(
        "forward" if in_forward else "backward", KeyboardInterrupt(), passes=where == "recomputation"
    )
    with pytest.raises(KeyboardInterrupt):
        mean_square(model, local_part(rows())).backward()
    assert_shows_sharded(model, params)
    assert_shows_sharded(model.blocks[1], block_params)
    edit_load_state_dict(model)
    edit_mul(reference)
    assert_shows_sharded(model, params)
    with our_warnings() as texts:
        torch.testing.assert_close(model(rows()), reference(rows()), rtol=0, atol=1e-6)
    assert len(texts) == 1
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert_trains_on(model, reference)

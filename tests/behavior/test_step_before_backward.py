"""Invariant 6: an optimizer step between forward and backward raises."""

from __future__ import annotations

import functools

import pytest
import torch

from fsdp_compose import (
    fully_shard,
)
from tests import harness
from tests.behavior.test_every_group_reduced import Layer
from tests.harness import our_warnings, same_on_every_rank
from tests.internals import assert_nothing_is_unsharded
from tests.models import DIM, ROWS, rows
from tests.training import (
    assert_no_gradients,
    assert_trains_on,
    local_part,
    mean_square,
    pair,
    sgd,
    stacks,
)

distributed = functools.partial(harness.distributed, timeout=20)  # seconds; a body takes a fraction of one


@pytest.mark.parametrize("stepped, named", [("", r"\(root\)"), ("blocks.1", r"blocks\.1"), ("head", r"\(root\)")])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(2, 3))
def test_optimizer_step_between_forward_and_backward_raises_on_every_rank(
    world_size, reshard_after_forward, stepped, named
):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    optimizers = [sgd(module.get_submodule(stepped).parameters()) for module in (model, reference)]
    mean_square(model, local_part(rows())).backward()
    mean_square(reference, rows()).backward()
    loss = mean_square(model, local_part(rows(1)))
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    reference.zero_grad()
    with pytest.raises(RuntimeError, match=f"{named}.*modified.*between a forward and its backward") as error:
        loss.backward()
    same_on_every_rank(str(error.value))
    assert_no_gradients(model)
    with our_warnings() as texts:
        assert_trains_on(model, reference)
    assert len(texts) == 1 and "interrupted" in texts[0]
    assert_nothing_is_unsharded(model)


@distributed(world_size=2)
def test_second_backward_after_a_step_raises():
    model, _ = stacks()
    optimizer = sgd(model.parameters())
    loss = mean_square(model, local_part(rows()))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"\(root\).*modified.*between a forward and its backward"):
        loss.backward()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("then", ["backward", "forward"])
@distributed(world_size=2)
def test_loading_between_forward_and_backward_raises(then, assign):
    model, reference = stacks()
    for _ in range(2):
        state = {name: value.detach() * 0.9 for name, value in model.state_dict().items()}
        loss = mean_square(model, local_part(rows()))
        model.load_state_dict(state, assign=assign)
        reference.load_state_dict({name: value * 0.9 for name, value in reference.state_dict().items()})
        if then == "forward":
            with torch.no_grad():
                model(local_part(rows()))
        with pytest.raises(RuntimeError, match=r"\(root\).*modified.*between a forward and its backward"):
            loss.backward()
        assert_no_gradients(model)
        with our_warnings() as texts:
            assert_trains_on(model, reference)
        assert len(texts) == 1 and "interrupted" in texts[0]


@pytest.mark.parametrize("kind", ["object", "None", "a number"])
@distributed(world_size=2)
def test_step_between_forward_and_backward_raises_where_outputs_cannot_be_hooked(kind):
    model, _ = pair(Layer(kind))
    fully_shard(model)
    batch = torch.randn(ROWS, DIM)
    with our_warnings():
        model.read(model(batch)).sum().backward()
        value = model.read(model(batch)).sum()
        sgd(model.parameters()).step()
        with pytest.raises(RuntimeError, match=r"\(root\).*modified.*between a forward and its backward"):
            value.backward()

"""Several models on one process group: one order of collectives for all of them."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import fully_shard, functional_mode, set_requires_gradient_sync, set_transport
from tests.harness import breakable_mesh, distributed, environment, same_on_every_rank
from tests.training import assert_no_gradients, local_part


def pair(widths, mesh=None, **options):
    torch.manual_seed(0)
    references = [nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in widths]
    models = copy.deepcopy(references)
    for model in models:
        fully_shard(model[0], mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return models, references


def batch():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def loss_of(model, is_functional=False):
    with functional_mode(model) if is_functional else contextlib.nullcontext():
        return model(local_part(batch())).square().mean()


def train_once(models):
    for model in models:
        loss_of(model).backward()
        model.zero_grad()


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@distributed(world_size=2)
def test_backwards_of_equal_models_in_different_order_raise_and_name_the_models(is_functional, options):
    models, _ = pair((8, 8), breakable_mesh(), **options)
    train_once(models)
    losses = [loss_of(model, is_functional) for model in models]
    first = dist.get_rank()
    with pytest.raises(RuntimeError, match="the ranks issued different collectives") as error:
        losses[first].backward()
    text = same_on_every_rank(str(error.value))
    assert "of model 1 (Sequential) on rank 0" in text and "of model 2 (Sequential) on rank 1" in text, text
    assert_no_gradients(models[first])


@pytest.mark.parametrize("is_functional", [False, True])
@distributed(world_size=2)
def test_forwards_of_equal_models_in_different_order_raise_and_name_the_models(is_functional):
    models, _ = pair((8, 8), breakable_mesh())
    train_once(models)
    first = dist.get_rank()
    with pytest.raises(RuntimeError, match="the ranks issued different collectives") as error:
        loss_of(models[first], is_functional).backward()
    text = same_on_every_rank(str(error.value))
    assert "the all-gather of (root) of model 1 (Sequential) on rank 0 and" in text, text
    assert "the all-gather of (root) of model 2 (Sequential) on rank 1" in text, text
    assert_no_gradients(models[first])


@distributed(world_size=2)
def test_backwards_that_issue_nothing_but_the_exchange_are_told_apart():
    """Their exchanges are of different sizes, which ended the process."""
    models, _ = pair((8, 24), breakable_mesh(), reshard_after_forward=False)
    train_once(models)
    losses = [loss_of(model) for model in models]
    for model in models:
        set_requires_gradient_sync(model, False)
    first = dist.get_rank()
    with pytest.raises(RuntimeError, match="the ranks issued different collectives") as error:
        losses[first].backward()
    text = same_on_every_rank(str(error.value))
    assert "was the end of backward of model 1 (Sequential) on rank 0 and the end of backward of model 2" in text, text


@distributed(world_size=2)
def test_first_forwards_of_equal_models_in_different_order_raise():
    models, _ = pair((8, 8), breakable_mesh())
    with pytest.raises(
        RuntimeError, match="there are several equal models, and the ranks start with different ones"
    ) as error:
        loss_of(models[dist.get_rank()])
    same_on_every_rank(str(error.value))


@distributed(world_size=2)
def test_first_forwards_in_different_order_next_to_a_model_of_one_rank_raise_at_the_second():
    mesh = breakable_mesh()
    rank = dist.get_rank()
    if rank == 0:
        unused = pair((8, 8), mesh)  # lives on until the end of the test
    with environment(FSDP_COMPOSE_COMPARE_STARTS="0"):  # else the values of the first two tell them apart
        models, _ = pair((8, 8), mesh)
        loss_of(models[rank])
    with pytest.raises(RuntimeError, match="there are several equal models, and the ranks start with different ones"):
        loss_of(models[1 - rank])
    if rank == 0:
        del unused


@distributed(world_size=1)
def test_a_group_that_gets_another_root_waits_for_no_backward_of_the_old_one():
    block = fully_shard(nn.Linear(4, 4))
    block(torch.ones(2, 4))  # as a model of its own; nothing is computed from the result
    model = fully_shard(nn.Sequential(block, nn.Linear(4, 4)))
    with torch.no_grad():
        model(torch.ones(2, 4))
    set_transport(model, lambda transport, role: transport)  # refused while a backward is to come
    model(torch.ones(2, 4)).sum().backward()
    assert block.weight.grad is not None


@distributed(world_size=2)
def test_models_that_were_made_in_another_order_or_on_one_rank_only_train():
    mesh = breakable_mesh()
    rank = dist.get_rank()
    made = {}
    for width in (8, 24) if rank else (24, 8):
        made[width] = pair((width,), mesh)
    if rank:
        unused = pair((8, 8), mesh)
        copy.deepcopy(made[8][0])
        del unused
    twin = copy.deepcopy(made[8][0][0]), copy.deepcopy(made[8][1][0])
    for width in (8, 24):
        compare(*made[width])
    compare([twin[0]], [twin[1]])


def compare(models, references):
    losses = [loss_of(model) for model in models]
    for loss in losses:
        loss.backward()
    for model, reference in zip(models, references, strict=True):
        reference(batch()).square().mean().backward()
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad, msg=name)


@pytest.mark.parametrize("widths", [(8, 8), (24, 8), (8, 24)])
@distributed(world_size=2)
def test_models_that_take_turns_in_every_way_train_as_unsharded(widths):
    (a, b), (ra, rb) = pair(widths)
    for order in ((0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1)):
        for reference in (ra, rb):
            reference.zero_grad()
            reference(batch()).square().mean().backward()
        a.zero_grad()
        b.zero_grad()
        losses = {}
        for i, which in enumerate(order):
            model = (a, b)[which]
            if i < 2:
                losses[which] = loss_of(model)
            else:
                losses[which].backward()
        for model, reference in ((a, ra), (b, rb)):
            for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), expected.grad)

"""Loaders that make DTensors placed like the sharded parameters, and put them in their place."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compose import drop_in
from fsdp_compose.checkpoint.state_dict import get_model_state_dict
from tests.harness import distributed
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import local_part, whole

GRANULES = {"elements": lambda fqn, param: "elements", "rows": lambda fqn, param: "rows"}


def model_of(seed: int, tie: bool = False) -> GPT:
    torch.manual_seed(seed)
    return GPT(dim=6, tie=tie)


def assign(model: nn.Module, full: dict[str, torch.Tensor], way: str) -> None:
    """As loaders do: a new parameter in each slot."""
    for fqn, param in [*model.named_parameters()]:
        value = full[fqn]
        if way == "from_local":
            local = distribute_tensor(value, param.device_mesh, param.placements).to_local().clone()
            made = DTensor.from_local(
                local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        else:
            made = distribute_tensor(value, param.device_mesh, param.placements)
        owner, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(owner), name, nn.Parameter(made.detach(), requires_grad=param.requires_grad))


@pytest.mark.parametrize("granule", GRANULES)
@pytest.mark.parametrize("is_meta", [False, True])
@pytest.mark.parametrize("way", ["from_local", "distribute_tensor"])
@distributed(world_size=(2, 3))
def test_assigned_parameters_are_taken_over_and_train(way, is_meta, granule):
    reference = model_of(1)
    full = {name: value.clone() for name, value in reference.state_dict().items()}
    model = model_of(0)
    if is_meta:
        model = model.to("meta")
    shard_layers(model, granularity=GRANULES[granule])
    assign(model, full, way)
    early = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)  # holds what was assigned
    saved = get_model_state_dict(model)
    assert all(torch.equal(value.full_tensor(), full[name]) for name, value in saved.items())
    theirs = torch.optim.AdamW(reference.parameters(), 1e-2, eps=1e-3)
    for batch in batches(3):
        gpt_loss(model, local_part(batch)).backward()
        gpt_loss(reference, batch).backward()
        for optimizer in (early, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in whole(model, lambda param: param, reference).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_first", [True, False])
@distributed(world_size=2)
def test_between_iterations_too_and_state_of_the_optimizer_stays(is_first):
    reference, other = model_of(1), model_of(2)
    model = copy.deepcopy(reference)
    shard_layers(model)
    ours, theirs = (torch.optim.AdamW(item.parameters(), 1e-2, eps=1e-3) for item in (model, reference))
    for step, batch in enumerate(batches(4)):
        if step == 2:
            before = [*model.parameters()]
            assign(model, dict(other.state_dict()), "from_local")
            if is_first:  # an optimizer that was built for what is assigned
                ours = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
                theirs = torch.optim.AdamW(reference.parameters(), 1e-2, eps=1e-3)
            with torch.no_grad():
                for param, value in zip(reference.parameters(), other.parameters(), strict=True):
                    param.copy_(value)
        gpt_loss(model, local_part(batch)).backward()
        gpt_loss(reference, batch).backward()
        if step == 2:
            assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in whole(model, lambda param: param, reference).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach(), rtol=1e-5, atol=1e-5)


@distributed(world_size=2)
def test_ties_that_are_assigned_together_hold():
    reference = model_of(1, tie=True)
    model = shard_layers(model_of(0, tie=True))
    full = dict(reference.state_dict())
    assign(model, full, "from_local")
    assert model.head.weight is not model.tokens.weight  # named_parameters() has one name of the two
    model.head.weight = model.tokens.weight  # as tie_weights() does
    batch = next(batches(1))
    gpt_loss(model, local_part(batch)).backward()
    gpt_loss(reference, batch).backward()
    assert model.head.weight is model.tokens.weight
    for name, value in whole(model, lambda param: param.grad, reference).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].grad, rtol=1e-5, atol=1e-5)


@distributed(world_size=2)
def test_requires_grad_of_what_is_assigned_holds():
    model = shard_layers(model_of(0))
    for fqn, param in [*model.named_parameters()]:
        if "up" in fqn:
            owner, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(owner), name, nn.Parameter(param.detach().clone(), requires_grad=False))
    gpt_loss(model, local_part(next(batches(1)))).backward()
    assert all((param.grad is None) == ("up" in name) for name, param in model.named_parameters())


@distributed(world_size=2)
def test_others_are_refused_by_name():
    model = shard_layers(model_of(0))
    gpt_loss(model, local_part(next(batches(1)))).backward()
    model.zero_grad()
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight.full_tensor()))
    with pytest.raises(RuntimeError, match=r"replaced, added or removed after fully_shard\(\): head.weight"):
        model(local_part(next(batches(1)))[:, :-1])


@distributed(world_size=2)
def test_another_parameter_of_the_model_is_no_new_one():
    """It ties two: refused by name between groups, after the first forward."""
    model = shard_layers(model_of(0))
    model(local_part(next(batches(1)))[:, :-1])
    model.blocks[0].norm1.weight = model.blocks[1].norm1.weight
    with pytest.raises(RuntimeError, match=r"replaced, added or removed.*blocks\.0\.norm1\.weight"):
        model(local_part(next(batches(1)))[:, :-1])


# ---- drop_in


@pytest.mark.parametrize("way", ["from_local", "distribute_tensor"])
@distributed(world_size=3)
def test_rows_are_boxes_that_torch_can_compute(way):
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    full = dict(model_of(1).state_dict())
    model = model_of(0)
    for block in model.blocks:
        drop_in.fully_shard(block)
    drop_in.fully_shard(model)
    for name, param in [*model.named_parameters()]:
        shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        assert tuple(shape) == tuple(param.to_local().shape), name
        box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        expected = distribute_tensor(full[name], param.device_mesh, param.placements).to_local()
        assert torch.equal(full[name][box], expected) or not expected.numel()
    assign(model, full, way)
    assert all(torch.equal(value.full_tensor(), full[name]) for name, value in model.state_dict().items())

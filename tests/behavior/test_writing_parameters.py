"""How users write to sharded parameters and their gradients: as to the unsharded ones, or an error that says how."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fsdp_compose import flat_parameters, fully_shard
from tests.harness import distributed
from tests.internals import full_parameters
from tests.training import assert_parameters_match, full, pair

DIM = 4


def nets() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    model, reference = pair(nn.Sequential(nn.Linear(DIM, DIM + 1), nn.Linear(DIM + 1, DIM)))
    fully_shard(model[0])
    fully_shard(model)
    return model, reference


def copied(param: nn.Parameter) -> None:
    param.copy_(torch.arange(param.numel()).view(param.shape))


def copied_broadcast(param: nn.Parameter) -> None:
    param.copy_(torch.arange(param.shape[-1]).float())


def data_copied(param: nn.Parameter) -> None:
    param.data.copy_(torch.linspace(0, 1, param.numel()).view(param.shape))


def slice_copied(param: nn.Parameter) -> None:
    param[:2].copy_(torch.ones(param[:2].shape))


def filled(param: nn.Parameter) -> None:
    param.fill_(2.5)


def normal(param: nn.Parameter) -> None:
    param.normal_(1.0, 2.0)


def uniform(param: nn.Parameter) -> None:
    param.uniform_(-1, 1)


def trunc_normal(param: nn.Parameter) -> None:
    nn.init.trunc_normal_(param)


def kaiming(param: nn.Parameter) -> None:
    nn.init.kaiming_uniform_(param) if param.dim() > 1 else nn.init.zeros_(param)


def xavier(param: nn.Parameter) -> None:
    nn.init.xavier_normal_(param) if param.dim() > 1 else nn.init.constant_(param, 0.5)


def eye(param: nn.Parameter) -> None:
    nn.init.eye_(param) if param.dim() > 1 else nn.init.normal_(param)


def clamped(param: nn.Parameter) -> None:
    param.clamp_(-0.1, 0.1).mul_(2)


def assigned(param: nn.Parameter) -> None:
    param[0] = torch.ones(param[0].shape) if param.dim() > 1 else 7.0


WRITES = [
    copied, copied_broadcast, data_copied, slice_copied, filled, normal, uniform, trunc_normal, kaiming, xavier,
    eye, clamped, assigned,
]  # fmt: skip


@distributed(world_size=2)
def test_writes_to_parameters() -> None:
    for write in WRITES:
        model, reference = nets()
        for one in (model, reference):
            torch.manual_seed(7)
            with torch.no_grad():
                for param in one.parameters():
                    write(param)
        for name, value in full_parameters(model).items():
            expected = reference.get_parameter(name)
            torch.testing.assert_close(value, expected.detach(), msg=f"{write.__name__}: {name}")


@distributed(world_size=2)
def test_copy_of_a_plain_tensor_of_another_shape_raises() -> None:
    model, _ = nets()
    with torch.no_grad(), pytest.raises(RuntimeError):
        model[0].weight.copy_(torch.ones(DIM + 1, DIM + 1))


@distributed(world_size=2)
def test_vectors_of_parameters() -> None:
    model, reference = nets()
    ours, theirs = parameters_to_vector(model.parameters()), parameters_to_vector(reference.parameters())
    torch.testing.assert_close(full(ours), theirs)
    for one in (model, reference):
        vector_to_parameters(torch.linspace(0, 1, theirs.numel()), one.parameters())
    assert_parameters_match(model, reference)
    model(torch.ones(2, DIM)).square().mean().backward()
    reference(torch.ones(2, DIM)).square().mean().backward()
    vector_to_parameters(full(ours), model.parameters())
    vector_to_parameters(theirs, reference.parameters())
    assert_parameters_match(model, reference)


@distributed(world_size=2)
def test_gradients_that_users_assign() -> None:
    model, reference = nets()
    ours = torch.optim.Adam(model.parameters(), lr=0.1)
    theirs = torch.optim.Adam(reference.parameters(), lr=0.1)
    for step in range(2):
        for one in (model, reference):
            for param in one.parameters():
                param.grad = torch.zeros_like(param)
                param.grad.copy_(torch.linspace(-1, step + 1, param.numel()).view(param.shape))
        norms = [nn.utils.get_total_norm([p.grad for p in one.parameters()]) for one in (model, reference)]
        torch.testing.assert_close(full(norms[0]), norms[1])
        for one in (model, reference):
            nn.utils.clip_grad_value_(one.parameters(), 0.5)
            one(torch.ones(2, DIM)).square().mean().backward()  # adds to it
        ours.step()
        theirs.step()
        assert_parameters_match(model, reference)
        for optimizer in (ours, theirs):
            optimizer.zero_grad()


@distributed(world_size=2)
def test_a_plain_gradient_is_refused_where_there_are_flat_parameters() -> None:
    model, reference = nets()
    optimizer = torch.optim.Adam(flat_parameters(model), lr=0.1)
    for param in model.parameters():
        param.grad = torch.linspace(-1, 1, param.numel()).view(param.shape)
    with pytest.raises(RuntimeError, match="was assigned to, but it is part of a flat view"):
        optimizer.step()
    assert_parameters_match(model, reference)


@pytest.mark.parametrize("foreach", [False, True])
@distributed(world_size=2)
def test_a_plain_gradient_is_sharded_by_the_step(foreach: bool) -> None:
    model, reference = nets()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, foreach=foreach) for one in (model, reference)]
    for step in range(3):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            for i, param in enumerate(one.parameters()):
                if (i + step) % 3:  # the others have none, or keep their last one
                    param.grad = torch.linspace(-1, step + i, param.numel()).view(param.shape)
            optimizer.step()
            if step == 1:
                optimizer.zero_grad()
                one(torch.ones(2, DIM)).square().mean().backward()
        assert_parameters_match(model, reference)


@distributed(world_size=2)
def test_a_weight_of_a_child_group_used_by_its_parent() -> None:
    class Tied(nn.Module):
        def __init__(self, gathers: bool) -> None:
            super().__init__()
            self.embed, self.gathers = nn.Embedding(DIM, DIM), gathers

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.linear(self.embed(ids), full(self.embed.weight) if self.gathers else self.embed.weight)

    model = Tied(gathers=False)
    fully_shard(model.embed)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"embed\.weight of the fully_shard group embed.*full_tensor\(\)"):
        model(torch.arange(DIM))
    model, reference = pair(Tied(gathers=True))
    fully_shard(model.embed)
    fully_shard(model)
    model(torch.arange(DIM)).square().mean().backward()
    reference(torch.arange(DIM)).square().mean().backward()
    mean = reference.embed.weight.grad.clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(full(model.embed.weight.grad), mean / dist.get_world_size())

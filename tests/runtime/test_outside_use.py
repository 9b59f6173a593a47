"""Weights used outside their group's forward, in a loss: their gradients are those of unsharded training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.func import grad as grad_of
from torch.func import jvp, vmap
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecisionPolicy,
    flat_parameters,
    fully_shard,
    functional_mode,
    no_sync,
    set_functional_mode,
)
from tests.harness import distributed
from tests.internals import full_gradients
from tests.training import full, local_part, pair

DIM, VOCAB, BATCH = 4, 7, 12


class Trunk(nn.Module):
    """Returns hidden states; ``head`` is for the loss, and ``apply_head`` runs it as well."""

    def __init__(self, apply_head: bool = False) -> None:
        super().__init__()
        self.apply_head = apply_head
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-4, 5, param.shape) / 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).relu()
        return (x, self.head(x)) if self.apply_head else x


def trunks(mode: str = "default", *, apply_head: bool = False, **kwargs) -> tuple[Trunk, Trunk]:
    torch.manual_seed(0)
    model, reference = pair(Trunk(apply_head).double())
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model.head, **kwargs)
    fully_shard(model, **kwargs)
    if mode == "functional":
        set_functional_mode(model)
    return model, reference


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH,), generator=torch.Generator().manual_seed(seed))


# Losses of hidden states, as a program would write them; each a mean over the batch.


def by_full_tensor(model: Trunk, h: torch.Tensor) -> torch.Tensor:
    return F.linear(h, full(model.head.weight)).square().mean()


def by_redistribute(model: Trunk, h: torch.Tensor) -> torch.Tensor:
    weight = model.head.weight
    if isinstance(weight, DTensor):
        weight = weight.redistribute(placements=[Replicate()]).to_local()
    return F.linear(h, weight).square().mean()


def by_explicit_average(model: Trunk, h: torch.Tensor) -> torch.Tensor:
    weight = model.head.weight
    if isinstance(weight, DTensor):
        weight = weight.full_tensor(grad_placements=[Partial("avg")])
    return F.linear(h, weight).square().mean()


def by_explicit_sum(model: Trunk, h: torch.Tensor) -> torch.Tensor:
    weight = model.head.weight
    if isinstance(weight, DTensor):
        weight = weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return F.linear(h, weight).square().sum() / (BATCH * VOCAB) + 0 * h.sum()
    return F.linear(h, weight).square().mean()


def chunked(model: Trunk, h: torch.Tensor) -> torch.Tensor:
    weight = full(model.head.weight)
    losses = [checkpoint(F.linear, part, weight, use_reentrant=False).square().mean() for part in h.chunk(2)]
    return torch.stack(losses).mean()


def gathered_twice(model: Trunk, h: torch.Tensor) -> torch.Tensor:
    return (F.linear(h, full(model.head.weight)) * F.linear(h, full(model.head.weight)).detach()).mean() + (
        by_full_tensor(model, h.detach())
    )


def of_a_view(model: Trunk, h: torch.Tensor) -> torch.Tensor:
    weight = model.head.weight
    parts = h @ full(weight[1]).unsqueeze(1) + h[:, :1] @ full(weight[:1, :1])
    return (h @ full(weight.t()) + parts).square().mean()


def of_derived_values(model: Trunk, h: torch.Tensor) -> torch.Tensor:
    return F.linear(h, full(model.head.weight * 2)).square().mean() + (h * full(model.blocks[0].bias.exp())).mean()


def of_other_groups(model: Trunk, h: torch.Tensor) -> torch.Tensor:
    return (F.linear(h, full(model.embed.weight)) + F.linear(h, full(model.blocks[0].weight)).sum(1, True)).mean()


def with_decay(model: Trunk, h: torch.Tensor) -> torch.Tensor:
    """Terms that are the same on every rank are not divided."""
    decay = sum(full(param).square().sum() for param in model.parameters())
    norms = sum(full(param.square().sum()) for param in model.parameters())
    return by_full_tensor(model, h) + decay / 8 + norms / 4


LOSSES = [
    by_full_tensor, by_redistribute, by_explicit_average, chunked, gathered_twice, of_a_view, of_derived_values,
    of_other_groups, with_decay,
]  # fmt: skip
Loss = Callable[[Trunk, torch.Tensor], torch.Tensor]


def assert_same(model: nn.Module, reference: nn.Module, tolerance: float = 1e-13) -> None:
    ours = dict(model.named_parameters())
    for name, param in reference.named_parameters():
        got = None if ours[name].grad is None else ours[name].grad.full_tensor()
        assert (got is None) == (param.grad is None), f"{name}: {got}, expected {param.grad}"
        if got is not None:
            torch.testing.assert_close(got, param.grad.to(got.dtype), rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("mode", ["default", "functional"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@distributed(world_size=2)
def test_gradients_equal_those_of_unsharded_training(loss: Loss, mode: str) -> None:
    model, reference = trunks(mode)
    for step in range(2):
        loss(model, model(local_part(ids(step)))).backward()
        loss(reference, reference(ids(step))).backward()
        assert_same(model, reference)


@distributed(world_size=3)
def test_on_three_ranks_with_flat_views_and_an_optimizer() -> None:
    model, reference = trunks(apply_head=True)
    ours = torch.optim.AdamW(flat_parameters(model), lr=0.1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(4):
        for one, batch in ((model, local_part(ids(step))), (reference, ids(step))):
            h, logits = one(batch)
            (by_full_tensor(one, h) + logits.mean()).backward()  # the weight's two uses are one gradient
        assert_same(model, reference, 1e-12)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


@distributed(world_size=2)
def test_exact_with_powers_of_two() -> None:
    model, reference = trunks(apply_head=True)
    for one, batch in ((model, local_part(ids())), (reference, ids())):
        h, logits = one(batch)
        loss = (h.shape[0] / BATCH) * F.linear(h, full(one.head.weight)).sum() + logits.sum() * h.shape[0] / BATCH
        (loss * BATCH / h.shape[0] / 16 * (dist.get_world_size() if one is model else 1)).backward()
    for name, grad in full_gradients(model).items():
        assert torch.equal(grad, reference.get_parameter(name).grad), name


@pytest.mark.parametrize("mode", ["default", "functional"])
@distributed(world_size=2)
def test_a_rank_whose_loss_does_not_use_the_weight_contributes_zero(mode: str) -> None:
    model, _ = trunks(mode)
    h = model(local_part(ids()))
    is_first = dist.get_rank() == 0
    weight = model.head.weight.full_tensor()
    loss = h.square().mean() + (F.linear(h.detach(), weight).sum() if is_first else 0)
    if mode == "functional":
        with pytest.raises(RuntimeError, match="different collectives") as info:
            loss.backward()
        assert "head" in str(info.value)
        return
    loss.backward()
    expected = h.detach().sum(0).expand(VOCAB, -1).clone()
    dist.broadcast(expected, 0)
    torch.testing.assert_close(full_gradients(model)["head.weight"], expected / 2)


@pytest.mark.parametrize("is_flat", [False, True])
@distributed(world_size=2)
def test_accumulation_without_sync_and_hooks(is_flat: bool) -> None:
    model, reference = trunks()
    seen: list[torch.Tensor] = []
    model.head.weight.register_hook(lambda grad: seen.append(grad.full_tensor()))
    optimizer = torch.optim.SGD(flat_parameters(model) if is_flat else model.parameters(), lr=1.0)
    for step in range(3):
        with no_sync(model) if step < 2 else nullcontext():
            by_full_tensor(model, model(local_part(ids(step)))).backward()
        by_full_tensor(reference, reference(ids(step))).backward()
    assert_same(model, reference)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], reference.head.weight.grad)
    optimizer.zero_grad()
    reference.zero_grad()
    by_full_tensor(model, model(local_part(ids()))).backward()
    by_full_tensor(reference, reference(ids())).backward()
    assert_same(model, reference)


@distributed(world_size=2)
def test_low_precision() -> None:
    """The whole tensor has the parameter's own dtype; its gradient joins the group's in the dtype of the reduction."""
    model, reference = trunks(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    h = model(local_part(ids()))
    assert h.dtype == torch.bfloat16
    weight = model.head.weight.full_tensor()
    assert weight.dtype == torch.float64
    (F.linear(h, weight.to(h.dtype)).float().sum()).backward()
    by_hand = F.linear(reference(ids()), reference.head.weight).sum() / 2
    by_hand.backward()
    assert_same(model, reference, 5e-2)


@distributed(world_size=2)
def test_frozen_weight_and_no_grad() -> None:
    torch.manual_seed(0)
    model, reference = pair(Trunk().double())
    for one in (model, reference):
        one.head.requires_grad_(False)
    fully_shard(model.head)
    fully_shard(model)
    h = model(local_part(ids()))
    assert not model.head.weight.full_tensor().requires_grad
    by_full_tensor(model, h).backward()
    by_full_tensor(reference, reference(ids())).backward()
    assert_same(model, reference)
    with torch.no_grad():
        assert not model.embed.weight.full_tensor().requires_grad


@distributed(world_size=2)
def test_a_step_between_raises() -> None:
    model, _ = trunks()
    loss = by_full_tensor(model, model(local_part(ids())).detach())
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified.*between"):
        loss.backward()
    assert model.head.weight.grad is None


@distributed(world_size=2)
def test_before_the_first_forward_and_without_any() -> None:
    model, reference = trunks()
    by_full_tensor(model, local_part(torch.eye(BATCH, DIM).double())).backward()
    by_full_tensor(reference, torch.eye(BATCH, DIM).double()).backward()
    assert_same(model, reference)
    model.zero_grad()
    model(local_part(ids()))
    by_full_tensor(model, local_part(torch.eye(BATCH, DIM).double())).backward()  # the group's own forward never ran
    assert_same(model, reference)


@distributed(world_size=2)
def test_second_derivatives_in_functional_mode() -> None:
    model, reference = trunks()

    def penalty(one: Trunk, batch: torch.Tensor) -> torch.Tensor:
        h = one(batch)
        loss = F.linear(h, full(one.head.weight)).square().mean()
        (grad,) = torch.autograd.grad(loss, one.head.weight, create_graph=True)
        return loss + full(grad).square().sum() / 4

    with functional_mode(model):
        penalty(model, local_part(ids())).backward()
    penalty(reference, ids()).backward()
    assert_same(model, reference)


@distributed(world_size=2)
def test_second_derivatives_in_the_default_mode_are_refused() -> None:
    model, _ = trunks()
    loss = by_full_tensor(model, model(local_part(ids())))
    with pytest.raises(RuntimeError, match="functional mode"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("mode", ["default", "functional"])
@distributed(world_size=2)
def test_inside_the_forward_of_a_parent(mode: str) -> None:
    class Tied(Trunk):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.linear(super().forward(ids), full(self.embed.weight))

    torch.manual_seed(0)
    model, reference = pair(Tied().double())
    fully_shard(model.embed)
    fully_shard(model)
    set_functional_mode(model, mode == "functional")
    for step in range(2):
        model(local_part(ids(step))).square().mean().backward()
        reference(ids(step)).square().mean().backward()
        assert_same(model, reference)


@pytest.mark.parametrize("mode", ["default", "functional"])
@distributed(world_size=2, timeout=120)  # torch imports much for its first transform
def test_inside_transforms_of_torch_func(mode: str) -> None:
    """A transform may use the weight as a constant; what it computes has a gradient for the weight."""
    model, reference = trunks(mode)
    h, whole = model(local_part(ids())).detach(), reference(ids()).detach()

    def energy(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, full(weight)).square().sum()

    ours, expected = (partial(energy, one.head.weight) for one in (model, reference))
    forces, whole_forces = grad_of(ours)(h), grad_of(expected)(whole)
    torch.testing.assert_close(forces, local_part(whole_forces))
    torch.testing.assert_close(vmap(grad_of(ours))(h), forces)
    torch.testing.assert_close(jvp(ours, (h,), (h,)), jvp(expected, (h,), (h,)))
    forces.square().mean().backward()
    whole_forces.square().mean().backward()
    assert_same(model, reference)
    with pytest.raises(NotImplementedError, match=r"torch\.func.*full_tensor\(\) before"):
        grad_of(partial(energy, model.head.weight.detach()))(h)


@distributed(world_size=2)
def test_the_sharded_weight_itself_is_an_error_that_names_it() -> None:
    model, _ = trunks()
    h = model(local_part(ids()))
    with pytest.raises(RuntimeError, match=r"head\.weight of the fully_shard group head.*full_tensor"):
        F.linear(h, model.head.weight)

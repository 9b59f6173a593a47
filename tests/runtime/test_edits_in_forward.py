"""Sharded parameters that the root's forward edits between two groups: what the next group computes with.

Groups are gathered ahead (prefetch, ``unshard()``), or kept from an earlier use; an edit that comes later must show on
every rank, or be an error that names it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn

from fsdp_compose import (
    flat_parameters,
    fully_shard,
    functional_mode,
    set_functional_mode,
    set_reshard_after_forward,
    unshard,
)
from tests.harness import distributed
from tests.training import assert_parameters_match, local_part, mean_over_ranks

Edit = Callable[["Editing"], None]


class Editing(nn.Module):
    """``edit`` runs between the forwards of ``first`` and ``target``; ``source`` never runs."""

    def __init__(self, is_frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.target, self.last = nn.Linear(8, 5), nn.Linear(5, 7), nn.Linear(7, 4)
        self.source = nn.Linear(5, 7)
        self.source.requires_grad_(False)
        self.target.requires_grad_(not is_frozen)
        self.edit: Edit = lambda _: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with torch.no_grad():
            self.edit(self)
        return self.last(torch.tanh(self.target(h)))


def shard(model: Editing, **options: object) -> Editing:
    for module in (model.first, model.target, model.last, model.source, model):
        fully_shard(module, **options)
    return model


def momentum(model: Editing, act: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
    for p, q in zip(model.target.parameters(), model.source.parameters(), strict=True):
        act(p, q)


def step(model: Editing, **options: object) -> None:
    optimizer = torch.optim.AdamW(model.target.parameters(), lr=0.1, **options)
    for p in model.target.parameters():
        p.grad = p.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()


EDITS: dict[str, Edit] = {
    "add_": lambda m: momentum(m, lambda p, q: p.add_(0.1)),
    "copy_": lambda m: momentum(m, lambda p, q: p.copy_(q * 0.5 + p)),
    "lerp_": lambda m: momentum(m, lambda p, q: p.lerp_(q, 0.3)),
    "mul_().add_()": lambda m: momentum(m, lambda p, q: p.mul_(0.7).add_(q, alpha=0.3)),
    ".data.copy_": lambda m: momentum(m, lambda p, q: p.data.copy_(p.data * 0.7 + q.data * 0.3)),
    ".data.mul_": lambda m: momentum(m, lambda p, q: p.data.mul_(0.7)),
    "detach().add_": lambda m: momentum(m, lambda p, q: p.detach().add_(q)),
    "slice": lambda m: m.target.bias[1:3].add_(1.0),
    "last row": lambda m: m.target.weight[6].add_(1.0),
    "transposed view": lambda m: m.target.weight.t().mul_(0.7),
    "mask": lambda m: m.target.weight.masked_fill_(m.target.weight > 0.2, 0.1),
    "index": lambda m: m.target.bias.index_fill_(0, torch.tensor([2]), 0.3),
    "random": lambda m: (torch.manual_seed(4), m.target.bias.uniform_())[0],
    "init": lambda m: (torch.manual_seed(4), nn.init.normal_(m.target.weight))[0],
    "_foreach_lerp_": lambda m: torch._foreach_lerp_([*m.target.parameters()], [*m.source.parameters()], 0.3),
    "_foreach_mul_ of one": lambda m: torch._foreach_mul_([m.target.bias], 0.7),
    "_foreach_copy_": lambda m: torch._foreach_copy_([*m.target.parameters()], [*m.source.parameters()]),
    "load_state_dict": lambda m: m.target.load_state_dict(m.source.state_dict()),
    "clip": lambda m: momentum(m, lambda p, q: p.clamp_(-0.2, 0.2)),
    "fill_": lambda m: m.target.bias.fill_(0.3),
    "zero_": lambda m: m.target.bias.zero_(),
    "step of a foreach optimizer": lambda m: step(m, foreach=True),
    "step of a fused optimizer": lambda m: step(m, fused=True),
    "step of a for-loop optimizer": lambda m: step(m, foreach=False),
}


def inputs(step: int) -> torch.Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def train(model: Editing, share: Callable[[torch.Tensor], torch.Tensor], edit: Edit, steps: int = 4) -> torch.Tensor:
    """Losses; editing begins when the order of groups is known, and alternates with its absence."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for i in range(steps):
        model.edit = edit if i % 2 else lambda _: None
        loss = model(share(inputs(i))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_training(model: Editing, edit: Edit, is_frozen: bool, unsharded_edit: Edit | None = None) -> None:
    reference = Editing(is_frozen)
    expected = train(reference, lambda x: x, unsharded_edit or edit)
    losses = train(model, local_part, edit)
    torch.testing.assert_close(mean_over_ranks(losses), expected, rtol=0, atol=1e-6)
    assert_parameters_match(model, reference, tolerance=1e-6)


@distributed(world_size=(2, 3))
def test_edit_of_the_next_group_shows_in_its_forward(world_size):
    for is_frozen in (False, True):
        for i, (name, edit) in enumerate(EDITS.items()):
            if (is_frozen and "step" in name) or (world_size == 3 and i % 2 == is_frozen):
                continue
            try:
                check_training(shard(Editing(is_frozen)), edit, is_frozen)
            except AssertionError as error:
                raise AssertionError(f"{name}, frozen: {is_frozen}: {error}") from error


@pytest.mark.parametrize("mode", ["reshard", "keep", "functional", "frozen by functional"])
@distributed(world_size=2)
def test_edit_of_the_next_group_shows_in_every_mode(mode):
    model = shard(Editing(is_frozen=True), reshard_after_forward=mode != "keep")
    set_functional_mode(model, mode == "functional")
    if mode == "frozen by functional":
        set_functional_mode(model.target)
    check_training(model, EDITS["lerp_"], is_frozen=True)
    check_training(shard(Editing(), reshard_after_forward=mode != "keep"), EDITS[".data.copy_"], is_frozen=False)


@pytest.mark.parametrize("local", [False, True])
@distributed(world_size=(2, 3))
def test_step_of_flat_views_inside_forward_shows(local):
    model = shard(Editing())
    optimizer = torch.optim.SGD(flat_parameters(model.target, local=local), lr=0.5)

    def flat_step(model: Editing) -> None:
        for p in model.target.parameters():
            p.grad = None
        for p in optimizer.param_groups[0]["params"]:
            p.grad = p.detach() * 0.5
        optimizer.step()
        optimizer.zero_grad()

    check_training(model, flat_step, is_frozen=False, unsharded_edit=lambda m: momentum(m, lambda p, q: p.mul_(0.75)))


@distributed(world_size=(2, 3))
def test_write_to_a_flat_view_inside_forward_shows():
    model = shard(Editing())
    (flat,) = flat_parameters(model.target)
    unsharded = EDITS[".data.mul_"]
    check_training(model, lambda _: flat.mul_(0.7), is_frozen=False, unsharded_edit=unsharded)


@distributed(world_size=(2, 3))
def test_write_to_local_memory_that_other_ranks_may_not_know_of_is_an_error():
    def write_locally(model: Editing) -> None:
        momentum(model, lambda p, q: p.to_local().lerp_(q.to_local(), 0.3))

    model = shard(Editing())
    model(local_part(inputs(0))).sum().backward()
    model.edit = write_locally
    with pytest.raises(RuntimeError, match=r"rank \d.*through its local memory.*target\.weight"):
        model(local_part(inputs(1)))
    model.edit = lambda _: None
    with pytest.warns(UserWarning, match="interrupted"):
        model(local_part(inputs(1))).sum().backward()


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world_size=2)
def test_edit_after_a_group_was_gathered_by_hand_shows(reshard):
    def gather_then_edit(model: Editing) -> None:
        unshard(model.target, async_op=True)
        EDITS["lerp_"](model)

    model = shard(Editing(), reshard_after_forward=reshard)
    check_training(model, gather_then_edit, is_frozen=False, unsharded_edit=EDITS["lerp_"])


class Twice(Editing):
    """Uses ``target`` before and after the edit, the first time outside the graph or inside it."""

    has_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with nullcontext() if self.has_grad else torch.no_grad():
            before = self.target(h)
        with torch.no_grad():
            self.edit(self)
        return self.last(torch.tanh(self.target(h) + before))


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world_size=2)
def test_edit_between_two_uses_shows_in_the_second(reshard):
    reference = Twice()
    expected = train(reference, lambda x: x, EDITS["lerp_"])
    model = shard(Twice(), reshard_after_forward=reshard)
    losses = train(model, local_part, EDITS["lerp_"])
    torch.testing.assert_close(mean_over_ranks(losses), expected, rtol=0, atol=1e-6)
    assert_parameters_match(model, reference, tolerance=1e-6)


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world_size=2)
def test_edit_of_a_group_whose_backward_is_to_come_raises(reshard, is_functional):
    model = shard(Twice(), reshard_after_forward=reshard)
    model.has_grad = True
    with functional_mode(model) if is_functional else nullcontext():
        model(local_part(inputs(0))).sum().backward()
        model.edit = EDITS["lerp_"]
        loss = model(local_part(inputs(1))).sum()
    with pytest.raises(RuntimeError, match="group target were modified"):
        loss.backward()


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world_size=2)
def test_edits_show_in_evaluation(reshard):
    model = shard(Editing())
    set_reshard_after_forward(model, reshard)
    reference = Editing()
    for i in range(4):
        model.edit = reference.edit = EDITS["mul_().add_()"] if i else lambda _: None
        with torch.no_grad():
            torch.testing.assert_close(model(inputs(i)), reference(inputs(i)))


class MoCo(nn.Module):
    """Momentum contrast: the key encoder follows the query encoder inside forward, and has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", torch.randn(5, 10))

    @torch.no_grad()
    def follow(self) -> None:
        for k, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
            k.data.mul_(0.9).add_(q.data, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        with torch.no_grad():
            self.follow()
            key = self.key(x.flip(0))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue], dim=1)
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@pytest.mark.parametrize("layers", [False, True])
@distributed(world_size=2)
def test_key_encoder_that_follows_by_momentum_inside_forward(layers):
    reference, model = MoCo(), MoCo()
    for encoder in (model.query, model.key):
        for layer in encoder if layers else ():
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(encoder)
    fully_shard(model)
    losses = []
    for module, share in ((reference, lambda x: x), (model, lambda x: x)):
        optimizer = torch.optim.SGD(module.query.parameters(), lr=0.5)
        for i in range(5):
            loss = module(share(inputs(i)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[5:]), torch.stack(losses[:5]), rtol=0, atol=1e-6)
    assert_parameters_match(model, reference, tolerance=1e-6)

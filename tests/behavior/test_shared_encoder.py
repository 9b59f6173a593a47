"""Several sharded roots around one encoder (actor and critic, two heads, GAN): trained as their unsharded twins are."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import RaggedDTensor, flat_parameters, fully_shard, functional_mode, no_sync, set_functional_mode
from fsdp_compose.checkpoint import get_model_state_dict, set_model_state_dict
from tests.harness import distributed
from tests.training import assert_gradients_match, assert_parameters_match, local_part, mean_over_ranks, mean_square


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Head(nn.Module):
    def __init__(self, encoder: Encoder, width: int) -> None:
        super().__init__()
        self.encoder, self.scale, self.out = encoder, nn.Parameter(torch.ones(6)), nn.Linear(6, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(x) * self.scale)


class Models(nn.Module):
    """Never called, nor sharded: it holds the two roots."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        encoder = Encoder()
        self.actor, self.critic = Head(encoder, 5), Head(encoder, 1)


def shard(models: Models, groups: str = "layers", reshard: bool | None = None) -> Models:
    encoder = models.actor.encoder
    modules = [encoder, models.actor, models.critic]
    if groups == "layers":
        modules = [*encoder.layers, encoder, models.actor.out, models.actor, models.critic]
    for module in modules:
        fully_shard(module, reshard_after_forward=reshard)
    return models


def inputs(step: int) -> torch.Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def alternate(m: Models, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    loss = mean_square((m.actor, m.critic)[step % 2], x)
    loss.backward()
    return [loss]


def one_backward(m: Models, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    losses = [mean_square(m.actor, x), mean_square(m.critic, x)]
    sum(losses).backward()
    return losses


def two_backwards(m: Models, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    losses = [mean_square(m.actor, x), mean_square(m.critic, x)]
    for loss in losses if step % 2 else reversed(losses):
        loss.backward()
    return losses


def one_after_the_other(m: Models, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    losses = []
    for root in (m.actor, m.critic) if step % 2 else (m.critic, m.actor):
        losses.append(mean_square(root, x))
        losses[-1].backward()
    return losses if step % 2 else losses[::-1]


def evaluate_one(m: Models, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    with torch.no_grad():
        target = mean_square(m.critic, x)
    loss = (mean_square(m.actor, x) - target).square()
    loss.backward()
    return [loss]


def evaluate_between(m: Models, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    loss = mean_square(m.actor, x)
    with torch.no_grad():
        value = mean_square(m.critic, x)
    loss.backward()
    return [loss, value]


def encoder_by_itself(m: Models, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    losses = [m.actor.encoder(x).square().mean(), mean_square(m.critic, x), mean_square(m.actor, x)]
    sum(losses).backward()
    return losses


def encoder_between(m: Models, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    losses = [mean_square(m.actor, x), m.actor.encoder(x).square().mean(), mean_square(m.critic, x)]
    for loss in losses:
        loss.backward()
    return losses


def joint_loss(m: Models, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    """One loss is computed from both outputs."""
    loss = (m.actor(x).mean(1) * m.critic(x).detach().flatten()).sum() + m.critic(x).mean() * m.actor(x).mean()
    loss.backward()
    return [loss]


PROGRAMS = (
    alternate, one_backward, two_backwards, one_after_the_other, evaluate_one, evaluate_between, encoder_by_itself,
    encoder_between, joint_loss,
)  # fmt: skip


def train(
    models: Models, program: Callable[..., list[torch.Tensor]], parts: list[Callable[[torch.Tensor], torch.Tensor]]
) -> torch.Tensor:
    """Losses of four steps; of an unsharded model, the mean over all ranks' parts of the batch."""
    optimizer = torch.optim.SGD(models.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        found = [torch.stack([x.detach() for x in program(models, part(inputs(step)), step)]) for part in parts]
        losses.append(torch.stack(found).mean(0))
        if len(parts) > 1:
            for param in models.parameters():
                if param.grad is not None:
                    param.grad /= len(parts)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return torch.cat(losses)


def unsharded(program: Callable[..., list[torch.Tensor]], kind: type[Models] = Models) -> tuple[torch.Tensor, Models]:
    reference, world_size = kind(), dist.get_world_size()
    parts = [lambda x, rank=rank: x.chunk(world_size)[rank] for rank in range(world_size)]
    return train(reference, program, parts), reference


def check(models: Models, program: Callable[..., list[torch.Tensor]]) -> None:
    expected, reference = unsharded(program)
    losses = train(models, program, [local_part])
    torch.testing.assert_close(mean_over_ranks(losses), expected, rtol=0, atol=1e-6)
    assert_parameters_match(models, reference, tolerance=1e-6)


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
@distributed(world_size=2)
def test_training_equals_unsharded_training(program, is_functional):
    models = shard(Models())
    set_functional_mode(models, is_functional)
    check(models, program)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world_size=3)
def test_training_with_every_choice_of_groups(reshard):
    check(shard(Models(), reshard=reshard), one_backward)
    check(shard(Models(), "one", reshard), two_backwards)
    models = shard(Models(), "one", reshard)
    set_functional_mode(models.actor.encoder)
    check(models, one_after_the_other)


def accumulate(m: Models, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    """Three backwards before a step, the first two without sync in one of the roots or in both."""
    context = no_sync if isinstance(m.actor.out.weight, RaggedDTensor) else lambda _: nullcontext()
    losses = [mean_square(m.actor, x), mean_square(m.critic, x * 2), mean_square(m.actor, x + 1)]
    with context(m.actor):
        losses[0].backward()
        with context(m.critic):
            losses[1].backward()
    losses[2].backward()
    mean_square(m.critic, x).backward()
    return losses


@distributed(world_size=2)
def test_accumulation_without_sync_over_both_roots():
    check(shard(Models()), accumulate)


@distributed(world_size=2)
def test_flat_views_of_both_roots():
    expected, reference = unsharded(one_backward)
    models = shard(Models())
    optimizer = torch.optim.SGD(flat_parameters(models), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        losses.append(torch.stack([x.detach() for x in one_backward(models, local_part(inputs(step)), step)]))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    torch.testing.assert_close(mean_over_ranks(torch.cat(losses)), expected, rtol=0, atol=1e-6)
    assert_parameters_match(models, reference, tolerance=1e-6)


@distributed(world_size=2)
def test_checkpoint_of_both_roots():
    models = shard(Models())
    train(models, one_backward, [local_part])
    for name in ("", "actor", "critic"):
        saved, fresh = get_model_state_dict(models.get_submodule(name)), shard(Models())
        assert saved.keys() == Models().get_submodule(name).state_dict().keys()
        mean_square(fresh.critic, local_part(inputs(9)))
        set_model_state_dict(fresh.get_submodule(name), copy.deepcopy(saved))
        for root in [name] if name else ["actor", "critic"]:
            with torch.no_grad():
                ours, theirs = (both.get_submodule(root)(inputs(7)) for both in (fresh, models))
            torch.testing.assert_close(ours, theirs)


@distributed(world_size=2)
def test_one_root_goes_and_another_comes():
    models = shard(Models())
    train(models, one_backward, [local_part])
    gone = weakref.ref(models.critic.out.weight)
    models.critic = None
    gc.collect()
    assert gone() is None
    mean_square(models.actor, local_part(inputs(0))).backward()
    torch.manual_seed(1)
    models.critic = fully_shard(Head(models.actor.encoder, 3))
    reference = copy.deepcopy(models)
    for root in (reference.actor, reference.critic):
        assert root.encoder is reference.actor.encoder
    for _ in range(2):
        for both in (models, reference):
            sum(mean_square(root, local_part(inputs(1))) for root in (both.critic, both.actor)).backward()
    for (name, ours), theirs in zip(models.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, name
        if "critic" in name:  # the others have a gradient from before, or not
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())


class Calls(Head):
    """Its forward calls another root, which is not below it."""

    def __init__(self, encoder: Encoder, other: nn.Module) -> None:
        super().__init__(encoder, 2)
        self.others = (other,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.others[0](x).mean()


@distributed(world_size=2)
def test_root_inside_the_forward_of_another_that_is_not_around_it():
    models = shard(Models())
    outer = fully_shard(Calls(models.actor.encoder, models.critic))
    with pytest.raises(RuntimeError, match="first forward of the fully_shard'ed Head runs inside the forward of"):
        outer(local_part(inputs(0)))
    with pytest.warns(UserWarning, match="interrupted"):
        models.critic(local_part(inputs(0))).sum().backward()
    reference = Models()
    unsharded_outer = Calls(reference.actor.encoder, reference.critic)
    unsharded_outer.load_state_dict({k: v.full_tensor() for k, v in outer.state_dict().items()})
    models.critic.zero_grad()
    for _ in range(2):
        outer(local_part(inputs(1))).square().mean().backward()
        mean_square(models.actor, local_part(inputs(1))).backward()
        for x in inputs(1).chunk(2):
            (unsharded_outer(x).square().mean() / 2).backward()
            (mean_square(reference.actor, x) / 2).backward()
    assert_gradients_match(models, reference)


@distributed(world_size=2)
def test_exception_in_one_root_is_recovered_from_in_the_other():
    models, reference = shard(Models()), Models()
    train(models, one_backward, [local_part])
    reference.load_state_dict({k: v.full_tensor() for k, v in models.state_dict().items()})

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    hook = models.critic.out.register_forward_hook(fail)
    models.zero_grad()
    loss = mean_square(models.actor, local_part(inputs(0)))
    with pytest.raises(ValueError, match="on purpose"):
        models.critic(local_part(inputs(0)))
    hook.remove()
    del loss
    with pytest.warns(UserWarning, match="interrupted"):
        loss = mean_square(models.actor, local_part(inputs(0)))
    (loss + mean_square(models.critic, local_part(inputs(0)))).backward()
    (mean_square(reference.actor, inputs(0)) + mean_square(reference.critic, inputs(0))).backward()
    assert_gradients_match(models, reference)


@distributed(world_size=2)
def test_double_backward_through_both_roots():
    models, reference = shard(Models()), Models()
    for both, share in ((models, local_part), (reference, lambda x: x)):
        context = functional_mode if both is models else lambda _: nullcontext()
        for _ in range(2):
            x = share(inputs(0)).requires_grad_()
            with context(both):
                score = both.actor(x).sum(1) * both.critic(x).flatten()
                (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            slope.square().sum(1).mean().backward()
    assert_gradients_match(models, reference)


@distributed(world_size=2)
def test_encoder_that_is_no_group_of_its_own_is_refused_by_name():
    models = Models()
    fully_shard(models.actor)
    with pytest.raises(ValueError, match=r"encoder\.layers\.0\.weight of this Head is already in another group"):
        fully_shard(models.critic)

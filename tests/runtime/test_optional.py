"""Groups that each rank may run or skip: training equals unsharded training on the mean of the ranks' losses."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp_compose
from fsdp_compose import (
    CPUOffloadPolicy,
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
    functional_mode,
    keep_unsharded,
    no_sync,
    replicate,
    reshard,
    set_keep_unsharded_storage,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_reshard_after_backward,
    set_reshard_after_forward,
    summon_full_params,
    sync_optional_groups,
    unshard,
)
from fsdp_compose.checkpoint import get_state_dict, set_state_dict
from fsdp_compose.core.comm import control_exchange
from fsdp_compose.core.flat import listening
from fsdp_compose.core.group import get_state
from tests.flat.test_all_gather_extensions import EightBit
from tests.harness import distributed, environment, lasting_mesh
from tests.internals import impatient
from tests.training import assert_same_gradients, assert_same_parameters, raise_by_the_user, sgd, whole

DIM = 6
Plan = tuple[bool | int, ...]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class VisionLanguage(nn.Module):
    """Text, and on some ranks images, which a tower and a projection bring into it. A plan: (whether there is one,)."""

    optional = ("tower", "projection")

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.tower, self.projection = nn.Sequential(Mlp(), Mlp()), nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.use_reentrant = use_reentrant

    def call(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return module(x)
        return checkpoint(module, x, use_reentrant=self.use_reentrant)

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        if plan[0]:
            h = h + self.projection(self.call(self.tower, x.sin()))
        for block in self.blocks:
            h = self.call(block, h)
        return self.head(h)


class LayerDrop(nn.Module):
    """A plan: of each layer, how often it runs."""

    optional = ("layers.0", "layers.1", "layers.2")

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed, self.last = Mlp(), nn.Linear(DIM, 1)
        self.layers = nn.ModuleList(Mlp() for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        for layer, times in zip(self.layers, plan, strict=True):
            for _ in range(times):
                if self.use_reentrant is None:
                    h = layer(h)
                else:
                    h = checkpoint(layer, h, use_reentrant=self.use_reentrant)
        return self.last(h)


class Experts(LayerDrop):
    """Experts beside each other, in a group around them that is optional too; in the order of the plan."""

    optional = ("layers.0", "layers.1", "layers.2")

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        return self.last(h + sum([self.layers[i](h) * (i + 1) for i in plan], torch.zeros_like(h)))


class EarlyExit(LayerDrop):
    """A plan: (after how many layers to leave,); the model returns what the last one has returned, as it is."""

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers[: plan[0]]:
            h = layer(h)
        return h


PLANS: dict[type[nn.Module], list[tuple[Plan, Plan, Plan]]] = {
    VisionLanguage: [
        ((1,), (0,), (0,)),
        ((0,), (0,), (0,)),
        ((0,), (1,), (1,)),
        ((1,), (1,), (1,)),
        ((0,), (0,), (1,)),
    ],
    LayerDrop: [
        ((1, 0, 2), (0, 1, 1), (0, 0, 0)),
        ((0, 0, 1), (0, 0, 2), (0, 0, 1)),
        ((3, 1, 0), (0, 0, 0), (1, 1, 1)),
    ],
    Experts: [((2, 0), (1,), ()), ((0, 1, 2), (2, 1, 0), (1, 1)), ((), (), ()), ((1, 0), (0, 1), (0,))],
    EarlyExit: [((3,), (1,), (0,)), ((0,), (0,), (0,)), ((1,), (2,), (3,)), ((2,), (2,), (2,))],
}


def made(kind: type[nn.Module], **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return kind(**kwargs).double()


def shard(model: nn.Module, inner: bool = True, **kwargs) -> nn.Module:
    for name, module in reversed([*model.named_modules()][1:]):
        if inner and isinstance(module, Mlp) and name not in model.optional:
            fully_shard(module, **kwargs)
        elif name in model.optional:
            fully_shard(module, optional=True, **kwargs)
    return fully_shard(model, **kwargs)


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, DIM, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return model(x, plan).square().mean()


def mean_loss(reference: nn.Module, step: int, plans: Sequence[Plan]) -> torch.Tensor:
    size = dist.get_world_size()
    return torch.stack([loss_of(reference, batch(step, r), plans[r]) for r in range(size)]).mean()


def assert_equal_parameters(model: nn.Module, reference: nn.Module) -> None:
    assert_same_parameters(model, reference, 1e-11, relative=1e-9)


def train_both(model: nn.Module, reference: nn.Module, plans: Sequence[Sequence[Plan]], rounds: int = 2) -> None:
    rank = dist.get_rank()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, reference)]
    for step, at_step in enumerate([*plans] * rounds):
        loss_of(model, batch(step, rank), at_step[rank]).backward()
        mean_loss(reference, step, at_step).backward()
        assert_same_gradients(model, reference, rtol=1e-10, atol=1e-12)
        norms = [clip_grad_norm_(net.parameters(), 0.5) for net in (model, reference)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert torch.isfinite(model(batch(step, rank), at_step[rank - 1])).all()
    assert_equal_parameters(model, reference)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [*PLANS])
@distributed(world_size=(2, 3))
def test_training_equals_unsharded_training(kind, reshard):
    model = shard(made(kind), reshard_after_forward=reshard)
    train_both(model, made(kind), PLANS[kind])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [VisionLanguage, LayerDrop])
@distributed(world_size=(2, 3))
def test_with_activation_checkpointing(kind, use_reentrant):
    model = shard(made(kind, use_reentrant=use_reentrant), inner=not use_reentrant)
    train_both(model, made(kind, use_reentrant=use_reentrant), PLANS[kind])


# ---- several forwards and backwards


def steps_of(kind: type[nn.Module]) -> Iterator[tuple[int, Sequence[Plan]]]:
    yield from enumerate(PLANS[kind])


@pytest.mark.parametrize("kind", [VisionLanguage, LayerDrop])
@distributed(world_size=2)
def test_accumulation_without_sync(kind):
    """Also where no rank runs a group in the backward that reduces."""
    rank, model, reference = dist.get_rank(), shard(made(kind)), made(kind)
    for first in range(len(PLANS[kind])):
        for i in range(3):
            plans = PLANS[kind][(first + i) % len(PLANS[kind])]
            with no_sync(model) if i < 2 else nullcontext():
                loss_of(model, batch(i, rank), plans[rank]).backward()
            mean_loss(reference, i, plans).backward()
        assert_same_gradients(model, reference, rtol=1e-10, atol=1e-12)
        model.zero_grad()
        reference.zero_grad()


@distributed(world_size=2)
def test_accumulation_with_sync():
    rank, model, reference = dist.get_rank(), shard(made(LayerDrop)), made(LayerDrop)
    for step, plans in steps_of(LayerDrop):
        loss_of(model, batch(step, rank), plans[rank]).backward()
        mean_loss(reference, step, plans).backward()
        assert_same_gradients(model, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [VisionLanguage, LayerDrop, Experts])
@distributed(world_size=2)
def test_two_backwards_through_a_graph(kind):
    rank, model, reference = dist.get_rank(), shard(made(kind)), made(kind)
    for step, plans in steps_of(kind):
        ours, theirs = loss_of(model, batch(step, rank), plans[rank]), mean_loss(reference, step, plans)
        for retain in (True, False):
            ours.backward(retain_graph=retain)
            theirs.backward(retain_graph=retain)
        assert_same_gradients(model, reference, rtol=1e-10, atol=1e-12)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("is_together", [True, False])
@pytest.mark.parametrize("kind", [VisionLanguage, LayerDrop, Experts])
@distributed(world_size=2)
def test_two_forwards(kind, is_together):
    """And one backward of both, or one of each, the first one first."""
    train_in_two_forwards(shard(made(kind)), made(kind), PLANS[kind], is_together)


def train_in_two_forwards(
    model: nn.Module, reference: nn.Module, at_steps: Sequence[Sequence[Plan]], is_together: bool
) -> None:
    rank = dist.get_rank()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, reference)]
    for step, plans in enumerate(at_steps):
        others = at_steps[step - 1]
        ours = [loss_of(model, batch(step + i, rank), item[rank]) for i, item in enumerate((plans, others))]
        theirs = [mean_loss(reference, step + i, item) for i, item in enumerate((plans, others))]
        for losses in (ours, theirs):
            for loss in [losses[0] + losses[1]] if is_together else losses:
                loss.backward()
        assert_same_gradients(model, reference, rtol=1e-10, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("frozen", [("tower",), ("embed", "blocks.0"), ("embed", "blocks", "projection"), ("embed",)])
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world_size=2)
def test_frozen_parts(frozen, reshard):
    """Also where only images bring what requires grad to frozen or trainable layers."""
    model, reference = made(VisionLanguage), made(VisionLanguage)
    for net in (model, reference):
        for name in frozen:
            net.get_submodule(name).requires_grad_(False)
    train_both(shard(model, reshard_after_forward=reshard), reference, PLANS[VisionLanguage])


@distributed(world_size=2)
def test_freezing_between_iterations():
    model, reference = shard(made(LayerDrop)), made(LayerDrop)
    for flag in (False, True):
        for net in (model, reference):
            net.layers[2].requires_grad_(flag)
        train_both(model, reference, PLANS[LayerDrop], rounds=1)


@distributed(world_size=4)
def test_hybrid_sharding():
    mesh = lasting_mesh(("replicate", "shard"))
    plans = [(*at, at[0]) for at in PLANS[LayerDrop]]
    train_both(shard(made(LayerDrop), mesh=mesh), made(LayerDrop), plans)


@distributed(world_size=2)
def test_whole_parameters_and_checkpoints_between_iterations():
    model, reference = shard(made(LayerDrop)), made(LayerDrop)
    train_both(model, reference, PLANS[LayerDrop], rounds=1)
    with summon_full_params(model):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-11)
    copied = shard(made(LayerDrop))
    copied.load_state_dict(copy.deepcopy(model.state_dict()))
    train_both(copied, reference, PLANS[LayerDrop], rounds=0)


@pytest.mark.parametrize("kind", [VisionLanguage, EarlyExit])
@distributed(world_size=2)
def test_gradients_and_parameters_are_the_same_to_the_bit(kind):
    """Where unsharded training adds up the ranks' gradients in their order: halves are exact."""
    rank, model, reference = dist.get_rank(), shard(made(kind)), made(kind)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, reference)]
    for step, plans in enumerate([*PLANS[kind]] * 2):
        loss_of(model, batch(step, rank), plans[rank]).backward()
        for r in range(2):
            (loss_of(reference, batch(step, r), plans[r]) / 2).backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or ours.grad.full_tensor().equal(theirs.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.detach().full_tensor().equal(theirs.detach()), name


@distributed(world_size=2)
def test_optimizers_of_flat_views_and_their_state_saved_and_loaded():
    """Also of a group that no rank has run yet, which has no state."""
    plans = [((1, 0, 0), (0, 1, 0), ()), ((0, 0, 0), (1, 0, 0), ())]
    rank, reference = dist.get_rank(), made(LayerDrop)
    model = shard(made(LayerDrop))
    optimizer = torch.optim.AdamW(flat_parameters(model), lr=0.01)
    other = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in range(6):
        if step == 2:  # go on with copies
            states = copy.deepcopy(get_state_dict(model, optimizer))
            model = shard(made(LayerDrop))
            optimizer = torch.optim.AdamW(flat_parameters(model), lr=0.01)
            set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        at = plans[step % 2] if step < 4 else ((0, 0, 1), (1, 0, 1), ())
        loss_of(model, batch(step, rank), at[rank]).backward()
        mean_loss(reference, step, at).backward()
        assert_same_gradients(model, reference, rtol=1e-10, atol=1e-12)
        for item in (optimizer, other):
            item.step()
            item.zero_grad()
    assert_equal_parameters(model, reference)


@distributed(world_size=2)
def test_beside_another_model_on_the_same_process_group():
    """The exchanges of the other model are as long as the rounds of the first, from its first forward on."""
    rank, plain, reference = dist.get_rank(), made(VisionLanguage), made(VisionLanguage)
    for block in plain.blocks:
        fully_shard(block)
    fully_shard(plain)
    everywhere = [((1,), (1,), (1,)), ((0,), (0,), (0,))]
    train_both(plain, reference, everywhere, rounds=1)
    model, other = shard(made(LayerDrop)), made(LayerDrop)
    for step in range(3):
        train_both(model, other, [PLANS[LayerDrop][step]], rounds=1)
        loss = loss_of(plain, batch(step, rank), (1,))
        train_both(model, other, [PLANS[LayerDrop][step - 1]], rounds=1)
        loss.backward()
        mean_loss(reference, step, everywhere[0]).backward()
        assert_same_gradients(plain, reference, rtol=1e-10, atol=1e-12)


# ---- other models beside one that has optional groups


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.last = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Generator(VisionLanguage):
    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__(use_reentrant)
        self.head = nn.Linear(DIM, DIM)


class Judging(Generator):
    """Asks a model that is not a part of it, in its forward, after the tower."""

    def __init__(self, judge: nn.Module) -> None:
        super().__init__()
        self.judges = [judge]

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        if plan[0]:
            h = h + self.projection(self.tower(x.sin()))
        h = h + self.judges[0](h)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def critic_of(is_frozen: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return Critic().double().requires_grad_(not is_frozen)


def sharded_critic(is_frozen: bool = False) -> nn.Module:
    critic = critic_of(is_frozen)
    for layer in critic.layers:
        fully_shard(layer)
    return fully_shard(critic)


MIXED = [((1,), (0,)), ((0,), (1,)), ((0,), (0,)), ((1,), (1,))]
Nets = Sequence[nn.Module]


def train_several(models: Nets, twins: Nets, loss: Callable[[Nets, torch.Tensor, Plan], torch.Tensor]) -> None:
    """``loss``: of some models, a batch and a plan."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizers = [sgd(net.parameters()) for net in (*models, *twins)]
    for step, plans in enumerate([*MIXED, *MIXED]):
        loss(models, batch(step, rank), plans[rank]).backward()
        torch.stack([loss(twins, batch(step, r), plans[r]) for r in range(size)]).mean().backward()
        for model, twin in zip(models, twins, strict=True):
            got = whole(model, lambda param: param.grad, twin)
            expected = {name: param.grad for name, param in twin.named_parameters()}
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model, twin in zip(models, twins, strict=True):
        assert_equal_parameters(model, twin)


def criticised(nets: Nets, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return nets[1](nets[0](x, plan)).square().mean()


def criticised_twice(nets: Nets, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return criticised(nets, x, plan) + nets[1](x).sin().mean() + nets[1](nets[0](-x, plan)).cos().mean()


def fed(nets: Nets, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return nets[0](nets[1](x) * x, plan).square().mean()


def summed(nets: Nets, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return nets[0](x, plan).square().mean() + nets[1](x).square().mean()


def summed_later(nets: Nets, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return nets[1](x).square().mean() + nets[0](x, plan).square().mean()


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@distributed(world_size=2)
def test_a_backward_through_another_model_too(use_reentrant):
    for i, loss in enumerate((criticised, criticised_twice, fed, summed, summed_later)):
        is_frozen = (i + (None, False, True).index(use_reentrant)) % 2 == 0  # every two of the three meet
        models = [shard(made(Generator, use_reentrant=use_reentrant)), sharded_critic(is_frozen)]
        twins = [made(Generator, use_reentrant=use_reentrant), critic_of(is_frozen)]
        train_several(models, twins, loss)


@pytest.mark.parametrize("is_frozen", [False, True])
@distributed(world_size=2)
def test_another_model_that_runs_inside_forward(is_frozen):
    def alone(nets: Nets, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        return nets[0](x, plan).square().mean()

    critic, twin = sharded_critic(is_frozen), critic_of(is_frozen)
    models = [shard(made(Judging, judge=critic)), critic]
    train_several(models, [made(Judging, judge=twin), twin], alone)


def both(nets: Nets, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return nets[0](x, plan).square().mean() + nets[1](x, (1 - plan[0],)).cos().mean()


def one_after_the_other(nets: Nets, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    return nets[1](nets[0](x, plan), (1 - plan[0],)).square().mean()


@pytest.mark.parametrize("use_reentrant", [None, False], ids=["plain", "checkpoint"])
@distributed(world_size=2)
def test_a_backward_through_two_models_with_optional_groups(use_reentrant):
    for loss in (both, one_after_the_other):
        models = [shard(made(Generator, use_reentrant=use_reentrant)) for _ in range(2)]
        train_several(models, [made(Generator, use_reentrant=use_reentrant) for _ in range(2)], loss)


@distributed(world_size=2)
def test_a_backward_that_comes_back_to_a_model_with_optional_groups_is_refused():
    def around(nets: Nets, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        return one_after_the_other((nets[1], nets[0]), one_after_the_other(nets, x, plan).sin() * x, plan)

    models = [shard(made(Generator)) for _ in range(2)]
    plan = (dist.get_rank(),)
    with pytest.raises(RuntimeError, match="so that they share a root, or run a backward for each"):
        around(models, batch(0, dist.get_rank()), plan).backward()
    assert all(param.grad is None for model in models for param in model.parameters())
    for model in models:
        loss_of(model, batch(0, dist.get_rank()), plan).backward()


# ---- groups that are not optional, and stay gathered on one rank only


class Boxing(Mlp):
    """Returns a function if it is told to, in which no tensor is looked for."""

    def forward(self, x: torch.Tensor, in_box: int) -> torch.Tensor | Callable[[], torch.Tensor]:
        y = super().forward(x)
        return (lambda: y) if in_box else y


def unboxed(output: torch.Tensor | Callable[[], torch.Tensor]) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output()


class Unhooked(VisionLanguage):
    """Blocks, in an order, some of them several times; what returns a box stays gathered. A plan: (whether there is an
    image, whether block 1 returns a box, whether the tower does)."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.blocks, self.tower = nn.ModuleList(Boxing() for _ in range(3)), Boxing()
        self.order = order

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        if plan[0]:
            h = h + self.projection(unboxed(self.tower(x.sin(), plan[2])))
        for i in self.order:
            h = unboxed(self.blocks[i](h, plan[1] and i == 1))
        return self.head(h)


BOXES = [
    ((1, 1, 0), (0, 0, 0), (0, 0, 0)),
    ((0, 0, 0), (0, 0, 0), (0, 0, 0)),
    ((0, 0, 0), (0, 1, 0), (1, 0, 0)),
    ((1, 0, 1), (0, 0, 0), (1, 0, 0)),
    ((0, 0, 0), (0, 0, 0), (0, 1, 0)),
    ((1, 1, 1), (1, 1, 1), (0, 0, 0)),
]


# Once, twice in a row, and twice where the forward before it gathers it ahead.
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 1, 2), (1, 0, 1, 2), (0, 1, 0, 1, 2, 1)], ids=str)
@distributed(world_size=(2, 3))
def test_a_group_that_stays_gathered_on_one_rank_only(order):
    model, reference = made(Unhooked, order=order), made(Unhooked, order=order)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "forward of the fully_shard'ed Boxing")
        train_both(shard(model), reference, BOXES)


@pytest.mark.parametrize("is_together", [True, False])
@distributed(world_size=(2, 3))
def test_groups_that_stay_gathered_on_one_rank_only_in_two_forwards(is_together):
    """The second forward may skip the group whose output the first has left in a box."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "forward of the fully_shard'ed Boxing")
        train_in_two_forwards(shard(made(Unhooked, order=(0, 1))), made(Unhooked, order=(0, 1)), BOXES, is_together)


@pytest.mark.parametrize("hints", ["forward", "backward", "both"])
@distributed(world_size=2)
def test_groups_gathered_ahead_as_the_user_says(hints):
    """Optional groups among them are left out."""
    model = shard(made(VisionLanguage))
    parts = [model.tower, model.blocks[0], model.blocks[1]]
    if hints != "backward":
        set_modules_to_forward_prefetch(model, parts)
        set_modules_to_forward_prefetch(model.blocks[0], parts[1:])
    if hints != "forward":
        set_modules_to_backward_prefetch(model.blocks[1], parts)
    train_both(model, made(VisionLanguage), PLANS[VisionLanguage])


# ---- inside forward


class Summing(VisionLanguage):
    """All ranks add something up in the middle of forward, and gather a group ahead."""

    optional = ("tower", "projection")
    ahead, serves = "", True

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        if plan[0]:
            h = h + self.projection(self.tower(x.sin()))
        if get_state(self) is not None:
            if self.serves:
                sync_optional_groups(self)
            dist.all_reduce(torch.ones(1))
        if self.ahead and get_state(self) is not None:
            unshard(self.get_submodule(self.ahead))
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@pytest.mark.parametrize("ahead", ["", "blocks.1"])
@distributed(world_size=2)
def test_collectives_of_the_users_own_inside_forward(ahead):
    model = shard(made(Summing))
    model.ahead = ahead
    train_both(model, made(Summing), PLANS[VisionLanguage])


class Ahead(VisionLanguage):
    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        if plan[0] and get_state(self) is not None:
            unshard(self.tower)
        return super().forward(x, plan)


@distributed(world_size=2)
def test_an_optional_group_gathered_ahead():
    train_both(shard(made(Ahead)), made(Ahead), PLANS[VisionLanguage])


# ---- other ways to shard


class Tied(VisionLanguage):
    """A weight of an optional group is one of the root's too."""

    def __init__(self) -> None:
        super().__init__()
        self.projection.weight = self.embed.weight


@distributed(world_size=2)
def test_a_parameter_tied_to_one_of_the_group_around():
    train_both(shard(made(Tied)), made(Tied), PLANS[VisionLanguage])


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world_size=(2, 3))
def test_parameters_tied_between_optional_groups(reshard):
    """They belong to the group around both."""
    model, reference = made(LayerDrop), made(LayerDrop)
    for net in (model, reference):
        net.layers[1].up.weight = net.layers[0].up.weight
    train_both(shard(model, reshard_after_forward=reshard), reference, PLANS[LayerDrop])


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world_size=(2, 3))
def test_several_modules_in_one_optional_group(reshard):
    """Each rank runs some of the modules."""
    model = made(LayerDrop)
    fully_shard([model.layers[0], model.layers[2]], optional=True, reshard_after_forward=reshard)
    fully_shard(model.layers[1], reshard_after_forward=reshard)
    fully_shard(model)
    plans = [((1, 1, 0), (0, 1, 1), (0, 1, 0)), ((0, 2, 0), (0, 2, 0), (0, 2, 0)), ((2, 1, 1), (0, 1, 0), (1, 1, 0))]
    train_both(model, made(LayerDrop), plans)


@pytest.mark.parametrize("kind", [VisionLanguage, LayerDrop, Experts])
@distributed(world_size=(2, 3))
def test_in_debug_mode(kind):
    """Where ranks meet before each collective; a rank at the end of its forward serves others."""
    with environment(FSDP_COMPOSE_DEBUG="1"):
        train_both(shard(made(kind)), made(kind), PLANS[kind], rounds=1)


@distributed(world_size=2)
def test_a_step_that_one_rank_skips_is_named_in_debug_mode():
    rank = dist.get_rank()
    with environment(FSDP_COMPOSE_DEBUG="1"):
        model = shard(made(LayerDrop))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, batch(0, rank), PLANS[LayerDrop][0][rank]).backward()
        if rank == 0:
            optimizer.step()
        with pytest.raises(RuntimeError, match="optimizer step"):
            loss_of(model, batch(0, rank), PLANS[LayerDrop][0][rank]).backward()


@pytest.mark.parametrize("where", ["forward", "backward", "end of backward"])
@distributed(world_size=2)
def test_another_model_after_an_interrupted_one_that_one_rank_still_has(where):
    """Its rounds are over, whether or not a rank has collected it."""
    rank, model, plan = dist.get_rank(), shard(made(LayerDrop)), PLANS[LayerDrop][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        if where == "forward":
            raise_by_the_user()
        if where == "backward":
            output.register_hook(raise_by_the_user)

    with environment(FSDP_COMPOSE_DEBUG=str(int(where == "end of backward"))):
        loss_of(model, batch(0, rank), plan[rank]).backward()
        model.embed.register_forward_hook(fail)
        if where == "end of backward" and rank == 0:
            optimizer.step()
        with pytest.raises((ValueError, RuntimeError), match=r"by the user|optimizer step|raised an exception"):
            loss_of(model, batch(0, rank), plan[rank]).backward()
    kept = [model] if rank == 0 else []
    del model, optimizer
    gc.collect()
    other = fully_shard(nn.Linear(3, 3))
    other(torch.ones(2, 3)).sum().backward()
    train_both(shard(made(VisionLanguage)), made(VisionLanguage), PLANS[VisionLanguage], rounds=1)
    assert len(kept) == (rank == 0)


@pytest.mark.parametrize("keeps_storage", [False, True])
@distributed(world_size=(2, 3))
def test_what_is_held_gathered_between_forwards(keeps_storage):
    """It is gathered again all the same, on all ranks."""
    rank, model, reference = dist.get_rank(), shard(made(VisionLanguage)), made(VisionLanguage)
    set_reshard_after_backward(model, False)
    set_keep_unsharded_storage(model, keeps_storage)
    unshard(model.blocks[0], until_reshard=True)
    train_both(model, reference, PLANS[VisionLanguage], rounds=1)
    with keep_unsharded(model), torch.no_grad():
        for step, plans in steps_of(VisionLanguage):
            x = batch(step, rank)
            torch.testing.assert_close(model(x, plans[rank]), reference(x, plans[rank]), rtol=1e-9, atol=1e-11)
    reshard(model.blocks[0])
    train_both(model, reference, PLANS[VisionLanguage], rounds=1)


# ---- errors


class Wrong(VisionLanguage):
    """Runs the tower inside a block, or a block on some ranks only, or blocks in another order on one of them."""

    inside = ""

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.embed(x)
        if self.inside == "block":
            self.blocks[0].register_forward_pre_hook(lambda _module, args: (self.tower(args[0]),))
        if self.inside == "skip" and dist.get_rank() == 1:
            h = self.blocks[0](h)
        if self.inside == "order" and dist.get_rank() == 0:
            h = h + self.projection(self.tower(h))
        if self.inside == "order" and dist.get_rank() == 2:
            return self.head(self.blocks[0](self.blocks[1](h)))
        return self.head(self.blocks[1](self.blocks[0](h)))


@distributed(world_size=2)
def test_an_optional_group_inside_another_group_is_refused():
    model = shard(made(Wrong))
    model.inside = "block"
    with pytest.raises(RuntimeError, match=r"optional fully_shard group tower runs inside the forward of blocks\.0"):
        loss_of(model, batch(0, 0), (1,))


@distributed(world_size=2)
def test_a_group_that_is_not_optional_and_runs_on_one_rank_is_named_on_all():
    model = shard(made(Wrong))
    model.inside = "skip"
    with pytest.raises(RuntimeError, match=r"different collectives.*blocks\.[01]"):
        loss_of(model, batch(0, 0), (0,))


@distributed(world_size=3)
def test_another_order_on_one_rank_is_named_on_all_while_a_third_demands():
    model = shard(made(Wrong))
    loss_of(model, batch(0, 0), (0,)).backward()
    model.inside = "order"
    with pytest.raises(RuntimeError, match=r"different collectives.*blocks\.[01]"):
        loss_of(model, batch(0, 0), (0,))
    model.inside = ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*discarded.*")
        loss_of(model, batch(0, 0), (0,)).backward()


@distributed(world_size=2)
def test_a_root_cannot_be_optional():
    model = fully_shard(made(LayerDrop), optional=True)
    with pytest.raises(ValueError, match="LayerDrop is optional, but its forward is the outermost one"):
        model(batch(0, 0), (1, 1, 1))


@distributed(world_size=2)
def test_functional_mode_is_refused():
    model = shard(made(LayerDrop))
    with functional_mode(model), pytest.raises(NotImplementedError, match="functional mode.*optional groups"):
        model(batch(0, 0), (1, 1, 1))
    train_both(model, made(LayerDrop), PLANS[LayerDrop], rounds=1)


@distributed(world_size=2)
def test_what_needs_functional_mode_is_refused_with_a_remedy_that_works():
    """The remedy for models with optional groups is not functional mode alone, which refuses them."""
    x = batch(0, dist.get_rank())
    for options, needs in (({"optional": True}, "shard it without optional=True"), ({}, r"functional_mode\(model\): ")):
        model = made(VisionLanguage)
        fully_shard(model.tower, **options)
        fully_shard(model)
        loss = loss_of(model, x, (1,))
        with pytest.raises(RuntimeError, match=needs):
            loss.backward(create_graph=True)
        with pytest.raises(RuntimeError, match=needs):
            torch.autograd.grad(loss_of(model, x, (1,)), [next(model.parameters())])
    with functional_mode(model):
        torch.autograd.grad(loss_of(model, x, (1,)), [next(model.parameters())], create_graph=True)


@pytest.mark.parametrize("plans", [((), (0,)), ((1,), ()), ((0,), (1,)), ((0, 1), (1,))], ids=str)
@distributed(world_size=2, fresh=True)
def test_experts_that_one_rank_alone_uses_are_refused_with_the_remedy(plans):
    model = made(Experts)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    rank = dist.get_rank()
    with pytest.raises(RuntimeError, match=r"fully_shard\(optional=True\)"):
        loss_of(model, batch(0, rank), plans[rank]).backward()


@distributed(world_size=4)
def test_parts_are_refused():
    for option in (2, True):
        model = shard(made(LayerDrop), reshard_after_forward=2)
        set_reshard_after_forward(model, option)
        with pytest.raises(NotImplementedError, match="keeps parts"):
            model(batch(0, 0), (1, 1, 1))


@distributed(world_size=2)
def test_offload_is_refused():
    with pytest.raises(NotImplementedError, match="offloaded"):
        shard(made(LayerDrop), offload_policy=CPUOffloadPolicy())(batch(0, 0), (1, 1, 1))


@distributed(world_size=2)
def test_replicated_groups_beside_optional_ones_are_refused():
    model = made(LayerDrop)
    fully_shard(model.layers[0], optional=True)
    replicate(model)
    with pytest.raises((NotImplementedError, ValueError), match="replicate"):
        model(batch(0, 0), (1, 1, 1))


@distributed(world_size=2)
def test_models_that_share_groups_are_refused():
    shared = fully_shard(Mlp().double())
    models = [nn.Sequential(shared, Mlp()).double() for _ in range(2)]
    fully_shard(models[0][1], optional=True)
    for model in models:
        fully_shard(model)
    with pytest.raises(NotImplementedError, match="several models share groups"):
        for model in models:
            model(batch(0, 0))


@distributed(world_size=4)
def test_parameters_that_are_dtensors_are_refused():
    mesh = lasting_mesh(("data", "tensor"))
    model = made(LayerDrop)
    parallelize_module(model.layers[1], mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(NotImplementedError, match=r"layers\.1 has parameters that are DTensors"):
        shard(model, mesh=mesh["data"])(batch(0, 0), (1, 1, 1))


@distributed(world_size=2)
def test_parameters_that_their_class_gathers_are_refused():
    model = made(LayerDrop)
    layer = model.layers[1].up
    layer.weight = nn.Parameter(EightBit(layer.weight.detach().float()))
    with pytest.raises(NotImplementedError, match="has parameters that their class gathers"):
        shard(model)(batch(0, 0), (1, 1, 1))


@distributed(world_size=2)
def test_compiled_regions_are_refused():
    run = fsdp_compose.compile(shard(made(LayerDrop)), backend="eager")
    with pytest.raises(NotImplementedError, match="a compiled region .* with optional groups"):
        run(batch(0, 0), (1, 1, 1))


@distributed(world_size=2)
def test_keeping_an_optional_group_gathered_is_refused():
    model = shard(made(LayerDrop))
    with pytest.raises(ValueError, match="is optional"):
        unshard(model.layers[0], until_reshard=True)
    model(batch(0, 0), (1, 1, 1))
    with pytest.raises(RuntimeError, match="only inside the forward"):
        unshard(model.layers[0])


# ---- failures


class Failing(LayerDrop):
    """Raises where it is told to: ``fails`` tells in which rank and where, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = ""

    def at(self, where: str, h: torch.Tensor) -> torch.Tensor:
        if self.fails == where:
            raise ArithmeticError("on one rank")
        if self.fails == f"{where} in backward" and h.requires_grad:
            h = h * 1
            h.register_hook(_fail)
        return h

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        h = self.at("before the layers", self.embed(x))
        for layer, times in zip(self.layers, plan, strict=True):
            for _ in range(times):
                h = self.at("between the layers", layer(h))
        return self.at("at the end", self.last(self.at("behind the layers", h)))


def _fail(_grad: torch.Tensor) -> None:
    raise ArithmeticError("on one rank")


PLACES = ["before the layers", "between the layers", "behind the layers"]


@pytest.mark.parametrize("place", [*PLACES, "at the end", *[f"{place} in backward" for place in PLACES]])
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)], ids=str)
@distributed(world_size=3)
def test_training_goes_on_after_ranks_have_raised(place, failing):
    """All others raise one error that names them, wherever they are."""
    check_raising(place, failing)


@pytest.mark.parametrize("place", PLACES)
@distributed(world_size=2)
def test_training_goes_on_after_one_of_two_ranks_has_raised(place):
    check_raising(place, (1,))
    check_raising(f"{place} in backward", (0,))


def check_raising(place: str, failing: tuple[int, ...]) -> None:
    model, rank = shard(made(Failing)), dist.get_rank()
    reference = made(Failing)
    train_both(model, reference, PLANS[LayerDrop], rounds=1)
    plans = [(1, 1, 2), (0, 1, 1), (0, 0, 0)]
    model.fails = place if rank in failing else ""
    raised = "rank 0|rank 1|some ranks" if len(failing) > 1 else f"rank {failing[0]}"
    expected = (ArithmeticError, RuntimeError) if rank in failing else RuntimeError
    with pytest.raises(expected, match=f"on one rank|({raised}) raised an exception"):
        loss_of(model, batch(0, rank), plans[rank]).backward()
    model.fails = ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*discarded.*")
        model.zero_grad()
        loss_of(model, batch(0, rank), plans[rank]).backward()
    mean_loss(reference, 0, plans).backward()
    assert_same_gradients(model, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("demands", [True, False])
@distributed(world_size=3, pg_timeout=2)
def test_a_rank_that_runs_no_forward_is_named_in_bounded_time(demands):
    model, rank = shard(made(LayerDrop)), dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    loss_of(model, batch(0, rank), (1, 0, 0)).backward()
    if rank == 2:
        store.wait(["raised 0", "raised 1"], timedelta(seconds=40))
        return
    with pytest.raises(RuntimeError, match="another rank did not come|rank 2|not all ranks have"):
        loss_of(model, batch(1, rank), (1, 0, 0) if demands and rank == 0 else (0, 0, 0)).backward()
    store.set(f"raised {rank}", b"")


@distributed(world_size=2, pg_timeout=2)
def test_a_collective_of_the_users_own_without_serving_is_an_error_with_the_remedy():
    model, rank = shard(made(Summing)), dist.get_rank()
    model.serves = False
    if rank:
        time.sleep(0.5)  # so that rank 0 stops waiting first: it would be told of the error here otherwise
    expected = r"rank 0 needs tower.*Call sync_optional_groups\(model\)" if rank == 0 else "timed out|Timed out|closed"
    with pytest.raises(RuntimeError, match=expected):
        model(batch(0, rank), (1,) if rank == 0 else (0,))


@distributed(world_size=3, fresh=True)
def test_a_rank_that_makes_another_number_of_backwards_is_named_on_all():
    """Here it raises before it comes to its backward, and goes on to the next forward."""
    with impatient():
        model, rank = shard(made(LayerDrop)), dist.get_rank()
        loss = loss_of(model, batch(0, rank), (1, 0, 0))
        with pytest.raises(
            RuntimeError,
            match=r"the ranks run different programs: .* rank 1 .*the all-gather of (last\.weight|\(root\))",
        ):
            if rank != 1:
                loss.backward()
            loss_of(model, batch(0, rank), (0, 1, 0))


# ---- costs


def rounds_in(model: nn.Module, call: Callable[[], object]) -> int:
    root = get_state(model).root
    before = root.scheduler.protocol.count
    call()
    return root.scheduler.protocol.count - before


@distributed(world_size=2)
def test_where_no_rank_runs_them_rounds_are_few_without_the_garbage_collector():
    rank, model = dist.get_rank(), shard(made(VisionLanguage))
    for _ in range(2):
        loss_of(model, batch(0, rank), (1,)).backward()
    gc.collect()
    gc.disable()
    try:
        loss_of(model, batch(0, rank), (1,)).backward()
        # A point at each of the two blocks, at the end of forward, and at the start of backward.
        for _ in range(2):
            assert rounds_in(model, lambda: loss_of(model, batch(0, rank), (0,)).backward()) == 4
        assert rounds_in(model, lambda: loss_of(model, batch(0, rank), (rank,)).backward()) > 6
    finally:
        gc.enable()


@distributed(world_size=2, fresh=True)
def test_models_without_optional_groups_make_no_rounds():
    model = made(VisionLanguage)
    model.optional = ()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model(batch(0, 0), (1,))
    root = get_state(model).root
    assert not root.scheduler.skips
    assert len(root.exchange._carrier._head) == control_exchange._HEAD.size  # nothing is padded for rounds


@distributed(world_size=2)
def test_a_rank_that_skips_a_group_frees_it_again():
    rank, model = dist.get_rank(), shard(made(LayerDrop))
    for step, plans in steps_of(LayerDrop):
        loss_of(model, batch(step, rank), plans[rank]).backward()
        assert not any(h.unsharded.is_allocated for item in model.layers for h in get_state(item)._handles)


@distributed(world_size=2)
def test_a_rank_keeps_what_it_has_gathered_for_itself_when_another_rank_gathers_it():
    rank, model, plans = dist.get_rank(), shard(made(Experts), reshard_after_forward=False), ((0, 2), (1, 0))
    for step in range(2):
        loss = loss_of(model, batch(step, rank), plans[rank])
        for i in plans[rank]:
            assert all(handle.unsharded.is_allocated for handle in get_state(model.layers[i])._handles), (step, i)
        loss.backward()


class MostBytes:
    """Hears what groups do, and notes how much memory there was at most for gathering and reducing; or, of which
    ``module``, for its groups."""

    def __init__(self, model: nn.Module) -> None:
        self.most = 0
        self._model = model

    def begin(self, *_: object) -> Callable[[], None]:
        self._look()
        return self._look

    def _look(self) -> None:
        root = get_state(self._model).root
        handles = [handle for state in root.live_states() for handle in state._handles]
        buffers = [buffer.storage.nbytes() for buffer in root.communicator._buffers.values()]
        self.most = max(self.most, sum(buffers) + sum(handle.unsharded.memory.nbytes() for handle in handles))


def most_bytes(model: nn.Module, step: int, plan: Plan) -> int:
    listener = MostBytes(model)
    with listening(listener):
        loss_of(model, batch(step, dist.get_rank()), plan).backward()
    return listener.most


@distributed(world_size=3)
def test_a_rank_that_skips_groups_holds_one_of_them_at_a_time():
    """Beyond what it holds where no rank runs one: also where others demand several at once."""
    rank, model = dist.get_rank(), shard(made(Experts))
    none, different = ((), (), ()), ((), (0, 1, 2, 2), (2, 1, 0, 1))
    largest = max(8 * sum(p.numel() for p in layer.parameters()) for layer in made(Experts).layers)
    for step in range(3):
        plain, most = (most_bytes(model, step, plans[rank]) for plans in (none, different))
        if rank == 0:
            assert plain < most <= plain + largest + 64, (plain, most, largest)  # and some padding


class Inside(nn.Module):
    """All its parameters are in groups inside; one of them is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tower = nn.Linear(4, 4), nn.Linear(4, 4)
        self.runs_tower = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.runs_tower:
            self.tower(x)
        return x


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(4, 4), Inside(), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.inside(x).detach())


@distributed(world_size=2)
def test_ranks_gather_ahead_alike_past_a_group_without_parameters():
    model = Around()
    fully_shard(model.inside.tower, optional=True)
    for module in (model.first, model.inside.first, model.inside, model.last, model):
        fully_shard(module)
    for step in range(4):
        model.inside.runs_tower = bool(step) and dist.get_rank() == 0
        model(torch.ones(2, 4)).sum().backward()

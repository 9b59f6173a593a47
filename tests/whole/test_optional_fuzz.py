"""Random models and programs with groups that ranks may skip train as the same ones unsharded, in double precision.

By hand: ``FSDP_COMPOSE_FUZZ=200 python -m pytest tests/whole/test_optional_fuzz.py`` for as many programs more.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import clip_grad_norm_, fully_shard, no_sync
from tests.harness import distributed
from tests.runtime.test_optional import DIM, Mlp, assert_equal_parameters, batch, unboxed
from tests.training import assert_same_gradients

NUM_PROGRAMS = 4
STEPS = 4
BOXES = 0.1  # how often a layer returns what cannot be hooked: it stays gathered on that rank


class Layer(nn.Module):
    """One of a random model; it may have layers inside, which a rank may skip if it may skip this one."""

    def __init__(self, rng: random.Random, depth: int, reentrant: bool) -> None:
        super().__init__()
        self.is_optional = rng.random() < 0.6
        self.own = Mlp()
        self.is_nested = rng.random() < 0.4  # a group inside
        self.checkpoints = rng.choice([None, None, False, *([True] if reentrant else [])])
        self.inner = nn.ModuleList(Layer(rng, depth - 1, reentrant) for _ in range(rng.randint(0, 2) if depth else 0))

    def forward(self, x: torch.Tensor, seed: int, in_box: bool = False) -> torch.Tensor | Callable[[], torch.Tensor]:
        y = walk(self.inner, self.own(x), random.Random(seed))
        return (lambda: y) if in_box else y


def walk(
    layers: nn.ModuleList, x: torch.Tensor, rng: random.Random, goes_wrong: tuple[nn.Module, str] | None = None
) -> torch.Tensor:
    """Run the layers that are not optional, in order, and between them others, as this rank's dice fall.
    ``goes_wrong``: at which of the former, and how."""
    optional = [layer for layer in layers if layer.is_optional]
    for layer in layers:
        picked = [rng.choice(optional) for _ in range(rng.randint(0, 2))] if optional and rng.random() < 0.7 else []
        for item in [*picked, *([] if layer.is_optional else [layer])]:
            # What is not optional gets a number that does not depend on this rank.
            seed = rng.randint(0, 1 << 30)
            if goes_wrong is not None and item is goes_wrong[0]:
                if goes_wrong[1] == "raises":
                    raise ArithmeticError("on one rank")
                if goes_wrong[1] == "skips":
                    continue
                x = unboxed(item(x, seed))
            y = x if rng.random() < 0.8 or not item.is_optional or item.checkpoints else x.detach()
            if item.checkpoints is None:
                y = unboxed(item(y, seed, rng.random() < BOXES))
            else:
                y = checkpoint(item, y, seed, use_reentrant=item.checkpoints)
            x = x + y if item.is_optional and rng.random() < 0.5 else y
    return x


class Model(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        reentrant = rng.random() < 0.4
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.layers = nn.ModuleList(Layer(rng, 2, reentrant) for _ in range(rng.randint(2, 4)))
        self.goes_wrong: tuple[nn.Module, str] | None = None
        for layer in self.layers:
            if rng.random() < 0.2 and not reentrant:
                layer.own.up.requires_grad_(False)

    def forward(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        return self.head(walk(self.layers, self.embed(x), random.Random(seed), self.goes_wrong))


def shard(layers: nn.ModuleList, rng: random.Random, reshard: bool) -> None:
    for layer in layers:
        shard(layer.inner, rng, reshard)
        if layer.is_nested:
            fully_shard(layer.own, reshard_after_forward=reshard)
        fully_shard(layer, optional=layer.is_optional, reshard_after_forward=reshard)


def made(rng: random.Random) -> list[Model]:
    """A sharded model, and the same one unsharded."""
    structure = rng.randint(0, 1 << 30)
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Model(random.Random(structure)).double())
    reshard = rng.random() < 0.7
    shard(nets[0].layers, rng, reshard)
    fully_shard(nets[0])
    return nets


def run(program: int) -> None:
    rng, rank, size = random.Random(program), dist.get_rank(), dist.get_world_size()
    nets = model, reference = made(rng)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    for step in range(STEPS):
        num_backwards, num_forwards, is_quiet = rng.randint(1, 2), rng.randint(1, 2), rng.random() < 0.3
        is_synced = rng.random() < 0.5
        for i in range(num_backwards):
            seeds = [[rng.randint(0, 1 << 30) for _ in range(num_forwards)] for _ in range(size)]
            if is_quiet:  # all ranks do the same
                seeds = [seeds[0]] * size

            def loss_of(net: nn.Module, of: int, step: int = step, seeds: list[list[int]] = seeds) -> torch.Tensor:
                return torch.stack([net(batch(step, of), seed).square().mean() for seed in seeds[of]]).sum()

            with nullcontext() if is_synced or i + 1 == num_backwards else no_sync(model):
                loss = loss_of(model, rank)
                if rng.random() < 0.3:  # a forward without a backward in between
                    with torch.no_grad():
                        model(batch(step, rank), seeds[rank - 1][0])
                loss.backward()
            torch.stack([loss_of(reference, of) for of in range(size)]).mean().backward()
        assert_same_gradients(model, reference, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(*[clip_grad_norm_(net.parameters(), 0.5) for net in nets])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_parameters(model, reference)


@distributed(world_size=(2, 3, 4), timeout=550)
def test_random_programs():
    num_programs = NUM_PROGRAMS + int(os.environ.get("FSDP_COMPOSE_FUZZ", "0"))
    for program in range(num_programs):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "forward of the fully_shard'ed Layer")
                run(1000 * dist.get_world_size() + program)
        except BaseException as error:
            error.add_note(f"in program {1000 * dist.get_world_size() + program}")
            raise


def go_wrong(program: int) -> None:
    rng, rank, size = random.Random(program), dist.get_rank(), dist.get_world_size()
    model, reference = made(rng)
    numbers = [i for i, layer in enumerate(model.layers) if not layer.is_optional]
    if not numbers:
        return
    for _ in range(3):
        number, odd, how = rng.choice(numbers), rng.randrange(size), rng.choice(["raises", "skips", "runs twice"])
        model.goes_wrong = (model.layers[number], how) if rank == odd else None
        seeds = [rng.randint(0, 1 << 30) for _ in range(size)]
        expected = ArithmeticError if how == "raises" and rank == odd else RuntimeError
        message = "on one rank" if how == "raises" else "different collectives in this iteration"
        with pytest.raises(expected, match=rf"{message}|rank {odd} raised an exception"):
            model(batch(0, rank), seeds[rank]).square().mean().backward()
        model.goes_wrong = None
        model.zero_grad()
        reference.zero_grad()
        model(batch(0, rank), seeds[rank]).square().mean().backward()
        torch.stack([reference(batch(0, of), seeds[of]).square().mean() for of in range(size)]).mean().backward()
        assert_same_gradients(model, reference, rtol=1e-10, atol=1e-12)
        model.zero_grad()


@distributed(world_size=(2, 3, 4), timeout=300)
def test_random_programs_in_which_one_rank_goes_wrong():
    """All ranks raise one error, wherever they are and whatever they demand, and the next iteration is right."""
    for program in range(2 * NUM_PROGRAMS + int(os.environ.get("FSDP_COMPOSE_FUZZ", "0"))):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "forward of the fully_shard'ed Layer|.*discarded")
                go_wrong(1000 * dist.get_world_size() + program)
        except BaseException as error:
            error.add_note(f"in program {1000 * dist.get_world_size() + program}")
            raise

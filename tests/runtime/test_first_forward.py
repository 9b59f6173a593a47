"""The first forward: all ranks meet, and compare their models, before they train."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import MixedPrecisionPolicy, fully_shard, replicate, set_gradient_divide_factor
from fsdp_compose.core.comm.store import TIMEOUT_ENV
from tests.harness import distributed, environment
from tests.training import full


def rendezvous_timeout(seconds: float) -> AbstractContextManager[None]:
    return environment(**{TIMEOUT_ENV: str(seconds)})


def assert_trains(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters() if param.requires_grad)


def error_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> str:
    """The error that the forward of ``model`` raises, on every rank alike and without waiting for the timeout, which
    is beyond the test's."""
    with rendezvous_timeout(300), pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4, dtype=dtype))
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert texts == texts[:1] * len(texts)
    return texts[0]


def shard_two(model: nn.Module, **kwargs: Any) -> nn.Module:
    fully_shard(model[0], **kwargs)
    return fully_shard(model, **kwargs)


def frozen(model: nn.Module) -> nn.Module:
    model[1].bias.requires_grad_(False)
    return model


def two_layers(*more: nn.Module, out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, out), *more)


# What the odd rank does, and what the error must name.
DIFFERENT: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "shape": (lambda: shard_two(two_layers(out=6)), ("1.weight", r"\[4, 4\]", r"\[6, 4\]")),
    "dtype": (lambda: shard_two(two_layers().double()), ("1.weight", "torch.float32", "torch.float64")),
    "extra layer": (lambda: shard_two(two_layers(nn.Linear(4, 4))), ("2.weight",)),
    "missing layer": (lambda: shard_two(nn.Sequential(nn.Linear(4, 4))), ("1.weight",)),
    "one group less": (lambda: fully_shard(two_layers()), ("0.weight",)),
    "another group": (lambda: regrouped(), ('"0.weight"', '"1.weight"')),
    "frozen parameter": (lambda: shard_two(frozen(two_layers())), ("1.bias", "requires_grad")),
    "policy": (
        lambda: shard_two(two_layers(), mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
        ("compute dtype", "torch.bfloat16"),
    ),
    "reduce dtype": (
        lambda: shard_two(two_layers(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)),
        ("reduce dtype", "torch.float64"),
    ),
    "granularity": (lambda: shard_two(two_layers(), granularity=lambda *_: "whole"), ("elements per rank",)),
    "reshard_after_forward": (
        lambda: shard_two(two_layers(), reshard_after_forward=True),
        ("reshard_after_forward", "true", "false"),
    ),
    "names": (lambda: renamed(), ("second.weight", '"1.weight"')),
    "order": (lambda: swapped(), ("weight", "bias")),
}


def regrouped() -> nn.Module:
    model = two_layers()
    fully_shard(model[1])
    return fully_shard(model)


def renamed() -> nn.Module:
    model = nn.Sequential()
    model.first, model.second = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard(model.first)
    return fully_shard(model)


def swapped() -> nn.Module:
    model = two_layers()
    model[1]._parameters = dict(reversed(model[1]._parameters.items()))
    return shard_two(model)


@pytest.mark.parametrize("difference", DIFFERENT)
@pytest.mark.parametrize("odd_rank", [0, 2])
@distributed(world_size=3)
def test_ranks_with_different_models(difference, odd_rank):
    build, words = DIFFERENT[difference]
    model = build() if dist.get_rank() == odd_rank else shard_two(two_layers())
    message = error_of(model, torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32)
    for word in ("different models", "rank 0", rf"rank {odd_rank or 1}", "same", *words):
        assert re.search(word, message), f"no {word!r} in: {message}"
    torch.manual_seed(0)
    assert_trains(shard_two(two_layers()))


@pytest.mark.parametrize("absent", [0, 1, 2])
@distributed(world_size=3)
def test_rank_that_does_not_come_to_the_first_forward(absent):
    timeout = 1.0
    model = shard_two(two_layers())
    if dist.get_rank() != absent:
        with rendezvous_timeout(timeout), pytest.raises(RuntimeError) as caught:
            model(torch.ones(2, 4))
        for word in ("first forward", rf"rank\(s\) {absent} did not arrive", f"within {timeout:g} s", TIMEOUT_ENV):
            assert re.search(word, str(caught.value)), f"no {word!r} in: {caught.value}"
    dist.barrier()
    with rendezvous_timeout(20):
        assert_trains(model)


@distributed(world_size=3)
def test_all_ranks_that_do_not_come_are_named():
    model = fully_shard(nn.Linear(4, 4))
    if dist.get_rank() == 0:
        with rendezvous_timeout(1), pytest.raises(RuntimeError, match=r"rank\(s\) 1, 2 did not arrive"):
            model(torch.ones(2, 4))
    dist.barrier()
    with rendezvous_timeout(20):
        assert_trains(model)


@distributed(world_size=3)
def test_rank_that_comes_with_another_model_after_an_absence():
    """Payloads that ranks brought to a rendezvous that failed are not judged at the next."""
    rank = dist.get_rank()
    if rank != 1:
        with rendezvous_timeout(1), pytest.raises(RuntimeError, match="did not arrive"):
            fully_shard(nn.Linear(4, 4 if rank == 0 else 6))(torch.ones(2, 4))
    dist.barrier()
    torch.manual_seed(0)
    with rendezvous_timeout(20):
        assert_trains(fully_shard(nn.Linear(4, 4)))


@distributed(world_size=2)
def test_ranks_with_other_options_are_one_error():
    model = nn.Linear(4, 4)
    fully_shard(model)
    set_gradient_divide_factor(model, 2.0 + dist.get_rank())
    with pytest.raises(RuntimeError, match="gradient divide factor"):
        model(torch.ones(2, 4))


@distributed(world_size=(2, 3))
def test_ranks_that_start_differently_take_over_the_first_ranks_values():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].running_mean.fill_(dist.get_rank())
    replicate(model)
    with torch.device("meta"):
        late = nn.Linear(2, 2)
    replicate(late).to_empty(device="cpu")
    with torch.no_grad():
        late.weight.to_local().normal_()
        late.bias.to_local().normal_()
    late(model.eval()(torch.ones(2, 3)))
    torch.manual_seed(0)
    expected = nn.Linear(3, 4)
    assert torch.equal(model[0].weight.full_tensor(), expected.weight)
    for tensor in (*model.parameters(), *model.buffers(), *late.parameters()):
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, full(tensor.detach()).tolist())
        assert all(item == everyone[0] for item in everyone)
    assert not model[1].running_mean.any()

"""``assert_trains_like_unsharded``: compare sharded with unsharded training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._arguments import checked

Loss = Callable[[nn.Module, Any], torch.Tensor]
_Bounds = tuple[float, float]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@checked()
def assert_trains_like_unsharded(
    model: nn.Module,
    shard: Callable[[nn.Module], object],
    batches: Sequence[Any],
    loss: Loss,
    optimizer: MakeOptimizer = torch.optim.SGD,
    *,
    part: Callable[[Any, int, int], Any] | None = None,
    ranks: tuple[int, int] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Shard and train ``model``, and assert that it trains like an unsharded copy.

    The copy trains on whole batches, and the sharded model on this rank's share of each. The losses must agree after
    every step, all gradients after the first step, and all parameters at the end.

    Ranks: all ranks, with equal models and batches.

    Args:
        model: an unsharded model; this function shards and trains it.
        shard: calls ``fully_shard`` on the model and its submodules.
        batches: arguments of ``loss``, one for each step.
        loss: from a model and a batch to a loss that is a mean over the first dimension.
        optimizer: from parameters to an optimizer. Adaptive optimizers amplify rounding differences.
        part: from a batch, the rank and the number of ranks to this rank's share of the batch. Default: an equal share
            of the first dimension of each tensor, also inside lists, tuples and dicts.
        ranks: this rank's index and the number of data-parallel ranks. Default: those of the default process group.
        rtol, atol: as for ``torch.testing.assert_close``.

    Raises:
        AssertionError: the results differ; the message names the step and the parameter.
        ValueError: the rows of a batch cannot be divided equally among the ranks.
    """
    rank, num_ranks = ranks or (dist.get_rank(), dist.get_world_size())
    reference = copy.deepcopy(model)
    shard(model)
    optimizers = optimizer(model.parameters()), optimizer(reference.parameters())
    bounds = rtol, atol
    for step, batch in enumerate(batches):
        mine = loss(model, (part or share_of)(batch, rank, num_ranks))
        expected = loss(reference, batch)
        mine.backward()
        expected.backward()
        mean = mine.detach().clone()
        dist.all_reduce(mean)
        _assert_close(f"the loss of step {step}", mean / dist.get_world_size(), expected.detach(), bounds)
        if step == 0:
            _compare(f"after step {step}, the gradient of", _gradients(model), _gradients(reference), bounds)
        for one in optimizers:
            one.step()
            one.zero_grad()
    _compare(f"after {len(batches)} steps,", dict(model.named_parameters()), dict(reference.named_parameters()), bounds)


def share_of(batch: Any, rank: int, num_ranks: int) -> Any:
    """Return this rank's share of the first dimension of each tensor in ``batch``."""
    if isinstance(batch, torch.Tensor):
        if batch.shape[0] % num_ranks:
            raise ValueError(f"a batch of shape {tuple(batch.shape)} cannot be split equally among {num_ranks} ranks")
        return batch.chunk(num_ranks)[rank]
    if isinstance(batch, dict):
        return {key: share_of(value, rank, num_ranks) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(share_of(value, rank, num_ranks) for value in batch)
    return batch


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def _compare(when: str, found: dict[str, Any], expected: dict[str, Any], bounds: _Bounds) -> None:
    assert found.keys() == expected.keys(), f"{when} names differ: {found.keys() ^ expected.keys()}"
    for name, tensor in found.items():
        assert (tensor is None) == (expected[name] is None), (
            f"{when} {name}: {tensor}, without sharding {expected[name]}"
        )
        if tensor is not None:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            _assert_close(f"{when} {name}", whole.detach(), expected[name].detach(), bounds)


def _assert_close(what: str, found: torch.Tensor, expected: torch.Tensor, bounds: _Bounds) -> None:
    rtol, atol = bounds
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")

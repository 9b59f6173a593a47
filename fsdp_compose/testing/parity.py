"""Training that must equal training without sharding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

Loss = Callable[[nn.Module, Any], torch.Tensor]
_Bounds = tuple[float, float]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


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
    """Train a copy of ``model`` as it is, on whole batches, and ``model`` sharded, on this rank's part of each; after
    every step the losses, after the first all gradients, and at the end all parameters must be equal.

    Ranks: all, with equal models and batches.

    Args:
        model: not sharded yet; it is sharded and trained.
        shard: calls ``fully_shard`` on it and its submodules.
        batches: what ``loss`` takes; one step each.
        loss: of a model and a batch: a mean over the first dimension.
        optimizer: of parameters. Differences of rounding grow with adaptive ones.
        part: of a batch, the rank and the number of ranks, what this rank trains on. Default: of each tensor, also in
            lists, tuples and dicts, its equal share of the first dimension.
        ranks: which of how many data-parallel ranks this one is. Default: of all.
        rtol, atol: as of ``torch.testing.assert_close``.

    Raises:
        AssertionError: naming the step, and the parameter.
        ValueError: a batch has rows that do not divide by the ranks.
    """
    rank, num_ranks = ranks or (dist.get_rank(), dist.get_world_size())
    reference = copy.deepcopy(model)
    shard(model)
    optimizers = optimizer(model.parameters()), optimizer(reference.parameters())
    bounds = rtol, atol
    for step, batch in enumerate(batches):
        mine = loss(model, (part or part_of)(batch, rank, num_ranks))
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


def part_of(batch: Any, rank: int, num_ranks: int) -> Any:
    """This rank's share of the first dimension of each tensor in ``batch``."""
    if isinstance(batch, torch.Tensor):
        if batch.shape[0] % num_ranks:
            raise ValueError(f"a batch of shape {tuple(batch.shape)} has no equal parts for {num_ranks} ranks")
        return batch.chunk(num_ranks)[rank]
    if isinstance(batch, dict):
        return {key: part_of(value, rank, num_ranks) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(part_of(value, rank, num_ranks) for value in batch)
    return batch


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def _compare(when: str, found: dict[str, Any], expected: dict[str, Any], bounds: _Bounds) -> None:
    assert found.keys() == expected.keys(), f"{when} other names: {found.keys() ^ expected.keys()}"
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

"""How tests train a sharded model and its unsharded equal, and compare them."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import RaggedDTensor, RaggedShard, clip_grad_norm_, fully_shard, no_sync, set_requires_all_reduce
from tests.internals import full_gradients, full_parameters, sharded_params
from tests.models import GPT, Experts, Stack, batches, gpt_loss, inputs, rows, shard_layers


def local_part(batch: torch.Tensor) -> torch.Tensor:
    """This rank's share of a global batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # The default eps of 1e-8 blows gradients that are zero but for rounding up to the learning rate.
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def train(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    steps: int = 10,
    microbatches: int = 1,
    share: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch,
    without_sync: Callable[[nn.Module], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> torch.Tensor:
    """Losses of ``steps`` optimizer steps; ``without_sync`` wraps all microbatches of a step but its last."""
    optimizer = make_optimizer(model.parameters())
    losses = []
    for batch in batches(steps):
        total = torch.zeros(())
        for i, part in enumerate(batch.chunk(microbatches)):
            with without_sync(model) if i + 1 < microbatches else nullcontext():
                loss = gpt_loss(model, share(part)) / microbatches
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return torch.stack(losses)


def train_gpt(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    seed: int = 7,
    *,
    clip: Iterable[nn.Parameter] | None = None,
    microbatches: int = 1,
    unsynced: bool = False,
) -> list[float]:
    """Trains on this rank's part of each batch, and returns each step's last loss. ``clip``: the parameters whose
    gradients are clipped. ``unsynced``: only the last backward of a step reduces."""
    losses = []
    for batch in batches(steps, seed):
        for i, part in enumerate(local_part(batch).chunk(microbatches)):
            with no_sync(model) if unsynced and i + 1 < microbatches else nullcontext():
                loss = gpt_loss(model, part)
                loss.backward()
        if clip is not None:
            clip_grad_norm_(clip, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gpt_twins(*, offload_policy: Any = None, **options: Any) -> tuple[GPT, GPT]:
    """Two equal sharded models, of which only the first is offloaded."""
    torch.manual_seed(0)
    model, twin = pair(GPT(layers=2))
    of_first = {} if offload_policy is None else {"offload_policy": offload_policy}
    return shard_layers(model, **of_first, **options), shard_layers(twin, **options)


def assert_same_parameters(
    model: nn.Module, reference: nn.Module, tolerance: float = 1e-5, relative: float = 0.0
) -> None:
    """Compares what ``full_tensor()`` returns; ``assert_parameters_match`` gathers as a forward does. Both models may
    be sharded."""
    ours, theirs = full_values(model), full_values(reference)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        note = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(ours[name], expected, rtol=relative, atol=tolerance, msg=note)


def assert_same_gradients(model: nn.Module, reference: nn.Module, *when: object, **tolerances: float) -> None:
    both = zip(model.named_parameters(), reference.parameters(), strict=True)
    pairs = {name: (param, other) for (name, param), other in both}
    for name, (param, other) in pairs.items():
        assert (param.grad is None) == (other.grad is None), f"{name}: {param.grad}, expected {other.grad}; {when}"
    got = wholes({name: param.grad for name, (param, other) in pairs.items() if other.grad is not None})
    for name, grad in got.items():
        note = functools.partial("{}: {} {}".format, name, when)
        torch.testing.assert_close(grad, pairs[name][1].grad, **tolerances, msg=note)


def assert_parameters_match(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    ours, theirs = full_parameters(model), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        difference = (ours[name] - expected.detach()).abs().max().item() if expected.numel() else 0.0
        assert difference <= tolerance, f"{name} differs by {difference}"


def assert_gradients_match(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    ours = full_gradients(model)
    for name, param in reference.named_parameters():
        got = ours[name]
        assert (got is None) == (param.grad is None), f"{name}: gradient {got}, expected {param.grad}"
        if got is not None and got.numel():
            difference = (got - param.grad).abs().max().item()
            assert difference <= tolerance, f"{name}: gradients differ by {difference}"


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """``model`` and an equal copy, for sharded and unsharded training."""
    return model, copy.deepcopy(model)


def assert_no_gradients(model: nn.Module) -> None:
    present = [name for name, param in model.named_parameters() if param.grad is not None]
    assert not present, f"gradients were published: {present}"


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, if it is sharded; then all ranks must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, whole, by FQN. All ranks must call it."""
    return wholes({name: param.detach() for name, param in model.named_parameters()})


def wholes(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of tensors, whole if they are sharded. All ranks must call it."""
    ours = {name: item for name, item in tensors.items() if is_cut_over_one_mesh(item)}
    found = gathered(ours) if len({item.device_mesh for item in ours.values()}) == 1 else {}
    return {name: found[name] if name in found else full(item).clone() for name, item in tensors.items()}


def is_cut_over_one_mesh(tensor: Any) -> bool:
    if not isinstance(tensor, RaggedDTensor) or not tensor.is_floating_point():
        return False
    return len(tensor.placements) == 1 and isinstance(tensor.placements[0], RaggedShard)


def gathered(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Sharded tensors, whole, by one gather for all: each has its elements in the order of ranks, of the mesh's last
    dimension. ``full_tensor`` of each takes longer than a training step."""
    if not tensors:
        return {}
    group = next(iter(tensors.values())).device_mesh.get_group(-1)
    local = [tensor.to_local().detach().flatten().double() for tensor in tensors.values()]
    counts, room = [part.numel() for part in local], sum(tensor.numel() for tensor in tensors.values())
    mine = torch.zeros(len(counts) + room, dtype=torch.float64)  # in which numbers and elements are exact
    mine[: len(counts) + sum(counts)] = torch.cat([torch.tensor(counts, dtype=mine.dtype), *local])
    everyones = torch.empty(group.size() * len(mine), dtype=torch.float64)
    dist.all_gather_into_tensor(everyones, mine, group=group)
    parts = []
    for row in everyones.view(group.size(), -1):
        theirs = row[: len(counts)].long().tolist()
        parts.append(row[len(counts) : len(counts) + sum(theirs)].split(theirs))
    return {
        name: torch.cat(parts_of_one).view(tensor.shape).to(tensor.dtype)
        for (name, tensor), parts_of_one in zip(tensors.items(), zip(*parts, strict=True), strict=True)
    }


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def mean_square_in_float(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def stacks(**options: Any) -> tuple[Stack, Stack]:
    """A sharded stack, a group for each block and one for the rest, and its unsharded equal."""
    torch.manual_seed(0)
    model, reference = pair(Stack(use_reentrant=options.pop("use_reentrant", None)))
    return shard_layers(model, **options), reference


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    mean_square(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_trains_on(model: nn.Module, reference: nn.Module, steps: int = 2) -> None:
    """Both models take the same steps from here and stay equal."""
    optimizers = sgd(sharded_params(model)), sgd(reference.parameters())
    for i in range(steps):
        train_step(model, optimizers[0], local_part(rows(100 + i)))
        train_step(reference, optimizers[1], rows(100 + i))
    assert_parameters_match(model, reference, 1e-6)


def whole(
    model: nn.Module, of: Callable[[nn.Parameter], RaggedDTensor | None], like: nn.Module
) -> dict[str, torch.Tensor | None]:
    """The results of ``of`` for each parameter, put together from all ranks; ``None`` must be so on all of them.

    Local shards are contiguous, and follow each other in rank order: nothing of the runtime is needed for it.
    """
    sharded = {name: of(param) for name, param in model.named_parameters()}
    for name, param in like.named_parameters():
        assert sharded[name] is None or sharded[name].shape == param.shape, name
    mine = {name: None if t is None else _bytes_of(t.to_local().detach()) for name, t in sharded.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)  # not of tensors, which take long to pickle
    result: dict[str, torch.Tensor | None] = {}
    for name, param in like.named_parameters():
        parts = [theirs[name] for theirs in everyone]
        missing = [rank for rank, part in enumerate(parts) if part is None]
        assert len(missing) in (0, len(parts)), f"{name} is None on ranks {missing} only"
        result[name] = None
        if not missing:
            joined = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8) if any(parts) else torch.empty(0)
            result[name] = joined.view(sharded[name].dtype).view(param.shape)
    return result


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    difference = (got - expected).abs().max().item() if expected.numel() else 0.0
    assert difference <= tolerance, f"{what} differs by {difference}"


class Twins:
    """A sharded model and an equal unsharded one. The same is done to both, and they must stay equal: the unsharded one
    sees the whole batch, the sharded one on each rank its share. Losses are means over the batch."""

    def __init__(
        self,
        model: nn.Module,
        shard: Callable[[nn.Module], Any] = shard_layers,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
        tolerance: float = 1e-5,
    ) -> None:
        self.sharded, self.reference = pair(model)
        shard(self.sharded)
        self.both = (self.reference, self.sharded)
        self.optimizers = [make_optimizer(twin.parameters()) for twin in self.both]
        self.tolerance = tolerance

    def backward(self, loss_of: Callable[..., torch.Tensor], *batch: torch.Tensor) -> None:
        """Forward and backward of both."""

        def forward_and_backward(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, *batch)
            loss.backward()
            return loss

        self.run(forward_and_backward, *batch)

    def run(self, action: Callable[..., torch.Tensor], *batch: torch.Tensor) -> None:
        """``action(model, *batch)`` on both; the losses it returns must agree."""
        expected = action(self.reference, *batch)
        got = action(self.sharded, *map(local_part, batch))
        assert abs(mean_over_ranks(got) - expected.item()) <= self.tolerance

    def backward_by_rank(self, loss_of: Callable[..., torch.Tensor], batch: torch.Tensor) -> None:
        """As ``backward``, but ``loss_of(model, share, rank)`` does something else on each rank; the unsharded twin
        plays all ranks in turn."""
        world_size = dist.get_world_size()
        for rank, share in enumerate(batch.chunk(world_size)):
            (loss_of(self.reference, share, rank) / world_size).backward()
        loss_of(self.sharded, local_part(batch), dist.get_rank()).backward()

    def check_gradients(self) -> dict[str, torch.Tensor | None]:
        got = whole(self.sharded, lambda param: param.grad, self.reference)
        for name, param in self.reference.named_parameters():
            grad = got[name]
            assert (grad is None) == (param.grad is None), f"{name}: gradient {grad}, expected {param.grad}"
            if grad is not None:
                assert_close(grad, param.grad, self.tolerance, f"gradient of {name}")
        return got

    def check_parameters(self) -> None:
        got = whole(self.sharded, lambda param: param, self.reference)
        for name, param in self.reference.named_parameters():
            assert_close(got[name], param.detach(), self.tolerance, name)

    def step(self, set_to_none: bool = True) -> None:
        """Optimizer step of both, after comparing the gradients and before comparing the parameters."""
        self.check_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        self.check_parameters()

    def train(self, loss_of: Callable[..., torch.Tensor] = mean_square, steps: int = 3, *shape: int) -> None:
        for x in inputs(steps, *shape):
            self.backward(loss_of, x)
            self.step()


def experts(**options: Any) -> tuple[Experts, Experts]:
    torch.manual_seed(0)
    model, reference = pair(Experts())
    for expert in model.experts:
        fully_shard(expert, **options)
    return fully_shard(model, **options), reference


def interrupt(model: Stack, where: str, place: int, error: BaseException, step: int = 50) -> None:
    """Lets ``error`` happen in ``where`` of block ``place``, and catches it as a user would."""
    model.blocks[place].trip.arm(where, error)
    with pytest.raises(type(error), match="by the user"):
        mean_square(model, local_part(rows(step))).backward()


def edit_mul(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)


def edit_load_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def after_training(model: nn.Module) -> None:
    batch = local_part(rows()) if fully_shard.state(model) else rows()
    train_step(model, sgd(model.parameters()), batch)


def raise_by_the_user(*_: Any) -> None:
    raise ValueError("by the user")


@contextlib.contextmanager
def without_all_reduce(model: nn.Module) -> Iterator[None]:
    set_requires_all_reduce(model, False)
    yield
    set_requires_all_reduce(model, True)

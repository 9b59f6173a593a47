"""Programs whose forward puts a parametrization on a parameter and takes it off again, as LoRA on stacked experts does.
torch sets the parameter to its own memory then, which raises its version counter, and moves it in its module's dict;
but nothing is written. They train as unsharded; real writes beside it raise one error on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecisionPolicy, fully_shard, functional_mode
from fsdp_compose.errors import RanksDifferError
from tests.harness import distributed
from tests.training import full_parameters

DIM = 6
ERROR = r"modified in place inside forward"


class Add(nn.Module):
    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta.to(weight.dtype)


@contextmanager
def added(module: nn.Module, name: str, delta: torch.Tensor) -> Iterator[None]:
    parametrize.register_parametrization(module, name, Add(delta))
    try:
        yield
    finally:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


class Lora(nn.Module):
    """A layer with a trainable delta. ``write`` is done to it inside forward."""

    def __init__(self, bias: bool = True, name: str = "weight") -> None:
        super().__init__()
        self.base, self.name = nn.Linear(DIM, DIM, bias=bias), name
        self.delta = nn.Parameter(torch.randn_like(getattr(self.base, name)) / 8)
        self.write: Callable[[nn.Linear], object] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with added(self.base, self.name, self.delta):
            x = self.base(x)
        if self.write is not None:
            with torch.no_grad():
                self.write(self.base)
        return x


class Experts(nn.Module):
    """Stacked experts. The second is parametrized when autograd has saved the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, DIM, 4) / 3), nn.Parameter(torch.randn(3, 4, DIM) / 3)
        self.deltas = nn.ParameterList([torch.randn(3, DIM, 4) / 8, torch.randn(3, 4, DIM) / 8])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with added(self, "up", self.deltas[0]):
            hidden = torch.einsum("bi,eih->beh", x, self.up).tanh()
        gated = hidden * self.up.sum().tanh()
        with added(self, "down", self.deltas[1]):
            return x + torch.einsum("beh,eho->bo", gated, self.down)


class Spectral(nn.Module):
    """Normalized inside forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)  # for the vectors that it draws
        parametrizations.spectral_norm(self.base)
        try:
            return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "weight": Lora,
    "weight alone": lambda: Lora(bias=False),
    "bias": lambda: Lora(name="bias"),
    "experts": Experts,
    "spectral": Spectral,
}


def model_of(part: Callable[[], nn.Module], checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [Checkpointed(part()) if checkpointed else part() for _ in range(2)]
    return nn.Sequential(nn.Linear(DIM, DIM), *parts)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def assert_trains_as_unsharded(
    part: Callable[[], nn.Module], checkpointed: bool = False, num_forwards: int = 1, tolerance: float = 1e-5, **options
) -> None:
    model = model_of(part, checkpointed)
    reference, ranks = copy.deepcopy(model), range(dist.get_world_size())
    for layer in model[1:]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1, momentum=0.9) for item in (model, reference)]
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                model(batch(step, dist.get_rank()))
        numbers = range(num_forwards * step, num_forwards * step + num_forwards)
        sum(model(batch(n, dist.get_rank())).square().mean() for n in numbers).backward()
        for n in numbers:
            for rank in ranks:  # one after the other: torch refuses spectral_norm put on twice before a backward
                (reference(batch(n, rank)).square().mean() / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours, theirs = full_parameters(model), dict(reference.named_parameters())  # their order changes without sharding
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].float(), value.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PARTS)
@distributed(world_size=(1, 2))
def test_a_parametrization_on_and_off_inside_forward_trains_as_unsharded(name):
    assert_trains_as_unsharded(PARTS[name])


@pytest.mark.parametrize("name", ["weight", "experts"])
@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"checkpointed": True},
        {"num_forwards": 2},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), "tolerance": 0.05},
    ],
    ids=["unsharded until backward", "checkpointed", "two forwards", "mixed"],
)
@distributed(world_size=2)
def test_it_trains_as_unsharded_with_options(name, options):
    assert_trains_as_unsharded(PARTS[name], **options)


def write_all(base: nn.Linear) -> None:
    base.weight.mul_(1.5)


def write_last_row(base: nn.Linear) -> None:
    base.weight[-1].zero_()  # rank 0 does not hold it


def write_other(base: nn.Linear) -> None:
    base.bias.add_(1)


def replace(base: nn.Linear) -> None:
    base.weight = nn.Parameter(base.weight.clone())


def put_on_weight_norm(base: nn.Linear) -> None:
    parametrizations.weight_norm(base)


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize(
    ("write", "error"),
    [
        (write_all, ERROR + ".*1.base.weight"),
        (write_last_row, ERROR + ".*1.base.weight"),
        (write_other, ERROR + ".*1.base.bias"),
        (replace, "forward replaced, added or removed.*1.base.weight"),
        (put_on_weight_norm, "forward replaced, added or removed.*1.base.weight"),
    ],
)
@distributed(world_size=2)
def test_a_real_write_beside_it_raises_on_every_rank(write, error, first):
    model = model_of(Lora)
    for layer in model[1:]:
        fully_shard(layer)
    fully_shard(model)
    for step in range(first):
        model(batch(step, dist.get_rank())).square().mean().backward()
    model[1].write = write
    with pytest.raises(RuntimeError, match=error):
        model(batch(first, dist.get_rank()))


@distributed(world_size=2)
def test_a_write_without_a_parametrization_raises_though_it_changes_no_bit():
    model = fully_shard(nn.Linear(DIM, DIM))
    model.register_forward_pre_hook(lambda module, _: module.weight.data_ptr() and module.weight.detach().mul_(1))
    with pytest.raises(RuntimeError, match=ERROR):
        model(batch(0, 0))


@distributed(world_size=2)
def test_a_write_to_a_neighbour_is_none_to_what_autograd_has_saved():
    """It is an error of ours at the end of forward, not one of autograd's that names neither."""
    model = fully_shard(nn.Linear(DIM, DIM))
    versions = []

    def write(module: nn.Linear, _: object) -> None:
        before = module.bias._version
        module.weight.detach().mul_(2)
        versions.append(module.bias._version - before)

    model.register_forward_pre_hook(write)
    with pytest.raises(RuntimeError, match=ERROR):
        model(batch(0, 0))
    assert versions == [0]


def write_as_first_rank(base: nn.Linear) -> None:
    if dist.get_rank() == 0:
        base.weight[-1].mul_(1.5)  # which the last rank holds


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("checkpointed", [False, True])
@distributed(world_size=(2, 3))
def test_a_write_of_one_rank_to_elements_of_another_raises_on_every_rank(checkpointed, first):
    model = model_of(Lora, checkpointed)
    for layer in model[1:]:
        fully_shard(layer)
    fully_shard(model)
    for step in range(first):
        model(batch(step, dist.get_rank())).square().mean().backward()
    lora = model[1].inner if checkpointed else model[1]
    lora.write = write_as_first_rank
    model.zero_grad()
    with pytest.raises(RuntimeError, match="some ranks have modified unsharded parameters in place"):
        model(batch(first, dist.get_rank())).square().mean().backward()
    assert all(param.grad is None for param in model.parameters())
    lora.write = None
    model(batch(first, dist.get_rank())).square().mean().backward()


class Sometimes(Lora):
    """Puts its parametrization on where ``is_on``."""

    is_on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.is_on else self.base(x) + 0 * self.delta.sum()


@pytest.mark.parametrize("first", [0, 4])
@distributed(world_size=(2, 3))
def test_a_parametrization_that_one_rank_alone_puts_on_is_one_error_on_every_rank(first):
    model = model_of(Sometimes)
    for layer in model[1:]:
        fully_shard(layer)
    fully_shard(model)
    for step in range(first):
        model(batch(step, dist.get_rank())).square().mean().backward()
    model[1].is_on = dist.get_rank() == 0
    with pytest.raises(RanksDifferError, match="or put none on|run different programs"):
        model(batch(first, dist.get_rank())).square().mean().backward()


@distributed(world_size=2)
def test_in_functional_mode_the_error_names_the_mode():
    model = fully_shard(model_of(Lora))
    with functional_mode(model), pytest.raises(ValueError, match="non-leaf Tensor") as caught:
        model(batch(0, 0))
    assert any("leave functional_mode()" in note for note in getattr(caught.value, "__notes__", [])) or not hasattr(
        caught.value, "add_note"
    )
    model(batch(0, 0)).sum().backward()

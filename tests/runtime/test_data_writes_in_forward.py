"""Programs whose forward writes to its own parameters in ways that torch does not count: every rank raises one error
that names the parameter, and programs that write nothing never raise it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from fsdp_compose import (
    MixedPrecisionPolicy,
    flat_parameters,
    fully_shard,
    functional_mode,
    keep_unsharded,
    reshard,
    summon_full_params,
    unshard,
)
from tests.harness import breakable_mesh, distributed
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import assert_parameters_match, local_part

DIM = 6
ERROR = "modified in place inside forward"


class ActNorm(nn.Module):
    """Initialised from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(DIM)), nn.Parameter(torch.ones(DIM))
        self.is_initialised = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_initialised:
            self.is_initialised = True
            self.loc.data.copy_(-x.detach().mean(0))
            self.scale.data.copy_(1 / (x.detach().std(0) + 1e-6))
        return self.scale * (x + self.loc)


class Critic(nn.Linear):
    """Clips its weights."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for p in self.parameters():
            p.data.clamp_(-0.01, 0.01)
        return super().forward(x)


class Codebook(nn.Module):
    """Vector quantisation whose codes follow moving averages, and are a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, DIM), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x.detach().float(), self.codes.float()).argmin(1)
        for code in nearest.unique():
            mean = x.detach()[nearest == code].mean(0)
            self.codes.data[code] = 0.9 * self.codes.data[code] + 0.1 * mean
        return x + (self.codes[nearest] - x).detach()


class Writing(nn.Linear):
    """Does something to its weight."""

    def __init__(self, write: Callable[[nn.Parameter], object]) -> None:
        super().__init__(DIM, DIM)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.weight)
        return super().forward(x)


def assign(p: nn.Parameter) -> None:
    p.data = p.detach() * 0.5


def assign_transposed(p: nn.Parameter) -> None:
    p.data = p.data.t()


def write_row(p: nn.Parameter) -> None:
    p.data[2] = 1.0


def write_numpy(p: nn.Parameter) -> None:
    p.detach().numpy()[...] *= 0.5


def write_detached(p: nn.Parameter) -> None:
    p.detach().mul_(0.5)


def give_other_memory(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.set_(torch.ones_like(p))


WRITES = {f.__name__: f for f in (assign, assign_transposed, write_row, write_numpy, write_detached, give_other_memory)}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "ActNorm": ActNorm,
    "Critic": Critic,
    "Codebook": Codebook,
    **{name: lambda write=write: Writing(write) for name, write in WRITES.items()},
}
BYTES = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def model_with(part: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), part, nn.Linear(DIM, DIM))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(12, DIM, generator=torch.Generator().manual_seed(seed + 100 * dist.get_rank()))


def assert_all_ranks_raise(call: Callable[[], object], name: str = "", error: str = ERROR) -> None:
    try:
        call()
    except RuntimeError as caught:
        message = str(caught)
    else:
        message = "no error"
    messages: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert all(error in item and name in item for item in messages), messages


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("name", MODULES)
@distributed(world_size=2)
def test_writes_in_forward_raise_on_every_rank(name, is_functional):
    for options in ({}, {"reshard_after_forward": False}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}):
        if "mp_policy" in options and name == "write_numpy":
            continue  # NumPy has no bfloat16
        for mode in (torch.enable_grad, torch.no_grad):
            model = shard_layers(model_with(MODULES[name]()), **options)
            with mode(), functional_mode(model) if is_functional else nullcontext():
                # Memory that NumPy has seen cannot be freed: that is the error, where it is freed before anyone looks.
                error = "unsharded parameters" if name == "write_numpy" else ERROR
                assert_all_ranks_raise(lambda model=model: model(batch()), "1.", error)


@distributed(world_size=(1, 2, 3))
def test_a_model_trains_on_after_the_error():
    for name in ("assign", "write_row", "Critic"):
        part = MODULES[name]()
        reference = copy.deepcopy(model_with(part))
        model = shard_layers(model_with(part))
        if dist.get_world_size() == 1 and name != "assign":  # what forward computes with is the shard's own memory
            before = part.weight.detach().to_local().clone()
            model(batch())
            assert not torch.equal(part.weight.to_local(), before)
            continue
        assert_all_ranks_raise(lambda model=model: model(batch()), "1.weight")
        for item in (part, reference[1]):
            item.forward = lambda x, item=item: F.linear(x, item.weight, item.bias)
        with torch.no_grad():
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                q.copy_(p.full_tensor())
        for module, x in ((model, batch()), (reference, torch.cat([every_batch(r) for r in range(world())]))):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(2):
                module(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_parameters_match(model, reference, tolerance=1e-6)


def world() -> int:
    return dist.get_world_size()


def every_batch(rank: int) -> torch.Tensor:
    return torch.randn(12, DIM, generator=torch.Generator().manual_seed(100 * rank))


@distributed(world_size=(2, 3))
def test_a_write_on_one_rank_is_an_error_on_all():
    def write(p: nn.Parameter) -> None:
        if dist.get_rank() == 0:
            p.data.zero_()

    assert_all_ranks_raise(lambda: shard_layers(model_with(Writing(write)))(batch()), "1.weight")
    # One rank has all elements of a small parameter.
    model = shard_layers(model_with(ActNorm()), granularity=lambda fqn, param: "whole")
    assert_all_ranks_raise(lambda: model(batch()), "1.loc")


@distributed(world_size=2)
def test_a_rank_that_has_written_to_its_shard_meets_the_others_at_the_end_of_forward():
    """Its gathered memory cannot be compared with its shard any more, but that of the other rank can."""
    model = nn.Sequential(Writing(lambda _: None))
    fully_shard(model, mesh=breakable_mesh())
    sharded = model[0].weight

    def write(_: nn.Parameter) -> None:
        if dist.get_rank() == 0:
            with torch.no_grad():
                sharded.to_local().mul_(1.0)

    model[0].write = write
    with functional_mode(model):
        first, second = (model(torch.ones(2, DIM)) for _ in range(2))
    assert torch.equal(first, second)


@distributed(world_size=2)
def test_a_write_that_begins_later_is_found():
    model = shard_layers(model_with(Critic()))
    clipping = Critic.forward
    Critic.forward = nn.Linear.forward
    try:
        for _ in range(10):
            model(batch()).sum().backward()
        Critic.forward = clipping
        assert_all_ranks_raise(lambda: [model(batch()).sum().backward() for _ in range(10)], "1.weight")
    finally:
        Critic.forward = clipping


@distributed(world_size=2)
def test_every_forward_looks_under_debug(monkeypatch):
    monkeypatch.setenv("FSDP_COMPOSE_DEBUG", "1")
    calls = []

    def write(p: nn.Parameter) -> None:
        calls.append(0)
        if len(calls) == 7:
            p.data.zero_()

    model = shard_layers(model_with(Writing(write)))
    for _ in range(6):
        model(batch()).sum().backward()
    assert_all_ranks_raise(lambda: model(batch()), "1.weight")


@distributed(world_size=2)
def test_assignment_to_data_of_a_sharded_parameter_shows_in_the_same_forward():
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for p in self.second.parameters():
                p.data = p.data * 0.5
            return self.second(x)

    reference = Parent()
    for is_functional in (False, True):
        model, other = Parent(), copy.deepcopy(reference)
        for module in (model.first, model.second, model):
            fully_shard(module)
        optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, other)]
        for _ in range(3):
            with functional_mode(model) if is_functional else nullcontext():
                model(every_batch(dist.get_rank())).square().mean().backward()
            other(torch.cat([every_batch(r) for r in range(world())])).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_parameters_match(model, other, tolerance=1e-6)


# ---- no false alarm


@pytest.mark.parametrize("options", [{}, {"keep": True}, {"bf16": True}, {"fp16": True}])
@distributed(world_size=2)
def test_training_never_raises_it(options, monkeypatch):
    monkeypatch.setenv("FSDP_COMPOSE_DEBUG", "1")
    given: dict[str, object] = {"reshard_after_forward": False} if "keep" in options else {}
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if key in options:
            given["mp_policy"] = MixedPrecisionPolicy(dtype)
    for use_reentrant in (None, False) if not options else (True,):
        torch.manual_seed(0)
        model = shard_layers(GPT(use_reentrant=use_reentrant), **given)
        params = flat_parameters(model) if use_reentrant is None else model.parameters()
        optimizer = torch.optim.AdamW(params, lr=1e-3)
        for i, item in enumerate(batches(4)):
            if i == 1:
                unshard(model.blocks[1])
            gpt_loss(model, local_part(item)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), keep_unsharded(model):
                gpt_loss(model, local_part(item))
                model.blocks[0].up.weight.mul_(0.99)
                gpt_loss(model, local_part(item))
            if i == 2:
                with summon_full_params(model):
                    model.head.weight.data.mul_(0.9)
                unshard(model.blocks[0])
                reshard(model.blocks[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world_size=2)
def test_bits_are_compared_and_not_values(dtype):
    values = torch.tensor([-0.0, 0.0, float("nan"), -float("nan"), float("inf"), 1e-42, 1e38 * 3.4, 1.0])
    policy = MixedPrecisionPolicy(dtype, cast_forward_inputs=True)
    for size in (7, 64, 1000):
        layer = nn.Linear(size, 3)
        with torch.no_grad():
            layer.weight.view(-1).copy_(values.repeat(3 * size)[: 3 * size])
        model = fully_shard(nn.Sequential(fully_shard(layer, mp_policy=policy)), mp_policy=policy)
        with torch.no_grad():
            model(torch.ones(2, size))

    def negate_zeros(p: nn.Parameter) -> None:
        p.data.view(BYTES[dtype]).bitwise_xor_(-(2 ** (8 * dtype.itemsize - 1)))  # of zeros: -0.0, an equal number

    part = Writing(negate_zeros)
    nn.init.zeros_(part.weight)
    assert_all_ranks_raise(lambda: shard_layers(model_with(part), mp_policy=policy)(batch()), "1.weight")


@distributed(world_size=2)
def test_an_exception_in_forward_restarts_the_looks():
    model = shard_layers(model_with(nn.BatchNorm1d(DIM)))
    for i in range(6):
        model(batch(i)).sum().backward()
    handle = model[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch())
    handle.remove()
    with pytest.warns(UserWarning, match="interrupted"):
        model(batch()).sum().backward()
    model[1].forward = lambda x: (model[1].weight.data.mul_(2), x)[1]
    assert_all_ranks_raise(lambda: [model(batch()).sum() for _ in range(3)], "1.weight")

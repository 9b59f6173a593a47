"""``model.load_state_dict()`` of whole, plain tensors into a sharded model: each rank takes its own part of them and
nothing is sent. Ranks that were given different ones, or nothing, raise one error before they train a mixture."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compose import fully_shard, replicate
from fsdp_compose.checkpoint import StateDictOptions, set_model_state_dict
from fsdp_compose.core.group.start_values import CHECK_ENV
from tests.harness import distributed, environment, lasting_mesh, same_on_every_rank
from tests.training import full_parameters

DIM = 5


class Net(nn.Module):
    """Trained, frozen and tied parameters, a number, an empty one, and buffers; two groups, and a module in neither's
    root."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(DIM, 3), nn.Linear(3, DIM))
        self.norm, self.head, self.tied = nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM)
        self.tied.weight = self.head.weight
        self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 2))
        self.block[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.head(self.norm(self.block(x)))) * self.scale + self.none.sum()


def net(seed: int, device: str = "cpu") -> Net:
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point():
                value.uniform_(0.5, 1.5)
    return model.to(device)


def sharded(model: nn.Module, shard: Any = fully_shard, **options: Any) -> nn.Module:
    shard(model.block, **options)
    return shard(model, **options)


def whole(seed: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {
        name: value.to(dtype) if dtype is not None and value.is_floating_point() else value.clone()
        for name, value in net(seed).state_dict().items()
    }


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module) -> None:
    model(batch()).square().mean().backward()
    model.zero_grad()


def assert_holds(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    values = {**full_parameters(model), **dict(model.named_buffers())}
    for name, value in values.items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("assign", [False, True])
@distributed(world_size=(1, 2, 3))
def test_each_rank_takes_its_part(assign, dtype, after_a_step):
    model, reference = sharded(net(0)), net(0)
    if after_a_step:
        run(model)
        run(reference)
    params = dict(model.named_parameters())
    flags = {name: param.requires_grad for name, param in params.items()}
    for item in (model, reference):
        item.load_state_dict(whole(1, dtype), assign=assign)
    reference.tied.weight = reference.head.weight  # assignment unties them, where it replaces parameters
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in params.items()}
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert {p.dtype for p in params.values()} == {dtype if assign and dtype else torch.float32}
    assert model.head.weight is model.tied.weight
    assert_holds(model, dict(whole(1)))
    if dtype is not None and assign:
        return  # buffers are in another dtype than inputs
    for item in (model, reference):
        item(batch(1)).square().mean().backward()
    for name, param in model.named_parameters():
        if param.requires_grad:
            torch.testing.assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad)


@pytest.mark.parametrize("assign", [False, True])
@distributed(world_size=(2, 3))
def test_of_a_part_of_the_model_alone(assign):
    model, before, given = sharded(net(0)), whole(0), whole(1)
    inner = {"weight": given["block.1.weight"]}
    result = model.block[1].load_state_dict(inner, strict=False, assign=assign)
    assert result.missing_keys == ["bias"] and not result.unexpected_keys
    expected = {**before, "block.1.weight": given["block.1.weight"]}
    assert_holds(model, expected)
    model.head.load_state_dict({"weight": given["head.weight"]}, assign=assign)
    expected |= {"head.weight": given["head.weight"]}
    assert_holds(model, expected)
    wrapper = nn.ModuleDict({"inside": model})  # no group of its own
    wrapper.load_state_dict({f"inside.{name}": value for name, value in given.items()}, assign=assign)
    assert_holds(model, given)
    run(model)


@pytest.mark.parametrize("assign", [False, True])
@distributed(world_size=(1, 2, 3))
def test_into_a_model_that_was_sharded_on_the_meta_device(assign):
    model = sharded(net(0, "meta"))
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(whole(1), assign=assign)
    assert_holds(model, whole(1))
    run(model)


@pytest.mark.parametrize("way", ["hybrid", "replicated"])
@distributed(world_size=4)
def test_into_replicas(way):
    mesh = lasting_mesh(("replicate", "shard"))
    model = sharded(net(0), mesh=mesh) if way == "hybrid" else sharded(net(0), replicate)
    for seed in (1, 2):
        model.load_state_dict(whole(seed), assign=seed == 2)
        assert_holds(model, whole(seed))
        run(model)


@pytest.mark.parametrize("assign", [False, True])
@distributed(world_size=4)
def test_beside_tensor_parallelism(assign):
    mesh = lasting_mesh(("fsdp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    other = {name: value + 1 for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    for item in (other, {name: value + 1 for name, value in other.items()}):
        model.load_state_dict(item, assign=assign)
        for name, param in model.named_parameters():
            assert torch.equal(param.full_tensor(), item[name]), name
        model(torch.randn(3, 6, generator=torch.Generator().manual_seed(0))).sum().backward()


# ---- Ranks that were given different tensors


def load_others(model: nn.Module) -> None:
    model.load_state_dict(whole(1 + dist.get_rank()))


def assign_others(model: nn.Module) -> None:
    model.load_state_dict(whole(1 + dist.get_rank()), assign=True)


def load_on_the_first_alone(model: nn.Module) -> None:
    model.load_state_dict(whole(1) if dist.get_rank() == 0 else {}, strict=False)


def load_a_part_of_it_on_the_last(model: nn.Module) -> None:
    given = whole(1)
    if dist.get_rank() == dist.get_world_size() - 1:
        del given["block.1.weight"]
    model.load_state_dict(given, strict=False)


def load_without_values_on_others(model: nn.Module) -> None:
    given = {name: value if dist.get_rank() == 0 else value.to("meta") for name, value in whole(1).items()}
    with (
        pytest.raises(RuntimeError, match="meta device.*broadcast_from_rank0")
        if dist.get_rank()
        else contextlib.nullcontext()
    ):
        model.load_state_dict(given)


DIFFERENT = [
    load_others, assign_others, load_on_the_first_alone, load_a_part_of_it_on_the_last, load_without_values_on_others,
]  # fmt: skip


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("load", DIFFERENT)
@distributed(world_size=(2, 3))
def test_different_ones_are_one_error_on_every_rank_before_gradients_are_shown(load, after_a_step):
    model = sharded(net(0))
    if after_a_step:
        run(model)
    load(model)
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\).*broadcast_from_rank0=True") as caught:
        model(batch()).square().mean().backward()
    if not after_a_step:
        same_on_every_rank(str(caught.value))
    assert all(param.grad is None for param in model.parameters())
    state = whole(3) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)  # what the error advises
    run(model)
    assert_holds(sharded(net(3)), full_parameters(model) | whole(3))


@distributed(world_size=2)
def test_on_the_meta_device_too():
    model = sharded(net(0, "meta"))
    model.to_empty(device="cpu")
    load_on_the_first_alone(model)
    with pytest.raises(RuntimeError, match=r"were not written since to_empty\(\): head.weight"):
        model(batch())


@pytest.mark.parametrize("after_a_step", [False, True])
@distributed(world_size=2)
def test_whoever_wants_a_mixture_turns_the_comparison_off(after_a_step):
    with environment(**{CHECK_ENV: "0"}):
        model = sharded(net(0))
        if after_a_step:
            run(model)
        load_others(model)
        run(model)


@pytest.mark.parametrize("after_a_step", [False, True])
@distributed(world_size=2)
def test_a_load_that_another_one_follows_does_not_count(after_a_step):
    model = sharded(net(0))
    load_others(model)
    set_model_state_dict(model, whole(3), options=StateDictOptions(full_state_dict=True))
    if after_a_step:
        run(model)
    model.load_state_dict(whole(4))
    run(model)
    assert_holds(model, {**whole(4), **dict(model.named_buffers())})


@pytest.mark.parametrize("assign", [False, True])
@distributed(world_size=2)
def test_tensors_that_do_not_fit_are_refused(assign):
    model = sharded(net(0))
    local = {name: getattr(value, "_local_tensor", value) for name, value in copy.deepcopy(model).state_dict().items()}
    with pytest.raises((RuntimeError, ValueError), match="size mismatch|was given a tensor of shape"):
        model.load_state_dict(local, assign=assign)
    if assign:
        assert_holds(model, whole(0) | dict(model.named_buffers()))

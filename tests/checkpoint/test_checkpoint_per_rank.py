"""Plain tensors that differ from rank to rank: in an optimizer's state they are refused, elsewhere they are saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import return_and_correct_aliasing

from fsdp_compose import fully_shard, replicate
from fsdp_compose.checkpoint import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    load,
    save,
    set_optimizer_state_dict,
)
from tests.checkpoint.states import FLATTENED, FULL, FULL_ON_CPU, adamw, assert_equal, build, shared_folder, train
from tests.harness import distributed, lasting_mesh, same_on_every_rank
from tests.models import shard_layers


class Packed(torch.Tensor):
    """Codes and a scale, as optimizers of few bits keep them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _, size, stride):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.is_pinned.default:
            return False
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            made = cls(args[0].codes.clone(), args[0].scale.clone())
            return return_and_correct_aliasing(function, args, kwargs or {}, made)
        raise NotImplementedError(str(function))


class Statistic(torch.Tensor):
    """A class with memory of its own."""


def codes(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((4, 8), value).to(dtype)


VALUES: dict[str, Callable[[int], Any]] = {
    "packed": codes,
    "last byte": lambda rank: torch.tensor([0.0] * 100_000 + [float(rank)]),
    "order": lambda rank: torch.arange(4.0).roll(rank),
    "bytes": partial(codes, dtype=torch.uint8),
    "bfloat16": partial(codes, dtype=torch.bfloat16),
    "float8": partial(codes, dtype=torch.float8_e4m3fn),
    "flags": partial(codes, dtype=torch.bool),
    "complex": lambda rank: (codes(rank, torch.complex64) * 1j).conj(),
    "scalar": lambda rank: torch.tensor(float(rank)),
    "shape": lambda rank: torch.zeros(4 + rank),
    "empty": lambda rank: torch.zeros(rank),
    "dtype": lambda rank: codes(0, torch.float64 if rank else torch.float32),
    "strided": lambda rank: torch.arange(12.0).view(3, 4).t()[rank : rank + 2],
    "not a number": lambda rank: torch.tensor([float("nan"), rank]),
    "in a list": lambda rank: [torch.zeros(3), torch.full((3,), float(rank))],
    "in a tuple": lambda rank: (torch.zeros(3), torch.full((3,), float(rank))),
    "in a dict": lambda rank: {"row": {"mean": codes(rank)}},
    "codes of a class": lambda rank: Packed(codes(rank, torch.uint8), torch.ones(1)),
    "scale of a class": lambda rank: Packed(codes(0, torch.uint8), torch.full((1,), 1.0 + rank)),
    "subclass": lambda rank: codes(rank).as_subclass(Statistic),
    "number": float,
    "count": int,
    "flag": bool,
}


def assert_error(function: Callable[[], Any], call: str, key: str) -> None:
    """Every rank raises the same error, which names a value and its ranks."""
    with pytest.raises(RuntimeError) as caught:
        function()
    text = str(caught.value)
    assert text.startswith(f"{call}: plain tensors or numbers in the state of an optimizer differ from rank to rank"), (
        text
    )
    assert f": {key}" in text and "on rank 0, but" in text and "on rank 1" in text
    assert "under keys that contain the rank" in text
    same_on_every_rank(text)


def assert_refused(state: dict[str, Any], key: str) -> None:
    folder = shared_folder() / "checkpoint"
    assert_error(lambda: save(state, folder), "save()", key)
    dist.barrier()
    assert not folder.exists() and [*folder.parent.iterdir()] == []


def assert_saved(state: dict[str, Any]) -> None:
    folder = shared_folder() / "checkpoint"
    save(state, folder)
    assert (folder / "manifest.json").exists()


def trained() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A model, its optimizer, and the state of one parameter in it."""
    model = shard_layers(build())
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    return model, optimizer, optimizer.state[model.second.weight]


FORMS = ["nested", "flattened", "own", "in a list", "keys differ"]


@pytest.mark.parametrize("form", FORMS)
@distributed(world_size=2)
def test_plain_tensors_of_optimizer_state_that_differ_are_refused(form):
    model, optimizer, of_weight = trained()
    rank = dist.get_rank()

    def state_with(value: Any) -> tuple[dict[str, Any], str]:
        of_weight["packed"] = value
        if form == "own":
            number = [id(param) for param in model.parameters()].index(id(model.second.weight))
            return {"app": {"optimizer": optimizer.state_dict()}}, f"app.optimizer.state.{number}.packed"
        state = get_optimizer_state_dict(model, optimizer, options=FLATTENED if form == "flattened" else None)
        if form == "in a list":
            return {"app": [{"state": {}, "param_groups": []}, state]}, "app.1.state.second.weight.packed"
        own = {f"own {rank}": rank} if form == "keys differ" else {}
        return {"app": {"optimizer": state, **own}}, "app.optimizer.state.second.weight.packed"

    for i, (kind, value) in enumerate(VALUES.items()):
        print(kind)
        assert_refused(*state_with(value(rank)))
        if (i + FORMS.index(form)) % 2:  # every form, and every kind, is saved too where it does not differ
            assert_saved(state_with(value(1))[0])


@distributed(world_size=2)
def test_a_full_state_dict_of_plain_tensors_that_differ_is_refused():
    model, optimizer, of_weight = trained()
    rank = dist.get_rank()
    for options in (FULL, FULL_ON_CPU):
        for value in VALUES.values():
            of_weight["packed"] = value(rank)
            get = partial(get_optimizer_state_dict, model, optimizer, options=options)
            assert_error(get, "get_optimizer_state_dict()", "state.second.weight.packed")
            get_model_state_dict(model, options=options)
        assert_error(partial(get_state_dict, model, optimizer, options=options), "get_state_dict()", "state.second")
        of_weight["packed"] = codes(1.0)
        state = get()
        if state:
            assert_equal(state["state"]["second.weight"]["packed"], codes(1.0))
        del of_weight["packed"]
        optimizer.param_groups[0]["d"] = torch.tensor(float(rank))
        assert_error(get, "get_optimizer_state_dict()", "param_groups.0.d")
        optimizer.param_groups[0]["d"] = 0.1 + rank
        assert_error(get, "get_optimizer_state_dict()", "param_groups.0.d")
        del optimizer.param_groups[0]["d"]
    if rank:
        of_weight["only here"] = codes(1.0)
    get_optimizer_state_dict(model, optimizer, options=FULL)


@distributed(world_size=2)
def test_tensors_in_parameter_groups_and_shared_state_that_differ_are_refused():
    model, optimizer, _ = trained()
    rank = dist.get_rank()
    optimizer.param_groups[0]["d"] = torch.tensor(float(rank))
    assert_refused({"optimizer": get_optimizer_state_dict(model, optimizer)}, "optimizer.param_groups.0.d")
    assert_refused(get_optimizer_state_dict(model, optimizer), "param_groups.0.d")
    optimizer.param_groups[0]["d"] = torch.tensor(1.0)
    optimizer.state["shared"] = {"norm": torch.tensor(float(rank))}
    assert_refused(get_optimizer_state_dict(model, optimizer), "state.optimizers.0.shared.norm")


@distributed(world_size=3)
def test_the_error_names_some_of_many_values_and_the_first_rank_that_differs():
    model, optimizer, of_weight = trained()
    for i in range(5):
        of_weight[f"packed {i}"] = codes(dist.get_rank() // 2)
    with pytest.raises(RuntimeError, match="packed 0 is .* on rank 0, but .* on rank 2; .*; 2 more. Make them equal"):
        save({"optimizer": get_optimizer_state_dict(model, optimizer)}, shared_folder() / "checkpoint")


@distributed(world_size=2)
def test_what_differs_outside_of_the_optimizers_state_is_saved():
    model, optimizer, of_weight = trained()
    rank = dist.get_rank()
    own = {"generator": torch.get_rng_state() + rank, "loader": {"state": {"seen": torch.tensor([rank])}}}
    of_weight["packed"] = codes(1.0)

    def state() -> dict[str, Any]:
        by_rank = {f"{rank}": {"state": {0: {"packed": codes(rank)}}, "param_groups": [{"params": [0], "lr": 0.1}]}}
        return {"optimizer": get_optimizer_state_dict(model, optimizer), "local optimizers": by_rank}

    folder = shared_folder() / "checkpoint"
    save({**state(), **own}, folder)
    of_weight["packed"] = codes(0.0)
    loaded = state()
    loaded["local optimizers"][f"{rank}"]["state"][0]["packed"].fill_(-1.0)
    load(loaded, folder)
    set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    assert_equal(of_weight["packed"], codes(1.0))
    assert_equal(loaded["local optimizers"][f"{rank}"]["state"][0]["packed"], codes(rank))


@distributed(world_size=3)
def test_ranks_that_have_other_parameters_may_keep_other_state():
    """Stages of a pipeline: ranks 0 and 1 share one model, rank 2 has another."""
    rank = dist.get_rank()
    group, model = dist.new_group([0, 1]), nn.Linear(4, 4)
    if rank < 2:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = adamw(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()

    def state_with(value: float) -> dict[str, Any]:
        optimizer.state[model.weight]["packed"] = codes(value)
        return {"app": {f"stage {rank // 2}": get_optimizer_state_dict(model, optimizer)}}

    assert_saved(state_with(rank // 2))
    assert_refused(state_with(rank), "app.stage 0.state.weight.packed")


class Plain(nn.Module):
    """Parameters that every rank keeps whole, and one with fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.own = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.own(self.first(x)))


def sharded(model: Plain) -> nn.Module:
    return fully_shard(model, ignored_params={*model.own.parameters()})


def hybrid(model: Plain) -> nn.Module:
    mesh = lasting_mesh(("replicate", "shard"))
    return fully_shard(model, mesh=mesh, ignored_params={*model.own.parameters()})


def tensor_parallel(model: Plain) -> nn.Module:
    mesh = lasting_mesh(("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(output_layouts=Replicate())})
    return fully_shard(model, mesh=mesh["dp"], ignored_params={*model.own.parameters()})


def replicated(model: Plain) -> nn.Module:
    return replicate(model)


@pytest.mark.parametrize("shard", [sharded, hybrid, tensor_parallel, replicated])
@distributed(world_size=4)
def test_state_that_agrees_is_saved(shard):
    """Counters, NaN, and what one rank alone has, before the first step and after it."""
    model = shard(Plain())
    optimizer = adamw(model.parameters())
    for step in range(3):
        model_state, state = get_state_dict(model, optimizer)
        assert_saved({"model": model_state, "optimizer": state})
        assert_saved({"optimizer": get_optimizer_state_dict(model, optimizer, options=FULL)})
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for entries in optimizer.state.values():
            entries["not a number"] = torch.tensor([float("nan"), step])
            if dist.get_rank() == 2:
                entries["only here"] = torch.tensor(1.0)
    assert any(isinstance(value, DTensor) for entries in optimizer.state.values() for value in entries.values())

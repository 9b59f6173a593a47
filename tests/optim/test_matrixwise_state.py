"""State of ``Matrixwise`` comes back as what it was, whatever has loaded, copied or pickled it; and groups are those of
the optimizer inside."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from fsdp_compose import fully_shard
from fsdp_compose.checkpoint import get_state_dict, resume, save
from fsdp_compose.errors import MisuseError, RanksDifferError
from fsdp_compose.optim import Matrixwise
from tests.harness import distributed, run_distributed, same_on_every_rank
from tests.optim.test_muon import Parameters, assert_bits, give_gradients

SHAPES = [(9, 5), (4,), (2, 3, 6), ()]
NUMBERS = {"int": 1, "float": 0.5, "bool": True, "nested": {"list": [2, None, "text"]}}
SCALARS = {
    f"{dtype}".removeprefix("torch."): torch.ones((), dtype=dtype)
    for dtype in (torch.int64, torch.int32, torch.float64, torch.float32, torch.bfloat16, torch.bool)
}


class Counting(torch.optim.Optimizer):
    """Keeps numbers of Python's beside tensors without dimensions, of each type, and steps by some of them."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(copy.deepcopy({**NUMBERS, **SCALARS, "mean": torch.zeros_like(param)}))
                state["int"] += 1
                state["int64"].add_(1)
                state["float64"].mul_(1.5)
                assert {key: type(value) for key, value in state.items()} == TYPES
                assert all(state[key].dtype == value.dtype for key, value in SCALARS.items())
                state["mean"].lerp_(param.grad, 1 - group["momentum"])
                param.sub_(state["mean"] * (group["lr"] * state["float64"].item() / (state["int"] + state["int64"])))


TYPES = {key: type(value) for key, value in {**NUMBERS, **SCALARS, "mean": torch.zeros(1)}.items()}
MAKES: dict[str, Any] = {
    "numbers and tensors": Counting,
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
}


def step(params: Any, optimizer: Any, number: int) -> None:
    give_gradients([*params], number)
    optimizer.step()


def trained(make: Any, steps: int) -> Any:
    model = fully_shard(Parameters(SHAPES))
    optimizer = Matrixwise(model.items, make)
    for number in range(steps):
        step(model.items, optimizer, number)
    return model, optimizer


def expected(make: Any, steps: int) -> list[torch.Tensor]:
    params = [*Parameters(SHAPES).items]
    matrices = [params[0], params[1], *[torch.nn.Parameter(item.clone()) for item in params[2].detach()], params[3]]
    optimizer = make(matrices)
    for number in range(steps):
        give_gradients(params, number)
        for matrix, grad in zip(matrices[2:4], params[2].grad, strict=True):
            matrix.grad = grad.clone()
        optimizer.step()
    stack = torch.stack([item.detach() for item in matrices[2:4]])
    return [params[0].detach(), params[1].detach(), stack, params[3].detach()]


def _loaded(model: Any, optimizer: Any) -> Any:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model, optimizer


def _hooked(model: Any, optimizer: Any) -> Any:
    good, bad = copy.deepcopy(optimizer.state_dict()), {"param_groups": [], "state": {}}
    optimizer.register_load_state_dict_pre_hook(lambda _, state: good if not state["state"] else None)
    optimizer.load_state_dict(bad)
    return model, optimizer


def _copied(model: Any, optimizer: Any) -> Any:
    model, optimizer = copy.deepcopy((model, optimizer))
    optimizer.describe()
    return copy.deepcopy((model, optimizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@distributed(world_size=(1, 3))
def test_state_comes_back_as_what_it_was(dtype):
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # in which torch's optimizers keep numbers
    try:
        for name, make in MAKES.items():
            values = expected(make, 4)
            for way in (_loaded, _hooked, _copied):
                model, optimizer = way(*trained(make, 2))
                for number in (2, 3):
                    step(model.items, optimizer, number)
                assert_bits([*model.items], values, name, way)
    finally:
        torch.set_default_dtype(usual)


@distributed(world_size=2)
def test_state_is_shown_and_placed_as_what_its_matrix_keeps():
    model, optimizer = trained(Counting, 1)
    dtypes = {"int": torch.int64, "float": torch.float64, "bool": torch.bool, "mean": torch.float32}
    for state in (optimizer.state[model.items[0]], *(optimizer.state[model.items[2]][str(i)] for i in range(2))):
        assert {key: state[key].dtype for key in dtypes} == dtypes
        assert all(state[key].dtype == value.dtype for key, value in SCALARS.items())
    stack = model.items[2]
    assert optimizer.place_state(stack, "1.mean", (3, 6), torch.float32).shape == (3, 6)
    for key in ("2.mean", "mean", "last.mean"):  # the stack has two matrices
        assert optimizer.place_state(stack, key, (3, 6), torch.float32) is None


def save_trained(folder: str) -> None:
    model, optimizer = trained(Counting, 2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, folder)


def resume_and_compare(folder: str) -> None:
    model, optimizer = trained(Counting, 0)
    resume(folder, model, optimizer)
    for number in (2, 3):
        step(model.items, optimizer, number)
    assert_bits([*model.items], expected(Counting, 4))


def test_state_comes_back_from_a_checkpoint_as_what_it_was(tmp_path):
    run_distributed(save_trained, 2, {"folder": str(tmp_path / "saved")})
    run_distributed(resume_and_compare, 3, {"folder": str(tmp_path / "saved")})


def test_pickled_without_ranks():
    params = [*Parameters(SHAPES).items]
    optimizer = Matrixwise(params, Counting)
    for number in range(2):
        step(params, optimizer, number)
    params, optimizer = pickle.loads(pickle.dumps((params, optimizer)))
    for number in (2, 3):
        step(params, optimizer, number)
    assert_bits(params, expected(Counting, 4))


@distributed(world_size=2)
def test_state_of_one_process_loads():
    """The state was saved by an optimizer that knows nothing of ``Matrixwise``."""
    params = [*Parameters(SHAPES[:2]).items]
    plain = Counting(params)
    model = fully_shard(Parameters(SHAPES[:2]))
    optimizer = Matrixwise(model.items, Counting)
    for number in range(3):
        step(params, plain, number)
        if number == 0:
            step(model.items, optimizer, number)
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        else:
            step(model.items, optimizer, number)
    assert_bits([*model.items], [param.detach() for param in params])


# ---- Groups


@pytest.mark.parametrize("make", [Counting, MAKES["AdamW"]], ids=["momentum", "betas"])
def test_schedulers_that_cycle_momentum(make):
    ours, theirs = Parameters(SHAPES[:2]), Parameters(SHAPES[:2])
    optimizers = [Matrixwise([{"params": ours.items[0]}, {"params": ours.items[1], "lr": 0.3}], make)]
    optimizers.append(make([{"params": theirs.items[0]}, {"params": theirs.items[1], "lr": 0.3}]))
    schedulers = [lr_scheduler.CyclicLR(item, 0.01, 0.2, step_size_up=2) for item in optimizers]
    for number in range(5):
        for params, optimizer, scheduler in zip((ours.items, theirs.items), optimizers, schedulers, strict=True):
            step(params, optimizer, number)
            scheduler.step()
    assert_bits([*ours.items], [param.detach() for param in theirs.items])


@distributed(world_size=2)
def test_state_of_another_optimizer_is_refused():
    model, optimizer = trained(MAKES["AdamW"], 1)
    other = Matrixwise(model.items, lambda params: torch.optim.SGD(params, lr=0.1)).state_dict()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(MisuseError, match=r"a parameter group has no betas, eps.* Nothing was changed"):
        optimizer.load_state_dict(other)
    assert str(optimizer.state_dict()) == str(before)
    step(model.items, optimizer, 1)
    assert_bits([*model.items], expected(MAKES["AdamW"], 2))


DIFFERENT = {
    "optimizers ['AdamW'], rank 1 has optimizers ['Adam']": (torch.optim.AdamW, torch.optim.Adam),
    "momentum=0.9 in parameter group 0": (torch.optim.SGD, lambda params: torch.optim.SGD(params, momentum=0.9)),
}


@pytest.mark.parametrize("differs", DIFFERENT)
@distributed(world_size=2)
def test_ranks_that_make_other_optimizers(differs):
    model = fully_shard(Parameters(SHAPES))
    optimizer = Matrixwise(model.items, DIFFERENT[differs][dist.get_rank()])
    with pytest.raises(RanksDifferError, match="ranks differ in what they train") as caught:
        step(model.items, optimizer, 0)
    assert differs in same_on_every_rank(str(caught.value))
    assert_bits([*model.items], [param.detach() for param in Parameters(SHAPES).items])

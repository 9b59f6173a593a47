"""``resume``: all checks come before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

from fsdp_compose import flat_parameters, fully_shard
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_state_dict,
    load,
    resume,
    save,
    set_state_dict,
)
from tests.checkpoint.states import adamw, assert_equal, shared_folder, snapshot, state_of
from tests.harness import distributed, same_on_every_rank


def stack(layers: int, value: float = 0.0, width: int = 3) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return fully_shard(model)


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, times: int = 1) -> torch.optim.Optimizer:
    for _ in range(times):
        model(torch.ones(2, model[0].in_features)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def of_all(model: nn.Module) -> Any:
    return adamw(model.parameters())


def of_head(model: nn.Module) -> Any:
    return adamw(model[1].parameters())


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def two_groups(model: nn.Module) -> Any:
    return adamw([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}])


def flat(model: nn.Module) -> Any:
    return adamw(flat_parameters(model))


# the optimizer that saves, and its model's layers; that which loads, into two layers, and what the error says
UNFIT: dict[str, tuple[Any, int, Any, str]] = {
    "more layers saved": (of_all, 3, of_all, r"2\.weight"),
    "fewer layers saved": (of_all, 1, of_all, r"1\.weight"),
    "fewer trained": (of_head, 2, of_all, r"missing: 0\.weight"),
    "another optimizer": (sgd, 2, of_all, "expected .*exp_avg"),
    "groups in conflict": (two_groups, 2, of_all, "the saved lr is"),
    "flat views": (of_head, 2, flat, "missing"),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("steps", [0, 1])
@distributed(world_size=(1, 2))
def test_what_does_not_fit_changes_nothing(name, steps):
    make_saved, layers, make, text = UNFIT[name]
    folder = shared_folder() / "checkpoint"
    model = stack(layers, 1.0)
    save(state_of(model, stepped(make_saved(model), model)), folder)
    model = stack(2, 5.0)
    optimizer = stepped(make(model), model, steps)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=rf"(?s){text}") as caught:
        resume(folder, model, optimizer)
    same_on_every_rank(str(caught.value))
    assert "othing was changed" in str(caught.value)
    assert_equal(snapshot(model, optimizer), before)
    stepped(optimizer, model)  # nothing was loaded that had to be set


@distributed(world_size=(1, 2))
def test_fewer_or_more_trained_parameters_have_a_way_in():
    folder = shared_folder() / "checkpoint"
    model = stack(2, 1.0)
    saved = stepped(adamw(model[1].parameters()), model)
    save(state_of(model, saved), folder / "head")
    save(state_of(model, stepped(adamw(model.parameters()), model)), folder / "all")
    other = stack(2, 5.0)
    resume(folder / "all", other, adamw(other[1].parameters()))  # the others' state is passed over
    assert_equal(snapshot(other), snapshot(model))
    optimizer = adamw(other.parameters())
    of_model, of_optimizer = get_state_dict(other, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    load(state, folder / "head")
    options = StateDictOptions(strict=False)
    set_state_dict(
        other, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    assert {name for name, of in other.named_parameters() if of in optimizer.state} == {"1.weight", "1.bias"}
    stepped(optimizer, other)

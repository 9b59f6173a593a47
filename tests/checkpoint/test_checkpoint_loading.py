"""``load()`` brings back the state that was saved, whatever the optimizer that it is loaded into keeps by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.optim.optimizer import Optimizer

from fsdp_compose import fully_shard
from fsdp_compose.checkpoint import (
    get_model_state_dict,
    get_optimizer_state_dict,
    load,
    save,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.checkpoint.states import (
    FLATTENED,
    FROM_RANK0,
    FULL,
    assert_equal,
    batch,
    set_state,
    shared_folder,
    snapshot,
    state_of,
    through_a_folder,
    train,
)
from tests.harness import distributed


class Waves(nn.Module):
    """Real and complex parameters; the output layer is tied to the input one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.phases = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.view_as_real(self.first(x).to(torch.complex64) @ self.phases).sum(-1) @ torch.ones(5, 6))


def waves(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return fully_shard(Waves())


class Undeclared(torch.optim.SGD):
    """An optimizer whose step must not be tried out: it keeps a running mean, a count and a history."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(mean=torch.zeros_like(param), count=0, history=[torch.zeros_like(param)])
                state["mean"].lerp_(param.grad, 0.1)
                state["count"] += 1
                state["history"][0].add_(param.grad)
                param.sub_(state["mean"] + state["history"][0] * 0.01, alpha=group["lr"] / state["count"])


def sgd(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, **options)


def adam(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=0.1, **options)


CASES: dict[str, tuple[Callable[[nn.Module], Optimizer], Callable[[nn.Module], Optimizer]]] = {
    "the same": (adam(), adam()),
    "momentum into none": (sgd(momentum=0.9), sgd()),
    "none into momentum": (sgd(), sgd(momentum=0.9)),
    "amsgrad into none": (adam(amsgrad=True), adam()),
    "none into amsgrad": (adam(), adam(amsgrad=True)),
    "undeclared": (lambda model: Undeclared(model.parameters(), lr=0.1),) * 2,
}


@pytest.mark.parametrize("options", [None, FLATTENED], ids=["nested", "flattened"])
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("case", CASES)
@distributed(world_size=2)
def test_state_that_the_optimizer_would_not_keep_by_itself_is_loaded(case, steps, options):
    model, other = waves(0), waves(1)
    optimizer, its = (build(m) for build, m in zip(CASES[case], (model, other), strict=True))
    train(model, optimizer, 2)
    train(other, its, steps)
    through_a_folder(model, optimizer, other, its, options)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))
    for trained, by in ((model, optimizer), (other, its)):
        train(trained, by, 2, begin=2)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))


@pytest.mark.parametrize("options", [None, FLATTENED], ids=["nested", "flattened"])
@distributed(world_size=2)
def test_state_that_was_saved_by_the_other_name_of_a_tied_parameter_is_loaded(options):
    folder = shared_folder() / "checkpoint"
    model, other = waves(0), waves(1)
    optimizer, its = adam()(model), adam()(other)
    train(model, optimizer, 2)
    state = state_of(model, optimizer, options)
    rename = lambda key: key.replace("first.weight", "last.weight")  # noqa: E731
    if options is None:
        state["optimizer"]["state"] = {rename(fqn): entries for fqn, entries in state["optimizer"]["state"].items()}
        (group,) = state["optimizer"]["param_groups"]
        group["params"] = [rename(fqn) for fqn in group["params"]]
    else:
        state["optimizer"] = {rename(key): value for key, value in state["optimizer"].items()}
    save(state, folder)
    loaded = state_of(other, its, options)
    load(loaded, folder)
    set_state(other, its, loaded)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))


@distributed(world_size=2)
def test_state_of_parameters_that_are_not_trained_is_not_read():
    folder = shared_folder() / "checkpoint"
    model, other = waves(0), waves(1)
    optimizer, its = adam()(model), torch.optim.Adam([other.phases])
    train(model, optimizer, 1)
    save(state_of(model, optimizer), folder)
    state = state_of(other, its)
    load(state, folder)
    assert [*state["optimizer"]["state"]] == ["phases"]
    set_state(other, its, state)
    expected = snapshot(model, optimizer)
    assert_equal(snapshot(other, its)[1]["state"], {"phases": expected[1]["state"]["phases"]})
    assert_equal(snapshot(other)[0], expected[0])


@distributed(world_size=2)
def test_state_without_a_place_that_could_be_known_is_an_error_and_not_dropped():
    folder = shared_folder() / "checkpoint"
    model = waves(0)
    optimizer, fresh = (CASES["undeclared"][i](model) for i in range(2))
    train(model, optimizer, 1)
    save({"optimizer": get_optimizer_state_dict(model, optimizer)}, folder)
    state = {"optimizer": get_optimizer_state_dict(model, fresh)}
    before = copy.deepcopy(state)
    with pytest.raises(RuntimeError, match=r"phases.mean, of shape .* load the model's state dict in the same call"):
        load(state, folder)
    assert_equal(state, before)
    train(model, fresh, 1)
    state = {"optimizer": get_optimizer_state_dict(model, fresh)}
    load(state, folder)
    assert state["optimizer"]["state"]["phases"]["count"] == 1


@pytest.mark.parametrize("flattened", [True, False])
@distributed(world_size=2)
def test_a_checkpoint_in_the_other_form_is_an_error(flattened):
    folder = shared_folder() / "checkpoint"
    model = waves(0)
    optimizer = adam()(model)
    train(model, optimizer, 1)
    forms = (FLATTENED, None) if flattened else (None, FLATTENED)
    save(state_of(model, optimizer, forms[0]), folder)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=f"was saved with flatten_optimizer_state_dict={flattened}: get the"):
        load(state_of(model, optimizer, forms[1]), folder)
    assert_equal(snapshot(model, optimizer), before)


@distributed(world_size=2)
def test_an_optimizers_own_dict_with_numbers_is_loaded_or_an_error_and_not_dropped():
    folder = shared_folder() / "checkpoint"
    model, other = waves(0), waves(1)
    optimizer, its = adam()(model), adam()(other)
    train(model, optimizer, 2)
    save({"optimizer": optimizer.state_dict()}, folder)
    with pytest.raises(RuntimeError, match="was saved as an optimizer's own state_dict"):
        load(state_of(other, its), folder)
    with pytest.raises(RuntimeError, match=r"state.0.exp_avg, of shape .*, but the optimizer has no such state"):
        load({"optimizer": its.state_dict()}, folder)
    train(other, its, 1)
    state = {"optimizer": its.state_dict()}
    load(state, folder)
    set_optimizer_state_dict(other, its, state["optimizer"])
    assert_equal(snapshot(other, its)[1], snapshot(model, optimizer)[1])


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
@distributed(world_size=2)
def test_state_of_another_kind_of_optimizer_is_an_error(steps):
    folder = shared_folder() / "checkpoint"
    model, other = waves(0), waves(1)
    optimizer, its = sgd(momentum=0.9)(model), adam()(other)
    train(model, optimizer, 1)
    train(other, its, steps)
    save(state_of(model, optimizer), folder)
    before = snapshot(other, its)
    optimizer_state = get_optimizer_state_dict(other, its)
    load({"model": get_model_state_dict(model), "optimizer": optimizer_state}, folder)
    with pytest.raises(
        RuntimeError, match="expected step, exp_avg, exp_avg_sq, which Adam keeps; found momentum_buffer"
    ):
        set_optimizer_state_dict(other, its, optimizer_state)
    assert_equal(snapshot(other, its), before)


class Halved(nn.Module):
    """In the first version of its format the weight was half of what it is now."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


@pytest.mark.parametrize("how", ["full", "broadcast", "sharded", "compiled"])
@distributed(world_size=2)
def test_modules_are_told_the_version_of_their_format(how):
    model, other = (fully_shard(nn.Sequential(Halved())) for _ in range(2))
    expected = snapshot(model)
    if how == "compiled":
        other = torch.compile(other)
    options = {"full": FULL, "broadcast": FROM_RANK0}.get(how)
    full = None if how in ("sharded", "compiled") else FULL
    set_model_state_dict(other, get_model_state_dict(model, options=full), options=options)
    assert_equal(snapshot(other), expected)
    old = nn.Sequential(Halved()).state_dict()
    old["0.weight"] = expected[0]["0.weight"] / 2
    old._metadata["0"]["version"] = 1
    set_model_state_dict(other, old, options=options)
    assert_equal(snapshot(other), expected)


@distributed(world_size=2)
def test_lists_and_state_of_no_parameter_load_into_an_optimizer_that_has_none():
    folder = shared_folder() / "checkpoint"
    model, other = waves(0), waves(1)
    lbfgs = lambda m: torch.optim.LBFGS(m.first.parameters(), lr=0.1, max_iter=3, history_size=4)  # noqa: E731
    optimizers = [lbfgs(model), lbfgs(other)]

    def closure_of(trained: nn.Module) -> Any:
        def closure() -> torch.Tensor:
            trained.zero_grad()
            loss: torch.Tensor = trained(batch(0)).square().mean()
            loss.backward()
            return loss

        return closure

    optimizers[0].step(closure_of(model))
    optimizers[0].state["all"] = {"seen": 3, "sum": torch.ones(2)}
    save(state_of(model, optimizers[0]), folder)
    state = state_of(other, optimizers[1])
    load(state, folder)
    set_state(other, optimizers[1], state)
    assert optimizers[1].state["all"]["seen"] == 3
    assert_equal(snapshot(other, optimizers[1]), snapshot(model, optimizers[0]))
    for trained, by in zip((model, other), optimizers, strict=True):
        by.step(closure_of(trained))
    assert_equal(snapshot(other, optimizers[1]), snapshot(model, optimizers[0]))

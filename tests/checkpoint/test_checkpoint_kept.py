"""Loads bring back what was saved: dtypes, keys, state of unusual optimizers and models. And what is given stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import declare_elementwise, flat_parameters, fully_shard
from fsdp_compose.checkpoint import (
    async_save,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    load,
    load_hf,
    save,
    save_hf,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.checkpoint.states import (
    FULL,
    adamw,
    assert_equal,
    build,
    set_state,
    shared_folder,
    snapshot,
    state_of,
    through_a_folder,
    train,
)
from tests.harness import distributed, same_on_every_rank
from tests.models import shard_layers


def stack(seed: int, is_sharded: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(dtype)
    return fully_shard(model) if is_sharded else model


def steps(model: nn.Module, optimizer: Any, number: int) -> None:
    for _ in range(number):
        model(torch.ones(4, 6, dtype=next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("is_sharded", [True, False])
@distributed(world_size=2)
def test_one_loaded_dict_makes_two_optimizers_that_share_nothing(is_sharded):
    folder = shared_folder() / "checkpoint"
    source = stack(0, is_sharded)
    trained = adamw(source.parameters())
    steps(source, trained, 1)
    save(state_of(source, trained), folder)
    models = [stack(seed, is_sharded) for seed in (1, 2)]
    pairs = [(model, adamw(model.parameters())) for model in models]
    state = state_of(*pairs[0])
    load(state, folder)
    for model, optimizer in pairs:
        set_state(model, optimizer, state)
    expected = snapshot(source, trained)
    steps(*pairs[0], 2)
    assert_equal(snapshot(*pairs[1]), expected)


class Master(torch.optim.Optimizer):
    """Keeps fp32 weights next to bf16 ones, and counts in bytes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(master=param.detach().float(), codes=torch.zeros_like(param, dtype=torch.uint8))
                    state["several"] = {"mean": torch.zeros_like(param, dtype=torch.float64)}
                state["master"].sub_(param.grad.float(), alpha=group["lr"])
                state["several"]["mean"].add_(param.grad.double())
                state["codes"].add_(1)
                param.copy_(state["master"])


@pytest.mark.parametrize("how", ["full", "disk"])
@pytest.mark.parametrize("name", ["Master", "NAdam", "ASGD", "AdamW"])
@distributed(world_size=2)
def test_state_keeps_its_dtype(name, how):
    make = Master if name == "Master" else getattr(torch.optim, name)
    model, other = stack(0, dtype=torch.bfloat16), stack(1, dtype=torch.bfloat16)
    optimizer, its = make(model.parameters()), make(other.parameters())
    steps(model, optimizer, 2)
    if how == "full":
        set_state(other, its, state_of(model, optimizer, FULL))
    else:
        through_a_folder(model, optimizer, other, its)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))
    for trained, by in ((model, optimizer), (other, its)):
        steps(trained, by, 2)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))


@distributed(world_size=2)
def test_state_becomes_what_the_optimizer_keeps_for_parameters_of_another_dtype():
    model, other = stack(0), stack(1, dtype=torch.bfloat16)
    optimizer, its = adamw(model.parameters()), adamw(other.parameters())
    steps(model, optimizer, 1)
    set_optimizer_state_dict(other, its, get_optimizer_state_dict(model, optimizer, options=FULL))
    kept = [value.dtype for entries in its.state.values() for key, value in entries.items() if key != "step"]
    assert set(kept) == {torch.bfloat16}
    steps(other, its, 1)


class Rows(torch.optim.Optimizer):
    """Keeps whole results of sharded tensors, and computes with them and with plain tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state, grad, shape = self.state[param], param.grad, param.shape[-1:]
                if not state:
                    state.update(length=torch.zeros(()), mean=torch.zeros(shape), weights=torch.ones(shape))
                    state["rows"], state["norm"] = grad.abs().mean(-1, keepdim=True), grad.norm()
                state["length"].add_(grad.norm())
                state["mean"].add_(grad.reshape(-1, *shape).mean(0))
                state["rows"].mul_(0.5).add_(grad.abs().mean(-1, keepdim=True))
                state["norm"].lerp_(grad.norm(), 0.5)
                state["weights"].mul_(1 + state["rows"].mean() * state["norm"])
                scale = state["rows"] * state["weights"] + state["length"]
                param.addcdiv_(grad - state["mean"], scale, value=-group["lr"])


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("how", ["full", "disk", "disk and full"])
@distributed(world_size=2)
def test_state_of_whole_results_goes_on_with_plain_tensors(how, steps_before):
    model, other = stack(0), stack(1)
    optimizer, its = Rows(model.parameters()), Rows(other.parameters())
    steps(model, optimizer, 2)
    steps(other, its, steps_before)
    if how == "full":
        set_state(other, its, state_of(model, optimizer, FULL))
    else:
        through_a_folder(model, optimizer, other, its, FULL if "full" in how else None)
    for trained, by in ((model, optimizer), (other, its)):
        steps(trained, by, 2)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))


class Numbered(torch.optim.SGD):
    """Keeps its state by numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("table", {10: 0.1})
            for param in group["params"]:
                means = self.state[param].setdefault("means", {})
                for i in (0, 1):
                    means.setdefault(i, torch.zeros_like(param)).lerp_(param.grad, 0.1 + i / 2)
                    param.sub_(means[i], alpha=group["table"][10])


@distributed(world_size=2)
def test_keys_that_are_numbers_stay_numbers():
    folder = shared_folder() / "checkpoint"
    model, other = stack(0), stack(1)
    optimizer, its = (Numbered(m.parameters(), lr=0.1) for m in (model, other))
    first, second = (torch.optim.lr_scheduler.MultiStepLR(by, [2, 4, 4], gamma=0.5) for by in (optimizer, its))
    steps(model, optimizer, 3)
    first.step()
    more = {"by number": {3: {"x": 1}, 5: [{7: 1}]}}
    save({**state_of(model, optimizer), "scheduler": first, "more": more}, folder)
    given: dict[str, Any] = {"by number": {3: {"x": 0}, 5: [{7: 0}]}}
    state = {**state_of(other, its), "scheduler": second, "more": given}
    load(state, folder)
    set_state(other, its, state)
    assert second.state_dict() == first.state_dict() and type(second.milestones) is type(first.milestones)
    assert given == more and state["more"] is given
    assert_equal(snapshot(other, its), snapshot(model, optimizer))
    for trained, by in ((model, optimizer), (other, its)):
        steps(trained, by, 1)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))


@distributed(world_size=2)
def test_keys_that_a_hook_has_renamed_are_an_error_and_not_passed_over():
    def rename(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}old"] = state.pop(f"{prefix}weight")

    def renaming() -> nn.Module:
        layer = nn.Linear(3, 3)
        layer.register_state_dict_post_hook(rename)
        return fully_shard(nn.Sequential(layer))

    message = r"0\.old: a hook added it to state_dict\(\), but load_state_dict\(\) does not accept it"
    with pytest.raises(RuntimeError, match=message):
        set_model_state_dict(renaming(), get_model_state_dict(renaming()))


def test_hooks_of_a_meta_parameter_that_no_group_has_run_after_it_is_loaded():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    seen: list[str] = []
    model.weight.register_hook(lambda _: seen.append("hook"))
    model.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    set_model_state_dict(model, nn.Linear(2, 2).state_dict())
    model(torch.ones(1, 2)).sum().backward()
    assert seen == ["hook", "accumulated"]


@distributed(world_size=2)
def test_optimizers_may_come_from_a_generator():
    source = build(0)
    trained = adamw(source.parameters())
    train(source, trained, 1)
    states = get_state_dict(source, (by for by in [trained]), options=FULL)
    with torch.device("meta"):
        model = shard_layers(build(1))
    optimizer = adamw(model.parameters())
    several = (by for by in [optimizer])
    set_state_dict(model, several, model_state_dict=states[0], optim_state_dict=states[1])
    assert_equal(get_optimizer_state_dict(model, optimizer, options=FULL)["state"], states[1]["state"])


@declare_elementwise
class Counting(torch.optim.SGD):
    """Its step changes more than its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.total, self.log = torch.zeros(1), {"steps": [0]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.total += 1
        self.log["steps"][0] += 1
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["noise"] = torch.rand_like(param)


def test_getters_change_nothing_that_a_step_would():
    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters())
    before = torch.get_rng_state()
    state = get_optimizer_state_dict(model, optimizer)
    assert state["state"]["weight"].keys() == {"noise"}, "a stand-in was tried"
    assert torch.equal(torch.get_rng_state(), before) and optimizer.total == 0 and optimizer.log == {"steps": [0]}


class Unforeseen(torch.optim.AdamW):
    """As ``AdamW``, of a class whose step must not be tried out."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@distributed(world_size=2)
def test_state_of_another_shape_is_an_error_also_where_its_meaning_is_not_known():
    model = fully_shard(nn.Linear(4, 4))
    optimizer = Unforeseen(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state, before = get_optimizer_state_dict(model, optimizer, options=FULL), snapshot(model, optimizer)
    state["state"]["weight"]["exp_avg"] = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"exp_avg of weight: expected shape \(4, 4\); found shape \(3, 3\)"):
        set_optimizer_state_dict(model, optimizer, state, options=FULL)
    assert_equal(snapshot(model, optimizer), before)


@distributed(world_size=2)
def test_a_sharded_and_a_plain_model_of_equal_names_load_from_one_checkpoint():
    folder = shared_folder() / "checkpoint"

    def pairs(seed: int) -> dict[str, Any]:
        models = {"G": stack(seed), "D": stack(seed + 1, is_sharded=False)}
        return {name: (model, Unforeseen(model.parameters())) for name, model in models.items()}

    def states(of: dict[str, Any]) -> dict[str, Any]:
        models = {name: get_model_state_dict(model) for name, (model, _) in of.items()}
        return models | {f"{name} optimizer": get_optimizer_state_dict(*pair) for name, pair in of.items()}

    first, second = pairs(0), pairs(5)
    for model, optimizer in first.values():
        steps(model, optimizer, 2)
    save(states(first), folder)
    loaded = states(second)
    load(loaded, folder)
    for name, (model, optimizer) in second.items():
        set_model_state_dict(model, loaded[name])
        set_optimizer_state_dict(model, optimizer, loaded[f"{name} optimizer"])
        assert_equal(snapshot(model, optimizer), snapshot(*first[name]))


@distributed(world_size=2, timeout=40)
def test_a_plain_model_that_is_given_sharded_values_meets_the_other_ranks():
    sharded, plain = stack(0), stack(1, is_sharded=False)
    state = get_model_state_dict(sharded)
    set_model_state_dict(plain, state)
    assert_equal(snapshot(plain), snapshot(sharded))
    if dist.get_rank() == 1:
        state["stray"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="unexpected: stray") as caught:
        set_model_state_dict(plain, state)
    same_on_every_rank(str(caught.value).replace("on rank 1: ", ""))


@distributed(world_size=2)
def test_sparse_buffers_are_kept_or_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    fully_shard(model)
    full = get_model_state_dict(model, options=FULL)
    assert torch.equal(full["sparse"].to_dense(), torch.eye(3))
    with pytest.raises(RuntimeError, match=r"sparse is torch.sparse_coo, which safetensors does not support"):
        save_hf(model, shared_folder() / "hf")


def test_lazy_views_parts_and_long_names_are_saved_as_they_look(tmp_path):
    real, pairs = torch.arange(9.0), torch.randn(9, dtype=torch.complex64)
    given = {
        "negated": torch._neg_view(real[2:5]),
        "conjugated": pairs[2:5].conj(),
        "imaginary": pairs[2:5].conj().imag,
        "halves": pairs.to(torch.complex32)[2:5].conj(),
        "n" * 250: real[:2],
    }
    for name, how in (("now", save), ("later", lambda *arguments: async_save(*arguments).result())):
        how(given, tmp_path / name)
        into = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in given.items()}
        load(into, tmp_path / name)
        for key, value in given.items():
            assert torch.equal(into[key].to(torch.complex64), value.to(torch.complex64)), (name, key)


SPECIAL: dict[str, Callable[[], torch.Tensor]] = {
    "torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "on the meta device": lambda: torch.ones(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
}


@distributed(world_size=2)
def test_tensors_that_files_cannot_hold_are_refused_by_name():
    folder = shared_folder()
    for kind, make in SPECIAL.items():
        for call in (save, async_save):
            state = {"a": torch.ones(1), "b": {"special": make() if dist.get_rank() else torch.ones(2)}}
            with pytest.raises(RuntimeError, match=rf"on rank 1: b\.special .*\({kind}\): save its parts") as caught:
                call(state, folder / "checkpoint")
            same_on_every_rank(str(caught.value).replace("on rank 1: ", ""))
    dist.barrier()
    assert not [*folder.iterdir()]


@distributed(world_size=2)
def test_other_shapes_are_named_with_the_remedy():
    folder = shared_folder() / "checkpoint"
    save({"model": get_model_state_dict(stack(0))}, folder)
    other = fully_shard(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)))
    before = snapshot(other)
    with pytest.raises(RuntimeError, match="for model.0.weight.*Build the model .* Nothing was changed") as caught:
        load({"model": get_model_state_dict(other)}, folder)
    same_on_every_rank(str(caught.value))
    assert_equal(snapshot(other), before)


@pytest.mark.parametrize("flat", [False, True])
@distributed(world_size=2)
def test_parameters_without_elements_have_state_as_any_other(flat):

    def make(seed: int) -> tuple[nn.Module, Any]:
        model = stack(seed, is_sharded=False)
        model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
        fully_shard(model)
        return model, adamw(flat_parameters(model) if flat else model.parameters())

    def run(model: nn.Module, optimizer: Any) -> None:
        if not flat:
            model.nothing.grad = torch.zeros_like(model.nothing)
        steps(model, optimizer, 1)

    first, second = make(0), make(1)
    run(*first)
    through_a_folder(*first, *second)
    assert_equal(snapshot(*second), snapshot(*first))
    for pair in (first, second):
        run(*pair)
    assert_equal(snapshot(*second), snapshot(*first))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.state(x)


@distributed(world_size=2)
def test_a_submodule_may_be_named_state():
    model, other = fully_shard(Named()), fully_shard(Named())
    optimizer, its = Unforeseen(model.parameters()), Unforeseen(other.parameters())
    steps(model, optimizer, 1)
    through_a_folder(model, optimizer, other, its)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))


@distributed(world_size=2)
def test_a_load_that_fails_leaves_the_dict_as_it_was():
    folder = shared_folder() / "checkpoint"
    model, other = stack(0), stack(1)
    optimizer, its = adamw(model.parameters()), adamw(other.parameters())
    steps(model, optimizer, 1)
    save(state_of(model, optimizer), folder)
    state = {**state_of(other, its), "lacking": 3}
    before, inner = copy.deepcopy(state["optimizer"]["param_groups"]), state["optimizer"]
    with pytest.raises(RuntimeError, match=r"the checkpoint lacks lacking\..* Nothing was changed"):
        load(state, folder)
    assert state["optimizer"] is inner and inner["param_groups"] == before
    del state["lacking"]
    load(state, folder)
    assert state["optimizer"] is inner, "the dicts that the user holds are filled"
    set_state(other, its, state)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))


def test_addresses_are_no_folders():
    model = nn.Linear(2, 2)
    for call in (
        lambda: save({"x": 1}, "s3://bucket/step"),
        lambda: load({"x": 1}, "s3://bucket/step"),
        lambda: save_hf(model, "s3://bucket/step"),
        lambda: load_hf(model, "s3://bucket/step"),
    ):
        with pytest.raises(ValueError, match="s3://bucket/step is not a folder of a file system"):
            call()


@distributed(world_size=2)
def test_what_is_loaded_in_inference_mode_can_be_trained():
    folder = shared_folder() / "checkpoint"
    model, other = stack(0), stack(1)
    optimizer, its = adamw(model.parameters()), adamw(other.parameters())
    steps(model, optimizer, 1)
    save(state_of(model, optimizer), folder)
    with torch.inference_mode():
        state = state_of(other, its)
        load(state, folder)
        set_state(other, its, state)
    for trained, by in ((model, optimizer), (other, its)):
        steps(trained, by, 1)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))

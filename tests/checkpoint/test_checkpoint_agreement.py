"""State dicts where ranks differ, where the user's code raises, and what a dict may share with what is live."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_compose import RaggedDTensor, declare_elementwise, flat_parameters, fully_shard, summon_full_params
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    patch_model_state_dict,
    patch_optimizer_state_dict,
    save_hf,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.checkpoint.states import (
    FLATTENED,
    FROM_RANK0,
    FULL,
    FULL_ON_CPU,
    Net,
    adamw,
    assert_equal,
    batch,
    build,
    snapshot,
    train,
)
from tests.checkpoint.test_checkpoint import Matrices
from tests.harness import distributed, same_on_every_rank
from tests.models import shard_layers


@contextmanager
def told(message: str) -> Iterator[None]:
    """Every rank raises this one error, without waiting for the process group's timeout, which is beyond the test's."""
    with pytest.raises(RuntimeError, match=message) as caught:
        yield
    same_on_every_rank(str(caught.value))


def local_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.to_local().clone() for name, param in model.named_parameters()}


# ---- ranks that differ


@distributed(world_size=2)
def test_the_first_rank_may_send_the_sharded_dict_of_an_optimizer_that_has_not_stepped():
    model = shard_layers(build())
    optimizer = adamw(model.parameters())
    state = get_optimizer_state_dict(model, optimizer)
    train(model, optimizer, 1)
    set_optimizer_state_dict(model, optimizer, state if dist.get_rank() == 0 else {}, options=FROM_RANK0)
    assert not optimizer.state


@distributed(world_size=2)
def test_full_getters_name_what_one_rank_alone_would_gather():
    model = shard_layers(build())
    params = [*model.parameters()]
    if dist.get_rank() == 1:
        for param in params[:1]:
            param.grad = torch.zeros_like(param)
    optimizer = adamw(params)
    optimizer.step()
    for options in (FULL, FULL_ON_CPU):
        with told(r"rank 0 has nothing more, but rank 1 has exp_avg of scale of shape \(\), torch\.float32, placed"):
            get_optimizer_state_dict(model, optimizer, options=options)
        with told(r"get_state_dict\(\): .*rank 1 has exp_avg of scale"):
            get_state_dict(model, optimizer, options=options)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    names = {name for name, _ in model.named_parameters()}
    state = optimizer.state[params[0]]
    with told(r"state\.scale\.step is .* on rank 0, but .* on rank 1"):  # rank 1 has made one more step
        get_optimizer_state_dict(model, optimizer, options=FULL)
    state["step"].fill_(2.0)
    assert get_optimizer_state_dict(model, optimizer, options=FULL)["state"].keys() == names
    if dist.get_rank() == 1:
        state["exp_avg"] = state["exp_avg"].double()
    with told(r"exp_avg of scale of shape \(\), torch\.float32.* rank 1 has .*torch\.float64"):
        get_optimizer_state_dict(model, optimizer, options=FULL)
    model.head.weight.requires_grad_(dist.get_rank() == 0)
    frozen = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    with told(r"rank 0 has head\.weight of shape \(6, 10\).* rank 1 has "):
        get_model_state_dict(model, options=frozen)
    with told(r"rank 0 has first\.weight of shape .* but rank 1 has second\.weight of shape"):
        get_model_state_dict(model, submodules={model.first if dist.get_rank() == 0 else model.second}, options=FULL)


@distributed(world_size=2)
def test_getters_where_a_hook_raises_on_one_rank():
    model = shard_layers(build())
    optimizer = adamw(model.parameters())

    def hook(*_: Any) -> None:
        raise KeyError("from a hook")

    handles: list[Any] = []
    if dist.get_rank() == 1:
        handles.append(model.counter.register_state_dict_post_hook(hook))
    for options in (FULL, FULL_ON_CPU):
        with told(r"on rank 1: KeyError: 'from a hook'"):
            get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 1:
        handles.pop().remove()
        handles.append(optimizer.register_state_dict_post_hook(hook))
    with told(r"on rank 1: KeyError: 'from a hook'"):
        get_optimizer_state_dict(model, optimizer, options=FULL)
    with told(r"on rank 1: KeyError: 'from a hook'"):
        set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []})
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="from a hook") as caught:
            get_optimizer_state_dict(model, optimizer)
        assert isinstance(caught.value.__cause__, KeyError)


@distributed(world_size=2)
def test_full_parameters_on_the_first_rank_only_are_refused_on_every_rank(tmp_path):
    model = shard_layers(build())
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    expected = get_state_dict(model, optimizer, options=FULL)
    refused = r"is full on the first rank and sharded on the others, inside summon_full_params\(rank0_only=True\)"
    with summon_full_params(model, rank0_only=True, writeback=False):
        for options in (None, FULL, FULL_ON_CPU):
            with told(refused):
                get_model_state_dict(model, options=options)
        for options in (None, FROM_RANK0):
            with told(refused):
                set_model_state_dict(model, expected[0], options=options)
        with told(refused):
            save_hf(model, tmp_path / "model")
        assert_equal(get_optimizer_state_dict(model, optimizer, options=FULL), expected[1])
    assert_equal([*get_state_dict(model, optimizer, options=FULL)], [*expected])


@pytest.mark.parametrize("offload", [False, True])
@distributed(world_size=2)
def test_state_dicts_inside_summon_full_params_are_those_of_the_full_parameters(offload):
    model, other = shard_layers(build(0)), shard_layers(build(1))
    expected = get_model_state_dict(other, options=FULL)
    for options in (None, FROM_RANK0):
        set_model_state_dict(model, build(0).state_dict())
        with summon_full_params(model, offload_to_cpu=offload):
            set_model_state_dict(model, expected, options=options)
            inside = get_model_state_dict(model, options=FULL)
            assert_equal(inside, expected)
            with torch.no_grad():
                model.scale.fill_(7.0)
            assert inside["scale"] != 7.0 and get_model_state_dict(model, options=FULL)["scale"] == 7.0
            set_model_state_dict(model, get_model_state_dict(other))
        assert_equal(get_model_state_dict(model, options=FULL), expected)


@distributed(world_size=2)
def test_ranks_that_give_other_layouts_are_told_which():
    mesh = init_device_mesh("cpu", (2,))
    model, source = build(0), build(1)
    del model.dead, source.dead  # which never gets state
    shard_layers(model), shard_layers(source)
    optimizer, trained = adamw(model.parameters()), adamw(source.parameters())
    train(source, trained, 1), train(model, optimizer, 1)
    sharded, full = get_state_dict(source, trained), get_state_dict(source, trained, options=FULL)
    before = snapshot(model, optimizer)
    is_first = dist.get_rank() == 0
    rows = distribute_tensor(full[0]["second.weight"], mesh, [Shard(0)])
    columns = distribute_tensor(full[0]["second.weight"], mesh, [Shard(1)])
    with told(
        r"rank 0 has second\.weight of shape \(10, 10\), torch\.float32, whole or sharded as it is here, but rank 1 "
        r"has second\.weight of shape \(10, 10\), torch\.float32, placed \[Shard\(dim=0\)\]"
    ):
        given = {**full[0], "second.weight": full[0]["second.weight"] if is_first else rows}
        set_state_dict(model, optimizer, model_state_dict=given, optim_state_dict=full[1])
    with told(r"rank 0 has second\.weight of .*Shard\(dim=1\).*, but rank 1 has second\.weight of .*Shard\(dim=0\)"):
        set_model_state_dict(model, {**full[0], "second.weight": columns if is_first else rows})
    with told(r"but rank 1 has exp_avg of second\.weight of shape \(10, 10\), torch\.float32, placed \[Shard\(dim=0"):
        given = copy.deepcopy(full[1])
        if not is_first:
            given["state"]["second.weight"]["exp_avg"] = rows
        set_optimizer_state_dict(model, optimizer, given)
    assert_equal(snapshot(model, optimizer), before)
    # Nothing is communicated for either: ranks may differ.
    set_state_dict(
        model,
        optimizer,
        model_state_dict=full[0] if is_first else sharded[0],
        optim_state_dict=sharded[1] if is_first else full[1],
    )
    assert_equal(snapshot(model, optimizer), snapshot(source, trained))


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world_size=2)
def test_an_optimizer_dict_that_makes_no_sense_on_one_rank_is_told_to_all(broadcast):
    plain, model = build(0), shard_layers(build(1))
    source, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    train(plain, source, 1), train(model, optimizer, 1)
    good, before = source.state_dict(), snapshot(model, optimizer)
    wrong: dict[str, Any] = {
        r"it has state for the parameters \[77\], which are in none of its groups": {
            **good,
            "state": {**good["state"], 77: good["state"][0]},
        },
        r"expected a dict as the state of scale; found a int": {"state": {"scale": 1}, "param_groups": []},
        r"expected 'params' in each parameter group; found one with the keys \['lr'\]": {
            "state": {},
            "param_groups": [{"lr": 1}],
        },
        r"found a list": [],
    }
    options = FROM_RANK0 if broadcast else None
    bad_rank = 0 if broadcast else 1
    for message, state in wrong.items():
        with told(message):
            set_optimizer_state_dict(model, optimizer, state if dist.get_rank() == bad_rank else good, options=options)
    assert_equal(snapshot(model, optimizer), before)
    set_optimizer_state_dict(model, optimizer, good, options=options)
    assert_equal(snapshot(model, optimizer)[1], snapshot(plain, source)[1])
    with told(r"expected a dict, found a NoneType"):
        set_model_state_dict(model, None if dist.get_rank() == bad_rank else plain.state_dict(), options=options)


@distributed(world_size=2)
def test_pending_state_on_one_rank_only_is_told_to_all():
    model = shard_layers(build())
    optimizer = adamw(model.parameters())
    pending = get_optimizer_state_dict(model, optimizer)
    train(model, optimizer, 1)
    with told(r"(step|exp_avg) of scale, which has no state yet"):
        set_optimizer_state_dict(
            model, optimizer, pending if dist.get_rank() else get_optimizer_state_dict(model, optimizer)
        )


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world_size=2)
def test_a_model_may_be_on_the_meta_device_on_some_ranks_only(broadcast):
    source = build(1)
    trained = adamw(source.parameters())
    train(source, trained, 1)
    states = get_state_dict(source, trained, options=FULL)
    if dist.get_rank() == 0:
        model = shard_layers(build(0))
    else:
        with torch.device("meta"):
            model = shard_layers(Net())
    optimizer = adamw(model.parameters())
    options = FROM_RANK0 if broadcast else None
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    assert_equal(get_optimizer_state_dict(model, optimizer, options=FULL)["state"], states[1]["state"])
    assert_equal(get_model_state_dict(model, options=FULL), states[0])


# ---- what a full dict shares


class Live(nn.Module):
    """Everything that a full dict could share: plain parameters, buffers (one by two names), extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded, self.plain, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("same_table", self.table)
        self.history = {"losses": [torch.zeros(1)], "seen": [1]}

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.plain(self.sharded(x)))


@pytest.mark.parametrize("is_flat", [False, True])
@distributed(world_size=(1, 2))
def test_full_state_dicts_share_no_memory_with_what_is_live(is_flat):
    model = Live()
    fully_shard(model.sharded)
    first = flat_parameters(model.sharded) if is_flat else [*model.sharded.parameters()]
    groups = [{"params": first, "seen": {"tokens": [1]}}, {"params": [*model.plain.parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.1), weight_decay=0.5)

    def step() -> None:
        model(torch.randn(4, 4)).square().sum().backward()
        optimizer.step()

    step()
    for options in (FULL, FULL_ON_CPU, StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)):
        states = get_state_dict(model, optimizer, options=options)
        before = copy.deepcopy(states)
        if states[0]:
            assert states[0]["table"].data_ptr() == states[0]["same_table"].data_ptr(), "one tensor stays one"
        step()
        with torch.no_grad():
            model.table.add_(1), model.history["losses"][0].add_(1), model.history["seen"].append(2)
            for group in optimizer.param_groups:
                group["lr"].mul_(0.5)
            optimizer.param_groups[0]["seen"]["tokens"].append(2)
        assert_equal([*states], [*before])
    sharded = get_model_state_dict(model)
    with torch.no_grad():
        model.table.fill_(9.0)
    assert sharded["table"][0] == 9.0, "sharded dicts are alive"


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch(step)).square().mean()
        loss.backward()
        return loss

    return closure


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    if isinstance(state, (list, tuple)):
        return [tensor for value in state for tensor in tensors_of(value)]
    return [state] if isinstance(state, torch.Tensor) else []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["sharded", "full", "rank 0", "flattened"])
@distributed(world_size=2)
def test_lbfgs_goes_on_from_its_state_dict_to_the_bit(how):
    """It keeps lists of vectors over all parameters."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)

    model, resumed = fully_shard(Matrices()), fully_shard(Matrices())
    optimizer, loaded = make(model), make(resumed)
    for step in range(2):
        optimizer.step(closure_of(model, optimizer, step))
    options = {"sharded": None, "full": FULL, "rank 0": FULL_ON_CPU, "flattened": FLATTENED}[how]
    states = get_state_dict(model, optimizer, options=options)
    if how in ("full", "rank 0"):
        assert all(type(tensor) is torch.Tensor for tensor in tensors_of(states))
    for again in range(2):  # also into an optimizer that has stepped
        set_state_dict(
            resumed,
            loaded,
            model_state_dict=states[0],
            optim_state_dict=states[1],
            options=FROM_RANK0 if how == "rank 0" else None,
        )
        if again == 0:
            loaded.step(closure_of(resumed, loaded, 7))
    live = {tensor.to_local().data_ptr() for tensor in tensors_of(optimizer.state_dict()) if tensor.dim()}
    assert not live & {tensor.to_local().data_ptr() for tensor in tensors_of(loaded.state_dict()) if tensor.dim()}
    for trained, its in ((model, optimizer), (resumed, loaded)):
        for step in range(2, 4):
            its.step(closure_of(trained, its, step))
    full = [get_state_dict(*pair, options=FULL) for pair in ((model, optimizer), (resumed, loaded))]
    assert_equal([*full[1]], [*full[0]])
    plain = Matrices()
    unsharded = make(plain)
    set_state_dict(plain, unsharded, model_state_dict=full[0][0], optim_state_dict=full[0][1])
    unsharded.step(closure_of(plain, unsharded, 5)), optimizer.step(closure_of(model, optimizer, 5))
    torch.testing.assert_close(plain.state_dict(), get_model_state_dict(model, options=FULL))


@declare_elementwise
class Historian(torch.optim.Optimizer):
    """Keeps the last gradients of each parameter in a list, and state that is of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["global"].setdefault("count", 0)
        self.state["global"]["count"] += 1
        self.state["norms"] = [torch.full((2,), float(self.state["global"]["count"]))]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    history = self.state[param].setdefault("history", [])
                    history.append(param.grad.clone())
                    for grad in history:
                        param.sub_(grad, alpha=group["lr"])


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("how", ["sharded", "full", "rank 0", "flattened"])
@distributed(world_size=2)
def test_lists_of_tensors_and_state_of_no_parameter_round_trip(how, is_flat):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Historian(flat_parameters(model) if is_flat else model.parameters())

    model, other = fully_shard(Matrices()), fully_shard(Matrices())
    optimizer, loaded = make(model), Historian(other.parameters())
    train(model, optimizer, 2)
    options = {"sharded": None, "full": FULL, "rank 0": FULL_ON_CPU, "flattened": FLATTENED}[how]
    states = get_state_dict(model, optimizer, options=options)
    if how == "full":
        assert states[1]["state"]["optimizers.0"]["global"] == {"count": 2}
        assert [tuple(grad.shape) for grad in states[1]["state"]["first.weight"]["history"]] == [(5, 6), (5, 6)]
    its_options = FROM_RANK0 if how == "rank 0" else None
    set_state_dict(other, loaded, model_state_dict=states[0], optim_state_dict=states[1], options=its_options)
    assert loaded.state["global"] == {"count": 2} and loaded.state["norms"] is not optimizer.state["norms"]
    assert all(isinstance(grad, RaggedDTensor) for grad in loaded.state[other.first.weight]["history"])
    back = make(model)
    set_optimizer_state_dict(model, back, get_optimizer_state_dict(other, loaded, options=options), options=its_options)
    for trained, its in ((model, back), (other, loaded)):
        train(trained, its, 2, begin=2)
    full = [get_state_dict(*pair, options=FULL) for pair in ((model, back), (other, loaded))]
    assert_equal([*full[1]], [*full[0]])
    assert full[0][1]["state"]["optimizers.0"]["norms"][0][0] == 4.0


@distributed(world_size=2)
def test_two_parameters_of_a_flat_view_have_state_of_one_nesting():
    model, other = fully_shard(Matrices()), fully_shard(Matrices())
    optimizer, flat = Historian(model.parameters()), Historian(flat_parameters(other))
    train(model, optimizer, 2)
    for longer in ("first", "second"):
        state = get_optimizer_state_dict(model, optimizer, options=FULL)
        state["state"][f"{longer}.weight"]["history"].pop()
        with told(r"or lists of other lengths, but the optimizer holds both in one flat view"):
            set_optimizer_state_dict(other, flat, state)
    assert not flat.state[flat.param_groups[0]["params"][0]]


@distributed(world_size=2)
def test_state_under_a_key_without_a_name_is_refused():
    model = fully_shard(Matrices())
    optimizer = Historian(model.parameters())
    optimizer.state[("a", 1)] = {"count": 1}
    with told(r"the Historian keeps state under \('a', 1\), which is neither one of its parameters nor a string"):
        get_optimizer_state_dict(model, optimizer, options=FULL)
    own = torch.optim.SGD(model.parameters()).state_dict()
    numbered = {**own, "state": {"global": {"count": 3}}}
    optimizer.state.clear()
    set_optimizer_state_dict(model, optimizer, numbered)
    assert optimizer.state["global"] == {"count": 3}


# ---- what raises while it is loaded


class Loud(nn.Module):
    """Refuses to be loaded where ``is_loud``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)
        self.is_loud = False

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        if self.is_loud:
            raise ValueError("not today")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("where", ["extra state", "model hook", "optimizer hook"])
@distributed(world_size=2)
def test_what_raises_while_it_is_loaded_is_told_to_all_with_what_was_changed(where):
    model, source = fully_shard(Loud()), fully_shard(Loud())
    optimizer, trained = adamw(model.parameters()), adamw(source.parameters())
    train(model, optimizer, 1), train(source, trained, 2)
    before = snapshot(model, optimizer)

    def hook(*_: Any) -> None:
        raise ValueError("not today")

    if dist.get_rank() == 1:
        if where == "extra state":
            model.is_loud = True
        elif where == "model hook":
            model.register_load_state_dict_pre_hook(hook)
        else:
            optimizer.register_load_state_dict_post_hook(hook)
    states = get_state_dict(source, trained)
    is_model = where != "optimizer hook"
    changed = "some of the model's values may be replaced, on any rank; the optimizers are unchanged"
    with told(
        r"set_state_dict\(\): on rank 1: ValueError: not today\n.*"
        + (changed if is_model else "some optimizer state may already be replaced, on any rank")
    ):
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    if is_model:
        assert_equal(snapshot(model, optimizer)[1], before[1])
    dist.barrier()


class Together(nn.Module):
    """Loads its two parameters together, from their sum and difference as they stand in the dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(1))
        self.seen: list[set[str]] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.seen.append({key[len(prefix) :] for key in state_dict if key.startswith(prefix)})
        super()._load_from_state_dict(state_dict, prefix, *args)


@distributed(world_size=2)
def test_a_module_that_loads_by_itself_gets_all_of_its_keys():
    model = fully_shard(nn.Sequential(Together(), nn.Linear(3, 3)))
    state = {**get_model_state_dict(model), "0.b": torch.full((3,), 2.0)}  # the others are where they belong
    set_model_state_dict(model, state)
    assert model[0].seen == [{"a", "b", "scale"}]
    assert torch.equal(model[0].b.full_tensor(), torch.full((3,), 2.0)) and model[0].a.full_tensor()[0] == 1.0


# ---- small ones


@distributed(world_size=2)
def test_empty_groups_of_several_optimizers_keep_their_own_hyperparameters():
    def make(model: nn.Module, *rates: float) -> list[torch.optim.Optimizer]:
        halves = [[*model.first.parameters()], [*model.second.parameters()]]
        return [
            torch.optim.SGD([{"params": half}, {"params": [], "lr": rate}], lr=0.1)
            for half, rate in zip(halves, rates, strict=True)
        ]

    model, other = fully_shard(Matrices()), fully_shard(Matrices())
    optimizers, loaded = make(model, 1.0, 2.0), make(other, 3.0, 4.0)
    set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(model, optimizers))
    assert [optimizer.param_groups[1]["lr"] for optimizer in loaded] == [1.0, 2.0]


@distributed(world_size=2)
def test_submodules_whose_keys_would_collide_are_refused():
    model = shard_layers(build())
    for options in (
        StateDictOptions(keep_submodule_prefixes=False),
        StateDictOptions(keep_submodule_prefixes=False, full_state_dict=True),
    ):
        with told(r"first\.weight and second\.weight would both be named weight"):
            get_model_state_dict(model, submodules={model.first, model.second}, options=options)
        assert len(get_model_state_dict(model, submodules={model.first, model.counter}, options=options)) == 3


@distributed(world_size=2)
def test_unexpected_names_in_a_flattened_dict_are_passed_over_if_not_strict():
    model = shard_layers(build())
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    before = snapshot(model, optimizer)
    state = {
        **get_optimizer_state_dict(model, optimizer, options=FLATTENED),
        "state.zzz.step": torch.tensor(1.0),
        "param_groups.zzz.lr": 0.5,
    }
    with told(r"unexpected: these keys name no parameter of the model: state\.zzz\.step, param_groups\.zzz\.lr"):
        set_optimizer_state_dict(model, optimizer, state)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    assert_equal(snapshot(model, optimizer), before)


@pytest.mark.parametrize("is_sharded", [False, True])
@distributed(world_size=2)
def test_pending_state_is_pickled_as_none(is_sharded):
    model = shard_layers(build()) if is_sharded else build()
    optimizer = adamw(model.parameters())
    file = io.BytesIO()
    torch.save(get_optimizer_state_dict(model, optimizer), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["state"]["scale"] == {"step": None, "exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": None}
    train(model, optimizer, 1)
    set_optimizer_state_dict(model, optimizer, loaded)
    assert not optimizer.state


@pytest.mark.parametrize("is_sharded", [False, True])
@distributed(world_size=2)
def test_live_tensors_under_exchanged_names_are_exchanged(is_sharded):
    model = nn.Sequential(OrderedDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}))
    if is_sharded:
        fully_shard(model.a), fully_shard(model.b)  # of one layout: nothing moves
    optimizer = adamw(model.parameters())
    for i, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, i + 1.0)
    optimizer.step()
    before = snapshot(model, optimizer)
    state, its = get_state_dict(model, optimizer)
    twin = {"a": "b", "b": "a"}
    exchanged = {f"{twin[key[0]]}{key[1:]}": value for key, value in state.items()}
    moments = {f"{twin[key[0]]}{key[1:]}": value for key, value in its["state"].items()}
    set_state_dict(model, optimizer, model_state_dict=exchanged, optim_state_dict={**its, "state": moments})
    after = snapshot(model, optimizer)
    for key in before[0]:
        assert torch.equal(after[0][key], before[0][f"{twin[key[0]]}{key[1:]}"])
        assert_equal(after[1]["state"][key], before[1]["state"][f"{twin[key[0]]}{key[1:]}"])


@pytest.mark.parametrize("is_sharded", [False, True])
@distributed(world_size=2)
def test_sparse_buffers_are_got_and_set(is_sharded):
    model = nn.Sequential(OrderedDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}))
    model.register_buffer("adjacent", torch.eye(4).to_sparse())
    if is_sharded:
        fully_shard(model.a), fully_shard(model.b)
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        state = get_model_state_dict(model, options=options)
        expected = 3 * state["adjacent"].to_dense()
        set_model_state_dict(model, {**state, "adjacent": expected.to_sparse()}, options=options)
        assert torch.equal(model.adjacent.to_dense(), expected)


@pytest.mark.parametrize("is_sharded", [False, True])
@distributed(world_size=2)
def test_a_copy_of_a_patched_model_speaks_for_itself(is_sharded):
    model = shard_layers(build(0)) if is_sharded else build(0)
    optimizer = adamw(model.parameters())
    patch_model_state_dict(model, options=FULL)
    patch_optimizer_state_dict(model, optimizers=optimizer, options=FULL)
    train(model, optimizer, 1)
    expected, other = [model.state_dict(), optimizer.state_dict()], build(1).state_dict()
    twin, its = copy.deepcopy((model, optimizer))
    twin.load_state_dict(other)
    its.load_state_dict(torch.optim.AdamW(twin.parameters()).state_dict())
    assert_equal([model.state_dict(), optimizer.state_dict()], expected)
    assert_equal(twin.state_dict(), other)
    assert not its.state


class Tabled(nn.Linear):
    """Has extra state that is a tensor."""

    def get_extra_state(self) -> torch.Tensor:
        return self.table

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.table = state


@distributed(world_size=2)
def test_extra_state_that_is_a_tensor_reaches_every_rank():
    model = Tabled(3, 3)
    model.table = torch.arange(3) * dist.get_rank()
    fully_shard(model)
    state = {**get_model_state_dict(model, options=FULL), "_extra_state": torch.arange(5)}
    set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=FROM_RANK0)
    assert torch.equal(model.table, torch.arange(5))


class Wordless(nn.Linear):
    """Raises an error without a text on one rank."""

    def get_extra_state(self) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError


@distributed(world_size=2)
def test_an_error_without_a_text_is_an_error_on_every_rank():
    with pytest.raises(RuntimeError, match=r"get_model_state_dict\(\): .*RuntimeError"):
        get_model_state_dict(fully_shard(Wordless(3, 3)), options=FULL)

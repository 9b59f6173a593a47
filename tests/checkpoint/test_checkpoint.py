"""State dicts: made, gathered, and loaded into every kind of model and optimizer. Each defect that other systems have
is a test here, named after its symptom."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compose import (
    RaggedDTensor,
    RaggedShard,
    distribute_ragged,
    flat_parameters,
    fully_shard,
    summon_full_params,
)
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    patch_model_state_dict,
    patch_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from fsdp_compose.core.comm import Transport
from fsdp_compose.core.comm.store import TIMEOUT_ENV
from fsdp_compose.core.group.registry import _get_fsdp_handles
from fsdp_compose.core.state_dicts.optimizer_init import is_pending
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
    whole,
)
from tests.harness import distributed, environment, lasting_mesh, same_on_every_rank
from tests.models import shard_layers

# ---- getters


@distributed(world_size=(1, 3))
def test_state_dicts_have_the_names_and_values_of_the_unsharded_model():
    model, reference = shard_layers(build()), build()
    optimizer, expected_optimizer = adamw(model.parameters()), adamw(reference.parameters())
    expected = {k: v for k, v in reference.state_dict().items()}
    state = get_model_state_dict(model)
    assert list(state) == list(expected) and "counter._extra_state" in state and "scratch" not in state
    assert_equal(whole(state), expected)
    train(model, optimizer, 2), train(reference, expected_optimizer, 2)
    with CommDebugMode() as comm:
        sharded, sharded_optimizer = get_state_dict(model, optimizer)
    assert comm.get_total_counts() == 0
    for name, param in model.named_parameters():
        assert sharded[name].to_local().data_ptr() == param.to_local().data_ptr()
        for key, value in optimizer.state[param].items():
            assert sharded_optimizer["state"][name][key] is value
    assert list(sharded) == list(expected)
    full, full_optimizer = get_state_dict(model, optimizer, options=FULL)
    assert_equal(full, whole(sharded))
    assert_equal(full_optimizer, whole(sharded_optimizer))
    assert (
        full_optimizer["state"].keys()
        == get_optimizer_state_dict(reference, expected_optimizer, options=FULL)["state"].keys()
    )
    assert full["back.weight"] is full["first.weight"], "a tie stays one tensor"
    on_cpu, optimizer_on_cpu = get_state_dict(model, optimizer, options=FULL_ON_CPU)
    if dist.get_rank() == 0:
        assert_equal([on_cpu, optimizer_on_cpu], [full, full_optimizer])
    else:
        assert on_cpu == {} and optimizer_on_cpu == {}
    copied = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert_equal(whole(copied), full)
    assert all(
        v.to_local().data_ptr() != sharded[k].to_local().data_ptr()
        for k, v in copied.items()
        if isinstance(v, RaggedDTensor) and v.to_local().numel()
    )


@distributed(world_size=3)
def test_full_state_dicts_take_one_collective_for_each_flat_parameter():
    model = shard_layers(build())
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    num_flat = len(_get_fsdp_handles(model))
    for handle in _get_fsdp_handles(model):
        handle.change_transports(lambda item, _: Transport(item.group))  # as on other backends than gloo
    for options in (FULL, FULL_ON_CPU):
        with CommDebugMode() as comm:
            state = get_model_state_dict(model, options=options)
        assert comm.get_total_counts() == num_flat, comm.get_comm_counts()
        with CommDebugMode() as comm:
            optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
        assert comm.get_total_counts() == 3 * num_flat, "one for each of exp_avg, exp_avg_sq, max_exp_avg_sq"
        with CommDebugMode() as comm:
            again = get_state_dict(model, optimizer, options=options)
        assert_equal([*again], [state, optimizer_state])


@distributed(world_size=2)
def test_submodules_and_frozen_parameters_can_be_left_out():
    model = shard_layers(build())
    model.head.weight.requires_grad_(False)
    some = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True, full_state_dict=True))
    assert "head.weight" not in some and len(some) == len(build().state_dict()) - 1
    set_model_state_dict(model, some, options=StateDictOptions(ignore_frozen_params=True))
    assert [*get_model_state_dict(model, submodules={model.second})] == ["second.weight", "second.bias"]
    short = StateDictOptions(keep_submodule_prefixes=False, full_state_dict=True)
    state = get_model_state_dict(model, submodules={model.second}, options=short)
    assert_equal(state, build().second.state_dict())
    optimizer = adamw(model.parameters())
    state = get_optimizer_state_dict(model, optimizer, submodules={model.second})
    assert [group["params"] for group in state["param_groups"]] == [["second.weight", "second.bias"]]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "plain SGD": partial(torch.optim.SGD, lr=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.01, weight_decay=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.01, weight_decay=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.1, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True, weight_decay=0.1),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01, weight_decay=0.1),
    "Muon": partial(torch.optim.Muon, lr=0.01, weight_decay=0.1),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
}


class Matrices(nn.Module):
    """Two matrices, which every optimizer can train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.filterwarnings("ignore")
@distributed(world_size=2, timeout=120)
def test_getting_optimizer_state_changes_no_training_for_any_optimizer():
    for name, make in OPTIMIZERS.items():
        models = [fully_shard(Matrices()) for _ in range(2)]
        optimizers = [make(model.parameters()) for model in models]
        for step in range(3):
            for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                is_observed = i == 1

                def closure(model=model, optimizer=optimizer, step=step):
                    optimizer.zero_grad()
                    loss = model(batch(step)).square().mean()
                    loss.backward()
                    return loss

                def observe(model=model, optimizer=optimizer):
                    before = [param.grad for param in model.parameters()]
                    for options in (None, FULL, FLATTENED):
                        get_state_dict(model, optimizer, options=options)
                    assert all(a is b.grad for a, b in zip(before, model.parameters(), strict=True))

                if is_observed:
                    observe()
                if name == "LBFGS":
                    optimizer.step(closure)
                else:
                    closure()
                    if is_observed:
                        observe()
                    optimizer.step()
        states = [snapshot(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        assert_equal(states[1], states[0], name)
        fresh = fully_shard(Matrices())
        loaded = make(fresh.parameters())
        if name != "LBFGS":  # its history is lists of whole vectors, which go through a full dict as they are
            model_state, optimizer_state = get_state_dict(models[0], optimizers[0], options=FULL)
            set_state_dict(fresh, loaded, model_state_dict=model_state, optim_state_dict=optimizer_state)
            assert_equal(snapshot(fresh, loaded), states[0], name)
            models[0].zero_grad()
            for model, optimizer in ((fresh, loaded), (models[0], optimizers[0])):
                train(model, optimizer, 1, begin=3)
            assert_equal(snapshot(fresh, loaded), snapshot(models[0], optimizers[0]), name)


@distributed(world_size=2)
def test_optimizer_state_while_gradients_exist_before_the_first_step_is_complete():
    model = shard_layers(build())
    optimizer = adamw(model.parameters())
    fresh = get_optimizer_state_dict(model, optimizer)
    model(batch(0)).square().mean().backward()
    with_gradients = get_optimizer_state_dict(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    for state in (fresh, with_gradients):
        assert list(state["state"]) == names and state["param_groups"][0]["params"] == names
        for name, entries in state["state"].items():
            assert entries.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
            assert all(map(is_pending, entries.values())), name
            assert entries["exp_avg"].placements == model.get_parameter(name).placements
    assert get_optimizer_state_dict(model, optimizer, options=FULL)["state"] == {}
    set_optimizer_state_dict(model, optimizer, with_gradients)
    assert not optimizer.state


@distributed(world_size=2)
def test_getters_inside_forward_and_with_full_parameters_see_the_same():
    model = shard_layers(build())
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    expected = [*get_state_dict(model, optimizer, options=FULL)]
    found: list[Any] = []

    def look(*_: Any) -> None:
        sharded = get_state_dict(model, optimizer)
        found.append([*get_state_dict(model, optimizer, options=FULL)])
        assert all(isinstance(sharded[0][name], RaggedDTensor) for name, _ in model.named_parameters())

    handle = model.second.register_forward_hook(look)
    model(batch(1))
    handle.remove()
    assert_equal(found, [expected])
    with summon_full_params(model, writeback=False):
        inside = get_state_dict(model, optimizer, options=FULL)
        assert inside[0].keys() == expected[0].keys() and torch.equal(
            inside[0]["head.weight"], expected[0]["head.weight"]
        )
        assert_equal(inside[1], expected[1])


# ---- loading


@pytest.mark.parametrize("how", ["sharded", "full", "rank 0", "flattened"])
@distributed(world_size=3)
def test_everything_round_trips(how):
    source, model = shard_layers(build(0)), shard_layers(build(1))
    sources = [adamw(source.parameters())]
    train(source, sources[0], 2)
    sources[0].param_groups[0].update(initial_lr=0.25, tag="mine")
    optimizer = adamw(model.parameters())
    options = {"sharded": None, "full": FULL, "rank 0": FULL_ON_CPU, "flattened": FLATTENED}[how]
    states = get_state_dict(source, sources, options=options)
    expected, memory = snapshot(source, *sources), [p.to_local().data_ptr() for p in model.parameters()]
    given = copy.deepcopy(whole(states)) if how != "sharded" else states
    if how == "rank 0" and dist.get_rank():
        given = ({"nonsense": 1}, {})
    result = set_state_dict(
        model,
        optimizer,
        model_state_dict=given[0],
        optim_state_dict=given[1],
        options=FROM_RANK0 if how == "rank 0" else None,
    )
    assert result.missing_keys == [] and result.unexpected_keys == []
    assert_equal(snapshot(model, optimizer), expected)
    assert [p.to_local().data_ptr() for p in model.parameters()] == memory, "in place"
    assert model.counter.steps == 2 and model.back.weight is model.first.weight
    assert optimizer.param_groups[0]["tag"] == "mine" and optimizer.param_groups[0]["initial_lr"] == 0.25
    for trained, its in ((source, sources[0]), (model, optimizer)):  # and each has memory of its own
        train(trained, its, 2, begin=2)
    assert_equal(snapshot(model, optimizer), snapshot(source, *sources))


@distributed(world_size=2)
def test_parameters_that_never_got_a_gradient_round_trip_as_having_no_state():
    model, other = shard_layers(build(0)), shard_layers(build(1))
    optimizer, loaded = adamw(model.parameters()), adamw(other.parameters())
    train(model, optimizer, 1)
    train(other, loaded, 1)
    for name in ("dead.weight", "dead.bias"):  # state that is not in what is loaded goes
        loaded.state[other.get_parameter(name)] = {k: v.clone() for k, v in loaded.state[other.scale].items()}
    assert len(loaded.state) == len(optimizer.state) + 2
    for options in (None, FULL, FLATTENED):
        state = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(other, loaded, state)
        assert {n for n, p in other.named_parameters() if p not in loaded.state} == {"dead.weight", "dead.bias"}
        assert_equal(snapshot(other, loaded)[1], snapshot(model, optimizer)[1])


@distributed(world_size=2)
def test_parameters_frozen_at_load_keep_their_saved_state():
    torch.manual_seed(0)
    models = [shard_layers(build()) for _ in range(2)]
    optimizers = [adamw(model.parameters()) for model in models]
    train(models[0], optimizers[0], 2)
    frozen = models[1].second.requires_grad_(False)
    set_state_dict(
        models[1],
        optimizers[1],
        model_state_dict=get_model_state_dict(models[0]),
        optim_state_dict=get_optimizer_state_dict(models[0], optimizers[0]),
    )
    frozen.requires_grad_(True)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 1, begin=2)
    assert_equal(snapshot(models[1], optimizers[1]), snapshot(models[0], optimizers[0]))


@pytest.mark.parametrize("options", [None, FLATTENED], ids=["nested", "flattened"])
@distributed(world_size=2)
def test_parameter_groups_round_trip_whole(options):
    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        decay = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        optimizer = torch.optim.SGD([{"params": decay, "tag": "decay"}, {"params": others, "lr": 0.3}], lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    model, other = shard_layers(build()), shard_layers(build())
    (optimizer, scheduler), (loaded, later) = make(model), make(other)
    train(model, optimizer, 1), scheduler.step()
    optimizer.param_groups[0]["seen"] = {"tokens": [1, 2]}
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if options is not None:
        assert all(not key.startswith("state.") for key in state), "SGD without momentum has no state"
    set_optimizer_state_dict(other, loaded, state)
    later.load_state_dict(scheduler.state_dict())
    for ours, theirs in zip(loaded.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    scheduler.step(), later.step()
    assert later.get_last_lr() == scheduler.get_last_lr() == [0.025, 0.075]


@distributed(world_size=2)
def test_other_parameter_groups_get_hyperparameters_by_name():
    model, other = shard_layers(build(0)), shard_layers(build(1))
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    optimizer.param_groups[0]["tag"] = "whole"
    params = [*other.parameters()]
    regrouped = adamw([{"params": params[4:]}, {"params": params[:4], "lr": 0.5}, {"params": [], "lr": 7.0}])
    set_optimizer_state_dict(other, regrouped, get_optimizer_state_dict(model, optimizer))
    assert [(group["lr"], group.get("tag")) for group in regrouped.param_groups] == [
        (0.01, "whole"),
        (0.01, "whole"),
        (7.0, None),
    ]
    assert_equal(snapshot(other, regrouped)[1]["state"], snapshot(model, optimizer)[1]["state"])
    with pytest.raises(RuntimeError, match=r"missing: scale, which the optimizer trains, is in no parameter group"):
        set_optimizer_state_dict(other, regrouped, {"state": {}, "param_groups": []})
    with pytest.raises(RuntimeError, match=r"unexpected: zzz, which the model does not have"):
        state = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(other, regrouped, {**state, "state": {**state["state"], "zzz": {"step": 1}}})
    regrouped.param_groups[0]["lr"] = 0.125
    state = get_optimizer_state_dict(other, regrouped)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"the saved lr is 0\.01 for scale, but 0\.125 for second"):
        set_optimizer_state_dict(model, optimizer, state)
    assert_equal(snapshot(model, optimizer), before)


@distributed(world_size=2)
def test_an_optimizer_parameter_outside_the_model_is_an_error_that_names_it_or_kept():
    def make(seed: int) -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer]:
        model, temperature = shard_layers(build(seed)), nn.Parameter(torch.tensor([1.0, 2.0]))
        return model, temperature, torch.optim.AdamW([{"params": model.parameters()}, {"params": [temperature]}])

    (model, temperature, optimizer), (other, _, loaded) = make(0), make(1)
    for action in (
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),
    ):
        with pytest.raises(RuntimeError, match=r"parameter 0 of parameter group 1 of the AdamW, of shape \(2,\)"):
            action()
    temperature.grad = torch.ones(2)
    train(model, optimizer, 1)
    keep = StateDictOptions(keep_foreign_params=True)
    state = get_optimizer_state_dict(model, optimizer, options=keep)
    assert state["param_groups"][1]["params"] == ["param_groups.1.params.0"]
    set_optimizer_state_dict(other, loaded, state, options=keep)
    kept = loaded.state[loaded.param_groups[1]["params"][0]]
    assert torch.equal(kept["exp_avg"], optimizer.state[temperature]["exp_avg"]) and kept["step"] == 1


@distributed(world_size=2)
def test_ties_stay_ties_and_one_of_their_names_is_enough():
    model = shard_layers(build(0))
    full = get_model_state_dict(model, options=FULL)
    assert full["back.weight"].data_ptr() == full["first.weight"].data_ptr()
    other = shard_layers(build(1))
    for name in ("first.weight", "back.weight"):
        half = {k: v for k, v in full.items() if k != name}
        assert set_model_state_dict(other, half).missing_keys == []
        assert other.back.weight is other.first.weight
        assert_equal(whole(get_model_state_dict(other)), full)
    plain = build(1)
    set_model_state_dict(plain, full)
    assert plain.back.weight is plain.first.weight and torch.equal(plain.first.weight, full["first.weight"])
    with torch.device("meta"):
        meta = Net()
    with pytest.warns(UserWarning, match=r"left scratch on the meta device.*scratch: non-persistent"):
        set_model_state_dict(meta, full)
    assert meta.back.weight is meta.first.weight and not meta.first.weight.is_meta
    assert meta.first.weight.data_ptr() != full["first.weight"].data_ptr()
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    assert "back.weight" not in get_optimizer_state_dict(model, optimizer)["state"]


@distributed(world_size=2)
def test_a_model_on_the_meta_device_gets_memory_and_keeps_its_parameters():
    expected = build(0).state_dict()
    with torch.device("meta"):
        model = shard_layers(Net())
    before = [*model.parameters()]
    with pytest.warns(UserWarning, match="scratch"):
        set_model_state_dict(model, expected, options=FROM_RANK0)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert_equal(whole(get_model_state_dict(model)), expected)
    model.scratch = torch.ones(2)
    train(model, adamw(model.parameters()), 1)


@pytest.mark.parametrize("broadcast", [False, True], ids=["every rank", "rank 0"])
@distributed(world_size=2)
def test_what_does_not_fit_is_one_error_on_every_rank_and_changes_nothing(broadcast):
    model = shard_layers(build(0))
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    good = build(1).state_dict()
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=FULL)
    before = snapshot(model, optimizer)
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "missing": ({k: v for k, v in good.items() if k != "head.weight"}, r"missing: head\.weight of shape \(6, 10\)"),
        "unexpected": ({**good, "zzz": torch.ones(1)}, r"unexpected: zzz, which the model does not have"),
        "shape": (
            {**good, "head.weight": torch.ones(8, 10, dtype=torch.float64)},
            r"head\.weight: expected shape \(6, 10\), torch\.float32, placed \[RaggedShard.*; found a tensor of shape "
            r"\(8, 10\), torch\.float64",
        ),
        "type": ({**good, "table": "four"}, r"table: expected shape \(4,\), torch\.int64; found a str"),
    }
    for what, (state, message) in wrong.items():
        given = state if dist.get_rank() == 0 or not broadcast else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        with pytest.raises(RuntimeError, match=message) as caught:
            set_state_dict(model, optimizer, model_state_dict=given, optim_state_dict=optimizer_state, options=options)
        same_on_every_rank(str(caught.value))
        assert_equal(snapshot(model, optimizer), before)
        if what in ("missing", "unexpected"):
            lenient = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
            result = set_model_state_dict(model, given, options=lenient)
            same_on_every_rank(str(result))
            keys = {"missing": result.missing_keys, "unexpected": result.unexpected_keys}[what]
            assert keys == [{"missing": "head.weight", "unexpected": "zzz"}[what]]
            before = snapshot(model, optimizer)
    bad = copy.deepcopy(optimizer_state)
    bad["state"]["second.weight"]["exp_avg"] = torch.ones(3, 3)
    with pytest.raises(
        RuntimeError, match=r"exp_avg of second\.weight: expected shape \(10, 10\); found shape \(3, 3\)"
    ):
        set_state_dict(model, optimizer, model_state_dict=good, optim_state_dict=bad)
    assert_equal(snapshot(model, optimizer), before)


@distributed(world_size=2)
def test_an_error_that_only_one_rank_has_is_raised_on_every_rank():
    model = shard_layers(build(0))
    before = snapshot(model)
    state = build(1).state_dict()
    if dist.get_rank() == 1:
        state["head.weight"] = torch.ones(1)
    with pytest.raises(
        RuntimeError, match=r"on rank 1: the state dict does not fit this Net.*\n.*found .*\(1,\)"
    ) as caught:
        set_model_state_dict(model, state)
    same_on_every_rank(str(caught.value))
    lenient = StateDictOptions(strict=False)
    state = build(1).state_dict()
    if dist.get_rank() == 1:
        del state["scale"]
    with pytest.raises(RuntimeError, match=r"rank 0 has scale of shape \(\), .* but rank 1 has "):
        set_model_state_dict(model, state, options=lenient)
    assert_equal(snapshot(model), before)


@distributed(world_size=2, fresh=True)
def test_a_full_state_dict_on_one_rank_only_names_the_absent_rank_and_the_call():
    model = shard_layers(build())
    with environment(**{TIMEOUT_ENV: "1"}):
        if dist.get_rank() == 0:
            with pytest.raises(
                RuntimeError, match=r"get_model_state_dict\(\) \(called at .*test_checkpoint.py:\d+\): rank\(s\) 1"
            ):
                get_model_state_dict(model, options=FULL)
    dist.barrier()
    assert_equal(get_model_state_dict(model, options=FULL), build().state_dict())


# ---- flat optimizers


@pytest.mark.parametrize("where", ["all", "matrices"])
@distributed(world_size=3)
def test_flat_optimizers_and_those_over_parameters_load_each_other(where):
    def flat(model: nn.Module) -> torch.optim.Optimizer:
        if where == "all":
            return adamw(flat_parameters(model))
        matrices = flat_parameters(model, lambda _, p: p.dim() > 1)
        others = flat_parameters(model, lambda _, p: p.dim() <= 1)
        return adamw([{"params": matrices, "lr": 0.01}, {"params": others}])

    def by_parameter(model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model.parameters())

    def alive(seed: int) -> Net:
        model = build(seed)
        del model.dead  # next to parameters that are used, a flat optimizer keeps state for it too
        return shard_layers(model)

    for make, make_other in ((flat, by_parameter), (by_parameter, flat), (flat, flat)):
        model, other = alive(0), alive(1)
        optimizer = make(model)
        train(model, optimizer, 2)
        loaded = make_other(other)
        for options in (None, FULL):
            states = get_state_dict(model, optimizer, options=options)
            set_state_dict(other, loaded, model_state_dict=states[0], optim_state_dict=states[1])
            assert_equal(snapshot(other, loaded)[1]["state"], snapshot(model, optimizer)[1]["state"])
        for trained, its in ((model, optimizer), (other, loaded)):
            train(trained, its, 2, begin=2)
        assert_equal(snapshot(other)[0], snapshot(model)[0])


@distributed(world_size=2)
def test_state_that_a_flat_view_cannot_hold_is_refused():
    model, other = shard_layers(build(0)), shard_layers(build(1))
    optimizer, flat = adamw(model.parameters()), adamw(flat_parameters(other))
    train(model, optimizer, 1)
    state = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(RuntimeError, match=r"dead\.weight has no state and scale has some.*one flat"):
        set_optimizer_state_dict(other, flat, state)
    assert not flat.state
    set_optimizer_state_dict(other, flat, state, options=StateDictOptions(strict=False))
    loaded = whole(get_optimizer_state_dict(other, flat))["state"]
    assert loaded["dead.weight"]["exp_avg"].count_nonzero() == 0
    state["state"]["scale"]["step"] = torch.tensor(5.0)
    with pytest.raises(RuntimeError, match=r"step of scale is 5\.0 and that of first\.weight is 1\.0"):
        set_optimizer_state_dict(other, flat, state, options=StateDictOptions(strict=False))


# ---- names, wrappers, other parallelisms


@pytest.mark.filterwarnings("ignore")
@distributed(world_size=2)
def test_names_are_those_before_any_wrapper():
    from torch.distributed._composable import replicate
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    expected = build().state_dict()
    compiled_before = build()
    compiled_before.second = torch.compile(compiled_before.second)
    compiled_after = shard_layers(build())
    compiled_after.second = torch.compile(compiled_after.second)
    wrapped = build()
    wrapped.second = checkpoint_wrapper(wrapped.second)
    models = {
        "compiled, then sharded": shard_layers(compiled_before),
        "sharded, then compiled": compiled_after,
        "all compiled": torch.compile(shard_layers(build())),
        "checkpointed": shard_layers(wrapped),
        "DDP": nn.parallel.DistributedDataParallel(build(), find_unused_parameters=True),
        "compiled DDP": torch.compile(nn.parallel.DistributedDataParallel(torch.compile(build()))),
        "torch's replicate": replicate(build()),
        "plain": build(),
    }
    source = build(1)
    for what, model in models.items():
        state = whole(get_model_state_dict(model))
        assert set(state) == set(expected), what
        assert_equal(state, {key: expected[key] for key in state})
        optimizer = adamw(model.parameters())
        fqns = [fqn for group in get_optimizer_state_dict(model, optimizer)["param_groups"] for fqn in group["params"]]
        assert fqns == [name for name, _ in build().named_parameters()], what
        set_model_state_dict(model, source.state_dict(), options=FROM_RANK0)
        loaded = whole(get_model_state_dict(model))
        assert_equal(loaded, {key: source.state_dict()[key] for key in loaded})


@distributed(world_size=4)
def test_tensor_parallel_and_two_dimensional_layouts_have_the_state_dict_of_one_process():
    mesh = lasting_mesh(("data", "tensor"))
    reference = build(0)
    del reference.back, reference.dead
    model = copy.deepcopy(reference)
    parallelize_module(model.second, mesh["tensor"], ColwiseParallel())
    row = mesh.get_local_rank("data")
    for module, name in ((model.first, "weight"), (model.head, "weight")):  # as HSDP and FSDP over TP will lay them out
        param = getattr(module, name)
        if name == "weight" and module is model.first:
            placements = [torch.distributed.tensor.Replicate(), RaggedShard((7, 3))]
        else:
            placements = [RaggedShard((20, 10), flat=True), Shard(1)]
        setattr(module, name, nn.Parameter(distribute_ragged(param.detach(), mesh, placements)))
    assert row in (0, 1)
    expected = reference.state_dict()
    full = get_model_state_dict(model, options=FULL)
    assert_equal(full, expected)
    optimizer = adamw(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    states = get_state_dict(model, optimizer, options=FULL)
    plain = build(1)
    del plain.back, plain.dead
    plain_optimizer = adamw(plain.parameters())
    set_state_dict(plain, plain_optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    assert_equal(get_optimizer_state_dict(plain, plain_optimizer)["state"], states[1]["state"])
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    back = get_state_dict(plain, plain_optimizer, options=FULL)
    for options in (None, FROM_RANK0):
        set_state_dict(model, optimizer, model_state_dict=back[0], optim_state_dict=back[1], options=options)
        assert_equal(get_state_dict(model, optimizer, options=FULL), back)
    # DTensors of one mesh into another layout of it
    given = {**states[0], "first.weight": distribute_tensor(states[0]["first.weight"], mesh, [Shard(0), Shard(1)])}
    set_model_state_dict(model, given)
    assert_equal(get_model_state_dict(model, options=FULL), states[0])


@distributed(world_size=2)
def test_full_tensors_of_uneven_parameters_are_right_in_an_average():
    model = nn.Linear(3, 5)
    reference = copy.deepcopy(model)
    fully_shard(model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update_parameters(model), average.update_parameters(model)
    state = get_model_state_dict(average, options=FULL)
    assert state["module.weight"].shape == (5, 3)
    torch.testing.assert_close(state["module.weight"], reference.weight.detach() + 1.0)


@distributed(world_size=2)
def test_patched_models_and_optimizers_speak_the_same_dicts():
    model, other = shard_layers(build(0)), shard_layers(build(1))
    optimizers = [[adamw(m.second.parameters()), adamw(m.norm.parameters())] for m in (model, other)]
    train(model, optimizers[0][0], 1), train(model, optimizers[0][1], 1)
    for patched, its in zip((model, other), optimizers, strict=True):
        patch_model_state_dict(patched, options=FULL)
        patch_optimizer_state_dict(patched, optimizers=its, options=FULL)
    state, optimizer_state = model.state_dict(), optimizers[0][0].state_dict()
    assert all(type(value) is not RaggedDTensor for value in state.values())
    assert len(optimizer_state["param_groups"]) == 2 and len(optimizer_state["state"]) == 4
    other.load_state_dict(state), optimizers[1][1].load_state_dict(optimizer_state)
    assert_equal(snapshot(other, *optimizers[1]), snapshot(model, *optimizers[0]))


@distributed(world_size=2)
def test_an_optimizers_own_state_dict_of_an_unsharded_model_loads():
    plain, model = build(0), shard_layers(build(1))
    source, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    train(plain, source, 2)
    set_state_dict(model, optimizer, model_state_dict=plain.state_dict(), optim_state_dict=source.state_dict())
    assert_equal(snapshot(model, optimizer), snapshot(plain, source))
    flat = adamw(flat_parameters(shard_layers(build(1))))
    with pytest.raises(RuntimeError, match=r"of shape|numbers its parameters|does not have"):
        set_optimizer_state_dict(model, flat, source.state_dict())


@distributed(world_size=2)
def test_an_optimizer_whose_state_cannot_be_foreseen_still_saves_what_it_has():
    class Strange(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        nested = {"steps": 0, "history": [torch.ones(2)]}
                        self.state[param].setdefault("count", nested)["steps"] += 1

    model, other = shard_layers(build()), shard_layers(build())
    optimizer, loaded = Strange(model.parameters()), Strange(other.parameters())
    assert get_optimizer_state_dict(model, optimizer)["state"] == {}
    train(model, optimizer, 2)
    for options in (None, FULL, FLATTENED):
        set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(model, optimizer, options=options))
        assert_equal(loaded.state[other.scale]["count"], {"steps": 2, "history": [torch.ones(2)]})
        assert (
            loaded.state[other.scale]["count"]["history"][0] is not optimizer.state[model.scale]["count"]["history"][0]
        )
    loaded.state.clear()
    optimizer.param_groups[0]["weights"] = torch.arange(3)
    state = get_optimizer_state_dict(model, optimizer, options=FULL_ON_CPU)
    set_optimizer_state_dict(other, loaded, state, options=FROM_RANK0)
    assert_equal(loaded.state[other.scale]["count"], {"steps": 2, "history": [torch.ones(2)]})
    assert torch.equal(loaded.param_groups[0]["weights"], torch.arange(3))
    with pytest.raises(
        RuntimeError, match=r"cannot send this state dict: TypeError: expected whole tensors, got a DTensor"
    ):
        set_model_state_dict(other, get_model_state_dict(model), options=FROM_RANK0)


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world_size=2)
def test_optimizer_state_loads_next_to_a_model_on_the_meta_device(broadcast):
    """Plain and sharded; the parameters stay the objects that the optimizer trains."""
    source = build()
    optimizer = adamw(source.parameters())
    train(source, optimizer, 2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    model_state, optimizer_state = get_state_dict(source, optimizer, options=StateDictOptions(full_state_dict=True))
    for is_sharded in (False, True):
        with torch.device("meta"):
            model = build()
        if is_sharded:
            shard_layers(model)
        resumed = adamw(model.parameters())
        ids = [id(param) for param in model.parameters()]
        with pytest.raises(RuntimeError, match="on the meta device .*load the model first"):
            set_optimizer_state_dict(model, resumed, optimizer_state, options=options)
        if is_sharded:
            flat = adamw(flat_parameters(model))
            with pytest.raises(RuntimeError, match="flat views on the meta device"):
                set_state_dict(
                    model, flat, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
                )
        set_state_dict(model, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
        assert [id(param) for param in model.parameters()] == ids
        got = get_optimizer_state_dict(model, resumed, options=StateDictOptions(full_state_dict=True))
        assert_equal(got["state"], optimizer_state["state"])

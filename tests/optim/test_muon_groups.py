"""Parameter groups of ``Muon``: read at each step, whatever has replaced them; moved by torch's schedulers as groups of
torch's optimizers are; and refused if they have what it cannot honour, before anything has changed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from fsdp_compose import flat_parameters, fully_shard
from fsdp_compose.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from fsdp_compose.errors import MisuseError
from fsdp_compose.optim import Muon, muon_groups
from tests.harness import distributed
from tests.optim.test_muon import SETS, Parameters, assert_bits, give_gradients
from tests.optim.test_muon_ranks import assert_unchanged, held

SHAPES = [*SETS["odd"][1:], (7,)]
LATER = {"lr": 0.05, "weight_decay": 0.3}


class Torchs:
    """One process trains the same parameters with torch's Muon and AdamW."""

    def __init__(self) -> None:
        self.params = [*Parameters(SHAPES).items]
        self.optimizers = [torch.optim.Muon(self.params[:-1], lr=0.02), torch.optim.AdamW(self.params[-1:], lr=0.02)]

    def step(self, number: int) -> None:
        give_gradients(self.params, number)
        for optimizer in self.optimizers:
            optimizer.step()


def made(params: Any, lr: Any = 0.02, muon: Any = None, adamw: Any = None) -> Muon:
    groups = [{"params": params[:-1], **(muon or {})}, {"params": params[-1:], "algorithm": "adamw", **(adamw or {})}]
    return Muon(groups, lr=lr)


def step(params: Any, optimizer: Muon, number: int) -> None:
    give_gradients([*params], number)
    optimizer.step()


def _loaded(model: Any, optimizer: Any) -> Any:
    optimizer.load_state_dict(optimizer.state_dict())
    return model, optimizer


def _set(model: Any, optimizer: Any) -> Any:
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    return model, optimizer


def _hooked(model: Any, optimizer: Any) -> Any:
    optimizer.register_load_state_dict_pre_hook(lambda _, state: copy.deepcopy(state))
    return _loaded(model, optimizer)


def _assigned(model: Any, optimizer: Any) -> Any:
    optimizer.param_groups = [copy.copy(group) for group in optimizer.param_groups]
    return model, optimizer


def _exchanged(model: Any, optimizer: Any) -> Any:
    first = optimizer.param_groups[0]
    optimizer.add_param_group({"params": first["params"].pop(), "lr": 0.02})
    return model, optimizer


def _copied(model: Any, optimizer: Any) -> Any:
    return copy.deepcopy((model, optimizer))


WAYS = {
    "loaded": _loaded,
    "set": _set,
    "hooked": _hooked,
    "assigned": _assigned,
    "moved": _exchanged,
    "copied": _copied,
}


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=(1, 2))
def test_options_that_change_after_groups_were_replaced(way):
    model, torchs = fully_shard(Parameters(SHAPES)), Torchs()
    optimizer = made([*model.items])
    step(model.items, optimizer, 0)
    torchs.step(0)
    optimizer.describe()
    model, optimizer = WAYS[way](model, optimizer)
    for group in [*optimizer.param_groups, *[item.param_groups[0] for item in torchs.optimizers]]:
        group.update(LATER)
        if "betas" in group:
            group["betas"] = (0.5, 0.6)
        else:
            group.update(momentum=0.5, nesterov=False, ns_steps=3, adjust_lr_fn="match_rms_adamw")
    for number in (1, 2):
        step(model.items, optimizer, number)
        torchs.step(number)
        assert_bits([*model.items], [param.detach() for param in torchs.params], number)


def test_pickled_without_ranks():
    params, torchs = [*Parameters(SHAPES).items], Torchs()
    optimizer = made(params)
    step(params, optimizer, 0)
    torchs.step(0)
    params, optimizer = pickle.loads(pickle.dumps((params, optimizer)))
    for group in [*optimizer.param_groups, *[item.param_groups[0] for item in torchs.optimizers]]:
        group.update(LATER)
    step(params, optimizer, 1)
    torchs.step(1)
    assert_bits(params, [param.detach() for param in torchs.params])


# ---- Schedulers

SCHEDULERS: dict[str, Any] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.OneCycleLR(o, 0.1, total_steps=9)], [2]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.5, 4),
}


@pytest.mark.parametrize("way", ["as made", "loaded", "copied"])
def test_schedulers_move_what_they_move_with_torchs_optimizers(way):
    for name, schedule in SCHEDULERS.items():
        params, torchs = [*Parameters(SHAPES).items], Torchs()
        optimizer = made(params)
        if way != "as made":
            step(params, optimizer, 0)
            torchs.step(0)
            (params, optimizer) = WAYS[way](params, optimizer)
        ours, theirs = schedule(optimizer), [schedule(item) for item in torchs.optimizers]
        for number in range(1, 6):
            step(params, optimizer, number)
            torchs.step(number)
            for scheduler in (ours, *theirs):
                scheduler.step()
            for group, item in zip(optimizer.param_groups, torchs.optimizers, strict=True):
                moved = item.param_groups[0]
                for key in {*moved} & {"lr", "momentum", "betas", "weight_decay", "base_momentum", "max_momentum"}:
                    assert group[key] == moved[key], (name, number, key)
        assert_bits(params, [param.detach() for param in torchs.params], name)


# ---- What is refused

REFUSED: list[dict[str, Any]] = [
    *[{"adamw": {name: True}} for name in ("amsgrad", "maximize", "fused", "foreach", "capturable", "differentiable")],
    {"adamw": {"betas": 0.9}}, {"adamw": {"betas": (1.5, 0.9)}}, {"adamw": {"betas": (0.9, -0.1)}},
    {"adamw": {"eps": "1e-8"}}, {"adamw": {"lr": "0.02"}}, {"adamw": {"weight_decay": None}},
    {"muon": {"maximize": True}}, {"muon": {"momentum": 1.5}}, {"muon": {"momentum": "0.9"}}, {"muon": {"lr": "0.02"}},
    {"muon": {"ns_steps": 2.5}}, {"muon": {"ns_steps": True}}, {"muon": {"nesterov": "no"}}, {"muon": {"eps": None}},
    {"muon": {"block_rows": 4.0}}, {"muon": {"block_rows": 0}}, {"muon": {"ns_coefficients": 3.0}},
    {"muon": {"ns_coefficients": ("a", "b", "c")}}, {"muon": {"lr": float("nan")}}, {"muon": {"lr": torch.ones(2)}},
    {"muon": {"adjust_lr_fn": 1}},
]  # fmt: skip


@distributed(world_size=2)
def test_options_are_refused_where_they_are_given_and_at_the_step():
    model = fully_shard(Parameters(SHAPES))
    params = [*model.items]
    optimizer, before = made(params), []
    step(params, optimizer, 0)
    give_gradients(params, 1)
    before = held(params, optimizer)
    for options in REFUSED:
        ((kind, option),) = options.items()
        ((name, value),) = option.items()
        with pytest.raises(MisuseError, match=name):
            made(params, **options)
        fresh = Muon(params[:1])
        with pytest.raises(MisuseError, match=name):
            fresh.add_param_group({"params": params[-1:] if kind == "adamw" else params[1:2], **option,
                                   "algorithm": kind})  # fmt: skip
        assert len(fresh.param_groups) == 1
        group = optimizer.param_groups[kind == "adamw"]
        kept = {**group}
        group[name] = value
        with pytest.raises(MisuseError, match=name):
            optimizer.step()
        group.clear()
        group.update(kept)
        assert_unchanged(params, optimizer, before)
    optimizer.step()
    torchs = Torchs()
    for number in (0, 1):
        torchs.step(number)
    assert_bits(params, [param.detach() for param in torchs.params])


@distributed(world_size=(1, 2))
def test_a_state_of_torchs_muon_loads():
    model, other = (fully_shard(Parameters(SHAPES[:-1])) for _ in range(2))
    ours, theirs = Muon([*model.items], lr=0.02, block_rows=None), torch.optim.Muon([*other.items], lr=0.02)
    step(model.items, ours, 0)
    # torch's own has whole matrices only; but for that, its state is this.
    state = ours.state_dict()
    known = {*theirs.state_dict()["param_groups"][0]}
    state["param_groups"] = [{key: value for key, value in g.items() if key in known} for g in state["param_groups"]]
    assert "algorithm" not in state["param_groups"][0]
    step(other.items, fresh := Muon([*other.items], lr=0.02), 0)
    fresh.load_state_dict(copy.deepcopy(state))
    for number in (1, 2):
        step(model.items, ours, number)
        step(other.items, fresh, number)
    assert_bits([*other.items], [param.full_tensor().detach() for param in model.items])


@distributed(world_size=2)
def test_groups_and_states_of_other_optimizers_are_refused():
    model = fully_shard(Parameters(SHAPES))
    params = [*model.items]
    optimizer = made(params)
    step(params, optimizer, 0)
    give_gradients(params, 1)
    before, good = held(params, optimizer), optimizer.state_dict()
    for other in (torch.optim.AdamW, torch.optim.SGD):
        foreign = other([{"params": params[:-1]}, {"params": params[-1:]}], lr=0.1).state_dict()
        with pytest.raises(MisuseError, match=r"algorithm='muon' has no \w+:"):
            optimizer.load_state_dict(foreign)
        with pytest.raises(
            MisuseError, match=r"items.0 has the shape .* on this rank, and its momentum_buffer is missing"
        ):
            state = {number: {"other": torch.ones(3)} for number in good["state"]}
            optimizer.load_state_dict({**good, "state": state})
        assert_unchanged(params, optimizer, before)
    for index, algorithm in ((0, "adamw"), (1, "muon")):
        optimizer.param_groups[index]["algorithm"] = algorithm
        with pytest.raises(MisuseError, match=f"algorithm='{algorithm}' has no .*its algorithm changed later"):
            optimizer.step()
        optimizer.param_groups[index]["algorithm"] = ("muon", "adamw")[index]
    whole = {number: {key: torch.ones(37, 41) for key in entries} for number, entries in good["state"].items()}
    with pytest.raises(MisuseError, match=r"Was it saved by another rank|was it saved by another rank"):
        optimizer.load_state_dict({**good, "state": whole})
    assert_unchanged(params, optimizer, before)
    optimizer.load_state_dict(good)
    optimizer.step()


@distributed(world_size=2)
def test_the_shards_of_another_rank_are_refused():
    model = fully_shard(Parameters([(7, 7)]), granularity=lambda *_: "rows")
    params = [*model.items]
    optimizer = Muon(params)
    step(params, optimizer, 0)
    box = [pickle.dumps(optimizer.state_dict())] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box)
    before = held(params, optimizer)
    state = pickle.loads(box[0])
    if dist.get_rank() == 0:
        optimizer.load_state_dict(state)
    else:
        with pytest.raises(MisuseError, match=r"Muon.load_state_dict\(\): items.0 has the shape \(3, 7\).*\(4, 7\)"):
            optimizer.load_state_dict(state)
    assert_unchanged(params, optimizer, before)


@distributed(world_size=1)
def test_flat_views_have_no_matrices():
    model = fully_shard(Parameters([(6, 4), (5, 5)]))
    with pytest.raises(MisuseError, match=r"flat view has none.*Muon\(muon_groups\(model\)\)"):
        Muon(flat_parameters(model))
    assert Muon(muon_groups(model)).describe().num_matrices == 2

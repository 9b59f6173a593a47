"""``tune()`` and ``plan --tune``: what it chooses fits and is fastest by its own model, the code that it prints does
what was predicted, and what users get wrong is said in a line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from fsdp_compose import MisuseError, MixedPrecisionPolicy, fully_shard, plan
from fsdp_compose.__main__ import main
from fsdp_compose.core.comm import CollectiveKind as Kind
from fsdp_compose.inspect import Issue, simulate
from fsdp_compose.tuning import PRESETS, Device, Hardware, Level, Network, Result, Setting, Tuning, search, tune
from fsdp_compose.tuning.answer import in_order
from tests.harness import ROOT, distributed
from tests.inspect.test_plan import Net
from tests.training import full_values, sgd
from tests.tuning.test_step_events import mixed

MIB = 1 << 20
GPU = Device("gpu", "", {"float32": 1e12}, (1e12, 1e12), memory=1e11, kernel=1e-6, host=0, collective=0, error=0.01)


def hardware(inside: float = 1e9, between: float = 1e9, node: int = 4, device: Device = GPU) -> Hardware:
    return Hardware(device, Network((Level(node, inside, 1e-6), Level(0, between, 1e-6))))


def factory(batch: int = 4):
    tokens = torch.zeros(batch, 32, dtype=torch.int64)
    return Net(), lambda model: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.fixture(autouse=True)
def _each_setting_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run of a factory's setting is the same for all limits, networks and devices: searches share them."""

    def once(build, make_optimizer, world_size, note, without_sync=None):
        model, (device, setting) = build.func.__self__, build.args
        key = model.factory, model.seq, device, setting, world_size
        if key not in RUNS:
            facts = simulate(build, make_optimizer, world_size, note, without_sync)
            RUNS[key] = facts, model.num_blocks, model.can_split, model.codes[setting]
        facts, model.num_blocks, model.can_split, model.codes[setting] = RUNS[key]
        return facts

    monkeypatch.setattr(search, "simulate", once)


RUNS: dict = {}


def settings_of(found: Tuning) -> list[Setting]:
    return [result.setting for result in found.results]


# ---- The choice


ROOMY = 1 << 30


@cache
def with_room(world_size: int = 8, inside: float = 1e9, between: float = 1e9) -> Tuning:
    return tune(factory, world_size, hardware(inside, between), max_memory=ROOMY)


def just_less_than(peak: float, num_networks: int = 1) -> int:
    """The memory in which a step has room whose peak is a hundredth less, and what is reserved."""
    peak = int(0.99 * peak)
    return peak + sum(GPU.reserved(peak, num_networks).values())


def test_everything_that_is_found_fits_and_the_fastest_comes_first():
    peaks = sorted(result.peak for result in with_room().results)
    limit = just_less_than(peaks[len(peaks) // 2])
    found = tune(factory, 8, hardware(), max_memory=limit)
    assert found.results and found.rejected
    assert all(result.peak < result.needed <= limit for result in found.results)
    num, seconds = 1 + len(found.tied), [result.times.seconds for result in found.results]
    assert seconds[num:] == sorted(seconds[num:]) and max(seconds[:num]) <= 1.01 * min(seconds)
    assert len({*settings_of(found)}) == len(found.results)
    assert not {*settings_of(found)} & {item.setting for item in found.rejected}


def test_the_default_is_what_plan_says():
    found = with_room()
    world = plan(factory, 8).worlds[0]
    assert found.default.peak == world.peak.nbytes
    assert found.default.events == world.events
    assert found.default.setting == Setting("zero3", (8,), batch=4)
    assert found.default_fits and "does not fit" not in str(found)


def test_without_a_network_to_wait_for_nothing_is_recomputed_or_split():
    best = with_room(8, 1e18, 1e18).best
    assert best is not None
    assert (best.setting.checkpointed, best.setting.num_batches) == ("none", 1)


def test_on_a_slow_network_whole_parameters_are_kept_if_they_fit():
    best = tune(factory, 8, hardware(1e7, 1e7, node=8), max_memory=1 << 30).best
    assert best is not None
    assert best.setting.strategy in ("zero2", "ddp")  # neither gathers twice


def test_between_slow_nodes_parameters_are_not_sharded():
    found = tune(factory, 8, hardware(1e10, 1e6), max_memory=1 << 30)
    assert found.best is not None
    assert found.best.setting.strategy == "hybrid"
    assert found.best.setting.mesh == (2, 4)


def test_less_memory_recomputes_or_cuts_the_batch():
    roomy = with_room(2)
    best = tune(factory, 2, hardware(), max_memory=just_less_than(min(result.peak for result in roomy.results))).best
    assert best is not None and roomy.best is not None
    assert best.peak < roomy.best.peak and best.times.seconds > roomy.best.times.seconds
    assert best.setting.checkpointed != "none" or best.setting.num_batches > 1


def test_what_no_memory_holds_is_offloaded():
    peak = with_room(2).default.peak
    found = tune(lambda: factory(1), 2, hardware(), max_memory=just_less_than(0.5 * peak))
    assert found.results
    assert all(result.setting.is_offloaded for result in found.results)
    assert found.best is not None and "CPUOffloadPolicy()" in found.best.code


def test_nothing_fits():
    found = tune(factory, 8, hardware(), max_memory=1000)
    assert found.best is None and not found.tied
    assert "nothing fits" in str(found) and "left out" in str(found)
    assert json.loads(found.json())["code"] is None
    with pytest.raises(MisuseError, match="nothing fits"):
        found.save("nothing.svg")


def test_one_rank():
    found = with_room(1)
    assert found.best is not None
    assert {setting.strategy for setting in settings_of(found)} == {"zero3"}


def test_of_results_that_predictions_cannot_tell_apart_the_smallest_comes_first():
    one = with_room().results[0]

    def result(seconds: float, hundredths: float, on_half: float) -> Result:
        peak = int(0.01 * hundredths * ROOMY)
        return replace(one, times=replace(one.times, seconds=seconds), peak=peak, on_half=on_half)

    fastest, smallest, steadier, slow = (
        result(1.0, 20, 3.0), result(1.15, 10, 2.0), result(1.1, 10.2, 1.5), result(1.3, 1, 1.3),
    )  # fmt: skip
    machine = hardware(device=replace(GPU, error=0.2))
    ordered = in_order([fastest, steadier, smallest, slow], machine, ROOMY)
    assert ordered == [steadier, smallest, fastest, slow]
    found = replace(with_room(), hardware=machine, results=tuple(ordered))
    assert found.best is steadier and found.tied == (smallest, fastest)
    assert "3 settings are tied" in str(found)
    alone = replace(found, results=found.results[:1])
    assert not alone.tied and "tied" not in str(alone)


def test_settings_that_take_as_long_and_as_much_are_one_row():
    found = with_room()
    one, other = found.results[:2]
    like = replace(other, peak=one.peak, times=one.times, on_half=one.on_half)
    pair = replace(found, results=(one, like), rejected=())
    assert f"{one.setting}; or 1 more" in str(pair) and "only measuring tells them apart" in str(pair)
    pair = replace(pair, results=(one, replace(like, on_half=2 * one.on_half)))
    assert f"for {other.setting}) " not in str(pair) and "half of the network's bandwidth would tell" in str(pair)


def test_a_choice_that_half_of_the_network_would_change_is_told():
    found = with_room(8, 2e9, 1e7)
    one, other = found.results[:2]
    turned = replace(found, results=(one, replace(other, on_half=one.on_half / 2)))
    assert f"with half of the network's bandwidth: {other.setting}, " in str(turned)
    turned = replace(found, results=(one, replace(other, on_half=2 * one.on_half)))
    assert "with half of the network's bandwidth: the same, " in str(turned)


def test_a_measured_step_is_the_anchor():
    plain = with_room()
    found = tune(factory, 8, hardware(), max_memory=ROOMY, measured=3 * plain.default.times.seconds)
    assert [*settings_of(found)] == [*settings_of(plain)]
    for one, other in zip(found.results, plain.results, strict=True):
        assert one.times.seconds == pytest.approx(3 * other.times.seconds)
        assert one.times.exposed == pytest.approx(3 * other.times.exposed)
        assert one.on_half == pytest.approx(3 * other.on_half)
    assert "3.00 x those predicted" in str(found)
    with pytest.raises(MisuseError, match="expected more than 0"):
        tune(factory, 8, hardware(), max_memory=ROOMY, measured=0.0)


def test_batches_are_compared_by_the_time_of_a_sequence_up_to_the_largest_that_fits():
    found = tune(factory, 2, hardware(), max_memory=just_less_than(with_room(2).default.peak * 4), batch=[1, 2])
    batches = {setting.batch for setting in settings_of(found)}
    assert batches >= {1, 2, 4} and {setting.num_batches for setting in settings_of(found)} == {1}
    assert any(item.setting.batch == 2 * max(batches) for item in found.rejected)
    rates = [result.per_sequence for result in found.results[1 + len(found.tied) :]]
    assert rates == sorted(rates)
    assert found.default.setting.batch == 1


def test_without_sync_gradients_are_whole_until_the_last_micro_batch():
    limit = just_less_than(with_room(2).default.peak)
    found = tune(factory, 2, hardware(), max_memory=limit, accumulates=True)
    (result,) = [one for one in found.results if one.setting.no_sync and one.setting.strategy == "zero3"][:1]
    reduced = [event for event in result.events if isinstance(event, Issue) and event.kind == Kind.REDUCE_SCATTER]
    once = [event for event in found.default.events if isinstance(event, Issue) and event.kind == Kind.REDUCE_SCATTER]
    assert len(reduced) == len(once) > 0
    assert "all but the last under no_sync(model)" in result.code
    assert all(setting.no_sync == (setting.num_batches > 1) for setting in settings_of(found))


def test_an_operator_without_a_formula_is_listed_with_what_it_may_hide():
    def strange():
        return Several(lambda: nn.Linear(64, 64)), lambda model: model(mixed(*[torch.ones(128, 64)] * 3)).sum()

    found = tune(strange, 2, hardware(), max_memory=ROOMY)
    (line,) = [line for line in str(found).splitlines() if "tests_of_events::mixed" in line]
    assert "1 times: counted by its bytes" in line and "register_flop_formula" in line
    assert "without a formula" not in str(with_room())


def test_the_heading_has_the_number_of_groups():
    assert f"{with_room().num_groups} groups (--wrap chooses others)" in str(with_room())
    alone = tune(lambda: (nn.Linear(64, 64), lambda m: m(torch.ones(2, 64)).sum()), 2, hardware(), max_memory=ROOMY)
    assert "ONE GROUP: no list of blocks was found" in str(alone)


def test_micro_batches_are_those_of_the_factory():
    made: list[int] = []

    def noting(batch: int = 4):
        made.append(batch)
        return factory(batch)

    found = tune(noting, 2, hardware(), max_memory=just_less_than(with_room(2).default.peak))
    assert {2, 4} <= {*made} <= {1, 2, 4}
    tried = [*settings_of(found), *(item.setting for item in found.rejected)]
    assert all(setting.batch * setting.num_batches == 4 for setting in tried)


def test_gradients_of_earlier_micro_batches_count():
    found = tune(factory, 2, hardware(), max_memory=just_less_than(with_room(2).default.peak))
    (twice,) = [
        result
        for result in found.results
        if result.setting == Setting("zero3", (2,), checkpointed="none", batch=2, num_batches=2)
    ]
    alone = plan(lambda: factory(2), 2).worlds[0]
    kept = max(moment.bytes_by_kind["gradients"] for moment in alone.moments)
    assert twice.peak == max(moment.nbytes - moment.bytes_by_kind["gradients"] + kept for moment in alone.moments)


@pytest.mark.parametrize("has_batch", [True, False])
def test_activations_of_one_run_rule_out_other_settings(has_batch):
    make = factory if has_batch else lambda: factory()
    found = tune(make, 8, hardware(), max_memory=just_less_than(with_room().default.peak))
    ruled_out = [item.setting for item in found.rejected if ", activations" in item.why]
    assert ruled_out and not {*ruled_out} & {*settings_of(found)}
    assert not found.default_fits and "default (does not fit)" in str(found)
    run = len(found.results) + len(found.rejected) - len(ruled_out)
    assert found.num_runs == run + (found.default.setting in ruled_out)


def test_what_is_left_out_without_a_run_does_not_fit(monkeypatch):
    """Parameters that stay gathered are too large for some settings, and state is for others."""
    peaks = sorted(result.peak for result in with_room().results)
    limit = just_less_than(peaks[len(peaks) // 2])
    found = tune(factory, 8, hardware(), max_memory=limit)
    monkeypatch.setattr(search._Search, "_needed", lambda self, setting, peak: 0)
    slow = tune(factory, 8, hardware(), max_memory=limit)
    assert [*settings_of(found)] == [*settings_of(slow)] and found.num_runs < slow.num_runs


def test_parameters_that_stay_gathered_rule_out_settings():
    peak = plan(wide, 8).worlds[0].peak.nbytes
    tight = tune(wide, 8, hardware(), max_memory=just_less_than(1.02 * peak))
    (why,) = {item.why for item in tight.rejected if item.setting == Setting("zero2", (8,))}
    assert "what stays gathered take" in why and tight.default_fits


def wide():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(16)))
    return model, lambda model: model(torch.zeros(2, 512)).mean()


def test_any_divisor_of_the_batch_is_a_micro_batch():
    found = tune(factory, 2, hardware(), batch=6, max_memory=just_less_than(with_room(2).default.peak // 2))
    tried = {setting.num_batches for setting in settings_of(found)} | {
        item.setting.num_batches for item in found.rejected
    }
    assert {1, 2, 3, 6} >= tried > {1, 2}


def test_offloading_is_tried_with_smaller_micro_batches_too():
    peak = with_room(2).default.peak
    found = tune(factory, 2, hardware(), batch=16, max_memory=just_less_than(0.5 * peak))
    assert found.best is not None
    assert found.best.setting.is_offloaded and found.best.setting.num_batches > 1
    assert found.best.needed <= found.max_memory


class UsesAnothersWeight(nn.Module):
    """As a group of its own, ``b`` is not gathered when this runs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return F.linear(self.a(x), self.b.weight)


class Several(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_setting_that_the_model_does_not_allow_is_left_out():
    def strange():
        return Several(UsesAnothersWeight), lambda model: model(torch.ones(4, 32)).sum()

    found = tune(strange, 2, hardware(), max_memory=ROOMY)
    assert found.best is not None
    (refused,) = {item.why for item in found.rejected}
    assert "Error" in refused and refused in str(found)


def test_lists_inside_blocks_are_no_groups():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.Linear(32, 32)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

        def forward(self, x):
            return sum(expert(self.attention(x)) for expert in self.experts)

    found = tune(
        lambda: (Several(Listed), lambda model: model(torch.ones(4, 32)).sum()), 2, hardware(), max_memory=ROOMY
    )
    assert not found.rejected and not any(setting.splits for setting in settings_of(found))


# ---- The code


CODES = [
    Setting("zero3", (4,)),
    Setting("zero3", (4,), per_group=2, checkpointed="blocks"),
    Setting("zero3", (4,), splits=True, checkpointed="every 2nd block"),
    Setting("zero3", (4,), reshard_after_forward=2),
    Setting("zero2", (4,)),
    Setting("ddp", (4,), per_group=3),
    Setting("hybrid", (2, 2), reshard_after_forward=False),
    Setting("hfsdp", (2, 2), batch=1, num_batches=4),
]


def code_that_makes(setting: Setting, policy: MixedPrecisionPolicy | None = None) -> str:
    from fsdp_compose.inspect import modules_to_wrap
    from fsdp_compose.tuning.setting import code_of

    model = Net()
    return code_of(setting, model, modules_to_wrap(model, None), policy, "cpu")


def shard_by(code: str, model: nn.Module) -> None:
    names: dict = {}
    exec(code, names)
    names["shard"](model)


@pytest.mark.parametrize("setting", CODES, ids=str)
def test_the_code_does_what_was_predicted(setting):
    from fsdp_compose.tuning.search import _Model

    maker = _Model(factory, None, None, None, None)
    plain = replace(setting, batch=4, num_batches=1)
    predicted = plan(partial(maker.build, "cpu", plain), 4).worlds[0]

    def pasted():
        model, loss_of = factory()
        shard_by(maker.codes[plain], model)
        return model, loss_of

    found = plan(pasted, 4).worlds[0]
    assert found.events == predicted.events
    assert found.layout == predicted.layout
    assert found.moments == predicted.moments


def test_the_codes_policy():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    code = code_that_makes(CODES[0], policy)
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)" in code
    compile(code, "code", "exec")


@pytest.mark.parametrize("index", range(len(CODES)))
@distributed(world_size=4)
def test_the_code_trains_as_unsharded(index):
    torch.manual_seed(0)
    reference, model = Net(), Net()
    model.load_state_dict(reference.state_dict())
    shard_by(code_that_makes(CODES[index]), model)
    optimizers = sgd(reference.parameters()), sgd(model.parameters())
    for step in range(3):
        tokens = torch.randint(128, (4, 8), generator=torch.Generator().manual_seed(step))
        own = tokens[dist.get_rank() :][:1]
        for one, part, optimizer in ((reference, tokens, optimizers[0]), (model, own, optimizers[1])):
            F.cross_entropy(one(part).flatten(0, 1), part.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, values in full_values(model).items():
        torch.testing.assert_close(values, reference.get_parameter(name).detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_the_code_has_the_whole_policy():
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False)
    code = code_that_makes(CODES[0], policy)
    text = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False)"
    assert text in code
    by_function = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: None)
    assert "def shard(model, mp_policy):" in code_that_makes(CODES[0], by_function)


def test_the_codes_blocks_are_those_that_were_found():
    from fsdp_compose.tuning.setting import code_of

    class Odd(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = blocks

    some = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for blocks in (nn.ModuleList([*some, nn.Dropout()]), nn.Sequential(*some, nn.Linear(2, 2))):
        model = Odd(blocks)
        assert 'for name in ["blocks.0", "blocks.1"]' in code_of(Setting("zero3", (2,)), model, some, None, "cpu")
    alone = Odd(nn.ModuleDict({"0": some[0]}))
    assert 'for name in ["blocks.0"]' in code_of(Setting("zero3", (2,)), alone, some[:1], None, "cpu")


# ---- What is refused


def test_a_sharded_model_is_refused():
    def sharded():
        model, loss_of = factory()
        return fully_shard(model), loss_of

    with pytest.raises(MisuseError, match="already sharded"):
        tune(sharded, 2, hardware(), max_memory=MIB)


def test_memory_must_be_known():
    with pytest.raises(MisuseError, match="max_memory"):
        tune(factory, 2, hardware())
    assert tune(factory, 2, hardware(device=replace(GPU, capacity=1 << 30))).best is not None


@pytest.mark.parametrize(
    "sizes", [{"world_size": 0}, {"node_size": 0}, {"batch": -4}, {"max_memory": -1}, {"max_memory": 0}]
)
def test_numbers_are_positive(sizes):
    with pytest.raises(MisuseError, match="at least 1|a positive number of bytes"):
        tune(factory, hardware=hardware(), **{"world_size": 2, "max_memory": MIB, **sizes})


def test_a_batch_that_the_factory_does_not_take_is_refused():
    with pytest.raises(MisuseError, match="no parameter batch"):
        tune(lambda: factory(), 2, hardware(), max_memory=MIB, batch=8)


def test_hardware_that_does_not_know_the_network_is_refused():
    alone = Network((Level(0, math.inf, 0.0),), start=0.0)
    with pytest.raises(MisuseError, match="in no time"):
        tune(factory, 2, Hardware(GPU, alone), max_memory=MIB)
    measured = Hardware(GPU, Network((Level(0, 1e9, 0.0),)), {"processes": 2})
    with pytest.raises(MisuseError, match="measured by 2"):
        tune(factory, 4, measured, max_memory=MIB)
    with pytest.raises(MisuseError, match="what connects nodes"):
        tune(factory, 4, Hardware(GPU, Network((Level(0, 1e9, 0.0),))), node_size=2, max_memory=MIB)


# ---- The command


MODEL = ["--model", "examples/plan_models.py:gpt", "--set", "layers=2", "--quiet"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["plan", *MODEL, "--tune", *arguments])
    return status, *capsys.readouterr()


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_command(capsys, tmp_path):
    picture = tmp_path / "tune.svg"
    arguments = ("--world-size", "16", "--hardware", "a100", "--max-memory", "80GB", "--plot", str(picture))
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert "GPT on 16 x A100 SXM 80 GB, 8 in a node" in out
    assert "def shard(model):" in out and "default" in out and "published runs" in out and "buffers of NCCL" in out
    assert picture.read_text().startswith("<?xml")


def test_the_command_as_json(capsys):
    status, out, _ = run(capsys, "--world-size", "4", "--node-size", "2", "--hardware", "h100", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["node_size"] == 2 and found["max_memory"] == PRESETS["h100"].device.capacity
    assert found["results"][0]["times"]["seconds"] <= found["results"][-1]["times"]["seconds"]
    names: dict = {}
    exec(found["code"], names)
    assert callable(names["shard"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-size", "2,4"], "one --world-size"),
        (["--mesh", "*x2"], "leave them out"),
        (["--strategy", "ddp"], "leave them out"),
        (["--limits", "1 group"], "leave them out"),
        (["--max-memory", "lots"], "--max-memory lots"),
        (["--hardware", "h1000"], "expected a100"),
        (["--node-size", "0"], "--node-size 0"),
        (["--software", "2019"], "--software 2019: expected 2024 or 2026"),
        (["--measured", "soon"], "--measured soon: expected a time such as 0.85s"),
        (["--batch", "1,two"], "--batch 1,two: expected numbers"),
        (["--write", "nowhere/it.json"], "No such file or directory: 'nowhere"),
    ],
)
def test_the_commands_mistakes(arguments, said, capsys):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and not out
    assert said in err and "Traceback" not in err


def test_options_of_tune_without_it_are_refused(capsys):
    for option in (["--max-memory", "80GB"], ["--measured", "1s"], ["--software", "2024"], ["--compiled"]):
        assert main(["plan", *MODEL, *option]) == 2
        assert f"{option[0]} is for --tune" in capsys.readouterr().err
    assert main(["plan", *MODEL, "--batch", "1,2", "--seq", "4"]) == 2
    assert "several are for --tune" in capsys.readouterr().err


def test_a_file_of_hardware(capsys, tmp_path: Path):
    path, written = tmp_path / "mine.json", tmp_path / "written.json"
    path.write_text(replace(hardware(), device=replace(GPU, name="mine", capacity=1 << 34)).json())
    arguments = ("--world-size", "2", "--measured", "200ms", "--node-size", "1", "--node-bandwidth", "5")
    status, out, _ = run(capsys, *arguments, "--hardware", str(path), "--write", str(written))
    assert status == 0 and "2 x mine" in out and "takes 200 ms, as measured" in out and "all ranks 5\n" in out
    assert written.read_text() == path.read_text()

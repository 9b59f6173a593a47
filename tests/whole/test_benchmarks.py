"""The benchmarks run, in their quick form, and count what they say they count: exact facts, never a time."""

from __future__ import annotations

import copy
import csv
import importlib
import json
import math
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_compose.tuning.hardware import COMPARED
from tests import harness
from tests.harness import ROOT

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OURS, FSDP2 = "fsdp_compose", "FSDP2"
NO_COPY_OUT, NO_COPIES = "FSDP2 without copy-out", "FSDP2 without copies"
IN_CHUNKS = "fsdp_compose in FSDP2's layout"
harness.preload("matplotlib.pyplot")


def run(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run ``script`` as a user does, check what it writes, and return its JSON by benchmark name."""
    output = folder / "output"
    process = harness.start_forked(output, run_as_main, BENCHMARKS / script, "--quick", f"--out={folder}", *arguments)
    try:
        process.join()
    finally:
        harness.end(process)
    printed = output.read_text()
    assert process.exitcode == 0, printed
    reports = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert reports
    for name, report in reports.items():
        assert report.keys() == {"benchmark", "machine", "settings", "rows"} and report["benchmark"] == name
        assert report["rows"] and report["machine"]["torch"] == torch.__version__
        assert (folder / f"{name}.png").stat().st_size > 1000, "a plot"
    assert "|--" in printed and (OURS in printed or "system" not in report["rows"][0]), "a table"
    return reports


def run_as_main(script: Path, *arguments: str) -> None:
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def by_system(report: dict[str, Any], **chosen: Any) -> dict[str, dict[str, Any]]:
    rows = [row for row in report["rows"] if all(row[key] == value for key, value in chosen.items())]
    assert len({row["system"] for row in rows}) == len(rows)
    return {row["system"]: row for row in rows}


@pytest.mark.timeout(300)
def test_throughput_trains_the_same_numbers_on_every_system(tmp_path):
    (report,) = run("throughput.py", tmp_path, "--rounds=2").values()
    assert report["settings"] == {"processes": 2, "rounds": 2, "num_blocks": 3}
    systems = by_system(report)
    alone = {name for name in systems if name.endswith("alone")}
    assert systems.keys() - alone == {"DDP", "FSDP1", FSDP2, OURS} and len(alone) == 3
    assert all(row["step_ms"] > 0 for row in systems.values())
    losses = [systems[name]["loss"] for name in systems.keys() - alone]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-4), "all did the same work"
    assert systems[FSDP2]["to_fsdp2"] == systems["DDP"]["to_ddp"] == 1


@pytest.mark.timeout(300)
def test_generation_gives_the_same_logits_on_every_system(tmp_path):
    (report,) = run("generation.py", tmp_path).values()
    assert {(row["system"], row["setting"]) for row in report["rows"]} == {
        ("plain", "default"), (FSDP2, "default"), (FSDP2, "kept"), (OURS, "default"), (OURS, "kept")
    }  # fmt: skip
    assert all(row["is_equal"] and row["forward_ms"] > 0 for row in report["rows"])


@pytest.mark.timeout(300)
def test_replicate_trains_beside_ddp_and_torchs_replicate(tmp_path):
    (report,) = run("replicate.py", tmp_path).values()
    assert report["settings"]["processes"] == 2
    systems = by_system(report)
    assert systems.keys() == {"DDP", "torch replicate", "fsdp_compose replicate", "fsdp_compose replicate flat"}
    assert all(row["step_ms"] > 0 for row in systems.values())


@pytest.mark.timeout(300)
def test_weight_sync_gives_the_same_weights_and_sends_fewer_bytes(tmp_path):
    (report,) = run("weight_sync.py", tmp_path).values()
    by_operation = {(row["operation"], row["learning_rate"]): row for row in report["rows"]}
    assert all(row["is_equal"] and row["milliseconds"] > 0 for row in report["rows"]) and len(by_operation) == 6
    full = by_operation["full_parameters", None]["sent_mib"]
    assert full == pytest.approx(by_operation["full_tensor() of each", None]["sent_mib"] / 2, rel=0.01)
    assert by_operation["changed_since", 1e-6]["sent_mib"] < full / 10


@pytest.mark.timeout(300)
def test_memory_peaks_are_below_those_of_fsdp2(tmp_path):
    (report,) = run("memory.py", tmp_path).values()
    for precision in ("fp32", "bf16/fp32"):
        for resharding in ("default", "never"):
            systems = by_system(report, precision=precision, resharding=resharding)
            limited = {f"{OURS}, 2 groups", f"{OURS}, 1 group"} if resharding == "default" else set()
            assert systems.keys() == {"FSDP1", FSDP2, NO_COPIES, OURS, IN_CHUNKS} | limited
            assert systems[IN_CHUNKS]["step_blocks"] > systems[OURS]["step_blocks"], "copies"
            # The quick run's two blocks are small beside its activations; the goal of 0.8 is measured with six.
            assert all(systems[name]["step_ratio"] <= systems[OURS]["step_ratio"] for name in limited)
            assert not limited or systems[f"{OURS}, 1 group"]["forward_ratio"] < systems[OURS]["forward_ratio"]
            # FSDP2 of torch 2.15 holds one block less.
            most = 0.75 if harness.TORCH < (2, 15) else 1
            assert systems[OURS]["forward_ratio"] <= most and systems[OURS]["step_ratio"] <= 1
            left = {systems[name]["left_bytes"] for name in (OURS, NO_COPIES, IN_CHUNKS)}
            assert left == {0}, "a step leaves what it found"
            assert systems[NO_COPIES]["forward_ratio"] < 1, "nothing but what is computed with"
            # At least what must be there: the unsharded root and two blocks, or all of them.
            num_blocks = report["settings"]["blocks"] if resharding == "never" else 2
            assert systems[OURS]["forward_blocks"] >= num_blocks


def test_allocated_bytes_sees_what_dispatch_modes_do_not(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from memory import AllocatedBytes

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> None:
        storage.resize_(0)
        storage.resize_(num_bytes)

    with AllocatedBytes() as allocated:
        before = torch.empty(1000, dtype=torch.uint8)
        storage = before.untyped_storage()
        with allocated.section("grown"):
            resize(storage, 64_000)
        with allocated.section("temporary"):
            torch.empty(5000, dtype=torch.uint8)
            torch.empty(3000, dtype=torch.uint8)
        with allocated.section("freed"):
            storage.resize_(0)
        with allocated.section("kept"):
            kept = torch.empty(4000, dtype=torch.uint8), torch.empty(2000, dtype=torch.uint8)
    assert allocated.peak == {"grown": 63_000, "temporary": 5000, "freed": 0, "kept": 6000}
    assert allocated.end == {"grown": 63_000, "temporary": 0, "freed": -64_000, "kept": 6000}
    assert len(kept) == 2


@pytest.mark.timeout(300)
def test_copies_and_collectives_are_counted(tmp_path):
    (moved,) = run("copied_bytes.py", tmp_path).values()
    groups = moved["settings"]["num_groups"]
    for precision, size in (("fp32", 1), ("bf16/fp32", 0.5)):
        systems = by_system(moved, precision=precision)
        for name in ("FSDP1", FSDP2, NO_COPY_OUT, NO_COPIES, OURS):
            row = systems[name]
            # Each group for forward, and each but the root, which stays unsharded, again for backward.
            assert (row["all_gathers"], row["reduce_scatters"], row["all_reduces"]) == (2 * groups - 1, groups, 0)
            assert row["all_gathered"] == pytest.approx(1.75 * size, rel=0.01), "the root is a quarter of this model"
            assert row["reduce_scattered"] == pytest.approx(1, rel=0.01), "reduced in fp32"
        assert systems[OURS]["computed"] == 0
        # The gradients once; with a cast, two bytes of every element of the shard into its place, for each all-gather.
        casts = 0 if precision == "fp32" else systems[OURS]["all_gathered"] / moved["settings"]["ranks"]
        assert systems[OURS]["copied"] == pytest.approx(1 + casts, rel=1e-6)
        assert systems[FSDP2]["copied"] > 2 and systems[FSDP2]["computed"] == 0, "its copies have other names now"
        # Without the copy-out, shards are still copied for each all-gather, after the cast if there is one.
        shards = systems[FSDP2]["all_gathered"] / moved["settings"]["ranks"]
        assert systems[NO_COPY_OUT]["copied"] == pytest.approx(1 + shards + casts, rel=1e-3)
        assert systems[NO_COPIES]["copied"] == pytest.approx(1 + casts, rel=1e-3)
        assert systems[NO_COPY_OUT]["computed"] == systems[NO_COPIES]["computed"] == 0


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("packs", [True, False])
@harness.distributed(2, fresh=True)  # for it replaces functions of torch
def test_fsdp2_without_copy_out_has_the_bits_of_fsdp2(packs: bool, param_dtype: torch.dtype | None):
    sys.path.insert(0, str(BENCHMARKS))
    from fsdp2_views import use_views

    # Rows that 2 ranks do not share evenly, a parameter of one row, one that needs no gradient.
    base = nn.Sequential(nn.Linear(7, 13), nn.Sequential(nn.Linear(13, 5), nn.LayerNorm(5)), nn.Linear(5, 1))
    base[1][1].bias.requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    inputs = [torch.randn(3, 7) + dist.get_rank() for _ in range(5)]
    trained = []
    for is_prototype in (False, True):
        model = copy.deepcopy(base)
        for module in (model[0], model[1]):
            fully_shard(module, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if is_prototype:
            use_views(model, packs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for step, x in enumerate(inputs):
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            if step != 1:  # and gradients of two steps together
                optimizer.step()
                optimizer.zero_grad()
        model[1].unshard()
        storages = [param.untyped_storage() for param in model[1].parameters()]
        assert len({storage.data_ptr() for storage in storages}) == (1 if is_prototype else 4)
        model[1].reshard()
        assert not any(storage.size() for storage in storages)
        trained.append((losses, [param.to_local() for param in model.parameters()]))
    (losses, params), (others, views) = trained
    assert others == losses and len({*losses}) == len(losses)
    assert all(map(torch.equal, views, params))


@pytest.mark.timeout(300)
def test_growth_measures_every_size(tmp_path):
    (report,) = run("growth.py", tmp_path, "--repeats=1").values()
    rows = report["rows"]
    sizes = {(row["varied"], row["num_groups"], row["num_ranks"]) for row in rows}
    on_meta = {("groups on meta", 3, 8), ("groups on meta", 12, 8)}
    assert sizes == {("groups", 3, 64), ("groups", 12, 64), ("ranks", 3, 8), ("ranks", 3, 512)} | on_meta
    assert len(rows) == 2 * len(sizes) and {row["system"] for row in rows} == {OURS, FSDP2}
    assert all(row["fully_shard_us"] > 0 for row in rows)


@pytest.mark.timeout(300)
def test_calls_are_those_of_each_part_of_a_step(tmp_path):
    (report,) = run("calls.py", tmp_path).values()
    assert {(row["part"], row["system"]) for row in report["rows"]} == {
        (part, system) for part in ("forward, backward", "step, zero_grad") for system in (FSDP2, OURS)
    }
    assert all(row["calls"] >= row["crossings"] for row in report["rows"])
    ours = by_system(report, part="forward, backward")[OURS]
    assert ours["num_files"] > 5 and ours["crossings"] > 5, "it counts hooks, gathers and reductions"


@pytest.mark.timeout(300)
def test_state_dicts_take_no_more_memory_than_those_of_fsdp2(tmp_path):
    (report,) = run("checkpoint.py", tmp_path).values()
    size = report["settings"]["parameter_bytes"] / 2**20
    for operation in (
        "get, sharded",
        "get, full",
        "get, full on one CPU",
        "DCP save",
        "DCP load and set",
        "save",
        "load and set",
    ):
        systems = by_system(report, operation=operation)
        assert systems.keys() == {FSDP2, OURS} and all(row["ms"] > 0 for row in systems.values())
        assert systems[FSDP2]["time_ratio"] == 1 and systems[FSDP2]["peak_ratio"] in (1, None), "None: it took nothing"
        if operation.startswith("get, full"):  # parameters and two moments, on the rank that holds most
            assert all(row["peak_mib"] >= 2.9 * size for row in systems.values())
    for operation in ("get, sharded", "save"):
        assert by_system(report, operation=operation)[OURS]["peak_mib"] < 0.1 * size


@pytest.mark.timeout(300)
def test_the_accelerator_benchmark_runs_without_one(tmp_path):
    (report,) = run("gpu.py", tmp_path, "--steps=2").values()
    for group in ("fake", "real"):
        systems = by_system(report, group=group, mode="eager", sequence=16)
        assert systems.keys() == {FSDP2, OURS}
        assert all(row["peaks_differ"] == 0 for row in systems.values()), "the same peak in every step"
        assert systems[OURS]["memory_ratio"] <= 1
        assert all(0 < row["copy_share"] < 1 for row in systems.values())
    measured = tmp_path / "gpu.json"
    predicted = run("tuning.py", tmp_path, "--what=gpu", "--hardware=h200", f"--measured={measured}")["tuning_gpu"][
        "rows"
    ]
    for row in predicted:
        (found,) = by_system(report, group=row["group"], system=OURS).values()
        assert row["measured_ms"] == pytest.approx(16e3 / found["tokens_per_s"]) and row["predicted_ms"] > 0
        assert row["measured_mib"] == found["peak_mib"] and row["predicted_mib"] > 0
    assert len(predicted) == 2


SYSTEMS = {"plain", "FSDP1", "FSDP1 flat", FSDP2, NO_COPY_OUT, NO_COPIES, OURS, "fsdp_compose flat", IN_CHUNKS}


@pytest.mark.timeout(300)
def test_host_overhead_has_every_system_at_every_precision(tmp_path):
    (report,) = run("host_overhead.py", tmp_path, "--blocks=1", "--repeats=2").values()
    assert len(report["rows"]) == 2 * len(SYSTEMS)
    for precision in ("fp32", "bf16/fp32"):
        systems = by_system(report, backend="null", world=64, blocks="eager", precision=precision)
        assert systems.keys() == SYSTEMS
        assert all(
            min(row[f"{part}_ms"] for part in ("forward", "backward", "optimizer")) > 0 for row in systems.values()
        )
        assert systems[FSDP2]["ratio"] == systems[FSDP2]["optimizer_ratio"] == 1 and systems["plain"]["ratio"] is None


@pytest.mark.timeout(300)
def test_host_overhead_clips_the_gradients_of_experts_on_a_mesh_of_their_own(tmp_path):
    (report,) = run("host_overhead.py", tmp_path, "--blocks=1", "--repeats=2", "--experts=4").values()
    for precision in ("fp32", "bf16/fp32"):
        systems = by_system(report, backend="null", world=64, precision=precision)
        assert systems.keys() == SYSTEMS - {NO_COPY_OUT, NO_COPIES}
        assert all(row["clip_ms"] > 0 for row in systems.values())
        assert systems[FSDP2]["step_ratio"] == 1 and systems[OURS]["step_ratio"] > 0


def test_host_overhead_knows_the_checks_that_it_switches_off(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from ablations import ABLATIONS

    for replaced in ABLATIONS.values():
        assert replaced and all(callable(getattr(owner, method)) for owner, method, _ in replaced)


@pytest.mark.timeout(300)
def test_optimizers_measures_steps_in_one_group_and_in_many_and_clipping(tmp_path):
    (report,) = run("optimizers.py", tmp_path).values()
    cases = {(row["action"], row["num_parameters"], row["num_groups"]) for row in report["rows"]}
    steps = {(f"AdamW {mode}", 12, 1) for mode in ("fused", "foreach", "loop")}
    steps |= {(f"AdamW {mode}", 24, 2) for mode in ("fused", "foreach")}
    assert cases == steps | {("torch's clip_grad_norm_", 24, 1), ("our clip_grad_norm_", 24, 1)}
    for action, num_parameters, num_groups in cases:
        systems = by_system(report, action=action, num_parameters=num_parameters, num_groups=num_groups)
        plain = set() if action.startswith("our") else {"plain"}
        assert systems.keys() == plain | {FSDP2, OURS, "fsdp_compose flat"}
        assert systems[FSDP2]["ratio"] == 1 and all(row["ms"] > 0 for row in systems.values())


@pytest.mark.timeout(300)
def test_control_exchange_happens_once_in_every_backward(tmp_path):
    (report,) = run("control_exchange.py", tmp_path).values()
    (row,) = report["rows"]
    assert (row["num_groups"], row["exchanges"]) == (3, 1)
    assert row["direct_us"] > 0 and row["alone_us"] > 0


@pytest.mark.timeout(300)
def test_a_save_in_the_background_is_timed_beside_others_and_copies_once(tmp_path):
    (report,) = run("async_save.py", tmp_path).values()
    rows = {row["system"]: row for row in report["rows"]}
    save, ours = f"{OURS}, save", f"{OURS}, async_save"
    assert [*rows] == [save, ours, "dcp.async_save"]
    assert all(row["call_cpu"] > 0 and row["durable_cpu"] > 0 for row in rows.values())
    assert rows[ours]["staged"] == pytest.approx(1, abs=0.01) and rows[save]["staged"] is None


@pytest.mark.timeout(300)
def test_one_rank_of_very_many_is_measured_and_its_messages_grow_with_the_logarithm(tmp_path):
    """Times, and resident memory, of which a quick run takes less than the system counts, are the benchmark's affair;
    that memory does not grow is tested by ``test_many_ranks``."""
    (report,) = run("scale.py", tmp_path).values()
    ours = sorted([row for row in report["rows"] if row["system"] == OURS], key=lambda row: row["num_ranks"])
    assert len(ours) > 1 and {row["system"] for row in report["rows"]} == {OURS, FSDP2}
    for row in ours:
        assert row["exchange_hops"] <= row["num_ranks"].bit_length() + 1
        assert row["connections"] <= row["num_ranks"].bit_length()
    assert all(row["step_us"] > 0 and row["fully_shard_us"] > 0 for row in report["rows"])


def test_collectives_of_messages_are_measured_next_to_gloos_own(tmp_path):
    (report,) = run("transport.py", tmp_path).values()
    rows = {row["collective"]: row for row in report["rows"]}
    assert rows.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert all(row["gloo_ms"] > 0 and row["messages_ms"] > 0 for row in rows.values())


def test_padding_is_below_one_percent(tmp_path):
    (report,) = run("padding.py", tmp_path).values()
    assert {row["system"] for row in report["rows"]} == {OURS, FSDP2, "LCM"}
    for group in {row["group"] for row in report["rows"]}:
        systems = by_system(report, group=group)
        padding = [systems[OURS][key] for key in systems[OURS] if key.startswith("ranks_")]
        assert len(padding) == 5 and max(padding[:4]) < 1


@pytest.mark.timeout(300)
def test_a_compiled_whole_model_is_measured_in_every_way(tmp_path):
    reports = run("compiled.py", tmp_path)
    assert reports.keys() == {f"compiled_{name}" for name in ("host", "compilation", "memory", "throughput", "order")}
    whole = f"{OURS} whole"
    host = by_system(reports["compiled_host"])
    assert host.keys() == {"plain whole", f"{FSDP2} blocks", whole, "collectives alone"}
    assert host[f"{FSDP2} blocks"]["ratio"] == 1 and host["collectives alone"]["overhead_us"] > 0
    compilation = by_system(reports["compiled_compilation"], backend="aot_eager")
    assert all(row["graphs"] == 1 and row["cpu_s"] > 0 and not row["error"] for row in compilation.values())
    peaks = {name: by_system(reports["compiled_memory"], resharding=name) for name in ("default", "never")}
    assert peaks["default"][whole]["step_mib"] < peaks["never"][whole]["step_mib"]
    assert all(systems[whole]["ratio"] <= 1.02 and systems[whole]["left_bytes"] == 0 for systems in peaks.values())
    losses = [row["loss"] for row in reports["compiled_throughput"]["rows"]]
    assert len(losses) == 4 and losses == pytest.approx([losses[0]] * 4, abs=1e-4), "all did the same work"
    order = {(row["graph"], row["order"], row["collective"]): row for row in reports["compiled_order"]["rows"]}
    kinds = {("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")}
    assert {(graph, kind) for graph, _, kind in order} == kinds
    for graph, kind in kinds:
        assert order[graph, "captured", kind]["hidden"] == 0
        early = order[graph, "launch_early", kind]
        assert early["hidden"] == early["count"] - (kind == "all_gather")


def test_a_benchmark_starts_in_an_interpreter_of_its_own(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "padding.py"), "--quick", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "|--" in done.stdout, done.stderr
    scripts = {*BENCHMARKS.glob("*.py")} - {BENCHMARKS / "compared.py"}  # which runs tests of this repository
    imports = {line.split()[1].partition(".")[0] for path in scripts for line in import_lines(path)}
    assert "fsdp_compose" in imports and "tests" not in imports, "the others were forked where tests can be imported"


def import_lines(script: Path) -> list[str]:
    return [line.strip() for line in script.read_text().splitlines() if line.strip().startswith(("from ", "import "))]


def test_tests_that_need_a_gpu_can_be_imported_without_one():
    module = importlib.import_module("tests.gpu.test_cuda")
    assert module.pytestmark.name == "gpu"
    assert sum(name.startswith(("test_", "Test")) for name in vars(module)) >= 4


@pytest.mark.timeout(400)
def test_a_step_of_muon_sends_what_is_promised(tmp_path):
    (report,) = run("muon.py", tmp_path, "--rounds=1").values()
    systems = by_system(report)
    assert systems.keys() == {
        *(f"{FSDP2}{way}" for way in (" + full_tensor()", ", torch's Muon", " + all-to-all")),
        *(f"{OURS}{way}" for way in (", torch's Muon", "", ", whole matrices")),
    }
    ours, whole = systems[OURS], systems[f"{OURS}, whole matrices"]
    assert systems[f"{FSDP2} + full_tensor()"]["sent_ratio"] == 1
    assert ours["sent_ratio"] <= 0.10 and ours["sent_to_all_to_all"] <= 0.30 and whole["sent_mb"] < ours["sent_mb"]
    assert ours["collectives"] < systems[f"{FSDP2} + all-to-all"]["collectives"]
    assert all(row["cpu_ms"] > 0 and row["peak_mib"] > 0 for row in systems.values())


@pytest.mark.timeout(400)
def test_wire_formats_send_what_is_promised(tmp_path):
    reports = run("wire.py", tmp_path, "--gbit=0")
    assert reports.keys() == {"wire_codec", "wire_step", "wire_loss"}
    sent = {row["format"]: row["bytes_ratio"] for row in reports["wire_step"]["rows"]}
    assert sent.keys() == {"fp32", "bf16 sums", "bf16 both", "int8 gathers", "int8 both"}
    assert sent["fp32"] == 1 and sent["bf16 both"] == pytest.approx(0.5, abs=0.001) and sent["int8 both"] <= 0.26
    codecs = {row["format"]: row for row in reports["wire_codec"]["rows"]}
    assert all(0 < row["error"] < 0.03 and row["encode"] > 0 for row in codecs.values())
    fp8, int8 = codecs["fp8 (e4m3)"], codecs["int8/256"]
    assert int8["error"] < fp8["error"] / 3 and int8["error_of_tails"] < fp8["error_of_tails"], "why fp8 is not offered"
    for row in reports["wire_loss"]["rows"]:
        assert (row["training_change"] == 0) == (row["format"] == "fp32")
        assert abs(row["training_change"]) < 1 and abs(row["validation_change"]) < 1


@pytest.mark.timeout(300)
def test_predicted_times_are_put_beside_measured_and_published_ones(tmp_path):
    reports = run("tuning.py", tmp_path)
    measured, published = reports["tuning"]["rows"], reports["tuning_published"]["rows"]
    assert len({row["setting"] for row in measured}) == 4
    assert all(row["predicted_ms"] > 0 and row["wall_ms"] > 0 for row in measured)
    for row in measured:
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["wall_ms"] - 1)
    (run_,) = published
    assert run_["run"] == "MPT 125M" and run_["error"] == run_["predicted"] / run_["published"] - 1


def rows_of(page: str) -> list[list[str]]:
    """The rows of the table of published runs in docs/project/performance.md, and of the halves before it."""
    lines = [line for line in page.partition("## Predictions of times")[2].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.timeout(300)
def test_predictions_of_published_runs_are_those_of_the_page(tmp_path):
    """The command predicts again the runs that are fastest to predict; all rows are behind the table of errors."""
    page = (ROOT / "docs/project/performance.md").read_text()
    rows = [row for row in rows_of(page) if len(row) == 13 and row[0] in ("used", "held out")]
    with (ROOT / "benchmarks/published_runs.csv").open(newline="") as file:
        runs = [(run["half"], run["run"], f"{int(run['published']):,}") for run in csv.DictReader(file)]
    assert [(row[0], row[1], row[9]) for row in rows] == runs
    for half, label in (("used", "used"), ("held out", "held out")):
        errors = [float(row[11].rstrip("%")) for row in rows if row[0] == half]
        sizes = sorted(map(abs, errors))
        (said,) = [row for row in rows_of(page) if row[0] == f"{len(errors)} {label}"]
        median, three_quarters, bias, largest = (float(cell.rstrip("%")) for cell in said[1:])
        assert statistics.median(sizes) == pytest.approx(median, abs=0.51)  # of rows, which are rounded
        assert sizes[math.ceil(0.75 * len(sizes)) - 1] == pytest.approx(three_quarters, abs=0.51)
        assert statistics.median(errors) == pytest.approx(bias, abs=0.51) and sizes[-1] == largest
        planning = (ROOT / "docs/planning.md").read_text()
        assert " | ".join(said[1:]) in planning
        if half == "held out":
            assert median <= 15 and three_quarters <= 25 and abs(bias) <= 10
            assert f"of {len(errors)} published runs" in COMPARED
            half_within, most_within = map(int, re.findall(r"(\d+) %", COMPARED))
            assert median <= half_within <= median + 1.5 and three_quarters <= most_within <= three_quarters + 1.5
    for name in ("MPT 125M", "MPT 1B"):
        reports = run("tuning.py", tmp_path, "--what=published", f"--runs={name}")
        found = [(f"{row['predicted']:,.0f}", f"{row['error']:+.0%}") for row in reports["tuning_published"]["rows"]]
        assert found == [(row[10], row[11]) for row in rows if row[1] == name]
    # More sequences, recomputed, are faster than fewer that are not: a choice that batches are compared for.
    many, few = (
        next(row for row in rows if row[1:3] + row[7:8] == ["MPT 13B", gpus, batch])
        for gpus, batch in (("512", "16 x 2048"), ("64", "2 x 2048"))
    )
    for column in (9, 10):
        assert float(many[column].replace(",", "")) > float(few[column].replace(",", ""))


@pytest.mark.timeout(300)
def test_published_peaks_of_memory_are_at_most_five_percent_above_the_predicted_ones(tmp_path):
    page = [row for row in rows_of((ROOT / "docs/project/performance.md").read_text()) if len(row) == 9]
    rows = [row for row in page if row[3] in ("reserved", "allocated")]
    with (ROOT / "benchmarks/published_runs.csv").open(newline="") as file:
        runs = [(run["run"], run["gpus"], run["gib"]) for run in csv.DictReader(file) if run["gib"]]
    assert [(row[0], row[1], row[4]) for row in rows] == runs
    assert all(float(row[7].rstrip("%")) >= -5 for row in rows)
    found = run("tuning.py", tmp_path, "--what=memory", "--runs=Llama 3.1 8B")["tuning_memory"]["rows"]
    said = [row[5:8] for row in rows if row[0] == "Llama 3.1 8B"]
    assert said == [[f"{row['allocated']:.1f}", f"{row['needed']:.1f}", f"{row['error']:+.0%}"] for row in found]


@pytest.mark.timeout(300)
def test_thirty_architectures_are_planned_within_a_minute_each(tmp_path):
    """The command plans again the one that takes least."""
    rows = [row for row in rows_of((ROOT / "docs/project/performance.md").read_text()) if len(row) == 5]
    planned = {row[0]: row for row in rows if row[2].isdigit()}
    assert sum(int(row[3]) <= 60 for row in planned.values()) >= 30
    (row,) = run("tuning.py", tmp_path, "--what=architectures", "--runs=bloom")["tuning_architectures"]["rows"]
    assert planned["bloom"][2:3] + planned["bloom"][4:] == [str(row["settings"]), row["found"]]
    assert row["seconds"] < 60


def test_owners_of_large_models_are_balanced_and_planned_at_once(tmp_path):
    (report,) = run("muon_owners.py", tmp_path).values()
    assert [(row["model"], row["ranks"]) for row in report["rows"]] == [
        ("Llama 8B", 2), ("Llama 8B", 64), ("Mixtral 8x7B", 2), ("Mixtral 8x7B", 64),
    ]  # fmt: skip
    for row in report["rows"]:
        assert row["bound"] <= row["balance"] <= 1.12 and 0 < row["bytes_per_element"] <= 4


@pytest.mark.timeout(300)
def test_meshes_train_the_same_numbers_and_keep_and_move_what_is_promised(tmp_path):
    (report,) = run("meshes.py", tmp_path).values()
    rows = {row["strategy"]: row for row in report["rows"] if row["system"] == OURS}
    assert len({round(row["loss"], 4) for row in report["rows"]}) == 1
    sharded, kept, hybrid, parts, replicated = rows.values()
    assert hybrid["kept_mib"] == pytest.approx(2 * sharded["kept_mib"], rel=0.02)
    assert replicated["kept_mib"] == pytest.approx(4 * sharded["kept_mib"], rel=0.02)
    assert sharded["kept_mib"] < parts["kept_mib"] < kept["kept_mib"] < replicated["kept_mib"]
    # blocks are gathered twice, the rest once; of two shards less than of four; without shards two halves of one
    assert kept["received_mib"] < hybrid["received_mib"] < sharded["received_mib"]
    assert kept["received_mib"] < parts["received_mib"] < sharded["received_mib"]
    assert replicated["received_mib"] == pytest.approx(kept["received_mib"], rel=0.02)

"""How good ``plan --tune``'s times are: beside steps of real processes, and beside published runs.

    python -m fsdp_compose calibrate --processes 2 --output machine.json    # on an idle machine
    python benchmarks/tuning.py --what measured --hardware machine.json
    python benchmarks/tuning.py --what measured --hardware machine.json --processes 4 --gbit 1   # between pairs
    python benchmarks/tuning.py --what published
    python benchmarks/tuning.py --what memory
    python benchmarks/tuning.py --what architectures    # needs transformers
    python benchmarks/tuning.py --what gpu --hardware gpu.json --measured runs/benchmarks/gpu.json  # of gpu.py
    python benchmarks/tuning.py --quick

``measured``: models that ``calibrate`` has not seen, each with several settings, which take turns, in another order
each round. What counts is the order *within* a model: ``rank`` is Spearman's correlation of predicted and measured
times, ``choice`` how much longer the setting that was predicted to be the fastest takes than the fastest. ``--gbit``
lets collectives between the two halves of the processes wait as long as such a network would take.

``published``: tokens per second and GPU of the runs in published_runs.csv, whose models are run dry, with the presets
as they are. Rates of presets were chosen from its half ``used``; the half ``held out`` judges them.

``memory``: the peaks of those of them whose peak was published, of two kinds: what tensors took (allocated), and that
with what torch's allocator kept beside (reserved). Of a run of several micro-batches it is that of a loop that keeps
unsharded gradients until the last one, as its source does.

``architectures``: how long ``plan --tune`` takes for transformers' language models, each as its configuration class
makes it by default, on 64 H100s; one that is refused says why.

``gpu``: the steps that ``gpu.py`` has measured on one GPU, with the file that ``calibrate`` has written there, or with
a preset. Collectives take no time: one rank has none, and those of the fake process group move nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from gpu import GROUPS
from models import GPT, Llama
from processes import run_on_ranks, time_in_turn
from report import column
from systems import OURS, PRECISIONS, wrap
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from wire import Link, Throttled

from fsdp_compose import MixedPrecisionPolicy, fully_shard, plan, set_transport
from fsdp_compose.inspect import WorldFacts
from fsdp_compose.tuning import Hardware, Level, Network, Setting, apply_setting, read_hardware, schedule, tune
from fsdp_compose.tuning import hardware_of as hardware_from

# ---- Measured


@dataclass(frozen=True)
class Model:
    """A model to measure. A rank trains ``batch`` sequences of ``length`` tokens."""

    name: str
    make: Callable[[], nn.Module]
    batch: int
    length: int

    def loss_of(self, model: nn.Module) -> torch.Tensor:
        tokens = torch.arange(self.batch * self.length).view(self.batch, -1) % 256
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


MODELS = (
    Model("GPT 6 x 320", partial(GPT, 6, 320, 5), 4, 96),
    Model("GPT 4 x 640", partial(GPT, 4, 640, 10), 1, 64),
    Model("Llama 5 x 384", partial(Llama, 384, 5, 256), 2, 160),
)
QUICK_MODELS = (Model("GPT 2 x 64", partial(GPT, 2, 64, 2), 1, 16),)


def settings_for(num_ranks: int) -> list[Setting]:
    flat, halves = (num_ranks,), (2, num_ranks // 2)
    found = [
        Setting("zero3", flat),
        Setting("zero2", flat),
        Setting("ddp", flat),
        Setting("zero3", flat, per_group=2),
        Setting("zero3", flat, per_group=100),
        Setting("zero3", flat, splits=True),
        Setting("zero3", flat, checkpointed="blocks"),
        Setting("ddp", flat, checkpointed="every 2nd block"),
        Setting("zero2", flat, per_group=2),
    ]
    if num_ranks > 2:
        found += [Setting("hybrid", halves), Setting("hybrid", halves, reshard_after_forward=False)]
        found += [Setting("hfsdp", halves)]
    return found


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, foreach=True)


def built(model: Model, setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    made = model.make()
    blocks = [*made.blocks]  # type: ignore[arg-type]
    apply_setting(setting, made, blocks, None)
    return made


def measure(models: Sequence[Model], settings: Sequence[Setting], rounds: int, gbit: float, path: Path) -> None:
    actions = {(model.name, str(setting)): _stepping(model, setting, gbit) for model in models for setting in settings}
    times = time_in_turn(actions, rounds)
    if dist.get_rank() == 0:
        found = [[*key, *(median(parts) for parts in zip(*runs, strict=True))] for key, runs in times.items()]
        path.write_text(json.dumps(found))


def _stepping(model: Model, setting: Setting, gbit: float) -> Callable[[], Sequence[float]]:
    made = built(model, setting)
    if gbit:
        link = Link(gbit * 1e9 / 8, True)
        set_transport(made, lambda transport, _: Throttled(transport, link) if _is_between(transport) else transport)
    optimizer = adamw(made.parameters())

    def step() -> Sequence[float]:
        began = process_time()
        model.loss_of(made).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [process_time() - began]

    return step


def _is_between(transport: Any) -> bool:
    half = dist.get_world_size() // 2
    return len({rank // half for rank in dist.get_process_group_ranks(transport.group)}) > 1


def predicted(model: Model, setting: Setting, num_ranks: int, hardware: Hardware) -> float:
    events = plan(partial(_built_for_plan, model, setting), num_ranks, optimizer=adamw).worlds[0].events
    return schedule(events, hardware.device, hardware.network).seconds


def _built_for_plan(model: Model, setting: Setting) -> Any:
    return built(model, setting), model.loss_of


@dataclass(frozen=True)
class Measured:
    model: str = column("model")
    setting: str = column("setting")
    wall_ms: float = column("measured, wall ms", ".1f")
    cpu_ms: float = column("CPU ms", ".1f")
    predicted_ms: float = column("predicted ms", ".1f")
    error: float = column("error", "+.1%")


def measured_rows(options: argparse.Namespace) -> list[Measured]:
    num_ranks, models = options.processes, QUICK_MODELS if options.quick else MODELS
    settings = settings_for(num_ranks)[: 4 if options.quick else None]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        # In a process of its own, since the ranks are forked before torch is used.
        run_on_ranks(num_ranks, measure, models, settings, options.rounds, options.gbit, path)
        times = {(name, setting): (wall, cpu) for name, setting, wall, cpu in json.loads(path.read_text())}
    hardware = read_hardware(options.hardware)
    if options.gbit:
        levels = (Level(num_ranks // 2, float("inf"), 0.0), Level(0, options.gbit * 1e9 / 8 / (num_ranks // 2), 0.0))
        hardware = replace(hardware, network=Network(levels, 0.0))
    rows = []
    for model in models:
        for setting in settings:
            wall, cpu = times[model.name, str(setting)]
            seconds = predicted(model, setting, num_ranks, hardware)
            clock = cpu if hardware.calibrated.get("clock") == "cpu" and not options.gbit else wall
            rows.append(Measured(model.name, str(setting), wall, cpu, 1e3 * seconds, 1e3 * seconds / clock - 1))
    return rows


@dataclass(frozen=True)
class Within:
    model: str = column("model")
    settings: int = column("settings")
    spread: float = column("slowest to fastest", ".2f")
    rank: float = column("rank", "+.2f")
    choice: float = column("choice", "+.1%")
    error: float = column("median error", ".1%")


def within(rows: Sequence[Measured]) -> list[Within]:
    found = []
    for name in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == name]
        times = [row.predicted_ms / (1 + row.error) for row in own]
        chosen = min(range(len(own)), key=lambda i: own[i].predicted_ms)
        rank = spearman([row.predicted_ms for row in own], times)
        errors = median(abs(row.error) for row in own)
        found.append(Within(name, len(own), max(times) / min(times), rank, times[chosen] / min(times) - 1, errors))
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    ranks = torch.tensor([[sorted(some).index(value) for value in some] for some in (a, b)], dtype=torch.float64)
    return torch.corrcoef(ranks)[0, 1].item()


# ---- Published

RUNS = Path(__file__).with_name("published_runs.csv")
SOURCES = {
    "fms": "foundation-model-stack/fms-fsdp, README.md at this commit; selective checkpointing taken for every second "
    "block of 13B, and for all of 34B and 70B; 4,096 tokens",
    "foundry": "mosaicml/llm-foundry, scripts/train/benchmarking/README.md; 512: an earlier version of its table",
    "kempner": "KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md",
    "titan": "pytorch/torchtitan, docs/performance.md in 2024, and benchmarks/llama3_h100_202412_torchtitan.md",
}
MODELS_OF_RUNS: dict[str, Callable[[], nn.Module]] = {
    "llama2-7b": partial(Llama, 4096, 32, 32_000, 11_008, 32),
    "llama2-13b": partial(Llama, 5120, 40, 32_000, 13_824, 40),
    "llama2-34b": partial(Llama, 8192, 48, 32_000, 22_016, 8),
    "llama2-70b": partial(Llama, 8192, 80, 32_000, 28_672, 8),
    "llama3-8b": partial(Llama, 4096, 32, 128_256), "llama3-13b": partial(Llama, 5120, 40, 128_256, 17_920, 8),
    "llama3-70b": partial(Llama, 8192, 80, 128_256, 28_672, 8),
    "mpt-125m": partial(GPT, 12, 768, 12, 50_368), "mpt-1b": partial(GPT, 24, 2048, 16, 50_368),
    "mpt-7b": partial(GPT, 32, 4096, 32, 50_368), "mpt-13b": partial(GPT, 40, 5120, 40, 50_368),
    "mpt-30b": partial(GPT, 48, 7168, 56, 50_368), "mpt-70b": partial(GPT, 80, 8192, 64, 50_368),
}  # fmt: skip


def hardware_of_run(run: Mapping[str, str]) -> Hardware:
    """The preset of that software, with what the source says of these cards and nodes; nothing is fitted here."""
    name, _, rest = run["hardware"].partition(" ")
    found = hardware_from(name.removesuffix("-40"), run["software"])
    inner, outer = found.network.levels
    if rest in ("400", "800"):  # Gb/s of a node
        outer = replace(outer, bandwidth=0.75 * float(rest) * 1e9 / 8 / inner.ranks)
    if rest == "4-gpu nodes":
        inner = replace(inner, ranks=4)
    memory = {"a100-40": 1555, "h100 2.4 TB/s": 2400}.get(run["hardware"])  # GB/s of the data sheet
    rate = found.device.memory if memory is None else 0.8e9 * memory
    device = replace(found.device, memory=rate, matmul_bytes=rate)
    return Hardware(device, Network((inner, outer), found.network.start))


def saved_products() -> Any:
    """Saves every other product, and attention, as torchtitan's selective checkpointing of operators does."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        elif "scaled_dot_product" in str(operation):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def built_for(
    model: str, ranks: str, sharding: str, batch: str, length: str, recomputed: str, kept_in: str, reduced_in: str
) -> Any:
    with torch.device("meta"):
        made = MODELS_OF_RUNS[model]().to(PRECISION_OF[kept_in])
    blocks = [*made.blocks]  # type: ignore[arg-type]
    context = {"context_fn": saved_products} if recomputed == "products" else {}
    for block in blocks[:: 2 if recomputed == "every 2nd" else 1] if recomputed != "none" else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)
    policy = MixedPrecisionPolicy(torch.bfloat16, PRECISION_OF[reduced_in])
    options: dict[str, Any] = {"mp_policy": policy}
    if sharding == "HSDP":
        shape = (int(ranks) // 8, 8)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if sharding == "grad only":
        options["strategy"] = "zero2"
    for module in (*blocks, made):
        fully_shard(module, **options)
    tokens = torch.zeros(int(batch), int(length), dtype=torch.int64)
    return made, lambda made: F.cross_entropy(made(tokens).float().flatten(0, 1), tokens.flatten())


PRECISION_OF = {"bf16": torch.bfloat16, "fp32": torch.float32}


@cache
def planned(*what: str, accumulates: bool = False) -> WorldFacts:
    """Return a run's plan. Runs that differ only in hardware or compilation share it."""
    return plan(partial(built_for, *what), int(what[1]), accumulates=accumulates).worlds[0]


def what_of(run: Mapping[str, str]) -> list[str]:
    names = ("model", "gpus", "sharding", "sequences", "tokens", "recomputed", "kept_in", "reduced_in")
    return [run[name] for name in names]


@dataclass(frozen=True)
class Published:
    half: str = column("half")
    run: str = column("run")
    gpus: int = column("GPUs")
    hardware: str = column("hardware")
    software: str = column("software")
    mode: str = column("mode")
    sharding: str = column("sharding")
    batch: str = column("sequences x tokens")
    recomputed: str = column("recomputed")
    published: int = column("published, tokens/s/GPU", ",")
    predicted: float = column("predicted", ",.0f")
    error: float = column("error", "+.0%")
    source: str = column("source")


def published_row(run: Mapping[str, str]) -> Published:
    hardware, num_batches = hardware_of_run(run), int(run["micro_batches"])
    seconds = schedule(
        planned(*what_of(run)).events,
        hardware.device,
        hardware.network,
        num_batches=num_batches,
        is_compiled=run["mode"] == "compiled",
    ).seconds
    predicted = num_batches * int(run["sequences"]) * int(run["tokens"]) / seconds
    batch = f"{run['sequences']} x {run['tokens']}" + (f", {num_batches} times" if num_batches > 1 else "")
    names = run["half"], run["run"], int(run["gpus"]), run["hardware"], run["software"], run["mode"], run["sharding"]
    published = int(run["published"])
    error = predicted / published - 1
    return Published(*names, batch, run["recomputed"], published, predicted, error, run["source"])


@dataclass(frozen=True)
class Half:
    half: str = column("half")
    runs: int = column("runs")
    median: float = column("median error", ".1%")
    three_quarters: float = column("three quarters within", ".1%")
    bias: float = column("bias (median)", "+.1%")
    largest: float = column("largest", ".0%")


def halves(rows: Sequence[Published]) -> list[Half]:
    """``used`` are the runs from which the presets' rates were chosen; the others judge them."""
    found = []
    for half in ("used", "held out"):
        errors = [row.error for row in rows if row.half == half]
        sizes = sorted(map(abs, errors))
        if errors:
            three_quarters = sizes[math.ceil(0.75 * len(sizes)) - 1]
            found.append(Half(half, len(errors), median(sizes), three_quarters, median(errors), sizes[-1]))
    return found


@dataclass(frozen=True)
class Memory:
    run: str = column("run")
    gpus: int = column("GPUs")
    mode: str = column("mode")
    kind: str = column("what")
    published: float = column("published, GiB", ".1f")
    allocated: float = column("predicted: allocated", ".1f")
    needed: float = column("with what is reserved", ".1f")
    error: float = column("error", "+.0%")
    source: str = column("source")


def memory_row(run: Mapping[str, str]) -> Memory:
    peak = planned(*what_of(run), accumulates=int(run["micro_batches"]) > 1).peak.nbytes
    num_networks = 1 + (run["sharding"] == "HSDP")
    needed = peak + sum(hardware_of_run(run).device.reserved(peak, num_networks).values())
    published, sizes = float(run["gib"]), (peak / 2**30, needed / 2**30)
    error = sizes[run["gib_of"] == "reserved"] / published - 1
    return Memory(run["run"], int(run["gpus"]), run["mode"], run["gib_of"], published, *sizes, error, run["source"])


# ---- Architectures

ARCHITECTURES = (
    "llama", "llama4_text", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "gemma",
    "gemma2", "gemma3_text", "phi", "phi3", "phimoe", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "gpt_oss",
    "bloom", "opt", "mpt", "falcon", "falcon_mamba", "mamba", "mamba2", "deepseek_v2", "deepseek_v3", "olmo", "olmo2",
    "olmoe", "starcoder2", "stablelm", "granite", "granitemoe", "cohere", "glm4", "exaone4",
)  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    name: str = column("architecture")
    parameters: float | None = column("parameters, billions", ".2f")
    settings: int | None = column("settings", "")
    seconds: float = column("CPU s", ".0f")
    found: str = column("fastest, or why it is refused")


def architecture_row(name: str) -> Architecture:
    began, num_elements = process_time(), 0

    def factory(batch: int = 2) -> Any:
        nonlocal num_elements
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(name, use_cache=False)
        has_experts = any("expert" in key for key in config.to_dict())
        options = {"experts_implementation": "grouped_mm"} if has_experts else {}  # a loop depends on the routing
        model = AutoModelForCausalLM.from_config(config, **options)
        num_elements = sum(param.numel() for param in model.parameters())
        tokens = torch.zeros(batch, 1024, dtype=torch.int64)
        return model, lambda model: model(input_ids=tokens, labels=tokens).loss

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    try:
        answer = tune(factory, 64, hardware="h100", mp_policy=policy)
    except (RuntimeError, ValueError, TypeError) as error:
        found, num_settings = str(error).partition("\n")[0][:150], None
    else:
        found, num_settings = str(answer.best.setting), len(answer.results)
    return Architecture(name, num_elements / 1e9 or None, num_settings, process_time() - began, found)


# ---- One GPU


@dataclass(frozen=True)
class OnGpu:
    group: str = column("group")
    mode: str = column("mode")
    sequence: int = column("sequence")
    measured_ms: float = column("measured ms", ".1f")
    predicted_ms: float = column("predicted ms", ".1f")
    error: float = column("error", "+.1%")
    measured_mib: float = column("peak, MiB", ".0f")
    predicted_mib: float = column("predicted", ".0f")
    memory_error: float = column("error ", "+.1%")


def gpu_rows(measured: Path, hardware: Hardware) -> list[OnGpu]:
    found = json.loads(measured.read_text())
    sizes = [found["settings"][name] for name in ("dim", "num_blocks", "vocabulary")]
    device, free = hardware.device, Network((Level(0, float("inf"), 0.0),), 0.0)
    rows = []
    for row in found["rows"]:
        if row["system"] == OURS:
            world = plan(
                partial(_built_for_gpu, *sizes, row["sequence"]), GROUPS[row["group"]], optimizer=adamw
            ).worlds[0]
            step = schedule(world.events, device, free, is_compiled=row["mode"] == "compiled").seconds
            seconds, mib = row["sequence"] / row["tokens_per_s"], world.peak.nbytes / 2**20
            times, peaks = (
                (1e3 * seconds, 1e3 * step, step / seconds - 1),
                (row["peak_mib"], mib, mib / row["peak_mib"] - 1),
            )
            rows.append(OnGpu(row["group"], row["mode"], row["sequence"], *times, *peaks))
    return rows


def _built_for_gpu(dim: int, num_blocks: int, vocabulary: int, sequence: int) -> Any:
    with torch.device("meta"):
        model = Llama(dim, num_blocks, vocabulary)
    tokens = torch.zeros(1, sequence, dtype=torch.int64)
    return wrap(model, OURS, PRECISIONS["bf16/fp32"]), lambda made: F.cross_entropy(
        made(tokens).flatten(0, 1).float(), tokens.flatten()
    )


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--what", choices=["measured", "published", "memory", "architectures", "gpu", "all"], default="all"
    )
    parser.add_argument("--hardware", help="the file that calibrate wrote (default: calibrates now); gpu: or a preset")
    parser.add_argument("--measured", type=Path, help="gpu: the file that gpu.py wrote")
    parser.add_argument(
        "--runs", default="", help="published, memory, architectures: only those whose name contains this"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gbit", type=float, default=0.0, help="of the network between the two halves; 0: none")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.what in ("measured", "all"):
        if options.hardware is None:
            options.hardware = calibrated(options)
        rows = measured_rows(options)
        own = {"processes": options.processes, "gbit": options.gbit, "rounds": options.rounds}
        found = report.Report("tuning", own, rows)
        print(found.table(), "\n", report.Report("tuning_within", own, within(rows)).table(), sep="\n")
        found.write(options.out, report.bars("setting", "error", by="model"))
    if options.what == "gpu":
        found = report.Report("tuning_gpu", {}, gpu_rows(options.measured, hardware_from(options.hardware)))
        print(found.table())
        found.write(options.out, report.bars("sequence", "error", by="group"))
    with RUNS.open(newline="") as file:
        runs = [run for run in csv.DictReader(file) if not options.runs or options.runs in run["run"]]
    if options.what == "memory":
        found = report.Report("tuning_memory", {}, [memory_row(run) for run in runs if run["gib"]])
        print(found.table())
        found.write(options.out, report.bars("run", "error", by="mode"))
    if options.what == "architectures":
        torch.set_num_threads(1)
        names = [name for name in ARCHITECTURES if options.runs in name]
        rows = []
        for name in names:
            rows.append(architecture_row(name))
            print(rows[-1], file=sys.stderr, flush=True)
        found = report.Report("tuning_architectures", {}, rows)
        print(found.table())
        found.write(options.out, report.bars("name", "seconds", by="name"))
    if options.what in ("published", "all"):
        rows = [published_row(run) for run in (runs[-1:] if options.quick and not options.runs else runs)]
        found = report.Report("tuning_published", {}, rows)
        print(found.table(), "\n", report.Report("tuning_halves", {}, halves(rows)).table(), sep="\n")
        found.write(options.out, report.bars("run", "error", by="hardware"))


def calibrated(options: argparse.Namespace) -> Path:
    path = Path(options.out) / "hardware" / "machine.json"  # beside reports, which are JSON too
    path.parent.mkdir(parents=True, exist_ok=True)
    rounds = ["--rounds", "1"] if options.quick else []
    command = [sys.executable, "-m", "fsdp_compose", "calibrate", "--busy-ok", "--processes", str(options.processes)]
    subprocess.run([*command, *rounds, "--output", os.fspath(path)], check=True)
    return path


if __name__ == "__main__":
    main()

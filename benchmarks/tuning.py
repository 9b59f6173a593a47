"""How good ``plan --tune``'s times are: beside steps of real processes, and beside published runs.

    python -m fsdp_compose calibrate --processes 2 --output machine.toml    # on an idle machine
    python benchmarks/tuning.py --what measured --hardware machine.toml
    python benchmarks/tuning.py --what measured --hardware machine.toml --processes 4 --gbit 1   # between pairs
    python benchmarks/tuning.py --what published
    python benchmarks/tuning.py --what gpu --hardware gpu.toml --measured runs/benchmarks/gpu.json  # of gpu.py
    python benchmarks/tuning.py --quick

``measured``: models that ``calibrate`` has not seen, each with several settings, which take turns, in another order
each round. What counts is the order *within* a model: ``rank`` is Spearman's correlation of predicted and measured
times, ``choice`` how much longer the setting that was predicted to be the fastest takes than the fastest. ``--gbit``
lets collectives between the two halves of the processes wait as long as such a network would take.

``published``: tokens per second and GPU of torchtitan's and llm-foundry's reports, whose models are run dry. The
hardware is the preset, but for torchtitan's H100s, which are said to have 2.4 TB/s and 500 W (0.8 of the rates), and
for the software of 2023, whose efficiency is fitted to one of its runs, MPT 7B.

``gpu``: the steps that ``gpu.py`` has measured on one GPU, with the file that ``calibrate`` has written there, or with
a preset. Collectives take no time: one rank has none, and those of the fake process group move nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from wire import Link, Throttled

from fsdp_compose import MixedPrecisionPolicy, fully_shard, plan, set_transport
from fsdp_compose.tuning import PRESETS, Hardware, Level, Network, Setting, apply_setting, read_hardware, schedule
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


@dataclass(frozen=True)
class Run:
    """A published run: ``micro`` micro-batches of ``batch`` sequences on each GPU."""

    what: str
    hardware: str
    ranks: int
    make: Callable[[], nn.Module]
    batch: int
    length: int
    recomputes: str  # none, products, every 2nd, blocks
    tokens: int
    source: str
    micro: int = 1
    is_compiled: bool = False


TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_2024 = "torchtitan, docs/performance.md"
FOUNDRY = "llm-foundry, scripts/train/benchmarking/README.md"
LLAMA_8B, LLAMA_70B = partial(Llama, 4096, 32, 128_256), partial(Llama, 8192, 80, 128_256)
MPT = {
    "1b": partial(GPT, 24, 2048, 16, 50_368), "7b": partial(GPT, 32, 4096, 32, 50_368),
    "13b": partial(GPT, 40, 5120, 40, 50_368), "30b": partial(GPT, 48, 7168, 56, 50_368),
    "70b": partial(GPT, 80, 8192, 64, 50_368),
}  # fmt: skip
RUNS = (
    Run("Llama 3.1 8B", "h100 500 W", 8, LLAMA_8B, 2, 8192, "products", 5762, TITAN),
    Run("Llama 3.1 8B", "h100 500 W", 8, LLAMA_8B, 2, 8192, "products", 6667, TITAN, is_compiled=True),
    Run("Llama 3.1 8B", "h100 500 W", 128, LLAMA_8B, 2, 8192, "products", 5605, TITAN),
    Run("Llama 3.1 8B", "h100 500 W", 128, LLAMA_8B, 2, 8192, "products", 6514, TITAN, is_compiled=True),
    Run("Llama 3 8B", "a100", 64, LLAMA_8B, 1, 8192, "every 2nd", 2904, TITAN_2024),
    Run("Llama 3 8B", "a100", 64, LLAMA_8B, 1, 8192, "products", 2973, TITAN_2024),
    Run("Llama 3 70B", "a100", 64, LLAMA_70B, 1, 8192, "blocks", 331, TITAN_2024),
    Run("MPT 1B", "h100 in 2023", 8, MPT["1b"], 14, 2048, "none", 45_455, FOUNDRY),
    Run("MPT 7B", "h100 in 2023", 8, MPT["7b"], 6, 2048, "none", 10_643, FOUNDRY),
    Run("MPT 13B", "h100 in 2023", 8, MPT["13b"], 2, 2048, "none", 4_792, FOUNDRY),
    Run("MPT 13B", "h100 in 2023", 64, MPT["13b"], 2, 2048, "none", 4_800, FOUNDRY),
    Run("MPT 30B", "h100 in 2023", 32, MPT["30b"], 14, 2048, "blocks", 2_308, FOUNDRY, micro=3),
    Run("MPT 70B", "h100 in 2023", 64, MPT["70b"], 8, 2048, "blocks", 1_039, FOUNDRY, micro=4),
    Run("MPT 70B", "h100 in 2023", 32, MPT["70b"], 2, 2048, "blocks", 882, FOUNDRY, micro=16),
)


_SLOWER = {
    "h100 500 W": (0.8, 2.4 / 3.35),
    "h100 in 2023": (0.81, 0.81),  # fitted to one of the runs, MPT 7B; the others are predicted with it
}
"""Factors for products and for memory, that a preset as shipped does not have: what the source says of the cards, and
what is fitted to a run."""


def hardware_of(name: str) -> Hardware:
    found = PRESETS[name.split()[0]]
    products, memory = _SLOWER.get(name, (1.0, 1.0))
    device = replace(
        found.device,
        matmul={dtype: products * rate for dtype, rate in found.device.matmul.items()},
        attention=(products * found.device.attention[0], products * found.device.attention[1]),
        memory=memory * found.device.memory,
    )
    return replace(found, device=device)


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


def built_for(run: Run) -> Any:
    with torch.device("meta"):
        model = run.make()
    blocks = [*model.blocks]  # type: ignore[arg-type]
    context = {"context_fn": saved_products} if run.recomputes == "products" else {}
    for block in blocks[:: 2 if run.recomputes == "every 2nd" else 1] if run.recomputes != "none" else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mp_policy=policy)
    tokens = torch.zeros(run.batch, run.length, dtype=torch.int64)
    return model, lambda made: F.cross_entropy(made(tokens).float().flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Published:
    run: str = column("run")
    gpus: int = column("GPUs")
    hardware: str = column("hardware")
    published: int = column("published, tokens/s/GPU", ",")
    predicted: float = column("predicted", ",.0f")
    error: float = column("error, preset as shipped", "+.0%")
    slowed_error: float = column("error, preset slowed for these runs", "+.0%")
    step_s: float = column("step s", ".2f")
    exposed_s: float = column("exposed s", ".2f")
    plan_s: float = column("CPU s to predict", ".1f")
    source: str = column("source")


def published_row(run: Run) -> Published:
    began = process_time()
    world = plan(partial(built_for, run), run.ranks).worlds[0]
    tokens = run.batch * run.length * run.micro
    shipped, slowed = (
        schedule(world.events, device.device, device.network, num_batches=run.micro, is_compiled=run.is_compiled)
        for device in (PRESETS[run.hardware.split()[0]], hardware_of(run.hardware))
    )
    what = f"{run.what}, {'compiled' if run.is_compiled else 'eager'}, recomputes {run.recomputes}"
    errors = [tokens / found.seconds / run.tokens - 1 for found in (shipped, slowed)]
    seconds = process_time() - began
    figures = run.tokens, tokens / shipped.seconds, *errors, shipped.seconds, shipped.exposed, seconds
    return Published(what, run.ranks, run.hardware, *figures, run.source)


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
    parser.add_argument("--what", choices=["measured", "published", "gpu", "all"], default="all")
    parser.add_argument("--hardware", help="the file that calibrate wrote (default: calibrates now); gpu: or a preset")
    parser.add_argument("--measured", type=Path, help="gpu: the file that gpu.py wrote")
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
    if options.what in ("published", "all"):
        runs = [published_row(run) for run in (RUNS[:1] if options.quick else RUNS)]
        found = report.Report("tuning_published", {}, runs)
        print(found.table())
        found.write(options.out, report.bars("run", "error", by="hardware"))


def calibrated(options: argparse.Namespace) -> Path:
    path = Path(options.out) / "machine.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    rounds = ["--rounds", "1"] if options.quick else []
    command = [sys.executable, "-m", "fsdp_compose", "calibrate", "--busy-ok", "--processes", str(options.processes)]
    subprocess.run([*command, *rounds, "--output", os.fspath(path)], check=True)
    return path


if __name__ == "__main__":
    main()

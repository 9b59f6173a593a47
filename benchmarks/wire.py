"""Wire formats: CPU time of encoding, time of a step on slow networks, and what rounding does to a loss.

    python benchmarks/wire.py --what codec
    python benchmarks/wire.py --what step                # 2 processes; --gbit 1,10
    python benchmarks/wire.py --what loss --seeds 0,1,2  # 500 steps of examples/train_gpt.py
    python benchmarks/wire.py --quick

``step``: each collective passes a link that sends one after another, at so many Gbit/s, and ``wait()`` lasts until the
bytes are through, so that overlap counts. ``CPU + link`` adds the CPU time of the training thread and the time that it
would have waited for the link. That does not depend on what else the machine does, but leaves out gloo's threads and
waiting for other ranks. ``wall`` really sleeps. All formats step in turn; ratios are medians over the rounds.

``loss``: the same data and initial parameters, in fp32 and in each format. The loss is the mean of the last tenth of
the training steps, and that of validation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import report
import torch
import torch.distributed as dist
from models import Llama
from processes import run_on_ranks
from report import column

from fsdp_compose import Transport, TransportWrapper, fully_shard, set_transport
from fsdp_compose.core.comm import Label, Work
from fsdp_compose.plugins.transports import Bfloat16, Int8, Wire, WireFormat

FORMATS: dict[str, tuple[WireFormat | None, WireFormat | None]] = {
    "fp32": (None, None),
    "bf16 sums": (None, Bfloat16()),
    "bf16 both": (Bfloat16(), Bfloat16()),
    "int8 gathers": (Int8(), None),
    "int8 both": (Int8(), Int8()),
}
MIB = 2**20


# ---- Encoding


class Float8(WireFormat):
    """Elements as multiples of a scale, rounded to 3 bits of mantissa. The package does not offer it."""

    name, block = "fp8 (e4m3)", 256

    def nbytes(self, numel: int) -> int:
        return numel // self.block * 4 + numel

    def encode(self, source: torch.Tensor, packed: torch.Tensor) -> None:
        blocks, (scales, elements) = source.view(-1, self.block), self._parts(packed)
        torch.div(blocks.abs().amax(1, keepdim=True), torch.finfo(torch.float8_e4m3fn).max, out=scales)
        elements.copy_(blocks / scales)

    def decode(self, packed: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        scales, elements = self._parts(packed)
        values = elements.float().mul_(scales).view(-1)
        out.add_(values) if adds else out.copy_(values)

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        end = packed.numel() // (4 + self.block) * 4
        scales, elements = packed[:end].view(torch.float32), packed[end:].view(torch.float8_e4m3fn)
        return scales.view(-1, 1), elements.view(-1, self.block)


@dataclass(frozen=True)
class Codec:
    """Times are CPU time, or on a GPU those of its kernels."""

    format: str = column("format")
    encode: float = column("encode, ms a MiB", ".4f")
    decode: float = column("decode", ".4f")
    add: float = column("decode and add", ".4f")
    copy: float = column("a copy", ".4f")
    error: float = column("relative error", ".5f")
    error_of_tails: float = column("with heavy tails", ".5f")  # Student's t, 3 degrees of freedom


def codecs(quick: bool) -> list[Codec]:
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    numel = 1 << (18 if quick else 27 if is_cuda else 22)
    source, out = torch.randn(numel, device=device), torch.zeros(numel, device=device)
    tails = source / torch.randn(3, numel, device=device).square().mean(0).sqrt()
    rows = []
    for encoding in (Bfloat16(), Int8(), Float8()):
        packed = torch.zeros(encoding.nbytes(numel), dtype=torch.uint8, device=device)

        def best(action: Callable[[], object]) -> float:
            times = []
            for _ in range(3 if quick else 15):
                times.append(_device_time(action) if is_cuda else _cpu_time(action))
            return 1e3 * min(times) / (source.nbytes / MIB)

        encode = best(lambda: encoding.encode(source, packed))  # noqa: B023
        decode = best(lambda: encoding.decode(packed, out, False))  # noqa: B023
        add = best(lambda: encoding.decode(packed, out, True))  # noqa: B023
        errors = [_error(encoding, elements, packed) for elements in (source, tails)]
        rows.append(Codec(encoding.name, encode, decode, add, best(lambda: out.copy_(source)), *errors))
    return rows


def _cpu_time(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return time.thread_time() - began


def _device_time(action: Callable[[], object]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    action()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3


def _error(encoding: WireFormat, elements: torch.Tensor, packed: torch.Tensor) -> float:
    out = torch.empty_like(elements)
    encoding.encode(elements, packed)
    encoding.decode(packed, out, False)
    return float((out - elements).norm() / elements.norm())


# ---- A step on a slow network


class Link:
    """What one rank sends, one after another. ``clock``: seconds; ``sleep``: lets them pass."""

    def __init__(self, bytes_per_second: float, is_wall: bool) -> None:
        self._rate, self._is_wall = bytes_per_second, is_wall
        self._free_at = self._slept = 0.0
        self.nbytes = 0

    def now(self) -> float:
        return time.perf_counter() if self._is_wall else time.thread_time() + self._slept

    def send(self, nbytes: int) -> float:
        """Return when it is through."""
        self.nbytes += nbytes
        self._free_at = max(self.now(), self._free_at) + (nbytes / self._rate if self._rate else 0)
        return self._free_at

    def wait_until(self, end: float) -> None:
        left = end - self.now()
        if left > 0 and self._is_wall:
            time.sleep(left)
        elif left > 0:
            self._slept += left


class Throttled(TransportWrapper):
    name = "throttled"

    def __init__(self, inner: Transport, link: Link) -> None:
        super().__init__(inner)
        self._link = link

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        return self._through(super().all_gather(whole, shard, label), shard.nbytes * (self.group.size() - 1))

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        work = super().reduce_scatter(shard, whole, is_average, label)
        return self._through(work, whole.nbytes // self.group.size() * (self.group.size() - 1))

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        work = super().all_reduce(tensor, is_average, label)
        return self._through(work, 2 * tensor.nbytes // self.group.size() * (self.group.size() - 1))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, *arguments: Any) -> Work:
        return self._through(super().all_to_all(received, sent, *arguments), sent.nbytes)

    def _through(self, work: Work, nbytes: int) -> Work:
        return _OnLink(work, self._link, self._link.send(nbytes))


class _OnLink:
    def __init__(self, work: Work, link: Link, end: float) -> None:
        self._work, self._link, self._end = work, link, end

    def wait(self) -> None:
        self._work.wait()
        self._link.wait_until(self._end)


@dataclass(frozen=True)
class Step:
    format: str = column("format")
    gbit: float = column("Gbit/s", "g")
    kib: float = column("KiB sent", ".0f")
    bytes_ratio: float = column("to fp32", ".4f")
    ms: float = column("CPU + link, ms", ".1f")
    ratio: float = column("to fp32 ", ".2f")
    wall_ms: float = column("wall, ms", ".1f")
    wall_ratio: float = column("to fp32  ", ".2f")


def step_worker(quick: bool, rates: Sequence[float], rounds: int, path: Path) -> None:
    rows = []
    for gbit in rates:
        times: dict[tuple[str, bool], list[float]] = {}
        sent: dict[str, float] = {}
        runs = {(name, wall): _stepping(quick, name, gbit, wall, sent) for name in FORMATS for wall in (False, True)}
        order, shuffled = [*runs], random.Random(0)
        for i in range(-2, rounds):
            shuffled.shuffle(order)
            for key in order:
                seconds = torch.tensor(runs[key](), dtype=torch.float64)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if i >= 0:
                    times.setdefault(key, []).append(1e3 * seconds.item())
        for name in FORMATS:
            own, wall = times[name, False], times[name, True]
            ratio, wall_ratio = (
                median([a / b for a, b in zip(some, times["fp32", is_wall], strict=True)])
                for some, is_wall in ((own, False), (wall, True))
            )
            kib = sent[name] / 1024
            rows.append(Step(name, gbit, kib, sent[name] / sent["fp32"], median(own), ratio, median(wall), wall_ratio))
    if dist.get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))


def _stepping(quick: bool, name: str, gbit: float, is_wall: bool, sent: dict[str, float]) -> Callable[[], float]:
    torch.manual_seed(0)
    model = Llama(64, 2, 128) if quick else Llama(256, 8, 512)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    link = Link(gbit * 1e9 / 8, is_wall)
    gathers, sums = FORMATS[name]
    set_transport(model, lambda transport, _: Wire(Throttled(transport, link), gathers, sums))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(128, (1, 32))

    def step() -> float:
        dist.barrier()
        link.nbytes = 0
        began = link.now()
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent[name] = link.nbytes
        return link.now() - began

    return step


# ---- A loss


@dataclass(frozen=True)
class Loss:
    seed: int = column("seed")
    format: str = column("format")
    training: float = column("training loss", ".5f")
    training_change: float = column("change, %", "+.4f")
    validation: float = column("validation loss", ".5f")
    validation_change: float = column("change, % ", "+.4f")


def loss_worker(quick: bool, seeds: Sequence[int], steps: int, names: Sequence[str], path: Path) -> None:
    example = _example()
    rows: list[Loss] = []
    for seed in seeds:
        found: dict[str, tuple[float, float]] = {}
        for name in names:
            training, validation = found[name] = _train(example, quick, seed, steps, name)
            changes = [100 * (a / b - 1) for a, b in zip(found[name], found[names[0]], strict=True)]
            rows.append(Loss(seed, name, training, changes[0], validation, changes[1]))
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
    if dist.get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))


def _train(example: Any, quick: bool, seed: int, steps: int, name: str) -> tuple[float, float]:
    with _arguments(["--seed", str(seed), "--steps", str(steps), *(["--dim", "64"] if quick else [])]):
        args = example.parse_args()
    args.data, args.val_batches = Path(sysconfig.get_paths()["stdlib"]), 16
    corpus, device = example.Corpus(args.data, args.max_bytes, args.seq_len), torch.device("cpu")
    model, _ = example.build_model(args, device)
    gathers, sums = FORMATS[name]
    set_transport(model, lambda transport, _: Wire(transport, gathers, sums))
    run, losses = example.Run(model, args), []
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(corpus.training) - args.seq_len, (args.batch,), generator=generator)
        batch = example.windows(corpus.training, example.my_slice(starts), args.seq_len, device)
        loss = example.loss_of(model, *batch)
        loss.backward()
        losses.append(loss.detach())
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
    last = example.mean_over_ranks(losses[-max(1, steps // 10) :])
    return last, example.validate(model, corpus, args, device)


def _example() -> Any:
    path = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _arguments:
    """Inside this context, the command line."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments

    def __enter__(self) -> None:
        self._before, sys.argv = sys.argv, [sys.argv[0], *self._arguments]
        os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))

    def __exit__(self, *_: object) -> None:
        sys.argv = self._before


# ---- The command


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--what", choices=("codec", "step", "loss"), nargs="*", default=None)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gbit", default="1,10,0", help="rates of the link; 0: none")
    parser.add_argument("--rounds", type=int, help="timed steps of each kind (default: 11; --quick: 1)")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, help="of ``loss`` (default: 500; --quick: 4)")
    parser.add_argument("--formats", default="fp32,int8 both,bf16 sums", help="of ``loss``; the first is compared with")
    options = parser.parse_args()
    for what in options.what or ("codec", "step", "loss"):
        rows = _rows(what, options)
        settings = {"what": what, "processes": options.processes, "load": os.getloadavg()[0]}
        result = report.Report(f"wire_{what}", settings, rows)
        print(f"\n{what}\n\n{result.table()}")
        plot = {"codec": "encode", "step": "ratio", "loss": "validation_change"}[what]
        result.write(options.out, report.bars("format", plot, by="format"))


def _rows(what: str, options: argparse.Namespace) -> list[Any]:
    quick = options.quick
    if what == "codec":
        torch.set_num_threads(1)
        return codecs(quick)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        if what == "step":
            rates = [float(item) for item in options.gbit.split(",")]
            rounds = options.rounds or (1 if quick else 11)
            run_on_ranks(options.processes, step_worker, quick, rates, rounds, path)
            return [Step(**row) for row in json.loads(path.read_text())]
        seeds, steps = [int(item) for item in options.seeds.split(",")], options.steps or (4 if quick else 500)
        run_on_ranks(options.processes, loss_worker, quick, seeds, steps, options.formats.split(","), path)
        return [Loss(**row) for row in json.loads(path.read_text())]


if __name__ == "__main__":
    main()

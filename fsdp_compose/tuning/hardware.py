"""What a machine can do: a device, and the networks between the ranks. Presets, and files in JSON.

Rates are what training gets out of a device, not what a data sheet promises. Those of a preset come from published
runs, see below. ``python -m fsdp_compose calibrate`` measures those of a machine."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .._arguments import checked
from ..errors import MisuseError, MisuseTypeError
from ..extension import CollectiveKind
from ..inspect import STEP, Operation


@checked()
@dataclass(frozen=True)
class Curve:
    """Seconds by size: linear between the given sizes; below the first one it takes as long as that, beyond the last
    one, time grows with the size.

    Attributes:
        nbytes: sizes, ascending.
        seconds: for each.
    """

    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, nbytes: float) -> float:
        sizes, seconds = self.nbytes, self.seconds
        i = bisect.bisect_left(sizes, nbytes)
        if i == 0:
            return seconds[0]
        if i == len(sizes):
            return seconds[-1] * nbytes / max(1.0, sizes[-1])
        share = (nbytes - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])


@checked()
@dataclass(frozen=True)
class Device:
    """What computes.

    Attributes:
        name, source: what it is, and where the figures come from.
        matmul: floating-point operations a second that matrix products reach, by dtype (``bfloat16``), or by dtype and
            layout of the two matrices: ``float32 nt``, where ``t`` stands for one stored by columns.
        matmul_bytes: bytes a second of a product's operands and results, in addition; 0: part of ``matmul``.
        attention: floating-point operations a second of attention, forward and backward.
        memory: bytes a second that element-wise operations read and write.
        kernel: seconds that an operation takes at least.
        host: seconds of the host for an operation.
        collective: seconds of the host for a collective.
        peak: floating-point operations a second of the data sheet, by dtype, for MFU.
        capacity: bytes of memory; 0: unknown.
        overlaps: collectives run while the device computes. Those of the CPU take the time of the core that computes.
        beside: how many times as long operations take while a collective runs.
        fused: the share of element-wise bytes that is left when blocks are compiled.
        eager: how many times as long the element-wise operations of eager blocks take as their bytes say.
        host_memory: bytes a second that an optimizer's step on the host reads and writes, of one rank.
        host_link: bytes a second between the memories of host and device, in one direction.
        curves: seconds of element-wise operations by bytes, where ``memory`` says too little.
        collectives: seconds of a core that a collective takes, by kind and bytes, if nothing ``overlaps``.
        error: the relative error to expect of the ratio of two predicted times of one model.
    """

    name: str
    source: str
    matmul: Mapping[str, float]
    attention: tuple[float, float]
    memory: float
    matmul_bytes: float = 0.0
    kernel: float = 4e-6
    host: float = 7e-6
    collective: float = 30e-6
    peak: Mapping[str, float] = field(default_factory=dict)
    capacity: int = 0
    overlaps: bool = True
    beside: float = 1.0
    fused: float = 0.4
    eager: float = 1.0
    host_memory: float = 20e9
    host_link: float = 20e9
    curves: Mapping[str, Curve] = field(default_factory=dict)
    collectives: Mapping[str, Curve] = field(default_factory=dict)
    error: float = 0.1

    def host_seconds(self, is_compiled: bool = False) -> float:
        """How long the host takes for an operation. In compiled blocks there are about a quarter as many."""
        return self.host / 4 if is_compiled else self.host

    def seconds(self, operation: Operation, is_compiled: bool = False) -> float:
        """How long an operation takes, without the host."""
        nbytes: float = operation.nbytes
        if operation.flops:
            if operation.is_attention:
                return max(self.kernel, operation.flops / self.attention[operation.is_backward])
            seconds = operation.flops / self._matmul_rate(operation)
            if self.matmul_bytes:
                return max(self.kernel, seconds + nbytes / self.matmul_bytes)
            return max(self.kernel, seconds, nbytes / self.memory)
        if operation.phase != STEP:
            nbytes *= self.fused if is_compiled else self.eager
        name = operation.name
        curve = self.curves.get(name) or self.curves.get(_LIKE.get(name, "add_" if name.endswith("_") else "add"))
        if curve is None:
            return max(self.kernel, nbytes / self.memory)
        num = 1 if self.overlaps else operation.num_tensors  # an accelerator takes a list at once
        return num * max(self.kernel, curve.at(nbytes / num))

    def reserved(self, peak: int, num_networks: int) -> dict[str, int]:
        """Return how many bytes must be free beside a step's ``peak``, by what takes them."""
        if not self.overlaps:
            return {"a tenth of the memory, which stays free": peak // 9}
        return {
            "rounding and segments of torch's allocator": int(_ALLOCATOR * peak),
            "workspaces of cuBLAS": _CUBLAS,
            "buffers of NCCL": _NCCL * num_networks,
        }

    def _matmul_rate(self, operation: Operation) -> float:
        dtype = str(operation.dtype).removeprefix("torch.")
        for key in (f"{dtype} {operation.layout}", dtype):
            if key in self.matmul:
                return self.matmul[key]
        if dtype not in ("float64", "float32", "float16", "bfloat16"):  # products of whole numbers, say
            return max(self.matmul.values())
        raise MisuseError(
            f"hardware {self.name}: it does not say how fast matrix products in {dtype} are, only in "
            f"{', '.join(self.matmul)}: give a file with matmul.{dtype}"
        )


# Torchtitan published 82.4, 77.0, 67.0 and 62.0 GiB reserved (its benchmarks/llama3_h100_202412_torchtitan.md) where
# 68.0, 68.0, 57.5 and 57.5 GiB are predicted to be allocated.
_ALLOCATOR = 0.15
_CUBLAS = 32 << 20  # torch's default on Hopper, CUBLAS_WORKSPACE_CONFIG; less elsewhere
_NCCL = 32 * 2 * (4 << 20)  # of a process group: up to 32 channels, two neighbors in a ring, NCCL_BUFFSIZE's default

# Element-wise operations that take as long as another one, which is measured.
_LIKE = {
    "addcmul_": "addcdiv_", "log_softmax_backward_data": "log_softmax", "softmax": "log_softmax",
    "softmax_backward_data": "log_softmax", "native_batch_norm": "native_layer_norm", "gelu_backward": "gelu",
    "silu": "gelu", "silu_backward": "gelu", "tanh": "gelu", "tanh_backward": "gelu", "sigmoid": "gelu", "exp": "gelu",
    "zeros": "copy_", "zero_": "copy_", "fill_": "copy_", "embedding": "copy_", "embedding_dense_backward": "copy_",
    "clone": "add", "cat": "add", "to_copy": "add",
}  # fmt: skip


@checked()
@dataclass(frozen=True)
class Level:
    """One level of a network.

    Attributes:
        ranks: how many ranks share a node of this level, for example 8; 0 for the outermost level: all.
        bandwidth: bytes a second of one rank, in one direction, that collectives reach; may be infinite. Between nodes
            all ranks of a node send at a time, so this is the node's bandwidth, divided by its ranks.
        latency: seconds of a message.
    """

    ranks: int
    bandwidth: float
    latency: float


@checked()
@dataclass(frozen=True)
class Network:
    """The networks that connect ranks, from the innermost.

    Attributes:
        levels: see ``Level``.
        start: seconds that any collective takes.
    """

    levels: tuple[Level, ...]
    start: float = 15e-6

    def __post_init__(self) -> None:
        sizes = [level.ranks for level in self.levels]
        grows = all(a > 0 and b > a and b % a == 0 for a, b in itertools.pairwise(sizes[:-1]))
        if not sizes or sizes[-1] or min(sizes[:-1], default=1) < 1 or not grows:
            raise MisuseError(
                f"network: expected levels whose ranks are multiples of those before, and 0 (all) for the last, got "
                f"{sizes}"
            )

    @property
    def is_free(self) -> bool:
        """Whether bytes take no time."""
        return all(math.isinf(level.bandwidth) for level in self.levels)

    def with_node(self, ranks: int | None, bandwidth: float | None = None) -> Network:
        """This network with other numbers of ranks in the innermost nodes, each with its own connection.

        Args:
            bandwidth: of such a node to others, all its connections together; ``None``: as it is.

        Raises:
            ValueError: there is one level only, so nothing is known of what connects nodes; or see ``Network``.
        """
        if len(self.levels) == 1:
            raise MisuseError(
                "node_size: the hardware has one level of network only, so it does not say what connects nodes: add "
                "another one of network.levels to its file, or measure with calibrate --node-bandwidth"
            )
        inner, outer, *more = self.levels
        ranks = ranks or inner.ranks
        outer = outer if bandwidth is None else replace(outer, bandwidth=bandwidth / ranks)
        return replace(self, levels=(replace(inner, ranks=ranks), outer, *more))

    def scaled(self, factor: float) -> Network:
        """This network with other bandwidths."""
        levels = [replace(level, bandwidth=level.bandwidth * factor) for level in self.levels]
        return replace(self, levels=(*levels,))

    def seconds(self, kind: str, nbytes: int, ranks: Sequence[int], sent: int | None = None) -> float:
        """How long a collective takes by rings (an all-reduce by trees, if their latency is less), when nothing else
        uses the connections but the collectives that other ranks of the node run at the same time.

        Args:
            kind, nbytes, ranks, sent: see ``Issue``.
        """
        num = len(ranks)
        if num < 2:
            return 0.0
        if sent is None:
            sent = int(nbytes * (num - 1) / num) * (2 if kind == CollectiveKind.ALL_REDUCE else 1)
        spans = [*self._levels_of(ranks)]
        ring = tree = 0.0
        for i, (level, _, nodes) in enumerate(spans):
            above = spans[i + 1][2] if i + 1 < len(spans) else 1
            ring += (nodes - above) * level.latency
            tree += math.log2(nodes / above) * level.latency
        if kind == CollectiveKind.ALL_TO_ALL:
            # Each level carries what leaves its nodes, and a rank uses its own connection.
            shares = [(num - inside) / (num - 1) / level.bandwidth for level, inside, _ in spans]
            return self.start + tree + sent * max(shares)
        # A ring enters and leaves a node once, and there are as many rings as ranks of the group in a node: so the
        # group uses the connections of all its ranks there. Rings run at the pace of the slowest level.
        slowest = min(level.bandwidth * inside for level, inside, _ in spans)
        return self.start + (min(2 * ring, 2 * tree) if kind == CollectiveKind.ALL_REDUCE else ring) + sent / slowest

    def _levels_of(self, ranks: Sequence[int]) -> Iterator[tuple[Level, int, int]]:
        """The levels that a collective of these ranks crosses, how many of them are in a node below each, and how many
        such nodes there are."""
        below = 1
        for level in self.levels:
            nodes = len({rank // below for rank in ranks})
            if nodes == 1:
                return
            above = len({rank // level.ranks for rank in ranks}) if level.ranks else 1
            if above < nodes:
                yield level, min(Counter(rank // below for rank in ranks).values()), nodes
            below = level.ranks or len(ranks)


@checked()
@dataclass(frozen=True)
class Hardware:
    """A device and the network between its ranks.

    Attributes:
        device, network: see there.
        calibrated: how it was measured, for people; empty for a preset.
    """

    device: Device
    network: Network
    calibrated: Mapping[str, Any] = field(default_factory=dict)

    def json(self) -> str:
        """The text of a file that ``read_hardware`` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"


@checked()
def read_hardware(path: str | os.PathLike[str]) -> Hardware:
    """Read a file that ``calibrate`` or a user wrote; docs/reference/tuning.md has the format.

    Raises:
        ValueError: it is no JSON, or something is missing, unknown or no positive number. It names the file and the
            entry.
        OSError: it can't be read.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise MisuseError(f"hardware {path}: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(found.get(name), dict) for name in ("device", "network")):
        raise MisuseError(f"hardware {path}: expected an object with the objects device and network")
    device, network = {"source": str(path), **found["device"]}, found["network"]
    for name in ("curves", "collectives"):
        curves = device.get(name, {})
        if not isinstance(curves, dict):
            raise MisuseError(f"hardware {path}: device.{name}: expected an object, got {curves!r}")
        device[name] = {key: _curve_of(path, f"device.{name}.{key}", item) for key, item in curves.items()}
    levels = network.get("levels")
    if not isinstance(levels, list) or not levels or not all(isinstance(level, dict) for level in levels):
        raise MisuseError(f"hardware {path}: network.levels: expected a list of objects, got {levels!r}")
    network = {**network, "levels": tuple(_record(path, "network.levels", Level, item) for item in levels)}
    return Hardware(
        _record(path, "device", Device, device), _record(path, "network", Network, network), found.get("calibrated", {})
    )


def _curve_of(path: Any, where: str, item: Any) -> Curve:
    curve = _record(path, where, Curve, item if isinstance(item, dict) else {})
    sizes, seconds = curve.nbytes, curve.seconds
    if not len(sizes) == len(seconds) > 0 or [*sizes] != sorted({*sizes}):
        raise MisuseError(f"hardware {path}: {where}: expected nbytes, ascending, and as many seconds, got {item!r}")
    return curve


def _record(path: Any, where: str, made: type[Any], values: Mapping[str, Any]) -> Any:
    known = [item.name for item in fields(made)]
    unknown = [name for name in values if name not in known]
    required = (item.name for item in fields(made) if item.default is MISSING and item.default_factory is MISSING)
    missing = [name for name in required if name not in values]
    if unknown or missing:
        what = f"unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}" if unknown else ""
        raise MisuseError(f"hardware {path}: {where}: {what or 'missing ' + ', '.join(missing)}")
    for name, value in values.items():
        least = min(_numbers(path, f"{where}.{name}", value), default=1.0)
        if not least >= 0 or (name in _POSITIVE and least == 0):
            raise MisuseError(f"hardware {path}: {where}.{name}: expected positive numbers, got {value!r}")
    try:
        return made(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except MisuseTypeError as error:
        raise MisuseError(f"hardware {path}: {where}: {error}") from None


_POSITIVE = {"matmul", "attention", "memory", "bandwidth", "host_memory", "host_link", "fused", "eager", "beside"}
_LISTS = {"attention": 2, "matmul": 0, "peak": 0, "nbytes": 0, "seconds": 0}  # of numbers; how many, if that is given


def _numbers(path: Any, where: str, value: Any) -> list[float]:
    """The numbers of an entry, of which lists and objects may have several."""
    name = where.rpartition(".")[2]
    if isinstance(value, (str, bool)) or name in ("curves", "collectives", "levels"):
        return []
    several = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    is_right = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in several)
    is_list = isinstance(value, (list, dict))
    if not is_right or is_list != (name in _LISTS) or _LISTS.get(name) not in (None, 0, len(several)):
        what = f"{_LISTS[name] or ''} numbers".strip() if name in _LISTS else "a number"
        raise MisuseError(f"hardware {path}: {where}: expected {what}, got {value!r}")
    return several


# ---- Presets: the data sheet's figures, and which part of them training reaches.
#
# Attention is that of FlashAttention-2 (https://arxiv.org/abs/2307.08691, figures 4 and 5), in proportion to the peak
# where it has none. Each rank has a network card of its own, as in the makers' servers of 8.
# Latencies of rings are NCCL's own (its src/graph/tuning.cc: a hop of a NVLink ring takes 3.4 us, one over the network
# 9.6). Links and memory reach 0.75 and 0.8 of their sheets.
#
# Four numbers were chosen from published runs, the half "used" of benchmarks/published_runs.csv: the part of the peak
# that products reach, how much longer element-wise work of eager blocks takes, and how much longer anything takes
# beside a collective. The other half judges them: COMPARED, which benchmarks/tuning.py --what published prints.

BUSY = 1.2  # wall time by CPU time of what was measured, above which something else used the cores
SOFTWARE = ("2024", "2026")
"""Generations of training software: runs that were published in 2023 and 2024, and those of 2026."""
COMPARED = "of 36 published runs that chose none of its rates, half are predicted within 3 %, three quarters within 7 %"
_EAGER = {"2024": 2.0, "2026": 1.0}  # fms-fsdp gained 1.23 and 1.28 by compiling, this package's Llama of 2026 1.03
_BESIDE = 1.25

# By data sheets: TFLOP/s in half precisions and in fp32 without reduced products; GB/s of memory, GB; GB/s of links and
# of the network card; TFLOP/s of attention, forward and backward. Then the part of the peak that products reach, by
# software; how many times as long operations take beside a collective; and whether published runs were compared.
_SHEETS: Mapping[str, tuple[Any, ...]] = {
    "a100": (
        "A100 SXM 80 GB", "NVIDIA's data sheet of the A100 80GB; DGX A100: 8 cards of 200 Gb/s",
        312, 19.5, 2039, 80, 300, 25, (190, 170), (0.8, 0.8), _BESIDE, True,
    ),
    "h100": (
        "H100 SXM 80 GB", "NVIDIA's data sheet of the H100; DGX H100: 8 cards of 400 Gb/s",
        989, 67, 3350, 80, 450, 50, (350, 280), (0.66, 0.75), _BESIDE, True,
    ),
    "h200": (
        "H200 SXM 141 GB", "NVIDIA's data sheet of the H200; DGX H200: 8 cards of 400 Gb/s",
        989, 67, 4800, 141, 450, 50, (350, 280), (0.66, 0.75), _BESIDE, True,
    ),
    "b200": (
        "B200 SXM 180 GB", "NVIDIA's data sheet of the HGX B200 (1,000 W); DGX B200: 8 cards of 400 Gb/s",
        2250, 80, 8000, 180, 900, 50, (800, 640), (0.7, 0.7), _BESIDE, False,
    ),
    "mi300x": (
        "MI300X 192 GB", "AMD's data sheet of the MI300X: 7 links of 64 GB/s; 8 cards of 400 Gb/s",
        1307, 163, 5300, 192, 448, 50, (350, 280), (0.5, 0.5),
        1.41, False,  # RCCL's all-gathers, by github.com/ROCm/mori pull request 200
    ),
}  # fmt: skip


def _preset(key: str, software: str) -> Hardware:
    name, source, half, single, memory, capacity, link, card, attention, products, beside, is_compared = _SHEETS[key]
    peaks = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
    reached = products[SOFTWARE.index(software)]
    device = Device(
        name,
        f"{source}; {f'software of {software}: {COMPARED}' if is_compared else 'no run was compared with it'}",
        matmul={dtype: reached * rate for dtype, rate in peaks.items()},
        attention=(attention[0] * 1e12, attention[1] * 1e12),
        memory=0.8 * memory * 1e9,
        matmul_bytes=0.8 * memory * 1e9,
        peak=peaks,
        capacity=int(capacity * 1e9),
        beside=beside,
        eager=_EAGER[software],
    )
    return Hardware(device, Network((Level(8, 0.75 * link * 1e9, 3.4e-6), Level(0, 0.75 * card * 1e9, 9.6e-6))))


PRESETS: Mapping[str, Hardware] = {key: _preset(key, SOFTWARE[-1]) for key in _SHEETS}


@checked()
def hardware_of(text: str, software: str | None = None) -> Hardware:
    """A preset by its name, or the file at this path.

    Args:
        software: of a preset, the generation of the training software, one of ``SOFTWARE``. Default: the newest.

    Raises:
        ValueError: there is neither; or see ``read_hardware``.
    """
    if software is not None and software not in SOFTWARE:
        raise MisuseError(f"--software {software}: expected {' or '.join(SOFTWARE)}")
    if text.lower() in _SHEETS:
        return _preset(text.lower(), software or SOFTWARE[-1])
    if not Path(text).is_file():
        raise MisuseError(f"--hardware {text}: expected {', '.join(PRESETS)}, or a file that calibrate has written")
    if software is not None:
        raise MisuseError(f"--software {software}: {text} was measured, so it is for presets only")
    return read_hardware(text)

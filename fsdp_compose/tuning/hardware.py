"""What a machine can do: a device, and the networks between the ranks. Presets, and files in TOML.

Rates are what training gets out of a device, not what a data sheet promises: of a preset they are guesses, so its times
are only good for comparisons. ``python -m fsdp_compose calibrate`` measures those of a machine."""

from __future__ import annotations

import bisect
import datetime
import importlib
import itertools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .._arguments import checked
from ..comm import ALL_REDUCE, ALL_TO_ALL
from ..errors import MisuseError
from ..inspect import Operation

tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


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
        part = (nbytes - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + part * (seconds[i] - seconds[i - 1])


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
        host_memory: bytes a second that an optimizer's step on the host reads and writes, of one rank.
        host_link: bytes a second between the memories of host and device, in one direction.
        fresh: seconds for a byte of new memory, in pieces of at least ``fresh_from`` bytes: page faults of a CPU.
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
    host_memory: float = 20e9
    host_link: float = 20e9
    fresh: float = 0.0
    fresh_from: int = 32 << 20
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
                return max(self.kernel, operation.flops / self.attention[operation.name.endswith("backward")])
            seconds = operation.flops / self._matmul_rate(operation)
            if self.matmul_bytes:
                return max(self.kernel, seconds + nbytes / self.matmul_bytes)
            return max(self.kernel, seconds, nbytes / self.memory)
        nbytes *= self.fused if is_compiled else 1.0
        curve = self._curve(operation.name)
        if curve is None:
            return max(self.kernel, nbytes / self.memory)
        num = 1 if self.overlaps else operation.num_tensors  # an accelerator takes a list at once
        return num * max(self.kernel, curve.at(nbytes / num))

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

    def _curve(self, name: str) -> Curve | None:
        if not self.curves:
            return None
        return self.curves.get(name) or self.curves.get(_LIKE.get(name, "add_" if name.endswith("_") else "add"))


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

    def with_node(self, ranks: int) -> Network:
        """This network with other numbers of ranks in the innermost nodes, each with its own connection.

        Raises:
            ValueError: there is one level only, so nothing is known of what connects nodes; or see ``Network``.
        """
        if len(self.levels) == 1:
            raise MisuseError(
                "node_size: the hardware has one level of network only, so it does not say what connects nodes: add a "
                "[[network.level]] to its file, or measure with calibrate --node-bandwidth"
            )
        return replace(self, levels=(replace(self.levels[0], ranks=ranks), *self.levels[1:]))

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
            sent = int(nbytes * (num - 1) / num) * (2 if kind == ALL_REDUCE else 1)
        spans = [*self._levels_of(ranks)]
        ring = tree = 0.0
        for i, (level, _, nodes) in enumerate(spans):
            above = spans[i + 1][2] if i + 1 < len(spans) else 1
            ring += (nodes - above) * level.latency
            tree += math.log2(nodes / above) * level.latency
        if kind == ALL_TO_ALL:  # each level carries what leaves its nodes, and a rank uses its own connection
            shares = [(num - inside) / (num - 1) / level.bandwidth for level, inside, _ in spans]
            return self.start + tree + sent * max(shares)
        # A ring enters and leaves a node once, and there are as many rings as ranks of the group in a node: so the group
        # uses the connections of all its ranks there. Rings run at the pace of the slowest level.
        slowest = min(level.bandwidth * inside for level, inside, _ in spans)
        return self.start + (min(2 * ring, 2 * tree) if kind == ALL_REDUCE else ring) + sent / slowest

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

    def toml(self) -> str:
        """The text of a file that ``read_hardware`` reads."""
        device = {name: value for name, value in _plain(self.device).items() if value not in ({}, None)}
        lines = [*_table("device", device)]
        lines += ["", "[network]", f"start = {self.network.start!r}"]
        for level in self.network.levels:
            lines += ["", "[[network.level]]", *(f"{name} = {value!r}" for name, value in _plain(level).items())]
        if self.calibrated:
            lines += ["", *_table("calibrated", dict(self.calibrated))]
        return "\n".join(lines) + "\n"


def _plain(record: Any) -> dict[str, Any]:
    return {item.name: getattr(record, item.name) for item in fields(record)}


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{name}]"
    yield from (f"{_key(key)} = {_value(value)}" for key, value in values.items() if not isinstance(value, Mapping))
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield ""
            yield f"[{name}.{_key(key)}]"
            yield from (f"{_key(inner)} = {_value(given)}" for inner, given in value.items())


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, Curve):
        return f"{{ nbytes = {_value(value.nbytes)}, seconds = {_value(value.seconds)} }}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, (bool, str)):
        return json.dumps(value)  # TOML's are JSON's
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return repr(value)


@checked()
def read_hardware(path: str | os.PathLike[str]) -> Hardware:
    """Read a file that ``calibrate`` or a user wrote; docs/reference/tuning.md has the format.

    Raises:
        ValueError: it is no TOML, or something is missing, unknown or no positive number. It names the file and the
            entry.
        OSError: it can't be read.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise MisuseError(f"hardware {path}: {error}") from None
    device, network = found.get("device"), found.get("network")
    if not isinstance(device, dict) or not isinstance(network, dict):
        raise MisuseError(f"hardware {path}: expected the tables [device] and [network], found {', '.join(found)}")
    levels = network.pop("level", [])
    if not isinstance(levels, list) or not all(isinstance(level, dict) for level in levels) or not levels:
        raise MisuseError(f"hardware {path}: expected [[network.level]], with two brackets, at least once")
    device = {"source": str(path), **device}
    for name in ("curves", "collectives"):
        given = device.get(name, {})
        if not isinstance(given, dict):
            raise MisuseError(f"hardware {path}: device.{name}: expected a table, got {given!r}")
        device[name] = {key: _curve_of(path, f"{name}.{key}", item) for key, item in given.items()}
    if isinstance(device.get("attention"), list):
        device["attention"] = tuple(device["attention"])
    network = {**network, "levels": tuple(_record(path, "network.level", Level, item) for item in levels)}
    return Hardware(
        _record(path, "device", Device, device),
        _record(path, "network", Network, network),
        found.get("calibrated", {}),
    )


def _curve_of(path: Any, where: str, item: Any) -> Curve:
    if isinstance(item, dict):
        item = {name: tuple(values) if isinstance(values, list) else values for name, values in item.items()}
        if all(isinstance(values, tuple) for values in item.values()):
            curve: Curve = _record(path, where, Curve, item)
            if len(curve.nbytes) == len(curve.seconds) > 0 and _are_ascending(curve):
                return curve
    raise MisuseError(f"hardware {path}: {where}: expected nbytes, ascending, and as many seconds, got {item!r}")


def _are_ascending(curve: Curve) -> bool:
    are_numbers = all(map(_is_number, (*curve.nbytes, *curve.seconds)))
    return are_numbers and [*curve.nbytes] == sorted({*curve.nbytes})


def _record(path: Any, where: str, made: type[Any], values: Any) -> Any:
    known = {item.name for item in fields(made)}
    unknown = [name for name in values if name not in known]
    missing = [item.name for item in fields(made) if item.name not in values and _is_required(item)]
    if unknown or missing:
        what = f"unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}" if unknown else ""
        raise MisuseError(f"hardware {path}: {where}: {what or 'missing ' + ', '.join(missing)}")
    for name, value in values.items():
        if not _fits(name, value):
            raise MisuseError(
                f"hardware {path}: {where}.{name}: expected {_KINDS.get(name, 'a number')}, got {value!r}"
            )
        wrong = [number for number in _numbers(value) if not number >= 0]  # NaN too
        if wrong or (name in _POSITIVE and not all(number > 0 for number in _numbers(value))):
            raise MisuseError(f"hardware {path}: {where}.{name}: expected positive numbers, got {value!r}")
    return made(**values)


_KINDS = {
    "name": "a text", "source": "a text", "overlaps": "true or false", "attention": "two numbers",
    "matmul": "a table of numbers", "peak": "a table of numbers",
}  # fmt: skip
_BUILT = {"curves", "collectives", "levels", "nbytes", "seconds"}  # checked where they are made


def _fits(name: str, value: Any) -> bool:
    kind = _KINDS.get(name)
    if name in _BUILT:
        return True
    if kind == "a text":
        return isinstance(value, str)
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "two numbers":
        return isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))
    if kind == "a table of numbers":
        return isinstance(value, dict) and all(map(_is_number, value.values()))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_POSITIVE = {"matmul", "attention", "memory", "bandwidth", "host_memory", "host_link", "fused"}


def _is_required(item: Any) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)):
        yield float(value)


# ---- Presets. Products reach 0.7 of the data sheet's rate (A100: 0.8), memory 0.8, links 0.75; attention is that of
# FlashAttention-2 (https://arxiv.org/abs/2307.08691, figures 4 and 5: causal, forward and backward), in proportion to
# the peak where it has none. Each rank has a network card of its own, as in the makers' servers of 8.


def _preset(
    name: str,
    source: str,
    *,
    peak: float,
    single: float,
    memory: float,
    capacity: float,
    link: float,
    card: float,
    attention: tuple[float, float],
    efficiency: float = 0.7,
) -> Hardware:
    """
    Args:
        peak, single: TFLOP/s in half precisions, and in fp32 without reduced products.
        memory, link, card: GB/s.
        capacity: GB.
        attention: TFLOP/s, forward and backward.
    """
    peaks = {"bfloat16": peak * 1e12, "float16": peak * 1e12, "float32": single * 1e12}
    device = Device(
        name,
        source,
        matmul={dtype: efficiency * rate for dtype, rate in peaks.items()},
        attention=(attention[0] * 1e12, attention[1] * 1e12),
        memory=0.8 * memory * 1e9,
        peak=peaks,
        capacity=int(capacity * 1e9),
    )
    levels = (Level(8, 0.75 * link * 1e9, 1e-6), Level(0, 0.75 * card * 1e9, 5e-6))
    return Hardware(device, Network(levels))


PRESETS: Mapping[str, Hardware] = {
    "a100": _preset(
        "A100 SXM 80 GB", "NVIDIA's data sheet of the A100 80GB; DGX A100: 8 cards of 200 Gb/s",
        peak=312, single=19.5, memory=2039, capacity=80, link=300, card=25, attention=(190, 170), efficiency=0.8,
    ),
    "h100": _preset(
        "H100 SXM 80 GB", "NVIDIA's data sheet of the H100; DGX H100: 8 cards of 400 Gb/s",
        peak=989, single=67, memory=3350, capacity=80, link=450, card=50, attention=(350, 280),
    ),
    "h200": _preset(
        "H200 SXM 141 GB", "NVIDIA's data sheet of the H200; DGX H200: 8 cards of 400 Gb/s",
        peak=989, single=67, memory=4800, capacity=141, link=450, card=50, attention=(350, 280),
    ),
    "b200": _preset(
        "B200 SXM 180 GB", "NVIDIA's data sheet of the HGX B200 (1,000 W); DGX B200: 8 cards of 400 Gb/s",
        peak=2250, single=80, memory=8000, capacity=180, link=900, card=50, attention=(800, 640),
    ),
    "mi300x": _preset(
        "MI300X 192 GB", "AMD's data sheet of the MI300X: 7 links of 64 GB/s to a rank; 8 cards of 400 Gb/s",
        peak=1307, single=163, memory=5300, capacity=192, link=448, card=50, attention=(350, 280), efficiency=0.5,
    ),
}  # fmt: skip


@checked()
def hardware_of(text: str) -> Hardware:
    """A preset by its name, or the file at this path.

    Raises:
        ValueError: there is neither; or see ``read_hardware``.
    """
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    if not Path(text).is_file():
        raise MisuseError(f"--hardware {text}: expected {', '.join(PRESETS)}, or a file that calibrate has written")
    return read_hardware(text)

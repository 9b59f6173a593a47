"""The result of ``tune()``: plain data, formatted as text, JSON or a picture."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import MisuseError
from ..inspect import Operation, Report, Section, StepEvent, as_text, bytes_of, save_figure
from .hardware import BUSY, Hardware
from .schedule import COMPUTE, Schedule, schedule
from .setting import Setting

_MOST_SHOWN, _MOST_NAMED = 5, 3
_OF_MEMORY = 0.01  # of all memory, in which peaks that differ less count as equal


@dataclass(frozen=True)
class Result:
    """A setting that fits, and what it takes.

    Attributes:
        setting: see ``Setting``.
        peak: bytes of a rank's device.
        reserved: bytes that must be free beside them, by what takes them.
        times: see ``Schedule``.
        on_half: seconds of the step if the network had half of its bandwidth.
        events: what a step with one micro-batch does; not in JSON.
        code: a function ``shard(model)`` to paste.
    """

    setting: Setting
    peak: int
    reserved: Mapping[str, int]
    times: Schedule
    on_half: float
    events: tuple[StepEvent, ...] = field(default=(), repr=False)
    code: str = field(default="", repr=False)

    @property
    def needed(self) -> int:
        """Bytes of memory that it needs."""
        return self.peak + sum(self.reserved.values())

    @property
    def sequences(self) -> int:
        """Sequences of a step of a rank; 1 if it is not known how many there are."""
        return max(1, self.setting.batch * self.setting.num_batches)

    @property
    def per_sequence(self) -> float:
        """How many seconds of the step one sequence takes."""
        return self.times.seconds / self.sequences


@dataclass(frozen=True)
class Rejected:
    """A setting that is left out.

    Attributes:
        setting: see ``Setting``.
        why: what takes too much memory, or the error with which the step ended.
    """

    setting: Setting
    why: str


@dataclass(frozen=True)
class Tuning:
    """What ``tune()`` found. Print it, or read the figures.

    Attributes:
        model: the model's class.
        world_size, node_size: numbers of ranks, in all and in a node.
        max_memory: bytes of a rank.
        hardware: what the times are predicted for.
        is_compiled: blocks are compiled.
        num_groups: of the default setting.
        results: settings that fit: first those that are as fast as the fastest, as far as predictions can tell, those
            that take less memory before others, and of these those that suffer less from a slower network; then others,
            the fastest first. Of several batches, by the time of a sequence.
        default: ``fully_shard`` on each block and on the model, whether it fits or not.
        rejected: settings that are left out, with reasons.
        num_runs: how many steps were run dry.
        measured: the seconds of the default's step, if they were given.
        factor: by which all times were multiplied for that.
    """

    model: str
    world_size: int
    node_size: int
    max_memory: int
    hardware: Hardware
    is_compiled: bool
    num_groups: int
    results: tuple[Result, ...]
    default: Result
    rejected: tuple[Rejected, ...]
    num_runs: int
    measured: float | None = None
    factor: float = 1.0

    @property
    def best(self) -> Result | None:
        """The setting to take, if one fits."""
        return self.results[0] if self.results else None

    @property
    def tied(self) -> tuple[Result, ...]:
        """The results that the predictions can't tell from the best one: the hardware's ``error`` is larger than what
        they differ by."""
        return self.results[1 : num_tied(self.results, self.hardware)]

    @property
    def default_fits(self) -> bool:
        """Whether the default is among the results."""
        return any(result.setting == self.default.setting for result in self.results)

    def text(self) -> str:
        """Format the best settings as a table, with what would change the choice, and the code of the first."""
        return as_text(_report_of(self))

    __str__ = text

    def json(self) -> str:
        """Return everything as JSON, for programs."""
        names = ("model", "world_size", "node_size", "max_memory", "is_compiled", "num_groups", "measured")
        found = {
            "hardware": self.hardware.device.name,
            "results": [_plain(result) for result in self.results],
            "tied": len(self.tied),
            "default": {**_plain(self.default), "fits": self.default_fits},
            "rejected": [{**asdict(item.setting), "why": item.why} for item in self.rejected],
            "code": self.best.code if self.best is not None else None,
        }
        return json.dumps({name: getattr(self, name) for name in names} | found, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw memory against time of all settings, and what the best one does when, into a ``.png``, ``.svg`` or
        ``.pdf`` file.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the name has another suffix, or there is no such folder; or nothing fits.
        """
        path, best = Path(path), self.best
        if best is None:
            raise MisuseError(f"{path}: nothing fits, so there is nothing to draw")

        def draw(figure: Any) -> None:
            upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
            _draw_settings(upper, self, best)
            options = {"is_compiled": self.is_compiled, "keeps_spans": True}
            _draw_schedule(lower, predict(best.setting, best.events, self.hardware, factor=self.factor, **options))

        save_figure(path, (11.0, 7.0), draw)


def predict(
    setting: Setting, events: Sequence[StepEvent], hardware: Hardware, *, factor: float = 1.0, **options: Any
) -> Schedule:
    """Predict a setting's times; ``options`` are those of ``schedule``."""
    batches, is_offloaded = setting.num_batches, setting.is_offloaded
    machine = hardware.device, hardware.network
    times = schedule(events, *machine, num_batches=batches, is_offloaded=is_offloaded, **options)
    return times if factor == 1.0 else times.stretched(factor)


def num_tied(results: Sequence[Result], hardware: Hardware) -> int:
    """How many of the first results are as fast as the fastest, as far as predictions can tell."""
    least = min((result.per_sequence for result in results), default=0.0) * (1 + hardware.device.error)
    return sum(result.per_sequence <= least for result in results)


def in_order(ranked: Sequence[Result], hardware: Hardware, memory: int) -> list[Result]:
    """Results, the fastest first, in the order of ``Tuning``."""
    num = num_tied(ranked, hardware)
    tied = sorted(ranked[:num], key=lambda one: (round(one.peak / memory / _OF_MEMORY), one.on_half / one.sequences))
    return [*tied, *ranked[num:]]


def _plain(result: Result) -> dict[str, Any]:
    times = asdict(result.times)
    del times["spans"]
    return {
        "setting": asdict(result.setting), "peak": result.peak, "needed": result.needed, "times": times,
        "on_half": result.on_half,
    }  # fmt: skip


# ---- The report


def _report_of(tuning: Tuning) -> Report:
    device, best = tuning.hardware.device, tuning.best
    groups = f"{tuning.num_groups} groups (--wrap chooses others)" if tuning.num_groups > 1 else (
        "ONE GROUP: no list of blocks was found, name their classes with --wrap"
    )  # fmt: skip
    heading = [
        f"{tuning.model} on {tuning.world_size:,} x {device.name}, {tuning.node_size} in a node, "
        f"{bytes_of(tuning.max_memory)} each; {groups}; {len(tuning.results)} settings fit, {len(tuning.rejected)} are "
        f"left out ({tuning.num_runs} dry runs)"
    ]
    rows = [*_alike(tuning)][:_MOST_SHOWN]
    default = "default" if tuning.default_fits else "default (does not fit)"
    named = [(str(number), row) for number, row in enumerate(rows, 1)] + [(default, (tuning.default,))]
    unit, name = _unit_of([row[0].times.seconds for _, row in named])
    columns = ("", "setting", "micro-batches", f"step, {name}", f"exposed, {name}", "sequences/s", "peak, GiB", "MFU")
    cells = [_row(number, row, unit) for number, row in named]
    sections = [Section("fastest first, predicted", columns, cells, right=columns[2:])]
    sections.append(Section("how sure", items=[*_notes(tuning, rows)]))
    if best is not None:
        shares = {"what the step allocates": best.peak, **best.reserved}
        items = [f"{what}: {bytes_of(nbytes)}" for what, nbytes in shares.items()]
        sections.append(Section("memory of the first", items=[*items, f"of {bytes_of(tuning.max_memory)}"]))
    unknown = [*_operators_without_formula(tuning)]
    if unknown:
        sections.append(Section("operators without a formula of their operations", items=unknown))
    if tuning.rejected:
        sections.append(Section("left out", items=[*_rejections(tuning.rejected)]))
    sections.append(Section("assumed", items=[*_assumptions(tuning)]))
    if best is not None:
        sections.append(Section("code of the first", items=best.code.split("\n")))
    return Report(tuning.model, heading, sections)


def _alike(tuning: Tuning) -> Iterator[tuple[Result, ...]]:
    """The results; tied ones that take as much memory together."""
    num = num_tied(tuning.results, tuning.hardware)
    peaks: dict[int, list[Result]] = {}
    for result in tuning.results[:num]:
        peaks.setdefault(round(result.peak / tuning.max_memory / _OF_MEMORY), []).append(result)
    yield from map(tuple, peaks.values())
    yield from ((result,) for result in tuning.results[num:])


def _row(number: str, row: Sequence[Result], unit: float) -> list[str]:
    result = row[0]
    times, setting = result.times, result.setting
    batches = f"{setting.num_batches} of {setting.batch}" if setting.batch else f"{setting.num_batches}"
    rate = f"{1 / result.per_sequence:,.2f}" if setting.batch else "-"
    mfu = f"{times.mfu:.0%}" if times.mfu else "-"
    seconds = [f"{times.seconds / unit:,.2f}", f"{times.exposed / unit:,.2f}"]
    name = str(setting) if len(row) == 1 else f"{setting}; or {len(row) - 1} more"
    return [number, name, batches, *seconds, rate, f"{result.peak / (1 << 30):,.2f}", mfu]


def _unit_of(seconds: Sequence[float]) -> tuple[float, str]:
    longest = max(seconds)
    return (1.0, "s") if longest >= 2 else (1e-3, "ms") if longest >= 2e-3 else (1e-6, "us")


def _seconds(seconds: float) -> str:
    unit, name = _unit_of([seconds])
    return f"{seconds / unit:.3g} {name}"


def _notes(tuning: Tuning, rows: Sequence[Sequence[Result]]) -> Iterator[str]:
    error, best = tuning.hardware.device.error, tuning.best
    if best is None:
        yield "nothing fits: more ranks, a smaller batch, more memory, or offloading of activations may help"
        return
    if tuning.tied:
        yield (
            f"{len(tuning.tied) + 1} settings are tied: they differ by less than the error of predictions "
            f"({error:.0%}), so the one that takes least memory is first; measure them"
        )
    for number, row in enumerate(rows, 1):
        if len(row) > 1:
            named = ", or ".join(str(one.setting) for one in row[:_MOST_NAMED])
            more = f" and {len(row) - _MOST_NAMED} more" if len(row) > _MOST_NAMED else ""
            first, slowest = row[0].on_half, max(row, key=lambda one: one.on_half)
            told = "only measuring tells them apart"
            if slowest.on_half > (1 + error) * first:
                times = f"{_seconds(first)} against {_seconds(slowest.on_half)} for {slowest.setting}"
                told = f"half of the network's bandwidth would tell them apart ({times})"
            yield f"{number}: {named}{more}: {told}"
    other = min(tuning.results, key=lambda one: one.on_half / one.sequences)
    gains = best.on_half / best.sequences > (1 + error) * other.on_half / other.sequences
    yield f"with half of the network's bandwidth: {other.setting if gains else 'the same'}, " + _seconds(
        (other if gains else best).on_half
    )


def _operators_without_formula(tuning: Tuning) -> Iterator[str]:
    device, events = tuning.hardware.device, (tuning.best or tuning.default).events
    found: dict[str, list[Operation]] = {}
    for event in events:
        if isinstance(event, Operation) and event.hidden:
            found.setdefault(event.name, []).append(event)
    for name, those in found.items():
        counted = sum(device.seconds(one) for one in those)
        hidden = sum(device.seconds(replace(one, flops=one.hidden)) for one in those)
        yield (
            f"{name}, {len(those)} times: counted by its bytes, {_seconds(counted)}; by its sizes it may take up to "
            f"{_seconds(hidden)}. Give its formula to torch.utils.flop_counter.register_flop_formula"
        )


def _rejections(rejected: Sequence[Rejected]) -> Iterator[str]:
    for item in rejected[:_MOST_SHOWN]:
        batch = f", {item.setting.num_batches} of {item.setting.batch}" if item.setting.batch else ""
        yield f"{item.setting}{batch}: {item.why}"
    if len(rejected) > _MOST_SHOWN:
        yield f"and {len(rejected) - _MOST_SHOWN} more"


def _assumptions(tuning: Tuning) -> Iterator[str]:
    device, network = tuning.hardware.device, tuning.hardware.network
    measured = tuning.hardware.calibrated
    how = "measured by calibrate" if measured else "a preset"
    if measured.get("clock") == "wall" and measured.get("busy", 0.0) > BUSY:
        how += (
            f" while the machine was busy, so these times are worth nothing ({measured['busy']:g} times its CPU time)"
        )
    yield f"{device.name}: {how} ({device.source})"
    if tuning.measured is not None:
        took = _seconds(tuning.measured)
        yield f"times are {tuning.factor:.2f} x those predicted: the default's step takes {took}, as measured"
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in device.matmul.items())
    yield f"products in TFLOP/s: {rates}; memory {device.memory / 1e9:,.0f} GB/s"
    levels = "; ".join(f"{level.ranks or 'all'} ranks {level.bandwidth / 1e9:.3g}" for level in network.levels)
    yield f"network in GB/s of each rank: {levels}"
    blocks = "compiled blocks" if tuning.is_compiled else "eager blocks"
    yield f"{blocks}; nothing else uses the network; data come in time"


# ---- The picture: memory against time of all settings, and the first one's schedule


def _draw_settings(axes: Any, tuning: Tuning, best: Result) -> None:
    gib = 1 << 30
    front: list[Result] = []  # for which no faster one takes less memory
    for result in sorted(tuning.results, key=lambda one: (one.per_sequence, one.peak)):
        if not front or result.peak < front[-1].peak:
            front.append(result)
    others = [result for result in tuning.results if result not in front]
    peaks = [result.peak / gib for result in (*tuning.results, tuning.default)]
    axes.scatter([one.per_sequence for one in others], [one.peak / gib for one in others], s=18, color="#bab0ac")
    axes.plot(
        [one.per_sequence for one in front], [one.peak / gib for one in front], "o-", color="#4c78a8",
        label="nothing is faster and smaller",
    )  # fmt: skip
    axes.plot(tuning.default.per_sequence, tuning.default.peak / gib, "D", color="#f58518", label="default")
    memory = tuning.max_memory / gib
    if memory < 1.5 * max(peaks):
        axes.axhline(memory, color="#e45756", linestyle=":", label="memory")
    else:  # a line so far above would press all points together
        axes.plot([], [], " ", label=f"memory: {memory:,.1f} GiB, far above")
    for number, result in enumerate(front[:_MOST_SHOWN], 1):  # settings are too long for labels that may not overlap
        axes.annotate(str(number), (result.per_sequence, result.peak / gib), xytext=(4, 4), textcoords="offset points")
        axes.plot([], [], " ", label=f"{number}: {result.setting}")
    axes.set_xlabel("seconds for a sequence, predicted" if best.setting.batch else "seconds of a step, predicted")
    axes.set_ylabel("GiB of one rank at the peak")
    axes.margins(0.15)
    axes.set_title(f"{tuning.model}, {tuning.world_size:,} x {tuning.hardware.device.name}: {best.setting}", loc="left")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_schedule(axes: Any, times: Schedule) -> None:
    lanes = [*Counter(span.lane for span in times.spans)]
    for place, lane in enumerate(lanes):
        spans = [(span.start, span.end - span.start) for span in times.spans if span.lane == lane]
        spans = _joined(spans, times.seconds / 4_000)  # more would hide each other
        axes.broken_barh(spans, (place - 0.4, 0.8), color="#54a24b" if lane == COMPUTE else "#72b7b2")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlim(0, times.seconds)
    axes.set_xlabel("seconds")


def _joined(spans: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Join spans with less than ``gap`` between them."""
    found: list[tuple[float, float]] = []
    for start, length in sorted(spans):
        if found and start - sum(found[-1]) < gap:
            found[-1] = (found[-1][0], max(sum(found[-1]), start + length) - found[-1][0])
        else:
            found.append((start, length))
    return found

"""The result of ``tune()``: plain data, formatted as text, JSON or a picture."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..inspect import Report, Section, StepEvent, as_text, bytes_of, save_figure
from .hardware import Hardware
from .schedule import COMPUTE, Schedule, schedule
from .setting import Setting

_FACTORS = (0.5, 2.0)  # of the network's bandwidth, in the question of what changes then
_MOST_SHOWN = 5


@dataclass(frozen=True)
class Result:
    """A setting that fits, and what it takes.

    Attributes:
        setting: see ``Setting``.
        peak: bytes of a rank's device.
        times: see ``Schedule``.
        events: what a step with one micro-batch does; not in JSON.
        code: a function ``shard(model)`` to paste.
    """

    setting: Setting
    peak: int
    times: Schedule
    events: tuple[StepEvent, ...] = field(default=(), repr=False)
    code: str = field(default="", repr=False)


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
        max_memory: bytes of a rank; a tenth of them stays free.
        hardware: what the times are predicted for.
        is_compiled: blocks are compiled.
        results: settings that fit, the fastest first.
        default: ``fully_shard`` on each block and on the model, whether it fits or not.
        rejected: settings that are left out, with reasons.
        num_runs: how many steps were run dry.
    """

    model: str
    world_size: int
    node_size: int
    max_memory: int
    hardware: Hardware
    is_compiled: bool
    results: tuple[Result, ...]
    default: Result
    rejected: tuple[Rejected, ...]
    num_runs: int

    @property
    def best(self) -> Result | None:
        """The fastest setting that fits, if there is one."""
        return self.results[0] if self.results else None

    @property
    def tied(self) -> tuple[Result, ...]:
        """The results that the predictions can't tell from the best one: the hardware's ``error`` is larger than what
        they take more."""
        if self.best is None:
            return ()
        most = self.best.times.seconds * (1 + self.hardware.device.error)
        return tuple(result for result in self.results[1:] if result.times.seconds <= most)

    @property
    def default_fits(self) -> bool:
        """Whether the default is among the results."""
        return any(result.setting == self.default.setting for result in self.results)

    def best_with(self, factor: float) -> tuple[Result, Schedule]:
        """The best result if the network had other bandwidths, and its times then."""
        hardware = replace(self.hardware, network=self.hardware.network.scaled(factor))
        pairs = [(one, predict(one.setting, one.events, hardware, self.is_compiled)) for one in self.results]
        return min(pairs, key=lambda pair: pair[1].seconds)

    def text(self) -> str:
        """Format the best settings as a table, with what else would change the choice, and the code of the best."""
        return as_text(_report_of(self))

    def json(self) -> str:
        """Return everything as JSON, for programs."""
        best = self.best
        return json.dumps(
            {
                "model": self.model,
                "world_size": self.world_size,
                "node_size": self.node_size,
                "max_memory": self.max_memory,
                "hardware": self.hardware.device.name,
                "is_compiled": self.is_compiled,
                "results": [_plain(result) for result in self.results],
                "tied": len(self.tied),
                "default": {**_plain(self.default), "fits": self.default_fits},
                "rejected": [{**asdict(item.setting), "why": item.why} for item in self.rejected],
                "code": best.code if best is not None else None,
            },
            indent=1,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw memory against time of all settings, and what the best one does when, into a ``.png``, ``.svg`` or
        ``.pdf`` file.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the name has another suffix, or there is no such folder; or nothing fits.
        """
        _save_picture(self, Path(path))

    def __str__(self) -> str:
        return self.text()


def predict(
    setting: Setting, events: Sequence[StepEvent], hardware: Hardware, is_compiled: bool, keeps_spans: bool = False
) -> Schedule:
    return schedule(
        events,
        hardware.device,
        hardware.network,
        num_batches=setting.num_batches,
        is_offloaded=setting.is_offloaded,
        is_compiled=is_compiled,
        keeps_spans=keeps_spans,
    )


def _plain(result: Result) -> dict[str, Any]:
    times = asdict(result.times)
    del times["spans"]
    return {"setting": asdict(result.setting), "peak": result.peak, "times": times}


# ---- The report


def _report_of(tuning: Tuning) -> Report:
    device, best = tuning.hardware.device, tuning.best
    heading = [
        f"{tuning.model} on {tuning.world_size:,} x {device.name}, {tuning.node_size} in a node, "
        f"{bytes_of(tuning.max_memory)} each: {len(tuning.results)} settings fit, {len(tuning.rejected)} are left out "
        f"({tuning.num_runs} dry runs)"
    ]
    columns = ("", "setting", "micro-batches", "step", "exposed", "peak", "MFU")
    shown = [(str(number), result) for number, result in enumerate(tuning.results[:_MOST_SHOWN], 1)]
    default = "default" if tuning.default_fits else "default (does not fit)"
    rows = [_row(number, result) for number, result in [*shown, (default, tuning.default)]]
    sections = [Section("fastest first, predicted", columns, rows, right=columns[2:])]
    notes = [*_notes(tuning)]
    if notes:
        sections.append(Section("how sure", items=notes))
    if tuning.rejected:
        sections.append(Section("left out", items=[*_rejections(tuning.rejected)]))
    sections.append(Section("assumed", items=[*_assumptions(tuning)]))
    if best is not None:
        sections.append(Section("code of the first", items=best.code.split("\n")))
    return Report(tuning.model, heading, sections)


def _row(number: str, result: Result) -> list[str]:
    times, setting = result.times, result.setting
    batches = f"{setting.num_batches} of {setting.batch}" if setting.batch else f"{setting.num_batches}"
    mfu = f"{times.mfu:.0%}" if times.mfu else "-"
    seconds = [_seconds(times.seconds), _seconds(times.exposed)]
    return [number, str(setting), batches, *seconds, bytes_of(result.peak), mfu]


def _seconds(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.0f} us"


def _notes(tuning: Tuning) -> Iterator[str]:
    error = tuning.hardware.device.error
    if tuning.best is None:
        yield "nothing fits: more ranks, a smaller batch, more memory, or offloading of activations may help"
        return
    if tuning.tied:
        slowest = tuning.tied[-1].times.seconds / tuning.best.times.seconds - 1
        yield (
            f"the first {len(tuning.tied) + 1} are tied within {max(slowest, 0.001):.1%}, which is less than the "
            f"error of the predictions ({error:.0%}): measure them"
        )
    for factor in _FACTORS:
        other, times = tuning.best_with(factor)
        what = "the same" if other is tuning.best else str(other.setting)
        yield f"with {factor:g} x the network's bandwidth: {what}, {_seconds(times.seconds)}"


def _rejections(rejected: Sequence[Rejected]) -> Iterator[str]:
    for item in rejected[:_MOST_SHOWN]:
        batch = f", {item.setting.num_batches} of {item.setting.batch}" if item.setting.batch else ""
        yield f"{item.setting}{batch}: {item.why}"
    if len(rejected) > _MOST_SHOWN:
        yield f"and {len(rejected) - _MOST_SHOWN} more"


def _assumptions(tuning: Tuning) -> Iterator[str]:
    device, network = tuning.hardware.device, tuning.hardware.network
    how = "measured by calibrate" if tuning.hardware.calibrated else "a preset: rates are guesses, times good to +-30 %"
    yield f"{device.name}: {how} ({device.source})"
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in device.matmul.items())
    yield f"products in TFLOP/s: {rates}; memory {device.memory / 1e9:,.0f} GB/s"
    levels = "; ".join(f"{level.ranks or 'all'} ranks {level.bandwidth / 1e9:.3g}" for level in network.levels)
    yield f"network in GB/s of each rank: {levels}"
    blocks = "compiled blocks" if tuning.is_compiled else "eager blocks"
    yield f"{blocks}; a tenth of the memory stays free; nothing else uses the network; data come in time"


# ---- The picture: memory against time of all settings, and the first one's schedule


def _save_picture(tuning: Tuning, path: Path) -> None:
    from ..errors import MisuseError

    best = tuning.best
    if best is None:
        raise MisuseError(f"{path}: nothing fits, so there is nothing to draw")

    def draw(figure: Any) -> None:
        upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
        _draw_settings(upper, tuning, best)
        _draw_schedule(lower, predict(best.setting, best.events, tuning.hardware, tuning.is_compiled, True))

    save_figure(path, (9.0, 7.0), draw)


def _draw_settings(axes: Any, tuning: Tuning, best: Result) -> None:
    gib = 1 << 30
    front = [*_front(tuning.results)]
    others = [result for result in tuning.results if result not in front]
    axes.scatter([one.times.seconds for one in others], [one.peak / gib for one in others], s=18, color="#bab0ac")
    axes.plot([one.times.seconds for one in front], [one.peak / gib for one in front], "o-", color="#4c78a8")
    axes.plot(tuning.default.times.seconds, tuning.default.peak / gib, "D", color="#f58518", label="default")
    axes.axhline(tuning.max_memory / gib, color="#e45756", linestyle=":", label="memory")
    for result in front[:_MOST_SHOWN]:
        axes.annotate(
            str(result.setting), (result.times.seconds, result.peak / gib), fontsize="x-small",
            xytext=(4, 4), textcoords="offset points",
        )  # fmt: skip
    axes.set_xlabel("seconds of a step, predicted")
    axes.set_ylabel("GiB of one rank at the peak")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{tuning.model}, {tuning.world_size:,} x {tuning.hardware.device.name}: {best.setting}", loc="left")
    axes.legend(fontsize="small")


def _front(results: Sequence[Result]) -> Iterator[Result]:
    """The Pareto front: results for which no faster one takes less memory. ``results`` are sorted by time."""
    least = float("inf")
    for result in results:
        if result.peak < least:
            least = result.peak
            yield result


_MOST_SPANS = 4_000  # drawn by lane: more would hide each other


def _draw_schedule(axes: Any, times: Schedule) -> None:
    lanes = [*Counter(span.lane for span in times.spans)]
    for place, lane in enumerate(lanes):
        spans = [(span.start, span.end - span.start) for span in times.spans if span.lane == lane]
        spans = _joined(spans, times.seconds / _MOST_SPANS)
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

"""The output of every benchmark: a table on the terminal, a JSON file, a plot.

A benchmark's result is a list of rows, instances of one dataclass. ``column()`` says how a field is headed and written
in the table; JSON gets every field as it is. Files go to ``runs/benchmarks`` unless ``--out`` says otherwise::

    @dataclass(frozen=True)
    class Row:
        system: str = column("system")
        step_ms: float = column("step ms", ".1f")

    report = Report("throughput", settings, rows)
    print(report.table())
    report.write(options.out, bars("system", "step_ms"))

Medians and ratios only: on a shared machine an absolute time means nothing outside its own run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

OUT = Path(__file__).resolve().parents[1] / "runs" / "benchmarks"

Plot = Callable[[Any, Sequence[Any]], None]  # draws rows into matplotlib axes


def column(header: str, format: str = "") -> Any:
    """A dataclass field that the table shows; ``None`` in a row is shown as nothing."""
    return dataclasses.field(metadata={"header": header, "format": format})


@dataclass
class Report:
    """The figures of one run of one benchmark.

    Attributes:
        benchmark: its name, and the name of the files.
        settings: what was measured and how: sizes, number of repeats.
        rows: the figures, all of one dataclass.
    """

    benchmark: str
    settings: dict[str, Any]
    rows: Sequence[Any]

    def table(self, rows: Sequence[Any] | None = None) -> str:
        """``rows`` (all of them by default) in Markdown."""
        rows = self.rows if rows is None else rows
        columns = [field for field in dataclasses.fields(rows[0]) if "header" in field.metadata]
        kinds = [any(_is_number(getattr(row, field.name)) for row in rows) for field in columns]
        lines = [
            "| " + " | ".join(field.metadata["header"] for field in columns) + " |",
            "|" + "|".join("--:" if is_number else "---" for is_number in kinds) + "|",
        ]
        for row in rows:
            cells = [_cell(getattr(row, field.name), field.metadata["format"]) for field in columns]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        machine = {"cpus": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
        if torch.cuda.is_available():
            machine["gpu"] = torch.cuda.get_device_name()
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"benchmark": self.benchmark, "machine": machine, "settings": self.settings, "rows": rows}

    def write(self, folder: Path, *plots: Plot) -> None:
        """Write ``<benchmark>.json`` and, with matplotlib, ``<benchmark>.png`` with one picture for each of ``plots``;
        say where they are."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.benchmark}.json"
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        written = [str(path)]
        if plots:
            picture = folder / f"{self.benchmark}.png"
            try:
                _draw(picture, self, plots)
                written.append(str(picture))
            except ModuleNotFoundError as error:
                print(f"\nNo plot: {error} (pip install matplotlib)")
        print(f"\nFSDP1, FSDP2, DDP and DCP are those of torch {torch.__version__}. Written: {', '.join(written)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any, format: str) -> str:
    if value is None:
        return ""
    return f"{value:{format}}" if _is_number(value) else str(value)


# ---- plots


def bars(group: str, value: str, *, by: str = "system", unit: str = "", line: float | None = None) -> Plot:
    """Bars of ``value``, side by side for each ``by``, in clusters named by ``group`` (names of fields, or properties,
    of a row); ``line``: a goal."""

    def draw(axes: Any, rows: Sequence[Any]) -> None:
        rows = [row for row in rows if getattr(row, value) is not None]
        clusters = list(dict.fromkeys(getattr(row, group) for row in rows))
        kinds = list(dict.fromkeys(getattr(row, by) for row in rows))
        width = 0.8 / len(kinds)
        for i, kind in enumerate(kinds):
            heights = {getattr(row, group): getattr(row, value) for row in rows if getattr(row, by) == kind}
            places = [clusters.index(cluster) + (i - (len(kinds) - 1) / 2) * width for cluster in heights]
            axes.bar(places, list(heights.values()), width, label=kind)
        axes.set_xticks(range(len(clusters)), [str(cluster) for cluster in clusters], rotation=20, ha="right")
        axes.set_ylabel(unit or value)
        if line is not None:
            axes.axhline(line, color="black", linestyle="--", linewidth=1)
        axes.legend(fontsize="small")

    return draw


def lines(x: str, value: str, *, by: str = "system", unit: str = "", only: Callable[[Any], bool] = bool) -> Plot:
    """``value`` over ``x`` on logarithmic axes, one line for each ``by``, of the rows that ``only`` accepts."""

    def draw(axes: Any, rows: Sequence[Any]) -> None:
        rows = [row for row in rows if only(row)]
        for kind in dict.fromkeys(getattr(row, by) for row in rows):
            points = [(getattr(row, x), getattr(row, value)) for row in rows if getattr(row, by) == kind]
            axes.loglog(*zip(*points), marker="o", label=kind)
        axes.set_xlabel(x.replace("_", " "))
        axes.set_ylabel(unit or value)
        if rows:
            axes.legend(fontsize="small")

    return draw


def _draw(path: Path, report: Report, plots: Sequence[Plot]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(plots), figsize=(6.5 * len(plots), 4.5), squeeze=False)
    for plot, place in zip(plots, axes[0], strict=True):
        plot(place, report.rows)
    figure.suptitle(report.benchmark)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---- command lines


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with what every benchmark understands: ``--quick`` and ``--out``."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help="small and rough: seconds, to see that it runs")
    result.add_argument(
        "--out", type=Path, default=OUT, metavar="FOLDER", help="for JSON and plot (default: runs/benchmarks)"
    )
    return result

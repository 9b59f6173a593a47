"""A plan as a picture, by matplotlib: for each number of ranks a bar of the memory at the peak, by kind."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from .facts import KINDS, PlanFacts

SUFFIXES = (".png", ".svg", ".pdf")
_COLORS = ("#4c78a8", "#72b7b2", "#f58518", "#eeca3b", "#54a24b", "#b279a2", "#ff9da6", "#bab0ac")


def check_picture(path: Path) -> None:
    """Whether a picture can be written there, said before anything is done for it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the name ends in something else; there is no such folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install 'fsdp-compose[see]'")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path}: expected a name that ends in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")


def save_picture(plan: PlanFacts, path: Path) -> None:
    """Write it, whole or not at all. For what it raises see ``check_picture``."""
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 1.2 * max(3, len(plan.worlds)), 5), layout="constrained")
    axes = figure.add_subplot()
    largest = max(world.peak.nbytes for world in plan.worlds)
    unit, name = next((size, name) for size, name in _UNITS if largest >= size or size == 1)
    below = [0.0] * len(plan.worlds)
    places = range(len(plan.worlds))
    for kind, color in zip(KINDS, _COLORS, strict=True):
        heights = [world.peak.bytes_by_kind[kind] / unit for world in plan.worlds]
        if any(heights):
            axes.bar(places, heights, bottom=below, label=kind, color=color, width=0.7)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for place, height in zip(places, below, strict=True):
        axes.text(place, height, f"{height:,.1f}", ha="center", va="bottom", fontsize="small")
    axes.set_xticks(places, [f"{world.world_size:,}" for world in plan.worlds])
    axes.set_ylim(0, 1.08 * max(below))  # room for the sums
    axes.set_xlabel("ranks")
    axes.set_ylabel(f"{name} of one rank at the peak")
    axes.set_title(f"{plan.worlds[0].layout.name}, {plan.optimizer}", loc="left", fontsize="medium")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))

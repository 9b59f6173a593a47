"""A plan as plain text, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from ..description.words import bytes_of
from .facts import KINDS, PlanFacts, WorldFacts

_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


def as_text(plan: PlanFacts) -> str:
    layout = plan.worlds[0].layout
    batch = f"; {plan.batch} on each rank" if plan.batch else ""
    lines = [
        f"{layout.name}: {layout.num_parameters:,} parameters of {layout.numel:,} elements, {len(layout.groups)} "
        f"groups; {plan.optimizer}{batch}",
        "",
        "memory of one rank when there is most, in a step",
        *_table([_memory_heading(), *map(_memory_row, plan.worlds)]),
        "",
        "collectives of a step: how many, of how many bytes in all",
        *_table([_collective_heading(), *map(_collective_row, plan.worlds)]),
        "",
        "layout",
        *_table([_layout_heading(), *map(_layout_row, plan.worlds)]),
    ]
    said: dict[str, list[str]] = {}
    for world in plan.worlds:
        for item in world.advice:
            said.setdefault(item.text, []).append(f"{world.world_size:,}")
    advice = [f"  {', '.join(sizes)} ranks: {text}" for text, sizes in said.items()]
    return "\n".join([*lines, *(["", "advice", *advice] if advice else [])])


def as_json(plan: PlanFacts) -> str:
    """All facts; with the peaks."""
    worlds = []
    for world in plan.worlds:
        facts = asdict(world)
        for moment, found in zip((*facts["moments"], facts["building"]), (*world.moments, world.building), strict=True):
            moment["nbytes"] = found.nbytes
        worlds.append(facts | {"peak": {"doing": world.peak.doing, "nbytes": world.peak.nbytes}})
    return json.dumps({"optimizer": plan.optimizer, "batch": plan.batch, "worlds": worlds}, indent=1)


def mesh_of(world: WorldFacts) -> str:
    """The meshes of the groups."""
    shapes = {"x".join(map(str, group.mesh_shape)) for group in world.layout.groups}
    return ", ".join(sorted(shapes)) or "-"


def _memory_heading() -> list[str]:
    return ["ranks", "mesh", "peak", "in", *KINDS, "building"]


def _memory_row(world: WorldFacts) -> list[str]:
    peak = world.peak
    kinds = [bytes_of(peak.bytes_by_kind[kind]) if peak.bytes_by_kind[kind] else "-" for kind in KINDS]
    start = [f"{world.world_size:,}", mesh_of(world), bytes_of(peak.nbytes), peak.doing]
    return [*start, *kinds, bytes_of(world.building.nbytes)]


def _collective_heading() -> list[str]:
    return ["ranks", *(f"{kind}s" for kind in _COLLECTIVES), "sent by a rank", "least part"]


def _collective_row(world: WorldFacts) -> list[str]:
    cells = [f"{world.world_size:,}"]
    for kind in _COLLECTIVES:
        found = [item.nbytes for item in world.collectives if item.kind == kind]
        cells.append(f"{len(found):,} of {bytes_of(sum(found))}" if found else "-")
    if not world.collectives:
        return [*cells, "-", "-"]
    sent = sum(item.sent_bytes for item in world.collectives)
    return [*cells, bytes_of(sent), bytes_of(min(item.part_bytes for item in world.collectives))]


def _layout_heading() -> list[str]:
    return ["ranks", "flat parameters", "kept by a rank", "padding of all", "in rows", "in elements"]


def _layout_row(world: WorldFacts) -> list[str]:
    layout = world.layout
    params = [param for flat in layout.flat_parameters for param in flat.parameters]
    in_elements = sum(any(part.rows is None for part in param.parts) for param in params)
    sizes = bytes_of(layout.kept_bytes), bytes_of(layout.padding_bytes)
    return [
        f"{world.world_size:,}",
        f"{len(layout.flat_parameters):,}",
        *sizes,
        f"{len(params) - in_elements:,}",
        f"{in_elements:,}",
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]

"""The pictures of docs/project/design.md: ``python docs/generator/design_pictures.py`` writes them to docs/pictures.

``owners.svg`` is laid out by hand, below. ``step.svg`` is a trace of a small model on two gloo ranks. It shows the
order in which rank 0 came to things, not how long they took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
import torch.nn as nn

from fsdp_compose import fully_shard, trace
from fsdp_compose.inspect import TraceEvent
from fsdp_compose.testing import run_on_ranks

PICTURES = Path(__file__).parents[1] / "pictures"
INK, GRAY, LINE = "#222", "#666", "#3f51b5"
GROUP, FLAT, COMM, USER, GRAPH = "#c5cae9", "#ffe0b2", "#c8e6c9", "#eceff1", "#f3e5f5"


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">'
    arrow = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>'
    )
    return "\n".join([head, arrow, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>\n"])


def text(x: float, y: float, words: str, more: str = f'fill="{INK}"') -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = 'stroke="#555"') -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" {more}/>'


# ---- Who owns what


def box(x: float, y: float, width: float, title: str, lines: Sequence[str], fill: str) -> list[str]:
    """A class, with what it has; its height is 24 and 15 for each line."""
    found = [
        rect(x, y, width, 24 + 15 * len(lines), fill),
        text(x + 8, y + 16, title, f'fill="{INK}" font-weight="bold"'),
    ]
    return found + [text(x + 8, y + 32 + 15 * i, line, f'fill="{INK}" font-size="11"') for i, line in enumerate(lines)]


def arrow(path: str, is_weak: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if is_weak else ""
    return f'<path d="{path}" stroke="{LINE}" stroke-width="1.5" fill="none" marker-end="url(#tip)"{dashes}/>'


def owners() -> str:
    flat_param = ["layout: where each parameter lies", "sharded_params: for optimizers", "segments: flat views"]
    parts = [
        *box(20, 40, 170, "your modules", ["root", "  block 0", "  block 1", "_parameters: swapped"], USER),
        *box(20, 190, 170, "the autograd graph", ["hooks on outputs", "and on input aliases"], USER),
        *box(20, 300, 170, "DefaultUse", ["one forward of one group,", "as backward sees it"], GRAPH),
        *box(
            250,
            40,
            220,
            "_FSDPState  × 3",
            [
                "one per fully_shard call",
                "options: GroupOptions",
                "swap: ParameterSwap",
                "progress, backward, persistent",
                "mesh: DataParallelMesh",
            ],
            GROUP,
        ),
        *box(
            250,
            270,
            220,
            "Root  × 1",
            ["all groups that run together", "forward, backward: of this iteration", "records: the order for prefetch"],
            GROUP,
        ),
        *box(250, 400, 220, "CollectiveLog", ["one per process group:", "what was issued, in order"], GROUP),
        *box(530, 40, 210, "FlatParamHandle", flat_param, FLAT),
        *box(530, 270, 210, "Communicator", ["streams", "ReduceBuffer, one per dtype"], FLAT),
        *box(530, 370, 210, "ControlExchange", ["did all ranks do the same?", "who has a gradient?"], COMM),
        *box(800, 40, 190, "shard", ["this rank's slice, always there"], FLAT),
        *box(800, 94, 190, "Unsharded", ["the whole, while it is used"], FLAT),
        *box(800, 148, 190, "PendingGradients", ["from autograd to reduction"], FLAT),
        *box(800, 202, 190, "ShardedGradient", ["the flat gradient: .grad"], FLAT),
        *box(800, 270, 190, "Transport", ["all-gather, reduce-scatter,", "all-reduce"], COMM),
        arrow("M190 70 H248"),
        arrow("M105 190 V236").replace("190 V236", "244 V298"),
        arrow("M190 320 H220 V110 H248"),
        arrow("M470 70 H528"),
        arrow("M340 139 V268"),
        arrow("M380 270 V141", is_weak=True),
        arrow("M470 290 H528"),
        arrow("M470 310 H500 V390 H528"),
        arrow("M360 339 V398"),
        *[arrow(f"M740 70 H770 V{y} H798") for y in (59, 113, 167, 221)],
        arrow("M470 125 H500 V254 H780 V290 H798"),
        text(198, 62, "registry", f'fill="{GRAY}" font-size="10"'),
        text(346, 215, "root", f'fill="{GRAY}" font-size="10"'),
        text(386, 215, "states (weak)", f'fill="{GRAY}" font-size="10"'),
        text(480, 62, "_handles", f'fill="{GRAY}" font-size="10"'),
        text(590, 249, "mesh", f'fill="{GRAY}" font-size="10"'),
        text(366, 375, "order", f'fill="{GRAY}" font-size="10"'),
        text(530, 132, "one for each kind of parameter:", f'fill="{GRAY}" font-size="11"'),
        text(530, 147, "dtype, requires_grad, dtypes of", f'fill="{GRAY}" font-size="11"'),
        text(530, 162, "compute, reduction and gradients", f'fill="{GRAY}" font-size="11"'),
    ]
    for x, fill, name in (
        (20, USER, "yours"),
        (90, GRAPH, "runtime/"),
        (180, GROUP, "group/"),
        (265, FLAT, "flat/"),
        (335, COMM, "comm/"),
    ):
        parts += [rect(x, 14, 12, 12, fill), text(x + 17, 24, name, f'fill="{GRAY}" font-size="11"')]
    return svg(1010, 480, parts)


# ---- One step in time

COLORS = {
    "forward": "#7fb3d5",
    "backward": "#c39bd3",
    "wait": "#e74c3c",
    "all-gather": "#f5b041",
    "reduce-scatter": "#58d68d",
}
SENTENCES = {  # the sentence of the page that an event belongs to, by its kind, its group and a running number
    ("all-gather", "(root)", 0): 4,
    ("all-gather", "1", 0): 5,
    ("forward", "0", 0): 6,
    ("reshard", "0", 0): 7,
    ("all-gather", "1", 1): 8,
    ("reshard", "1", 1): 9,
    ("reduce-scatter", "1", 0): 10,
    ("reshard", "0", 1): 11,
}


def train() -> list[TraceEvent]:
    """What rank 0 does in the third step."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(64, 8))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        inputs = torch.randn(32, 64)
        with trace(model) as step:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return step.events


def places(events: Sequence[TraceEvent]) -> dict[int, float]:
    """Where each start and end of an event is drawn, in the order in which the program came to them."""
    wide = {event.ends for event in events if event.ends == event.begins + 1 and event.what in ("forward", "backward")}
    found, x = {}, 0.0
    for place in sorted({place for event in events for place in (event.begins, event.ends)}):
        x += 7 if place in wide else 1
        found[place] = x
    return found


def step(events: Sequence[TraceEvent]) -> str:
    left, right, width = 96, 24, 1010
    at = places(events)
    scale = (width - left - right) / max(at.values())
    parts, marks, seen = [], [], Counter[tuple[str, str]]()
    rows = {"compute": 52, "all-gathers": 136, "reductions": 212}
    for name, top in rows.items():
        parts.append(text(left - 10, top + 18, name, f'fill="{INK}" text-anchor="end"'))
    free = [0.0, 0.0]
    for event in sorted(events, key=lambda item: item.begins):
        x, stop = left + at[event.begins] * scale, left + at[event.ends] * scale
        group, y, height = event.group.strip("()"), float(rows[event.track]), 26.0
        group = group if group == "root" else f"block {group}"
        words = f"{event.what} of the root" if event.track == "compute" and group == "root" else group
        if event.track == "all-gathers":  # two may be on their way at once
            lane = 0 if free[0] <= x else 1
            free[lane] = stop
            y += lane * 30
        elif event.track == "compute" and not (event.what in ("forward", "backward") and group == "root"):
            y += 30
        if event.what == "reshard":
            parts.append(f'<path d="M{x:.1f} {y + 6:g} v16 m-4 -5 l4 5 l4 -5" stroke="{INK}" fill="none"/>')
        else:
            parts.append(rect(x, y, stop - x, height, COLORS[event.what], 'stroke="#fff" stroke-width="0.5"'))
            if event.what != "wait" and stop - x > 5.6 * len(words):
                style = f'fill="{INK}" font-size="11" text-anchor="middle"'
                parts.append(text((x + stop) / 2, y + 17, words, style))
        number = SENTENCES.get((event.what, event.group, seen[event.what, event.group]))
        seen[event.what, event.group] += 1
        if number:
            marks += mark(x, y - 1, number)
    assert len(marks) == 2 * len(SENTENCES), "the trace has other events now: number them anew"
    along = float(left)
    for what, color in COLORS.items():
        parts += [rect(along, 12, 12, 12, color), text(along + 17, 22, what, f'fill="{GRAY}" font-size="11"')]
        along += 42 + 6.2 * len(what)
    parts.append(text(along, 22, "↓ reshard: the memory is freed", f'fill="{GRAY}" font-size="11"'))
    parts.append(text(along + 210, 22, "numbers: the sentences below", f'fill="{GRAY}" font-size="11"'))
    return svg(width, 254, [*parts, *marks])


def mark(x: float, y: float, number: int) -> list[str]:
    style = 'fill="#fff" font-size="10" font-weight="bold" text-anchor="middle"'
    return [f'<circle cx="{x:g}" cy="{y:g}" r="8" fill="{LINE}"/>', text(x, y + 3.5, str(number), style)]


if __name__ == "__main__":
    (PICTURES / "owners.svg").write_text(owners())
    (PICTURES / "step.svg").write_text(step(run_on_ranks(2, train, timeout=60)[0]))

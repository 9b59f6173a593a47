"""A description as one HTML page, with a picture of each flat parameter; it loads nothing from anywhere.

A picture has a bar for each shard, as long as the shard, in which the parameters have colours and padding has none::

    rank 0   |aaaaaaaaaaaa|
    rank 1   |aaaaaaaabbb.|
"""

from __future__ import annotations

from html import escape

from .facts import FlatParameterFacts, GroupFacts, ModelFacts, ParameterFacts
from .words import (
    COLUMNS,
    bytes_of,
    flat_title,
    group_details,
    group_title,
    part_of,
    ranges_of,
    row_of,
    sizes_of,
    title_of,
)

_STYLE = """\
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222 }
h2 { font-size: 1.1em; margin: 2em 0 0 } h3 { font-size: 1em; font-weight: normal; margin: 1em 0 .3em }
table { border-collapse: collapse; margin: .5em 0 } th, td { text-align: left; padding: .1em .8em .1em 0 }
th { border-bottom: 1px solid #999; font-weight: 600 } td { border-bottom: 1px solid #eee }
.details { color: #666; margin: 0 } svg text { font: 11px system-ui, sans-serif }"""

_WIDTH, _HEIGHT, _STEP, _LABEL = 900, 18, 24, 110  # pixels: of a bar, its height, from bar to bar, left of the bars
_MOST_BARS = 16


def as_page(facts: ModelFacts) -> str:
    body = [f"<h1>{escape(title_of(facts))}</h1>", f"<p>{escape(sizes_of(facts))}</p>"]
    for group in facts.groups:
        body += [f"<h2>{escape(group_title(group))}</h2>", f'<p class="details">{escape(group_details(group))}</p>']
        for flat in group.flat_parameters:
            body += [f"<h3>{escape(flat_title(flat))}</h3>", picture(flat, group), _table(flat, facts.rank)]
    if facts.others:
        body.append("<h2>in no group, whole on every rank</h2><ul>")
        for other in facts.others:
            text = f"{other.fqn} {other.shape} {other.dtype}, {bytes_of(other.nbytes)}"
            body.append(f"<li>{escape(text)}</li>")
        body.append("</ul>")
    title = escape(facts.name)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return "\n".join(['<!DOCTYPE html><html lang="en">', f"<head>{head}</head><body>", *body, "</body></html>\n"])


def picture(flat: FlatParameterFacts, group: GroupFacts) -> str:
    """An SVG: a bar for each of the first shards."""
    num_bars = min(flat.num_shards, _MOST_BARS)
    bars = []
    for shard in range(num_bars):
        ranks = f"rank{'s' if len(group.shard_ranks[shard]) > 1 else ''} {ranges_of(group.shard_ranks[shard])}"
        y = shard * _STEP
        bars.append(f'<text x="0" y="{y + 13}">{escape(ranks)}</text>')
        frame = f'x="{_LABEL}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}"'
        bars.append(f'<rect {frame} fill="#f3f3f3" stroke="#999"><title>padding where empty</title></rect>')
        for index, param in enumerate(flat.parameters):
            bars.append(_piece(param, index, group.shard_ranks[shard], flat.shard_numel, y))
    height = num_bars * _STEP
    if num_bars < flat.num_shards:
        bars.append(f'<text x="0" y="{height + 13}">and {flat.num_shards - num_bars} more shards</text>')
        height += _STEP
    return f'<svg width="{_LABEL + _WIDTH + 1}" height="{height}" role="img">{"".join(bars)}</svg>'


def _piece(param: ParameterFacts, index: int, ranks: tuple[int, ...], shard_numel: int, y: int) -> str:
    """A parameter in the bar of one shard; nothing if it has no element there."""
    part = next((item for item in param.parts if item.ranks == ranks), None)
    if part is None:
        return ""
    x = _LABEL + part.shard_start * _WIDTH / shard_numel
    width = (part.shard_stop - part.shard_start) * _WIDTH / shard_numel
    color = f"hsl({index * 137 % 360}, 55%, {'70' if param.requires_grad else '88'}%)"
    title = escape(f"{param.fqn} {param.shape}: {part_of(part)}")
    frame = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_HEIGHT}"'
    label = ""
    if width > 7 * len(param.fqn):
        label = f'<text x="{x + 4:.2f}" y="{y + 13}" pointer-events="none">{escape(param.fqn)}</text>'
    return f'<rect {frame} fill="{color}" stroke="#666" stroke-width="0.5"><title>{title}</title></rect>{label}'


def _table(flat: FlatParameterFacts, rank: int) -> str:
    rows = [("th", COLUMNS), *(("td", row_of(param, rank)) for param in flat.parameters)]
    lines = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) for tag, cells in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"

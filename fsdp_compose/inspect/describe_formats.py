"""The facts of a model's layout as plain data, and their forms: text, the terminal, one HTML page.

The data says which rank holds what of each parameter, in how many bytes. It consists of numbers and names only, so it
can be printed, written and compared; ``describe`` reads it off a model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from io import StringIO


@dataclass(frozen=True)
class Part:
    """The elements of a parameter in one shard.

    Attributes:
        ranks: that hold the shard, by their numbers in the default process group: one, or one of each replica.
        start, stop: of the elements, in the flattened parameter.
        rows: the same as indices of dim 0, where shard boundaries lie between these; else ``None``.
        shard_start, shard_stop: where they are, in elements of the shard.
    """

    ranks: tuple[int, ...]
    start: int
    stop: int
    rows: tuple[int, int] | None
    shard_start: int
    shard_stop: int


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter of a flat parameter.

    Attributes:
        fqn: its name in the model; ``tied``: its other names there.
        shape, numel: of the whole parameter.
        local_shape: of what this rank's flat parameter has of it, and ``parts`` count in: less than ``shape`` where
            tensor parallelism has cut it.
        dtype: that it is kept in.
        offset: of its first element, in elements of the flat parameter.
        granule: so many consecutive elements no shard boundary divides.
        placements: of the sharded parameter on its mesh.
        parts: those that are not empty, by shard.
    """

    fqn: str
    tied: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    local_shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    offset: int
    granule: int
    placements: tuple[str, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class FlatParameterFacts:
    """One flat parameter. Bytes and elements are those of one replica.

    Attributes:
        dtype: of the shards; ``compute``: of the unsharded parameters; ``reduce``: of the reduction; ``gradient``: of
            the sharded gradients.
        gathered_by: the class of its only parameter, if that class gathers it in a form of its own.
        home: where the shards live.
        num_shards, shard_numel, shard_bytes: of how many shards it consists, and how long each is, padding included.
        held_bytes: of parameters in each shard, without padding.
        padding_bytes: in all shards.
        unsharded_bytes: while it is gathered; ``None``: its class decides, or there is nothing to gather.
    """

    dtype: str
    compute: str
    reduce: str
    gradient: str
    gathered_by: str | None
    home: str
    num_shards: int
    shard_numel: int
    shard_bytes: int
    held_bytes: tuple[int, ...]
    padding_bytes: int
    unsharded_bytes: int | None
    parameters: tuple[ParameterFacts, ...]

    @property
    def flat_bytes(self) -> int:
        """The bytes of all shards."""
        return self.num_shards * self.shard_bytes


@dataclass(frozen=True)
class GroupFacts:
    """What one call of ``fully_shard`` or ``replicate`` manages.

    Attributes:
        names: of the modules given to it; ``classes``: theirs.
        is_replicated: ``replicate`` made it.
        mesh_shape, mesh_dims: of its mesh; ``device``: where it computes.
        shard_ranks: for each shard, the ranks that hold it, by their numbers in the default process group.
        policy: dtypes that the user chose.
        options: what else he did, where it is not the default; and ``reshard_after_forward``.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    is_replicated: bool
    mesh_shape: tuple[int, ...]
    mesh_dims: tuple[str, ...]
    device: str
    shard_ranks: tuple[tuple[int, ...], ...]
    policy: dict[str, str]
    options: dict[str, str]
    flat_parameters: tuple[FlatParameterFacts, ...]

    @property
    def name(self) -> str:
        """The name of the group."""
        return ", ".join(name or "(root)" for name in self.names)


@dataclass(frozen=True)
class OtherParameter:
    """A parameter that no group manages: every rank has it whole."""

    fqn: str
    shape: tuple[int, ...]
    numel: int
    dtype: str
    requires_grad: bool
    nbytes: int


@dataclass(frozen=True)
class ModelFacts:
    """A model.

    Attributes:
        name: its class.
        rank, world_size: of the process that looks.
    """

    name: str
    rank: int
    world_size: int
    groups: tuple[GroupFacts, ...]
    others: tuple[OtherParameter, ...]

    @property
    def flat_parameters(self) -> list[FlatParameterFacts]:
        return [flat for group in self.groups for flat in group.flat_parameters]

    @property
    def num_parameters(self) -> int:
        return sum(len(flat.parameters) for flat in self.flat_parameters) + len(self.others)

    @property
    def numel(self) -> int:
        """The elements of all parameters, whole."""
        managed = sum(param.numel for flat in self.flat_parameters for param in flat.parameters)
        return managed + sum(other.numel for other in self.others)

    @property
    def kept_bytes(self) -> int:
        """What this rank keeps between iterations."""
        return sum(flat.shard_bytes for flat in self.flat_parameters) + sum(other.nbytes for other in self.others)

    @property
    def padding_bytes(self) -> int:
        return sum(flat.padding_bytes for flat in self.flat_parameters)

    @property
    def flat_bytes(self) -> int:
        """The bytes of all shards and of everything that is whole."""
        return sum(flat.flat_bytes for flat in self.flat_parameters) + sum(other.nbytes for other in self.others)


# ---- The facts in words that every form of a description uses.


_MOST_PARTS = 4  # of a parameter, in words
_MOST_DIGITS = 10_000  # above it, the next unit

COLUMNS = ("parameter", "shape", "dtype", "elements", "offset", "held by")


def title_of(facts: ModelFacts) -> str:
    flat, groups, params = len(facts.flat_parameters), len(facts.groups), facts.num_parameters
    return (
        f"{facts.name}: {_count(groups, 'group')}, {_count(flat, 'flat parameter')}, {_count(params, 'parameter')} of "
        f"{_count(facts.numel, 'element')}"
    )


def sizes_of(facts: ModelFacts) -> str:
    return (
        f"rank {facts.rank} of {facts.world_size} keeps {bytes_of(facts.kept_bytes)} of {bytes_of(facts.flat_bytes)}, "
        f"of which {bytes_of(facts.padding_bytes)} are padding"
    )


EqualGroups = Sequence[GroupFacts]
"""One group, or several that differ in names alone: a form of a description shows the first."""


def collapsed(groups: Sequence[GroupFacts], all_groups: bool) -> list[EqualGroups]:
    """Equal groups together, where the first of them is; with ``all_groups`` each alone."""
    if all_groups:
        return [[group] for group in groups]
    found: list[tuple[GroupFacts, list[GroupFacts]]] = []
    for group in groups:
        nameless = _without_names(group)
        equal = next((members for facts, members in found if facts == nameless), None)
        if equal is None:
            found.append((nameless, [group]))
        else:
            equal.append(group)
    return [members for _, members in found]


def _without_names(group: GroupFacts) -> GroupFacts:
    """The facts, with parameters called as in their module."""

    def in_module(fqn: str) -> str:
        prefixes = ((f"{name}.", number) for number, name in enumerate(group.names))
        return next((f"{number}.{fqn[len(prefix) :]}" for prefix, number in prefixes if fqn.startswith(prefix)), fqn)

    flats = []
    for flat in group.flat_parameters:
        params = [
            replace(param, fqn=in_module(param.fqn), tied=tuple(map(in_module, param.tied)))
            for param in flat.parameters
        ]
        flats.append(replace(flat, parameters=tuple(params)))
    return replace(group, names=(), flat_parameters=tuple(flats))


def names_of(groups: EqualGroups) -> str:
    """``blocks.0 ... blocks.31`` for neighbours in a list; ``blocks.{0, 2, 4}.mlp`` for others that differ in one
    number; all names if they differ otherwise, or are two."""
    names = [group.name for group in groups]
    paths = [name.split(".") for name in names]
    if len({len(path) for path in paths}) == 1 and len(names) > 2:
        differing = [i for i, parts in enumerate(zip(*paths)) if len({*parts}) > 1]
        if len(differing) == 1 and all(path[differing[0]].isdigit() for path in paths):
            (place,) = differing
            numbers = [int(path[place]) for path in paths]
            if numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
                return f"{names[0]} ... {names[-1]}"
            return ".".join([*paths[0][:place], f"{{{ranges_of(numbers)}}}", *paths[0][place + 1 :]])
    return ", ".join(names)


def group_title(groups: EqualGroups) -> str:
    group = groups[0]
    ranks = ranges_of([rank for ranks in group.shard_ranks for rank in ranks])
    how = "replicated on" if group.is_replicated else "sharded over"
    num_shards, num_replicas = len(group.shard_ranks), len(group.shard_ranks[0])
    if num_replicas > 1 and num_shards > 1:
        how = f"{num_replicas} replicas of {num_shards} shards on"
    number = f", {len(groups)} equal groups" if len(groups) > 1 else ""
    return f"{names_of(groups)} ({', '.join(group.classes)}){number}: {how} ranks {ranks}"


def group_details(group: GroupFacts) -> str:
    dims = group.mesh_dims or (None,) * len(group.mesh_shape)
    sizes = [str(size) if name is None else f"{name}={size}" for name, size in zip(dims, group.mesh_shape, strict=True)]
    chosen = [f"{name}={value}" for name, value in (*group.policy.items(), *group.options.items())]
    return f"mesh ({', '.join(sizes)}) on {group.device}; {', '.join(chosen)}"


def flat_title(flat: FlatParameterFacts) -> str:
    dtypes = [flat.dtype]
    for what, dtype in (("computed in", flat.compute), ("reduced in", flat.reduce), ("gradients in", flat.gradient)):
        if dtype != flat.dtype:
            dtypes.append(f"{what} {dtype}")
    home = ["in host memory"] if flat.home == "host memory" else []
    unsharded = "" if flat.unsharded_bytes is None else f", {bytes_of(flat.unsharded_bytes)} unsharded"
    if flat.gathered_by is not None:
        unsharded = f", gathered as {flat.gathered_by}"
    padding = f"{bytes_of(flat.padding_bytes)} of padding in all" if flat.padding_bytes else "no padding"
    return (
        f"{', '.join([*dtypes, *home])}: {_count(flat.num_shards, 'shard')} of {bytes_of(flat.shard_bytes)}, "
        f"{padding}{unsharded}"
    )


def row_of(param: ParameterFacts, rank: int) -> tuple[str, ...]:
    """The cells of a parameter, for ``COLUMNS``; ``rank``: whose part is never left out."""
    name = param.fqn if not param.tied else f"{param.fqn} = {', '.join(param.tied)}"
    shape = str(param.shape)
    if param.local_shape != param.shape and param.parts:
        shape += f", {param.local_shape} here"
    frozen = "" if param.requires_grad else ", frozen"
    return name, shape, param.dtype + frozen, f"{param.numel:,}", f"{param.offset:,}", held_by(param.parts, rank)


def held_by(parts: Sequence[Part], rank: int) -> str:
    """The parts of a parameter with the ranks that hold them; of many the first, the last and that of ``rank``."""
    shown, left_out = [], False
    for i, part in enumerate(parts):
        if len(parts) <= _MOST_PARTS or i in (0, len(parts) - 1) or rank in part.ranks:
            shown.append(("... | " if left_out else "") + f"{range_of(part)} on {ranges_of(part.ranks)}")
            left_out = False
        else:
            left_out = True
    return f"{unit_of(parts[0])} {' | '.join(shown)}" if parts else "nothing to hold"


def part_of(part: Part) -> str:
    """One part by itself."""
    return f"{unit_of(part)} {range_of(part)} on {ranges_of(part.ranks)}"


def unit_of(part: Part) -> str:
    return "elements" if part.rows is None else "rows"


def range_of(part: Part) -> str:
    """The rows or elements, both ends included."""
    first, stop = part.rows or (part.start, part.stop)
    return str(first) if stop == first + 1 else f"{first}-{stop - 1}"


def ranges_of(numbers: Sequence[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def bytes_of(nbytes: int) -> str:
    if nbytes < _MOST_DIGITS:
        return f"{nbytes:,} B"
    size, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if size >= _MOST_DIGITS:
            size, unit = size / 1024, larger
    return f"{size:,.1f} {unit}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# ---- A description as plain text.


_TO_THE_RIGHT = ("elements", "offset")


def as_text(facts: ModelFacts, all_groups: bool) -> str:
    lines = [title_of(facts), sizes_of(facts)]
    for groups in collapsed(facts.groups, all_groups):
        group = groups[0]
        lines += ["", group_title(groups), f"  {group_details(group)}"]
        for flat in group.flat_parameters:
            lines.append(f"  {flat_title(flat)}")
            lines += [f"    {line}" for line in table([row_of(param, facts.rank) for param in flat.parameters])]
    if facts.others:
        lines += ["", "in no group, whole on every rank; see find_unreduced_parameters(model)"]
        lines += [f"  {other.fqn} {other.shape} {other.dtype}, {bytes_of(other.nbytes)}" for other in facts.others]
    return "\n".join(lines)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of aligned cells, below ``COLUMNS``."""
    cells = [COLUMNS, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    return [
        "  ".join(
            cell.rjust(width) if column in _TO_THE_RIGHT else cell.ljust(width)
            for cell, width, column in zip(row, widths, COLUMNS, strict=True)
        ).rstrip()
        for row in cells
    ]


# ---- A description as text with colours and ruled tables, made by ``rich``, as wide as the terminal.


def can_use_terminal() -> bool:
    """Whether output goes to a terminal, and ``rich`` is installed."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def as_terminal_text(facts: ModelFacts, all_groups: bool) -> str:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=StringIO(), force_terminal=True)
    with console.capture() as capture:
        console.print(Text(title_of(facts), style="bold"))
        console.print(Text(sizes_of(facts)))
        for groups in collapsed(facts.groups, all_groups):
            group = groups[0]
            console.print()
            console.print(Text(group_title(groups), style="bold cyan"))
            console.print(Text(group_details(group), style="dim"))
            for table in _tables(group, facts.rank):
                console.print(table)
        if facts.others:
            console.print(
                Text("\nin no group, whole on every rank; see find_unreduced_parameters(model)", style="bold yellow")
            )
            for other in facts.others:
                console.print(Text(f"{other.fqn} {other.shape} {other.dtype}, {bytes_of(other.nbytes)}"))
    return capture.get().rstrip("\n")


def _tables(group: GroupFacts, rank: int) -> list[object]:
    from rich.table import Table
    from rich.text import Text

    tables: list[object] = []
    for flat in group.flat_parameters:
        table = Table(title=Text(flat_title(flat)), title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="right" if column in ("elements", "offset") else "left")
        for param in flat.parameters:
            table.add_row(*map(Text, row_of(param, rank)), style="" if param.requires_grad else "dim")
        tables.append(table)
    return tables


# ---- A description as one HTML page, with a picture of each flat parameter; it loads nothing from anywhere.
#
# A picture has a bar for each shard, as long as the shard, in which the parameters have colours and padding has none::
#
#     rank 0   |aaaaaaaaaaaa|
#     rank 1   |aaaaaaaabbb.|


_STYLE = """\
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222 }
h2 { font-size: 1.1em; margin: 2em 0 0 } h3 { font-size: 1em; font-weight: normal; margin: 1em 0 .3em }
table { border-collapse: collapse; margin: .5em 0 } th, td { text-align: left; padding: .1em .8em .1em 0 }
th { border-bottom: 1px solid #999; font-weight: 600 } td { border-bottom: 1px solid #eee }
.details { color: #666; margin: 0 } svg text { font: 11px system-ui, sans-serif }"""

_WIDTH, _HEIGHT, _STEP, _LABEL = 900, 18, 24, 110  # pixels: of a bar, its height, from bar to bar, left of the bars
_MOST_BARS = 16


def as_page(facts: ModelFacts, all_groups: bool) -> str:
    body = [f"<h1>{escape(title_of(facts))}</h1>", f"<p>{escape(sizes_of(facts))}</p>"]
    for groups in collapsed(facts.groups, all_groups):
        group = groups[0]
        body += [f"<h2>{escape(group_title(groups))}</h2>", f'<p class="details">{escape(group_details(group))}</p>']
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

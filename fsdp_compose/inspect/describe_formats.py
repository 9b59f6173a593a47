"""The facts of a model's layout as plain data, and the report of them.

The data says which rank holds what of each parameter, in how many bytes. It consists of numbers and names only, so it
can be printed, written and compared; ``describe`` reads it off a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape

from .report import Report, Section, bytes_of, count, ranges_of


@dataclass(frozen=True)
class ShardFacts:
    """The elements of a parameter in one shard."""

    ranks: tuple[int, ...]  # that hold the shard, by their numbers in the default process group: one of each replica
    start: int  # in the flattened parameter
    stop: int
    rows: tuple[int, int] | None  # start and stop as indices of dim 0, if shard boundaries lie between these
    shard_start: int  # in elements of the shard
    shard_stop: int


@dataclass(frozen=True)
class Computed:
    """Adjacent matrices of a parameter that the same ranks compute, in a step of ``Muon``."""

    ranks: tuple[int, ...]  # one of each replica, unless replicas share the work
    start: int  # the number of the first matrix
    stop: int


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter of a flat parameter."""

    fqn: str
    tied: tuple[str, ...]  # its other names in the model
    shape: tuple[int, ...]
    numel: int
    local_shape: tuple[int, ...]  # what ``parts`` count in: less than ``shape`` if tensor parallelism has cut it
    dtype: str
    requires_grad: bool
    offset: int  # of its first element in the flat parameter, in elements
    granule: int  # so many consecutive elements are never in two shards
    placements: tuple[str, ...]  # on the mesh of the sharded parameter
    parts: tuple[ShardFacts, ...]  # by shard, without empty ones; so called in JSON
    computed: tuple[Computed, ...] = ()  # its matrices, if an optimizer of whole matrices trains it


@dataclass(frozen=True)
class FlatParameterFacts:
    """One flat parameter. Bytes and elements are those of one replica."""

    dtype: str  # of the shards
    compute: str  # of the unsharded parameters
    reduce: str
    gradient: str  # of the sharded gradients
    gathered_by: str | None  # the class of its only parameter, if that class gathers it in a form of its own
    home: str  # where the shards live
    num_shards: int
    shard_numel: int  # with padding, as in the next line
    shard_bytes: int
    held_bytes: tuple[int, ...]  # by shard, without padding
    padding_bytes: int  # in all shards
    unsharded_bytes: int | None  # ``None``: its class decides, or there is nothing to gather
    parameters: tuple[ParameterFacts, ...]

    @property
    def flat_bytes(self) -> int:
        """The bytes of all shards."""
        return self.num_shards * self.shard_bytes


@dataclass(frozen=True)
class GroupFacts:
    """What one call of ``fully_shard`` or ``replicate`` manages."""

    names: tuple[str, ...]  # of the modules that were given to it
    classes: tuple[str, ...]
    is_replicated: bool  # ``replicate`` made it
    mesh_shape: tuple[int, ...]
    mesh_dims: tuple[str, ...]
    device: str  # where it computes
    shard_ranks: tuple[tuple[int, ...], ...]  # for each shard the ranks that hold it, as in ``ShardFacts``
    policy: dict[str, str]  # dtypes that the user chose
    options: dict[str, str]  # others that are not the default, and ``reshard_after_forward``
    flat_parameters: tuple[FlatParameterFacts, ...]

    @property
    def name(self) -> str:
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
    """A model, as one rank sees it."""

    name: str  # of its class
    rank: int
    world_size: int
    groups: tuple[GroupFacts, ...]
    others: tuple[OtherParameter, ...]

    @property
    def flat_parameters(self) -> list[FlatParameterFacts]:
        return [flat for group in self.groups for flat in group.flat_parameters]

    @property
    def parameters(self) -> list[ParameterFacts]:
        """The parameters of all groups, in their order."""
        return [param for flat in self.flat_parameters for param in flat.parameters]

    @property
    def num_parameters(self) -> int:
        return len(self.parameters) + len(self.others)

    @property
    def numel(self) -> int:
        """The elements of all parameters, whole."""
        return sum(param.numel for param in self.parameters) + sum(other.numel for other in self.others)

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


_MOST_RANGES = 4  # of a parameter, in words

COLUMNS = ("parameter", "shape", "dtype", "elements", "offset", "held by")


EqualGroups = Sequence[GroupFacts]
"""One group, or several that differ in names alone: a form of a description shows the first."""


def _without_names(group: GroupFacts) -> GroupFacts:
    """The facts, with parameters called as in their module, and without the ranks that an optimizer has chosen."""

    def in_module(fqn: str) -> str:
        prefixes = ((f"{name}.", number) for number, name in enumerate(group.names))
        return next((f"{number}.{fqn[len(prefix) :]}" for prefix, number in prefixes if fqn.startswith(prefix)), fqn)

    def renamed(param: ParameterFacts) -> ParameterFacts:
        return replace(param, fqn=in_module(param.fqn), tied=tuple(map(in_module, param.tied)), computed=())

    flats = [replace(flat, parameters=tuple(map(renamed, flat.parameters))) for flat in group.flat_parameters]
    return replace(group, names=(), flat_parameters=tuple(flats))


def names_of(groups: EqualGroups) -> str:
    """``blocks.0 ... blocks.31`` for neighbours in a list; ``blocks.{0, 2, 4}.mlp`` for others that differ in one
    number; all names if they differ otherwise, or are two."""
    names = [group.name for group in groups]
    paths = [name.split(".") for name in names]
    if len({len(path) for path in paths}) == 1 and len(names) > 2:
        differing = [i for i, names_there in enumerate(zip(*paths)) if len({*names_there}) > 1]
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
        f"{', '.join([*dtypes, *home])}: {count(flat.num_shards, 'shard')} of {bytes_of(flat.shard_bytes)}, "
        f"{padding}{unsharded}"
    )


def row_of(param: ParameterFacts, rank: int) -> tuple[str, ...]:
    """The cells of a parameter, for ``COLUMNS``; ``rank``: whose shard is never left out."""
    name = param.fqn if not param.tied else f"{param.fqn} = {', '.join(param.tied)}"
    shape = str(param.shape)
    if param.local_shape != param.shape and param.parts:
        shape += f", {param.local_shape} here"
    frozen = "" if param.requires_grad else ", frozen"
    return name, shape, param.dtype + frozen, f"{param.numel:,}", f"{param.offset:,}", held_by(param.parts, rank)


def held_by(shards: Sequence[ShardFacts], rank: int) -> str:
    """The shards of a parameter with the ranks that hold them; of many the first, the last and that of ``rank``."""
    shown, left_out = [], False
    for i, shard in enumerate(shards):
        if len(shards) <= _MOST_RANGES or i in (0, len(shards) - 1) or rank in shard.ranks:
            shown.append(("... | " if left_out else "") + f"{range_of(shard)} on {ranges_of(shard.ranks)}")
            left_out = False
        else:
            left_out = True
    return f"{unit_of(shards[0])} {' | '.join(shown)}" if shards else "nothing to hold"


def computed_by(computed: Sequence[Computed]) -> str:
    """The ranks that compute a parameter's matrices; of many stacks the first and the last."""
    if len(computed) < 2:
        return "".join(ranges_of(item.ranks) for item in computed)
    texts = [
        f"{item.start if item.stop == item.start + 1 else f'{item.start}-{item.stop - 1}'} on {ranges_of(item.ranks)}"
        for item in computed
    ]
    return " | ".join(texts if len(texts) <= _MOST_RANGES else [*texts[: _MOST_RANGES - 2], "...", texts[-1]])


def unit_of(shard: ShardFacts) -> str:
    return "elements" if shard.rows is None else "rows"


def range_of(shard: ShardFacts) -> str:
    """The rows or elements, both ends included."""
    first, stop = shard.rows or (shard.start, shard.stop)
    return str(first) if stop == first + 1 else f"{first}-{stop - 1}"


def report_of(facts: ModelFacts, all_groups: bool) -> Report:
    """The description of a model, with a picture of each flat parameter."""
    sections = []
    equal: dict[object, list[GroupFacts]] = {}
    for number, group in enumerate(facts.groups):
        equal.setdefault(number if all_groups else repr(_without_names(group)), []).append(group)
    for groups in equal.values():
        group = groups[0]
        dims = group.mesh_dims or (None,) * len(group.mesh_shape)
        shape = zip(dims, group.mesh_shape, strict=True)
        mesh = ", ".join(str(size) if name is None else f"{name}={size}" for name, size in shape)
        chosen = ", ".join(f"{name}={value}" for name, value in (*group.policy.items(), *group.options.items()))
        sections.append(Section(group_title(groups), details=f"mesh ({mesh}) on {group.device}; {chosen}"))
        for flat in group.flat_parameters:
            rows, columns = [row_of(param, facts.rank) for param in flat.parameters], [*COLUMNS]
            if any(param.computed for param in flat.parameters):
                columns.append("matrices computed by")
                texts = [computed_by(param.computed) for param in flat.parameters]
                rows = [(*row, text) for row, text in zip(rows, texts, strict=True)]
            frozen = [number for number, param in enumerate(flat.parameters) if not param.requires_grad]
            drawn = partial(picture, flat, group)
            right = ("elements", "offset")
            sections.append(Section(flat_title(flat), columns, rows, right, frozen, is_part=True, picture=drawn))
    others = [f"{other.fqn} {other.shape} {other.dtype}, {bytes_of(other.nbytes)}" for other in facts.others]
    if others:
        where = "in no group, whole on every rank; see find_unreduced_parameters(model)"
        sections.append(Section(where, items=others))
    num_flat, params = len(facts.flat_parameters), facts.num_parameters
    title = (
        f"{facts.name}: {count(len(facts.groups), 'group')}, {count(num_flat, 'flat parameter')}, "
        f"{count(params, 'parameter')} of {count(facts.numel, 'element')}"
    )
    sizes = (
        f"rank {facts.rank} of {facts.world_size} keeps {bytes_of(facts.kept_bytes)} of {bytes_of(facts.flat_bytes)}, "
        f"of which {bytes_of(facts.padding_bytes)} are padding"
    )
    return Report(facts.name, [title, sizes], sections)


# ---- The picture of a flat parameter
#
# It has a bar for each shard, as long as the shard, in which the parameters have colors and padding has none::
#
#     rank 0   |aaaaaaaaaaaa|
#     rank 1   |aaaaaaaabbb.|


_WIDTH, _HEIGHT, _STEP, _LABEL = 900, 18, 24, 110  # pixels: of a bar, its height, from bar to bar, left of the bars
_MOST_BARS = 16


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
            bars.append(_bar(param, index, group.shard_ranks[shard], flat.shard_numel, y))
    height = num_bars * _STEP
    if num_bars < flat.num_shards:
        bars.append(f'<text x="0" y="{height + 13}">and {flat.num_shards - num_bars} more shards</text>')
        height += _STEP
    return f'<svg width="{_LABEL + _WIDTH + 1}" height="{height}" role="img">{"".join(bars)}</svg>'


def _bar(param: ParameterFacts, index: int, ranks: tuple[int, ...], shard_numel: int, y: int) -> str:
    """A parameter in the bar of one shard; nothing if it has no element there."""
    held = next((item for item in param.parts if item.ranks == ranks), None)
    if held is None:
        return ""
    x = _LABEL + held.shard_start * _WIDTH / shard_numel
    width = (held.shard_stop - held.shard_start) * _WIDTH / shard_numel
    color = f"hsl({index * 137 % 360}, 55%, {'70' if param.requires_grad else '88'}%)"
    where = f"{unit_of(held)} {range_of(held)} on {ranges_of(held.ranks)}"
    title = escape(f"{param.fqn} {param.shape}: {where}")
    frame = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_HEIGHT}"'
    label = ""
    if width > 7 * len(param.fqn):
        label = f'<text x="{x + 4:.2f}" y="{y + 13}" pointer-events="none">{escape(param.fqn)}</text>'
    return f'<rect {frame} fill="{color}" stroke="#666" stroke-width="0.5"><title>{title}</title></rect>{label}'

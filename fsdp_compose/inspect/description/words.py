"""The facts in words that every form of a description uses."""

from __future__ import annotations

from collections.abc import Sequence

from .facts import FlatParameterFacts, GroupFacts, ModelFacts, ParameterFacts, Part

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


def group_title(group: GroupFacts) -> str:
    ranks = ranges_of([rank for ranks in group.shard_ranks for rank in ranks])
    how = "replicated on" if group.is_replicated else "sharded over"
    num_shards, num_replicas = len(group.shard_ranks), len(group.shard_ranks[0])
    if num_replicas > 1 and num_shards > 1:
        how = f"{num_replicas} replicas of {num_shards} shards on"
    return f"{group.name} ({', '.join(group.classes)}): {how} ranks {ranks}"


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

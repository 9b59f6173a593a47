"""The result of ``plan()``: plain data, formatted as text, JSON or a picture, with advice.

The data describe a training step on one rank, for each number of ranks; all sizes are bytes on one rank.
``simulated_step`` measures them, and ``planning`` builds the model to simulate. The end of this file checks the
options of the command line. Nothing here touches a model."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import MisuseError
from ..optim import MatricesReport
from .describe_formats import ModelFacts
from .report import Report, Section, as_text, bytes_of
from .step_events import StepEvent

PARAMETERS, GATHERED, GRADIENTS, REDUCTIONS, OPTIMIZER, ACTIVATIONS, TEMPORARY, OTHER = KINDS = (
    "parameters",
    "gathered",
    "gradients",
    "reductions",
    "optimizer",
    "activations",
    "temporary",
    "other",
)
"""Kinds of memory: shards, and parameters in no group; unsharded parameters; gradients in ``.grad``; inputs of
reductions; optimizer state; tensors made by forward, or by recomputation in backward; temporary tensors of backward and
of the optimizer's step; everything else, such as the batch and buffers."""


@dataclass(frozen=True)
class Moment:
    """The peak memory of one phase.

    Attributes:
        doing: the phase: ``building``, ``forward``, ``backward`` or ``optimizer``.
        bytes_by_kind: bytes for each of ``KINDS``.
    """

    doing: str
    bytes_by_kind: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True)
class CollectiveFacts:
    """One collective of a step.

    Attributes:
        kind: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all`` or ``gather``.
        group: the name of its group; of an all-to-all, the parameters that it is for.
        nbytes: size of the whole tensor; of an all-to-all, of all that its ranks send.
        num_ranks: number of ranks that take part.
        sent: of an all-to-all, bytes that this rank sends.
        is_exposed: no matrix product, convolution or attention runs between its start and the wait for it.
    """

    kind: str
    group: str
    nbytes: int
    num_ranks: int
    sent: int | None = None
    is_exposed: bool = False

    @property
    def chunk_bytes(self) -> int:
        """Size of what one rank gives or gets."""
        return self.nbytes // self.num_ranks

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends at least, by ring algorithms: the chunks of all others, twice in an all-reduce. In an
        all-to-all, those that this rank sends."""
        if self.sent is not None:
            return self.sent
        return (self.nbytes - self.chunk_bytes) * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Advice:
    """A suggestion.

    Attributes:
        about: its topic: ``small shards``, ``one large group``, ``tied``, ``replicate``, ``padding``, ``activations``,
            ``unreduced`` or ``computed``.
        text: the suggestion, with the figures behind it.
    """

    about: str
    text: str


@dataclass(frozen=True)
class LimitedFacts:
    """A step with a limit on the memory for communication.

    Attributes:
        limit: ``limit_unsharded_bytes``.
        peak: the peak memory of the step.
        num_exposed, exposed_bytes: its exposed collectives, see ``CollectiveFacts``.
    """

    limit: int | str
    peak: Moment
    num_exposed: int
    exposed_bytes: int


@dataclass(frozen=True)
class WorldFacts:
    """A training step on one rank of many.

    Attributes:
        world_size: the number of ranks.
        layout: the layout of the parameters, see ``describe``.
        moments: peak memory of each phase of a later step.
        building: peak memory while the model is built and sharded.
        collectives: the collectives of flat parameters in one step, in order.
        recomputes: whether backward recomputed forwards.
        unreduced: trainable parameters whose gradients are not averaged, with reasons.
        computed: operations that had to run because torch cannot infer their output shapes.
        step: what the optimizer says of a step, if it is ``Muon`` or ``Matrixwise``.
        limited: the same step with each of the limits that ``plan`` was given.
        events: what the rank does in that step, in order, for models of time; not in the report or in JSON.
    """

    world_size: int
    layout: ModelFacts
    moments: tuple[Moment, ...]
    building: Moment
    collectives: tuple[CollectiveFacts, ...]
    recomputes: bool
    unreduced: tuple[str, ...]
    computed: tuple[str, ...]
    step: MatricesReport | None = None
    advice: tuple[Advice, ...] = ()
    limited: tuple[LimitedFacts, ...] = ()
    events: tuple[StepEvent, ...] = field(default=(), repr=False)

    def with_limit(self, limit: int | str) -> LimitedFacts:
        """What the limit with which this step was run does to it."""
        return LimitedFacts(limit, self.peak, *self.exposed)

    @property
    def exposed(self) -> tuple[int, int]:
        """The number of exposed collectives, and their bytes."""
        found = [item.nbytes for item in self.collectives if item.is_exposed]
        return len(found), sum(found)

    @cached_property
    def peak(self) -> Moment:
        """The peak memory of a step."""
        return max(self.moments, key=lambda moment: moment.nbytes)

    @property
    def gathers(self) -> list[CollectiveFacts]:
        return [item for item in self.collectives if item.kind == "all-gather"]


@dataclass(frozen=True)
class Plan:
    """The result of ``plan()``. Print it, or read the figures in ``worlds``; docs/planning.md explains them.

    Attributes:
        optimizer, batch: descriptions of the optimizer and the batch.
        worlds: a step for each number of ranks, in the order of the request.
    """

    optimizer: str
    batch: str
    worlds: tuple[WorldFacts, ...]

    def text(self) -> str:
        """Format the plan as tables of memory, collectives and layout, with advice."""
        return as_text(report_of(self))

    __str__ = text

    def json(self) -> str:
        """Return everything as JSON, for programs."""
        worlds = []
        for world in self.worlds:
            facts = asdict(replace(world, events=()))
            del facts["events"]
            facts["peak"] = {"doing": world.peak.doing, "nbytes": world.peak.nbytes}
            for moment in (*facts["moments"], facts["building"]):
                moment["nbytes"] = sum(moment["bytes_by_kind"].values())
            worlds.append(facts)
        return json.dumps({"optimizer": self.optimizer, "batch": self.batch, "worlds": worlds}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw the memory by kind for each number of ranks, and write it to a ``.png``, ``.svg`` or ``.pdf`` file.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the name has another suffix, or there is no such folder.
        """
        save_figure(Path(path), (2.5 + 1.2 * max(3, len(self.worlds)), 5), partial(_draw, self))


# ---- The report of a plan: tables with a row for each number of ranks


_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
_OF_OPTIMIZERS = "all-to-all"  # shown only if there are some


def report_of(plan: Plan) -> Report:
    layout = plan.worlds[0].layout
    batch = f"; {plan.batch} on each rank" if plan.batch else ""
    heading = (
        f"{layout.name}: {layout.num_parameters:,} parameters of {layout.numel:,} elements, {len(layout.groups)} "
        f"groups; {plan.optimizer}{batch}"
    )
    memory = ("ranks", "mesh", "peak", "in", *KINDS, "building")
    kinds = list(_COLLECTIVES)
    if any(item.kind == _OF_OPTIMIZERS for world in plan.worlds for item in world.collectives):
        kinds.append(_OF_OPTIMIZERS)
    collectives = ("ranks", *(f"{kind}s" for kind in kinds), "sent by a rank", "least part")
    rows = [_collective_row(world, kinds) for world in plan.worlds]
    flat = ("ranks", "flat parameters", "kept by a rank", "padding of all", "in rows", "in elements")
    sections = [
        Section("peak memory of one rank in a step", memory, [*map(_memory_row, plan.worlds)], right=memory),
        Section("collectives in a step: count and total bytes", collectives, rows, right=collectives),
        Section("layout", flat, [*map(_layout_row, plan.worlds)], right=flat),
    ]
    limits = [row for world in plan.worlds if world.limited for row in _limit_rows(world)]
    if limits:
        columns = ("ranks", "limit", "peak", "in", "exposed collectives")
        sections.append(Section("peak memory with limit_unsharded_bytes", columns, limits, right=columns))
    steps = [f"{world.world_size:,} ranks: {world.step}" for world in plan.worlds if world.step is not None]
    if steps:
        sections.append(Section("the optimizer's step", items=steps))
    said: dict[str, list[str]] = {}
    for world in plan.worlds:
        for item in world.advice:
            said.setdefault(item.text, []).append(f"{world.world_size:,}")
    if said:
        advice = [f"{', '.join(sizes)} ranks: {text}" for text, sizes in said.items()]
        sections.append(Section("advice", items=advice))
    return Report(layout.name, [heading], sections)


def _memory_row(world: WorldFacts) -> list[str]:
    peak = world.peak
    kinds = [bytes_of(peak.bytes_by_kind[kind]) if peak.bytes_by_kind[kind] else "-" for kind in KINDS]
    meshes = sorted({"x".join(map(str, group.mesh_shape)) for group in world.layout.groups})
    start = [f"{world.world_size:,}", ", ".join(meshes) or "-", bytes_of(peak.nbytes), peak.doing]
    return [*start, *kinds, bytes_of(world.building.nbytes)]


def _collective_row(world: WorldFacts, kinds: Sequence[str]) -> list[str]:
    cells = [f"{world.world_size:,}"]
    for kind in kinds:
        found = [item.nbytes for item in world.collectives if item.kind == kind]
        cells.append(f"{len(found):,} of {bytes_of(sum(found))}" if found else "-")
    if not world.collectives:
        return [*cells, "-", "-"]
    sent = sum(item.sent_bytes for item in world.collectives)
    chunks = [item.chunk_bytes for item in world.collectives if item.sent is None]
    return [*cells, bytes_of(sent), bytes_of(min(chunks)) if chunks else "-"]


def _limit_rows(world: WorldFacts) -> Iterator[list[str]]:
    none = ("none", world.peak, *world.exposed)
    for limit, peak, count, exposed in [(*vars(item).values(),) for item in world.limited] + [none]:
        words = bytes_of(limit) if isinstance(limit, int) else limit
        yield [f"{world.world_size:,}", words, bytes_of(peak.nbytes), peak.doing, f"{count:,} of {bytes_of(exposed)}"]


def _layout_row(world: WorldFacts) -> list[str]:
    layout, params = world.layout, world.layout.parameters
    in_elements = sum(any(shard.rows is None for shard in param.parts) for param in params)
    counts = len(params) - in_elements, in_elements
    sizes = bytes_of(layout.kept_bytes), bytes_of(layout.padding_bytes)
    return [f"{world.world_size:,}", f"{len(layout.flat_parameters):,}", *sizes, *map("{:,}".format, counts)]


# ---- A plan as a picture, by matplotlib: for each number of ranks a bar of the memory at the peak, by kind.


SUFFIXES = (".png", ".svg", ".pdf")
_COLORS = ("#4c78a8", "#72b7b2", "#f58518", "#eeca3b", "#54a24b", "#b279a2", "#ff9da6", "#bab0ac")


def check_picture(path: Path) -> None:
    """Check that a picture can be written to ``path``, before any work is done.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the name has another suffix; there is no such folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if path.suffix not in SUFFIXES:
        raise MisuseError(f"--plot {path}: expected a name that ends in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise MisuseError(f"--plot {path}: there is no folder {path.parent}")


def save_figure(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write a figure of matplotlib, completely or not at all. ``draw`` fills it. Raises the errors of
    ``check_picture``."""
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _draw(plan: Plan, figure: Any) -> None:
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


_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


# ---- Advice: each rule is a function of the facts for one number of ranks, and quotes the figures it uses.


# Bytes from each rank below which an all-gather takes the time of its latency: about 100 GB/s times 10 us.
_SMALL_CHUNK = 1 << 20
_LARGE_GROUP = 0.5  # of all parameters
_LARGE_SHARE = 0.25  # of the peak
_SMALL_STATE = 0.1  # of the peak
_MUCH_PADDING = 0.01  # of all shards
_MANY_ACTIVATIONS = 0.6  # of the peak
_MOST_NAMES = 3


def advise(facts: WorldFacts) -> WorldFacts:
    rules = (_small_shards, _replicas, _large_group, _ties, _padding, _activations, _unreduced, _computed)
    return replace(facts, advice=tuple(item for rule in rules for item in rule(facts)))


def _small_shards(facts: WorldFacts) -> Iterator[Advice]:
    chunks: dict[str, int] = {}
    gathers = [item for item in facts.gathers if item.num_ranks > 1]
    for item in gathers:
        chunks[item.group] = max(chunks.get(item.group, 0), item.chunk_bytes)
    small = {name: nbytes for name, nbytes in chunks.items() if nbytes < _SMALL_CHUNK}
    if not small or (len(small) == 1 and len(chunks) > 1):  # a single small group, usually the root's, costs little
        return
    smallest = min(small, key=lambda name: small[name])
    typical = sorted(small.values())[len(small) // 2]
    text = (
        f"{len(small)} of {len(chunks)} groups gather less than {_SMALL_CHUNK >> 20} MiB from each rank (smallest: "
        f"{smallest}, {bytes_of(small[smallest])}), so latency dominates their all-gathers."
    )
    num_together = -(-_SMALL_CHUNK // max(1, typical))
    if num_together <= len(small):
        text += f" Make one group of {num_together} adjacent modules: fully_shard([block, ..., block])."
    num_ranks = max(item.num_ranks for item in gathers)
    whole, divisors = typical * num_ranks, [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    num_shards = max(n for n in divisors if n == 1 or whole // n >= _SMALL_CHUNK)  # the most that are not small
    if num_shards > 1:
        extra = _state_bytes(facts) * (num_ranks // num_shards - 1)
        text += (
            f" Or shard over {num_shards} ranks and replicate (--mesh *x{num_shards}): "
            f"{bytes_of(extra)} more on each rank."
        )
    elif num_together > len(small):
        text += f" Even merged they stay below {_SMALL_CHUNK >> 20} MiB: replicate() them instead."
    yield Advice("small shards", text)


def _state_bytes(facts: WorldFacts) -> int:
    """Return the bytes of parameters, gradients and optimizer state that a rank keeps."""
    return sum(
        max(moment.bytes_by_kind[kind] for moment in facts.moments) for kind in (PARAMETERS, GRADIENTS, OPTIMIZER)
    )


def _replicas(facts: WorldFacts) -> Iterator[Advice]:
    num_ranks = max((item.num_ranks for item in facts.gathers), default=1)
    whole = _state_bytes(facts) * num_ranks
    if num_ranks > 1 and whole <= _SMALL_STATE * facts.peak.nbytes:
        yield Advice(
            "replicate",
            f"parameters, gradients and optimizer state would take {bytes_of(whole)} on every rank unsharded, and the "
            f"peak is {bytes_of(facts.peak.nbytes)}: replicate over the dimension of {num_ranks} ranks (replicate(), "
            f"or another --mesh), which saves {len(facts.gathers)} all-gathers a step.",
        )


def _large_group(facts: WorldFacts) -> Iterator[Advice]:
    groups = facts.layout.groups
    sizes = [sum(flat.flat_bytes for flat in group.flat_parameters) for group in groups]
    for group, nbytes in zip(groups, sizes, strict=True):
        share = nbytes / max(1, sum(sizes))
        held = max((item.nbytes for item in facts.gathers if item.group == group.name), default=0)
        if share > _LARGE_GROUP and held > _LARGE_SHARE * facts.peak.nbytes:
            yield Advice(
                "one large group",
                f"the group {group.name} has {share:.0%} of the parameters: gathered, it takes {bytes_of(held)} of a "
                f"peak of {bytes_of(facts.peak.nbytes)}, and its all-gather overlaps no compute. Make groups of the "
                "modules inside it (--wrap ClassName).",
            )


def _ties(facts: WorldFacts) -> Iterator[Advice]:
    for group in facts.layout.groups:
        for flat in group.flat_parameters:
            for param in flat.parameters:
                if param.tied:
                    yield Advice(
                        "tied",
                        f"{' = '.join((param.fqn, *param.tied))} is one parameter of the group {group.name}, which "
                        "stays gathered from the first use of the parameter to the last"
                        + (f": {bytes_of(flat.unsharded_bytes)}." if flat.unsharded_bytes else "."),
                    )


def _padding(facts: WorldFacts) -> Iterator[Advice]:
    padding, whole = facts.layout.padding_bytes, facts.layout.flat_bytes
    if padding > _MUCH_PADDING * whole:
        yield Advice(
            "padding",
            f"{padding / whole:.1%} of all shards is padding ({bytes_of(padding)}): the groups are too small for so "
            "many ranks, or granules too large.",
        )


def _activations(facts: WorldFacts) -> Iterator[Advice]:
    activations = facts.peak.bytes_by_kind[ACTIVATIONS]
    if activations > _MANY_ACTIVATIONS * facts.peak.nbytes and not facts.recomputes:
        yield Advice(
            "activations",
            f"activations are {activations / facts.peak.nbytes:.0%} of the peak ({bytes_of(activations)}). More ranks "
            "do not help: use a smaller batch on each rank or activation checkpointing.",
        )


def _unreduced(facts: WorldFacts) -> Iterator[Advice]:
    if facts.unreduced:
        more = f"; and {len(facts.unreduced) - _MOST_NAMES} more" if len(facts.unreduced) > _MOST_NAMES else ""
        yield Advice(
            "unreduced", f"gradients that no group averages: {'; '.join(facts.unreduced[:_MOST_NAMES])}{more}."
        )


def _computed(facts: WorldFacts) -> Iterator[Advice]:
    if facts.computed:
        yield Advice(
            "computed",
            f"torch cannot infer the output shape of {', '.join(facts.computed)} without computing it: results that "
            "depend on its elements may differ in a real run.",
        )


# ---- Options of the command line, checked before anything is built.


DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16,
}  # fmt: skip
REST = "*"  # in a mesh's shape: the remaining ranks


def load_factory(text: str) -> Callable[..., Any]:
    """Import the function that ``module:name`` or ``path/to/file.py:name`` names. Raises ValueError if there is none;
    exceptions of the module's own code propagate."""
    place, colon, name = text.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise MisuseError(f"--model {text}: expected module:factory, or path/to/file.py:factory")
    module = _file(Path(place), text) if place.endswith(".py") else _module(place, text)
    found = getattr(module, name, None)
    if not callable(found):
        offered = [key for key, value in vars(module).items() if _can_be_factory(value, module)]
        others = f"; it has {', '.join(offered[:8])}" if offered else ""
        what = "is not a function" if hasattr(module, name) else "does not exist"
        raise MisuseError(f"--model {text}: {name} {what} in {place}{others}")
    return found


def _can_be_factory(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not value.__name__.startswith("_")


def _module(name: str, text: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module was found, and one of its own imports fails
        raise MisuseError(
            f"--model {text}: there is no module {error.name} on Python's path, which includes the current folder; to "
            "name a file, give its path with .py"
        ) from None


def _file(path: Path, text: str) -> ModuleType:
    if not path.is_file():
        raise MisuseError(f"--model {text}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "it is a file of Python's"
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # as in an import: dataclasses and pickles look for it
    sys.path.insert(0, str(path.parent))  # as when Python runs it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if known is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = known
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def world_sizes_of(text: str) -> tuple[int, ...]:
    """Parse ``8,64,1024``. Raises ValueError if an item is not a number, or less than 1."""
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise MisuseError(f"--world-size {text}: expected numbers of ranks, for example 8,64,1024")
    return tuple(map(int, sizes))


def mesh_shape_of(text: str | None, world_size: int) -> tuple[int, ...]:
    """Parse the shape of a mesh of ``world_size`` ranks: ``8``, or ``2x4`` for 2 replicas of 4 shards; one number may
    be ``*``, for the remaining ranks. Raises ValueError if it has another form, or does not fit ``world_size``."""
    if text is None:
        return (world_size,)
    sizes = text.lower().split("x")
    is_size = [size == REST or (size.isdecimal() and int(size) > 0) for size in sizes]
    if len(sizes) > 2 or not all(is_size) or sizes.count(REST) > 1:
        raise MisuseError(
            f"--mesh {text}: expected the number of shards, or RxS for R replicas of S shards; one of them may be *, "
            "for the remaining ranks: *x8"
        )
    given = math.prod(int(size) for size in sizes if size != REST)
    if world_size % given or (REST not in sizes and given != world_size):
        there = f"a multiple of {given}" if REST in sizes else str(given)
        raise MisuseError(f"--mesh {text}: needs {there} ranks, but --world-size is {world_size}")
    return tuple(world_size // given if size == REST else int(size) for size in sizes)


def dtype_of(text: str | None, option: str) -> torch.dtype | None:
    """Raises ValueError if there is no such dtype."""
    if text is None or text in DTYPES:
        return None if text is None else DTYPES[text]
    raise MisuseError(f"{option} {text}: expected one of {', '.join(DTYPES)}")

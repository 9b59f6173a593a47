"""``tune()``: which settings take least time, of those that fit."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.nn as nn

from .._arguments import checked, size_of
from ..errors import MisuseError
from ..extension import STRATEGIES, MixedPrecisionPolicy, no_sync, states_to_run
from ..inspect import (
    ACTIVATIONS,
    ADAMW,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    LossOf,
    MakeOptimizer,
    OptimizerOf,
    WorldFacts,
    bytes_of,
    model_of,
    modules_to_wrap,
    of_parameters,
    simulate,
)
from .answer import Rejected, Result, Tuning, in_order, predict
from .hardware import Hardware, hardware_of
from .setting import CHECKPOINTED, NONE, Setting, apply_setting, code_of, large_children

_NUM_REFINED = 3  # the best settings of the first round, whose groups the second round changes
_MOST_BLOCKS_PER_GROUP = 4
_MOST_SEQUENCES = 4096  # of a rank, in the search for the largest batch that fits
_ON_HOST = (PARAMETERS, GRADIENTS, OPTIMIZER)  # kinds of memory that offloading keeps there


@checked()
def tune(
    factory: Callable[..., Any],
    world_size: int,
    hardware: str | Hardware = "h100",
    *,
    node_size: int | None = None,
    max_memory: int | str | None = None,
    wrap: Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    batch: int | Sequence[int] | None = None,
    seq: int | None = None,
    optimizer: MakeOptimizer | None = ADAMW,
    optimizer_of: OptimizerOf | None = None,
    is_compiled: bool = False,
    accumulates: bool = False,
    measured: float | None = None,
    node_bandwidth: float | None = None,
    note: Callable[[str], None] | None = None,
) -> Tuning:
    """Find the settings with which a training step of this model takes least time on these machines.

    For each setting that may fit, this runs the step as ``plan`` does, without other ranks, without a GPU and without
    memory, and predicts its time from what the step does. It compares strategies and meshes, which blocks form a group,
    whether parameters are gathered again before backward, which blocks recompute their activations, micro-batches, and
    offloading. Precision is the caller's choice. docs/planning.md says how good the predictions are.

    Ranks: call it in a process without a process group.

    Args:
        factory: as for ``plan``, but it must not shard the model. If it has a parameter ``batch``, the sequences of one
            rank, micro-batches are compared too.
        world_size: the number of ranks.
        hardware: the name of a preset (``a100``, ``h100``, ``h200``, ``b200``, ``mi300x``), a file that ``calibrate``
            has written, or an object.
        node_size: ranks in a node; default: the hardware's.
        max_memory: bytes of a rank, or ``"80GB"``; default: the hardware's. What allocators and libraries reserve is
            left free.
        wrap, mp_policy, batch, seq, optimizer, optimizer_of: as for ``plan``. ``batch`` is what a rank trains in a
            step, in one or several micro-batches. Of several, and of the largest that fits, the time of a sequence is
            compared.
        is_compiled: the blocks will be compiled (``Block.compile()``).
        accumulates: micro-batches but the last are under ``no_sync``, see ``plan``.
        measured: seconds of a step of the default setting (``fully_shard`` on each block and on the model, with the
            first batch) on the real machine. All times are predicted relative to it.
        node_bandwidth: bytes a second between two nodes, of all cards together; default: the hardware's.
        note: called with a line of text about the progress.

    Returns:
        What was found; print it. ``best.code`` is a function to paste.

    Raises:
        ValueError: arguments contradict each other or the model; no memory limit is known; the factory's model is
            sharded already.
        RuntimeError: there is a process group; or the model has data-dependent control flow.
    """
    machine = hardware_of(hardware) if isinstance(hardware, str) else hardware
    memory = machine.device.capacity if max_memory is None else size_of(max_memory, "tune(max_memory={})")
    batches = [batch] if batch is None or isinstance(batch, int) else [*batch]
    if not batches or min(1 if number is None else number for number in (world_size, node_size, *batches)) < 1:
        raise MisuseError(f"tune(world_size={world_size}, node_size={node_size}, batch={batch}): expected at least 1")
    if min(1.0 if number is None else number for number in (measured, node_bandwidth)) <= 0:
        raise MisuseError(f"tune(measured={measured}, node_bandwidth={node_bandwidth}): expected more than 0")
    if not memory:
        raise MisuseError(f"tune(): {machine.device.name} does not say how much memory it has: give max_memory")
    if (node_size is not None and node_size < world_size) or node_bandwidth is not None:
        machine = replace(machine, network=machine.network.with_node(node_size, node_bandwidth))
    _check_network(machine, world_size)
    make = optimizer_of
    if make is None and optimizer is not None:
        make = partial(of_parameters, optimizer)
    model = _Model(factory, wrap, mp_policy, batches[0], seq)
    search = _Search(model, make, world_size, machine, memory, is_compiled, accumulates, note or (lambda _: None))
    several = [number for number in batches if number is not None] if len(batches) > 1 else [model.batch or 0]
    return search.run(several, measured)


def _check_network(machine: Hardware, world_size: int) -> None:
    """Refuse hardware of which communication between so many ranks is not known."""
    device, levels = machine.device, machine.network.levels
    measured = machine.calibrated.get("processes", world_size)
    if len(levels) == 1 and isinstance(measured, int) and measured < world_size:
        raise MisuseError(
            f"tune(world_size={world_size}): {device.name} was measured by {measured} process(es) of one machine. That "
            "says nothing of more: measure with as many (calibrate --processes), or say what connects the machines "
            "(calibrate --node-bandwidth)"
        )
    if world_size > 1 and machine.network.is_free and (device.overlaps or not device.collectives):
        raise MisuseError(
            f"tune(world_size={world_size}): by its description, {device.name} communicates in no time: give its "
            "[[network.level]] a bandwidth"
        )


@dataclass
class _Model:
    """Makes the model, for each setting."""

    # See ``tune``.
    factory: Callable[..., Any]
    wrap: Sequence[str] | None
    mp_policy: MixedPrecisionPolicy | None
    batch: int | None
    seq: int | None
    num_blocks: int = 0  # how many modules become groups by default; known when the model has been made
    can_split: bool = False  # whether they have large modules inside
    codes: dict[Setting, str] = field(default_factory=dict)  # the code of the settings that it was made for

    def __post_init__(self) -> None:
        batch = inspect.signature(self.factory).parameters.get("batch") if self.seq is None else None
        self.takes_batch = batch is not None
        if batch is None and self.seq is None and self.batch is not None:
            raise MisuseError("tune(batch=...): the factory has no parameter batch, and there is no seq: leave it out")
        if self.batch is None and batch is not None and isinstance(batch.default, int):
            self.batch = batch.default

    def build(self, device: str, setting: Setting) -> tuple[nn.Module, LossOf]:
        batch = setting.batch
        factory = partial(self.factory, batch=batch) if self.takes_batch and batch else self.factory
        model, loss_of = model_of(factory, None if self.seq is None else batch, self.seq)
        if states_to_run(model):
            raise MisuseError("tune(): the factory returns an already sharded model: let it return the plain one")
        blocks = [block for block in modules_to_wrap(model, self.wrap) if block is not model]
        self.num_blocks, self.can_split = len(blocks), bool(blocks and large_children(blocks))
        self.codes[setting] = code_of(setting, model, blocks, self.mp_policy, device)
        apply_setting(setting, model, blocks, self.mp_policy)
        return model, loss_of


_Run = tuple[WorldFacts, int]  # what a dry run of a setting found, and the peak on the device


@dataclass
class _Search:
    model: _Model
    make_optimizer: OptimizerOf | None
    world_size: int
    hardware: Hardware
    memory: int
    is_compiled: bool
    accumulates: bool
    note: Callable[[str], None]
    found: dict[Setting, Result] = field(default_factory=dict)
    rejected: dict[Setting, str] = field(default_factory=dict)
    # By what is recomputed, bytes for each sequence; for all, if it is not known how many there are.
    activations: dict[str, float] = field(default_factory=dict)
    num_runs: int = 0
    factor: float = 1.0

    def run(self, batches: Sequence[int], measured: float | None) -> Tuning:
        self.node = min(self.hardware.network.levels[0].ranks or self.world_size, self.world_size)
        self.default = Setting("zero3", (self.world_size,), batch=batches[0])
        self.first = self._dry_run(self.default)
        if measured is not None:
            self.factor = measured / self._result(self.default, self.first).times.seconds
        for batch in batches:
            for strategy in self._strategies():
                self._try(self._first_round(replace(strategy, batch=batch), len(batches) == 1))
        if not self.found:
            self._try(self._first_round(replace(self.default, is_offloaded=True), True))
        if len(batches) > 1 and self.found:
            self._try_larger_batches(max(batches))
        for result in self._ranked()[:_NUM_REFINED]:
            self._try(self._other_groups(result.setting))
        layout, results = self.first[0].layout, in_order(self._ranked(), self.hardware, self.memory)
        rejected = [Rejected(setting, why) for setting, why in self.rejected.items()]
        given = layout.name, self.world_size, self.node, self.memory, self.hardware, self.is_compiled
        found = len(layout.groups), (*results,), self._result(self.default, self.first), (*rejected,), self.num_runs
        return Tuning(*given, *found, measured, self.factor)

    # ---- What is tried

    def _strategies(self) -> Iterator[Setting]:
        world, node = self.world_size, self.node
        yield Setting("zero3", (world,))
        if world == 1:
            return
        yield Setting("zero2", (world,))
        yield Setting("ddp", (world,))
        shards = node
        while 1 < shards < world and world % shards == 0:
            mesh = (world // shards, shards)
            yield Setting("hybrid", mesh)
            yield Setting("hybrid", mesh, reshard_after_forward=False)
            if shards == node:
                yield Setting("hfsdp", mesh)
                yield Setting("zero3", (world,), reshard_after_forward=node)
            shards *= 2

    def _first_round(self, setting: Setting, splits_batch: bool) -> Iterator[Setting]:
        """For each micro-batch, from the largest, recompute no more than it takes to fit; stop where nothing has to be
        recomputed, since smaller ones only communicate more often."""
        splits = [num for num in range(1, setting.batch + 1) if setting.batch % num == 0] if splits_batch else []
        for num_batches in splits or [1]:
            batch = setting.batch // num_batches
            accumulates = self.accumulates and num_batches > 1
            for checkpointed in self._levels():
                tried = replace(setting, batch=batch, num_batches=num_batches, checkpointed=checkpointed)
                yield (tried := replace(tried, no_sync=accumulates))
                if tried in self.found:
                    if checkpointed == NONE:
                        return
                    break

    def _levels(self) -> Sequence[str]:
        return CHECKPOINTED if self.model.num_blocks else (NONE,)

    def _try_larger_batches(self, batch: int) -> None:
        """Double the batch of the best setting while it fits, however much is recomputed."""
        best = self._ranked()[0].setting
        while (batch := 2 * batch) <= _MOST_SEQUENCES:
            tried = [replace(best, batch=batch, checkpointed=checkpointed) for checkpointed in self._levels()]
            self._try(tried)
            if not any(setting in self.found for setting in tried):
                return

    def _other_groups(self, setting: Setting) -> Iterator[Setting]:
        per_group = 2
        while per_group <= min(_MOST_BLOCKS_PER_GROUP, self.model.num_blocks // 2):
            yield replace(setting, per_group=per_group)
            per_group *= 2
        if self.model.can_split:
            yield replace(setting, splits=True)

    # ---- What it gives

    def _try(self, settings: Iterable[Setting]) -> None:
        for setting in settings:
            if setting in self.found or setting in self.rejected:
                continue
            state = self._state(setting)
            activations = int(self.activations.get(setting.checkpointed, 0.0) * (setting.batch or 1))
            if self._needed(setting, state + activations) > self.memory:
                more = f", activations {bytes_of(activations)}" if activations else ""
                what = "parameters, optimizer state, and gradients or what stays gathered"
                self.rejected[setting] = f"{what} take {bytes_of(state)}{more}"
                continue
            try:
                result = self._result(setting, self.first if setting == self.default else self._dry_run(setting))
            except Exception as error:  # what the model allows by default, another setting may not
                self.rejected[setting] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            if result.needed <= self.memory:
                self.found[setting] = result
                continue
            needed = bytes_of(result.needed)
            self.rejected[setting] = f"the peak is {bytes_of(result.peak)}, with what is reserved {needed}"

    def _needed(self, setting: Setting, peak: int) -> int:
        return peak + sum(self.hardware.device.reserved(peak, _num_networks(setting)).values())

    def _state(self, setting: Setting) -> int:
        """Bytes of parameters, optimizer state, and gradients or what stays gathered after forward, on the device, from
        those of the default setting, in which all is sharded."""
        if setting.is_offloaded:
            return 0
        row, sizes = STRATEGIES[setting.strategy], setting.mesh
        kept = {kind: max(moment.bytes_by_kind[kind] for moment in self.first[0].moments) for kind in _ON_HOST}
        # Parameters that all ranks gather and keep are counted apart from those that the optimizer trains.
        dims = {PARAMETERS: row.optimizer if row.gathers_all else row.parameters, GRADIENTS: row.gradients}
        dims[OPTIMIZER] = row.optimizer
        flats = [flat for group in self.first[0].layout.groups for flat in group.flat_parameters]
        # Experts that are spread over some of the ranks are on fewer, so there are fewer copies of them.
        most = min((flat.num_shards for flat in flats), default=self.world_size)
        copies = {kind: row.num_copies(dims[kind], sizes) for kind in kept}
        state = {kind: nbytes * min(copies[kind], most) for kind, nbytes in kept.items()}
        kept_by = False if setting.strategy == "zero2" else setting.reshard_after_forward
        gathered = sum(flat.unsharded_bytes or 0 for flat in flats) // (kept_by or 1) if kept_by is not None else 0
        return state[PARAMETERS] + state[OPTIMIZER] + max(state[GRADIENTS], gathered)

    def _dry_run(self, setting: Setting) -> _Run:
        self.num_runs += 1
        found = simulate(
            partial(self.model.build, "cuda" if self.hardware.device.overlaps else "cpu", setting),
            self.make_optimizer,
            self.world_size,
            lambda line: self.note(f"run {self.num_runs}, {setting}: {line}"),
            no_sync if setting.no_sync else None,
        )
        kept = max(moment.bytes_by_kind[GRADIENTS] for moment in found.moments)
        peak = 0
        for moment in found.moments:
            nbytes = moment.nbytes
            if setting.is_offloaded:
                nbytes -= sum(moment.bytes_by_kind[kind] for kind in _ON_HOST)
            elif setting.num_batches > 1 and not setting.no_sync:  # gradients of earlier micro-batches
                nbytes += kept - moment.bytes_by_kind[GRADIENTS]
            peak = max(peak, nbytes)
        activations = max(moment.bytes_by_kind[ACTIVATIONS] for moment in found.moments)
        known = self.activations.get(setting.checkpointed, math.inf)
        self.activations[setting.checkpointed] = min(known, activations / (setting.batch or 1))
        return found, peak

    def _result(self, setting: Setting, run: _Run) -> Result:
        (facts, peak), slow = run, replace(self.hardware, network=self.hardware.network.scaled(0.5))
        one = partial(predict, setting, facts.events, is_compiled=self.is_compiled, factor=self.factor)
        reserved, code = self.hardware.device.reserved(peak, _num_networks(setting)), self.model.codes[setting]
        return Result(setting, peak, reserved, one(self.hardware), one(slow).seconds, facts.events, code)

    def _ranked(self) -> list[Result]:
        return sorted(self.found.values(), key=lambda result: result.per_sequence)


def _num_networks(setting: Setting) -> int:
    return sum(size > 1 for size in setting.mesh)

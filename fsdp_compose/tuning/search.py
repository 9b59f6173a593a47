"""``tune()``: which settings take least time, of those that fit."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.nn as nn

from .._arguments import checked, size_of
from ..errors import MisuseError
from ..extension import STRATEGIES, Kept, MixedPrecisionPolicy, no_sync, states_to_run
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


class _Model:
    """Makes the model, for each setting.

    Attributes:
        num_blocks: how many modules become groups by default; known when the model has been made.
        can_split: whether they have large modules inside.
        codes: the code of the settings that it was made for.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        wrap: Sequence[str] | None,
        mp_policy: MixedPrecisionPolicy | None,
        batch: int | None,
        seq: int | None,
    ) -> None:
        self._factory, self._wrap, self._mp_policy, self._seq = factory, wrap, mp_policy, seq
        self._takes_batch = seq is None and "batch" in inspect.signature(factory).parameters
        if batch is not None and seq is None and not self._takes_batch:
            raise MisuseError("tune(batch=...): the factory has no parameter batch, and there is no seq: leave it out")
        self.batch = batch
        if batch is None and self._takes_batch:
            default = inspect.signature(factory).parameters["batch"].default
            self.batch = default if isinstance(default, int) else None
        self.num_blocks, self.can_split = 0, False
        self.codes: dict[Setting, str] = {}

    def build(self, device: str, setting: Setting) -> tuple[nn.Module, LossOf]:
        batch = setting.batch
        factory = partial(self._factory, batch=batch) if self._takes_batch and batch else self._factory
        is_of_tokens = self._seq is not None
        model, loss_of = model_of(factory, batch if is_of_tokens else None, self._seq)
        if states_to_run(model):
            raise MisuseError("tune(): the factory returns an already sharded model: let it return the plain one")
        blocks = [block for block in modules_to_wrap(model, self._wrap) if block is not model]
        self.num_blocks, self.can_split = len(blocks), bool(blocks and large_children(blocks))
        self.codes[setting] = code_of(setting, model, blocks, self._mp_policy, device)
        apply_setting(setting, model, blocks, self._mp_policy)
        return model, loss_of


@dataclass(frozen=True)
class _Run:
    """What a dry run of a setting found."""

    facts: WorldFacts
    peak: int  # on the device


class _Search:
    def __init__(
        self,
        model: _Model,
        make_optimizer: OptimizerOf | None,
        world_size: int,
        hardware: Hardware,
        memory: int,
        is_compiled: bool,
        accumulates: bool,
        note: Callable[[str], None],
    ) -> None:
        self._model, self._make_optimizer, self._world_size, self._memory = model, make_optimizer, world_size, memory
        self._hardware, self._is_compiled, self._accumulates, self._note = hardware, is_compiled, accumulates, note
        self._node = min(hardware.network.levels[0].ranks or world_size, world_size)
        self._found: dict[Setting, Result] = {}
        self._rejected: dict[Setting, str] = {}
        # By what is recomputed, bytes for each sequence; for all, if it is not known how many there are.
        self._activations: dict[str, float] = {}
        self._num_runs, self._factor = 0, 1.0

    def run(self, batches: Sequence[int], measured: float | None) -> Tuning:
        default = Setting("zero3", (self._world_size,), batch=batches[0])
        first = self._dry_run(default)
        if measured is not None:
            self._factor = measured / self._result(default, first).times.seconds
        plain = self._result(default, first)
        for batch in batches:
            for strategy in self._strategies():
                for setting in self._first_round(replace(strategy, batch=batch), len(batches) == 1):
                    self._try(setting, default, first)
        if not self._found:
            for setting in self._first_round(replace(default, is_offloaded=True), True):
                self._try(setting, default, first)
        if len(batches) > 1 and self._found:
            self._try_larger_batches(max(batches), default, first)
        for result in self._ranked()[:_NUM_REFINED]:
            for setting in self._other_groups(result.setting):
                self._try(setting, default, first)
        return Tuning(
            model=first.facts.layout.name,
            world_size=self._world_size,
            node_size=self._node,
            max_memory=self._memory,
            hardware=self._hardware,
            is_compiled=self._is_compiled,
            num_groups=len(first.facts.layout.groups),
            results=tuple(in_order(self._ranked(), self._hardware, self._memory)),
            default=plain,
            rejected=tuple(Rejected(setting, why) for setting, why in self._rejected.items()),
            num_runs=self._num_runs,
            measured=measured,
            factor=self._factor,
        )

    # ---- What is tried

    def _strategies(self) -> Iterator[Setting]:
        world, node = self._world_size, self._node
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
        for num_batches in _splits_of(setting.batch) if splits_batch else [1]:
            batch = setting.batch // num_batches
            accumulates = self._accumulates and num_batches > 1
            for checkpointed in self._levels():
                tried = replace(setting, batch=batch, num_batches=num_batches, checkpointed=checkpointed)
                yield (tried := replace(tried, no_sync=accumulates))
                if tried in self._found:
                    if checkpointed == NONE:
                        return
                    break

    def _levels(self) -> Sequence[str]:
        return CHECKPOINTED if self._model.num_blocks else (NONE,)

    def _try_larger_batches(self, batch: int, default: Setting, first: _Run) -> None:
        """Double the batch of the best setting while it fits, however much is recomputed."""
        best = self._ranked()[0].setting
        while (batch := 2 * batch) <= _MOST_SEQUENCES:
            tried = [replace(best, batch=batch, checkpointed=checkpointed) for checkpointed in self._levels()]
            for setting in tried:
                self._try(setting, default, first)
            if not any(setting in self._found for setting in tried):
                return

    def _other_groups(self, setting: Setting) -> Iterator[Setting]:
        per_group = 2
        while per_group <= min(_MOST_BLOCKS_PER_GROUP, self._model.num_blocks // 2):
            yield replace(setting, per_group=per_group)
            per_group *= 2
        if self._model.can_split:
            yield replace(setting, splits=True)

    # ---- What it gives

    def _try(self, setting: Setting, default: Setting, first: _Run) -> None:
        if setting in self._found or setting in self._rejected:
            return
        state = self._state(setting, first)
        activations = self._activations.get(setting.checkpointed, 0.0) * (setting.batch or 1)
        if self._needed(setting, int(state + activations)) > self._memory:
            more = f", activations {bytes_of(int(activations))}" if activations else ""
            self._rejected[setting] = f"parameters, gradients and optimizer state take {bytes_of(state)}{more}"
            return
        try:
            result = self._result(setting, first if setting == default else self._dry_run(setting))
        except Exception as error:  # what the model allows by default, another setting may not
            self._rejected[setting] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return
        if result.needed > self._memory:
            self._rejected[setting] = (
                f"the peak is {bytes_of(result.peak)}, with what is reserved {bytes_of(result.needed)}"
            )
        else:
            self._found[setting] = result

    def _needed(self, setting: Setting, peak: int) -> int:
        return peak + sum(self._hardware.device.reserved(peak, _num_networks(setting)).values())

    def _state(self, setting: Setting, first: _Run) -> int:
        """Bytes of parameters, gradients and optimizer state on the device, from those of the default setting, in which
        all is sharded."""
        if setting.is_offloaded:
            return 0
        row, sizes = STRATEGIES[setting.strategy], setting.mesh
        kept = {kind: max(moment.bytes_by_kind[kind] for moment in first.facts.moments) for kind in _ON_HOST}
        # Parameters that all ranks gather and keep are counted apart from those that the optimizer trains.
        gathers_all = Kept.SHARDED not in row.parameters
        dims = {PARAMETERS: row.optimizer if gathers_all else row.parameters, GRADIENTS: row.gradients}
        dims[OPTIMIZER] = row.optimizer
        copies = {
            kind: math.prod(size for size, item in zip(sizes, dims[kind], strict=True) if item is not Kept.SHARDED)
            for kind in kept
        }
        return sum(nbytes * copies[kind] for kind, nbytes in kept.items())

    def _dry_run(self, setting: Setting) -> _Run:
        self._num_runs += 1
        found = simulate(
            partial(self._model.build, "cuda" if self._hardware.device.overlaps else "cpu", setting),
            self._make_optimizer,
            self._world_size,
            lambda line: self._note(f"run {self._num_runs}, {setting}: {line}"),
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
        known = self._activations.get(setting.checkpointed, math.inf)
        self._activations[setting.checkpointed] = min(known, activations / (setting.batch or 1))
        return _Run(found, peak)

    def _result(self, setting: Setting, run: _Run) -> Result:
        events, slow = run.facts.events, replace(self._hardware, network=self._hardware.network.scaled(0.5))
        times, on_half = (
            predict(setting, events, hardware, self._is_compiled, self._factor) for hardware in (self._hardware, slow)
        )
        reserved = self._hardware.device.reserved(run.peak, _num_networks(setting))
        return Result(setting, run.peak, reserved, times, on_half.seconds, events, self._model.codes[setting])

    def _ranked(self) -> list[Result]:
        return sorted(self._found.values(), key=lambda result: result.per_sequence)


def _num_networks(setting: Setting) -> int:
    return sum(size > 1 for size in setting.mesh)


def _splits_of(batch: int) -> list[int]:
    """Into how many equal micro-batches a batch can be split."""
    return [num for num in range(1, batch + 1) if batch % num == 0] or [1]

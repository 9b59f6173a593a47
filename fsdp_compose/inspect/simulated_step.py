"""Simulate a training step on one rank of many, without the other ranks and without touching memory.

``plan()`` runs it. Operations return tensors with shapes, strides and storages, but nothing is computed into them. A
transport records collectives without moving data. A ledger tracks how many bytes of each kind exist at each moment."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .._torch import fake_store, refuse_access, watched_storages
from ..errors import MisuseError, MisuseRuntimeError
from ..extension import CollectiveKind, Label, Transport, Work, states_to_run, stay_on_cpu
from ..optim import Matrixwise, Muon
from .describe import collect
from .diagnose import find_unreduced_parameters
from .dry_run import DryRun, Ledger, Take, kernels_of_devices
from .plan_report import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    REDUCTIONS,
    TEMPORARY,
    CollectiveFacts,
    WorldFacts,
)
from .step_events import BACKWARD, FORWARD, STEP, Issue, Wait

# ---- The transport of a dry run: records collectives and moves no data.


class NothingMoves(Transport):
    """Records the collectives of the ``fully_shard`` group ``name`` and moves no data. ``take`` is called with each
    and its process group, and returns its work."""

    name = "nothing moves"

    def __init__(self, group: dist.ProcessGroup, name: str, ledger: Ledger, take: Take) -> None:
        super().__init__(group)
        self._of, self._ledger, self._take = name, ledger, take

    def among(self, peers: dist.ProcessGroup) -> Transport:
        return self

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        self._ledger.label(GATHERED, whole)
        return self._note(CollectiveKind.ALL_GATHER, whole.nbytes, whole)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        self._ledger.label(REDUCTIONS, whole, shard)  # the shard is relabelled if it becomes a gradient
        return self._note(CollectiveKind.REDUCE_SCATTER, whole.nbytes, shard)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        self._ledger.label(REDUCTIONS, tensor)
        return self._note(CollectiveKind.ALL_REDUCE, tensor.nbytes, tensor)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        num_moved: int,
        label: Label,
    ) -> Work:
        self._ledger.lose_values(received)
        nbytes = num_moved * sent.element_size()
        facts = CollectiveFacts(CollectiveKind.ALL_TO_ALL, str(label), nbytes, self.group.size(), sent.nbytes)
        return self._take(facts, self.group)

    def gather(
        self,
        whole: torch.Tensor | None,
        part: torch.Tensor,
        ranges: Sequence[tuple[int, int]],
        is_everywhere: bool,
        label: Label,
    ) -> None:
        nbytes = sum(stop - start for start, stop in ranges) * part.element_size()
        self._note(CollectiveKind.GATHER, nbytes, whole).wait()

    def _note(self, kind: str, nbytes: int, filled: torch.Tensor | None) -> Work:
        if filled is not None:
            self._ledger.lose_values(filled)
        return self._take(CollectiveFacts(kind, self._of, nbytes, self.group.size()), self.group)


class _Work:
    """A collective that is complete at once."""

    def __init__(self, facts: CollectiveFacts, mode: DryRun, ledger: Ledger, issue: Issue) -> None:
        self.facts, self._mode, self._begun = facts, mode, mode.num_products
        self._events, self._wait = ledger.events, Wait(issue.number)
        self._events.append(issue)
        self.is_exposed = False  # whether nothing that takes long was computed between its start and the first wait
        self._is_awaited = False

    def wait(self) -> None:
        if not self._is_awaited:
            self._is_awaited, self.is_exposed = True, self._mode.num_products == self._begun
            self._events.append(self._wait)


# ---- The step, and its facts


NUM_STEPS = 2  # in the first one, groups learn their order, and the optimizer's state is made


LossOf = Callable[[nn.Module], torch.Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]  # of a list of parameters
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
Build = Callable[[], tuple[nn.Module, LossOf]]
WithoutSync = Callable[[nn.Module], AbstractContextManager[None]]


def simulate(
    build: Build,
    make_optimizer: OptimizerOf | None,
    world_size: int,
    note: Callable[[str], None],
    without_sync: WithoutSync | None = None,
) -> WorldFacts:
    """Build the model as the first of ``world_size`` ranks, and train it for some steps.

    Args:
        build: returns the sharded model, and a function from the model to a loss. Runs in a process group whose
            collectives move no data.
        make_optimizer: makes the optimizer of the model, if there is one.
        note: called with a line of text about the progress.
        without_sync: the step has a micro-batch before its last one, and this context around it: ``no_sync``.

    Raises:
        RuntimeError: there is a process group already, or no address space for the model.
    """
    if dist.is_initialized():
        raise MisuseRuntimeError(
            f"rank {dist.get_rank()}: plan() makes its own process groups (and so do tune() and calibrate(), which use "
            "it), but this process already has one: call it in a separate process, or before init_process_group()"
        )
    excepthook = sys.excepthook  # torch's writes the rank before each line, once more for each process group
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()  # what is older than the model takes no time in the collections below
    try:
        stay_on_cpu()
        return _Simulation(world_size, note, without_sync).run(build, make_optimizer)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        what = str(error).partition("\n")[0]
        raise MisuseRuntimeError(
            f"plan(): this machine has no address space for a tensor of the model ({what}). Nothing is written there, "
            "but Linux refuses what is larger than all memory, unless it is told otherwise: sysctl "
            "vm.overcommit_memory=1. Or plan on a machine with more memory, or a model of smaller tensors"
        ) from error
    finally:
        gc.collect()  # models are cycles: the memory is needed for the next
        if freezes:
            gc.unfreeze()
        dist.destroy_process_group()
        sys.excepthook = excepthook


class _Simulation:
    def __init__(self, world_size: int, note: Callable[[str], None], without_sync: WithoutSync | None) -> None:
        self._world_size, self._note, self._without_sync = world_size, note, without_sync
        self._ledger = Ledger()
        self._mode = DryRun(self._ledger, self._tell, self._take)
        self._doing = ""
        self._began = time.monotonic()
        self._works: list[_Work] = []

    def run(self, build: Build, make_optimizer: OptimizerOf | None) -> WorldFacts:
        ledger = self._ledger
        refuse_access(torch.empty(0).untyped_storage(), "")  # probes torch once per process, which needs real kernels
        watched = watched_storages(ledger.resized, ledger.exchanged)
        with watched, torch.compiler.set_stance("force_eager"), kernels_of_devices(), self._mode:
            self._begin("building", OTHER)
            model, loss_of = build()
            self._materialize(model)
            optimizer = None
            if make_optimizer is not None:
                optimizer = make_optimizer(model)
            self._listen(model)
            layout, unreduced = collect(model), tuple(map(str, find_unreduced_parameters(model)))
            ledger.label(PARAMETERS, *model.parameters())
            recomputes = False
            for number in range(1, NUM_STEPS + 1):
                gc.collect()
                self._works.clear()
                ledger.events.clear()
                recomputes = self._step(model, loss_of, optimizer, f"step {number} of {NUM_STEPS}: ")
            ledger.label(PARAMETERS, *model.parameters())
        moments = ledger.peaks()
        return WorldFacts(
            world_size=self._world_size,
            layout=layout,
            moments=tuple(moments[-3:]),
            building=moments[1],
            collectives=tuple([replace(work.facts, is_exposed=work.is_exposed) for work in self._works]),
            recomputes=recomputes,
            unreduced=unreduced,
            computed=tuple(sorted(self._mode.computed)),
            step=optimizer.describe() if isinstance(optimizer, (Muon, Matrixwise)) else None,
            events=tuple(ledger.events),
        )

    def _materialize(self, model: nn.Module) -> None:
        if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            return
        buffers = [(module, *item) for module in model.modules() for item in module.named_buffers(recurse=False)]
        model.to_empty(device="cpu")
        for module, name, buffer in buffers:
            if buffer.is_meta:
                materialized = getattr(module, name)
                # The program would write to it: a forward refuses unwritten buffers. What, is not known.
                with torch.no_grad():
                    materialized.zero_()
                self._ledger.lose_values(materialized)
            else:
                # to_empty() has replaced this one too, but forward may take its path from its values.
                setattr(module, name, buffer)

    def _listen(self, model: nn.Module) -> None:
        for state, name in states_to_run(model):
            if state.mesh.replicas is not None:
                raise MisuseError(
                    "plan(): the model averages gradients over replica groups (set_replicas()), whose number only they "
                    "know: plan one group's job without them. They add an all-reduce of each gradient shard"
                )
            for handle in state._handles:
                handle.change_transports(
                    lambda transport, _, name=name or "(root)": transport.over(  # type: ignore[misc]
                        lambda sender: NothingMoves(sender.group, name, self._ledger, self._take)
                    )
                )

    def _take(self, facts: CollectiveFacts, group: dist.ProcessGroup) -> Work:
        ranks = dist.get_process_group_ranks(group)
        issue = Issue(len(self._works), facts.kind, facts.group, facts.nbytes, ranks, self._ledger.phase, facts.sent)
        self._works.append(_Work(facts, self._mode, self._ledger, issue))
        return self._works[-1]

    def _step(self, model: nn.Module, loss_of: LossOf, optimizer: torch.optim.Optimizer | None, prefix: str) -> bool:
        """Run a training step. Return whether its backward recomputed forwards."""
        if self._without_sync is not None:
            with self._without_sync(model):
                self._micro_batch(model, loss_of, prefix)
        self._micro_batch(model, loss_of, prefix)
        self._ledger.label(GRADIENTS, *(param.grad for param in model.parameters()))
        self._begin(STEP, TEMPORARY, prefix)
        if optimizer is None:
            for param in model.parameters():
                param.grad = None
        else:
            optimizer.step()
            for state in optimizer.state.values():
                self._ledger.label(OPTIMIZER, *(item for item in state.values() if isinstance(item, torch.Tensor)))
            optimizer.zero_grad()
        return self._ledger.has_recomputed

    def _micro_batch(self, model: nn.Module, loss_of: LossOf, prefix: str) -> None:
        self._begin(FORWARD, ACTIVATIONS, prefix)
        loss = loss_of(model)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise MisuseError(
                "the loss must be a tensor of one element that depends on trainable parameters, got "
                + (f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:80])
            )
        self._begin(BACKWARD, TEMPORARY, prefix)
        loss.backward()

    def _begin(self, name: str, kind: str, prefix: str = "") -> None:
        self._ledger.begin(name, kind)
        self._doing = f"{prefix}{name}"
        self._tell(0)

    def _tell(self, num_operations: int) -> None:
        seconds = time.monotonic() - self._began
        count = f", {num_operations:,} operations" if num_operations else ""
        self._note(f"{self._world_size:,} ranks: {self._doing}{count} ({seconds:.0f} s)")

"""A training step on one rank of many, without the other ranks and without memory; its facts."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn as nn

from ..._torch import fake_store, refuse_access, watched_storages
from ...group import states_to_run
from ..check import check
from ..description import collect
from .dry_run import DryRun
from .facts import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    TEMPORARY,
    CollectiveFacts,
    WorldFacts,
)
from .ledger import Ledger, label_all
from .transport import NothingMoves

NUM_STEPS = 2  # in the first one, groups learn their order, and the optimizer's state is made


class Trained(Protocol):
    """What a step needs: built anew for each number of ranks."""

    def build(self) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        """The sharded model, and what makes a loss of it."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Of its parameters."""


def simulate(trained: Trained, world_size: int, note: Callable[[str], None]) -> WorldFacts:
    """Build the model as the first of ``world_size`` ranks, and train it for some steps.

    Args:
        trained: what to build.
        note: is told how far it has come.
    """
    with one_of_many(world_size):
        try:
            return _Simulation(world_size, note).run(trained)
        finally:
            gc.collect()  # models are cycles: the memory is needed for the next


@contextmanager
def one_of_many(world_size: int) -> Iterator[None]:
    """Be the first rank of a process group whose collectives move nothing.

    Raises:
        RuntimeError: there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"rank {dist.get_rank()}: plan() makes process groups of its own, and this process has one already: plan "
            "in a process by itself, or before init_process_group()"
        )
    excepthook = sys.excepthook  # torch's writes the rank before each line, once more for each process group
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


class _Simulation:
    def __init__(self, world_size: int, note: Callable[[str], None]) -> None:
        self._world_size, self._note = world_size, note
        self._ledger = Ledger()
        self._mode = DryRun(self._ledger, self._tell)
        self._doing = ""
        self._began = time.monotonic()
        self._collectives: list[CollectiveFacts] = []

    def run(self, trained: Trained) -> WorldFacts:
        ledger = self._ledger
        refuse_access(torch.empty(0).untyped_storage(), "")  # found out once in a process, by operations that are done
        with watched_storages(ledger.resized, ledger.exchanged), torch.compiler.set_stance("force_eager"), self._mode:
            self._begin("building", OTHER)
            model, loss_of = trained.build()
            if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                model.to_empty(device="cpu")
            optimizer = trained.optimizer(model)
            self._listen(model)
            layout, unreduced = collect(model), tuple(map(str, check(model)))
            label_all(ledger, model.parameters(), PARAMETERS)
            recomputes = False
            for number in range(1, NUM_STEPS + 1):
                gc.collect()
                self._collectives.clear()
                recomputes = self._step(model, loss_of, optimizer, f"step {number} of {NUM_STEPS}: ")
            label_all(ledger, model.parameters(), PARAMETERS)
        moments = ledger.peaks()
        return WorldFacts(
            world_size=self._world_size,
            layout=layout,
            moments=tuple(moments[-3:]),
            building=moments[1],
            collectives=tuple(self._collectives),
            recomputes=recomputes,
            unreduced=unreduced,
            computed=tuple(sorted(self._mode.computed)),
        )

    def _listen(self, model: nn.Module) -> None:
        for state, name in states_to_run(model):
            for handle in state._handles:
                handle.change_transports(
                    lambda transport, name=name or "(root)": NothingMoves(  # type: ignore[misc]
                        transport.group, name, self._ledger, self._collectives.append
                    )
                )

    def _step(
        self,
        model: nn.Module,
        loss_of: Callable[[nn.Module], torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        prefix: str,
    ) -> bool:
        """A training step; whether forwards were repeated in its backward."""
        self._begin("forward", ACTIVATIONS, prefix)
        loss = loss_of(model)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                "the loss must be a tensor of one element that depends on parameters which require gradients, got "
                + (f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:80])
            )
        self._begin("backward", TEMPORARY, prefix)
        loss.backward()
        del loss
        label_all(self._ledger, (param.grad for param in model.parameters()), GRADIENTS)
        self._begin("optimizer", TEMPORARY, prefix)
        if optimizer is None:
            for param in model.parameters():
                param.grad = None
        else:
            optimizer.step()
            for state in optimizer.state.values():
                label_all(self._ledger, (item for item in state.values() if isinstance(item, torch.Tensor)), OPTIMIZER)
            optimizer.zero_grad()
        return self._ledger.has_recomputed

    def _begin(self, name: str, kind: str, prefix: str = "") -> None:
        self._ledger.begin(name, kind)
        self._doing = f"{prefix}{name}"
        self._tell(0)

    def _tell(self, num_operations: int) -> None:
        seconds = time.monotonic() - self._began
        count = f", {num_operations:,} operations" if num_operations else ""
        self._note(f"{self._world_size:,} ranks: {self._doing}{count} ({seconds:.0f} s)")

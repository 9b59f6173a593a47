"""Training in replica groups that are jobs of their own: what runs on a rank, over gloo alone or with torchft.

A group's ranks are one ``Job``. Its parameters are sharded over them, and gradients are averaged over the groups by one
of two objects, which also decide whether a step is made: ``OverGloo``, the least that does it, and ``OverTorchft``. A
batch is made from (step, group, rank), so an unsharded run can repeat what was trained.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn

import fsdp_compose
from fsdp_compose import checkpoint
from fsdp_compose.core.comm.control_exchange import Carrier

from .systems import System
from .training import Net

STEPS, AT = 6, 2  # steps in all; the loss comes in the one with the number AT
RANKS = 2  # of a group
WIDTH, ROWS = 6, 3
TIMEOUT = timedelta(seconds=60)  # of what waits for other groups; a loss is noticed by closed connections before
OF_TORCHFT = timedelta(seconds=10)  # the same with torchft: that of examples/elastic.py


@dataclass(frozen=True)
class Place:
    """One group of a case, and how it finds the others.

    Attributes:
        num_groups, group: how many there are, and the number of this one.
        last: the rank of this group that dies, and before which collective of step ``AT``, from 1 on; ``None``: none.
        takes_group: the other rank of this group dies with it.
        port: of a store that outlives all groups.
        own_port: of a store of this group, for torchft.
        lighthouse: the address of torchft's; empty: without torchft.
        folder: where a rank that is about to die leaves the time.
    """

    num_groups: int
    group: int
    last: tuple[int, int] | None
    takes_group: bool
    port: int
    own_port: int
    lighthouse: str
    folder: Path


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Net(WIDTH).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, step: int, group: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * group + rank)
    return model(torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)).square().mean()


def unsharded(took_part: list[list[int]]) -> dict[str, torch.Tensor]:
    """The parameters after steps over the batches of the groups that took part in each."""
    model = model_of()
    optimizer = optimizer_of(model)
    for step, groups in enumerate(took_part):
        optimizer.zero_grad()
        for group in groups:
            for rank in range(RANKS):
                (loss_of(model, step, group, rank) / (RANKS * len(groups))).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


# ---- What averages over the groups, and decides about steps


def close_connections(group: Any) -> None:
    """Let the ranks that wait for this one hear that it has given up."""
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):  # gloo closes a connection when something is late on it
                group.recv([torch.empty(1)], rank, 1).wait(timedelta(milliseconds=1))


class OverGloo:
    """A gloo process group with the ranks of the same number in the other groups, made anew when a group is lost.

    Whether a step is made is decided once for all groups, in the store: as made, when all ranks of all groups have
    their gradients; as thrown away, by the first that misses some. So it does not matter that of several ranks some
    hear of a loss before a collective is done, and some after.
    """

    def __init__(self, place: Place, note: Callable[[str], None]) -> None:
        self._group, self._note = place.group, note
        self._store = dist.TCPStore("127.0.0.1", place.port, is_master=False)
        self._members, self._epoch, self.step = [*range(place.num_groups)], 0, 0
        self._connect()

    def _connect(self) -> None:
        store = dist.PrefixStore(f"{self._epoch}/{dist.get_rank()}", self._store)
        number, size = self._members.index(self._group), len(self._members)
        self._beside = dist.ProcessGroupGloo(store, number, size, TIMEOUT)
        self.is_lost = False

    def begin(self) -> None: ...

    def average(self, tensor: torch.Tensor) -> Any:
        work = self._begin(tensor, dist.ReduceOp.SUM)
        return _Average(self, work, tensor, len(self._members))

    def maximum(self, tensor: torch.Tensor) -> bool:
        self.finish(self._begin(tensor, dist.ReduceOp.MAX))
        return not self.is_lost

    def _begin(self, tensor: torch.Tensor, op: Any) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        try:
            return None if self.is_lost else self._beside.allreduce([tensor], options)
        except RuntimeError:
            self._lose()
        return None

    def finish(self, work: Any) -> None:
        try:
            if work is not None:
                work.wait()
        except RuntimeError:
            self._lose()

    def _lose(self) -> None:
        self.is_lost = True
        close_connections(self._beside)

    def may_step(self) -> bool:
        """Decide about the step, after backward, and leave lost groups behind. Ranks: all."""
        self.took_part = True, len(self._members)
        has_all = torch.tensor([not self.is_lost], dtype=torch.uint8)
        self._note("vote in the group")
        dist.all_reduce(has_all, dist.ReduceOp.MIN)
        if not has_all:
            self._lose()
        verdict = torch.zeros(2, dtype=torch.uint8)
        if dist.get_rank() == 0:
            self._note("vote of the groups")
            self.maximum(torch.zeros(1, dtype=torch.uint8))  # it fails if a group misses gradients
            proposal = "thrown away" if self.is_lost else "made"
            is_made = self._store.compare_set(f"{self._epoch}/step-{self.step}", "", proposal) == b"made"
            verdict = torch.tensor([is_made, self.is_lost], dtype=torch.uint8)
        self._note("verdict in the group")
        dist.broadcast(verdict, 0)
        is_made, is_lost = map(bool, verdict.tolist())
        self.step += is_made
        if is_lost:
            self._go_on_without()
        return is_made

    def _go_on_without(self) -> None:
        self._lose()
        self._epoch += 1
        ended = f"ended-{self._epoch}"  # told by the launcher
        self._store.wait([ended], TIMEOUT)
        self._members.remove(int(self._store.get(ended)))
        self._connect()

    def close(self) -> None: ...


class _Average:
    def __init__(self, replicas: OverGloo, work: Any, tensor: torch.Tensor, size: int) -> None:
        self._replicas, self._work, self._tensor, self._size = replicas, work, tensor, size

    def wait(self) -> None:
        self._replicas.finish(self._work)
        self._tensor /= self._size
        self._size = 1


class OverTorchft:
    """torchft's manager, which also lets a group that has fallen behind take the state of another one."""

    def __init__(self, place: Place, note: Callable[[str], None], state: Any) -> None:
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        self._note, self._beside = note, ProcessGroupGloo(timeout=OF_TORCHFT)
        self._manager = Manager(
            pg=self._beside,
            min_replica_size=1,
            state_dict=state.state,
            load_state_dict=state.load,
            replica_id=f"group_{place.group}",
            rank=dist.get_rank(),
            world_size=RANKS,
            store_addr="127.0.0.1",
            store_port=place.own_port,
            lighthouse_addr=place.lighthouse,
            hostname="127.0.0.1",
            timeout=OF_TORCHFT,
            quorum_timeout=3 * OF_TORCHFT,
            connect_timeout=OF_TORCHFT,
            init_sync=False,
        )
        store = dist.TCPStore("127.0.0.1", place.port, is_master=False)
        store.add("here", 1)  # all begin when all are there: otherwise one may train alone for a while
        while int(store.add("here", 0)) < RANKS * place.num_groups:
            time.sleep(0.01)

    @property
    def step(self) -> int:
        return self._manager.current_step()

    def begin(self) -> None:
        self._manager.start_quorum()

    def average(self, tensor: torch.Tensor) -> Any:
        return self._manager.allreduce(tensor)

    def maximum(self, tensor: torch.Tensor) -> bool:
        self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.MAX).wait()
        if self._manager.errored() is None:
            return True
        close_connections(self._beside.parent)
        return False

    def may_step(self) -> bool:
        self._note("vote of the groups")
        self.took_part = self._manager.is_participating(), self._manager.num_participants()
        return self._manager.should_commit()

    def close(self) -> None:
        dist.barrier()
        self._manager.shutdown(wait=False)


class LocalState:
    """What this rank holds of a model and AdamW, for FSDP2; ``checkpoint.shards`` is that for fsdp_compose."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._params, self._optimizer = [*model.parameters()], optimizer  # as they are outside of forward

    def state(self) -> list[Any]:
        states = [self._optimizer.state.get(param, {}) for param in self._params]
        return [
            (local_of(param).clone(), {key: local_of(value).clone() for key, value in state.items()})
            for param, state in zip(self._params, states)
        ]

    @torch.no_grad()
    def load(self, found: list[Any]) -> None:
        for param, (values, state) in zip(self._params, found):
            local_of(param).copy_(values)
            for key, value in state.items():
                local_of(self._optimizer.state[param][key]).copy_(value)


def local_of(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


# ---- Collectives, counted


class Collectives:
    """Counts what this rank begins in one step, and dies before the collective with the number ``last``.

    Attributes:
        names: of those that were counted.
    """

    def __init__(self, place: Place) -> None:
        self.names: list[str] = []
        self._place, self._is_on, self._pids = place, False, [os.getpid()] * RANKS
        self._last = place.last[1] if place.last is not None and place.last[0] == dist.get_rank() else 0
        dist.all_gather_object(self._pids, os.getpid())

    def note(self, name: str) -> None:
        if not self._is_on:
            return
        self.names.append(name)
        if len(self.names) == self._last:
            (self._place.folder / "died").write_text(repr(time.time()))
            others = [pid for pid in self._pids if pid != os.getpid() and self._place.takes_group]
            for pid in (*others, os.getpid()):
                os.kill(pid, signal.SIGKILL)

    def _note_recorded(self, line: str) -> None:
        if not line.startswith(("  wait", "all-reduce")):  # averages over groups are counted with the maxima
            self.note(line)

    @contextlib.contextmanager
    def counted(self, system: System, model: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if system.is_ours:
                stack.enter_context(fsdp_compose.record_collectives(model, self._note_recorded))
                self._count(stack, Carrier, "send", "control exchange")
            for name in () if system.is_ours else FSDP2_COLLECTIVES:
                self._count(stack, dist, name, name)
            self._is_on = True
            try:
                yield
            finally:
                self._is_on = False

    def _count(self, stack: contextlib.ExitStack, owner: Any, method: str, name: str) -> None:
        call = getattr(owner, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return call(*args, **kwargs)

        stack.enter_context(mock.patch.object(owner, method, noted))


FSDP2_COLLECTIVES = [
    name
    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    if hasattr(dist, name)  # which of them FSDP2 calls depends on torch's version
]


class _Noting:
    """Counts the calls of a ``Replicas``."""

    def __init__(self, replicas: Any, note: Callable[[str], None]) -> None:
        self._replicas, self._note = replicas, note

    def average(self, tensor: torch.Tensor) -> Any:
        self._note("average over groups")
        return self._replicas.average(tensor)

    def maximum(self, tensor: torch.Tensor) -> bool:
        self._note("maximum over groups")
        return self._replicas.maximum(tensor)


def connect(system: System, model: nn.Module, replicas: Any) -> None:
    if system.is_ours:
        fsdp_compose.set_replicas(model, replicas)
        return
    for module in model.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            module.set_all_reduce_hook(partial(_average, replicas))


def _average(replicas: Any, gradient: torch.Tensor) -> None:
    replicas.average(gradient).wait()


# ---- The program


def train(system: System, place: Place) -> dict[str, Any]:
    """A program: the log of the steps that were made, the parameters, and the collectives of step ``AT``."""
    model = model_of()
    system.shard(model)
    optimizer = optimizer_of(model)
    collectives = Collectives(place)
    if place.lighthouse:
        state: Any = checkpoint.shards(model, optimizer) if system.is_ours else LocalState(model, optimizer)
        replicas: Any = OverTorchft(place, collectives.note, state)
    else:
        replicas = OverGloo(place, collectives.note)
    connect(system, model, _Noting(replicas, collectives.note))
    log = []
    while replicas.step < STEPS:
        counts = replicas.step == AT and not collectives.names
        with collectives.counted(system, model) if counts else contextlib.nullcontext():
            replicas.begin()
            optimizer.zero_grad()
            loss_of(model, replicas.step, place.group, dist.get_rank()).backward()
            if replicas.may_step():
                collectives.note("the optimizer's step")
                optimizer.step()
                log.append([replicas.step - 1, *replicas.took_part, time.time()])
    whole = {name: param.full_tensor().tolist() for name, param in model.named_parameters()}
    replicas.close()
    return {"log": log, "parameters": whole, "collectives": collectives.names}

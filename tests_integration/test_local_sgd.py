"""torchft's LocalSGD and DiLoCo over sharded models: two groups of two processes train as two unsharded models do that
average their parameters, or step with the average of their pseudogradients."""

from __future__ import annotations

import copy
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.faults.jobs import Job, values
from fsdp_compose import flat_parameters, fully_shard, set_reshard_after_backward
from fsdp_compose.checkpoint import shards
from tests import harness

GROUPS, RANKS, STEPS, EVERY = 2, 2, 8, 2
TIMEOUT = timedelta(seconds=30)
harness.preload("torchft.local_sgd")
harness.preload(__name__)


@dataclass(frozen=True)
class Case:
    """How to average.

    Attributes:
        views: of the parameters: themselves; ``"flat"``, their flat views; ``"flat, local"``, plain tensors of those.
        is_diloco: pseudogradients, with an optimizer of their own, rather than parameters.
        fragments: averaged in turn.
        delay, alpha: of a fragment, torchft's arguments.
        keeps: parameters stay gathered until a step.
        is_late: the second group begins when the first one has averaged once, alone.
    """

    views: str = ""
    is_diloco: bool = False
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    keeps: bool = False
    is_late: bool = False


CASES = {
    "LocalSGD": Case(),
    "LocalSGD, flat views": Case("flat"),
    "LocalSGD, flat local views": Case("flat, local"),
    "LocalSGD, kept gathered": Case(keeps=True),
    "LocalSGD, a group that comes late": Case(is_late=True),
    "DiLoCo": Case(is_diloco=True),
    "DiLoCo, flat views": Case("flat", is_diloco=True),
    "DiLoCo, flat local views": Case("flat, local", is_diloco=True),
    "DiLoCo, kept gathered": Case(is_diloco=True, keeps=True),
    "DiLoCo, fragments": Case(is_diloco=True, fragments=2, delay=1, alpha=0.25),
    "DiLoCo, a group that comes late": Case(is_diloco=True, is_late=True),
    "DiLoCo, flat views, a group that comes late": Case("flat", is_diloco=True, is_late=True),
}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()  # nothing divides by two


def inner_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def outer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def loss_of(model: nn.Module, step: int, group: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * group + rank)
    return model(torch.randn(4, 5, generator=generator, dtype=torch.float64)).square().mean()


# ---- On a rank


@dataclass(frozen=True)
class Ports:
    lighthouse: str
    own: int  # of a store of this group
    common: int


def manager_of(group: int, ports: Ports, **state: Any) -> Manager:
    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        use_async_quorum=False,  # DiLoCo wants that
        replica_id=f"group_{group}",
        rank=dist.get_rank(),
        world_size=RANKS,
        store_addr="127.0.0.1",
        store_port=ports.own,
        lighthouse_addr=ports.lighthouse,
        hostname="127.0.0.1",
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        init_sync=False,
        **state,
    )


def train(case: Case, group: int, ports: Ports) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", ports.common, is_master=False)
    model = model_of()
    for module in (model[0], model):
        fully_shard(module, reshard_after_forward=False if case.keeps else None)
    set_reshard_after_backward(model, not case.keeps)
    modules: list[nn.Module] = [model]
    if case.views:  # what torchft takes is a module: one that has the views as its parameters
        modules = [nn.ParameterList(flat_parameters(model, local="local" in case.views))]
    elif case.fragments > 1:
        modules = [model[0], model[2]]
    optimizer = inner_of([param for module in modules for param in module.parameters()])
    held = shards(model, optimizer)  # before torchft's hooks: the step must have ended when these read it
    if case.is_late and group:
        store.wait(["alone"], TIMEOUT)
    manager = manager_of(group, ports, state_dict=held.state, load_state_dict=held.load)
    if not case.is_late:
        meet(store, RANKS * GROUPS)
    if case.is_diloco:
        outer = [outer_of(module.parameters()) for module in modules]
        options = {"fragment_sync_delay": case.delay, "fragment_update_alpha": case.alpha}
        averaging: Any = DiLoCo(manager, modules, optimizer, outer, sync_every=EVERY * case.fragments, **options)
    else:
        averaging = LocalSGD(manager, modules[0], optimizer, sync_every=EVERY)
    averaged = []
    with averaging:
        for step in range(EVERY if case.is_late and group else 0, STEPS):
            if case.is_late and step == 2 * EVERY - 1:  # both average after this step
                if group:
                    store.add("asks", 1)
                else:
                    store.add("alone", 1)
                    while int(store.add("asks", 0)) < RANKS:
                        time.sleep(0.01)
                    time.sleep(1)  # until its request has arrived
            optimizer.zero_grad()
            loss_of(model, step, group, dist.get_rank()).backward()
            optimizer.step()
            if step % EVERY == EVERY - 1:
                averaged.append(manager.num_participants())
    whole = {name: param.full_tensor().tolist() for name, param in model.named_parameters()}
    dist.barrier()
    manager.shutdown(wait=False)
    return {"parameters": whole, "averaged": averaged}


def meet(store: dist.TCPStore, num: int) -> None:
    store.add("here", 1)
    while int(store.add("here", 0)) < num:
        time.sleep(0.01)


def train_all(group: int, ports: dict[str, Ports]) -> dict[str, Any]:
    """A program: the cases, one after the other."""
    return {name: train(CASES[name], group, ports[name]) for name in ports}


# ---- Without shards


class Reference:
    """One group, with its optimizers."""

    def __init__(self, case: Case) -> None:
        self.model = model_of()
        self.inner = inner_of(self.model.parameters())
        self.modules = [self.model] if case.fragments == 1 else [self.model[0], self.model[2]]
        self.outer = [outer_of(module.parameters()) for module in self.modules]
        self.original = [[param.detach().clone() for param in module.parameters()] for module in self.modules]

    def pseudogradients(self, fragment: int) -> list[torch.Tensor]:
        params = self.modules[fragment].parameters()
        return [before - param.detach() for before, param in zip(self.original[fragment], params)]

    @torch.no_grad()
    def step_with(self, fragment: int, gradients: list[torch.Tensor], alpha: float) -> None:
        params = [*self.modules[fragment].parameters()]
        local = [param.clone() for param in params]
        for param, before, gradient in zip(params, self.original[fragment], gradients):
            param.copy_(before)
            param.grad = gradient.clone()
        self.outer[fragment].step()
        self.outer[fragment].zero_grad()
        self.original[fragment] = [param.clone() for param in params]
        for param, before in zip(params, local):
            param.lerp_(before, alpha)


def mean(items: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(tensors).mean(0) for tensors in zip(*items)]


def simulated(case: Case) -> list[dict[str, torch.Tensor]]:
    groups = [Reference(case) for _ in range(1 if case.is_late else GROUPS)]
    begun: list[list[torch.Tensor]] = []
    for step in range(STEPS):
        for number, group in enumerate(groups):
            group.inner.zero_grad()
            for rank in range(RANKS):
                (loss_of(group.model, step, number, rank) / RANKS).backward()
            group.inner.step()
        in_round, fragment = step % EVERY + 1, step // EVERY % case.fragments
        if case.is_late and step == 2 * EVERY - 1:
            groups.append(copy.deepcopy(groups[0]))  # it takes over all, also what the first one has not averaged yet
        if in_round == EVERY - case.delay:
            begun = [group.pseudogradients(fragment) for group in groups]
        if in_round == EVERY and case.is_diloco:
            for group in groups:
                group.step_with(fragment, mean(begun), case.alpha)
        elif in_round == EVERY:
            averages = mean([[param.detach() for param in group.model.parameters()] for group in groups])
            for group in groups:
                for param, average in zip(group.model.parameters(), averages):
                    param.data.copy_(average)
    return [{name: param.detach() for name, param in group.model.named_parameters()} for group in groups]


@pytest.fixture(scope="module")
def trained() -> Any:
    """What each group's ranks return, of all cases: starting processes takes longer than these."""
    os.environ.setdefault("RUST_LOG", "error")
    with ExitStack() as stack:
        stores, ports = [], [dict[str, Ports]() for _ in range(GROUPS)]
        for name in CASES:
            lighthouse = LighthouseServer(
                bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=30_000, heartbeat_timeout_ms=1000
            )
            stack.callback(lighthouse.shutdown)
            address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
            made = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(GROUPS + 1)]
            stores += made
            for group in range(GROUPS):
                ports[group][name] = Ports(address, made[group].port, made[-1].port)
        jobs = [stack.enter_context(Job(train_all, group, ports[group], world_size=RANKS)) for group in range(GROUPS)]
        return [values(job.finish()) for job in jobs]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_groups_train_as_unsharded_models_do(trained: Any, name: str):
    case = CASES[name]
    for group, expected in enumerate(simulated(case)):
        for rank in trained[group]:
            for key, value in expected.items():
                found = torch.tensor(rank[name]["parameters"][key], dtype=torch.float64)
                torch.testing.assert_close(found, value, rtol=0, atol=1e-12, msg=f"{name}: {key} of group {group}")
    numbers = [rank[name]["averaged"] for ranks in trained for rank in ranks]
    assert numbers[0][-1] == GROUPS and numbers[0][0] == (1 if case.is_late else GROUPS), numbers

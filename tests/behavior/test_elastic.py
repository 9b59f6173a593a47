"""Replica groups in jobs of their own (``set_replicas``): averages, ``None``, and groups that are lost.

The ranks of one test stand for several jobs: each group has a process group and a mesh of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_compose
from fsdp_compose import (
    CPUOffloadPolicy,
    FSDPComposeError,
    MisuseError,
    MixedPrecisionPolicy,
    RankLostError,
    RanksDifferError,
    clip_grad_norm_,
    describe,
    flat_parameters,
    fully_shard,
    functional_mode,
    no_sync,
    record_collectives,
    replicate,
    set_replicas,
    set_requires_all_reduce,
)
from fsdp_compose.checkpoint import shards
from tests import harness
from tests.internals import full_parameters
from tests.models import Stack, rows, shard_layers
from tests.training import adamw, mean_square, sgd

distributed = functools.partial(harness.distributed, timeout=60)


class Group:
    """The replica group that this rank is in: ``num_groups`` of them have the ranks of the test, in order. All ranks
    make it together, with all process groups: of two lives of each group, and beside each other.

    Args:
        survivors: the numbers of the groups that go on without the others.
    """

    def __init__(self, num_groups: int, survivors: Sequence[int] = ()) -> None:
        self.rank, self.num_groups = dist.get_rank(), num_groups
        self.size = dist.get_world_size() // num_groups
        self.number, self.place = divmod(self.rank, self.size)
        of_group = [[*range(number * self.size, (number + 1) * self.size)] for number in range(num_groups)]
        self._lives = [self._mine(of_group) for _ in range(2)]
        self.everyone = self._mine([[ranks[place] for ranks in of_group] for place in range(self.size)])
        self.survivors = self._mine([[of_group[i][place] for i in survivors] for place in range(self.size)])
        self.alone = self._mine([[rank] for rank in range(dist.get_world_size())])

    def _mine(self, parts: list[list[int]]) -> Any:
        groups = [dist.new_group(ranks) for ranks in parts if ranks]
        own = [group for group, ranks in zip(groups, parts, strict=False) if self.rank in ranks]
        return own[0] if own else None

    def new_life(self) -> DeviceMesh:
        """A mesh over the ranks of this group, on a process group of its own, as after a restart."""
        return DeviceMesh.from_group(self._lives.pop(), "cpu")


class OfGroup:
    """``Replicas`` made of a plain process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.log = group, list[str]()

    def average(self, tensor: torch.Tensor) -> Any:
        self.log.append("average")
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return Divided(work, tensor, self.group.size())

    def maximum(self, tensor: torch.Tensor) -> bool:
        self.log.append("maximum")
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return True


class Divided:
    def __init__(self, work: Any, tensor: torch.Tensor, divisor: int) -> None:
        self.work, self.tensor, self.divisor = work, tensor, divisor

    def wait(self) -> None:
        self.work.wait()
        self.tensor.div_(self.divisor)
        self.divisor = 1


class Done:
    def wait(self) -> None: ...


class Died(Exception):
    """This group is killed here."""


class Losing(OfGroup):
    """Loses the group ``victim`` at its ``at``-th call in a step: that group is killed, the others lose it."""

    def __init__(self, group: dist.ProcessGroup, victim: int, at: int, own: int) -> None:
        super().__init__(group)
        self.victim, self.at, self.own, self.num_calls, self.is_lost = victim, at, own, 0, False

    def _call(self) -> bool:
        self.num_calls += 1
        self.is_lost = self.is_lost or self.num_calls > self.at
        if self.is_lost and self.own == self.victim:
            raise Died
        return not self.is_lost

    def average(self, tensor: torch.Tensor) -> Any:
        if self._call():
            return super().average(tensor)
        tensor.fill_(float("nan"))
        return Divided(Done(), tensor, 1)

    def maximum(self, tensor: torch.Tensor) -> bool:
        return self._call() and super().maximum(tensor)


def sharded(mesh: DeviceMesh, replicas: Any, make: Callable[[], nn.Module] = Stack, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = make().double()
    if hasattr(model, "blocks"):
        shard_layers(model, mesh=mesh, **options)
    else:
        fully_shard(model, mesh=mesh, **options)
    set_replicas(model, replicas)
    return model


def batch_of(step: int, number: int, place: int) -> torch.Tensor:
    return rows(1000 * step + 10 * number + place).double()


def unsharded(took: list[list[int]], size: int, make: Callable[[], nn.Module] = Stack) -> dict[str, torch.Tensor]:
    """Parameters after steps over the batches of the groups that took part in each."""
    torch.manual_seed(0)
    model = make().double()
    optimizer = adamw(model.parameters())
    for step, numbers in enumerate(took):
        optimizer.zero_grad()
        for number in numbers:
            for place in range(size):
                (mean_square(model, batch_of(step, number, place)) / (len(numbers) * size)).backward()
        optimizer.step()
    return dict(model.named_parameters())


def assert_close(model: nn.Module, reference: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, reference[name].detach(), rtol=0, atol=tolerance, msg=name)


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, step: int) -> None:
    optimizer.zero_grad()
    mean_square(model, batch_of(step, group.number, group.place)).backward()


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("num_groups", [2, 3])
@distributed(world_size=(2, 3, 4, 6))
def test_groups_train_as_one_process_does(world_size, num_groups, options):
    if world_size % num_groups:
        return
    group = Group(num_groups)
    replicas = OfGroup(group.everyone)
    model = sharded(group.new_life(), replicas, **options)
    optimizer = adamw(model.parameters())
    for step in range(4):
        step_alone(model, optimizer, group, step)
        optimizer.step()
    assert_close(model, unsharded([[*range(num_groups)]] * 4, group.size))
    assert replicas.log == (["maximum"] + ["average"] * 4 + ["maximum"]) * 4


@distributed(world_size=4)
def test_averages_are_in_flight_while_backward_goes_on():
    group, lines = Group(2), list[str]()

    class Noting(OfGroup):
        def average(self, tensor: torch.Tensor) -> Any:
            lines.append("begin")
            work = super().average(tensor)
            work.work = Telling(work.work)
            return work

    class Telling:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            lines.append("wait")
            self.work.wait()

    model = sharded(group.new_life(), Noting(group.everyone))
    mean_square(model, batch_of(0, group.number, group.place)).backward()
    assert lines.count("begin") == lines.count("wait") == 4
    assert lines[:3] == ["begin"] * 3, "nothing is waited for while backward runs"


class Branches(nn.Module):
    """``b`` is used if ``uses_b``; both are in one group."""

    uses_b = True

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + (self.b(x) if self.uses_b else 0)


@pytest.mark.parametrize("in_a_loss", [False, True])
@distributed(world_size=(2, 4))
def test_none_means_the_same_in_all_groups(world_size, in_a_loss):
    group = Group(2)
    model = sharded(group.new_life(), OfGroup(group.everyone), Branches)
    torch.manual_seed(0)
    reference = Branches().double()
    optimizers = adamw(model.parameters()), adamw(reference.parameters())
    for step in range(3):
        uses = [(step + number) % 2 == 0 for number in range(2)]
        model.uses_b = uses[group.number]
        optimizers[0].zero_grad()
        loss = mean_square(model, batch_of(step, group.number, group.place))
        if in_a_loss and step == 1 and group.number == 0:
            loss = loss + model.c.weight.full_tensor().square().sum()  # arrives late, in one group
        loss.backward()
        assert model.b.weight.grad is not None, "the other group has one"
        assert (model.c.weight.grad is None) == (not (in_a_loss and step == 1))
        assert model.c.bias.grad is None
        optimizers[0].step()
        optimizers[1].zero_grad()
        for number in range(2):
            reference.uses_b = uses[number]
            for place in range(group.size):
                loss = mean_square(reference, batch_of(step, number, place))
                if in_a_loss and step == 1 and number == 0:
                    loss = loss + reference.c.weight.square().sum()
                (loss / world_size).backward()
        optimizers[1].step()
    assert_close(model, dict(reference.named_parameters()))


@distributed(world_size=4)
def test_ranks_of_which_one_alone_has_lost_another_group_still_agree():
    """Which parameters have a gradient is the same on the ranks of a group, whatever each knows of other groups."""
    group = Group(2)

    class LosesBesideOneRank(OfGroup):
        """The first ranks of the groups lose each other in the maximum at the end, of which one still gets the
        result."""

        is_lost = is_end = False

        def average(self, tensor: torch.Tensor) -> Any:
            return Divided(Done(), tensor, 1) if self.is_lost else super().average(tensor)

        def maximum(self, tensor: torch.Tensor) -> bool:
            if self.is_lost:
                return False
            self.is_lost, self.is_end = self.is_end and group.place == 0, True
            super().maximum(received := tensor.clone())
            if self.is_lost and group.rank == 0:
                return False
            tensor.copy_(received)
            return True

    model = sharded(group.new_life(), LosesBesideOneRank(group.everyone), Branches)
    model.uses_b = group.number == 1
    loss = mean_square(model, batch_of(0, group.number, group.place))
    if group.number == 1:
        loss = loss + model.c.weight.full_tensor().square().sum()  # late: all ranks must reduce once more
    loss.backward()
    assert [param.grad is not None for param in model.parameters()] == [True, True, True, True, True, False]
    assert model.c.weight.grad.full_tensor().any()


POLICIES: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 0),
    "bf16": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}, 0),
    "fp16 sums": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, 1e-3),
    "offload": ({"offload_policy": CPUOffloadPolicy()}, 0),
}


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=4)
def test_it_trains_like_hybrid_sharding(policy):
    group = Group(2)
    (options, tolerance), models = POLICIES[policy], list[nn.Module]()
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for mesh, replicas in ((hybrid, None), (group.new_life(), OfGroup(group.everyone))):
        torch.manual_seed(0)
        model = shard_layers(Stack(), mesh=mesh, **options)
        if replicas is not None:
            set_replicas(model, replicas)
        models.append(model)
    optimizers = [adamw(flat_parameters(model)) for model in models]
    for step in range(3):
        norms = []
        for model, optimizer in zip(models, optimizers, strict=True):
            for i, part in enumerate(batch_of(step, group.number, group.place).float().chunk(2)):
                with nullcontext() if i else no_sync(model):
                    mean_square(model, part).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(norms[0], norms[1], rtol=tolerance, atol=tolerance)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.full_tensor(), rtol=tolerance, atol=tolerance)


class TwoOrders(nn.Module):
    is_other = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.second, self.first) if self.is_other else (self.first, self.second)
        return second(first(x))


def two_orders(mesh: DeviceMesh, replicas: Any) -> TwoOrders:
    torch.manual_seed(0)
    model = TwoOrders().double()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_replicas(model, replicas)
    return model


@distributed(world_size=(2, 4))
def test_groups_that_reduce_in_another_order_raise_by_name_and_go_on(world_size):
    group = Group(2)
    model = two_orders(group.new_life(), OfGroup(group.everyone))
    model.is_other = group.number == 1
    with pytest.raises(RanksDifferError, match="replica groups.*another order.*No gradient was published"):
        mean_square(model, batch_of(0, group.number, group.place)).backward()
    assert all(param.grad is None for param in model.parameters())
    model.is_other = False
    mean_square(model, batch_of(0, group.number, group.place)).backward()
    assert all(param.grad is not None for param in model.parameters())


class Partly(nn.Module):
    """Runs as many of its layers as ``uses`` says."""

    def __init__(self, num_layers: int = 3, width: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), *[nn.Linear(3, 3) for _ in range(num_layers - 2)]])
        self.layers.append(nn.Linear(3, width))
        self.uses = num_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.uses]:
            x = layer(x)
        return x


# Of the second group: what it does otherwise, and what the first group and the second one are told.
DIFFERENT = {
    "fewer layers": (lambda: Partly(2), "not at .* with 6 parameters.* lacks layers.2", "with 4 parameters.* lacks 1"),
    "a wider layer": (lambda: Partly(width=5), "lacks layers.2: ", "lacks layers.2: "),
    "a frozen layer": (Partly, "lacks layers.1: .* x torch.float64", "this group lacks 1 that another one has"),
    "a layer that is not run": (Partly, "lacks layers.2: ", "this group lacks 1 that another one has"),
    "another reduce dtype": (Partly, "lacks layers.0.*float64", "lacks layers.0.*float32"),
}


@pytest.mark.parametrize("how", [*DIFFERENT])
@distributed(world_size=(2, 4))
def test_groups_in_other_collectives_raise_by_name_before_the_first_average(world_size, how):
    group = Group(2)
    replicas = OfGroup(group.everyone)
    make, *told = DIFFERENT[how]
    torch.manual_seed(0)
    is_other = group.number == 1
    model = (make if is_other else Partly)().double()
    if is_other and how == "a frozen layer":
        model.layers[1].requires_grad_(False)
    if is_other and how == "a layer that is not run":
        model.uses = 2
    dtype = torch.float32 if is_other and how == "another reduce dtype" else None
    mesh = group.new_life()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    fully_shard(model, mesh=mesh)
    set_replicas(model, replicas)
    for step in range(2):  # the second one after the error, which leaves nothing behind
        with pytest.raises(RanksDifferError, match=f"set_replicas.*would reduce.*{told[is_other]}"):
            mean_square(model, batch_of(step, group.number, group.place)).backward()
        assert all(param.grad is None for param in model.parameters())
    assert replicas.log == ["maximum"] * 4
    if how in ("a frozen layer", "a layer that is not run"):
        model.requires_grad_()
        model.uses = 3
        mean_square(model, batch_of(2, group.number, group.place)).backward()
        assert all(param.grad is not None for param in model.parameters())


@distributed(world_size=(2, 4))
def test_a_group_that_leaves_out_the_backward_of_one_model_raises_by_name(world_size):
    group = Group(2)
    replicas = OfGroup(group.everyone)
    models = [sharded(group.new_life(), replicas, functools.partial(nn.Linear, 3, width)) for width in (3, 5)]
    x = batch_of(0, group.number, group.place)
    losses = [model(x).square().mean() for model in models]
    with pytest.raises(RanksDifferError, match="set_replicas.*would reduce.*another one lacks .root.: "):
        losses[group.number].backward()
    assert "average" not in replicas.log


@distributed(world_size=4)
def test_a_rank_that_differs_from_its_own_group_is_an_error_in_that_group():
    group = Group(2)
    replicas = OfGroup(group.everyone)
    model = two_orders(group.new_life(), replicas)
    mean_square(model, batch_of(0, group.number, group.place)).backward()
    replicas.group = group.alone  # the other group has ended
    model.second.requires_grad_(group.rank != 3)
    if group.number:
        with pytest.raises(RanksDifferError, match="requires_grad of a parameter has changed on some ranks only"):
            mean_square(model, batch_of(0, group.number, group.place)).backward()


@distributed(world_size=2)
def test_set_replicas_on_some_ranks_only_is_an_error_on_all():
    replicas = OfGroup(Group(2).alone)
    model = fully_shard(Stack())
    set_replicas(model, replicas if dist.get_rank() else None)
    with pytest.raises(RanksDifferError, match="replica groups"):
        model(rows())
    model = fully_shard(Stack())
    mean_square(model, rows()).backward()
    if dist.get_rank():
        set_replicas(model, replicas)
    with pytest.raises(RanksDifferError, match="set_replicas.. was called on some ranks only"):
        mean_square(model, rows()).backward()


of_two_blocks = functools.partial(Stack, 2)


def train_with_losses(num_groups: int, victim: int, at: int) -> bool:
    """Train in ``num_groups`` groups, of which one is killed at a call of step 1 and comes back at step 3. Return
    whether the step had that many calls."""
    everyone = [*range(num_groups)]
    others = [number for number in everyone if number != victim]
    group = Group(num_groups, others)
    is_victim, took = group.number == victim, list[list[int]]()
    model = sharded(group.new_life(), OfGroup(group.everyone), of_two_blocks)
    optimizer = adamw(model.parameters())
    held = shards(model, optimizer)
    step_alone(model, optimizer, group, 0)
    optimizer.step()
    took.append(everyone)

    losing = Losing(group.everyone, victim, at, group.number)
    set_replicas(model, losing)
    before = held.state()
    if is_victim:
        try:
            step_alone(model, optimizer, group, 1)
        except Died:
            pass
        else:
            assert not losing.is_lost
    else:
        step_alone(model, optimizer, group, 1)
    if losing.is_lost:
        if not is_victim:
            assert all(torch.equal(before[key], value) for key, value in held.state().items())
            set_replicas(model, OfGroup(group.survivors))
            for step in (1, 2):  # the lost one is taken again
                step_alone(model, optimizer, group, step)
                optimizer.step()
        took += [others, others]
        if is_victim:
            model = sharded(group.new_life(), None, of_two_blocks)
            optimizer = adamw(model.parameters())
            held = shards(model, optimizer)
        # What the groups' manager does: the one that comes takes over what another one has.
        beside, source = group.everyone, others[0] * group.size + group.place
        sent = [held.state() if group.number == others[0] else None]
        dist.broadcast_object_list(sent, src=source, group=beside)
        if is_victim:
            held.load(sent[0])
        set_replicas(model, OfGroup(group.everyone))
    else:
        optimizer.step()
        took.append(everyone)
        set_replicas(model, OfGroup(group.everyone))
    for step in range(len(took), 5):
        step_alone(model, optimizer, group, step)
        optimizer.step()
        took.append(everyone)
    assert_close(model, unsharded(took, group.size, of_two_blocks))
    mine = torch.cat([value.detach().flatten().double() for value in held.state().values()])
    states = [torch.empty_like(mine) for _ in everyone]
    dist.all_gather(states, mine, group=group.everyone)
    assert all(torch.equal(state, states[0]) for state in states), "healed groups are equal"
    return losing.is_lost


@pytest.mark.parametrize("num_groups, victim", [(2, 1), (2, 0), (3, 1)])
def test_a_group_lost_at_each_collective_of_a_step_costs_that_step_alone(num_groups, victim):
    harness.run_distributed(
        lose_at_each_collective, 2 * num_groups, {"num_groups": num_groups, "victim": victim}, timeout=120
    )


def lose_at_each_collective(num_groups: int, victim: int) -> None:
    lost = [train_with_losses(num_groups, victim, at) for at in range(6)]
    assert lost == [True] * 5 + [False], "three averages between two maxima"


class Failing(OfGroup):
    def average(self, tensor: torch.Tensor) -> Any:
        return self

    def wait(self) -> None:
        raise RuntimeError("by the manager")


@distributed(world_size=2, fresh=True)
def test_a_rank_whose_average_raises_ends_its_group_at_once():
    group = Group(1)
    model = sharded(group.new_life(), (Failing if group.place else OfGroup)(group.alone))
    with pytest.raises(RankLostError, match="by the manager|rank 1|not all ranks"):
        step_alone(model, sgd(model.parameters()), group, 0)


@distributed(world_size=4)
def test_accumulation_without_the_average_communicates_in_the_group_alone():
    group = Group(2)
    replicas = OfGroup(group.everyone)
    model = sharded(group.new_life(), replicas)
    torch.manual_seed(0)
    reference = Stack().double()
    for i in range(3):
        if i == 0 and group.number == 0:  # groups may run unequal numbers of these
            continue
        if i == 1:
            set_requires_all_reduce(model, False)
        with no_sync(model) if i == 0 else functools.partial(torch.enable_grad)():
            mean_square(model, batch_of(i, group.number, group.place)).backward()
        set_requires_all_reduce(model, True)
        assert replicas.log == [] or i == 2
    for number in range(2):
        for place in range(2):
            for i in range(3):
                if i or number:
                    (mean_square(reference, batch_of(i, number, place)) / 4).backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=0, atol=1e-12)


@distributed(world_size=2)
def test_what_is_refused_by_name():
    replicas = OfGroup(Group(2).alone)
    with pytest.raises(MisuseError, match="no fully_shard group"):
        set_replicas(nn.Linear(1, 1), replicas)
    with pytest.raises(MisuseError, match=r"object has no method average|a object has no method average"):
        set_replicas(fully_shard(Stack()), object())
    optional = Stack()
    fully_shard(optional.blocks[0], optional=True)
    fully_shard(optional)
    with pytest.raises(MisuseError, match="blocks.0|SmallBlock.*optional"):
        set_replicas(optional, replicas)
    with pytest.raises(MisuseError, match="replicas of its own"):
        set_replicas(replicate(Stack()), replicas)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(MisuseError, match="replicas of its own"):
        set_replicas(fully_shard(Stack(), mesh=mesh), replicas)
    model = shard_layers(Stack())
    set_replicas(model.blocks[0], replicas)
    with pytest.raises(MisuseError, match="some of the fully_shard groups"):
        model(rows())
    set_replicas(model, replicas)
    mean_square(model, rows()).backward()
    with pytest.raises(MisuseError, match="call it on the root"):
        set_replicas(model.blocks[0], None)
    with functional_mode(model), pytest.raises(NotImplementedError, match="set_replicas.*leave functional mode"):
        model(rows())
    compiled = fsdp_compose.compile(model, backend="eager")
    with pytest.raises(NotImplementedError, match="compiled region.*set_replicas"):
        compiled(rows())
    model.blocks[1].trip.look = lambda: set_replicas(model, None)
    with pytest.raises(FSDPComposeError, match="is running"):
        model(rows())
    model.blocks[1].trip.look = lambda: None
    with no_sync(model):
        mean_square(model, rows()).backward()
    with pytest.raises(FSDPComposeError, match="accumulated"):
        set_replicas(model, None)


@distributed(world_size=2)
def test_what_is_shown_names_the_stage():
    group = Group(2)
    model = sharded(group.new_life(), OfGroup(group.everyone))
    with record_collectives(model) as lines:
        mean_square(model, batch_of(0, group.number, group.place)).backward()
    found = [line for line in lines if line.startswith("all-reduce")]
    assert len(found) == 4 and all("among replica groups" in line for line in found), found
    assert "averaged over replica groups (OfGroup)" in str(describe(model))


@distributed(world_size=2)
def test_compiled_modules_train_too():
    group = Group(2)
    model = sharded(group.new_life(), OfGroup(group.everyone))
    compiled = torch.compile(model, backend="eager")  # its graphs break at the hooks of groups
    optimizer = adamw(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        mean_square(compiled, batch_of(step, group.number, group.place)).backward()
        optimizer.step()
    assert_close(model, unsharded([[0, 1]] * 2, 1))

    captured = fully_shard(nn.Linear(3, 3))
    mean_square(fsdp_compose.compile(captured, backend="eager"), rows()).backward()
    with pytest.raises(MisuseError, match="graphs of torch.compile"):
        set_replicas(captured, OfGroup(group.everyone))


@distributed(world_size=2)
def test_replicas_can_be_set_taken_away_and_copied():
    group = Group(2)
    replicas = OfGroup(group.everyone)
    model = sharded(group.new_life(), replicas)
    step_alone(model, sgd(model.parameters()), group, 0)
    copied = copy.deepcopy(model)
    num_calls = len(replicas.log)
    step_alone(copied, sgd(copied.parameters()), group, 1)
    assert len(replicas.log) == 2 * num_calls
    set_replicas(model, None)
    step_alone(model, sgd(model.parameters()), group, 2)
    assert len(replicas.log) == 2 * num_calls
    alone = unsharded_gradients(group)
    for param, expected in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected, rtol=0, atol=1e-12)


def unsharded_gradients(group: Group) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Stack().double()
    mean_square(model, batch_of(2, group.number, group.place)).backward()
    return [param.grad for param in model.parameters()]

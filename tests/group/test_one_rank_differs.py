"""One rank does more, or less, than the others: with ``FSDP_COMPOSE_DEBUG=1`` one error on every rank, in bounded time,
after which training can go on; without, the differences that the control exchange alone can see."""

from __future__ import annotations

import contextlib
import copy
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_compose import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    broadcast_replicas,
    drop_in,
    flat_parameters,
    fully_shard,
    functional_mode,
)
from fsdp_compose._torch import close_gloo_connections
from fsdp_compose.checkpoint import StateDictOptions, set_model_state_dict
from fsdp_compose.core.comm import store
from fsdp_compose.core.comm.store import DEBUG_ENV, TIMEOUT_ENV
from fsdp_compose.core.group.registry import get_state
from tests.harness import breakable_mesh, distributed, environment, same_on_every_rank
from tests.internals import impatient
from tests.training import local_part

NUM_STEPS = 3
DIFFERENT = "run different programs|issued different collectives|different numbers of optimizer steps"


def build(mesh=None):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    model = copy.deepcopy(reference)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, reference


def batch(step):
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


class Loop:
    """A training loop in which this rank may skip, or do twice, one thing at one step."""

    def __init__(self, model, is_functional=False, change="", place=-1):
        self.model, self.is_functional = model, is_functional
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.change, self.place = change, place

    def forward(self, step):
        with functional_mode(self.model) if self.is_functional else contextlib.nullcontext():
            return self.model(local_part(batch(step))).square().mean()

    def step(self, step):
        change = self.change if step == self.place else ""
        if change == "a forward for the log":
            with torch.no_grad():
                self.model(local_part(batch(step)))
        if change == "a forward with gradients":
            self.forward(step)
        self.optimizer.zero_grad()
        loss = self.forward(step)
        if change == "neither backward nor step":
            return
        if change != "no backward":
            loss.backward()
        if change == "two backwards":
            self.forward(step).backward()
        if change != "no step":
            self.optimizer.step()
        if change == "two steps":
            self.optimizer.step()

    def run(self):
        for step in range(NUM_STEPS):
            self.step(step)
        self.forward(NUM_STEPS)  # an evaluation ends the training


COLLECTIVES = [
    "a forward for the log",
    "a forward with gradients",
    "no backward",
    "neither backward nor step",
    "two backwards",
]


def error_of(loop, match):
    with pytest.raises(RuntimeError, match=match) as error:
        loop.run()
    return str(error.value)


@contextlib.contextmanager
def debugging(seconds="0.5"):
    with environment(**{DEBUG_ENV: "1", TIMEOUT_ENV: seconds}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_GRACE", timedelta(seconds=0.2))
        yield


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("change", COLLECTIVES)
@distributed(world_size=2)
def test_with_debugging_every_rank_names_what_all_ranks_are_about_to_do(change, is_functional):
    rank = dist.get_rank()
    with debugging("5"):
        for place in range(NUM_STEPS):
            model, _ = build(breakable_mesh())
            loop = Loop(model, is_functional, change if rank == place % 2 else "", place)
            # Two forwards and backwards are equal to those of the others but for the step between them.
            is_alike = change == "two backwards"
            text = error_of(loop, "numbers of optimizer steps" if is_alike else "are about to do different things")
            same_on_every_rank(text)
            assert "rank 0: " in text and "rank 1: " in text, text


@pytest.mark.parametrize("change", ["no step", "two steps"])
@distributed(world_size=2)
def test_with_debugging_a_step_of_one_rank_is_named(change):
    rank = dist.get_rank()
    with debugging("5"):
        for place in range(NUM_STEPS):
            model, _ = build(breakable_mesh())
            text = error_of(Loop(model, False, change if rank else "", place), "different numbers of optimizer steps")
            same_on_every_rank(text)
            other = place + (2 if change == "two steps" else 0)
            assert f"rank 1: {other} optimizer step(s)" in text and f"rank 0: {place + 1} optimizer step(s)" in text, (
                text
            )


@distributed(world_size=3)
def test_with_debugging_training_goes_on_after_the_error():
    rank = dist.get_rank()
    with debugging("5"):
        for change in ("no backward", "neither backward nor step", "a forward for the log"):
            model, reference = build(breakable_mesh())
            loop = Loop(model, change=change if rank == 1 else "", place=1)
            loop.step(0)
            expected = torch.optim.SGD(reference.parameters(), 0.1)

            def reference_step(step, reference=reference, expected=expected):
                expected.zero_grad()
                reference(batch(step)).square().mean().backward()
                expected.step()

            reference_step(0)
            with pytest.raises(RuntimeError, match="are about to do different things") as error:
                loop.step(1)
                loop.step(2)
            text = same_on_every_rank(str(error.value))
            assert "rank 1: all-gather of" in text and "ranks 0, 2: " in text, text
            loop.place = -1
            for step in (3, 4):
                with pytest.warns(UserWarning, match="interrupted") if step == 3 else contextlib.nullcontext():
                    loop.step(step)
                reference_step(step)
            for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(param.full_tensor(), wanted)


@distributed(world_size=2)
def test_with_debugging_a_rank_that_left_its_loop_is_named():
    rank = dist.get_rank()
    with debugging():
        for leaves in (0, 1):
            model, _ = build(breakable_mesh())
            loop = Loop(model)
            loop.step(0)
            if rank != leaves:
                with pytest.raises(RuntimeError, match=rf"agreeing on the next collective.*rank\(s\) {leaves} did not"):
                    loop.step(1)
            dist.barrier()


@distributed(world_size=2)
def test_with_debugging_an_exception_on_one_rank_does_not_let_the_others_wait():
    rank = dist.get_rank()
    with debugging("5"):
        model, _ = build(breakable_mesh())
        loop = Loop(model)
        loop.step(0)
        hook = model[2].register_forward_pre_hook(lambda *_: 1 / 0) if rank else None
        for step in (1, 2):  # rank 1 comes to step 2 while rank 0 is in step 1
            if step == 2 and hook is not None:
                hook.remove()
            is_expected = step == 1
            errors = (ZeroDivisionError,) if rank else (RuntimeError,)
            with pytest.raises(errors) if is_expected else pytest.warns(UserWarning, match="interrupted"):
                loop.step(step)
        loop.step(3)
        same_on_every_rank(str([param.full_tensor().tolist() for param in model.parameters()]))


# ---- without debugging: on gloo, where collectives are made of messages


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("place", range(NUM_STEPS))
@pytest.mark.parametrize("change", COLLECTIVES)
@distributed(world_size=2)
def test_every_rank_raises_in_bounded_time_and_one_that_waits_names_the_difference(change, place, is_functional):
    with impatient():
        check_that_ranks_notice(change, place, is_functional)


@pytest.mark.parametrize("change", COLLECTIVES)
@distributed(world_size=3)
def test_every_one_of_three_ranks_raises(change):
    with impatient():
        check_that_ranks_notice(change, 1, is_functional=False)


def check_that_ranks_notice(change, place, is_functional):
    """A rank that has come to its end has not noticed: that it goes is noticed by the others."""
    world_size = dist.get_world_size()
    model, _ = build(breakable_mesh())
    loop = Loop(model, is_functional, change if dist.get_rank() == world_size - 1 else "", place)
    error = None
    try:
        loop.run()
    except RuntimeError as raised:
        error = str(raised)
    close_gloo_connections(get_state(model).mesh.shard_group)  # as at the end of the process
    errors = [None] * world_size
    dist.all_gather_object(errors, error)
    assert any(errors), "no rank has noticed"
    ended = [text is None for text in errors]
    if any(ended):
        assert all(text is None or "not all ranks have" in text or re.search(DIFFERENT, text) for text in errors), (
            errors
        )
    else:
        assert all(re.search(DIFFERENT, text) for text in errors), errors


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("place", range(NUM_STEPS - 1))
@pytest.mark.parametrize("change", ["no step", "two steps"])
@distributed(world_size=(2, 3))
def test_a_step_that_one_rank_alone_makes_or_leaves_out_is_an_error_of_the_next_backward(
    change, place, is_functional, world_size
):
    model, _ = build()
    loop = Loop(model, is_functional, change if dist.get_rank() == 1 else "", place)
    text = same_on_every_rank(error_of(loop, "different numbers of optimizer steps since their last backward"))
    assert f"rank 1: {0 if change == 'no step' else 2}" in text and "load a checkpoint" in text
    assert all(param.grad is None for param in model.parameters())
    loop.place = -1
    with pytest.warns(UserWarning, match="interrupted"):
        loop.step(NUM_STEPS)
    loop.step(NUM_STEPS + 1)  # it was told once


@pytest.mark.parametrize("make", ["views", "one optimizer a parameter", "those with elements"])
@distributed(world_size=(2, 3, 4))
def test_ranks_may_have_other_optimizers_of_what_they_hold(make, world_size):
    """Among the shards of the last group are some that hold nothing."""
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(3, 1)), nn.Linear(1, 1)))
    loss = model(torch.ones(1, 3)).sum()
    loss.backward()
    params = [*flat_parameters(model)] if make == "views" else [*model.parameters()]
    if make != "views":
        params = [param for param in params if param.to_local().numel()]
    if make == "one optimizer a parameter":
        optimizers = [torch.optim.SGD([param], 0.1) for param in params]
    else:
        optimizers = [torch.optim.SGD(params, 0.1)] if params else []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()


@distributed(world_size=(2, 3))
def test_a_rank_that_holds_frozen_elements_only_may_have_no_optimizer(world_size):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1, bias=False))
    model[0].requires_grad_(False)
    fully_shard(model)
    step_of_holders(model)


def step_of_holders(model):
    model(torch.ones(1, 8)).sum().backward()
    params = [param for param in model.parameters() if param.requires_grad and param.to_local().numel()]
    optimizer = torch.optim.SGD(params, 0.1) if params else None
    for _ in range(3):
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        model(torch.ones(1, 8)).sum().backward()


@distributed(world_size=2)
def test_a_step_of_a_model_of_one_rank_alone_is_of_no_concern():
    model, _ = build()
    other = nn.Linear(2, 2)
    for step in range(3):
        model(local_part(batch(step))).sum().backward()
        if dist.get_rank():
            other(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(other.parameters(), 0.1).step()


# ---- ranks that start from different values


class Vocabulary(nn.Module):
    """Parameters of several kinds: long, short, frozen, in another dtype, not contiguous."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False))
        self.body[0].weight.requires_grad_(False)
        self.body[2].weight = nn.Parameter(torch.randn(6, 6).t())
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        self.register_buffer("offset", torch.randn(6))

    def forward(self, ids):
        return self.body(self.embed(ids)) * self.scale + self.offset


IDS = torch.arange(12)
STARTED_DIFFERENTLY = r"first forward: when fully_shard\(\) was called, {} had other values on {} than on {}"
OPTIONS = {"plain": {}, "low": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, "host": {}, "whole": {}}
OPTIONS["host"]["offload_policy"] = CPUOffloadPolicy()
OPTIONS["whole"]["granularity"] = lambda *_: "whole"


def shard_vocabulary(model, options="plain", mesh=None):
    fully_shard(model.body, mesh=mesh, **OPTIONS[options])
    return fully_shard(model, mesh=mesh, **OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["embed.weight", "body.0.weight", "body.0.bias", "body.2.weight", "scale"])
@distributed(world_size=3)
def test_a_parameter_that_starts_differently_on_one_rank_is_named_on_all(name, options):
    torch.manual_seed(0)
    model = Vocabulary()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter(name)[-1] += 1
    shard_vocabulary(model, options)
    for _ in range(2):  # the next forward says it again
        with pytest.raises(RuntimeError, match=STARTED_DIFFERENTLY.format(name, "rank 1", "ranks 0, 2")) as error:
            model(IDS)
        same_on_every_rank(str(error.value))


@pytest.mark.parametrize("shard", [fully_shard, drop_in.fully_shard])
@distributed(world_size=2)
def test_other_seeds_are_an_error_that_says_how_many_parameters_differ(shard):
    torch.manual_seed(dist.get_rank())
    model = shard(Vocabulary())
    with pytest.raises(RuntimeError, match=r"embed\.weight had other values.*\(4 parameters differ in all\)"):
        model(IDS)


@distributed(world_size=4)
def test_ranks_of_one_shard_group_that_started_differently_are_named_where_there_are_replicas():
    torch.manual_seed(dist.get_rank() == 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_vocabulary(Vocabulary(), mesh=mesh)
    with pytest.raises(RuntimeError, match=STARTED_DIFFERENTLY.format(r"embed\.weight", "rank 3", "rank 2")):
        model(IDS)


def start_from(way):
    """A sharded model whose ranks began with different values, or had none, and the values that it has now."""
    torch.manual_seed(0)
    right = Vocabulary()
    torch.manual_seed(dist.get_rank())
    if way == "meta":
        with torch.device("meta"):
            model = shard_vocabulary(Vocabulary())
        model.to_empty(device="cpu")
        model.offset.copy_(right.offset)
    else:
        model = Vocabulary()
        if way == "broadcast":
            broadcast_replicas(model)
        shard_vocabulary(model)
    if way == "broadcast":
        return model, right
    state = right.state_dict() if dist.get_rank() == 0 or way != "first rank's" else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "first rank's")
    set_model_state_dict(model, state, options=options)
    return model, right


@pytest.mark.parametrize("way", ["broadcast", "loaded", "first rank's", "meta"])
@distributed(world_size=3)
def test_values_that_all_ranks_get_before_the_first_forward_are_right(way):
    model, right = start_from(way)
    torch.testing.assert_close(model(IDS), right(IDS))  # no bits: sharded, the transposed weight is contiguous
    for (name, param), expected in zip(model.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected), name


@distributed(world_size=2)
def test_whoever_wants_a_mixture_turns_the_comparison_off():
    torch.manual_seed(dist.get_rank())
    with environment(FSDP_COMPOSE_COMPARE_STARTS="0"):
        model = shard_vocabulary(Vocabulary())
        model(IDS).sum().backward()
    assert model.embed.weight.grad is not None


@distributed(world_size=2)
def test_broadcast_before_sharding_refuses_what_it_cannot_make_equal():
    with torch.device("meta"), pytest.raises(ValueError, match="weight is on the meta device: call module.to_empty"):
        broadcast_replicas(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="call it with the same model on every rank"):
        broadcast_replicas(nn.Linear(2, 2 + dist.get_rank()))
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="weight is a DTensor, whose ranks hold different parts: give the mesh"):
        broadcast_replicas(model)
    with pytest.raises(ValueError, match="the model is sharded already"):
        broadcast_replicas(fully_shard(nn.Linear(2, 2)), mesh=mesh)

"""``checkpoint.shards``: what a rank holds, copied on any thread and loaded in place."""

from __future__ import annotations

import functools
import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compose import FSDPComposeError, flat_parameters, fully_shard, offload_optimizer_states, summon_full_params
from fsdp_compose.checkpoint import Shards, shards
from tests import harness
from tests.internals import local_of
from tests.models import Stack, rows, shard_layers
from tests.training import adamw, local_part, mean_square, sgd, train_step

distributed = functools.partial(harness.distributed, timeout=60)

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: sgd(model.parameters()),
    "adamw": lambda model: adamw(model.parameters()),
    "two groups": lambda model: torch.optim.Adam(
        [{"params": [*model.parameters()][:3], "lr": 0.1}, {"params": [*model.parameters()][3:], "betas": (0.5, 0.9)}]
    ),
    "flat views": lambda model: adamw(flat_parameters(model)),
    "offloaded": lambda model: offload_optimizer_states(adamw(flat_parameters(model))),
}


class Counted(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1  # another tensor each time
        return super().forward(x)


def made(seed: int = 0, kind: str = "adamw", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Shards]:
    torch.manual_seed(seed)
    model = shard_layers(Counted(), **options)
    optimizer = OPTIMIZERS[kind](model)
    return model, optimizer, shards(model, optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        batch = local_part(rows(step))
        train_step(model, optimizer, batch)


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("kind", OPTIMIZERS)
@distributed(world_size=(1, 2))
def test_a_loaded_state_trains_on_bit_for_bit(world_size, kind):
    model, optimizer, held = made(0, kind)
    other, other_optimizer, other_held = made(1, kind)  # never stepped
    train(model, optimizer, 0, 1, 2)
    optimizer.param_groups[0]["lr"] = 0.0125  # as a schedule does
    file = io.BytesIO()
    torch.save(held.state(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values())
    addresses = [local_of(param).data_ptr() for param in other.parameters()]
    other_held.load(state)
    assert [local_of(param).data_ptr() for param in other.parameters()] == addresses
    assert_equal(other_held.state(), state)
    train(model, optimizer, 3, 4, 5)
    train(other, other_optimizer, 3, 4, 5)
    after = held.state()
    assert_equal(other_held.state(), after)
    held.load(state)  # back, in place
    train(model, optimizer, 3, 4, 5)
    assert_equal(held.state(), after)


@distributed(world_size=2)
def test_state_that_the_other_does_not_have_goes():
    model, optimizer, held = made()
    start = held.state()
    train(model, optimizer, 0, 1)
    first = held.state()
    held.load(start)
    assert not optimizer.state
    train(model, optimizer, 0, 1)
    assert_equal(
        {k: v for k, v in held.state().items() if "count" not in k},
        {k: v for k, v in first.items() if "count" not in k},
    )


@distributed(world_size=2)
def test_parameters_in_memory_of_their_own_and_of_no_group():
    def make(seed: int) -> tuple[nn.Module, Shards]:
        torch.manual_seed(seed)
        model = Stack()
        model.alone = nn.Parameter(torch.randn(3))
        fully_shard(model, ignored_params={model.alone})
        return model, shards(model)

    (model, held), (other, other_held) = make(0), make(1)
    for param in other.parameters():
        if param is not other.alone:
            param.data = param.data.clone()
    other_held.load(held.state())
    assert_equal(other_held.state(), held.state())
    assert torch.equal(model.alone, other.alone)
    assert torch.equal(model(rows()), other(rows()))


def other_size() -> tuple[nn.Module, Any]:
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = shard_layers(Counted(), mesh=DeviceMesh.from_group(group, "cpu"))
    return model, adamw(model.parameters())


def other_groups() -> tuple[nn.Module, Any]:
    model = fully_shard(Counted())
    return model, adamw(model.parameters())


def other_dtype() -> tuple[nn.Module, Any]:
    model = shard_layers(Counted().double())
    return model, adamw(model.parameters())


def other_optimizer() -> tuple[nn.Module, Any]:
    model = shard_layers(Counted())
    return model, sgd(model.parameters())


def other_parameter_groups() -> tuple[nn.Module, Any]:
    model = shard_layers(Counted())
    return model, adamw([{"params": [param]} for param in model.parameters()])


def no_optimizer() -> tuple[nn.Module, Any]:
    return shard_layers(Counted()), ()


@pytest.mark.parametrize("number", range(7))
@distributed(world_size=2)
def test_another_layout_is_a_named_error_that_changes_nothing(number):
    makes: list[tuple[Callable[[], tuple[nn.Module, Any]], str]] = [
        (other_size, "rank 0 of 1"),
        (other_groups, "more: "),
        (other_dtype, "float64"),
        (other_optimizer, "SGD, group 0"),
        (other_parameter_groups, "AdamW, group 0: 1 parameters"),
        (no_optimizer, "nothing more"),
    ]
    model, optimizer, held = made()
    train(model, optimizer, 0)
    before = held.state()
    if number < len(makes):
        make, text = makes[number]
        torch.manual_seed(1)
        other, other_optimizers = make()
        other_held = shards(other, other_optimizers)
        state = other_held.state()
    else:  # that of another rank
        text, other_held = "on rank 1 of 2.*on rank 0 of 2|on rank 0 of 2.*on rank 1 of 2", held
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, before)
        state = everyone[1 - dist.get_rank()]
    with pytest.raises(FSDPComposeError, match=f"(?s)another layout.*{text}.*Nothing was changed"):
        held.load(state)
    assert_equal(held.state(), before)
    train(model, optimizer, 1)


@distributed(world_size=1)
def test_a_state_that_does_not_fit_changes_nothing():
    model, optimizer, held = made()
    train(model, optimizer, 0)
    before = held.state()
    train(model, optimizer, 1)
    now = held.state()
    for change, text in [
        (lambda state: state.pop("flat.1"), "flat.1 is missing"),
        (lambda state: state.pop("optimizer.0.state.2.exp_avg"), "optimizer.0.state.2.exp_avg is missing"),
        (lambda state: state.pop("hyperparameters"), "hyperparameters"),
        (lambda state: state.update({"flat.1": state["flat.1"].double()}), "flat.1 is .*float64"),
        (lambda state: state.update({"strange": torch.zeros(1)}), "strange is unknown"),
    ]:
        state = dict(before)
        change(state)
        with pytest.raises(FSDPComposeError, match=f"(?i)(?s){text}"):
            held.load(state)
        assert_equal(held.state(), now)
    with pytest.raises(FSDPComposeError, match="expected what"):
        held.load({})


@distributed(world_size=1)
def test_what_it_refuses():
    with pytest.raises(FSDPComposeError, match="no module"):
        shards(nn.Linear(1, 1))
    model, optimizer, held = made()
    with pytest.raises(FSDPComposeError, match="expected optimizers, got int"):
        shards(model, [3])
    train(model, optimizer, 0)
    state = held.state()
    with summon_full_params(model), pytest.raises(FSDPComposeError, match="summon_full_params"):
        held.state()
    model.blocks[1].trip.look = lambda: held.load(state)
    with pytest.raises(FSDPComposeError, match="is running"):
        model(rows())
    model.blocks[1].trip.look = lambda: None
    train(model, optimizer, 1)

    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return object()

    with pytest.raises(FSDPComposeError, match="extra state"):
        shards(fully_shard(nn.Sequential(Extra(1, 1))))
    optimizer.state[next(model.parameters())]["strange"] = object()
    with pytest.raises(FSDPComposeError, match="strange of the state of embed.weight in the AdamW"):
        held.state()
    del optimizer.state[next(model.parameters())]["strange"]
    optimizer.state["shared"] = {"number": 1}
    with pytest.raises(FSDPComposeError, match="none of its parameters"):
        held.state()


@distributed(world_size=1)
def test_copies_made_in_inference_mode_are_usual_tensors():
    model, optimizer, held = made()
    train(model, optimizer, 0)
    with torch.inference_mode():
        state = held.state()
    assert not [key for key, value in state.items() if value.is_inference()]
    assert [value.add_(1) for value in state.values() if value.is_floating_point()]


@distributed(world_size=1)
def test_state_not_shaped_like_its_parameter_needs_an_optimizer_that_has_stepped():
    def make(seed: int) -> tuple[Callable[[], None], Shards]:
        torch.manual_seed(seed)
        model = fully_shard(Stack())
        optimizer = torch.optim.LBFGS(model.parameters(), history_size=2, max_iter=2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_square(model, rows())
            loss.backward()
            return loss

        return lambda: optimizer.step(closure), shards(model, optimizer)

    (step, held), (other_step, other_held) = make(0), make(1)
    step()
    step()
    with pytest.raises(FSDPComposeError, match=r"old_dirs.0 is not shaped like its parameter"):
        other_held.load(held.state())
    other_step()
    other_step()
    other_held.load(held.state())
    step()
    other_step()
    assert_equal(held.state(), other_held.state())


@distributed(world_size=1)
def test_a_step_that_raised_is_told_of_until_the_next_one():
    model, optimizer, held = made()
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(held.state(timeout=0.2))
        except FSDPComposeError as error:
            found.append(str(error))

    def in_thread() -> Any:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return found.pop()

    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, 0)
    assert "ended in an exception" in in_thread()
    handle.remove()
    stepping = threading.Thread(target=optimizer.step)  # on another thread than the one that raised
    stepping.start()
    stepping.join(20)
    assert not stepping.is_alive()
    assert_equal(in_thread(), held.state())


@distributed(world_size=1, timeout=120)
def test_every_state_read_in_a_thread_during_hundreds_of_steps_is_that_of_a_step():
    model, optimizer, held = made()

    def summary(state: dict[str, torch.Tensor]) -> tuple[float, ...]:
        return tuple(float(v.double().sum()) for key, v in state.items() if key.startswith(("flat", "optimizer")))

    train(model, optimizer, 0)
    known, read, problems, stop = {summary(held.state())}, list[Any](), list[str](), threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                read.append(summary(held.state()))
            except Exception as error:
                problems.append(repr(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        steps = 0
        while steps < 400 or len(set(read)) <= 20:
            train(model, optimizer, steps)
            known.add(summary(held.state()))
            steps += 1
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not problems, problems[:3]
    assert set(read) <= known

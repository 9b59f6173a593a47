"""One rank does more, or less, than the others: with ``FSDP_COMPOSE_DEBUG=1`` one error on every rank, in bounded time,
after which training can go on; without, the differences that the control exchange alone can see."""

from __future__ import annotations

import contextlib
import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import fully_shard, functional_mode
from fsdp_compose.comm import rendezvous
from fsdp_compose.comm.records import DEBUG_ENV
from fsdp_compose.comm.rendezvous import TIMEOUT_ENV
from tests.harness import distributed
from tests.models import local_part
from tests.test_invariants import breakable_mesh, environment, same_on_every_rank

NUM_STEPS = 3


def build(mesh=None):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    model = copy.deepcopy(reference)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, reference


def batch(step):
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(step))


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
        patch.setattr(rendezvous, "_GRACE", timedelta(seconds=0.2))
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

"""Invariant 8: after an interrupted iteration, ranks meet first, and training goes on."""

from __future__ import annotations

import contextlib
import functools
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import (
    RaggedDTensor,
    fully_shard,
    no_sync,
)
from fsdp_compose._torch import default_store
from fsdp_compose.core.comm import store
from fsdp_compose.core.comm.store import TIMEOUT_ENV
from fsdp_compose.core.group.registry import _get_fsdp_states
from tests import harness
from tests.harness import breakable_mesh, environment, our_warnings
from tests.internals import assert_nothing_is_unsharded, sharded_params
from tests.models import IN, OUT, Stack, rows
from tests.training import (
    after_training,
    assert_gradients_match,
    assert_no_gradients,
    assert_parameters_match,
    assert_trains_on,
    interrupt,
    local_part,
    mean_square,
    pair,
    raise_by_the_user,
    sgd,
    stacks,
    train_step,
)

distributed = functools.partial(harness.distributed, timeout=20)  # seconds; a body takes a fraction of one


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@distributed(world_size=2)
def test_training_goes_on_after_an_interruption(kind, where, place, reshard_after_forward):
    check_interruption(kind, where, place, reshard_after_forward)


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("place", [0, 1, 2])
@distributed(world_size=3)
def test_training_goes_on_after_an_interruption_of_three_ranks(place, reshard_after_forward):
    is_error = (place + (reshard_after_forward is None)) % 2 == 0
    check_interruption(ValueError if is_error else KeyboardInterrupt, "forward", place, reshard_after_forward)
    check_interruption(KeyboardInterrupt if is_error else ValueError, "backward", place, reshard_after_forward)


def check_interruption(kind: type[BaseException], where: str, place: int, reshard_after_forward: bool | None) -> None:
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    optimizers = sgd(model.parameters()), sgd(reference.parameters())
    params = list(model.parameters())
    for step, interruptions in enumerate([1, 0, 2, 0]):  # in the first iteration, and later twice in a row
        for _ in range(interruptions):
            interrupt(model, where, place, kind("by the user"))
            assert all(param.grad is None for param in params)
        with our_warnings() as texts:
            train_step(model, optimizers[0], local_part(rows(step)))
        train_step(reference, optimizers[1], rows(step))
        assert len(texts) == bool(interruptions) and all("interrupted" in text for text in texts), texts
        assert_nothing_is_unsharded(model)
        assert all(ours is sharded for ours, sharded in zip(model.parameters(), params, strict=True))
    assert_parameters_match(model, reference, 1e-6)


@pytest.mark.parametrize("where", ["forward", "backward"])
@distributed(world_size=2)
def test_interruption_outside_of_every_block(where):
    model, reference = stacks()
    after_training(model)
    after_training(reference)
    for kind in (ValueError, KeyboardInterrupt):
        model.trip.arm(where, kind("by the user"))
        with pytest.raises(kind):
            mean_square(model, local_part(rows())).backward()
    with our_warnings() as texts:
        assert_trains_on(model, reference)
    assert len(texts) == 1
    assert_nothing_is_unsharded(model)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@distributed(world_size=2)
def test_interrupted_evaluation(kind):
    model, reference = stacks(reshard_after_forward=False)
    after_training(model)
    after_training(reference)
    for mode in (torch.no_grad, torch.inference_mode):
        model.blocks[1].trip.arm("forward", kind("by the user"))
        with mode(), pytest.raises(kind):
            model(rows())
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(model(rows()), reference(rows()), rtol=0, atol=1e-6)
        assert_nothing_is_unsharded(model)
    assert_trains_on(model, reference)


def give_other_data(model: nn.Module) -> None:
    for param in sharded_params(model) or model.parameters():
        param.data = param.data * 1.5


def freeze_a_block(model: nn.Module) -> None:
    model.blocks[1].requires_grad_(False)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("change", [nn.Module.double, give_other_data, freeze_a_block])
@distributed(world_size=2)
def test_what_the_user_changes_after_an_interruption_takes_effect(change, where):
    model, reference = stacks()
    after_training(model)
    after_training(reference)
    interrupt(model, where, 1, ValueError("by the user"))
    for twin in (model, reference):
        change(twin)
    dtype = reference.head.weight.dtype
    with our_warnings():
        mean_square(model, local_part(rows(2)).to(dtype)).backward()
    mean_square(reference, rows(2).to(dtype)).backward()
    assert_gradients_match(model, reference, 1e-6)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=2)
def test_interrupted_recomputation(use_reentrant, kind):
    model, reference = stacks(use_reentrant=use_reentrant)
    params, optimizers = list(model.parameters()), (sgd(model.parameters()), sgd(reference.parameters()))
    for step, place in enumerate([1, 0, 2]):
        model.blocks[place].trip.arm("forward", kind("by the user"), passes=1)
        with pytest.raises(kind):
            mean_square(model, local_part(rows())).backward()
        with our_warnings() as texts:
            train_step(model, optimizers[0], local_part(rows(step)))
        train_step(reference, optimizers[1], rows(step))
        assert len(texts) == 1
        assert_nothing_is_unsharded(model)
        assert all(ours is sharded for ours, sharded in zip(model.parameters(), params, strict=True))
    assert_parameters_match(model, reference, 1e-6)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@distributed(world_size=2)
def test_interruption_while_prefetched_groups_are_in_flight(kind):
    model, reference = stacks()
    after_training(model)
    after_training(reference)
    states = _get_fsdp_states(model)

    def prefetched() -> list[int]:
        found = []
        for i, state in enumerate(states[1:]):
            if any(handle.unsharded.work is not None for handle in state._handles):
                found.append(i)
        return found

    in_flight = []
    model.blocks[0].trip.look = lambda: in_flight.append(prefetched())
    interrupt(model, "forward", 0, kind("by the user"))
    assert in_flight == [[1]]
    model.blocks[0].trip.look = lambda: None
    for param in [*sharded_params(model), *reference.parameters()]:
        param.data.mul_(1.5)  # what was gathered for the interrupted iteration is stale
    with our_warnings(), torch.no_grad():
        torch.testing.assert_close(model(rows()), reference(rows()), rtol=0, atol=1e-6)
    assert_nothing_is_unsharded(model)
    assert_trains_on(model, reference)
    in_flight.clear()
    hook = model.blocks[2].trip.register_full_backward_pre_hook(lambda *_: in_flight.append(prefetched()))
    interrupt(model, "backward", 2, kind("by the user"))
    hook.remove()
    assert in_flight == [[1]]
    with our_warnings():
        assert_trains_on(model, reference)
    assert_nothing_is_unsharded(model)


@pytest.mark.parametrize("how", ["sync", "no_sync"])
@pytest.mark.parametrize(
    "where, place, is_dropped",
    [("forward", 2, False), ("backward", 2, False), ("backward", 1, True), ("backward", 0, True)],
)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@distributed(world_size=2)
def test_accumulated_gradients_are_dropped_only_if_the_interrupted_backward_had_touched_them(
    kind, where, place, is_dropped, how
):
    model, reference = stacks()
    without_sync = no_sync if how == "no_sync" else lambda _: contextlib.nullcontext()
    with without_sync(model):
        mean_square(model, local_part(rows(0))).backward()
        interrupt(model, where, place, kind("by the user"), step=1)
    with our_warnings() as texts:
        mean_square(model, local_part(rows(2))).backward()
    assert len(texts) == 1 and ("all gradients are None" in texts[0]) == is_dropped, texts
    for step in [2] if is_dropped else [0, 2]:
        mean_square(reference, rows(step)).backward()
    assert_gradients_match(model, reference, 1e-6)
    for module in (model, reference):
        module.zero_grad()
    assert_trains_on(model, reference)


@distributed(world_size=2)
def test_exception_handled_inside_forward_is_no_interruption():
    class Tolerant(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                try:
                    x = block(x)
                except ValueError:
                    continue
            return self.head(x)

    torch.manual_seed(0)
    model, reference = pair(Tolerant())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with our_warnings() as texts:
        for step in range(3):
            for module, batch in ((model, local_part(rows(step))), (reference, rows(step))):
                module.blocks[1].trip.arm("forward", ValueError("handled"))
                mean_square(module, batch).backward()
            assert_gradients_match(model, reference, 1e-6)
            assert model.blocks[1].up.weight.grad is not None if step < 0 else True
            model.zero_grad()
            reference.zero_grad()
    assert not texts
    assert_nothing_is_unsharded(model)


@distributed(world_size=2)
def test_forwards_without_backward_are_no_interruption():
    model, reference = stacks()
    with our_warnings() as texts:
        for _ in range(3):
            model(rows())
        first, second = (model(local_part(rows(i))).square().mean() for i in range(2))
        (first + second).backward()
    assert not texts
    for i in range(2):
        mean_square(reference, rows(i)).backward()
    assert_gradients_match(model, reference, 1e-6)


class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(IN, IN), nn.Linear(IN, OUT)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        return self.outer(x) + self(x, depth - 1) if depth else self.outer(x)


@pytest.mark.parametrize("nested", [False, True])
@distributed(world_size=2)
def test_root_that_calls_itself_is_no_interruption(nested):
    torch.manual_seed(0)
    model, reference = pair(CallsItself())
    if nested:
        fully_shard(model.inner)
    fully_shard(model)
    with our_warnings() as texts:
        assert_trains_on(model, reference)
    assert not texts


@distributed(world_size=2)
def test_interleaved_roots_are_no_interruption():
    (first, first_reference), (second, second_reference) = stacks(), stacks()
    optimizers = [sgd(model.parameters()) for model in (first, second, first_reference, second_reference)]
    with our_warnings() as texts:
        for step in range(3):
            losses = mean_square(first, local_part(rows(step))), mean_square(second, local_part(rows(step + 9)))
            (losses[0] * losses[1]).backward()  # one backward through both
            for ours, theirs in zip(rows(step).chunk(2), rows(step + 9).chunk(2)):
                (mean_square(first_reference, ours) * mean_square(second_reference, theirs) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert not texts
    assert_parameters_match(first, first_reference, 1e-6)
    assert_parameters_match(second, second_reference, 1e-6)


@pytest.mark.parametrize("where, recovering", [("forward", 0), ("backward", 1)])
@distributed(world_size=2)
def test_interruption_on_one_rank_names_the_absent_rank_in_time(where, recovering):
    model, _ = stacks(mesh=breakable_mesh())
    after_training(model)
    with environment(**{TIMEOUT_ENV: "1"}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_GRACE", timedelta(seconds=0.5))
        if dist.get_rank() == recovering:
            interrupt(model, where, 1, ValueError("by the user"))
            with pytest.raises(
                RuntimeError, match=rf"recovery.*rank\(s\) {1 - recovering} did not arrive.*{TIMEOUT_ENV}"
            ):
                model(rows())
        else:  # its collective has no partner
            with pytest.raises(
                RuntimeError,
                match=f"rank {1 - recovering}: the (all-gather|reduce-scatter) of the fully_shard|the control exchange",
            ):
                mean_square(model, local_part(rows())).backward()
            assert_no_gradients(model)


@pytest.mark.parametrize("with_term", [False, True])
@distributed(world_size=2)
def test_gradient_hooks_that_raise_in_different_groups_leave_no_gradient_on_any_rank(with_term):
    model, reference = stacks()
    blocks, seen = [model.blocks[i].up.weight for i in range(2)], []

    def raise_once(_grad: torch.Tensor) -> None:
        if not seen:
            seen.append("raised")
            raise ValueError("by the user")

    blocks[dist.get_rank()].register_hook(raise_once)
    blocks[1 - dist.get_rank()].register_hook(lambda grad: None)  # autograd's own hooks gather: on all ranks

    def loss_with_term(module: Stack, batch: torch.Tensor) -> torch.Tensor:
        weight = module.blocks[1].up.weight
        return (weight.full_tensor() if isinstance(weight, RaggedDTensor) else weight).sum() + mean_square(
            module, batch
        )

    loss = loss_with_term if with_term else mean_square
    with pytest.raises(ValueError, match="by the user"):
        loss(model, local_part(rows())).backward()
    with our_warnings() as texts:
        loss(model, local_part(rows(1))).backward()
    assert len(texts) == 1 and "all gradients are None" in texts[0]
    loss(reference, rows(1)).backward()
    assert_gradients_match(model, reference, 1e-6)
    model.zero_grad()
    reference.zero_grad()
    assert_trains_on(model, reference)


@distributed(world_size=2)
def test_interruptions_at_different_places_are_one_error_on_every_rank():
    model, _ = stacks(mesh=breakable_mesh())
    after_training(model)
    with environment(**{TIMEOUT_ENV: "10"}):
        # Rank 0 has gathered the root and prefetched block 0; rank 1 has prefetched block 1 as well.
        if dist.get_rank() == 0:
            model.trip.arm("forward", ValueError("by the user"))
        else:
            model.blocks[0].register_forward_pre_hook(raise_by_the_user)
        with pytest.raises(ValueError, match="by the user"):
            model(rows())
        words = r"different places on different ranks.*rank 0 after \d+, rank 1 after \d+.*Restart"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=words):
                model(rows())


@distributed(world_size=2)
def test_interruptions_far_apart_name_the_absent_rank_and_never_hang():
    model, _ = stacks(mesh=breakable_mesh())
    with environment(**{TIMEOUT_ENV: "1"}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_GRACE", timedelta(seconds=0.5))
        if dist.get_rank() == 0:
            interrupt(model, "forward", 0, ValueError("by the user"))
            with pytest.raises(RuntimeError, match=r"rank\(s\) 1 did not arrive"):
                model(rows())
            default_store().wait(["its all-gather has failed"], timedelta(seconds=50))  # which rank 0 never joined
        else:
            model.blocks[2].trip.arm("forward", ValueError("by the user"))
            with pytest.raises(RuntimeError, match="the all-gather of the fully_shard"):
                model(rows())
            default_store().set("its all-gather has failed", "")
        with pytest.raises(
            RuntimeError, match="different places on different ranks|arrive at the rendezvous|restart the processes"
        ):
            model(rows())

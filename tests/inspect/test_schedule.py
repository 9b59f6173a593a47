"""``record_collectives``: what a model asks of the ranks, in which order, and when it waits."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from expecttest import assert_expected_inline

from fsdp_compose import (
    fully_shard,
    functional_mode,
    no_sync,
    record_collectives,
    summon_full_params,
)
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import distributed, fake_process_group
from tests.inspect.test_trace import step
from tests.training import local_part


def build(**options) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options), reference


def schedule(num_before: int = 0, **options) -> str:
    """One iteration, after others."""
    with fake_process_group(rank=1, world_size=4):
        model, _ = build(**options)
        for _ in range(num_before):
            step(model)
        with record_collectives(model) as lines:
            step(model)
        return "\n".join(lines)


def test_first_iteration():
    assert_expected_inline(
        schedule(),
        """\
all-gather 0 (32 x float32 among 4 ranks)
  wait for all-gather 0
all-gather 1 (32 x float32 among 4 ranks)
  wait for all-gather 1
all-gather 1 (32 x float32 among 4 ranks)
all-gather 0 (32 x float32 among 4 ranks)
  wait for all-gather 1
reduce-scatter 1 (32 x float32 among 4 ranks)
  wait for all-gather 0
  wait for reduce-scatter 1
reduce-scatter 0 (32 x float32 among 4 ranks)
  wait for reduce-scatter 0""",
    )


def test_flat_parameters_of_one_group_are_told_apart_by_their_parameters():
    """Frozen and trainable ones are two flat parameters; the root's group, which has one, is called by its name."""
    with fake_process_group(rank=1, world_size=4):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
        model[0][1].requires_grad_(False)
        fully_shard(model[0])
        fully_shard(model)
        with record_collectives(model) as lines, torch.no_grad():
            model(torch.ones(2, 4))
    assert {line.partition(" among")[0] for line in lines if line.startswith("all-gather")} == {
        "all-gather 0.0.weight and 1 more (32 x float32",
        "all-gather 0.1.weight and 1 more (32 x float32",
        "all-gather (root) (32 x float32",
    }


def test_second_iteration_gathers_ahead():
    assert_expected_inline(
        schedule(1),
        """\
all-gather 0 (32 x float32 among 4 ranks)
all-gather 1 (32 x float32 among 4 ranks)
  wait for all-gather 0
  wait for all-gather 1
all-gather 1 (32 x float32 among 4 ranks)
all-gather 0 (32 x float32 among 4 ranks)
  wait for all-gather 1
reduce-scatter 1 (32 x float32 among 4 ranks)
  wait for all-gather 0
  wait for reduce-scatter 1
reduce-scatter 0 (32 x float32 among 4 ranks)
  wait for reduce-scatter 0""",
    )


def test_without_resharding_backward_gathers_nothing():
    assert_expected_inline(
        schedule(1, reshard_after_forward=False),
        """\
all-gather 0 (32 x float32 among 4 ranks)
all-gather 1 (32 x float32 among 4 ranks)
  wait for all-gather 0
  wait for all-gather 1
reduce-scatter 1 (32 x float32 among 4 ranks)
  wait for reduce-scatter 1
reduce-scatter 0 (32 x float32 among 4 ranks)
  wait for reduce-scatter 0""",
    )


def test_functional_mode_gathers_again_for_no_backward():
    with fake_process_group(rank=1, world_size=4):
        model, _ = build()
        with record_collectives(model) as lines, functional_mode(model):
            step(model)
    assert_expected_inline(
        "\n".join(lines),
        """\
all-gather 0 (32 x float32 among 4 ranks)
  wait for all-gather 0
all-gather 1 (32 x float32 among 4 ranks)
  wait for all-gather 1
reduce-scatter 1 (32 x float32 among 4 ranks)
  wait for reduce-scatter 1
reduce-scatter 0 (32 x float32 among 4 ranks)
  wait for reduce-scatter 0""",
    )


def test_without_sync_backward_reduces_nothing_until_the_last():
    with fake_process_group(rank=1, world_size=4):
        model, _ = build()
        step(model)
        with record_collectives(model) as lines:
            with no_sync(model):
                step(model)
            assert not any("reduce-scatter" in line for line in lines)
            del lines[:]
            step(model)
    assert_expected_inline(
        "\n".join(line for line in lines if "reduce" in line),
        """\
reduce-scatter 1 (32 x float32 among 4 ranks)
  wait for reduce-scatter 1
reduce-scatter 0 (32 x float32 among 4 ranks)
  wait for reduce-scatter 0""",
    )


def test_full_parameters_are_gathered_once():
    with fake_process_group(rank=1, world_size=4):
        model, _ = build()
        with record_collectives(model) as lines, summon_full_params(model):
            pass
    assert_expected_inline(
        "\n".join(lines),
        """\
gather 0 on every rank
gather 1 on every rank""",
    )


class Ends(nn.Module):
    """Layers, the first and the last of which are one group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        self.cuts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x).tanh()).tanh()
        return self.last(x.detach() if self.cuts else x)


def shard_ends(model: Ends, reshard: bool) -> Ends:
    fully_shard(model.middle)
    fully_shard([model.first, model.last], reshard_after_forward=reshard)
    return fully_shard(model)


@pytest.mark.parametrize(("reshard", "num_gathers"), [(False, 1), (True, 2)])
@distributed(world_size=2)
def test_a_group_of_several_modules_is_gathered_once_each_way(reshard, num_gathers):
    torch.manual_seed(0)
    reference = Ends()
    model = shard_ends(copy.deepcopy(reference), reshard)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for how in ("plain", "plain", "accumulated", "two forwards", "last alone", "plain"):
        with record_collectives(model) as lines:
            for item, batch in ((reference, x), (model, local_part(x))):
                if how == "two forwards":
                    (item(batch).square().mean() + item(2 * batch).square().mean()).backward()
                else:
                    item.cuts = how == "last alone"  # backward comes to one of the modules only
                    with no_sync(item) if how == "accumulated" and item is model else contextlib.nullcontext():
                        item(batch).square().mean().backward()
        gathers = [line for line in lines if line.startswith("all-gather first ")]
        if how == "plain":
            assert len(gathers) == num_gathers, "\n".join(lines)
        if how != "accumulated":
            for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None), f"{how}: {name}"
                if theirs.grad is not None:
                    torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=f"{how}: {name}")
            model.zero_grad()
            reference.zero_grad()
    handles = _get_fsdp_handles(model)
    assert not any(handle.unsharded.is_allocated for handle in handles)


@pytest.mark.parametrize("is_functional", [False, True])
@distributed(world_size=(2, 3))
def test_a_recorded_run_is_the_same_and_afterwards_nothing_is_recorded(is_functional, world_size):
    model, reference = build()
    noted: list[str] = []
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    before = [handle.mesh.transport for handle in _get_fsdp_handles(model)]
    for i in range(4):
        with functional_mode(model) if is_functional else contextlib.nullcontext():
            if i % 2:
                with record_collectives(model, noted.append) as lines:
                    model(local_part(x)).square().mean().backward()
                assert lines and lines == noted
                noted.clear()
            else:
                model(local_part(x)).square().mean().backward()
                assert not noted
        reference(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    assert [handle.mesh.transport for handle in _get_fsdp_handles(model)] == before
    gathered = [None] * world_size
    dist.all_gather_object(gathered, lines)
    assert all(other == lines for other in gathered)


@distributed(world_size=2)
def test_an_exception_ends_the_recording():
    model, _ = build()
    before = [handle.mesh.transport for handle in _get_fsdp_handles(model)]
    with pytest.raises(ZeroDivisionError), record_collectives(model):
        step(model)
        raise ZeroDivisionError
    assert [handle.mesh.transport for handle in _get_fsdp_handles(model)] == before
    step(model)


@distributed(world_size=2)
def test_one_rank_alone_may_record():
    model, reference = build()
    with record_collectives(model) if dist.get_rank() else contextlib.nullcontext():
        step(model)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in reference.state_dict().items():
        assert torch.equal(full[name], value)


@distributed(world_size=2)
def test_copies_that_are_made_meanwhile_record_nothing():
    model, _ = build()
    with record_collectives(model) as lines:
        twin = copy.deepcopy(model)
        step(twin)
        assert not lines
        step(model)
        assert lines

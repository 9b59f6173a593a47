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
from fsdp_compose.group.registry import _get_fsdp_handles
from tests.harness import distributed, fake_process_group
from tests.models import local_part


def build(**options) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(reference)
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options), reference


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


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
all-gather 0.weight and 1 more (32 x float32 among 4 ranks)
  wait for all-gather 0.weight and 1 more
all-gather 1.weight and 1 more (32 x float32 among 4 ranks)
  wait for all-gather 1.weight and 1 more
all-gather 1.weight and 1 more (32 x float32 among 4 ranks)
all-gather 0.weight and 1 more (32 x float32 among 4 ranks)
  wait for all-gather 1.weight and 1 more
reduce-scatter 1.weight and 1 more (32 x float32 among 4 ranks)
  wait for all-gather 0.weight and 1 more
  wait for reduce-scatter 1.weight and 1 more
reduce-scatter 0.weight and 1 more (32 x float32 among 4 ranks)
  wait for reduce-scatter 0.weight and 1 more""",
    )


def test_second_iteration_gathers_ahead():
    assert_expected_inline(
        schedule(1),
        """\
all-gather 0.weight and 1 more (32 x float32 among 4 ranks)
all-gather 1.weight and 1 more (32 x float32 among 4 ranks)
  wait for all-gather 0.weight and 1 more
  wait for all-gather 1.weight and 1 more
all-gather 1.weight and 1 more (32 x float32 among 4 ranks)
all-gather 0.weight and 1 more (32 x float32 among 4 ranks)
  wait for all-gather 1.weight and 1 more
reduce-scatter 1.weight and 1 more (32 x float32 among 4 ranks)
  wait for all-gather 0.weight and 1 more
  wait for reduce-scatter 1.weight and 1 more
reduce-scatter 0.weight and 1 more (32 x float32 among 4 ranks)
  wait for reduce-scatter 0.weight and 1 more""",
    )


def test_without_resharding_backward_gathers_nothing():
    assert_expected_inline(
        schedule(1, reshard_after_forward=False),
        """\
all-gather 0.weight and 1 more (32 x float32 among 4 ranks)
all-gather 1.weight and 1 more (32 x float32 among 4 ranks)
  wait for all-gather 0.weight and 1 more
  wait for all-gather 1.weight and 1 more
reduce-scatter 1.weight and 1 more (32 x float32 among 4 ranks)
  wait for reduce-scatter 1.weight and 1 more
reduce-scatter 0.weight and 1 more (32 x float32 among 4 ranks)
  wait for reduce-scatter 0.weight and 1 more""",
    )


def test_functional_mode_gathers_again_for_no_backward():
    with fake_process_group(rank=1, world_size=4):
        model, _ = build()
        with record_collectives(model) as lines, functional_mode(model):
            step(model)
    assert_expected_inline(
        "\n".join(lines),
        """\
all-gather 0.weight and 1 more (32 x float32 among 4 ranks)
  wait for all-gather 0.weight and 1 more
all-gather 1.weight and 1 more (32 x float32 among 4 ranks)
  wait for all-gather 1.weight and 1 more
reduce-scatter 1.weight and 1 more (32 x float32 among 4 ranks)
  wait for reduce-scatter 1.weight and 1 more
reduce-scatter 0.weight and 1 more (32 x float32 among 4 ranks)
  wait for reduce-scatter 0.weight and 1 more""",
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
reduce-scatter 1.weight and 1 more (32 x float32 among 4 ranks)
  wait for reduce-scatter 1.weight and 1 more
reduce-scatter 0.weight and 1 more (32 x float32 among 4 ranks)
  wait for reduce-scatter 0.weight and 1 more""",
    )


def test_full_parameters_are_gathered_once():
    with fake_process_group(rank=1, world_size=4):
        model, _ = build()
        with record_collectives(model) as lines, summon_full_params(model):
            pass
    assert_expected_inline(
        "\n".join(lines),
        """\
gather 0.weight and 1 more on every rank
gather 1.weight and 1 more on every rank""",
    )


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

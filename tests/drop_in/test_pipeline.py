"""Pipelines of fully_shard'ed stages: each step reduces once for each group, and trains as one process."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp, pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from fsdp_compose import flat_parameters, fully_shard, no_sync, record_collectives, reduce_gradients
from fsdp_compose.pipelining import PipelineStage
from tests.harness import distributed
from tests.training import local_part, pair

NUM_MICROBATCHES, DIM = 4, 6


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, DIM)) for _ in range(4)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch(step: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, DIM, generator=generator), torch.randn(size, DIM, generator=generator)


def stages_of(
    model: nn.Sequential,
    indices: list[int],
    num_stages: int,
    mesh: Any,
    stage_of: type[Any] = PipelineStage,
    shard: Callable[..., Any] = fully_shard,
) -> list[Any]:
    stages, size = [], len(model) // num_stages
    for index in indices:
        part = nn.Sequential(*model[index * size : (index + 1) * size])
        for layer in part:
            shard(layer, mesh=mesh["dp"])
        shard(part, mesh=mesh["dp"])
        stages.append(stage_of(part, index, num_stages, torch.device("cpu"), group=mesh.get_group("pp")))
    return stages


INTERLEAVED = (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)  # the latter splits backwards


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, *INTERLEAVED])
@distributed(world_size=(2, 4))
def test_pipelines_train_as_one_process_with_one_reduction_a_step(schedule, world_size):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model, reference = pair(layers())
    is_interleaved = schedule in INTERLEAVED
    indices = [pp, pp + 2] if is_interleaved else [pp]
    stages = stages_of(model, indices, 4 if is_interleaved else 2, mesh)
    run = schedule(stages if is_interleaved else stages[0], n_microbatches=NUM_MICROBATCHES, loss_fn=loss_of)
    params = [param for stage in stages for param in stage.submod.parameters()]
    ours, theirs = torch.optim.AdamW(params, 1e-2, eps=1e-3), torch.optim.AdamW(reference.parameters(), 1e-2, eps=1e-3)
    for step in range(3):
        x, target = batch(step)
        mine, wanted = x.chunk(world_size // 2)[dp], target.chunk(world_size // 2)[dp]
        lines: list[str] = []
        with record_all(stages, lines):
            run.step(mine) if pp == 0 else run.step(target=wanted)
        if step and world_size > 2:  # the first one also runs the stages to learn what they return
            num_handles = sum(len(fully_shard.state(layer)._handles) for stage in stages for layer in stage.submod)
            assert sum(line.startswith("reduce-scatter") for line in lines) == num_handles
        loss_of(reference(x), target).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    size = len(model) // (4 if is_interleaved else 2)
    for index, stage in zip(indices, stages, strict=True):
        expected = nn.Sequential(*reference[index * size : (index + 1) * size])
        for got, param in zip(stage.submod.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(got.full_tensor(), param, atol=1e-6)


DEFERS = "finalize_gradients" in inspect.signature(ScheduleGPipe.step).parameters  # torch >= 2.15


@pytest.mark.skipif(not DEFERS, reason="schedules of torch < 2.15 take no finalize_gradients")
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, *INTERLEAVED])
@distributed(world_size=4)
def test_gradients_of_several_steps_are_reduced_and_scaled_once_as_those_of_fsdp2(schedule):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    is_interleaved, shown = schedule in INTERLEAVED, []
    # FSDP2's gradients of split backwards are not all there.
    theirs = ScheduleInterleaved1F1B if schedule is ScheduleInterleavedZeroBubble else schedule
    systems = [(theirs, pipelining.PipelineStage, fsdp.fully_shard), (schedule, PipelineStage, fully_shard)]
    for schedule_of, stage_of, shard in systems:
        indices, num_stages = ([pp, pp + 2], 4) if is_interleaved else ([pp], 2)
        stages = stages_of(layers(), indices, num_stages, mesh, stage_of, shard)
        run = schedule_of(stages if is_interleaved else stages[0], n_microbatches=NUM_MICROBATCHES, loss_fn=loss_of)
        params = [param for stage in stages for param in stage.submod.parameters()]
        for step, is_last in enumerate((False, False, True, True)):
            x, target = batch(step)
            mine, wanted = x.chunk(2)[dp], target.chunk(2)[dp]
            options = {"finalize_gradients": is_last}
            run.step(mine, **options) if pp == 0 else run.step(target=wanted, **options)
            if is_last:
                shown.append([param.grad.full_tensor() for param in params])
                for param in params:
                    param.grad = None
    torch.testing.assert_close(shown[2:], shown[:2])


class record_all:
    """``record_collectives`` on several models."""

    def __init__(self, stages: list[PipelineStage], lines: list[str]) -> None:
        self.contexts = [record_collectives(stage.submod, lines.append) for stage in stages]

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in self.contexts:
            context.__exit__(*error)


# ---- reduce_gradients by itself


@pytest.mark.parametrize("is_flat", [False, True])
@distributed(world_size=(1, 2, 3))
def test_what_was_accumulated_is_reduced_outside_backward(is_flat):
    model, reference = pair(layers())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    flat = flat_parameters(model) if is_flat else []
    for step in range(2):
        with no_sync(model):
            for part in range(3):
                x, target = batch(10 * step + part, size=12)
                loss_of(model(local_part(x)), local_part(target)).backward()
                loss_of(reference(x), target).backward()
        reduce_gradients(model)
        reduce_gradients(model)  # there is nothing more
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-6)
        if step:
            continue
        x, target = batch(99, size=12)  # and a backward that adds to it
        loss_of(model(local_part(x)), local_part(target)).backward()
        loss_of(reference(x), target).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-6)
        model.zero_grad()
        reference.zero_grad()
        for param in flat:
            param.grad = None


@distributed(world_size=2)
def test_groups_that_accumulated_nothing_are_left_as_they_are():
    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x, target = batch(0, size=4)
    loss_of(model(local_part(x)), local_part(target)).backward()
    before = [param.grad.full_tensor() for param in model.parameters()]
    with record_collectives(model) as lines:
        reduce_gradients(model)
    assert not lines
    assert all(torch.equal(p.grad.full_tensor(), grad) for p, grad in zip(model.parameters(), before, strict=True))


@distributed(world_size=2)
def test_it_is_refused_inside_a_forward_and_options_stay():
    model = layers()
    fully_shard(model)
    model(torch.randn(2, DIM))
    error = []

    def inside(*_: object) -> None:
        try:
            reduce_gradients(model)
        except RuntimeError as caught:
            error.append(str(caught))

    handle = model[0].register_forward_hook(inside)
    with no_sync(model):
        model(torch.randn(2, DIM)).sum().backward()
        handle.remove()
        reduce_gradients(model)
        assert fully_shard.state(model).options.requires_gradient_sync is False
    assert "forward or backward" in error[0]
    assert copy.copy(model[0][0].weight.grad).full_tensor().shape == (8, DIM)
    assert dist.get_world_size() == 2

"""``offload_model()`` and ``onload_model()``: a whole model sleeps in host memory, and wakes up with the same bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    flat_parameters,
    full_parameters,
    fully_shard,
    keep_unsharded,
    no_sync,
    offload_model,
    onload_model,
)
from fsdp_compose.core.flat import local_of
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import distributed
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import adamw, gpt_twins, local_part, train_gpt
from tests.two_memories import IN, OUT, TwoMemories

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "kept": lambda: {"reshard_after_forward": False},
    "bf16": lambda: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "hybrid": lambda: {"mesh": init_device_mesh("cpu", (dist.get_world_size(), 1))},
}


def assert_equal(model: nn.Module, twin: nn.Module) -> None:
    for ours, theirs in zip(_get_fsdp_handles(model), _get_fsdp_handles(twin), strict=True):
        assert torch.equal(ours.shard, theirs.shard)


def allocated(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The bytes behind everything that a model and its optimizer have."""
    storages = {}
    for handle in _get_fsdp_handles(model):
        unsharded = handle.unsharded.memory
        tensors = [handle.shard, unsharded.hidden, unsharded.shown, handle.gradient.memory.flat]
        for tensor in tensors:
            if tensor is not None:
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        reduction = handle.pending_gradients.reduction
        if reduction is not None:
            storages[reduction.flat.untyped_storage()._cdata] = reduction.flat.untyped_storage()
    for tensor in model.buffers():
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
    for state in optimizer.state.values():
        for tensor in state.values():
            storage = local_of(tensor).untyped_storage()
            storages[storage._cdata] = storage
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("flat", [False, True], ids=["parameters", "flat views"])
@pytest.mark.parametrize("options", ["plain", "kept", "bf16", "hybrid"])
@distributed(world_size=(1, 2))
def test_training_goes_on_with_the_same_bits_and_objects(options, flat):
    model, twin = gpt_twins(**OPTIONS[options]())
    make = flat_parameters if flat else lambda item: [*item.parameters()]
    params = make(model)
    optimizer, other = adamw(params), adamw(make(twin))
    assert train_gpt(model, optimizer, 3, 1) == train_gpt(twin, other, 3, 1)
    before = [*map(id, model.parameters())], [*map(id, params)]
    states = [id(tensor) for state in optimizer.state.values() for tensor in state.values()]
    collected = _collectives_of(model)
    for seed in (2, 3):
        offload_model(model, optimizer)
        assert allocated(model, optimizer) == 0
        onload_model(model, optimizer)
        assert ([*map(id, model.parameters())], [*map(id, params)]) == before
        assert states == [id(tensor) for state in optimizer.state.values() for tensor in state.values()]
        assert train_gpt(model, optimizer, 2, seed) == train_gpt(twin, other, 2, seed)
    assert_equal(model, twin)
    assert collected == _collectives_of(model)  # nothing was taken into another shard


def _collectives_of(model: nn.Module) -> list[int]:
    return [id(handle.shard) for handle in _get_fsdp_handles(model)]


@distributed(world_size=2)
def test_what_is_one_storage_is_one_copy_each_way():
    with TwoMemories() as memories:
        model, _ = gpt_twins()
        optimizer = adamw(flat_parameters(model))
        train_gpt(model, optimizer, 1, 1)
        gpt_loss(model, local_part(next(batches(1)))).backward()
        memories.forget_copies()
        offload_model(model, optimizer)
        shards = [handle.shard for handle in _get_fsdp_handles(model)]
        sizes = [shard.numel() * 4 for shard in shards]
        expected = sorted([size for size in sizes for _ in ("shard", "gradient", "exp_avg", "exp_avg_sq")])
        assert sorted(size for size in memories.copies[OUT] if size > 4) == expected  # 4: the count of steps
        onload_model(model, optimizer)
        assert sorted(size for size in memories.copies[IN] if size > 4) == expected
        assert not any(memories.is_on_host(param) for param in model.parameters() if local_of(param).numel())


@distributed(world_size=2)
def test_a_gradient_is_kept():
    model, twin = gpt_twins()
    optimizer, other = adamw(model.parameters()), adamw(twin.parameters())
    for item in (model, twin):
        gpt_loss(item, local_part(next(batches(1)))).backward()
    grads = [param.grad for param in model.parameters()]
    offload_model(model, optimizer)
    onload_model(model, optimizer)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    optimizer.step()
    other.step()
    assert_equal(model, twin)


@pytest.mark.parametrize("flat", [False, True], ids=["parameters", "flat views"])
@distributed(world_size=2)
def test_a_model_that_has_not_run_yet_sleeps_too(flat):
    model, twin = gpt_twins()
    optimizer = adamw(flat_parameters(model) if flat else model.parameters())
    other = adamw(flat_parameters(twin) if flat else twin.parameters())
    offload_model(model, optimizer)
    with pytest.raises(RuntimeError, match=r"since offload_model\(\): call onload_model"):
        model(local_part(next(batches(1)))[:, :-1])
    onload_model(model)
    assert train_gpt(model, optimizer, 2, 1) == train_gpt(twin, other, 2, 1)
    assert_equal(model, twin)


@distributed(world_size=2)
def test_while_asleep_nothing_runs_and_nothing_can_be_read():
    model, twin = gpt_twins()
    optimizer, other = adamw(model.parameters()), adamw(twin.parameters())
    assert train_gpt(model, optimizer, 1, 1) == train_gpt(twin, other, 1, 1)
    offload_model(model, optimizer)
    ids = local_part(next(batches(1)))[:, :-1]
    for part, given in ((model, ids), (model.blocks[0], torch.ones(2, 3, 16))):
        with pytest.raises(RuntimeError, match=r"since offload_model\(\): call onload_model"):
            part(given)
    with pytest.raises(RuntimeError, match=r"since offload_model\(\): call onload_model"):
        optimizer.step()
    with pytest.raises(RuntimeError):
        _get_fsdp_handles(model)[0].shard.sum()
    with pytest.raises(RuntimeError, match="already offloaded"):
        offload_model(model)
    onload_model(model)
    with pytest.raises(RuntimeError, match="was not called"):
        onload_model(model)
    assert train_gpt(model, optimizer, 2, 2) == train_gpt(twin, other, 2, 2)
    assert_equal(model, twin)


@distributed(world_size=2)
def test_what_the_user_changes_while_the_model_sleeps_is_noticed():
    model, twin = gpt_twins()
    optimizer, other = adamw(model.parameters()), adamw(twin.parameters())
    assert train_gpt(model, optimizer, 1, 1) == train_gpt(twin, other, 1, 1)
    offload_model(model, optimizer)
    model.head.weight.requires_grad_(False)
    twin.head.weight.requires_grad_(False)
    onload_model(model, optimizer)
    assert train_gpt(model, optimizer, 2, 2) == train_gpt(twin, other, 2, 2)
    assert_equal(model, twin)


@distributed(world_size=2)
def test_a_model_that_was_kept_unsharded_is_gathered_again():
    model, twin = gpt_twins()
    ids = local_part(next(batches(1)))[:, :-1]
    with torch.no_grad(), keep_unsharded(model):
        before = model(ids)
        offload_model(model)
        onload_model(model)
        assert torch.equal(model(ids), before)
    assert torch.equal(twin(ids), before)


@distributed(world_size=2)
def test_buffers_and_parameters_of_no_group_sleep_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    ignored = [*model[2].parameters()]
    fully_shard(model, ignored_params=ignored)
    x = torch.randn(8, 4)
    model(x)
    expected = model[1].running_mean.clone(), ignored[0].detach().clone()
    offload_model(model)
    for tensor in (model[1].running_mean, ignored[0]):
        assert tensor.untyped_storage().nbytes() == 0
    onload_model(model)
    assert torch.equal(model[1].running_mean, expected[0]) and torch.equal(ignored[0], expected[1])


@distributed(world_size=2)
def test_what_lives_in_host_memory_stays_there():
    with TwoMemories() as memories:
        torch.manual_seed(0)
        model = shard_layers(GPT(), offload_policy=CPUOffloadPolicy())
        optimizer = adamw(model.parameters())
        train_gpt(model, optimizer, 2, 1)
        memories.forget_copies()
        offload_model(model, optimizer)
        assert memories.copies == {IN: [], OUT: []}
        assert all(handle.shard.untyped_storage().nbytes() for handle in _get_fsdp_handles(model))
        onload_model(model, optimizer)
        train_gpt(model, optimizer, 1, 2)


@distributed(world_size=2)
def test_it_is_refused_before_anything_changes():
    model, _ = gpt_twins()
    optimizer = adamw(model.parameters())
    with pytest.raises(TypeError, match="nn.Module"):
        offload_model(optimizer)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizers"):
        offload_model(model, [model])
    with pytest.raises(ValueError, match="no fully_shard group"):
        offload_model(nn.Linear(2, 2))
    train_gpt(model, optimizer, 1, 1)
    with no_sync(model):
        gpt_loss(model, local_part(next(batches(1)))).backward()
    with pytest.raises(RuntimeError, match="accumulated without gradient sync"):
        offload_model(model, optimizer)
    gpt_loss(model, local_part(next(batches(1)))).backward()
    offload_model(model)
    with pytest.raises(ValueError, match="was not given to offload"):
        onload_model(model, optimizer)
    onload_model(model)
    optimizer.step()


@distributed(world_size=2)
def test_waking_up_can_be_tried_again():
    model, twin = gpt_twins()
    optimizer, other = adamw(model.parameters()), adamw(twin.parameters())
    assert train_gpt(model, optimizer, 1, 1) == train_gpt(twin, other, 1, 1)
    offload_model(model, optimizer)
    original, calls = torch.empty, []

    def scarce(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("too little memory")
        return original(*args, **kwargs)

    with mock.patch.object(torch, "empty", scarce), pytest.raises(torch.OutOfMemoryError):
        onload_model(model, optimizer)
    with pytest.raises(RuntimeError, match=r"since offload_model\(\): call onload_model"):
        model(local_part(next(batches(1)))[:, :-1])
    onload_model(model, optimizer)
    assert train_gpt(model, optimizer, 2, 2) == train_gpt(twin, other, 2, 2)
    assert_equal(model, twin)


@distributed(world_size=2)
def test_a_model_that_is_dropped_while_it_sleeps_is_freed():
    model, _ = gpt_twins()
    optimizer = adamw(model.parameters())
    train_gpt(model, optimizer, 1, 1)
    offload_model(model, optimizer)
    reference = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert reference() is None


@distributed(world_size=2)
def test_inside_forward_it_is_refused():
    class Sleeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            offload_model(self)
            return F.relu(self.inner(x))

    model = fully_shard(Sleeps())
    with pytest.raises(RuntimeError, match="is running"):
        model(torch.ones(2, 4))
    assert dist.get_world_size() == 2


@distributed(world_size=2)
def test_weights_for_other_programs_are_refused_by_name_while_the_model_sleeps():
    model = shard_layers(GPT())
    gpt_loss(model, local_part(next(batches(1)))).backward()
    offload_model(model)
    with pytest.raises(RuntimeError, match=r"in host memory since offload_model\(\)"), full_parameters(model) as it:
        next(it)
    onload_model(model)
    with full_parameters(model) as buckets:
        assert sum(len(bucket) for bucket in buckets) == len([*model.named_parameters()])

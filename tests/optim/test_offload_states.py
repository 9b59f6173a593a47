"""``offload_optimizer_states()``: state in host memory, the step on the device, chunk by chunk, with the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_compose import (
    CPUOffloadPolicy,
    RaggedShard,
    distribute_ragged,
    flat_parameters,
    offload_model,
    offload_optimizer_states,
    onload_model,
)
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from fsdp_compose.core.flat import local_of
from fsdp_compose.core.flat.sharded_param import shown_on
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.flat.test_offload import HALF, assert_equal, assert_same_state
from tests.harness import distributed, fake_process_group
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import gpt_twins, local_part, train_gpt
from tests.two_memories import IN, OUT, TwoMemories

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
}
POLICIES = {
    "state": None,
    "state and gradients": CPUOffloadPolicy(parameters=False),
    "state, gradients and shards": CPUOffloadPolicy(),
}
SMALL = 4096 * 2  # bytes: chunks of 1,024 elements, the smallest


def params_of(model: nn.Module, flat: bool) -> list[nn.Parameter]:
    return flat_parameters(model) if flat else [*model.parameters()]


# Every two of an optimizer, a policy and a kind of parameters (flat views or not) meet.
TOGETHER = [(name, policy, (i + j) % 2 == 0) for i, name in enumerate(OPTIMIZERS) for j, policy in enumerate(POLICIES)]


@pytest.mark.parametrize(("name", "policy", "flat"), TOGETHER)
@distributed(world_size=2)
def test_the_step_is_the_ordinary_one_bit_for_bit(name, policy, flat):
    make, arguments = OPTIMIZERS[name]
    with TwoMemories() as memories:
        model, twin = gpt_twins(offload_policy=POLICIES[policy])
        params, expected = params_of(model, flat), params_of(twin, flat)
        optimizer = offload_optimizer_states(make(params, **arguments), chunk_bytes=SMALL)
        other = make(expected, **arguments)
        assert train_gpt(model, optimizer, 2, clip=params) == train_gpt(twin, other, 2, clip=expected)
        assert_equal(model, twin)
        for param, reference in zip(params, expected, strict=True):
            assert_same_state(optimizer.state[param], other.state[reference])
            for key, value in optimizer.state[param].items():
                wanted = other.state[reference][key]
                assert type(value) is type(wanted), key
                if isinstance(value, torch.Tensor) and value.dim():
                    assert value.shape == wanted.shape and memories.is_on_host(value)


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=2)
def test_chunks_are_bounded_and_each_element_goes_in_and_out_once(policy):
    with TwoMemories() as memories:
        model, _ = gpt_twins(offload_policy=POLICIES[policy])
        params = flat_parameters(model)
        optimizer = offload_optimizer_states(torch.optim.AdamW(params, foreach=True), chunk_bytes=SMALL)
        train_gpt(model, optimizer, 1, clip=params)
        gpt_loss(model, local_part(next(batches(1)))).backward()
        memories.forget_copies()
        optimizer.step()
        total = sum(handle.shard.nbytes for handle in _get_fsdp_handles(model))
        host_tensors_in, host_tensors_out = {"state": (2, 2), "state and gradients": (3, 2)}.get(policy, (4, 3))
        assert sum(memories.copies[IN]) == host_tensors_in * total
        assert sum(memories.copies[OUT]) == host_tensors_out * total
        assert max(memories.copies[IN] + memories.copies[OUT]) <= 1024 * 4
        for handle in _get_fsdp_handles(model):
            assert memories.is_on_host(handle.shard) == (policy == "state, gradients and shards")
            assert memories.is_on_host(handle.gradient.flat) == (policy != "state")


@distributed(world_size=2)
def test_an_optimizer_that_has_stepped_is_taken_over():
    with TwoMemories() as memories:
        model, twin = gpt_twins()
        params, expected = params_of(model, True), params_of(twin, True)
        optimizer, other = (torch.optim.AdamW(item, lr=1e-2) for item in (params, expected))
        assert train_gpt(model, optimizer, 3, clip=params) == train_gpt(twin, other, 3, clip=expected)
        offload_optimizer_states(optimizer, chunk_bytes=SMALL)
        assert all(memories.is_on_host(optimizer.state[param]["exp_avg"]) for param in params)
        assert train_gpt(model, optimizer, 3, clip=params) == train_gpt(twin, other, 3, clip=expected)
        assert_equal(model, twin)


@pytest.mark.parametrize("flat", [False, True], ids=["parameters", "flat views"])
@distributed(world_size=2)
def test_checkpoints_are_as_always_and_what_is_loaded_goes_to_the_host(flat):
    def build(streams: bool) -> tuple[GPT, torch.optim.Optimizer, list[nn.Parameter]]:
        torch.manual_seed(0)
        model = shard_layers(GPT())
        params = params_of(model, flat)
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        return model, offload_optimizer_states(optimizer, chunk_bytes=SMALL) if streams else optimizer, params

    with TwoMemories() as memories:
        memories.refuses_host_collectives = False  # a device that NCCL alone serves is asked for in ``device_for``
        model, optimizer, params = build(True)
        twin, other, expected = build(False)
        assert train_gpt(model, optimizer, 3, clip=params) == train_gpt(twin, other, 3, clip=expected)
        full = StateDictOptions(full_state_dict=True)
        saved = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        whole = get_optimizer_state_dict(model, optimizer, options=full)
        assert_same_state(whole, get_optimizer_state_dict(twin, other, options=full))
        assert_same_state(saved[1], get_optimizer_state_dict(twin, other))
        fresh, fresh_optimizer, fresh_params = build(True)
        set_model_state_dict(fresh, copy.deepcopy(saved[0]))
        set_optimizer_state_dict(fresh, fresh_optimizer, copy.deepcopy(saved[1]))
        for param in fresh_params:
            assert memories.is_on_host(fresh_optimizer.state[param]["exp_avg"])
        assert train_gpt(fresh, fresh_optimizer, 3, clip=fresh_params) == train_gpt(twin, other, 3, clip=expected)
        assert_equal(fresh, twin)


@distributed(world_size=2)
def test_schedulers_hooks_and_closures_see_one_step():
    model, twin = gpt_twins()
    params, expected = params_of(model, True), params_of(twin, True)
    optimizer = offload_optimizer_states(torch.optim.AdamW(params, lr=1e-2), chunk_bytes=SMALL)
    other = torch.optim.AdamW(expected, lr=1e-2)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    schedulers = [torch.optim.lr_scheduler.StepLR(item, 1, 0.5) for item in (optimizer, other)]
    for batch in batches(3):
        for item, trains in ((model, optimizer), (twin, other)):

            def closure(item=item, trains=trains):
                trains.zero_grad()
                loss = gpt_loss(item, local_part(batch))  # noqa: B023
                loss.backward()
                return loss

            assert trains.step(closure).requires_grad
        for scheduler in schedulers:
            scheduler.step()
    assert seen == ["before", "after"] * 3
    assert_equal(model, twin)


@distributed(world_size=2)
def test_a_parameter_without_a_gradient_is_left_alone():
    model, twin = gpt_twins()
    params, expected = params_of(model, False), params_of(twin, False)
    optimizer = offload_optimizer_states(torch.optim.AdamW(params, lr=1e-2), chunk_bytes=SMALL)
    other = torch.optim.AdamW(expected, lr=1e-2)
    for item, trains in ((model, optimizer), (twin, other)):
        gpt_loss(item, local_part(next(batches(1)))).backward()
        item.head.weight.grad = None
        trains.step()
    assert_equal(model, twin)
    assert [key is params[-1] for key in optimizer.state].count(True) == 0


@distributed(world_size=2)
def test_a_model_whose_optimizer_state_is_offloaded_sleeps_and_wakes():
    with TwoMemories() as memories:
        model, twin = gpt_twins()
        params, expected = params_of(model, True), params_of(twin, True)
        optimizer = offload_optimizer_states(torch.optim.AdamW(params, lr=1e-2), chunk_bytes=SMALL)
        other = torch.optim.AdamW(expected, lr=1e-2)
        assert train_gpt(model, optimizer, 3, clip=params) == train_gpt(twin, other, 3, clip=expected)
        offload_model(model)
        onload_model(model)
        assert train_gpt(model, optimizer, 3, clip=params) == train_gpt(twin, other, 3, clip=expected)
        assert_equal(model, twin)
        assert all(memories.is_on_host(local_of(optimizer.state[param]["exp_avg"])) for param in params)


@pytest.mark.parametrize(("unsynced", "flat_among"), [(True, 2), (False, 4)])
@distributed(world_size=(2, 4))
def test_gradients_in_host_memory_accumulate(unsynced, flat_among, world_size):
    flat = world_size == flat_among
    with TwoMemories() as memories:
        model, twin = gpt_twins(offload_policy=POLICIES["state and gradients"], mp_policy=HALF)
        params, expected = params_of(model, flat), params_of(twin, flat)
        optimizer = offload_optimizer_states(torch.optim.AdamW(params, lr=1e-2), chunk_bytes=SMALL)
        how = {"microbatches": 3, "unsynced": unsynced}
        assert train_gpt(model, optimizer, 2, clip=params, **how) == train_gpt(
            twin, torch.optim.AdamW(expected, lr=1e-2), 2, clip=expected, **how
        )
        assert_equal(model, twin)
        offload_model(model, optimizer)
        onload_model(model, optimizer)
        gpt_loss(model, local_part(next(batches(1)))).backward()
        with pytest.raises(AssertionError, match="mixes host and device memory"):  # on devices: torch's own error
            torch.optim.SGD(params, lr=0.1).step()
        assert all(memories.is_on_host(param.grad) for param in params)


def test_a_gradient_is_shown_on_the_device_of_its_parameter():
    """``meta`` stands for a device other than that of the elements."""
    with fake_process_group(world_size=2):
        mesh = init_device_mesh("cpu", (2,))
        for sharded in (
            distribute_ragged(torch.ones(4, 3), mesh, [RaggedShard((2, 2))], src_data_rank=None),
            distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None),
        ):
            meta = torch.device("meta")
            param = nn.Parameter(sharded.to(meta))
            shown = shown_on(meta, sharded)
            assert type(shown) is type(sharded) and shown.device == meta and shown.shape == sharded.shape
            assert shown.to_local() is not None and local_of(shown) is local_of(sharded)
            param.grad = shown
            param.grad.mul_(3)
            assert local_of(sharded).tolist() == [[3.0] * 3] * 2


@distributed(world_size=2)
def test_plain_flat_views_of_shards_whose_gradients_are_in_host_memory_are_refused():
    model, _ = gpt_twins(offload_policy=POLICIES["state and gradients"])
    with pytest.raises(ValueError, match="Leave local out"):
        flat_parameters(model, local=True)


def test_what_cannot_be_streamed_is_refused():
    param = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(TypeError, match="expected an Optimizer"):
        offload_optimizer_states(param)
    with pytest.raises(TypeError, match="Adafactor"):
        offload_optimizer_states(torch.optim.Adafactor([param]))
    optimizer = torch.optim.SGD([param], lr=0.1)
    with pytest.raises(ValueError, match="positive number of bytes"):
        offload_optimizer_states(optimizer, chunk_bytes=0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="before creating schedulers"):
        offload_optimizer_states(optimizer)

"""``fsdp_compose.drop_in``: programs written for FSDP2 go on when one import is changed."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import logging
import operator
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining import stage as of_stages
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compose
from fsdp_compose import drop_in, record_collectives, set_functional_mode
from fsdp_compose.checkpoint import get_model_state_dict
from fsdp_compose.core.group.registry import get_state
from tests.drop_in.test_pipeline import layers, loss_of
from tests.harness import distributed, fake_process_group, lasting_mesh
from tests.internals import Collectives
from tests.models import GPT, batches, gpt_loss
from tests.training import local_part, pair

FSDP1 = {
    "BackwardPrefetch", "CPUOffload", "FullOptimStateDictConfig", "FullStateDictConfig", "FullyShardedDataParallel",
    "LocalOptimStateDictConfig", "LocalStateDictConfig", "MixedPrecision", "OptimStateDictConfig", "OptimStateKeyType",
    "ShardedOptimStateDictConfig", "ShardedStateDictConfig", "ShardingStrategy", "StateDictConfig", "StateDictSettings",
    "StateDictType",
}  # fmt: skip
SYSTEMS = {"FSDP2": fsdp, "drop_in": drop_in}


def shard(system: ModuleType, model: GPT, **options: Any) -> GPT:
    for block in model.blocks:
        system.fully_shard(block, **options)
    return system.fully_shard(model, **options)


# ---- names


def test_every_public_name_of_fsdp2_is_there():
    assert {*fsdp.__all__} - FSDP1 <= {*drop_in.__all__}


def test_every_public_method_of_fsdp2_is_there_with_its_parameters():
    for name, method in vars(fsdp.FSDPModule).items():
        if name.startswith("_") or not callable(method):
            continue
        theirs, ours = inspect.signature(method), inspect.signature(getattr(drop_in.FSDPModule, name))
        assert [*theirs.parameters] == [*ours.parameters], name
        for parameter in theirs.parameters.values():
            assert parameter.default == ours.parameters[parameter.name].default, name
    assert [*inspect.signature(fsdp.fully_shard).parameters] == [*inspect.signature(drop_in.fully_shard).parameters]


# ---- modules


@pytest.mark.parametrize("cls", [drop_in.FSDPModule, fsdp.FSDPModule])
def test_a_sharded_module_is_an_fsdp_module_of_torch_too(cls):
    with fake_process_group():
        model, plain = GPT(), GPT()
        keys = [*model.state_dict()]
        assert not isinstance(model, cls)
        assert shard(drop_in, model) is model
        assert isinstance(model, cls) and isinstance(model.blocks[0], (dict, cls))
        assert not isinstance(model.head, cls) and not isinstance(plain, cls) and not isinstance(None, cls)
        assert type(model).__name__ == "FSDPGPT" and type(model).__bases__[1] is GPT
        assert type(model.blocks[0]) is type(model.blocks[1])
        assert isinstance(model, GPT) and [*model.state_dict()] == keys
        assert model.set_requires_gradient_sync.__self__ is model
        assert not hasattr(model.head, "unshard")
        with pytest.raises(TypeError, match="cannot be instantiated"):
            drop_in.FSDPModule()


def test_a_list_of_modules_is_one_group_of_fsdp_modules():
    with fake_process_group():
        model = GPT()
        assert drop_in.fully_shard([model.norm, model.head]) == [model.norm, model.head]
        assert isinstance(model.norm, drop_in.FSDPModule) and isinstance(model.head, drop_in.FSDPModule)
        assert get_state(model.norm) is get_state(model.head)


def test_methods_of_a_copy_are_the_copys():
    with fake_process_group():
        model = shard(drop_in, GPT())
        other = copy.deepcopy(model)
        assert isinstance(other, drop_in.FSDPModule)
        assert other.unshard.__self__ is other and other.blocks[1].unshard.__self__ is other.blocks[1]
        other.set_requires_gradient_sync(False)
        assert get_state(model).options.requires_gradient_sync
        assert not get_state(other.blocks[2]).options.requires_gradient_sync


def test_slices_conversions_and_pickles_of_sharded_modules():
    with fake_process_group():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        shard_each = [drop_in.fully_shard(item) for item in (model[0], model[2], model)]
        part = model[:2]
        assert type(part) is nn.Sequential and part[0] is shard_each[0]
        assert not isinstance(part, fsdp.FSDPModule) and isinstance(part[0], fsdp.FSDPModule)
        params = [*model.parameters()]
        assert model.to(torch.float64) is model and all(map(operator.is_, params, model.parameters()))
        assert model(torch.randn(3, 4, dtype=torch.float64)).dtype is torch.float64
        for twin in (copy.copy(model), copy.deepcopy(model)):
            assert type(twin) is type(model) and twin.reshard.__self__ is twin
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            pickle.dumps(model)


@pytest.mark.parametrize("fullgraph", [True, False])
@distributed(world_size=2)
def test_compiled_modules_train_as_one_process(fullgraph):
    model, reference = pair(layers())
    for layer in model:
        drop_in.fully_shard(layer)
        layer.compile(backend="aot_eager", fullgraph=fullgraph)
    drop_in.fully_shard(model)
    assert all(isinstance(item, fsdp.FSDPModule) for item in (model, *model))
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(x.chunk(2)[dist.get_rank()]).square().mean().backward()
    (2 * reference(x).square().mean()).backward()
    for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-6)


def test_a_model_is_freed_without_the_garbage_collector():
    with fake_process_group():
        model = shard(drop_in, GPT())
        gc.collect()
        gc.disable()
        try:
            ref = weakref.ref(model.blocks[0])
            del model
            assert ref() is None
        finally:
            gc.enable()


class Named(nn.Linear):
    def reshard(self) -> str:
        return "mine"


def test_an_attribute_with_the_name_of_a_method_is_refused_before_anything_changes():
    with fake_process_group():
        model = nn.Sequential(Named(4, 4), nn.Linear(4, 4))
        with pytest.raises(ValueError, match="a Named has attributes of its own named reshard"):
            drop_in.fully_shard(model[0])
        assert get_state(model[0]) is None and model[0].reshard() == "mine"
        drop_in.fully_shard(model)
        assert model[0].reshard() == "mine"
        assert isinstance(fsdp_compose.fully_shard(Named(4, 4)), Named)


def test_a_wrapper_that_passes_on_attributes_is_sharded_beside_what_is_inside():
    with fake_process_group():
        inner = nn.Linear(4, 4)
        model = nn.Sequential(checkpoint_wrapper(inner))
        drop_in.fully_shard(inner)
        assert not isinstance(model[0], drop_in.FSDPModule) and model[0].unshard.__self__ is inner
        drop_in.fully_shard(model[0])
        assert isinstance(model[0], drop_in.FSDPModule) and model[0].unshard.__self__ is model[0]
        named = nn.Module()
        named.reshard, named.forward = nn.Linear(2, 2), lambda x: x
        with pytest.raises(ValueError, match="named reshard"):
            drop_in.fully_shard(named)


def test_what_fsdp_compose_has_sharded_has_no_methods_and_is_no_fsdp_module():
    with fake_process_group():
        model = fsdp_compose.fully_shard(nn.Linear(4, 4))
        assert not isinstance(model, drop_in.FSDPModule) and not hasattr(model, "unshard")


def test_the_default_mesh_is_that_of_fsdp2_and_parameters_are_cut_between_rows():
    with fake_process_group(world_size=4):
        model = shard(drop_in, GPT(dim=6))
        theirs = fsdp.fully_shard(nn.Linear(4, 4)).weight.device_mesh
        for name, param in model.named_parameters():
            assert param.device_mesh == theirs, name
            assert param.device_mesh.mesh_dim_names == theirs.mesh_dim_names, name
            assert param.to_local().ndim == param.ndim and param.to_local().shape[1:] == param.shape[1:], name


def test_a_row_longer_than_all_shards_is_cut_inside():
    with fake_process_group(world_size=4):
        model = drop_in.fully_shard(nn.Linear(1000, 1))
        assert sum(handle.shard.numel() for handle in get_state(model)._handles) < 300


def test_placements_say_where_boundaries_may_be():
    with fake_process_group(world_size=4):
        model = nn.Sequential(nn.Linear(6, 3, bias=False))
        drop_in.fully_shard(model, shard_placement_fn=lambda param: Shard(1))
        assert get_state(model)._handles[0].layout.params[0].granule == 1
        for wrong in (Partial(), Shard(2), "rows"):
            with pytest.raises(ValueError, match=r"expected Shard\(dim\) for a dimension of weight"):
                drop_in.fully_shard(nn.Linear(6, 3, bias=False), shard_placement_fn=lambda param, wrong=wrong: wrong)


# ---- policies


@pytest.mark.parametrize("policy", [fsdp.MixedPrecisionPolicy, drop_in.MixedPrecisionPolicy])
def test_a_reduce_dtype_left_out_means_what_it_means_in_this_torch(policy):
    is_new = torch.__version__ >= (2, 15)
    with fake_process_group():
        model = drop_in.fully_shard(nn.Linear(4, 4), mp_policy=policy(param_dtype=torch.bfloat16))
        (handle,) = get_state(model)._handles
        assert handle.unsharded.dtype is torch.bfloat16
        assert handle.pending_gradients.dtype is (torch.float32 if is_new else torch.bfloat16)
        ours = fsdp_compose.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = drop_in.fully_shard(nn.Linear(4, 4), mp_policy=ours)
        assert get_state(model)._handles[0].pending_gradients.dtype is torch.float32


def test_a_policy_of_another_kind_is_refused():
    with fake_process_group(), pytest.raises(TypeError, match="mp_policy"):
        drop_in.fully_shard(nn.Linear(4, 4), mp_policy=torch.bfloat16)


# ---- training


def train(system: ModuleType, model: GPT, accumulate: bool, **options: Any) -> list[torch.Tensor]:
    """A program with the names of FSDP2: losses, and norms of gradients."""
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    options = {name: make(system) for name, make in options.items()}
    shard(system, model, **options)
    assert all(isinstance(item, system.FSDPModule) for item in (model, *model.blocks))
    model.set_modules_to_forward_prefetch([*model.blocks][:2])
    for earlier, later in zip(model.blocks, model.blocks[1:], strict=False):
        later.set_modules_to_backward_prefetch([earlier])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    results = []
    for batch in batches(3):
        parts = local_part(batch).chunk(2 if accumulate else 1)
        for part in parts:
            is_last = part is parts[-1]
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            model.set_reshard_after_backward(is_last)
            loss = gpt_loss(model, part) / len(parts)
            loss.backward()
            results.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        results.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model.unshard()
        results.append(gpt_loss(model, local_part(next(batches(1)))))
        model.reshard()
    return results


def second_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 and param.shape[-1] % 2 == 0 else None


OPTIONS: dict[str, dict[str, Callable[[ModuleType], Any]]] = {
    "plain": {},
    "kept": {"reshard_after_forward": lambda system: False},
    "bf16": {"mp_policy": lambda system: system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bf16 reduction": {"mp_policy": lambda system: system.MixedPrecisionPolicy(torch.bfloat16)},
    "no offloading": {"offload_policy": lambda system: system.OffloadPolicy()},
    "offloading": {"offload_policy": lambda system: system.CPUOffloadPolicy(pin_memory=False)},
    "dim 1": {"shard_placement_fn": lambda system: second_dim},
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@distributed(world_size=2)
def test_the_same_program_gives_fsdp2s_numbers(options, accumulate):
    model = GPT(layers=2)
    theirs, ours = (train(SYSTEMS[name], model, accumulate, **OPTIONS[options]) for name in SYSTEMS)
    tolerance = {"bf16": 2e-3, "bf16 reduction": 2e-2}.get(options, 1e-6)
    for expected, got in zip(theirs, ours, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ends", ["set_requires_all_reduce", "set_requires_gradient_sync"])
@distributed(world_size=4)
def test_hybrid_sharding_with_reductions_left_out_gives_fsdp2s_numbers(ends):
    mesh = lasting_mesh(("replicate", "shard"))
    losses = {}
    for name, system in SYSTEMS.items():
        model = shard(system, make_gpt(), mesh=mesh, reshard_after_forward=True)
        optimizer, losses[name] = torch.optim.SGD(model.parameters(), 0.1), []
        for step, batch in enumerate(batches(6)):
            if step % 2:
                getattr(model, ends)(True)
            else:
                model.set_requires_all_reduce(False)
            loss = gpt_loss(model, local_part(batch))
            loss.backward()
            losses[name].append(loss.detach())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(losses["drop_in"], losses["FSDP2"], rtol=1e-5, atol=1e-5)


def make_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT()


@pytest.mark.parametrize("factor", [1.0, 3.0])
@distributed(world_size=2)
def test_factors_sums_and_hooks_are_of_one_group(factor):
    results = {}
    for name, system in SYSTEMS.items():
        model = shard(system, make_gpt())
        seen: list[int] = []
        model.blocks[0].set_gradient_divide_factor(factor)
        model.blocks[0].set_force_sum_reduction_for_comms(True)  # FSDP2 needs it on gloo
        model.blocks[1].set_force_sum_reduction_for_comms(True)

        def double(gradient: torch.Tensor, seen: list[int] = seen) -> None:
            seen.append(1)
            gradient.mul_(2)

        model.blocks[2].set_all_reduce_hook(double)
        gpt_loss(model, local_part(next(batches(1)))).backward()
        assert seen == [1], name
        results[name] = {key: param.grad.full_tensor() for key, param in model.named_parameters()}
    torch.testing.assert_close(results["drop_in"], results["FSDP2"], rtol=1e-5, atol=1e-6)


def of_param_groups(model: nn.Module, hook: Callable[[torch.Tensor], None]) -> None:
    """How torchtitan sets it."""
    for module in model.modules():
        if isinstance(module, (fsdp.FSDPModule, drop_in.FSDPModule)):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._all_reduce_hook = hook


def of_the_only_param_group(model: nn.Module, hook: Callable[[torch.Tensor], None]) -> None:
    for module in model.modules():
        if isinstance(module, (fsdp.FSDPModule, drop_in.FSDPModule)):
            module._get_fsdp_state()._fsdp_param_group._all_reduce_hook = hook


def of_all_states(model: nn.Module, hook: Callable[[torch.Tensor], None]) -> None:
    for state in model._get_fsdp_state()._state_ctx.all_states:
        state._fsdp_param_group._all_reduce_hook = hook


@pytest.mark.parametrize("set_hook", [of_param_groups, of_the_only_param_group, of_all_states])
@distributed(world_size=4)
def test_a_hook_set_as_a_private_attribute_averages_over_replicas(set_hook):
    mesh = lasting_mesh(("replicate", "shard"))
    results = {}
    for name, system in SYSTEMS.items():
        model, calls = shard(system, make_gpt(), mesh=mesh["shard"]), []
        if set_hook is of_all_states:
            gpt_loss(model, next(batches(1))).backward()  # FSDP2 lists states from the first forward on
            model.zero_grad()

        def average(gradient: torch.Tensor, calls: list[int] = calls) -> None:
            calls.append(1)
            dist.all_reduce(gradient, group=mesh.get_group("replicate"))
            gradient.div_(2)

        set_hook(model, average)
        gpt_loss(model, local_part(next(batches(1)))).backward()
        assert len(calls) == 1 + len(model.blocks), (name, calls)
        assert model._get_fsdp_state()._fsdp_param_group._all_reduce_hook is average
        set_hook(model, None)
        gpt_loss(model, local_part(next(batches(1)))).backward()
        assert len(calls) == 1 + len(model.blocks), (name, calls)
        results[name] = [param.grad.full_tensor() for param in model.parameters()]
    torch.testing.assert_close(results["drop_in"], results["FSDP2"], rtol=1e-5, atol=1e-6)


def test_any_other_private_attribute_cannot_be_set():
    with fake_process_group():
        model = shard(drop_in, GPT())
        state = model._get_fsdp_state()
        (group,) = state._fsdp_param_groups
        for item, names in (
            (state, ("_training_state", "_is_root", "_state_ctx", "_module", "anything")),
            (group, ("_training_state", "_all_reduce_hook_stream", "_reduce_scatter_comm", "mesh_info", "_module")),
        ):
            for name in names:
                with pytest.raises(AttributeError, match=rf"{name} of FSDP2's ``FSDP(State|ParamGroup)``"):
                    setattr(item, name, None)


@distributed(world_size=2)
def test_chunks_of_a_loss_gather_the_head_once():
    model, reference = pair(make_gpt())
    for block in model.blocks:
        drop_in.fully_shard(block)
    drop_in.fully_shard(model.head)
    drop_in.fully_shard(model)
    head, model.head, plain_head, reference.head = model.head, nn.Identity(), reference.head, nn.Identity()
    batch = next(batches(1))

    def backward_in_chunks(model: nn.Module, head: nn.Module, batch: torch.Tensor, own: bool) -> None:
        hidden = model(batch[:, :-1])
        leaf = hidden.detach().requires_grad_()
        chunks = [*zip(leaf.chunk(3, 1), batch[:, 1:].chunk(3, 1), strict=True)]
        if own:
            head.set_reshard_after_forward(False)
            head.set_reshard_after_backward(False)
            head.set_requires_gradient_sync(False, recurse=False)
            head.unshard()
        for i, (x, target) in enumerate(chunks):
            if own and i == len(chunks) - 1:
                head.set_requires_gradient_sync(True, recurse=False)
            nn.functional.cross_entropy(head(x).flatten(0, 1), target.flatten()).backward()
        if own:
            head.set_reshard_after_forward(True)
            head.set_reshard_after_backward(True)
            head.reshard()
        hidden.backward(leaf.grad)

    with Collectives() as collectives:
        backward_in_chunks(model, head, local_part(batch), own=True)
    gathers = collectives.count["allgather_base"]
    assert gathers == 1 + 2 * len(model.blocks) + 1, gathers  # head; blocks twice; the root once
    backward_in_chunks(reference, plain_head, batch, own=False)
    torch.testing.assert_close(head.weight.grad.full_tensor(), plain_head.weight.grad, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)


ACCUMULATED = {  # reshard_after_forward, microbatches
    "kept": (False, 4),
    "kept, two microbatches": (False, 2),
    "freed after forward": (True, 4),
}


@pytest.mark.parametrize("program", ACCUMULATED)
@distributed(world_size=2)
def test_the_last_microbatch_uses_what_earlier_ones_have_gathered(program):
    reshards, num_parts = ACCUMULATED[program]
    counts: dict[str, list[int]] = {name: [] for name in SYSTEMS}
    weights = {}
    for name, system in SYSTEMS.items():
        model = shard(system, make_gpt(), reshard_after_forward=reshards)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in batches(3):
            with Collectives() as collectives:
                parts = local_part(batch).chunk(num_parts)
                for part in parts:
                    model.set_requires_gradient_sync(part is parts[-1])
                    model.set_reshard_after_backward(part is parts[-1])
                    (gpt_loss(model, part) / len(parts)).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts[name].append(collectives.count["allgather_base"])
        weights[name] = [param.full_tensor() for param in model.parameters()]
    assert counts["drop_in"] == counts["FSDP2"]
    torch.testing.assert_close(weights["drop_in"], weights["FSDP2"], rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
def test_the_last_microbatch_gathers_again_what_was_written_to():
    model, reference = pair(make_gpt())
    shard(drop_in, model, reshard_after_forward=False)
    for step, batch in enumerate(batches(3)):
        for is_last in (False, True):
            model.set_reshard_after_backward(is_last)
            losses = gpt_loss(model, batch), gpt_loss(reference, batch)
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
            for loss in losses:
                loss.backward()
            if not is_last:
                with torch.no_grad():
                    for param in (*model.parameters(), *reference.parameters()):
                        param.mul_(1 + 0.1 * step)


@distributed(world_size=2)
def test_finalize_backward_reduces_what_was_accumulated_and_frees():
    model, reference = pair(make_gpt())
    shard(drop_in, model)
    model.set_manual_backward_finalization(True)
    model.finalize_backward()  # before the first forward: nothing
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for batch in batches(2):
        gpt_loss(model, local_part(batch)).backward()
        gpt_loss(reference, batch).backward()
    model.finalize_backward()
    with pytest.raises(RuntimeError):
        model.head.weight.grad.full_tensor()  # not set to synchronise yet
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, drop_in.GradientReductionHandle)
    handle.wait()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)
    for state in (get_state(item) for item in (model, *model.blocks)):
        assert not any(handle.unsharded.is_allocated for handle in state._handles)


def test_what_is_not_there_says_so():
    with fake_process_group():
        model = drop_in.fully_shard(nn.Linear(4, 4))
        with pytest.warns(UserWarning, match="no effect"):
            model.set_symm_mem_for_comm()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.set_reduce_scatter_unused_params(True)
            model.set_reduce_scatter_max_input_buffers(2)
            model.set_unshard_in_backward(False)
            model.reset_iter_state()
        with pytest.raises(TypeError):
            model.set_reduce_scatter_max_input_buffers(True)
        drop_in.share_comm_ctx([model])
        with pytest.raises(ValueError, match="expected modules given to fully_shard"):
            drop_in.share_comm_ctx([nn.Linear(2, 2)])


@pytest.mark.skipif(
    not hasattr(fsdp.FSDPModule, "reset_iter_state"),
    reason="FSDP2 of torch < 2.13 has no reset_iter_state to compare with",
)
@pytest.mark.parametrize("left", ["reduced", "accumulated", "both", "interrupted"])
@distributed(world_size=2)
def test_reset_iter_state_treats_gradients_as_the_installed_fsdp2_does(left):
    shown = []
    for system in (fsdp, drop_in):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for layer in model:
            system.fully_shard(layer)
        system.fully_shard(model)
        x = torch.ones(2, 4) * (1 + dist.get_rank())

        def run(is_synced: bool, model: Any = model, x: torch.Tensor = x) -> None:
            model.set_requires_gradient_sync(is_synced)
            model(x).sum().backward()

        if left in ("reduced", "both"):
            run(True)
        if left in ("accumulated", "both", "interrupted"):
            run(False)
        if left == "interrupted":
            handle = model[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(x)
            handle.remove()
        model.reset_iter_state()
        with pytest.raises(RuntimeError, match="root"):
            model[0].reset_iter_state()
        has_gradient = [param.grad is not None for param in model.parameters()]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was interrupted")
            run(True)
        has_none = not any(has_gradient) or left in (
            "accumulated",
            "interrupted",
        )  # FSDP2 shows what is accumulated nowhere
        shown.append((has_none, [param.grad.full_tensor() for param in model.parameters()]))
    (theirs_none, theirs), (ours_none, ours) = shown
    assert theirs_none == ours_none
    torch.testing.assert_close(ours, theirs)


# ---- meshes


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, 5) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bd,ndo->bo", x, self.weight)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(5, 5), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(torch.tanh(self.router(x)))


@pytest.mark.parametrize("system", SYSTEMS)
@distributed(world_size=4)
def test_parameters_with_a_mesh_of_their_own(system):
    torch.manual_seed(0)
    model, reference = pair(nn.Sequential(Mixture(), Mixture()))
    mesh = lasting_mesh(("replicate", "shard"))
    world = lasting_mesh(("dp",), (4,))
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for block in model:
        experts = {*block.experts.parameters()}
        result = ShardPlacementResult(Shard(0), info)
        SYSTEMS[system].fully_shard(
            block, mesh=world, shard_placement_fn=lambda p, experts=experts, on=result: on if p in experts else None
        )
    SYSTEMS[system].fully_shard(model, mesh=world)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(4))
    model(local_part(x)).square().mean().backward()
    reference(x).square().mean().backward()
    assert model[0].experts.weight.device_mesh.ndim == 2 and model[0].router.weight.device_mesh.ndim == 1
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("system", SYSTEMS)
@distributed(world_size=4)
def test_a_module_with_parameters_of_its_own_on_two_meshes(system):
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    torch.manual_seed(0)
    model, reference = pair(nn.Linear(5, 4))
    rows = lasting_mesh(("replicate", "shard"))
    result = ShardPlacementResult(Shard(0), HSDPMeshInfo(rows, shard_mesh_dim=1, replicate_mesh_dim=0))
    world = lasting_mesh(("dp",), (4,))
    SYSTEMS[system].fully_shard(model, mesh=world, shard_placement_fn=lambda p: result if p.ndim == 2 else None)
    assert (model.weight.device_mesh.ndim, model.bias.device_mesh.ndim) == (2, 1)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(4))
    for net, given in ((model, local_part(x)), (reference, x)):
        net(given).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(6), nn.Linear(6, 6), nn.Sequential(nn.RMSNorm(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale(torch.tanh(self.linear(self.norm(x))))


def norms_stay_whole(model: nn.Module) -> Callable[[nn.Parameter], Any]:
    norms = {param for norm in model.modules() if "Norm" in type(norm).__name__ for param in norm.parameters(False)}
    return lambda param: Replicate() if param in norms else None


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@distributed(world_size=4)
def test_parameters_that_stay_whole(shape):
    mesh = lasting_mesh(("replicate", "shard")[-len(shape) :], shape)
    torch.manual_seed(0)
    model, reference = pair(nn.Sequential(Normed(), Normed()))
    whole = {name for name, _ in model.named_parameters() if "norm" in name or "scale" in name}
    for block in model:
        drop_in.fully_shard(block, mesh=mesh, shard_placement_fn=norms_stay_whole(block))
    drop_in.fully_shard(model, mesh=mesh)
    for name, param in model.named_parameters():
        assert (param.to_local().numel() == param.numel() and len(param.placements) > 0) or name not in whole
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference)]
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        with record_collectives(model) as lines:
            model(local_part(x)).square().mean().backward()
        reference(x).square().mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        num_groups = {kind: sum(line.startswith(kind) for line in lines) for kind in ("all-gather", "all-reduce")}
        assert num_groups["all-gather"] == 2 * len(model) and num_groups["all-reduce"] >= 2 * len(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, theirs in reference.state_dict().items() if dist.get_rank() == 0 else ():
        torch.testing.assert_close(state[name], theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("container", [nn.ModuleList, lambda items: nn.ModuleDict({"a": items[0], "b": items[1]})])
def test_lists_of_modules_that_stay_whole(container):
    with fake_process_group(world_size=4):
        model = nn.Module()
        model.norms, model.linear = container([nn.LayerNorm(4), nn.LayerNorm(4)]), nn.Linear(4, 4)
        linear = {*model.linear.parameters()}
        drop_in.fully_shard(model, shard_placement_fn=lambda p: None if p in linear else Replicate())
        for norm in model.norms.children():
            assert get_state(norm) is not None and norm.weight.to_local().numel() == 4


def test_what_cannot_stay_whole_is_refused_with_the_way_out():
    with fake_process_group(world_size=4):
        model = nn.Sequential(nn.Linear(4, 4))
        with pytest.raises(ValueError, match=r"bias of a Linear stay whole.*put them into a module of their own"):
            drop_in.fully_shard(model, shard_placement_fn=lambda p: Replicate() if p.ndim == 1 else None)
        with pytest.raises(ValueError, match=r"all parameters of this Sequential.*fsdp_compose\.replicate\(module\)"):
            drop_in.fully_shard(model, shard_placement_fn=lambda p: Replicate())
        assert get_state(model) is None


WHOLE_MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    # sizes, names, those over which to shard, and to replicate
    "all ranks": ((4,), ("dp",), ("dp",), ()),
    "replicate": ((2, 2), ("a", "b"), (), ("a", "b")),
    "both": ((2, 2), ("a", "b"), ("b",), ("a",)),
    "several": ((2, 2), ("a", "b"), ("a", "b"), ()),
    "one replica": ((1, 1, 4), ("a", "b", "dp"), ("dp",), ("a", "b")),
    "shard, tp": ((2, 2), ("dp", "tp"), ("dp",), ()),
    "tp, shard": ((2, 2), ("tp", "dp"), ("dp",), ()),
    "both, tp": ((1, 2, 2), ("rep", "dp", "tp"), ("dp",), ("rep",)),
    "both, tp of one": ((2, 2, 1), ("rep", "dp", "tp"), ("dp",), ("rep",)),
}
CUTS = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": Replicate()}


def on_whole_mesh(mesh: DeviceMesh) -> nn.Module:
    """A model whose parameters are DTensors on a mesh, cut over its dimension "tp". Of few operations: how each is cut
    on a mesh, which DTensor finds out once, takes longer than all training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 4))
    for name, param in [*model.named_parameters()]:
        module, _, key = name.partition(".")
        placements = [CUTS[name] if "tp" in dim else Replicate() for dim in mesh.mesh_dim_names or ()]
        setattr(model[int(module)], key, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    return model


@pytest.mark.parametrize("mode", ["", "bf16", "accumulation", "no reshard"])
@pytest.mark.parametrize("dims", WHOLE_MESHES)
@distributed(world_size=4)
def test_parameters_on_a_whole_mesh_train_as_under_fsdp2(dims, mode):
    """Inputs are DTensors on the whole mesh: each rank's own batch, taken for equal, or parts of one batch. Every two
    of a mesh, a mode and a kind of batch meet; on one mesh, DTensor looks at each kind with one dtype."""
    is_whole_batch = (mode == "bf16") == ([*WHOLE_MESHES].index(dims) % 2 == 0)
    shape, names, sharded, replicated = WHOLE_MESHES[dims]
    chosen = drop_in.DataParallelMeshDims(shard=sharded or None, replicate=replicated or None)
    mesh = lasting_mesh(names, shape)
    policies = (fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32),) if mode == "bf16" else ()
    data = [i for i, name in enumerate(names) if "tp" not in name]
    rank = 0
    for dim in data:
        rank = rank * mesh.size(dim) + mesh.get_local_rank(dim)
    found = []
    for system in (fsdp.fully_shard, drop_in.fully_shard):
        model = on_whole_mesh(mesh)
        for module in (model[0], model[2], model):
            options = {"mp_policy": policies[0]} if policies else {}
            system(module, mesh=mesh, dp_mesh_dims=chosen, reshard_after_forward=mode != "no reshard", **options)
        make = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3) if mode == "no reshard" else torch.optim.SGD
        optimizer = make(model.parameters(), foreach=False)
        results = []
        for step in range(3):
            model.set_requires_gradient_sync(mode != "accumulation" or step == 1)
            x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            placements = [Shard(0) if is_whole_batch and i in data else Replicate() for i in range(mesh.ndim)]
            loss = model(DTensor.from_local(x, mesh, placements, run_check=False)).sum()
            loss.backward()
            results.append(loss.full_tensor().detach())
            if mode != "accumulation" or step == 1:
                results += [param.grad.full_tensor() for param in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        found.append([*results, *[param.detach().full_tensor() for param in model.parameters()]])
        assert all(isinstance(param, DTensor) for param in model.parameters())
    rtol, atol = (1e-2, 1e-3) if mode == "bf16" else (1e-5, 1e-6)  # FSDP2 sums over tp in bf16
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@distributed(world_size=4)
def test_what_forward_sees_on_a_whole_mesh():
    mesh = lasting_mesh(("dp", "tp"))
    model = on_whole_mesh(mesh)
    specs = {name: (param.device_mesh, param.placements, param.shape) for name, param in model.named_parameters()}
    drop_in.fully_shard(model, mesh=mesh, dp_mesh_dims=drop_in.DataParallelMeshDims(shard="dp"))
    seen: dict[str, Any] = {}

    def look(module: nn.Module, _: Any) -> None:
        seen.update({name: (p.device_mesh, p.placements, p.shape) for name, p in model.named_parameters()})

    model[0].register_forward_pre_hook(look)
    x = DTensor.from_local(torch.randn(2, 6), mesh, [Replicate(), Replicate()], run_check=False)
    loss = model(x).square().mean()
    assert seen == specs
    loss.backward()
    for name, param in model.named_parameters():
        assert param.device_mesh.ndim == 2 and param.grad.placements == param.placements, name
    with pytest.raises(NotImplementedError, match=r"DTensors on the data-parallel dimensions, too \(dp_mesh_dims\)"):
        set_functional_mode(model)
        model(x)
    set_functional_mode(model, False)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(x).full_tensor(), model(x).full_tensor())


@distributed(world_size=4)
def test_weights_on_a_whole_mesh_stay_tied_across_calls():
    """Each call puts another parameter in place of one on the whole mesh. In FSDP2 the second call does not know the
    first one's."""
    mesh = lasting_mesh(("dp", "tp"))
    dims = drop_in.DataParallelMeshDims(shard="dp")
    model, truth = pair(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    for net in (model, truth):
        for name, param in [*net[0].named_parameters()]:
            whole = (
                distribute_tensor(param.detach(), mesh, [Replicate(), Replicate()]) if net is model else param.detach()
            )
            tied = nn.Parameter(whole)
            setattr(net[0], name, tied)
            setattr(net[1], name, tied)
    before = dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(ValueError, match="Replicate"):  # refused: nothing of it is left
        wrong = nn.Sequential(*model, nn.Linear(1, 1, bias=False))
        wrong[2].weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0), Replicate()]))
        drop_in.fully_shard(wrong, mesh=mesh, dp_mesh_dims=dims)
    assert dict(model.named_parameters(remove_duplicate=False)) == before
    drop_in.fully_shard(model[0], mesh=mesh, dp_mesh_dims=dims)
    drop_in.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert model[0].weight is model[1].weight and model[0].bias is model[1].bias
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    model(DTensor.from_local(x, mesh, [Replicate(), Replicate()], run_check=False)).sum().backward()
    for i in range(2):
        (truth(torch.randn(2, 6, generator=torch.Generator().manual_seed(i))).sum() / 2).backward()
    for ours, theirs in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-6)


UNEVEN = {  # features between two layers, shard_placement_fn
    "rows by default": (15, None),
    "rows": (15, lambda param: Shard(0)),
    "dim 1": (15, lambda param: Shard(param.ndim - 1)),
    "fewer rows than ranks": (1, lambda param: Shard(0)),
}


@pytest.mark.parametrize("program", UNEVEN)
@distributed(world_size=4)
def test_tensor_parallelism_that_splits_unevenly_trains_as_one_process(program):
    features, placement_fn = UNEVEN[program]
    mesh = lasting_mesh(("dp", "tp"))
    torch.manual_seed(0)
    model, reference = pair(nn.Sequential(nn.Linear(6, features), nn.Linear(features, 4)))
    plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for module in (*model, model):
        drop_in.fully_shard(module, mesh=mesh["dp"], shard_placement_fn=placement_fn)
    optimizers = [torch.optim.AdamW(item.parameters(), 1e-2, eps=1e-3) for item in (model, reference)]
    for step in range(2):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        model(x.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
        reference(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=1e-5, atol=1e-6, msg=name)


ON_META: dict[str, Callable[[Any], dict[str, Any]]] = {
    "default mesh": lambda mesh: {},
    "hybrid": lambda mesh: {"mesh": mesh},
    "dim 1": lambda mesh: {"shard_placement_fn": second_dim},
    "tensor parallelism": lambda mesh: {"mesh": mesh["dp"]},
    "uneven tensor parallelism": lambda mesh: {"mesh": mesh["dp"]},
    "on a whole mesh": lambda mesh: {"mesh": mesh, "dp_mesh_dims": drop_in.DataParallelMeshDims(shard="dp")},
}


@pytest.mark.parametrize("program", ON_META)
@distributed(world_size=4)
def test_a_model_is_sharded_inside_the_meta_device(program):
    mesh = lasting_mesh(("dp", "tp"))
    options = ON_META[program](mesh)
    features = 7 if "uneven" in program else 8
    reference = nn.Sequential(nn.Linear(6, features), nn.Linear(features, 4))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, features), nn.Linear(features, 4))
        if "tensor" in program:
            plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
        if "dp_mesh_dims" in options:
            for name, param in [*model.named_parameters()]:
                place, _, key = name.partition(".")
                whole = nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate(), Replicate()]))
                setattr(model[int(place)], key, whole)
        for module in (*model, model):
            drop_in.fully_shard(module, **options)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    for seeded in (model, reference):
        torch.manual_seed(1)
        for module in seeded:
            module.reset_parameters()
    for (name, ours), theirs in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs[1].detach(), msg=name)
    x = torch.randn(8, 6)
    if "dp_mesh_dims" in options:
        whole = DTensor.from_local(x, mesh, [Replicate(), Replicate()], run_check=False)
        torch.testing.assert_close(model(whole).full_tensor(), reference(x), rtol=1e-5, atol=1e-6)
    else:
        torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6)


def test_dimensions_that_cannot_be_meant_are_refused():
    with fake_process_group(world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for dims, error in (
            (drop_in.DataParallelMeshDims(shard="fsdp"), "'fsdp' not found in mesh.mesh_dim_names"),
            (drop_in.DataParallelMeshDims(shard="dp"), "must be DTensors .* weight is not a DTensor"),
        ):
            model = nn.Linear(4, 4)
            with pytest.raises(ValueError, match=error):
                drop_in.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
            assert get_state(model) is None
        model.bias = None
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Replicate(), Shard(0)]))
        with pytest.raises(ValueError, match="weight is already a DTensor"):  # data parallelism alone beside tp
            drop_in.fully_shard(model, mesh=mesh, dp_mesh_dims=drop_in.DataParallelMeshDims(replicate="dp"))
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Replicate()]))
        with pytest.raises(ValueError, match="Replicate"):
            drop_in.fully_shard(model, mesh=mesh, dp_mesh_dims=drop_in.DataParallelMeshDims(shard="dp"))


class WithoutSubclasses(nn.Sequential):
    def __init_subclass__(cls, name: str, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)


@pytest.mark.parametrize("why", ["a gradient", "shared memory", "a clash", "a policy", "other ranks", "no subclass"])
def test_what_is_refused_leaves_parameters_and_inner_modules_as_they_were(why):
    """The refused call puts parameters on other meshes, makes groups of inner modules, or both."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    with fake_process_group(world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        world = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        result = ShardPlacementResult(None, HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0))
        experts, dims = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for inner in dims:
            for name, param in [*inner.named_parameters()]:
                setattr(inner, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()] * 2)))
        calls = (
            (
                experts,
                {"mesh": world, "shard_placement_fn": lambda p: result if p in {*experts[0].parameters()} else None},
            ),
            (dims, {"mesh": mesh, "dp_mesh_dims": drop_in.DataParallelMeshDims(shard="dp")}),
        )
        for model, arguments in calls:
            if why == "a gradient":
                model[1].weight.grad = torch.zeros_like(model[1].weight)
            elif why == "shared memory":
                if model is dims:
                    continue
                model[1].weight.data = model[1].bias.data.expand(4, 4)
            elif why == "a clash":
                model.reshard = 3
            elif why == "a policy":
                arguments["mp_policy"] = object()
            elif why == "other ranks":
                arguments["reshard_after_forward"] = 3
            elif why == "no subclass":
                model.__class__ = WithoutSubclasses
            before = {name: id(param) for name, param in model.named_parameters()}
            message = "subclass of WithoutSubclasses" if why == "no subclass" else None
            with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
                drop_in.fully_shard(model, **arguments)
            assert {name: id(param) for name, param in model.named_parameters()} == before
            assert not any(get_state(inner) for inner in model.modules())


# ---- install()


def a_package() -> ModuleType:
    """One that has imported FSDP2's names, under other names too."""
    package = ModuleType("a_package_of_somebody")
    exec(
        "from torch.distributed.fsdp import fully_shard, FSDPModule as Sharded\n"
        "from torch.distributed.fsdp import MixedPrecisionPolicy\n"
        "import torch.distributed.fsdp\n"
        "def shard(module): return fully_shard(module, mp_policy=MixedPrecisionPolicy())\n"
        "def is_sharded(module): return isinstance(module, Sharded)\n"
        "def late():\n"
        "    from torch.distributed._composable.fsdp import FSDPModule, fully_shard\n"
        "    return FSDPModule, fully_shard, torch.distributed.fsdp.FSDPModule\n",
        vars(package),
    )
    return package


def globals_of_all_modules() -> dict[str, Any]:
    return {
        f"{module.__name__}.{name}": value
        for module in [*sys.modules.values()]
        if isinstance(module, ModuleType)
        for name, value in [*vars(module).items()]
    }


@distributed(world_size=1, fresh=True)
def test_install_rebinds_what_it_lists_and_nothing_else_and_uninstall_undoes_it():
    package = a_package()
    sys.modules[package.__name__] = package
    drop_in.install()  # imports what it needs to
    drop_in.uninstall()
    before = globals_of_all_modules()
    theirs = {fsdp.fully_shard, fsdp.register_fsdp_forward_method, fsdp.share_comm_ctx}
    theirs |= {of_stages.stage_backward_input, of_stages.stage_backward_weight}
    said: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("fsdp_compose")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel("INFO")
    report = drop_in.install()
    log.removeHandler(handler)
    assert said == [f"install(): rebound {', '.join(report)}"]
    after = globals_of_all_modules()
    changed = sorted(name for name, value in after.items() if before.get(name) is not value)
    assert changed == report == drop_in.installed() and before.keys() == after.keys()
    assert {before[name] for name in report} == theirs
    assert {
        "a_package_of_somebody.fully_shard",
        "torch.distributed.fsdp.fully_shard",
        "torch.distributed._composable.fsdp.fully_shard",
        "torch.distributed.pipelining.stage.stage_backward_input",
    } <= {*report}
    assert drop_in.install() == []
    assert package.late() == (fsdp.FSDPModule, drop_in.fully_shard, fsdp.FSDPModule)
    model = package.shard(nn.Linear(4, 4))
    assert package.is_sharded(model)
    with pytest.raises(RuntimeError, match=r"uninstall\(\): there are modules sharded by drop_in"):
        drop_in.uninstall()
    assert drop_in.install() == []
    del model
    gc.collect()
    package.fully_shard = None  # somebody else's, who keeps it
    kept = sorted({*report} - {"a_package_of_somebody.fully_shard"})
    after = globals_of_all_modules()
    assert drop_in.installed() == kept == drop_in.uninstall()
    again = globals_of_all_modules()
    assert sorted(name for name, value in again.items() if after.get(name) is not value) == kept
    assert all(again[name] is before[name] for name in kept) and package.fully_shard is None
    assert drop_in.uninstall() == drop_in.installed() == []


@pytest.mark.parametrize("system", ["FSDP2", "fsdp_compose"])
@distributed(world_size=1, fresh=True)
def test_it_is_refused_while_models_are_sharded_by_others(system):
    sharder = {"FSDP2": fsdp, "fsdp_compose": fsdp_compose}[system].fully_shard
    model = sharder(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=rf"sharded by {system}.* \(1, among them"):
        drop_in.install()
    assert fsdp.fully_shard is not drop_in.fully_shard
    del model
    gc.collect()
    assert drop_in.install()


# ---- pipelines of torch's own stages

NUM_MICROBATCHES, DIM = 4, 6
SCHEDULES = {
    ScheduleGPipe: 1,
    Schedule1F1B: 1,
    ScheduleInterleaved1F1B: 2,
    ScheduleLoopedBFS: 2,
    ScheduleInterleavedZeroBubble: 2,
    ScheduleZBVZeroBubble: 2,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@distributed(world_size=(2, 4), fresh=True)  # where no model of another test is alive
def test_installed_pipelines_train_as_one_process_with_one_reduction_a_step(schedule, world_size):
    drop_in.install()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model, reference = pair(layers())
    per_rank = SCHEDULES[schedule]
    num_stages = 2 * per_rank
    indices = [pp] if per_rank == 1 else [pp, 3 - pp] if schedule is ScheduleZBVZeroBubble else [pp, pp + 2]
    size, stages = len(model) // num_stages, []
    for index in indices:
        part = nn.Sequential(*model[index * size : (index + 1) * size])
        for layer in part:
            fsdp.fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fsdp.fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
        stages.append(PipelineStage(part, index, num_stages, torch.device("cpu"), group=mesh.get_group("pp")))
    run = schedule(stages if per_rank > 1 else stages[0], n_microbatches=NUM_MICROBATCHES, loss_fn=loss_of)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizers = [torch.optim.AdamW(items, 1e-2, eps=1e-3) for items in (params, [*reference.parameters()])]
    is_last = num_stages - 1 in indices
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, target = (torch.randn(16, DIM, generator=generator) for _ in range(2))
        mine, wanted = x.chunk(world_size // 2)[dp], target.chunk(world_size // 2)[dp]
        arguments = ((mine,) if 0 in indices else (), {"target": wanted} if is_last else {})
        lines: list[str] = []
        if step:  # the first one also runs the stages to learn what they return
            contexts = [fsdp_compose.record_collectives(stage.submod, lines.append) for stage in stages]
            for context in contexts:
                context.__enter__()
        run.step(*arguments[0], **arguments[1])
        if step:
            for context in contexts:
                context.__exit__(None, None, None)
            groups = sum(len(stage.submod) for stage in stages)
            reductions = sum(line.startswith("reduce-scatter") for line in lines)
            assert reductions == (groups if world_size > 2 else 0), lines
        loss_of(reference(x), target).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for index, stage in zip(indices, stages, strict=True):
        expected = nn.Sequential(*reference[index * size : (index + 1) * size])
        for got, param in zip(stage.submod.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(got.full_tensor(), param.detach(), rtol=1e-5, atol=1e-6)
    assert dist.get_world_size() == world_size

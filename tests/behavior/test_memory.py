"""Where memory is, when it goes, and that nothing keeps a model alive."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecisionPolicy,
    flat_parameters,
    fully_shard,
    functional_mode,
    no_sync,
    summon_full_params,
    unshard,
)
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from fsdp_compose.core.comm.context import known_for
from fsdp_compose.core.comm.control_exchange import _Control
from fsdp_compose.core.group.registry import _get_fsdp_states, get_state
from fsdp_compose.plugins.debugging import standstill
from fsdp_compose.strategies import STRATEGIES
from tests.harness import distributed, environment, fake_process_group, lasting_mesh
from tests.internals import all_unsharded_bytes, handles_of
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import adamw, local_part


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of sharded gradients, unsharded accumulated gradients and reduce buffers."""
    flats = [handle.gradient.memory.flat for handle in handles_of(model)]
    flats += [
        handle.pending_gradients.accumulation.flat
        for handle in handles_of(model)
        if handle.pending_gradients.accumulation is not None
    ]
    root = get_state(model).root
    buffers = root.communicator._buffers.values() if root is not None else ()
    storages = [flat.untyped_storage() for flat in flats if flat is not None] + [buffer.storage for buffer in buffers]
    return sum(storage.nbytes() for storage in storages)


# ---- unsharded parameters --------------------------------------------------------------------------------------------


class GatherOutputs(TorchDispatchMode):
    """Where the all-gathers write."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in function._schema.name:
            self.storages.add(args[0].untyped_storage().data_ptr())
        elif function._schema.name == "c10d::recv_":  # a message
            self.storages.add(args[0][0].untyped_storage().data_ptr())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@distributed(world_size=(2, 3))
def test_each_unsharded_parameter_lies_in_the_output_of_an_all_gather(param_dtype):
    model = shard_layers(GPT(dim=4, layers=2), mp_policy=MixedPrecisionPolicy(param_dtype))
    gathers = GatherOutputs()
    seen: list[str] = []

    def look(module: nn.Module, *_: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            assert param.untyped_storage().data_ptr() in gathers.storages, name
            assert param.dtype == (param_dtype or torch.float32)
            seen.append(name)

    for module in model.modules():
        module.register_forward_pre_hook(look)
    (batch,) = batches(1)
    with gathers:
        gpt_loss(model, local_part(batch)).backward()
    # A parameter that is used without its module's forward is not looked at: the position table.
    assert len(seen) == len(list(model.parameters())) - 1


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_unsharded_memory_is_not_a_byte_larger_than_the_shards_of_all_ranks(reshard_after_forward):
    with fake_process_group(world_size=3):
        policy = MixedPrecisionPolicy(torch.bfloat16)
        model = fully_shard(nn.Linear(3, 5), mp_policy=policy, reshard_after_forward=reshard_after_forward)
        (handle,) = handles_of(model)
        for _ in range(2):
            unshard(model)
            assert all_unsharded_bytes(model) == 3 * handle.shard.numel() * torch.bfloat16.itemsize
            model(torch.ones(1, 3)).sum().backward()
            assert all_unsharded_bytes(model) == 0


@distributed(world_size=1)
def test_one_rank_computes_with_its_shard():
    model = fully_shard(nn.Linear(3, 3))
    (handle,) = handles_of(model)
    seen = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.weight.untyped_storage().data_ptr()))
    model(torch.ones(1, 3)).sum().backward()
    assert seen == [handle.shard.untyped_storage().data_ptr()]
    assert all_unsharded_bytes(model) == handle.shard.untyped_storage().nbytes()


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(world_size=(2, 3))
def test_nothing_is_left_unsharded_after_a_training_step(reshard_after_forward):
    model = shard_layers(GPT(dim=4, layers=2), reshard_after_forward=reshard_after_forward)
    assert all_unsharded_bytes(model) == 0, "after fully_shard"
    optimizer = adamw(model.parameters())
    for batch in batches(3):
        gpt_loss(model, local_part(batch)).backward()
        assert all_unsharded_bytes(model) == 0, "after backward"
        assert sum(buffer.storage.nbytes() for buffer in get_state(model).root.communicator._buffers.values()) == 0
        optimizer.step()
        optimizer.zero_grad()


@distributed(world_size=(2, 3))
def test_nothing_is_left_unsharded_after_a_forward_that_raised():
    model = shard_layers(GPT(dim=4, layers=2))
    (batch,) = batches(1)
    gpt_loss(model, local_part(batch)).backward()
    hook = model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(local_part(batch)[:, :-1])
    assert all_unsharded_bytes(model) == 0
    hook.remove()
    with pytest.warns(UserWarning, match="interrupted"):
        gpt_loss(model, local_part(batch)).backward()


class MostUnshardedAtOnce:
    """Counts, at each module's forward, the groups whose parameters are there."""

    def __init__(self, model: nn.Module) -> None:
        self.most = 0
        self._states = _get_fsdp_states(model)
        for module in model.modules():
            module.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        there = [any(handle.unsharded.memory.nbytes() for handle in state._handles) for state in self._states]
        self.most = max(self.most, sum(there))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@distributed(world_size=2)
def test_evaluation_holds_the_groups_that_run_and_one_prefetched(mode):
    model = GPT(dim=4, layers=4)
    for part in (model.tokens, model.positions, model.norm, model.head):
        part.requires_grad_(False)  # in no group
    model = nn.Sequential(*model.blocks)
    for block in model:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    count = MostUnshardedAtOnce(model)
    for _ in range(3):
        with mode():
            model(torch.ones(1, 2, 4))
        assert all_unsharded_bytes(model) == 0
    assert count.most == 2


# Without reentry the recomputation begins when the last block has been gathered for its backward, and prefetched the
# one before.
@pytest.mark.parametrize(("use_reentrant", "at_most"), [(True, 2), (False, 3)])
@distributed(world_size=2)
def test_recomputation_of_a_long_segment_frees_each_block_before_the_next(use_reentrant, at_most):
    blocks = nn.Sequential(*GPT(dim=4, layers=5).blocks)
    for block in blocks:
        fully_shard(block)
    fully_shard(blocks)
    count = MostUnshardedAtOnce(blocks)
    for _ in range(2):
        x = torch.ones(1, 2, 4, requires_grad=True)
        y = checkpoint(lambda x: blocks(x), x, use_reentrant=use_reentrant)
        count.most = 0  # from here on in the recomputation
        y.sum().backward()
        assert 0 < count.most <= at_most
        assert all_unsharded_bytes(blocks) == 0


@distributed(world_size=2)
def test_unsharded_ahead_of_an_iteration_that_does_not_use_it():
    model = shard_layers(GPT(dim=4, layers=2))
    (batch,) = batches(1)
    unshard(model.blocks[0])
    assert all_unsharded_bytes(model.blocks[0]) > 0
    with torch.no_grad():
        gpt_loss(model, local_part(batch))
    assert all_unsharded_bytes(model) == 0


# ---- gradients -------------------------------------------------------------------------------------------------------


@distributed(world_size=(2, 3))
def test_gradient_memory_is_freed_by_the_forward_after_zero_grad():
    model = shard_layers(GPT(dim=4, layers=2))
    shard_bytes = sum(handle.shard.untyped_storage().nbytes() for handle in handles_of(model))
    for batch in batches(3):
        loss = gpt_loss(model, local_part(batch))
        assert gradient_bytes(model) == 0, "after forward"
        loss.backward()
        assert gradient_bytes(model) == shard_bytes, "after backward: sharded gradients and nothing else"
        model.zero_grad()


@distributed(world_size=(2, 3))
def test_gradient_memory_that_the_user_holds_is_his():
    model = shard_layers(GPT(dim=4, layers=2))
    first, second = batches(2)
    gpt_loss(model, local_part(first)).backward()
    held = [param.grad for param in model.parameters()]
    references = [weakref.ref(grad) for grad in held]
    model.zero_grad()
    gpt_loss(model, local_part(second)).backward()
    assert not any(param.grad is grad for param, grad in zip(model.parameters(), held, strict=True))
    held.clear()
    assert [reference() for reference in references] == [None] * len(references)


@distributed(world_size=(2, 3))
def test_accumulation_without_sync_holds_unsharded_gradients_until_they_are_reduced():
    model = shard_layers(GPT(dim=4, layers=2), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    flat_bytes = sum(handle.layout.flat_numel * 4 for handle in handles_of(model))
    shard_bytes = sum(handle.shard.untyped_storage().nbytes() for handle in handles_of(model))
    first, second = batches(2)
    with no_sync(model):
        gpt_loss(model, local_part(first)).backward()
        assert gradient_bytes(model) == flat_bytes
    gpt_loss(model, local_part(second)).backward()
    assert gradient_bytes(model) == shard_bytes
    assert not get_state(model).root.communicator._in_flight


@distributed(world_size=(2, 3))
def test_frozen_group_has_no_gradient_memory():
    model = GPT(dim=4, layers=2)
    model.blocks[0].requires_grad_(False)
    shard_layers(model)
    (batch,) = batches(1)
    gpt_loss(model, local_part(batch)).backward()
    (frozen,) = handles_of(model.blocks[0])
    trained = sum(handle.shard.untyped_storage().nbytes() for handle in handles_of(model) if handle is not frozen)
    assert gradient_bytes(model) == trained
    assert frozen.gradient.memory.flat is None


# ---- shards ----------------------------------------------------------------------------------------------------------


@distributed(world_size=(2, 3))
def test_original_parameters_are_freed_by_fully_shard():
    model = GPT(dim=4, layers=2)
    originals = [weakref.ref(param) for param in model.parameters()]
    numel = sum(param.numel() for param in model.parameters())
    with no_garbage_collection():
        shard_layers(model)
        assert [reference() for reference in originals] == [None] * len(originals)
    storages = [param.to_local().untyped_storage() for param in model.parameters()]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(held.values()) <= numel * 4 / dist.get_world_size() * 1.2, "a rank holds its share and some padding"


# ---- the end of a model ----------------------------------------------------------------------------------------------


@functools.cache
def first_optimizer_step() -> None:
    """The first one in a process imports modules from inside, and what it works on stays in a cycle."""
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    adamw([param]).step()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    first_optimizer_step()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def references_to(model: nn.Module) -> dict[str, weakref.ref[Any]]:
    """Everything that must go with ``model``."""
    references: dict[str, weakref.ref[Any]] = {}
    for name, module in model.named_modules():
        references[f"module {name}"] = weakref.ref(module)
    for name, param in model.named_parameters():
        references[f"parameter {name}"] = weakref.ref(param)
    for state in _get_fsdp_states(model):
        references[f"state {state.fqn}"] = weakref.ref(state)
        for i, handle in enumerate(state._handles):
            references[f"handle {i} of {state.fqn}"] = weakref.ref(handle)
            references[f"shard {i} of {state.fqn}"] = weakref.ref(handle.shard)
            references[f"unsharded storage {i} of {state.fqn}"] = weakref.ref(handle.unsharded.storage)
            if handle.gradient.memory.flat is not None:
                references[f"gradient {i} of {state.fqn}"] = weakref.ref(handle.gradient.memory.flat)
        if state.root is not None:
            references["root"] = weakref.ref(state.root.communicator)
    return references


def alive(references: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, reference in references.items() if reference() is not None]


def assert_gone(references: dict[str, weakref.ref[Any]]) -> None:
    """A finished collective lets go of its tensors a moment later, on a thread of the process group."""
    deadline = time.monotonic() + 30
    while alive(references) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive(references) == []


def use_and_drop(model: nn.Module, when: str) -> dict[str, weakref.ref[Any]]:
    """Uses ``model`` for a while and returns references to what was in it; the caller holds nothing else."""
    optimizer = adamw(model.parameters())
    if when == "before the first forward":
        return references_to(model)
    for batch in batches(1 if when == "after a forward" else 3):
        loss = gpt_loss(model, local_part(batch))
        if when == "after a forward":
            return references_to(model)
        if when == "after a forward that raised":
            hook = model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                gpt_loss(model, local_part(batch))
            hook.remove()
            return references_to(model)
        if when == "after accumulation without sync":
            with no_sync(model):
                loss.backward()
            continue
        loss.backward()
        if when == "after backward without a step":
            continue
        optimizer.step()
        optimizer.zero_grad()
        if when == "after evaluation":
            with torch.no_grad():
                gpt_loss(model, local_part(batch))
    return references_to(model)


@pytest.mark.parametrize(
    "when",
    [
        "before the first forward",
        "after a forward",
        "after a forward that raised",
        "after training steps",
        "after backward without a step",
        "after accumulation without sync",
        "after evaluation",
    ],
)
@pytest.mark.parametrize("use_reentrant", [None, False, True])
@distributed(world_size=2)
def test_everything_goes_with_the_model(when, use_reentrant):
    with no_garbage_collection():
        model = shard_layers(GPT(dim=4, layers=2, use_reentrant=use_reentrant))
        references = use_and_drop(model, when)
        assert alive(references) == list(references)
        del model
        assert_gone(references)


@pytest.mark.parametrize("when", ["before the first forward", "after a forward", "after training steps"])
@pytest.mark.parametrize("way", ["cast", *STRATEGIES])
@distributed(world_size=4)
def test_everything_goes_with_models_of_every_strategy(way, when):
    row = STRATEGIES.get(way, STRATEGIES["zero3"])
    shape = (4,) if row.num_dims == 1 else (2, 2)
    mesh = lasting_mesh(("replicate", "shard")[-len(shape) :], shape)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if way == "cast" else None
    with no_garbage_collection():
        model = shard_layers(GPT(dim=4, layers=2), mesh=mesh, strategy=row, mp_policy=policy)
        references = use_and_drop(model, when)
        assert alive(references) == list(references)
        del model
        assert_gone(references)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_loss_keeps_what_its_backward_needs_and_then_lets_go(reshard_after_forward):
    (batch,) = batches(1)
    with no_garbage_collection():
        model = shard_layers(GPT(dim=4, layers=2), reshard_after_forward=reshard_after_forward)
        loss = gpt_loss(model, local_part(batch))
        references = references_to(model)
        del model
        assert "state blocks.0" in alive(references), "the graph holds it"
        del loss
        assert_gone(references)


@distributed(world_size=2)
def test_optimizer_holds_parameters_and_not_the_model():
    with no_garbage_collection():
        model = shard_layers(GPT(dim=4, layers=2))
        optimizer = adamw(model.parameters())
        for batch in batches(2):
            gpt_loss(model, local_part(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        references = references_to(model)
        del model
        assert {name.split()[0] for name in alive(references)} == {"parameter", "shard"}
        with torch.no_grad():
            bases = {id(param.to_local()._base) for param in optimizer.param_groups[0]["params"]}
        shards = {id(reference()) for name, reference in references.items() if name.startswith("shard")}
        assert shards == bases, "parameters are views of them"
        del optimizer
        assert_gone(references)


@distributed(world_size=2)
def test_sharded_child_outlives_its_root():
    (batch,) = batches(1)
    with no_garbage_collection():
        model = shard_layers(GPT(dim=4, layers=2))
        gpt_loss(model, local_part(batch)).backward()
        block = model.blocks[0]
        references = references_to(model)
        del model
        names = alive(references)
        assert not any("blocks.1" in name or "head" in name for name in names)
        block.zero_grad()
        block(torch.ones(1, 2, 4)).sum().backward()
        assert block.qkv.weight.grad is not None
        del block
        assert_gone(references)


def test_rejected_call_keeps_nothing():
    with fake_process_group(world_size=4), no_garbage_collection():
        model = GPT(dim=4, layers=1)
        model.head.weight.grad = torch.zeros_like(model.head.weight)
        with contextlib.suppress(ValueError):
            fully_shard(model)
        reference = weakref.ref(model)
        del model
        assert reference() is None


# ---- the end of a process group --------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in batches(2):
        optimizer.zero_grad()
        gpt_loss(model, local_part(batch)).backward()
        optimizer.step()


def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def checkpoint_into(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer)
    mesh = next(model.parameters()).device_mesh
    states = get_state_dict(model, optimizer)
    group = mesh.get_group()
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder, process_group=group)
    dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    set_model_state_dict(model, get_model_state_dict(model, options=options), options=options)


def interrupt(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    hook = model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        gpt_loss(model, local_part(next(batches(1))))
    hook.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of recovery
        train(model, optimizer)


def penalise(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with functional_mode(model):
        train(model, optimizer)


def look_inside(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer)
    with summon_full_params(model):
        assert all(type(param) is nn.Parameter for param in model.parameters())
    sum(param.full_tensor().sum() for param in model.parameters()).backward()


def be_looked_at(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Return right after a look."""
    train(model, optimizer)
    watcher = standstill._watcher
    assert watcher is not None
    before, deadline = {*watcher._seen}, time.monotonic() + 20
    while before == {*watcher._seen} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert before != {*watcher._seen}


USES = {
    "looked at": lambda folder, model, optimizer: be_looked_at(model, optimizer),
    "shard": lambda folder, model, optimizer: None,
    "train": lambda folder, model, optimizer: train(model, optimizer),
    "clip": lambda folder, model, optimizer: clip(model, optimizer),
    "checkpoint": checkpoint_into,
    "interrupted": lambda folder, model, optimizer: interrupt(model, optimizer),
    "functional mode": lambda folder, model, optimizer: penalise(model, optimizer),
    "whole parameters": lambda folder, model, optimizer: look_inside(model, optimizer),
}


def use_a_process_group(folder: Path, how: str, is_flat: bool) -> dict[str, weakref.ref[Any]]:
    """A model on a process group of its own, used, dropped, and its group destroyed."""
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    USES[how](folder, model, adamw(flat_parameters(model) if is_flat else model.parameters()))
    control = known_for(group, _Control)
    found = {"process group": group, "mesh": mesh, "control group": control and control.group}
    dist.barrier(group)
    dist.destroy_process_group(group)
    return {name: weakref.ref(item) for name, item in found.items() if item is not None}


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("how", ["shard", "train", "interrupted", "functional mode"])
@distributed(world_size=2)
def test_everything_goes_with_the_process_group(how, debug, tmp_path):
    """Its connections and threads: a program that makes a group for each experiment would run out of them."""
    first_optimizer_step()
    with environment(FSDP_COMPOSE_DEBUG=debug):
        references = use_a_process_group(tmp_path, how, is_flat=False)
    gc.collect()
    assert_gone(references)


@distributed(world_size=2, fresh=True)
def test_the_thread_that_looks_after_ranks_that_stand_still_keeps_no_process_group(tmp_path):
    with environment(FSDP_COMPOSE_HANG_SECONDS="12"):  # a look every two seconds
        references = use_a_process_group(tmp_path, "looked at", is_flat=False)
    gc.collect()
    deadline = time.monotonic() + 1
    while alive(references) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive(references) == []


@pytest.mark.parametrize("is_flat", [False, True], ids=["sharded parameters", "flat views"])
@pytest.mark.parametrize("how", ["train", "clip", "checkpoint", "whole parameters"])
@distributed(world_size=2)
def test_control_group_goes_when_another_is_made(how, is_flat, tmp_path):
    """Where torch's own caches keep the process group, by the meshes of plain DTensors."""
    references = use_a_process_group(tmp_path / "first", how, is_flat)
    use_a_process_group(tmp_path / "second", "train", is_flat)
    gc.collect()
    assert_gone({"control group": references["control group"]})


@pytest.mark.parametrize("inputs", ["a tensor", "a tuple", "a keyword", "a dict"])
@distributed(world_size=2)
def test_inputs_go_with_their_last_reference_without_the_garbage_collector(inputs):
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> torch.Tensor:
            x = x["x"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
            return self.linear(x).detach()

    model = fully_shard(Takes(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    gc.disable()
    try:
        for _ in range(3):
            x = torch.ones(2, 4)
            seen = weakref.ref(x)
            given = {"a tuple": (x, 1), "a dict": {"x": x}}.get(inputs, x)
            model(x=given) if inputs == "a keyword" else model(given)
            del x, given
            assert seen() is None
    finally:
        gc.enable()

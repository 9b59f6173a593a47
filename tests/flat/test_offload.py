"""``fully_shard(offload_policy=CPUOffloadPolicy())``: shards, gradients and optimizer state in host memory."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten_with_path

from fsdp_compose import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    flat_parameters,
    fully_shard,
    functional_mode,
    summon_full_params,
)
from fsdp_compose._torch import without_modes
from fsdp_compose.core.flat import local_of, shard_storage
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import ROOT, distributed, fake_process_group, lasting_mesh
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import adamw, gpt_twins, local_part, sgd, train_gpt
from tests.two_memories import IN, OUT, TwoMemories

POLICY = CPUOffloadPolicy()
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HALF_REDUCED = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    with without_modes():  # a look of the test's own at both sides
        return torch.equal(local_of(one), local_of(other))


def assert_same_state(mine: Any, expected: Any) -> None:
    with without_modes():
        leaves = [tree_flatten_with_path(item)[0] for item in (mine, expected)]
        for (path, ours), (_, theirs) in zip(*leaves, strict=True):
            is_same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
            assert is_same, path


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    """Equal shards, bit for bit."""
    for ours, theirs in zip(_get_fsdp_handles(model), _get_fsdp_handles(other), strict=True):
        assert same(ours.shard, theirs.shard), ours


@contextmanager
def two_memories() -> Iterator[TwoMemories]:
    with TwoMemories() as memories:
        yield memories


def pairs() -> DeviceMesh:
    return lasting_mesh(("replicate", "shard"), (2, dist.get_world_size() // 2))


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "bf16": lambda: {"mp_policy": HALF},
    "bf16 reduced": lambda: {"mp_policy": HALF_REDUCED},
    "parts": lambda: {"reshard_after_forward": 2},
    "kept": lambda: {"reshard_after_forward": False},
    "hybrid": lambda: {"mesh": pairs()},
    "hybrid, bf16": lambda: {"mesh": pairs(), "mp_policy": HALF},
}


# Every two of options, a kind of parameters (flat views or not) and a world size meet.
@pytest.mark.parametrize(("options", "flat_among"), [(name, (2, 4)[i % 2]) for i, name in enumerate(OPTIONS)])
@distributed(world_size=(2, 4))
def test_training_equals_training_on_the_device_bit_for_bit(options, flat_among, world_size):
    flat = world_size == flat_among
    with two_memories() as memories:
        model, twin = gpt_twins(offload_policy=POLICY, **OPTIONS[options]())
        params = flat_parameters(model) if flat else [*model.parameters()]
        expected = flat_parameters(twin) if flat else [*twin.parameters()]
        optimizer = adamw(params)
        assert train_gpt(model, optimizer, 2, clip=params) == train_gpt(twin, adamw(expected), 2, clip=expected)
        assert_equal(model, twin)
        for param in params:
            assert memories.is_on_host(param)
            for state in optimizer.state[param].values():
                assert state.dim() == 0 or memories.is_on_host(state)


@pytest.mark.parametrize("options", ["plain", "bf16"])
@distributed(world_size=1)
def test_one_rank_too_copies_its_shard(options):
    with two_memories() as memories:
        model, twin = gpt_twins(offload_policy=POLICY, **OPTIONS[options]())
        ours, theirs = [*model.parameters()], [*twin.parameters()]
        assert train_gpt(model, sgd(ours), 4, clip=ours) == train_gpt(twin, sgd(theirs), 4, clip=theirs)
        assert_equal(model, twin)
        assert memories.copies[IN] and memories.copies[OUT]


@pytest.mark.parametrize("options", ["plain", "bf16", "bf16 reduced", "hybrid"])
@distributed(world_size=4)
def test_a_step_copies_each_flat_parameter_in_once_for_each_gather_and_each_gradient_out_once(options):
    with two_memories() as memories:
        model, _ = gpt_twins(offload_policy=POLICY, **OPTIONS[options]())
        params = [*model.parameters()]
        optimizer = sgd(params)
        train_gpt(model, optimizer, 4, clip=params)  # looks for unseen writes come after uses 1, 2, 4, 8
        memories.forget_copies()
        train_gpt(model, optimizer, 1, clip=params)
        sizes = [handle.shard.nbytes for handle in _get_fsdp_handles(model)]
        root, blocks = sizes[0], sizes[1:]
        assert sorted(memories.copies[OUT]) == sorted(sizes)
        assert sorted(memories.copies[IN]) == sorted([root, *blocks, *blocks])  # blocks are resharded after forward


@pytest.mark.parametrize("unsynced", [True, False])
@pytest.mark.parametrize("options", ["plain", "bf16", "hybrid"])
@distributed(world_size=2)
def test_gradients_accumulate(options, unsynced):
    with two_memories() as memories:
        model, twin = gpt_twins(offload_policy=POLICY, **OPTIONS[options]())
        ours, theirs = [*model.parameters()], [*twin.parameters()]
        memories.forget_copies()  # what fully_shard() has copied
        how = {"microbatches": 3, "unsynced": unsynced}
        assert train_gpt(model, sgd(ours), 2, clip=ours, **how) == train_gpt(twin, sgd(theirs), 2, clip=theirs, **how)
        assert_equal(model, twin)
        sizes = [handle.shard.nbytes for handle in _get_fsdp_handles(model)]
        num_reductions = 2 * (1 if unsynced else 3)
        assert len(memories.copies[OUT]) == num_reductions * len(sizes)


@distributed(world_size=2)
def test_a_gradient_is_in_host_memory_and_the_flat_buffers_are_not():
    with two_memories() as memories:
        model, _ = gpt_twins(offload_policy=POLICY)
        gpt_loss(model, local_part(next(batches(1)))).backward()
        for handle in _get_fsdp_handles(model):
            assert memories.is_on_host(handle.shard)
            assert memories.is_on_host(handle.gradient.flat)
            assert not memories.is_on_host(handle.unsharded.memory.hidden)
            assert handle.gradient.target is None
        for param in model.parameters():
            assert memories.is_on_host(param.grad)


@distributed(world_size=2)
def test_functional_mode_computes_on_the_device():
    with two_memories() as memories:
        model, twin = gpt_twins(offload_policy=POLICY)
        batch = local_part(next(batches(1)))
        for item in (model, twin):
            with functional_mode(item):
                gpt_loss(item, batch).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert memories.is_on_host(ours.grad)
            assert same(ours.grad, theirs.grad)


@distributed(world_size=2)
def test_full_parameters_are_on_the_device_and_edits_come_back():
    with two_memories() as memories:
        model, _ = gpt_twins(offload_policy=POLICY)
        with summon_full_params(model):
            full = [*model.parameters()]
            assert not any(map(memories.is_on_host, full))
            with torch.no_grad():
                for param in full:
                    param.fill_(2.0)
        assert all((handle.shard[: handle.local_shards[0][1]] == 2.0).all() for handle in _get_fsdp_handles(model))
        assert all(map(memories.is_on_host, model.parameters()))


@distributed(world_size=2)
def test_an_unseen_write_is_found():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.mul_(2)
            return x @ self.weight

    with two_memories():
        model = fully_shard(Writes(), offload_policy=POLICY)
        with pytest.raises(RuntimeError, match="modified in place inside forward"):
            model(torch.ones(2, 4))


@pytest.mark.parametrize("tie", [False, True])
@distributed(world_size=2)
def test_checkpoints_and_tied_weights_are_as_always(tie):
    from fsdp_compose.checkpoint import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    def build(**options: Any) -> tuple[GPT, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = shard_layers(GPT(tie=tie), **options)
        return model, adamw(model.parameters())

    with two_memories() as memories:
        memories.refuses_host_collectives = False
        (model, optimizer), (twin, other) = build(offload_policy=POLICY), build()
        ours, theirs = [*model.parameters()], [*twin.parameters()]
        assert train_gpt(model, optimizer, 4, clip=ours) == train_gpt(twin, other, 4, clip=theirs)
        full = StateDictOptions(full_state_dict=True)
        ours_saved = get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)
        saved = get_model_state_dict(twin, options=full), get_optimizer_state_dict(twin, other, options=full)
        for mine, expected in zip(ours_saved, saved, strict=True):
            assert_same_state(mine, expected)
        fresh, fresh_optimizer = build(offload_policy=POLICY)
        set_model_state_dict(fresh, saved[0], options=full)
        set_optimizer_state_dict(fresh, fresh_optimizer, saved[1], options=full)
    # Past the memories: by ``to(param.device)`` torch loads state, which they do not see.
    fresh_params = [*fresh.parameters()]
    assert train_gpt(fresh, fresh_optimizer, 4, clip=fresh_params) == train_gpt(twin, other, 4, clip=theirs)
    assert_equal(fresh, twin)


@distributed(world_size=2)
def test_a_model_on_the_meta_device_is_materialised_on_the_host():
    torch.manual_seed(0)
    values = GPT().state_dict()
    with two_memories() as memories, torch.device("meta"):
        model = GPT()
        shard_layers(model, offload_policy=POLICY)
    with memories:
        model.to_empty(device="cpu")
        for name, param in model.named_parameters():
            with torch.no_grad():
                param.copy_(values[name])
        loss = gpt_loss(model, local_part(next(batches(1))))
        loss.backward()
        assert all(memories.is_on_host(handle.shard) for handle in _get_fsdp_handles(model))


@distributed(world_size=2)
def test_a_copy_of_a_model_is_offloaded_too():
    with two_memories() as memories:
        model, twin = gpt_twins(offload_policy=POLICY)
        clone = copy.deepcopy(model)
        ours, theirs = [*clone.parameters()], [*twin.parameters()]
        assert train_gpt(clone, sgd(ours), 4, clip=ours) == train_gpt(twin, sgd(theirs), 4, clip=theirs)
        assert_equal(clone, twin)
        assert all(map(memories.is_on_host, ours))


@distributed(world_size=2)
def test_a_gradient_after_an_interrupted_backward_is_right():
    with two_memories():
        model, twin = gpt_twins(offload_policy=POLICY)
        batch = local_part(next(batches(1)))
        for item in (model, twin):
            gpt_loss(item, batch).backward()
            handle = item.blocks[0].up.register_full_backward_hook(_raise)
            with pytest.raises(ZeroDivisionError):
                gpt_loss(item, batch).backward()
            handle.remove()
            item.zero_grad()
            gpt_loss(item, batch).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert same(ours.grad, theirs.grad)


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


def test_two_memories_see_what_devices_would_refuse():
    """The watch itself: a gradient left on the device, a copy too many, a collective on host memory."""
    with fake_process_group(world_size=2), two_memories() as memories:
        param = nn.Parameter(shard_storage.host_memory(4, torch.float32, False).zero_())
        left_behind = torch.ones(4)
        for mixes in (lambda: param + left_behind, lambda: torch._foreach_add_([left_behind], [param.detach()])):
            with pytest.raises(AssertionError, match="mixes host and device memory"):
                mixes()
        optimizer = torch.optim.AdamW([param], foreach=True)
        param.grad = left_behind
        with pytest.raises(AssertionError, match="mixes host and device memory"):
            optimizer.step()
        with pytest.raises(AssertionError, match="on host memory"):
            dist.all_reduce(param.detach())
        assert memories.copies == {IN: [], OUT: []}
        made = [torch.zeros_like(param), param.detach()[1:], (param * 2).view(2, 2), param.double()]
        assert all(map(memories.is_on_host, made)) and not memories.is_on_host(left_behind)
        param.detach().copy_(left_behind)
        left_behind[2:].copy_(param.detach()[2:])
        assert memories.copies == {IN: [8], OUT: [16]}


def test_torchs_own_policies_are_taken():
    with fake_process_group():
        theirs = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
        model = fully_shard(nn.Linear(4, 4), offload_policy=theirs)
        assert fully_shard.state(model).options.offload == CPUOffloadPolicy(pin_memory=False)
        nothing = fully_shard(nn.Linear(4, 4), offload_policy=torch.distributed.fsdp.OffloadPolicy())
        assert fully_shard.state(nothing).options.offload is None
        assert not any(handle.storage.is_host for handle in _get_fsdp_handles(nothing))


@pytest.mark.parametrize("given", [True, "cpu", CPUOffloadPolicy])
def test_other_things_are_refused(given):
    with fake_process_group(), pytest.raises(TypeError, match=r"offload_policy=.*expected a CPUOffloadPolicy"):
        fully_shard(nn.Linear(4, 4), offload_policy=given)


@pytest.mark.parametrize("other", [None, CPUOffloadPolicy(parameters=False)])
@distributed(world_size=2)
def test_ranks_that_differ_are_one_error(other):
    model = fully_shard(nn.Linear(4, 4), offload_policy=POLICY if dist.get_rank() else other)
    with pytest.raises(RuntimeError, match="offload_policy"):
        model(torch.ones(2, 4))


def test_memory_for_compute_is_not_made_where_shards_live():
    """On a machine with one kind of device no run shows it: each use of ``shard.device`` is listed here."""
    found = [
        (path.relative_to(ROOT / "fsdp_compose").as_posix(), line.strip())
        for path in (ROOT / "fsdp_compose").rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"shard\.device(?!\.type)", line)
    ]
    assert {path for path, _ in found} == {
        "core/state_dicts/optimizer_state.py",  # optimizer state, beside the shard
        "core/flat/collectives.py",  # a copy on the device
        "plugins/parameter_classes/unsharded_extension.py",  # refused where shards live elsewhere
        "core/flat/flat_param.py",  # the gradient, beside the shard
        "core/flat/shard_storage.py",
        "core/flat/unsharded.py",  # of shards on the device
        "inspect/describe.py",  # told
        "core/summon.py",  # a gradient, beside the shard
    }, found

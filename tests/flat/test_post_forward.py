"""``reshard_after_forward=int``: between forward and backward a few ranks hold the parameters together."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
    functional_mode,
    no_sync,
    record_collectives,
    set_reshard_after_backward,
    set_reshard_after_forward,
)
from tests.harness import distributed
from tests.models import GPT, batches, gpt_loss
from tests.training import adamw, assert_same_parameters, local_part


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=2, **options)
    return fully_shard(model, **options)


def kept(model: nn.Module) -> list[bool]:
    handles = [handle for block in model.blocks for handle in fully_shard.state(block)._handles]
    return [handle.unsharded.post_forward.is_kept for handle in handles]


@pytest.mark.parametrize("is_flat", (False, True))
@pytest.mark.parametrize("use_reentrant", (None, False, True))
@distributed(world_size=4)
def test_trains_like_full_gathers(use_reentrant, is_flat):
    torch.manual_seed(0)
    ours = GPT(use_reentrant=use_reentrant, layers=2)
    theirs = copy.deepcopy(ours)
    shard(ours)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    optimizers = [adamw(flat_parameters(model) if is_flat else model.parameters()) for model in (ours, theirs)]
    for step, batch in enumerate(batches(3)):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            if step == 1:
                with no_sync(model):
                    gpt_loss(model, local_part(batch)).backward()
            first, second = gpt_loss(model, local_part(batch)), gpt_loss(model, local_part(batch))
            (first + second).backward()
            with torch.no_grad():
                gpt_loss(model, local_part(batch))
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert kept(ours) == [False] * 2
        for (name, param), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(param.to_local(), other.to_local()), name


@distributed(world_size=4)
def test_backward_gathers_among_the_ranks_that_share_parts():
    model = shard(GPT(layers=3))
    for _ in range(2):
        lines: list[str] = []
        loss = gpt_loss(model, local_part(next(iter(batches(1)))))
        assert kept(model) == [True] * 3
        with record_collectives(model, lines.append):
            loss.backward()
        assert kept(model) == [False] * 3
        gathers = [line for line in lines if line.startswith("all-gather")]
        assert len(gathers) == 3
        assert all("among 2 ranks" in line for line in gathers), gathers
        model.zero_grad()


@distributed(world_size=4)
def test_what_stays_is_a_part_of_the_parameters():
    torch.manual_seed(0)
    model = shard(GPT(layers=2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    loss = gpt_loss(model, local_part(next(iter(batches(1)))))
    (handle,) = fully_shard.state(model.blocks[0])._handles
    assert handle.unsharded.memory.nbytes() == 0
    kept = handle.unsharded.post_forward
    assert kept._memory.untyped_storage().nbytes() == kept.nbytes == handle.layout.flat_numel // 2 * 2
    loss.backward()
    assert kept._memory.untyped_storage().nbytes() == kept.nbytes == 0


@distributed(world_size=4)
def test_parts_until_a_step():
    torch.manual_seed(0)
    ours = GPT(layers=2)
    theirs = copy.deepcopy(ours)
    shard(ours)
    set_reshard_after_backward(ours.blocks[0], 2)
    set_reshard_after_backward(ours.blocks[1], 2)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    optimizers = [adamw(model.parameters()) for model in (ours, theirs)]
    for batch in batches(3):
        for accumulated in range(2):
            lines: list[str] = []
            with record_collectives(ours, lines.append):
                gpt_loss(ours, local_part(batch)).backward()
            gathers = [line for line in lines if line.startswith("all-gather")]
            # The root's, then each block in forward and backward: the first one after a step alone is among all ranks.
            assert sum("among 2 ranks" in line for line in gathers) == (4 if accumulated else 2), gathers
            assert kept(ours) == [True] * 2
            gpt_loss(theirs, local_part(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(ours, theirs, tolerance=0)
    ours.eval()
    torch.testing.assert_close(gpt_loss(ours, local_part(batch)), gpt_loss(theirs, local_part(batch)))


@pytest.mark.parametrize("stays", (False, True))
@distributed(world_size=4)
def test_forwards_without_grad_mode_between_steps(stays):
    """They gather anew what parts are older than; and come between a forward and its backward."""
    torch.manual_seed(0)
    ours = GPT(layers=2)
    theirs = copy.deepcopy(ours)
    shard(ours)
    for block in ours.blocks:
        set_reshard_after_backward(block, 2 if stays else True)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    optimizers = [adamw(model.parameters()) for model in (ours, theirs)]
    for batch in batches(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            with torch.no_grad():
                before = gpt_loss(model, local_part(batch))
            loss = gpt_loss(model, local_part(batch))
            torch.testing.assert_close(loss.detach(), before)
            with torch.no_grad():
                gpt_loss(model, local_part(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                gpt_loss(model, local_part(batch))
        assert_same_parameters(ours, theirs, tolerance=0)


@distributed(world_size=4)
def test_a_write_between_forward_and_backward_raises():
    model = shard(GPT(layers=2))
    loss = gpt_loss(model, local_part(next(iter(batches(1)))))
    with torch.no_grad():
        next(model.blocks[0].parameters()).add_(1)
    with pytest.raises(RuntimeError, match="written|modified|changed"):
        loss.backward()
    with pytest.warns(UserWarning, match="discarded"):
        gpt_loss(model, local_part(next(iter(batches(1))))).backward()
    reference = GPT(layers=2)
    reference.load_state_dict({name: item.full_tensor() for name, item in model.state_dict().items()})
    gpt_loss(reference, next(iter(batches(1)))).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=0, atol=2e-6)


@distributed(world_size=4)
def test_writes_after_the_backward_show_in_the_next_forward():
    """With parts that stay until a step: by operations, by loading, by other means."""
    model = shard(GPT(layers=2))
    for block in model.blocks:
        set_reshard_after_backward(block, 2)
    batch = local_part(next(iter(batches(1))))
    gpt_loss(model, batch).backward()
    with torch.no_grad():
        for param in model.blocks.parameters():
            param.mul_(0.5)
    state = {name: item.full_tensor().clone() for name, item in model.state_dict().items()}
    reference = GPT(layers=2)
    reference.load_state_dict(state)
    torch.testing.assert_close(gpt_loss(model, batch), gpt_loss(reference, batch))
    with torch.no_grad():
        model.blocks[0].half().float()  # other memory, the same elements but for their last digits
    for key in state:
        state[key] = model.state_dict()[key].full_tensor()
    reference.load_state_dict(state)
    torch.testing.assert_close(gpt_loss(model, batch), gpt_loss(reference, batch))


@distributed(world_size=4)
def test_functional_mode_and_copies():
    torch.manual_seed(0)
    ours = GPT(layers=2)
    theirs = copy.deepcopy(ours)
    shard(ours)
    for batch in batches(2):
        with functional_mode(ours):
            gpt_loss(ours, local_part(batch)).backward()
        twin = copy.deepcopy(ours)
        twin.zero_grad()
        gpt_loss(twin, local_part(batch)).backward()
        theirs.zero_grad()
        gpt_loss(theirs, batch).backward()
        for a, b, c in zip(ours.parameters(), twin.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), c.grad, rtol=0, atol=2e-6)
            torch.testing.assert_close(b.grad.full_tensor(), c.grad, rtol=0, atol=2e-6)
        ours.zero_grad()


@distributed(world_size=4)
def test_with_hybrid_sharding_and_on_a_part_of_the_ranks():
    """(1, 4) has parts of two ranks; a mesh of two of the ranks has none of its own."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    ours = GPT(layers=2)
    theirs = copy.deepcopy(ours)
    shard(ours, mesh=mesh)
    for batch in batches(2):
        gpt_loss(ours, local_part(batch)).backward()
        gpt_loss(theirs, batch).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=0, atol=4e-6)


@distributed(world_size=4)
def test_one_and_all_are_flags():
    model = GPT(layers=2)
    fully_shard(model.blocks[0], reshard_after_forward=1)
    fully_shard(model.blocks[1], reshard_after_forward=4)
    assert fully_shard.state(model.blocks[0]).options.reshard_after_forward is False
    assert fully_shard.state(model.blocks[1]).options.reshard_after_forward is True


@pytest.mark.parametrize("number", (0, -2, 3, 8))
@distributed(world_size=4)
def test_numbers_that_do_not_divide_the_ranks(number):
    with pytest.raises(ValueError, match=re.escape("1, 2 or 4 of them")):
        fully_shard(nn.Linear(2, 2), reshard_after_forward=number)
    with pytest.raises(TypeError, match="a whole number"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward="node")


@distributed(world_size=4)
def test_setters():
    model = shard(GPT(layers=2))
    set_reshard_after_forward(model, False)
    set_reshard_after_forward(model.blocks[0], 2)
    with pytest.raises(ValueError, match="made with reshard_after_forward=2"):
        set_reshard_after_forward(model.blocks[0], 4)
    with pytest.raises(ValueError, match="reshard_after_forward=no number"):
        set_reshard_after_backward(model, 2)
    with pytest.raises(TypeError, match="a whole number"):
        set_reshard_after_backward(model, None)
    gpt_loss(model, local_part(next(iter(batches(1))))).backward()
    assert dist.get_world_size() == 4

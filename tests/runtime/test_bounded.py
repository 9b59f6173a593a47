"""``fully_shard(limit_unsharded_bytes=...)``: what is held for communication, and that nothing else changes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    CPUOffloadPolicy,
    MisuseError,
    MixedPrecisionPolicy,
    TransportWrapper,
    compile,
    fully_shard,
    functional_mode,
    no_sync,
    set_transport,
)
from fsdp_compose.core.group.registry import get_state
from tests.harness import distributed, fake_process_group, lasting_mesh
from tests.training import full

WIDTH, NUM_BLOCKS = 32, 4
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x).relu()


class Stack(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, 1)
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def stack(limit: int | str | None, is_checkpointed: bool = False, **options: Any) -> Stack:
    torch.manual_seed(0)
    model = Stack(is_checkpointed)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, limit_unsharded_bytes=limit, **options)


class Held(TransportWrapper):
    """Notes what the model holds for communication whenever a collective begins."""

    name = "held"

    def __init__(self, inner, note: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._note = note

    def all_gather(self, whole, shard, label):
        work = super().all_gather(whole, shard, label)
        self._note("gather")
        return work

    def reduce_scatter(self, shard, whole, is_average, label):
        self._note("reduce")
        return super().reduce_scatter(shard, whole, is_average, label)


def buffer_bytes(model: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in get_state(model).root.communicator._buffers.values())


def watched(model: nn.Module) -> list[tuple[str, int]]:
    """The kinds of collectives from now on, and the bytes that are held when each has begun."""
    seen: list[tuple[str, int]] = []

    def note(kind: str) -> None:
        root = get_state(model).root
        states = [state for state in root.live_states() if state.position.reshards_after_forward]
        sizes = [
            handle.layout.flat_numel * handle.unsharded.dtype.itemsize
            for state in states
            for handle in state._handles
            if handle.unsharded.is_allocated
        ]
        seen.append((kind, sum(sizes) + buffer_bytes(model)))

    set_transport(model, lambda transport, role: Held(transport, note))
    return seen


def step(model: nn.Module, number: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()


@pytest.mark.parametrize(
    ("limit", "blocks"), [(None, 3), ("3 groups", 3), ("2 groups", 2), (2 * BLOCK_BYTES, 2), ("1 group", 1), (1, 1)]
)
@distributed(world_size=2)
def test_what_is_held_stays_below_the_limit(limit, blocks):
    model = stack(limit)
    step(model)
    seen = watched(model)
    step(model)
    assert [kind for kind, _ in seen].count("gather") == 2 * NUM_BLOCKS + 1
    assert max(nbytes for _, nbytes in seen) == blocks * BLOCK_BYTES
    assert buffer_bytes(model) == 0, "nothing is kept after backward"


@distributed(world_size=2)
def test_reductions_in_another_dtype_count_as_they_are():
    model = stack("2 groups", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    step(model)
    seen = watched(model)
    step(model)
    # A gradient in fp32 is as large as two groups in bf16, so nothing is gathered ahead in backward.
    assert max(nbytes for _, nbytes in seen) == BLOCK_BYTES
    assert max(nbytes for kind, nbytes in seen if kind == "gather") == BLOCK_BYTES, "one is still gathered ahead"


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "kept after forward": lambda: {"reshard_after_forward": False},
    "bf16": lambda: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "hybrid": lambda: {"mesh": lasting_mesh(("r", "s"))},
    "parts": lambda: {"reshard_after_forward": 2},
    "offloaded": lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "hfsdp": lambda: {"mesh": lasting_mesh(("r", "s")), "strategy": "hfsdp"},
    "zero2": lambda: {"strategy": "zero2"},
    "ddp": lambda: {"strategy": "ddp"},
}


def trained(limit: int | str | None, setting: str, is_checkpointed: bool = False) -> list[torch.Tensor]:
    """Parameters after steps with accumulation, frozen parameters and a forward without grad mode."""
    model = stack(limit, is_checkpointed, **SETTINGS[setting]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        if number == 1:
            model.blocks[1].requires_grad_(False)
            with no_sync(model):
                step(model, 50)
        if number == 2:
            model.blocks[1].requires_grad_(True)
            with torch.no_grad():
                model(torch.ones(1, WIDTH))
        step(model, number)
        optimizer.step()
        optimizer.zero_grad()
    return [full(param).detach() for param in model.parameters()]


@functools.cache
def trained_without(setting: str, is_checkpointed: bool) -> list[torch.Tensor]:
    return trained(None, setting, is_checkpointed)


@pytest.mark.parametrize("limit", ["1 group", "2 groups"])
@pytest.mark.parametrize("setting", SETTINGS)
@distributed(world_size=4)
def test_the_bits_are_those_without_a_limit(limit, setting):
    for is_checkpointed in (False, True):
        expected = trained_without(setting, is_checkpointed)
        got = trained(limit, setting, is_checkpointed)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("limit", ["1 group", "2 groups", "3 groups"])
@distributed(world_size=2)
def test_ranks_may_accumulate_unequally(limit):
    """One rank drops what it has accumulated: its reduction goes through other memory than that of the others."""
    gradients = []
    for bound in (None, limit):
        model = stack(bound)
        step(model)
        model.zero_grad()
        for _ in range(2):
            with no_sync(model):
                step(model, 1)
            if dist.get_rank() == 0:
                model.zero_grad()
            step(model, 2)
        gradients.append([full(param.grad) for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@distributed(world_size=2)
def test_groups_mean_something_if_all_stay_gathered():
    model = stack("2 groups", reshard_after_forward=False)
    step(model)
    assert get_state(model).root.scheduler._limit == 2 * BLOCK_BYTES


@distributed(world_size=2)
def test_functional_mode_gathers_as_ever():
    gradients = []
    for limit in (None, "1 group"):
        model = stack(limit)
        for _ in range(2):
            model.zero_grad()
            with functional_mode(model):
                step(model)
        gradients.append([full(param.grad) for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@distributed(world_size=2)
def test_a_copy_has_the_limit_too():
    model = copy.deepcopy(stack("1 group"))
    step(model)
    seen = watched(model)
    step(model)
    assert max(nbytes for _, nbytes in seen) == BLOCK_BYTES


@distributed(world_size=2)
def test_an_interrupted_backward_leaves_nothing_behind():
    model = stack("2 groups")
    step(model)

    def fail(_: object) -> None:
        raise KeyboardInterrupt

    output = model.blocks[0](torch.ones(2, WIDTH, requires_grad=True))
    hook = output.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        output.sum().backward()
    hook.remove()
    model.zero_grad()
    step(model)
    expected = stack(None)
    step(expected)
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(full(got.grad), full(wanted.grad))


@pytest.mark.parametrize("limit", [0, -1, "0 groups", "two groups", "2 blocks", "", True, 1.5, [1]])
def test_a_limit_that_is_none_is_refused(limit):
    with fake_process_group(world_size=2):
        model = nn.Linear(2, 2)
        with pytest.raises((ValueError, TypeError), match=r"limit_unsharded_bytes=.*expected a (positive )?number"):
            fully_shard(model, limit_unsharded_bytes=limit)
        fully_shard(model, limit_unsharded_bytes=1)  # nothing was changed


@distributed(world_size=2)
def test_a_limit_of_an_inner_group_is_refused():
    model = Stack()
    fully_shard(model.blocks[0])
    fully_shard(model.blocks[1], limit_unsharded_bytes=100)
    fully_shard(model)
    with pytest.raises(MisuseError, match=r"blocks\.1 is not the root.*pass it with the root's call"):
        step(model)


@distributed(world_size=2)
def test_optional_groups_are_refused():
    model = Stack()
    fully_shard(model.blocks[0], optional=True)
    fully_shard(model, limit_unsharded_bytes="2 groups")
    with pytest.raises(NotImplementedError, match="optional groups"):
        step(model)


@distributed(world_size=2)
def test_ranks_with_different_limits_are_told():
    model = stack("1 group" if dist.get_rank() else "2 groups")
    with pytest.raises(RuntimeError, match=r"limit_unsharded_bytes.*(1 group.*2 groups|2 groups.*1 group)"):
        step(model)


@distributed(world_size=2)
def test_graphs_break_at_the_groups_and_whole_models_are_refused():
    with pytest.raises(MisuseError, match=r"limit_unsharded_bytes.*compile block by block"):
        compile(stack("1 group"))
    gradients = []
    for limit in (None, "1 group"):
        model = stack(limit)
        run = model
        if limit:
            run = torch.compile(model, backend="aot_eager")
            for block in model.blocks[:2]:
                block.compile(backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            run(torch.ones(2, WIDTH)).square().mean().backward()
        gradients.append([full(param.grad) for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

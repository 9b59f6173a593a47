"""``offload_checkpointed_inputs``: bits, bytes, what stays on the device, and what is not touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compose import (
    CheckpointedInputs,
    MisuseError,
    MixedPrecisionPolicy,
    fully_shard,
    offload_checkpointed_inputs,
)
from tests.harness import distributed
from tests.training import full
from tests.two_memories import IN, OUT, TwoMemories

WIDTH, ROWS, NUM_BLOCKS = 16, 4, 4
INPUT_BYTES = WIDTH * ROWS * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.linear(x).relu())


class Stack(nn.Module):
    """``call``: how the blocks are called."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.call = call

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        return x


def selective() -> Any:
    return create_selective_checkpoint_contexts(
        lambda context, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


def wrapped(offloads: bool, **options: Any) -> Stack:
    model = Stack()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, **options)
    assert not offloads or offload_checkpointed_inputs(model, min_bytes=1) == NUM_BLOCKS
    return model


def called(offloads: bool, **options: Any) -> Stack:
    inputs = CheckpointedInputs(min_bytes=1)

    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not offloads:
            return checkpoint(block, x, **options)
        with inputs:
            return checkpoint(block, x, **options)

    return Stack(call)


def compiled(offloads: bool) -> Stack:
    model = wrapped(offloads)
    for block in model.blocks:
        block._checkpoint_wrapped_module.compile(backend="aot_eager")
    return model


KINDS: dict[str, Callable[[bool], Stack]] = {
    "wrapper": wrapped,
    "reentrant wrapper": partial(wrapped, checkpoint_impl=CheckpointImpl.REENTRANT),
    "selective": partial(wrapped, context_fn=selective),
    "called": partial(called, use_reentrant=False),
    "called, reentrant": partial(called, use_reentrant=True),
    "called, with an early stop": partial(called, use_reentrant=False, early_stop=True),
    "compiled blocks": compiled,
}


def shard(model: Stack, inner: bool, **options: Any) -> Stack:
    for block in model.blocks:
        fully_shard(getattr(block, "_checkpoint_wrapped_module", block) if inner else block, **options)
    return fully_shard(model, **options)


def batch(number: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def gradients(model: Stack, steps: int = 2) -> list[torch.Tensor]:
    for number in range(steps):
        torch.manual_seed(number)  # of dropout
        model(batch(number)).square().mean().backward()
    return [full(param.grad) for param in model.parameters()]


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_bits_are_those_without(kind, inner, policy):
    results = []
    for offloads in (False, True):
        torch.manual_seed(0)
        results.append(gradients(shard(KINDS[kind](offloads), inner, mp_policy=policy)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "compiled blocks"])
@distributed(world_size=2)
def test_each_input_is_copied_once_in_either_direction(kind):
    model = shard(KINDS[kind](True), inner=False)
    with TwoMemories() as memories:
        model(batch(0)).sum().backward()
        memories.forget_copies()
        output = model(batch(0))
        assert memories.copies == {OUT: [INPUT_BYTES] * NUM_BLOCKS, IN: []}
        output.sum().backward()
        assert memories.copies == {OUT: [INPUT_BYTES] * NUM_BLOCKS, IN: [INPUT_BYTES] * NUM_BLOCKS}


@distributed(world_size=2)
def test_one_input_is_fetched_ahead_and_none_stays():
    model = shard(wrapped(True), inner=False)
    storages: list[StorageWeakRef] = []
    fetched: list[int] = []

    def look(module: nn.Module, args: Any) -> None:
        storages.append(StorageWeakRef(args[0].untyped_storage()))

    def count(module: nn.Module, args: Any) -> None:
        fetched.append(len(memories.copies[IN]))

    for block in model.blocks:
        block.register_forward_pre_hook(look)
        block._checkpoint_wrapped_module.register_forward_pre_hook(count)
    with TwoMemories() as memories:
        model(batch(0)).sum().backward()
        memories.forget_copies()
        del storages[:]
        output = model(batch(0))
        assert all(ref.expired() for ref in storages[:NUM_BLOCKS]), "forward leaves no input behind"
        del fetched[:]
        output.sum().backward()
    # When a block is recomputed, its input is there, and that of the block before is on its way.
    assert fetched == [2, 3, 4, 4]


class Encoded(nn.Module):
    """Each block also gets the output of an encoder, a mask, and a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(ROWS, WIDTH))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)])
        self.inputs = CheckpointedInputs(min_bytes=1)

    def forward(self, x, mask):
        encoded = self.encoder(x)
        x = x * 1
        for block in self.blocks:
            with self.inputs:
                x = checkpoint(
                    lambda x, e, m, b, block=block: block(x) + e * m + b, x, encoded, mask, self.bias,
                    use_reentrant=False,
                )  # fmt: skip
        return x


@distributed(world_size=2)
def test_what_several_blocks_get_is_copied_once():
    model = Encoded()
    with TwoMemories() as memories:
        model(batch(0).requires_grad_(), torch.ones(ROWS, WIDTH)).sum().backward()
    # The encoder's output with the first block; neither masks nor leaves.
    assert memories.copies[OUT] == [INPUT_BYTES] * (NUM_BLOCKS + 1)


@distributed(world_size=1)
def test_small_tensors_stay():
    model = Stack(lambda block, x: checkpoint(block, x, use_reentrant=False))
    inputs = CheckpointedInputs(min_bytes=INPUT_BYTES + 1)
    call = model.call

    def within(block, x):
        with inputs:
            return call(block, x)

    model.call = within
    with TwoMemories() as memories:
        model(batch(0)).sum().backward()
    assert memories.copies == {OUT: [], IN: []}


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.view(1, 4, 4, 4).to(memory_format=torch.channels_last),
    "sliced": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(3, -1),
    "part of another": lambda x: x[1:3],
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "empty": lambda x: x[:0],
    "one element": lambda x: x.sum().view(1, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=1)
def test_recomputation_sees_the_layout_that_forward_saw(use_reentrant, layout):
    seen: list[Any] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.shape, x.stride(), x.dtype, x.detach().clone()))
        return (x * x.abs()).abs()

    x = batch(0).requires_grad_()
    with CheckpointedInputs(min_bytes=1):
        output = checkpoint(block, LAYOUTS[layout](x * 1), use_reentrant=use_reentrant)
    output.sum().backward()
    (*first, before), (*second, after) = seen
    assert first == second and torch.equal(before, after)
    expected = batch(0).requires_grad_()
    block(LAYOUTS[layout](expected * 1)).sum().backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.parametrize("min_bytes", [1, 1 << 20])
@distributed(world_size=1)
def test_writes_after_the_checkpoint_are_not_lost(min_bytes):
    """What was copied is as it was; what stays on the device is looked at, as autograd does without hooks."""
    x = batch(0).requires_grad_()
    saved = x * 1
    with CheckpointedInputs(min_bytes=min_bytes):
        output = checkpoint(torch.square, saved, use_reentrant=False)
    with torch.no_grad():
        saved.mul_(2)
    if min_bytes > 1:
        with pytest.raises(RuntimeError, match=r"was modified by an inplace operation.*expected version 0"):
            output.sum().backward()
    else:
        output.sum().backward()
        assert torch.equal(x.grad, 2 * x.detach())


@distributed(world_size=1)
def test_a_tensor_that_was_written_between_two_blocks_is_copied_again():
    x = batch(0).requires_grad_()
    inputs = CheckpointedInputs(min_bytes=1)
    shared = x * 1
    with TwoMemories() as memories:
        with inputs:
            first = checkpoint(torch.square, shared, use_reentrant=False)
        with torch.no_grad():
            shared.mul_(3)
        with inputs:
            second = checkpoint(torch.square, shared, use_reentrant=False)
        (first.sum() + second.sum()).backward()
    assert len(memories.copies[OUT]) == 2
    assert torch.equal(x.grad, 2 * x.detach() + 6 * x.detach())


@distributed(world_size=1)
def test_several_forwards_before_backwards_and_two_backwards_of_one():
    results = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = wrapped(offloads)
        losses = [model(batch(number)).square().mean() for number in range(3)]
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        losses[2].backward()
        results.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@distributed(world_size=1)
def test_an_exception_in_a_block_leaves_no_hooks_behind(error):
    model = wrapped(True)

    def fail(*_: object) -> None:
        raise error

    hook = model.blocks[2]._checkpoint_wrapped_module.register_forward_pre_hook(fail)
    with TwoMemories() as memories:
        with pytest.raises(error):
            model(batch(0))
        hook.remove()
        memories.forget_copies()
        nn.Linear(WIDTH, WIDTH)(batch(0).requires_grad_() * 1).sum().backward()
        assert memories.copies == {OUT: [], IN: []}
        model(batch(0)).sum().backward()
        assert len(memories.copies[OUT]) == NUM_BLOCKS


@distributed(world_size=1)
def test_without_gradients_nothing_is_copied():
    model = wrapped(True)
    with TwoMemories() as memories, torch.no_grad():
        model(batch(0))
    assert memories.copies == {OUT: [], IN: []}


@distributed(world_size=1)
def test_a_second_call_replaces_the_first_and_a_copy_has_its_own():
    with TwoMemories() as memories:
        model = wrapped(True)
        model(batch(0)).sum().backward()
        assert offload_checkpointed_inputs(model, min_bytes=1) == NUM_BLOCKS
        for one in (model, copy.deepcopy(model)):
            memories.forget_copies()
            one(batch(0)).sum().backward()
            assert len(memories.copies[OUT]) == len(memories.copies[IN]) == NUM_BLOCKS


@distributed(world_size=1)
def test_sizes_may_vary():
    """There is never more host memory than was needed at a time."""
    inputs = CheckpointedInputs(min_bytes=1)
    for rows in (2, 9, 4, 7, 3, 12, 5):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        y = x * 1
        for _ in range(NUM_BLOCKS):
            with inputs:
                y = checkpoint(torch.sin, y, use_reentrant=False)
        y.sum().backward()
        expected = x.detach().clone().requires_grad_()
        z = expected * 1
        for _ in range(NUM_BLOCKS):
            z = torch.sin(z)
        z.sum().backward()
        assert torch.equal(x.grad, expected.grad)
        (streams,) = inputs._streams.values()
        assert len(streams._free) == NUM_BLOCKS


@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=1)
def test_a_checkpoint_inside_another_keeps_nothing_of_its_own(use_reentrant):
    results = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = Stack()
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        outer = checkpoint_wrapper(
            nn.Sequential(*model.blocks),
            checkpoint_impl=CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT,
        )
        if offloads:
            assert offload_checkpointed_inputs(outer, min_bytes=1) == NUM_BLOCKS + 1
        inner: list[StorageWeakRef] = []
        for block in [*model.blocks][1:]:
            block.register_forward_pre_hook(
                lambda _, args, inner=inner: inner.append(StorageWeakRef(args[0].untyped_storage()))
            )
        with TwoMemories() as memories:
            torch.manual_seed(1)
            output = outer(model.first(batch(0)))
            assert len(inner) == NUM_BLOCKS - 1 and all(ref.expired() for ref in inner)
            assert len(memories.copies[OUT]) == offloads
            output.square().sum().backward()
        results.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_models_without_checkpointed_blocks_are_refused():
    with pytest.raises(MisuseError, match=r"no block below this Stack is checkpointed.*CheckpointedInputs\(\)"):
        offload_checkpointed_inputs(Stack())
    with pytest.raises(TypeError, match="expected an nn.Module, got list"):
        offload_checkpointed_inputs([Stack()])

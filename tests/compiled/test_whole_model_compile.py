"""``torch.compile`` of a whole sharded model: one graph each way, with the collectives of its blocks in it. The numbers
are those of an eager twin, bit for bit with aot_eager, whatever is done around the compiled forward."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import multiprocessing
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp_compose
from fsdp_compose import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
    functional_mode,
    no_sync,
    register_forward_method,
    replicate,
    set_gradient_divide_factor,
    set_requires_all_reduce,
)
from fsdp_compose.checkpoint import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from tests import harness
from tests.internals import full_gradients, full_parameters
from tests.models import shard_layers
from tests.training import (
    adamw,
    assert_parameters_match,
    local_part,
    mean_over_ranks,
    mean_square_in_float,
    pair,
    raise_by_the_user,
    without_all_reduce,
)

distributed = functools.partial(harness.distributed, timeout=150)  # seconds; the first compilation on a cold machine

DIM, ROWS, STEPS = 8, 12, 3


class Block(nn.Module):
    """``spare``: a parameter that no forward uses."""

    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 11), nn.Linear(11, DIM)
        if spare:
            self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """``inside``, ``outside``: kinds of activation checkpointing (``use_reentrant``), of blocks, in forward."""

    def __init__(self, blocks: int = 2, spare: bool = False, tie: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, DIM), nn.Linear(DIM, 3)
        self.blocks = nn.ModuleList(Block(spare) for _ in range(blocks))
        self.use_reentrant: bool | None = None
        if tie:
            self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)

    def loss_and_size(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def batches(steps: int = STEPS, rows: int = ROWS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(rows, 3, generator=generator) for _ in range(steps)]


def step_of(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    loss = mean_square_in_float(model, local_part(batch))
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach(), norm]


def step_and_look(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """A step of training, and an evaluation, which is another graph."""
    found = step_of(model, batch, optimizer)
    with torch.no_grad():
        return [*found, mean_square_in_float(model, local_part(batch))]


Train = Callable[[nn.Module], list[torch.Tensor]]


def train(model: nn.Module, step: Callable[..., list[torch.Tensor]] = step_of) -> list[torch.Tensor]:
    optimizer = adamw([param for param in model.parameters() if param.requires_grad])
    return [value for batch in batches() for value in step(model, batch, optimizer)]


class Captured:
    """The graphs of aot_eager, with the collectives that each has."""

    def __init__(self) -> None:
        self.forwards: list[str] = []
        self.backwards: list[str] = []
        self.breaks: Counter[str] = Counter()

    @property
    def backend(self) -> Any:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        def note(notes: list[str]) -> Any:
            def compiler(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
                notes.append(collectives(graph))
                return make_boxed_func(graph.forward)

            return compiler

        return aot_autograd(
            fw_compiler=note(self.forwards),
            bw_compiler=note(self.backwards),
            partition_fn=min_cut_rematerialization_partition,
        )


_SHORT = {
    "all_gather": "AG",
    "all_gather_into_tensor": "AG",
    "reduce_scatter": "RS",
    "reduce_scatter_tensor": "RS",
    "all_reduce": "AR",
}


def collectives(graph: torch.fx.GraphModule) -> str:
    """The collectives of a graph in their order, and ``m`` for the arithmetic between them."""
    found: list[str] = []
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        kind = _SHORT.get(name) or ("m" if name in ("addmm", "mm") else None)
        if kind and not (kind == "m" and found[-1:] == ["m"]):
            found.append(kind)
    return " ".join(found)


@contextlib.contextmanager
def compiled(model: nn.Module, **options: Any) -> Iterator[Captured]:
    """``model.compile(fullgraph=True)`` for a time; what it has captured."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    captured = Captured()
    options.setdefault("fullgraph", True)
    options.setdefault("backend", captured.backend)
    model.compile(**options)
    yield captured
    captured.breaks = Counter(counters["graph_break"])
    model._compiled_call_impl = None
    torch._dynamo.reset()


def check_twin(
    model: Stack,
    shard_it: Callable[[Stack], Any] = shard_layers,
    train_it: Callable[..., list[torch.Tensor]] = train,
    tolerance: float = 0.0,
    **options: Any,
) -> Captured:
    """Trains a compiled model and an eager twin: the same numbers, one forward and one backward graph."""
    eager = copy.deepcopy(model)
    identities = None
    for item in (model, eager):
        shard_it(item)
    identities = [*map(id, model.parameters())]
    expected = train_it(eager)
    with compiled(model, **options) as captured:
        found = train_it(model)
    assert not captured.breaks, captured.breaks
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    ours, theirs = full_parameters(model), full_parameters(eager)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance, msg=name)
    for (name, param), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
    assert [*map(id, model.parameters())] == identities
    return captured


def stack(**options: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(**options)


@pytest.mark.parametrize(
    ("reshard_after_forward", "forward", "backward"),
    [
        (True, "m AG m AG m", "m AG m RS AG m RS m"),
        (None, "m AG m AG m", "m AG m RS AG m RS m"),
        (False, "m AG m AG m", "m RS m RS m"),
    ],
)
@distributed(world_size=(2, 4))
def test_one_graph_each_way_with_one_gather_and_one_reduction_of_each_block(reshard_after_forward, forward, backward):
    train_it = functools.partial(train, step=step_and_look)
    captured = check_twin(
        stack(), functools.partial(shard_layers, reshard_after_forward=reshard_after_forward), train_it
    )
    assert captured.forwards == [forward, forward]  # the second is of the evaluation
    assert captured.backwards == [backward]


@distributed(world_size=1)
def test_one_rank_needs_no_collective():
    """The graph computes with the shards themselves, also where steps had written to them before it was captured."""

    def train_it(model: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        return train(model)

    captured = check_twin(stack(), train_it=train_it)
    assert captured.forwards == ["m"] and captured.backwards == ["m"]


@distributed(world_size=2)
def test_numbers_are_those_of_unsharded_training():
    model, reference = pair(stack())
    shard_layers(model)
    with compiled(model):
        found = [mean_over_ranks(value) for value in train(model)[::2]]
    optimizer, expected = adamw(reference.parameters()), []
    for batch in batches():
        loss = mean_square_in_float(reference, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert_parameters_match(model, reference, 1e-6)


@distributed(world_size=2)
def test_inductor():
    check_twin(stack(), tolerance=1e-6, backend="inductor")


@distributed(world_size=2)
def test_compiled_before_sharding_and_by_torch_compile():
    model = stack()
    eager = shard_layers(copy.deepcopy(model))
    torch._dynamo.reset()
    captured = Captured()
    whole = torch.compile(model, fullgraph=True, backend=captured.backend)
    shard_layers(model)
    for ours, theirs in zip(train(whole), train(eager), strict=True):
        assert torch.equal(ours, theirs)
    assert captured.backwards == ["m AG m RS AG m RS m"]
    torch._dynamo.reset()


# ---- options of the model and of its sharding


@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=2)
def test_activation_checkpointing_of_blocks(use_reentrant):
    model = stack()
    model.use_reentrant = use_reentrant
    captured = check_twin(model)
    assert captured.backwards == ["m AG m RS AG m RS m"]


POLICIES = {
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16 throughout": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype=torch.bfloat16),
    "fp16": MixedPrecisionPolicy(torch.float16, torch.float16),
}


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=4)
def test_mixed_precision(policy):
    captured = check_twin(stack(), functools.partial(shard_layers, mp_policy=POLICIES[policy]))
    assert captured.backwards == ["m AG m RS AG m RS m"]


@distributed(world_size=2)
def test_divide_factors_and_a_gradient_scaler():
    def shard_it(model: Stack) -> None:
        shard_layers(model, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
        set_gradient_divide_factor(model, 3.0)

    def train_it(model: nn.Module) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)

        def step(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
            scaler.scale(mean_square_in_float(model, local_part(batch))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return [torch.tensor(scaler.get_scale())]

        return train(model, step)

    check_twin(stack(), shard_it, train_it)


@distributed(world_size=2)
def test_unused_parameters_have_no_gradient():
    """Their gradient is None, not zeros, which AdamW would decay."""
    model = stack(spare=True)
    captured = check_twin(model)
    assert captured.backwards == ["m AG m RS AG m RS m"]
    assert torch.equal(full_parameters(model)["blocks.0.spare"], torch.ones(3))


class Branches(Block):
    """Two ways through it, with parameters of their own."""

    def forward(self, x: torch.Tensor, long: bool = True) -> torch.Tensor:
        return super().forward(x) if long else x + self.norm(x)


class Twice(Stack):
    """Calls a block two times; ``first`` and ``second``: by which way."""

    first, second = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(x))
        return self.head(self.blocks[1](self.blocks[1](x, self.first), self.second))


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True), (False, False)])
@distributed(world_size=2)
def test_a_module_called_twice_one_time_without_some_parameters(order):
    torch.manual_seed(0)
    model = Twice()
    model.blocks[1] = Branches()
    model.first, model.second = order
    check_twin(model, tolerance=1e-6)  # an ulp or two: compiled kernels may round differently


@distributed(world_size=2)
def test_frozen_parameters_and_freezing_later():
    def shard_it(model: Stack) -> None:
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.requires_grad_(False)
        shard_layers(model)

    def train_it(model: nn.Module) -> list[torch.Tensor]:
        found = train(model)
        model.blocks[1].down.requires_grad_(False)  # of what had trained so far
        found += train(model)
        model.blocks[0].requires_grad_(True)
        return found + train(model)

    check_twin(stack(), shard_it, train_it)


@pytest.mark.parametrize("way", ["sync", "keeps gradients", "accumulates", "replicas later", "flat views", "resharded"])
@distributed(world_size=4)
def test_frozen_and_thawed_between_forward_and_backward(way):
    """What the graph has computed for a parameter that was frozen since is in no gradient, no norm and no step."""

    def shard_it(model: Stack) -> None:
        mesh = None
        if way == "replicas later":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        shard_layers(model, mesh=mesh, reshard_after_forward=True if way == "resharded" else None)

    def train_it(model: Stack) -> list[torch.Tensor]:
        optimizer = adamw(flat_parameters(model) if way == "flat views" else model.parameters())
        toggled = [model.blocks[0].up.weight, model.head.bias, model.blocks[1].norm.bias]
        if way == "flat views":  # one is frozen as a whole
            toggled = [*model.blocks[0].parameters()]
        found = []
        for number, batch in enumerate(batches(6)):
            waits = number % 2 == 0
            loss = mean_square_in_float(model, local_part(batch))
            for param in toggled:
                param.requires_grad_(not param.requires_grad)
            with no_sync(model) if way == "accumulates" and waits else contextlib.nullcontext():
                if way == "replicas later":
                    set_requires_all_reduce(model, not waits)
                loss.backward()
            found.append(loss.detach())
            if way in ("accumulates", "replicas later") and waits:
                continue
            found.append(clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            if way != "keeps gradients":
                optimizer.zero_grad()
        return found

    # What is accumulated is added up in another order.
    check_twin(stack(), shard_it, train_it, tolerance=1e-6 if way in ("accumulates", "replicas later") else 0.0)


@distributed(world_size=2)
def test_a_group_of_several_modules_gathers_once():
    def shard_it(model: Stack) -> None:
        fully_shard([*model.blocks], reshard_after_forward=True)
        fully_shard(model)

    captured = check_twin(stack(), shard_it)
    assert captured.forwards == ["m AG m"] and captured.backwards == ["m AG m RS m"]


@distributed(world_size=2)
def test_tied_parameters():
    check_twin(stack(tie=True))


@distributed(world_size=4)
def test_hybrid_sharding():
    def shard_it(model: Stack) -> None:
        shard_layers(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))

    captured = check_twin(stack(), shard_it)
    assert captured.backwards == ["m AG m RS AR AG m RS AR m"]


@distributed(world_size=2)
def test_replicated_blocks():
    def shard_it(model: Stack) -> None:
        replicate(model.blocks[0])
        fully_shard(model.blocks[1])
        fully_shard(model)

    captured = check_twin(stack(), shard_it)
    assert captured.backwards == ["m AG m RS m AR m"]


# ---- what is done around a forward


def accumulating(without_sync: Callable[[nn.Module], Any]) -> Callable[..., list[torch.Tensor]]:
    def step(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        first, second, third = local_part(batch).chunk(3)
        with without_sync(model):
            mean_square_in_float(model, first).backward()
            mean_square_in_float(model, second).backward()
        loss = mean_square_in_float(model, third)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    return step


@pytest.mark.parametrize("how", [no_sync, contextlib.nullcontext])
@distributed(world_size=2)
def test_accumulation(how):
    train_it = functools.partial(train, step=accumulating(how))
    captured = check_twin(stack(spare=True), train_it=train_it, tolerance=1e-6)
    kinds = {backward.count("RS") for backward in captured.backwards}
    assert kinds == ({0, 2} if how is no_sync else {2})  # without sync no reduction is in the graph


@pytest.mark.parametrize("where", ["backward outside", "one backward", "sync first"])
@distributed(world_size=2)
def test_forwards_without_sync_and_backwards_with_it(where):
    """What is captured depends on the moment of the forward; what becomes of it, on that of the backward, as ever."""

    def step(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        first, second = local_part(batch).chunk(2)
        if where == "sync first":
            one = mean_square_in_float(model, first)
            with no_sync(model):
                two = mean_square_in_float(model, second)
        else:
            with no_sync(model):
                one = mean_square_in_float(model, first)
            two = mean_square_in_float(model, second) if where == "one backward" else None
        (one if two is None else one + two).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [one.detach()]

    check_twin(stack(spare=True), train_it=functools.partial(train, step=step), tolerance=1e-6)


@distributed(world_size=2)
def test_parameters_that_are_moved_before_a_backward_are_noticed():
    model = shard_layers(stack())
    batch = local_part(batches(1)[0])
    with compiled(model):
        loss = mean_square_in_float(model, batch)
        model.to(torch.float64).to(torch.float32)
        later = mean_square_in_float(model, batch)
        with pytest.raises(RuntimeError, match="moved|modified"):
            (loss + later).backward()


@distributed(world_size=4)
def test_accumulation_without_the_average_over_replicas():
    def shard_it(model: Stack) -> None:
        shard_layers(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))

    train_it = functools.partial(train, step=accumulating(without_all_reduce))
    captured = check_twin(stack(), shard_it, train_it, tolerance=1e-6)
    assert {(item.count("RS"), item.count("AR")) for item in captured.backwards} == {(2, 0), (2, 2)}


@distributed(world_size=2)
def test_an_eager_accumulation_and_a_compiled_backward():
    """The first microbatch runs eagerly without sync, the second is compiled: both are in the gradient."""
    model, eager = stack(), stack()
    first, second = local_part(batches(1)[0]).chunk(2)
    for item in (model, eager):
        shard_layers(item)
        with no_sync(item):
            mean_square_in_float(item, first).backward()
    mean_square_in_float(eager, second).backward()
    with compiled(model):
        mean_square_in_float(model, second).backward()
    ours, theirs = full_gradients(model), full_gradients(eager)
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("local", [False, True])
@distributed(world_size=2)
def test_flat_optimizers(local):
    def train_it(model: nn.Module) -> list[torch.Tensor]:
        optimizer = adamw(flat_parameters(model, local=local))
        found = []
        for batch in batches():
            loss = mean_square_in_float(model, local_part(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    check_twin(stack(), train_it=train_it)


@distributed(world_size=2)
def test_two_forwards_before_a_backward_and_alternation_with_eager_steps():
    def train_it(model: nn.Module) -> list[torch.Tensor]:
        optimizer, found = adamw(model.parameters()), []
        impl = model._compiled_call_impl
        for number, batch in enumerate(batches(4)):
            model._compiled_call_impl = None if number % 2 else impl
            first, second = local_part(batch).chunk(2)
            loss = mean_square_in_float(model, first) + mean_square_in_float(model, second)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        model._compiled_call_impl = impl
        return found

    check_twin(stack(), train_it=train_it, tolerance=1e-6)


@distributed(world_size=2)
def test_an_eager_and_a_compiled_forward_in_one_backward():
    def train_it(model: nn.Module) -> list[torch.Tensor]:
        optimizer, found, impl = adamw(model.parameters()), [], model._compiled_call_impl
        for batch in batches():
            first, second = local_part(batch).chunk(2)
            loss = mean_square_in_float(model, first)
            model._compiled_call_impl = None
            loss = loss + mean_square_in_float(model, second)
            model._compiled_call_impl = impl
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    check_twin(stack(), train_it=train_it, tolerance=1e-6)


@distributed(world_size=2)
def test_several_shapes_recompile_at_most_once():
    def train_it(model: nn.Module) -> list[torch.Tensor]:
        optimizer, found = adamw(model.parameters()), []
        for rows in (12, 8, 20, 16, 4):
            loss = mean_square_in_float(model, local_part(batches(1, rows)[0]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    captured = check_twin(stack(), train_it=train_it)
    assert len(captured.forwards) == 2


@distributed(world_size=2)
def test_gradient_hooks_of_parameters():
    def train_it(model: nn.Module) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        for name, param in model.named_parameters():
            if name.endswith("up.weight"):
                param.register_hook(lambda grad: grad * 2)
                param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.full_tensor()))
        return train(model) + seen

    check_twin(stack(), train_it=train_it)


@distributed(world_size=2)
def test_copies_and_moves():
    def train_it(model: nn.Module) -> list[torch.Tensor]:
        found = train(model)
        model.to(torch.float64)
        model.to(torch.float32)  # other memory: graphs read the new one
        found += train(model)
        twin = copy.deepcopy(model)
        return found + train(twin) + train(model)

    check_twin(stack(), train_it=train_it)


@distributed(world_size=2)
def test_state_dicts_between_compiled_steps():
    """What a compiled model has trained goes into an eager one, and back, with its optimizer's state."""
    model, eager = shard_layers(stack()), shard_layers(stack())
    first, second = adamw(model.parameters()), adamw(eager.parameters())
    with compiled(model):
        step_of(model, batches()[0], first)
        for source, target in (((model, first), (eager, second)), ((eager, second), (model, first))):
            set_state_dict(
                *target,
                model_state_dict=get_model_state_dict(source[0]),
                optim_state_dict=get_optimizer_state_dict(*source),
            )
            ours, theirs = step_of(model, batches()[1], first), step_of(eager, batches()[1], second)
            assert torch.equal(ours[0], theirs[0])
    params, others = full_parameters(model), full_parameters(eager)
    assert all(torch.equal(params[name], others[name]) for name in others)


@distributed(world_size=2)
def test_recovery_after_an_exception():
    def train_it(model: nn.Module) -> list[torch.Tensor]:
        found = train(model)
        x = local_part(batches(1)[0]).requires_grad_()
        x.register_hook(raise_by_the_user)  # when all groups have run
        with pytest.raises(ValueError, match="by the user"):
            mean_square_in_float(model, x).backward()
        return found + train(model)

    with pytest.warns(UserWarning, match="were discarded"):
        check_twin(stack(), train_it=train_it)


@distributed(world_size=2)
def test_methods_other_than_forward():
    def shard_it(model: Stack) -> None:
        shard_layers(model)
        for block in model.blocks:
            block.tail = functools.partial(Block.forward, block)

    def tail(self: Block, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    class Other(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block.tail(x)
            return self.head(x)

    Block.tail = tail  # type: ignore[attr-defined]

    def shard_others(model: Stack) -> None:
        shard_layers(model)
        for block in model.blocks:
            register_forward_method(block, "tail")

    torch.manual_seed(0)
    captured = check_twin(Other(), shard_others)
    assert captured.backwards == ["m AG m RS AG m RS m"]


@distributed(world_size=2)
def test_backward_with_inputs():
    model, eager = shard_layers(stack()), shard_layers(stack())
    batch = local_part(batches(1)[0])
    mean_square_in_float(eager, batch).backward(inputs=[*eager.parameters()])
    with compiled(model):
        mean_square_in_float(model, batch).backward(inputs=[*model.parameters()])
    ours, theirs = full_gradients(model), full_gradients(eager)
    for name, grad in theirs.items():
        assert torch.equal(ours[name], grad), name


# ---- refused, by name


@distributed(world_size=2)
def test_gradients_of_sharded_parameters_and_double_backward_are_refused():
    model = shard_layers(stack())
    batch = local_part(batches(1)[0])
    with compiled(model):
        for params in (model.blocks[0].parameters(), model.parameters()):
            with pytest.raises(RuntimeError, match="functional_mode"):
                torch.autograd.grad(mean_square_in_float(model, batch), [*params], allow_unused=True)
        with pytest.raises(RuntimeError, match="functional_mode"):
            mean_square_in_float(model, batch).backward(create_graph=True)
        model.zero_grad()
        found = train(model)
    eager = shard_layers(stack())
    for ours, theirs in zip(found, train(eager), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_a_step_between_forward_and_backward_is_noticed(reshard_after_forward):
    model = shard_layers(stack(), reshard_after_forward=reshard_after_forward)
    optimizer = adamw(model.blocks.parameters())
    batch = local_part(batches(1)[0])
    with compiled(model):
        mean_square_in_float(model, batch).backward()
        loss = mean_square_in_float(model, batch)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


def write_in_place(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(0.5)


def write_to_data(param: nn.Parameter) -> None:
    param.data.mul_(0.5)


IN_PLACE = "_GatheredParameters is a view .* modified inplace"  # autograd says so first
IN_DATA = "writes to one of its own parameters, among .*up.bias"


class Writer(Block):
    def __init__(self, write: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.up.bias)
        return super().forward(x)


class Scaled(Block):
    """With parameters of which one rank has all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.factor = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale * self.factor


class ParentWriter(Stack):
    write = staticmethod(write_in_place)

    def __init__(self, written: str) -> None:
        super().__init__()
        self.blocks[1], self.written = Scaled(), written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(x))
        self.write(self.blocks[1].get_parameter(self.written))
        return self.head(self.blocks[1](x))


@pytest.mark.parametrize("written", ["up.weight", "scale", "factor"])
@pytest.mark.parametrize("write", [write_in_place, write_to_data])
@distributed(world_size=2)
def test_writes_to_parameters_inside_a_compiled_forward_are_refused(write, written):
    """To gathered ones, by their module: they would be lost. To sharded ones, by the parent: the graph may have read
    them before; also in evaluation."""
    own = stack()
    own.blocks[1] = Writer(write)
    shard_layers(own)
    with compiled(own), pytest.raises(RuntimeError, match=IN_PLACE if write is write_in_place else IN_DATA):
        mean_square_in_float(own, batches(1)[0])
    torch.manual_seed(0)
    parent = ParentWriter(written)
    parent.write = write
    shard_layers(parent)
    with compiled(parent):
        for context in (torch.no_grad(), contextlib.nullcontext()):
            with context, pytest.raises(RuntimeError, match="written to sharded parameters of the .* group blocks.1"):
                mean_square_in_float(parent, batches(1)[0])


@torch.compiler.nested_compile_region
def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


class Nested(Stack):
    """Equal blocks are compiled once: each is called in a nested region, with its hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = call(block, x)
        return self.head(x)


@pytest.mark.parametrize(("backend", "tolerance"), [("aot_eager", 0.0), ("inductor", 1e-6)])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_blocks_in_nested_regions_train_as_eager_ones(backend, tolerance, reshard_after_forward):
    torch.manual_seed(0)
    shard_it = functools.partial(shard_layers, reshard_after_forward=reshard_after_forward)
    check_twin(Nested(blocks=3), shard_it, tolerance=tolerance, backend=backend)


@distributed(world_size=2)
def test_ranks_whose_graphs_differ_raise_alike():
    """... before they run; and where the graphs are the same again, training goes on."""

    class Choosy(Stack):
        skips = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks[1:] if self.skips else self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Choosy()
    eager = shard_layers(copy.deepcopy(model))
    shard_layers(model)
    with compiled(model):
        model.skips = dist.get_rank() == 1
        with pytest.raises(RuntimeError, match="(?s)captured graphs with different collectives.*blocks.0 .*blocks.1 "):
            mean_square_in_float(model, batches(1)[0])
        model.skips = False
        with pytest.warns(UserWarning, match="were discarded"):
            found = train(model)
    for ours, theirs in zip(found, train(eager), strict=True):
        assert torch.equal(ours, theirs)


@distributed(world_size=2)
def test_a_part_of_a_group_of_several_modules_is_refused():
    class Partial(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[0](self.embed(x)))

    model = Partial()
    fully_shard([*model.blocks])
    fully_shard(model)
    with compiled(model), pytest.raises(RuntimeError, match="only some of the modules of the fully_shard group"):
        mean_square_in_float(model, batches(1)[0])


# ---- everything in the graph: fsdp_compose.compile()


def check_region(model: Stack, **options: Any) -> Captured:
    eager = copy.deepcopy(model)
    shard_layers(eager, **options)
    shard_layers(model, **options)
    torch._dynamo.reset()
    captured = Captured()
    run = fsdp_compose.compile(model, fullgraph=True, backend=captured.backend)

    def step(_model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        loss = run(local_part(batch)).square().mean()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return [loss.detach(), norm, mean_square_in_float(run, local_part(batch))]

    found, expected = train(model, step), train(eager, step_and_look)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = full_parameters(model), full_parameters(eager)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    torch._dynamo.reset()
    return captured


@pytest.mark.parametrize(
    ("reshard_after_forward", "backward"),
    [(None, "m AG m RS AG m RS m RS"), (False, "m RS m RS m RS"), (True, "m AG m AG m RS AG m RS m RS")],
)
@distributed(world_size=2)
def test_the_root_in_the_graph_too(reshard_after_forward, backward):
    captured = check_region(stack(), reshard_after_forward=reshard_after_forward)
    assert captured.forwards == ["AG m AG m AG m"] * 2 and captured.backwards == [backward]


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@distributed(world_size=2)
def test_a_step_between_a_region_and_its_backward_is_noticed(reshard_after_forward):
    model = shard_layers(stack(), reshard_after_forward=reshard_after_forward)
    optimizer = adamw(model.parameters())
    batch = local_part(batches(1)[0])
    torch._dynamo.reset()
    run = fsdp_compose.compile(model, fullgraph=True, backend="aot_eager")
    run(batch).square().mean().backward()
    loss = run(batch).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    torch._dynamo.reset()


@distributed(world_size=2)
def test_moved_parameters_between_calls_of_a_region():
    model, eager = shard_layers(stack()), shard_layers(stack())
    torch._dynamo.reset()
    run = fsdp_compose.compile(model, fullgraph=True, backend="aot_eager")
    for function, item in ((run, model), (eager, eager)):
        for batch in batches():
            item.zero_grad()
            function(local_part(batch)).square().mean().backward()
            item.to(torch.float64).to(torch.float32)
    ours, theirs = full_gradients(model), full_gradients(eager)
    assert all(torch.equal(ours[name], grad) for name, grad in theirs.items())
    torch._dynamo.reset()


@distributed(world_size=2)
def test_a_whole_step_as_a_region():
    """Forward and loss are in a graph; backward and the optimizer break it."""
    model, eager = shard_layers(stack()), shard_layers(stack())
    torch._dynamo.reset()
    captured = Captured()
    optimizers = [adamw(model.parameters()), adamw(eager.parameters())]

    def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = fsdp_compose.compile(functools.partial(step_with, model, optimizers[0]), model, backend=captured.backend)
    for batch in batches(4):
        ours, theirs = run(local_part(batch)), step_with(eager, optimizers[1], local_part(batch))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert captured.forwards[0] == "AG m AG m AG m"
    torch._dynamo.reset()


@distributed(world_size=2)
def test_a_region_recovers_from_an_exception():
    model, eager = shard_layers(stack()), shard_layers(stack())
    torch._dynamo.reset()
    run = fsdp_compose.compile(model, backend="aot_eager")
    batch = local_part(batches(1)[0])
    with pytest.raises(RuntimeError):
        run(batch[:, :2])  # of another shape than the model wants
    with pytest.warns(UserWarning, match="were discarded"):
        run(batch).square().mean().backward()
    mean_square_in_float(eager, batch).backward()
    ours, theirs = full_gradients(model), full_gradients(eager)
    assert all(torch.equal(ours[name], grad) for name, grad in theirs.items())
    torch._dynamo.reset()


def test_what_compile_refuses():
    with pytest.raises(ValueError, match="was not called on this Stack"):
        fsdp_compose.compile(stack())
    with pytest.raises(ValueError, match="pass the sharded models"):
        fsdp_compose.compile(lambda x: x)


@pytest.mark.parametrize("is_compiled", [False, True])
@distributed(world_size=2)
def test_compiled_autograd_is_refused(is_compiled):
    """By an error at once; then a backward without it trains."""
    from torch._dynamo import compiled_autograd

    model, eager = shard_layers(stack()), shard_layers(stack())
    batch = local_part(batches(1)[0])
    with compiled(model) if is_compiled else contextlib.nullcontext():
        loss = mean_square_in_float(model, batch)
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(RuntimeError, match="runs under compiled autograd"),
        ):
            loss.backward()
        mean_square_in_float(model, batch).backward()
    mean_square_in_float(eager, batch).backward()
    ours, theirs = full_gradients(model), full_gradients(eager)
    assert all(torch.equal(ours[name], grad) for name, grad in theirs.items())


@distributed(world_size=2)
def test_functional_mode_runs_as_before():
    """It is not captured: the graph breaks at its groups."""
    model, eager = shard_layers(stack()), shard_layers(stack())
    batch = local_part(batches(1)[0])
    with compiled(model, fullgraph=False), functional_mode(model), functional_mode(eager):
        ours = torch.autograd.grad(mean_square_in_float(model, batch), [*model.parameters()])
        theirs = torch.autograd.grad(mean_square_in_float(eager, batch), [*eager.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


# ---- caches on disk


def test_numbers_of_captured_flat_parameters_tell_what_graphs_do():
    """torch's caches on disk find a graph with gathers by these numbers: a count would give another process's graph."""
    from fsdp_compose.plugins.graphs.captured_shards import GatherPlan, GradientForm, plan_id

    fp32 = torch.float32
    one = GatherPlan(
        "0", None, 2, fp32, fp32, fp32, fp32, (4, 2), ((0, (2, 2)),), (True,), GradientForm.REDUCED, 1.0, True, True
    )
    others = [dataclasses.replace(one, before=3.0), dataclasses.replace(one, reduce_dtype=torch.bfloat16)]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as processes:  # each numbers its first one
        numbers = [processes.apply(plan_id, (flat,)) for flat in (one, *others, one)]
    assert numbers[0] == numbers[3] and len(set(numbers)) == 3


_CALL = re.compile(r"(?:torch\.ops\.\w+|extern_kernels)\.(\w+?)(?:\.default)?\(")
_CALLS = {
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "wait_tensor": "wait",
    "flatten": "flatten",
    "mm": "m",
    "addmm": "m",
}


def inductor_calls(code: str) -> str:
    """What Inductor's code calls, in its order: as ``collectives``, and where it waits and flattens gradients."""
    found: list[str] = []
    for line in code.splitlines():
        call = _CALL.search(line)
        kind = _CALLS.get(call.group(1)) if call else None
        if kind and not (kind == "m" and found[-1:] == ["m"]):
            found.append(kind)
    return " ".join(found)


@distributed(world_size=2)
def test_what_the_code_of_inductor_calls():
    """The reduction of a group starts before the gradients of the next one are flattened, and at most two flat
    gradients exist at a time, as in an eager backward: more would take more memory than that does."""
    from torch._inductor.utils import run_and_get_code

    calls = {}
    for reshards in (True, False):
        model, batch = shard_layers(stack(), reshard_after_forward=reshards), local_part(batches(1)[0])
        with compiled(model, backend="inductor"):
            _, codes = run_and_get_code(lambda: mean_square_in_float(model, batch).backward())  # noqa: B023
        calls[reshards] = [*map(inductor_calls, codes)]
    forward = "m AG wait m AG wait m"
    backwards = ["m AG wait m flatten m RS wait AG wait m flatten m RS wait", "m flatten RS wait m flatten RS wait m"]
    if harness.TORCH >= (2, 15):  # Inductor schedules otherwise
        forward = "AG m wait AG m wait m"
        backwards = [
            "AG m wait m flatten RS m wait AG wait m flatten RS m wait",
            "m flatten RS m flatten wait RS m wait",
        ]
    assert calls == {True: [forward, backwards[0]], False: [forward, backwards[1]]}

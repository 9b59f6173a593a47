"""Sharded models under torch.compile, block by block: eager's numbers, one graph for equal blocks, no break inside a
block, no recompilation after warm-up. Dynamo is imported only when something is compiled."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecisionPolicy
from tests import harness
from tests.harness import ROOT
from tests.models import shard_layers
from tests.training import (
    assert_parameters_match,
    local_part,
    mean_over_ranks,
    mean_square_in_float,
    pair,
    raise_by_the_user,
)

distributed = functools.partial(harness.distributed, timeout=90)  # seconds; the first compilation on a cold machine

DIM, ROWS, WARM_UP, STEPS = 8, 12, 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 12), nn.Linear(12, DIM)
        self.dropout = nn.Dropout(0.0)  # train and eval are different graphs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, DIM), nn.Linear(DIM, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.use_reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def stacks() -> tuple[Stack, Stack]:
    torch.manual_seed(0)
    return pair(Stack())


# ---- the ways to compile a sharded model -----------------------------------------------------------------------------


def compile_then_shard(model: Stack, options: dict[str, Any], **compile_options: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(**compile_options)
    shard_layers(model, **options)
    return model


def shard_then_compile(model: Stack, options: dict[str, Any], **compile_options: Any) -> nn.Module:
    shard_layers(model, **options)
    for block in model.blocks:
        block.compile(**compile_options)
    return model


def shard_compiled_modules(model: Stack, options: dict[str, Any], **compile_options: Any) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **compile_options)
    shard_layers(model, **options)
    return model


def compile_forward(model: Stack, options: dict[str, Any], **compile_options: Any) -> nn.Module:
    shard_layers(model, **options)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **compile_options)
    return model


def compile_everything(model: Stack, options: dict[str, Any], **compile_options: Any) -> nn.Module:
    shard_layers(model, **options)
    return torch.compile(model, **compile_options)


BLOCK_BY_BLOCK = [compile_then_shard, shard_then_compile, shard_compiled_modules, compile_forward]


# ---- training --------------------------------------------------------------------------------------------------------


def batches(steps: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(ROWS, 3, generator=generator) for _ in range(steps)]


def train(
    model: nn.Module,
    share: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch,
    after_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Losses, in training and then in evaluation, of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, batch in enumerate(batches()):
        model.train()
        loss = mean_square_in_float(model, share(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [loss.item(), mean_square_in_float(model, share(batch)).item()]
        after_step(step)
    return losses


class Compilations:
    """A backend that counts the graphs it is given, and what Dynamo says about breaks."""

    def __init__(self, backend: str = "aot_eager") -> None:
        from torch._dynamo.testing import CompileCounterWithBackend
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        self._breaks = counters["graph_break"]
        self.backend = CompileCounterWithBackend(backend)
        self.counts: list[int] = []
        self._stance: Any = None

    def after_step(self, step: int) -> None:
        """From the end of warm-up on, a recompilation is an error."""
        self.counts.append(self.backend.frame_count)
        if step + 1 == WARM_UP:
            self._stance = torch.compiler.set_stance("fail_on_recompile")
            self._stance.__enter__()

    @property
    def breaks(self) -> dict[str, int]:
        return {reason.splitlines()[0]: count for reason, count in self._breaks.items()}

    def __enter__(self) -> Compilations:
        return self

    def __exit__(self, *error: object) -> None:
        if self._stance is not None:
            self._stance.__exit__(*error)
        torch._dynamo.reset()


def check(
    how: Callable[..., nn.Module],
    options: dict[str, Any] | None = None,
    use_reentrant: bool | None = None,
    backend: str = "aot_eager",
    **compile_options: Any,
) -> Compilations:
    """Trains compiled and sharded, and unsharded in eager mode; returns what was compiled."""
    model, reference = stacks()
    with Compilations(backend) as compilations:
        compiled = how(model, options or {}, backend=compilations.backend, **compile_options)
        model.use_reentrant = use_reentrant
        losses = train(compiled, local_part, compilations.after_step)
    means = [mean_over_ranks(torch.tensor(loss)) for loss in losses]
    expected = train(reference)
    assert max(abs(a - b) for a, b in zip(means, expected, strict=True)) <= 1e-6, (means, expected)
    if how is shard_compiled_modules:  # torch.compile(block) in place of the block: its name is in the FQNs
        for i, block in enumerate(reference.blocks):
            reference.blocks[i] = torch.compile(block)
    assert_parameters_match(model, reference, 1e-6)
    for graph in compilations.backend.graphs if how is not compile_everything else ():
        assert operations(graph) == ["layer_norm", "linear", "gelu", "linear", "dropout", "add"]  # a whole block
    return compilations


def operations(graph: torch.fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("how", BLOCK_BY_BLOCK)
@distributed(world_size=2)
def test_compiled_blocks_share_one_graph_without_breaks_or_recompilations(how):
    compilations = check(how, fullgraph=True)
    assert compilations.counts == [2] * STEPS  # one for training, one for evaluation
    assert not compilations.breaks


@pytest.mark.parametrize("reshard_after_forward", [False, None])
@distributed(world_size=2)
def test_compiled_blocks_with_other_reshard_after_forward(reshard_after_forward):
    compilations = check(shard_then_compile, {"reshard_after_forward": reshard_after_forward}, fullgraph=True)
    assert compilations.counts == [2] * STEPS and not compilations.breaks


@distributed(world_size=2)
def test_compiling_the_whole_model_makes_one_graph():
    """All blocks are compiled, with their collectives (``test_whole_model_compile``)."""
    compilations = check(compile_everything, fullgraph=True)
    assert compilations.counts == [2] * STEPS and not compilations.breaks


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("how", [shard_then_compile, compile_forward])
@distributed(world_size=2)
def test_activation_checkpointing_outside_of_compiled_blocks(how, use_reentrant):
    compilations = check(how, use_reentrant=use_reentrant, fullgraph=True)
    # Reentrant checkpointing runs a block's forward without gradients first: a graph of its own.
    assert compilations.counts == [3 if use_reentrant else 2] * STEPS
    assert not compilations.breaks


@pytest.mark.parametrize("how", [compile_then_shard, compile_forward, compile_everything])
@distributed(world_size=2)
def test_mixed_precision_equals_eager_mixed_precision(how):
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    model, eager = stacks()
    shard_layers(eager, **options)
    expected = train(eager, local_part)
    with Compilations() as compilations:
        losses = train(how(model, options, backend=compilations.backend), local_part, compilations.after_step)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-6, (losses, expected)
    assert compilations.counts == [2] * STEPS


@distributed(world_size=2)
def test_inductor():
    compilations = check(shard_then_compile, backend="inductor", fullgraph=True)
    assert compilations.counts == [2] * STEPS and not compilations.breaks


@distributed(world_size=2)
def test_a_compiled_model_recovers_from_an_exception():
    model, reference = stacks()
    with Compilations() as compilations, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shard_then_compile(model, {}, backend=compilations.backend)
        hook = model.head.register_forward_pre_hook(raise_by_the_user)
        for _ in range(2):
            with pytest.raises(ValueError, match="by the user"):
                model(local_part(batches()[0]))
        hook.remove()
        params = list(model.parameters())
        train(model, local_part)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    train(reference)
    assert_parameters_match(model, reference, 1e-6)


# ---- what compilation costs those who do not compile, and per call ---------------------------------------------------


@pytest.mark.parametrize("how", [shard_then_compile, compile_everything])
@distributed(world_size=2)
def test_hooks_are_disabled_for_dynamo_once_and_not_per_call(how):
    import torch._dynamo

    model, _ = stacks()
    calls: list[Any] = []
    disable = torch._dynamo.disable

    def counting_disable(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0] if args else None)
        return disable(*args, **kwargs)

    seen = []
    with pytest.MonkeyPatch.context() as patch, Compilations("eager") as compilations, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch._dynamo, "disable", counting_disable)
        compiled = how(model, {}, backend=compilations.backend)
        train(compiled, local_part, lambda step: seen.append(len(calls)))
    ours = [call for call in calls if str(getattr(call, "__module__", "")).startswith("fsdp_compose")]
    assert len(set(ours)) == len(ours), ours  # each hook at most once in the life of the process
    assert seen[0] == seen[-1]


def run_python(code: str) -> None:
    """Runs ``code`` in a process of its own, to see what it imports."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_neither_import_nor_uncompiled_training_imports_dynamo():
    run_python(
        """
        import sys
        import torch
        import fsdp_compose
        assert "torch._dynamo" not in sys.modules, "import fsdp_compose"

        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        before = "torch._dynamo" in sys.modules
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        fsdp_compose.fully_shard(model[0])
        fsdp_compose.fully_shard(model)
        for _ in range(2):
            model(torch.randn(2, 3)).sum().backward()
            for param in model.parameters():
                param.data.add_(param.grad)
                param.grad = None
        with torch.no_grad():
            model(torch.randn(2, 3))
        assert not before and "torch._dynamo" not in sys.modules, "a training step"
        """
    )

"""``torch.compile(optimizer.step)`` in a process that has sharded a model: for that model, and for others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compose
from fsdp_compose import RaggedShard, distribute_ragged, flat_parameters, fully_shard
from fsdp_compose.optim import Matrixwise, Muon
from tests import harness
from tests.harness import fake_process_group
from tests.models import Net, inputs, shard_layers
from tests.training import adamw, assert_close, local_part, mean_square, pair, whole

distributed = functools.partial(harness.distributed, timeout=120)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Counted:
    """A backend that counts its graphs and their operations."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.graphs: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        self.graphs.append(len(graph.graph.nodes))
        return graph


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], share: Any = None) -> None:
    for x in inputs(3):
        mean_square(model, share(x) if share else x).backward()
        step()
        optimizer.zero_grad()


def sharded_parameters(model: nn.Module) -> Any:
    return model.parameters()


def local_flat_views(model: nn.Module) -> Any:
    return flat_parameters(model, local=True)


def flat_in_two_groups(model: nn.Module) -> Any:
    return [
        {"params": flat_parameters(model, lambda _, p: p.ndim > 1), "weight_decay": 0.1},
        {"params": flat_parameters(model, lambda _, p: p.ndim <= 1)},
    ]


def test_compiled_step_of_an_unsharded_model_is_as_if_nothing_were_sharded():
    with fake_process_group(rank=0, world_size=1):
        other = fully_shard(nn.Linear(3, 3))
        first = torch.optim.SGD(flat_parameters(other), lr=0.1)
        other(torch.ones(2, 3)).sum().backward()
        first.step()  # every hook is there, and has run
        model, reference = pair(Net(1))
        counted, optimizer = Counted(), adamw(model.parameters())
        train(model, optimizer, torch.compile(optimizer.step, backend=counted))
        optimizer = adamw(reference.parameters())
        train(reference, optimizer, optimizer.step)
        assert counted.graphs, "nothing was compiled"
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(a.detach(), b.detach(), 1e-6, "a parameter")


@pytest.mark.parametrize(
    ("parameters", "make"),
    [(sharded_parameters, adamw), (flat_parameters, adamw), (local_flat_views, sgd), (flat_in_two_groups, sgd)],
)
@distributed(world_size=2)
def test_compiled_step_of_a_sharded_model(parameters, make):
    torch.manual_seed(0)
    model, eager = pair(Net(1))
    shard_layers(model)
    shard_layers(eager)
    counted, optimizer = Counted(), make(parameters(model))
    train(model, optimizer, torch.compile(optimizer.step, backend=counted), local_part)
    optimizer = make(parameters(eager))
    train(eager, optimizer, optimizer.step, local_part)
    assert counted.graphs, "nothing was compiled"
    ours, theirs = (whole(item, lambda param: param, Net(1)) for item in (model, eager))
    for name, expected in theirs.items():
        assert_close(ours[name], expected, 1e-6, name)


def muon(params: Any) -> torch.optim.Optimizer:
    return Muon(params, lr=0.1, ns_dtype=torch.float64)


def shampoo_like(params: Any) -> torch.optim.Optimizer:
    return Matrixwise(params, sgd)


@pytest.mark.parametrize("make", [muon, shampoo_like])
@distributed(world_size=(1, 3))
def test_a_compiled_step_that_moves_matrices(make):
    weights = []
    for how in ("eager", "step", "whole step"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(8, 8, bias=False))
        optimizer = make(model.parameters())

        def whole_step(x, model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(optimizer.step, backend="eager") if how == "step" else optimizer.step
        if how == "whole step":
            run = fsdp_compose.compile(whole_step, model, backend="aot_eager")
        for i in range(3):
            x = torch.full((1, 8), 1.0 + i)
            if how == "whole step":
                run(x)
                continue
            model(x).square().mean().backward()
            step()
            optimizer.zero_grad()
        weights.append(model.weight.full_tensor().detach())
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0])


@distributed(world_size=2)
def test_a_compiled_step_between_forward_and_backward_is_noticed():
    model = shard_layers(Net())
    optimizer = sgd(flat_parameters(model))
    step = torch.compile(optimizer.step, backend="eager")
    (x,) = inputs()
    mean_square(model, x).backward()
    loss = mean_square(model, x)
    step()
    with pytest.raises(RuntimeError, match="were modified"):
        loss.backward()


@distributed(world_size=2)
def test_a_compiled_step_of_an_optimizer_that_is_refused():
    model = shard_layers(Net())
    optimizer = torch.optim.Adafactor(flat_parameters(model))
    mean_square(model, next(inputs())).backward()
    with pytest.raises(Exception, match="Adafactor cannot train flat_parameters"):
        torch.compile(optimizer.step, backend="eager")()


@distributed(world_size=2)
def test_a_step_that_was_compiled_before_sharding_trains_the_sharded_parameters():
    torch.manual_seed(0)
    model, reference = pair(Net(1))
    optimizer = sgd(model.parameters())
    step = torch.compile(optimizer.step, backend=Counted())
    train(model, optimizer, step)
    shard_layers(model)
    train(model, optimizer, step, local_part)
    optimizer = sgd(reference.parameters())
    train(reference, optimizer, optimizer.step)
    train(reference, optimizer, optimizer.step)
    ours = whole(model, lambda param: param, reference)
    for name, expected in reference.named_parameters():
        assert_close(ours[name], expected.detach(), 1e-5, name)


# ---- One cache folder for the ranks of a host, and for runs with other numbers of ranks


def steps_of(parameters: Any, make: Any) -> None:
    torch.manual_seed(0)
    model, reference = pair(Net(1))
    shard_layers(model)
    optimizer = make(parameters(model))
    train(model, optimizer, torch.compile(optimizer.step), local_part)
    optimizer = make(reference.parameters())
    train(reference, optimizer, optimizer.step)
    ours = whole(model, lambda param: param, reference)
    for name, expected in reference.named_parameters():
        assert_close(ours[name], expected.detach(), 1e-5, name)


def tensors_of_one_layout() -> None:
    """Ranks hold equally many rows of some of them, but other rows; and other numbers of rows of the rest."""
    size = dist.get_world_size()
    mesh, reached = init_device_mesh("cpu", (size,)), 40
    even, uneven = [12] * size, [3, *[12] * (size - 2), 21]
    compiled = torch.compile(lambda p, q: p.mul_(q)[reached % p.shape[0]].add_(7.0), dynamic=False)
    for counts in (even, uneven):
        factors = torch.linspace(1, 2, 12 * size * 8).view(-1, 8)
        expected = torch.arange(12.0 * size * 8).view(-1, 8)
        p, q = (distribute_ragged(item, mesh, [RaggedShard(counts)]) for item in (expected, factors))
        compiled(p, q)
        expected.mul_(factors)[reached % expected.shape[0]].add_(7.0)
        assert_close(p.full_tensor(), expected, 1e-6, f"rows {counts}")


def whole_model() -> None:
    torch.manual_seed(0)
    model, reference = pair(Net(1))
    shard_layers(model)
    compiled = torch.compile(model)
    for one in (compiled, reference):
        optimizer = sgd(one.parameters())
        train(one, optimizer, optimizer.step, local_part if one is compiled else None)
    ours = whole(model, lambda param: param, reference)
    for name, expected in reference.named_parameters():
        assert_close(ours[name], expected.detach(), 1e-5, name)


PROGRAMS = {
    "SGD": functools.partial(steps_of, sharded_parameters, sgd),
    "SGD on flat views": functools.partial(steps_of, flat_parameters, sgd),
    "SGD on local flat views": functools.partial(steps_of, local_flat_views, sgd),
    "tensors of one layout": tensors_of_one_layout,
    "a whole model": whole_model,
}


def run_with_caches(program: str, folder: str) -> None:
    """Cold, then from what all ranks have left in the folder."""
    with harness.environment(TORCHINDUCTOR_CACHE_DIR=folder), torch._inductor.config.patch(compile_threads=1):
        for is_warm in (False, True):
            dist.barrier()
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            PROGRAMS[program]()
            if is_warm:
                found = torch._dynamo.utils.counters
                # torch keeps no graph of a whole model, which contains collectives, but what Inductor makes of it
                hits = found["aot_autograd"]["autograd_cache_hit"] + found["inductor"]["fxgraph_cache_hit"]
                assert hits, f"nothing came from the caches: {dict(found)}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", PROGRAMS)
def test_caches_of_compiled_code_that_ranks_and_runs_share(program, tmp_path):
    for world_size in (2, 3, 2):
        arguments = {"program": program, "folder": str(tmp_path)}
        harness.run_distributed(run_with_caches, world_size, arguments, timeout=150)

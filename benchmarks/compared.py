"""Compare fsdp_compose and torch's FSDP2 in the cases where sharded training goes wrong: two processes on gloo each.

    python benchmarks/compared.py             # prints the table of docs/project/cases.md; minutes
    python benchmarks/compared.py --only tied # the cases whose names contain a word

Every case compares with unsharded training of the same model on the whole batch, and is judged by what happened, not by
what a document says: right; wrong without a word; an error; or no end within the time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.nn as nn
from safetensors.torch import load_file, save_file
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fsdp_compose
from tests.harness import run_distributed, shutdown_pools

DIM, ROWS, TIME_LIMIT = 4, 8, 15


class WrongError(Exception):
    """The case went through, and its numbers are not those of unsharded training."""


@dataclass(frozen=True)
class System:
    """The functions that the cases need of a system, under one set of names."""

    name: str

    def shard(self, module: Any, **options: Any) -> Any:
        if self.name == "FSDP2":
            if "policy" in options:
                options["mp_policy"] = TorchPolicy(**options.pop("policy"))
            return torch_fully_shard(module, **options)
        if "policy" in options:
            options["mp_policy"] = fsdp_compose.MixedPrecisionPolicy(**options.pop("policy"))
        return fsdp_compose.fully_shard(module, **options)

    def clip(self, params: Any, norm: float) -> torch.Tensor:
        clip = nn.utils.clip_grad_norm_ if self.name == "FSDP2" else fsdp_compose.clip_grad_norm_
        return clip(params, norm)

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        if self.name == "FSDP2":
            torch.distributed.fsdp.register_fsdp_forward_method(module, name)
        else:
            fsdp_compose.register_forward_method(module, name)


SYSTEMS = [System("FSDP2"), System("fsdp_compose")]
CASES: dict[str, Callable[[System], None]] = {}


def case(symptom: str) -> Callable[[Callable[[System], None]], Callable[[System], None]]:
    def add(function: Callable[[System], None]) -> Callable[[System], None]:
        CASES[symptom] = function
        return function

    return add


# ---- parts of cases


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(layers))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


def shard_layers(system: System, model: Any, **options: Any) -> Any:
    for layer in model.layers:
        system.shard(layer, **options)
    return system.shard(model, **options)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, loss: Any = loss_of) -> None:
    loss(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_both(model: nn.Module, reference: nn.Module, loss: Any = loss_of, steps: int = 2, seed: int = 10) -> None:
    optimizers = sgd(model), sgd(reference)
    for i in range(steps):
        step(model, optimizers[0], mine(batch(seed + i)), loss)
        step(reference, optimizers[1], batch(seed + i), loss)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def expect(ok: bool, otherwise: str) -> None:
    """On every rank the same verdict, so that no rank is left alone in a collective."""
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, bool(ok))
    if not all(verdicts):
        raise WrongError(otherwise)


def expect_equal(model: nn.Module, reference: nn.Module, what: str = "parameters differ") -> None:
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    expect(all(torch.allclose(full(a.detach()), b, atol=1e-5) for a, b in pairs), what)


def expect_gradients(model: nn.Module, reference: nn.Module) -> None:
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
    expect(all((a is None) == (b is None) for a, b in pairs), "a gradient is missing")
    expect(all(a is None or torch.allclose(full(a), b, atol=1e-5) for a, b in pairs), "gradients differ")


# ---- training that goes wrong silently


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class ReturnsBox(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return Box(super().forward(x))


@case("a model in one group returns an object of the user's class")
def returns_object(system: System) -> None:
    model, reference = twins(ReturnsBox())
    system.shard(model)
    train_both(model, reference, lambda model, x: model(x).value.square().mean())
    expect_equal(model, reference)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("by the user")


@case("an exception in backward is caught, and training goes on")
def caught_in_backward(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    train_both(model, reference, seed=30)
    hook = model.layers[0].register_forward_hook(lambda module, args, output: Fails.apply(output))
    with contextlib.suppress(ValueError):
        loss_of(model, mine(batch())).backward()
    hook.remove()
    model.zero_grad()
    train_both(model, reference)
    expect_equal(model, reference)


@case("an exception in forward is caught, and training goes on")
def caught_in_forward(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    train_both(model, reference, seed=30)

    def fail(*_: Any) -> None:
        raise ValueError("by the user")

    hook = model.layers[1].register_forward_hook(fail)
    with contextlib.suppress(ValueError):
        loss_of(model, mine(batch())).backward()
    hook.remove()
    train_both(model, reference)
    expect_equal(model, reference)


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return self.head(x)


@case("reentrant checkpointing, two forwards before one backward")
def reentrant(system: System) -> None:
    model, reference = twins(Checkpointed())
    shard_layers(system, model)

    def two(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return loss_of(model, x) + loss_of(model, x * 2)

    train_both(model, reference, two)
    expect_equal(model, reference)


@case("the optimizer is built after an evaluation")
def built_after_evaluation(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    with torch.no_grad():
        model(batch())
    train_both(model, reference)
    expect_equal(model, reference)


@case("the optimizer is built before sharding")
def built_before(system: System) -> None:
    model, reference = twins(Net())
    optimizers = sgd(model), sgd(reference)
    shard_layers(system, model)
    for i in range(2):
        step(model, optimizers[0], mine(batch(i)))
        step(reference, optimizers[1], batch(i))
    expect_equal(model, reference)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.choice = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[self.choice](x)


def different_experts(system: System, shard: Callable[[Any], Any]) -> None:
    model, reference = twins(Experts())
    shard(model)
    for rank, part in enumerate(batch().chunk(2)):
        reference.choice = rank
        (loss_of(reference, part) / 2).backward()
    model.choice = dist.get_rank()
    loss_of(model, mine(batch())).backward()
    expect_gradients(model, reference)


@case("ranks use different experts of one group")
def experts_in_one_group(system: System) -> None:
    different_experts(system, system.shard)


@case("ranks use different experts, each a group")
def experts_in_groups(system: System) -> None:
    different_experts(system, lambda model: shard_layers(system, model))


@case("parameters are zeroed after a forward")
def zeroed(system: System) -> None:
    model = shard_layers(system, Net())
    with torch.no_grad():
        model(batch())
        for param in model.parameters():
            param.zero_()
        expect(not any(full(value).any() for value in model.state_dict().values()), "state_dict() has old values")
        expect(not model(batch()).any(), "the next forward uses old values")


@case("a module is added after sharding")
def added(system: System) -> None:
    model = shard_layers(system, Net())
    torch.manual_seed(1)
    model.head = nn.Sequential(model.head, nn.Linear(DIM, DIM))
    loss_of(model, mine(batch())).backward()
    grads: list[Any] = [None] * 2
    dist.all_gather_object(grads, full(model.head[1].weight.grad))
    expect(torch.equal(*grads), "its gradient differs from rank to rank")


@case("a mesh of two replicas with one shard each")
def replicas(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    train_both(model, reference)
    expect_equal(model, reference)


@case("replicas that start from different values, on a (2, 1) mesh")
def different_replicas(system: System) -> None:
    torch.manual_seed(dist.get_rank())
    model = Net()
    shard_layers(system, model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, mine(batch())).backward()
        optimizer.step()
    weights = [torch.empty(DIM, DIM) for _ in range(2)]
    dist.all_gather(weights, model.layers[0].weight.detach().full_tensor())
    expect(torch.equal(*weights), "the replicas are different models")


@case("a layer on a (2, 1) mesh in a model sharded over both ranks")
def two_meshes(system: System) -> None:
    model, reference = twins(Net())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    system.shard(model.layers[0], mesh=mesh)
    system.shard(model)
    train_both(model, reference)
    expect_equal(model, reference)


@case("a layer is sharded over one of two ranks, and not replicated over the other")
def part_of_the_ranks(system: System) -> None:
    model, reference = twins(Net())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))
    system.shard(model.layers[0], mesh=mesh["shard"])
    system.shard(model)
    train_both(model, reference)
    expect_equal(model, reference)


# ---- tensor and expert parallel, on a mesh (1, 2)


class MLP(nn.Module):
    """A model whose width tensor parallelism cuts; 2 need not divide it."""

    def __init__(self, width: int = 2 * DIM) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, width), nn.Linear(width, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def tensor_parallel(system: System, model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    return system.shard(model, mesh=mesh["dp"])


def train_whole_batches(model: nn.Module, reference: nn.Module, clip: Any = None) -> None:
    """Both ranks have the same batch."""
    pairs = [(model, sgd(model)), (reference, sgd(reference))]
    for i in range(2):
        norms = []
        for net, optimizer in pairs:
            loss_of(net, batch(i)).backward()
            if clip is not None:
                norms.append(full((clip if net is model else nn.utils.clip_grad_norm_)(net.parameters(), 0.01)))
            optimizer.step()
            optimizer.zero_grad()
        expect(not norms or torch.allclose(*norms), "another norm")
    expect_equal(model, reference)


@case("tensor parallelism cuts some layers of a group")
def tensor_parallel_layers(system: System) -> None:
    model, reference = twins(MLP())
    train_whole_batches(tensor_parallel(system, model), reference)


@case("tensor parallelism: clipping over parameters that it cuts and others")
def tensor_parallel_clipping(system: System) -> None:
    model, reference = twins(MLP())
    train_whole_batches(tensor_parallel(system, model), reference, system.clip)


@case("tensor parallelism: 7 columns on two ranks, and clipping")
def tensor_parallel_uneven(system: System) -> None:
    model, reference = twins(MLP(width=7))
    train_whole_batches(tensor_parallel(system, model), reference, system.clip)


@case("tensor parallelism: plain parameters start from different values on its ranks")
def tensor_parallel_different(system: System) -> None:
    model = MLP()
    with torch.no_grad():
        model.norm.weight.add_(dist.get_rank())
    tensor_parallel(system, model)
    loss_of(model, batch()).backward()
    weights = [torch.empty(DIM) for _ in range(2)]
    dist.all_gather(weights, full(model.norm.weight.detach()))
    expect(torch.equal(*weights), "plain parameters differ from rank to rank")


@case("tensor parallelism: its ranks get different batches")
def tensor_parallel_batches(system: System) -> None:
    model = MLP()
    tensor_parallel(system, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(2):
            loss_of(model, batch(seed=2 * i + dist.get_rank())).backward()
    if not any("batch" in str(item.message) for item in caught):
        raise WrongError("gradients of a mixture of batches, without a word")
    raise RuntimeWarning(next(str(item.message) for item in caught if "batch" in str(item.message)))


@case("tensor parallelism: forward writes to a parameter that it cuts")
def tensor_parallel_edit(system: System) -> None:
    model, reference = twins(MLP())

    def halve(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    for net in (model, reference):
        net.up.register_forward_pre_hook(halve)
    train_whole_batches(tensor_parallel(system, model), reference)


@case("clipping over sharded and plain parameters")
def clipping(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model, ignored_params={model.head.weight, model.head.bias})
    loss_of(model, mine(batch())).backward()
    loss_of(reference, batch()).backward()
    for param in model.head.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
    norm = system.clip(model.parameters(), 0.01)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    expect(torch.allclose(full(norm), expected), "another norm")
    expect_gradients(model, reference)


class Rotary(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(1.0, DIM + 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.frequencies


@case("a non-persistent buffer after the meta device, to_empty() and loading")
def buffers(system: System) -> None:
    reference = Rotary()
    with torch.device("meta"):
        model = Rotary()
    shard_layers(system, model)
    torch.use_deterministic_algorithms(True)  # which fills what to_empty() allocates with NaN: it is zeros by luck
    model.to_empty(device="cpu")
    torch.use_deterministic_algorithms(False)
    state = reference.state_dict()
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = state[name]
            if system.name == "FSDP2":
                part = torch.distributed.tensor.distribute_tensor(whole, param.device_mesh, param.placements)
            else:
                part = fsdp_compose.distribute_ragged(whole, param.device_mesh, param.placements)
            param.copy_(part)
        expect(torch.allclose(model(batch()), reference(batch()), atol=1e-5), "garbage in the outputs")


@case("step() between a forward and its backward")
def early_step(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    optimizers = sgd(model), sgd(reference)
    for twin, x in ((model, mine(batch())), (reference, batch())):
        loss_of(twin, x).backward()
    loss = loss_of(model, mine(batch(1)))
    optimizers[0].step()
    with contextlib.suppress(RuntimeError):  # in-place changes between forward and backward: what unsharded raises
        theirs = loss_of(reference, batch(1))
        optimizers[1].step()
        theirs.backward()
        raise AssertionError("the unsharded model must refuse this")
    loss.backward()
    expect(False, "gradients of a mixture of parameters")


@case("a gradient is held while training goes on")
def held(system: System) -> None:
    model = shard_layers(system, Net())
    loss_of(model, mine(batch())).backward()
    grad = model.layers[0].weight.grad
    before = full(grad).clone()
    model.zero_grad()
    loss_of(model, mine(batch(1))).backward()
    expect(torch.equal(full(grad), before), "it changes")


# ---- modules and parameters


@case("the class of a module after sharding")
def classes(system: System) -> None:
    model = shard_layers(system, Net())
    expect(type(model) is Net and type(model.head) is nn.Linear, "it is another class")


@case("copy.deepcopy of a sharded model")
def copies(system: System) -> None:
    model, reference = twins(Net())
    copied = copy.deepcopy(shard_layers(system, model))
    train_both(copied, reference)
    expect_equal(copied, reference)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    forward = Net.forward
    head = staticmethod(torch.sigmoid)


@case("weights tied across groups")
def tied(system: System) -> None:
    model, reference = twins(Tied())
    shard_layers(system, model)
    train_both(model, reference)
    expect_equal(model, reference)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x).bfloat16()).float()


@case("fp32 norms and bf16 matrices in one group")
def dtypes(system: System) -> None:
    model, reference = twins(Mixed())
    system.shard(model)
    optimizers = sgd(model), sgd(reference)
    step(model, optimizers[0], mine(batch()))
    step(reference, optimizers[1], batch())
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    expect(all(torch.allclose(full(a.detach()), b, atol=1e-2) for a, b in pairs), "parameters differ")


@case("frozen and trainable parameters in one group")
def frozen(system: System) -> None:
    model = Net()
    model.layers.requires_grad_(False)
    model, reference = twins(model)
    system.shard(model)
    train_both(model, reference)
    expect_equal(model, reference)


class Encodes(Net):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


@case("a registered method other than forward")
def methods(system: System) -> None:
    model, reference = twins(Encodes())
    shard_layers(system, model)
    system.register_forward_method(model, "encode")
    expect(torch.allclose(model.encode(batch()), reference.encode(batch()), atol=1e-5), "another result")


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@case("MultiheadAttention whose out_proj is a group")
def attention(system: System) -> None:
    model, reference = twins(Attends())
    system.shard(model.attention.out_proj)
    system.shard(model)
    expect(torch.allclose(model(batch()), reference(batch()), atol=1e-5), "another result")


@case("the forward of a child runs before that of its root")
def child_first(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    model.layers[0](batch())
    train_both(model, reference)
    expect_equal(model, reference)


@case("a gradient penalty (double backward)")
def penalty(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().sum() / len(x)

    train_both(model, reference, loss)
    expect_equal(model, reference)


@case("attributes and hooks of parameters, after sharding")
def attributes(system: System) -> None:
    model, fired = Net(), []
    model.head.weight.tag = "mine"
    model.head.weight.register_post_accumulate_grad_hook(lambda param: fired.append(1))
    shard_layers(system, model)
    loss_of(model, mine(batch())).backward()
    expect(getattr(model.head.weight, "tag", None) == "mine" and fired == [1], "they are gone")


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale)


@case("a scalar parameter")
def scalar(system: System) -> None:
    model, reference = twins(Scales())
    system.shard(model)
    train_both(model, reference)
    expect_equal(model, reference)


@case("model.double() between two steps")
def converted(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    train_both(model, reference)
    model.double()
    reference.double()
    train_both(model, reference, lambda model, x: loss_of(model, x.double()))
    expect_equal(model, reference)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@case("BatchNorm under a bf16 policy")
def batch_norm(system: System) -> None:
    model = system.shard(Normed(), policy={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})
    loss_of(model, mine(batch())).float().backward()
    expect(model.norm.running_mean.dtype == torch.float32, "statistics in bf16")


@case("torch.autograd.grad of the input alone")
def input_gradient(system: System) -> None:
    model = shard_layers(system, Net())
    x = mine(batch()).requires_grad_()
    torch.autograd.grad(loss_of(model, x), x)
    expect(all(param.grad is None for param in model.parameters()), "parameters have gradients")


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.rank = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.always(x)
        return x if self.rank else self.sometimes(x)


@case("only one rank uses a parameter, then clipping")
def used_on_one_rank(system: System) -> None:
    model, reference = twins(Sometimes())
    system.shard(model)
    for rank, part in enumerate(batch().chunk(2)):
        reference.rank = rank
        (loss_of(reference, part) / 2).backward()
    model.rank = dist.get_rank()
    loss_of(model, mine(batch())).backward()
    norm = system.clip(model.parameters(), 1.0)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    expect(torch.allclose(full(norm), expected), "another norm")
    expect_gradients(model, reference)


class Momentum(nn.Module):
    """Momentum contrast: the frozen key encoder follows the other one inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.key.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        with torch.no_grad():
            for key, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.lerp_(other, 0.3)
            keys = self.key(x.flip(1))
        return query * keys


@case("forward changes the parameters of the next group")
def momentum(system: System) -> None:
    model, reference = twins(Momentum())
    for encoder in (model.query, model.key):
        system.shard(encoder)
    system.shard(model)
    train_both(model, reference, steps=4)


class Shares(nn.Module):
    """Two models around one encoder."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.Linear(DIM, DIM)
        self.actor, self.critic = nn.Sequential(encoder, nn.Linear(DIM, 3)), nn.Sequential(encoder, nn.Linear(DIM, 1))


@case("two sharded models share an encoder, one backward through both")
def shared_encoder(system: System) -> None:
    model, reference = twins(Shares())
    for module in (model.actor[0], model.actor, model.critic):
        system.shard(module)
    train_both(model, reference, loss=lambda m, x: loss_of(m.actor, x) + loss_of(m.critic, x))


@case("parameters are edited between two forwards of an evaluation that keeps them gathered")
def edited_while_kept(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    if system.name == "FSDP2":
        model.set_reshard_after_forward(False)
    with torch.no_grad(), contextlib.nullcontext() if system.name == "FSDP2" else fsdp_compose.keep_unsharded(model):
        for _ in range(2):
            expect(torch.allclose(model(batch()), reference(batch()), atol=1e-5), "old values")
            for both in (model, reference):
                for param in both.parameters():
                    param.mul_(0.5)


@case("rank 0 alone calls the model")
def one_rank(system: System) -> None:
    os.environ["FSDP_COMPOSE_TIMEOUT"] = "3"  # seconds that fsdp_compose waits for absent ranks
    model = shard_layers(system, Net())
    if dist.get_rank() == 0:
        try:
            model(batch())
        finally:
            del os.environ["FSDP_COMPOSE_TIMEOUT"]
            dist.barrier()
    else:
        dist.barrier()


@case("the loss computes with the head's weight: F.linear(h, model.head.weight.full_tensor())")
def loss_on_a_weight(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (net(x) @ full(net.layers[-1].weight)).square().mean()

    loss(model, mine(batch())).backward()
    loss(reference, batch()).backward()
    expect_gradients(model, reference)


class Cached(Net):
    """Keeps the weight of its head in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = (self.head.weight, self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.linear(x, *self.cached)


@case("a module keeps its weights in a tuple")
def cached_weights(system: System) -> None:
    torch.manual_seed(0)
    model = Cached()
    torch.manual_seed(0)
    reference = Cached()
    shard_layers(system, model)
    train_both(model, reference)
    expect_gradients_of_loss(model, reference)


@case("clipping a list of parameters taken before sharding")
def old_list(system: System) -> None:
    model, reference = twins(Net())
    old = [*model.parameters()]
    shard_layers(system, model)
    loss_of(model, mine(batch())).backward()
    loss_of(reference, batch()).backward()
    norms = [nn.utils.clip_grad_norm_(params, 0.01) for params in (old, reference.parameters())]
    expect(torch.allclose(full(norms[0]), norms[1]), "another norm")
    expect_gradients(model, reference)


@case("loss.backward(inputs=list(model.parameters()))")
def backward_inputs(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    loss_of(model, mine(batch())).backward(inputs=[*model.parameters()])
    loss_of(reference, batch()).backward()
    expect_gradients(model, reference)


@case("two parameters in the same memory: nn.Parameter(other.data)")
def same_memory(system: System) -> None:
    model = Net()
    model.head.weight = nn.Parameter(model.layers[0].weight.data)
    reference = Net()
    reference.load_state_dict(model.state_dict())
    reference.head.weight = nn.Parameter(reference.layers[0].weight.data)
    shard_layers(system, model)
    train_both(model, reference)
    expect_gradients_of_loss(model, reference)


@case("one rank skips the backward of a NaN loss")
def skipped_backward(system: System) -> None:
    model, _ = twins(Net())
    shard_layers(system, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        loss = loss_of(model, mine(batch()))
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("nan")
        if loss.isfinite():  # on this rank alone
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    raise WrongError("went on as if all ranks had done the same")


@case("one rank skips the backward of a NaN loss, with FSDP_COMPOSE_DEBUG=1")
def skipped_backward_debugged(system: System) -> None:
    os.environ["FSDP_COMPOSE_DEBUG"] = "1"
    try:
        skipped_backward(system)
    finally:
        del os.environ["FSDP_COMPOSE_DEBUG"]


@case("one rank skips an optimizer step")
def skipped_step(system: System) -> None:
    model, _ = twins(Net())
    shard_layers(system, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, mine(batch())).backward()
        if step != 1 or dist.get_rank() != 1:  # it has found an inf, say
            optimizer.step()
    raise WrongError("went on with shards of different steps")


def expect_gradients_of_loss(model: nn.Module, reference: nn.Module) -> None:
    loss_of(model, mine(batch())).backward()
    loss_of(reference, batch()).backward()
    expect_gradients(model, reference)


@case("forward clips its weights by `p.data.clamp_()`")
def _clipped_in_forward(system: System) -> None:
    class Clipping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for p in self.parameters():
                p.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    model, reference = twins(Net())
    model.head, reference.head = Clipping(DIM, DIM), Clipping(DIM, DIM)
    reference.head.load_state_dict(model.head.state_dict())
    system.shard(model.head)
    shard_layers(system, model)
    train_both(model, reference)
    expect_equal(model, reference)


class LocalLosses(Net):
    """Each layer is trained by a loss of its own, with a backward inside forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.detach()))
            if torch.is_grad_enabled():
                x.square().mean().backward()
        return self.head(x.detach())


@case("backward inside the root's forward: a loss for each layer")
def local_losses(system: System) -> None:
    model, reference = twins(LocalLosses())
    shard_layers(system, model)
    train_both(model, reference, steps=3)
    expect_equal(model, reference)


class Auxiliary(nn.Module):
    """Keeps a loss of its own from the fifth forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.count, self.loss = 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        self.count += 1
        if self.count > 4:
            self.loss = x.square().mean()
        return self.layers[1](x.detach())


@case("an auxiliary loss kept as an attribute, from the fifth forward on")
def auxiliary(system: System) -> None:
    model, reference = twins(Auxiliary())
    system.shard(model)  # one group, whose output leads to its last layer only
    train_both(model, reference, loss=lambda m, x: loss_of(m, x) + m.loss, steps=7)
    expect_equal(model, reference)


class Adversarial(nn.Module):
    """The discriminator is frozen while the generator's forward runs through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator, discriminator = self.layers
        discriminator.requires_grad_(False)
        x = discriminator(generator(x))
        discriminator.requires_grad_(True)
        return x


@case("forward freezes a part of the model and thaws it again")
def adversarial(system: System) -> None:
    model, reference = twins(Adversarial())
    shard_layers(system, model)
    train_both(model, reference, steps=3)
    expect_equal(model, reference)
    loss_of(model, mine(batch())).backward()
    loss_of(reference, batch()).backward()
    expect_gradients(model, reference)


@case("a parameter is frozen between forward and backward")
def frozen_before_backward(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    for net, x in ((model, mine(batch())), (reference, batch())):
        loss = loss_of(net, x)
        net.layers[0].weight.requires_grad_(False)
        loss.backward()
    expect_gradients(model, reference)


@case("a hook keeps a weight in forward, and it is read later")
def kept_weight(system: System) -> None:
    model = Net()
    kept: list[torch.Tensor] = []
    model.layers[0].register_forward_hook(lambda module, *_: kept.append(module.weight))
    shard_layers(system, model)
    loss_of(model, mine(batch())).backward()
    for other in range(3):
        loss_of(model, mine(batch(other))).backward()
    expect(bool(torch.isfinite(kept[0].sum())), "garbage")
    raise WrongError("memory that was freed has been read")


@case("a gradient hook runs another sharded model, without gradients")
def teacher_in_hook(system: System) -> None:
    model, reference = twins(Net())
    teacher, teacher_reference = twins(Net())
    for net in (model, teacher):
        shard_layers(system, net)

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        other = teacher if net is model else teacher_reference
        hidden = net(x)

        def follow(grad: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return grad * other(x)

        hidden.register_hook(follow)
        return hidden.square().mean()

    for _ in range(2):
        loss(model, mine(batch())).backward()
        loss(reference, batch()).backward()
        with torch.no_grad():
            for both in (teacher, teacher_reference):
                for param in both.parameters():
                    param.mul_(0.5)
    expect_gradients(model, reference)


class Forwards(nn.Module):
    """A wrapper that passes attributes through to what it wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


@case("a wrapper that forwards attributes is sharded around a sharded module")
def forwarding_wrapper(system: System) -> None:
    model, reference = twins(Net())
    wrapped = system.shard(Forwards(shard_layers(system, model)))
    train_both(wrapped, reference)
    expect_equal(wrapped, reference)


@case("torch.compile(optimizer.step)")
def compiled_step(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    optimizers = sgd(model), sgd(reference)
    compiled = torch.compile(optimizers[0].step, backend="eager")
    for i in range(2):
        loss_of(model, mine(batch(i))).backward()
        loss_of(reference, batch(i)).backward()
        compiled()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    expect_equal(model, reference)


@case("torch.func.functional_call with other weights")
def functional_call(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    loss_of(model, mine(batch())).backward()
    other = {name: param.detach() * 2 for name, param in reference.named_parameters()}
    with torch.no_grad():
        found = torch.func.functional_call(model, other, (batch(),))
        expected = torch.func.functional_call(reference, other, (batch(),))
    expect(torch.allclose(found, expected, atol=1e-5), "other outputs")


@case("torch.func.jvp through a sharded model")
def forward_mode(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    found, expected = [torch.func.jvp(net, (batch(),), (batch(1),))[1] for net in (model, reference)]
    expect(torch.allclose(found, expected, atol=1e-5), "another derivative")


@case("vector_to_parameters, and a plain tensor assigned to .grad")
def plain_values(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    with torch.no_grad():
        for net in (model, reference):
            nn.utils.vector_to_parameters(torch.arange(60.0) / 60, net.parameters())
            for param in net.parameters():
                param.grad = torch.ones(param.shape)
    for net in (model, reference):
        sgd(net).step()
    expect_equal(model, reference)


class Streams(Net):
    """Yields the output of one layer after the other."""

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            yield self.head(x)


@case("forward is a generator that the loss consumes")
def generator(system: System) -> None:
    model, reference = twins(Streams())
    shard_layers(system, model)
    train_both(model, reference, loss=lambda m, x: sum(out.square().mean() for out in m(x)))
    expect_equal(model, reference)


class Tagged(torch.Tensor):
    """A plain subclass of torch.Tensor."""


@case("parameters of the user's own tensor class")
def own_class(system: System) -> None:
    model, reference = twins(Net())
    for net in (model, reference):
        net.head.weight = nn.Parameter(net.head.weight.detach().as_subclass(Tagged))
    shard_layers(system, model)
    train_both(model, reference)
    expect_equal(model, reference)


@case("part of a sharded model is called by itself, after a forward of the whole model and a step")
def part_alone(system: System) -> None:
    model, reference = twins(nn.Sequential(Net()))
    for layer in model[0].layers:
        system.shard(layer)
    system.shard(model)
    train_both(model, reference)
    with torch.no_grad():
        expect(torch.allclose(model[0](batch()), reference[0](batch()), atol=1e-5), "old values")


@case("safetensors.save_file(model.state_dict())")
def bare_save(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    loss_of(model, mine(batch())).backward()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.safetensors")
        save_file(model.state_dict(), path)
        found = load_file(path)
    expect(all(torch.equal(found[name], value) for name, value in reference.state_dict().items()), "other values")


@case("ranks that shard one model start from different values (seeds)")
def different_starts(system: System) -> None:
    torch.manual_seed(0)
    reference = Net()
    torch.manual_seed(dist.get_rank())
    model = Net()
    shard_layers(system, model)
    loss_of(model, mine(batch())).backward()
    expect_equal(model, reference)


@case("torch.compile(optimizer.step) twice, with one cache folder: ranks hold different numbers of rows")
def warm_compile_cache(system: System) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder[0]))
        for _ in range(2):
            torch._dynamo.reset()
            model, reference = twins(nn.Linear(DIM, 7))
            system.shard(model)
            optimizers = sgd(model), sgd(reference)
            compiled = torch.compile(optimizers[0].step)
            loss_of(model, mine(batch())).backward()
            loss_of(reference, batch()).backward()
            compiled()
            optimizers[1].step()
            expect_equal(model, reference)


class Embedded(nn.Module):
    """A vocabulary of 6, with an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, DIM), nn.Linear(DIM, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed((x[:, 0].abs() * 10).long() % 6)))


@case("weights tied in one group are untied after sharding")
def untied(system: System) -> None:
    model, reference = twins(Embedded())
    for tied in (model, reference):
        tied.head.weight = tied.embed.weight
    system.shard(model)
    train_both(model, reference)
    for tied in (model, reference):
        tied.head.weight = nn.Parameter(tied.embed.weight.detach().clone())
    loss_of(model, mine(batch()))
    expect(model.head.weight is not model.embed.weight, "they are tied again")
    train_both(model, reference)
    expect_equal(model, reference)


@case("two groups exchange modules after sharding")
def exchanged(system: System) -> None:
    model, reference = twins(Net())
    for net in (model, reference):
        net.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    shard_layers(system, model)
    train_both(model, reference)
    for net in (model, reference):
        net.layers[0][0], net.layers[1][0] = net.layers[1][0], net.layers[0][0]
    train_both(model, reference)
    expect_equal(model, reference)


@case("a gradient hook multiplies by a mask of the whole weight's size (only new tokens train)")
def masked_rows(system: System) -> None:
    model, reference = twins(Embedded())
    mask = torch.zeros(6, 1)
    mask[4:] = 1
    for net in (model, reference):
        net.embed.weight.register_hook(lambda grad: grad * mask)
    system.shard(model)
    train_both(model, reference)
    expect_equal(model, reference)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@case("microbatches without the all-reduce over replicas, reduce_dtype=bf16: 256 + 1 + 1 + 1")
def partial_sums(system: System) -> None:
    model = Sums()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    policy = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    system.shard(model, mesh=mesh, policy=policy)
    for i, value in enumerate((256.0, 1.0, 1.0, 1.0)):
        if system.name == "FSDP2":
            model.set_requires_all_reduce(i == 3)
        else:
            fsdp_compose.set_requires_all_reduce(model, i == 3)
        model(torch.full((DIM,), value)).backward()
    expect(bool((full(model.weight.grad) == 259).all()), f"the gradient is {full(model.weight.grad)[0]:.0f}, not 259")


class Cache:
    """A key/value cache of the user's class, in which torch finds tensors, and which forward fills."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.num_rows = keys, 0


torch.utils._pytree.register_pytree_node(Cache, lambda cache: ([cache.keys], None), lambda keys, _: Cache(*keys))


class Caches(Net):
    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.num_rows += len(x)
        return super().forward(x)


@case("forward under a bf16 policy fills a cache of the user's class, which holds fp32 tensors")
def fills_cache(system: System) -> None:
    model = Caches()
    system.shard(model, policy=dict(param_dtype=torch.bfloat16))
    cache = Cache(torch.zeros(0, DIM))
    model(mine(batch()), cache)
    expect(cache.num_rows == ROWS // dist.get_world_size(), "the cache that the caller holds is empty")


@case("a backward hook sets an attribute on its weight, which the training loop reads")
def attributes_in_backward(system: System) -> None:
    def note_norms(layer: nn.Module, _: Any, grads: tuple[torch.Tensor, ...]) -> None:
        layer.weight.norms = grads[0].norm(dim=1)

    model = Net()
    for layer in model.layers:
        layer.register_full_backward_hook(note_norms)
    shard_layers(system, model)
    loss_of(model, mine(batch())).backward()
    names = [name for name, param in model.named_parameters() if hasattr(param, "norms")]
    expect(names == ["layers.0.weight", "layers.1.weight"], f"the attribute is on {names}")


@case("a plain tensor of optimizer state that differs between ranks is saved and loaded")
def per_rank_state(system: System) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model = nn.Linear(DIM, DIM)
    system.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss_of(model, mine(batch())).backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    state["packed"] = torch.full((8,), dist.get_rank() + 1.0)
    is_torch = system.name == "FSDP2"
    dicts: Any = torch.distributed.checkpoint.state_dict if is_torch else fsdp_compose.checkpoint
    files: Any = torch.distributed.checkpoint if is_torch else fsdp_compose.checkpoint
    where: Any = {"checkpoint_id" if is_torch else "folder": Path(str(folder[0]), "checkpoint")}
    files.save({"optimizer": dicts.get_optimizer_state_dict(model, optimizer)}, **where)
    state["packed"].zero_()
    loaded = {"optimizer": dicts.get_optimizer_state_dict(model, optimizer)}
    files.load(loaded, **where)
    dicts.set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    found = optimizer.state[model.weight]["packed"][0].item()
    expect(found == dist.get_rank() + 1, f"rank {dist.get_rank()} has loaded {found:.0f}")


@case("before the first forward, `module.weight = nn.Parameter(plain)`, equal on all ranks")
def replaced_by_plain(system: System) -> None:
    model = Net()
    reference = copy.deepcopy(model)
    shard_layers(system, model)
    for item in (model, reference):
        layer = item.layers[0]
        layer.weight = nn.Parameter(torch.full(tuple(layer.weight.shape), 0.1))
    for item, x in ((model, mine(batch())), (reference, batch())):
        loss_of(item, x).backward()
        torch.optim.SGD(item.parameters(), 0.1).step()
    expect_equal(model, reference)


@case("one rank saves a checkpoint while the other trains on")
def saves_alone(system: System) -> None:
    folder = tempfile.mkdtemp()
    model = shard_layers(system, Net())
    loss_of(model, mine(batch())).backward()
    if dist.get_rank() == 0:
        if system.name == "FSDP2":
            torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder)
        else:
            fsdp_compose.checkpoint.save(model.state_dict(), f"{folder}/checkpoint")
    for _ in range(2):
        loss_of(model, mine(batch())).backward()
    raise WrongError("went on as if all ranks had done the same")


@case("rank 0 alone evaluates a model of replicate(), ten times")
def evaluates_replica(system: System) -> None:
    model, reference = twins(Net())
    (torch_replicate if system.name == "FSDP2" else fsdp_compose.replicate)(model)
    train_both(model, reference)
    if dist.get_rank() == 0:
        with torch.no_grad():
            for _ in range(10):
                model(batch())
    train_both(model, reference)
    expect_equal(model, reference)


class Shifts(nn.Module):
    def __init__(self, shift: torch.Tensor) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.shift


class Parametrizes(Net):
    """As peft's LoRA does with stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.head, "weight", Shifts(self.delta))
        try:
            return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self.head, "weight", leave_parametrized=False)


@case("forward puts a parametrization on a weight, and takes it off")
def parametrized_in_forward(system: System) -> None:
    model, reference = twins(Parametrizes())
    shard_layers(system, model)
    train_both(model, reference)
    # By name: removing the parametrization has moved the weight behind the bias.
    expected = dict(reference.named_parameters())
    same = [torch.allclose(full(item.detach()), expected[name]) for name, item in model.named_parameters()]
    expect(all(same) and len(same) == len(expected), "parameters differ")


@case("load_state_dict() of whole tensors that differ between ranks")
def different_loads(system: System) -> None:
    model = shard_layers(system, Net())
    loss_of(model, mine(batch())).backward()
    model.load_state_dict({name: torch.full(item.shape, dist.get_rank()) for name, item in model.state_dict().items()})
    loss_of(model, mine(batch())).backward()
    raise WrongError("trains a mixture of both")


class Normalized(torch.optim.Optimizer):
    """Divides by a running norm, which it keeps as a plain tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                norm = self.state[param].setdefault("norm", torch.ones(1))
                norm.mul_(0.9).add_(param.grad.norm().reshape(1), alpha=0.1)
                param.sub_(param.grad / norm.sqrt(), alpha=0.1)


@case("an optimizer adds the norm of a gradient to a plain tensor of its state")
def norm_in_state(system: System) -> None:
    model, reference = twins(Net())
    shard_layers(system, model)
    for net, x in ((model, mine(batch())), (reference, batch())):
        optimizer = Normalized(net.parameters())
        for _ in range(2):
            step(net, optimizer, x)
    expect_equal(model, reference)


# ---- checkpoints, optimizers of matrices, one rank alone


def shared_folder() -> str:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return str(folder[0])


def save_and_load(system: System, saved: Any, loaded: Any) -> None:
    is_torch, folder = system.name == "FSDP2", f"{shared_folder()}/checkpoint"
    files: Any = torch.distributed.checkpoint if is_torch else fsdp_compose.checkpoint
    where: Any = {"checkpoint_id" if is_torch else "folder": folder}
    files.save(saved, **where)
    files.load(loaded, **where)


@case("a dict of state that has grown is loaded into the empty one of a new process")
def grown_state(system: System) -> None:
    saved = {"loader": {"seen": {"a": 3, "b": 5}, "workers": [1, 2]}}
    loaded: Any = {"loader": {"seen": {}, "workers": []}}
    save_and_load(system, saved, loaded)
    expect(loaded == saved, f"{loaded} was loaded")


@case("what each rank has for itself beside model and optimizer (its random generator) is saved and loaded")
def state_of_each_rank(system: System) -> None:
    rank = dist.get_rank()
    loaded: Any = {"rng": torch.zeros(3)}
    save_and_load(system, {"rng": torch.full((3,), rank + 1.0)}, loaded)
    expect(loaded["rng"][0] == rank + 1, "rank 1 has loaded that of rank 0")


@case("torch's HuggingFaceStorageWriter saves, and its reader loads, 3 rows of 5 columns over two ranks")
def hugging_face_writer(system: System) -> None:
    folder = shared_folder()
    model = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(15.0).view(3, 5))
    system.shard(model)
    files: Any = torch.distributed.checkpoint
    writer = files.HuggingFaceStorageWriter(folder, save_distributed=True)
    files.save(model.state_dict(), storage_writer=writer)
    loaded = {"0.weight": torch.full((3, 5), -1.0)}
    files.load(loaded, storage_reader=files.HuggingFaceStorageReader(folder))
    expect(torch.equal(loaded["0.weight"], torch.arange(15.0).view(3, 5)), f"loaded {loaded['0.weight'].tolist()}")


@case("the newest checkpoint, and cleaning up, after all were copied (equal times, names of any length)")
def newest_after_a_copy(system: System) -> None:
    folder = Path(shared_folder())
    is_torch = system.name == "FSDP2"
    files: Any = torch.distributed.checkpoint if is_torch else fsdp_compose.checkpoint
    for number in (9, 10, 100):
        where: Any = {"checkpoint_id" if is_torch else "folder": folder / f"step-{number}"}
        files.save({"step": torch.tensor(number)}, **where)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            os.utime(path, (0, 0))
            for file in path.iterdir():
                os.utime(file, (0, 0))
    dist.barrier()
    expect(Path(files.latest(folder)).name == "step-100", "an older checkpoint")
    if dist.get_rank() == 0:
        files.keep(folder, last=1)
    dist.barrier()
    expect([path.name for path in folder.iterdir()] == ["step-100"], "another one was kept")


@case("Muon (torch.optim's, and fsdp_compose.optim's): a schedule goes on after load_state_dict()")
def muon_after_load(system: System) -> None:
    model, reference = twins(nn.Sequential(nn.Linear(DIM, 3, bias=False), nn.Linear(3, DIM, bias=False)))
    system.shard(model)
    cls: Any = torch.optim.Muon if system.name == "FSDP2" else fsdp_compose.optim.Muon
    optimizers = cls(model.parameters(), lr=0.1), torch.optim.Muon(reference.parameters(), lr=0.1)
    for net, optimizer, part in zip((model, reference), optimizers, (mine, lambda x: x), strict=True):
        step(net, optimizer, part(batch(0)))
        optimizer.load_state_dict(optimizer.state_dict())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.01)
        for i in range(1, 3):
            step(net, optimizer, part(batch(i)))
            scheduler.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    expect(all(torch.allclose(full(a.detach()), b, atol=1e-2) for a, b in pairs), "parameters differ")  # bf16 steps


@case("rank 0 alone logs the mean of a weight")
def statistic_of_one_rank(system: System) -> None:
    model = shard_layers(system, Net())
    train_both(model, copy.deepcopy(Net()))
    if dist.get_rank() == 0:
        str(full(model.head.weight.detach().mean()).item())
    for i in range(2):
        loss_of(model, mine(batch(i))).backward()


# ---- running and judging


def run_case(symptom: str, system: System, report: str) -> None:
    """On every rank."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            CASES[symptom](system)
        outcome = ["right", ""]
    except WrongError as error:
        outcome = ["wrong", str(error)]
    except Exception as error:
        outcome = ["error", f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"]
    Path(f"{report}.{dist.get_rank()}").write_text(json.dumps(outcome))


def judge(symptom: str, system: System) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as directory:
        report = str(Path(directory, "report"))
        found = [Path(f"{report}.{rank}") for rank in range(2)]
        try:
            arguments = {"symptom": symptom, "system": system, "report": report}
            run_distributed(run_case, 2, arguments, timeout=TIME_LIMIT)
        except pytest.fail.Exception as failure:
            if "the process exited" in str(failure):
                return "crash", ""
            is_hang = "did not finish" in str(failure) or "hangs" in str(failure)
            # An error may have closed the connections: what the ranks have to do after the case fails too then.
            if not is_hang and not all(path.exists() for path in found):
                raise
        outcomes = [json.loads(path.read_text()) if path.exists() else ["hang", ""] for path in found]
    if any(kind != "right" for kind, _ in outcomes):
        shutdown_pools()
    kinds = [kind for kind, _ in outcomes]
    text = next((text for _, text in outcomes if text), "")
    if "hang" in kinds:
        return f"no end within {TIME_LIMIT} s" + (" on one rank, error on the other" if "error" in kinds else ""), text
    return next((kind for kind in ("error", "wrong") if kind in kinds), "right"), text


def cell(kind: str, text: str) -> str:
    text = text.replace(f"{Path(__file__).resolve().parents[1]}/", "")
    text = text if len(text) <= 160 else text[:157] + "..."
    text = text.replace("|", "\\|").replace("\n", " ")
    words = {"right": "right", "wrong": "**wrong, silently**", "error": "error"}.get(kind, f"**{kind}**")
    return words + (f": {text}" if text else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--cases", type=int, nargs=2, metavar=("FROM", "TO"), help="run these, counting from 0")
    arguments = parser.parse_args()
    chosen = [symptom for symptom in CASES if arguments.only in symptom][slice(*(arguments.cases or (None,)))]
    print(f"| case | FSDP2, torch {torch.__version__.split('+')[0]} | fsdp_compose |\n|---|---|---|")
    for symptom in chosen:
        print(f"| {symptom} | {' | '.join(cell(*judge(symptom, system)) for system in SYSTEMS)} |", flush=True)
    shutdown_pools()


if __name__ == "__main__":
    from benchmarks import compared  # under the name by which the processes find it

    compared.main()

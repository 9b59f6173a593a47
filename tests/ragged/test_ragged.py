"""RaggedDTensor: every operation equals the same operation on the full tensor, or raises."""

from __future__ import annotations

import copy
import io
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_compose import RaggedDTensor, RaggedShard, distribute_ragged, fully_shard
from fsdp_compose.core.ragged.ops.operands import GatheredView
from fsdp_compose.core.ragged.placement import range_to_boxes
from tests.harness import distributed, fake_process_group

# name -> (shape of the mesh, placements of a (10, 4) tensor); the last rank of 3 holds nothing
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[], list[Any]]]] = {
    "rows": ((3,), lambda: [RaggedShard((7, 3, 0))]),
    "elements": ((3,), lambda: [RaggedShard((17, 23, 0), flat=True)]),
    "one owner": ((3,), lambda: [RaggedShard((0, 40, 0), flat=True)]),
    "replicated rows": ((2, 2), lambda: [Replicate(), RaggedShard((4, 6))]),
    "replicated elements": ((2, 2), lambda: [Replicate(), RaggedShard((3, 37), flat=True)]),
    "rows of columns": ((2, 2), lambda: [RaggedShard((10, 0)), Shard(1)]),
    "elements of columns": ((2, 2), lambda: [RaggedShard((13, 7), flat=True), Shard(1)]),
    "elements of rows": ((2, 2), lambda: [RaggedShard((7, 13), flat=True), Shard(0)]),
}
SHAPE = (10, 4)


def build_mesh(layout: str) -> DeviceMesh:
    return init_device_mesh("cpu", LAYOUTS[layout][0])


def full_of(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if isinstance(value, (list, tuple)):
        return [full_of(item) for item in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, f"{actual.dtype} for {expected.dtype}"
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        assert actual == expected, f"{actual!r} for {expected!r}"


def inplace(action: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def run(x: Any, y: Any) -> Any:
        action(x, y)
        return x

    return run


def row_of(x: torch.Tensor) -> torch.Tensor:
    """A (4,) tensor of the kind of x."""
    row = torch.arange(1.0, 5.0)
    return DTensor.from_local(row, x.device_mesh, [Replicate()] * x.device_mesh.ndim) if is_dtensor(x) else row


def is_dtensor(x: torch.Tensor) -> bool:
    return isinstance(x, DTensor)


def seeded(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def run(x: Any, _: Any) -> Any:
        torch.manual_seed(5)
        return function(x)

    return run


def foreach(function: Callable[[list[Any], list[Any]], Any]) -> Callable[[Any, Any], Any]:
    def run(x: Any, y: Any) -> Any:
        firsts, seconds = [x.clone(), x + 1], [y, y * 2]
        return function(firsts, seconds) or firsts

    return run


def gradient(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def run(x: Any, y: Any) -> Any:
        leaf = x.clone().requires_grad_(True)
        function(leaf, y).backward()
        return leaf.grad

    return run


def adamw(fused: bool) -> Callable[[Any, Any], Any]:
    def run(x: Any, y: Any) -> Any:
        params, grads = [x.clone()], [y]
        first, second, step = [torch.zeros_like(x)], [torch.zeros_like(x)], [torch.tensor(1.0)]
        torch._fused_adamw_(
            params, grads, first, second, [], step, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-3,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        return [params, first, second]

    return run


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    # arithmetic
    "x + 1": lambda x, y: x + 1,
    "2 - x": lambda x, y: 2 - x,
    "x + y": lambda x, y: x + y,
    "x * y": lambda x, y: x * y,
    "x / y": lambda x, y: x / y,
    "x ** 2": lambda x, y: x**2,
    "-x": lambda x, y: -x,
    "x % 0.3": lambda x, y: x % 0.3,
    "x // y": lambda x, y: x // y,
    "sqrt": lambda x, y: x.sqrt(),
    "exp": lambda x, y: x.exp(),
    "abs": lambda x, y: (x - 0.5).abs(),
    "clamp": lambda x, y: x.clamp(0.2, 0.6),
    "lerp": lambda x, y: x.lerp(y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "where": lambda x, y: torch.where(x > y, x, y),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "round": lambda x, y: (10 * x).round(),
    "nan_to_num": lambda x, y: (x / (x - x)).nan_to_num(1.0, 2.0, 3.0),
    "maximum": lambda x, y: torch.maximum(x, y),
    "x * 0-dim": lambda x, y: x * torch.tensor(3.0),
    "x * norm": lambda x, y: x * y.norm(),
    "x * row": lambda x, y: x * row_of(x),
    "row * x": lambda x, y: row_of(x) * x,
    "x + a larger one": lambda x, y: x + torch.stack([row_of(x)] * 20).view(2, 10, 4),
    "frexp": lambda x, y: list(torch.frexp(x)),
    "x // 3": lambda x, y: x // 3,
    # comparisons
    "x > y": lambda x, y: x > y,
    "x == x": lambda x, y: x == x,
    "isnan": lambda x, y: x.isnan(),
    "isfinite": lambda x, y: torch.isfinite(x),
    "logical_and": lambda x, y: torch.logical_and(x > 0.3, y > 0.3),
    "equal": lambda x, y: torch.equal(x, x.clone()),
    "not equal": lambda x, y: torch.equal(x, y),
    "allclose": lambda x, y: torch.allclose(x, x + 1e-9),
    # reductions
    "sum": lambda x, y: x.sum(),
    "sum in double": lambda x, y: x.sum(dtype=torch.float64),
    "sum of bf16": lambda x, y: x.bfloat16().sum(),
    "sum of int": lambda x, y: (x * 100).int().sum(),
    "sum(0)": lambda x, y: x.sum(0),
    "sum(1)": lambda x, y: x.sum(1),
    "sum keepdim": lambda x, y: x.sum(1, keepdim=True),
    "mean": lambda x, y: x.mean(),
    "mean(0)": lambda x, y: x.mean(0),
    "mean of bf16": lambda x, y: x.bfloat16().mean(),
    "max": lambda x, y: x.max(),
    "min": lambda x, y: x.min(),
    "amax": lambda x, y: x.amax(),
    "amax(1)": lambda x, y: x.amax(1),
    "max of negatives": lambda x, y: (-x).max(),
    "max of int": lambda x, y: (x * -100).int().max(),
    "max with NaN": lambda x, y: torch.where(x < 0.2, x / 0 * 0, x).max(),
    "min with NaN": lambda x, y: torch.where(x < 0.2, x / 0 * 0, x).min(),
    "norm inf with NaN": lambda x, y: torch.where(x < 0.2, x / 0 * 0, x).norm(math.inf),
    "_foreach_norm inf with NaN": lambda x, y: torch._foreach_norm([torch.where(x < 0.2, x / 0 * 0, x), y], math.inf),
    "max of bool": lambda x, y: (x > 0.5).max(),
    "norm of complex": lambda x, y: (x * (1 + 2j)).norm(),
    "_foreach_norm of bf16": lambda x, y: torch._foreach_norm([x.bfloat16(), y]),
    "_foreach_norm 0": lambda x, y: torch._foreach_norm([x, y], 0),
    "max(1)": lambda x, y: x.max(1).values,
    "argmax": lambda x, y: x.argmax(),
    "any": lambda x, y: (x > 0.99).any(),
    "all": lambda x, y: (x > 0).all(),
    "isnan().any()": lambda x, y: x.isnan().any(),
    "count_nonzero": lambda x, y: (x > 0.5).count_nonzero(),
    "prod": lambda x, y: (x + 0.5).prod(),
    "var": lambda x, y: x.var(),
    "std": lambda x, y: x.std(),
    "norm": lambda x, y: x.norm(),
    "norm 1": lambda x, y: x.norm(1),
    "norm 3": lambda x, y: x.norm(3),
    "norm inf": lambda x, y: x.norm(math.inf),
    "norm of bf16": lambda x, y: x.bfloat16().norm(),
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x),
    "vector_norm 0": lambda x, y: torch.linalg.vector_norm(x, 0),
    "vector_norm 0.5": lambda x, y: torch.linalg.vector_norm(x, 0.5),
    "vector_norm inf": lambda x, y: torch.linalg.vector_norm(x, math.inf),
    "vector_norm -inf": lambda x, y: torch.linalg.vector_norm(x, -math.inf),
    "norm -1": lambda x, y: x.norm(-1),
    "_foreach_norm -1": lambda x, y: torch._foreach_norm([x], -1),
    "half mean": lambda x, y: (x * 0 + 5000).half().mean(dtype=torch.float16),
    "any of bytes": lambda x, y: (x > 0.5).to(torch.uint8).any(),
    "vector_norm dim": lambda x, y: torch.linalg.vector_norm(x, 2, dim=1),
    "vector_norm in double": lambda x, y: torch.linalg.vector_norm(x, dtype=torch.float64),
    "item": lambda x, y: round(x.sum().item(), 3),
    "bool": lambda x, y: bool((x > 0).all()),
    "matmul": lambda x, y: x @ y.t(),
    "dot": lambda x, y: torch.dot(x.view(-1), y.view(-1)),
    "cumsum": lambda x, y: x.cumsum(0),
    "sort": lambda x, y: x.sort(0).values,
    "norm inf of nothing": lambda x, y: x[:0].norm(math.inf),
    "norm of nothing": lambda x, y: x[:0].norm(),
    "_foreach_norm inf of nothing": lambda x, y: torch._foreach_norm([x, y[:0]], math.inf),
    "amax of nothing": lambda x, y: x[:0].amax(),
    # what no handler knows
    "nonzero": lambda x, y: (x > 0.5).nonzero(),
    "masked_select": lambda x, y: x.masked_select(x > 0.5),
    "x[mask]": lambda x, y: x[x > 0.5],
    "topk": lambda x, y: x.view(-1).topk(5),
    "quantile": lambda x, y: x.quantile(0.3),
    "unique": lambda x, y: x.round().unique(),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "kron": lambda x, y: torch.kron(x[:2], y),
    "cdist": lambda x, y: torch.cdist(x, y),
    "unfold": lambda x, y: x.unfold(0, 2, 2),
    "singular values": lambda x, y: torch.linalg.svdvals(x),
    "scatter_reduce": lambda x, y: x.scatter_reduce(0, torch.tensor([[0, 1, 2, 9]]), y[:1], "sum"),
    "multinomial": seeded(lambda x: x.multinomial(2)),
    # what only some elements make an error
    "int // 0": lambda x, y: (x * 100).int() // 0,
    "int // int": lambda x, y: (x * 100).int() // (y * 0 + 7).int(),
    "int // zeros": lambda x, y: (x * 100).int() // (y > y[0, 1]).int(),
    "int % zeros": lambda x, y: (x * 100).int() % (y * 0).int(),
    "int_.div_(0)": inplace(lambda x, y: x.copy_(x.int().div_(0, rounding_mode="floor"))),
    # in place
    "triu_": inplace(lambda x, y: x.triu_()),
    "addmm_": inplace(lambda x, y: x.addmm_(y, y[:4])),
    "abs_": inplace(lambda x, y: x.sub_(0.5).abs_()),
    "mm(out=)": inplace(lambda x, y: torch.mm(y, y[:4], out=x)),
    "zeros(out=)": inplace(lambda x, y: torch.zeros(10, 4, out=x)),
    "where(out=)": inplace(lambda x, y: torch.where(y > 0.5, x, y, out=x)),
    "put_": inplace(lambda x, y: x.put_(torch.tensor([0, 39]), row_of(x)[:2])),
    "add_": inplace(lambda x, y: x.add_(y, alpha=2)),
    "mul_": inplace(lambda x, y: x.mul_(2)),
    "mul_ row": inplace(lambda x, y: x.mul_(row_of(x))),
    "x += 1": inplace(lambda x, y: x.__iadd__(1)),
    "copy_": inplace(lambda x, y: x.copy_(y)),
    "copy_ of bf16": inplace(lambda x, y: x.copy_(y.bfloat16())),
    "zero_": inplace(lambda x, y: x.zero_()),
    "fill_": inplace(lambda x, y: x.fill_(3.0)),
    "lerp_": inplace(lambda x, y: x.lerp_(y, 0.3)),
    "addcdiv_": inplace(lambda x, y: x.addcdiv_(y, x + 1, value=0.5)),
    "addcmul_": inplace(lambda x, y: x.addcmul_(y, y, value=0.5)),
    "clamp_": inplace(lambda x, y: x.clamp_(0.3, 0.6)),
    "masked_fill_": inplace(lambda x, y: x.masked_fill_(x > 0.5, 0.0)),
    "sqrt_": inplace(lambda x, y: x.sqrt_()),
    "out=": inplace(lambda x, y: torch.add(y, y, out=x)),
    "index_put_": inplace(lambda x, y: x.index_put_((torch.tensor([1, 8]), torch.tensor([2, 3])), torch.tensor(9.0))),
    "index_fill_": inplace(lambda x, y: x.index_fill_(1, torch.tensor([0, 2]), 5.0)),
    "index_fill_ of a column": inplace(lambda x, y: x[:, 1].index_fill_(0, torch.tensor([0, 9]), 5.0)),
    "index_add_": inplace(lambda x, y: x.index_add_(0, torch.tensor([9]), y[:1])),
    "scatter_": inplace(lambda x, y: x.scatter_(0, torch.tensor([[1, 0, 7, 9]]), 3.0)),
    "x[[1, 8], 2] = 0": inplace(lambda x, y: x.__setitem__((torch.tensor([1, 8]), 2), 0.0)),
    "x[mask] = 0": inplace(lambda x, y: x.__setitem__(x > 0.5, 0.0)),
    "x[:] = y": inplace(lambda x, y: x.__setitem__(slice(None), y)),
    "x[1] = 7": inplace(lambda x, y: x.__setitem__(1, 7.0)),
    "x.data.mul_": inplace(lambda x, y: x.data.mul_(3)),
    # views that write
    "x[1].zero_()": inplace(lambda x, y: x[1].zero_()),
    "x[-1].zero_()": inplace(lambda x, y: x[-1].zero_()),
    "x.data[1].zero_()": inplace(lambda x, y: x.data[1].zero_()),
    "x[2:9].mul_": inplace(lambda x, y: x[2:9].mul_(2)),
    "x[6:8][1].mul_": inplace(lambda x, y: x[6:8][1].mul_(2)),
    "x[3][1:3].mul_": inplace(lambda x, y: x[3][1:3].mul_(2)),
    "x.view(-1).mul_": inplace(lambda x, y: x.view(-1).mul_(2)),
    "x.view(-1)[5:30].mul_": inplace(lambda x, y: x.view(-1)[5:30].mul_(2)),
    "x.view(5, 8).mul_": inplace(lambda x, y: x.view(5, 8).mul_(2)),
    "x.flatten().mul_": inplace(lambda x, y: x.flatten().mul_(2)),
    "x.unsqueeze(0).mul_": inplace(lambda x, y: x.unsqueeze(0).mul_(2)),
    "x.squeeze().mul_": inplace(lambda x, y: x.squeeze().mul_(2)),
    "x.chunk(3)[1].mul_": inplace(lambda x, y: x.chunk(3)[1].mul_(2)),
    "x.split((2, 8))[1].mul_": inplace(lambda x, y: x.split((2, 8))[1].mul_(2)),
    "x.unbind()[4].mul_": inplace(lambda x, y: x.unbind()[4].mul_(2)),
    "x.narrow(0, 1, 8).mul_": inplace(lambda x, y: x.narrow(0, 1, 8).mul_(2)),
    "x.t().add_": inplace(lambda x, y: x.t().add_(1)),
    "x[:, 1].add_": inplace(lambda x, y: x[:, 1].add_(1)),
    "x[::2].add_": inplace(lambda x, y: x[::2].add_(1)),
    "x.chunk(2, 1)[0].add_": inplace(lambda x, y: x.chunk(2, 1)[0].add_(1)),
    "x.t()[1].add_": inplace(lambda x, y: x.t()[1].add_(1)),
    "x.permute.add_": inplace(lambda x, y: x.permute(1, 0).add_(1)),
    "x.diagonal().add_": inplace(lambda x, y: x.diagonal().add_(1)),
    "x.expand(2).add_": inplace(lambda x, y: x.expand(1, 10, 4).add_(1)),
    "t_": inplace(lambda x, y: x.t_()),
    "resize_": inplace(lambda x, y: x.resize_(5, 4)),
    "set_": inplace(lambda x, y: x.set_(y)),
    # views that read
    "t()": lambda x, y: x.t(),
    "transpose": lambda x, y: x.transpose(0, 1) * 2,
    "view": lambda x, y: x.view(2, 5, 4),
    "reshape": lambda x, y: x.reshape(4, 10),
    "view and back": lambda x, y: x.view(-1).view(10, 4) + x,
    "x[3]": lambda x, y: x[3],
    "x[3, 2]": lambda x, y: x[3, 2],
    "x[2:5]": lambda x, y: x[2:5],
    "x[:, 1:3]": lambda x, y: x[:, 1:3],
    "x[::3]": lambda x, y: x[::3],
    "x[[1, 5]]": lambda x, y: x[torch.tensor([1, 5])],
    "x[None]": lambda x, y: x[None],
    "chunk": lambda x, y: x.chunk(3),
    "chunk(dim=1)": lambda x, y: x.chunk(2, dim=1),
    "split": lambda x, y: x.split(4),
    "unbind": lambda x, y: x.unbind(),
    "expand": lambda x, y: x.expand(2, 10, 4),
    "squeeze": lambda x, y: x.unsqueeze(1).squeeze(1),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "x[2:5] + x[2:5]": lambda x, y: x[2:5] + x[2:5],
    "norm of a slice": lambda x, y: x[2:5].norm(),
    "iteration": lambda x, y: [row.sum() for row in x],
    # new tensors
    "clone": lambda x, y: x.clone(),
    "detach": lambda x, y: x.detach(),
    "zeros_like": lambda x, y: torch.zeros_like(x),
    "ones_like": lambda x, y: torch.ones_like(x, dtype=torch.int32),
    "full_like": lambda x, y: torch.full_like(x, 3.0),
    "empty_like": lambda x, y: torch.empty_like(x).fill_(1),
    "rand_like": seeded(torch.rand_like),
    "randn_like": seeded(torch.randn_like),
    "new_zeros": lambda x, y: x.new_zeros(10, 4),
    "new_zeros of another shape": lambda x, y: x.new_zeros(3),
    "new_ones": lambda x, y: x.new_ones((10, 4)),
    "new_full": lambda x, y: x.new_full((10, 4), 2.0),
    "new_empty": lambda x, y: x.new_empty((10, 4)).zero_(),
    "new_empty_strided": lambda x, y: x.new_empty_strided((10, 4), (1, 10)).zero_(),
    "new_empty_strided of another shape": lambda x, y: x.new_empty_strided((2, 3), (1, 2)).zero_(),
    # types
    "to(bf16)": lambda x, y: x.to(torch.bfloat16),
    "double": lambda x, y: x.double(),
    "half().float()": lambda x, y: x.half().float(),
    "int": lambda x, y: (x * 10).int(),
    "bool and back": lambda x, y: (x > 0.5).float(),
    "type_as": lambda x, y: x.type_as(y.double()),
    "complex": lambda x, y: (x * 1j).abs(),
    "view_as_real": lambda x, y: torch.view_as_real(x + 1j * y),
    "view_as_real, written": lambda x, y: [z := x + 1j * y, torch.view_as_real(z).mul_(2)],
    "view_as_real of a row": lambda x, y: torch.view_as_real((x + 1j * y)[1]),
    "view_as_complex": lambda x, y: torch.view_as_complex(x.view(10, 2, 2)),
    "view_as_complex of one": lambda x, y: torch.view_as_complex(x.view(-1)[2:4]),
    "view_as_complex and back": lambda x, y: torch.view_as_real(torch.view_as_complex(x.view(10, 2, 2)).mul_(1j)),
    "maximum, out of parts": inplace(lambda x, y: torch.maximum(torch.view_as_real(x + 1j * y).sum(-1), y, out=x)),
    "bf16 + fp32": lambda x, y: x.bfloat16() + y,
    # random
    "normal_": seeded(lambda x: x.normal_(1.0, 2.0)),
    "uniform_": seeded(lambda x: x.uniform_(-1, 1)),
    "bernoulli_": seeded(lambda x: x.bernoulli_(0.3)),
    "exponential_": seeded(lambda x: x.exponential_()),
    "random_": seeded(lambda x: x.random_(0, 100)),
    # lists
    "_foreach_add": foreach(lambda a, b: torch._foreach_add(a, b)),
    "_foreach_add_": foreach(lambda a, b: torch._foreach_add_(a, b)),
    "_foreach_add_ scalar": foreach(lambda a, b: torch._foreach_add_(a, 2.0)),
    "_foreach_mul_ scalars": foreach(lambda a, b: torch._foreach_mul_(a, [2.0, 3.0])),
    "_foreach_mul_ tensor": foreach(lambda a, b: torch._foreach_mul_(a, torch.tensor(2.0))),
    "_foreach_mul_ norm": foreach(lambda a, b: torch._foreach_mul_(a, b[0].norm())),
    "_foreach_sqrt": foreach(lambda a, b: torch._foreach_sqrt(a)),
    "_foreach_neg_": foreach(lambda a, b: torch._foreach_neg_(a)),
    "_foreach_lerp_": foreach(lambda a, b: torch._foreach_lerp_(a, b, 0.3)),
    "_foreach_addcdiv_": foreach(lambda a, b: torch._foreach_addcdiv_(a, b, b, [0.3, 0.4])),
    "_foreach_addcmul_ tensor": foreach(lambda a, b: torch._foreach_addcmul_(a, b, b, torch.tensor([0.3, 0.4]))),
    "_foreach_maximum_": foreach(lambda a, b: torch._foreach_maximum_(a, b)),
    "_foreach_copy_": foreach(lambda a, b: torch._foreach_copy_(a, b)),
    "_foreach_zero_": foreach(lambda a, b: torch._foreach_zero_(a)),
    "_foreach_pow": foreach(lambda a, b: torch._foreach_pow(a, 2)),
    "_foreach_norm": foreach(lambda a, b: torch._foreach_norm(a)),
    "_foreach_norm 1": foreach(lambda a, b: torch._foreach_norm(a, 1)),
    "_foreach_norm inf": foreach(lambda a, b: torch._foreach_norm(a, math.inf)),
    "_foreach_max": foreach(lambda a, b: torch._foreach_max(a)),
    "_fused_adamw_": adamw(True),
    # autograd
    "grad of sum of squares": gradient(lambda x, y: (x * x).sum()),
    "grad of norm": gradient(lambda x, y: x.norm()),
    "grad of x[1]": gradient(lambda x, y: (x[1] * 3).sum()),
    "grad of mean of products": gradient(lambda x, y: (x * y).mean()),
    "grad of matmul": gradient(lambda x, y: (x @ y.t()).sum()),
    "grad of view": gradient(lambda x, y: (x.view(-1) ** 2).sum()),
    "grad of max": gradient(lambda x, y: x.max()),
    "grad of sum(0)": gradient(lambda x, y: (x.sum(0) ** 2).sum()),
    "grad of unbind": gradient(lambda x, y: (x.unbind()[3] * y[2]).sum()),
    "grad of chunk": gradient(lambda x, y: x.chunk(3)[1].square().sum()),
    "grad of split": gradient(lambda x, y: (x.split((2, 8))[1] * 3).sum() + x.split(4)[0].sum()),
    "grad of unbind of columns": gradient(lambda x, y: x.unbind(1)[1].square().sum()),
    "grad of an index": gradient(lambda x, y: x[torch.tensor([1, 8, 1])].square().sum()),
    "grad of a mask": gradient(lambda x, y: x[x > 0.5].square().sum()),
    "grad of x[2:5]": gradient(lambda x, y: x[2:5].square().sum()),
    "grad of x[:, 1]": gradient(lambda x, y: x[:, 1].square().sum()),
    "grad of iteration": gradient(lambda x, y: sum(row.square().sum() for row in x)),
    "copies": lambda x, y: copy.deepcopy(x),
}
if hasattr(torch, "_foreach_mm"):  # not in torch 2.12
    OPERATIONS["_foreach_mm"] = lambda x, y: torch._foreach_mm([x[:4]], [y[:4]])

# What changes the shape or the memory of a tensor raises, and leaves it as it was.
RAISE = {"t_", "resize_", "set_"}


ON_3_RANKS = [name for name, (shape, _) in LAYOUTS.items() if math.prod(shape) == 3]
ON_4_RANKS = [name for name, (shape, _) in LAYOUTS.items() if math.prod(shape) == 4]


@pytest.mark.parametrize("layout", ON_3_RANKS)
@distributed(world_size=3, timeout=60)
def test_every_operation_equals_that_on_the_full_tensor_or_raises(layout):
    check_operations(layout)


@pytest.mark.parametrize("layout", ON_4_RANKS)
@distributed(world_size=4, timeout=60)
def test_every_operation_on_a_mesh_of_two_dimensions_equals_that_on_the_full_tensor_or_raises(layout):
    check_operations(layout)


def check_operations(layout: str) -> None:
    warnings.simplefilter("ignore")
    mesh, placements = build_mesh(layout), LAYOUTS[layout][1]()
    torch.manual_seed(0)
    first, second = torch.rand(SHAPE) + 0.01, torch.rand(SHAPE) + 0.01
    originals = [distribute_ragged(item, mesh, placements) for item in (first, second)]
    wrong = []
    for name, operation in OPERATIONS.items():
        x, y = (item.clone() for item in originals)
        try:
            expected = full_of(operation(first.clone(), second.clone()))
        except RuntimeError as error:
            expected = error  # such as writing to an expanded tensor: must raise here as well
        may_raise = name in RAISE or isinstance(expected, Exception)
        try:
            actual = full_of(operation(x, y))
        except (RuntimeError, NotImplementedError) as error:
            if not may_raise:
                wrong.append(f"{name}: raised {error}")
            elif not isinstance(expected, Exception) and "aten" not in str(error):
                wrong.append(f"{name}: the error does not name the operation: {error}")
            elif not torch.equal(x.full_tensor(), first):
                wrong.append(f"{name}: raised, and changed the tensor")
            continue
        try:
            assert name not in RAISE and not isinstance(expected, Exception), "did not raise"
            assert_same(actual, expected)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(OPERATIONS)} operations", *wrong])


@distributed(world_size=3, timeout=60)
def test_layouts_move_into_each_other():
    mesh = build_mesh("rows")
    full = torch.randn(SHAPE)
    dist.broadcast(full, 0)
    placements = [RaggedShard((7, 3, 0)), RaggedShard((2, 4, 4)), RaggedShard((17, 23, 0), flat=True)]
    placements += [Shard(0), Shard(1), Replicate()]
    for source in placements:
        for target in placements:
            if isinstance(source, RaggedShard):
                tensor = distribute_ragged(full, mesh, [source]).redistribute(placements=[target])
            else:
                plain = distribute_tensor(full, mesh, [source])
                if isinstance(target, RaggedShard):
                    tensor = distribute_ragged(plain, placements=[target])
                else:
                    continue
            assert tensor.placements == (target,)
            assert torch.equal(tensor.full_tensor(), full)


@distributed(world_size=3, timeout=60)
def test_distributing_a_plain_tensor_takes_the_values_of_the_source_rank():
    mesh = build_mesh("rows")
    mine = torch.full(SHAPE, float(dist.get_rank()))
    assert distribute_ragged(mine, mesh, [RaggedShard((7, 3, 0))]).full_tensor().unique().tolist() == [0.0]
    kept = distribute_ragged(mine, mesh, [RaggedShard((7, 3, 0))], src_data_rank=None)
    assert kept.full_tensor().unique().tolist() == [0.0, 1.0]  # what each rank had


@distributed(world_size=3, timeout=60)
def test_local_and_full_tensors_are_differentiable():
    mesh = build_mesh("rows")
    full = torch.rand(SHAPE)
    dist.broadcast(full, 0)
    x = distribute_ragged(full, mesh, [RaggedShard((7, 3, 0))]).requires_grad_(True)
    (x.to_local() ** 2).sum().backward()
    assert isinstance(x.grad, RaggedDTensor)
    torch.testing.assert_close(x.grad.full_tensor(), 2 * full)
    x.grad = None
    (x.full_tensor() ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * full)
    assert x.to_local().data_ptr() == x.detach().to_local().data_ptr()


@distributed(world_size=3, timeout=60)
def test_grad_placements_say_what_gradients_of_a_view_are():
    warnings.simplefilter("ignore")
    mesh, factor = build_mesh("rows"), dist.get_rank() + 1.0
    for local in (True, False):
        for placement, expected in ((Partial(), 6.0), (None, 2.0)):  # the sum over ranks, and the average
            x = distribute_ragged(torch.ones(SHAPE), mesh, [RaggedShard((7, 3, 0))]).requires_grad_(True)
            given = None if placement is None else [placement]
            view = x.t()
            value = view.to_local(grad_placements=given) if local else view.full_tensor(grad_placements=given)
            (value * factor).sum().backward()
            assert x.grad.full_tensor().unique().tolist() == [expected], (local, placement)


def roundtrip(tensor: torch.Tensor, how: str) -> torch.Tensor:
    if how == "deepcopy":
        return copy.deepcopy(tensor)
    if how == "pickle":
        return pickle.loads(pickle.dumps(tensor))
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("layout", ["rows", "elements", "replicated rows", "rows of columns"])
@distributed(world_size=4, timeout=60)
def test_copies_and_files_keep_layout_and_values(layout, how):
    mesh = init_device_mesh("cpu", (4,)) if layout in ("rows", "elements") else build_mesh(layout)
    placements = LAYOUTS[layout][1]()
    if mesh.ndim == 1:
        placements = [RaggedShard((*placements[0].counts, 0), placements[0].flat)]
    buffer = torch.arange(100.0)
    whole = distribute_ragged(torch.arange(40.0).view(SHAPE), mesh, placements)
    # A view into a larger buffer, as parameters are.
    local = buffer[16 : 16 + whole.to_local().numel()].view(whole.to_local().shape)
    local.copy_(whole.to_local())
    tensor = RaggedDTensor.from_local(local, mesh, placements, shape=SHAPE)
    assert tensor.data_ptr() == 0 and tensor.storage_offset() == 0
    for item in (tensor, nn.Parameter(tensor)):
        other = roundtrip(item, how)
        assert isinstance(other, RaggedDTensor) and isinstance(other, nn.Parameter) == isinstance(item, nn.Parameter)
        assert other.requires_grad == item.requires_grad
        assert other.placements == tuple(placements) and other.device_mesh == mesh
        assert torch.equal(other.to_local(), tensor.to_local())
        assert other.to_local().data_ptr() != tensor.to_local().data_ptr() or not tensor.to_local().numel()
        with torch.no_grad():
            other.mul_(2)
        assert torch.equal(tensor.full_tensor(), torch.arange(40.0).view(SHAPE))


INITIALIZERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": lambda p: nn.init.normal_(p, 0.5, 2.0),
    "uniform_": nn.init.uniform_,
    "constant_": lambda p: nn.init.constant_(p, 3.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "trunc_normal_": nn.init.trunc_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p, a=math.sqrt(5)),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "sparse_": lambda p: nn.init.sparse_(p, 0.3),
    "orthogonal_": nn.init.orthogonal_,
}


@pytest.mark.parametrize("layout", ["rows", "elements"])
@distributed(world_size=3, timeout=60)
def test_initialization_equals_that_on_one_device(layout):
    check_initialization(layout)


@pytest.mark.parametrize("layout", ["replicated elements", "elements of columns"])
@distributed(world_size=4, timeout=60)
def test_initialization_on_a_mesh_of_two_dimensions_equals_that_on_one_device(layout):
    check_initialization(layout)


def check_initialization(layout: str) -> None:
    warnings.simplefilter("ignore")
    mesh, placements = build_mesh(layout), LAYOUTS[layout][1]()
    for name, initialize in INITIALIZERS.items():
        expected = nn.Parameter(torch.zeros(SHAPE))
        actual = nn.Parameter(distribute_ragged(torch.zeros(SHAPE), mesh, placements))
        torch.manual_seed(3)
        initialize(expected)
        torch.manual_seed(3)
        initialize(actual)
        assert torch.equal(actual.full_tensor(), expected), name


@distributed(world_size=3, timeout=60)
def test_numbers_are_drawn_in_the_dtype_of_the_tensor():
    for dtype in (torch.float64, torch.bfloat16):
        for draw in (torch.rand_like, torch.randn_like, torch.Tensor.normal_):
            full = torch.zeros(SHAPE, dtype=dtype)
            sharded = distribute_ragged(full, build_mesh("rows"), [RaggedShard((7, 3, 0))])
            torch.manual_seed(3)
            expected = draw(full)
            torch.manual_seed(3)
            assert_same(full_of(draw(sharded)), expected)


@distributed(world_size=4, timeout=60)
def test_replicas_that_would_draw_different_numbers_raise():
    mesh, placements = build_mesh("replicated rows"), LAYOUTS["replicated rows"][1]()
    tensor = distribute_ragged(torch.zeros(SHAPE), mesh, placements)
    torch.manual_seed(dist.get_rank() // 2)
    with pytest.raises(RuntimeError, match=r"normal_.*manual_seed"):
        tensor.normal_()
    assert tensor.full_tensor().abs().sum() == 0


@distributed(world_size=3, timeout=60)
def test_an_operation_that_gathers_warns_once():
    mesh = build_mesh("rows")
    x = distribute_ragged(torch.rand(SHAPE), mesh, [RaggedShard((7, 3, 0))])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x.logcumsumexp(0)
    assert [str(item.message) for item in caught if "logcumsumexp" in str(item.message)] != []
    assert sum("logcumsumexp" in str(item.message) for item in caught) == 1


@distributed(world_size=3, timeout=60)
def test_a_gathered_view_writes_through_until_it_is_out_of_date():
    mesh = build_mesh("rows")
    full = torch.arange(40.0).view(SHAPE)
    x = distribute_ragged(full, mesh, [RaggedShard((7, 3, 0))])
    view = x.t()
    assert isinstance(view, GatheredView) and isinstance(view[0], GatheredView)
    result = view[0].add_(1)
    assert isinstance(result, GatheredView)
    view[1].zero_()  # an older view of the same copy
    view.mul_(2)
    expected = full.clone()
    expected.t()[0].add_(1)
    expected.t()[1].zero_()
    expected.mul_(2)
    assert torch.equal(x.full_tensor(), expected) and torch.equal(view.full_tensor(), expected.t())
    copied = view.clone()
    assert not isinstance(copied, GatheredView)
    copied.add_(1)
    assert torch.equal(x.full_tensor(), expected)
    with pytest.raises(RuntimeError, match=r"aten.t_.*lost"):
        view.t_()
    x.add_(1)
    uses = [
        lambda: view + 1,
        lambda: view.full_tensor(),
        lambda: view.to_local(),
        lambda: view.zero_(),
        lambda: view[0],
    ]
    for use in (*uses, lambda: x.mul_(view.t()), lambda: torch.add(x, view.t())):
        with pytest.raises(RuntimeError, match="out of date"):
            use()
    assert torch.equal(x.full_tensor(), expected + 1)


@distributed(world_size=3, timeout=60)
def test_mixing_with_plain_tensors_raises_and_says_what_to_do():
    mesh = build_mesh("rows")
    x = distribute_ragged(torch.rand(SHAPE), mesh, [RaggedShard((7, 3, 0))])
    with pytest.raises(RuntimeError, match="distribute_ragged"):
        x.add_(torch.rand(SHAPE))
    with pytest.raises(RuntimeError, match="full_tensor"):
        torch.zeros(SHAPE).copy_(x)
    before = x.full_tensor()
    with pytest.raises(RuntimeError, match="whole values"):
        x.copy_(torch.rand(2, *SHAPE))
    with pytest.raises(TypeError, match=r"\.data"):
        x.data = torch.rand(2, *SHAPE)
    assert torch.equal(x.full_tensor(), before)


@distributed(world_size=3)
def test_plain_tensors_of_the_whole_values_can_be_copied_and_assigned():
    mesh = build_mesh("rows")
    x = distribute_ragged(torch.rand(SHAPE), mesh, [RaggedShard((7, 3, 0))])
    torch.manual_seed(0)
    for whole in (torch.rand(SHAPE), torch.rand(SHAPE[-1])):
        x.copy_(whole)
        assert torch.equal(x.full_tensor(), whole.expand(SHAPE))
    whole = torch.rand(SHAPE)
    x.data = whole
    assert torch.equal(x.full_tensor(), whole)


@distributed(world_size=3, timeout=60)
def test_optimizer_state_in_another_layout_raises_or_is_converted():
    mesh = build_mesh("rows")
    full = torch.rand(SHAPE)
    dist.broadcast(full, 0)

    def sharded(placement: Any) -> torch.Tensor:
        if isinstance(placement, RaggedShard):
            return distribute_ragged(full, mesh, [placement])
        return distribute_tensor(full, mesh, [placement])

    param, grad, other = sharded(RaggedShard((7, 3, 0))), sharded(RaggedShard((7, 3, 0))), sharded(Shard(0))
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    for states in ([other], [other]), ([sharded(RaggedShard((7, 3, 0)))], [other]):
        with pytest.raises(RuntimeError, match=r"_fused_adamw_.*distribute_ragged"):
            torch._fused_adamw_(
                [param], [grad], *states, [], [torch.tensor(1.0)], amsgrad=False, maximize=False, **settings
            )
    assert torch.equal(param.full_tensor(), full)
    torch._foreach_add_([param], [other])  # an operand that is only read is converted
    assert torch.equal(param.full_tensor(), 2 * full)
    torch._foreach_add_([other, param], [param.clone(), sharded(Shard(0))])
    assert other.placements == (Shard(0),)
    assert torch.equal(other.full_tensor(), 3 * full)
    assert torch.equal(param.full_tensor(), 3 * full)


@distributed(world_size=3, timeout=60)
def test_lists_of_ragged_and_plain_tensors_mix():
    mesh = build_mesh("rows")
    full = torch.rand(SHAPE)
    dist.broadcast(full, 0)
    ragged = distribute_ragged(full, mesh, [RaggedShard((7, 3, 0))])
    norms = torch._foreach_norm([ragged, distribute_tensor(full, mesh, [Shard(0)]), full])
    for norm in norms:
        value = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.testing.assert_close(value, full.norm())
    local = torch.ones(3)
    sums = torch._foreach_mul([ragged, local], [2.0, 3.0])
    assert torch.equal(sums[0].full_tensor(), 2 * full) and torch.equal(sums[1], 3 * local)


def test_wrong_layouts_are_refused(one_rank_mesh):
    with pytest.raises(ValueError, match="contiguous local tensor of shape"):
        RaggedDTensor.from_local(torch.zeros(3, 4), one_rank_mesh, [RaggedShard((10,))], shape=SHAPE)
    with pytest.raises(ValueError, match="10 rows"):
        RaggedDTensor.from_local(torch.zeros(9, 4), one_rank_mesh, [RaggedShard((9,))], shape=SHAPE)
    with pytest.raises(ValueError, match="exactly one of them a RaggedShard"):
        RaggedDTensor.from_local(torch.zeros(SHAPE), one_rank_mesh, [Replicate()], shape=SHAPE)
    with pytest.raises(ValueError, match=">= 0"):
        RaggedShard((3, -1))
    with pytest.raises(NotImplementedError, match="RaggedDTensor"):
        RaggedShard((3, 1))._to_replicate_tensor()
    for name in {"_to_partial_tensor"} & {*dir(Shard)}:  # torch 2.15
        with pytest.raises(NotImplementedError, match="RaggedDTensor"):
            getattr(RaggedShard((3, 1)), name)()
    with pytest.raises(ValueError):
        DTensor.from_local(torch.zeros(SHAPE), one_rank_mesh, [RaggedShard((9,))])


def test_placements_equal_only_equal_ones():
    placement = RaggedShard((3, 2))
    assert placement == RaggedShard((3, 2)) and hash(placement) == hash(RaggedShard((3, 2)))
    for other in (RaggedShard((3, 2), flat=True), RaggedShard((2, 3)), Shard(0), Replicate()):
        assert placement != other and other != placement
    assert pickle.loads(pickle.dumps(placement)) == placement and copy.deepcopy(placement) == placement
    assert placement.is_shard() and placement.is_shard(0) and not placement.is_replicate()


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
@settings(deadline=None, max_examples=200)
def test_boxes_cover_a_range_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = range_to_boxes(tuple(shape), start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    whole = torch.arange(numel).view(shape)
    found = [whole[tuple(map(slice, box.offsets, map(sum, zip(box.offsets, box.sizes))))].flatten() for box in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))


@pytest.fixture
def one_rank_mesh():
    with fake_process_group(world_size=1):
        yield init_device_mesh("cpu", (1,))


WRITES: dict[str, Callable[[RaggedDTensor], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "add_ of another": lambda x: x.add_(x),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "fused": lambda x: adamw_in_place(x),
    "row": lambda x: x[2].zero_(),
    "rows": lambda x: x[1:9].zero_(),
    "view": lambda x: x.view(-1).mul_(2),
    "row of a detached": lambda x: x.detach()[3].fill_(1),
    "data": lambda x: x.data.mul_(2),
    "transposed": lambda x: x.t().mul_(2),
    "copy_": lambda x: x.copy_(x + 1),
    "normal_": lambda x: x.normal_(),
    "index_put_": lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(0.0)),
    "to_local": lambda x: x.to_local().mul_(2),
    "unbind": lambda x: x.unbind()[0].mul_(2),
}


def adamw_in_place(x: torch.Tensor) -> None:
    states = [[torch.zeros_like(x)], [torch.zeros_like(x)], [], [torch.tensor(1.0)]]
    torch._fused_adamw_(
        [x],
        [x.clone()],
        *states,
        lr=0.1,
        beta1=0.9,
        beta2=0.9,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


@distributed(world_size=3, timeout=60)
def test_every_write_counts_in_the_version_of_the_memory():
    warnings.simplefilter("ignore")
    mesh, spec = build_mesh("rows"), [RaggedShard((7, 3, 0))]
    for name, write in WRITES.items():
        buffer = torch.rand(60)
        shape = distribute_ragged(torch.rand(SHAPE), mesh, spec).to_local().shape
        local = buffer[8 : 8 + math.prod(shape)].view(shape)
        before = buffer._version
        write(RaggedDTensor.from_local(local, mesh, spec, shape=SHAPE))
        assert buffer._version > before, name


@distributed(world_size=4, timeout=60)
def test_checkpoints_move_between_all_layouts_bit_exact():
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    full = torch.arange(40.0).view(SHAPE)
    tensors: dict[str, torch.Tensor] = {}
    for layout in ON_4_RANKS:
        tensors[layout] = distribute_ragged(full + len(tensors), build_mesh(layout), LAYOUTS[layout][1]())
    line = init_device_mesh("cpu", (4,))
    tensors["rows"] = distribute_ragged(full - 1, line, [RaggedShard((7, 0, 3, 0))])
    tensors["empty"] = distribute_ragged(torch.empty(0, 4), line, [RaggedShard((0, 0, 0, 0))])
    tensors["scalar"] = distribute_ragged(torch.tensor(2.5), line, [RaggedShard((0, 0, 1, 0), flat=True)])
    expected = {name: tensor.full_tensor() for name, tensor in tensors.items()}
    dcp.save(dict(tensors), checkpoint_id=folder[0])
    dist.barrier()
    names = [*ON_4_RANKS]
    for shift in range(1, len(names)):
        state: dict[str, torch.Tensor] = {}
        for i, name in enumerate(names):
            other = names[(i + shift) % len(names)]
            state[name] = distribute_ragged(torch.zeros(SHAPE), build_mesh(other), LAYOUTS[other][1]())
        state["rows"] = distribute_tensor(torch.zeros(SHAPE), line, [Shard(0)])
        state["empty"] = distribute_ragged(torch.empty(0, 4), line, [RaggedShard((0, 0, 0, 0))])
        state["scalar"] = distribute_ragged(torch.tensor(0.0), line, [RaggedShard((1, 0, 0, 0), flat=True)])
        dcp.load(state, checkpoint_id=folder[0])
        for name, value in expected.items():
            assert torch.equal(state[name].full_tensor(), value), name


@distributed(world_size=3, timeout=60)
def test_copies_between_layouts():
    mesh = build_mesh("rows")
    full = torch.rand(SHAPE)
    dist.broadcast(full, 0)
    small = (full * 100).to(torch.int16)  # not a dtype of gloo
    ragged = distribute_ragged(small, mesh, [RaggedShard((7, 3, 0))], src_data_rank=None)
    assert torch.equal(ragged.full_tensor(), small)
    for source in (RaggedShard((7, 3, 0)), RaggedShard((2, 4, 4)), RaggedShard((17, 23, 0), flat=True)):
        for other in (Shard(0), Shard(1), Replicate()):
            ragged, plain = distribute_ragged(full, mesh, [source]), distribute_tensor(full * 2, mesh, [other])
            ragged.copy_(plain)
            assert ragged.placements == (source,) and torch.equal(ragged.full_tensor(), full * 2)
            plain.copy_(distribute_ragged(full * 3, mesh, [source]))
            assert plain.placements == (other,) and torch.equal(plain.full_tensor(), full * 3)


@distributed(world_size=3, timeout=60)
def test_printing_needs_no_other_rank():
    mesh = build_mesh("rows")
    x = distribute_ragged(torch.zeros(SHAPE), mesh, [RaggedShard((7, 3, 0))])
    if dist.get_rank() == 0:
        assert "RaggedDTensor(shape=(10, 4), placements=[RaggedShard([7, 3, 0])], rank 0 holds tensor(" in repr(x)
        assert "RaggedDTensor" in str(nn.Parameter(x)) and "RaggedDTensor" in f"{x}"
    assert f"{x.sum().item():.1f}" == "0.0"


SCALAR_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+ a double": lambda p, d: p + torch.tensor(1.0, dtype=torch.float64),
    "bf16 * 0-dim": lambda p, d: p.bfloat16() * torch.tensor(1.3),
    "bf16 * number": lambda p, d: p.bfloat16() * 1.3,
    "bf16 * replicated": lambda p, d: p.bfloat16() * d,
    "int + 0-dim": lambda p, d: p.int() + torch.tensor(3),
    "where": lambda p, d: torch.where(p > 1, torch.tensor(1.0, dtype=torch.float64), p),
    "foreach": lambda p, d: torch._foreach_mul([p.bfloat16()], [torch.tensor(1.3)]),
    "foreach by one": lambda p, d: torch._foreach_mul([p.bfloat16()], torch.tensor(1.3)),
    "in place": inplace(lambda p, d: p.mul_(3)),
    "foreach in place": inplace(lambda p, d: torch._foreach_add_([p, p.clone()], 2.0)),
    "norm": lambda p, d: p.norm(),
    "row": lambda p, d: p * torch.ones(3).sum(),
    "beside a row": lambda p, d: p + d.expand(3),
    "view": inplace(lambda p, d: p.view(1).mul_(2)),
    "equal": lambda p, d: torch.equal(p, torch.tensor(2.5)),
    "equal to replicated": lambda p, d: torch.equal(d, p),
    "item": lambda p, d: p.item(),
}


@distributed(world_size=3, timeout=60)
def test_operations_on_0_dim_tensors_equal_those_on_full_ones():
    warnings.simplefilter("ignore")
    mesh = build_mesh("rows")
    for name, operation in SCALAR_OPERATIONS.items():
        full = torch.tensor(2.5)
        p = distribute_ragged(full, mesh, [RaggedShard((0, 1, 0), flat=True)])
        actual = full_of(operation(p, distribute_tensor(full, mesh, [Replicate()])))
        expected = full_of(operation(full.clone(), full.clone()))
        try:
            assert_same(actual, expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@distributed(world_size=3, timeout=60)
def test_views_belong_to_the_memory_they_were_made_of():
    warnings.simplefilter("ignore")
    mesh, placements = build_mesh("rows"), [RaggedShard((7, 3, 0))]
    full = torch.arange(40.0).view(SHAPE)
    x, y = distribute_ragged(full, mesh, placements), distribute_ragged(-full, mesh, placements)
    view = x.t()
    x.data = y.clone()
    with pytest.raises(RuntimeError, match="out of date"):
        view.add_(1)
    assert torch.equal(x.full_tensor(), -full)
    x.t().to_local().zero_()
    x.t().full_tensor().zero_()
    assert torch.equal(x.full_tensor(), -full)  # copies
    with pytest.raises(NotImplementedError, match="as_strided"):
        x[2:5].as_strided((3, 4), (4, 1), 0)
    copied = roundtrip(x.t(), "torch.save")
    assert type(copied) is DTensor and torch.equal(copied.full_tensor(), -full.t())
    assert torch.equal(copy.deepcopy(x.t()).full_tensor(), -full.t())
    with pytest.raises(RuntimeError, match="shape"):
        torch.add(x[0], y[0], out=x)
    with pytest.raises(RuntimeError, match="does not fit"):
        torch._foreach_add([x[0]], [x])


@distributed(world_size=3, timeout=60)
def test_views_work_in_inference_mode():
    warnings.simplefilter("ignore")
    mesh, placements = build_mesh("rows"), [RaggedShard((7, 3, 0))]
    full = torch.arange(40.0).view(SHAPE)
    x = distribute_ragged(full, mesh, placements)
    with torch.inference_mode():
        assert torch.equal((x.t() + 1).full_tensor(), full.t() + 1)
        assert torch.equal((x * 2)[1].mul_(2).full_tensor(), full[1] * 4)
        assert torch.equal((x * 2).t().full_tensor(), full.t() * 2)
        assert torch.equal(x[:, 1].full_tensor(), full[:, 1])


@distributed(world_size=2)
def test_sharing_memory_with_other_processes_raises():
    x = distribute_ragged(torch.ones(3), init_device_mesh("cpu", (2,)), [RaggedShard((2, 1))])
    with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
        x.share_memory_()
    with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
        fully_shard(nn.Linear(2, 2)).share_memory()


@distributed(world_size=3, timeout=60)
def test_autograd_notices_a_foreach_write_to_a_saved_tensor():
    x = distribute_ragged(torch.rand(SHAPE), build_mesh("rows"), [RaggedShard((7, 3, 0))]).requires_grad_(True)
    out = (x * x).sum()
    with torch.no_grad():
        torch._foreach_add_([x], 1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.backward()


def test_a_reduction_is_chosen_as_one_whatever_tags_it_has():
    from fsdp_compose.core.ragged.ops import choose
    from fsdp_compose.core.ragged.ops.reductions import BY_OPERATOR

    assert BY_OPERATOR == {operator: choose(operator) for operator in BY_OPERATOR}

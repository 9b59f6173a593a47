"""What ``calibrate`` measures: operations, collectives, and steps of a model so small that the host takes its time.

Operations are described by ``operation_of``, as those of a simulated step are, so both count the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from .._arguments import checked
from .._torch import DispatchMode
from ..extension import CollectiveKind, Label, Work, fully_shard, transport_of
from ..inspect import Operation, operation_of


@checked()
@dataclass(frozen=True)
class Workload:
    """Sizes of what is measured. The defaults are for a CPU and take about a minute.

    Attributes:
        products: sizes (m, k, n) of matrix products.
        attentions: shapes (batch, heads, tokens, width) of the queries of causal attentions.
        tensor_bytes: sizes of the tensors of element-wise operations, at least 1 KiB.
        collective_bytes: sizes of the whole tensors of collectives.
        seconds: things are repeated for about so long in each round.
    """

    products: Sequence[tuple[int, int, int]] = (
        (64, 64, 64), (256, 256, 256), (512, 512, 512), (128, 1024, 1024), (512, 256, 1024), (512, 1024, 256),
    )  # fmt: skip
    attentions: Sequence[tuple[int, int, int, int]] = ((4, 4, 128, 64), (2, 8, 128, 64), (1, 8, 512, 64))
    tensor_bytes: Sequence[int] = (1 << 12, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
    collective_bytes: Sequence[int] = (1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    seconds: float = 0.01


# So large that a GPU computes for longer than the host needs to issue it; of element-wise operations and collectives,
# small ones too.
GPU_WORKLOAD = Workload(
    products=((2048, 2048, 2048), (4096, 4096, 4096), (8192, 1024, 4096), (8192, 4096, 1024), (16384, 4096, 4096)),
    attentions=((4, 16, 2048, 64), (4, 16, 2048, 128), (1, 32, 4096, 128)),
    tensor_bytes=(1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
    collective_bytes=(1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
)

_Start = Callable[[], Work]  # starts a collective
TINY, NUM_TINY = "tiny operations", 100
BESIDE, NUM_PRODUCTS, NUM_GATHERS = "products beside all-gathers", 40, 8
STEP_ALONE, STEP_SHARDED = "step of a tiny model", "step of a tiny sharded model"


@dataclass
class Sample:
    """Something that is measured, and how long it takes."""

    name: str  # of the operation or the collective, or one of the names above
    # Seconds of the clock, and of all threads of the process.
    wall: float = 0.0
    cpu: float = 0.0
    operation: Operation | None = None  # what it is, if it is one operation
    nbytes: int = 0  # of a collective's whole tensor
    run: Callable[[], Any] = object  # does it
    repeats: int = 1  # how often it is done for one measurement

    def seconds(self, clock: str) -> float:
        return self.cpu if clock == "cpu" else self.wall


def actions_of(
    work: Workload, dtypes: Sequence[torch.dtype], device: torch.device, group: dist.ProcessGroup
) -> Iterator[Sample]:
    """Ranks: all of the group."""
    if device.type == "cpu":
        # The C library keeps freed memory for later, except for pieces of 32 MiB and more. Before it has freed a large
        # piece, results of some MiB are new memory again and again: bring it to where a training step soon brings it.
        torch.empty((32 << 20) - (1 << 16), dtype=torch.uint8)
    random_of = partial(torch.randn, device=device)
    for dtype in dtypes:
        for m, k, n in work.products:
            yield from _products(random_of(m, k, dtype=dtype), random_of(k, n, dtype=dtype))
    for shape in work.attentions:
        yield from _attention(*(random_of(shape, dtype=dtypes[-1]) for _ in range(3)))
    for nbytes in work.tensor_bytes:
        yield from _element_wise(*(random_of(nbytes // 1024, 256) for _ in range(3)))
    tiny = random_of(8), random_of(8)
    yield Sample(TINY, run=lambda: [torch.add(*tiny) for _ in range(NUM_TINY)])
    yield Sample(STEP_ALONE, run=_step_of(tiny_model, device))
    yield Sample(STEP_SHARDED, run=_step_of(tiny_sharded_model, device))
    for nbytes in work.collective_bytes if group.size() > 1 else ():
        whole, collectives = _collectives(nbytes, device, group)
        for name, start in collectives.items():
            yield Sample(name, nbytes=whole, run=partial(lambda begin: begin().wait(), start))
    if group.size() > 1 and device.type == "cuda":
        a, b = (random_of(*shape, dtype=dtypes[-1]) for shape in itertools.pairwise(work.products[-1]))
        yield Sample(BESIDE, nbytes=whole, run=partial(_beside, collectives[CollectiveKind.ALL_GATHER], a, b))


class _Seen(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        seen = operation_of(func, args, kwargs, result, _tensors, "")
        self.operations += [seen] if seen is not None else []
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]


def _operation(run: Callable[[], Any]) -> Sample:
    """A sample that runs one operation, besides views of its arguments."""
    with _Seen() as seen:
        run()
    operation = max(seen.operations, key=lambda item: (item.flops, item.nbytes))
    return Sample(operation.name, operation=operation, run=run)


def _products(a: torch.Tensor, b: torch.Tensor) -> Iterator[Sample]:
    a_columns, b_columns = a.t().contiguous(), b.t().contiguous()
    batches = torch.stack([a] * 4), torch.stack([b] * 4)
    yield _operation(lambda: torch.mm(a, b))
    yield _operation(lambda: torch.mm(a, b_columns.t()))
    yield _operation(lambda: torch.mm(a_columns.t(), b))
    yield _operation(lambda: torch.bmm(*batches))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[Sample]:
    yield _operation(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True))
    leaves = q, k, v = [item.detach().requires_grad_() for item in (query, key, value)]
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(result)
    yield _operation(lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True))


def _element_wise(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Iterator[Sample]:
    """``x`` stays as it is, up to rounding: nothing grows, and nothing becomes so small that it is slow."""
    aten, ones = torch.ops.aten, torch.ones(x.shape[-1], device=x.device)
    positive, shape = z.abs() + 1.0, [x.shape[-1]]
    _, mean, deviation = aten.native_layer_norm(x, shape, ones, ones, 1e-5)
    masks = [True, True, True]
    yield _operation(lambda: x + y)
    yield _operation(lambda: x.add_(y, alpha=1e-9))
    yield _operation(lambda: z.copy_(y))
    yield _operation(lambda: F.gelu(x))
    yield _operation(lambda: aten.gelu_backward(y, x))
    yield _operation(lambda: aten.native_layer_norm(x, shape, ones, ones, 1e-5))
    yield _operation(lambda: aten.native_layer_norm_backward(y, x, shape, mean, deviation, ones, ones, masks))
    yield _operation(lambda: torch.log_softmax(x, -1))
    yield _operation(lambda: x.addcdiv_(y, positive, value=1e-9))
    yield _operation(lambda: x.lerp_(y, 1e-9))


def _collectives(nbytes: int, device: torch.device, group: dist.ProcessGroup) -> tuple[int, dict[str, _Start]]:
    transport, label = transport_of(group, device), Label(["flat"])
    shard = torch.zeros(max(1, nbytes // 4 // group.size()), device=device)
    whole = torch.zeros(shard.numel() * group.size(), device=device)
    return whole.nbytes, {
        CollectiveKind.ALL_GATHER: partial(transport.all_gather, whole, shard, label),
        CollectiveKind.REDUCE_SCATTER: partial(transport.reduce_scatter, shard, whole, True, label),
        CollectiveKind.ALL_REDUCE: partial(transport.all_reduce, whole, True, label),
    }


def _beside(gather: _Start, a: torch.Tensor, b: torch.Tensor) -> None:
    """Products that take longer than the all-gathers that run at the same time."""
    works = [gather() for _ in range(NUM_GATHERS)]
    for _ in range(NUM_PRODUCTS):
        torch.mm(a, b)
    for work in works:
        work.wait()


# ---- The tiny model

ModelAndLoss = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]


def tiny_model(device: torch.device) -> ModelAndLoss:
    layers = [
        nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        for _ in range(4)
    ]
    model, inputs = nn.Sequential(*layers, nn.Linear(64, 64)).to(device), torch.randn(1, 8, 64, device=device)
    return model, lambda model: model(inputs).square().mean()


def tiny_sharded_model(device: torch.device) -> ModelAndLoss:
    model, loss_of = tiny_model(device)
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model), loss_of


def tiny_optimizer(is_cuda: bool, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=is_cuda)


def _step_of(factory: Callable[[torch.device], ModelAndLoss], device: torch.device) -> Callable[[], None]:
    model, loss_of = factory(device)
    optimizer = tiny_optimizer(device.type == "cuda", model)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

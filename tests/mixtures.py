"""A small mixture of experts whose blocks hold all their kinds of parameters themselves, and the ways to spread it.

A token goes to its experts by an all-to-all of torch.distributed, over ranks that have different tokens. One process
is the truth: it runs the parts of all data ranks one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_compose import fully_shard
from tests.harness import lasting_mesh

EXPERTS = ("up", "down", "down_a", "down_b")
DIM, HIDDEN, NUM_EXPERTS, NUM_CHOSEN, ROWS = 8, 16, 8, 2, 6  # ROWS of each data rank


class Block(nn.Module):
    """A router, a shared expert, and stacked routed experts.

    Attributes:
        bias: added to scores when experts are chosen; moved after each step instead of an auxiliary loss.
        counts: how many tokens of this rank have gone to each expert.
        capacity: tokens of one data rank that an expert takes; the rest is dropped.
        is_grouped: experts compute by one grouped product.
        lora: the rank of trained additions to frozen experts; 0: experts are trained themselves.
    """

    def __init__(self, capacity: int | None = None, is_grouped: bool = False, lora: int = 0) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.shared = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, DIM))
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, HIDDEN) / 2)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, DIM) / 2)
        if lora:
            self.down_a = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, lora))
            self.down_b = nn.Parameter(torch.randn(NUM_EXPERTS, lora, DIM) / 4)
            for name, param in self.named_parameters():
                param.requires_grad_(name in ("down_a", "down_b"))
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))
        self.register_buffer("counts", torch.zeros(NUM_EXPERTS))
        self.capacity, self.is_grouped = capacity, is_grouped
        self.ep: DeviceMesh | None = None
        self.tp: DeviceMesh | None = None  # over which each expert is spread
        self.folded: DeviceMesh | None = None  # of ranks with one batch, over which experts are spread too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(NUM_CHOSEN).indices
        return x + self.shared(x) + self.routed(*map(self.own, (x, chosen, scores.gather(-1, chosen))))

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank sends to experts, of what ranks with one batch have in common."""
        if self.folded is None:
            return tensor
        return DTensor.from_local(tensor, self.folded, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()

    def routed(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        expert, order = chosen.flatten().sort(stable=True)
        if self.capacity is not None:
            first = torch.searchsorted(expert, expert)
            has_room = torch.arange(len(expert)) - first < self.capacity
            expert, order = expert[has_room], order[has_room]
        counts = expert.bincount(minlength=NUM_EXPERTS)
        self.counts += counts
        token, weight = order // NUM_CHOSEN, weights.flatten()[order]
        y = self.dispatched(x[token], counts)
        routed = torch.zeros_like(x).index_add(0, token, y * weight[:, None])
        if self.folded is not None:
            routed = DTensor.from_local(routed, self.folded, [Shard(0)]).full_tensor()
        return routed

    def dispatched(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The tokens, sorted by expert, through the experts on all ranks of ``ep``."""
        if self.ep is None:
            return self.experts(x, counts)
        num, group = self.ep.size(), self.ep.get_group()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, got = counts.view(num, -1).sum(1).tolist(), arriving.view(num, -1)
        x = all_to_all_single_autograd(x, got.sum(1).tolist(), sent, group)
        here = torch.arange(got.shape[1]).repeat(num).repeat_interleave(arriving)  # the expert of each row
        order = here.argsort(stable=True)
        y = self.experts(x[order], got.sum(0))
        return all_to_all_single_autograd(y[order.argsort()], sent, got.sum(1).tolist(), group)

    def experts(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        up, down, *more = [self.local(name) for name in EXPERTS if hasattr(self, name)]
        if more:
            down = down + more[0] @ more[1]
        if self.tp is not None:
            x = DTensor.from_local(x, self.tp, [Replicate()]).to_local(grad_placements=[Partial()])
        if self.is_grouped:
            ends = counts.cumsum(0).int()
            y = F.grouped_mm(F.silu(F.grouped_mm(x, up, offs=ends)), down, offs=ends)
        else:
            parts = zip(x.split(counts.tolist()), up, down, strict=True)
            y = torch.cat([F.silu(part @ first) @ second for part, first, second in parts])
        return y if self.tp is None else DTensor.from_local(y, self.tp, [Partial()]).full_tensor()

    def local(self, name: str) -> torch.Tensor:
        param = getattr(self, name)
        if not isinstance(param, DTensor):
            return param
        terms = [Partial() if item.is_replicate() else item for item in param.placements]
        return param.to_local(grad_placements=terms)

    def move_bias(self, counts: torch.Tensor) -> None:
        """Away from experts that got more than the mean of ``counts``, those of all data ranks."""
        self.bias += 0.1 * (counts.mean() - counts).sign()
        self.counts.zero_()


class ChoosingBlock(nn.Module):
    """Experts that choose tokens, as many each: no size depends on a router, as in a dry run.

    Attributes:
        way: how tokens go to their experts: by ``torch.distributed``, by functional collectives or as a DTensor.
    """

    def __init__(self, dim: int, num_experts: int, ep: DeviceMesh, way: str) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(num_experts, dim, 4 * dim))
        self.down = nn.Parameter(torch.empty(num_experts, 4 * dim, dim))
        for name in ("up", "down"):
            setattr(self, name, nn.Parameter(distribute_tensor(getattr(self, name).detach(), ep, [Shard(0)])))
        self.ep, self.way = ep, way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        num_experts, num_ranks = len(self.router.weight), self.ep.size()
        chosen = self.router(rows).topk(len(rows) // num_experts, dim=0).indices.t().contiguous()  # of each expert
        if self.way == "dtensor":
            y = DTensor.from_local(rows[chosen], self.ep, [Shard(1)]).redistribute(placements=[Shard(0)]).to_local()
            y = DTensor.from_local(self.experts(y), self.ep, [Shard(0)]).redistribute(placements=[Shard(1)]).to_local()
        else:
            here = num_experts // num_ranks, num_ranks, chosen.shape[1], x.shape[-1]
            y = self.exchanged(rows[chosen]).view(num_ranks, here[0], *here[2:]).transpose(0, 1).flatten(1, 2)
            y = self.exchanged(self.experts(y).view(here).transpose(0, 1).contiguous().flatten(0, 1))
        return x + torch.zeros_like(rows).index_add(0, chosen.flatten(), y.flatten(0, 1)).view_as(x)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.up.to_local())), self.down.to_local())

    def exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """An equal part of the rows for each rank."""
        group = self.ep.get_group()
        if self.way == "functional":
            sizes = [len(x) // self.ep.size()] * self.ep.size()
            return all_to_all_single_autograd(x, sizes, sizes, group)
        return _Exchange.apply(x, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, received = group, torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(grad.contiguous(), ctx.group), None


class Choosing(nn.Module):
    def __init__(self, ep: DeviceMesh, way: str, dim: int, num_experts: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, dim), nn.Linear(dim, 512)
        self.blocks = nn.ModuleList(ChoosingBlock(dim, num_experts, ep, way) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def choosing(
    way: str, ep_size: int, shards: bool = True, dim: int = 64, num_experts: int = 8, length: int = 128
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A mixture for ``plan`` on a mesh of (fsdp, ep), and its loss. ``shards``: it is sharded over all ranks."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // ep_size, ep_size), mesh_dim_names=("fsdp", "ep"))
    model = Choosing(mesh["ep"], way, dim, num_experts)
    data = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for module in (*model.blocks, model) if shards else ():
        fully_shard(module, mesh=data)
    tokens = torch.zeros(4, length, dtype=torch.int64)
    return model, lambda model: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class Mixture(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Block(**options) for _ in range(2)])
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mixture(dtype: torch.dtype = torch.float64, **options: Any) -> Mixture:
    torch.manual_seed(0)
    return Mixture(**options).to(dtype)


class Layout(NamedTuple):
    """Sizes of (replicate, fsdp, ep, tp) and of a pipeline, whose product is the number of ranks.

    ``folds``: experts are spread over the ranks of ``tp``, not each cut over them; ``ones``: meshes have dimensions for
    replicas and ``tp`` even if these are of one rank.
    """

    replicate: int = 1
    fsdp: int = 1
    ep: int = 1
    tp: int = 1
    folds: bool = False
    pp: int = 1
    ones: bool = False

    @property
    def has_replicas(self) -> bool:
        return self.replicate > 1 or self.ones

    @property
    def cuts(self) -> bool:
        return self.tp > 1 or self.ones

    @property
    def mesh(self) -> DeviceMesh:
        """What experts are spread over, and what is left for them."""
        return lasting_mesh(("pp", "replicate", "fsdp", "ep", "tp"), (self.pp, *self[:4]))

    @property
    def dense(self) -> DeviceMesh:
        """All ranks with batches of their own, and what other parameters than experts are spread over."""
        if not self.has_replicas:
            return lasting_mesh(("pp", "dp", "model"), (self.pp, self.num_parts, self.tp))
        names = ("pp", "outer", "inner", "model")
        return lasting_mesh(names, (self.pp, self.replicate, self.fsdp * self.ep, self.tp))

    @property
    def mesh_of_folded(self) -> DeviceMesh:
        """What experts are spread over, if they are spread over the ranks of ``tp`` too."""
        sizes = (self.pp, self.replicate, self.fsdp, self.ep * self.tp)
        return lasting_mesh(("pp", "replicate", "fsdp", "ep"), sizes)

    @property
    def data(self) -> DeviceMesh:
        """A mesh for ``fully_shard``."""
        return self.dense["outer", "inner"] if self.has_replicas else self.dense["dp"]

    @property
    def num_parts(self) -> int:
        return self.replicate * self.fsdp * self.ep

    @property
    def place(self) -> int:
        """This rank's number among the data ranks."""
        return dist.get_rank() // self.tp % self.num_parts


EP_LAYOUTS = [
    Layout(fsdp=2, ep=2), Layout(ep=4), Layout(fsdp=4, ep=1), Layout(replicate=2, ep=2), Layout(replicate=2, fsdp=2),
    Layout(fsdp=2, tp=2), Layout(ep=2, tp=2), Layout(replicate=2, tp=2), Layout(ep=2, tp=2, folds=True),
]  # fmt: skip


def spread(block: Block, layout: Layout) -> None:
    """The experts over ``ep``, and each of them over ``tp``."""
    mesh = layout.mesh
    if layout.folds:
        block.folded = mesh["tp"]
        spread_over(block, layout.mesh_of_folded["ep"])
    elif not layout.cuts:
        spread_over(block, mesh["ep"])
    else:
        block.tp = mesh["tp"]
        spread_over(block, mesh["ep"], mesh["ep", "tp"])


def spread_over(block: Block, ep: DeviceMesh, both: DeviceMesh | None = None) -> None:
    block.ep = ep
    for name in (name for name in EXPERTS if hasattr(block, name)):
        param, cut = getattr(block, name), Replicate() if name == "down_b" else Shard(2 if name == "up" else 1)
        placed = distribute_tensor(param.detach(), both or ep, [Shard(0)] if both is None else [Shard(0), cut])
        setattr(block, name, nn.Parameter(placed, param.requires_grad))


def shard(
    model: Mixture,
    layout: Layout,
    shard_one: Callable[..., Any] = fully_shard,
    limit: str | None = None,
    **options: Any,
) -> Mixture:
    for block in model.blocks:
        spread(block, layout)
        shard_one(block, mesh=layout.data, **options)
    if limit is not None:
        options["limit_unsharded_bytes"] = limit
    shard_one(model, mesh=layout.data, **options)
    return model


def batch(
    step: int, layout: Layout, dtype: torch.dtype = torch.float64, is_even: bool = True
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of all data ranks."""
    generator = torch.Generator().manual_seed(step)
    num_rows = [ROWS if is_even else 1 + 3 * i for i in range(layout.num_parts)]
    xs = torch.randn(sum(num_rows), DIM + 3, generator=generator, dtype=torch.float64).to(dtype).split(num_rows)
    return [(x[:, :DIM], x[:, DIM:]) for x in xs]


def loss_of(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(part[0]), part[1])

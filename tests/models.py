"""Small models that tests share, and batches for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_compose import fully_shard

VOCAB, SEQ, GLOBAL_BATCH = 29, 6, 12  # the batch divides by 1, 2, 3 and 4 ranks; the vocabulary divides by none
IN, DIM, OUT, ROWS = 3, 5, 2, 12  # sizes that 2 and 3 ranks do not divide; a global batch that they do


class Block(nn.Module):
    """A pre-norm transformer block with real attention."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x))
        (batch, seq, _), dim = qkv.shape, x.shape[-1]  # sequence parallelism gives a part of the sequence in x
        qkv = qkv.view(batch, seq, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """``use_reentrant``: ``None`` for no activation checkpointing, else the kind."""

    def __init__(self, dim: int = 16, layers: int = 3, use_reentrant: bool | None = None, tie: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.tokens, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(SEQ, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        if tie:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


def shard_layers(model: Any, **options: Any) -> Any:
    """A group for each of the model's layers (or blocks, or the modules of an ``nn.Sequential``), one for the rest."""
    for layer in getattr(model, "blocks", getattr(model, "layers", model)):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def gpt_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def batches(steps: int, seed: int = 7) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=generator)


class Trip(nn.Module):
    """Passes its input on. Armed with an error, raises it the next time its forward, or its backward, is reached;
    ``passes`` lets it go by so many times first. ``look`` is called in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: dict[str, BaseException] = {}
        self.passes = 0
        self.look: Callable[[], None] = lambda: None

    def arm(self, where: str, error: BaseException, passes: int = 0) -> None:
        self.armed, self.passes = {where: error}, passes

    def reached(self, where: str) -> None:
        if where in self.armed:
            if self.passes:
                self.passes -= 1
            else:
                raise self.armed.pop(where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        self.reached("forward")
        return PassThrough.apply(x, self)


class PassThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.trip = trip
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.trip.reached("backward")
        return grad, None


class SmallBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.trip, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 7), Trip(), nn.Linear(7, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.trip(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    """``use_reentrant``: ``None`` for no activation checkpointing, else the kind."""

    def __init__(self, blocks: int = 3, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed, self.trip, self.head = nn.Linear(IN, DIM), Trip(), nn.Linear(DIM, OUT)
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trip(self.embed(x))
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def rows(step: int = 0, size: int = IN) -> torch.Tensor:
    return torch.randn(ROWS, size, generator=torch.Generator().manual_seed(step))


class Layer(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def inputs(steps: int = 1, *shape: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        yield torch.randn(GLOBAL_BATCH, *(shape or (DIM,)), generator=generator)


class Branches(nn.Module):
    """Two layers and two side branches: in the root's group, and in one of its own. ``use`` names those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.side = nn.ModuleDict({"a": nn.Linear(DIM, DIM), "b": nn.Linear(DIM, DIM)})

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            for name in use:
                x = x + self.side[name](x)
        return x


def shard_branches(model: Branches) -> None:
    fully_shard(model.side["b"])
    shard_layers(model)


class Experts(nn.Module):
    """Runs the expert whose number ``choice`` says, through equal-shaped groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.choice = nn.Linear(IN, DIM), 0  # None: no expert
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return x if self.choice is None else self.experts[self.choice](x)

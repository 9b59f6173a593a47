"""Small models and reference training that the tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_compose import fully_shard, reshard, unshard
from fsdp_compose.group.registry import states_to_run
from fsdp_compose.group.state import _FSDPState

VOCAB, SEQ, GLOBAL_BATCH = 29, 6, 12  # the batch divides by 1, 2, 3 and 4 ranks; the vocabulary divides by none


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


def shard_gpt(model: GPT, **kwargs) -> GPT:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def gpt_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def batches(steps: int, seed: int = 7) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=generator)


def local_part(batch: torch.Tensor) -> torch.Tensor:
    """This rank's share of a global batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def sgd(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    # The default eps of 1e-8 blows gradients that are zero but for rounding up to the learning rate.
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def train(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    steps: int = 10,
    microbatches: int = 1,
    share: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch,
    without_sync: Callable[[nn.Module], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> torch.Tensor:
    """Losses of ``steps`` optimizer steps; ``without_sync`` wraps all microbatches of a step but its last."""
    optimizer = make_optimizer(model.parameters())
    losses = []
    for batch in batches(steps):
        total = torch.zeros(())
        for i, part in enumerate(batch.chunk(microbatches)):
            with without_sync(model) if i + 1 < microbatches else nullcontext():
                loss = gpt_loss(model, share(part)) / microbatches
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return torch.stack(losses)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter of a sharded model, whole, by FQN. All ranks must call it."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = {}
    for state, module in sharded_modules(model):
        unshard(module)
        for handle in state._handles:
            for sharded, whole in zip(handle.sharded_params, handle.unsharded.params, strict=True):
                found[names[id(sharded)]] = whole.detach().clone()
        reshard(module)
    return {name: found[name] for name in names.values()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Every gradient of a sharded model, whole, by FQN; ``None`` where there is none. All ranks must call it."""
    names = {id(param): name for name, param in model.named_parameters()}
    found: dict[str, torch.Tensor | None] = {}
    for state, _ in sharded_modules(model):
        for handle in state._handles:
            flat = torch.zeros_like(handle.shard)
            for sharded, (start, stop, _shape) in zip(handle.sharded_params, handle.local_shards, strict=True):
                if sharded.grad is not None:
                    flat[start:stop] = sharded.grad.to_local().flatten()
            whole = torch.empty(handle.layout.flat_numel, dtype=flat.dtype)
            dist.all_gather_into_tensor(whole, flat)
            for sharded, view in zip(handle.sharded_params, handle.full_views_of(whole), strict=True):
                found[names[id(sharded)]] = view.clone() if sharded.grad is not None else None
    return {name: found[name] for name in names.values()}


def sharded_modules(model: nn.Module) -> list[tuple[_FSDPState, nn.Module]]:
    return [(state, state.modules[0]()) for state, _ in states_to_run(model)]


def assert_parameters_match(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    ours, theirs = full_parameters(model), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        difference = (ours[name] - expected.detach()).abs().max().item() if expected.numel() else 0.0
        assert difference <= tolerance, f"{name} differs by {difference}"


def assert_gradients_match(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    ours = full_gradients(model)
    for name, param in reference.named_parameters():
        got = ours[name]
        assert (got is None) == (param.grad is None), f"{name}: gradient {got}, expected {param.grad}"
        if got is not None and got.numel():
            difference = (got - param.grad).abs().max().item()
            assert difference <= tolerance, f"{name}: gradients differ by {difference}"


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """``model`` and an equal copy, for sharded and unsharded training."""
    return model, copy.deepcopy(model)

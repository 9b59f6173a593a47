"""The models that the benchmarks train: transformer blocks, tiny ones for host overhead and real ones for bytes.

Every model has ``.blocks``; a block has 12 parameters (``MixtureBlock``: 13, and 3 of each expert), all trainable.
Wrapping schemes (``systems.py``) make one group of each block, one of its experts and one of what remains.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

PARAMETERS_PER_BLOCK = 12


class Block(nn.Module):
    """A pre-norm transformer block: two layer norms and four linear layers, each with weight and bias."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class TinyBlocks(nn.Module):
    """Blocks so small that a step is nearly all host work: the model of the host-overhead benchmark."""

    def __init__(self, num_blocks: int = 48, width: int = 16, num_heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.head = nn.Linear(width, width)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def example_input(self) -> torch.Tensor:
        return torch.randn(1, 2, self.width)


class Expert(nn.Module):
    """Two projections, one gating the other, and one back. Those of routed experts may be DTensors, of which each rank
    computes with its part: the experts of other ranks are the rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (projection.weight for projection in (self.gate, self.up, self.down))
        gate, up, down = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class Experts(nn.ModuleList):
    """The routed experts that one rank computes with."""

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        routed = [
            sum(weight * self[i](token) for weight, i in zip(own, chosen_of_token.tolist(), strict=True))
            for token, own, chosen_of_token in zip(tokens, weights, chosen, strict=True)
        ]
        return torch.stack(routed)


class MixtureBlock(nn.Module):
    """A block in the shape of DeepSeek-V3's: latent attention, an fp32 router, a shared expert, routed ones, of which a
    token takes two. Most experts of a step get no token."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.attention_norm, self.query_norm, self.latent_norm, self.mlp_norm = (nn.RMSNorm(width) for _ in range(4))
        self.query_down, self.query_up, self.latent_down, self.projection = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.latent_up = nn.Linear(width, 2 * width, bias=False)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.shared = Expert(width)
        self.experts = Experts(Expert(width) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        query = self.query_up(self.query_norm(self.query_down(normed)))
        key, value = self.latent_up(self.latent_norm(self.latent_down(normed))).chunk(2, -1)
        x = x + self.projection(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        tokens = self.mlp_norm(x)
        scores = F.linear(tokens.float(), self.router.weight.float()).sigmoid()
        weights, chosen = scores.topk(2, -1)
        routed = self.experts(tokens[0], weights[0].to(tokens.dtype), chosen[0])
        return x + self.shared(tokens) + routed[None]


class TinyMixtures(TinyBlocks):
    """Blocks of a mixture of experts in the shape of DeepSeek-V3, as ``TinyBlocks``."""

    def __init__(self, num_blocks: int, num_experts: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(MixtureBlock(num_experts, self.width) for _ in range(num_blocks))


class GPT(nn.Module):
    """A byte-level GPT with an untied head."""

    def __init__(self, num_blocks: int = 8, width: int = 256, num_heads: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.vocabulary = vocabulary

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def example_input(self) -> torch.Tensor:
        return torch.randint(self.vocabulary, (2, 32))


# ---- a Llama-3-like model, for accelerators


class LlamaBlock(nn.Module):
    """RMSNorm, grouped-query attention with rotary positions, SwiGLU; no biases."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim // num_heads
        self.attention_norm = nn.RMSNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        query = self.query(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.key(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        value = self.value(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, dim))


def _rotate(x: torch.Tensor, theta: float = 500_000.0) -> torch.Tensor:
    """Rotary position embedding: pairs of elements turn with their position, each pair at its own speed."""
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Llama(nn.Module):
    """Blocks in the proportions of Llama 3 8B, with a small vocabulary, so that the blocks are what is measured."""

    def __init__(
        self,
        dim: int = 4096,
        num_blocks: int = 8,
        vocabulary: int = 8192,
        hidden: int | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        num_heads = max(4, dim // 128)
        sizes = dim, num_heads, num_kv_heads or num_heads // 4, hidden or 7 * dim // 2
        self.blocks = nn.ModuleList(LlamaBlock(*sizes) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.vocabulary = vocabulary

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def num_groups(model: nn.Module) -> int:
    """How many groups the systems make of ``model``: one of each block, one of its experts, and the root."""
    return len(model.blocks) + sum(isinstance(block, MixtureBlock) for block in model.blocks) + 1


def parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

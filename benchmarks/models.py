"""The models that the benchmarks train: transformer blocks, tiny ones for host overhead and real ones for bytes.

Every model has ``.blocks``; a block has 12 parameters, all trainable. Wrapping schemes (``systems.py``) make one group
of each block and one of what remains.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

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


def num_groups(model: nn.Module) -> int:
    """How many groups the systems make of ``model``: one of each block, and the root."""
    return len(model.blocks) + 1


def parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

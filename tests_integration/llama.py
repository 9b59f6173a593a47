"""A tiny Llama with transformers' real modelling code, and batches for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, BATCH = 67, 12, 4


def config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 36, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
        "attn_implementation": "eager", "use_cache": False,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **changes})


def model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(config(**changes))


def batches(num: int) -> Iterator[torch.Tensor]:
    """This rank's token ids."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(num):
        whole = torch.randint(VOCABULARY, (BATCH * dist.get_world_size(), LENGTH), generator=generator)
        yield whole.chunk(dist.get_world_size())[dist.get_rank()]


def mean(loss: torch.Tensor) -> float:
    """Over the ranks."""
    value = loss.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()

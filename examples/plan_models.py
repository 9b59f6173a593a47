"""Models for ``python -m fsdp_compose plan``: the GPT of train_gpt.py, and three models from transformers.

    python -m fsdp_compose plan --model examples/plan_models.py:gpt --world-size 8,64
    python -m fsdp_compose plan --model examples/plan_models.py:llama --set layers=8 --world-size 8,64

A factory returns the model and a function that makes a batch and returns its loss. It is called for each number of
ranks; the machine does not need the memory that the model asks for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
import train_gpt
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def gpt(
    dim: int = 256,
    layers: int = 4,
    heads: int = 4,
    batch: int = 12,
    seq: int = 128,
    tie: bool = True,
    checkpoint_activations: bool = False,
) -> Made:
    """Builds the model of train_gpt.py with its defaults; ``batch`` is the number of sequences of one rank."""
    settings = argparse.Namespace(
        dim=dim, layers=layers, heads=heads, seq_len=seq, tie=tie, checkpoint_activations=checkpoint_activations
    )

    def loss_of(model: nn.Module) -> Tensor:
        tokens = torch.zeros(batch, seq + 1, dtype=torch.int64)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return train_gpt.GPT(settings), loss_of


def llama(
    dim: int = 256, layers: int = 4, batch: int = 4, seq: int = 128, checkpoint_activations: bool = False
) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=dim,
        intermediate_size=dim * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=dim // 64,
        num_key_value_heads=max(1, dim // 256),
        vocab_size=4096,
        use_cache=False,
    )
    return _language_model(LlamaForCausalLM(config), batch, seq, checkpoint_activations)


def gpt2(dim: int = 256, layers: int = 4, batch: int = 4, seq: int = 128, checkpoint_activations: bool = False) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=dim, n_layer=layers, n_head=dim // 64, n_positions=seq, vocab_size=4096, use_cache=False)
    return _language_model(GPT2LMHeadModel(config), batch, seq, checkpoint_activations)


def mixtral(
    dim: int = 256, layers: int = 4, batch: int = 4, seq: int = 128, checkpoint_activations: bool = False
) -> Made:
    """Builds a mixture of experts with grouped matrix products: a loop over experts would depend on the routing."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=dim,
        intermediate_size=dim * 2,
        num_hidden_layers=layers,
        num_attention_heads=dim // 64,
        num_key_value_heads=max(1, dim // 128),
        num_local_experts=4,
        vocab_size=4096,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    return _language_model(MixtralForCausalLM(config), batch, seq, checkpoint_activations)


def _language_model(model: nn.Module, batch: int, seq: int, checkpoint_activations: bool) -> Made:
    if checkpoint_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss_of(model: nn.Module) -> Tensor:
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        return model(input_ids=tokens, labels=tokens).loss

    return model, loss_of

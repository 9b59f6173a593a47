"""torchtitan's functions around FSDP2, on a decoder laid out as its own are (those need Triton)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import fsdp as titan

from tests_integration import llama
from tests_integration.side_by_side import assert_same, pin_no_memory, results_of

DIM = 16


class Block(nn.Module):
    moe_enabled = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))).cumsum(1) / x.shape[1]


class Experts(nn.Module):
    num_experts = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.num_experts, DIM, DIM) / DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bsd,ndo->bso", x, self.weight)


class MixtureBlock(Block):
    moe_enabled = True

    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.Module()
        self.moe.routed_experts = nn.Module()
        self.moe.routed_experts.inner_experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.moe.routed_experts.inner_experts(x)


class Decoder(nn.Module):
    def __init__(self, block: type[nn.Module], enable_weight_tying: bool = False) -> None:
        super().__init__()
        self.enable_weight_tying, self.skips_head = enable_weight_tying, False
        self.tok_embeddings = nn.Embedding(llama.VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): block() for i in range(3)})
        self.norm, self.lm_head = nn.RMSNorm(DIM), nn.Linear(DIM, llama.VOCABULARY, bias=False)
        if enable_weight_tying:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x)
        return x if self.skips_head else self.lm_head(x)


def loss_of(
    logits: torch.Tensor, labels: torch.Tensor, global_valid_tokens: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return loss / (llama.BATCH * llama.LENGTH * 2), {}


def train(
    model: Decoder, policy: str = "default", dtype: torch.dtype = torch.float32, chunks: int = 0, **options: Any
) -> dict[str, Any]:
    names = options.pop("names", ("fsdp",))
    mesh = init_device_mesh("cpu", (2,) if len(names) == 1 else (2, 1), mesh_dim_names=names)
    titan.apply_fsdp_to_decoder(
        model, mesh, dtype, torch.float32, False, reshard_after_forward_policy=policy, **options
    )
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # FSDP2 divides by nothing on gloo only so
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    chunked = ChunkedLossWrapper.__new__(ChunkedLossWrapper)
    chunked.num_chunks, chunked.loss_fn = chunks, loss_of
    chunked.set_lm_head(model.lm_head)
    model.skips_head = bool(chunks)
    losses, norms = [], []
    for ids in llama.batches(4):
        output = model(ids)
        loss = chunked(output, ids)[0] if chunks else loss_of(output, ids)[0]
        loss.backward()
        losses.append(llama.mean(loss))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    groups = sum(isinstance(module, fsdp.FSDPModule) for module in model.modules())
    return {"losses": losses, "norms": norms, "groups": groups}


def make(block: type[nn.Module] = Block, **options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(block, **options)


def plain(folder: Path) -> dict[str, Any]:
    return train(make())


def always(folder: Path) -> dict[str, Any]:
    return train(make(), "always")


def bf16(folder: Path) -> dict[str, Any]:
    return train(make(), dtype=torch.bfloat16)


def tied(folder: Path) -> dict[str, Any]:
    return train(make(enable_weight_tying=True))


def hybrid(folder: Path) -> dict[str, Any]:
    return train(make(), names=("dp_replicate", "fsdp"))


def fewer_experts_than_ranks(folder: Path) -> dict[str, Any]:
    Experts.num_experts = 1  # which are cut along dim 1 then
    return train(make(MixtureBlock))


def offloaded(folder: Path) -> dict[str, Any]:
    pin_no_memory()
    return train(make(), cpu_offload=True)


def experts(folder: Path) -> dict[str, Any]:
    return train(make(MixtureBlock))


def in_chunks(folder: Path) -> dict[str, Any]:
    return train(make(), chunks=3)


@pytest.mark.parametrize(
    "program", [plain, always, bf16, tied, hybrid, fewer_experts_than_ranks, experts, offloaded, in_chunks]
)
def test_training(program, tmp_path):
    assert_same(results_of(program, tmp_path), 2e-2 if program is bf16 else 2e-5)

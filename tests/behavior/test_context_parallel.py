"""Context parallelism: torch's ``context_parallel`` around a sharded model, over the data ranks dp x cp."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fsdp_compose import clip_grad_norm_, flat_parameters, functional_mode, no_sync
from tests.harness import distributed, lasting_mesh
from tests.models import Block, shard_layers
from tests.training import adamw

VOCAB, SEQ, BATCH, DIM = 29, 8, 8, 16
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class LM(nn.Module):
    """Positions are given: a rank has a part of the sequence, of which it knows only by them."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


# ---- torch's ring attention is made for the kernels of accelerators: here with those of the CPU


def _ring_attention(_op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    query, key, value, dropout, is_causal = (*args, 0.0, False)[:5]
    mesh, local = query.device_mesh, [item.to_local() for item in (query, key, value)]
    out, logsumexp = _attention._templated_ring_attention(
        mesh.get_group(), 2, _FLASH, *local, is_causal=is_causal, dropout_p=dropout, **kwargs
    )
    return DTensor.from_local(out, mesh, [Shard(2)]), DTensor.from_local(logsumexp, mesh, [Shard(2)])


def _ring_attention_backward(_op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    *tensors, dropout, is_causal = args
    mesh = tensors[1].device_mesh
    grad_out, query, key, value, out, logsumexp = (item.to_local() for item in tensors)
    grads = _attention._templated_ring_attention_backward(
        mesh.get_group(), 2, _FLASH_BACKWARD, grad_out, "grad_out", query, key, value, out, logsumexp, is_causal,
        dropout_p=dropout, **kwargs,
    )  # fmt: skip
    return tuple(DTensor.from_local(item, mesh, [Shard(2)]) for item in grads)


@contextmanager
def in_context(mesh: DeviceMesh, *buffers: torch.Tensor) -> Iterator[None]:
    """``buffers`` are this rank's parts of the sequence within."""
    handlers = {_FLASH: _ring_attention, _FLASH_BACKWARD: _ring_attention_backward}
    dims = [item.ndim - 1 for item in buffers]
    with (
        mock.patch.dict(_attention.custom_ops, handlers),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=dims, no_restore_buffers={*buffers}),
    ):
        yield


# ---- training


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    batch = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator)
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def loss_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten())


def backward(model: nn.Module, mesh: DeviceMesh, step: int) -> torch.Tensor:
    """Train on this rank's part of the batch and of the sequence; return the loss of all ranks."""
    ids, labels = (item.chunk(mesh.size(0))[mesh.get_local_rank("dp")].clone() for item in data(step))
    positions = torch.arange(SEQ)
    with in_context(mesh["cp"], ids, labels, positions):
        loss = loss_of(model, ids, labels, positions)
        loss.backward()
    return loss.detach()


def shard(model: LM, mesh: DeviceMesh, ways: str) -> None:
    data_mesh = mesh["dp", "cp"]  # hybrid: replicas over dp, shards over cp
    if ways == "sharded":
        data_mesh = data_mesh._flatten("dp_cp")
    shard_layers(model, mesh=data_mesh)


@pytest.mark.parametrize("recomputes", (False, True))
@pytest.mark.parametrize("ways", ("sharded", "hybrid"))
@pytest.mark.parametrize("shape", ((2, 2), (1, 4)))
@distributed(world_size=4)
def test_trains_like_one_process(shape, ways, recomputes):
    mesh = lasting_mesh(("dp", "cp"), shape)
    torch.manual_seed(0)
    reference = LM()
    ours = copy.deepcopy(reference)
    ours.recomputes = recomputes
    shard(ours, mesh, ways)
    params = flat_parameters(ours) if recomputes else ours.parameters()
    optimizers = adamw(params), adamw(reference.parameters())
    for step in range(3):
        if step == 1:
            with no_sync(ours):
                backward(ours, mesh, 7)
            loss_of(reference, *data(7), torch.arange(SEQ)).backward()
        backward(ours, mesh, step)
        loss_of(reference, *data(step), torch.arange(SEQ)).backward()
        for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=0, atol=2e-6)
        norms = [clip_grad_norm_(model.parameters(), 0.1) for model in (ours, reference)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.detach().full_tensor(), b.detach(), rtol=0, atol=5e-6)


@distributed(world_size=4)
def test_in_functional_mode():
    mesh = lasting_mesh(("dp", "cp"))
    torch.manual_seed(0)
    reference = LM()
    ours = copy.deepcopy(reference)
    shard(ours, mesh, "sharded")
    with functional_mode(ours):
        backward(ours, mesh, 0)
    loss_of(reference, *data(0), torch.arange(SEQ)).backward()
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=0, atol=2e-6)

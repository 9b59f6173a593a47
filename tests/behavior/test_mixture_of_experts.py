"""A mixture of experts of transformers: its experts as groups of their own, and spread over ranks."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from fsdp_compose import clip_grad_norm_, fully_shard
from tests.behavior.test_expert_parallel import Gathered, Summed
from tests.harness import distributed, lasting_mesh

VOCAB, NUM_EXPERTS = 32, 4


def mixtral() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2, max_position_embeddings=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randint(VOCAB, (4, 9), generator=generator)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def compare(model: nn.Module, reference: nn.Module, place: int, num_places: int) -> None:
    """Train both, on this rank's part of each batch and on all of it."""
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4) for net in (model, reference)]
    for batch in batches():
        loss_of(model, batch.chunk(num_places)[place]).backward()
        loss_of(reference, batch).backward()
        norms = [clip_grad_norm_(net.parameters(), 0.5) for net in (model, reference)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().full_tensor(), theirs.detach(), rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("shape", ((4,), (2, 2)))
@distributed(world_size=4)
def test_experts_as_groups_of_their_own(shape):
    """Each layer's experts, its rest, and what is left; also as a hybrid."""
    model = mixtral()
    reference = copy.deepcopy(model)
    mesh = lasting_mesh(("replicate", "shard")[-len(shape) :], shape)
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compare(model, reference, torch.distributed.get_rank(), 4)


def spread(experts: MixtralExperts, ep: DeviceMesh) -> None:
    """Over the ranks of ``ep``: each computes its experts for the tokens of all."""
    group, rank, num = ep.get_group(), ep.get_local_rank(), ep.size()
    num_local = NUM_EXPERTS // num
    for name, param in [*experts.named_parameters()]:
        experts.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), ep, [Shard(0)])))

    def forward(self: MixtralExperts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        local = index_of_all = Gathered.apply(index.float(), group).long() - rank * num_local
        local = torch.where((index_of_all >= 0) & (index_of_all < num_local), local, num_local)  # theirs for "none"
        mine = types.SimpleNamespace(num_experts=num_local, act_fn=self.act_fn, config=self.config)
        mine.gate_up_proj, mine.down_proj = self.gate_up_proj.to_local(), self.down_proj.to_local()
        result = MixtralExperts.forward(mine, Gathered.apply(x, group), local, Gathered.apply(weights, group))
        return Summed.apply(result, group).chunk(num)[rank]

    experts.forward = types.MethodType(forward, experts)


@pytest.mark.parametrize("shape", ((2, 2), (1, 4)))
@distributed(world_size=4)
def test_experts_spread_over_ranks(shape):
    """Experts over ``ep``, and sharded over ``edp``; the rest is sharded over all ranks. No factor by hand."""
    model = mixtral()
    reference = copy.deepcopy(model)
    mesh = lasting_mesh(("edp", "ep"), shape)
    for layer in model.model.layers:
        spread(layer.mlp.experts, mesh["ep"])
        fully_shard(layer.mlp.experts, mesh=mesh["edp"])
        fully_shard(layer)
    fully_shard(model)
    compare(model, reference, torch.distributed.get_rank(), 4)

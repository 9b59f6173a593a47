"""Wire formats in graphs of a whole model."""

from __future__ import annotations

import torch

import fsdp_compose
from fsdp_compose import MixedPrecisionPolicy, set_wire_formats
from tests.harness import distributed
from tests.models import Stack, rows, shard_layers
from tests.training import adamw, mean_square


@distributed(world_size=2)
def test_graphs_send_the_same_bits_as_eager_steps():
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = shard_layers(Stack(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        set_wire_formats(model, all_gather="int8", reduce_scatter="int8")
        run = fsdp_compose.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
        optimizer = adamw(model.parameters())
        losses = []
        for step in range(3):
            loss = mean_square(run, rows(step))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    assert found[0] == found[1]

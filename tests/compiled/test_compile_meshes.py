"""A compiled whole model with tensor and sequence parallelism: an eager twin's numbers."""

from __future__ import annotations

import functools

import pytest
import torch

from fsdp_compose import clip_grad_norm_
from tests import harness
from tests.compiled.test_whole_model_compile import compiled
from tests.flat.test_tensor_parallel import mesh_of, parallelize, reference, sharded_gpt, share_of, train
from tests.models import batches, gpt_loss, shard_layers
from tests.training import assert_same_parameters

distributed = functools.partial(harness.distributed, timeout=200)


@pytest.mark.parametrize("kind", ["tensor", "some", "sequence"])
@distributed(world_size=4)
def test_tensor_parallelism(kind):
    mesh = mesh_of(2, 2)
    model, eager = (sharded_gpt(mesh, kind, layers=2) for _ in range(2))
    found = []
    for item in (eager, model):
        optimizer = torch.optim.AdamW(item.parameters(), lr=1e-2, eps=1e-3)

        def train(item=item, optimizer=optimizer):
            values = []
            for batch in batches(3):
                loss = gpt_loss(item, share_of(mesh["dp"])(batch))
                loss.backward()
                values += [loss.detach(), clip_grad_norm_(item.parameters(), 1.0)]
                optimizer.step()
                optimizer.zero_grad()
            return values

        if item is eager:
            found.append(train())
        else:
            with compiled(item) as captured:
                found.append(train())
    assert len(captured.forwards) == len(captured.backwards) == 1 and not captured.breaks
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@distributed(world_size=4)
def test_compiled_blocks_with_tensor_parallelism_train_as_one_process():
    mesh = mesh_of(2, 2)
    model, expected = reference(layers=1), reference(layers=1)
    parallelize(model, mesh["tp"], "tensor")
    model.blocks[0].compile(backend="aot_eager")
    shard_layers(model, mesh=mesh["dp"])
    train(model, share_of(mesh["dp"]), steps=2)
    train(expected, steps=2)
    assert_same_parameters(model, expected)

"""A whole training step as a CUDA graph: captured once, replayed 50 times, equal to steps that were not captured."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_cuda import DEVICE, Training, process_group
from tests.models import GPT, gpt_loss

pytestmark = pytest.mark.gpu

REPLAYS = 50


def step_of(training: Training, batch: torch.Tensor) -> torch.Tensor:
    loss = gpt_loss(training.model, batch)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_captured_step_is_replayed(reshard_after_forward, is_compiled):
    base = GPT()
    with process_group("nccl"):
        ours, expected = (Training("fp64", DEVICE, base, reshard_after_forward=reshard_after_forward) for _ in range(2))
        if is_compiled:
            ours.model.compile()
            expected.model.compile()
        batch = ours.batches[0].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step_of(ours, batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            loss = step_of(ours, batch)
        losses = []
        for number in range(REPLAYS):
            batch.copy_(ours.batches[number % 4])
            graph.replay()
            losses.append(loss.clone())
        for _ in range(3):
            step_of(expected, expected.batches[0])
        theirs = [step_of(expected, expected.batches[number % 4]) for number in range(REPLAYS)]
        assert torch.equal(torch.stack(losses), torch.stack(theirs))
        for shard, other in zip(ours.shards(), expected.shards(), strict=True):
            assert torch.equal(shard, other)
        step_of(ours, batch)  # and the model goes on without the graph
        step_of(expected, batch)
        for shard, other in zip(ours.shards(), expected.shards(), strict=True):
            assert torch.equal(shard, other)

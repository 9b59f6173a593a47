"""Compiled models beside what watches, or changes, what ranks do: optional groups, and ranks that stand still."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compose.plugins.debugging.standstill import HANG_SECONDS_ENV
from tests.comm.test_hang import Lines, blocks_of_three
from tests.harness import distributed
from tests.runtime.test_optional import VisionLanguage, batch, loss_of, made, mean_loss, shard, steps_of
from tests.training import assert_same_gradients


@distributed(world_size=2, timeout=180)
def test_a_model_with_optional_groups():
    """Graphs break at its groups."""
    model = shard(made(VisionLanguage))
    compiled = torch.compile(model, backend="aot_eager")
    reference = made(VisionLanguage)
    rank = dist.get_rank()
    for step, plans in steps_of(VisionLanguage):
        loss_of(compiled, batch(step, rank), plans[rank]).backward()
        mean_loss(reference, step, plans).backward()
        assert_same_gradients(model, reference, rtol=1e-10, atol=1e-12)


@distributed(2, fresh=True)
def test_compilation_is_no_standing_still():
    os.environ[HANG_SECONDS_ENV] = "0.5"
    shown = Lines()
    logging.getLogger("fsdp_compose").addHandler(shown)
    model = blocks_of_three()

    def slow(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        time.sleep(1.5)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=slow)
    for _ in range(2):
        compiled(torch.ones(2, 8))
    assert not shown.lines, shown.lines

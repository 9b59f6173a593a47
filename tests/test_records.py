"""``FSDP_COMPOSE_DEBUG=1``: errors tell what every rank did last."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from fsdp_compose import fully_shard, meeting
from fsdp_compose.collectives import Communicator
from fsdp_compose.meeting import TIMEOUT_ENV
from fsdp_compose.records import DEBUG_ENV, RecordingCommunicator, last_of_every_rank
from tests.harness import distributed
from tests.models import local_part
from tests.test_invariants import (
    breakable_mesh,
    environment,
    experts,
    inputs,
    interrupt,
    loss_of,
    same_on_every_rank,
    stacks,
)


@distributed(world_size=(2, 3))
def test_error_of_a_mismatch_names_the_last_collective_of_every_rank(world_size):
    with environment(**{DEBUG_ENV: "1"}):
        model, _ = experts()
        model.choice = int(dist.get_rank() == world_size - 1)
        with pytest.raises(RuntimeError, match="issued different collectives") as error:
            loss_of(model, local_part(inputs())).backward()
        text = same_on_every_rank(str(error.value))
    assert f"The last collective of each rank ({DEBUG_ENV}=1)" in text
    for rank in range(world_size):
        assert f"rank {rank}: reduce-scatter of (root) (embed.weight and 1 more) in backward, collective" in text


@distributed(world_size=2)
def test_error_of_a_hang_names_where_every_rank_was():
    """Rank 1 goes no further than the first block; rank 0 waits for it in the next one."""
    with environment(**{DEBUG_ENV: "1", TIMEOUT_ENV: "1"}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_GRACE", timedelta(seconds=0.5))
        model, _ = stacks(mesh=breakable_mesh())
        if dist.get_rank() == 1:
            interrupt(model, "forward", 0, ValueError("by the user"))
            with pytest.raises(RuntimeError, match=r"rank\(s\) 0 did not come") as error:
                model(inputs())
        else:
            with pytest.raises(RuntimeError, match=r"the all-gather of the fully_shard group with blocks\.1") as error:
                model(inputs())
        text = str(error.value)
    assert "rank 1: all-gather of blocks.0 (blocks.0.norm.weight and 5 more) in forward, collective 2" in text
    assert "rank 0: all-gather of blocks.1 (blocks.1.norm.weight and 5 more) in forward, collective 3" in text


@distributed(world_size=2)
def test_nothing_is_recorded_when_it_is_off():
    for value, kind in (("0", Communicator), ("1", RecordingCommunicator)):
        with environment(**{DEBUG_ENV: value}):
            model, _ = stacks(mesh=breakable_mesh())
            loss_of(model, local_part(inputs())).backward()
            root = fully_shard.state(model).root
            assert type(root.communicator) is kind
            group = root.live_states()[0].mesh.shard_group
            text = last_of_every_rank(group)
            assert ("rank 1: " in text) == (value == "1") and "none" not in text

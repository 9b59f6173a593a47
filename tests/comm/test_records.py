"""``FSDP_COMPOSE_DEBUG=1``: errors tell what every rank did last."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import fully_shard, replicate
from fsdp_compose.core.comm import store
from fsdp_compose.core.comm.store import DEBUG_ENV, TIMEOUT_ENV, last_of_every_rank
from fsdp_compose.core.flat.collectives import Communicator
from fsdp_compose.core.group.registry import get_state
from fsdp_compose.plugins.debugging.lockstep import LockstepCommunicator
from tests.harness import breakable_mesh, distributed, environment, same_on_every_rank
from tests.models import rows
from tests.training import experts, interrupt, local_part, mean_square, stacks


@distributed(world_size=(2, 3))
def test_error_of_a_mismatch_names_the_collective_of_every_rank(world_size):
    with environment(**{DEBUG_ENV: "1"}):
        model, _ = experts()
        model.choice = int(dist.get_rank() == world_size - 1)
        with pytest.raises(RuntimeError, match="the ranks are about to do different things") as error:
            mean_square(model, local_part(rows())).backward()
        text = same_on_every_rank(str(error.value))
    others = "ranks 0, 1" if world_size == 3 else "rank 0"
    assert f"{others}: all-gather of experts.0 in forward" in text, text
    assert f"rank {world_size - 1}: all-gather of experts.1 in forward" in text, text


@distributed(world_size=2)
def test_errors_of_an_interruption_on_one_rank_name_where_every_rank_was():
    """Rank 1 goes no further than the first block; rank 0 is told in the next, and does not come to the recovery."""
    with environment(**{DEBUG_ENV: "1", TIMEOUT_ENV: "1"}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_GRACE", timedelta(seconds=0.5))
        model, _ = stacks(mesh=breakable_mesh())
        if dist.get_rank() == 1:
            interrupt(model, "forward", 0, ValueError("by the user"))
            with pytest.raises(RuntimeError, match=r"rank\(s\) 0 did not arrive") as error:
                model(rows())
        else:
            with pytest.raises(RuntimeError, match="rank 1: discarding an interrupted iteration") as error:
                model(rows())
        text = str(error.value)
    if dist.get_rank() == 1:
        assert "rank 1: all-gather of blocks.0 in forward, collective 2" in text
    assert "rank 0: all-gather of blocks.1 in forward" in text


@distributed(world_size=2)
def test_reductions_of_replicated_groups_are_recorded_and_agreed_on():
    with environment(**{DEBUG_ENV: "1"}):
        mesh = breakable_mesh()
        torch.manual_seed(0)
        models = [replicate(nn.Linear(4, 4), mesh=mesh) for _ in range(2)]
        models[0](torch.ones(2, 4)).sum().backward()
        assert "all-reduce of " in last_of_every_rank(get_state(models[0]).mesh.peers)
        with pytest.raises(RuntimeError, match="the ranks are about to do different things") as error:
            models[dist.get_rank()](torch.ones(2, 4)).sum().backward()
        same_on_every_rank(str(error.value))


@distributed(world_size=2)
def test_nothing_is_recorded_when_it_is_off():
    for value, kind in (("0", Communicator), ("1", LockstepCommunicator)):
        with environment(**{DEBUG_ENV: value}):
            model, _ = stacks(mesh=breakable_mesh())
            mean_square(model, local_part(rows())).backward()
            root = fully_shard.state(model).root
            assert type(root.communicator) is kind
            group = root.live_states()[0].mesh.shard_group
            text = last_of_every_rank(group)
            assert ("rank 1: " in text) == (value == "1") and "none" not in text

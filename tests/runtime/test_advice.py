"""What the first forward says among very many ranks, and that it is silent among few."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import fully_shard
from fsdp_compose.core.runtime.lazy_init import GroupSize, advice
from tests.harness import fake_process_group

KIB, MIB = 1 << 10, 1 << 20


def first_forward(num_ranks: int, rank: int = 0, width: int = 128, num_replicas: int = 1) -> nn.Module:
    with fake_process_group(rank, num_ranks):
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (num_replicas, num_ranks // num_replicas), mesh_dim_names=names)
        mesh = mesh if num_replicas > 1 else mesh["shard"]
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            model(torch.ones(2, width))
        return model


def test_small_groups_among_many_ranks_are_told_once(caplog):
    with caplog.at_level(logging.INFO, "fsdp_compose"):
        first_forward(4096)
    (record,) = caplog.records
    assert record.name == "fsdp_compose" and record.levelno == logging.WARNING
    text = record.getMessage()
    assert "4 of 4 fully_shard groups have less than 1 MiB on each of 4096 ranks" in text
    assert "Merge 4 adjacent groups into one, fully_shard([block, next_block, ...])" in text


@pytest.mark.parametrize("settings", [{"num_ranks": 64}, {"num_ranks": 4096, "rank": 7}])
def test_few_ranks_and_all_ranks_but_the_first_say_nothing(settings, caplog):
    with caplog.at_level(logging.INFO, "fsdp_compose"):
        first_forward(**settings)
    assert not caplog.records


def test_hybrid_sharding_over_few_ranks_is_not_advised_again(caplog):
    with caplog.at_level(logging.INFO, "fsdp_compose"):
        first_forward(4096, num_replicas=512)
    assert not caplog.records


def test_large_groups_among_very_many_ranks_are_advised_to_be_sharded_over_fewer():
    """A 70B llama's blocks among 16,384 ranks: 1.7 GB each in bf16, 104 KiB a rank."""
    groups = [GroupSize(f"layers.{i}", 104 * KIB) for i in range(80)] + [GroupSize("", 130 * KIB)]
    text = advice(groups, 16384)
    shards, replicas = map(int, reversed(re.search(r"a mesh of \((\d+), (\d+)\)", text).groups()))
    assert shards * replicas == 16384 and 104 * KIB * replicas >= MIB > 104 * KIB * replicas // 2
    assert "layers.0: 104 KiB" in text and "Or Merge 2 adjacent groups" in text


def test_one_mib_on_each_rank_is_enough():
    assert "a mesh of (4, 16)" in advice([GroupSize("layers.0", 256 * KIB)], 64)


def test_nothing_is_said_where_most_groups_are_large_enough():
    groups = [GroupSize(f"layers.{i}", 2 * MIB) for i in range(8)] + [GroupSize("norm", 16)]
    assert advice(groups, 1024) == "" and advice([], 1024) == ""
    assert advice([GroupSize("layers.0", MIB)], 512) == ""


def test_the_memory_of_merged_groups_is_bounded():
    """Groups of 3 GiB are not merged, however little of each is on a rank."""
    groups = [GroupSize(f"layers.{i}", 192 * KIB) for i in range(4)]
    text = advice(groups, 16384)
    assert "Merge" not in text and "Hybrid sharding helps" in text

"""What grows with the number of ranks, and what must not: up to 16,384 of them, played by one process.

What needs real ranks is in test_control_exchange.py and test_rendezvous.py.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compose import RaggedShard, fully_shard
from fsdp_compose.core.flat import layout as layout_module
from fsdp_compose.core.flat.layout import ParamSpec, plan_layout
from fsdp_compose.core.ragged import RunLengths
from tests.flat.test_layout import alignments, param_specs, properties
from tests.harness import fake_process_group, run_forked
from tests.internals import executed_lines

MANY = 16384
PIECES = 5  # nothing, a head, whole shards, a tail, nothing

counts_of_ranks = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(tuple)


# ---- counts of ranks as run lengths


@properties
@given(counts_of_ranks, st.integers(0, 40), st.integers(0, 40))
def test_run_lengths_are_the_sequence_that_they_stand_for(counts, start, stop):
    lengths = RunLengths.of(counts)
    assert lengths == counts and tuple(lengths) == counts and len(lengths) == len(counts)
    assert [lengths[i] for i in range(-len(counts), len(counts))] == [*counts, *counts]
    assert lengths[1:-1] == counts[1:-1] and lengths.total == sum(counts)
    assert [lengths.start(rank) for rank in range(len(counts))] == [sum(counts[:rank]) for rank in range(len(counts))]
    ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
    inside = [max(0, min(end, stop) - max(end - n, start)) for n, end in zip(counts, ends, strict=True)]
    assert tuple(lengths.within(start, stop)) == tuple(inside)
    with pytest.raises(IndexError):
        lengths[len(counts)]


@properties
@given(counts_of_ranks, counts_of_ranks)
def test_equal_sequences_are_equal_run_lengths_and_have_one_hash(one, other):
    a, b = RunLengths.of(one), RunLengths.of(other)
    assert (a == b) == (one == other) and (a.pieces == b.pieces) == (one == other)
    halves = RunLengths([(count, ranks) for count in one for ranks in (0, 1)])  # as pieces that could be fewer
    assert halves.pieces == a.pieces and hash(halves) == hash(a) == hash(one)
    placements = RaggedShard(one), RaggedShard(other)
    assert (placements[0] == placements[1]) == (one == other)
    assert RaggedShard(a.pieces) == placements[0] and hash(RaggedShard(a.pieces)) == hash(placements[0])


@properties
@given(param_specs(), st.sampled_from([1, 2, 3, 7, 64, 300]), alignments)
def test_a_layout_gives_each_parameter_at_most_five_pieces(specs, world_size, alignment):
    plan = plan_layout(specs, world_size, alignment)
    for index in range(len(specs)):
        counts = plan.counts(index)
        assert tuple(counts) == tuple(plan.local_shard(index, rank).numel for rank in range(world_size))
        assert len(counts.pieces) <= PIECES


def placement_of(world_size: int) -> RaggedShard:
    """That of a parameter with a head and a tail, in the middle of all ranks."""
    ranks = world_size - 4
    return RaggedShard(((0, 1), (5, 1), (64, ranks), (7, 1), (0, 1)), flat=True)


def test_a_placement_costs_the_same_among_all_numbers_of_ranks():
    few, many = placement_of(64), placement_of(MANY)
    assert len(many.counts) == MANY and many.num_placed == 12 + 64 * (MANY - 4)
    assert many.element_range((many.num_placed,), MANY - 2) == (5 + 64 * (MANY - 4), many.num_placed)
    assert repr(many) == f"RaggedShard([(0, 1), (5, 1), (64, {MANY - 4}), (7, 1), (0, 1)], flat=True)"
    assert eval(repr(many), {"RaggedShard": RaggedShard}) == many
    assert len(str(many)) < 80
    assert len(pickle.dumps(many)) <= len(pickle.dumps(few)) + 8
    assert pickle.loads(pickle.dumps(many)) == copy.deepcopy(many) == many != few


def test_placements_of_few_ranks_read_as_before():
    assert repr(RaggedShard((7, 3, 0))) == "RaggedShard([7, 3, 0])"
    assert str(RaggedShard((7, 3, 0), flat=True)) == "RE[7, 3, 0]"
    assert RaggedShard((7, 3, 0)).counts == (7, 3, 0) and RaggedShard((7, 3, 0)).starts == (0, 7, 10, 10)


def test_placements_are_loaded_where_only_known_names_are_allowed():
    file = io.BytesIO()
    torch.save(placement_of(MANY), file)
    assert file.tell() < 2048
    file.seek(0)
    assert torch.load(file, weights_only=True) == placement_of(MANY)


# ---- plans


def test_equal_groups_are_planned_once():
    layout_module.clear_plans()
    lines = []
    for layer in range(4):
        specs = [ParamSpec(f"{layer}.{i}", (67 + 2 * i, 129 + 2 * i), "rows") for i in range(60)]
        lines.append(executed_lines(lambda: plan_layout(specs, 64, 8, padding_budget=1.0)))  # noqa: B023
        plan = plan_layout(specs, 64, 8, padding_budget=1.0)
        assert [param.fqn for param in plan.params] == [f"{layer}.{i}" for i in range(60)]
    assert max(lines[1:]) * 4 < lines[0], lines
    others = [ParamSpec(param.fqn, param.shape, "elements") for param in plan.params]
    found = {param.granule for param in plan_layout(others, 64, 8).params}
    assert found == {1}, "what differs in granules alone is planned by itself"


# ---- groups


class Tiny(nn.Module):
    NUM_PARAMS = 12

    def __init__(self) -> None:
        super().__init__()
        for i in range(self.NUM_PARAMS):
            self.register_parameter(f"p{i}", nn.Parameter(torch.ones(3 + i, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.p0.sum()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _shard_groups(_rank: int, world_sizes: tuple[int, ...]) -> None:
    """Prints executed lines for a group, and bytes for a parameter, for each number of ranks."""
    torch.set_num_threads(1)
    for world_size in world_sizes:
        with fake_process_group(0, world_size):
            warm, groups = [Tiny() for _ in range(8)], [Tiny() for _ in range(64)]
            for group in warm:
                fully_shard(group)
            gc.collect()
            before = _resident_bytes()
            for group in groups:
                fully_shard(group)
            used = (_resident_bytes() - before) / (len(groups) * Tiny.NUM_PARAMS)
            print("MEASURED", executed_lines(lambda: fully_shard(Tiny())), used)


@pytest.mark.timeout(120)
def test_groups_cost_about_the_same_among_8_and_16384_ranks(tmp_path):
    ((code, said),) = run_forked(1, tmp_path, _shard_groups, (8, 4096, MANY))
    assert code == 0, said
    few, *many = [tuple(map(float, line.split()[1:])) for line in said.splitlines() if line.startswith("MEASURED")]
    assert len(many) == 2
    for lines, bytes_of_parameter in many:
        assert lines <= 1.5 * few[0], said
        assert bytes_of_parameter <= 8192, said

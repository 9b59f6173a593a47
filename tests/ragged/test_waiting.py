"""Operations on sharded tensors that communicate: a rank that runs one alone is told so, whichever it is."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Shard

from fsdp_compose import RaggedShard, distribute_ragged, fully_shard
from fsdp_compose.core.comm.context import all_kept
from fsdp_compose.core.comm.failure import entered
from fsdp_compose.errors import RanksDifferError
from fsdp_compose.plugins.gloo.journal import Journal
from tests.harness import distributed, lasting_mesh

_DRAWN = ("rand", "bernoulli", "dropout", "multinomial", "normal", "poisson")  # as every rank draws them


def of_one_tensor() -> list[Any]:
    """All operators of torch that can be called with one tensor, or a list of tensors, and nothing else."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if not name.startswith("aten::") or any(word in name for word in _DRAWN):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        arguments = [] if func is None else [item for item in func._schema.arguments if not item.has_default_value()]
        if len(arguments) == 1 and str(arguments[0].type) in ("Tensor", "List[Tensor]"):
            found.append((func, str(arguments[0].type) != "Tensor"))
    return found


def _numbers() -> tuple[int, int]:
    """How many collectives and messages of torch's, and how many waits that have a name, this rank has entered."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
    named = sum(entered.values()) + sum(journal.count for _, journal in all_kept(Journal))
    return sum(group._get_sequence_number_for_group() for group in groups), named


@distributed(world_size=(2, 4))
def test_every_operator_that_communicates_waits_by_name(world_size):
    whole = torch.arange(-10.0, 14.0).view(6, 4)
    mesh, placements = lasting_mesh(("data",), (2,)) if world_size == 2 else None, [RaggedShard([2, 4])]
    if mesh is None:
        mesh, placements = lasting_mesh(("data", "tensor")), [RaggedShard([2, 4]), Shard(1)]
    unnamed, num_communicating = [], 0
    originals = [
        distribute_ragged(given, mesh, placements, src_data_rank=None) for given in (whole, whole.long(), whole > 0)
    ]
    for func, takes_list in of_one_tensor():
        for tensor in (original.clone() for original in originals):
            before = _numbers()
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    func([tensor] if takes_list else tensor)
                except Exception:  # of this dtype, or of tensors that are sharded
                    pass
            after = _numbers()
            num_communicating += after != before
            if after[0] != before[0] and after[1] == before[1]:
                unnamed.append(str(func))
    assert num_communicating > 20, num_communicating
    assert not unnamed, sorted(set(unnamed))


STATISTICS = {
    "aten.mean.default": lambda weight: weight.mean(),
    "aten.any.default": lambda weight: weight.isnan().any(),
    "aten.equal.default": lambda weight: torch.equal(weight, weight),
}


@pytest.mark.parametrize("name", STATISTICS)
@distributed(world_size=2, fresh=True)
def test_a_statistic_of_one_rank_ends_with_both_calls_named(name):
    model = fully_shard(nn.Linear(8, 8))
    x = torch.ones(1, 8)
    model(x).sum().backward()
    begin = time.monotonic()
    with pytest.raises(RanksDifferError, match="wait for each other") as caught:
        STATISTICS[name](model.weight.detach()) if dist.get_rank() == 0 else model(x)
    assert name.removesuffix(".default") in str(caught.value)
    assert "the all-gather of " in str(caught.value) and "gloo" not in str(caught.value)
    assert time.monotonic() - begin < 40

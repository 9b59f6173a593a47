"""Ranks of ``Muon`` that differ, skip a step or die: the others are told who, and nothing has changed. And groups that
ranks may skip."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Replicate, distribute_tensor

from fsdp_compose import fully_shard, replicate
from fsdp_compose.core.comm import Carrier
from fsdp_compose.core.flat import local_of
from fsdp_compose.core.group import END_OF_BACKWARD, get_state
from fsdp_compose.core.runtime.agreement import begin_exchange, end_exchange
from fsdp_compose.errors import MisuseError, RankLostError, RanksDifferError
from fsdp_compose.optim import Muon, muon, muon_groups
from tests.harness import distributed, lasting_mesh, run_forked, same_on_every_rank
from tests.optim.test_muon import SETS, Parameters, assert_bits, expected, give_gradients
from tests.training import full_values

SHAPES = [*SETS["odd"], (7,)]


def made(model: Any = None, **options: Any) -> tuple[list[Any], Muon]:
    """Parameters with gradients, which have made a step: four matrices, and a vector for AdamW."""
    model = fully_shard(Parameters(SHAPES)) if model is None else model
    params = [*model.items]
    optimizer = Muon([{"params": params[:4]}, {"params": params[4:], "algorithm": "adamw"}], lr=0.02, **options)
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    return params, optimizer


def held(params: Sequence[Any], optimizer: Muon) -> list[torch.Tensor]:
    """Copies of all that this rank has of parameters and of the optimizer's state."""
    state = [value for param in params for value in optimizer.state[param].values()]
    return [local_of(item).detach().clone() for item in (*params, *state)]


def assert_unchanged(params: Sequence[Any], optimizer: Muon, before: Sequence[torch.Tensor]) -> None:
    after = held(params, optimizer)
    assert len(after) == len(before) and all(map(torch.equal, after, before))


@pytest.mark.parametrize("index", [1, 4], ids=["a matrix", "AdamW's"])
@distributed(world_size=(2, 3))
def test_a_gradient_that_one_rank_lacks(index):
    params, optimizer = made()
    before, last = held(params, optimizer), dist.get_world_size() - 1
    if dist.get_rank() == last:
        params[index].grad = None
    with pytest.raises(RanksDifferError) as caught:
        optimizer.step()
    text, shape = same_on_every_rank(str(caught.value)), SHAPES[index]
    assert f"rank 0 has items.{index} of shape {shape}, " in text and f"rank {last} has items.{index}" in text
    assert "with a gradient, rank" in text and "without a gradient. A backward gives all ranks" in text
    assert text.endswith("Nothing was changed")
    assert_unchanged(params, optimizer, before)
    give_gradients(params, 1)  # then it goes on
    optimizer.step()
    assert_bits(params[:4], expected(SHAPES[:4], 2, lr=0.02))


@distributed(world_size=2)
def test_a_gradient_that_only_one_rank_has():
    params, optimizer = made()
    before = held(params, optimizer)
    for param in params if dist.get_rank() else ():
        param.grad = None
    with pytest.raises(RanksDifferError, match=r"rank 0 has items.0 .* with a gradient, rank 1 has items.0 .* without"):
        optimizer.step()
    assert_unchanged(params, optimizer, before)


@pytest.mark.parametrize("of", ["whole matrices", "replicas", "hybrid"])
@distributed(world_size=4)
def test_ranks_agree_also_where_nothing_moves(of):
    if of == "replicas":
        model = replicate(Parameters(SHAPES))
    elif of == "hybrid":
        model = fully_shard(Parameters(SHAPES), mesh=lasting_mesh(("replicate", "shard")))
    else:
        model = fully_shard(Parameters(SHAPES), granularity=lambda *_: "whole")
    params, optimizer = made(model)
    before = held(params, optimizer)
    if dist.get_rank() == 3:
        params[0].grad = None
    with pytest.raises(RanksDifferError, match=r"rank 3 has items.0 of shape \(37, 41\), .* without a gradient"):
        optimizer.step()
    assert_unchanged(params, optimizer, before)


@distributed(world_size=3)
def test_what_one_rank_cannot_step_is_told_to_all():
    params, optimizer = made()
    before = held(params, optimizer)
    if dist.get_rank() == 1:
        params[2].grad = distribute_tensor(
            torch.zeros(101, 3), params[2].device_mesh, [Replicate()], src_data_rank=None
        )
    expects = MisuseError if dist.get_rank() == 1 else RanksDifferError
    with pytest.raises(expects, match="the gradient of items.2 has .* expected a dense gradient") as caught:
        optimizer.step()
    if dist.get_rank() != 1:
        assert "Muon.step(): rank 1 cannot step, so no rank does: MisuseError: Muon: the grad" in str(caught.value)
        assert str(caught.value).endswith("Nothing was changed")
    assert_unchanged(params, optimizer, before)
    give_gradients(params, 1)
    optimizer.step()
    assert_bits(params[:4], expected(SHAPES[:4], 2, lr=0.02))


@pytest.mark.parametrize("what", ["closure", "plan"])
@distributed(world_size=(2, 3))
def test_what_fails_on_one_rank_before_a_step_is_told_to_all(what):
    params, optimizer = made()
    before, last = held(params, optimizer), dist.get_world_size() - 1
    is_last = dist.get_rank() == last

    def closure() -> float:
        if is_last and what == "closure":
            raise ArithmeticError("no loss")
        return 1.0

    if is_last and what == "plan":
        optimizer.param_groups[0]["block_rows"] = 7
    raised, text = (ArithmeticError, "no loss") if what == "closure" else (MisuseError, "block_rows=7")
    with pytest.raises(raised if is_last else RanksDifferError, match=text) as caught:
        optimizer.step(closure)
    assert is_last or f"rank {last} cannot step, so no rank does: {raised.__name__}: " in str(caught.value)
    optimizer.param_groups[0]["block_rows"] = None
    assert_unchanged(params, optimizer, before)
    what = ""
    assert optimizer.step(closure) == 1.0
    assert_bits(params[:4], expected(SHAPES[:4], 2, lr=0.02))


@pytest.mark.parametrize(
    "option",
    [
        {"block_rows": 1}, {"ns_dtype": torch.float32}, {"over_replicas": True}, {"ns_steps": 3}, {"nesterov": False},
        {"lr": 0.5},
    ],
    ids=str,
)  # fmt: skip
@distributed(world_size=2)
def test_options_that_differ(option):
    model = fully_shard(Parameters(SHAPES))
    params = [*model.items]
    optimizer = Muon(params[:4], **(option if dist.get_rank() else {}))
    give_gradients(params, 0)
    before = held(params, optimizer)
    with pytest.raises(RanksDifferError, match="with the same parameters and options, in the same order") as caught:
        optimizer.step()
    assert next(iter(option)) in same_on_every_rank(str(caught.value))
    assert_unchanged(params, optimizer, before)


@pytest.mark.parametrize("option", [{"lr": 0.5}, {"ns_steps": 3}, {"betas": (0.5, 0.5)}], ids=str)
@distributed(world_size=2)
def test_options_that_differ_later(option):
    params, optimizer = made()
    before, ((name, value),) = held(params, optimizer), option.items()
    group = optimizer.param_groups[name == "betas"]
    kept = group[name]
    group[name] = value if dist.get_rank() else kept
    with pytest.raises(RanksDifferError, match=rf"rank 0 has {name}=.* in parameter group [01], rank 1 has {name}="):
        optimizer.step()
    assert_unchanged(params, optimizer, before)
    group[name] = kept
    optimizer.step()
    assert_bits(params[:4], expected(SHAPES[:4], 2, lr=0.02))


@distributed(world_size=2)
def test_plain_parameters_are_each_ranks_own():
    """Experts of a rank that no group shards: with other shapes, and with gradients where they got tokens."""
    rank = dist.get_rank()
    model = fully_shard(Parameters(SHAPES))
    own = nn.Parameter(torch.ones(4 + rank, 3))
    optimizer = Muon([{"params": [*list(model.items)[:4], own]}])
    give_gradients([*model.items], 0)
    own.grad = torch.ones_like(own) if rank else None
    optimizer.step()
    assert bool((own != 1).all()) == (rank == 1)


@distributed(world_size=(2, 4), fresh=True)  # the carrier keeps the size that optional groups of another test took
def test_a_step_costs_one_small_exchange():
    _, optimizer = made()
    carrier = Carrier.of(dist.group.WORLD)
    before, length = carrier.num_exchanges, len(carrier._head)
    optimizer.step()
    assert carrier.num_exchanges == before + 1
    assert len(carrier._head) == length <= 64  # 40, and marks if groups are optional


@distributed(world_size=2, fresh=True)
def test_a_rank_that_skips_the_step_and_goes_on():
    params, optimizer = made()
    before = held(params, optimizer)
    with pytest.raises((RankLostError, RanksDifferError), match="rank 0") as caught:
        if dist.get_rank() == 0:
            optimizer.step()
        params[0].full_tensor()
    assert "start of an optimizer's step" in str(caught.value), caught.value
    assert_unchanged(params, optimizer, before)


@pytest.mark.parametrize("stepping", [0, 1])
@distributed(world_size=2, fresh=True)
def test_a_rank_that_is_at_the_end_of_a_backward_instead(stepping):
    """As on a backend whose collectives do not wait on the host, so that none before tells the ranks apart."""
    model = fully_shard(nn.Linear(6, 6, bias=False))
    optimizer = Muon([model.weight])
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    before, root = held([model.weight], optimizer), get_state(model).root
    with pytest.raises(RanksDifferError, match=r"(?s)the start of Muon.step\(\).*Nothing was changed|No gradient was"):
        if dist.get_rank() == stepping:
            optimizer.step()
        begin_exchange(root, root.exchange, END_OF_BACKWARD)
        end_exchange(root, root.exchange, END_OF_BACKWARD)
    assert_unchanged([model.weight], optimizer, before)


# ---- Ranks that die


NUM_BUCKETS = 6


def die_or_step(rank: int, port: int, number: int, size: int) -> None:
    """Rank 1 dies before the step, or while it computes the bucket with this number, from 1; the others tell."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    layers = [nn.Linear(20, 24) for _ in range(NUM_BUCKETS)]  # each cut between all ranks
    for layer in layers:
        fully_shard(layer)
    matrices, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    groups = [{"params": matrices}, {"params": biases, "algorithm": "adamw"}]
    optimizer = Muon(groups, bucket_bytes=1)
    give_gradients([*matrices, *biases], 0)
    optimizer.step()
    before, adamw = held(matrices, optimizer), held(biases, optimizer)
    if rank == 1 and number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    compute, calls = muon._compute, []

    def compute_or_die(*arguments: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(*arguments)

    muon._compute = compute_or_die
    begun = time.monotonic()
    try:
        optimizer.step()
        print("TOLD no error")
    except RuntimeError as error:
        print(f"TOLD {time.monotonic() - begun:.1f} {type(error).__name__} {error}".replace("\n", " "))
    changed = [not torch.equal(*pair) for pair in zip(before, held(matrices, optimizer), strict=True)]
    print(f"CHANGED {any(changed[:NUM_BUCKETS])} {sum(changed[NUM_BUCKETS:])}")
    assert_unchanged(biases, optimizer, adamw)
    sys.stdout.flush()
    time.sleep(1)  # its connections stay open: it is not its end that the others notice
    os._exit(0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_dies(tmp_path: Path, number: int, size: int):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, (code, said) in enumerate(run_forked(size, tmp_path, die_or_step, store.port, number, size)):
        if rank == 1:
            assert code == -signal.SIGKILL
            continue
        assert code == 0, said
        told, changed = [line for line in said.splitlines() if line.split()[0] in ("TOLD", "CHANGED")]
        assert "RankLostError" in told and float(told.split()[1]) < 12, said
        if number == 0:
            assert "start of an optimizer's step" in told and told.endswith("Nothing was changed"), said
            assert changed == "CHANGED False 0", said
        else:  # momenta of all buckets that were sent; of more where nothing went to the dead rank
            assert re.search("in an optimizer's step failed: ranks? .* ended, or given up", told), said
            assert number <= int(changed.split()[-1]) <= NUM_BUCKETS, said


# ---- Groups that ranks may skip


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
        if images is not None:
            x = x + self.tower(images)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@distributed(world_size=(2, 3))
def test_groups_that_ranks_may_skip():
    torch.manual_seed(0)
    reference = TwoTowers()
    model = copy.deepcopy(reference)
    fully_shard(model.tower, optional=True)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    size = dist.get_world_size()
    options = {"muon": {"lr": 0.02}, "adamw": {"lr": 1e-2, "eps": 1e-3}}
    ours, theirs = (Muon(muon_groups(item, **options), ns_dtype=torch.float32) for item in (model, reference))
    generator = torch.Generator().manual_seed(3)
    for step in range(8):
        x, images = torch.randn(2, size, 4, 6, generator=generator)
        # In turn: no rank, the first, the last, all.
        uses = [[False] * size, [rank == 0 for rank in range(size)], [rank + 1 == size for rank in range(size)],
                [True] * size][step % 4]  # fmt: skip
        losses = [reference(x[rank], images[rank] if uses[rank] else None).square().mean() for rank in range(size)]
        (sum(losses) / size).backward()
        rank = dist.get_rank()
        model(x[rank], images[rank] if uses[rank] else None).square().mean().backward()
        assert (model.tower[0].weight.grad is None) == (reference.tower[0].weight.grad is None) == (not any(uses))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    after = full_values(reference)
    for name, value in full_values(model).items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=2e-5, msg=name)

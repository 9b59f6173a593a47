"""The table of strategies: every row trains as one process does, and loads what every other row has saved."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import (
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
    functional_mode,
    no_sync,
    record_collectives,
)
from fsdp_compose.checkpoint import get_state_dict, set_state_dict
from fsdp_compose.core.group.options import R, S
from fsdp_compose.strategies import STRATEGIES, Strategy
from tests.harness import distributed, lasting_mesh
from tests.models import DIM, GPT, Net, batches, gpt_loss, rows, shard_layers
from tests.training import adamw, assert_same_parameters, full_values, local_part, train_step, wholes


def apply(model: Any, name: str) -> Any:
    row = STRATEGIES[name]
    shape, names = ((4,), ("data",)) if row.num_dims == 1 else ((2, 2), ("replicate", "shard"))
    return shard_layers(model, mesh=lasting_mesh(names, shape), strategy=name)


@pytest.mark.parametrize("is_functional", (False, True))
@pytest.mark.parametrize("is_flat", (False, True))
@pytest.mark.parametrize("name", STRATEGIES)
@distributed(world_size=4)
def test_trains_as_one_process(name, is_flat, is_functional):
    torch.manual_seed(0)
    reference = GPT(layers=2)
    ours = apply(copy.deepcopy(reference), name)
    params = flat_parameters(ours) if is_flat else ours.parameters()
    optimizers = adamw(params), adamw(reference.parameters())
    accumulates_whole = STRATEGIES[name].accumulates_whole and not is_functional
    for first, second in zip(batches(2), batches(2, seed=8), strict=True):
        for batch in (first, second):
            with ExitStack() as contexts:
                if is_functional:
                    contexts.enter_context(functional_mode(ours))
                if accumulates_whole and batch is first:
                    contexts.enter_context(no_sync(ours))
                gpt_loss(ours, local_part(batch)).backward()
            gpt_loss(reference, batch).backward()
        norms = [clip_grad_norm_(model.parameters(), 0.1) for model in (ours, reference)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(ours, reference, tolerance=5e-6)


@distributed(world_size=4, timeout=180)
def test_every_row_loads_what_every_row_has_saved(tmp_path):
    """Model and optimizer load bit for bit, and each strategy trains on from them as the one that saved them does."""

    def trained(name: str, seed: int) -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = apply(Net(layers=1), name)
        optimizer = adamw(model.parameters())
        train_step(model, optimizer, local_part(rows(seed, DIM)))
        return model, optimizer

    def values_of(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
        states = get_state_dict(model, optimizer)[1]["state"]
        return {"model": full_values(model), "exp_avg": wholes({k: state["exp_avg"] for k, state in states.items()})}

    made: dict[str, Any] = {name: trained(name, number) for number, name in enumerate(STRATEGIES)}
    for name, (model, optimizer) in made.items():
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=f"{tmp_path}/{name}")
    expected = {name: values_of(*pair) for name, pair in made.items()}
    rows_of_table = [*STRATEGIES]
    for target in rows_of_table:
        model, optimizer = trained(target, 9)
        for source, (saved, _) in made.items():
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(states, checkpoint_id=f"{tmp_path}/{source}")
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
            torch.testing.assert_close(values_of(model, optimizer), expected[source], rtol=0, atol=0)
            if rows_of_table.index(source) != (rows_of_table.index(target) + 1) % len(rows_of_table):
                continue
            going_on = copy.deepcopy(saved), model
            others = adamw(going_on[0].parameters()), optimizer
            set_state_dict(
                going_on[0], others[0], model_state_dict=saved.state_dict(), optim_state_dict=states["optimizer"]
            )
            for pair in zip(going_on, others, strict=True):
                train_step(*pair, local_part(rows(20, DIM)))
            assert_same_parameters(*going_on, tolerance=2e-6)


KEPT = {
    # Elements of parameters and of optimizer state on a rank, of all; what stays gathered between steps; gathers of a
    # forward and backward, first after a step and then; collectives of a reduction.
    "ddp": (1, 0, (0, 0), "all-reduce"),
    "zero1": (1 / 4, 1, (2, 0), "reduce-scatter"),
    "zero2": (1 / 4, 1, (2, 0), "reduce-scatter"),
    "zero3": (1 / 4, 0, (3, 3), "reduce-scatter"),
    "hybrid": (1 / 2, 0, (3, 3), "reduce-scatter all-reduce"),
    "hfsdp": (1 / 4, 1 / 2, (4, 4), "reduce-scatter"),
}


@pytest.mark.parametrize("name", STRATEGIES)
@distributed(world_size=4)
def test_rows_keep_gather_and_reduce_what_they_say(name):
    torch.manual_seed(0)
    model = apply(GPT(layers=1, dim=64), name)
    share, stays, num_gathers, reduction = KEPT[name]
    numel = sum(param.numel() for param in model.parameters())
    kept = sum(param.to_local().numel() for param in model.parameters())
    assert abs(kept / numel - share) < 0.05
    assert " ".join(STRATEGIES[name].stages) == reduction
    batch = local_part(next(iter(batches(1))))
    for expected in num_gathers:
        with record_collectives(model) as lines:
            gpt_loss(model, batch).backward()
        gathers = [line for line in lines if line.startswith("all-gather")]
        assert len(gathers) == expected, gathers
        for kind in ("reduce-scatter", "all-reduce"):
            count = sum(line.startswith(kind) for line in lines)
            assert count == (2 if kind in reduction.split() else 0), lines
    if name == "hfsdp":  # after the first gather all are among the ranks of a row
        assert all("among 2 ranks" in line for line in gathers)
    held = 0
    for module in (model, model.blocks[0]):
        for handle in fully_shard.state(module)._handles:
            kept = handle.unsharded.post_forward
            if kept is not None and kept.is_kept:
                held += kept._memory.numel()
            elif handle.unsharded.is_allocated and not handle.unsharded.never_freed:
                held += handle.layout.flat_numel
    assert abs(held / numel - stays) < 0.05


@distributed(world_size=4)
def test_rows_of_ones_own_and_groups_of_different_rows():
    torch.manual_seed(0)
    reference = GPT(layers=2)
    ours = copy.deepcopy(reference)
    mesh = lasting_mesh(("replicate", "shard"))
    own = Strategy(parameters=(R, R), gradients=(R, S), optimizer=(R, S))  # hybrid, gathered until a step
    fully_shard(ours.blocks[0], mesh=mesh, strategy=own)
    fully_shard(ours.blocks[1], strategy="ddp")
    fully_shard(ours, strategy="zero3")
    optimizers = adamw(ours.parameters()), adamw(reference.parameters())
    for batch in batches(3):
        gpt_loss(ours, local_part(batch)).backward()
        gpt_loss(reference, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(ours, reference, tolerance=5e-6)


def test_rows_that_make_no_sense():
    for parameters, gradients, optimizer, words in (
        ((S,), (S,), (R,), "over a dimension that replicates the optimizer state"),
        ((S, R), (S, R), (S, R), "replicated over the outer one too"),
        ((R,), (R, S), (R, S), "one entry per dimension"),
        ((R, S), (R, S), (S, S), "gradients must be kept"),
        ((), (), (), "one entry per dimension"),
    ):
        with pytest.raises(ValueError, match=words):
            Strategy(parameters, gradients, optimizer)


@distributed(world_size=2)
def test_bad_arguments():
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="strategy='zero4'.: expected one of ddp, zero1"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, strategy="zero4")
    with pytest.raises(ValueError, match="a mesh of 2 dimension"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, strategy="hybrid")
    with pytest.raises(TypeError, match="a string or a Strategy"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, strategy=3)
    with pytest.raises(ValueError, match="got both"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, strategy="zero2", reshard_after_forward=True)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (2, 1)])
def test_parts_that_all_ranks_hold_together_are_the_default(sizes):
    assert Strategy((S, S), (R, R), (S, S)).reshards(sizes) is None
    parts = Strategy((R, S), (S, S), (S, S)).reshards(sizes)
    assert parts == {(1, 2): None, (2, 2): 2, (2, 1): False}[sizes]

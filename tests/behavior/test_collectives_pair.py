"""Invariant 1: collectives pair: ranks that differ get the same error, before a gradient is shown."""

from __future__ import annotations

import functools
import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_compose import (
    MixedPrecisionPolicy,
    fully_shard,
)
from fsdp_compose._torch import default_store
from fsdp_compose.core.comm.control_exchange import Carrier
from fsdp_compose.core.comm.store import TIMEOUT_ENV
from fsdp_compose.core.group.registry import _get_fsdp_states
from tests import harness
from tests.harness import breakable_mesh, environment, our_warnings, same_on_every_rank
from tests.internals import assert_nothing_is_unsharded
from tests.models import DIM, Experts, Stack, rows
from tests.training import (
    assert_gradients_match,
    assert_no_gradients,
    assert_parameters_match,
    assert_trains_on,
    experts,
    local_part,
    mean_square,
    sgd,
    stacks,
    train_step,
)

distributed = functools.partial(harness.distributed, timeout=20)  # seconds; a body takes a fraction of one


def wider(model: Stack) -> None:
    model.blocks[1].up = nn.Linear(DIM, 8)


def frozen(model: Stack) -> None:
    model.blocks[1].up.weight.requires_grad_(False)


def in_double(model: Stack) -> None:
    model.blocks[1].double()


@pytest.mark.parametrize(
    "change, names",
    [
        (wider, r"blocks\.1.*up\.weight.*\[7, 5\].*blocks\.1.*up\.weight.*\[8, 5\]"),
        (frozen, r"blocks\.1.*up\.weight.*requires_grad.*true.*blocks\.1.*up\.bias"),
        (in_double, r"blocks\.1.*norm\.weight.*float32.*blocks\.1.*norm\.weight.*float64"),
    ],
    ids=["shape", "requires_grad", "dtype"],
)
@distributed(world_size=(2, 3))
def test_ranks_with_different_models_raise_the_same_error_at_first_forward(world_size, change, names):
    model = Stack()
    if dist.get_rank() == world_size - 1:
        change(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=f"different models.*rank 0.*rank {world_size - 1}.*Build the same") as error:
        model(rows())
    error.match(names.replace(".*blocks", f".*rank {world_size - 1}.*blocks"))
    same_on_every_rank(str(error.value))
    assert [id(param) for param in model.parameters()] == [
        id(sharded) for sharded in model.state_dict(keep_vars=True).values()
    ]
    model, reference = stacks()
    assert_trains_on(model, reference)


@pytest.mark.parametrize("difference", ["groups", "policy", "order"])
@distributed(world_size=2)
def test_ranks_that_shard_the_same_model_differently_raise_at_first_forward(difference):
    model, is_other = Stack(), dist.get_rank() == 1
    for block in model.blocks[1 if is_other and difference == "groups" else 0 :]:
        fully_shard(block)
    options = {}
    if is_other and difference == "policy":
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if is_other and difference == "order":
        model._modules = dict(reversed(model._modules.items()))
    fully_shard(model, **options)
    with pytest.raises(RuntimeError, match="first forward: the ranks have different models.*rank 0.*rank 1") as error:
        model(rows())
    same_on_every_rank(str(error.value))


@pytest.mark.parametrize("early", [0, 1])
@distributed(world_size=2)
def test_first_forward_names_a_rank_that_does_not_come_and_can_be_repeated(early):
    model, reference = stacks()
    late = 1 - early
    with environment(**{TIMEOUT_ENV: "0.5"}):
        if dist.get_rank() == early:
            with pytest.raises(RuntimeError, match=rf"first forward: rank\(s\) {late} did not arrive.*{TIMEOUT_ENV}"):
                model(rows())
            default_store().set(f"rank {early} has given up", "")
        else:
            default_store().wait([f"rank {early} has given up"], timedelta(seconds=50))
    with environment(**{TIMEOUT_ENV: "10"}):
        assert_trains_on(model, reference)


def run_every_expert(model: Experts) -> None:
    """So often that the next forward does not look for unseen writes, whose exchange would come before backward's."""
    for choice in (0, 0, 1, 1, None):
        model.choice = choice
        mean_square(model, local_part(rows())).backward()
    model.zero_grad()


@pytest.mark.parametrize("steps_before", [0, 1])
@distributed(world_size=(2, 3))
def test_ranks_that_run_different_groups_of_equal_shape_raise_before_a_gradient_is_published(world_size, steps_before):
    model, reference = experts()
    optimizers = sgd(model.parameters()), sgd(reference.parameters())
    for _ in range(steps_before):
        model.choice = reference.choice = None
        train_step(model, optimizers[0], local_part(rows()))
        train_step(reference, optimizers[1], rows())
    model.choice = int(dist.get_rank() == world_size - 1)
    words = rf"experts\.0 on rank 0.*experts\.1 on rank {world_size - 1}.*No gradient was published"
    with pytest.raises(RuntimeError, match=words) as error:
        mean_square(model, local_part(rows())).backward()
    error.match("same order.*one group with their parent")
    same_on_every_rank(str(error.value))
    assert_no_gradients(model)
    model.choice = reference.choice = 1
    with our_warnings() as texts:
        train_step(model, optimizers[0], local_part(rows(1)))
    train_step(reference, optimizers[1], rows(1))
    assert len(texts) == 1 and "interrupted" in texts[0]
    assert_parameters_match(model, reference, 1e-6)
    assert_nothing_is_unsharded(model)


@distributed(world_size=2)
def test_the_first_difference_is_named_also_after_forwards_of_a_model_that_is_gone_on_some_ranks():
    kept = [experts()[0]]
    with torch.no_grad():
        kept[0](local_part(rows()))
    if dist.get_rank() == 1:
        kept.clear()
        gc.collect()
    model, _ = experts()
    model.choice = dist.get_rank()
    with pytest.raises(RuntimeError, match=r"experts\.0.* on rank 0 and .*experts\.1.* on rank 1"):
        mean_square(model, local_part(rows())).backward()
    assert_no_gradients(model)


@distributed(world_size=2)
def test_ranks_that_leave_a_prefetched_path_raise_before_a_gradient_is_published():
    """All expect expert 0 and prefetch it, one runs expert 1: it issues one collective more than the others."""
    model, _ = experts(mesh=breakable_mesh())
    train_step(model, sgd(model.parameters()), local_part(rows()))
    model.choice = dist.get_rank()
    words = r"\b(experts\.0|experts\.1|\(root\)).*(another rank|rank 0)|at the end of forward failed: "
    with pytest.raises(RuntimeError, match=words):
        mean_square(model, local_part(rows())).backward()
    assert_no_gradients(model)


@distributed(world_size=2)
def test_gradients_that_a_failed_backward_was_added_to_are_dropped():
    model, reference = experts()
    run_every_expert(model)
    mean_square(model, local_part(rows())).backward()
    model.choice = dist.get_rank()
    with pytest.raises(RuntimeError, match=r"experts\.0.*experts\.1"):
        mean_square(model, local_part(rows())).backward()
    model.choice = 0
    with our_warnings() as texts:
        mean_square(model, local_part(rows())).backward()
    assert len(texts) == 1 and "all gradients are None" in texts[0]
    mean_square(reference, rows()).backward()
    assert_gradients_match(model, reference, 1e-6)


@distributed(world_size=2)
def test_one_backward_exchanges_once():
    with environment(FSDP_COMPOSE_TRANSPORT="collectives"):
        model, _ = stacks()
    optimizer = sgd(model.parameters())
    data = _get_fsdp_states(model)[0].mesh.shard_group
    for _ in range(2):
        train_step(model, optimizer, local_part(rows()))
    carrier = Carrier.of(data)
    num_whole = carrier.num_whole  # those of earlier tests on these ranks count too
    for step, num_looks in enumerate([0, 1, 0, 0, 0, 1]):  # the 3rd to 8th forward: the 4th and the 8th look
        before = carrier.num_exchanges, data._get_sequence_number_for_group()
        train_step(model, optimizer, local_part(rows(step)))
        assert carrier.num_exchanges - before[0] == 1 + num_looks
        # Forward gathers 4 groups, backward the 3 blocks again; every group is reduced once.
        assert data._get_sequence_number_for_group() - before[1] == 4 + 3 + 4
    for num_looks in (1, 1, 0, 1):
        before = carrier.num_exchanges
        with torch.no_grad():
            model(local_part(rows()))
        assert carrier.num_exchanges == before + num_looks and carrier.num_whole == num_whole


@distributed(world_size=3)
def test_ranks_may_be_in_different_numbers_of_process_groups():
    some = dist.new_group([0, 1])
    model, reference = stacks()
    assert_trains_on(model, reference, steps=1)
    if dist.get_rank() < 2:
        dist.destroy_process_group(some)

"""Training a small GPT sharded equals training it on one process, in every combination of options."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_compose import MixedPrecisionPolicy, fully_shard, no_sync
from tests.harness import distributed
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import adamw, assert_parameters_match, local_part, mean_over_ranks, sgd, train

STEPS = 2
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def small_gpt(use_reentrant: bool | None = None) -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, use_reentrant=use_reentrant)


@functools.cache
def unsharded_training(optimizer: str, microbatches: int) -> tuple[torch.Tensor, GPT]:
    model = small_gpt()
    return train(model, OPTIMIZERS[optimizer], steps=STEPS, microbatches=microbatches), model


def assert_losses_match(losses: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(mean_over_ranks(losses), expected, rtol=0, atol=1e-5)


def check_parity(optimizer: str, reshard: bool | None, accumulation: str, use_reentrant: bool | None) -> None:
    microbatches = 1 if accumulation == "none" else 3 if dist.get_world_size() in (1, 2, 4) else 2
    expected, reference = unsharded_training(optimizer, microbatches)
    model = shard_layers(small_gpt(use_reentrant), reshard_after_forward=reshard)
    options = {"without_sync": no_sync} if accumulation == "no_sync" else {}
    losses = train(model, OPTIMIZERS[optimizer], steps=STEPS, microbatches=microbatches, share=local_part, **options)
    assert_losses_match(losses, expected)
    assert_parameters_match(model, reference, tolerance=1e-5)


OPTIONS = [*itertools.product(("sgd", "adamw"), (True, False, None), ("none", "sync", "no_sync"), (None, False, True))]
# A third of them, at every world size another one: every pair of values of two options is in each.
THIRDS = [
    [case for i, case in enumerate(OPTIONS) if (i + i // 3 + i // 9 + i // 27) % 3 == third] for third in range(3)
]


def every_pair_of(cases: list[tuple[object, ...]]) -> set[tuple[object, ...]]:
    return {(i, case[i], j, case[j]) for case in cases for i in range(4) for j in range(i)}


def test_a_third_has_every_pair_of_options():
    assert all(every_pair_of(third) == every_pair_of(OPTIONS) for third in THIRDS)
    assert sorted(map(str, itertools.chain(*THIRDS))) == sorted(map(str, OPTIONS))


@pytest.mark.parametrize("case", range(len(THIRDS[0])))
@distributed(world_size=(1, 2, 3, 4))
def test_training_equals_single_process(case):
    check_parity(*THIRDS[dist.get_world_size() % 3][case])


@pytest.mark.parametrize("precision", [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (None, None)])
@distributed(world_size=2)  # two summands commute; with more, the order of a sum depends on the layout
def test_losses_equal_torch_fsdp2_bit_for_bit(precision):
    param_dtype, reduce_dtype = precision
    torch.manual_seed(0)
    ours = shard_layers(GPT(), mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))
    torch.manual_seed(0)
    theirs = GPT()
    policy = TorchMixedPrecisionPolicy(param_dtype, reduce_dtype)
    for block in theirs.blocks:
        torch_fully_shard(block, mp_policy=policy)
    torch_fully_shard(theirs, mp_policy=policy)
    optimizers = [sgd(ours.parameters()), sgd(theirs.parameters())]
    for batch in batches(6):
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss = gpt_loss(model, local_part(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]


@distributed(world_size=2)
def test_whole_model_in_one_group():
    expected, reference = unsharded_training("adamw", 1)
    model = fully_shard(small_gpt())
    losses = train(model, adamw, steps=STEPS, share=local_part)
    assert_losses_match(losses, expected)
    assert_parameters_match(model, reference)


@distributed(world_size=2)
def test_blocks_without_a_root_group():
    torch.manual_seed(0)
    model = GPT()
    for param in [*model.tokens.parameters(), *model.positions.parameters(), *model.norm.parameters()]:
        param.requires_grad_(False)
    model.head.weight.requires_grad_(False)
    torch.manual_seed(0)
    reference = GPT()
    for name, param in reference.named_parameters():
        param.requires_grad_(name.startswith("blocks"))
    for block in model.blocks:
        fully_shard(block)
    trainable = lambda module: [param for param in module.parameters() if param.requires_grad]  # noqa: E731
    expected = train(reference, lambda _: sgd(iter(trainable(reference))), steps=4)
    got = train(model, lambda _: sgd(iter(trainable(model))), steps=4, share=local_part)
    assert_losses_match(got, expected)

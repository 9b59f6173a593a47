"""Dtypes of single parameters: those that compute in another dtype than their group (``param_dtype_override_fn``), and
those whose gradients have another one (``grad_dtype``). Numbers are those of modules with parameters cast by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
    no_sync,
    record_collectives,
    replicate,
    set_functional_mode,
    summon_full_params,
)
from fsdp_compose.checkpoint import get_model_state_dict, set_model_state_dict
from fsdp_compose.core.group.registry import get_state
from tests.harness import distributed, fake_process_group, lasting_mesh
from tests.training import adamw, local_part, mean_square, pair

DIM, LOW = 6, torch.bfloat16
Override = Callable[[nn.Parameter], "torch.dtype | None"]
has_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")


class Linear(nn.Linear):
    """Computes in the dtype of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.weight.dtype) @ self.weight.T
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Block(nn.Module):
    """As in mixtures of experts and state-space models: a norm, a router and ``A_log`` that must not be rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), Linear(DIM, 3, bias=False)
        self.up, self.down = Linear(DIM, 7), Linear(7, DIM)
        self.A_log = nn.Parameter(torch.linspace(0.1, 1, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.to(self.norm.weight.dtype))
        share = self.router(y).softmax(-1).amax(-1, keepdim=True)
        z = self.down(self.up(y).tanh())
        return (x + z * share.to(z.dtype) * self.A_log.exp().to(z.dtype)).to(x.dtype)


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), Linear(DIM, 3)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x).float()


def is_delicate(param: nn.Parameter) -> bool:
    return param.ndim == 1 or param.shape[0] == 3


def keep_delicate(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if is_delicate(param) else None


def whole(model: nn.Module, of: Callable[[nn.Parameter], torch.Tensor], like: nn.Module) -> dict[str, torch.Tensor]:
    """The results of ``of`` for each parameter, whole."""
    with torch.no_grad():
        return {name: of(param).full_tensor() for name, param in model.named_parameters()}


def gradients_by_hand(
    reference: nn.Module, batches: list[torch.Tensor], dtype_of: Override, world_size: int
) -> dict[str, torch.Tensor]:
    """Return gradients of a model whose parameters are cast, averaged over the ranks in the original dtype and summed
    over batches."""
    total = {name: torch.zeros_like(param) for name, param in reference.named_parameters()}
    for batch in batches:
        average = {name: torch.zeros_like(param) for name, param in reference.named_parameters()}
        for share in batch.chunk(world_size):
            low = copy.deepcopy(reference)
            for param in low.parameters():
                param.data = param.data.to(dtype_of(param) or LOW)
            mean_square(low, share.to(LOW)).backward()
            for name, param in low.named_parameters():
                average[name] += param.grad
        for name, grad in average.items():
            total[name] += grad / world_size
    return total


@dataclass
class Way:
    """``shard``: the model; ``batches``: of each step; ``wraps``: each of its backwards but the last."""

    shard: Callable[[Model, Any], None]
    num_batches: int = 1
    wraps: Callable[[nn.Module], Any] = lambda model: nullcontext()
    is_flat: bool = False
    is_functional: bool = False
    checkpoints: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0


def shard_blocks(model: Model, policy: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)


def shard_over_replicas(model: Model, policy: Any) -> None:
    world_size = dist.get_world_size()
    mesh = lasting_mesh(("replicate", "shard"), (world_size // 2 or 1, min(world_size, 2)))
    shard_blocks(model, policy, mesh=mesh)


def replicate_blocks(model: Model, policy: Any) -> None:
    for block in model.blocks:
        replicate(block, mp_policy=policy)
    replicate(model, mp_policy=policy)


WAYS = {
    "plain": Way(shard_blocks),
    "one group": Way(lambda model, policy: fully_shard(model, mp_policy=policy)),
    "no reshard": Way(lambda model, policy: shard_blocks(model, policy, reshard_after_forward=False)),
    "accumulated": Way(shard_blocks, 3, tolerance=1e-6),
    "no_sync": Way(shard_blocks, 3, no_sync, tolerance=1e-6),
    "flat views": Way(shard_blocks, is_flat=True),
    "flat views, no_sync": Way(shard_blocks, 2, no_sync, is_flat=True, tolerance=1e-6),
    "functional": Way(shard_blocks, is_functional=True),
    "checkpointed": Way(shard_blocks, checkpoints=True),
    "hybrid": Way(shard_over_replicas, tolerance=1e-6),
    "replicated": Way(replicate_blocks, tolerance=1e-6),
    "replicated, no_sync": Way(replicate_blocks, 2, no_sync, tolerance=1e-6),
}


def check_training(way: Way, override: Override, reduce_dtype: torch.dtype | None = None, clips: bool = False) -> Model:
    """Train with ``override`` and compare gradients and parameters at every step."""
    torch.manual_seed(0)
    model, reference = pair(Model(way.checkpoints))
    way.shard(model, MixedPrecisionPolicy(LOW, reduce_dtype, param_dtype_override_fn=override))
    set_functional_mode(model, way.is_functional)
    mine = flat_parameters(model) if way.is_flat else [*model.parameters()]
    optimizers = [adamw(mine), adamw(reference.parameters())]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batches = [torch.randn(12, DIM, generator=generator) for _ in range(way.num_batches)]
        for i, batch in enumerate(batches):
            with way.wraps(model) if i + 1 < len(batches) else nullcontext():
                mean_square(model, local_part(batch)).backward()
        expected = gradients_by_hand(reference, batches, override, dist.get_world_size())
        got = whole(model, lambda param: param.grad, reference)
        for name, param in reference.named_parameters():
            assert got[name].dtype == param.dtype
            difference = (got[name] - expected[name]).abs().max().item()
            assert difference <= way.tolerance, f"gradient of {name} differs by {difference}"
            param.grad = got[name].clone() if way.tolerance else expected[name]
        if clips:
            norm = clip_grad_norm_(mine, 0.01)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, param in whole(model, lambda param: param, reference).items():
            wanted = reference.get_parameter(name).detach()
            assert torch.equal(param, wanted) if not clips else torch.allclose(param, wanted, atol=1e-6), name
            with torch.no_grad():
                reference.get_parameter(name).copy_(param)
    return model


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=(1, 2))
def test_training_equals_a_module_whose_parameters_are_cast_by_hand(way):
    check_training(WAYS[way], keep_delicate)


@pytest.mark.parametrize("way", ["hybrid", "no_sync", "flat views, no_sync"])
@distributed(world_size=4)
def test_training_equals_casting_by_hand_on_more_ranks(way):
    WAYS[way].tolerance = 1e-6
    check_training(WAYS[way], keep_delicate)


@pytest.mark.parametrize("way", ["plain", "flat views"])
@distributed(world_size=2)
def test_gradients_of_both_dtypes_are_clipped_together(way):
    check_training(WAYS[way], keep_delicate, clips=True)


ANSWERS: dict[str, tuple[Override, set[torch.dtype]]] = {
    "None": (lambda param: None, {LOW}),
    "param_dtype": (lambda param: LOW, {LOW}),
    "its own": (lambda param: param.dtype, {torch.float32}),
    "some their own": (keep_delicate, {LOW, torch.float32}),
    "some another": (lambda param: torch.float64 if is_delicate(param) else None, {LOW, torch.float64}),
    "all another": (lambda param: torch.float64 if param.ndim > 1 else param.dtype, {torch.float32, torch.float64}),
}


@pytest.mark.parametrize("answer", ANSWERS)
@distributed(world_size=2)
def test_each_answer_gives_its_compute_dtype_and_one_flat_parameter_each(answer):
    override, dtypes = ANSWERS[answer]
    model = check_training(Way(shard_blocks, tolerance=1e-6), override)
    handles = get_state(model.blocks[0])._handles
    assert {handle.unsharded.dtype for handle in handles} == dtypes and len(handles) == len(dtypes)
    assert {handle.shard.dtype for handle in handles} == {torch.float32}


@distributed(world_size=2)
def test_parameters_travel_in_their_compute_dtype_and_gradients_in_the_reduce_dtype():
    model = Model()
    policy = MixedPrecisionPolicy(LOW, torch.bfloat16, param_dtype_override_fn=keep_delicate)
    shard_blocks(model, policy)
    with record_collectives(model) as lines:
        mean_square(model, torch.randn(4, DIM)).backward()
    gathered = {line.split(" x ")[1].split()[0] for line in lines if line.startswith("all-gather")}
    reduced = {line.split(" x ")[1].split()[0] for line in lines if line.startswith("reduce-scatter")}
    assert gathered == {"bfloat16", "float32"} and reduced == {"bfloat16"}


@distributed(world_size=2)
def test_the_function_is_called_once_for_each_managed_parameter():
    seen: list[nn.Parameter] = []

    def note(param: nn.Parameter) -> None:
        seen.append(param)

    model = Model()
    before, ignored = [*model.parameters()], model.blocks[0].A_log
    policy = MixedPrecisionPolicy(LOW, param_dtype_override_fn=note)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, ignored_params=[ignored])
    fully_shard(model, mp_policy=policy, ignored_params=[ignored])
    for _ in range(2):
        mean_square(model, torch.randn(4, DIM)).backward()
    assert {*map(id, seen)} == {*map(id, before)} - {id(ignored)} and len(seen) == len(before) - 1


@distributed(world_size=2)
def test_inputs_are_cast_to_param_dtype_and_a_kept_parameter_stays_kept_when_the_model_is_converted():
    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = (x.dtype, self.weight.dtype, self.bias.dtype)
            return x @ self.weight.T + self.bias

    model = Looks(DIM, DIM)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(LOW, param_dtype_override_fn=keep_delicate))
    model(torch.randn(2, DIM))
    assert model.seen == (LOW, LOW, torch.float32)
    model.double()
    model(torch.randn(2, DIM, dtype=torch.float64)).sum().backward()
    assert model.seen == (LOW, LOW, torch.float64)
    assert model.bias.grad.dtype == torch.float64
    clone = copy.deepcopy(model)
    clone(torch.randn(2, DIM))
    assert clone.seen == (LOW, LOW, torch.float64)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(DIM, DIM), Block(), nn.Linear(DIM, DIM)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(x)).to(self.head.weight.dtype))


@distributed(world_size=2)
def test_a_tied_parameter_takes_its_dtype_to_another_group():
    model = Tied()
    tied = model.embed.weight
    policy = MixedPrecisionPolicy(LOW, param_dtype_override_fn=lambda p: torch.float64 if p is tied else None)
    fully_shard(model.embed, mp_policy=policy)
    fully_shard(model.head, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    dtypes = []
    model.block.register_forward_pre_hook(lambda *_: dtypes.append(model.embed.weight.dtype))
    with pytest.raises(RuntimeError, match="dtype"):  # the user's own: a bf16 input and a weight in fp64
        model(torch.randn(2, DIM))
    policies = {h.fqns[0]: h.unsharded.dtype for h in get_state(model)._handles if "weight" in h.fqns[0]}
    assert torch.float64 in policies.values()


@distributed(world_size=2)
def test_state_dicts_load_into_another_choice_of_dtypes():
    torch.manual_seed(dist.get_rank() == 5)
    kept, other = Model(), Model()
    shard_blocks(kept, MixedPrecisionPolicy(LOW, param_dtype_override_fn=keep_delicate))
    shard_blocks(other, MixedPrecisionPolicy(LOW))
    set_model_state_dict(other, get_model_state_dict(kept))
    with summon_full_params(kept), summon_full_params(other):
        for a, b in zip(kept.parameters(), other.parameters(), strict=True):
            assert a.dtype == b.dtype == torch.float32 and torch.equal(a, b)


@distributed(world_size=(2, 3), fresh=True)
def test_answers_that_differ_between_ranks_are_one_error_at_the_first_forward():
    model = Model()
    odd = dist.get_rank() == dist.get_world_size() - 1
    policy = MixedPrecisionPolicy(LOW, param_dtype_override_fn=keep_delicate if odd else None)
    shard_blocks(model, policy)
    with pytest.raises(RuntimeError, match=r"the ranks have different models(.|\n)*head.weight(.|\n)*compute dtype"):
        model(torch.randn(2, DIM))


@distributed(world_size=2, fresh=True)
def test_one_answer_that_differs_is_named_with_both_dtypes():
    block = Block()
    kept = block.up.weight if dist.get_rank() else None
    policy = MixedPrecisionPolicy(LOW, param_dtype_override_fn=lambda p: p.dtype if p is kept else None)
    fully_shard(block, mp_policy=policy)
    with pytest.raises(RuntimeError, match=r"the ranks have different models.*up\.(weight|bias)"):
        block(torch.randn(2, DIM))


@pytest.mark.parametrize("answer", ["float32", torch.int8, torch.complex64, 32], ids=repr)
def test_an_answer_that_is_no_floating_dtype_is_refused_by_name_before_anything_is_changed(answer):
    model = Model()
    before = [*model.parameters()]
    policy = MixedPrecisionPolicy(LOW, param_dtype_override_fn=lambda param: answer)
    with fake_process_group(rank=0, world_size=2):
        with pytest.raises(ValueError, match=r"param_dtype_override_fn.*A_log, which is torch.float32"):
            fully_shard(model.blocks[0], mp_policy=policy)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        with pytest.raises(TypeError, match="param_dtype_override_fn=3.*expected a function"):
            MixedPrecisionPolicy(LOW, param_dtype_override_fn=3)


def test_the_policy_of_torch_is_taken_with_its_function():
    from torch.distributed.fsdp import MixedPrecisionPolicy as Torchs

    try:
        policy = Torchs(LOW, param_dtype_override_fn=keep_delicate)
    except TypeError:
        pytest.skip("torch < 2.15 has no param_dtype_override_fn")
    with fake_process_group(rank=0, world_size=2):
        block = fully_shard(Block(), mp_policy=policy)
        assert {handle.unsharded.dtype for handle in get_state(block)._handles} == {LOW, torch.float32}


@distributed(world_size=2)
def test_frozen_integers_are_asked_about_and_stay_together():
    module = nn.Linear(DIM, DIM)
    module.order = nn.Parameter(torch.arange(DIM), requires_grad=False)
    module.more = nn.Parameter(torch.arange(DIM), requires_grad=False)
    own = MixedPrecisionPolicy(LOW, param_dtype_override_fn=lambda p: p.dtype if p is module.order else None)
    fully_shard(module, mp_policy=own)
    assert len(get_state(module)._handles) == 2
    module(torch.randn(2, DIM)).sum().backward()


# ---- grad_dtype ------------------------------------------------------------------------------------------------------


def with_grad_dtype(model: nn.Module, dtype: torch.dtype, which: Callable[[nn.Parameter], bool]) -> nn.Module:
    for param in model.parameters():
        if which(param):
            param.grad_dtype = dtype
    return model


GRADIENTS = {
    "wider": (torch.bfloat16, torch.float32),
    "lower": (torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("way", ["plain", "accumulated", "no_sync", "flat views", "functional", "hybrid", "replicated"])
@pytest.mark.parametrize("kind", GRADIENTS)
@has_grad_dtype
@distributed(world_size=2)
def test_gradients_have_the_grad_dtype_of_their_parameter(kind, way):
    dtype, grad_dtype = GRADIENTS[kind]
    way = WAYS[way]
    torch.manual_seed(0)
    model, reference = pair(Model().to(dtype))
    which = lambda param: param.ndim == 2  # noqa: E731
    with_grad_dtype(model, grad_dtype, which)
    way.shard(model, None)
    set_functional_mode(model, way.is_functional)
    mine = flat_parameters(model) if way.is_flat else [*model.parameters()]
    optimizer = torch.optim.SGD(mine, lr=0.1)
    wanted = {name: grad_dtype if which(param) else dtype for name, param in reference.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        expected = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in reference.named_parameters()}
        for i in range(way.num_batches):
            batch = torch.randn(12, DIM, generator=generator).to(dtype)
            with way.wraps(model) if i + 1 < way.num_batches else nullcontext():
                mean_square(model, local_part(batch)).backward()
            for share in batch.chunk(2):
                mean_square(reference, share).backward()
                for name, param in reference.named_parameters():
                    expected[name] += param.grad.float() / 2
                    param.grad = None
        got = whole(model, lambda param: param.grad, reference)
        for name, grad in got.items():
            assert grad.dtype == wanted[name], name
            exact = dtype == torch.bfloat16 and wanted[name] == torch.float32
            torch.testing.assert_close(grad.float(), expected[name], atol=1e-6 if exact else 2e-3, rtol=0.02)
        before = whole(model, lambda param: param, reference)
        optimizer.step()
        for name, param in whole(model, lambda param: param, reference).items():
            assert param.dtype == dtype
            torch.testing.assert_close(param, before[name].add(got[name], alpha=-0.1).to(dtype), atol=1e-2, rtol=0.02)
            with torch.no_grad():
                reference.get_parameter(name).copy_(param)
        optimizer.zero_grad()
    assert all((param.grad_dtype == wanted[name]) for name, param in model.named_parameters())


@has_grad_dtype
@distributed(world_size=2)
def test_reductions_follow_grad_dtype_unless_there_is_a_reduce_dtype():
    for reduce_dtype, expected in [(None, {"bfloat16", "float32"}), (torch.float64, {"float64"})]:
        model = with_grad_dtype(Model(), torch.bfloat16, lambda param: param.ndim == 2)
        shard_blocks(model, MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        with record_collectives(model) as lines:
            mean_square(model, torch.randn(4, DIM)).backward()
        assert {line.split(" x ")[1].split()[0] for line in lines if line.startswith("reduce-scatter")} == expected
        assert {(param.ndim, param.grad.dtype) for param in model.parameters()} == {
            (2, torch.bfloat16),
            (1, torch.float32),
        }


@has_grad_dtype
@distributed(world_size=2)
def test_grad_dtype_survives_conversions_copies_and_clipping():
    model = with_grad_dtype(nn.Linear(DIM, DIM), torch.float64, lambda param: True)
    fully_shard(model)
    x = torch.randn(4, DIM)
    model(x).sum().backward()
    total = torch.stack([param.grad.full_tensor().norm() for param in model.parameters()]).norm()
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), total)
    for param in model.parameters():
        assert param.grad.dtype == torch.float64
    for twin in (copy.deepcopy(model), model):
        twin.zero_grad()
        twin.bfloat16()
        twin(x.bfloat16()).sum().backward()
        for param in twin.parameters():
            assert (param.dtype, param.grad.dtype) == (torch.bfloat16, torch.float64)
    with summon_full_params(model, with_grads=True):
        for param in model.parameters():
            assert param.grad.dtype == torch.float64


FOLLOWED = hasattr(torch.Tensor, "_has_grad_dtype_override")  # FSDP2 of torch >= 2.15 follows grad_dtype


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@pytest.mark.parametrize("param_dtype", [None, LOW])
@has_grad_dtype
@distributed(world_size=2)
def test_grad_dtype_none_keeps_the_dtype_that_gradients_are_reduced_in(param_dtype, reduce_dtype):
    wanted = reduce_dtype or param_dtype or torch.float32
    for system in (fully_shard, *([fsdp.fully_shard] if FOLLOWED else [])):
        model = nn.Linear(DIM, DIM)
        for param in model.parameters():
            param.grad_dtype = None
        policy = MixedPrecisionPolicy if system is fully_shard else fsdp.MixedPrecisionPolicy
        system(model, mp_policy=policy(param_dtype, reduce_dtype))
        for _ in range(2):
            model(torch.randn(4, DIM)).float().sum().backward()
        assert {param.grad.dtype for param in model.parameters()} == {wanted}, system


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@has_grad_dtype
@distributed(world_size=2)
def test_grad_dtype_that_is_set_after_sharding_is_refused_by_name(dtype):
    model = nn.Sequential(nn.Linear(DIM, DIM))
    fully_shard(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"grad_dtype of 0\.weight .* before fully_shard\(\)"):
            model[0].weight.grad_dtype = dtype
        model[0].weight.grad_dtype = torch.float32
        model(torch.randn(4, DIM)).sum().backward()
        assert model[0].weight.grad.dtype == torch.float32


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "_has_grad_dtype_override"), reason="torch < 2.15 does not tell if it was set"
)
@distributed(world_size=2)
def test_grad_dtype_that_is_that_of_the_parameter_survives_conversions():
    for system in (fsdp.fully_shard, fully_shard):
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        model[0].weight.grad_dtype = torch.float32
        system(model)
        model.bfloat16()
        model(torch.randn(4, DIM, dtype=torch.bfloat16)).sum().backward()
        found = {name: param.grad.dtype for name, param in model.named_parameters()}
        assert found.pop("0.weight") == torch.float32 and {*found.values()} == {torch.bfloat16}, system


@pytest.mark.parametrize("way", ["set", "load"])
@has_grad_dtype
@distributed(world_size=2)
def test_grad_dtype_of_an_assigned_parameter_is_refused_by_name(way):
    model = nn.Sequential(nn.Linear(DIM, DIM))
    fully_shard(model)
    given = nn.Parameter(model[0].weight.detach().clone())
    given.grad_dtype = torch.bfloat16
    with pytest.raises(RuntimeError, match=r"assigned to 0\.weight has grad_dtype torch\.bfloat16.*before fully_shard"):
        if way == "set":
            model[0].weight = given
            model(torch.randn(4, DIM))
        else:
            model.load_state_dict({**model.state_dict(), "0.weight": given}, assign=True)


@has_grad_dtype
@distributed(world_size=2)
def test_grad_dtype_survives_a_conversion_with_a_gradient():
    model = with_grad_dtype(nn.Linear(DIM, DIM), torch.bfloat16, lambda param: True)
    fully_shard(model)
    model(torch.ones(4, DIM)).sum().backward()
    model.to(torch.float64)
    model(torch.ones(4, DIM, dtype=torch.float64)).sum().backward()
    for param in model.parameters():
        assert (param.dtype, param.grad.dtype, param.grad_dtype) == (torch.float64, torch.bfloat16, torch.bfloat16)
        torch.testing.assert_close(param.grad.full_tensor(), torch.full(param.shape, 8.0, dtype=torch.bfloat16))

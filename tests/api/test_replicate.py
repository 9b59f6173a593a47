"""``replicate()``: data parallelism with whole parameters, against training in one process."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed._composable import replicate as torch_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecisionPolicy,
    RaggedDTensor,
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
    no_sync,
    record_collectives,
    replicate,
    set_functional_mode,
    set_gradient_divide_factor,
)
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.harness import breakable_mesh, distributed, environment
from tests.models import GPT, gpt_loss
from tests.models import batches as token_batches
from tests.training import adamw, assert_same_parameters, full, local_part, sgd

SMALL = 2000  # bytes of a bucket: several of them in a GPT


def alone(model: nn.Module) -> None:
    replicate(model, bucket_bytes=SMALL)


def each_block(model: nn.Module) -> None:
    for block in model.blocks:
        replicate(block)
    replicate(model, bucket_bytes=SMALL)


def inside(model: nn.Module) -> None:
    for block in model.blocks:
        replicate(block, bucket_bytes=SMALL)
    fully_shard(model)


def around(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block)
    replicate(model, bucket_bytes=SMALL)


def beside(model: nn.Module) -> None:
    replicate(model.blocks[0])
    fully_shard(model.blocks[1])
    fully_shard(model)


LAYOUTS: dict[str, Callable[[nn.Module], None]] = {f.__name__: f for f in (alone, each_block, inside, around, beside)}


def assert_gradients(ours: nn.Module, theirs: nn.Module, tolerance: float = 2e-6) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            got = full(a.grad).to(b.grad.dtype)
            assert (got - b.grad).abs().max() <= tolerance * max(1.0, b.grad.abs().max().item()), name


@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=(1, 2, 4))
def test_trains_like_one_process(layout, world_size):
    use_reentrant = (None, False, True)[([*LAYOUTS].index(layout) + world_size) % 3]  # every two of the three meet
    torch.manual_seed(0)
    reference = GPT(use_reentrant=use_reentrant, layers=2)
    ours = copy.deepcopy(reference)
    LAYOUTS[layout](ours)
    optimizers = adamw(ours.parameters()), adamw(reference.parameters())
    for batch in token_batches(2):
        gpt_loss(ours, local_part(batch)).backward()
        gpt_loss(reference, batch).backward()
        norms = clip_grad_norm_(ours.parameters(), 0.1), nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(ours, reference, tolerance=2e-6)


# ---- a model of large and small parameters, some of which are not always used


class Net(nn.Module):
    """The weights of ``wide`` are placed in their buckets at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 128)
        self.wide = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.extra = nn.Linear(128, 128, bias=False)
        self.last = nn.Linear(128, 3)

    def forward(self, x: torch.Tensor, with_extra: bool = True, again: bool = False) -> torch.Tensor:
        x = self.first(x)
        for layer in self.wide:
            x = checkpoint(layer, x, use_reentrant=True) if again else layer(x)
            x = checkpoint(layer, x, use_reentrant=True) if again else x  # a second gradient for its parameters
            x = x.tanh()
        return self.last(self.extra(x) if with_extra else x)


class Both:
    """A replicated model and one that is not, with the same backwards."""

    def __init__(self, wrap: Callable[[nn.Module], Any], prepare: Callable[[nn.Module], Any] = lambda _: None) -> None:
        torch.manual_seed(0)
        self.reference = Net()
        prepare(self.reference)
        self.ours = copy.deepcopy(self.reference)
        self.wrapped = wrap(self.ours)
        self.generator = torch.Generator().manual_seed(1)

    def backward(self, syncs: bool = True, on_first: bool | None = None, **arguments: bool) -> None:
        """``on_first``: whether the first rank's part of the batch uses ``extra``, as the others' does."""
        batch = torch.randn(12, 5, generator=self.generator)
        uses = [True] * dist.get_world_size()
        if on_first is not None:
            uses[0] = on_first
            arguments["with_extra"] = uses[dist.get_rank()]
        with nullcontext() if syncs else no_sync(self.ours):
            self.ours(local_part(batch), **arguments).square().mean().backward()
        for use, part in zip(uses, batch.chunk(len(uses)), strict=True):
            given = arguments if on_first is None else {**arguments, "with_extra": use}
            (self.reference(part, **given).square().mean() / len(uses)).backward()

    def check(self, tolerance: float = 2e-6) -> None:
        assert_gradients(self.ours, self.reference, tolerance)

    def zero(self) -> None:
        self.ours.zero_grad()
        self.reference.zero_grad()


def in_buckets(model: nn.Module, **options: Any) -> nn.Module:
    return replicate(model, bucket_bytes=60_000, **options)


@distributed(world_size=(2, 4))
def test_gradients_are_averages():
    both = Both(in_buckets)
    both.backward()
    both.check()
    both.backward()  # added
    both.check()
    both.zero()
    both.backward(with_extra=False)
    both.check()  # None where no rank has one
    both.backward(on_first=False)  # on some ranks
    both.check()
    both.zero()
    for syncs in (False, False, True):
        both.backward(syncs=syncs)
    both.check()
    both.backward(syncs=False)
    both.backward(with_extra=False)
    both.check()
    both.zero()
    both.backward(again=True)  # gradients that come after their bucket was averaged
    both.check(1e-5)
    both.ours.zero_grad(set_to_none=False)
    both.reference.zero_grad(set_to_none=False)
    both.backward()
    both.check()


class LargeParts(nn.Module):
    """Parameters of 256 KiB each, whose gradients are moved as soon as they arrive, beside small ones."""

    def __init__(self, has_small: bool, is_sparse: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 256, sparse=is_sparse)
        self.up = nn.Linear(256, 256, bias=has_small)
        self.unused = nn.Linear(256, 256, bias=False)

    def forward(self, ids: torch.Tensor, uses_all: bool = False) -> torch.Tensor:
        hidden = self.up(self.tokens(ids))
        return self.unused(hidden) if uses_all else hidden


@pytest.mark.parametrize("how", ["replicate", "ddp", "zero1"])
@pytest.mark.parametrize("kind", ["large", "small too", "sparse"])
@distributed(world_size=2)
def test_gradients_that_were_all_moved_as_they_arrived(kind, how):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = LargeParts(kind == "small too", kind == "sparse")
    plain = copy.deepcopy(model)
    if how == "replicate":
        replicate(model)
    else:
        for part in (model.tokens, model.up, model.unused):
            fully_shard(part, strategy=how)
        fully_shard(model, strategy=how)
    for step in range(4):  # the unused part is used by all ranks, by one (of a group: by all), by none
        ids = torch.arange(step, 256, 3).view(1, -1)
        users = {0: (0, 1), 1: (1,) if how == "replicate" else (0, 1), 2: (), 3: (0, 1)}[step]
        model((ids + rank) % 256 if kind == "large" else ids, rank in users).square().mean().backward()
        for other in range(2):
            plain((ids + other) % 256 if kind == "large" else ids, other in users).square().mean().div(2).backward()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            if expected.grad is None:
                assert param.grad is None, name
            else:
                dense = expected.grad.to_dense() if expected.grad.is_sparse else expected.grad
                torch.testing.assert_close(full(param.grad), dense, rtol=1e-5, atol=1e-7, msg=name)
        model.zero_grad()
        plain.zero_grad()


@distributed(world_size=2)
def test_gradients_that_the_user_keeps_stay_his():
    both = Both(in_buckets)
    both.backward()
    kept = both.ours.wide[0].weight.grad
    before = kept.to_local().clone()
    both.zero()
    both.backward()
    both.check()
    assert torch.equal(kept.to_local(), before)


@distributed(world_size=(2, 3))
def test_options_of_reductions():
    rows = {
        "bf16": (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), 2e-2),
        "fp16": (MixedPrecisionPolicy(reduce_dtype=torch.float16), 4e-3),
        "fp64": (MixedPrecisionPolicy(reduce_dtype=torch.float64), 2e-6),
        "compute in bf16": (MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32), 5e-2),
    }
    for name, (policy, tolerance) in rows.items():
        both = Both(lambda model, policy=policy: in_buckets(model, mp_policy=policy))
        for _ in range(2):
            both.backward()
            both.check(tolerance)
            assert {param.dtype for param in both.ours.parameters()} == {torch.float32}, name
    both = Both(in_buckets)
    set_gradient_divide_factor(both.ours, 2.0 * dist.get_world_size())
    both.backward()
    for param in both.reference.parameters():
        param.grad /= 2
    both.check()


@distributed(world_size=2)
def test_frozen_parameters_and_several_dtypes():
    def prepare(model: nn.Module) -> None:
        model.wide[1].requires_grad_(False)
        model.wide[2].weight.requires_grad_(False)

    both = Both(in_buckets, prepare)
    both.backward()
    both.check()
    both.zero()
    for model in (both.ours, both.reference):
        model.wide[1].requires_grad_(True)
        model.first.weight.requires_grad_(False)
    both.backward()
    both.check()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 2, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).double())

    reference = Mixed()
    ours = replicate(copy.deepcopy(reference))
    batch = torch.randn(8, 5)
    reference.load_state_dict({name: full(value) for name, value in ours.state_dict().items()})
    dist.broadcast(batch, 0)
    ours(local_part(batch)).square().mean().backward()
    reference.load_state_dict({name: full(value) for name, value in ours.state_dict().items()})
    reference(batch).square().mean().backward()
    assert_gradients(ours, reference)


@distributed(world_size=2)
def test_ties_flat_views_copies_and_optimizers_built_before():
    torch.manual_seed(0)
    reference = GPT(tie=True, layers=2)
    ours = copy.deepcopy(reference)
    early = sgd(ours.parameters())  # built before
    alone(ours)
    twins = copy.deepcopy(ours)
    flat = sgd(flat_parameters(twins))
    expected = sgd(reference.parameters())
    for batch in token_batches(3):
        for model, optimizer, part in (
            (ours, early, local_part(batch)),
            (twins, flat, local_part(batch)),
            (reference, expected, batch),
        ):
            gpt_loss(model, part).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
    assert_same_parameters(ours, reference, tolerance=2e-6)
    assert_same_parameters(twins, reference, tolerance=2e-6)
    again = copy.deepcopy(ours)
    assert_same_parameters(again, reference, tolerance=2e-6)
    gpt_loss(again, local_part(batch)).backward()
    gpt_loss(reference, batch).backward()
    assert_gradients(again, reference)
    assert all(param.grad is None for param in ours.parameters())


@distributed(world_size=2)
def test_functional_mode():
    both = Both(in_buckets)
    set_functional_mode(both.ours, True)
    batch = torch.randn(4, 5, generator=both.generator)
    norms = []
    for model, x in ((both.ours, local_part(batch)), (both.reference, batch)):
        grads = torch.autograd.grad(model(x).square().mean(), [*model.parameters()], create_graph=True)
        norms.append(sum(full(grad).square().sum() for grad in grads))
    torch.testing.assert_close(*norms)
    both.backward()
    both.check()


# ---- ranks


@distributed(world_size=2)
def test_a_rank_with_another_model_or_another_program_gets_an_error():
    model = replicate(nn.Linear(3, 3 + dist.get_rank()))
    with pytest.raises(RuntimeError, match="the ranks have different models"):
        model(torch.ones(2, 3))
    buckets = replicate(Net(), bucket_bytes=60_000 * (1 + dist.get_rank()))
    with pytest.raises(RuntimeError, match="the ranks have different models"):
        buckets(torch.ones(2, 5))


@distributed(world_size=2)
def test_a_rank_that_freezes_alone_is_named():
    model = in_buckets(Net())
    model(torch.ones(2, 5)).sum().backward()
    if dist.get_rank():
        model.wide[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="requires_grad"):
        model(torch.ones(2, 5)).sum().backward()


@distributed(world_size=2)
def test_trains_in_debug_mode():
    os.environ["FSDP_COMPOSE_DEBUG"] = "1"
    both = Both(in_buckets)
    both.backward()
    both.backward(on_first=False)
    both.check()


@distributed(world_size=2)
def test_another_models_backward_at_the_same_time():
    """Two models in one backward, of which a rank uses only a part: all still issue the same collectives."""
    torch.manual_seed(0)
    ours = [Net(), Net()]
    references = copy.deepcopy(ours)
    for model in ours:
        in_buckets(model)
    batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        losses = [model(local_part(batch), with_extra=dist.get_rank() == 0).square().mean() for model in ours]
        sum(losses).backward()
        for rank, part in enumerate(batch.chunk(2)):
            sum(model(part, with_extra=rank == 0).square().mean() / 2 for model in references).backward()
    for model, reference in zip(ours, references, strict=True):
        assert_gradients(model, reference)


@distributed(world_size=2)
def test_a_backward_that_raises_leaves_no_gradient():
    both = Both(in_buckets)
    both.backward()
    both.zero()

    class Stop(Exception):
        pass

    def stop(_grad: torch.Tensor) -> None:
        raise Stop

    def interrupt(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(stop)

    hook = both.ours.first.register_forward_hook(interrupt)
    with pytest.raises(Stop):
        both.ours(torch.ones(2, 5)).sum().backward()
    hook.remove()
    assert all(param.grad is None for param in both.ours.parameters())
    with pytest.warns(UserWarning, match="discarded"):
        both.backward()
    both.check()


# ---- schedule


# In processes of its own: beside a model of an earlier test with a backward to come, buckets are not averaged early.
@distributed(world_size=2, fresh=True)
def test_buckets_are_averaged_while_backward_runs():
    both = Both(in_buckets)
    both.backward()
    events: list[str] = []
    both.ours.first.register_full_backward_hook(lambda *_: events.append("backward of first"))
    with record_collectives(both.ours, lambda line: events.append(line.split()[0])):
        both.backward()
    assert events.count("all-reduce") == 5
    assert events.index("backward of first") > 3  # nearly all before it
    both.check()


@distributed(world_size=2)
def test_gradients_are_views_of_the_buckets():
    model = in_buckets(Net())
    model(torch.ones(2, 5)).sum().backward()
    storages = {param.grad.to_local().untyped_storage().data_ptr() for param in model.parameters()}
    assert len(storages) == 5
    model.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    again = {param.grad.to_local().untyped_storage().data_ptr() for param in model.parameters()}
    assert again == storages  # recycled


# ---- checkpoints


def assert_same_states(got: Any, expected: Any) -> None:
    """Assert that two pairs of state dicts, of a model and its optimizer, are equal bit for bit."""
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(got[1]["state"], expected[1]["state"], rtol=0, atol=0)
    assert got[1]["param_groups"] == expected[1]["param_groups"]


@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=2)
def test_a_state_dict_has_the_parameters_themselves(layout):
    """Not plain tensors: what saves or loads it must see which ranks have what."""
    model = GPT(layers=2)
    LAYOUTS[layout](model)
    (batch,) = token_batches(1)
    gpt_loss(model, local_part(batch)).backward()
    saved = model.state_dict()
    for name, param in model.named_parameters():
        assert type(saved[name]) is RaggedDTensor, name
        assert (saved[name].device_mesh, saved[name].placements) == (param.device_mesh, param.placements), name
        assert saved[name].to_local().data_ptr() == param.to_local().data_ptr(), name


@distributed(world_size=2)
def test_checkpoints_into_and_from_sharded_models(tmp_path):
    full = StateDictOptions(full_state_dict=True)

    def made(wrap: Callable[[nn.Module], Any], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = GPT(layers=2)
        wrap(model)
        optimizer = adamw(model.parameters())
        gpt_loss(model, local_part(next(iter(token_batches(1))))).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    for number, (source, target) in enumerate(((alone, fully_shard), (fully_shard, alone), (alone, each_block))):
        a, b = made(source, 1), made(target, 2)
        expected = get_model_state_dict(a[0], options=full), get_optimizer_state_dict(*a, options=full)
        folder = f"{tmp_path}/{number}"
        dcp.save(state(*a), checkpoint_id=folder)
        loaded = state(*b)
        dcp.load(loaded, checkpoint_id=folder)
        set_model_state_dict(b[0], loaded["model"])
        set_optimizer_state_dict(*b, loaded["optimizer"])
        got = get_model_state_dict(b[0], options=full), get_optimizer_state_dict(*b, options=full)
        if dist.get_rank() == 0:
            assert_same_states(got, expected)
        c = made(target, 3)
        everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(c[0], expected[0], options=everywhere)
        set_optimizer_state_dict(*c, expected[1], options=everywhere)
        got = get_model_state_dict(c[0], options=full), get_optimizer_state_dict(*c, options=full)
        if dist.get_rank() == 0:
            assert_same_states(got, expected)


# ---- arguments, and torch's own


@distributed(world_size=2)
def test_bad_arguments():
    model = Net()
    with pytest.raises(TypeError, match="replicate.bucket_bytes"):
        replicate(model, bucket_bytes=2.5)
    with pytest.raises(ValueError, match="positive"):
        replicate(model, bucket_bytes=0)
    with pytest.raises(ValueError, match="expected a mesh with one dimension"):
        replicate(model, mesh=init_device_mesh("cpu", (2, 1)))
    with pytest.raises(TypeError, match=r"replicate\(mesh"):
        replicate(model, mesh="cpu")
    with pytest.raises(TypeError, match=r"replicate\(\): expected an nn.Module"):
        replicate(3)
    replicate(model)
    for again in (fully_shard, replicate):
        with pytest.raises(ValueError, match=r"replicate\(\) was already called on this Net"):
            again(model)
    with pytest.raises(ValueError, match=r"fully_shard\(\) was already called on this Linear"):
        replicate(fully_shard(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="torch's replicate"):
        replicate(torch_ddp(nn.Linear(2, 2)))


@distributed(world_size=2)
def test_torchs_replicates_beside_ours():
    for theirs in (torch_ddp, torch_replicate):
        torch.manual_seed(0)
        a, b = nn.Linear(3, 3), nn.Linear(3, 2)
        reference = copy.deepcopy(nn.Sequential(a, b))
        replicate(a), theirs(b)
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        b(a(local_part(batch))).square().mean().backward()
        reference(batch).square().mean().backward()
        assert_gradients(nn.ModuleList([a, b]), reference)


@distributed(world_size=2)
def test_parameters_that_are_ignored_stay_as_they_are():
    model = Net()
    weight = model.extra.weight
    replicate(model, ignored_params=[weight])
    model(torch.ones(2, 5)).sum().backward()
    assert model.extra.weight is weight and type(weight.grad) is torch.Tensor


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("debug", ["0", "1"])
@distributed(world_size=(2, 3))
def test_ranks_may_run_unequal_numbers_of_what_communicates_nothing(debug, param_dtype, world_size):
    """Forwards of a replicated model, with gradients or without, and backwards in ``no_sync``."""
    rank = dist.get_rank()
    with environment(FSDP_COMPOSE_DEBUG=debug):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model = copy.deepcopy(plain)
        replicate(model, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
        optimizer = torch.optim.SGD(model.parameters(), 0.125)
        expected = torch.optim.SGD(plain.parameters(), 0.125)
        for step in range(6):
            for _ in range(rank * step):
                with torch.no_grad():
                    model(torch.ones(2, 4))
            with no_sync(model):
                for _ in range(rank * step):
                    model(torch.ones(2, 4)).float().sum().backward()
            model(torch.ones(2, 4)).float().sum().backward()
            if not rank:
                model(torch.ones(2, 4))  # no backward follows
            optimizer.step()
            optimizer.zero_grad()
            for other in range(world_size):
                for _ in range(other * step + 1):
                    (plain(torch.ones(2, 4)).sum() / world_size).backward()
            expected.step()
            expected.zero_grad()
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if param_dtype is None else {"rtol": 0.1, "atol": 0.1}
        for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), wanted, **tolerance)


@distributed(world_size=2, timeout=60)
def test_unequal_backwards_that_reduce_are_still_an_error():
    """What was to be compared is compared at the next collective: a step more in between, too."""
    model = nn.Linear(4, 4)
    replicate(model, mesh=breakable_mesh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 4)).sum().backward()
    if dist.get_rank():
        optimizer.step()
    optimizer.zero_grad()
    with no_sync(model):
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="different numbers of optimizer steps"):
        model(torch.ones(2, 4)).sum().backward()

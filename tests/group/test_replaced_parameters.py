"""References to parameters that fully_shard has replaced: training through them is that of the unsharded model."""

from __future__ import annotations

import copy
import functools
import gc
import operator
import subprocess
import sys
import textwrap
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compose import clip_grad_norm_, flat_parameters, fully_shard, functional_mode, set_functional_mode
from tests.harness import ROOT, distributed
from tests.models import shard_layers
from tests.training import assert_gradients_match, assert_parameters_match, local_part, pair

DIM, BATCH = 4, 6
Named = namedtuple("Named", ["weight", "other"])


@dataclass
class Kept:
    weight: nn.Parameter


class Layer(nn.Module):
    """A linear layer that computes with a reference to its weight that it keeps elsewhere."""

    def __init__(self, keep: Callable[[Layer], Callable[[], nn.Parameter]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        self.find = keep(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.find()).tanh()


def in_attribute(key: str, make: Callable[[nn.Parameter], Any], read: Callable[[Any], nn.Parameter]) -> Any:
    def keep(layer: Layer) -> Callable[[], nn.Parameter]:
        object.__setattr__(layer, key, make(layer.weight))
        reference = weakref.ref(layer)
        return lambda: read(getattr(reference(), key))

    return keep


def in_closure(layer: Layer) -> Callable[[], nn.Parameter]:
    weight = layer.weight
    return lambda: weight


def in_partial(layer: Layer) -> Callable[[], nn.Parameter]:
    return functools.partial(getattr, Kept(layer.weight), "weight")


KEEPERS = {
    "attribute": in_attribute("cached", lambda w: w, lambda w: w),
    "list": in_attribute("cached", lambda w: [w], lambda held: held[0]),
    "tuple": in_attribute("cached", lambda w: (w, 1), lambda held: held[0]),
    "nested": in_attribute("cached", lambda w: {"a": [(w,)]}, lambda held: held["a"][0][0]),
    "namedtuple": in_attribute("cached", lambda w: Named(w, None), lambda held: held.weight),
    "dataclass": in_attribute("cached", Kept, lambda held: held.weight),
    "closure": in_closure,
    "partial": in_partial,
}


class Model(nn.Module):
    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(keep) for _ in range(2))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(seed))


def models(keep: Any) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model(keep)
    torch.manual_seed(0)
    return model, Model(keep)


@pytest.mark.parametrize("mode", ["default", "functional"])
@pytest.mark.parametrize("where", KEEPERS)
@distributed(world_size=2)
def test_a_module_computes_with_a_reference_that_it_kept(where: str, mode: str) -> None:
    model, reference = models(KEEPERS[where])
    shard_layers(model)
    set_functional_mode(model, mode == "functional")
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, reference))
    for step in range(3):
        model(local_part(batch(step))).square().mean().backward()
        reference(batch(step)).square().mean().backward()
        assert_gradients_match(model, reference)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_parameters_match(model, reference)


@distributed(world_size=2)
def test_parameters_on_meta() -> None:
    with torch.device("meta"):
        model = Model(KEEPERS["tuple"])
    _, reference = models(KEEPERS["tuple"])
    shard_layers(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            param.zero_()
            other.zero_()
            other += 0.5
            param += 0.5
    model(local_part(batch(0))).square().mean().backward()
    reference(batch(0)).square().mean().backward()
    assert_gradients_match(model, reference)


@pytest.mark.parametrize("is_flat", [False, True])
@distributed(world_size=2)
def test_a_list_of_parameters_taken_before(is_flat: bool) -> None:
    """torch's clipping, zero_grad(), initialization and averages through it reach the sharded parameters."""
    model, reference = models(KEEPERS["attribute"])
    old, theirs = [*model.parameters()], [*reference.parameters()]
    shard_layers(model)
    flat = torch.optim.SGD(flat_parameters(model), lr=0.5) if is_flat else None
    ours, other = torch.optim.SGD(old, lr=0.5), torch.optim.SGD(theirs, lr=0.5)
    ours = flat or ours
    ours.zero_grad()
    for params in (old, theirs):
        with torch.no_grad():
            for param in params:
                param.mul_(2)
                param.data.add_(0.25)
    for step in range(2):
        model(local_part(batch(step))).square().mean().backward()
        reference(batch(step)).square().mean().backward()
        norms = [nn.utils.clip_grad_norm_(params, 0.01) for params in (old, theirs)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        torch.testing.assert_close(clip_grad_norm_(old, 1.0), torch.tensor(0.01), rtol=1e-3, atol=0)
        for optimizer, params in ((ours, old), (other, theirs)):
            optimizer.step()
            for param in params:
                param.grad = None
        assert all(param.grad is None for param in model.parameters())
    assert_parameters_match(model, reference)
    for mine, param, its in zip(old, model.parameters(), theirs, strict=True):
        assert (mine.shape, mine.dtype, mine.numel(), mine.requires_grad) == (
            its.shape, its.dtype, its.numel(), True
        )  # fmt: skip
        assert hash(mine) == id(mine)
        mine.requires_grad_(False)
        assert not param.requires_grad
    assert "standing for RaggedDTensor" in repr(old[0])


@distributed(world_size=2)
def test_hooks_registered_through_an_old_reference() -> None:
    model, _ = models(KEEPERS["attribute"])
    old = model.head.weight
    shard_layers(model)
    seen: list[torch.Size] = []
    old.register_hook(lambda grad: seen.append(grad.shape))
    old.register_post_accumulate_grad_hook(lambda param: seen.append(param.shape))
    model(local_part(batch(0))).sum().backward()
    assert seen == [old.shape] * 2


@distributed(world_size=2)
def test_outside_forward_it_is_the_sharded_parameter() -> None:
    model, reference = models(KEEPERS["closure"])
    old = model.head.weight
    shard_layers(model)
    h = model(local_part(batch(0)))
    with pytest.raises(RuntimeError, match=r"head\.weight of the fully_shard group .*full_tensor"):
        F.linear(h.t(), old)
    (h @ old.full_tensor()).square().mean().backward()
    (reference(batch(0)) @ reference.head.weight).square().mean().backward()
    assert_gradients_match(model, reference)


@distributed(world_size=2)
def test_a_graph_recorded_before_raises() -> None:
    model, _ = models(KEEPERS["attribute"])
    loss = model(local_part(batch(0))).sum()
    total = sum(param.sum() for param in model.parameters())
    shard_layers(model)
    with pytest.raises(RuntimeError):  # torch's, of saved tensors that were modified, or ours
        loss.backward()
    with pytest.raises(RuntimeError, match=r"the parameter .* recorded before"):
        total.backward()
    model(local_part(batch(0))).sum().backward()


@distributed(world_size=2)
def test_copies() -> None:
    class Cached(nn.Linear):
        def __init__(self) -> None:
            super().__init__(DIM, DIM)
            self.cached = {"weights": (self.weight,)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.cached["weights"][0], self.bias)

    torch.manual_seed(0)
    model, reference = pair(Cached())
    untouched = copy.deepcopy(model)
    old = [*model.parameters()]
    optimizer = torch.optim.SGD(old, lr=0.5)
    fully_shard(model)
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(2):
        twin(local_part(batch(step))).square().mean().backward()
        reference(batch(step)).square().mean().backward()
        for each in (its_optimizer, theirs):
            each.step()
            each.zero_grad()
    assert_parameters_match(twin, reference)
    assert_parameters_match(model, untouched)


@distributed(world_size=2)
def test_holds_no_memory() -> None:
    model, _ = models(KEEPERS["attribute"])
    old = [*model.parameters()]
    storages = [StorageWeakRef(param.untyped_storage()) for param in old]
    state = {name: param.detach() for name, param in model.head.named_parameters()}
    before = {name: value.clone() for name, value in state.items()}
    shard_layers(model)
    gc.collect()
    assert [storage.expired() for storage in storages] == [True, True, False, False]
    assert all(torch.equal(value, before[name]) for name, value in state.items())


@distributed(world_size=2)
def test_a_class_of_the_users_own_and_ties() -> None:
    class Weight(nn.Parameter):
        pass

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
            self.a.weight = self.b.weight = Weight(torch.randn(DIM, DIM))
            self.pair = (self.a.weight, self.b.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.b(self.a(x)), self.pair[0])

    torch.manual_seed(0)
    model, reference = pair(Tied().double())
    model.pair, reference.pair = ((one.a.weight, one.b.weight) for one in (model, reference))
    fully_shard(model.a)
    assert sum(param.numel() for param in model.parameters()) == 2 * DIM * DIM  # until the other place is sharded
    fully_shard(model)
    for step in range(2):
        model(local_part(batch(step).double())).square().mean().backward()
        reference(batch(step).double()).square().mean().backward()
        assert_gradients_match(model, reference)


@distributed(world_size=2)
def test_in_a_gradient_penalty() -> None:
    model, reference = models(KEEPERS["closure"])
    shard_layers(model)

    def penalty(one: Model, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(one(x.requires_grad_()).sum(), x, create_graph=True)
        return slope.square().mean()

    with functional_mode(model):
        penalty(model, local_part(batch(0))).backward()
    penalty(reference, batch(0)).backward()
    model.head.bias.grad = reference.head.bias.grad = None
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


# ---- optimizers that were built before


@distributed(world_size=2)
def test_optimizers_that_were_built_or_copied_before_are_found_without_a_search():
    class Alone(torch.optim.Optimizer):
        """Leaves out the constructor of the base class."""

        def __init__(self, params: Any) -> None:
            self.param_groups, self.state, self.defaults = [{"params": [*params], "lr": 0.1}], {}, {}

    model = nn.Linear(DIM, DIM)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    twin, alone = copy.copy(early), Alone(model.parameters())
    gone = weakref.ref(torch.optim.AdamW(model.parameters()))
    with mock.patch.object(gc, "get_objects", side_effect=AssertionError("all objects were searched")):
        fully_shard(model)
        model(torch.ones(1, DIM))
    for optimizer in (early, twin, alone):
        (group,) = optimizer.param_groups
        assert all(map(operator.is_, group["params"], model.parameters()))
    assert gone() is None


BUILT_BEFORE_IMPORT = """
    import gc, operator, torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = torch.nn.Linear(4, 4)
    early = torch.optim.SGD(model.parameters(), lr=0.1)

    from fsdp_compose import fully_shard

    fully_shard(model)
    model(torch.ones(1, 4))
    (group,) = early.param_groups
    assert all(map(operator.is_, group["params"], model.parameters()))

    def no_search():
        raise AssertionError("searched twice")

    gc.get_objects = no_search
    other = torch.nn.Linear(4, 4)
    early = torch.optim.SGD(other.parameters(), lr=0.1)
    fully_shard(other)
    other(torch.ones(1, 4))
    (group,) = early.param_groups
    assert all(map(operator.is_, group["params"], other.parameters()))
    print("both were found")
"""


def test_an_optimizer_that_is_older_than_the_import_is_found_by_one_search() -> None:
    command = [sys.executable, "-c", textwrap.dedent(BUILT_BEFORE_IMPORT)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "both were found" in run.stdout, run.stderr

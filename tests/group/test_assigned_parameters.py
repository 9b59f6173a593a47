"""Loaders that make DTensors placed like the sharded parameters, and put them in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.utils.prune as prune
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compose import RaggedDTensor, drop_in, fully_shard
from fsdp_compose.core.state_dicts.state_dict import get_model_state_dict
from tests.harness import distributed, lasting_mesh
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import local_part, whole

GRANULES = {"elements": lambda fqn, param: "elements", "rows": lambda fqn, param: "rows"}


def model_of(seed: int, tie: bool = False) -> GPT:
    torch.manual_seed(seed)
    return GPT(dim=6, tie=tie)


def assign(model: nn.Module, full: dict[str, torch.Tensor], way: str) -> None:
    """As loaders do: a new parameter in each slot."""
    for fqn, param in [*model.named_parameters()]:
        value = full[fqn]
        if way == "from_local":
            local = distribute_tensor(value, param.device_mesh, param.placements).to_local().clone()
            made = DTensor.from_local(
                local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        else:
            made = distribute_tensor(value, param.device_mesh, param.placements)
        owner, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(owner), name, nn.Parameter(made.detach(), requires_grad=param.requires_grad))


@pytest.mark.parametrize("granule", GRANULES)
@pytest.mark.parametrize("is_meta", [False, True])
@pytest.mark.parametrize("way", ["from_local", "distribute_tensor"])
@distributed(world_size=(2, 3))
def test_assigned_parameters_are_taken_over_and_train(way, is_meta, granule):
    reference = model_of(1)
    full = {name: value.clone() for name, value in reference.state_dict().items()}
    model = model_of(0)
    if is_meta:
        model = model.to("meta")
    shard_layers(model, granularity=GRANULES[granule])
    assign(model, full, way)
    early = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)  # holds what was assigned
    saved = get_model_state_dict(model)
    assert all(torch.equal(value.full_tensor(), full[name]) for name, value in saved.items())
    theirs = torch.optim.AdamW(reference.parameters(), 1e-2, eps=1e-3)
    for batch in batches(3):
        gpt_loss(model, local_part(batch)).backward()
        gpt_loss(reference, batch).backward()
        for optimizer in (early, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in whole(model, lambda param: param, reference).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_first", [True, False])
@distributed(world_size=2)
def test_between_iterations_too_and_state_of_the_optimizer_stays(is_first):
    reference, other = model_of(1), model_of(2)
    model = copy.deepcopy(reference)
    shard_layers(model)
    ours, theirs = (torch.optim.AdamW(item.parameters(), 1e-2, eps=1e-3) for item in (model, reference))
    for step, batch in enumerate(batches(4)):
        if step == 2:
            before = [*model.parameters()]
            assign(model, dict(other.state_dict()), "from_local")
            if is_first:  # an optimizer that was built for what is assigned
                ours = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
                theirs = torch.optim.AdamW(reference.parameters(), 1e-2, eps=1e-3)
            with torch.no_grad():
                for param, value in zip(reference.parameters(), other.parameters(), strict=True):
                    param.copy_(value)
        gpt_loss(model, local_part(batch)).backward()
        gpt_loss(reference, batch).backward()
        if step == 2:
            assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in whole(model, lambda param: param, reference).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach(), rtol=1e-5, atol=1e-5)


@distributed(world_size=2)
def test_ties_that_are_assigned_together_hold():
    reference = model_of(1, tie=True)
    model = shard_layers(model_of(0, tie=True))
    full = dict(reference.state_dict())
    assign(model, full, "from_local")
    assert model.head.weight is not model.tokens.weight  # named_parameters() has one name of the two
    model.head.weight = model.tokens.weight  # as tie_weights() does
    batch = next(batches(1))
    gpt_loss(model, local_part(batch)).backward()
    gpt_loss(reference, batch).backward()
    assert model.head.weight is model.tokens.weight
    for name, value in whole(model, lambda param: param.grad, reference).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["slot", "load", "slot, later", "load, later"])
@distributed(world_size=2)
def test_hooks_gradient_and_attributes_of_what_is_assigned_hold_as_under_fsdp2(way):
    found = []
    for system in (torch_fully_shard, fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4))
        system(model)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        if "later" in way and system is fully_shard:  # FSDP2 notices nothing after the first forward
            model(x).sum().backward()
            model.zero_grad()
        calls: list[str] = []
        given = nn.Parameter(model[0].weight.detach().clone() * 2)
        given.register_post_accumulate_grad_hook(lambda _, calls=calls: calls.append("accumulated"))
        given.grad = torch.ones_like(given)
        given.mine = 5
        if "slot" in way:
            model[0].weight = given
        else:
            model.load_state_dict({**model.state_dict(), "0.weight": given}, assign=True)
        model(x).square().sum().backward()
        weight = model[0].weight
        results = [weight.full_tensor().detach(), weight.grad.full_tensor(), len(calls), weight.mine]
        model(x).square().sum().backward()
        found.append([*results, weight.grad.full_tensor(), len(calls)])
    for theirs, ours in zip(*found, strict=True):
        if isinstance(ours, torch.Tensor):
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours == theirs


@distributed(world_size=2)
def test_requires_grad_of_what_is_assigned_holds():
    model = shard_layers(model_of(0))
    for fqn, param in [*model.named_parameters()]:
        if "up" in fqn:
            owner, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(owner), name, nn.Parameter(param.detach().clone(), requires_grad=False))
    gpt_loss(model, local_part(next(batches(1)))).backward()
    assert all((param.grad is None) == ("up" in name) for name, param in model.named_parameters())


@distributed(world_size=2)
def test_others_are_refused_by_name():
    model = shard_layers(model_of(0))
    gpt_loss(model, local_part(next(batches(1)))).backward()
    model.zero_grad()
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight.full_tensor()))
    with pytest.raises(RuntimeError, match=r"replaced, added or removed after fully_shard\(\): head.weight"):
        model(local_part(next(batches(1)))[:, :-1])


@distributed(world_size=2)
def test_another_parameter_of_the_model_is_no_new_one():
    """It ties two: refused by name between groups, after the first forward."""
    model = shard_layers(model_of(0))
    model(local_part(next(batches(1)))[:, :-1])
    model.blocks[0].norm1.weight = model.blocks[1].norm1.weight
    with pytest.raises(RuntimeError, match=r"replaced, added or removed.*blocks\.0\.norm1\.weight"):
        model(local_part(next(batches(1)))[:, :-1])


# ---- Before the first forward: plain parameters, and DTensors in other layouts


def plain(value: torch.Tensor, param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value.clone())


def in_layout(*placements: Placement) -> Callable[[torch.Tensor, nn.Parameter], nn.Parameter]:
    def make(value: torch.Tensor, param: nn.Parameter) -> nn.Parameter:
        mesh = param.device_mesh
        whole = [Replicate()] * (mesh.ndim - len(placements))
        return nn.Parameter(distribute_tensor(value, mesh, [*whole, *placements]))

    return make


MAKERS = {
    "plain": plain,
    "a transposed view": lambda value, param: nn.Parameter(value.T.clone().T),
    "Replicate": in_layout(Replicate()),
    "Shard(0)": in_layout(Shard(0)),
    "Shard(1)": in_layout(Shard(1)),
    "frozen": lambda value, param: nn.Parameter(value.clone(), requires_grad=False),
}


def layers(seed: int = 0, hidden: int = 7) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 5))


def shard_two(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def assert_train_equally(model: nn.Module, reference: nn.Module, rank: int, num_shares: int) -> None:
    ours, theirs = (torch.optim.AdamW(item.parameters(), 1e-2, eps=1e-3) for item in (model, reference))
    torch.manual_seed(3)
    for _ in range(3):
        x = torch.randn(2 * num_shares, 5)
        model(x.chunk(num_shares)[rank]).square().mean().backward()
        reference(x).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert all(isinstance(param, RaggedDTensor) for param in model.parameters())
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert param.requires_grad == other.requires_grad
        torch.testing.assert_close(param.full_tensor().detach(), other.detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("where", ["ordinary", "on meta", "optional"])
@distributed(world_size=(1, 3, 4))
def test_replaced_before_the_first_forward_trains_as_unsharded(kind, where, world_size):
    reference = layers()
    model = layers()
    mesh = lasting_mesh(("r", "s"), (world_size // 2, 2)) if world_size == 4 else None
    if where == "on meta":
        model = model.to("meta")
    shard_two(model, mesh, **({"optional": True} if where == "optional" else {}))
    for index in (0, 2) if where != "on meta" else (0,):
        value = torch.linspace(-1, 1, 35).view(reference[index].weight.shape)
        model[index].weight = MAKERS[kind](value, model[index].weight)
        reference[index].weight = nn.Parameter(value.clone(), requires_grad=kind != "frozen")
    if where == "on meta":
        rest = [(model[0], reference[0], "bias"), *((model[2], reference[2], name) for name in ("weight", "bias"))]
        for layer, other, name in rest:
            setattr(layer, name, plain(getattr(other, name).detach(), getattr(layer, name)))
    assert_train_equally(model, reference, dist.get_rank(), world_size)


@pytest.mark.parametrize("kind", MAKERS)
@distributed(world_size=4)
def test_replaced_parameters_that_are_tensor_parallel_too(kind):
    mesh = lasting_mesh(("dp", "tp"))
    reference, model = layers(hidden=6), layers(hidden=6)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shard_two(model, mesh["dp"])
    for index in (0, 2):
        value = torch.linspace(-1, 1, 30).view(reference[index].weight.shape)
        model[index].weight = MAKERS[kind](value, model[index].weight)
        reference[index].weight = nn.Parameter(value.clone(), requires_grad=kind != "frozen")
    assert_train_equally(model, reference, mesh.get_local_rank("dp"), 2)


def weight_norm_on_and_off(layer: nn.Linear) -> None:
    nn.utils.remove_weight_norm(nn.utils.weight_norm(layer))


def spectral_norm_on_and_off(layer: nn.Linear) -> None:
    torch.manual_seed(1)
    nn.utils.remove_spectral_norm(nn.utils.spectral_norm(layer))


def pruned_for_good(layer: nn.Linear) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.3)
    prune.remove(layer, "weight")


class Norms(nn.Module):
    """As many models do, initialises a parameter from its others once they have values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(5, 5), nn.Parameter(torch.empty(5))

    def initialise(self) -> None:
        with torch.no_grad():
            self.norm = nn.Parameter(torch.linalg.norm(self.inner.weight, dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.norm


@pytest.mark.parametrize("change", [weight_norm_on_and_off, spectral_norm_on_and_off, pruned_for_good])
@distributed(world_size=(2, 3))
def test_utilities_of_torch_that_replace_parameters(change, world_size):
    reference, model = layers(), shard_two(layers())
    change(reference[0])
    change(model[0])
    assert_train_equally(model, reference, dist.get_rank(), world_size)


@distributed(world_size=(2, 3))
def test_a_parameter_computed_from_others_replaces_one(world_size):
    torch.manual_seed(0)
    reference = Norms()
    model = copy.deepcopy(reference)
    fully_shard(model)
    reference.initialise()
    model.initialise()
    assert_train_equally(model, reference, dist.get_rank(), world_size)


@distributed(world_size=2)
def test_what_was_given_acts_on_the_parameter_of_the_group():
    """An optimizer and a closure hold it; the attributes that were set on it stay."""
    reference, model = layers(), shard_two(layers())
    lists = []
    for item in (reference, model):
        given = nn.Parameter(torch.ones(7, 5))
        given.decays = False
        item[0].weight = given
        item[0].register_forward_pre_hook(lambda layer, args, given=given: args[0] + given.sum())
        lists.append((given, torch.optim.SGD(item.parameters(), 0.1)))
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    for item, share in ((reference, x), (model, x.chunk(2)[dist.get_rank()])):
        item(share).square().mean().backward()
    for _, optimizer in lists:
        optimizer.step()
    assert model[0].weight.decays is False and reference[0].weight.decays is False
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), other.detach(), rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
def test_seeds_of_what_was_replaced_do_not_matter():
    model = shard_two(layers(seed=dist.get_rank()))
    reference = layers(seed=5)
    for index in (0, 2):
        for name in ("weight", "bias"):
            setattr(model[index], name, nn.Parameter(getattr(reference[index], name).detach().clone()))
    assert_train_equally(model, reference, dist.get_rank(), 2)


def other_values(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.full((7, 5), float(dist.get_rank())))


def other_values_of_replicas(model: nn.Module) -> None:
    param = model[0].weight
    local = torch.full((7, 5), float(dist.get_rank()))
    model[0].weight = nn.Parameter(DTensor.from_local(local, param.device_mesh, [Replicate()], run_check=False))


def one_rank_alone(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        model[0].weight = nn.Parameter(torch.ones(7, 5))


def other_kinds(model: nn.Module) -> None:
    param = model[0].weight
    whole = distribute_tensor(torch.ones(7, 5), param.device_mesh, [Replicate()])
    model[0].weight = nn.Parameter(torch.ones(7, 5) if dist.get_rank() else whole)


def frozen_on_one(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(7, 5), requires_grad=dist.get_rank() == 0)


def of_another_shape(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(7, 6))


def of_another_dtype(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(7, 5, dtype=torch.float64))


def with_a_hook(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(7, 5))
    model[0].weight.register_hook(lambda grad: grad * 2)


def with_a_gradient(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(7, 5))
    model[0].weight.grad = torch.ones(7, 5)


def in_two_groups(model: nn.Module) -> None:
    model[0].bias = nn.Parameter(torch.ones(7))
    model[0].alias = model[0].bias


def in_shared_memory(model: nn.Module) -> None:
    memory = torch.ones(40)
    model[0].weight = nn.Parameter(memory[:35].view(7, 5))
    model[2].weight = nn.Parameter(memory[5:].view(5, 7))


def under_another_name(model: nn.Module) -> None:
    prune.identity(model[0], "bias")  # the last parameter of the module: the order of the values stays


REFUSED = {
    under_another_name: r"replaced, added or removed after fully_shard\(\): 0\.bias",
    other_values: r"ranks have different models.*replaced.*0\.weight.*digest",
    other_values_of_replicas: r"ranks have different models.*replaced.*0\.weight.*digest",
    one_rank_alone: r"ranks have different models.*replaced.*0\.weight.*a plain parameter",
    other_kinds: r"ranks have different models.*replaced.*0\.weight.*a plain parameter",
    frozen_on_one: r"ranks have different models.*replaced.*0\.weight.*a plain parameter",
    of_another_shape: r"replaced after fully_shard\(\)",
    of_another_dtype: r"replaced after fully_shard\(\)",
    with_a_hook: r"0\.weight\. They were added or replaced after fully_shard\(\)",
    with_a_gradient: r"0\.weight\. They were added or replaced after fully_shard\(\)",
    in_two_groups: r"0\.bias, 0\.alias\. They were added or replaced after fully_shard\(\)",
    in_shared_memory: r"0\.weight and the parameter 2\.weight are different tensors in the same memory",
}


@pytest.mark.parametrize("change", REFUSED)
@distributed(world_size=2, timeout=30)
def test_other_replacements_are_refused_on_every_rank(change):
    model = shard_two(layers())
    change(model)
    given = {name: param for name, param in model.named_parameters()}
    with pytest.raises((RuntimeError, ValueError), match=REFUSED[change]):
        model(torch.ones(2, 5))
    assert all(param is given[name] for name, param in model.named_parameters())


# ---- drop_in


@pytest.mark.parametrize("way", ["from_local", "distribute_tensor"])
@distributed(world_size=3)
def test_rows_are_boxes_that_torch_can_compute(way):
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    full = dict(model_of(1).state_dict())
    model = model_of(0)
    for block in model.blocks:
        drop_in.fully_shard(block)
    drop_in.fully_shard(model)
    for name, param in [*model.named_parameters()]:
        shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        assert tuple(shape) == tuple(param.to_local().shape), name
        box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        expected = distribute_tensor(full[name], param.device_mesh, param.placements).to_local()
        assert torch.equal(full[name][box], expected) or not expected.numel()
    assign(model, full, way)
    assert all(torch.equal(value.full_tensor(), full[name]) for name, value in model.state_dict().items())

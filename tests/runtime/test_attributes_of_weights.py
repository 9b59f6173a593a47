"""Attributes that users set on weights inside forward and backward (statistics of pruning, norms of per-sample
gradients): they are on the parameters that users see outside, as after an unsharded step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecisionPolicy, fully_shard, replicate, set_functional_mode, summon_full_params
from tests.flat.test_all_gather_extensions import EightBit, RowScales
from tests.harness import distributed, lasting_mesh, run_distributed
from tests.models import shard_layers
from tests.training import assert_same_parameters, mean_square, plain_sgd


class Noting(nn.Module):
    """Layers whose forward, module hooks and tensor hooks leave something on their weights."""

    def __init__(self, note: Callable[..., None], checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 6)
        self.head.bias.requires_grad_(False)
        self.tail = nn.Linear(6, 6, bias=False)
        self.tail.weight = self.head.weight
        self.checkpointed = checkpointed
        for layer in (*self.layers, self.head):
            note(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = torch.tanh(x)
        return self.tail(torch.tanh(self.head(x)))


def in_forward(layer: nn.Linear) -> None:
    def hook(module, args):
        module.weight.seen = args[0].detach().sum()
        module.bias.seen = module.weight.seen + 1

    layer.register_forward_pre_hook(hook)


def in_backward_hook(layer: nn.Linear) -> None:
    def hook(module, _, grads):
        module.weight.norms = grads[0].square().sum(-1).sqrt().detach()
        module.bias.norms = grads[0].sum(-1)

    layer.register_full_backward_hook(hook)


def in_tensor_hook(layer: nn.Linear) -> None:
    def hook(module, args, output):
        weight = module.weight
        if output.requires_grad:
            output.register_hook(lambda grad: setattr(weight, "norms", grad.square().sum().detach()))

    layer.register_forward_hook(hook)


def deleted(layer: nn.Linear) -> None:
    layer.weight.first = layer.bias.first = 1
    layer.weight.other = 2

    def hook(module, args):
        for param in (module.weight, module.bias):
            if hasattr(param, "first"):
                del param.first
            else:
                param.later = 3

    layer.register_forward_pre_hook(hook)


def changed_in_place(layer: nn.Linear) -> None:
    layer.weight.total, layer.bias.counts = torch.zeros(()), []

    def hook(module, args, output):
        module.weight.total += output.detach().sum()
        module.bias.counts.append(len(module.bias.counts))

    layer.register_forward_hook(hook)


def rebound(layer: nn.Linear) -> None:
    layer.weight.calls = 0

    def hook(module, *_):
        module.weight.calls += 1

    layer.register_forward_hook(hook)
    layer.register_full_backward_pre_hook(hook)


NOTES = [in_forward, in_backward_hook, in_tensor_hook, deleted, changed_in_place, rebound]


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in vars(param).items() if not key.startswith("_")}
        for name, param in model.named_parameters(remove_duplicate=False)
    }


def assert_same_attributes(model: nn.Module, reference: nn.Module, tolerance: float = 0.0) -> None:
    ours, theirs = attributes_of(model), attributes_of(reference)
    assert any(theirs.values())
    for name, expected in theirs.items():
        assert ours[name].keys() == expected.keys(), (name, ours[name], expected)
        for key, value in expected.items():
            given, wanted = torch.as_tensor(ours[name][key]), torch.as_tensor(value)
            torch.testing.assert_close(given, wanted, rtol=tolerance, atol=tolerance, msg=f"{name}: {key}")


def shard_optional(model: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, optional=True)
    fully_shard(model)


def shard_functional(model: Any) -> None:
    set_functional_mode(shard_layers(model))


WAYS: dict[str, Callable[[Any], Any]] = {
    "reshard_after_forward=True": lambda model: shard_layers(model, reshard_after_forward=True),
    "reshard_after_forward=False": lambda model: shard_layers(model, reshard_after_forward=False),
    "reshard_after_forward=2": lambda model: shard_layers(model, reshard_after_forward=2),
    "mixed precision": lambda model: shard_layers(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)),
    "replicate": replicate,
    "functional": shard_functional,
    "optional": shard_optional,
    "checkpointed": shard_layers,
}


def twins(note: Callable[..., None], checkpointed: bool = False) -> tuple[Noting, Noting]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Noting(note, checkpointed))
    return models[0], models[1]


def rows(step: int) -> torch.Tensor:
    """A batch. Every rank gets the same one, so the mean over four ranks is exact."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("way", WAYS)
def test_attributes_that_a_training_step_sets_on_weights_are_on_the_parameters(way, note):
    run_distributed(set_attributes, 4 if way == "reshard_after_forward=2" else 2, {"way": way, "note": note})


def set_attributes(way: str, note: Callable[..., None]) -> None:
    model, reference = twins(note, way == "checkpointed")
    WAYS[way](model)
    params = [*model.parameters()]
    optimizers = [plain_sgd(item.parameters()) for item in (model, reference)]
    for step in range(3):
        for item in (model, reference):
            mean_square(item, rows(step)).backward()
        assert_same_attributes(model, reference)
        for item, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            for param in item.parameters():
                param.set_outside = step
            with torch.no_grad():
                item(rows(step))
        assert_same_attributes(model, reference)
        if step == 1:  # conversions replace what is inside parameters
            for item in (model, reference):
                item.double()
                item.float()
    assert [*map(id, params)] == [*map(id, model.parameters())]
    assert_same_parameters(model, reference, tolerance=0)


@distributed(world_size=2, timeout=60)
def test_attributes_of_weights_that_tensor_parallelism_has_cut():
    model, reference = twins(in_forward)
    mesh = lasting_mesh(("data", "tensor"), (1, 2))
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], ColwiseParallel(output_layouts=Replicate()))
    shard_layers(model, mesh=mesh["data"])
    for step in range(3):
        for item in (model, reference):
            mean_square(item, rows(step)).backward()
        assert_same_attributes(model, reference, 1e-5)  # a sum of the ranks' sums: of other bits on some processors


@distributed(world_size=2, timeout=60)
def test_attributes_set_where_full_parameters_are_summoned_stay():
    model, reference = twins(changed_in_place)
    shard_layers(model)
    with summon_full_params(model):
        for param in model.parameters():
            param.mask = torch.ones_like(param)
    for param in reference.parameters():
        param.mask = torch.ones_like(param)
    mean_square(model, rows(0)).backward()
    mean_square(reference, rows(0)).backward()
    assert_same_attributes(model, reference)


@distributed(world_size=2, timeout=60)
def test_attributes_stay_when_a_state_dict_is_assigned_and_when_the_model_is_copied():
    model, _ = twins(rebound)
    shard_layers(model)
    for step in range(2):
        mean_square(model, rows(step)).backward()
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
    mean_square(model, rows(2)).backward()
    weights = [layer.weight for layer in (*model.layers, model.head)]
    assert [weight.calls for weight in weights] == [6] * 3
    twin = copy.deepcopy(model)
    mean_square(twin, rows(2)).backward()
    assert [layer.weight.calls for layer in (*twin.layers, twin.head)] == [8] * 3
    assert [weight.calls for weight in weights] == [6] * 3


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("cls", [EightBit, RowScales])
@distributed(world_size=2, timeout=60)
def test_attributes_of_parameters_that_their_class_gathers(cls, note):
    model, reference = twins(note)
    for layer in model.layers:
        values = vars(layer.weight)
        layer.weight = nn.Parameter(cls(layer.weight.detach()))
        vars(layer.weight).update(values)
    shard_layers(model)
    for step in range(2):
        for item in (model, reference):
            mean_square(item, rows(step)).backward()
        ours, theirs = attributes_of(model), attributes_of(reference)
        assert {name: found.keys() for name, found in ours.items()} == {n: f.keys() for n, f in theirs.items()}
        for item in (model, reference):
            for param in item.parameters():
                param.set_outside = step
            item.zero_grad()
    if note is rebound:
        assert model.layers[0].weight.calls == 4

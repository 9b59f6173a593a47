"""Modules that pass look-ups on to the module they wrap (activation checkpointing, PEFT, compiled modules): what is
sharded is what ``fully_shard`` was called on, in every order of sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_compose import (
    fully_shard,
    no_sync,
    register_forward_method,
    reshard,
    set_functional_mode,
    set_reshard_after_forward,
    unshard,
)
from fsdp_compose.core.group.registry import _get_fsdp_states_with_modules, get_state, is_compatible, states_to_run
from tests.harness import distributed
from tests.models import DIM, Layer, Net, inputs
from tests.training import Twins, mean_square


class Forwarding(nn.Module):
    """As the wrappers of PEFT and of trainers do it: what it has not is looked up on what it wraps."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["wrapped"], name)

    def forward(self, *args: Any) -> Any:
        return self.wrapped(*args)


class Adapter(Forwarding):
    """... and has parameters of its own."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__(wrapped)
        self.scale = nn.Parameter(torch.full((DIM,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapped(x) + x * self.scale


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS = [Forwarding, Adapter, checkpoint_wrapper]


def wrap_layers(model: nn.Module, wrap: Callable[[nn.Module], Any]) -> nn.Module:
    for i, layer in enumerate(model.layers):
        model.layers[i] = wrap(layer)
    return model


def inner(wrapper: nn.Module) -> nn.Module:
    return next(wrapper.children())


@pytest.mark.parametrize("wrap", [*WRAPPERS, compiled])
def test_state_of_a_wrapper_is_its_own(wrap, one_process):
    model = wrap_layers(Net(), wrap)
    first, second, third = model.layers
    fully_shard(inner(first))
    assert get_state(first) is None and get_state(inner(first)) is not None
    fully_shard(second)
    assert get_state(second) is not None and get_state(inner(second)) is None
    fully_shard(inner(third))
    fully_shard(third)
    assert get_state(third) is not get_state(inner(third)) is not None
    fully_shard(model)
    _, modules = _get_fsdp_states_with_modules(model)
    assert modules == [model, inner(first), second, third, inner(third)]
    assert len(states_to_run(model)) == 5


@pytest.mark.parametrize("wrap", [*WRAPPERS, compiled])
def test_controls_of_a_wrapper_that_is_not_sharded_do_not_reach_what_it_wraps(wrap, one_process):
    wrapper = wrap(Layer())
    fully_shard(inner(wrapper))
    for control in (
        unshard,
        reshard,
        lambda module: set_functional_mode(module, recurse=False),
        lambda module: set_reshard_after_forward(module, True, recurse=False),
    ):
        with pytest.raises(ValueError, match=r"fully_shard\(\) was not called on this"):
            control(wrapper)
    with no_sync(wrapper):  # this one is meant for all groups below
        assert not get_state(inner(wrapper)).options.requires_gradient_sync


def test_a_wrapper_of_a_replicated_module_can_be_sharded(one_process):
    wrapper = Adapter(Layer())
    replicate(inner(wrapper))
    assert is_compatible(wrapper) and not is_compatible(inner(wrapper))
    fully_shard(wrapper)
    assert [handle.fqns for handle in get_state(wrapper)._handles] == [["scale"]]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_sharding_twice_is_still_refused(wrap, one_process):
    wrapper = wrap(Layer())
    fully_shard(inner(wrapper))
    fully_shard(wrapper)
    for module in (wrapper, inner(wrapper)):
        with pytest.raises(ValueError, match="was already called on this"):
            fully_shard(module)


def both(model: nn.Module) -> None:
    """The wrapped modules first, then the wrappers, then the model, which is a wrapper itself."""
    for layer in model.wrapped.layers:
        fully_shard(inner(layer))
        fully_shard(layer)
    fully_shard(model.wrapped)
    fully_shard(model)


def wrapped_only(model: nn.Module) -> None:
    for layer in model.wrapped.layers:
        fully_shard(inner(layer))
    fully_shard(model.wrapped)


def wrappers_only(model: nn.Module) -> None:
    for layer in model.wrapped.layers:
        fully_shard(layer)
    fully_shard(model)


def functional(shard: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def shard_and_set(model: nn.Module) -> None:
        shard(model)
        set_functional_mode(model)

    return shard_and_set


CASES = [
    (wrap, shard, is_functional)
    for wrap in WRAPPERS
    for shard in (both, wrapped_only, wrappers_only)
    for is_functional in (False, True)
    # Checkpointing recomputes what is inside its wrapper; functional mode needs groups to be recomputed whole.
    if not (wrap is checkpoint_wrapper and shard is wrappers_only and is_functional)
]


@pytest.mark.parametrize(("wrap", "shard", "is_functional"), [*CASES, (compiled, both, False)])
@distributed(world_size=2)
def test_models_with_wrappers_train_in_every_order(wrap, shard, is_functional):
    torch.manual_seed(0)
    model = Forwarding(wrap_layers(Net(2), wrap))
    Twins(model, functional(shard) if is_functional else shard).train()


class Generates(Net):
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self(x)) + self.head.bias


class GeneratingAdapter(Adapter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapped(x * self.scale)


@distributed(world_size=2)
def test_methods_of_what_is_wrapped_can_be_registered_on_both():
    torch.manual_seed(0)

    def shard(model: nn.Module) -> None:
        fully_shard(inner(model))
        register_forward_method(inner(model), "generate")
        fully_shard(model)
        register_forward_method(model, "generate")
        assert "generate" in model.__dict__ and "generate" in inner(model).__dict__

    twins = Twins(GeneratingAdapter(Generates()), shard)
    for batch in inputs(2):
        twins.backward(lambda model, x: model.generate(x).square().mean() + mean_square(model, x), batch)
        twins.step()

"""Parameters that are tensors of other classes: wrappers of one tensor, without an all-gather of their own, train as
that tensor, with a warning; what cannot be sharded is refused by name before anything is changed. For classes with an
all-gather of their own see ``test_all_gather_extensions``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from fsdp_compose import flat_parameters, fully_shard, set_functional_mode
from fsdp_compose.flat import param_kind
from fsdp_compose.group.registry import _get_fsdp_states
from tests.harness import distributed, fake_process_group
from tests.models import DIM, Net, shard_layers
from tests.training import Twins, plain_sgd


class CastWhenUsed(torch.Tensor):
    """A wrapper around the weight."""

    _inner: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self._inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> CastWhenUsed:
        return cls(inner["_inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(CastWhenUsed, lambda item: item._inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(result)
        return result


class Quantised(CastWhenUsed):
    """As quantised weights: elements in another dtype and shape, with scales. No operation but a few is there."""

    _scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self._scale = inner.detach().abs().amax(0)
        self._inner = (inner.detach() / self._scale * 127).to(torch.int8)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_inner", "_scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{cls.__name__}: no {func}")


class Packed(Quantised):
    """... of which one part is all: half as many bytes."""

    def __init__(self, inner: torch.Tensor) -> None:
        self._inner = inner.detach().flatten()[::2].to(torch.uint8)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_inner"], None


class Tagged(nn.Parameter):
    """Plain data with a class on top."""

    scale = 2.0

    def scaled(self) -> torch.Tensor:
        return self * self.scale


class Functions(nn.Parameter):
    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


def with_weights(make: Any) -> Net:
    torch.manual_seed(0)
    net = Net(2)
    for layer in net.layers:
        weight = make(layer.linear.weight.detach())
        layer.linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return net


@pytest.mark.parametrize("is_functional", [False, True])
@distributed(world_size=2)
def test_a_wrapper_of_one_tensor_trains_as_that_tensor_and_is_named_once(is_functional):
    param_kind._warned.clear()
    twins = Twins(with_weights(lambda data: data), shard_layers, plain_sgd)
    wrapped = with_weights(CastWhenUsed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_layers(wrapped)
        shard_layers(with_weights(CastWhenUsed))
    told = [str(item.message) for item in caught if "CastWhenUsed" in str(item.message)]
    assert len(told) == 1 and "the parameter linear.weight" in told[0] and "fsdp_pre_all_gather" in told[0]
    assert caught[0].filename == shard_layers.__code__.co_filename  # where fully_shard() was called
    twins.sharded = wrapped
    twins.both = (twins.reference, wrapped)
    twins.optimizers[1] = plain_sgd(flat_parameters(wrapped) if not is_functional else wrapped.parameters())
    set_functional_mode(wrapped, is_functional)
    twins.train()


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (Quantised, r"_inner: torch.int8 \(5, 5\), _scale: torch.float32 \(5,\)"),
        (Packed, r"_inner: torch.uint8 \(13,\)"),
        (lambda data: TwoTensor(data, data.clone()), r"a: torch.float32 \(5, 5\), b: torch.float32 \(5, 5\)"),
    ],
)
def test_what_is_more_than_its_elements_is_refused_by_name(make, parts):
    refuse(with_weights(make), rf"the parameter linear.weight is a \w+ of shape \(5, 5\).*\({parts}\)")


def refuse(net: Net, match: str) -> None:
    with fake_process_group(rank=0, world_size=2):
        before = [*net.parameters()]
        with pytest.raises(ValueError, match=match) as raised:
            shard_layers(net)
        assert "ignored_params" in str(raised.value)
        assert all(a is b for a, b in zip(net.parameters(), before, strict=True)) and not _get_fsdp_states(net)
        for layer in net.layers:
            fully_shard(layer, ignored_params=[layer.linear.weight])  # the remedy


def test_sparse_parameters_are_refused():
    refuse(with_weights(torch.Tensor.to_sparse), "linear.weight is torch.sparse_coo, which cannot be sharded")


class UsesTag(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert type(layer.linear.weight) is Tagged
            x = torch.tanh(x @ layer.linear.weight.scaled())
        return self.head(x)


@distributed(world_size=2)
def test_plain_data_with_a_class_on_top_keeps_its_class():
    net = with_weights(Tagged)
    net.__class__ = UsesTag
    Twins(net, fully_shard, plain_sgd).train()
    Functions.calls.clear()
    Twins(with_weights(Functions), shard_layers, plain_sgd).train()
    assert "linear" in Functions.calls and DIM == 5

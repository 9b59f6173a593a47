"""The tensors that go into a group's forward and come out of it: found in arguments and results, cast and aliased."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

_Tensor = torch.Tensor
ATOMS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)


class InputWatcher(Protocol):
    """A forward under grad mode, which wants to know when gradients of inputs arrive."""

    @property
    def device_type(self) -> str: ...

    def alias(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def watch_container(self, container: list[Any] | dict[Any, Any]) -> None: ...


def prepare_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None, use: InputWatcher | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast floating-point inputs to ``dtype`` and alias each distinct input that requires grad, once."""
    if dtype is None and use is None:
        return args, kwargs
    if len(args) == 1 and not kwargs and isinstance(args[0], _Tensor):
        tensor = args[0]
        if dtype is not None:
            tensor = cast(tensor, dtype)
        if use is not None and tensor.requires_grad:
            tensor = use.alias(tensor)
        return (tensor,), kwargs
    prepared: dict[int, tuple[_Tensor, _Tensor]] = {}

    def prepare(tensor: torch.Tensor, may_alias: bool) -> torch.Tensor:
        known = prepared.get(id(tensor))
        if known is None:
            result = tensor if dtype is None else cast(tensor, dtype)
            if may_alias and use is not None and result.requires_grad and result.device.type == use.device_type:
                result = use.alias(result)
            known = prepared[id(tensor)] = (tensor, result)  # holds the tensor, so that the id stays its own
        return known[1]

    return _visit(args, use, prepare), {key: _visit(value, use, prepare) for key, value in kwargs.items()}


def _visit(value: Any, use: InputWatcher | None, prepare: Callable[[torch.Tensor, bool], torch.Tensor]) -> Any:
    """No closure that refers to itself: inputs would live until the garbage collector comes."""
    if isinstance(value, _Tensor):
        return prepare(value, True)
    if type(value) is tuple:
        return tuple([_visit(item, use, prepare) for item in value])
    if isinstance(value, ATOMS):
        return value
    # A container that the caller and forward may share: a tensor that forward puts in there escapes by it, and a
    # copy would hide what forward writes. So it is replaced only if a cast needs it.
    if use is not None and isinstance(value, (list, dict)):
        use.watch_container(value)
    return map_tensors(lambda tensor: prepare(tensor, False), value)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor in it replaced; ``value`` itself if none was."""
    if isinstance(value, _Tensor):
        return function(value)
    if isinstance(value, ATOMS):
        return value
    changed = False

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal changed
        result = function(tensor)
        changed |= result is not tensor
        return result

    mapped = tree_map_only(_Tensor, apply, value)
    return mapped if changed else value

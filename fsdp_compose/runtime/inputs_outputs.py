"""Finds the tensors that enter and leave a group's forward; casts and aliases inputs, and hooks outputs.

Called by the hooks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .._torch import same_storage
from ..flat import local_of
from ..group import _FSDPState, search_object

_Tensor = torch.Tensor
ATOMS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)


class InputWatcher(Protocol):
    """A forward under grad mode that must notice when gradients of its inputs arrive."""

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
    """Apply ``prepare`` to the tensors in ``value``.

    A function and not a closure: a recursive closure refers to itself, and the cycle would keep inputs alive until the
    garbage collector runs."""
    if isinstance(value, _Tensor):
        return prepare(value, True)
    if type(value) is tuple:
        return tuple([_visit(item, use, prepare) for item in value])
    if isinstance(value, ATOMS):
        return value
    # The caller and forward may share a container. A tensor that forward puts into it escapes that way, and a copy
    # would hide what forward writes. So the container is replaced only if a cast requires it.
    if use is not None and isinstance(value, (list, dict)):
        use.watch_container(value)
    return map_tensors(lambda tensor: prepare(tensor, False), value)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Replace every tensor in ``value``. Returns ``value`` itself if no tensor has changed."""
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


# ---- Outputs of a group's forward: found in its results and wherever else it has put tensors, and hooked
#
# A backward that passes one of them runs the hook of its use. This section also finds out whether a backward could
# enter the group in another way (an object in which no tensor can be found, an output that is a parameter); the use
# decides what to do then.


class OutputWatcher(Protocol):
    """A forward under grad mode that must notice when gradients of its outputs arrive."""

    containers: list[tuple[Any, set[int]]] | None
    has_alias: bool

    def tensors_put_into_inputs(self) -> list[torch.Tensor]: ...

    def hook_output(self, tensor: torch.Tensor) -> bool: ...


def hook_outputs(state: _FSDPState, use: OutputWatcher, output: Any) -> tuple[bool, bool]:
    """Hook every output that requires grad, and tensors that forward has kept or put elsewhere.

    Returns:
        Whether there are hooks, and whether backward may enter the group without passing them.
    """
    is_tensor, keeper = isinstance(output, _Tensor), state.swap.kept
    kept = [] if keeper.is_unchanged else keeper.new_ones()
    if use.containers is not None:
        kept += use.tensors_put_into_inputs()
    has_hooks = has_gaps = False
    leaves: list[Any] = [output] if is_tensor else tree_leaves(output)
    for leaf in leaves:
        if not isinstance(leaf, _Tensor):
            if not isinstance(leaf, ATOMS):
                found, is_complete = search_object(leaf)
                leaves += found  # the loop comes to them
                has_gaps |= not is_complete
        elif not leaf.requires_grad:
            has_gaps |= _is_parameter_memory(state, leaf)
        elif use.hook_output(leaf):
            has_hooks = True
        else:
            has_gaps = True
    # (Forward itself may have frozen all parameters.)
    may_need = use.has_alias or any(p.requires_grad for handle in state._handles for p in handle.unsharded.params)
    if keeper.is_unchanged and not has_hooks and may_need:
        kept += keeper.new_ones()
    for tensor in kept:
        has_hooks |= use.hook_output(tensor)
    if not has_hooks:
        # There is nothing to hook: tensors may have left the forward in another way, such as an attribute.
        has_gaps |= may_need
    return has_hooks, has_gaps


def has_parameter_memory(state: _FSDPState, output: Any) -> bool:
    """Whether some output is an unsharded parameter or a view of one. Without grad mode there is nothing to hook, but
    the memory of such an output must not be freed."""
    for leaf in (output,) if isinstance(output, _Tensor) else tree_leaves(output):
        if isinstance(leaf, _Tensor) and _is_parameter_memory(state, leaf):
            return True
    return False


def _is_parameter_memory(state: _FSDPState, tensor: torch.Tensor) -> bool:
    """Whether an output is an unsharded parameter or a view of one, whose memory resharding would free while the user
    holds it."""
    tensor = local_of(tensor)
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()
    return any(
        same_storage(storage, handle.unsharded.storage) for handle in state._handles if handle.unsharded.is_allocated
    )

"""Finds the tensors that enter and leave a group's forward; casts and aliases inputs, and hooks outputs.

Called by the hooks."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from ..._torch import same_storage
from ..flat import local_of
from ..group import ATOMS, HookedUse, _FSDPState, search_object

_Tensor = torch.Tensor


def prepare_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None, use: HookedUse | None
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
            # Each device has its own queue in autograd, so an alias on another one says nothing about this group.
            if may_alias and use is not None and result.requires_grad and result.device.type == use.device_type:
                result = use.alias(result)
            known = prepared[id(tensor)] = (tensor, result)  # holds the tensor, so that the id stays its own
        return known[1]

    return _visit(args, use, prepare), {key: _visit(value, use, prepare) for key, value in kwargs.items()}


def _visit(value: Any, use: HookedUse | None, prepare: Callable[[torch.Tensor, bool], torch.Tensor]) -> Any:
    """Apply ``prepare`` to the tensors in ``value``."""
    # A function and not a closure in ``prepare_inputs``: a recursive closure refers to itself, and the cycle would keep
    # inputs alive until the garbage collector runs.
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
    """Replace every tensor in ``value``: in dicts, lists, tuples, sets and deques, in subclasses of these, and in
    dataclasses. Returns ``value`` itself if no tensor has changed, else copies of the same classes. An object of any
    other class stays as it is."""
    return _mapped(function, value, [])


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any, around: list[int]) -> Any:
    """``map_tensors``, inside the containers whose ids are in ``around``."""
    if isinstance(value, _Tensor):
        return function(value)
    if isinstance(value, ATOMS) or not _is_container(value) or id(value) in around:
        return value
    around.append(id(value))
    try:
        if isinstance(value, dict):
            return _with_items(value, {key: _mapped(function, item, around) for key, item in value.items()})
        if isinstance(value, _SEQUENCES):
            return _with_sequence(value, [_mapped(function, item, around) for item in value])
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _with_fields(value, {name: _mapped(function, getattr(value, name), around) for name in names})
    finally:
        around.pop()


_SEQUENCES = (list, tuple, set, frozenset, deque)


def _is_container(value: Any) -> bool:
    # Not every pytree: caller and forward may both write to an object (a key/value cache), and a copy would hide from
    # one what the other has written.
    if isinstance(value, (dict, *_SEQUENCES)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module))


def _with_items(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    changed = {key: item for key, item in items.items() if item is not value[key]}
    if not changed:
        return value
    if type(value) is dict:
        return items
    result = copy.copy(value)  # keeps the class, what it has besides items, and their order
    if getattr(value, "__dict__", None) is value:
        result.__dict__ = result  # items are attributes
    for key, item in changed.items():
        result[key] = item
    return result


def _with_sequence(value: Any, items: list[Any]) -> Any:
    if all(map(is_, items, value)):
        return value
    if isinstance(value, (list, deque)):
        if type(value) is list:
            return items
        result = copy.copy(value)  # keeps the class, and a deque's maxlen
        result.clear()
        result.extend(items)
        return result
    make = getattr(value, "_make", type(value))  # of a named tuple
    return make(items)


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    changed = {name: item for name, item in fields.items() if item is not getattr(value, name)}
    if not changed:
        return value
    result = copy.copy(value)  # dataclasses.replace() would run __post_init__ again, and refuse fields without init
    write = object.__setattr__ if value.__dataclass_params__.frozen else setattr
    for name, item in changed.items():
        write(result, name, item)
    return result


# ---- Outputs of a group's forward: found in its results and wherever else it has put tensors, and hooked
#
# A backward that passes one of them runs the hook of its use. This section also finds out whether a backward could
# enter the group in another way (an object in which no tensor can be found, an output that is a parameter); the use
# decides what to do then.


def hook_outputs(state: _FSDPState, use: HookedUse, output: Any) -> tuple[bool, bool]:
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
    # A group that keeps nothing is searched only at the end of the outermost forward. But without a hook on an output,
    # what it has kept may be the only way into it.
    if keeper.is_unchanged and not has_hooks and may_need:
        kept += keeper.new_ones()
    for tensor in kept:
        has_hooks |= use.hook_output(tensor)
    if not has_hooks:
        # There is nothing to hook: tensors may have left the forward in another way, such as an attribute.
        has_gaps |= may_need
    return has_hooks, has_gaps


def has_parameter_memory(state: _FSDPState, output: Any) -> bool:
    """Whether some output is an unsharded parameter or a view of one: resharding must not free its memory."""
    for leaf in (output,) if isinstance(output, _Tensor) else tree_leaves(output):
        if isinstance(leaf, _Tensor) and _is_parameter_memory(state, leaf):
            return True
    return False


def _is_parameter_memory(state: _FSDPState, tensor: torch.Tensor) -> bool:
    """Whether an output is an unsharded parameter or a view of one."""
    tensor = local_of(tensor)
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()
    return any(
        same_storage(storage, handle.unsharded.storage) for handle in state._handles if handle.unsharded.is_allocated
    )

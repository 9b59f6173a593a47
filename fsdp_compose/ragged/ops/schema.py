"""The schema of an operator: which arguments it writes to, and of what kind they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

FUSED_OPTIMIZERS = {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"}

_INDEXED_WRITES = {
    "aten::index_put_", "aten::index_fill_", "aten::index_copy_", "aten::index_add_", "aten::scatter_",
    "aten::scatter_add_", "aten::masked_scatter_",
}  # fmt: skip
_WRITES = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::masked_fill_", *_INDEXED_WRITES}


def writes_through(func: Any) -> bool:
    """Whether ``func`` writes elements, and nothing else, to its first argument."""
    name = func._schema.name
    return name.endswith("_") and (name in _WRITES or torch.Tag.pointwise in func.tags)


def writes_by_index(func: Any) -> bool:
    """Whether ``func`` writes to some elements of its first argument, which indices or a mask name."""
    return func._schema.name in _INDEXED_WRITES


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that ``func`` writes to."""
    result: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            result += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if item is not None]
    return result


@cache
def written_positions(func: Any) -> tuple[int, ...]:
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return tuple(i for i, alias in enumerate(aliases) if alias is not None and alias.is_write)


def is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def map_tensors(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every instance of ``kind`` in it (in lists, tuples and dicts) replaced by ``function`` of it."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([map_tensors(kind, function, item) for item in value])
    if type(value) is dict:
        return {key: map_tensors(kind, function, item) for key, item in value.items()}
    return value

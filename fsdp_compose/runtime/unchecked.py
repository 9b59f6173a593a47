"""The hooks of forward while spmd_types checks the types of a program's tensors.

The checker sees each operation of forward. Those of this package are not the program's: its buffers have no types. So
the checks pause in its hooks, and what a hook gives back for a tensor (an alias, a cast) has the types of that tensor.
In backward there is nothing to do: a function mode, as the checker is, does not see what runs there.

Nobody else pays for it: ``pause_type_checks`` is called when the first annotated parameter is sharded."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn as nn

from ..group import traced_inside_others
from . import hooks
from .inputs_outputs import map_tensors

_is_captured = torch.compiler.is_dynamo_compiling


def pause_type_checks() -> None:
    """Let spmd_types check nothing in the hooks of groups that are made from now on."""
    hooks.registered[:] = pre_forward, post_forward


@traced_inside_others
def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    if _is_captured() or not _types().is_type_checking():
        return hooks.pre_forward(module, args, kwargs)
    with _types().no_typecheck():
        prepared = hooks.pre_forward(module, args, kwargs)
        _keep_types((args, kwargs), prepared)
    return prepared


@traced_inside_others
def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
    if _is_captured() or not _types().is_type_checking():
        return hooks.post_forward(module, args, output)
    with _types().no_typecheck():
        replaced = hooks.post_forward(module, args, output)
        if replaced is not None:
            _keep_types(output, replaced)
    return replaced


def _types() -> Any:
    return sys.modules["spmd_types"]


def _keep_types(before: Any, after: Any) -> None:
    """Give the tensors in ``after`` the types of those in ``before``, which has the same structure."""
    types = _types()
    for old, new in zip(_tensors(before), _tensors(after), strict=True):
        if new is not old and types.get_local_type(old):
            types.assert_type(new, types.get_local_type(old), partition_spec=types.get_partition_spec(old))


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found

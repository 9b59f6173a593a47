"""The tensors by which a group's forward leaves: found in its results, and wherever else it has put some, and hooked.

A backward that comes by one of them runs the hook of its use. Whether one could come by another way (an object in which
no tensor can be found, an output that is a parameter) is said here; what then follows is the use's affair.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from .._torch import same_storage
from ..flat import local_of
from ..group import _FSDPState, tensors_requiring_grad
from .inputs import ATOMS

_Tensor = torch.Tensor


class OutputWatcher(Protocol):
    """A forward under grad mode, which wants to know when gradients of outputs arrive."""

    containers: list[tuple[Any, set[int]]] | None
    has_alias: bool

    def tensors_put_into_inputs(self) -> list[torch.Tensor]: ...

    def hook_output(self, tensor: torch.Tensor) -> bool: ...


def hook_outputs(state: _FSDPState, use: OutputWatcher, output: Any) -> tuple[bool, bool]:
    """Hook every output that requires grad, and what forward has kept or put elsewhere.

    Returns:
        Whether there are hooks, and whether backward may come to the group past them.
    """
    is_tensor, keeper = isinstance(output, _Tensor), state.swap.kept
    kept = [] if keeper.is_quiet else keeper.new_ones()
    if use.containers is not None:
        kept += use.tensors_put_into_inputs()
    has_hooks = has_gaps = False
    for leaf in (output,) if is_tensor else tree_leaves(output):
        if not isinstance(leaf, _Tensor):
            if not isinstance(leaf, ATOMS):
                has_gaps = True
                kept += tensors_requiring_grad(leaf)  # not all there may be, but backward should not come unawares
        elif not leaf.requires_grad:
            has_gaps |= _is_parameter_memory(state, leaf)
        elif use.hook_output(leaf):
            has_hooks = True
        else:
            has_gaps = True
    # (Forward itself may have frozen all.)
    may_need = use.has_alias or any(p.requires_grad for handle in state._handles for p in handle.unsharded.params)
    if keeper.is_quiet and not has_hooks and may_need:
        kept += keeper.new_ones()
    for tensor in kept:
        has_hooks |= use.hook_output(tensor)
    if not has_hooks:
        # Nothing to hook: what backward needs may have left by another way, such as an attribute.
        has_gaps |= may_need
    return has_hooks, has_gaps


def has_parameter_memory(state: _FSDPState, output: Any) -> bool:
    """Whether some output is (a view of) an unsharded parameter. Without grad mode there is nothing to hook, but that
    must not be freed."""
    for leaf in (output,) if isinstance(output, _Tensor) else tree_leaves(output):
        if isinstance(leaf, _Tensor) and _is_parameter_memory(state, leaf):
            return True
    return False


def _is_parameter_memory(state: _FSDPState, tensor: torch.Tensor) -> bool:
    """Whether an output is (a view of) an unsharded parameter, which resharding would free under the user's hands."""
    tensor = local_of(tensor)
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()
    return any(
        same_storage(storage, handle.unsharded.storage) for handle in state._handles if handle.unsharded.is_allocated
    )

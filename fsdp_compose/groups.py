"""What a group manages: the modules and the parameters below the modules given to one ``fully_shard`` call."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn

from .flat_param import ManagedParameter, owner_of
from .state import _FSDPState, get_state, is_compatible
from .swap import ParameterSwap


def group_modules(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """The modules of the group with their names, depth first: not below a nested group, nor below a module that an
    incompatible API (torch's ``replicate``) manages."""
    names: dict[nn.Module, str] = {}
    roots = [("" if len(modules) == 1 else str(i), module) for i, module in enumerate(modules)]
    stack = [*reversed(roots)]
    while stack:
        name, module = stack.pop()
        is_root = module in modules
        if module in names or (get_state(module) is not None and not is_root) or not is_compatible(module):
            continue
        names[module] = name
        children = [(f"{name}.{child}" if name else child, item) for child, item in module.named_children()]
        stack.extend(reversed(children))
    return names


def managed_parameters(fqns: dict[nn.Module, str], ignored: set[nn.Parameter], label: str) -> list[ManagedParameter]:
    found: dict[nn.Parameter, ManagedParameter] = {}
    for module, name in fqns.items():
        for local_name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            fqn = f"{name}.{local_name}" if name else local_name
            owner = owner_of(param)
            if owner is not None:
                raise ValueError(
                    f"fully_shard(): the parameter {fqn} of this {label} is already in another group, as {owner[1]} "
                    f"of the sharded {owner[0]}. A parameter can be in one group: shard inner modules before outer "
                    "ones, and modules that share a parameter (tied weights) in one call: fully_shard([a, b]), or "
                    "by the call on their common parent"
                )
            found.setdefault(param, ManagedParameter(fqn, param)).slots.append((module, local_name))
    return list(found.values())


def prepare_swap(state: _FSDPState) -> None:
    """Prepare a copied group to show its parameters: when its modules are complete, before anything else is done."""
    roots = [module for ref in state.modules if (module := ref()) is not None]
    fqns = group_modules(roots)
    managed = {
        id(face): ManagedParameter(fqn, face)
        for handle in state._handles
        for fqn, face in zip(handle.fqns, handle.faces, strict=True)
    }
    for module in fqns:
        for name, param in module._parameters.items():
            if id(param) in managed:
                managed[id(param)].slots.append((module, name))
    state.swap = ParameterSwap(roots, [*managed.values()], state._handles, fqns)

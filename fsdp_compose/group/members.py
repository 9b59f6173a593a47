"""The modules and the parameters that a group manages: those below the modules given to one ``fully_shard`` call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.nn as nn

from ..flat import SHARDED_PARAM_ATTRIBUTE, FlatParamHandle, ManagedParameter, handle_of, owner_of
from .registry import get_state, is_compatible
from .state import _FSDPState, state_of
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
            if SHARDED_PARAM_ATTRIBUTE in param.__dict__:
                continue  # a tie: see ties_with_other_groups
            owner = handle_of(param)
            if owner is not None and _stands_below(module, owner[0]):
                group, owner_fqn = owner_of(param) or ("?", "?")
                raise ValueError(
                    f"fully_shard(): the parameter {fqn} of this {label} is already in another group, as {owner_fqn} "
                    f"of the sharded {group}. A parameter can be in one group: shard inner modules before outer ones"
                )
            if owner is not None:
                continue
            found.setdefault(param, ManagedParameter(fqn, param)).slots.append((module, local_name))
    return list(found.values())


def unsharded_tensors(
    fqns: Mapping[nn.Module, str], managed: Collection[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers of some modules, and those of their parameters that are neither in ``managed`` nor sharded already."""
    for module, prefix in fqns.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            is_sharded = tensor is None or SHARDED_PARAM_ATTRIBUTE in tensor.__dict__ or handle_of(tensor) is not None
            if tensor is not None and not is_sharded and tensor not in managed:
                yield (f"{prefix}.{name}" if prefix else name), tensor


def ties_with_other_groups(
    fqns: dict[nn.Module, str], ignored: set[nn.Parameter]
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Slots of the modules in which a parameter stands that an earlier call has sharded elsewhere (tied weights), and
    the sharded parameter that belongs there."""
    return [
        (module, name, param.__dict__[SHARDED_PARAM_ATTRIBUTE])
        for module in fqns
        for name, param in module._parameters.items()
        if param is not None and param not in ignored and SHARDED_PARAM_ATTRIBUTE in param.__dict__
    ]


def _stands_below(module: nn.Module, handle: FlatParamHandle) -> bool:
    """Whether the group of ``handle`` manages ``module`` itself."""
    state = state_of(handle)
    return state is not None and module in group_modules(state.live_modules())


def prepare_swap(state: _FSDPState) -> None:
    """Prepare a group to show its parameters, when its modules are complete: the copy of one, or one that has got other
    parameters, wherever they stand below its modules."""
    roots = state.live_modules()
    fqns = group_modules(roots)
    managed = {
        id(sharded): ManagedParameter(fqn, sharded)
        for handle in state._handles
        for fqn, sharded in zip(handle.fqns, handle.sharded_params, strict=True)
    }
    for root in roots:
        for prefix, module in root.named_modules():
            names = [name for name, param in module._parameters.items() if id(param) in managed]
            for name in names:
                managed[id(module._parameters[name])].slots.append((module, name))
            if names and module not in fqns:  # moved here from a nested group, whose modules may keep tensors (losses)
                steps = prefix.split(".")
                for i in range(len(steps) + 1):
                    name = ".".join(steps[:i])
                    fqns.setdefault(root.get_submodule(name), name)
    state.show_by(ParameterSwap(roots, [*managed.values()], state._handles, fqns))

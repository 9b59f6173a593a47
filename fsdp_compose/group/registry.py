"""Where states are registered, and how to find them in a module tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch.nn as nn

from .._torch import STATE_KEY, composable_registry, composable_states, contract, drop_composable_state
from ..flat import FlatParamHandle
from .state import _FSDPState


def fully_shard(module: list[nn.Module], install: Callable[[_FSDPState], None]) -> Any:
    """The function known to torch's registry; its name is the API's name there."""
    install(_registered.state(module[0]))
    return module


_API = fully_shard
_registered: Any = contract(state_cls=_FSDPState)(fully_shard)


def register_state(modules: list[nn.Module], install: Callable[[_FSDPState], None]) -> None:
    """Register one new state on ``modules``, of which none is inside another, and let ``install`` fill it in.

    A failure leaves no trace in the registry.
    """
    try:
        _registered(modules, install)
    except BaseException:
        for module in modules:
            drop_composable_state(module, _API)
        raise


def get_state(module: nn.Module) -> _FSDPState | None:
    """The state of the ``fully_shard`` call made on ``module`` itself, if there was one."""
    return cast("_FSDPState | None", composable_states(module).get(_API))


def state_of_hooked(module: nn.Module) -> _FSDPState:
    """As ``get_state``, for a module that has our hooks and therefore a state: on the hot path."""
    state: _FSDPState = module.__dict__[STATE_KEY][_API]  # cast() would be a call
    return state


# ---- traversal


def is_compatible(module: nn.Module) -> bool:
    return "replicate" not in composable_registry(module)


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[_FSDPState], list[nn.Module]]:
    """The states in the tree under ``module`` and the module of each.

    Depth first, in the order of ``module.modules()``; each state and each module once, however often it is shared;
    not descending into a module that an incompatible API manages (torch's ``replicate``).
    """
    states: list[_FSDPState] = []
    modules: list[nn.Module] = []
    for submodule in _walk(module, stop_at_incompatible=True):
        state = get_state(submodule)
        if state is not None and state not in states:
            states.append(state)
            modules.append(submodule)
    return states, modules


def _get_fsdp_states(module: nn.Module) -> list[_FSDPState]:
    """The states in the tree under ``module``; see ``_get_fsdp_states_with_modules``."""
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_root_states(module: nn.Module) -> list[_FSDPState]:
    """Those of ``_get_fsdp_states(module)`` whose module begins iterations; none before the first forward."""
    return [state for state in _get_fsdp_states(module) if state.is_root]


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    """The flat parameters of ``_get_fsdp_states(module)``, in that order."""
    return [handle for state in _get_fsdp_states(module) for handle in state._handles]


def states_to_run(module: nn.Module) -> list[tuple[_FSDPState, str]]:
    """Every state under ``module`` with the name of its module: what the runtime drives. Unlike
    ``_get_fsdp_states`` it goes everywhere: a sharded child of a replicated parent must run."""
    names = {submodule: name for name, submodule in module.named_modules()}
    found: dict[_FSDPState, str] = {}
    for submodule in _walk(module, stop_at_incompatible=False):
        state = get_state(submodule)
        if state is not None and state not in found:
            found[state] = names[submodule]
    return list(found.items())


def modules_to_run(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module under ``module`` with its name, except those that an incompatible API (torch's ``replicate``)
    manages: that API is responsible for their parameters."""
    names = {submodule: name for name, submodule in module.named_modules()}
    return [(names[submodule], submodule) for submodule in _walk(module, stop_at_incompatible=True)]


def _walk(module: nn.Module, stop_at_incompatible: bool) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if current in seen or (stop_at_incompatible and not is_compatible(current)):
            continue
        seen.add(current)
        yield current
        stack.extend(reversed(list(current.children())))

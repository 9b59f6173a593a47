"""Where the states of groups are registered, and how to find them in a module tree.

``_get_fsdp_states`` and its relatives are traversal functions with the names that they have in torch's own FSDP. This
file also decides which modules and parameters a new group manages, which of them share a flat parameter, and which
roots share groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn as nn

from ..._torch import STATE_KEY, composable_registry, composable_states
from ...errors import MisuseError
from ..flat import FlatParamHandle, ManagedParameter, ParamAttribute, handle_of, owner_of
from .options import GroupOptions
from .parameter_swap import ParameterSwap
from .state import Root, _FSDPState, state_of


def fully_shard() -> None:
    """Stands for the API in torch's registry, which knows an API by a function, and by its name."""


API_KEY = fully_shard


def get_state(module: nn.Module) -> _FSDPState | None:
    """The state of the ``fully_shard`` call made on ``module`` itself, if there was one."""
    return cast("_FSDPState | None", composable_states(module).get(API_KEY))


def state_of_hooked(module: nn.Module) -> _FSDPState:
    """Like ``get_state``, for a module that has our hooks and therefore a state."""
    state: _FSDPState = module.__dict__[STATE_KEY][API_KEY]  # cast() would be a call
    return state


# ---- Traversal


def is_compatible(module: nn.Module) -> bool:
    return "replicate" not in composable_registry(module)


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[_FSDPState], list[nn.Module]]:
    """The states in the tree under ``module`` and the module of each.

    The order is depth first, as in ``module.modules()``. Each state and module comes once, however often it is shared.
    Modules that an incompatible API (torch's ``replicate``) manages are skipped with everything below them.
    """
    found: dict[_FSDPState, nn.Module] = {}
    for submodule in _walk(module, stop_at_incompatible=True):
        state = get_state(submodule)
        if state is not None:
            found.setdefault(state, submodule)
    return [*found], [*found.values()]


def _get_fsdp_states(module: nn.Module) -> list[_FSDPState]:
    """The states in the tree under ``module``; see ``_get_fsdp_states_with_modules``."""
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    """The flat parameters of ``_get_fsdp_states(module)``, in the same order."""
    return [handle for state in _get_fsdp_states(module) for handle in state._handles]


def states_to_run(module: nn.Module) -> list[tuple[_FSDPState, str]]:
    """Every state under ``module`` that the runtime drives, with the name of its module."""
    names = {submodule: name for name, submodule in module.named_modules()}
    found: dict[_FSDPState, str] = {}
    # Skips nothing, unlike _get_fsdp_states(): a sharded child of a parent that torch's replicate() manages must run.
    for submodule in _walk(module, stop_at_incompatible=False):
        state = get_state(submodule)
        if state is not None and state not in found:
            found[state] = names[submodule]
    return list(found.items())


def own_state(module: nn.Module, call: str) -> _FSDPState:
    """The group of ``module`` itself; a ``ValueError`` naming ``call`` if it has none."""
    state = get_state(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise MisuseError(f"{call}(): fully_shard() was not called on this {type(module).__name__}")
    return state


def states_for(module: nn.Module, call: str, recurse: bool = True) -> list[_FSDPState]:
    """The groups that ``call`` is about.

    Raises:
        ValueError: there are none, so the call would do nothing.
    """
    if not recurse:
        return [own_state(module, call)]
    states = [state for state, _ in states_to_run(module)] if isinstance(module, nn.Module) else []
    if not states:
        raise MisuseError(
            f"{call}(): there is no fully_shard group below this {type(module).__name__}: pass a module that "
            "fully_shard() was called on, or one that contains such modules"
        )
    return states


def modules_to_run(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module under ``module`` with its name, except those of an incompatible API (torch's ``replicate``)."""
    names = {submodule: name for name, submodule in module.named_modules()}
    # That API is responsible for the parameters of its modules.
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


# ---- Roots that share groups: actor and critic around one encoder, two losses on one backbone
#
# A program may have several roots: modules whose forwards begin iterations. Roots with disjoint groups each have a
# ``Root`` of their own. Roots that share a group have one ``Root`` together, because one backward may reach uses of the
# shared group in the forwards of several roots. This file finds such roots; ``runtime/lazy_init`` makes their
# context::
#
#     actor   (root)  .--> encoder --> layers[0], layers[1]        one context: actor, encoder, layers..., critic
#     critic  (root)  '


@dataclass(frozen=True)
class RootModule:
    """A module whose forward begins iterations, with all groups below it and their names; its own group is first."""

    module: nn.Module
    groups: list[tuple[_FSDPState, str]]

    @property
    def state(self) -> _FSDPState:
        return self.groups[0][0]

    @property
    def states(self) -> list[_FSDPState]:
        return [state for state, _ in self.groups]


def roots_together(module: nn.Module) -> list[RootModule]:
    """The roots that share groups with ``module``, directly or through others, in the same order on all ranks.
    ``module`` comes first, unless it is part of another root."""
    found = [RootModule(module, states_to_run(module))]
    for root in found:  # grows
        for context in contexts_of(root.states):
            for states in context.by_root_module:
                owner = states[0]()
                if owner is not None and all(owner is not other.state for other in found):
                    found += [RootModule(item, states_to_run(item)) for item in owner.live_modules()[:1]]
    outermost = [
        root
        for root in found
        if not any(root.state is state for other in found if other is not root for state in other.states)
    ]
    return _connected(outermost, states_to_run(module)[0][0])


def contexts_of(states: Iterable[_FSDPState]) -> list[Root]:
    """The ``Root`` objects under which the groups have run so far."""
    return [*dict.fromkeys(state.root for state in states if state.root is not None)]


def _connected(roots: list[RootModule], state: _FSDPState) -> list[RootModule]:
    """The roots that share groups with the roots of ``state``, directly or through others."""
    reached = {state}
    waiting, chosen = list(roots), set()
    while True:
        more = [root for root in waiting if not reached.isdisjoint(root.states)]
        if not more:
            return [root for root in roots if id(root) in chosen]
        for root in more:
            waiting.remove(root)
            chosen.add(id(root))
            reached.update(root.states)


# ---- The modules and parameters that a group manages: those below the modules given to one ``fully_shard`` call


def group_modules(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """The modules of the group with their names, depth first, without nested groups and without modules that an
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
            if ParamAttribute.SHARDED in param.__dict__:
                continue  # a tie: see ties_with_other_groups
            place = handle_of(param)
            state = None if place is None else state_of(place[0])
            if state is not None and module in group_modules(state.live_modules()):
                group, owner_fqn = owner_of(param) or ("?", "?")
                raise MisuseError(
                    f"fully_shard(): the parameter {fqn} of this {label} is already in another group, as {owner_fqn} "
                    f"of the sharded {group}. A parameter can be in one group only: shard inner modules before outer "
                    "ones"
                )
            if place is None:
                found.setdefault(param, ManagedParameter(fqn, param)).slots.append((module, local_name))
    return list(found.values())


def unsharded_tensors(
    fqns: Mapping[nn.Module, str], managed: Collection[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of some modules, and their parameters that are neither in ``managed`` nor already sharded."""
    for module, prefix in fqns.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            is_sharded = tensor is None or ParamAttribute.SHARDED in tensor.__dict__ or handle_of(tensor) is not None
            if tensor is not None and not is_sharded and tensor not in managed:
                yield (f"{prefix}.{name}" if prefix else name), tensor


def ties_with_other_groups(
    fqns: dict[nn.Module, str], ignored: set[nn.Parameter]
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Slots of parameters that an earlier call has sharded elsewhere (tied weights), with the sharded one for each."""
    return [
        (module, name, param.__dict__[ParamAttribute.SHARDED])
        for module in fqns
        for name, param in module._parameters.items()
        if param is not None and param not in ignored and ParamAttribute.SHARDED in param.__dict__
    ]


def prepare_swap(state: _FSDPState) -> None:
    """Prepare a group to show its parameters, once its modules are complete. Needed for the copy of a group and for a
    group that has got other parameters, which may be anywhere below its modules."""
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
            if names and module not in fqns:  # came from a nested group; its modules may keep tensors such as losses
                steps = prefix.split(".")
                for i in range(len(steps) + 1):
                    name = ".".join(steps[:i])
                    fqns.setdefault(root.get_submodule(name), name)
    state.swap = ParameterSwap(roots, [*managed.values()], state._handles, fqns)


# ---- Which parameters of a group share a flat parameter: those of one kind; in a replicated group, those of one bucket


_FIRST_BUCKET_BYTES = 1 << 20  # small, so that its reduction starts early in backward, when nothing else is in flight


def partition(managed: Sequence[ManagedParameter], options: GroupOptions) -> list[list[ManagedParameter]]:
    """The parameters of each flat parameter, in the order in which their gradients are reduced."""
    # One for each (dtype, requires_grad, kind, mesh), in the order of their first parameters.
    by_kind: dict[tuple[object, ...], list[ManagedParameter]] = {}
    for item in managed:
        key = item.parameter.dtype, item.parameter.requires_grad, item.kind, id(item.mesh)
        by_kind.setdefault(key, []).append(item)
    kinds = list(by_kind.values())
    if options.bucket_bytes is None:
        return kinds
    positions = {item.fqn: i for i, item in enumerate(managed)}
    buckets = [bucket for kind in kinds for bucket in _buckets(kind, options.bucket_bytes)]
    # Backward reaches the last parameters first: a bucket is complete when its first parameter has its gradient.
    return sorted(buckets, key=lambda bucket: -positions[bucket[0].fqn])


def _buckets(kind: Sequence[ManagedParameter], bucket_bytes: int) -> list[list[ManagedParameter]]:
    """Buckets of adjacent parameters, from the last to the first, of about ``bucket_bytes``; the first one is small."""
    buckets: list[list[ManagedParameter]] = []
    room = 0
    for item in reversed(kind):
        if room <= 0:
            buckets.append([])
            room = bucket_bytes if len(buckets) > 1 else min(bucket_bytes, _FIRST_BUCKET_BYTES)
        buckets[-1].insert(0, item)
        room -= item.parameter.numel() * item.parameter.element_size()
    return buckets

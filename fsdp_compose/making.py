"""A group is made: arguments are checked, what it manages is decided, flat parameters are built and put in place.

Everything that can be refused is refused before a module is touched, so that a rejected call can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from ._torch import composable_registry
from .comm import data_parallel_mesh, device_of_mesh
from .flat import (
    FlatParamHandle,
    ManagedParameter,
    ParameterKind,
    Region,
    check_class,
    kind_of,
    mark_owner,
    refuse_placement,
    refuse_shared_memory,
    regions_of,
    shard_params,
    tensor_meshes,
)
from .group import (
    GroupOptions,
    ParameterSwap,
    _annotate_modules_for_dynamo,
    _FSDPState,
    get_state,
    group_modules,
    guard_state_dict,
    managed_parameters,
    partition,
    register_state,
    stand_in,
    state_of_hooked,
    ties_with_other_groups,
    unsharded_tensors,
    watch_meta_buffers,
)


def make_group(modules: list[nn.Module], mesh: DeviceMesh, options: GroupOptions, ignored: set[nn.Parameter]) -> None:
    """Make one group of checked ``modules``: the parameters below them that no nested call and ``ignored`` took. It
    runs once hooks drive the modules.

    Raises:
        ValueError: see ``fully_shard``.
    """
    found = check_group(modules, mesh, options, ignored)
    label, fqns, managed, regions = found.label, found.fqns, found.managed, found.regions
    ties = ties_with_other_groups(fqns, ignored)
    data_mesh = data_parallel_mesh(mesh, tensor_meshes(item.parameter for item in managed), options.part_size)
    arguments = data_mesh, options.granularity, options.offload
    handles = [shard_params(part, *arguments) for part in partition(managed, options)]

    def install(state: _FSDPState) -> None:
        state.install(modules, label, data_mesh, options, handles, ignored, regions)
        _put_sharded(managed, handles, label)
        watch_meta_buffers(fqns)
        state.show_by(ParameterSwap(modules, managed, handles, fqns))
        for item in modules:
            _annotate_modules_for_dynamo(item, set(item.modules()) - fqns.keys(), use_orig_params=True)

    register_state(modules, install)
    if ties:  # only now: torch's registry refuses a call that changes FQNs, and a tied parameter has one name less
        for item, name, sharded in ties:
            item._parameters[name] = sharded
            guard_state_dict(item, fqns[item])
        state_of_hooked(modules[0]).swap.rebuild()


class _Found(NamedTuple):
    """What a group manages: its name in messages, the modules with their FQNs, the parameters, and where these lie."""

    label: str
    fqns: dict[nn.Module, str]
    managed: list[ManagedParameter]
    regions: list[Region]


def check_group(
    modules: list[nn.Module], mesh: DeviceMesh, options: GroupOptions, ignored: set[nn.Parameter]
) -> _Found:
    """Raise what ``make_group`` would raise of the parameters. Changes nothing."""
    label, fqns = _label(modules), group_modules(modules)
    managed = managed_parameters(fqns, ignored, label)
    _check_parameters(managed, mesh, "fully_shard" if options.bucket_bytes is None else "replicate")
    managed = [replace(item, kind=_kind_of(item, options)) for item in managed]
    return _Found(label, fqns, managed, _check_memory(managed, fqns))


# ---- arguments

_REPLICATED = ("replicate", "replicated")


def check_modules(module: Any, caller: str) -> list[nn.Module]:
    """The roots among the modules given."""
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, list) or not modules or not all(isinstance(item, nn.Module) for item in modules):
        raise TypeError(
            f"{caller}(): expected an nn.Module or a non-empty list of nn.Modules, got {type(module).__name__}"
        )
    roots = [
        item
        for i, item in enumerate(modules)
        if item not in modules[:i] and not any(item in set(other.modules()) for other in modules if other is not item)
    ]
    for item in roots:
        if type(item).forward is nn.Module.forward and "forward" not in item.__dict__:
            raise ValueError(
                f"{caller}(): a {type(item).__name__} has no forward, so nothing would ever gather its parameters; "
                f"call it on its children, or make one group of them: {caller}(list(module.children()))"
            )
        state = get_state(item)
        if state is not None:
            earlier, sharded = ("fully_shard", "sharded") if state.options.bucket_bytes is None else _REPLICATED
            raise ValueError(
                f"{earlier}() was already called on this {type(item).__name__}: a module can be {sharded} once. Call "
                f"{caller}() on its submodules before it, each once"
            )
        for other in ("fully_shard", "replicate"):
            if other in composable_registry(item):
                raise ValueError(
                    f"{caller}(): torch's {other}() was already applied to this {type(item).__name__}; choose one"
                )
    return roots


def check_ignored(ignored_params: Iterable[nn.Parameter] | None, caller: str) -> set[nn.Parameter]:
    if ignored_params is None:
        return set()
    if isinstance(ignored_params, torch.Tensor) or not isinstance(ignored_params, Iterable):
        raise TypeError(
            f"{caller}(ignored_params=...): expected several nn.Parameters, got {type(ignored_params).__name__}"
        )
    ignored = list(ignored_params)
    for item in ignored:
        if not isinstance(item, nn.Parameter):
            raise TypeError(f"{caller}(ignored_params=...): expected nn.Parameters, got {type(item).__name__}")
    return set(ignored)


def _label(modules: Sequence[nn.Module]) -> str:
    return ", ".join(type(item).__name__ for item in modules)


# ---- parameters


def _check_parameters(managed: Sequence[ManagedParameter], mesh: DeviceMesh, caller: str) -> None:
    device = device_of_mesh(mesh)
    for item in managed:
        param = item.parameter
        if isinstance(param, UninitializedParameter):
            raise ValueError(
                f"{caller}(): the parameter {item.fqn} is not initialised (lazy module); run a forward first"
            )
        if param.device.type != "meta" and param.device != device and param.device.type != "cpu":
            raise ValueError(
                f"{caller}(): the parameter {item.fqn} is on {param.device}, but the mesh is on {device}; "
                f"move the module with module.to({str(device)!r}), or pass a mesh on {param.device.type}"
            )
        if isinstance(param, DTensor) and caller == "fully_shard":
            refuse_placement(item.fqn, param, mesh)
        elif isinstance(param, DTensor):
            raise ValueError(
                f"replicate(): the parameter {item.fqn} is a DTensor already, placed {list(param.placements)} on "
                f"{param.device_mesh}: give fully_shard() the data-parallel mesh (replicate, shard) of the same mesh, "
                "with one rank in its second dimension"
            )
        else:
            check_class(param, item.fqn, is_gathered=caller == "fully_shard")
        if param.grad is not None:
            raise ValueError(
                f"{caller}(): the parameter {item.fqn} has a gradient, which would be lost: call "
                "module.zero_grad() first"
            )
    devices = {item.parameter.device.type == "meta" for item in managed}
    if len(devices) > 1:
        on_meta = next(item.fqn for item in managed if item.parameter.device.type == "meta")
        raise ValueError(
            f"{caller}(): the parameter {on_meta} is on the meta device and others of its group are not; "
            "materialise all of them, or none"
        )


def _kind_of(item: ManagedParameter, options: GroupOptions) -> ParameterKind:
    # A replicated parameter is never gathered.
    module = item.slots[0][0] if options.bucket_bytes is None else None
    return kind_of(item.fqn, item.parameter, options.mp_policy, module)


def _check_memory(managed: Sequence[ManagedParameter], fqns: dict[nn.Module, str]) -> list[Region]:
    """Refuse parameters of the group that share memory. Return where the parameters lie."""
    regions = regions_of(((item.fqn, item.parameter) for item in managed), are_sharded=True)
    params = {item.parameter for item in managed}
    refuse_shared_memory([*regions, *regions_of(unsharded_tensors(fqns, params), are_sharded=False)])
    return regions


def _put_sharded(managed: Sequence[ManagedParameter], handles: Sequence[FlatParamHandle], label: str) -> None:
    """Replace each parameter by its sharded parameter, wherever it stands in the group."""
    sharded_params = {
        fqn: sharded for handle in handles for fqn, sharded in zip(handle.fqns, handle.sharded_params, strict=True)
    }
    for item in managed:
        sharded = sharded_params[item.fqn]
        mark_owner(item.parameter, label, item.fqn)  # to recognise a tie that points here from outside the group
        mark_owner(sharded, label, item.fqn)
        for module, name in item.slots:
            for key, value in module.__dict__.items():
                if isinstance(value, list):
                    module.__dict__[key] = _replaced(value, item.parameter, sharded)
            module._parameters[name] = sharded
        stand_in(item.parameter, sharded)


def _replaced(items: list[Any], old: Any, new: Any) -> list[Any]:
    if not any(item is old for item in items):
        return items
    return [new if item is old else item for item in items]

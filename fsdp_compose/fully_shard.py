"""``fully_shard()``: checks its arguments, decides what a group manages, builds flat parameters, installs hooks.

Everything that can be refused is refused before the module is touched, so that a rejected call can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from ._torch import composable_registry
from .comm import DataParallelMesh, data_parallel_mesh
from .flat import (
    FlatParamHandle,
    Granularity,
    ManagedParameter,
    MixedPrecisionPolicy,
    Region,
    as_ours,
    check_class,
    mark_owner,
    refuse_shared_memory,
    regions_of,
    shard_params,
)
from .group import (
    GroupOptions,
    ParameterSwap,
    _annotate_modules_for_dynamo,
    _FSDPState,
    by_kind,
    get_state,
    group_modules,
    guard_state_dict,
    managed_parameters,
    register_state,
    stand_in,
    state_of_hooked,
    ties_with_other_groups,
    unsharded_tensors,
    watch_meta_buffers,
)
from .runtime import notice_inputs, post_forward, pre_forward, tree_has_changed

_M = TypeVar("_M", nn.Module, list[nn.Module])


def fully_shard(
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    granularity: Granularity | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> _M:
    """Shard the parameters of ``module``, their gradients and their optimizer state over the data-parallel ranks.

    One call makes one *group*: the parameters below ``module`` that no nested call and no ``ignored_params`` took.
    Before forward and backward the group's parameters are all-gathered together, into the memory that ``forward``
    computes with; after backward their gradients are averaged and scattered. Call it on the inner modules first
    (each transformer block), then on the whole model.

    The module keeps its class and its FQNs. Each of its parameters is replaced once, by this call, by a sharded
    parameter that ``module.parameters()`` returns from then on, outside ``forward``: build the optimizer after.

    Ranks: every rank of the mesh makes the same calls on the same model; the call itself does not communicate. The
    first forward compares the ranks' models. Each rank keeps *its own* values: start from equal parameters.

    Args:
        module: a module, or a list of modules that form one group (for example a final norm and an output head).
        mesh: 1-D device mesh of the ranks that share the shards; default: all ranks.
        reshard_after_forward: free the gathered parameters between forward and backward and gather them again
            (``True``: least memory), or keep them (``False``: less communication). ``None``: ``False`` for the module
            whose forward is outermost, ``True`` for all others.
        granularity: a function from (FQN relative to ``module``, parameter) to the smallest piece of the parameter
            that no shard boundary may split: ``"elements"``, ``"rows"``, ``"whole"``, a number of elements, a block
            shape, or ``None`` for the default (rows where that costs next to nothing, else elements).
        mp_policy: dtypes to compute, reduce and return in (``torch.distributed.fsdp.MixedPrecisionPolicy`` too).
        ignored_params: parameters below ``module`` that stay as they are; their gradients are not reduced.

    Returns:
        ``module``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a module is sharded twice, a parameter would be in two groups, is on the wrong device, or is a
            tensor of a class that cannot be sharded (quantised weights); the mesh is not 1-D.
        RuntimeError: there is neither a mesh nor a process group.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    modules = _check_modules(module)
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise TypeError(f"fully_shard(reshard_after_forward={reshard_after_forward!r}): expected True, False or None")
    if mp_policy is None:
        mp_policy = MixedPrecisionPolicy()
    mp_policy = as_ours(MixedPrecisionPolicy, mp_policy, "fully_shard(mp_policy=...)")
    if granularity is not None and not callable(granularity):
        raise TypeError(
            f"fully_shard(granularity={granularity!r}): expected a function from (FQN, parameter) to a granule"
        )
    ignored = _check_ignored(ignored_params)
    data_mesh = data_parallel_mesh(mesh)
    label = _label(modules)
    fqns = group_modules(modules)
    managed = managed_parameters(fqns, ignored, label)
    ties = ties_with_other_groups(fqns, ignored)
    _check_parameters(managed, data_mesh)
    regions = _check_memory(managed, fqns)
    options = GroupOptions(mp_policy, granularity, reshard_after_forward)
    handles = [shard_params(part, data_mesh, mp_policy, granularity) for part in by_kind(managed)]

    def install(state: _FSDPState) -> None:
        state.install(modules, label, data_mesh, options, handles, ignored, regions)
        _put_sharded(managed, handles, label)
        watch_meta_buffers(fqns)
        state.show_by(ParameterSwap(modules, managed, handles, fqns))
        for item in modules:
            item.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
            item.register_forward_hook(post_forward, always_call=True)
            _annotate_modules_for_dynamo(item, set(item.modules()) - fqns.keys(), use_orig_params=True)

    register_state(modules, install)
    notice_inputs()
    if ties:  # only now: torch's registry refuses a call that changes FQNs, and a tied parameter has one name less
        for item, name, sharded in ties:
            item._parameters[name] = sharded
            guard_state_dict(item, fqns[item])
        state_of_hooked(modules[0]).swap.rebuild()
    tree_has_changed()
    return module


fully_shard.state = get_state  # type: ignore[attr-defined]


# ---- arguments


def _check_modules(module: Any) -> list[nn.Module]:
    """The roots among the modules given."""
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, list) or not modules or not all(isinstance(item, nn.Module) for item in modules):
        raise TypeError(
            f"fully_shard(): expected an nn.Module or a non-empty list of nn.Modules, got {type(module).__name__}"
        )
    roots = [
        item
        for i, item in enumerate(modules)
        if item not in modules[:i] and not any(item in set(other.modules()) for other in modules if other is not item)
    ]
    for item in roots:
        if type(item).forward is nn.Module.forward and "forward" not in item.__dict__:
            raise ValueError(
                f"fully_shard(): a {type(item).__name__} has no forward, so nothing would ever gather its parameters; "
                "shard its children, or make one group of them: fully_shard(list(module.children()))"
            )
        if get_state(item) is not None:
            raise ValueError(
                f"fully_shard() was already called on this {type(item).__name__}: a module can be sharded once. Shard "
                "its submodules before it, each once"
            )
        for other in ("fully_shard", "replicate"):
            if other in composable_registry(item):
                raise ValueError(
                    f"fully_shard(): torch's {other}() was already applied to this {type(item).__name__}; choose one"
                )
    return roots


def _check_ignored(ignored_params: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    if ignored_params is None:
        return set()
    if isinstance(ignored_params, torch.Tensor) or not isinstance(ignored_params, Iterable):
        raise TypeError(
            f"fully_shard(ignored_params=...): expected several nn.Parameters, got {type(ignored_params).__name__}"
        )
    ignored = list(ignored_params)
    for item in ignored:
        if not isinstance(item, nn.Parameter):
            raise TypeError(f"fully_shard(ignored_params=...): expected nn.Parameters, got {type(item).__name__}")
    return set(ignored)


def _label(modules: Sequence[nn.Module]) -> str:
    return ", ".join(type(item).__name__ for item in modules)


# ---- parameters


def _check_parameters(managed: Sequence[ManagedParameter], mesh: DataParallelMesh) -> None:
    for item in managed:
        param = item.parameter
        if isinstance(param, UninitializedParameter):
            raise ValueError(
                f"fully_shard(): the parameter {item.fqn} is not initialised (lazy module); run a forward first"
            )
        if param.device.type != "meta" and param.device != mesh.device and param.device.type != "cpu":
            raise ValueError(
                f"fully_shard(): the parameter {item.fqn} is on {param.device}, but the mesh is on {mesh.device}; "
                f"move the module with module.to({str(mesh.device)!r}), or pass a mesh on {param.device.type}"
            )
        if isinstance(param, DTensor):
            raise ValueError(
                f"fully_shard(): the parameter {item.fqn} is a DTensor already, of placements {param.placements} on "
                f"{param.device_mesh}: parameters that tensor parallelism has sharded are not supported yet"
            )
        check_class(param, item.fqn)
        grad_dtype = getattr(param, "grad_dtype", None)  # torch < 2.13 has none
        if grad_dtype not in (None, param.dtype):
            raise ValueError(
                f"fully_shard(): the parameter {item.fqn} is {param.dtype} and its grad_dtype {grad_dtype}, but "
                "sharded gradients have the dtype of their parameter: set param.grad_dtype = param.dtype, and choose "
                "the dtype of the reduction by MixedPrecisionPolicy(reduce_dtype=...)"
            )
        if param.grad is not None:
            raise ValueError(
                f"fully_shard(): the parameter {item.fqn} has a gradient, which would be lost: call "
                "module.zero_grad() first"
            )
    devices = {item.parameter.device.type == "meta" for item in managed}
    if len(devices) > 1:
        on_meta = next(item.fqn for item in managed if item.parameter.device.type == "meta")
        raise ValueError(
            f"fully_shard(): the parameter {on_meta} is on the meta device and others of its group are not; "
            "materialise all of them, or none"
        )


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

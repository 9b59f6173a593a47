"""``describe(model)``: which rank holds what, and in how many bytes; and ``fsdp_groups(model)``.

The facts are read off the model's groups: nothing is computed, changed or communicated. ``describe_formats`` puts
them into a report without knowing any model."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import starmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

from .._arguments import checked
from ..errors import MisuseError, MisuseRuntimeError
from ..extension import FlatParamHandle, _FSDPState, sharded_parameters, states_to_run
from ..optim import OwnersByParam, owners_by_param
from .describe_formats import (
    Computed,
    FlatParameterFacts,
    GroupFacts,
    ModelFacts,
    OtherParameter,
    ParameterFacts,
    ShardFacts,
    report_of,
)
from .report import as_page, for_stdout

# ---- ``fsdp_groups``: a model's groups, for programs


class FSDPGroup(NamedTuple):
    """One ``fully_shard`` or ``replicate`` call.

    Attributes:
        module: the module that was given to the call; of a list, the first one that is found in the model.
        name: the FQN of ``module`` in the model, "" for the model itself.
        parameters: the sharded parameters that the call manages; calls on submodules manage their own.
    """

    module: nn.Module
    name: str
    parameters: list[nn.Parameter]


@checked()
def fsdp_groups(model: nn.Module) -> Iterator[FSDPGroup]:
    """Iterate over the groups of ``model``: depth first, a module before its submodules, each group once. Local::

        for module, name, parameters in fsdp_groups(model):
            print(name or "(root)", sum(param.to_local().numel() for param in parameters), "elements on this rank")

    Args:
        model: any module. The iterator is empty if neither the module nor a submodule is sharded.

    Yields:
        The module, its name, and its group's parameters; the list is empty if the group has none.
    """
    for state, name in states_to_run(model):
        yield FSDPGroup(
            model.get_submodule(name), name, [param for handle in state._handles for param in handle.sharded_params]
        )


# ---- The facts of a model are read off its groups


_Holders = Sequence[tuple[int, ...]]  # for each shard the ranks that hold it
_Names = Mapping[int, Sequence[str]]  # of a parameter, by its id: all that the model has for it


def collect(model: nn.Module) -> ModelFacts:
    """The facts of ``model`` as this rank knows them: of shards of all ranks, since all have one layout. Raises
    RuntimeError if modules show full parameters instead of the sharded ones."""
    states = [state for state, _ in states_to_run(model)]
    for state in states:
        if any(handle.summoned is not None for handle in state._handles):
            raise MisuseRuntimeError(
                f"rank {state.mesh.rank}: describe() inside summon_full_params(): modules of the group {state.name} "
                "show full parameters, not those that it would describe: leave the context first"
            )
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    module_names: dict[nn.Module, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        module_names.setdefault(module, prefix)
        for name, param in sharded_parameters(module).items():
            if param is not None:
                names.setdefault(id(param), []).append(f"{prefix}.{name}" if prefix else name)
                params[id(param)] = param
    owners = owners_by_param()
    managed = {id(param) for state in states for handle in state._handles for param in handle.sharded_params}
    return ModelFacts(
        name=type(model).__name__,
        rank=dist.get_rank() if dist.is_initialized() else 0,
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        groups=tuple(_group(state, names, module_names, owners) for state in states),
        others=tuple(_other(names[key][0], param) for key, param in params.items() if key not in managed),
    )


def _other(fqn: str, param: nn.Parameter) -> OtherParameter:
    nbytes = param.numel() * param.element_size()
    return OtherParameter(fqn, tuple(param.shape), param.numel(), _dtype(param.dtype), param.requires_grad, nbytes)


def _group(
    state: _FSDPState, names: _Names, module_names: Mapping[nn.Module, str], owners: OwnersByParam
) -> GroupFacts:
    modules, mesh = state.live_modules(), state.mesh.mesh
    by_replica = mesh.mesh.reshape(-1, state.mesh.shard_world_size)
    holders = tuple(map(tuple, by_replica.T.tolist()))
    return GroupFacts(
        names=tuple(module_names.get(module, "?") for module in modules),
        classes=tuple(type(module).__name__ for module in modules),
        is_replicated=state.options.bucket_bytes is not None,
        mesh_shape=tuple(mesh.shape),
        mesh_dims=tuple(mesh.mesh_dim_names or ()),
        device=str(state.mesh.device),
        shard_ranks=holders,
        policy=_policy(state),
        options=_options(state, module_names),
        flat_parameters=tuple(_flat_parameter(handle, names, holders, owners) for handle in state._handles),
    )


def _flat_parameter(
    handle: FlatParamHandle, names: _Names, holders: _Holders, owners: OwnersByParam
) -> FlatParameterFacts:
    layout, codec, shard, unsharded = handle.layout, handle.kind.codec, handle.shard, handle.unsharded
    itemsize, num_shards = shard.element_size(), layout.world_size
    counts = [tuple(layout.counts(index)) for index in range(len(layout.params))]
    is_plain = codec.gathered_by is None and not unsharded.never_freed
    held = tuple(sum(count[shard] for count in counts) * itemsize for shard in range(num_shards))
    padding = layout.padding_numel * itemsize
    if codec.is_composite:  # bytes of several tensors fill each shard
        held, padding = (handle.shard_numel,) * num_shards, 0
    return FlatParameterFacts(
        dtype=_dtype(shard.dtype),
        compute=_dtype(unsharded.dtype),
        reduce=_dtype(handle.pending_gradients.dtype),
        gradient=_dtype(handle.gradient.dtype),
        gathered_by=codec.gathered_by,
        home="host memory" if handle.storage.is_host else str(shard.device),
        num_shards=num_shards,
        shard_numel=handle.shard_numel,
        shard_bytes=handle.shard_numel * itemsize,
        held_bytes=held,
        padding_bytes=padding,
        unsharded_bytes=layout.flat_numel * unsharded.dtype.itemsize if is_plain else None,
        parameters=tuple(_parameter(handle, index, names, holders, owners) for index in range(len(layout.params))),
    )


def _parameter(
    handle: FlatParamHandle, index: int, names: _Names, holders: _Holders, owners: OwnersByParam
) -> ParameterFacts:
    placed, param = handle.layout.params[index], handle.sharded_params[index]
    fqn, *tied = names.get(id(param)) or (handle.name_of(index),)
    is_composite = handle.kind.codec.is_composite
    shards = [*_shards(handle, index, holders)]
    if is_composite:  # rows of several tensors, as bytes that fill the shard
        shards = [replace(shard, shard_start=0, shard_stop=handle.shard_numel) for shard in shards]
    return ParameterFacts(
        fqn=fqn,
        tied=tuple(tied),
        shape=tuple(param.shape),
        numel=param.numel(),
        local_shape=tuple(param.shape) if is_composite else placed.shape,
        dtype=_dtype(param.dtype),
        requires_grad=param.requires_grad,
        offset=placed.offset,
        granule=placed.granule,
        placements=tuple(map(str, getattr(param, "placements", ()))),
        parts=tuple(shards),
        computed=tuple(starmap(Computed, owners.get(id(param), ()))),
    )


def _shards(handle: FlatParamHandle, index: int, holders: _Holders) -> Iterator[ShardFacts]:
    placed = handle.layout.params[index]
    has_rows, row = placed.row_aligned and placed.shape, placed.row_numel
    for shard, local in handle.layout.local_shards_of(index).items():
        start, stop = local.param_start, local.param_start + local.numel
        rows = (start // row, stop // row) if has_rows else None
        yield ShardFacts(holders[shard], start, stop, rows, local.shard_start, local.shard_start + local.numel)


def _policy(state: _FSDPState) -> dict[str, str]:
    policy = state.options.mp_policy
    chosen = {name: getattr(policy, name) for name in ("param_dtype", "reduce_dtype", "output_dtype")}
    facts = {name: _dtype(dtype) for name, dtype in chosen.items() if dtype is not None}
    if not policy.cast_forward_inputs:
        facts["cast_forward_inputs"] = "False"
    if policy.param_dtype_override_fn is not None:
        facts["param_dtype_override_fn"] = _name(policy.param_dtype_override_fn)
    return facts


def _options(state: _FSDPState, module_names: Mapping[nn.Module, str]) -> dict[str, str]:
    options, default = state.options, type(state.options)()
    reshards: object = options.reshard_after_forward
    if reshards is None:
        is_known = state.root is not None
        reshards = state.position.reshards_after_forward if is_known else "default (True; False for the root)"
    facts = {"reshard_after_forward": str(reshards)}
    if state.mesh.replicas is not None:
        facts["replicas"] = f"averaged over replica groups ({type(state.mesh.replicas).__name__})"
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in ("mp_policy", *facts) and value != getattr(default, field.name):
            facts[field.name] = _text(value, module_names)
    return facts


def _text(value: Any, module_names: Mapping[nn.Module, str]) -> str:
    if isinstance(value, tuple):  # modules to gather ahead
        modules = [item() if isinstance(item, weakref.ref) else item for item in value]
        return ", ".join(module_names.get(module, "?") or "(root)" for module in modules if module is not None)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        chosen = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return ", ".join(f"{name}={_text(item, module_names)}" for name, item in chosen.items())
    return _name(value) if callable(value) else str(value)


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- ``describe()``


FORMATS = ("text", "json", "html")


@checked()
def describe(model: nn.Module, format: str = "text", *, all_groups: bool = False) -> str:
    """Describe the layout of a sharded model: for each group its ranks, dtypes and options, and for each parameter of
    each flat parameter its place, and the rank that holds each shard. ``print(describe(model))``. Once ``Muon`` has
    planned its step, also the ranks that compute the matrices.

    Ranks: any; nothing is communicated, and nothing changes. Before the first forward too; only then is it known which
    group is the root's, on which the default of ``reshard_after_forward`` depends.

    Args:
        model: a module with sharded or replicated submodules. Names are relative to it.
        format: ``"text"``: tables, by ``rich`` with colours where that is installed and output goes to a terminal;
            ``"json"``: all facts, for programs (sizes in elements and bytes, ranks by their numbers in the default
            process group; parts of parameters from the first element to before the last one); ``"html"``: a page with a
            picture of each flat parameter, which loads nothing from anywhere.
        all_groups: show every group. By default, groups that differ only in their names, such as the blocks of a
            transformer, are shown once, with the parameters of the first. ``"json"`` has all groups in any case.

    Returns:
        The description.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: there is no such format.
        RuntimeError: called inside ``summon_full_params``.
    """
    if format not in FORMATS:
        raise MisuseError(f"describe(format={format!r}): expected one of {', '.join(map(repr, FORMATS))}")
    facts = collect(model)
    if format == "json":
        totals = {name: getattr(facts, name) for name in ("numel", "kept_bytes", "padding_bytes", "flat_bytes")}
        return json.dumps({**asdict(facts), "totals": totals}, indent=1)
    report = report_of(facts, all_groups)
    return as_page(report) if format == "html" else for_stdout(report)

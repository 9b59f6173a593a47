"""Builds flat parameters, and rebuilds them when their memory changes.

A flat parameter is made from ordinary parameters, or from parameters that other flat parameters have sharded. When the
user moves or casts a model, its flat parameters adopt the new memory here. Called by ``api.shard``, by tied parameters,
and by the runtime between iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._torch import DTensorSpec, local_tensor, set_local_tensor
from ..comm import DataParallelMesh, Label
from ..errors import MisuseError, MisuseRuntimeError
from ..ragged import CompositeDTensor, RaggedSpec, note_write_of_all_ranks, parameter_owners, writes
from .cpu_offload import OffloadedFlatParamHandle
from .extensions import CompositeExtension, Extension, cut
from .flat_param import CompositeFlatParamHandle, FlatParamHandle, LocalShards, handle_of
from .gradient_hooks import GradientHooks
from .layout import FlatLayout, ParamSpec, plan_equal_rows, plan_layout
from .param_kind import ParameterKind, plain_tensor
from .policy import CPUOffloadPolicy, Granularity
from .shard_storage import HostGradientStorage, HostShardStorage
from .sharded_param import (
    ManagedParameter,
    class_attributes,
    copy_attributes,
    inner_of_sharded_param,
    local_elements,
    make_sharded_param,
    rebind_sharded_param,
    sharded_spec,
)
from .tensor_parallel import TensorParallel, is_even, largest_local_shape, local_shape, spec_of, specs_of

SHARD_ALIGNMENT_BYTES = 16  # required by cuBLAS and NCCL; misaligned all-gathers lose up to 12x of their bandwidth


def shard_params(
    managed: Sequence[ManagedParameter],
    mesh: DataParallelMesh,
    granularity: Granularity | None = None,
    offload: CPUOffloadPolicy | None = None,
) -> FlatParamHandle:
    """Make a flat parameter from parameters of one kind (see ``group/registry``): copies this rank's elements, and
    changes nothing in the modules."""
    if isinstance(managed[0].kind.extension, CompositeExtension):
        return _shard_composite(managed[0], managed[0].kind.extension, mesh, offload)
    originals = [item.parameter for item in managed]
    own = [spec_of(original) for original in originals]
    layout, kind = _plan(managed, own, mesh, granularity), managed[0].kind
    dtype, device = originals[0].dtype, originals[0].device
    specs = _specs(layout, mesh, dtype, own)
    handle = _new_handle(layout, mesh, kind, _local_shards(layout, mesh, specs), TensorParallel.of(own), offload)
    shard = handle.storage.zeros(layout.shard_numel, dtype, device if device.type == "meta" else mesh.device)
    starts = _param_starts(layout, mesh)
    with torch.no_grad():
        for original, first, (start, stop, _) in zip(originals, starts, handle.local_shards, strict=True):
            if stop > start:
                plain = local_tensor(original) if isinstance(original, DTensor) else plain_tensor(original)
                shard[start:stop].copy_(plain.reshape(-1)[first : first + stop - start])
    with torch.inference_mode(False), torch.no_grad():
        parts = zip(handle.views_of(shard), originals, specs, strict=True)
        params = [make_sharded_param(*part) for part in parts]
    handle.hold(params, GradientHooks(params, owner=handle))
    for i, original in enumerate(originals):
        handle.hooks.move_over(i, original)
    handle.set_shard(shard)
    return handle


def _shard_composite(
    item: ManagedParameter, extension: CompositeExtension, mesh: DataParallelMesh, offload: CPUOffloadPolicy | None
) -> FlatParamHandle:
    """Like ``shard_params``, for a parameter that is stored as several tensors: its shard holds their bytes."""
    original, fqn = item.parameter, item.fqn
    num_ranks, label = mesh.shard_world_size, Label([fqn])

    def gather(local: torch.Tensor) -> torch.Tensor:
        flat = local.new_empty(num_ranks * local.numel())
        if num_ranks == 1:
            return flat.copy_(local)
        ranges = [(rank * local.numel(), (rank + 1) * local.numel()) for rank in range(num_ranks)]
        mesh.transport.unrecorded.gather(flat, local, ranges, True, label)
        return flat

    parts, shard = cut(original, fqn, (num_ranks, mesh.shard_rank), mesh.device, gather)
    handle = _new_composite_handle(item, replace(extension, parts=parts), mesh, offload)
    spec = sharded_spec(handle.layout, 0, mesh, original.dtype)
    with torch.inference_mode(False), torch.no_grad():
        (local,) = handle.locals_of(shard)
        sharded = nn.Parameter(CompositeDTensor.made(local, spec, parts), requires_grad=original.requires_grad)
        set_local_tensor(sharded, local)
        copy_attributes(original, sharded, not_copied=class_attributes(original))
    params = [sharded]
    handle.hold(params, GradientHooks(params, owner=handle))
    handle.hooks.move_over(0, original)
    handle.set_shard(shard)
    return handle


def shard_again(
    managed: Sequence[ManagedParameter],
    mesh: DataParallelMesh,
    granularity: Granularity | None = None,
    offload: CPUOffloadPolicy | None = None,
) -> FlatParamHandle:
    """Make a flat parameter from parameters that other flat parameters have sharded, and replace those.

    Ranks: all ranks of the mesh; each parameter is all-gathered once.
    """
    if isinstance(managed[0].kind.extension, CompositeExtension):
        return _shard_composite_again(managed[0], managed[0].kind.extension, mesh, offload)
    params = [item.parameter for item in managed]
    own = [_own_spec(sharded) for sharded in params]
    layout, kind = _plan(managed, own, mesh, granularity), managed[0].kind
    dtype, device = params[0].dtype, local_elements(params[0]).device
    specs = _specs(layout, mesh, dtype, own)
    handle = _new_handle(layout, mesh, kind, _local_shards(layout, mesh, specs), TensorParallel.of(own), offload)
    with torch.inference_mode(False), torch.no_grad():
        shard = handle.storage.zeros(layout.shard_numel, dtype, device)
        parts = zip(params, handle.views_of(shard), specs, _param_starts(layout, mesh), strict=True)
        for sharded, local, spec, first in parts:
            if device.type != "meta":
                inner = inner_of_sharded_param(sharded)
                local.copy_(inner.reshape(-1)[first : first + local.numel()].view(local.shape))
            rebind_sharded_param(sharded, local, spec)
    hooks = GradientHooks(params, [parameter_owners.get(id(sharded)) for sharded in params], owner=handle)
    handle.hold(params, hooks)
    handle.set_shard(shard)
    return handle


def _shard_composite_again(
    item: ManagedParameter, extension: CompositeExtension, mesh: DataParallelMesh, offload: CPUOffloadPolicy | None
) -> FlatParamHandle:
    """Like ``shard_again``, for a parameter that is stored as several tensors: every rank keeps its part.

    Raises:
        ValueError: the ranks differ.
    """
    sharded, parts = item.parameter, extension.bytes
    place = handle_of(sharded)
    if place is None or place[0].mesh.shard_group != mesh.shard_group:
        raise MisuseError(
            f"the parameter {item.fqn} is a {parts.name} that is tied across groups on different meshes: shard both "
            "groups on one mesh"
        )
    handle = _new_composite_handle(item, extension, mesh, offload)
    handle.hold([sharded], GradientHooks([sharded], [parameter_owners.get(id(sharded))], owner=handle))
    handle.set_shard(handle.flatten())
    return handle


def _new_handle(
    layout: FlatLayout,
    mesh: DataParallelMesh,
    kind: ParameterKind,
    local_shards: LocalShards,
    tensor_parallel: TensorParallel | None,
    offload: CPUOffloadPolicy | None,
) -> FlatParamHandle:
    if offload is None:
        return FlatParamHandle(layout, mesh, kind, local_shards, tensor_parallel)
    if kind.extension is not None:
        raise _refuse_offload(layout.params[0].fqn, kind.extension)
    handle = OffloadedFlatParamHandle(layout, mesh, kind, local_shards, tensor_parallel)
    home = HostShardStorage if offload.parameters else HostGradientStorage
    return handle.live_in(home(offload, mesh.device))


def _new_composite_handle(
    item: ManagedParameter, extension: CompositeExtension, mesh: DataParallelMesh, offload: CPUOffloadPolicy | None
) -> FlatParamHandle:
    if offload is not None:
        raise _refuse_offload(item.fqn, extension)
    layout = plan_equal_rows(item.fqn, tuple(extension.shape), mesh.shard_world_size)
    local_shards = [(0, layout.local_shard(0, mesh.shard_rank).numel, layout.local_shape(0, mesh.shard_rank))]
    return CompositeFlatParamHandle(layout, mesh, replace(item.kind, extension=extension), local_shards)


def _refuse_offload(fqn: str, extension: Extension) -> MisuseError:
    return MisuseError(
        f"fully_shard(offload_policy=...): the parameter {fqn} is a {extension.name}, which is gathered in another "
        "form, on the device: leave it out with ignored_params, or shard it without offload"
    )


def _own_spec(sharded: nn.Parameter) -> DTensorSpec | None:
    """The placement that a parameter about to be sharded had as a DTensor, if it was one."""
    place = handle_of(sharded)
    own = None if place is None else place[0].tensor_parallel
    return None if place is None or own is None else own.specs[place[1]]


def _specs(
    layout: FlatLayout, mesh: DataParallelMesh, dtype: torch.dtype, own: Sequence[DTensorSpec | None]
) -> list[RaggedSpec]:
    """How each parameter is sharded."""
    return [sharded_spec(layout, i, mesh, dtype, spec) for i, spec in enumerate(own)]


def _local_shards(
    layout: FlatLayout, mesh: DataParallelMesh, specs: Sequence[RaggedSpec]
) -> list[tuple[int, int, tuple[int, ...]]]:
    parts = [layout.local_shard(i, mesh.shard_rank) for i in range(len(layout.params))]
    return [
        (part.shard_start, part.shard_start + part.numel, spec.local_shape)
        for part, spec in zip(parts, specs, strict=True)
    ]


def _param_starts(layout: FlatLayout, mesh: DataParallelMesh) -> list[int]:
    """For each parameter, the index of the first element that this rank holds."""
    return [layout.local_shard(i, mesh.shard_rank).param_start for i in range(len(layout.params))]


def _plan(
    managed: Sequence[ManagedParameter],
    own: Sequence[DTensorSpec | None],
    mesh: DataParallelMesh,
    granularity: Granularity | None,
) -> FlatLayout:
    dtype, kind = managed[0].parameter.dtype, managed[0].kind
    dtypes = (dtype, kind.compute_dtype(dtype), kind.reduction_dtype(dtype), kind.gradient_dtype(dtype))
    alignment = max(1, SHARD_ALIGNMENT_BYTES // min(item.itemsize for item in dtypes))
    if kind.extension is not None:
        assert len(managed) == 1, "its class gathers it by itself"
        return plan_equal_rows(managed[0].fqn, tuple(managed[0].parameter.shape), mesh.shard_world_size)
    specs, shapes = [], []
    for item, spec in zip(managed, own, strict=True):
        granule = granularity(item.fqn, item.parameter) if granularity is not None else None
        whole = tuple(item.parameter.shape)
        specs.append(ParamSpec(item.fqn, whole if spec is None else largest_local_shape(spec), granule))
        shapes.append(whole if spec is None else local_shape(spec))
        if spec is not None and granule not in (None, "elements", "whole") and not is_even(spec):
            raise MisuseError(
                f"fully_shard(granularity=...): tensor parallelism does not split {item.fqn}, placed "
                f"{list(spec.placements)}, evenly, so {granule!r} differs between ranks: choose 'elements' or 'whole'"
            )
    layout = plan_layout(specs, mesh.shard_world_size, alignment)
    return layout.with_shapes(shapes)


# ---- Changes by the user: new memory for sharded parameters, and writes to them


def reflatten(handle: FlatParamHandle) -> None:
    """Copy the current elements of the sharded parameters, wherever they are, into a new shard.

    Raises:
        ValueError: the sharded parameters no longer agree on dtype or device, or one has another shape.
    """
    locals_ = [local_elements(sharded) for sharded in handle.sharded_params]
    first = f"{handle.name_of(0)}"
    shapes = [view.shape for view in handle.locals_of(handle.shard)]
    for fqn, local, shape in zip(handle.fqns, locals_, shapes, strict=True):
        if (local.dtype, local.device) != (locals_[0].dtype, locals_[0].device):
            raise MisuseError(
                f"the parameters of one fully_shard group no longer agree: {handle.label.names(fqn)} is {local.dtype} "
                f"on {local.device}, {first} is {locals_[0].dtype} on {locals_[0].device}; convert or move the whole "
                "sharded module, or give the part that differs a fully_shard() call of its own"
            )
        if local.shape != shape:
            raise MisuseError(
                f"the sharded parameter {handle.label.names(fqn)} was given data of shape {tuple(local.shape)} on "
                f"rank {handle.mesh.rank}, but its local shard there has shape {tuple(shape)}: assign data of that "
                "shape"
            )
    device = locals_[0].device
    home = handle.storage.device(handle.mesh)
    if device.type not in ("meta", home.type):
        where = "its offload_policy keeps it on" if handle.storage.is_host else "its mesh is on"
        raise MisuseError(
            f"the sharded parameter {first} was moved to {device}, but {where} {home}; move it back before the next "
            "forward"
        )
    handle.gradient.detach_segments()
    shard = handle.flatten()
    # A version that no shard had before.
    note_write_of_all_ranks((shard,) * max(handle.shard._version + 1 - shard._version, 1))
    for segment in handle.segments:
        segment.rebind(shard)
    for sharded, unsharded in zip(handle.sharded_params, handle.unsharded.bearers, strict=True):
        copy_attributes(unsharded, sharded)  # module.to() loses them
    handle.hooks.listen_again()
    was_unsharded = handle.unsharded.is_allocated
    handle.set_shard(shard)
    if was_unsharded and not handle.unsharded.never_freed and not handle.unsharded.is_meta:
        handle.unsharded.allocate()  # so that it is gathered again when the other ranks gather


def is_stale(handle: FlatParamHandle) -> bool:
    """Whether the ranks have written to the sharded parameters since they were gathered; the same on all ranks.

    Raises:
        RuntimeError: this rank alone has written.
    """
    version, segments, num_writes = handle.unsharded.gathered
    if handle.unsharded.never_freed:
        return False
    if handle.segments and handle.segment_version() != segments:
        return True
    if handle.shard._version == version:
        return False
    if num_writes != writes.count:
        return True
    names = ", ".join(handle.names)
    raise MisuseRuntimeError(
        f"rank {handle.mesh.rank}: a sharded parameter was written to through its local memory (to_local(), or a flat "
        "view made with local=True) after it had been gathered. Other ranks cannot know that, so the old gathered "
        f"values would be used. It is one of {names}. Write to the sharded parameter itself, under torch.no_grad(); "
        "or write outside forward, while no keep_unsharded() is active (during a forward, the next group is gathered "
        "ahead)"
    )


def describe(handle: FlatParamHandle) -> list[dict[str, Any]]:
    """The facts that must be the same on every rank: one per parameter, then one for the flat parameter."""
    specs, extension = specs_of(handle.tensor_parallel, len(handle.fqns)), handle.kind.extension
    facts: list[dict[str, Any]] = [
        {
            "parameter": handle.label.names(placement.fqn),
            "shape": list(placement.shape if spec is None else spec.shape),
            **({} if spec is None else {"placements": str(spec.placements)}),
            "dtype": str(handle.shard.dtype),
            "compute dtype": str(handle.unsharded.dtype),
            "reduce dtype": str(handle.pending_gradients.dtype),
            "gradient dtype": str(handle.gradient.dtype),
            **({} if extension is None else {"gathered by": extension.cls.__name__}),
            "requires_grad": sharded.requires_grad,
        }
        for placement, sharded, spec in zip(handle.layout.params, handle.sharded_params, specs, strict=True)
    ]
    offsets = [placement.offset for placement in handle.layout.params]
    return [*facts, {"elements per rank": handle.layout.shard_numel, "offsets": offsets}]

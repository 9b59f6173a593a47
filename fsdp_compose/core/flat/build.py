"""Builds flat parameters, and rebuilds them when their memory changes.

A flat parameter is made from ordinary parameters, or from parameters that other flat parameters have sharded. When the
user moves or casts a model, its flat parameters adopt the new memory here. Called by ``shard``, by tied parameters,
and by the runtime between iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..._torch import DTensorSpec, local_tensor
from ...errors import MisuseError, MisuseRuntimeError
from ..comm import DataParallelMesh, Label
from ..ragged import RaggedSpec, note_write_of_all_ranks, parameter_owners, writes
from .codecs import ParameterCodec
from .flat_param import FlatParamHandle, handle_of
from .gradient_hooks import GradientHooks
from .layout import FlatLayout, ParamSpec, plan_equal_rows, plan_layout
from .param_kind import ParameterKind, plain_tensor
from .policy import CPUOffloadPolicy, Granularity
from .shard_storage import ON_DEVICE, ShardStorage
from .sharded_param import (
    ManagedParameter,
    ParamAttribute,
    copy_attributes,
    even_chunks,
    inner_of_sharded_param,
    local_elements,
    make_sharded_param,
    rebind_sharded_param,
    sharded_specs,
    spec_of,
    specs_of,
)

if TYPE_CHECKING:
    from ...plugins.tensor_parallel import Shown, TensorParallel

SHARD_ALIGNMENT_BYTES = 16  # required by cuBLAS and NCCL; misaligned all-gathers lose up to 12x of their bandwidth


def shard_params(
    managed: Sequence[ManagedParameter],
    mesh: DataParallelMesh,
    granularity: Granularity | None = None,
    offload: CPUOffloadPolicy | None = None,
) -> FlatParamHandle:
    """Make a flat parameter from parameters of one kind (see ``group/registry``): copies this rank's elements, and
    changes nothing in the modules."""
    originals, kind, shard = [item.parameter for item in managed], managed[0].kind, None
    if kind.codec.is_composite:
        codec, shard = _cut(managed[0], mesh)
        kind = replace(kind, codec=codec)
    own: TensorParallel | None = None
    if any(spec_of(item) is not None or ParamAttribute.FORWARD_SPEC in item.__dict__ for item in originals):
        from ...plugins.tensor_parallel import TensorParallel

        own = TensorParallel.of(originals)
    handle, specs = _new_handle(managed, kind, own, mesh, granularity, offload)
    if shard is None:
        device = originals[0].device
        device = device if device.type == "meta" else mesh.device
        shard = handle.storage.zeros(handle.shard_numel, originals[0].dtype, device)
        if device.type != "meta":
            _copy_elements(originals, shard, handle)
    with torch.inference_mode(False), torch.no_grad():
        views = zip(handle.locals_of(shard), originals, specs, strict=True)
        params = [make_sharded_param(*view, kind.codec) for view in views]
    handle.hold(params, GradientHooks(params, owner=handle))
    for i, original in enumerate(originals):
        handle.hooks.move_over(i, original)
    handle.set_shard(shard)
    return handle


def _copy_elements(originals: Sequence[nn.Parameter], shard: torch.Tensor, handle: FlatParamHandle) -> None:
    """Copy this rank's elements to its new shard."""
    with torch.no_grad():
        for i, (original, (start, stop, _)) in enumerate(zip(originals, handle.local_shards, strict=True)):
            if stop > start:
                plain = local_tensor(original) if isinstance(original, DTensor) else plain_tensor(original)
                shard[start:stop].copy_(handle.layout.own_elements(i, plain, handle.mesh.shard_rank))


def _cut(item: ManagedParameter, mesh: DataParallelMesh) -> tuple[ParameterCodec, torch.Tensor]:
    """Cut a parameter that is stored as several tensors; return the codec, which knows the cut, and this rank's
    bytes."""
    from ...plugins.parameter_classes import CompositeCodec, cut

    num_ranks, label = mesh.shard_world_size, Label([item.fqn])

    def gather(local: torch.Tensor) -> torch.Tensor:
        flat = local.new_empty(num_ranks * local.numel())
        if num_ranks == 1:
            return flat.copy_(local)
        ranges = [(rank * local.numel(), (rank + 1) * local.numel()) for rank in range(num_ranks)]
        mesh.transport.unrecorded.gather(flat, local, ranges, True, label)
        return flat

    codec = item.kind.codec
    assert isinstance(codec, CompositeCodec)
    parts, local = cut(item.parameter, item.fqn, (num_ranks, mesh.shard_rank), mesh.device, gather)
    return replace(codec, parts=parts), local


def shard_again(
    managed: Sequence[ManagedParameter],
    mesh: DataParallelMesh,
    granularity: Granularity | None = None,
    offload: CPUOffloadPolicy | None = None,
) -> FlatParamHandle:
    """Make a flat parameter from parameters that other flat parameters have sharded, and replace those.

    Ranks: all ranks of the mesh; each parameter is all-gathered once, but one that is stored as several tensors, of
    which every rank keeps its shard.

    Raises:
        ValueError: such a parameter was sharded on another mesh.
    """
    params, kind, shard = [item.parameter for item in managed], managed[0].kind, None
    if kind.codec.is_composite:
        place = handle_of(params[0])
        if place is None or place[0].mesh.shard_group != mesh.shard_group:
            raise MisuseError(
                f"the parameter {managed[0].fqn} is a {kind.codec.gathered_by} that is tied across groups on different "
                "meshes: shard both groups on one mesh"
            )
    own: TensorParallel | None = None
    own_specs = [*map(_own_specs, params)]
    if any(shown is not None for _, shown in own_specs):
        from ...plugins.tensor_parallel import TensorParallel

        own = TensorParallel.joined(own_specs)
    handle, specs = _new_handle(managed, kind, own, mesh, granularity, offload)
    if not kind.codec.is_composite:
        device = local_elements(params[0]).device
        with torch.inference_mode(False), torch.no_grad():
            shard = handle.storage.zeros(handle.shard_numel, params[0].dtype, device)
            locals_ = zip(params, handle.views_of(shard), specs, strict=True)
            for i, (sharded, local, spec) in enumerate(locals_):
                if device.type != "meta":
                    inner = inner_of_sharded_param(sharded)
                    local.copy_(handle.layout.own_elements(i, inner, mesh.shard_rank).view(local.shape))
                rebind_sharded_param(sharded, local, spec)
    handle.hold(params, GradientHooks(params, [parameter_owners.get(id(sharded)) for sharded in params], owner=handle))
    handle.set_shard(handle.flatten() if shard is None else shard)
    return handle


def _new_handle(
    managed: Sequence[ManagedParameter],
    kind: ParameterKind,
    own: TensorParallel | None,
    mesh: DataParallelMesh,
    granularity: Granularity | None,
    offload: CPUOffloadPolicy | None,
) -> tuple[FlatParamHandle, list[RaggedSpec]]:
    """Make a flat parameter without a shard. ``own``: the placements that the parameters had as DTensors. Returns, too,
    how each parameter is sharded."""
    own_specs = specs_of(own, len(managed))
    layout, storage = _plan(managed, own_specs, mesh, granularity), ON_DEVICE
    if offload is not None:
        if kind.codec.gathered_by is not None:
            raise MisuseError(
                f"fully_shard(offload_policy=...): the parameter {managed[0].fqn} is a {kind.codec.gathered_by}, which "
                "is gathered in another form, on the device: leave it out with ignored_params, or shard it without "
                "offload"
            )
        storage = ShardStorage.of(offload, mesh.device)
    dtype = managed[0].parameter.dtype
    specs = sharded_specs(layout, mesh, dtype, own_specs)
    local_shards = [
        (local.shard_start, local.shard_start + local.numel, spec.local_shape)
        for local, spec in zip(layout.local_shards(mesh.shard_rank), specs, strict=True)
    ]
    return FlatParamHandle(layout, layout.over(mesh), kind, local_shards, own, storage), specs


def _own_specs(sharded: nn.Parameter) -> tuple[DTensorSpec | None, Shown]:
    """How a parameter about to be sharded again was placed, if it was a DTensor or annotated: its own placements, and
    what forward sees."""
    place = handle_of(sharded)
    own = None if place is None else place[0].tensor_parallel
    return (None, None) if place is None or own is None else (own.specs[place[1]], own.shown[place[1]])


def _plan(
    managed: Sequence[ManagedParameter],
    own: Sequence[DTensorSpec | None],
    mesh: DataParallelMesh,
    granularity: Granularity | None,
) -> FlatLayout:
    dtype, kind = managed[0].parameter.dtype, managed[0].kind
    if kind.codec.gathered_by is not None:
        assert len(managed) == 1, "its class gathers it by itself"
        fqn, shape = managed[0].fqn, tuple(managed[0].parameter.shape)
        if granularity is even_chunks:
            from ...plugins.even_chunks import plan_chunks

            return plan_chunks([ParamSpec(fqn, shape)], mesh.shard_world_size, 1, (0,))
        return plan_equal_rows(fqn, shape, mesh.shard_world_size)
    dtypes = (dtype, kind.compute_dtype(dtype), kind.reduction_dtype(dtype), kind.gradient_dtype(dtype))
    alignment = max(1, SHARD_ALIGNMENT_BYTES // min(item.itemsize for item in dtypes))
    specs: list[ParamSpec] = []
    shapes: list[tuple[int, ...]] = []
    for item, spec in zip(managed, own, strict=True):
        granule = granularity(item.fqn, item.parameter) if granularity is not None else None
        whole = tuple(item.parameter.shape)
        largest = local = whole
        if spec is not None:
            from ...plugins.tensor_parallel import is_even, largest_local_shape, local_shape

            largest, local = largest_local_shape(spec), local_shape(spec)
            is_fsdp2 = granularity is even_chunks
            if not (is_fsdp2 or granule in (None, "elements", "whole") or is_even(spec)):
                raise MisuseError(
                    f"fully_shard(granularity=...): tensor parallelism does not split {item.fqn}, placed "
                    f"{list(spec.placements)}, evenly, so {granule!r} differs between ranks: choose 'elements' or "
                    "'whole'"
                )
        specs.append(ParamSpec(item.fqn, largest, granule))
        shapes.append(local)
    if granularity is even_chunks:
        from ...plugins.even_chunks import plan_chunks

        dims = tuple([even_chunks.dim_of(item.parameter) for item in managed])
        return plan_chunks(specs, mesh.shard_world_size, alignment, dims).with_shapes(shapes)
    return plan_layout(specs, mesh.shard_world_size, alignment).with_shapes(shapes)


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
        "or say that all ranks have written, fsdp_compose.optim.note_write_of_all_ranks(); "
        "or write outside forward, while no keep_unsharded() is active (during a forward, the next group is gathered "
        "ahead)"
    )


def describe(handle: FlatParamHandle) -> list[dict[str, Any]]:
    """The facts that must be the same on every rank: one per parameter, then one for the flat parameter."""
    specs, gathered_by = specs_of(handle.tensor_parallel, len(handle.fqns)), handle.kind.codec.gathered_by
    facts: list[dict[str, Any]] = [
        {
            "parameter": handle.label.names(placement.fqn),
            "shape": list(placement.shape if spec is None else spec.shape),
            **({} if spec is None else {"placements": str(spec.placements)}),
            "dtype": str(handle.shard.dtype),
            "compute dtype": str(handle.unsharded.dtype),
            "reduce dtype": str(handle.pending_gradients.dtype),
            "gradient dtype": str(handle.gradient.dtype),
            **({} if gathered_by is None else {"gathered by": gathered_by}),
            "requires_grad": sharded.requires_grad,
        }
        for placement, sharded, spec in zip(handle.layout.params, handle.sharded_params, specs, strict=True)
    ]
    offsets = [placement.offset for placement in handle.layout.params]
    layout = {"elements per rank": handle.layout.shard_numel, "offsets": offsets}
    placed = {"layout": "even chunks", "dimensions": [str(item) for item in handle.layout.placements]}
    return [*facts, layout | (placed if handle.layout.in_chunks else {})]

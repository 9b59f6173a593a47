"""Parameters that the package spmd_types has annotated: plain tensors with a type for each dimension of a mesh.

A type says how the ranks of a dimension hold a parameter, and what backward leaves there::

    R      the same on all ranks    each rank has a term of the gradient
    I      the same on all ranks    each rank has the whole gradient
    S(i)   split along dim i        each rank has the gradient of its shard

Over the data-parallel dimensions it must be R: ``fully_shard`` reduces the gradient there. Over others, the parameter
is stored as a DTensor with such placements would be (``tensor_parallel``), but forward sees its plain local tensor.
spmd_types keeps the types as attributes, so the sharded and the unsharded parameter have them like any others.

The package is optional, and only looked for where something else has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ..._torch import DTensorSpec, TensorMeta, root_mesh
from ...errors import MisuseError


class Annotation(NamedTuple):
    """What the annotation of a parameter means for its storage."""

    spec: DTensorSpec | None = None  # how it is placed on dimensions that are not data-parallel, if there are any
    terms: tuple[int, ...] = ()  # those of them on which each rank has a term of the gradient
    attributes: Mapping[str, Any] = {}  # its types, where R must be added


def read(param: torch.Tensor, fqn: str, mesh: DeviceMesh, data_dims: Collection[str] | None) -> Annotation:
    """Read the annotation of a parameter that is about to be sharded over the dimensions ``data_dims`` of ``mesh``;
    ``None``: over all of them, beside others of the mesh that ``mesh`` is a part of.

    Raises:
        ValueError: it has a type that sharding cannot keep, or does not say enough, or too much.
    """
    types, what = sys.modules["spmd_types"], f"the parameter {fqn} is annotated by spmd_types"
    names, whole = mesh.mesh_dim_names or (), mesh if data_dims is not None else root_mesh(mesh)
    ours = [dim for dim in range(mesh.ndim) if data_dims is None or names[dim] in data_dims]
    data_axes = [types.MeshAxis.of(mesh.get_group(dim)) for dim in ours]
    data = types._mesh_axis.flatten_axes(tuple(data_axes))  # FSDP2 uses it, too
    axes = {types.MeshAxis.of(whole.get_group(dim)): dim for dim in range(whole.ndim) if whole.size(dim) > 1}
    others = {axis: dim for axis, dim in axes.items() if not axis <= data}
    found, partition = types.get_local_type(param), types.get_partition_spec(param)
    if partition is not None:
        found = {**found, **types.types.partition_spec_to_shard_types(partition)}
    placed: dict[int, Placement] = {}
    terms: list[int] = []
    for axis, kind in found.items():
        dim = others.get(axis)
        called = f"{getattr(kind, 'name', kind)} on {axis if axis not in axes else _name(whole, axes[axis])}"
        if axis <= data and kind is not types.R:
            raise MisuseError(
                f"{what} as {called}, which is data-parallel: annotate it as R there, or leave that out. "
                "Its gradient is reduced over these ranks"
            )
        if dim is None and not axis <= data:
            raise MisuseError(
                f"{what} as {called}, which is no dimension of {whole}: give the mesh that has it and the names of its "
                "data-parallel dimensions, drop_in.fully_shard(mesh=..., dp_mesh_dims=...)"
            )
        if kind is types.P or kind is types.V:
            raise MisuseError(
                f"{what} as {called}, which does not say what the ranks there hold together: annotate it as S(i) (each "
                "has a part along dim i), R or I (all have the same), or leave it out with ignored_params"
            )
        if dim is not None:
            placed[dim] = Replicate() if kind is types.R or kind is types.I else Shard(kind.dim)
            terms += [dim] if kind is types.R else []
    left_out = [_name(whole, dim) for dim in others.values() if dim not in placed]
    if left_out and data_dims is not None:
        raise MisuseError(f"{what}, but not on {', '.join(left_out)} of the same mesh: {_REMEDY}")
    for split in partition or ():
        order = [others.get(axis, -1) for axis in split] if isinstance(split, tuple) else []
        if order != sorted(order):
            raise MisuseError(
                f"{what} as {partition}, split over dimensions in another order than that of {whole}, which a sharded "
                "parameter cannot have: split it in the order of the mesh"
            )
    attributes = _with_data_axes(param, found, types.current_mesh() or data_axes, data)
    if not placed:
        return Annotation(attributes=attributes)
    dims = sorted(placed)
    return Annotation(
        _spec(param, whole, {dim: placed[dim] for dim in dims}), tuple(map(dims.index, terms)), attributes
    )


_REMEDY = "annotate it there too, as R if each rank has a term of its gradient, as I if each has all of it"


def _name(mesh: DeviceMesh, dim: int) -> str:
    return f"dimension {dim}" if mesh.mesh_dim_names is None else mesh.mesh_dim_names[dim]


def _with_data_axes(param: torch.Tensor, found: Mapping[Any, Any], axes: Iterable[Any], data: Any) -> Mapping[str, Any]:
    """The attributes of a parameter annotated as it is, and as R on those of ``axes`` inside ``data`` that its
    annotation leaves out."""
    types = sys.modules["spmd_types"]
    added = [axis for axis in axes if axis.size() > 1 and axis <= data and not any(axis <= known for known in found)]
    if not added:
        return {}
    stand_in = torch.empty(param.shape, device="meta")
    given = {**types.get_local_type(param), **dict.fromkeys(added, types.R)}
    types.assert_type(stand_in, given, partition_spec=types.get_partition_spec(param))
    return vars(stand_in)


def _spec(param: torch.Tensor, whole: DeviceMesh, placed: Mapping[int, Placement]) -> DTensorSpec:
    """How a parameter is placed on some dimensions of a mesh, if all ranks have local tensors of one shape."""
    shape = [*param.shape]
    for dim, placement in placed.items():
        if isinstance(placement, Shard):
            shape[placement.dim] *= whole.size(dim)
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), param.dtype)
    return DTensorSpec(whole[tuple(_name(whole, dim) for dim in placed)], tuple(placed.values()), meta)


def refuse_gaps(found: Mapping[str, Annotation]) -> None:
    """Raise ValueError if some parameters of a group are annotated on dimensions on which others are not."""
    on = {fqn: set(item.spec.mesh.mesh_dim_names or ()) if item.spec else set() for fqn, item in found.items()}
    most = max(on, key=lambda fqn: len(on[fqn]))
    for fqn, names in on.items():
        if names != on[most]:
            raise MisuseError(
                f"the parameter {fqn} is annotated by spmd_types, but not on "
                f"{', '.join(sorted(on[most] - names))}, as {most} of the same group is: {_REMEDY}"
            )

"""Parameters that the package spmd_types has annotated: plain tensors with a type for each dimension of a mesh.

A type says how the ranks of a dimension hold a parameter, and what backward leaves there::

    R      the same on all ranks    each rank has a term of the gradient
    I      the same on all ranks    each rank has the whole gradient
    S(i)   split along dim i        each rank has the gradient of its part

Over the data-parallel dimensions it must be R: ``fully_shard`` reduces the gradient there. Over others, the parameter
is stored as a DTensor with such placements would be (``tensor_parallel``), but forward sees this rank's plain part.
spmd_types keeps the types as attributes, so the sharded and the unsharded parameter have them like any others.

The package is optional, and only looked for where something else has imported it. This file is loaded when the first
annotated parameter is sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from .._torch import DTensorSpec, TensorMeta, root_mesh
from ..errors import MisuseError


class Annotation(NamedTuple):
    """What the annotation of a parameter means for its storage."""

    spec: DTensorSpec | None = None  # how it is placed on dimensions that are not data-parallel, if there are any
    terms: tuple[int, ...] = ()  # those of them on which each rank has a term of the gradient
    attributes: Mapping[str, Any] = {}  # its types, where R must be added


def read(param: torch.Tensor, fqn: str, mesh: DeviceMesh, data_dims: Collection[str] | None) -> Annotation:
    """Read the annotation of a parameter that is about to be sharded over the dimensions ``data_dims`` of ``mesh``;
    ``None``: over all of them, beside others of the mesh that ``mesh`` is a part of.

    Raises:
        ValueError: it has a type that sharding cannot keep, or on ``mesh`` not all that is needed.
    """
    types = sys.modules["spmd_types"]
    what = f"fully_shard(): the parameter {fqn or 'of this shape'} is annotated by spmd_types"
    names, whole = mesh.mesh_dim_names or (), mesh if data_dims is not None else root_mesh(mesh)
    ours = [dim for dim in range(mesh.ndim) if data_dims is None or names[dim] in data_dims]
    data_axes = [types.MeshAxis.of(mesh.get_group(dim)) for dim in ours]
    data = types._mesh_axis.flatten_axes(tuple(data_axes))  # FSDP2 uses it, too
    axes = {types.MeshAxis.of(whole.get_group(dim)): dim for dim in range(whole.ndim)}
    others = {axis: dim for axis, dim in axes.items() if axis.size() > 1 and not axis <= data}
    given, partition = types.get_local_type(param), types.get_partition_spec(param)
    found = {**given, **({} if partition is None else types.types.partition_spec_to_shard_types(partition))}
    placed: dict[int, Placement] = {}
    terms: list[int] = []
    for axis, kind in found.items():
        if axis <= data:
            if kind is not types.R:
                raise MisuseError(
                    f"{what} as {kind} on the data-parallel dimension {axis}: annotate it as R there, or leave the "
                    "dimension out. fully_shard() reduces its gradient over these ranks"
                )
            continue
        if axis not in others:
            raise MisuseError(
                f"{what} on {axis}, which is no dimension of {whole}: give the mesh that has it and the names of its "
                "data-parallel dimensions, drop_in.fully_shard(mesh=..., dp_mesh_dims=...)"
            )
        if kind is types.P or kind is types.V:
            raise MisuseError(
                f"{what} as {kind} on {axis}, which does not say what the ranks there hold together: annotate it as "
                "S(i) (each has a part along dim i), R or I (all have the same), or leave it out with ignored_params"
            )
        if kind is types.R:
            terms.append(others[axis])
        is_same = kind is types.R or kind is types.I
        placed[others[axis]] = Replicate() if is_same else Shard(kind.dim)
    left_out = [axis for axis, dim in others.items() if dim not in placed]
    if left_out and data_dims is not None:
        raise MisuseError(
            f"{what} on {[*found]}, but not on {left_out} of the same mesh: annotate it there too, as R if each rank "
            "has a term of its gradient, as I if each has all of it"
        )
    for axes_of_dim in partition or ():
        order = [others.get(axis, -1) for axis in axes_of_dim] if isinstance(axes_of_dim, tuple) else []
        if order != sorted(order):
            raise MisuseError(
                f"{what} as {partition}, split over {axes_of_dim} in another order than that of the dimensions of "
                f"{whole}, which the sharded parameter cannot tell: split it in the order of the mesh"
            )
    added = [
        axis
        for axis in types.current_mesh() or data_axes
        if axis.size() > 1 and axis <= data and not any(axis <= known for known in found)
    ]
    attributes: Mapping[str, Any] = {}
    if added:
        stand_in = torch.empty(param.shape, device="meta")
        types.assert_type(stand_in, {**given, **dict.fromkeys(added, types.R)}, partition_spec=partition)
        attributes = vars(stand_in)
    if not placed:
        return Annotation(attributes=attributes)
    dims = sorted(placed)
    spec = _spec(param, whole, dims, [placed[dim] for dim in dims])
    return Annotation(spec, tuple(dims.index(dim) for dim in terms), attributes)


def _spec(param: torch.Tensor, whole: DeviceMesh, dims: list[int], placements: list[Placement]) -> DTensorSpec:
    """How a parameter is placed on some dimensions of a mesh, if all ranks have parts of one shape."""
    shape = [*param.shape]
    for dim, placement in zip(dims, placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= whole.size(dim)
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), param.dtype)
    return DTensorSpec(whole[tuple((whole.mesh_dim_names or ())[dim] for dim in dims)], tuple(placements), meta)


def refuse_gaps(found: Mapping[str, Annotation]) -> None:
    """Raise ValueError if some parameters of a group are annotated on dimensions on which others are not."""
    on = {
        fqn: () if annotation.spec is None else annotation.spec.mesh.mesh_dim_names or ()
        for fqn, annotation in found.items()
    }
    most = max(on, key=lambda fqn: len(on[fqn]))
    for fqn, names in on.items():
        if set(names) != set(on[most]):
            left_out = ", ".join(sorted(set(on[most]) - set(names)))
            raise MisuseError(
                f"fully_shard(): the parameter {fqn} is annotated by spmd_types, but not on {left_out}, on which "
                f"{most} of the same group is: annotate it there too, as R if each rank has a term of its gradient, as "
                "I if each has all of it"
            )

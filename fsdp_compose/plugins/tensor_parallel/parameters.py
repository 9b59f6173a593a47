"""Parameters that were DTensors before ``fully_shard``: tensor parallelism has split them over ranks of another mesh.

A flat parameter holds their local tensors, so they sit next to plain parameters and travel with those in one
collective. ``TensorParallel`` does what that takes for one flat parameter; if all its parameters were plain, there is
none::

    before fully_shard     DTensor on tp, [Shard(0)]                      its own placements
    unsharded parameter    the same, over a view of the flat parameter    what forward computes with
    sharded parameter      RaggedDTensor on (dp, tp), [RaggedShard, Shard(0)]

The plan uses the largest local tensors of any rank, so offsets and shard lengths are the same on all. Autograd may
place a gradient in any way; for the reduction it is placed like the parameter.

Forward may see a parameter on a mesh that contains the data-parallel dimensions too (FSDP2's ``dp_mesh_dims``), where
it is replicated. Then ``ParamAttribute.FORWARD_SPEC`` of the parameter tells it. What autograd leaves on those
dimensions, replicas or terms of a sum, is averaged like any gradient. It may also see the plain local tensor
(``PlainLocal``; see ``annotations``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._torch import (
    DTensorSpec,
    StridedShard,
    TensorMeta,
    compute_local_shape_and_global_offset,
    dtensor_spec,
    local_tensor,
    make_dtensor,
    set_local_tensor,
    waited,
)
from ...core.comm import Transport, TransportRole, check_beside, default_mesh, has_ranks_in_common
from ...core.flat import ParamAttribute, annotation_of, spec_of
from ...core.flat.codecs import is_composite
from ...core.flat.sharded_param import own_counter
from ...core.ragged import RaggedDTensor, refuse_uneven_strides
from ...errors import MisuseError

AddUp = Callable[[Transport, torch.Tensor, Sequence[int]], None]
"""Replaces a tensor by its sum over the ranks of a transport. The indices say which parameters' gradients it holds."""


class PlainLocal(NamedTuple):
    """How forward sees a parameter: its local tensor, a plain one. On the dimensions ``terms`` of the parameter's own
    mesh, autograd leaves a term of the gradient."""

    terms: tuple[int, ...]


Shown = DTensorSpec | PlainLocal | None
"""How forward sees a parameter: as a DTensor, as the local tensor of one, or as a plain tensor that is whole."""


def refuse_placement(fqn: str, param: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise ValueError if a DTensor, or a parameter annotated like one, cannot be sharded over ``mesh`` too."""
    spec = spec_of(param)
    assert spec is not None
    how = "already a DTensor, placed" if isinstance(param, DTensor) else "annotated by spmd_types as"
    what = f"fully_shard(): the parameter {fqn} is {how} {list(spec.placements)} on "
    local = local_tensor(param) if isinstance(param, DTensor) else param
    if is_composite(local):
        raise MisuseError(
            f"{what}{spec.mesh}, of {type(local).__name__}, which is stored as several tensors: leave it out "
            "with ignored_params, or do not split it by tensor parallelism"
        )
    if isinstance(param, RaggedDTensor):
        raise MisuseError(f"{what}{spec.mesh}: distribute_ragged() made it; give its module plain parameters")
    if any(not item.is_replicate() and type(item) not in (Shard, StridedShard) for item in spec.placements):
        raise MisuseError(f"{what}{spec.mesh}: only Shard and Replicate are supported for tensor parallelism")
    refuse_uneven_strides(spec, f"{what}{spec.mesh}")
    mesh = param.__dict__.get(ParamAttribute.MESH, mesh)
    try:
        if has_ranks_in_common(mesh, spec.mesh):
            _refuse_data_ranks(mesh, spec)
        check_beside(mesh, spec.mesh)
    except RuntimeError as error:
        raise MisuseError(
            f"{what}{spec.mesh}, and the data-parallel mesh is {mesh}: {error}. Both must be dimensions of one mesh: "
            "mesh = init_device_mesh(..., mesh_dim_names=('dp', 'tp')), then parallelize_module(module, mesh['tp'], "
            "...), then fully_shard(module, mesh=mesh['dp']). Experts may be spread over data ranks: see docs/meshes.md"
        ) from error


def _refuse_data_ranks(mesh: DeviceMesh, spec: DTensorSpec) -> None:
    """Raise RuntimeError if a DTensor on data-parallel ranks is not one of expert parallelism."""
    data, common = mesh.mesh.flatten(), {*(mesh.mesh_dim_names or ())}.intersection(spec.mesh.mesh_dim_names or ())
    shared = data[torch.isin(data, spec.mesh.mesh)].tolist()
    if mesh is default_mesh() or common:
        why = f"has the dimension {min(common)!r} too" if common else "has all ranks, because mesh= was left out"
        raise RuntimeError(f"it is on the ranks {data.tolist()} and {why}, so the ranks {shared} are in both")
    for dim, item in enumerate(spec.placements):
        line = dist.get_process_group_ranks(spec.mesh.get_group(dim))
        if item.is_replicate() and len({*line} & {*data.tolist()}) > 1:
            raise RuntimeError(
                f"it is replicated over the ranks {line}, which have different batches: leave it a plain parameter, "
                "which is sharded over all data ranks"
            )


def placed(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """A DTensor over ``local``, placed as ``spec`` says; differentiable."""
    assert spec.tensor_meta is not None
    shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)


def local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    return tuple(compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)[0])


def largest_local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    shape = list(spec.shape)
    for dim, placement in enumerate(spec.placements):
        if isinstance(placement, (Shard, StridedShard)):
            shape[placement.dim] = -(-shape[placement.dim] // spec.mesh.size(dim))
    return tuple(shape)


def is_split_evenly(param: torch.Tensor) -> bool:
    """Whether tensor parallelism, if any, gives all ranks equally much of a parameter."""
    spec = spec_of(param)
    return spec is None or is_even(spec)


def is_even(spec: DTensorSpec) -> bool:
    sharded = [spec.mesh.size(dim) for dim, item in enumerate(spec.placements) if not item.is_replicate()]
    return prod(largest_local_shape(spec)) * prod(sharded) == prod(spec.shape)


class TensorParallel:
    """How the parameters of one flat parameter are placed on meshes of their own."""

    __slots__ = (
        "_dtensors", "_groups", "_own_dims", "_transports",
        "is_shown_as_stored", "is_shown_on_data_dims", "shown", "specs",
    )  # fmt: skip

    def __init__(self, pairs: Sequence[tuple[DTensorSpec | None, Shown]]) -> None:
        self.specs = tuple([spec for spec, _ in pairs])  # before fully_shard; None if it was not a DTensor
        self.shown = tuple([shown for _, shown in pairs])  # as forward sees it
        self._own_dims = [_own_dims(*pair) for pair in pairs]
        # Whether forward sees a parameter on a mesh with data-parallel dimensions.
        self.is_shown_on_data_dims = any(dims is not None for dims in self._own_dims)
        self.is_shown_as_stored = all(shown is spec for spec, shown in pairs)
        self._dtensors = [(i, spec) for i, spec in enumerate(self.specs) if spec is not None]
        meshes = dict.fromkeys(spec.mesh for _, spec in self._dtensors)
        self._transports = {(mesh, dim): Transport(mesh.get_group(dim)) for mesh in meshes for dim in range(mesh.ndim)}
        self._groups = [tuple(mesh.get_group(dim) for mesh, dim in self.sharded_dims(i)) for i in range(len(pairs))]

    @staticmethod
    def of(params: Sequence[nn.Parameter]) -> TensorParallel | None:
        """Make one for parameters that are not sharded yet; ``None`` if none is a DTensor, here or in forward, or
        annotated like one."""
        return TensorParallel.joined([*map(_stored_and_shown, params)])

    @staticmethod
    def joined(pairs: Sequence[tuple[DTensorSpec | None, Shown]]) -> TensorParallel | None:
        """Make one from the ``specs`` and ``shown`` of parameters; ``None`` if it has nothing to do."""
        return None if all(shown is None for _, shown in pairs) else TensorParallel(pairs)

    def change_transports(self, change: Callable[[Transport, TransportRole], Transport]) -> None:
        """Replace each transport of sums by ``change(transport, role)``, from the next sum on."""
        role = TransportRole.TENSOR_PARALLEL
        self._transports = {place: change(transport, role) for place, transport in self._transports.items()}

    def transport_names(self) -> dict[str, str]:
        """As ``DataParallelMesh.transport_names``."""
        names = dict.fromkeys(transport.unrecorded.name for transport in self._transports.values())
        return {TransportRole.TENSOR_PARALLEL.value: ", ".join(names)}

    def sharded_dims(self, index: int) -> tuple[tuple[DeviceMesh, int], ...]:
        """The dimensions of its mesh over which ranks hold different elements of a parameter."""
        spec = self.specs[index]
        if spec is None:
            return ()
        return tuple((spec.mesh, dim) for dim, item in enumerate(spec.placements) if not item.is_replicate())

    def by_groups(self, indices: Iterable[int]) -> dict[tuple[dist.ProcessGroup, ...], list[int]]:
        """Parameters by the process groups of these dimensions."""
        found: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for i in indices:
            found.setdefault(self._groups[i], []).append(i)
        return found

    def place(self, index: int) -> str:
        """This rank's coordinates on these dimensions, as text: the same on ranks with the same elements."""
        dims = self.sharded_dims(index)
        return ",".join([f"{(mesh.mesh_dim_names or ())[dim]}={mesh.get_local_rank(dim)}" for mesh, dim in dims])

    # ---- Parameters

    def parameters(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """Make parameters over views of a whole flat parameter, as modules had them before; frozen."""
        return [
            _parameter(view, spec) if isinstance(spec, DTensorSpec) else own_counter(view)
            for view, spec in zip(views, self.shown, strict=True)
        ]

    def wholes(self, views: Sequence[torch.Tensor], first: int = 0) -> list[torch.Tensor]:
        """Make whole tensors from views of a whole flat tensor, those of adjacent parameters from number ``first`` on.
        Ranks: all of the parameters' own meshes."""
        with torch.no_grad():
            return [
                view if spec is None else placed(view, spec).full_tensor()  # type: ignore[attr-defined]
                for view, spec in zip(views, self.specs[first:], strict=False)
            ]

    @property
    def is_on_first_rank(self) -> bool:
        meshes = {spec.mesh for spec in self.specs if spec is not None}
        return not any(any(mesh.get_coordinate() or ()) for mesh in meshes)

    # ---- Gradients

    def terms(self, grads: Sequence[torch.Tensor | None]) -> list[tuple[Transport, list[int]]]:
        """Which gradients autograd has left as one term on each rank, and the ranks over which they must be summed
        before they are reduced."""
        found: dict[tuple[DeviceMesh, int], list[int]] = {place: [] for place in self._transports}
        for i, spec in self._dtensors:
            for dim in self._summed_dims(i, grads[i]):
                found[spec.mesh, dim].append(i)
        return [(self._transports[place], indices) for place, indices in found.items()]

    def local_gradients(
        self, grads: Sequence[torch.Tensor | None], dtype: torch.dtype, add_up: AddUp
    ) -> list[torch.Tensor | None]:
        """The local tensors of gradients that autograd has left on the unsharded parameters, placed like those. If
        each rank has only a term of them, ``add_up`` sums them in ``dtype``, with one all-reduce for all of them.

        Ranks: all of the parameters' own meshes, which have gradients for the same parameters.
        """
        if self.is_shown_on_data_dims:
            grads = [*map(self._on_own_mesh, range(len(grads)), grads)]
        result, has_terms = [*grads], False
        for i, spec in self._dtensors:
            grad = grads[i]
            if grad is None:
                continue
            if not isinstance(grad, DTensor):
                has_terms = has_terms or bool(self._summed_dims(i, grad))
                continue
            placements = dtensor_spec(grad).placements
            if placements is not spec.placements and placements != spec.placements:
                if self._summed_dims(i, grad):
                    has_terms = True
                else:
                    grad = grad.redistribute(placements=spec.placements)
            local = local_tensor(grad)
            result[i] = local if type(local) is torch.Tensor else waited(local)
        for transport, indices in self.terms(grads) if has_terms else ():
            if indices:
                terms = [term for i in indices if (term := result[i]) is not None]
                flat = torch.cat([term.reshape(-1).to(dtype) for term in terms])
                add_up(transport, flat, indices)
                totals = flat.split([term.numel() for term in terms])
                for i, term, total in zip(indices, terms, totals, strict=True):
                    result[i] = total.view(term.shape)
        return result

    def _summed_dims(self, index: int, grad: torch.Tensor | None) -> list[int]:
        """The dimensions of its own mesh over which a gradient must be summed to be placed like its parameter, if sums
        suffice."""
        spec, shown, dims = self.specs[index], self.shown[index], self._own_dims[index]
        if isinstance(shown, PlainLocal):
            return [] if grad is None else [*shown.terms]
        if spec is None or not isinstance(grad, DTensor):
            return []
        placements = dtensor_spec(grad).placements
        if dims is not None and len(placements) > len(dims):
            placements = tuple(placements[dim] for dim in dims)
        differing = [dim for dim, item in enumerate(placements) if item != spec.placements[dim]]
        if all(placements[dim].is_partial("sum") and spec.placements[dim].is_replicate() for dim in differing):
            return differing
        return []

    def _on_own_mesh(self, index: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        """This data-parallel rank's gradient, without the data-parallel dimensions. Ranks: all, if it is sharded over
        those."""
        spec, dims = self.specs[index], self._own_dims[index]
        if dims is None or not isinstance(grad, DTensor):
            return grad
        placements = dtensor_spec(grad).placements
        whole = [Replicate() if item.is_shard() and i not in dims else item for i, item in enumerate(placements)]
        if whole != [*placements]:
            grad = grad.redistribute(placements=whole)
        local = local_tensor(grad)
        if spec is None:
            return local if type(local) is torch.Tensor else waited(local)
        meta = TensorMeta(grad.shape, grad.stride(), grad.dtype)
        return make_dtensor(DTensor, local, DTensorSpec(spec.mesh, tuple(whole[dim] for dim in dims), meta))


def _stored_and_shown(param: nn.Parameter) -> tuple[DTensorSpec | None, Shown]:
    annotation = annotation_of(param)
    if annotation is not None:
        return annotation.spec, None if annotation.spec is None else PlainLocal(annotation.terms)
    spec = spec_of(param)
    return spec, param.__dict__.get(ParamAttribute.FORWARD_SPEC, spec)


def _own_dims(spec: DTensorSpec | None, shown: Shown) -> list[int] | None:
    """The dimensions that the mesh of ``shown`` shares with that of ``spec``; ``None`` if there are no others."""
    if not isinstance(shown, DTensorSpec) or shown is spec:
        return None
    names, own = shown.mesh.mesh_dim_names or (), () if spec is None else spec.mesh.mesh_dim_names or ()
    return [names.index(name) for name in own]


def _parameter(view: torch.Tensor, spec: DTensorSpec) -> nn.Parameter:
    assert spec.tensor_meta is not None
    meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, view.dtype)
    parameter = nn.Parameter(make_dtensor(DTensor, view, DTensorSpec(spec.mesh, spec.placements, meta)), False)
    set_local_tensor(parameter, view)
    return parameter

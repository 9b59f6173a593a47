"""The one factory of sharded parameters: what users, optimizers and checkpoints see of a group's parameters.

A sharded parameter is a leaf ``nn.Parameter`` and a ``RaggedDTensor`` whose local tensor is a view of this rank's
shard. The runtime reads and writes shards and never calls an operation on a sharded parameter, so only this file
decides which kind of tensor it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..._torch import (
    DTensorSpec,
    as_parameter,
    dtensor_spec,
    is_shard_of_rows,
    is_wrapper,
    local_tensor,
    make_dtensor,
    renew_hooks,
    rows_within,
    set_local_tensor,
)
from ...errors import MisuseError, MisuseRuntimeError
from ..comm import DataParallelMesh, kept_for, mesh_beside
from ..ragged import SHOWN_ATTRIBUTE, RaggedDTensor, RaggedSpec, distribute_ragged, gather_local_shards, rebind
from .codecs import ParameterCodec
from .layout import FlatLayout, Granule
from .param_kind import ParameterKind

if TYPE_CHECKING:
    from ...plugins.tensor_parallel import Annotation


class ParamAttribute:
    """What this package sets on parameters, and on their sharded ones."""

    CLASS = "_fsdp_compose_class"  # of a sharded parameter: the subclass of nn.Parameter that the original belonged to
    SHARDED = "_fsdp_compose_sharded_param"  # of an original: the sharded parameter that has replaced it
    FLAT = "_fsdp_compose_flat"  # of the flat views that ``flat_parameters()`` has made
    # Of a parameter that forward sees on a mesh with data-parallel dimensions too; see ``tensor_parallel``.
    FORWARD_SPEC = "_fsdp_compose_forward_spec"
    DIM = "_fsdp_compose_dim"  # of a parameter of which even chunks are cut along another dimension than 0
    MESH = "_fsdp_compose_mesh"  # of a parameter that has another data-parallel mesh than its group


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's elements of a tensor."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def own_counter(view: torch.Tensor) -> nn.Parameter:
    """A frozen parameter with the memory of ``view`` and a version counter of its own, as parameters have in a module:
    so a write to a neighbour is none to what autograd has saved of it."""
    return nn.Parameter(view.data, requires_grad=False)


# ---- Parameters that tensor parallelism has split: how they were placed before ``fully_shard``


# The arguments of ``annotations_on``, and the annotations that were read there, by the id of the parameter.
_annotated_on: ContextVar[tuple[DeviceMesh, Collection[str] | None, dict[int, Annotation]]] = ContextVar(
    "_annotated_on"
)


@contextmanager
def annotations_on(mesh: DeviceMesh, data_dims: Collection[str] | None = None) -> Iterator[None]:
    """A context in which annotations of parameters are read on ``mesh``, of which ``data_dims`` are data-parallel;
    ``None``: all of it, if no context around this one says more."""
    if data_dims is None and _annotated_on.get(None) is not None:
        yield
        return
    token = _annotated_on.set((mesh, data_dims, {}))
    try:
        yield
    finally:
        _annotated_on.reset(token)


def is_annotated(param: torch.Tensor) -> bool:
    """Whether the package spmd_types has annotated a plain tensor; see ``annotations``."""
    types = sys.modules.get("spmd_types")  # optional
    return types is not None and not isinstance(param, DTensor) and bool(types.get_local_type(param))


def annotation_of(param: torch.Tensor, fqn: str = "") -> Annotation | None:
    """The annotation of a parameter that is about to be sharded, if it has one."""
    if not is_annotated(param):
        return None
    mesh, data_dims, known = _annotated_on.get()
    if id(param) not in known:
        from ...plugins.tensor_parallel import read

        known[id(param)] = read(param, fqn, mesh, data_dims)
    return known[id(param)]


def spec_of(param: torch.Tensor) -> DTensorSpec | None:
    """The placement of a parameter that is about to be sharded, if it is a DTensor or annotated like one."""
    if isinstance(param, DTensor):
        return dtensor_spec(param)
    annotation = annotation_of(param)
    return None if annotation is None else annotation.spec


class EvenChunks:
    """The granularity of a group that is laid out as FSDP2 does it: see the file ``even_chunks``."""

    def __call__(self, _fqn: str, _param: torch.Tensor) -> Granule:
        return "rows"

    def cut(self, param: torch.Tensor, dim: int) -> bool:
        """Let the next group cut a parameter along ``dim``, unless tensor parallelism has done so; return whether."""
        spec = spec_of(param)
        is_free = spec is None or not any(item.is_shard(dim) for item in spec.placements)
        if is_free:
            param.__dict__[ParamAttribute.DIM] = dim
        return is_free

    def forget(self, param: torch.Tensor) -> None:
        param.__dict__.pop(ParamAttribute.DIM, None)

    def dim_of(self, param: torch.Tensor) -> int:
        """The dimension along which a parameter is to be cut, or is already."""
        known = param._spec.even_dim if isinstance(param, RaggedDTensor) else 0
        return int(param.__dict__.get(ParamAttribute.DIM, known))


even_chunks = EvenChunks()


def meshes_of(param: torch.Tensor, mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh over which a parameter of a group on ``mesh`` is sharded, and that on which it is a DTensor, or
    annotated like one. Ranks: see ``mesh_beside``."""
    spec, given = spec_of(param), param.__dict__.get(ParamAttribute.MESH, mesh)
    return (given, None) if spec is None else (mesh_beside(given, spec.mesh), spec.mesh)


class _Placed(Protocol):
    """``TensorParallel``."""

    specs: tuple[DTensorSpec | None, ...]


def specs_of(own: _Placed | None, num_params: int) -> Sequence[DTensorSpec | None]:
    """For each parameter, how it was placed before, if it was a DTensor."""
    return [None] * num_params if own is None else own.specs


@dataclass
class ManagedParameter:
    """A parameter of a group, with every place in the module tree that holds it, and what was decided for it."""

    fqn: str
    parameter: nn.Parameter
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    kind: ParameterKind = field(default_factory=ParameterKind)
    mesh: DataParallelMesh = field(default=cast(DataParallelMesh, None))  # over which it is sharded, once it is known


def sharded_param_of(param: torch.Tensor) -> torch.Tensor:
    """The sharded parameter that has replaced ``param``; ``param`` itself if none has."""
    sharded: torch.Tensor = param.__dict__.get(ParamAttribute.SHARDED, param)
    return sharded


local_elements = local_tensor
"""The local elements behind a sharded parameter: a view of the shard, unless it was given other memory."""

_data_ptr = torch.Tensor.data_ptr


class _Specs(weakref.WeakValueDictionary[Any, RaggedSpec]):
    """The specs on the meshes of one process group."""

    # By the id of the mesh, which each spec keeps alive: meshes are equal if their ranks are, even if one belongs to
    # process groups that are gone. Weak: a mesh holds its process groups, which have connections and threads.


def sharded_specs(
    layout: FlatLayout, mesh: DataParallelMesh, dtype: torch.dtype, own: Sequence[DTensorSpec | None]
) -> list[RaggedSpec]:
    """How each parameter is sharded over ``mesh`` and, if it was a DTensor before, by its ``own`` placements. Equal
    specs are one object, so comparing them is fast."""
    known, specs = kept_for(mesh.shard_group, _Specs), []
    for param, placement, earlier in zip(layout.params, layout.placements, own, strict=True):
        whole, placements, shape = mesh.mesh, mesh.placements(placement), param.shape
        if earlier is not None:
            whole = mesh.beside(earlier.mesh)
            if layout.in_chunks and is_shard_of_rows(placement):  # chunks of the rows that tensor parallelism has left
                sizes = zip(earlier.placements, earlier.mesh.shape, strict=True)
                num_slices = prod([size for item, size in sizes if is_shard_of_rows(item)])
                placements = mesh.placements(rows_within(num_slices))
            placements, shape = (*placements, *earlier.placements), tuple(earlier.shape)
        key = (id(whole), placements, shape, dtype)
        spec = known.get(key)
        if spec is None:
            spec = known[key] = RaggedSpec.make(whole, placements, shape, dtype)
        specs.append(spec)
    return specs


def make_sharded_param(
    local: torch.Tensor, original: nn.Parameter, spec: RaggedSpec, codec: ParameterCodec
) -> nn.Parameter:
    """Make a sharded parameter over ``local``, a view of the shard, with the attributes that the user had set on
    ``original``."""
    tensor = codec.sharded(local, spec)
    # A new tensor needs no alias of itself, which is what nn.Parameter() would make.
    sharded = as_parameter(tensor, original.requires_grad)
    annotation = annotation_of(original)
    if annotation is not None:
        sharded.__dict__.update(annotation.attributes)
    copy_attributes(original, sharded, not_copied=class_attributes(original))
    if type(original) is not nn.Parameter and isinstance(original, nn.Parameter) and not is_wrapper(original):
        sharded.__dict__[ParamAttribute.CLASS] = type(original)
    return sharded


def class_attributes(param: torch.Tensor) -> Set[str]:
    """The attributes that a wrapper has from its class, among them the tensors inside, which must not outlive it."""
    if not is_wrapper(param) or isinstance(param, DTensor):
        return frozenset()
    from ...plugins.parameter_classes import context_of, inner_tensors, remade

    made = remade(type(param), inner_tensors(param), context_of(param), param.shape, param.stride())
    return vars(made).keys()


def copy_attributes(source: nn.Parameter, to: torch.Tensor, not_copied: Set[str] = frozenset()) -> None:
    """Copy the attributes that the user has set on ``source`` to another parameter, unless it has them."""
    for key, value in source.__dict__.items():
        if key not in NOT_COPIED and key not in not_copied:
            to.__dict__.setdefault(key, value)


def share_attributes(sharded: nn.Parameter, full: torch.Tensor) -> None:
    """Make the attributes of ``sharded`` those of ``full``, the same parameter, too: what is set on either, or deleted,
    changes both."""
    if full.__dict__.keys() <= {"_is_param"}:
        full.__dict__ = sharded.__dict__  # as ``swap_tensors()`` does
    else:
        # Its own class needs some of its attributes, so it gets copies instead.
        copy_attributes(sharded, full)


def restore_attributes(sharded: nn.Parameter, full: nn.Parameter) -> None:
    """Give a full parameter the original's attributes, and its class if that is the user's own."""
    share_attributes(sharded, full)
    cls = sharded.__dict__.get(ParamAttribute.CLASS)
    if cls is not None:
        full.__class__ = cls


def whole_like_original(sharded: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Like ``restore_attributes``, for a tensor that is part of an autograd graph."""
    cls = sharded.__dict__.get(ParamAttribute.CLASS)
    if cls is not None:
        whole = whole.as_subclass(cls)
    share_attributes(sharded, whole)
    return whole


NOT_COPIED = frozenset(
    {
        "_is_param",
        ParamAttribute.SHARDED,
        SHOWN_ATTRIBUTE,
        ParamAttribute.FORWARD_SPEC,
        ParamAttribute.MESH,
        ParamAttribute.DIM,
    }
)


def refuse_meta_content(sharded: nn.Parameter, source: Any, name: str) -> None:
    """Raise RuntimeError if ``load_state_dict()`` is given a plain tensor without values for a parameter."""
    if isinstance(source, torch.Tensor) and not isinstance(source, DTensor) and source.is_meta and not sharded.is_meta:
        raise MisuseRuntimeError(
            f"load_state_dict(): the tensor for the sharded parameter {name} of shape {tuple(sharded.shape)} is on the "
            "meta device, so it has no values. Give every rank the whole tensors; or, if only the first rank has them, "
            "call fsdp_compose.checkpoint.set_model_state_dict(model, state_dict, options=StateDictOptions("
            "full_state_dict=True, broadcast_from_rank0=True)) on all ranks"
        )


def check_content(sharded: nn.Parameter, source: Any, name: str) -> None:
    """Raise ValueError if ``take_content`` cannot take ``source``."""
    if not isinstance(source, torch.Tensor) or source.shape != sharded.shape:
        found = (
            type(source).__name__ if not isinstance(source, torch.Tensor) else f"tensor of shape {tuple(source.shape)}"
        )
        raise MisuseError(
            f"load_state_dict(assign=True): the sharded parameter {name} of shape {tuple(sharded.shape)} was given a "
            f"{found}: pass a tensor of its shape, whole and the same on every rank, or a DTensor"
        )


def take_content(sharded: nn.Parameter, source: torch.Tensor) -> None:
    """Give ``sharded`` the elements, dtype and memory of a tensor that would replace it; it keeps its identity and its
    attributes. Its gradient is dropped, as it would be with the parameter. Of a plain tensor, which is whole and the
    same on every rank, each rank copies its own elements.

    Ranks: if ``source`` is sharded in another way, all ranks of the mesh (it is redistributed).
    """
    assert isinstance(sharded, RaggedDTensor)
    with torch.no_grad():
        if sharded.is_composite:
            sharded.copy_(source)
            return
        if not isinstance(source, RaggedDTensor) or not source._spec.is_sharded_like(sharded._spec):
            source = distribute_ragged(source, sharded.device_mesh, sharded.placements, src_data_rank=None)
        fresh = nn.Parameter(source.detach(), requires_grad=sharded.requires_grad)
        set_local_tensor(fresh, local_tensor(source))
        sharded.grad = None
        torch.utils.swap_tensors(sharded, fresh)
        renew_hooks(sharded)
        sharded.__dict__ = fresh.__dict__  # its own again, which its unsharded parameter shares


def rebind_sharded_param(sharded: nn.Parameter, local: torch.Tensor, spec: RaggedSpec | None = None) -> None:
    """Make ``sharded``, the same object, a view of another shard of its dtype and device; with ``spec``, if given."""
    assert isinstance(sharded, RaggedDTensor)
    rebind(sharded, local, spec)


def inner_of_sharded_param(sharded: nn.Parameter) -> torch.Tensor:
    """All elements of ``sharded`` that the shard group has, outside autograd: the whole parameter or, if it was a
    DTensor before, what was local. Ranks: all ranks of the shard group."""
    return gather_local_shards(sharded.detach())  # type: ignore[arg-type]


class Snapshot:
    """Where the elements of some sharded parameters are."""

    __slots__ = ("_addresses", "_kinds", "_locals", "_params", "ids")

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self.ids = [*map(id, params)]
        # A sharded parameter that receives other memory gets another local tensor, and that tensor can be pointed
        # elsewhere too.
        self._locals = [*map(local_elements, params)]
        self._addresses = [*map(_data_ptr, self._locals)]
        self._kinds = self._present_kinds()

    def follow_addresses(self) -> None:
        """Record that their memory is elsewhere now, with the same elements."""
        self._addresses = [*map(_data_ptr, self._locals)]

    def _present_kinds(self) -> set[tuple[torch.dtype, torch.device]]:
        return {(sharded.dtype, sharded.device) for sharded in self._params}

    def has_locals(self) -> bool:
        """Whether the local tensors are the same objects."""
        # This tells even on a rank without elements, hence without addresses.
        return all(map(is_, map(local_elements, self._params), self._locals))

    def has_addresses(self) -> bool:
        """Whether their memory is still where it was (no ``module.to()``, ``to_empty()``, ``p.data = ...``)."""
        return [*map(_data_ptr, self._locals)] == self._addresses and self._present_kinds() == self._kinds


def make_gradient(local: torch.Tensor, sharded: nn.Parameter) -> torch.Tensor:
    """Make the tensor for ``sharded.grad``, over ``local``, a view of the flat gradient."""
    spec: RaggedSpec = sharded._spec  # type: ignore[attr-defined]
    gradient = RaggedDTensor(local, spec if spec.dtype == local.dtype else spec.with_dtype(local.dtype))
    return shown_on(sharded.device, gradient)


def shown_on(device: torch.device, gradient: DTensor) -> DTensor:
    """Wrap a gradient so that torch accepts it for a parameter on ``device``, wherever its elements are."""
    local = local_tensor(gradient)
    if local.device == device:
        return gradient
    # Only the wrapper claims the device; operations run where the elements are.
    nothing = torch.empty((), dtype=local.dtype, device=device).expand(local.shape)
    shown: DTensor = make_dtensor(type(gradient), nothing, dtensor_spec(gradient))
    set_local_tensor(shown, local)
    return shown


def is_sharded_like(gradient: torch.Tensor, sharded: nn.Parameter) -> bool:
    """Whether this rank's shard of ``gradient`` has the same elements as its shard of ``sharded``."""
    if not isinstance(sharded, RaggedDTensor):
        return True
    return isinstance(gradient, RaggedDTensor) and gradient._spec.is_sharded_like(sharded._spec)


def follow_layout(sharded: nn.Parameter) -> None:
    """Reshard a gradient that autograd produced for ``sharded`` before ``sharded`` was sharded again. Ranks: all of the
    mesh, if there is such a gradient."""
    gradient = sharded.grad
    if isinstance(gradient, RaggedDTensor) and not is_sharded_like(gradient, sharded):
        sharded.grad = like_sharded_param(gradient, sharded)


def like_sharded_param(gradient: torch.Tensor, sharded: nn.Parameter) -> torch.Tensor:
    """Copy a gradient that autograd has produced for ``sharded``; the copy is sharded like it.

    Ranks: if ``gradient`` is sharded in another way, all ranks of the mesh (it is redistributed).
    """
    if not isinstance(sharded, RaggedDTensor):
        return gradient.clone()
    with torch.no_grad():
        if is_sharded_like(gradient, sharded):
            return gradient.clone()
        return distribute_ragged(gradient, sharded.device_mesh, sharded.placements, src_data_rank=None)

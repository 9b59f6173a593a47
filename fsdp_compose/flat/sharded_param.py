"""The one factory of sharded faces: what users, optimizers and checkpoints see of a sharded parameter.

A face is a leaf ``nn.Parameter`` and a ``RaggedDTensor`` whose local tensor is a view of this rank's shard. The runtime
reads and writes shards and never calls an operation on a face, so what kind of tensor a face is can change here and
nowhere else.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._requirements import PLAIN_FACES
from .._torch import is_wrapper, set_local_tensor
from ..ragged import RaggedDTensor, RaggedShard, RaggedSpec, distribute_ragged
from .layout import FlatLayout

# Where a face remembers which subclass of nn.Parameter the original was an instance of.
_CLASS_ATTRIBUTE = "_fsdp_compose_class"
# Where an original parameter remembers the face that has taken its place.
FACE_ATTRIBUTE = "_fsdp_compose_face"


def face_of(param: torch.Tensor) -> torch.Tensor:
    """The sharded face that has taken the place of ``param``; ``param`` itself if none has."""
    face: torch.Tensor = param.__dict__.get(FACE_ATTRIBUTE, param)
    return face


def _itself(face: Any) -> Any:
    return face


face_local = _itself if PLAIN_FACES else attrgetter("_local_tensor")
"""The local elements behind a face: a view of the shard, unless somebody gave the face other memory."""

_data_ptr = torch.Tensor.data_ptr
# By process group, not by mesh: meshes are equal when their ranks are, also those of a process group that is gone. Each
# spec weakly: it knows its mesh, which knows the process group, and that has connections and threads.
_Specs = weakref.WeakValueDictionary[Any, RaggedSpec]
_specs: weakref.WeakKeyDictionary[dist.ProcessGroup, _Specs] = weakref.WeakKeyDictionary()


def face_spec(layout: FlatLayout, index: int, mesh: DeviceMesh, dtype: torch.dtype) -> RaggedSpec:
    """How parameter ``index`` is cut over ``mesh``; equal cuts are one object, so that comparing them is fast."""
    param, counts = layout.params[index], layout.counts(index)
    row = param.row_numel
    is_rows = param.row_aligned and bool(param.shape) and row > 0
    placement = RaggedShard(tuple([n // row for n in counts]) if is_rows else counts, flat=not is_rows)
    known = _specs.setdefault(mesh.get_group(), weakref.WeakValueDictionary())
    key = (placement, param.shape, dtype)
    spec = known.get(key)
    if spec is None:
        spec = known[key] = RaggedSpec.make(mesh, [placement], param.shape, dtype)
    return spec


def make_face(local: torch.Tensor, original: nn.Parameter, spec: RaggedSpec) -> nn.Parameter:
    """A sharded face over ``local``, a view of the shard, with the attributes the user had set on ``original``."""
    if PLAIN_FACES:
        face = nn.Parameter(local, requires_grad=original.requires_grad)
    else:
        face = nn.Parameter(RaggedDTensor(local, spec), requires_grad=original.requires_grad)
        set_local_tensor(face, local)  # type: ignore[arg-type]
    copy_attributes(original, face)
    if type(original) is not nn.Parameter and isinstance(original, nn.Parameter) and not is_wrapper(original):
        face.__dict__[_CLASS_ATTRIBUTE] = type(original)
    return face


def copy_attributes(source: nn.Parameter, to: nn.Parameter) -> None:
    """Give another parameter the attributes that the user has set on ``source``, if it lacks them."""
    for key, value in source.__dict__.items():
        if key not in _NOT_COPIED:
            to.__dict__.setdefault(key, value)


def dress(face: nn.Parameter, full: nn.Parameter) -> None:
    """Make a full parameter what the original was: its attributes, and its class if that is the user's own."""
    copy_attributes(face, full)
    cls = face.__dict__.get(_CLASS_ATTRIBUTE)
    if cls is not None:
        full.__class__ = cls


def whole_like_original(face: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """As ``dress``, for a tensor that autograd knows how it was made."""
    cls = face.__dict__.get(_CLASS_ATTRIBUTE)
    if cls is not None:
        whole = whole.as_subclass(cls)
    copy_attributes(face, whole)  # type: ignore[arg-type]
    return whole


_NOT_COPIED = {"_is_param", FACE_ATTRIBUTE}


def check_content(face: nn.Parameter, source: Any, name: str) -> None:
    """Raise ValueError if ``take_content`` cannot take ``source``."""
    is_number = (
        isinstance(source, torch.Tensor) and not source.dim()
    )  # which every rank has: torch's setters shard none
    if not (isinstance(source, DTensor) or is_number) or source.shape != face.shape:
        kind = "DTensor" if isinstance(source, DTensor) else "plain tensor"
        raise ValueError(
            f"load_state_dict(assign=True): the sharded parameter {name} of shape {tuple(face.shape)} was given a "
            f"{kind} of shape {tuple(source.shape)}: give it a DTensor of its shape (see distribute_ragged()), or "
            "load full tensors with torch.distributed.checkpoint.state_dict.set_model_state_dict()"
        )


def take_content(face: nn.Parameter, source: torch.Tensor) -> None:
    """Give ``face`` the elements, dtype and memory of a tensor that would take its place; it keeps its identity and its
    attributes. Its gradient is dropped, as it would be with the parameter.

    Ranks: if ``source`` is cut in another way, all ranks of the mesh (it is redistributed).
    """
    assert isinstance(face, RaggedDTensor)
    with torch.no_grad():
        if not isinstance(source, RaggedDTensor) or not source._spec.cuts_like(face._spec):
            source = distribute_ragged(source, face.device_mesh, face.placements, src_data_rank=None)
        fresh = nn.Parameter(source.detach(), requires_grad=face.requires_grad)
        set_local_tensor(fresh, source._local_tensor)  # type: ignore[arg-type]
        face.grad = None
        torch.utils.swap_tensors(face, fresh)
        copy_attributes(fresh, face)


def rebind_face(face: nn.Parameter, local: torch.Tensor, spec: RaggedSpec | None = None) -> None:
    """Make ``face`` a view of another shard of its dtype and device, cut by ``spec`` if given, keeping the object."""
    if PLAIN_FACES:
        face.data = local
        return
    set_local_tensor(face, local)  # type: ignore[arg-type]
    if spec is not None:
        face._spec = spec  # type: ignore[attr-defined]


def face_whole(face: nn.Parameter) -> torch.Tensor:
    """All elements of ``face``, outside autograd. Ranks: all ranks of the mesh."""
    return face.detach().full_tensor()  # type: ignore[attr-defined]


def face_memory(faces: Sequence[nn.Parameter]) -> tuple[list[int], set[tuple[torch.dtype, torch.device]]]:
    """Where the faces' elements are: differs from an earlier answer when somebody gave a face other memory
    (``module.to()``, ``to_empty()``, ``p.data = ...``). Empty faces have no address; their kind must do."""
    return [*map(_data_ptr, map(face_local, faces))], {(face.dtype, face.device) for face in faces}


def make_gradient(local: torch.Tensor, face: nn.Parameter) -> torch.Tensor:
    """What ``face.grad`` holds, over ``local``, a view of the flat gradient."""
    if PLAIN_FACES:
        return local
    return RaggedDTensor(local, face._spec)  # type: ignore[attr-defined]


def is_sharded_like(gradient: torch.Tensor, face: nn.Parameter) -> bool:
    """Whether this rank has the elements of ``gradient`` that it has of ``face``."""
    if not isinstance(face, RaggedDTensor):
        return True
    return isinstance(gradient, RaggedDTensor) and gradient._spec.cuts_like(face._spec)


def like_face(gradient: torch.Tensor, face: nn.Parameter) -> torch.Tensor:
    """A copy of a gradient that autograd has brought to ``face``, cut like the face.

    Ranks: if ``gradient`` is cut in another way, all ranks of the mesh (it is redistributed).
    """
    if not isinstance(face, RaggedDTensor):
        return gradient.clone()
    with torch.no_grad():
        if is_sharded_like(gradient, face):
            return gradient.clone()
        return distribute_ragged(gradient, face.device_mesh, face.placements, src_data_rank=None)

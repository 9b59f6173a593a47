"""``RaggedDTensor``, a ``DTensor`` sharded by a ``RaggedShard``: changes of layout, serialization, checkpoint hooks.

Users, optimizers and checkpoints see a group's parameters as this class. No operation on one passes it to stock code,
whose sharding propagation rebuilds even placements: the class owns its dispatch, and the table of handlers, which
``ops`` fills, decides. Nothing here knows about groups or training.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, repeat
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ..._arguments import checked
from ..._torch import (
    DTensorSpec,
    TensorMeta,
    admit_placements,
    admit_several_chunks,
    allow_in_foreach,
    local_tensor,
    make_dtensor,
    set_local_tensor,
)
from ...errors import MisuseRuntimeError
from ..comm import Label, device_for, transport_of
from .gather import DifferentiableGather, refuse_transforms
from .ownership import OWNER_ATTRIBUTE, OwnedDTensor, note_write_of_all_ranks, parameter_owners, requires_grad_writes
from .placement import EVEN_CHUNKS, RaggedShard, RaggedSpec, stacked, unstacked


class RaggedDTensor(OwnedDTensor):
    """A tensor whose elements are split over the ranks, one contiguous range each; see ``RaggedShard``.

    Every operation either returns the value that it would return on the full tensor, or raises. Element-wise
    operations, ``foreach`` and fused optimizer kernels, copies and conversions run on the local shards; full reductions
    (norms, sums) communicate once and are complete; slices of dim 0 and reshapes are views; everything else
    all-gathers, with one warning per operation. Operations that would change the shape or the memory of a
    ``RaggedDTensor`` raise.

    Ranks: all ranks of the mesh must call operations that communicate, as with any DTensor.

    Build one with ``RaggedDTensor.from_local`` or ``distribute_ragged``.
    """

    __module__ = "fsdp_compose"  # what pickles name, wherever this file lies
    # No __slots__: torch's checkpoint staging copies the attributes that type(tensor).__slots__ names.

    _local_tensor: torch.Tensor
    _spec: RaggedSpec
    is_part = False  # a view of a part of another one

    @staticmethod
    def __new__(
        cls: type[RaggedDTensor], local: torch.Tensor, spec: RaggedSpec, *, requires_grad: bool = False
    ) -> RaggedDTensor:
        return make_dtensor(cls, local, spec, requires_grad)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Does nothing: ``__new__`` has done everything."""

    @staticmethod
    def _from_elements(
        local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
    ) -> RaggedDTensor:
        """Like ``from_local``, of elements in any shape, which are as many as the placements say."""
        spec = RaggedSpec.make(mesh, placements, shape, local.dtype)
        return RaggedDTensor(local.reshape(spec.local_shape), spec)

    @staticmethod
    def from_local(  # type: ignore[override]
        local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, shape: Sequence[int]
    ) -> RaggedDTensor:
        """Wrap this rank's local shard in a ``RaggedDTensor`` that shares its memory. No communication.

        Args:
            local: this rank's local shard: contiguous, with the shape that the ``RaggedShard`` gives it.
            mesh: the ranks.
            placements: one per mesh dimension, exactly one of them a ``RaggedShard``.
            shape: the shape of the whole tensor.

        Raises:
            ValueError: the placements do not fit the mesh or the shape, or ``local`` does not fit them.
        """
        spec = RaggedSpec.make(mesh, placements, shape, local.dtype)
        if tuple(local.shape) != spec.local_shape or not local.is_contiguous():
            raise ValueError(
                f"RaggedDTensor.from_local(): got a local tensor of shape {tuple(local.shape)}"
                f"{'' if local.is_contiguous() else ' that is not contiguous'}; a tensor of shape {tuple(shape)} "
                f"placed {list(placements)} has a contiguous local tensor of shape {spec.local_shape} on rank "
                f"{spec.rank}"
            )
        return RaggedDTensor(local, spec)

    # ---- Movement

    def all_gather(self) -> DTensor:
        """All-gather the local shards into a plain DTensor, replicated over the ragged mesh dimension. Differentiable:
        see ``full_tensor``.

        Ranks: all ranks of the ragged mesh dimension.
        """
        inner = self._gather_as_parameter()
        return _gather(self) if inner is None else self.around(inner)

    def around(self, inner: torch.Tensor) -> DTensor:
        """Wrap the inner tensor, complete over the ragged mesh dimension, in a plain DTensor; differentiable."""
        spec = self._spec
        return DTensor.from_local(
            inner, spec.mesh, spec.gathered_placements, run_check=False, shape=self.shape, stride=self.stride()
        )

    def _gather_as_parameter(self) -> torch.Tensor | None:
        """Gather the inner tensor, if this is a parameter of a group and autograd is recording."""
        if not (self.requires_grad and self.is_leaf and torch.is_grad_enabled()):
            return None
        owner = parameter_owners.get(id(self))
        return None if owner is None else owner.gather(self)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor, on every rank. Ranks: all ranks of the mesh.

        Differentiable: each rank computes with the whole tensor on its own data, and the gradient of the sharded tensor
        is the average over the ranks, as everywhere in data-parallel training. (A loss term that is the same on every
        rank has equal gradients, which the average leaves unchanged.) The gradient of a ``fully_shard`` group's
        parameter is reduced together with the group's other gradients. ``grad_placements`` overrides this, as for any
        DTensor: with ``[Replicate()]`` the gradient is assumed to be the same on every rank; with ``[Partial()]`` the
        ranks' gradients are added.
        """
        if grad_placements is not None:
            return _gather(self, averages=False).full_tensor(grad_placements=grad_placements)
        inner = self._gather_as_parameter()
        if inner is None:
            return self.all_gather().full_tensor()
        return inner if self._spec.is_only_ragged else self.around(inner).full_tensor()

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **kwargs: Any
    ) -> DTensor:
        """Return the tensor in another layout: ``Replicate``, ``Shard``, or another ``RaggedShard``.

        For the way back, from a plain DTensor, use ``distribute_ragged``. Ranks: all ranks of the mesh.
        """
        if placements is None:
            raise ValueError("RaggedDTensor.redistribute(): expected placements")
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError("RaggedDTensor.redistribute(): moving to another mesh is not supported")
        if tuple(placements) == self._spec.placements:
            return self
        if any(isinstance(item, RaggedShard) for item in placements):
            return distribute_ragged(self, placements=placements)
        return self.all_gather().redistribute(placements=placements, **kwargs)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's local shard, sharing memory. Differentiable: its gradient arrives as a
        ``RaggedDTensor``."""
        if torch.is_grad_enabled() and self.requires_grad:
            result: torch.Tensor = _ToLocal.apply(self)
            return result
        return local_tensor(self)

    # ---- Views with gradients

    # Autograd fills the gradients of pieces that got none with plain zeros, and leaves indices as they are; stock
    # DTensor mixes with neither. So each piece is a view of its own, and indices become DTensors.

    def unbind(self, dim: int = 0) -> tuple[torch.Tensor, ...]:
        if not (torch.is_grad_enabled() and self.requires_grad):
            return super().unbind(dim)
        return tuple(self.select(dim, i) for i in range(self.shape[dim]))

    def split(self, split_size: Any, dim: int = 0) -> tuple[torch.Tensor, ...]:
        views = super().split(split_size, dim)
        if not (torch.is_grad_enabled() and self.requires_grad):
            return views
        bounds = accumulate([view.shape[dim] for view in views], initial=0)
        return tuple(self.narrow(dim, a, b - a) for a, b in pairwise(bounds))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
        if chunks < 1 or not (torch.is_grad_enabled() and self.requires_grad and self.shape[dim]):
            return super().chunk(chunks, dim)
        return self.split(-(-self.shape[dim] // chunks), dim)

    def __getitem__(self, indices: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and self.requires_grad:
            mesh, given = self.device_mesh, indices if isinstance(indices, tuple) else (indices,)
            replicate = partial(
                DTensor.from_local, device_mesh=mesh, placements=[Replicate()] * mesh.ndim, run_check=False
            )
            indices = tuple(replicate(item) if type(item) is torch.Tensor else item for item in given)
        return super().__getitem__(indices)

    # ---- Attributes

    def _set_requires_grad(self, value: bool) -> None:
        requires_grad_writes.count += 1
        torch.Tensor.requires_grad.__set__(self, value)  # type: ignore[attr-defined]

    # Reading runs no Python code.
    requires_grad = property(torch.Tensor.requires_grad.__get__, _set_requires_grad)  # type: ignore[attr-defined]

    def requires_grad_(self, requires_grad: bool = True) -> RaggedDTensor:
        """Set ``requires_grad``, in place."""
        self.requires_grad = requires_grad
        return self

    def detach_(self) -> RaggedDTensor:
        """Detach this tensor from its graph, in place; a leaf then no longer requires grad."""
        requires_grad_writes.count += 1
        return super().detach_()  # type: ignore[return-value]

    @property
    def data(self) -> torch.Tensor:
        """The tensor outside autograd, sharing memory. You can assign an equally sharded ``RaggedDTensor``, or a plain
        tensor with the whole values, the same on every rank: each rank copies its local shard from it. Inside a forward
        of the model, the assigned values are copied into the parameter's own memory, so the forward continues with
        them."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if type(value) is torch.Tensor and value.shape == self.shape and value.layout == torch.strided:
            value = RaggedDTensor(shard_whole(value, self._spec), self._spec.with_dtype(value.dtype))
        if not isinstance(value, RaggedDTensor) or not self._spec.is_sharded_like(value._spec):
            layout = value.placements if isinstance(value, DTensor) else type(value).__name__
            raise TypeError(
                f".data of a sharded parameter of shape {tuple(self.shape)}, placed {list(self.placements)}, cannot "
                f"be set to a {tuple(value.shape)} tensor ({layout}): use copy_() on the parameter under "
                "torch.no_grad(), or assign a tensor made by distribute_ragged()"
            )
        if value.dtype != self.dtype or value.device != self.device:
            raise TypeError(
                f".data of a sharded parameter ({self.dtype}, {self.device}) cannot be set to {value.dtype} on "
                f"{value.device}: convert the module with module.to()"
            )
        owner = parameter_owners.get(id(self))
        # Where the memory of the parameters is, is not checked again until the next forward.
        if owner is not None and owner.is_forward_running():
            with torch.no_grad():
                self.copy_(value)
            return
        own, given = (tensor.__dict__.get(OWNER_ATTRIBUTE) for tensor in (self, value))
        if own is not None and given is not None and given is not own:
            # The next forward would copy them into a flat parameter of its own: what is written to one afterwards, the
            # other would not have.
            raise MisuseRuntimeError(
                f".data of the parameter {own[1]} of the fully_shard group {own[0]} cannot be set to that of "
                f"{given[1]} of the group {given[0]}: sharded parameters cannot share memory. Copy the values instead: "
                "target.copy_(source) under torch.no_grad(), or target.data = source.data.clone()"
            )
        set_local_tensor(self, local_tensor(value))

    def detach(self) -> RaggedDTensor:
        """Return the tensor outside autograd, sharing memory. Errors about a detached parameter still name the
        parameter."""
        result: RaggedDTensor = super().detach()  # type: ignore[assignment]
        owner = self.__dict__.get(OWNER_ATTRIBUTE)
        if owner is not None:
            result.__dict__[OWNER_ATTRIBUTE] = owner
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"RaggedDTensor(shape={tuple(self.shape)}, placements={list(self.placements)}, rank {self._spec.rank} "
            f"holds {local_tensor(self)})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedDTensor:
        """Copy like any tensor; for a parameter, like ``nn.Parameter``, without its gradient."""
        if not isinstance(self, torch.nn.Parameter):
            return super().__deepcopy__(memo)
        twin: Any = memo.get(id(self))
        if twin is None:
            local = local_tensor(self).detach().clone()
            twin = torch.nn.Parameter(RaggedDTensor(local, self._spec), requires_grad=self.requires_grad)
            set_local_tensor(twin, local)
            memo[id(self)] = twin
            for key, value in self.__dict__.items():
                twin.__dict__.setdefault(key, copy.deepcopy(value, memo))
        return twin

    # ---- How ``torch.distributed.checkpoint`` saves and loads this rank's elements: as boxes

    def _chunks(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """This rank's elements as boxes of the whole tensor, each with a view of the local memory."""
        start, _ = self._spec.element_range
        local = local_tensor(self).detach().view(-1)
        found = []
        for box in self._spec.boxes():
            view = local[box.start - start : box.start - start + prod(box.sizes)].view(box.sizes)
            for whole, place in self._spec.boxes_of_whole(box):
                chunk = ChunkStorageMetadata(offsets=torch.Size(whole.offsets), sizes=torch.Size(whole.sizes))
                # Classes of other packages need not have an index that takes everything.
                found.append((chunk, view if whole.sizes == box.sizes else view[place]))
        return found

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local_tensor(self))
        if hasattr(properties, "strides"):  # since torch 2.15: the strides of the whole tensor
            whole: dict[str, Any] = {"strides": self.stride()}
            properties = replace(properties, **whole)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk, _ in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # torch.distributed.checkpoint calls this on every rank, even one that has nothing to load, right before it
        # writes to the local memory.
        note_write_of_all_ranks(local_tensor(self))
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for chunk, view in self._chunks():
            if chunk.offsets == index.offset:
                return view
        raise ValueError(f"rank {self._spec.rank} holds no part of {index.fqn} at {index.offset}")

    # ---- torch.compile

    def _stable_hash_for_caching(self) -> str:
        """The key of this tensor in the caches of ``torch.compile``."""
        # The ranks of a host share these caches, and so do runs with other numbers of ranks. The key of a DTensor is
        # its layout, which is the same on every rank. But the code compiled for this tensor depends on this rank's
        # place in the mesh and on its local tensor: with the code of another rank, it would write outside its memory.
        local, place = local_tensor(self), self._spec.mesh.get_coordinate()
        memory = tuple(local.shape), tuple(local.stride()), local.storage_offset(), local.dtype, local.device
        return f"{super()._stable_hash_for_caching()} {type(self).__qualname__} {place} {memory}"

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> RaggedDTensor:
        placements, meta, _, requires_grad = context
        spec = RaggedSpec(inner["device_mesh"], placements, TensorMeta(outer_size, outer_stride, meta.dtype))
        return RaggedDTensor(inner["_local_tensor"], spec, requires_grad=requires_grad)

    # ---- Dispatch

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return handlers[func](func, args, kwargs or {})


# The base class's own function, as an attribute of this class: torch looks it up on most accesses, by a name that the
# interpreter's method cache does not hold, and so would search every class before the one that has it.
RaggedDTensor.__torch_function__ = DTensor.__torch_function__  # type: ignore[method-assign]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Handlers(dict[Any, Handler]):
    """The handler of each operator seen so far. ``choose``, which ``ops`` sets, chooses that of a new one."""

    choose: Callable[[Any], Handler]

    def __missing__(self, func: Any) -> Handler:
        handler = self[func] = self.choose(func)
        return handler


handlers = _Handlers()

# ---- Movement between layouts


@checked()
def distribute_ragged(
    tensor: torch.Tensor,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> RaggedDTensor:
    """Shard a tensor by a ``RaggedShard``: ``distribute_tensor`` and ``redistribute`` for ragged layouts.

    Ranks: all ranks of the mesh.

    Args:
        tensor: a plain tensor (the whole one; the values of ``src_data_rank`` are used), or a DTensor in any layout.
        mesh: the ranks; default for a DTensor: its mesh.
        placements: one per mesh dimension, exactly one of them a ``RaggedShard``.
        src_data_rank: as in ``torch.distributed.tensor.distribute_tensor``: ``None`` means that every rank has the same
            values, and nothing is communicated.

    Returns:
        A detached ``RaggedDTensor`` with memory of its own.

    Raises:
        ValueError: the placements do not fit the mesh or the shape.
        NotImplementedError: the mesh of a DTensor has other ranks.
    """
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh if mesh is None else mesh
            if mesh != tensor.device_mesh:
                ranks = [sorted(item.mesh.flatten().tolist()) for item in (tensor.device_mesh, mesh)]
                if ranks[0] != ranks[1]:
                    raise NotImplementedError(
                        f"distribute_ragged(): the tensor is on the ranks {ranks[0]}, and the mesh has the ranks "
                        f"{ranks[1]}; moving to other ranks is not supported"
                    )
                tensor, src_data_rank = tensor.full_tensor(), None
        if mesh is None or placements is None:
            raise ValueError("distribute_ragged(): expected a mesh and placements")
        spec = RaggedSpec.make(mesh, placements, tensor.shape, tensor.dtype)
        if isinstance(tensor, RaggedDTensor):
            if tensor._spec.is_sharded_like(spec):
                return RaggedDTensor(local_tensor(tensor).clone(), spec)
            tensor = tensor.all_gather()
        elif isinstance(tensor, DTensor) and tensor.placements == spec.placements:  # even chunks
            return RaggedDTensor(local_tensor(tensor).detach().clone().contiguous(), spec)
        if not isinstance(tensor, DTensor):
            # Copied first: distribute_tensor broadcasts into the memory that it is given.
            whole = tensor.detach() if src_data_rank is None else tensor.detach().clone()
            tensor = distribute_tensor(whole, mesh, spec.gathered_placements, src_data_rank=src_data_rank)
        else:
            tensor = tensor.redistribute(placements=spec.gathered_placements)
        return RaggedDTensor(shard_inner(local_tensor(tensor), spec), spec)


def is_alike(tensor: torch.Tensor, spec: RaggedSpec) -> bool:
    """Whether a tensor is sharded as ``spec`` says; a stock DTensor can be, in even chunks."""
    if type(tensor) is RaggedDTensor:
        return tensor._spec.is_sharded_like(spec)
    if type(tensor) is not DTensor or not spec.is_even or tensor.shape != spec.shape:
        return False
    return tensor.placements == spec.placements and tensor.device_mesh == spec.mesh


def make_view(local: torch.Tensor, spec: RaggedSpec, is_part: bool) -> RaggedDTensor:
    """Make a view of another ragged tensor, over ``local``. ``is_part``: it views only part of that tensor."""
    view = RaggedDTensor(local, spec)
    view.is_part = is_part
    return view


def rebind(tensor: RaggedDTensor, local: torch.Tensor, spec: RaggedSpec | None = None) -> None:
    """Rebind ``tensor``, the same object, to ``local``, and to ``spec`` if one is given."""
    set_local_tensor(tensor, local)
    if spec is not None:
        tensor._spec = spec.left_partial if tensor._spec.leaves_partial else spec


def shard_inner(inner: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
    """Copy this rank's local shard out of the inner tensor."""
    return local_shard_of(inner.detach(), spec).clone()


def local_shard_of(inner: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
    """This rank's local shard of the inner tensor, a view if possible."""
    (start, stop), num_ranks = spec.element_range, spec.mesh.size(spec.ragged_dim)
    return stacked(inner, spec.even_dim, num_ranks)[start:stop].view(spec.local_shape)


def shard_whole(whole: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
    """Copy this rank's local shard out of the whole tensor."""
    return shard_inner(inner_of_whole(whole, spec), spec)


def inner_of_whole(whole: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
    """What of the whole tensor the ``RaggedShard`` shards; a view, unless it lies in strides."""
    for dim, runs in enumerate(spec.inner_runs):
        views = [whole.narrow(dim, *run) for run in runs]
        whole = views[0] if len(views) == 1 else torch.cat(views, dim)
    return whole


_LABEL = Label(["a RaggedDTensor"])


def gather_local_shards(tensor: RaggedDTensor) -> torch.Tensor:
    """Gather the inner tensor from the local shards of all ranks of the ragged mesh dimension."""
    spec, local = tensor._spec, local_tensor(tensor)
    rank, group, shape = spec.rank, spec.group, spec.inner_shape
    ranges = spec.ragged.element_ranges(spec.stacked_shape)
    home, local = local.device, local.to(device_for(group, local.device))
    flat = local.new_empty(prod(shape))
    if len(ranges) == 1 or local.device.type == "meta":
        flat[slice(*ranges[rank])] = local.reshape(-1)
    else:
        transport_of(group, local.device).gather(flat, local.reshape(-1), ranges, True, _LABEL)
    return unstacked(flat.to(home), shape, spec.even_dim, len(ranges))


def gathered(tensor: RaggedDTensor) -> DTensor:
    """Like ``all_gather``, but below autograd."""
    spec = tensor._spec
    plain = DTensorSpec(spec.mesh, spec.gathered_placements, spec.tensor_meta)
    return make_dtensor(DTensor, gather_local_shards(tensor), plain)


@dataclass(frozen=True)
class _RaggedGather(DifferentiableGather):
    """Gathers a tensor with these placements. ``averages``: each rank has a gradient of its own; otherwise it is the
    same on every rank."""

    placements: Sequence[Placement]
    averages: bool

    def all_gather(self, sharded: Sequence[RaggedDTensor]) -> list[torch.Tensor]:
        return [*map(gathered, sharded)]

    def reduce_scatter(self, grads: Sequence[DTensor]) -> list[torch.Tensor]:
        averages = map(averaged, grads) if self.averages else grads
        return [distribute_ragged(grad, placements=self.placements) for grad in averages]

    def gather_again(self, grads: Sequence[Any]) -> Any:
        return _RaggedGather(self.placements, True).apply(grads)


def _gather(tensor: RaggedDTensor, averages: bool = True) -> DTensor:
    """Gather a ragged tensor, differentiably."""
    refuse_transforms()
    (whole,) = _RaggedGather(tensor._spec.placements, averages).apply([tensor])
    result: DTensor = whole
    return result


def _scatter(whole: DTensor, placements: Sequence[Placement], averages: bool) -> RaggedDTensor:
    """Shard a tensor, differentiably; with ``averages``, the average of what the ranks have."""
    refuse_transforms()
    (sharded,) = _RaggedGather(placements, averages).deliver([whole])
    assert isinstance(sharded, RaggedDTensor)
    return sharded


def averaged(grad: DTensor) -> Any:
    """Average, over the ranks, a gradient that each of them has computed by itself; in fp32 if its dtype is shorter."""
    placements = [Partial("avg") if item.is_replicate() else item for item in grad.placements]
    local = local_tensor(grad)
    if local.dtype.itemsize == 2:
        local = local.float()
    each = DTensor.from_local(
        local, grad.device_mesh, placements, run_check=False, shape=grad.shape, stride=grad.stride()
    )
    return each.redistribute(placements=grad.placements).to(grad.dtype)


def scatter_average(grad: torch.Tensor, like: RaggedDTensor) -> RaggedDTensor:
    """Average gradients of the inner tensor over the ranks, and shard the result like a ragged tensor. Ranks: all ranks
    of the mesh."""
    return _scatter(like.around(grad), like._spec.placements, averages=True)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        local = local_tensor(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RaggedDTensor:
        return RaggedDTensor(grad.contiguous(), ctx.spec.with_dtype(grad.dtype))


def inference_mode_of(tensor: torch.Tensor) -> Any:
    """A context for making a view of ``tensor``: a view of an ordinary tensor must not be an inference tensor."""
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return torch.inference_mode(tensor.is_inference())


allow_in_foreach(RaggedDTensor)


# ---- ``RaggedShard`` placements passed to torch's own functions: ``DTensor.from_local``, ``distribute_tensor`` and the
# setters of ``torch.distributed.checkpoint.state_dict`` return a ``RaggedDTensor``.
#
# Stock DTensor refuses such a placement, or mistakes it for an even ``Shard``; but code that passes
# ``parameter.placements`` must get exactly that layout.


def _is_ours(placements: Any) -> bool:
    # hot: torch asks at each of its own from_local() calls
    return any(map(isinstance, placements, repeat(RaggedShard)))


def _from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None
) -> torch.Tensor:
    """Implements ``DTensor.from_local``, below autograd."""
    spec = RaggedSpec.make(mesh, placements, _whole_shape(local, placements) if shape is None else shape, local.dtype)
    if tuple(local.shape) != spec.local_shape:
        raise ValueError(
            f"DTensor.from_local(): got a local tensor of shape {tuple(local.shape)}; a tensor of shape "
            f"{tuple(spec.shape)} placed {list(placements)} has a local tensor of shape {spec.local_shape} on rank "
            f"{spec.rank}. {EVEN_CHUNKS}"
        )
    # Contiguous, like everything that a RaggedDTensor holds; and a fresh tensor, which autograd requires.
    local = local.contiguous()
    return RaggedDTensor(local.view_as(local), spec, requires_grad=local.requires_grad)


def _whole_shape(local: torch.Tensor, placements: Sequence[Placement]) -> Sequence[int]:
    """The shape of the whole tensor: from the rows, or from the tensor whose placements these are.

    Raises:
        ValueError: neither is known.
    """
    ragged = next(item for item in placements if isinstance(item, RaggedShard))
    if not ragged.flat and all(item is ragged or item.is_replicate() for item in placements):
        return (ragged.num_placed, *local.shape[1:])
    if ragged.of_shape is None:
        raise ValueError(
            f"DTensor.from_local(): the placements {list(placements)} do not determine the shape of the whole tensor: "
            "pass the whole tensor's shape= and stride="
        )
    return ragged.of_shape


def _as_placed(grad: DTensor, placements: Sequence[Placement]) -> DTensor:
    if grad.placements == tuple(placements):
        return grad
    return distribute_ragged(grad, placements=placements)


def _distribute(
    tensor: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Implements ``distribute_tensor``."""
    if isinstance(tensor, RaggedDTensor) and not _is_ours(placements):
        _, fqn = tensor.__dict__.get(OWNER_ATTRIBUTE, ("", ""))
        raise ValueError(
            f"distribute_tensor(): {f'the parameter {fqn}' if fqn else 'the tensor'} is already sharded, placed "
            f"{list(tensor.placements)}, and cannot also be placed {list(placements)}: call parallelize_module() "
            "before fully_shard(); to change the layout of a sharded tensor, use redistribute()"
        )
    if not tensor.is_leaf:
        raise RuntimeError("distribute_tensor(): expected a leaf tensor, got the result of an operation")
    if isinstance(tensor, DTensor):
        if tensor.placements != tuple(placements) or (mesh is not None and tensor.device_mesh != mesh):
            raise ValueError(
                f"distribute_tensor(): got a DTensor placed {list(tensor.placements)}: use redistribute(), or "
                f"distribute_ragged(), to place it {list(placements)}"
            )
        return tensor
    if mesh is not None and tensor.device.type != mesh.device_type and not tensor.is_meta:
        tensor = tensor.detach().to(mesh.device_type).requires_grad_(tensor.requires_grad)
    made = distribute_ragged(tensor, mesh, placements, src_data_rank=src_data_rank)
    made.requires_grad_(tensor.requires_grad)
    return made


def _fill(sharded: RaggedDTensor, whole: torch.Tensor) -> RaggedDTensor:
    """Convert a whole tensor to the layout of a sharded one: in its memory, or in new memory if that one is on the meta
    device."""
    spec = sharded._spec
    if tuple(whole.shape) != tuple(spec.shape):
        raise ValueError(
            f"got a tensor of shape {tuple(whole.shape)} for a sharded tensor of shape {tuple(spec.shape)}"
        )
    local = shard_whole(whole.detach(), spec)
    if sharded.is_meta:
        return RaggedDTensor(local, spec.with_dtype(whole.dtype))
    assert local.numel() == prod(spec.local_shape)
    sharded.to_local().copy_(local)
    return sharded


def _redistribute(tensor: DTensor, mesh: DeviceMesh | None, placements: Sequence[Placement], **options: Any) -> DTensor:
    """Implements ``DTensor.redistribute`` for a tensor without a ``RaggedShard``. Differentiable."""
    gathered_placements = [Replicate() if isinstance(item, RaggedShard) else item for item in placements]
    return _scatter(tensor.redistribute(mesh, gathered_placements, **options), placements, averages=False)


admit_several_chunks(lambda item: isinstance(item, RaggedDTensor) and item._spec.mesh.size() > 1)
admit_placements(_is_ours, _from_local, _as_placed, _distribute, _fill, _redistribute)

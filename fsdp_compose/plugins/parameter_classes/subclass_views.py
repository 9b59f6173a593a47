"""Sharded tensors whose local tensor (``_local_tensor``) looks to others like an instance of a user's class, over the
same memory, so functions that look for such an instance, and set attributes on it, find one. This package itself
computes with the plain local tensor, from ``local_tensor()``.

There are two kinds. In a ``ClassedDTensor``, the class has its elements in one tensor of its own shape, and every
operation is that of the elements. In a ``CompositeDTensor``, the class has several tensors, maybe of other shapes; its
plain local tensor holds their bytes, one after the other. Element-wise operations are those of the class, on an
instance over each rank's rows, if these are all that the class needs: so optimizers can train it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..._torch import allow_in_foreach, is_swapping_tensors, local_tensor, make_dtensor, set_local_tensor
from ...core.ragged import OWNER_ATTRIBUTE, SHOWN_ATTRIBUTE, RaggedDTensor, RaggedSpec, note_write_of_all_ranks
from ...core.ragged.ops import choose
from ...core.ragged.ops.operands import is_tensors, operand, pick, tensors_in, wrap_local_shard, written
from ...core.ragged.ops.pointwise import divide, per_element, pointwise, random
from .parts import Parts, common_tensor

aten = torch.ops.aten


@dataclass(slots=True, eq=False)
class _Shown:
    """The instance that stands for a local tensor; made again when the local tensor is replaced."""

    local_class: Any  # its ``over`` makes the instance; of a composite tensor, its ``Parts``
    # torch.distributed.checkpoint has read the attribute, in the way in which it also finds out where to write
    is_read: bool = False
    local: torch.Tensor | None = None
    made: Any = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Shown:
        return _Shown(self.local_class)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a sharded tensor whose local tensor is shown as an instance of its class cannot be pickled: pickle "
            ".detach()"
        )

    def instance(self, local: torch.Tensor) -> Any:
        if local is not self.local:
            with torch.no_grad():
                self.made = self.local_class.over(local.detach())
            self.local = local
        return self.made


def _shown_local(tensor: torch.Tensor) -> Any:
    """The local tensor as other code sees it. (``module.to()`` exchanges attributes by name, after the class.)"""
    local = local_tensor(tensor)
    return local if is_swapping_tensors() else shown_by(tensor).instance(local)


def shown_by(tensor: torch.Tensor) -> _Shown:
    """How a tensor shows its local tensor."""
    shown: _Shown = tensor.__dict__[SHOWN_ATTRIBUTE]
    return shown


_LOCAL_TENSOR = property(_shown_local, set_local_tensor)  # replaces the attribute of a DTensor


class ClassedDTensor(RaggedDTensor):
    """A sharded tensor whose ``_local_tensor`` is an instance of a class; made by ``show_as``."""

    __module__ = "fsdp_compose"

    _local_tensor = _LOCAL_TENSOR

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if CompositeDTensor in types:
            return CompositeDTensor.__torch_dispatch__(func, types, args, kwargs)
        kwargs = {key: _plain(value) for key, value in (kwargs or {}).items()}
        return RaggedDTensor.__torch_dispatch__(func, types, _plain(args), kwargs)


def _plain(value: Any) -> Any:
    """Remove the class, also inside lists."""
    if isinstance(value, ClassedDTensor):
        plain = RaggedDTensor(local_tensor(value), value._spec)
        owner = value.__dict__.get(OWNER_ATTRIBUTE)
        if owner is not None:
            plain.__dict__[OWNER_ATTRIBUTE] = owner
        return plain
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def show_as(tensor: torch.Tensor, local_class: Any) -> None:
    """Make a sharded tensor, the same object, show its local tensor by ``local_class.over()`` from now on; a composite
    one always does."""
    if not isinstance(tensor, RaggedDTensor) or isinstance(tensor, CompositeDTensor):
        return
    shown = tensor.__dict__.get(SHOWN_ATTRIBUTE)
    if shown is None or shown.local_class is not local_class:
        tensor.__dict__[SHOWN_ATTRIBUTE] = _Shown(local_class)
    if type(tensor) is RaggedDTensor:
        tensor.__class__ = ClassedDTensor


class CompositeDTensor(RaggedDTensor):
    """A sharded tensor of a class that holds several tensors, cut by rows. It can be copied, gathered, and saved
    to checkpoints. If all its tensors are cut, its class computes element-wise operations on each rank's rows: an
    optimizer can step it, and may have states of the class. No other operation can compute with it."""

    __module__ = "fsdp_compose"
    is_composite = True

    @staticmethod
    def made(local: torch.Tensor, spec: RaggedSpec, composite: Parts) -> CompositeDTensor:
        nothing = torch.empty((), dtype=spec.dtype, device=local.device).expand(spec.local_shape)
        tensor = make_dtensor(CompositeDTensor, nothing, spec)
        set_local_tensor(tensor, local)
        tensor.__dict__[SHOWN_ATTRIBUTE] = _Shown(composite)
        return tensor

    _local_tensor = _LOCAL_TENSOR

    @property
    def composite(self) -> Parts:
        """How its tensors are stored in the bytes."""
        composite: Parts = shown_by(self).local_class
        return composite

    def with_local(self, local: torch.Tensor) -> CompositeDTensor:
        return CompositeDTensor.made(local, self._spec, self.composite)

    def takes(self, whole: torch.Tensor) -> bool:
        """Whether values may come from ``whole`` only as from an instance of the class. A class that can train also
        takes plain elements, and optimizers may have plain states beside it."""
        return type(whole).__name__ == self.composite.name or bool(self.composite.uncut)

    def shard_of(self, whole: torch.Tensor) -> CompositeDTensor:
        """This rank's shard of a whole instance of the class, sharded like this one.

        Raises:
            TypeError: ``whole`` is not an instance.
        """
        if whole.shape != self.shape or type(whole).__name__ != self.composite.name:
            raise TypeError(
                f"{self._what()} takes values from another tensor that is sharded the same way, or from a whole "
                f"{self.composite.name} of its shape; got a {type(whole).__name__} of shape {tuple(whole.shape)}"
            )
        local = torch.zeros_like(local_tensor(self))
        with torch.no_grad():
            self.composite.write(local, whole.detach())
        return self.with_local(local)

    def made_of(self, func: Any, result: Any) -> torch.Tensor:
        """The sharded tensor with the local result of an operation of the class, which may be plain."""
        if isinstance(result, torch.Tensor) and tuple(result.shape) == tuple(self._spec.local_shape):
            if type(result) is torch.Tensor:
                return wrap_local_shard(result, self._spec)
            if type(result).__name__ == self.composite.name and result.dtype == self.dtype:
                local = torch.zeros_like(local_tensor(self))
                self.composite.take_in(local, result)
                return self.with_local(local)
            plain = common_tensor(result) if type(result).__name__ == self.composite.name else None
            if plain is not None:  # a comparison
                return wrap_local_shard(plain, self._spec)
        what = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, torch.Tensor) else ""
        raise NotImplementedError(
            f"{func} of {self._what()}: its class returned a {type(result).__name__} {what}, expected one of its own "
            f"in {self.dtype}, or plain elements, for this rank's rows, {tuple(self._spec.local_shape)}"
        )

    def _what(self) -> str:
        owner = self.__dict__.get(OWNER_ATTRIBUTE)
        name = "" if owner is None else f" {owner[1]} of the fully_shard group {owner[0]}"
        return f"the sharded {self.composite.name}{name} of shape {tuple(self.shape)}"

    # ---- Movement

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's shard, an instance of the class, sharing memory."""
        result: torch.Tensor = self._local_tensor
        return result

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Gather the whole instance of the class, on every rank. Ranks: all ranks of the mesh."""
        with torch.no_grad():
            composite = self.composite
            whole: torch.Tensor = composite.whole_of(composite.gather_bytes(local_tensor(self).detach()))
        return whole

    def all_gather(self) -> NoReturn:
        """Raises: this class has no DTensor that is whole on every rank."""
        raise NotImplementedError(f"{self._what()} cannot be placed in another layout: use .full_tensor()")

    def redistribute(self, *_: Any, **__: Any) -> NoReturn:
        """Raises, like ``all_gather``."""
        self.all_gather()

    # ---- Attributes

    def _set_requires_grad(self, value: bool) -> None:
        if value and self.composite.uncut:
            raise NotImplementedError(
                f"{self._what()} cannot train: {', '.join(self.composite.uncut)} is the same on every rank, and each "
                "would train a copy of its own. It stays frozen (requires_grad=False)"
            )
        super()._set_requires_grad(value)

    requires_grad = property(torch.Tensor.requires_grad.__get__, _set_requires_grad)  # type: ignore[attr-defined]

    @property
    def data(self) -> torch.Tensor:
        """The tensor outside autograd, sharing memory. You can assign a tensor that is sharded the same way, or a whole
        instance of the class, whose values are copied."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        given = value if self._is_alike(value) else self.shard_of(value)
        set_local_tensor(self, local_tensor(given))

    def _is_alike(self, value: Any) -> bool:
        return (
            isinstance(value, CompositeDTensor)
            and value._spec.is_sharded_like(self._spec)
            and value.composite.is_like(self.composite)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompositeDTensor:
        twin: Any = memo.get(id(self))
        if twin is None:
            twin = self.with_local(local_tensor(self).detach().clone())
            twin.requires_grad = self.requires_grad
            memo[id(self)] = twin
            for key, value in self.__dict__.items():
                twin.__dict__.setdefault(key, value)
        return twin

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._what()} cannot be pickled: save .to_local() or .full_tensor(), or use torch.distributed.checkpoint"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CompositeDTensor({self._what()}, placements={list(self.placements)}, rank {self._spec.rank})"

    # ---- Checkpoints: each rank's shard is one box, an instance of the user's class

    @property
    def local_shape(self) -> torch.Size:
        return torch.Size(self._spec.local_shape)

    def write_rows(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Read this rank's rows from pieces, each with its first row, that were cut for another number of ranks.

        Raises:
            ValueError: the pieces cannot be cut for these ranks.
        """
        with torch.no_grad():
            self.composite.write_rows(local_tensor(self), pieces)

    def _box(self) -> ChunkStorageMetadata:
        spec, width = self._spec, max(1, self.numel() // self.shape[0])
        offsets = [spec.element_range[0] // width, *[0] * (self.dim() - 1)]
        return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(spec.local_shape))

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        shown_by(self).is_read = True
        box, properties = self._box(), TensorProperties(dtype=self.dtype)
        data = TensorWriteData(chunk=box, properties=properties, size=self.size())
        return [WriteItem(index=MetadataIndex(fqn, box.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        shown_by(self).is_read = False
        note_write_of_all_ranks(local_tensor(self))
        return [self._box()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if index.offset is not None and self._box().offsets != index.offset:
            raise ValueError(f"rank {self._spec.rank} holds no part of {index.fqn} at {index.offset}")
        if shown_by(self).is_read:  # torch.save() refuses tensors of several dtypes in one storage
            shard: torch.Tensor = self.composite.in_own_memory(local_tensor(self).detach())
            return shard
        return self.to_local()

    # ---- Dispatch

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = _plain(args), {key: _plain(item) for key, item in (kwargs or {}).items()}
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], CompositeDTensor):
            return handler(*args, **kwargs)
        own = next(item for item in tensors_in((args, kwargs)) if isinstance(item, CompositeDTensor))
        handler = None if own.composite.uncut else _BY_KIND.get(choose(func))
        if handler is None:
            raise NotImplementedError(
                f"{func} of {own._what()}: only the forward of its module can compute with it. Elsewhere, use "
                ".full_tensor(), or this rank's part, .to_local()"
            )
        return handler(own, func, args, kwargs)


def with_local(tensor: RaggedDTensor, local: torch.Tensor) -> RaggedDTensor:
    """Make a tensor that is sharded like ``tensor``, over another local tensor."""
    if isinstance(tensor, CompositeDTensor):
        return tensor.with_local(local)
    return wrap_local_shard(local, tensor._spec)


def _clone(tensor: CompositeDTensor, **_: Any) -> CompositeDTensor:
    return tensor.with_local(local_tensor(tensor).clone())


def _converted(tensor: CompositeDTensor, **options: Any) -> CompositeDTensor:
    dtype, device = options.get("dtype") or tensor.dtype, torch.device(options.get("device") or tensor.device)
    if dtype != tensor.dtype or device.type != tensor.device.type:
        raise NotImplementedError(
            f"{tensor._what()} cannot be converted to {dtype} on {device}: it stays {tensor.dtype} on "
            f"{tensor.device}. Convert the other modules one by one, or the .full_tensor() of this one"
        )
    return _clone(tensor)


def _empty_like(tensor: CompositeDTensor, **options: Any) -> CompositeDTensor:
    device = torch.device(options.get("device") or tensor.device)
    if tensor.is_meta and (options.get("dtype") or tensor.dtype) == tensor.dtype:  # to_empty()
        return tensor.with_local(torch.zeros_like(local_tensor(tensor), device=device))
    return _converted(tensor, **options)


def _copy_into(target: CompositeDTensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
    if type(source) is RaggedDTensor and not target.composite.uncut:
        result: torch.Tensor = _pointwise(target, aten.copy_.default, (target, source, *rest), {})
        return result
    given = source if target._is_alike(source) else target.shard_of(source)
    local = local_tensor(target)
    local.copy_(local_tensor(given))
    note_write_of_all_ranks(local)
    return target


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default), lambda tensor: tensor.with_local(local_tensor(tensor))),
    aten.clone.default: _clone,
    aten._to_copy.default: _converted,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_into,
}


# ---- Operations of a class that can train: its own, element by element, on an instance over each rank's rows. Other
# operands are sharded by the same rows; some are plain (gradients, and states that the class makes plain)


def _compute(own: CompositeDTensor, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on local tensors; for one that writes, return what it has written to."""

    def local(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return [*map(local, item)]
        if isinstance(item, CompositeDTensor) and item._spec.is_sharded_like(own._spec):
            return item._local_tensor
        return operand(func, item, own._spec, own) if isinstance(item, torch.Tensor) else item

    result = func(*map(local, args), **{key: local(item) for key, item in kwargs.items()})
    targets = [item for item in written(func, args, kwargs) if isinstance(item, RaggedDTensor)]
    for target in targets:
        if isinstance(target, CompositeDTensor):  # the class may have replaced the tensors inside
            target.composite.take_in(local_tensor(target), target._local_tensor)
        note_write_of_all_ranks(local_tensor(target))  # nothing else counts it inside a dispatch
    if targets:
        return targets
    if isinstance(result, (list, tuple)):
        return [own.made_of(func, item) for item in result]
    return own.made_of(func, result)


def _pointwise(own: CompositeDTensor, func: Any, args: Any, kwargs: Any) -> Any:
    result = _compute(own, func, args, kwargs)
    return result[0] if isinstance(result, list) else result


def _per_element(_own: CompositeDTensor, func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``_foreach_*`` and ``_fused_*``: one call for each tensor of a class, and one for all others."""
    lists = [item for item in args if is_tensors(item)]
    num = len(lists[0])
    owns = [next((each[i] for each in lists if isinstance(each[i], CompositeDTensor)), None) for i in range(num)]
    results: list[Any] = [None] * num

    def picked(indices: Sequence[int]) -> tuple[Any, Any]:
        return [pick(item, indices, num) for item in args], {k: pick(item, indices, num) for k, item in kwargs.items()}

    others = [i for i in range(num) if owns[i] is None]
    if others:
        other_args, other_kwargs = picked(others)
        for i, result in zip(others, func(*other_args, **other_kwargs) or (), strict=False):
            results[i] = result
    is_in_place = func._schema.name.endswith("_")
    for i, own in enumerate(owns):
        if own is not None:
            found = _compute(own, func, *picked([i]))
            if is_in_place:
                increment_version(found)  # as for other sharded tensors in lists
            else:
                (results[i],) = found
    return None if is_in_place else results


def _draw(own: CompositeDTensor, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Draw the elements that a tensor of the class stands for, as a plain tensor, from which the class takes them."""
    spec = own._spec
    empty = torch.zeros(spec.local_shape, dtype=own.dtype, device=local_tensor(own).device)
    drawn: torch.Tensor = func(wrap_local_shard(empty, spec), *args[1:], **kwargs)
    return _copy_into(own, drawn) if func._schema.name.endswith("_") else drawn


_BY_KIND: dict[Any, Callable[..., Any]] = {
    pointwise: _pointwise,
    divide: _pointwise,
    per_element: _per_element,
    random: _draw,
}

allow_in_foreach(ClassedDTensor)

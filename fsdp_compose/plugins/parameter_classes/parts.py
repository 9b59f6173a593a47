"""The bytes of one rank's shard of a tensor whose class holds several tensors of other shapes and dtypes (quantized
weights: packed data, scales), and such instances as others make them: with their context, and without.

Each rank stores its rows of such a tensor as bytes: the tensors inside an instance of the class over these rows, one
after the other. An inner tensor is either cut at the same places (dim 0), or the same on every rank (a mean, a table)::

    whole    data |a a a a|b b b b|   scales |a|b|   mean |m|
    rank 0   bytes |a a a a|a|m|
    rank 1   bytes |b b b b|b|m|

Who cuts a tensor (``class_codecs``) makes its ``Parts``. ``CompositeDTensor`` is a sharded tensor over the bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._torch import is_wrapper, make_wrapper
from ...errors import MisuseError

PART_ALIGNMENT_BYTES = 16  # alignment of each tensor in the bytes, and of the whole


@dataclass(frozen=True)
class InnerTensor:
    """One tensor inside an instance of the class over one rank's rows."""

    name: str  # the attribute
    shape: torch.Size  # on a rank that has the most rows, as every rank stores it
    dtype: torch.dtype
    start: int  # the position of its first byte
    is_cut: bool  # the ranks' tensors, one after the other along dim 0, form the whole one; else every rank has that

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view(self, local: torch.Tensor) -> torch.Tensor:
        return local[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class Parts:
    """How the tensors inside a parameter are cut, and where they are in the bytes of one rank."""

    cls: type[Any]
    shape: torch.Size  # of the parameter, like ``dtype``
    dtype: torch.dtype
    inner: tuple[InnerTensor, ...]
    nbytes: int  # on one rank
    context: Any  # the other data from which an instance over one rank's rows is made
    whole_context: Any  # ... and the whole one
    num_ranks: int  # in the shard group
    rank: int  # this one, in the shard group
    gather_bytes: Callable[[torch.Tensor], torch.Tensor]  # gathers the bytes of the shard group from this rank's

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def most_rows(self) -> int:
        """The number of rows that every rank stores, some of which may be padding."""
        return -(-self.shape[0] // self.num_ranks)

    @property
    def rows(self) -> range:
        """This rank's rows."""
        return rows_of(self.shape, self.num_ranks, self.rank)

    @property
    def uncut(self) -> list[str]:
        """The names of the tensors that are the same on every rank: with any, it cannot train."""
        return [item.name for item in self.inner if not item.is_cut and self.num_ranks > 1]

    def is_like(self, other: Any) -> bool:
        """Whether both have the same bytes for the same instance."""
        return (self.cls, self.shape, self.dtype, self.inner) == (other.cls, other.shape, other.dtype, other.inner)

    def padded(self, local: torch.Tensor) -> Any:
        """An instance over all rows that this rank stores, sharing the memory of the bytes."""
        tensors = {item.name: item.view(local) for item in self.inner}
        shape = torch.Size([self.most_rows, *self.shape[1:]])
        return _instance(self.cls, tensors, self.context, shape)

    def over(self, local: torch.Tensor) -> Any:
        """An instance over this rank's rows, sharing the memory of the bytes."""
        instance, num_rows = self.padded(local), len(self.rows)
        return instance if num_rows == self.most_rows else first_rows(instance, num_rows)

    def in_own_memory(self, local: torch.Tensor) -> Any:
        """Like ``over``, but the tensors are copies, each in memory of its own."""
        instance = self.over(local)
        tensors = {name: tensor.clone() for name, tensor in inner_tensors(instance).items()}
        return _instance(self.cls, tensors, context_of(instance), instance.shape)

    def take_in(self, local: torch.Tensor, instance: Any) -> None:
        """Copy the tensors of an instance over this rank's rows, unless they are already there, into the bytes.

        Raises:
            ValueError: they have other shapes or dtypes.
        """
        own = inner_tensors(self.over(local))
        for name, tensor in own.items():
            given = getattr(instance, name, None)
            if not isinstance(given, torch.Tensor) or (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
                raise MisuseError(
                    f"an operation on the sharded {self.name} of shape {tuple(self.shape)} made {name} "
                    f"{describe_part(given)} of {tensor.dtype} {tuple(tensor.shape)}: its class must keep shapes and "
                    "dtypes, or return plain tensors"
                )
        for name, tensor in own.items():
            given = getattr(instance, name)
            if given.numel() and (given.data_ptr(), given.stride()) != (tensor.data_ptr(), tensor.stride()):
                tensor.copy_(given)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        return _instance(self.cls, tensors, self.whole_context, self.shape)

    def whole_of(self, flat: torch.Tensor) -> Any:
        """Make a whole instance, in memory of its own, from the bytes of all ranks."""
        locals_ = [*flat.view(self.num_ranks, self.nbytes)]
        tensors = {}
        for item in self.inner:
            if item.is_cut:
                num_rows = self._whole_shape(item)[0]
                tensors[item.name] = torch.cat([item.view(local) for local in locals_])[:num_rows]
            else:
                tensors[item.name] = item.view(locals_[0]).clone()
        return self.whole(tensors)

    def _whole_shape(self, item: InnerTensor) -> torch.Size:
        if not item.is_cut:
            return item.shape
        num_padded = self.num_ranks * self.most_rows - self.shape[0]  # only if it has the parameter's rows
        return torch.Size([item.shape[0] * self.num_ranks - num_padded, *item.shape[1:]])

    def write(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this rank's shard of a whole instance into ``local``.

        Raises:
            ValueError: its tensors have other shapes or dtypes.
        """
        whole = whole.detach()
        for item in self.inner:
            tensor = getattr(whole, item.name, None)
            expected = self._whole_shape(item)
            if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.dtype) != (expected, item.dtype):
                raise MisuseError(
                    f"got a {self.name} of shape {tuple(self.shape)} with {item.name} {describe_part(tensor)}, but the "
                    f"sharded one has {item.dtype} {tuple(expected)}: quantize it the same way"
                )
        for item in self.inner:
            tensor = getattr(whole, item.name)
            if item.is_cut:
                tensor = tensor[self.rank * item.shape[0] : (self.rank + 1) * item.shape[0]]
                item.view(local)[: tensor.shape[0]].copy_(tensor)
            else:
                item.view(local).copy_(tensor)

    def write_rows(self, local: torch.Tensor, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Write this rank's shard into ``local``, from pieces of a whole that was cut for another number of ranks.

        Args:
            pieces: each with its first row, in order; together they have all rows of this rank.

        Raises:
            ValueError: their tensors cannot be cut for these ranks.
        """
        num_rows, own = self.most_rows, self.rows
        written = []
        for item in self.inner:
            tensors = [getattr(piece, item.name) for _, piece in pieces]
            first, rows = tensors[0], pieces[0][1].shape[0]
            if first.shape == item.shape and rows != num_rows:
                written.append(first)  # the same on every rank
                continue
            length = item.shape[0] if item.shape else 0
            wanted = torch.Size([length * len(own) // num_rows, *item.shape[1:]]) if item.shape else item.shape
            start, rest = divmod((own.start - pieces[0][0]) * length, num_rows)
            chosen = torch.cat(tensors)[start : start + wanted[0]] if first.dim() and wanted else first
            is_whole = not rest and first.dim() and first.shape[0] * num_rows == length * rows
            if not is_whole or (chosen.shape, chosen.dtype) != (wanted, item.dtype):
                raise MisuseError(
                    f"{item.name} of a {self.name} of shape {tuple(self.shape)} was saved as {describe_part(first)} "
                    f"for {rows} rows, from which no rank of {self.num_ranks} can get its {item.dtype} "
                    f"{tuple(item.shape)}: load it on as many ranks as saved it"
                )
            written.append(chosen)
        for item, tensor in zip(self.inner, written, strict=True):
            view = item.view(local)
            (view[: tensor.shape[0]] if tensor.dim() else view).copy_(tensor)


def inner_tensors(param: Any) -> dict[str, Any]:
    """The tensors inside a wrapper, by attribute."""
    return {name: getattr(param, name) for name in param.__tensor_flatten__()[0]}


@dataclass(frozen=True)
class Attributes:
    """What stands for the context of a class that torch cannot make again: the attributes besides the tensors inside,
    and the dtype."""

    values: Mapping[str, Any]
    dtype: torch.dtype


def context_of(param: Any) -> Any:
    """What ``remade`` makes an instance from, besides the tensors inside: the class's own context, if its
    ``__tensor_unflatten__`` takes the four arguments that torch gives it and returns an instance."""
    # FSDP2 never calls that method, so classes that were written for FSDP2 alone may have another one.
    names, context = param.__tensor_flatten__()
    arguments = ({name: getattr(param, name) for name in names}, context, param.shape, param.stride())
    try:
        inspect.signature(type(param).__tensor_unflatten__).bind(*arguments)
    except TypeError:
        pass
    else:
        if isinstance(type(param).__tensor_unflatten__(*arguments), type(param)):
            return context
    values = {key: value for key, value in vars(param).items() if key not in (*names, "_is_param")}
    return Attributes(values, param.dtype)


def remade(
    cls: Any, tensors: Mapping[str, torch.Tensor], context: Any, shape: Sequence[int], stride: Sequence[int]
) -> Any:
    """Make an instance of a class from tensors inside and ``context_of`` another instance."""
    if not isinstance(context, Attributes):
        return cls.__tensor_unflatten__({**tensors}, context, torch.Size(shape), tuple(stride))
    first, *others = tensors.values()
    instance = make_wrapper(cls, shape, stride, context.dtype if others else first.dtype, first.device)
    vars(instance).update(context.values, **tensors)
    return instance


def _instance(cls: Any, tensors: Mapping[str, torch.Tensor], context: Any, shape: Sequence[int]) -> Any:
    stride = torch.empty(shape, device="meta").stride()
    return remade(cls, tensors, context, shape, stride)


def common_tensor(instance: Any) -> torch.Tensor | None:
    """The plain tensor that all tensors inside an instance equal, if there is one, of its shape and dtype."""
    first, *others = inner_tensors(instance).values()
    is_plain = not is_wrapper(first) and (first.shape, first.dtype) == (instance.shape, instance.dtype)
    return first if is_plain and all(are_equal(first, other) for other in others) else None


def are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, bit for bit."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return a.is_meta or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def rows_of(shape: torch.Size, num_ranks: int, rank: int) -> range:
    """The rows of one rank: equally many on each, but that the last ranks may have fewer."""
    most = -(-shape[0] // num_ranks)
    return range(min(rank * most, shape[0]), min((rank + 1) * most, shape[0]))


def first_rows(instance: Any, num_rows: int) -> Any:
    """Views of the first rows."""
    # Inside a dispatch, narrow() would not become this operator, which classes have.
    return torch.ops.aten.slice.Tensor(instance, 0, 0, num_rows)


def describe_part(part: object) -> str:
    return f"{part.dtype} {tuple(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__

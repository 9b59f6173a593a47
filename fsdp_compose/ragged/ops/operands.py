"""The operands of an operation as local tensors of one layout, and its local result as a tensor of that layout.

Every handler in ``ops`` begins and ends here. The file also reads an operator's schema (which arguments it writes to)
and has ``GatheredView``, a view of a ``RaggedDTensor`` where no ragged view exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ..._torch import DTensorSpec, TensorMeta, dtensor_spec, local_tensor, make_dtensor
from ..dtensor import RaggedDTensor, averaged, distribute_ragged, gathered, inference_mode_of, shard_whole
from ..ownership import OWNER_ATTRIBUTE, MixedOperandsError, describe_owner, note_write_of_all_ranks
from ..placement import RaggedSpec

# ---- Schemas: which arguments an operator writes to, and of what kind they are


Args = tuple[Any, ...]
Kwargs = dict[str, Any]

FUSED_OPTIMIZERS = {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"}

_INDEXED_WRITES = {
    "aten::index_put_", "aten::index_fill_", "aten::index_copy_", "aten::index_add_", "aten::scatter_",
    "aten::scatter_add_", "aten::masked_scatter_",
}  # fmt: skip
_WRITES = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::masked_fill_", *_INDEXED_WRITES}


def writes_through(func: Any) -> bool:
    """Whether ``func`` writes elements, and nothing else, to its first argument."""
    name = func._schema.name
    return name.endswith("_") and (name in _WRITES or torch.Tag.pointwise in func.tags)


def writes_by_index(func: Any) -> bool:
    """Whether ``func`` writes only to those elements of its first argument that indices or a mask select."""
    return func._schema.name in _INDEXED_WRITES


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that ``func`` writes to."""
    result: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            result += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if item is not None]
    return result


@cache
def written_positions(func: Any) -> tuple[int, ...]:
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return tuple(i for i, alias in enumerate(aliases) if alias is not None and alias.is_write)


def is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def map_tensors(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to every instance of ``kind`` in it (in lists, tuples and dicts)."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([map_tensors(kind, function, item) for item in value])
    if type(value) is dict:
        return {key: map_tensors(kind, function, item) for key, item in value.items()}
    return value


# ---- ``GatheredView``: a view of a ``RaggedDTensor`` where no ragged view exists
#
# ``views`` makes it; from then on it owns its dispatch: a write to it reaches the sharded tensor, or raises.


class GatheredView(DTensor):
    """The result of a view operation on a ``RaggedDTensor`` where no ragged view exists: a view of its gathered copy.

    The operations in ``writes_through`` write to the sharded tensor too; other writes raise. Once the sharded tensor
    has been written to, every use of the copy raises. (Only on the ranks that were written to: writes by some ranks
    alone, through ``to_local()``, are not tracked on the others.)

    Ranks: all ranks of the mesh make it and write to it together, as with any replicated DTensor.
    """

    _source: RaggedDTensor
    _whole: torch.Tensor  # the gathered copy that this is a view of
    _seen: list[Any]  # the memory of the sharded tensor, and its version, when it was gathered; shared by all views

    @staticmethod
    def __new__(
        cls: type[GatheredView], view: DTensor, source: RaggedDTensor, whole: torch.Tensor, seen: list[Any]
    ) -> GatheredView:
        result: GatheredView = make_dtensor(cls, local_tensor(view), dtensor_spec(view))
        result._source, result._whole, result._seen = source, whole, seen
        return result

    def __init__(self, *_: Any) -> None:
        """Does nothing: ``__new__`` has done everything."""

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """A copy: writes to it do not reach the sharded tensor."""
        self.check()
        if grad_placements is None and self._is_recorded():
            return self._averaging().full_tensor()
        return super().full_tensor(grad_placements=grad_placements).clone()

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """A copy: writes to it do not reach the sharded tensor."""
        self.check()
        if grad_placements is None and self._is_recorded():
            return self._averaging().to_local()
        return super().to_local(grad_placements=grad_placements).clone()

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        self.check()
        if self._is_recorded():
            return self._averaging().redistribute(*args, **kwargs)
        return super().redistribute(*args, **kwargs)

    def _is_recorded(self) -> bool:
        return self.requires_grad and torch.is_grad_enabled()

    def _averaging(self) -> DTensor:
        """Return a copy, as a plain DTensor, for each rank to use by itself: see ``RaggedDTensor.full_tensor``."""
        copy: DTensor = _AverageGradient.apply(self)
        return copy

    def check(self) -> None:
        """Raise if the sharded tensor has been written to since the copy was gathered."""
        local = self._source._local_tensor
        if local is not self._seen[0] or _version_of(local) != self._seen[1]:
            raise RuntimeError(
                f"this view of a gathered sharded tensor of shape {tuple(self._source.shape)} is out of date: the "
                "sharded tensor has been written to since the view was made. Make the view again"
            )

    def note_version(self) -> None:
        """Record that the copy is up to date."""
        local = self._source._local_tensor
        self._seen[:] = local, _version_of(local)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> DTensor:
        return self.plain().clone()  # type: ignore[return-value]

    def plain(self) -> DTensor:
        """Return this view as a plain DTensor that shares its memory, outside autograd."""
        self.check()
        return make_dtensor(DTensor, local_tensor(self), dtensor_spec(self))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        targets = [item for item in written(func, args, kwargs) if isinstance(item, GatheredView)]
        if targets and not writes_through(func):
            raise RuntimeError(
                f"{func} would write to a gathered copy of (a part of) a sharded tensor, and the write would be lost. "
                "Write to the sharded tensor itself, to a slice of its dim 0, or to its to_local()"
            )
        if targets:
            # Every rank has the whole copy, so plain tensors among the arguments (indices) are fine.
            func(*map_tensors(DTensor, _whole_of, args), **map_tensors(DTensor, _whole_of, kwargs))
            for target in targets:
                target._source._local_tensor.copy_(shard_whole(target._whole, target._source._spec))
                note_write_of_all_ranks(target._source._local_tensor)
                target.note_version()
            return targets[0]
        _refuse_plain_tensors(func, (*args, *kwargs.values()))
        result = func(
            *map_tensors(GatheredView, GatheredView.plain, args),
            **map_tensors(GatheredView, GatheredView.plain, kwargs),
        )
        source = next((item for item in args if isinstance(item, GatheredView)), None)
        return source.view_as_well(result) if func.is_view and source is not None else result

    def view_as_well(self, views: Any) -> Any:
        """Further views of the same copy."""
        with inference_mode_of(self._source):
            return map_tensors(DTensor, lambda view: GatheredView(view, self._source, self._whole, self._seen), views)


class _AverageGradient(torch.autograd.Function):
    """Returns a gathered tensor for each rank to use by itself: the gradient is the average over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: GatheredView) -> torch.Tensor:
        return tensor.plain().clone()

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return _AverageOnce.apply(grad)


class _AverageOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: DTensor) -> DTensor:
        return averaged(grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return grad


def _refuse_plain_tensors(func: Any, values: Sequence[Any]) -> None:
    """Raise stock DTensor's error, with the name of the parameter."""
    source = next((item._source for item in values if isinstance(item, GatheredView)), None)
    if hasattr(source, OWNER_ATTRIBUTE):
        for item in values:
            if isinstance(item, torch.Tensor) and not isinstance(item, DTensor) and item.dim():
                raise MixedOperandsError(
                    f"{func}: got mixed a torch.Tensor of shape {tuple(item.shape)} and {describe_owner(source)}"
                )


def _version_of(local: torch.Tensor) -> int:
    return 0 if local.is_inference() else local._version  # inference tensors have none


def _whole_of(tensor: DTensor) -> torch.Tensor:
    """All elements: a gathered view's own memory, or a copy of another DTensor."""
    if isinstance(tensor, GatheredView):
        tensor.check()
        return local_tensor(tensor)
    return tensor.full_tensor()


# ---- Operands and results


class Larger(Exception):
    """Raised when an operand cannot be broadcast to the layout of the result, because the result is larger than any
    ragged operand."""


def operand(func: Any, tensor: torch.Tensor, spec: RaggedSpec, read: RaggedDTensor | None = None) -> torch.Tensor:
    """The local elements of an operand, for an operation whose result is sharded by ``spec``. ``read``: a sharded
    operand that is only read, for error messages."""
    if type(tensor) is RaggedDTensor and tensor._spec.is_sharded_like(spec):
        return tensor._local_tensor
    if tensor.dim() == 0:
        return scalar_operand(tensor)
    tensor = tensor.plain() if isinstance(tensor, GatheredView) else tensor
    if not isinstance(tensor, DTensor):
        raise MixedOperandsError(
            f"{func}: got mixed a torch.Tensor of shape {tuple(tensor.shape)} and, of shape {tuple(spec.shape)}, "
            f"{describe_owner(read)}"
        )
    if tensor.shape != spec.shape:
        if torch.broadcast_shapes(tensor.shape, spec.shape) != spec.shape:
            raise Larger
        tensor = plain_dtensor(tensor).expand(spec.shape)
    return local_tensor(distribute_ragged(tensor, spec.mesh, spec.placements))


def scalar_operand(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim operand as a plain tensor, complete on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Convert ``tensor`` to a DTensor without a ragged layout."""
    if isinstance(tensor, RaggedDTensor):
        return gathered(tensor)
    return tensor.plain() if isinstance(tensor, GatheredView) else tensor


def as_scalar(local: torch.Tensor) -> torch.Tensor:
    return local.view(()) if local.numel() else local.new_ones(())


def touch(local: torch.Tensor) -> None:
    """Called after all ranks have written to a 0-dim tensor, of which this rank may hold nothing. A traced graph must
    still contain a write, as on the other ranks: write to the empty tensor."""
    if not local.numel():
        local.zero_()


def wrap_local_shard(local: torch.Tensor, spec: RaggedSpec) -> RaggedDTensor:
    return RaggedDTensor(local, spec if local.dtype is spec.dtype else spec.with_dtype(local.dtype))


def from_scalar(result: torch.Tensor, spec: RaggedSpec) -> RaggedDTensor:
    return wrap_local_shard(result.reshape(1)[: spec.local_shape[0]].clone(), spec)


def replicated(result: torch.Tensor, spec: RaggedSpec) -> DTensor:
    """Wrap a tensor that is the same on every rank in a DTensor."""
    meta = TensorMeta(result.shape, result.stride(), result.dtype)
    plain = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, meta)
    tensor: DTensor = make_dtensor(DTensor, result, plain)
    return tensor

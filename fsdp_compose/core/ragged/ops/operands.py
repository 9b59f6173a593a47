"""The operands of an operation as local tensors of one layout, and its local result as a tensor of that layout.

Every handler in ``ops`` begins and ends here. The file also reads an operator's schema (which arguments it writes to)
and has the two other kinds of results: ``ReplicatedDTensor``, complete on every rank, and ``GatheredView``, a view of a
``RaggedDTensor`` where no ragged view exists."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ...._torch import DTensorSpec, TensorMeta, dtensor_spec, local_tensor, make_dtensor, without_dispatch
from ...comm import all_reduce
from ..dtensor import RaggedDTensor, averaged, distribute_ragged, gathered, inference_mode_of, is_alike, shard_whole
from ..gather import DifferentiableGather, refuse_transforms
from ..ownership import OWNER_ATTRIBUTE, MixedOperandsError, describe_owner, note_write_of_all_ranks
from ..placement import RaggedSpec

# ---- Schemas: which arguments an operator writes to, and of what kind they are


Args = tuple[Any, ...]
Kwargs = dict[str, Any]

FUSED_OPTIMIZERS = {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"}

# These write only to those elements of their first argument that indices or a mask select.
INDEXED_WRITES = {
    "aten::index_put_", "aten::index_fill_", "aten::index_copy_", "aten::index_add_", "aten::scatter_",
    "aten::scatter_add_", "aten::masked_scatter_",
}  # fmt: skip
_WRITES = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::masked_fill_", *INDEXED_WRITES}


@cache
def written_arguments(func: Any) -> dict[int, str]:
    """The positions and names of the arguments that ``func`` writes to; torch takes microseconds to say so."""
    arguments = enumerate(func._schema.arguments)
    return {i: item.name for i, item in arguments if item.alias_info is not None and item.alias_info.is_write}


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that ``func`` writes to."""
    result: list[torch.Tensor] = []
    for i, name in written_arguments(func).items():
        value = kwargs.get(name) if name in kwargs or i >= len(args) else args[i]
        result += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if item is not None]
    return result


def is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def map_instances(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to every instance of ``kind`` in it (in lists, tuples and dicts)."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([map_instances(kind, function, item) for item in value])
    if type(value) is dict:
        return {key: map_instances(kind, function, item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value`` (in lists, tuples and dicts)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def pick(value: Any, indices: Sequence[int], num: int) -> Any:
    """Pick the elements that belong to some of the tensors, from lists and from 1-D tensors of scalars."""
    if isinstance(value, (list, tuple)) and len(value) == num:
        return [value[i] for i in indices]
    if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == num:
        return value[list(indices)]
    return value


def is_own(tensor: torch.Tensor) -> bool:
    """Whether this is a plain tensor that may differ between ranks."""
    # Scalars, such as step counts and learning rates, are taken to be equal, as by stock DTensor.
    return not isinstance(tensor, DTensor) and tensor.dim() > 0 and not (tensor.dim() == 1 and tensor.numel() == 1)


# ---- All ranks together


def over_ranks(what: Any, tensor: torch.Tensor, op: Any, mesh: DeviceMesh, dims: Iterable[int]) -> None:
    """All-reduce a small tensor over dimensions of the mesh, in place. Ranks: all of these; one that calls this alone
    is told so. ``what``: an operator, for messages."""
    from ....plugins.gloo import noticing_loss

    for dim in dims:
        group = mesh.get_group(dim)
        with noticing_loss(group, f"{what} of a sharded tensor"):
            all_reduce(tensor, op, group)


def refuse_collectives(func: Any) -> None:
    """Refuse a collective: on whole copies it would be wrong for all of them."""
    if "c10d" in func.namespace:
        raise NotImplementedError(
            f"{func} of a sharded tensor: call the collective on its to_local(). Gradients are averaged over the ranks "
            "already"
        )


def check_generators(func: Any, spec: Any, dims: Iterable[int], generator: Any) -> None:
    """Ranks along ``dims`` of the mesh must draw the same numbers."""
    dims = [dim for dim in dims if spec.mesh.size(dim) > 1]
    device = torch.device(spec.mesh.device_type)
    if not dims or device.type == "meta":
        return
    if generator is not None:
        state = generator.get_state()
    else:
        state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state()
    own = zlib.crc32(state.cpu().numpy().tobytes())
    bounds = torch.tensor([own, -own], dtype=torch.float64, device=device)
    over_ranks(func, bounds, dist.ReduceOp.MAX, spec.mesh, dims)
    if bounds[0] != -bounds[1]:
        raise RuntimeError(
            f"{func} on a sharded tensor of shape {tuple(spec.shape)}: the random generators of the ranks differ, so "
            "replicas of the result would differ too. Call torch.manual_seed() with the same seed on all ranks first"
        )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_equal(func: Any, tensor: torch.Tensor, mesh: DeviceMesh, other: str) -> torch.Tensor:
    """Return a plain tensor that is the same on all ranks, bit by bit; raise on all ranks if it is not. ``other``: what
    it is mixed with, for the error. Ranks: all ranks of the mesh."""
    if torch.compiler.is_compiling():
        raise MixedOperandsError(
            f"{func}: got mixed a torch.Tensor of shape {tuple(tensor.shape)}, which ranks cannot compare inside "
            f"torch.compile, and {other}"
        )
    if tensor.is_meta:
        return tensor
    flat = tensor.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    # Each element is mixed with its place: sums or exclusive ors alone would not tell permuted elements.
    mixed = (bits + torch.arange(1, len(bits) + 1, device=bits.device) * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 31)) * 0x14D049BB133111EB
    digest = (mixed ^ (mixed >> 29)).sum()
    bounds = torch.stack([digest, ~digest])
    over_ranks(func, bounds, dist.ReduceOp.MAX, mesh, [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1])
    if bounds[0] != ~bounds[1]:
        raise MixedOperandsError(
            f"{func}: got mixed a torch.Tensor of shape {tuple(tensor.shape)}, which differs between the ranks, and "
            f"{other}"
        )
    return tensor


# ---- ``ReplicatedDTensor``: a result that every rank has whole


class ReplicatedDTensor(DTensor):
    """A DTensor that every rank has whole: a norm, a sum over rows, a gathered copy of a ``RaggedDTensor``.

    Its operations run on the whole values, so none needs a rule of stock DTensor:

    - among its own kind, with numbers and with 0-dim tensors, they give a ``ReplicatedDTensor``;
    - with other plain tensors, a plain tensor, because those may differ between ranks. While autograd records, this
      raises: the gradient of what is replicated would differ too;
    - a plain tensor that is written to it must be the same on all ranks, which compare;
    - with a ``RaggedDTensor`` they are operations of that one, and with any other DTensor those of stock DTensor.

    Ranks: like any replicated DTensor, all ranks of the mesh do the same with it.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        sharded = next((kind for kind in types if issubclass(kind, RaggedDTensor)), None)
        if sharded is not None:
            return sharded.__torch_dispatch__(func, types, args, kwargs)
        operands = [*tensors_in((args, kwargs))]
        if func._schema.name.startswith("aten::_foreach_") and len({*map(type, operands)}) > 1:
            num = len(next(item for item in args if is_tensors(item)))
            if num > 1:  # tensors of several kinds: one by one
                results = []
                for i in range(num):
                    picked = [pick(item, [i], num) for item in args]
                    results.append(func(*picked, **{key: pick(item, [i], num) for key, item in kwargs.items()}))
                return None if results[0] is None else [result[0] for result in results]
        whole = [item for item in operands if isinstance(item, ReplicatedDTensor)]
        mesh = whole[0].device_mesh
        if any(isinstance(item, DTensor) and not isinstance(item, ReplicatedDTensor) for item in operands) or any(
            item.device_mesh != mesh for item in whole
        ):
            return _by_stock_rules(func, args, kwargs)
        _check_replicated(func, args, kwargs, whole, operands)
        return _on_whole(func, args, kwargs, dtensor_spec(whole[0]), any(map(is_own, operands)))

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> DTensor:
        placements, meta, *_, requires_grad = context
        spec = DTensorSpec(inner["device_mesh"], placements, TensorMeta(outer_size, outer_stride, meta.dtype))
        return make_dtensor(ReplicatedDTensor, inner["_local_tensor"], spec, requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _stock(self).__reduce_ex__(protocol)


def _stock(tensor: DTensor) -> DTensor:
    return make_dtensor(DTensor, local_tensor(tensor), dtensor_spec(tensor))


class PartialDTensor(DTensor):
    """A result of which each rank has a term, with the placements that stock DTensor leaves. Its operations are stock
    DTensor's, except that ``item()``, which reads this rank's term there, is that of the whole."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].full_tensor().item()

        def back(tensor: DTensor) -> DTensor:
            is_partial = type(tensor) is DTensor and any(item.is_partial() for item in tensor.placements)
            return make_dtensor(cls, local_tensor(tensor), dtensor_spec(tensor)) if is_partial else tensor

        args, kwargs = map_instances(cls, _stock, args), map_instances(cls, _stock, kwargs or {})
        return map_instances(DTensor, back, func(*args, **kwargs))

    __reduce_ex__ = ReplicatedDTensor.__reduce_ex__


# As for ``RaggedDTensor``.
PartialDTensor.__torch_function__ = DTensor.__torch_function__  # type: ignore[method-assign]
ReplicatedDTensor.__torch_function__ = DTensor.__torch_function__  # type: ignore[method-assign]


_RESHAPE_IN_PLACE = {"aten::t_", "aten::transpose_", "aten::squeeze_", "aten::unsqueeze_", "aten::detach_"}


def _by_stock_rules(func: Any, args: Args, kwargs: Kwargs) -> Any:
    back: dict[int, ReplicatedDTensor] = {}

    def stock(tensor: ReplicatedDTensor) -> DTensor:
        result = _stock(tensor)
        back[id(result)] = tensor
        return result

    args, kwargs = map_instances(ReplicatedDTensor, stock, args), map_instances(ReplicatedDTensor, stock, kwargs)
    return map_instances(DTensor, lambda item: back.get(id(item), item), func(*args, **kwargs))


def _check_replicated(
    func: Any, args: Args, kwargs: Kwargs, whole: Sequence[ReplicatedDTensor], operands: Sequence[torch.Tensor]
) -> None:
    """Raise for what would make a replicated tensor differ between ranks, or from its own memory."""
    refuse_collectives(func)
    if torch.Tag.inplace_view in func.tags and func._schema.name not in _RESHAPE_IN_PLACE:
        raise NotImplementedError(
            f"{func} of a replicated tensor of shape {tuple(whole[0].shape)} is not supported: it would get other "
            "memory. Compute with its full_tensor()"
        )
    mesh = whole[0].device_mesh
    own = [item for item in operands if is_own(item)]
    if own:
        targets = written(func, args, kwargs)
        other = f"a replicated one of shape {tuple(whole[0].shape)}, the result of an operation on a sharded tensor"
        is_written = any(isinstance(item, ReplicatedDTensor) for item in targets)
        if torch.is_grad_enabled() and (is_written or any(item.requires_grad for item in whole)):
            raise MixedOperandsError(
                f"{func}: got mixed a torch.Tensor of shape {tuple(own[0].shape)} and {other}: compute with its "
                ".full_tensor(), or under torch.no_grad()"
            )
        for item in own if is_written else ():
            check_equal(func, item, mesh, f"{other}, which it would be written to")
    if torch.Tag.nondeterministic_seeded in func.tags:
        check_generators(func, dtensor_spec(whole[0]), range(mesh.ndim), kwargs.get("generator"))


def _on_whole(func: Any, args: Args, kwargs: Kwargs, spec: DTensorSpec, is_plain: bool) -> Any:
    back: dict[int, ReplicatedDTensor] = {}

    def local(tensor: ReplicatedDTensor) -> torch.Tensor:
        back[id(tensor._local_tensor)] = tensor
        return tensor._local_tensor

    outs = {
        item.name: kwargs[item.name]
        for item in func._schema.arguments
        if item.is_out and isinstance(kwargs.get(item.name), ReplicatedDTensor)
    }
    local_kwargs = map_instances(ReplicatedDTensor, local, kwargs)
    for name, target in outs.items():
        local_kwargs[name] = torch.empty_like(target._local_tensor)  # torch may give it another shape
        back[id(local_kwargs[name])] = target
    result = func(*map_instances(ReplicatedDTensor, local, args), **local_kwargs)
    for name, target in outs.items():
        if local_kwargs[name].shape != target.shape:
            raise RuntimeError(
                f"{func}: the result has shape {tuple(local_kwargs[name].shape)}, but the replicated tensor that it "
                f"would be written to has shape {tuple(target.shape)}"
            )
        target._local_tensor.copy_(local_kwargs[name])
    if torch.Tag.inplace_view in func.tags:
        with without_dispatch():
            func(*args, **kwargs)  # to the wrapper, too
        args[0]._spec = dtensor_spec(on_all_ranks(result, spec))

    def wrap(item: torch.Tensor) -> torch.Tensor:
        return back[id(item)] if id(item) in back else item if is_plain else on_all_ranks(item, spec)

    return map_instances(torch.Tensor, wrap, result)


# ---- ``GatheredView``: a view of a ``RaggedDTensor`` where no ragged view exists
#
# ``views`` makes it; from then on it owns its dispatch: a write to it reaches the sharded tensor, or raises.


class GatheredView(DTensor):
    """The result of a view operation on a ``RaggedDTensor`` where no ragged view exists: a view of its gathered copy.

    Operations that write elements, and nothing else, to their first argument write to the sharded tensor too; other
    writes raise. Once the sharded tensor has been written to, every use of the copy raises. (Only on the ranks that
    were written to: writes by some ranks alone, through ``to_local()``, are not tracked on the others.)

    Ranks: all ranks of the mesh make it and write to it together, as with any replicated DTensor.
    """

    _source: RaggedDTensor
    _whole: torch.Tensor  # the gathered copy that this is a view of
    _seen: list[Any]  # the memory of the sharded tensor, and its version, when it was gathered; shared by all views

    @staticmethod
    def __new__(
        cls: type[GatheredView], view: DTensor, source: RaggedDTensor, whole: torch.Tensor, seen: list[Any]
    ) -> GatheredView:
        result = make_dtensor(cls, local_tensor(view), dtensor_spec(view))
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
        refuse_transforms()
        (copy,) = _UsedByEachRank().apply([self])
        result: DTensor = copy
        return result

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

    def plain(self) -> ReplicatedDTensor:
        """Return this view as a replicated DTensor that shares its memory, outside autograd."""
        self.check()
        return make_dtensor(ReplicatedDTensor, local_tensor(self), dtensor_spec(self))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        targets = [item for item in written(func, args, kwargs) if isinstance(item, GatheredView)]
        name = func._schema.name
        if targets and not (name.endswith("_") and (name in _WRITES or torch.Tag.pointwise in func.tags)):
            raise RuntimeError(
                f"{func} would write to a gathered copy of (a part of) a sharded tensor, and the write would be lost. "
                "Write to the sharded tensor itself, to a slice of its dim 0, or to its to_local()"
            )
        if targets:
            # Every rank has the whole copy, so plain tensors among the arguments (indices) are fine.
            func(*map_instances(DTensor, _whole_of, args), **map_instances(DTensor, _whole_of, kwargs))
            for target in targets:
                target._source._local_tensor.copy_(shard_whole(target._whole, target._source._spec))
                note_write_of_all_ranks(target._source._local_tensor)
                target.note_version()
            return targets[0]
        _refuse_plain_tensors(func, (*args, *kwargs.values()))
        result = func(
            *map_instances(GatheredView, GatheredView.plain, args),
            **map_instances(GatheredView, GatheredView.plain, kwargs),
        )
        source = next((item for item in args if isinstance(item, GatheredView)), None)
        return source.view_as_well(result) if func.is_view and source is not None else result

    def view_as_well(self, views: Any) -> Any:
        """Further views of the same copy."""
        with inference_mode_of(self._source):
            return map_instances(DTensor, lambda view: GatheredView(view, self._source, self._whole, self._seen), views)


class _UsedByEachRank(DifferentiableGather):
    """Returns a gathered tensor for each rank to use by itself: the gradient is the average over the ranks."""

    def all_gather(self, sharded: Sequence[GatheredView]) -> list[torch.Tensor]:
        return [view.plain().clone() for view in sharded]

    def reduce_scatter(self, grads: Sequence[DTensor]) -> list[torch.Tensor]:
        return [averaged(grad) for grad in grads]

    def gather_again(self, grads: Sequence[Any]) -> Sequence[Any]:
        return grads


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
    if is_alike(tensor, spec):
        return local_tensor(tensor)
    if tensor.dim() == 0:
        return scalar_operand(tensor)
    tensor = tensor.plain() if isinstance(tensor, GatheredView) else tensor
    if not isinstance(tensor, DTensor):
        other = f"of shape {tuple(spec.shape)}, {describe_owner(read)}"
        if not may_mix(read):
            raise MixedOperandsError(f"{func}: got mixed a torch.Tensor of shape {tuple(tensor.shape)} and, {other}")
        if torch.broadcast_shapes(tensor.shape, spec.shape) != spec.shape:
            raise Larger
        check_equal(func, tensor, spec.mesh, other)
        return shard_whole(tensor.expand(spec.shape), spec)
    if tensor.shape != spec.shape:
        if torch.broadcast_shapes(tensor.shape, spec.shape) != spec.shape:
            raise Larger
        tensor = (gathered(tensor) if isinstance(tensor, RaggedDTensor) else tensor).expand(spec.shape)
    if isinstance(tensor, ReplicatedDTensor) and tensor.device_mesh == spec.mesh:
        return shard_whole(tensor._local_tensor, spec)
    return local_tensor(distribute_ragged(tensor, spec.mesh, spec.placements))


def may_mix(read: torch.Tensor | None) -> bool:
    """Whether a sharded tensor may be computed with plain ones: without autograd, as in the step of an optimizer, and
    if what is only ``read`` is no parameter of a group."""
    # A parameter that is read is read by a forward, even without autograd, and that should run in its group.
    return not torch.is_grad_enabled() and not hasattr(read, OWNER_ATTRIBUTE)


def scalar_operand(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim operand as a plain tensor, complete on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor._local_tensor if isinstance(tensor, ReplicatedDTensor) else tensor.full_tensor()


def as_scalar(local: torch.Tensor) -> torch.Tensor:
    return local.view(()) if local.numel() else local.new_ones(())


def touch(local: torch.Tensor) -> None:
    """Called after all ranks have written to a 0-dim tensor, of which this rank may hold nothing."""
    # A traced graph must contain a write all the same, as on the other ranks.
    if not local.numel():
        local.zero_()


def wrap_local_shard(local: torch.Tensor, spec: RaggedSpec) -> RaggedDTensor:
    return RaggedDTensor(local, spec if local.dtype is spec.tensor_meta.dtype else spec.with_dtype(local.dtype))


def from_scalar(result: torch.Tensor, spec: RaggedSpec) -> RaggedDTensor:
    return wrap_local_shard(result.reshape(1)[: spec.local_shape[0]].clone(), spec)


def replicated(result: torch.Tensor, spec: RaggedSpec) -> ReplicatedDTensor:
    """Wrap a tensor that is the same on every rank in a DTensor."""
    meta = TensorMeta(result.shape, result.stride(), result.dtype)
    return on_all_ranks(result, DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, meta))


def on_all_ranks(result: torch.Tensor, like: DTensorSpec) -> ReplicatedDTensor:
    """The same, for the ranks of another replicated tensor, whose layout it shares if it can."""
    meta = TensorMeta(result.shape, result.stride(), result.dtype)
    spec = like if like.tensor_meta == meta else DTensorSpec(like.mesh, like.placements, meta)
    return make_dtensor(ReplicatedDTensor, result, spec)

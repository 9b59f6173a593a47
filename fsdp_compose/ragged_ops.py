"""What operations do to a ``RaggedDTensor``: one handler for each kind of operator, chosen once per operator.

=====================  ==============================================================================================
element-wise, copies   on the local runs, result cut like the (largest) ragged operand; other operands are cut alike
foreach, fused         the same for every element of the lists
full reductions        on the local runs, then one all-reduce; the result is complete, a replicated 0-dim DTensor
dim-0 slices, views    views: a contiguous range of the flattened tensor is a run on every rank
other views            all-gather; what is written to the result is written back, or raises; out of date, it raises
random                 the whole tensor is drawn, on every rank, and cut: values do not depend on the layout
everything else        all-gather, then what a plain DTensor does; with one warning per operator
everything else that   raises, naming the operator
writes
=====================  ==============================================================================================
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from math import inf, prod
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate

from ._torch import DTensorSpec, TensorMeta, dtensor_spec, foreach_norm, local_tensor, make_dtensor, share_versions
from .norms import accurate_dtype, combine_extremes, combine_norms, finish_norm, total_norm_of
from .placement import RaggedShard
from .ragged import (
    GatheredView,
    Handler,
    RaggedDTensor,
    RaggedSpec,
    choose_handler,
    cut_whole,
    distribute_ragged,
    gathered,
    inference_mode_of,
    map_tensors,
    writes_by_index,
    written,
)

aten = torch.ops.aten
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def _choose(func: Any) -> Handler:
    name: str = func._schema.name
    if func in _BY_OPERATOR:
        return _BY_OPERATOR[func]
    if name in _FUSED_OPTIMIZERS or (name.startswith("aten::_foreach_") and name != "aten::_foreach_mm"):
        return _per_element
    if writes_by_index(func):
        return _write_through
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random
    if torch.Tag.pointwise in func.tags:
        return _pointwise
    return _gathered_view if func.is_view else _gather_all


choose_handler.append(_choose)


# ---- element-wise


class _Larger(Exception):
    """An operand is not broadcast to the layout of the result: the result is larger than any ragged operand."""


def _pointwise(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    targets = written(func, args, kwargs)
    if targets:
        model = targets[0]
        if not isinstance(model, RaggedDTensor):
            return _write_elsewhere(func, model, args, kwargs)
    else:
        operands = [item for item in (*args, *kwargs.values()) if isinstance(item, RaggedDTensor)]
        model = operands[0] if len(operands) == 1 else max(operands, key=_size)
    spec = model._spec
    if spec.is_scalar:
        return _pointwise_scalar(func, args, kwargs, model, is_written=bool(targets))
    if kwargs.get("out") is not None:
        shapes = [item.shape for item in args if isinstance(item, torch.Tensor)]
        if torch.broadcast_shapes(*shapes) != spec.shape:
            raise RuntimeError(
                f"{func}: the result does not have the shape of the sharded tensor that it is written to, "
                f"{tuple(model.shape)}"
            )
    try:
        local_args = [_operand(func, item, spec) if isinstance(item, torch.Tensor) else item for item in args]
        local_kwargs = {
            key: _operand(func, item, spec) if isinstance(item, torch.Tensor) else item for key, item in kwargs.items()
        }
    except _Larger:
        if targets:
            raise RuntimeError(
                f"{func}: the result does not have the shape of the sharded tensor that it is written to, "
                f"{tuple(model.shape)}"
            ) from None
        return _gather_all(func, args, kwargs)
    result = func(*local_args, **local_kwargs)
    if targets:
        increment_version(model._local_tensor)  # inside a dispatch nobody else does
        return model
    if isinstance(result, torch.Tensor):
        return _wrap(result, spec)
    return type(result)([_wrap(item, spec) for item in result])


def _pointwise_scalar(func: Any, args: _Args, kwargs: _Kwargs, model: RaggedDTensor, is_written: bool) -> Any:
    """Of 0-dim tensors. Dtype promotion depends on being 0-dim, so that every rank computes with 0-dim tensors; those
    of the ranks that hold nothing have any value."""

    def operand(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if type(item) is RaggedDTensor and item._spec.cuts_like(model._spec):
            return _as_scalar(item._local_tensor)
        if item.dim() > 0:
            raise _Larger
        return _scalar(item)

    try:
        result = func(*map(operand, args), **{key: operand(item) for key, item in kwargs.items()})
    except _Larger:
        if is_written:
            raise RuntimeError(f"{func}: the result is not 0-dim, as the sharded tensor it is written to is") from None
        return _gather_all(func, args, kwargs)
    if is_written:
        increment_version(model._local_tensor)
        return model
    if isinstance(result, torch.Tensor):
        return _from_scalar(result, model._spec)
    return type(result)([_from_scalar(item, model._spec) for item in result])


def _as_scalar(local: torch.Tensor) -> torch.Tensor:
    return local.view(()) if local.numel() else local.new_ones(())


def _from_scalar(result: torch.Tensor, spec: RaggedSpec) -> RaggedDTensor:
    return _wrap(result.reshape(1)[: spec.local_shape[0]].clone(), spec)


def _size(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.dim(), tensor.numel()


def _wrap(local: torch.Tensor, spec: RaggedSpec) -> RaggedDTensor:
    return RaggedDTensor(local, spec if local.dtype is spec.dtype else spec.with_dtype(local.dtype))


def _operand(func: Any, tensor: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
    """The local elements of an operand of an operation whose result is cut as ``spec`` says."""
    if type(tensor) is RaggedDTensor and tensor._spec.cuts_like(spec):
        return tensor._local_tensor
    if tensor.dim() == 0:
        return _scalar(tensor)
    tensor = tensor.plain() if isinstance(tensor, GatheredView) else tensor
    if not isinstance(tensor, DTensor):
        raise RuntimeError(
            f"{func}: got a torch.Tensor of shape {tuple(tensor.shape)} and a sharded parameter or tensor of shape "
            f"{tuple(spec.shape)}: make both DTensors (fsdp_compose.distribute_ragged()), or use .to_local() or "
            ".full_tensor() of the sharded one"
        )
    if tensor.shape != spec.shape:
        if torch.broadcast_shapes(tensor.shape, spec.shape) != spec.shape:
            raise _Larger
        tensor = _plain(tensor).expand(spec.shape)
    return local_tensor(distribute_ragged(tensor, spec.mesh, spec.placements))


def _scalar(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim operand as a plain tensor, complete on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without a layout of ours."""
    if isinstance(tensor, RaggedDTensor):
        return gathered(tensor)
    return tensor.plain() if isinstance(tensor, GatheredView) else tensor


def _write_elsewhere(func: Any, target: torch.Tensor, args: _Args, kwargs: _Kwargs) -> Any:
    """A write to a tensor that is not ragged, computed with one that is."""
    if not isinstance(target, DTensor):
        raise RuntimeError(
            f"{func} cannot write a sharded tensor to a torch.Tensor: use .full_tensor() or .to_local() of the sharded "
            "one"
        )
    return func(
        *map_tensors(RaggedDTensor, lambda item: gathered(item), args),
        **map_tensors(RaggedDTensor, lambda item: gathered(item), kwargs),
    )


# ---- lists of tensors


def _per_element(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """``_foreach_*`` and ``_fused_*``: tensor i of every list belongs together."""
    lead = next(i for i, item in enumerate(args) if _is_tensors(item))
    leaders = args[lead]
    num = len(leaders)
    if all([type(item) is RaggedDTensor and not item._spec.is_scalar for item in leaders]):
        return _on_locals(func, args, kwargs, leaders)
    scalars = [i for i in range(num) if type(leaders[i]) is RaggedDTensor and leaders[i]._spec.is_scalar]
    ragged = [i for i in range(num) if type(leaders[i]) is RaggedDTensor and not leaders[i]._spec.is_scalar]
    others = [i for i in range(num) if type(leaders[i]) is not RaggedDTensor]
    results: list[Any] = [None] * num
    for indices in (ragged, scalars, others):
        if not indices:
            continue
        part = [_pick(item, indices, num) for item in args]
        part_kwargs = {key: _pick(item, indices, num) for key, item in kwargs.items()}
        if indices is not others:
            found = _on_locals(func, tuple(part), part_kwargs, part[lead])
        else:
            if func._schema.name.startswith("aten::_fused_"):
                _refuse_other_layouts(func, part)
            # Placed like their leaders: in place, stock rules would let a leader change its layout.
            part = [_like_leaders(func, item, part[lead]) if _is_tensors(item) else item for item in part]
            found = func(*part, **part_kwargs)
        for i, result in zip(indices, found or (), strict=False):
            results[i] = result
    return results if any(item is not None for item in results) else None


def _like_leaders(func: Any, tensors: Sequence[torch.Tensor], leaders: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    result = []
    for tensor, leader in zip(tensors, leaders, strict=True):
        if isinstance(tensor, RaggedDTensor):
            if not isinstance(leader, DTensor):
                raise RuntimeError(
                    f"{func}: a torch.Tensor of shape {tuple(leader.shape)} and a sharded tensor do not go together: "
                    "use .full_tensor() or .to_local() of the sharded one"
                )
            tensor = _gathered_with_warning(func)(tensor).redistribute(placements=leader.placements)
        result.append(tensor)
    return result


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _pick(value: Any, indices: Sequence[int], num: int) -> Any:
    """The elements that belong to some of the tensors: of lists, and of 1-D tensors of scalars."""
    if isinstance(value, (list, tuple)) and len(value) == num:
        return [value[i] for i in indices]
    if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == num:
        return value[list(indices)]
    return value


def _on_locals(func: Any, args: _Args, kwargs: _Kwargs, leaders: Sequence[RaggedDTensor]) -> Any:
    specs = [leader._spec for leader in leaders]
    writes = _written_positions(func)
    # Fused optimizers write to gradients only to unscale them.
    grads = args[1] if func._schema.name in _FUSED_OPTIMIZERS and kwargs.get("grad_scale") is None else None
    local_args: list[Any] = []
    written_locals: list[torch.Tensor] = []
    for position, value in enumerate(args):
        if _is_tensors(value):
            if _are_counters(value):
                local_args.append(value)
                continue
            is_written = position in writes
            if specs[0].is_scalar:
                locals_ = [
                    _other_operand(func, item, spec, is_written) for item, spec in zip(value, specs, strict=True)
                ]
                locals_ = [_as_scalar(item) for item in locals_]
                if is_written:
                    written_locals += [item._local_tensor for item in value if type(item) is RaggedDTensor]
                local_args.append(locals_)
                continue
            locals_ = [
                tensor._local_tensor
                if type(tensor) is RaggedDTensor and tensor._spec is spec
                else _other_operand(func, tensor, spec, is_written)
                for tensor, spec in zip(value, specs, strict=True)
            ]
            if is_written and value is not grads:
                written_locals += locals_
            local_args.append(locals_)
        else:
            local_args.append(_scalar(value) if isinstance(value, torch.Tensor) and value.dim() == 0 else value)
    local_kwargs = {
        key: _scalar(value) if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for key, value in kwargs.items()
    }
    result = func(*local_args, **local_kwargs)
    if written_locals:
        increment_version(written_locals)
        increment_version(leaders)  # autograd looks at these; and nobody saves the state of an optimizer for backward
    if result is None or func._schema.name.endswith("_"):
        return None
    wrap = _from_scalar if specs[0].is_scalar else _wrap
    return [wrap(item, spec) for item, spec in zip(result, specs, strict=True)]


def _are_counters(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are plain 0-dim tensors, such as the step counts of optimizers."""
    return {*map(type, tensors)} == {torch.Tensor} and not any(map(torch.Tensor.dim, tensors))


def _other_operand(func: Any, tensor: torch.Tensor, spec: RaggedSpec, is_written: bool) -> torch.Tensor:
    is_alike = type(tensor) is RaggedDTensor and tensor._spec.cuts_like(spec)
    if is_written and not is_alike and tensor.dim() > 0:  # a write to a converted copy would be lost
        raise RuntimeError(
            f"{func}: a tensor that is written to is placed {list(getattr(tensor, 'placements', []))}, but the "
            f"parameter of shape {tuple(spec.shape)} that it belongs to is placed {list(spec.placements)}: was "
            "the optimizer's state loaded from tensors in another layout? Convert them with distribute_ragged()"
        )
    try:
        return _operand(func, tensor, spec)
    except _Larger:
        raise RuntimeError(
            f"{func}: a tensor of shape {tuple(tensor.shape)} does not fit the sharded tensor of shape "
            f"{tuple(spec.shape)} that it belongs to"
        ) from None


@cache
def _written_positions(func: Any) -> tuple[int, ...]:
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return tuple(i for i, alias in enumerate(aliases) if alias is not None and alias.is_write)


def _refuse_other_layouts(func: Any, args: Sequence[Any]) -> None:
    for value in args:
        for tensor in value if _is_tensors(value) else ():
            if isinstance(tensor, RaggedDTensor):
                raise RuntimeError(
                    f"{func}: a gradient or optimizer state is placed {list(tensor.placements)}, but its parameter is "
                    "not sharded like it"
                )


def _foreach_norm(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """Norms of all tensors, complete, with one collective for all ragged ones of a mesh."""
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    tensors = args[0]
    results: list[Any] = [None] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, RaggedDTensor):
            key: Any = (tensor._spec.mesh, tensor._spec.reduce_dims, tensor.dtype)
        else:
            key = type(tensor)  # stock DTensors and plain tensors do not mix
        alike.setdefault(key, []).append(i)
    for key, indices in alike.items():
        if isinstance(key, type):
            norms = func([tensors[i] for i in indices], *args[1:], **kwargs)
        else:
            norms = _norms([tensors[i] for i in indices], order, dtype)
        for i, norm in zip(indices, norms, strict=True):
            results[i] = norm
    return results


def _norms(tensors: Sequence[RaggedDTensor], order: float, dtype: torch.dtype | None) -> list[DTensor]:
    """Of tensors of one dtype, that the same ranks hold."""
    spec, accurate = tensors[0]._spec, accurate_dtype(dtype or tensors[0].dtype)
    # An empty run has no largest element, nor a norm of negative order: put in an element that does not change it.
    neutral = inf if order < 0 else 0.0
    locals_ = [tensor._local_tensor for tensor in tensors]
    locals_ = [local if local.numel() else local.new_full((1,), neutral) for local in locals_]
    partial = torch.stack(foreach_norm(locals_, order, dtype=accurate))
    partial = partial if order in (0, inf, -inf) else partial.pow(order)
    for dim in spec.reduce_dims:
        combine_norms(partial, order, spec.mesh.get_group(dim))
    norms = finish_norm(partial, order).to(_norm_dtype(tensors[0].dtype, dtype)).unbind()
    scalar = dtensor_spec(_complete(norms[0], spec))
    return [make_dtensor(DTensor, norm, scalar) for norm in norms]


def _foreach_max(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    return [item.max() for item in args[0]]


# ---- reductions


def _reduce(
    local: Callable[..., torch.Tensor],
    op: Any,
    finish: Callable[[torch.Tensor, RaggedDTensor], torch.Tensor] | None = None,
) -> Handler:
    """A handler for a reduction of a whole tensor: ``local`` of the run, all-reduced with ``op``."""

    def handler(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        tensor = args[0]
        if not isinstance(tensor, RaggedDTensor) or _names_dims(func, args, kwargs):
            return _gather_all(func, args, kwargs)
        result = local(tensor, *args[1:], **kwargs)
        _all_reduce(result, op, tensor._spec)
        return _complete(finish(result, tensor) if finish is not None else result, tensor._spec)

    return handler


def _names_dims(func: Any, args: _Args, kwargs: _Kwargs) -> bool:
    """Whether a reduction is asked for some dims only, or to keep them."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "keepdim"):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if value is not None and value is not False and value != []:
                return True
    return False


def _all_reduce(tensor: torch.Tensor, op: Any, spec: RaggedSpec) -> None:
    for dim in spec.reduce_dims:
        dist.all_reduce(tensor, op, group=spec.mesh.get_group(dim))


def _complete(result: torch.Tensor, spec: RaggedSpec) -> DTensor:
    """A DTensor of what every rank has."""
    meta = TensorMeta(result.shape, result.stride(), result.dtype)
    plain = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, meta)
    tensor: DTensor = make_dtensor(DTensor, result, plain)
    return tensor


def _sum(tensor: RaggedDTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    local = tensor._local_tensor
    if dtype is None and not local.dtype.is_floating_point:
        return local.sum()
    return local.sum(dtype=accurate_dtype(dtype or local.dtype))


def _sum_handler(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    result = _reduce(_sum, dist.ReduceOp.SUM)(func, args, kwargs)
    source = args[0].dtype
    return result.to(kwargs.get("dtype") or (source if source.is_floating_point else result.dtype))


def _mean_handler(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    if isinstance(args[0], RaggedDTensor) and not _names_dims(func, args, kwargs):
        if not args[0].dtype.is_floating_point and not args[0].dtype.is_complex and kwargs.get("dtype") is None:
            return func(args[0]._local_tensor)  # raises, as for any integer tensor
        accumulated = _reduce(_sum, dist.ReduceOp.SUM)(func, args, kwargs)
        return (accumulated / args[0].numel()).to(kwargs.get("dtype") or args[0].dtype)
    return _gather_all(func, args, kwargs)


def _norm_handler(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """``linalg_vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None)`` and ``norm(x, p=2)``."""
    tensor = args[0]
    if not isinstance(tensor, RaggedDTensor) or _names_dims(func, args, kwargs):
        return _gather_all(func, args, kwargs)
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    order = 2.0 if order is None else float(order)
    dtype = kwargs.get("dtype")
    local = tensor._local_tensor.to(accurate_dtype(dtype or tensor.dtype))
    result = total_norm_of(local, order)
    for dim in tensor._spec.reduce_dims:
        combine_norms(result, order, tensor._spec.mesh.get_group(dim))
    return _complete(finish_norm(result, order).to(_norm_dtype(tensor.dtype, dtype)), tensor._spec)


def _norm_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    dtype = asked or dtype
    return dtype.to_real() if dtype.is_complex else dtype


def _extreme_handler(is_max: bool) -> Handler:
    def handler(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        tensor = args[0]
        if not isinstance(tensor, RaggedDTensor) or _names_dims(func, args, kwargs):
            return _gather_all(func, args, kwargs)
        local = tensor._local_tensor
        if tensor.numel() == 0:
            return func(local.new_empty(tensor.shape))  # raises, as for any empty tensor
        is_bool = local.dtype == torch.bool
        local = local.to(torch.uint8) if is_bool else local
        if local.numel():
            result = local.amax() if is_max else local.amin()
        else:
            limits = torch.finfo(local.dtype) if local.dtype.is_floating_point else torch.iinfo(local.dtype)
            lowest, highest = (-inf, inf) if local.dtype.is_floating_point else (limits.min, limits.max)
            result = local.new_full((), lowest if is_max else highest)
        for dim in tensor._spec.reduce_dims:
            combine_extremes(result, is_max, tensor._spec.mesh.get_group(dim))
        return _complete(result.bool() if is_bool else result, tensor._spec)

    return handler


def _any_handler(is_any: bool) -> Handler:
    def local(tensor: RaggedDTensor, *_: Any, **__: Any) -> torch.Tensor:
        elements = tensor._local_tensor
        return (elements.any() if is_any else elements.all()).to(torch.uint8)

    op = dist.ReduceOp.MAX if is_any else dist.ReduceOp.MIN
    # Of bytes, torch makes a byte.
    return _reduce(local, op, lambda result, tensor: result if tensor.dtype == torch.uint8 else result.bool())


def _count_nonzero(tensor: RaggedDTensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor._local_tensor.count_nonzero()


def _equal(func: Any, args: _Args, kwargs: _Kwargs) -> bool:
    """``torch.equal``: one answer for all ranks."""
    first, second = args
    if not isinstance(first, RaggedDTensor):
        first, second = second, first
    if first.shape != second.shape:
        return False
    if first.dim() == 0:
        return torch.equal(_scalar(first), _scalar(second))
    same = torch.equal(first._local_tensor, _operand(func, second, first._spec))
    answer = torch.tensor(int(same), device=first._local_tensor.device)
    _all_reduce(answer, dist.ReduceOp.MIN, first._spec)
    return bool(answer.item())


def _allclose(func: Any, args: _Args, kwargs: _Kwargs) -> bool:
    answer: DTensor = torch.isclose(*args, **kwargs).all()  # type: ignore[assignment]
    return bool(answer.full_tensor().item())


def _item(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    return func(gathered(args[0]).full_tensor())


def _unscale(func: Any, args: _Args, kwargs: _Kwargs) -> None:
    """GradScaler: an inf or NaN on any rank counts on all."""
    tensors, found_inf, inverse_scale = args
    locals_ = [local_tensor(item) if isinstance(item, DTensor) else item for item in tensors]
    func(locals_, found_inf, inverse_scale)
    increment_version(locals_)
    meshes = {
        (item.device_mesh, dim) for item in tensors if isinstance(item, DTensor) for dim in range(item.device_mesh.ndim)
    }
    for mesh, dim in sorted(meshes, key=lambda pair: (tuple(pair[0].mesh.flatten().tolist()), pair[1])):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=mesh.get_group(dim))


# ---- views


def _alias(func: Any, args: _Args, kwargs: _Kwargs) -> RaggedDTensor:
    tensor: RaggedDTensor = args[0]
    with inference_mode_of(tensor), share_versions():
        return RaggedDTensor(tensor._local_tensor.view(tensor._local_tensor.shape), tensor._spec)


def _view(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """Reshapes and slices. What is a contiguous range of the flattened tensor is one on every rank too."""
    tensor: RaggedDTensor = args[0]
    spec = tensor._spec
    if func is aten.as_strided.default and tensor.is_part and (len(args) > 3 or "storage_offset" in kwargs):
        raise NotImplementedError(f"{func} with a storage_offset, of a slice of a sharded tensor, is not supported")
    # On meta, where indices count elements, the same view says which elements it takes.
    like = torch.empty(spec.shape, dtype=torch.uint8, device="meta")
    result = func(like, *args[1:], **kwargs)
    if isinstance(result, torch.Tensor):
        view = _range_view(tensor, result)
        return _gathered_view(func, args, kwargs) if view is None else view
    views = [_range_view(tensor, item) for item in result]
    return _gathered_view(func, args, kwargs) if any(view is None for view in views) else type(result)(views)


def _range_view(tensor: RaggedDTensor, meta: torch.Tensor) -> RaggedDTensor | None:
    """The elements that ``meta``, a view of a tensor on meta of one-byte elements, takes; None if they are not a
    contiguous range."""
    spec, shape = tensor._spec, tuple(meta.shape)
    local = tensor._local_tensor
    if shape == tuple(spec.shape) and meta.is_contiguous():
        with inference_mode_of(tensor), share_versions():
            return RaggedDTensor(local.view(local.shape), spec)
    if not spec.is_only_ragged or not meta.is_contiguous():
        return None
    start = int(meta.storage_offset())
    stop = start + meta.numel()
    whole = tuple(spec.shape)
    runs = [spec.ragged.element_run(whole, rank) for rank in range(len(spec.ragged.counts))]
    counts = [max(0, min(run_stop, stop) - max(run_start, start)) for run_start, run_stop in runs]
    placement = RaggedShard(tuple(counts), flat=True)
    row = prod(shape[1:])
    if not spec.ragged.flat and shape and shape[1:] == whole[1:] and row:
        placement = RaggedShard(tuple(count // row for count in counts))
    placements = tuple(placement if isinstance(item, RaggedShard) else item for item in spec.placements)
    view_spec = RaggedSpec.make(spec.mesh, placements, shape, spec.dtype)
    run_start, run_stop = runs[spec.rank]
    begin = min(max(start, run_start), run_stop) - run_start
    with inference_mode_of(tensor), share_versions():
        mine = local.view(-1)[begin : begin + counts[spec.rank]].view(view_spec.local_shape)
        view = RaggedDTensor(mine, view_spec)
    view.is_part = True
    return view


def _gathered_view(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """A view that is not one of a run on every rank: of a gathered copy."""
    tensor: RaggedDTensor = args[0]
    plain = _gathered_with_warning(func)(tensor)
    whole = GatheredView(plain, tensor, local_tensor(plain), [])
    whole.note_version()
    return whole.view_as_well(func(plain, *args[1:], **kwargs))


# ---- new tensors


def _new(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """``new_empty(size)`` and the like: cut like ``self`` if it has its shape, else replicated."""
    tensor, size, *rest = args
    spec = tensor._spec
    if tuple(size) == tuple(spec.shape):
        return _wrap(func(tensor._local_tensor, spec.local_shape, *rest, **kwargs), spec)
    local = func(tensor._local_tensor, size, *rest, **kwargs)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return make_dtensor(DTensor, local, DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, meta))


def _random(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """Draws the whole tensor and keeps this rank's run: as on one device, if the ranks' generators agree."""
    name = func._schema.name
    tensor = args[0]
    is_in_place = name.endswith("_")
    if not isinstance(tensor, RaggedDTensor) or not (is_in_place or name.endswith("_like")):
        return _gather_all(func, args, kwargs)
    if any(isinstance(item, torch.Tensor) for item in args[1:]):
        raise RuntimeError(f"{func} with tensors as arguments is not supported on a sharded tensor")
    spec, local = tensor._spec, tensor._local_tensor
    _check_generators(func, spec, local.device, kwargs.get("generator"))
    whole = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    drawn = func(whole, *args[1:], **kwargs)
    run = cut_whole(drawn, spec)
    if is_in_place:
        local.copy_(run)
        increment_version(local)
        return tensor
    return _wrap(run, spec)


def _check_generators(func: Any, spec: RaggedSpec, device: torch.device, generator: Any) -> None:
    """Replicas must draw the same numbers."""
    replicated = [i for i, item in enumerate(spec.placements) if item.is_replicate() and spec.mesh.size(i) > 1]
    if not replicated or device.type == "meta":
        return
    if generator is not None:
        state = generator.get_state()
    else:
        state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state()
    own = zlib.crc32(state.cpu().numpy().tobytes())
    bounds = torch.tensor([own, -own], dtype=torch.float64, device=device)
    for dim in replicated:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=spec.mesh.get_group(dim))
    if bounds[0] != -bounds[1]:
        raise RuntimeError(
            f"{func} on a replicated, sharded tensor of shape {tuple(spec.shape)}: the random generators of the ranks "
            "differ, so its replicas would too. Call torch.manual_seed() with the same seed on all ranks first"
        )


def _make_out(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """``torch.eye(out=p)`` and the like: the whole is made, and cut."""
    target = kwargs["out"]
    whole = torch.empty(target.shape, dtype=target.dtype, device=target._local_tensor.device)
    func(*args, **{**kwargs, "out": whole})
    target._local_tensor.copy_(cut_whole(whole, target._spec))
    increment_version(target._local_tensor)
    return target


# ---- everything else


def _write_through(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """``p[mask] = value``: done on the gathered tensor, of which this rank's run is taken back."""
    target = args[0]
    if not isinstance(target, RaggedDTensor):
        return _write_elsewhere(func, target, args, kwargs)
    _warn(func)
    whole = target.full_tensor()
    full = [map_tensors(DTensor, lambda item: item.full_tensor(), item) for item in args[1:]]
    func(whole, *full, **kwargs)
    target._local_tensor.copy_(cut_whole(whole, target._spec))
    increment_version(target._local_tensor)
    return target


def _index(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """``p[indices]``: indices that are plain tensors are the same on every rank."""
    tensor, indices = args
    spec = next(item for item in (tensor, *indices) if isinstance(item, RaggedDTensor))._spec

    def replicate(item: torch.Tensor) -> torch.Tensor:
        return item if isinstance(item, DTensor) else _complete(item, spec)

    return _gather_all(func, (tensor, map_tensors(torch.Tensor, replicate, list(indices))), kwargs)


def _gather_all(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    if any(isinstance(item, RaggedDTensor) for item in written(func, args, kwargs)):
        raise NotImplementedError(
            f"{func} would write to a sharded tensor, in a way that is not supported: write to it as a whole, to "
            "slices of its dim 0, or to its to_local()"
        )
    gather = _gathered_with_warning(func)
    return func(*map_tensors(RaggedDTensor, gather, args), **map_tensors(RaggedDTensor, gather, kwargs))


def _gathered_with_warning(func: Any) -> Callable[[RaggedDTensor], DTensor]:
    def gather(tensor: RaggedDTensor) -> DTensor:
        _warn(func)
        plain = gathered(tensor)
        # Complete, also where another placement cuts the tensor: stock rules cover that best.
        return plain.redistribute(placements=[Replicate()] * plain.device_mesh.ndim)

    return gather


_warned: set[Any] = set()


def _warn(func: Any) -> None:
    if func not in _warned:
        _warned.add(func)
        warnings.warn(
            f"{func} all-gathers sharded tensors (this is said once per operator). If it runs in every step, use "
            "to_local() or operations that work on shards",
            stacklevel=3,
        )


_FUSED_OPTIMIZERS = {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"}

_VIEWS: Sequence[Any] = (
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.split.Tensor,
    aten.split_with_sizes.default, aten.unbind.int, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.as_strided.default,
)  # fmt: skip

# Element-wise in what they do, though not tagged so.
_LIKE_POINTWISE: Sequence[Any] = (
    aten.clone.default, aten._to_copy.default, aten.copy_.default,
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zeros_like.default, aten.ones_like.default,
    aten.empty_like.default, aten.full_like.default, aten.lerp.Scalar, aten.lerp.Tensor, aten.lerp_.Scalar,
    aten.lerp_.Tensor, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor, aten.lift_fresh.default, aten.nan_to_num.default, aten.nan_to_num_.default,
    aten._pin_memory.default, aten.where.self,
)  # fmt: skip

_BY_OPERATOR: dict[Any, Handler] = {
    **dict.fromkeys(_VIEWS, _view),
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    **dict.fromkeys(_LIKE_POINTWISE, _pointwise),
    **dict.fromkeys(
        (aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default), _new
    ),
    aten.rand_like.default: _random,
    aten.randn_like.default: _random,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._foreach_max.default: _foreach_max,
    aten.sum.default: _sum_handler,
    aten.sum.dim_IntList: _sum_handler,
    aten.mean.default: _mean_handler,
    aten.mean.dim: _mean_handler,
    aten.linalg_vector_norm.default: _norm_handler,
    aten.norm.Scalar: _norm_handler,
    aten.max.default: _extreme_handler(is_max=True),
    aten.min.default: _extreme_handler(is_max=False),
    aten.amax.default: _extreme_handler(is_max=True),
    aten.amin.default: _extreme_handler(is_max=False),
    aten.any.default: _any_handler(is_any=True),
    aten.all.default: _any_handler(is_any=False),
    aten.count_nonzero.default: _reduce(_count_nonzero, dist.ReduceOp.SUM),
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
    aten.index.Tensor: _index,
    aten._local_scalar_dense.default: _item,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.eye.m_out: _make_out,
    aten.eye.out: _make_out,
}

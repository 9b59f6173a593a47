"""Reductions of whole tensors: first of the local shards, then over the ranks, so results are complete.

The handlers, registered in the table of ``ops``, and the norms that ``optimizers.clip_grad`` uses too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan, prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from ...._torch import DTensorSpec, NormPartial, TensorMeta, current_graph_task_id, foreach_norm, make_dtensor
from ....plugins.gloo import noticing_loss
from ...comm import all_reduce, device_for
from ..dtensor import Handler, RaggedDTensor
from ..placement import RaggedSpec
from .operands import Args, Kwargs, PartialDTensor, ReplicatedDTensor, operand, over_ranks, replicated, scalar_operand
from .views import gather_all

# ---- Norms and extremes of tensors that are spread over ranks: a term on each rank, one collective, then the whole


def accurate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is summed in fp32: partial results are rounded once, at the end."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def partial_norm(local: torch.Tensor, order: float) -> torch.Tensor:
    """The term of a norm that adds up over the ranks: the sum of powers; for orders inf and -inf the largest
    and the smallest magnitude."""
    if not local.numel():
        # What changes nothing in the other ranks' result.
        return local.abs().new_full((), inf if order == -inf else 0.0)
    norm = torch.linalg.vector_norm(local, order)
    return norm if order in (0, inf, -inf) else norm.pow(order)


def combine_norms(partial: torch.Tensor, order: float, group: dist.ProcessGroup) -> None:
    """All-reduce the results of ``partial_norm`` over the ranks, in place and with one collective."""
    moved = partial.to(device_for(group, partial.device))
    if order in (inf, -inf):
        combine_extremes(moved, order == inf, group)
    else:
        with noticing_loss(group, "the sum of a norm over the ranks"):
            all_reduce(moved, dist.ReduceOp.SUM, group)
    if moved is not partial:
        partial.copy_(moved)


def combine_extremes(values: torch.Tensor, is_max: bool, group: dist.ProcessGroup) -> None:
    """Reduce to the largest or smallest value over the ranks, in place. NaN on any rank gives NaN on all."""
    with noticing_loss(group, "the extreme of a tensor over the ranks"):
        if not values.dtype.is_floating_point:
            all_reduce(values, dist.ReduceOp.MAX if is_max else dist.ReduceOp.MIN, group)
            return
        # Backends disagree about the MAX of a NaN, so flags for NaN travel next to the values.
        is_nan = values.isnan()
        signed = (values if is_max else -values).masked_fill(is_nan, -inf)
        both = torch.stack([signed, is_nan.to(values.dtype)])
        all_reduce(both, dist.ReduceOp.MAX, group)
    values.copy_(torch.where(both[1] > 0, torch.full_like(values, nan), both[0] if is_max else -both[0]))


def finish_norm(combined: torch.Tensor, order: float) -> torch.Tensor:
    return combined if order in (0, inf, -inf) else combined.pow(1.0 / order)


# ---- Results that each rank has a term of, as those of stock DTensor


def _is_left_partial(tensors: Sequence[Any]) -> bool:
    """Whether sums, means and norms of these tensors are. What autograd records, or needs, is complete. Extremes are
    too: to take them once more changes nothing."""
    if current_graph_task_id() != -1 or torch.compiler.is_compiling():
        return False
    if not all(isinstance(tensor, RaggedDTensor) and tensor._spec.leaves_partial for tensor in tensors):
        return False
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    # Stock DTensor computes only with those of one mesh.
    spread = {(tensor._spec.mesh, tensor._spec.reduce_dims) for tensor in tensors}
    return not is_recorded and len(spread) == 1 and all(dims for _, dims in spread)


def _partial(local: torch.Tensor, placement: Placement, spec: RaggedSpec) -> DTensor:
    placements = tuple(placement if dim in spec.reduce_dims else Replicate() for dim in range(spec.mesh.ndim))
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return make_dtensor(PartialDTensor, local, DTensorSpec(spec.mesh, placements, meta))


def _placement_of(order: float) -> Placement:
    return NormPartial(order) if order else Partial()


# ---- Handlers


def reduction(
    local: Callable[..., torch.Tensor],
    op: Any,
    finish: Callable[[torch.Tensor, RaggedDTensor], torch.Tensor] | None = None,
) -> Handler:
    """A handler for a reduction of a whole tensor: ``local`` of the local shard, all-reduced with ``op``."""

    def handler(func: Any, args: Args, kwargs: Kwargs) -> Any:
        tensor = args[0]
        if not isinstance(tensor, RaggedDTensor) or _names_dims(func, args, kwargs):
            return gather_all(func, args, kwargs)
        result = local(tensor, *args[1:], **kwargs)
        if op is dist.ReduceOp.SUM and _is_left_partial([tensor]):
            return _partial(result, Partial(), tensor._spec)
        over_ranks(func, result, op, tensor._spec.mesh, tensor._spec.reduce_dims)
        return replicated(finish(result, tensor) if finish is not None else result, tensor._spec)

    return handler


def _names_dims(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether a reduction runs over some dims only, or keeps them."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "keepdim"):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if value is not None and value is not False and value != []:
                return True
    return False


def _sum(tensor: RaggedDTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    local = tensor._local_tensor
    if dtype is None and not local.dtype.is_floating_point:
        return local.sum()
    return local.sum(dtype=accurate_dtype(dtype or local.dtype))


def sum_handler(func: Any, args: Args, kwargs: Kwargs) -> Any:
    source = args[0].dtype
    dtype = kwargs.get("dtype") or (source if source.is_floating_point else None)
    if _is_left_partial(args[:1]) and not _names_dims(func, args, kwargs):
        own = _sum(*args, **kwargs)
        return _partial(own.to(dtype or own.dtype), Partial(), args[0]._spec)
    result = reduction(_sum, dist.ReduceOp.SUM)(func, args, kwargs)
    return result.to(dtype or result.dtype)


def mean_handler(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], RaggedDTensor) and not _names_dims(func, args, kwargs):
        if not args[0].dtype.is_floating_point and not args[0].dtype.is_complex and kwargs.get("dtype") is None:
            return func(args[0]._local_tensor)  # raises, as for any integer tensor
        if _is_left_partial(args[:1]):
            spec, asked = args[0]._spec, kwargs.get("dtype")
            num_shards = prod(spec.mesh.size(dim) for dim in spec.reduce_dims)  # of unequal lengths
            mean = _sum(*args, **kwargs) * (num_shards / args[0].numel())
            return _partial(mean.to(asked or args[0].dtype), Partial("avg"), spec)
        accumulated = reduction(_sum, dist.ReduceOp.SUM)(func, args, kwargs)
        return (accumulated / args[0].numel()).to(kwargs.get("dtype") or args[0].dtype)
    return gather_all(func, args, kwargs)


def norm_handler(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``linalg_vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None)`` and ``norm(x, p=2)``."""
    tensor = args[0]
    if not isinstance(tensor, RaggedDTensor) or _names_dims(func, args, kwargs):
        return gather_all(func, args, kwargs)
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    order = 2.0 if order is None else float(order)
    if not tensor.numel():
        return _of_nothing(func, tensor, args[1:], kwargs)
    dtype = kwargs.get("dtype")
    local = tensor._local_tensor.to(accurate_dtype(dtype or tensor.dtype))
    result = partial_norm(local, order)
    if abs(order) != inf and _is_left_partial([tensor]):
        own = finish_norm(result, order).to(_norm_dtype(tensor.dtype, dtype))
        return _partial(own, _placement_of(order), tensor._spec)
    for dim in tensor._spec.reduce_dims:
        combine_norms(result, order, tensor._spec.mesh.get_group(dim))
    return replicated(finish_norm(result, order).to(_norm_dtype(tensor.dtype, dtype)), tensor._spec)


def _of_nothing(func: Any, tensor: RaggedDTensor, args: Args, kwargs: Kwargs) -> DTensor:
    """The result for a tensor without elements: torch's own, which may be an error."""
    return replicated(func(tensor._local_tensor.new_empty(tensor.shape), *args, **kwargs), tensor._spec)


def _norm_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    dtype = asked or dtype
    return dtype.to_real() if dtype.is_complex else dtype


def foreach_norms(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Norms of all tensors, complete, with one collective for all ragged ones of a mesh."""
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    tensors = args[0]
    results: list[Any] = [None] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, RaggedDTensor) and not tensor.numel():
            norms = func([tensor._local_tensor.new_empty(tensor.shape)], *args[1:], **kwargs)
            results[i] = replicated(norms[0], tensor._spec)
            continue
        if isinstance(tensor, RaggedDTensor):
            key: Any = (tensor._spec.mesh, tensor._spec.reduce_dims, tensor.dtype)
        else:
            key = type(tensor)  # stock DTensors and plain tensors do not mix
        alike.setdefault(key, []).append(i)
    meshes = [tensor._spec.mesh for tensor in tensors if isinstance(tensor, RaggedDTensor)]
    widest = max(meshes, key=DeviceMesh.size)  # all ranks have all norms: torch computes only with those of one mesh
    for key, indices in alike.items():
        if isinstance(key, type):
            norms = func([tensors[i] for i in indices], *args[1:], **kwargs)
        else:
            norms = _norms([tensors[i] for i in indices], order, dtype, widest, _is_left_partial(tensors))
        for i, norm in zip(indices, norms, strict=True):
            results[i] = norm
    return results


def _norms(
    tensors: Sequence[RaggedDTensor], order: float, dtype: torch.dtype | None, mesh: DeviceMesh, leaves_partial: bool
) -> list[DTensor]:
    """Norms of tensors that have one dtype and are held by the same ranks; as tensors of ``mesh``."""
    spec, accurate = tensors[0]._spec, accurate_dtype(dtype or tensors[0].dtype)
    # An empty local shard has no largest element, nor a norm of negative order: insert a neutral element.
    neutral = inf if order < 0 else 0.0
    locals_ = [tensor._local_tensor for tensor in tensors]
    locals_ = [local if local.numel() else local.new_full((1,), neutral) for local in locals_]
    partial = torch.stack(foreach_norm(locals_, order, dtype=accurate))
    partial = partial if order in (0, inf, -inf) else partial.pow(order)
    leaves_partial = leaves_partial and abs(order) != inf
    for dim in () if leaves_partial else spec.reduce_dims:
        combine_norms(partial, order, spec.mesh.get_group(dim))
    norms = finish_norm(partial, order).to(_norm_dtype(tensors[0].dtype, dtype)).unbind()
    if leaves_partial:
        return [_partial(norm, _placement_of(order), spec) for norm in norms]
    scalar = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, TensorMeta(norms[0].shape, (), norms[0].dtype))
    return [make_dtensor(ReplicatedDTensor, norm, scalar) for norm in norms]


def extreme_handler(is_max: bool) -> Handler:
    def handler(func: Any, args: Args, kwargs: Kwargs) -> Any:
        tensor = args[0]
        if not isinstance(tensor, RaggedDTensor) or _names_dims(func, args, kwargs):
            return gather_all(func, args, kwargs)
        local = tensor._local_tensor
        if tensor.numel() == 0:
            return _of_nothing(func, tensor, args[1:], kwargs)
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
        return replicated(result.bool() if is_bool else result, tensor._spec)

    return handler


def any_handler(is_any: bool) -> Handler:
    def local(tensor: RaggedDTensor, *_: Any, **__: Any) -> torch.Tensor:
        elements = tensor._local_tensor
        return (elements.any() if is_any else elements.all()).to(torch.uint8)

    op = dist.ReduceOp.MAX if is_any else dist.ReduceOp.MIN
    # torch makes a byte from bytes.
    return reduction(local, op, lambda result, tensor: result if tensor.dtype == torch.uint8 else result.bool())


def equal(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Handle ``torch.equal``: the same answer on all ranks."""
    first, second = args
    if not isinstance(first, RaggedDTensor):
        first, second = second, first
    if first.shape != second.shape:
        return False
    if first.dim() == 0:
        return torch.equal(scalar_operand(first), scalar_operand(second))
    same = torch.equal(first._local_tensor, operand(func, second, first._spec))
    answer = torch.tensor(int(same), device=first._local_tensor.device)
    over_ranks(func, answer, dist.ReduceOp.MIN, first._spec.mesh, first._spec.reduce_dims)
    return bool(answer.item())


def allclose(func: Any, args: Args, kwargs: Kwargs) -> bool:
    answer: DTensor = torch.isclose(*args, **kwargs).all()  # type: ignore[assignment]
    return bool(answer.full_tensor().item())


aten = torch.ops.aten

BY_OPERATOR: dict[Any, Handler] = {
    aten._foreach_norm.Scalar: foreach_norms,
    aten._foreach_max.default: lambda _func, args, _kwargs: [item.max() for item in args[0]],
    aten.sum.default: sum_handler,
    aten.sum.dim_IntList: sum_handler,
    aten.mean.default: mean_handler,
    aten.mean.dim: mean_handler,
    aten.linalg_vector_norm.default: norm_handler,
    aten.norm.Scalar: norm_handler,
    aten.max.default: extreme_handler(is_max=True),
    aten.min.default: extreme_handler(is_max=False),
    aten.amax.default: extreme_handler(is_max=True),
    aten.amin.default: extreme_handler(is_max=False),
    aten.any.default: any_handler(is_any=True),
    aten.all.default: any_handler(is_any=False),
    aten.count_nonzero.default: reduction(lambda item, *_, **__: item._local_tensor.count_nonzero(), dist.ReduceOp.SUM),
    aten.equal.default: equal,
    aten.allclose.default: allclose,
}

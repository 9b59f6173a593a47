"""Operations on local shards: element-wise ones, ``_foreach_*`` and ``_fused_*``, and the creation of tensors.

Handlers, registered in the table of ``ops``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ...._torch import local_tensor
from ..dtensor import RaggedDTensor, is_alike, shard_whole
from ..ownership import note_write_of_all_ranks, writes
from ..placement import RaggedSpec
from .operands import (
    FUSED_OPTIMIZERS,
    Args,
    Kwargs,
    Larger,
    ReplicatedDTensor,
    as_scalar,
    check_generators,
    from_scalar,
    is_tensors,
    operand,
    over_ranks,
    pick,
    replicated,
    scalar_operand,
    touch,
    wrap_local_shard,
    written,
    written_arguments,
)
from .views import as_in, first_ragged, gather_all, write_elsewhere

# NaNs that no computation makes, by the size of an element.
_MARKS = {2: (torch.int16, 0x7FED), 4: (torch.int32, 0x7FC0FEED), 8: (torch.int64, 0x7FF80000FEEDFEED)}
_has_marks = False  # in this process


def empty_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Memory for a tensor that was on the meta device (``to_empty()``) is marked until it is written to."""
    global _has_marks
    result = pointwise(func, args, kwargs)
    if args[0].is_meta and (mark := _mark_of(result._local_tensor)) is not None:
        mark.fill_(_MARKS[result.dtype.itemsize][1])
        _has_marks = True
    return result


def was_left_empty(local: torch.Tensor) -> bool:
    """Whether nobody has written to the memory of ``empty_like``. A rank without elements does not know."""
    # Whoever reads an element waits for a device, and elements in host memory may be on their way.
    mark = _mark_of(local) if _has_marks else None
    return mark is not None and mark.item() == _MARKS[local.dtype.itemsize][1]


def _mark_of(local: torch.Tensor) -> torch.Tensor | None:
    if local.is_meta or not local.numel() or not local.is_floating_point() or local.dtype.itemsize not in _MARKS:
        return None
    return local.detach().reshape(-1)[:1].view(_MARKS[local.dtype.itemsize][0])


def pointwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if kwargs.get("memory_format") is not None:
        kwargs = {**kwargs, "memory_format": torch.contiguous_format}  # local shards have no other memory format
    targets = written(func, args, kwargs) if written_arguments(func) else ()
    if targets:
        model = targets[0]
        if not isinstance(model, RaggedDTensor):
            return write_elsewhere(func, model, args, kwargs)
    else:
        operands = [item for item in (*args, *kwargs.values()) if isinstance(item, RaggedDTensor)]
        model = operands[0] if len(operands) == 1 else max(operands, key=lambda item: (item.dim(), item.numel()))
    spec = model._spec
    if spec.is_scalar:
        return _pointwise_scalar(func, args, kwargs, model, is_written=bool(targets))
    if kwargs.get("out") is not None:
        shapes = [item.shape for item in args if isinstance(item, torch.Tensor)]
        if torch.broadcast_shapes(*shapes) != spec.shape:
            raise _other_shape(func, model)
    read = None if targets else model
    try:
        local_args = [
            item._local_tensor
            if type(item) is RaggedDTensor and item._spec is spec  # the usual case
            else operand(func, item, spec, read)
            if isinstance(item, torch.Tensor)
            else item
            for item in args
        ]
        local_kwargs = {
            key: operand(func, item, spec, read) if isinstance(item, torch.Tensor) else item
            for key, item in kwargs.items()
        }
    except Larger:
        if targets:
            raise _other_shape(func, model) from None
        return gather_all(func, args, kwargs)
    result = func(*local_args, **local_kwargs)
    if targets:
        increment_version(model._local_tensor)  # like note_write_of_all_ranks(): nothing else counts it in a dispatch
        writes.count += 1
        return model
    if isinstance(result, torch.Tensor):
        return wrap_local_shard(result, spec)
    return type(result)([wrap_local_shard(item, spec) for item in result])


def _other_shape(func: Any, target: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"{func}: the result does not have the shape of the sharded tensor that it would be written to, "
        f"{tuple(target.shape)}"
    )


def copy_into(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Like ``pointwise``; also copies from a plain tensor with the whole values, the same on every rank: each rank
    takes its local shard."""
    target, source = args[:2]
    # A plain tensor that autograd must follow cannot be mixed with a sharded one: pointwise() refuses it.
    is_recorded = source.requires_grad and torch.is_grad_enabled()
    if isinstance(target, RaggedDTensor) and not isinstance(source, DTensor) and source.dim() and not is_recorded:
        if torch.broadcast_shapes(source.shape, target.shape) != target.shape:
            raise RuntimeError(
                f"{func}: a tensor of shape {tuple(source.shape)} cannot be copied into a sharded one of shape "
                f"{tuple(target.shape)}: pass the whole values, the same on every rank"
            )
        local = shard_whole(source.expand(target.shape), target._spec)
        args = (target, wrap_local_shard(local, target._spec), *args[2:])
    if isinstance(target, RaggedDTensor) and target._spec.is_scalar and type(source) is RaggedDTensor:
        if source._spec.is_sharded_like(target._spec):
            # Not through 0-dim views: torch.compile does not allow a write to a view at the end of a graph (torch
            # 2.13).
            func(target._local_tensor, source._local_tensor, *args[2:], **kwargs)
            note_write_of_all_ranks(target._local_tensor)
            return target
    return pointwise(func, args, kwargs)


def divide(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Like ``pointwise``, for operators that raise on a CPU when an integer is divided by zero."""
    dividend, divisor = args[:2]
    is_integer = all(
        not (item.is_floating_point() or item.is_complex()) if isinstance(item, torch.Tensor) else isinstance(item, int)
        for item in (dividend, divisor)
    )
    is_true_division = "div" in func._schema.name and "floor" not in func._schema.name
    if is_integer and not (is_true_division and kwargs.get("rounding_mode") is None):
        sharded = dividend if isinstance(dividend, RaggedDTensor) else divisor
        # Raise on every rank, not only on those that hold such an element, and before anything is written.
        is_zero = divisor == 0
        if isinstance(is_zero, torch.Tensor):
            is_zero = bool(scalar_operand(is_zero.any()))
        if is_zero and sharded.device.type == "cpu" and math.prod(sharded.shape):
            raise RuntimeError(f"{func} of a sharded tensor of shape {tuple(sharded.shape)}: ZeroDivisionError")
    return pointwise(func, args, kwargs)


def _pointwise_scalar(func: Any, args: Args, kwargs: Kwargs, model: RaggedDTensor, is_written: bool) -> Any:
    """``pointwise`` for 0-dim tensors. Dtype promotion depends on a tensor being 0-dim, so every rank computes with
    0-dim tensors; on ranks that hold nothing, their values are arbitrary."""

    def operand(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if type(item) is RaggedDTensor and item._spec.is_sharded_like(model._spec):
            return as_scalar(item._local_tensor)
        if item.dim() > 0:
            raise Larger
        return scalar_operand(item)

    try:
        result = func(*map(operand, args), **{key: operand(item) for key, item in kwargs.items()})
    except Larger:
        if is_written:
            raise RuntimeError(
                f"{func}: the result is not 0-dim, but the sharded tensor that it would be written to is"
            ) from None
        return gather_all(func, args, kwargs)
    if is_written:
        touch(model._local_tensor)
        note_write_of_all_ranks(model._local_tensor)
        return model
    if isinstance(result, torch.Tensor):
        return from_scalar(result, model._spec)
    return type(result)([from_scalar(item, model._spec) for item in result])


# ---- ``_foreach_*`` and ``_fused_*``: operations on lists of tensors, where the i-th tensors of all lists belong
# together


def per_element(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``_foreach_*`` and ``_fused_*``: the i-th tensors of all lists belong together."""
    lead = next(i for i, item in enumerate(args) if is_tensors(item))
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
        picked = [pick(item, indices, num) for item in args]
        picked_kwargs = {key: pick(item, indices, num) for key, item in kwargs.items()}
        if indices is not others:
            found = _on_locals(func, tuple(picked), picked_kwargs, picked[lead])
        else:
            if func._schema.name.startswith("aten::_fused_"):
                _refuse_other_layouts(func, picked)
            # Placed like their leaders: in place, stock rules would let a leader change its layout.
            picked = [_like_leaders(func, item, picked[lead]) if is_tensors(item) else item for item in picked]
            found = func(*picked, **picked_kwargs)
        for i, result in zip(indices, found or (), strict=False):
            results[i] = result
    return results if any(item is not None for item in results) else None


def _like_leaders(func: Any, tensors: Sequence[torch.Tensor], leaders: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    result = []
    for tensor, leader in zip(tensors, leaders, strict=True):
        if isinstance(tensor, RaggedDTensor):
            if not isinstance(leader, DTensor) and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{func}: a torch.Tensor of shape {tuple(leader.shape)} and a sharded tensor cannot be used "
                    "together: use .full_tensor() or .to_local() of the sharded one, or torch.no_grad()"
                )
            tensor = as_in(leader, func)(tensor)
            if isinstance(leader, DTensor) and not isinstance(leader, ReplicatedDTensor):
                tensor = tensor.redistribute(placements=leader.placements)  # type: ignore[attr-defined]
        result.append(tensor)
    return result


def _on_locals(func: Any, args: Args, kwargs: Kwargs, leaders: Sequence[RaggedDTensor]) -> Any:
    specs = [leader._spec for leader in leaders]
    positions = written_arguments(func)
    # Fused optimizers write to gradients only to unscale them.
    grads = args[1] if func._schema.name in FUSED_OPTIMIZERS and kwargs.get("grad_scale") is None else None
    local_args: list[Any] = []
    written_locals: list[torch.Tensor] = []
    for position, value in enumerate(args):
        if is_tensors(value):
            # Plain 0-dim tensors, such as the step counts of optimizers.
            if {*map(type, value)} == {torch.Tensor} and not any(map(torch.Tensor.dim, value)):
                local_args.append(value)
                continue
            is_written = position in positions
            if specs[0].is_scalar:
                pairs = zip(value, specs, strict=True)
                local_args.append([as_scalar(_other_operand(func, item, spec, is_written)) for item, spec in pairs])
                if is_written:
                    written_locals += [item._local_tensor for item in value if type(item) is RaggedDTensor]
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
            local_args.append(scalar_operand(value) if isinstance(value, torch.Tensor) and value.dim() == 0 else value)
    local_kwargs = {
        key: scalar_operand(value) if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for key, value in kwargs.items()
    }
    result = func(*local_args, **local_kwargs)
    if written_locals:
        if specs[0].is_scalar:
            for local in written_locals:
                touch(local)
        increment_version(written_locals)  # as note_write_of_all_ranks() does
        writes.count += 1
        increment_version(leaders)  # autograd looks at these; and the state of an optimizer is not saved for backward
    if result is None or func._schema.name.endswith("_"):
        return None
    wrap = from_scalar if specs[0].is_scalar else wrap_local_shard
    return [wrap(item, spec) for item, spec in zip(result, specs, strict=True)]


def _other_operand(func: Any, tensor: torch.Tensor, spec: RaggedSpec, is_written: bool) -> torch.Tensor:
    if is_written and not is_alike(tensor, spec) and tensor.dim() > 0:  # a write to a converted copy would be lost
        raise RuntimeError(
            f"{func}: it writes to a tensor that is placed {list(getattr(tensor, 'placements', []))}, but the "
            f"parameter of shape {tuple(spec.shape)} that it belongs to is placed {list(spec.placements)}: was the "
            "optimizer's state loaded from tensors in another layout? Convert them with distribute_ragged()"
        )
    try:
        return operand(func, tensor, spec)
    except Larger:
        raise RuntimeError(
            f"{func}: a tensor of shape {tuple(tensor.shape)} does not fit the sharded tensor of shape "
            f"{tuple(spec.shape)} that it belongs to"
        ) from None


def _refuse_other_layouts(func: Any, args: Sequence[Any]) -> None:
    for tensor in chain.from_iterable(filter(is_tensors, args)):
        if isinstance(tensor, RaggedDTensor):
            raise RuntimeError(
                f"{func}: a gradient or optimizer state is placed {list(tensor.placements)}, but its parameter is "
                "sharded differently"
            )


def unscale(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Handle GradScaler's unscale: an inf or NaN on any rank counts on all ranks."""
    tensors, found_inf, inverse_scale = args
    locals_ = [local_tensor(item) if isinstance(item, DTensor) else item for item in tensors]
    func(locals_, found_inf, inverse_scale)
    increment_version(locals_)
    meshes = {
        (item.device_mesh, dim) for item in tensors if isinstance(item, DTensor) for dim in range(item.device_mesh.ndim)
    }
    for mesh, dim in sorted(meshes, key=lambda pair: (tuple(pair[0].mesh.flatten().tolist()), pair[1])):
        over_ranks(func, found_inf, dist.ReduceOp.MAX, mesh, [dim])


# ---- New tensors made like sharded ones, and random numbers


def new(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``new_empty(size)`` and the like: sharded like ``self`` if it has its shape, else replicated."""
    tensor, size, *rest = args
    spec, local = tensor._spec, tensor._local_tensor
    if tuple(size) != tuple(spec.shape):
        return replicated(func(local, size, *rest, **kwargs), spec)
    if func is torch.ops.aten.new_empty_strided.default:
        # Without the strides: a local shard has no memory format. (Autograd makes a leaf's gradient this way when
        # something else holds the one that arrived.)
        return wrap_local_shard(local.new_empty(spec.local_shape, **kwargs), spec)
    return wrap_local_shard(func(local, spec.local_shape, *rest, **kwargs), spec)


def random(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Draw the whole tensor and keep this rank's local shard. A tensor without the shape of a sharded one is drawn
    whole on every rank."""
    # So the values are those of one device, if the ranks' generators agree. Those of replicas must: replicas would
    # differ from each other.
    name = func._schema.name
    tensor = args[0]
    is_in_place = name.endswith("_")
    if not isinstance(tensor, RaggedDTensor) or not (is_in_place or name.endswith("_like")):
        spec = first_ragged((*args, *kwargs.values()))._spec
        check_generators(func, spec, range(spec.mesh.ndim), kwargs.get("generator"))
        return gather_all(func, args, kwargs)
    if any(isinstance(item, torch.Tensor) for item in args[1:]):
        raise RuntimeError(f"{func} with tensors as arguments is not supported on a sharded tensor")
    spec, local = tensor._spec, tensor._local_tensor
    replicas = [i for i, item in enumerate(spec.placements) if item.is_replicate()]
    check_generators(func, spec, replicas, kwargs.get("generator"))
    whole = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    drawn_shard = shard_whole(func(whole, *args[1:], **kwargs), spec)
    if is_in_place:
        local.copy_(drawn_shard)
        note_write_of_all_ranks(local)
        return tensor
    return wrap_local_shard(drawn_shard, spec)


def make_out(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``torch.eye(out=p)`` and the like: make the whole tensor and shard it."""
    target = kwargs["out"]
    whole = torch.empty(target.shape, dtype=target.dtype, device=target._local_tensor.device)
    func(*args, **{**kwargs, "out": whole})
    target._local_tensor.copy_(shard_whole(whole, target._spec))
    note_write_of_all_ranks(target._local_tensor)
    return target

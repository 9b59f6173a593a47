"""``_foreach_*`` and ``_fused_*``: operations on lists of tensors, of which the i-th of every list belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..._torch import local_tensor
from ..edits import note_write_of_all_ranks
from ..spec import RaggedSpec
from ..tensor import RaggedDTensor
from .gathering import gathered_with_warning
from .operands import Larger, as_scalar, from_scalar, operand, scalar_operand, touch, wrap_local_shard
from .schema import FUSED_OPTIMIZERS, Args, Kwargs, is_tensors, written_positions


def per_element(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``_foreach_*`` and ``_fused_*``: tensors i of all lists belong together."""
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
        part = [_pick(item, indices, num) for item in args]
        part_kwargs = {key: _pick(item, indices, num) for key, item in kwargs.items()}
        if indices is not others:
            found = _on_locals(func, tuple(part), part_kwargs, part[lead])
        else:
            if func._schema.name.startswith("aten::_fused_"):
                _refuse_other_layouts(func, part)
            # Placed like their leaders: in place, stock rules would let a leader change its layout.
            part = [_like_leaders(func, item, part[lead]) if is_tensors(item) else item for item in part]
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
            tensor = gathered_with_warning(func)(tensor).redistribute(placements=leader.placements)
        result.append(tensor)
    return result


def _pick(value: Any, indices: Sequence[int], num: int) -> Any:
    """The elements that belong to some of the tensors: of lists, and of 1-D tensors of scalars."""
    if isinstance(value, (list, tuple)) and len(value) == num:
        return [value[i] for i in indices]
    if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == num:
        return value[list(indices)]
    return value


def _on_locals(func: Any, args: Args, kwargs: Kwargs, leaders: Sequence[RaggedDTensor]) -> Any:
    specs = [leader._spec for leader in leaders]
    writes = written_positions(func)
    # Fused optimizers write to gradients only to unscale them.
    grads = args[1] if func._schema.name in FUSED_OPTIMIZERS and kwargs.get("grad_scale") is None else None
    local_args: list[Any] = []
    written_locals: list[torch.Tensor] = []
    for position, value in enumerate(args):
        if is_tensors(value):
            if _are_counters(value):
                local_args.append(value)
                continue
            is_written = position in writes
            if specs[0].is_scalar:
                locals_ = [
                    _other_operand(func, item, spec, is_written) for item, spec in zip(value, specs, strict=True)
                ]
                locals_ = [as_scalar(item) for item in locals_]
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
        note_write_of_all_ranks(written_locals)
        increment_version(leaders)  # autograd looks at these; and the state of an optimizer is not saved for backward
    if result is None or func._schema.name.endswith("_"):
        return None
    wrap = from_scalar if specs[0].is_scalar else wrap_local_shard
    return [wrap(item, spec) for item, spec in zip(result, specs, strict=True)]


def _are_counters(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are plain 0-dim tensors, such as the step counts of optimizers."""
    return {*map(type, tensors)} == {torch.Tensor} and not any(map(torch.Tensor.dim, tensors))


def _other_operand(func: Any, tensor: torch.Tensor, spec: RaggedSpec, is_written: bool) -> torch.Tensor:
    is_alike = type(tensor) is RaggedDTensor and tensor._spec.is_sharded_like(spec)
    if is_written and not is_alike and tensor.dim() > 0:  # a write to a converted copy would be lost
        raise RuntimeError(
            f"{func}: a tensor that is written to is placed {list(getattr(tensor, 'placements', []))}, but the "
            f"parameter of shape {tuple(spec.shape)} that it belongs to is placed {list(spec.placements)}: was "
            "the optimizer's state loaded from tensors in another layout? Convert them with distribute_ragged()"
        )
    try:
        return operand(func, tensor, spec)
    except Larger:
        raise RuntimeError(
            f"{func}: a tensor of shape {tuple(tensor.shape)} does not fit the sharded tensor of shape "
            f"{tuple(spec.shape)} that it belongs to"
        ) from None


def _refuse_other_layouts(func: Any, args: Sequence[Any]) -> None:
    for value in args:
        for tensor in value if is_tensors(value) else ():
            if isinstance(tensor, RaggedDTensor):
                raise RuntimeError(
                    f"{func}: a gradient or optimizer state is placed {list(tensor.placements)}, but its parameter is "
                    "not sharded like it"
                )


def unscale(func: Any, args: Args, kwargs: Kwargs) -> None:
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

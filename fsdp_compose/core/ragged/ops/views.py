"""Views, and everything without a handler of its own.

A view of a contiguous range stays ragged; every other view is gathered. If no other file of ``ops`` handles an
operation, it runs on the whole plain tensor, on every rank, with one warning per operator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ...._torch import (
    DTensorSpec,
    current_graph_task_id,
    local_tensor,
    make_dtensor,
    share_versions,
    wrapper_under_construction,
)
from ..dtensor import RaggedDTensor, gathered, inference_mode_of, make_view, shard_whole
from ..ownership import OWNER_ATTRIBUTE, MixedOperandsError, describe_owner, note_write_of_all_ranks
from ..placement import RaggedShard, RaggedSpec
from .operands import (
    INDEXED_WRITES,
    Args,
    GatheredView,
    Kwargs,
    ReplicatedDTensor,
    check_equal,
    map_instances,
    may_mix,
    refuse_collectives,
    replicated,
    tensors_in,
    written,
)

# ---- The fallback: operations without a handler run on whole, plain tensors on every rank, with a warning
#
# So they need no rule of stock DTensor, and an error that depends on the elements is raised on every rank. A write to a
# sharded tensor goes to a whole copy, from which every rank then copies its local shard back.


aten = torch.ops.aten


def gather_all(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run the operation on the whole tensors; tensors in its result are replicated, or plain if they come from plain
    ones, which may differ between ranks."""
    refuse_collectives(func)
    _refuse_wrappers()
    targets = written(func, args, kwargs)
    if targets:
        return write_through(func, args, kwargs)
    warn_gathers(func)
    own = _own_tensors(func, args, kwargs)
    spec = first_ragged((*args, *kwargs.values()))._spec
    result = func(*map_instances(DTensor, _whole, args), **map_instances(DTensor, _whole, kwargs))
    return result if own else map_instances(torch.Tensor, lambda item: replicated(item, spec), result)


def look_up(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``F.embedding()`` and the like, whose weight must not be a sharded parameter."""
    weight, indices = args[:2]
    # The indices are those of a rank's own samples, though _own_tensors() takes integers to be the same everywhere.
    if hasattr(weight, OWNER_ATTRIBUTE) and not isinstance(indices, DTensor):
        raise MixedOperandsError(
            f"{func}: got mixed a torch.Tensor of indices of shape {tuple(indices.shape)} and {describe_owner(weight)}"
        )
    return gather_all(func, args, kwargs)


def first_ragged(values: Any) -> RaggedDTensor:
    """The first of the ragged tensors in ``values``, or in lists in it."""
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, RaggedDTensor):
                return item
    raise AssertionError("dispatched without a ragged tensor")


def write_through(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``p[mask] = value`` and the like: run it on the whole tensor, and copy this rank's local shard back."""
    targets = written(func, args, kwargs)
    if not any(isinstance(item, RaggedDTensor) for item in targets):
        return write_elsewhere(func, targets[0], args, kwargs)
    names = [argument.name for argument in func._schema.arguments if argument.alias_info is not None]
    is_known = func.namespace == "aten" and (func._schema.name.endswith("_") or names != ["self"])
    if not is_known or not all(isinstance(item, RaggedDTensor) for item in targets):
        raise _unknown_write(func)
    warn_gathers(func)
    if func._schema.name not in INDEXED_WRITES:
        for plain in _own_tensors(func, args, kwargs):
            check_equal(func, plain, first_ragged(targets)._spec.mesh, describe_owner(first_ragged(targets)))
    wholes = {id(item): gathered(item).full_tensor() for item in targets}  # type: ignore[arg-type]

    def whole(item: DTensor) -> torch.Tensor:
        return wholes[id(item)] if id(item) in wholes else _whole(item)

    memory = [wholes[id(item)].data_ptr() for item in targets]
    result = func(*map_instances(DTensor, whole, args), **map_instances(DTensor, whole, kwargs))
    for item, address in zip(targets, memory, strict=True):
        if wholes[id(item)].shape != item.shape or wholes[id(item)].data_ptr() != address:
            raise _unknown_write(func)
    for item in targets:
        assert isinstance(item, RaggedDTensor)
        item._local_tensor.copy_(shard_whole(wholes[id(item)], item._spec))
        note_write_of_all_ranks(item._local_tensor)
    back = {id(wholes[id(item)]): item for item in targets}
    spec = first_ragged(targets)._spec
    return map_instances(
        torch.Tensor, lambda item: back[id(item)] if id(item) in back else replicated(item, spec), result
    )


def _unknown_write(func: Any) -> NotImplementedError:
    return NotImplementedError(
        f"{func} would write to a sharded tensor in an unsupported way: write to all of it, to slices of its dim 0, "
        "or to its to_local()"
    )


def write_elsewhere(func: Any, target: torch.Tensor, args: Args, kwargs: Kwargs) -> Any:
    """Handle a write to a tensor that is not ragged, with ragged ones among the operands: with the whole of those."""
    if not isinstance(target, DTensor) and torch.is_grad_enabled():
        raise RuntimeError(
            f"{func} cannot write a sharded tensor to a torch.Tensor: use .full_tensor() or .to_local() of the sharded "
            "one, or torch.no_grad()"
        )
    kind: Any = RaggedDTensor if isinstance(target, DTensor) else DTensor
    like = as_in(target, func)
    return func(*map_instances(kind, like, args), **map_instances(kind, like, kwargs))


def as_in(target: torch.Tensor, func: Any) -> Callable[[Any], torch.Tensor]:
    """How to convert operands of an operation that writes to ``target``, which is not ragged: to whole tensors of its
    kind, which is plain, replicated or that of stock DTensor; even chunks are tensors of the last kind as they are."""
    if type(target) is DTensor:
        return lambda item: _as_stock(item, func)
    warn_gathers(func)
    if not isinstance(target, DTensor):
        return _whole
    if isinstance(target, ReplicatedDTensor):
        return lambda item: replicated(_whole(item), item._spec)
    return gathered


def _as_stock(tensor: RaggedDTensor, func: Any) -> DTensor:
    spec = tensor._spec
    if not spec.is_even:
        warn_gathers(func)
        return gathered(tensor)
    return make_dtensor(DTensor, tensor._local_tensor, DTensorSpec(spec.mesh, spec.placements, spec.tensor_meta))


def item(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(_whole(args[0]))


# ---- Helpers of the fallback


def _whole(tensor: DTensor) -> torch.Tensor:
    return (gathered(tensor) if isinstance(tensor, RaggedDTensor) else tensor).full_tensor()


def _refuse_wrappers() -> None:
    """Raise if a data-parallel wrapper is being put around a sharded model: it flattens the parameters first."""
    found = wrapper_under_construction()
    if found is not None:
        wrapper, module = found
        fqns = [fqn for fqn, param in module.named_parameters() if isinstance(param, RaggedDTensor)]
        raise RuntimeError(
            f"{wrapper}(): {', '.join(fqns[:1]) or 'a parameter'} of this {type(module).__name__} is sharded by "
            "fsdp_compose, which reduces its gradients already: use the model without the wrapper. To replicate over "
            "more ranks, call fully_shard() with a mesh (replicate, shard); for parts that should stay whole, use "
            "replicate()"
        )


def _own_tensors(func: Any, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """The plain tensors among the arguments that may hold a rank's own share of something; raise where they may not be
    mixed with sharded ones."""
    # Autograd joins the gradients of pieces, with plain zeros for a piece that got none: the same on every rank.
    if func in _JOINS and current_graph_task_id() != -1:
        return []
    tensors = [*tensors_in((args, kwargs))]
    # Integers and booleans are taken for indices and masks, which are the same on every rank too.
    own = [t for t in tensors if not isinstance(t, DTensor) and t.dim() and (t.is_floating_point() or t.is_complex())]
    if own:
        targets = written(func, args, kwargs)
        for item in tensors:
            is_read = all(item is not target for target in targets)
            if isinstance(item, RaggedDTensor) and not may_mix(item if is_read else None):
                raise MixedOperandsError(
                    f"{func}: got mixed a torch.Tensor of shape {tuple(own[0].shape)} and {describe_owner(item)}"
                )
    return own


# Called by the backward of unbind(), split() and chunk().
_JOINS = {aten.stack.default, aten.cat.default}


@cache
def warn_gathers(func: Any) -> None:
    warnings.warn(
        f"{func} all-gathers sharded tensors (this warning appears once per operator). If it runs in every step, "
        "use to_local() or operations that work on shards",
        stacklevel=3,
    )


# ---- Ragged and gathered views


def alias(func: Any, args: Args, kwargs: Kwargs) -> RaggedDTensor:
    tensor: RaggedDTensor = args[0]
    with inference_mode_of(tensor), share_versions():
        return RaggedDTensor(tensor._local_tensor.view(tensor._local_tensor.shape), tensor._spec)


def view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle reshapes and slices. A contiguous range of the flattened tensor is one on every rank too."""
    tensor: RaggedDTensor = args[0]
    spec = tensor._spec
    if func is aten.as_strided.default and tensor.is_part and (len(args) > 3 or "storage_offset" in kwargs):
        raise NotImplementedError(f"{func} with a storage_offset is not supported on a slice of a sharded tensor")
    # On the meta device, with indices as element numbers, the same view shows which elements it selects.
    like = torch.empty(spec.shape, dtype=torch.uint8, device="meta")
    result = func(like, *args[1:], **kwargs)
    if isinstance(result, torch.Tensor):
        view = _range_view(tensor, result)
        return gathered_view(func, args, kwargs) if view is None else view
    views = [_range_view(tensor, item) for item in result]
    return gathered_view(func, args, kwargs) if any(view is None for view in views) else type(result)(views)


def _range_view(tensor: RaggedDTensor, meta: torch.Tensor) -> RaggedDTensor | None:
    """The range of elements that ``meta`` selects (a view of a meta tensor with one-byte elements); None if it is not
    contiguous."""
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
    counts = spec.ragged.flattened(whole).counts.within(start, stop)
    placement = RaggedShard(counts, flat=True)
    row = prod(shape[1:])
    if not spec.ragged.flat and shape and shape[1:] == whole[1:] and row:
        placement = RaggedShard(counts.divided_by(row))
    view_spec = RaggedSpec.make(spec.mesh, spec.with_ragged(placement), shape, spec.dtype)
    own_start, own_stop = spec.element_range
    begin = min(max(start, own_start), own_stop) - own_start
    with inference_mode_of(tensor), share_versions():
        mine = local.view(-1)[begin : begin + counts[spec.rank]].view(view_spec.local_shape)
        return make_view(mine, view_spec, True)


def as_real(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """View a complex tensor as a real one with a last dimension of two, or back: every rank keeps the same numbers.
    (``torch.optim`` does this to complex parameters.)"""
    tensor: RaggedDTensor = args[0]
    spec, local = tensor._spec, tensor._local_tensor
    to_real = func is aten.view_as_real.default
    if not to_real and tensor.is_part:  # numbers that begin at odd places cannot be viewed as complex ones
        return gathered_view(func, args, kwargs)
    result = func(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
    ragged = spec.ragged
    if ragged.flat or not spec.shape or not result.shape:  # rows stay rows
        if not to_real and any(count % 2 for count, _ in ragged.counts.pieces):
            return gathered_view(func, args, kwargs)
        ragged = RaggedShard(ragged.counts.times(2) if to_real else ragged.counts.divided_by(2), flat=True)
    view_spec = RaggedSpec.make(spec.mesh, spec.with_ragged(ragged), tuple(result.shape), result.dtype)
    with inference_mode_of(tensor), share_versions():
        numbers = func(local if to_real else local.view(-1, 2)).view(view_spec.local_shape)
        return make_view(numbers, view_spec, tensor.is_part)


def gathered_view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make a view that is not a range on every rank: a view of a gathered copy."""
    tensor: RaggedDTensor = args[0]
    warn_gathers(func)
    plain = gathered(tensor)
    # The whole tensor, also where another placement shards it: stock rules do that best.
    plain = plain.redistribute(placements=[Replicate()] * plain.device_mesh.ndim)
    whole = GatheredView(plain, tensor, local_tensor(plain), [])
    whole.note_version()
    views = func(local_tensor(plain), *args[1:], **kwargs)
    return whole.view_as_well(map_instances(torch.Tensor, lambda view: replicated(view, tensor._spec), views))

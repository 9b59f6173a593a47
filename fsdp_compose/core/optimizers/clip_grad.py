"""Gradient clipping with one collective, which works on whole flat gradients where possible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from operator import is_

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..._arguments import checked
from ..._torch import foreach_mul_, foreach_norm
from ..flat import (
    FlatParamHandle,
    ShardedGradient,
    check_segments,
    handle_of_segment,
    local_of,
    refuse_unreduced,
    sharded_param_of,
    sharded_param_owners,
    waiting,
)
from ..ragged import accurate_dtype, combine_norms, finish_norm, partial_norm

# On the CPU torch sums the norm of an fp32 tensor in fp32, element by element: the 1-norm of 10^8 elements was a third
# too small. Pieces of this length keep it accurate.
_PIECE_NUMEL = 1 << 16

_Groups = tuple[dist.ProcessGroup, ...]


@checked()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their norm, over all parameters together, is at most ``max_norm``.

    Does the same as ``torch.nn.utils.clip_grad_norm_`` (which is also correct on sharded parameters), but with a single
    all-reduce of one number per mesh dimension for all sharded parameters of the mesh, and with one kernel per flat
    gradient if all of its parameters are passed. Half-precision gradients are summed in fp32.

    Ranks: all ranks of the mesh, with the same parameters.

    Args:
        parameters: sharded parameters, the original parameters that ``fully_shard`` replaced, the result of
            ``flat_parameters()`` (also with ``local=True``), other DTensors, and plain tensors. Of a plain tensor, the
            gradient on this rank counts.
        max_norm: the largest norm that the gradients may have after clipping.
        norm_type: order of the norm: ``inf`` for the largest magnitude; 0 counts the tensors that are not zero.
        error_if_nonfinite: raise, on every rank, if the norm is NaN or infinite, and leave the gradients unchanged.

    Returns:
        The norm before clipping: a 0-dim tensor, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set, or a gradient has not been reduced yet.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    params, order = list(parameters), float(norm_type)
    if not all(map(sharded_param_owners.__contains__, map(id, params))):
        params = [sharded_param_of(param) for param in params]
    if waiting:
        refuse_unreduced("clip_grad_norm_()", params)
    found = _Gradients(params, order)
    partials = []
    by_groups = {groups: [_partial_norm(locals_, order)] for groups, locals_ in found.locals_by_groups.items()}
    while by_groups:
        groups = max(by_groups, key=len)  # the first of several equally long ones
        partial = _together(by_groups.pop(groups), order)
        if groups:  # combine over the innermost group, then with tensors whose other shards the outer groups hold
            combine_norms(partial, order, groups[-1])
            by_groups.setdefault(groups[:-1], []).append(partial)
        else:
            partials.append(partial.count_nonzero().to(partial.dtype) if order == 0 else partial)
    for grad in found.unfinished:
        norm = torch.linalg.vector_norm(grad, order)
        partials.append(partial_norm(norm.full_tensor().view(1), order))
    if not partials:
        return torch.tensor(0.0)
    stacked = torch.stack([partial.to(partials[0].device) for partial in partials])
    total = finish_norm(_together([*stacked], order) if order else stacked.sum(), order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; to "
            "clip them anyway, pass error_if_nonfinite=False"
        )
    found.scale_((max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


class _Gradients:
    """The gradients of some parameters, as tensors of this rank.

    If all sharded parameters of a handle are given, each once, and every gradient is our view of the flat gradient,
    the flat gradient is used as a whole. This is correct because all other elements in it (padding, unused parameters)
    are zero.

    Attributes:
        locals_by_groups: the tensors to take norms of, keyed by the process groups whose ranks hold the remaining
            shards; the key is empty for tensors that only this rank has. The order is that of the parameters, which is
            the same on all ranks.
        unfinished: DTensors that still need a reduction.
    """

    def __init__(self, params: Sequence[torch.Tensor], order: float) -> None:
        self.locals_by_groups: defaultdict[_Groups, list[torch.Tensor]] = defaultdict(list)
        self.unfinished: list[DTensor] = []
        self._scaled: list[torch.Tensor] = []
        self._whole: list[ShardedGradient] = []
        self._followed: set[FlatParamHandle] = set()
        self._order = order
        ids: set[int] | None = None
        done: set[int] = set()
        i = 0
        while i < len(params):
            param, start = params[i], i
            i += 1
            owner = sharded_param_owners.get(id(param))
            handle = owner[0]() if owner is not None else None
            if id(param) in done:
                continue
            if handle is None or handle in self._followed or not self._may_add_whole(handle):
                self._add(param)
                continue
            following = start + len(handle.sharded_params)
            if following <= len(params) and all(map(is_, params[start:following], handle.sharded_params)):
                self._add_whole(handle)  # in our order, so there is nothing to remember
                i = following
                continue
            ids = {*map(id, params)} if ids is None else ids
            if len(ids) == len(params) and ids.issuperset(handle.snapshot.ids):
                self._add_whole(handle)
                done.update(handle.snapshot.ids)
            else:
                self._add(param)

    def _may_add_whole(self, handle: FlatParamHandle) -> bool:
        self._follow(handle)
        # Order 0 counts the tensors that are not zero, so it must see each parameter's own.
        return self._order != 0 and handle.gradient.is_untouched()

    def scale_(self, scale: torch.Tensor) -> None:
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for local in self._scaled:
            by_kind.setdefault((local.device, local.dtype), []).append(local)
        with torch.no_grad():
            for (device, _), locals_ in by_kind.items():
                foreach_mul_(locals_, scale.to(device))
            for gradient in self._whole:
                gradient.zero_unpublished()  # their zeros became NaN if the scale is NaN

    def _follow(self, handle: FlatParamHandle) -> None:
        self._followed.add(handle)
        if handle.segments:
            check_segments(handle)
            handle.follow_user()

    def _add_whole(self, handle: FlatParamHandle) -> None:
        gradient = handle.gradient
        flat = gradient.flat
        if flat is not None:
            self._whole.append(gradient)
            self._scaled.append(flat)
            self._add_range(handle, range(len(handle.sharded_params)), flat)

    def _add_range(self, handle: FlatParamHandle, sharded_params: range, local: torch.Tensor) -> None:
        """Take norms of ``local``, what of a flat gradient belongs to these adjacent parameters."""
        if handle.tensor_parallel is not None:
            for others, indices in handle.tensor_parallel.by_groups(sharded_params).items():
                groups, locals_ = (handle.mesh.shard_group, *others), handle.gradient.published_locals(indices)
                if locals_:
                    self.locals_by_groups[groups].extend(locals_)
            return
        # Zeros (padding, unused parameters) would change a norm of negative order.
        locals_ = [local] if self._order >= 0 else handle.gradient.published_locals(sharded_params)
        self.locals_by_groups[(handle.mesh.shard_group,)].extend(locals_)

    def _add(self, param: torch.Tensor) -> None:
        handle = handle_of_segment(param)
        if handle is not None:
            self._follow(handle)
        grad = param.grad
        if grad is None:
            return
        local = local_of(grad)
        self._scaled.append(local)
        if handle is not None:
            self._whole.append(handle.gradient)
            sharded_params = next(item.sharded_params for item in handle.segments if item.parameter is param)
            self._add_range(handle, sharded_params, local)
        elif isinstance(grad, DTensor):
            if any(item.is_partial() for item in grad.placements):
                self.unfinished.append(grad)
                return
            sharded_dims = [dim for dim, item in enumerate(grad.placements) if not item.is_replicate()]
            self.locals_by_groups[tuple([grad.device_mesh.get_group(dim) for dim in sharded_dims])].append(local)
        else:
            self.locals_by_groups[()].append(local)


def _together(partials: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    if order == 0:
        return torch.cat([*partials])
    if len(partials) == 1:
        return partials[0]
    stacked = torch.stack([partial.to(partials[0].device) for partial in partials])
    return stacked.amax() if order == inf else stacked.amin() if order == -inf else stacked.sum(0)


def _partial_norm(locals_: list[torch.Tensor], order: float) -> torch.Tensor:
    """The term of the common norm of all ``locals_`` that ranks add up; in fp32, or in fp64 if one of them is fp64.
    For order 0, the number of nonzero elements of each."""
    device, dtype = locals_[0].device, torch.float32
    if order == 0:
        return torch.stack([local.count_nonzero().to(device, dtype) for local in locals_])
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for local in locals_:
        by_dtype.setdefault(local.dtype, []).extend(_pieces(local))
    norms: list[torch.Tensor] = []
    with torch.no_grad():
        for kind, pieces in by_dtype.items():
            dtype = torch.promote_types(dtype, kind.to_real())
            norms += foreach_norm(pieces, order, dtype=accurate_dtype(kind)) if pieces else []
        if not norms:
            return partial_norm(torch.empty(0, dtype=dtype, device=device), order)
        return partial_norm(torch.stack([norm.to(device, dtype) for norm in norms]), order)


def _pieces(local: torch.Tensor) -> Sequence[torch.Tensor]:
    if local.numel() <= _PIECE_NUMEL or local.device.type != "cpu":
        return [local] if local.numel() else []
    return local.reshape(-1).split(_PIECE_NUMEL)

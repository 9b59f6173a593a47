"""Gradient clipping with one collective."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ._requirements import PLAIN_FACES
from ._torch import foreach_mul_, foreach_norm, local_tensor
from .norms import combine_norms, finish_norm, total_norm_of
from .ragged import RaggedDTensor


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their norm, over all parameters together, is at most ``max_norm``.

    What ``torch.nn.utils.clip_grad_norm_`` does (which is right on sharded parameters too), with one all-reduce of one
    number for all sharded parameters of a mesh. Half-precision gradients are summed in fp32.

    Ranks: all ranks of the mesh, with the same parameters.

    Args:
        parameters: sharded parameters, and others, which count as they are on this rank.
        max_norm: of the gradients after clipping.
        norm_type: order of the norm, ``inf`` for the largest magnitude.
        error_if_nonfinite: raise, on every rank, if the norm is NaN or infinite; gradients are unchanged.

    Returns:
        The norm before clipping: a 0-dim tensor, equal on every rank.
    """
    if PLAIN_FACES:
        raise RuntimeError(
            "clip_grad_norm_() needs sharded parameters that know they are sharded, so torch 2.12 or newer; this is "
            f"torch {torch.__version__}"
        )
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    grads = [param.grad for param in parameters if param.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    order = float(norm_type)
    sharded = [grad for grad in grads if isinstance(grad, RaggedDTensor)]
    # What must be all-reduced together: the runs of sharded tensors of one mesh, whatever their shapes.
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for item in sharded:
        groups = tuple(item._spec.mesh.get_group(dim) for dim in item._spec.reduce_dims)
        parts.setdefault(groups, []).append(item._local_tensor)
    partials = []
    for groups, locals_ in parts.items():
        partial = _partial_norm(locals_, order)
        for group in groups:
            combine_norms(partial, order, group)
        partials.append(partial)
    others = [grad for grad in grads if not isinstance(grad, RaggedDTensor)]
    plain = [grad for grad in others if not isinstance(grad, DTensor)]
    if plain:
        partials.append(_partial_norm(plain, order))
    for grad in others:
        if isinstance(grad, DTensor):
            norm = torch.linalg.vector_norm(grad, order)
            partials.append(total_norm_of(norm.full_tensor().view(1), order))
    stacked = torch.stack([partial.to(partials[0].device) for partial in partials])
    combined = stacked.amax() if order == inf else stacked.amin() if order == -inf else stacked.sum()
    total = finish_norm(combined, order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; to "
            "clip them nevertheless, pass error_if_nonfinite=False"
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        local = local_tensor(grad) if isinstance(grad, DTensor) else grad
        by_kind.setdefault((local.device, local.dtype), []).append(local)
    with torch.no_grad():
        for (device, _), locals_ in by_kind.items():
            foreach_mul_(locals_, scale.to(device))
    return total


def _partial_norm(locals_: list[torch.Tensor], order: float) -> torch.Tensor:
    """What of the norm of all ``locals_`` together adds up over ranks; in at least fp32."""
    with torch.no_grad():
        filled = [local for local in locals_ if local.numel()]
        real = locals_[0].abs().dtype
        dtype = torch.float32 if real.itemsize < 4 else real
        if not filled:
            return total_norm_of(torch.empty(0, dtype=dtype, device=locals_[0].device), order)
        norms = torch.stack([norm.to(dtype) for norm in foreach_norm(filled, order, dtype=dtype)])
        if order in (inf, -inf, 0):
            return norms.sum() if order == 0 else norms.amax() if order == inf else norms.amin()
        return total_norm_of(norms, order)

"""Where what a backward brings is kept, when it is not reduced over all data ranks: the accumulation of a handle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .accumulation import Accumulation
from .flat_param import FlatParamHandle


def accumulate(handle: FlatParamHandle, grads: Sequence[torch.Tensor | None]) -> None:
    """Add gradients that were taken from the unsharded parameters to what was accumulated before."""
    accumulation = _accumulation_of(handle)
    if accumulation.flat is None:
        dtype, device = handle.contributions.dtype, handle.home.compute_device(handle.shard)
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.zeros(handle.layout.flat_numel, dtype=dtype, device=device)
        accumulation.begin(flat, handle.full_views_of(flat))
    accumulation.add(grads)


def keep_scattered(handle: FlatParamHandle, scattered: torch.Tensor) -> None:
    """Keep what a reduction has scattered, until it is averaged over the replicas."""
    _accumulation_of(handle).keep_scattered(scattered, handle.views_of(scattered))


def _accumulation_of(handle: FlatParamHandle) -> Accumulation:
    """The accumulation there is, or a new one."""
    contributions = handle.contributions
    if contributions.accumulation is None:
        names, used = handle.names, contributions.is_used
        accumulation = Accumulation(handle.sharded_params, names, used, handle.mesh.mesh)
        for segment in handle.segments:
            accumulation.shows_at(segment.parameter, segment.sharded_params)
        contributions.accumulate(accumulation)
        return accumulation
    return contributions.accumulation

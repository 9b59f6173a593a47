"""Changed elements of parameters that tensor parallelism has cut: from each rank's part to the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist

from .._torch import DTensorSpec, compute_local_shape_and_global_offset
from ..comm import transport_of
from ..flat import TensorParallel
from .gathering import Span
from .sparse import Elements, Form, gather_counts, gather_elements


def over_tensor_ranks(
    own: TensorParallel, span: Span, parts: Sequence[Elements | None], is_everywhere: bool
) -> list[Elements | None]:
    """The elements of whole parameters; ``None`` where they are not wanted. One gather for all parameters that are cut
    over the same ranks.

    Ranks: all of the parameters' own meshes that have ``parts``.

    Args:
        parts: of each parameter of the span, what this rank's shard group has; positions are in that.
        is_everywhere: all ranks want them, else the first one alone.
    """
    found = [*parts]
    for groups, indices in own.by_groups(span.indices).items():
        if groups:
            places = [index - span.indices.start for index in indices]
            specs = [own.specs[index] for index in indices]
            wholes = _gather(groups, [(specs[i], parts[place]) for i, place in enumerate(places)], span, is_everywhere)
            for place, whole in zip(places, wholes, strict=True):
                found[place] = whole
    return found


def _gather(
    groups: Sequence[dist.ProcessGroup],
    items: Sequence[tuple[DTensorSpec | None, Elements | None]],
    span: Span,
    is_everywhere: bool,
) -> list[Elements | None]:
    """Several parameters at once: their positions are counted through, in one long tensor of all of them."""
    specs = [spec for spec, _ in items if spec is not None]
    starts = [0, *accumulate(prod(spec.shape) for spec in specs)]
    placed = [_in_whole(spec, part) for spec, (_, part) in zip(specs, items, strict=True) if part is not None]
    together: Elements | None = Elements(
        torch.cat([part.positions + start for part, start in zip(placed, starts, strict=False)]),
        torch.cat([part.values for part in placed]),
    )
    for group in reversed(groups):
        if together is None:
            break
        transport, device, label = transport_of(group, span.mesh.device), span.mesh.device, span.handle.label
        counts = gather_counts(transport, together.positions.numel(), device, label)
        form = Form.shortest(together.values.dtype, counts, [(0, starts[-1])] * len(counts))
        together = gather_elements(transport, together, form, is_everywhere, label)
    if together is None:
        return [None] * len(items)
    positions, order = together.positions.sort()
    values = together.values[order]
    cuts = torch.searchsorted(positions, torch.tensor(starts, device=positions.device)).tolist()
    return [Elements(positions[a:b] - start, values[a:b]) for start, a, b in zip(starts, cuts, cuts[1:], strict=False)]


def _in_whole(spec: DTensorSpec, part: Elements) -> Elements:
    """Elements of this rank's part of a DTensor, as elements of the whole one."""
    shape, offset = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    if not part.positions.numel():
        return part
    positions, stride = torch.zeros_like(part.positions), 1
    places = torch.unravel_index(part.positions, tuple(shape))
    for place, first, size in zip(reversed(places), reversed(offset), reversed(spec.shape), strict=True):
        positions += (place + first) * stride
        stride *= size
    return Elements(positions, part.values)

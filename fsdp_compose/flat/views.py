"""Views of a whole flat tensor."""

from __future__ import annotations

import torch

from .layout import FlatLayout


def full_views(layout: FlatLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of ``flat``, a whole flat parameter, with the parameters' shapes."""
    return [flat[p.offset : p.offset + p.numel].view(p.shape) for p in layout.params]

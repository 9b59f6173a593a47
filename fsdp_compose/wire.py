"""How elements travel between ranks."""

from __future__ import annotations

import torch


def wire(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a dtype that every backend can gather and reduce (complex numbers travel as pairs)."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor).view(-1)
    if tensor.dtype == torch.bool or tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    return tensor

"""How elements travel between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._torch import group_device_types

# gloo does not know them.
_AS_BYTES = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


# Every backend knows them.
PLAIN = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64})


def as_transferable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a dtype that every backend can gather, and reduce unless they are integers (complex numbers
    travel as pairs)."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor).view(-1)
    if tensor.dtype.itemsize == 1 or tensor.dtype in _AS_BYTES:
        return tensor.view(torch.uint8)
    return tensor


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where a tensor on ``device`` must be for the collectives of ``group``: for host memory it may have no backend
    (NCCL alone)."""
    if device.type != "cpu":
        return device
    types = group_device_types(group)
    if not types or "cpu" in types:
        return device
    device_type = min(types)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())

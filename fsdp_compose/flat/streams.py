"""Where streams and events come from: the one place, which a test may give others."""

from __future__ import annotations

from typing import Any

import torch


def streams_of(device: torch.device) -> Any:
    """The module with ``Stream``, ``Event``, ``stream`` and ``current_stream`` of a device (``torch.cuda``); ``None``
    of the CPU, where all that is issued is done."""
    return None if device.type == "cpu" else torch.get_device_module(device.type)

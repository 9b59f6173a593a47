"""Says which torch is needed, before anything is imported that an older one lacks."""

from __future__ import annotations

import re

import torch

OLDEST_TORCH = (2, 12)


def check_torch(version: str) -> None:
    """Raise ImportError if ``version`` is too old: DTensor subclasses do not get their operations there."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"fsdp_compose needs torch {oldest} or newer; this is torch {version}: pip install -U torch")


check_torch(str(torch.__version__))

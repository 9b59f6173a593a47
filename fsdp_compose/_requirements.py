"""Says which torch is needed, before anything is imported that an older one lacks.

On torch 2.11 operations do not reach a subclass of DTensor. ``FSDP_COMPOSE_ALLOW_TORCH_2_11=1`` lets the package be
imported there all the same, to measure the runtime on a machine that carries it: sharded parameters are then plain
tensors, this rank's elements, and only ``flat.sharded_param`` knows the difference.
"""

from __future__ import annotations

import os
import re
import warnings

import torch

OLDEST_TORCH = (2, 12)
ALLOW_2_11_ENV = "FSDP_COMPOSE_ALLOW_TORCH_2_11"


def check_torch(version: str) -> bool:
    """Raise ImportError if ``version`` is too old: DTensor subclasses do not get their operations there.

    Returns:
        Whether sharded parameters must be plain local tensors.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    numbers = tuple(map(int, found.groups())) if found is not None else (0, 0)
    if numbers >= OLDEST_TORCH:
        return False
    if numbers == (2, 11) and os.environ.get(ALLOW_2_11_ENV) == "1":
        warnings.warn(
            f"fsdp_compose on torch {version} ({ALLOW_2_11_ENV}=1), for measurements only: sharded parameters are "
            "plain tensors of this rank's elements, so norms, gradient clipping and checkpoints do not see the others'"
        )
        return True
    oldest = ".".join(map(str, OLDEST_TORCH))
    raise ImportError(f"fsdp_compose needs torch {oldest} or newer; this is torch {version}: pip install -U torch")


PLAIN_SHARDED_PARAMS = check_torch(str(torch.__version__))

"""Names by which files that were written earlier know what has moved: they load, also where torch allows names only
that it knows to be safe."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch


def known_as(item: Any, module: str) -> None:
    """Let pickles find ``item``, a class or a function that runs no code of theirs, in ``module``, which is gone."""
    vars(sys.modules.setdefault(module, ModuleType(module))).setdefault(item.__name__, item)
    torch.serialization.add_safe_globals([(item, f"{module}.{item.__name__}")])

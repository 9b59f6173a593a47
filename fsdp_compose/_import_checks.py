"""Checks made when the package is imported: the version of torch, and the store of a restarted torchrun.

``fsdp_compose/__init__.py`` imports this file before any other, because the others already need a supported torch. So
it imports nothing from the package, and nothing that an older torch lacks."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping

import torch

# ---- The version of torch, checked before anything is imported that another version may lack


OLDEST_TORCH = (2, 12)
TESTED_TORCH = ("2.12.0", "2.13.0", "2.14.1", "2.15.0")
"""The releases that the tests are run with; ``tests/test_requirements.py`` compares docs, Makefile and CI with them."""


def check_torch(version: str) -> None:
    """Raise ImportError if ``version`` is too old: there, operations do not dispatch to DTensor subclasses."""
    if _numbers(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"fsdp_compose needs torch {oldest} or newer; this is torch {version}: pip install -U torch")


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found is not None else (0, 0)


def is_untested(version: str) -> bool:
    """Whether ``version`` is newer than every torch that the tests are run with."""
    return _numbers(version) > _numbers(TESTED_TORCH[-1])


def note_untested(version: str) -> None:
    """Log, on one rank, that ``version`` is newer than every tested one."""
    if is_untested(version) and os.environ.get("RANK", "0") == "0":
        logging.getLogger("fsdp_compose").warning(
            "torch %s is newer than every version that fsdp_compose was tested with (up to %s)",
            version,
            TESTED_TORCH[-1],
        )


def refuse_if_untested(version: str, error: ImportError | AttributeError) -> None:
    """Called when a private name of torch is missing: raise ImportError, which names torch versions that have it, if
    ``version`` is newer than every tested one."""
    if is_untested(version):
        raise ImportError(
            f"fsdp_compose does not work with torch {version}, which lacks a private name that it needs ({error}); it "
            f"was tested with torch {TESTED_TORCH[0]} to {TESTED_TORCH[-1]}: pip install 'torch<={TESTED_TORCH[-1]}'"
        ) from error


VERSION = str(torch.__version__)
check_torch(VERSION)
note_untested(VERSION)


# ---- A warning in processes that torchrun has restarted: torch's ``init_process_group()`` may hang.
#
# torchrun keeps one store for all attempts. torch's process groups (seen in 2.13 with gloo) read the addresses that
# dead processes left there, and connect to them. At that point this package can only warn.


def hint(environment: Mapping[str, str]) -> str:
    """Return the text of the warning about the store; empty if this process was not restarted with an old store."""
    is_restarted = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not is_restarted or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "torchrun restarted this process with the store of the earlier attempt. If init_process_group() fails or "
        "hangs now, it is connecting to the address of a dead process: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for "
        "torchrun (with --standalone or --rdzv-backend c10d), which makes a new store for each attempt"
    )


if text := hint(os.environ):
    warnings.warn(text, stacklevel=2)

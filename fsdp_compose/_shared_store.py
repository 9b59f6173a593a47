"""Says, in processes that torchrun has restarted, why torch's own ``init_process_group()`` may hang, and the remedy.

torchrun keeps one store for all attempts. torch's process groups (seen in 2.13 with gloo) read what dead processes have
left there, and dial their addresses. That happens before this package can do anything but tell.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping


def hint(environment: Mapping[str, str]) -> str:
    """A warning about the store, as text; empty if this process was not restarted with an old one."""
    is_restarted = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not is_restarted or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "torchrun has restarted this process with the store of the earlier attempt. If init_process_group() fails or "
        "hangs now, it has dialled the address of a dead process: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for "
        "torchrun (with --standalone or --rdzv-backend c10d), which makes a new store for each attempt"
    )


if text := hint(os.environ):
    warnings.warn(text, stacklevel=2)

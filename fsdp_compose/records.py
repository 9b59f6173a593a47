"""What every rank did last, for errors: on with ``FSDP_COMPOSE_DEBUG=1``, set on all ranks before the first forward.

Each collective is then noted in the key-value store before it is issued: one round trip to the store. So an error can
tell what every rank was at, also a rank that hangs or is gone. When it is off none of this code runs.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from .flat_param import FlatParamHandle
from .namespace import known_namespace

DEBUG_ENV = "FSDP_COMPOSE_DEBUG"
_MAX_RANKS = 64  # that an error lists


def is_on() -> bool:
    """Whether collectives are recorded."""
    return os.environ.get(DEBUG_ENV) == "1"


def describe(handle: FlatParamHandle, what: str) -> str:
    """A collective of a handle, in words: the same on every rank that is about to issue it."""
    state = handle.group()
    root, phase = state.root, "outside forward"
    if root is not None and root.is_in_backward:
        phase = "backward"
    elif root is not None and root.depth:
        phase = "forward"
    others = f" and {len(handle.fqns) - 1} more" if len(handle.fqns) > 1 else ""
    return f"{what} of {state.name} ({handle.prefix}{handle.fqns[0]}{others}) in {phase}"


def note(handle: FlatParamHandle, what: str) -> None:
    """This rank is about to issue a collective."""
    text, root, mesh = describe(handle, what), handle.group().root, handle.mesh
    if root is not None:
        text += f", collective {root.order.count}"
    store = _store(mesh.shard_group)
    if store is not None:
        store.set(str(mesh.shard_rank), text)


def last_of_every_rank(group: dist.ProcessGroup) -> str:
    """The last collective that each rank has entered, as the end of an error; empty when records are off."""
    if not is_on():
        return ""
    store = _store(group)
    if store is None:
        return ""
    try:
        lines = [
            f"rank {rank}: {store.get(str(rank)).decode() if store.check([str(rank)]) else 'none'}"
            for rank in range(min(group.size(), _MAX_RANKS))
        ]
    except dist.DistNetworkError:
        return ""  # the process that held the store is gone
    return f"\nThe last collective of each rank ({DEBUG_ENV}=1):\n" + "\n".join(lines)


def _store(group: dist.ProcessGroup) -> dist.Store | None:
    namespace = known_namespace(group)
    return None if namespace is None else dist.PrefixStore("records", namespace)

"""The last collective of every rank, for errors: on with ``FSDP_COMPOSE_DEBUG=1``, set on all ranks before the first
forward.

Each collective is then noted in the key-value store before it is issued: one round trip to the store. So an error can
tell what every rank was at, also a rank that hangs or is gone. When it is off none of this code runs.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from .namespace import known_namespace

DEBUG_ENV = "FSDP_COMPOSE_DEBUG"
_MAX_RANKS = 64  # that an error lists


def is_on() -> bool:
    """Whether collectives are recorded."""
    return os.environ.get(DEBUG_ENV) == "1"


def note(group: dist.ProcessGroup, what: str) -> None:
    """This rank is about to issue a collective on ``group``; ``what``: it, as text."""
    store = _store(group)
    if store is not None:
        store.set(str(group.rank()), what)


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

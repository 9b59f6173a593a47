"""One process as one rank of many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from .._torch import fake_store


@contextmanager
def simulated_ranks(world_size: int = 64, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a process group whose collectives return at once and move nothing.

    What depends on shapes, layouts, memory and the order of collectives is as with real ranks; numbers are not.

    Args:
        world_size: how many ranks there seem to be.
        rank: which one this is.
    """
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()

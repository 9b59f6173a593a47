"""A process group whose collectives do nothing: what remains of a step is the host's own work.

torch's ``fake`` backend moves data (an all-gather over 64 ranks is 64 small copies), which on tiny parameters costs
more than what is to be measured. Here every collective returns at once, and outputs keep whatever they held: numbers
that a model computes under this process group mean nothing.

The backend is a Python subclass of ``ProcessGroup``, which torch takes as it is, so calls do not pass torch's
dispatcher: ``null`` shows the cost of the code around collectives, ``fake`` the cost of issuing them too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

BACKEND_NAME = "null"


class NullWork(distributed_c10d.Work):
    """A collective that has always been done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


class NullProcessGroup(dist.ProcessGroup):
    """Rank ``rank`` of ``world_size`` ranks that do not exist."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._rank, self._world_size, self._work = rank, world_size, NullWork()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world_size

    def getBackendName(self) -> str:
        return BACKEND_NAME

    # The C++ properties ask a registered backend, which this process group does not have.
    @property
    def pg_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    @property
    def group_desc(self) -> str:
        return BACKEND_NAME

    def _do_nothing(self, *args: Any, **kwargs: Any) -> NullWork:
        return self._work

    # torch 2.13 calls all_gather_single and reduce_scatter_single what 2.12 calls _allgather_base and
    # _reduce_scatter_base; its process groups answer to both.
    _allgather_base = all_gather_single = _do_nothing
    _reduce_scatter_base = reduce_scatter_single = _do_nothing
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _do_nothing
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _do_nothing
    allgather = allgather_coalesced = reduce_scatter = allreduce = allreduce_coalesced = _do_nothing
    broadcast = reduce = gather = scatter = alltoall = alltoall_base = all_to_all_single = _do_nothing
    barrier = monitored_barrier = _do_nothing


def _create(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> NullProcessGroup:
    return NullProcessGroup(rank, world_size)


def register() -> None:
    """Make ``backend="null"`` known to torch; nothing when it is."""
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _create, devices=["cpu"])


def init(rank: int, world_size: int) -> None:
    """Make a null process group torch's default one: this process plays ``rank`` of ``world_size`` ranks."""
    register()
    dist.init_process_group(BACKEND_NAME, rank=rank, world_size=world_size, store=dist.HashStore())

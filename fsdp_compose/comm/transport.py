"""How flat tensors move between the ranks of a process group: each collective is spelled here, once.

A transport only issues: the caller chooses the stream, waits for the work, and tells what failed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._torch import AllgatherOptions, ReduceScatterOptions


class Transport:
    """The collectives of the process group itself.

    Tensors are 1-D, contiguous and of one device, of dtypes that travel (see ``as_transferable``).
    Ranks: each method is called by all ranks of the process group, in the same order.
    """

    def all_gather(self, group: dist.ProcessGroup, whole: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        """Fill ``whole`` with the shards of all ranks, in their order; ``shard`` may be this rank's part of it."""
        return group._allgather_base(whole, shard, _ALL_GATHER)

    def reduce_scatter(
        self, group: dist.ProcessGroup, shard: torch.Tensor, whole: torch.Tensor, is_average: bool
    ) -> dist.Work:
        """Fill ``shard`` with this rank's part of the sum, or the average, of what each rank has in ``whole``;
        ``shard`` may be a part of it, which may be overwritten."""
        return group._reduce_scatter_base(shard, whole, _AVERAGE if is_average else _SUM)


TRANSPORT = Transport()


def _reduce_scatter_options(op: Any) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = True
    return options


_ALL_GATHER = AllgatherOptions()
_ALL_GATHER.asyncOp = True
_AVERAGE = _reduce_scatter_options(dist.ReduceOp.AVG)
_SUM = _reduce_scatter_options(dist.ReduceOp.SUM)

"""How flat tensors move between the ranks of a process group: each collective is spelled here, once.

A transport belongs to one process group and serves the ``fully_shard`` groups on it; a group may be given another one
(``FlatParamHandle.change_transports``). It only issues: the caller chooses the stream, waits, and tells what failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .._torch import AllgatherOptions, AllreduceOptions, ReduceScatterOptions
from .label import Label, Work
from .transferable import PLAIN, as_transferable

_LONG_BYTES = 1 << 20  # of one rank's part: copies of all parts would take more than a broadcast for each

Range = tuple[int, int]
"""The elements from the first number to before the second."""


class Transport:
    """The collectives of the process group itself.

    Tensors are 1-D, contiguous, and on one device. Ranks: each method is called by all ranks of the process group, in
    one order. ``label`` says what for.

    Attributes:
        name: compared at the first forward: the same on every rank.
        group: the process group.
    """

    name = "collectives"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def unrecorded(self) -> Transport:
        """This one, or what it records."""
        return self

    def among(self, peers: dist.ProcessGroup) -> Transport:
        """The same, for ranks that do the same together with all of ``peers``."""
        return self

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        """Fill ``whole`` with the equal shards of all ranks, in their order; ``shard`` may be this rank's part of
        it."""
        if whole.dtype not in PLAIN:
            whole, shard = as_transferable(whole), as_transferable(shard)
        return self.group._allgather_base(whole, shard, _ALL_GATHER)

    def prepared_all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Callable[[], Work]:
        """What issues ``all_gather`` with these arguments, again and again."""
        if type(self) is not Transport:
            return partial(self.all_gather, whole, shard, label)
        return partial(self.group._allgather_base, as_transferable(whole), as_transferable(shard), _ALL_GATHER)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        """Fill ``shard`` with this rank's part of the sum, or average, of what each rank has in ``whole``; it may be
        its part of ``whole``, which may be overwritten."""
        options = _AVERAGE if is_average else _SUM
        if whole.dtype not in PLAIN:
            whole, shard = as_transferable(whole), as_transferable(shard)
        return self.group._reduce_scatter_base(shard, whole, options)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        """Replace ``tensor`` by its sum, or average, over the ranks."""
        options = _ALL_AVERAGE if is_average else _ALL_SUM
        return self.group.allreduce([as_transferable(tensor)], options)

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range], is_everywhere: bool, label: Label
    ) -> None:
        """Fill ``whole`` with the parts of all ranks, and wait for it.

        Args:
            whole: ``None`` where it is not wanted.
            part: this rank's elements.
            ranges: where the part of each rank is in ``whole``; they may be unequal.
            is_everywhere: all ranks want it, else the first one alone.
        """
        lengths = {stop - start for start, stop in ranges}
        if lengths == {0}:
            return
        is_even = len(lengths) == 1 and [*ranges] == sorted(ranges)
        if is_everywhere and is_even:
            assert whole is not None
            self.all_gather(whole, part.resolve_conj(), label).wait()
        elif is_everywhere:
            assert whole is not None
            self._gather_uneven(whole, part, ranges, label)
        elif not is_even:
            self._gather_uneven_on_first(whole, part, ranges)
        else:
            parts = None if whole is None else [as_transferable(whole[start:stop]) for start, stop in ranges]
            dist.gather(as_transferable(part.resolve_conj()), parts, group=self.group, group_dst=0)

    def skip(self, nbytes: int, label: Label) -> None:
        """Ranks of other process groups of the mesh gather ``nbytes``, and those of this one do not."""

    def _gather_uneven(self, whole: torch.Tensor, part: torch.Tensor, ranges: Sequence[Range], label: Label) -> None:
        owners = [rank for rank, (start, stop) in enumerate(ranges) if stop > start]
        longest = max(stop - start for start, stop in ranges)
        if 2 * len(owners) <= len(ranges) or longest * part.element_size() >= _LONG_BYTES:
            # Few ranks hold anything, or there is much to send: parts go straight to where they belong.
            whole[slice(*ranges[self.group.rank()])] = part
            works = [
                dist.broadcast(
                    as_transferable(whole[slice(*ranges[rank])]), group=self.group, group_src=rank, async_op=True
                )
                for rank in owners
            ]
            for work in works:
                assert work is not None, "this rank is in the group"
                work.wait()
            return
        padded = part.new_zeros(longest)
        padded[: part.numel()] = part
        everything = part.new_empty(longest * len(ranges))
        self.all_gather(everything, padded, label).wait()
        for rank, (start, stop) in enumerate(ranges):
            whole[start:stop] = everything[rank * longest : rank * longest + stop - start]

    def _gather_uneven_on_first(self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range]) -> None:
        """By messages: what is sent arrives where it belongs."""
        if whole is None:
            messages = [dist.P2POp(dist.isend, as_transferable(part), group=self.group, group_peer=0)]
        else:
            whole[slice(*ranges[0])] = part
            messages = [
                dist.P2POp(dist.irecv, as_transferable(whole[start:stop]), group=self.group, group_peer=rank)
                for rank, (start, stop) in enumerate(ranges)
                if rank and stop > start
            ]
        if whole is None and not part.numel():
            return
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()


def _reduce_scatter_options(op: Any) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = True
    return options


def _all_reduce_options(op: Any) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = True
    return options


_ALL_GATHER = AllgatherOptions()
_ALL_GATHER.asyncOp = True
_AVERAGE = _reduce_scatter_options(dist.ReduceOp.AVG)
_SUM = _reduce_scatter_options(dist.ReduceOp.SUM)
_ALL_AVERAGE = _all_reduce_options(dist.ReduceOp.AVG)
_ALL_SUM = _all_reduce_options(dist.ReduceOp.SUM)

"""FSDP2 without the copies around its all-gather: a prototype of what is proposed for torch, to be measured beside it.

FSDP2 gathers the shards of a group's parameters rank by rank, then copies the pieces of each parameter together. An
all-gather that writes them together in the first place is proposed in pytorch#187239 and PR 188276::

    FSDP2:  shards [a0 b0] [a1 b1]  gathered [a0 b0 a1 b1]  copied out [a0 a1] [b0 b1]
    here:   shards [a0 b0] [a1 b1]  gathered [a0 a1 b0 b1], and the parameters are views of that

Each rank has the same shards as before, and as much padding. There are two forms:

- ``packs=True`` is PR 188276 as it stood in November 2026: shards are still copied into one input.
- ``packs=False`` is the best that this design can become (PR 188329 lets shards lie together): they are gathered from
  where they lie, and only a cast copies them.

No backend here has such a collective, so one coalesced call gathers each parameter into its place. Where the proposals
leave a choice, it is made in favour of FSDP2: resharding frees the buffer (PR 188276 keeps one that a backend owns),
layouts are checked once, and the handling of streams, which a CPU does not have, is left out.

For benchmarks only. It replaces private functions of torch, and refuses what the proposals exclude: parameters that are
DTensors or sharded along another dimension, groups of several dtypes, offloading to the CPU, all-gather extensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

GATHER = "all_gather_single_coalesced"  # since torch 2.13
if not hasattr(dist.ProcessGroup, GATHER):
    GATHER = "allgather_into_tensor_coalesced"
ALIGNMENT = 64  # bytes: parameters begin as they would in allocations of their own, so kernels do the same


def use_views(model: nn.Module, packs: bool) -> nn.Module:
    """Let the groups of ``model``, FSDP2's, gather without copying out; before the first forward."""
    param_group.foreach_all_gather = _all_gather
    param_group.foreach_all_gather_copy_out = _copy_out
    for module in model.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._all_gather_comm = GatherInPlace(packs)
    return model


class GatherInPlace:
    """In the place of one group's all-gather: writes every parameter's pieces into one buffer, whole."""

    def __init__(self, packs: bool) -> None:
        self._packs = packs
        self._buffer: torch.Tensor | None = None

    def gather(self, params: Sequence[Any], group: dist.ProcessGroup, async_op: bool) -> _Gathered:
        if self._buffer is None:
            self._buffer = self._lay_out(params, group.size())
        self._buffer.untyped_storage().resize_(self._num_bytes)
        work = getattr(group, GATHER)(self._outputs, self._inputs(params))
        if not async_op:
            work.wait()
        return _Gathered(self._buffer, None, work if async_op else None, [], [], [])

    def _lay_out(self, params: Sequence[Any], world_size: int) -> torch.Tensor:
        """The buffer, of which ``params`` become views. The first of them frees it when the group is resharded."""
        self._dtype = params[0].param_dtype or params[0].orig_dtype
        for param in params:
            is_of_another_dtype = (param.param_dtype or param.orig_dtype) != self._dtype
            is_extended = hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
            is_placed_otherwise = param.fsdp_placement.dim != 0 or param.is_dtensor or param.offload_to_cpu
            if is_of_another_dtype or is_extended or is_placed_otherwise:
                raise NotImplementedError(f"{param}: a parameter that the proposals exclude")
        self._sizes = [param.padded_sharded_param_size.numel() for param in params]
        step = ALIGNMENT // self._dtype.itemsize
        *offsets, numel = accumulate((-(-size * world_size // step) * step for size in self._sizes), initial=0)
        buffer = torch.empty(numel, dtype=self._dtype, device=params[0].device)
        self._num_bytes = buffer.nbytes
        self._outputs = [
            buffer.narrow(0, offset, size * world_size) for offset, size in zip(offsets, self._sizes, strict=True)
        ]
        for param, offset in zip(params, offsets, strict=True):
            view = buffer.as_strided(param._orig_size, param._contiguous_orig_stride, offset)
            # .data has a version of its own: that of the buffer moves with every all-gather.
            param._unsharded_param = nn.Parameter(view.data, requires_grad=param.sharded_param.requires_grad)
            if hasattr(param, "unsharded_grad_dtype"):  # newer than torch 2.13
                param._unsharded_param.grad_dtype = param.unsharded_grad_dtype
        params[0].all_gather_outputs = [buffer]
        return buffer

    def _inputs(self, params: Sequence[Any]) -> Sequence[torch.Tensor]:
        if self._packs:
            inputs = [given for (given,) in collectives._get_param_all_gather_inputs(params)]
        else:
            inputs = [param._sharded_param_data for param in params]
            if inputs[0].dtype == self._dtype:
                return inputs
        packed = inputs[0].new_empty(sum(self._sizes), dtype=self._dtype).split(self._sizes)
        torch._foreach_copy_(packed, inputs)
        return packed


class _Gathered(param_group.AllGatherResult):
    """What there is nothing to copy out of."""


_torchs_all_gather = param_group.foreach_all_gather
_torchs_copy_out = param_group.foreach_all_gather_copy_out


def _all_gather(params: Any, group: Any, async_op: bool, *others: Any) -> Any:
    gather_in_place = others[-1]
    if isinstance(gather_in_place, GatherInPlace):
        return gather_in_place.gather(params, group, async_op)
    return _torchs_all_gather(params, group, async_op, *others)


def _copy_out(gathered: Any, *others: Any, **options: Any) -> None:
    if not isinstance(gathered, _Gathered):
        _torchs_copy_out(gathered, *others, **options)
    elif gathered.all_gather_work is not None:
        gathered.all_gather_work.wait()

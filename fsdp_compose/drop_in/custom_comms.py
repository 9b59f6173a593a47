"""FSDP2's ``AllGather`` and ``ReduceScatter``, objects of the user that do a group's collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ..errors import MisuseTypeError
from ..extension import Label, Transport, TransportRole, TransportWrapper, Work, finish_with, get_state, set_transport

GATHER, REDUCE = "all-gather", "reduce-scatter"


class CustomComms(TransportWrapper):
    """Calls them as FSDP2 does, in memory that they allocate.

    Args:
        inner: does what they do not.
        comms: an ``AllGather`` and a ``ReduceScatter``, by kind of collective.
    """

    # Flat parameters are copied in and out, since their memory is not that of ``allocate()``.

    def __init__(self, inner: Transport, comms: dict[str, Any]) -> None:
        super().__init__(inner)
        self.comms = comms
        self.is_exact = GATHER not in comms  # it may be exact, but nobody tells
        names = [f"{kind} by {type(comm).__module__}.{type(comm).__qualname__}" for kind, comm in comms.items()]
        self.name = ", ".join([inner.unrecorded.name, *sorted(names)])

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        if GATHER not in self.comms:
            return self.inner.all_gather(whole, shard, label)
        comm, rank, numel = self.comms[GATHER], self.group.rank(), shard.numel()
        output = comm.allocate((whole.numel(),), dtype=whole.dtype, device=whole.device)
        own = output[rank * numel : rank * numel + numel].copy_(shard)
        work = comm(output_tensor=output, input_tensor=own, group=self.group, async_op=False)
        return finish_with(work or _DONE, whole.device, lambda: whole.copy_(output))

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        if REDUCE not in self.comms:
            return self.inner.reduce_scatter(shard, whole, is_average, label)
        comm = self.comms[REDUCE]
        given = comm.allocate((whole.numel(),), dtype=whole.dtype, device=whole.device).copy_(whole)
        output = comm.allocate((shard.numel(),), dtype=shard.dtype, device=whole.device)
        op = dist.ReduceOp.AVG if is_average else dist.ReduceOp.SUM
        work = comm(output_tensor=output, input_tensor=given, group=self.group, op=op)
        return finish_with(work or _DONE, whole.device, lambda: shard.copy_(output), given)


class _Done:
    def wait(self) -> None: ...


_DONE = _Done()


def set_comm(module: nn.Module, kind: str, comm: Any) -> None:
    """Let the module's own group do this kind of collective by ``comm``."""
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        what = "AllGather" if kind == GATHER else "ReduceScatter"
        raise MisuseTypeError(
            f"set_custom_{kind.replace('-', '_')}(): expected an object like torch's {what}, with a "
            f"method allocate(), that can be called; got {comm!r}"
        )
    state = get_state(module)
    comms: dict[str, Any] = {kind: comm}
    for handle in state._handles if state is not None else ():
        if isinstance(present := handle.mesh.transport.unrecorded, CustomComms):
            comms = {**present.comms, kind: comm}

    def wrap(transport: Transport, role: TransportRole) -> Transport:
        return CustomComms(transport, comms) if role is TransportRole.SHARDS else transport

    set_transport(module, wrap, recurse=False)

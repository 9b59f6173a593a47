"""FSDP2's ``AllGather`` and ``ReduceScatter``, objects of the user that do a group's collectives, and its process
group for reduce-scatters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ..errors import MisuseTypeError
from ..extension import (
    Label,
    Transport,
    TransportRole,
    TransportWrapper,
    Work,
    finish_with,
    get_state,
    set_transport,
    transport_of,
)

GATHER, REDUCE = "all-gather", "reduce-scatter"


class CustomComms(TransportWrapper):
    """Calls them as FSDP2 does, in memory that they allocate; ``inner`` does what they do not."""

    # Flat parameters are copied in and out, since their memory is not that of ``allocate()``.

    def __init__(self, inner: Transport, comms: dict[str, Any]) -> None:
        super().__init__(inner)
        self.comms = comms  # an ``AllGather`` and a ``ReduceScatter``, by kind of collective
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
    _set(module, {**_present(module)[0], kind: comm}, _present(module)[1])


# ---- A process group for reduce-scatters alone


class _OwnGroup(TransportWrapper):
    """Sends reduce-scatters over another process group of the same ranks."""

    def __init__(self, inner: Transport, other: Transport) -> None:
        super().__init__(inner)
        self.other = other
        self.name = f"{inner.unrecorded.name}, reduce-scatters in a group of their own"

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        return self.other.reduce_scatter(shard, whole, is_average, label)

    def over(self, change: Callable[[Transport], Transport]) -> Transport:
        return self._around(self.inner.over(change), self.other.over(change))

    @property
    def unrecorded(self) -> Transport:
        return self._around(self.inner.unrecorded, self.other.unrecorded)

    def among(self, peers: dist.ProcessGroup) -> Transport:
        return self._around(self.inner.among(peers), self.other.among(peers))

    def _around(self, inner: Transport, other: Transport) -> Transport:
        return self if inner is self.inner and other is self.other else _OwnGroup(inner, other)


def separate(module: nn.Module, enable: bool) -> None:
    """Let the module's own group do its reduce-scatters over a process group of their own, or no longer."""
    state = get_state(module)
    if state is None or not state._handles or state.mesh.shard_world_size == 1:
        return
    _set(module, _present(module)[0], state.mesh.second_group() if enable else None)


# ---- Both together


def _present(module: nn.Module) -> tuple[dict[str, Any], dist.ProcessGroup | None]:
    """What was set for a module's group: its comms, and the process group of its reduce-scatters."""
    state = get_state(module)
    comms, own = dict[str, Any](), None
    found: list[Transport] = []

    def look(transport: Transport, role: TransportRole) -> Transport:
        if role is TransportRole.SHARDS:
            found.append(transport.unrecorded)
        return transport

    for handle in state._handles if state is not None else ():
        handle.mesh.with_transports(look)
    for transport in found:
        if isinstance(transport, CustomComms):
            comms, transport = transport.comms, transport.inner
        if isinstance(transport, _OwnGroup):
            own = transport.other.group
    return comms, own


def _set(module: nn.Module, comms: dict[str, Any], own: dist.ProcessGroup | None) -> None:
    state = get_state(module)
    assert state is not None, "it is sharded"

    def wrap(transport: Transport, role: TransportRole) -> Transport:
        if role is not TransportRole.SHARDS:
            return transport
        if own is not None:
            transport = _OwnGroup(transport, transport_of(own, state.mesh.device, state.mesh.peers))
        return CustomComms(transport, comms) if comms else transport

    set_transport(module, wrap, recurse=False)

"""Runs gathered whole: cast to what they are sent in, then one collective, whose memory is the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from ..comm import DataParallelMesh, Transport
from ..flat import FlatParamHandle, local_elements, placed, specs_of
from .buckets import Run

Range = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """The part of a flat parameter that a run lies in.

    Attributes:
        indices: of its parameters.
        start, stop: the first element, and the one behind the last, with padding: alike on ranks that have less of some
            parameters (uneven tensor parallelism).
    """

    handle: FlatParamHandle
    indices: range
    start: int
    stop: int
    dtype: torch.dtype

    @property
    def mesh(self) -> DataParallelMesh:
        return self.handle.mesh

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def range_of(self, rank: int) -> Range:
        """The elements that a rank of the shard group holds, counted from ``start``."""
        shard = self.handle.layout.shard_numel
        first, last = max(rank * shard, self.start), min((rank + 1) * shard, self.stop)
        return (first - self.start, max(first, last) - self.start) if first < self.stop else (self.numel, self.numel)

    def ranges(self) -> list[Range]:
        return [self.range_of(rank) for rank in range(self.mesh.shard_world_size)]

    def own_in_shard(self) -> slice:
        """The elements of this rank's shard that are in it."""
        mesh = self.mesh
        start, stop = self.range_of(mesh.shard_rank)
        offset = self.start - mesh.shard_rank * self.handle.layout.shard_numel
        return slice(start + offset, stop + offset) if stop > start else slice(0, 0)

    def write_own(self, out: torch.Tensor) -> None:
        """Write this rank's elements, as they are now, into ``out``, which may be of another dtype."""
        handle = self.handle
        if not handle.was_moved():
            out.copy_(handle.shard.detach()[self.own_in_shard()])
            return
        first, _ = self.range_of(self.mesh.shard_rank)
        out.zero_()
        for i in self.indices:
            part, param = handle.layout.local_shard(i, self.mesh.shard_rank), handle.layout.params[i]
            begin = param.offset + part.param_start - self.start - first
            if part.numel:
                out[begin : begin + part.numel].copy_(local_elements(handle.sharded_params[i]).detach().reshape(-1))

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the whole of it, one for each parameter (what this rank's shard group has of it)."""
        params = [self.handle.layout.params[i] for i in self.indices]
        return [flat[p.offset - self.start :][: p.numel].view(p.shape) for p in params]


def span_of(run: Run) -> Span:
    places = [source.place for source in run]
    assert places[0] is not None, "the parameters of a run of several lie in a flat parameter"
    (handle, first), params = places[0], places[0][0].layout.params
    last = first + len(run)
    stop = params[last].offset if last < len(params) else handle.layout.flat_numel
    return Span(handle, range(first, last), params[first].offset if first else 0, stop, run[0].dtype)


def gather_run(run: Run, rank0_only: bool, is_first: bool) -> list[torch.Tensor]:
    """The whole tensors of a run, in memory of their own; none on the ranks that want none.

    Ranks: all ranks of the model.

    Args:
        rank0_only: only the rank that ``is_first`` wants them.
    """
    is_wanted = is_first or not rank0_only
    with torch.no_grad():
        if run[0].place is None:
            return _gather_lone(run[0].tensor.detach(), run[0].dtype, is_wanted)
        span = span_of(run)
        flat = gather_span(span, rank0_only)
        if flat is None:
            return []
        views = span.views_of(flat)
        specs = specs_of(span.handle.tensor_parallel, len(span.handle.layout.params))
        for place, index in enumerate(span.indices):
            spec = specs[index]
            if spec is not None:  # tensor parallelism has cut it: another gather, over the ranks of that
                views[place] = placed(views[place], spec).full_tensor()  # type: ignore[attr-defined]
        return views if is_wanted else []


def gather_span(span: Span, rank0_only: bool) -> torch.Tensor | None:
    """The whole of a span; ``None`` where it is not wanted. Of replicas, the first alone gathers what one rank wants.

    Ranks: all ranks of the model, which gather the same spans in the same order.
    """
    mesh, handle = span.mesh, span.handle
    transport = mesh.transport.unrecorded  # other ranks may record nothing
    if rank0_only and not mesh.is_first_replica:
        if mesh.shard_world_size > 1:
            transport.skip(span.numel * span.dtype.itemsize, handle.label)
        return None
    return gather_by(transport, span, rank0_only)


def gather_by(transport: Transport, span: Span, rank0_only: bool) -> torch.Tensor | None:
    """The same, by the ranks of one shard group, with a transport of theirs."""
    mesh, handle = span.mesh, span.handle
    ranges = span.ranges()
    start, stop = ranges[mesh.shard_rank]
    flat = None
    if not rank0_only or mesh.shard_rank == 0:
        flat = torch.empty(span.numel, dtype=span.dtype, device=mesh.device)
        own = flat[start:stop]
    else:
        own = torch.empty(stop - start, dtype=span.dtype, device=mesh.device)
    span.write_own(own)
    if mesh.shard_world_size > 1:
        transport.gather(flat, own, ranges, not rank0_only, handle.label)
    return flat


def _gather_lone(tensor: torch.Tensor, dtype: torch.dtype, is_wanted: bool) -> list[torch.Tensor]:
    """A tensor that is in no flat parameter: a DTensor whole, another one as this rank has it."""
    if isinstance(tensor, DTensor):
        copy = tensor.to(dtype, copy=True)
        whole: torch.Tensor = copy.full_tensor()  # type: ignore[attr-defined]
        return [whole] if is_wanted else []
    return [tensor.to(dtype, copy=True).contiguous()] if is_wanted else []


def named(run: Run, tensors: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a run under all their names; of none, nothing."""
    if not tensors:
        return []
    return [(name, tensor) for source, tensor in zip(run, tensors, strict=True) for name in source.names]

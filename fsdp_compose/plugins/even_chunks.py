"""FSDP2's layout: each rank holds an even chunk of the rows of every parameter, for one copy per collective.

Only ``drop_in.install(layout="fsdp2")`` asks for it, by the granularity ``even_chunks``; others never load this file.
Here ``a`` of 5 rows and ``b`` of 3 on two ranks, one letter per row::

    flat parameter      |aaaaa.|bbb.|         as forward sees it, and what backward fills
                           copy
    shards              |aaabb|aa.b.|         what is gathered and scattered: the chunks of one rank, then the next
    shard               |aaabb|               of rank 0

The flat parameter holds the parameters one after the other, each padded to equal chunks. So all other code sees a
layout like any other, whose local shards are elsewhere. ``ChunkTransport``, around the transport of the flat parameter,
turns one order into the other. If there is only one parameter, the two are the same, and nothing is copied. A parameter
may be cut along another dimension, evenly; the copy then puts its chunks together along that dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from ..core.comm import DataParallelMesh, Label, Transport, TransportWrapper, Work
from ..core.flat import FlatLayout
from ..core.flat.layout import LocalShard, ParamPlacement, ParamSpec, row_numel
from ..core.ragged import RaggedShard, RunLengths, unstacked
from .transports import finish_with


@dataclass(frozen=True)
class ChunkedLayout(FlatLayout):
    """The plan of a flat parameter of which each rank holds a chunk of every parameter."""

    dims: tuple[int, ...] = ()
    """The dimension along which each parameter is cut."""
    in_chunks: ClassVar[bool] = True

    def chunk_numel(self, index: int) -> int:
        """Elements of parameter ``index`` on the first rank, which has the most."""
        return _chunk_numel(self.params[index].shape, self.dims[index], self.world_size)

    def with_shapes(self, shapes: Sequence[tuple[int, ...]]) -> ChunkedLayout:
        params = [
            replace(param, shape=tuple(shape), numel=math.prod(shape), granule=row_numel(tuple(shape)))
            for param, shape in zip(self.params, shapes, strict=True)
        ]
        return replace(self, params=tuple(params))

    def local_shard(self, index: int, rank: int) -> LocalShard:
        param, chunk = self.params[index], self.chunk_numel(index)
        start, stop = min(rank * chunk, param.numel), min((rank + 1) * chunk, param.numel)
        return LocalShard(start, stop - start, param.offset // self.world_size if stop > start else 0)

    @cached_property
    def placements(self) -> Sequence[Placement]:
        return [
            Shard(dim) if param.shape and param.row_numel else RaggedShard(self.counts(index), flat=True)
            for index, (param, dim) in enumerate(zip(self.params, self.dims, strict=True))
        ]

    def counts(self, index: int) -> RunLengths:
        param = self.params[index]
        if self.dims[index]:
            return RunLengths([(self.chunk_numel(index), self.world_size)])
        rows = RaggedShard.even(param.shape[0] if param.shape else 1, self.world_size).counts
        return rows.times(math.prod(param.shape[1:]))

    def counts_of(self, start: int, stop: int) -> RunLengths:
        return RunLengths([((stop - start) // self.world_size, self.world_size)])

    def range_in_shard(self, start: int, stop: int, rank: int) -> tuple[int, int]:
        return start // self.world_size, stop // self.world_size

    def holders(self, index: int) -> range:
        return range(-(-self.params[index].numel // max(self.chunk_numel(index), 1)))

    def own_shard(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.cat([piece[rank].reshape(-1) for piece in self.pieces(flat)])

    def own_elements(self, index: int, whole: torch.Tensor, rank: int) -> torch.Tensor:
        dim = self.dims[index]
        return whole.chunk(self.world_size, dim)[rank].reshape(-1) if dim else super().own_elements(index, whole, rank)

    def whole_of(self, index: int, elements: torch.Tensor) -> torch.Tensor:
        return unstacked(elements, self.params[index].shape, self.dims[index], self.world_size)

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        shape, dim = self.params[index].shape, self.dims[index]
        if not dim:
            return super().local_shape(index, rank)
        return (*shape[:dim], shape[dim] // self.world_size, *shape[dim + 1 :])

    def as_shards(self, flat: torch.Tensor) -> torch.Tensor:
        shards = torch.empty_like(flat)
        if any(self.dims):
            _copy_all(self._pieces_of_shards(shards), self.pieces(flat))
        else:
            torch.cat(self.pieces(flat), 1, out=shards.view(self.world_size, -1))
        return shards

    def views_of_range(self, shards: torch.Tensor, indices: range) -> list[torch.Tensor]:
        by_rank, first = shards.view(self.world_size, -1), self.params[indices.start].offset
        found = []
        for index in indices:
            param = self.params[index]
            start = (param.offset - first) // self.world_size
            chunks = by_rank[:, start : start + self.chunk_numel(index)].reshape(-1)
            found.append(self.whole_of(index, chunks[: param.numel]))
        return found

    def positions_in_range(self, positions: torch.Tensor, indices: range) -> torch.Tensor:
        first, last = self.params[indices[0]].offset, self.params[indices[-1]].offset
        numel = (last - first) // self.world_size + self._padded(indices[-1])
        starts = [(self.params[i].offset - first) // self.world_size for i in indices]
        chunks = [self.chunk_numel(i) for i in indices]
        begins, lengths = (torch.tensor(item, device=positions.device) for item in (starts, chunks))
        rank, place = positions // numel, positions % numel
        index = torch.searchsorted(begins, place, right=True) - 1
        within = place - begins[index]
        found = rank * lengths[index] + within
        if any(self.dims[i] for i in indices):
            blocks = [math.prod(self.params[i].shape[self.dims[i] :]) // self.world_size for i in indices]
            block = torch.tensor(blocks, device=positions.device)[index]
            is_cut = torch.tensor([self.dims[i] > 0 for i in indices], device=positions.device)[index]
            found = torch.where(is_cut, (within // block * self.world_size + rank) * block + within % block, found)
        return begins[index] * self.world_size + found

    def _padded(self, index: int) -> int:
        """Elements between the start of a parameter's chunk and the next one's."""
        following = self.params[index + 1].offset if index + 1 < len(self.params) else self.flat_numel
        return (following - self.params[index].offset) // self.world_size

    # ---- The copies

    @cached_property
    def _sizes(self) -> list[int]:
        """The elements of one rank in each piece of the flat parameter: a chunk, or the padding after it."""
        chunks = [self.chunk_numel(index) for index in range(len(self.params))]
        sizes = [size for index, chunk in enumerate(chunks) for size in (chunk, self._padded(index) - chunk)]
        return [size for size in sizes if size]

    @cached_property
    def _rows(self) -> list[int]:
        """Into how many runs of neighbours the chunk of a rank is divided, for each piece."""
        rows = []
        for index, (param, dim) in enumerate(zip(self.params, self.dims, strict=True)):
            chunk = self.chunk_numel(index)
            rows += [math.prod(param.shape[:dim])] * bool(chunk) + [1] * bool(self._padded(index) - chunk)
        return rows

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat parameter: its pieces, by rank."""
        pieces = zip(flat.split([size * self.world_size for size in self._sizes]), self._rows, strict=True)
        if not any(self.dims):
            return [piece.view(self.world_size, -1) for piece, _ in pieces]
        return [piece.view(rows, self.world_size, -1).transpose(0, 1) for piece, rows in pieces]

    def copying_from_shards(self, shards: torch.Tensor, pieces: list[torch.Tensor]) -> Callable[[], object]:
        """A function that fills the pieces of a flat parameter with the shards of all ranks, one after the other."""
        if any(self.dims):
            return partial(_copy_all, pieces, self._pieces_of_shards(shards))
        return partial(torch.split_with_sizes_copy, shards.view(self.world_size, -1), self._sizes, 1, out=pieces)

    def _pieces_of_shards(self, shards: torch.Tensor) -> list[torch.Tensor]:
        pieces = zip(shards.view(self.world_size, -1).split(self._sizes, 1), self._rows, strict=True)
        return [piece.unflatten(1, (rows, -1)) for piece, rows in pieces]

    def over(self, mesh: DataParallelMesh) -> DataParallelMesh:
        if self.world_size == 1 or (len(self._sizes) == 1 and not any(self.dims)):
            return mesh  # the flat parameter is the shards, one after the other
        return replace(mesh, transport=ChunkTransport(mesh.transport, self))


def _copy_all(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    for target, item in zip(to, source, strict=True):
        target.copy_(item)


def _chunk_numel(shape: tuple[int, ...], dim: int, world_size: int) -> int:
    if dim:
        return math.prod(shape) // world_size
    return -(-(shape[0] if shape else 1) // world_size) * math.prod(shape[1:])


def plan_chunks(params: Sequence[ParamSpec], world_size: int, alignment: int, dims: tuple[int, ...]) -> ChunkedLayout:
    """Place ``params``, in this order, in a flat parameter of which each rank holds a chunk of each, along ``dims``.

    >>> plan_chunks([ParamSpec("w", (5, 4)), ParamSpec("b", (3,))], world_size=2, alignment=4, dims=(0, 0)).shard_numel
    16
    """
    placed: list[ParamPlacement] = []
    cursor = 0
    for spec, dim in zip(params, dims, strict=True):
        numel, row = math.prod(spec.shape), row_numel(spec.shape)
        placed.append(ParamPlacement(spec.fqn, spec.shape, numel, cursor * world_size, row, not dim))
        cursor += -(-_chunk_numel(spec.shape, dim, world_size) // alignment) * alignment
    payload = sum(param.numel for param in placed)
    shard_numel = max(cursor, alignment)
    return ChunkedLayout(world_size, alignment, shard_numel, tuple(placed), world_size * shard_numel - payload, dims)


class ChunkTransport(TransportWrapper):
    """Copies between the flat parameter and what is sent. Around all that the user wraps around a transport."""

    def __init__(self, inner: Transport, layout: ChunkedLayout) -> None:
        super().__init__(inner)
        self.layout, self.name = layout, inner.name

    def changed(self, change: Callable[[Transport], Transport]) -> Transport:
        return ChunkTransport(change(self.inner), self.layout)

    @property
    def exact(self) -> Transport:
        return self.inner.exact

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        return self._gather(whole, [], shard, label)

    def prepared_all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Callable[[], Work]:
        return partial(self._gather, whole, [], shard, label)

    def _gather(self, whole: torch.Tensor, pieces: list[torch.Tensor], shard: torch.Tensor, label: Label) -> Work:
        if not pieces:  # only now there is memory to view
            pieces += self.layout.pieces(whole)
        shards = torch.empty_like(whole)
        work = self.inner.all_gather(shards, shard, label)
        return finish_with(work, whole.device, self.layout.copying_from_shards(shards, pieces))

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        shards = self.layout.as_shards(whole)
        work = self.inner.reduce_scatter(shard, shards, is_average, label)
        return finish_with(work, whole.device, lambda: None, shards)

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Any], is_everywhere: bool, label: Label
    ) -> None:
        shards = None if whole is None else torch.empty_like(whole)
        self.inner.gather(shards, part, ranges, is_everywhere, label)
        if whole is not None and shards is not None:
            self.layout.copying_from_shards(shards, self.layout.pieces(whole))()

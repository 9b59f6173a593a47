"""FSDP2's layout: each rank holds an even chunk of the rows of every parameter, for one copy per collective.

Only ``drop_in.install(layout="fsdp2")`` asks for it, by the granularity ``even_chunks``; others never load this file.
Here ``a`` of 5 rows and ``b`` of 3 on two ranks, one letter per row::

    flat parameter      |aaaaa.|bbb.|         as forward sees it, and what backward fills
                           copy
    shards              |aaabb|aa.b.|         what is gathered and scattered: the chunks of one rank, then the next
    shard               |aaabb|               of rank 0

The flat parameter holds the parameters one after the other, each padded to equal chunks. So all other code sees a
layout like any other, whose local shards are elsewhere. ``ChunkTransport``, around the transport of the flat parameter,
turns one order into the other. If there is only one parameter, the two are the same, and nothing is copied.
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
from ..core.ragged import RaggedShard, RunLengths
from .transports import finish_with


@dataclass(frozen=True)
class ChunkedLayout(FlatLayout):
    """The plan of a flat parameter of which each rank holds a chunk of every parameter."""

    in_chunks: ClassVar[bool] = True

    def chunk_numel(self, index: int) -> int:
        """Elements of parameter ``index`` on the first rank, which has the most."""
        param = self.params[index]
        rows = param.shape[0] if param.shape else 1
        return -(-rows // self.world_size) * math.prod(param.shape[1:])

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
            Shard(0) if param.shape and param.row_numel else RaggedShard(self.counts(index), flat=True)
            for index, param in enumerate(self.params)
        ]

    def counts(self, index: int) -> RunLengths:
        param = self.params[index]
        rows = RaggedShard.even(param.shape[0] if param.shape else 1, self.world_size).counts
        return rows.times(math.prod(param.shape[1:]))

    def counts_of(self, start: int, stop: int) -> RunLengths:
        return RunLengths([((stop - start) // self.world_size, self.world_size)])

    def range_in_shard(self, start: int, stop: int, rank: int) -> tuple[int, int]:
        return start // self.world_size, stop // self.world_size

    def holders(self, index: int) -> range:
        return range(-(-self.params[index].numel // max(self.chunk_numel(index), 1)))

    def own_part(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.cat([piece[rank] for piece in self.pieces(flat)])

    def as_shards(self, flat: torch.Tensor) -> torch.Tensor:
        shards = torch.empty_like(flat)
        self.copy_to_shards(flat, shards)
        return shards

    def views_of_range(self, shards: torch.Tensor, indices: range) -> list[torch.Tensor]:
        parts, first = shards.view(self.world_size, -1), self.params[indices.start].offset
        found = []
        for index in indices:
            param = self.params[index]
            start = (param.offset - first) // self.world_size
            chunks = parts[:, start : start + self.chunk_numel(index)].reshape(-1)
            found.append(chunks[: param.numel].view(param.shape))
        return found

    def positions_in_range(self, positions: torch.Tensor, indices: range) -> torch.Tensor:
        first, last = self.params[indices[0]].offset, self.params[indices[-1]].offset
        numel = (last - first) // self.world_size + self._padded(indices[-1])
        starts = [(self.params[i].offset - first) // self.world_size for i in indices]
        chunks = [self.chunk_numel(i) for i in indices]
        begins, lengths = (torch.tensor(item, device=positions.device) for item in (starts, chunks))
        rank, place = positions // numel, positions % numel
        index = torch.searchsorted(begins, place, right=True) - 1
        return begins[index] * (self.world_size - 1) + rank * lengths[index] + place

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

    @property
    def is_as_shards(self) -> bool:
        """Whether the flat parameter is the shards, one after the other."""
        return self.world_size == 1 or len(self._sizes) == 1

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat parameter: its pieces, by rank."""
        parts = flat.split([size * self.world_size for size in self._sizes])
        return [part.view(self.world_size, -1) for part in parts]

    def copying_from_shards(self, shards: torch.Tensor, pieces: list[torch.Tensor]) -> Callable[[], object]:
        """A function that fills the pieces of a flat parameter with the shards of all ranks, one after the other."""
        return partial(torch.split_with_sizes_copy, shards.view(self.world_size, -1), self._sizes, 1, out=pieces)

    def copy_to_shards(self, flat: torch.Tensor, shards: torch.Tensor) -> None:
        """The other way round."""
        torch.cat(self.pieces(flat), 1, out=shards.view(self.world_size, -1))

    def over(self, mesh: DataParallelMesh) -> DataParallelMesh:
        """The mesh for a flat parameter with this layout."""
        return mesh if self.is_as_shards else replace(mesh, transport=ChunkTransport(mesh.transport, self))


def plan_chunks(params: Sequence[ParamSpec], world_size: int, alignment: int) -> ChunkedLayout:
    """Place ``params``, in this order, in a flat parameter of which each rank holds a chunk of each.

    >>> plan_chunks([ParamSpec("w", (5, 4)), ParamSpec("b", (3,))], world_size=2, alignment=4).shard_numel
    16
    """
    placed: list[ParamPlacement] = []
    cursor = 0
    for spec in params:
        numel, rows = math.prod(spec.shape), spec.shape[0] if spec.shape else 1
        placed.append(ParamPlacement(spec.fqn, spec.shape, numel, cursor * world_size, row_numel(spec.shape), True))
        chunk = -(-rows // world_size) * math.prod(spec.shape[1:])
        cursor += -(-chunk // alignment) * alignment
    payload = sum(param.numel for param in placed)
    shard_numel = max(cursor, alignment)
    return ChunkedLayout(world_size, alignment, shard_numel, tuple(placed), world_size * shard_numel - payload)


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
        return finish_with(work, whole.device, _nothing, shards)

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Any], is_everywhere: bool, label: Label
    ) -> None:
        shards = None if whole is None else torch.empty_like(whole)
        self.inner.gather(shards, part, ranges, is_everywhere, label)
        if whole is not None and shards is not None:
            self.layout.copying_from_shards(shards, self.layout.pieces(whole))()


def _nothing() -> None: ...

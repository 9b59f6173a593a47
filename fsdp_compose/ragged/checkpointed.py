"""How ``torch.distributed.checkpoint`` saves and loads a tensor of which each rank holds one range: as boxes."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .._torch import local_tensor
from .edits import note_write_of_all_ranks
from .owned import OwnedDTensor
from .spec import RaggedSpec


class CheckpointedDTensor(OwnedDTensor):
    """The hooks of ``torch.distributed.checkpoint``."""

    _spec: RaggedSpec

    def _chunks(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """This rank's elements as boxes of the whole tensor, each with a view of the local memory."""
        base, (start, _) = self._spec.inner_offsets, self._spec.element_range
        local = local_tensor(self).detach().view(-1)
        return [
            (
                ChunkStorageMetadata(
                    offsets=torch.Size([a + b for a, b in zip(base, box.offsets, strict=True)]),
                    sizes=torch.Size(box.sizes),
                ),
                local[box.start - start : box.start - start + prod(box.sizes)].view(box.sizes),
            )
            for box in self._spec.boxes()
        ]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local_tensor(self))
        if hasattr(properties, "strides"):  # torch 2.14: those of the whole tensor
            properties.strides = self.stride()
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk, _ in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Asked for on every rank, also where there is nothing to load, when torch.distributed.checkpoint is about to
        # write to the local memory.
        note_write_of_all_ranks(local_tensor(self))
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for chunk, view in self._chunks():
            if chunk.offsets == index.offset:
                return view
        raise ValueError(f"rank {self._spec.rank} holds no part of {index.fqn} at {index.offset}")

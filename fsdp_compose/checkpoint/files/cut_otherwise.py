"""Parameters of several tensors (quantised weights) that were saved by another number of ranks.

What a file holds of one is an instance of its class over the rows of the rank that saved it. A class need not know how
to cut rows out of such an instance, where ``torch.distributed.checkpoint`` would ask for that. So the pieces that have
rows of this rank are read whole, and their tensors are cut, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from ...ragged import CompositeDTensor


def read_cut_otherwise(
    plan: LoadPlan, planner: LoadPlanner, metadata: Metadata, read: Callable[[LoadPlan, Any], Any]
) -> LoadPlan:
    """Read what was cut otherwise than it is here.

    Args:
        plan: of tensors.
        read: the reader's own way to read a plan.

    Returns:
        What is left of the plan.
    """
    targets = getattr(planner, "state_dict", {})
    others, wanted = list[ReadItem](), dict[str, list[ReadItem]]()
    for item in plan.items:
        target, sizes = targets.get(item.dest_index.fqn), _saved_sizes(item, metadata)
        if isinstance(target, CompositeDTensor) and not (item.lengths == sizes == target.local_shape):
            whole = replace(item, storage_offsets=torch.Size([0] * len(sizes)), lengths=sizes)
            wanted.setdefault(item.dest_index.fqn, []).append(whole)
        else:
            others.append(item)
    for fqn, items in wanted.items():
        pieces = _Pieces()
        read(replace(plan, items=items), pieces)
        targets[fqn].write_rows(pieces.in_order())
    return replace(plan, items=others) if wanted else plan


def _saved_sizes(item: ReadItem, metadata: Metadata) -> torch.Size:
    """Of the tensor in the file, of which an item may want a part."""
    entry: Any = metadata.state_dict_metadata[item.storage_index.fqn]
    sizes: torch.Size = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
    return sizes


class _Piece:
    """What a reader finds in the place of a tensor to copy into; keeps what was read."""

    read: torch.Tensor

    def __init__(self, size: torch.Size) -> None:
        self._size = size

    def size(self) -> torch.Size:
        return self._size

    def detach(self) -> _Piece:
        return self

    def copy_(self, read: torch.Tensor) -> None:
        self.read = read


class _Pieces:
    """Stands in the place of a planner, for the pieces of one parameter."""

    def __init__(self) -> None:
        self._by_row: dict[int, _Piece] = {}

    def resolve_tensor(self, item: ReadItem) -> _Piece:
        assert item.storage_index.offset is not None
        piece = self._by_row[item.storage_index.offset[0]] = _Piece(item.lengths)
        return piece

    def commit_tensor(self, *_: Any) -> None:
        """Nothing to do: what was read is there."""

    def in_order(self) -> list[tuple[int, torch.Tensor]]:
        """What was read, each with its first row."""
        return [(row, self._by_row[row].read) for row in sorted(self._by_row)]

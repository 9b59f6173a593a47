"""``RaggedSpec``: mesh, placements, shape and dtype of a ``RaggedDTensor``, and what follows from them for one rank.

Pure arithmetic, computed once and kept. Tensors that are sharded alike should share one, so that comparing is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from .._torch import DTensorSpec, TensorMeta, compute_local_shape_and_global_offset, mend_mesh
from .placement import Box, RaggedShard, range_to_boxes

Shape = tuple[int, ...]


class RaggedSpec(DTensorSpec):
    """Mesh, placements, shape and dtype of a ``RaggedDTensor``, and what follows from them for this rank."""

    __module__ = "fsdp_compose"  # what pickles name, wherever this file lies
    __hash__ = DTensorSpec.__hash__

    @staticmethod
    def make(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> RaggedSpec:
        """Raises ValueError unless exactly one placement is a ``RaggedShard``, and it covers the tensor."""
        size = torch.Size(shape)
        known = [item.with_shape(size) if isinstance(item, RaggedShard) else item for item in placements]
        spec = RaggedSpec(mesh, tuple(known), TensorMeta(size, torch.empty(size, device="meta").stride(), dtype))
        num_ragged = sum(isinstance(item, RaggedShard) for item in spec.placements)
        if num_ragged != 1 or len(spec.placements) != mesh.ndim:
            raise ValueError(
                f"a RaggedDTensor on a mesh of {mesh.ndim} dimension(s) needs as many placements, of which one is a "
                f"RaggedShard; got {list(spec.placements)}"
            )
        units, inner = spec.ragged.num_units(spec.inner_shape), tuple(spec.inner_shape)
        if len(spec.ragged.counts) != mesh.size(spec.ragged_dim) or spec.ragged.num_placed != units:
            raise ValueError(
                f"{spec.ragged} does not shard a tensor of shape {inner}, which has {units} "
                f"{'elements' if spec.ragged.flat else 'rows'}, over {mesh.size(spec.ragged_dim)} ranks"
            )
        return spec

    def _verify_shard_order(self, shard_order: Any) -> None:
        """Stock DTensor refuses a placement that is no even ``Shard``; this class exists to carry one."""

    @cached_property
    def ragged_dim(self) -> int:
        """The mesh dimension that the ``RaggedShard`` is for."""
        return next(i for i, item in enumerate(self.placements) if isinstance(item, RaggedShard))

    @cached_property
    def ragged(self) -> RaggedShard:
        placement = self.placements[self.ragged_dim]
        assert isinstance(placement, RaggedShard)
        return placement

    @cached_property
    def rank(self) -> int:
        """This rank's place in the ragged mesh dimension."""
        return self.mesh.get_local_rank(self.ragged_dim)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the other local shards."""
        return self.mesh.get_group(self.ragged_dim)

    @cached_property
    def gathered_placements(self) -> tuple[Placement, ...]:
        """The placements after the local shards have been gathered."""
        return tuple(Replicate() if isinstance(item, RaggedShard) else item for item in self.placements)

    @cached_property
    def _inner(self) -> tuple[Shape, Shape]:
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.gathered_placements)
        return tuple(sizes), tuple(offsets)

    @property
    def inner_shape(self) -> Shape:
        """The shape of what the ``RaggedShard`` shards: what is local after all other placements."""
        return self._inner[0]

    @property
    def inner_offsets(self) -> Shape:
        """Where that lies in the whole tensor."""
        return self._inner[1]

    @cached_property
    def is_only_ragged(self) -> bool:
        """Whether no other placement shards the tensor: what the ``RaggedShard`` shards is the whole, on every rank."""
        sizes = self.mesh.shape
        return all(item.is_replicate() or size == 1 for item, size in zip(self.gathered_placements, sizes, strict=True))

    @cached_property
    def is_scalar(self) -> bool:
        return not self.shape

    @cached_property
    def reduce_dims(self) -> tuple[int, ...]:
        """The mesh dimensions whose ranks hold different elements."""
        return tuple(i for i, item in enumerate(self.placements) if not item.is_replicate())

    @cached_property
    def local_shape(self) -> Shape:
        return self.ragged.local_shape(self.inner_shape, self.rank)

    @cached_property
    def element_range(self) -> tuple[int, int]:
        """Start and stop of this rank's local shard in the flattened inner tensor."""
        return self.ragged.element_range(self.inner_shape, self.rank)

    @cached_property
    def _by_dtype(self) -> dict[torch.dtype, RaggedSpec]:
        return {self.dtype: self}

    @property
    def dtype(self) -> torch.dtype:
        assert self.tensor_meta is not None
        return self.tensor_meta.dtype

    def with_dtype(self, dtype: torch.dtype) -> RaggedSpec:
        spec = self._by_dtype.get(dtype)
        if spec is None:
            assert self.tensor_meta is not None
            meta = TensorMeta(self.tensor_meta.shape, self.tensor_meta.stride, dtype)
            spec = self._by_dtype[dtype] = RaggedSpec(self.mesh, self.placements, meta)
            spec.__dict__["_by_dtype"] = self._by_dtype
        return spec

    def is_sharded_like(self, other: RaggedSpec) -> bool:
        """Whether tensors of both have their elements at the same places."""
        return self is other or (
            self.shape == other.shape and self.placements == other.placements and self.mesh == other.mesh
        )

    def boxes(self) -> list[Box]:
        """This rank's local shard as boxes of the inner tensor; an empty tensor is one empty box on the first rank."""
        if prod(self.shape) == 0:
            return [Box((0,) * len(self.shape), tuple(self.shape), 0)] if self.rank == 0 else []
        return range_to_boxes(self.inner_shape, *self.element_range)

    def __getstate__(self) -> dict[str, Any]:
        names = ("mesh", "placements", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order")
        return {**{name: self.__dict__[name] for name in names if name in self.__dict__}, "_hash": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        mend_mesh(self.mesh)

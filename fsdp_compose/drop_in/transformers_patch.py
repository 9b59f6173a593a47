"""Let transformers' loader read this rank's part of a checkpoint's tensor: it assumes equal chunks for every shard."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from transformers.distributed.sharding_utils import DtensorShardOperation as Original

from ..ragged import RaggedShard


class DtensorShardOperation(Original):
    """transformers' class of this name (checked with 5.23), extended to our sharded parameters."""

    def __init__(self, param: DTensor) -> None:
        self.num_stacked = param.shape[0] if param.ndim else 1
        if any(isinstance(item, RaggedShard) and item.flat for item in param.placements):  # the original expects boxes
            self.device_mesh, self.placements, self.param_ndim = param.device_mesh, tuple(param.placements), param.ndim
        else:
            super().__init__(param)

    def shard_tensor(
        self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """Return this rank's part of ``source``, a tensor or a slice of a file. With ``tensor_idx``, ``source`` is one
        index of dim 0 of the parameter, and the result is ``None`` if this rank has no part of it.

        Raises:
            NotImplementedError: ``source`` is one index of a parameter that is sharded between elements.
        """
        found = [(dim, item) for dim, item in enumerate(self.placements) if isinstance(item, RaggedShard)]
        if not found:
            return super().shard_tensor(source, tensor_idx, device, dtype)
        mesh_dim, placement = found[0]
        rank = self.device_mesh.get_local_rank(mesh_dim)
        start, stop = placement.unit_range(rank)
        before = self.placements
        num_dims = len(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        if tensor_idx is not None and num_dims == self.param_ndim - 1:
            if placement.flat:
                raise NotImplementedError(
                    f"{placement!r} shards a parameter of {self.num_stacked} stacked tensors between elements, but the "
                    "checkpoint stores the tensors one by one: shard it by rows, or load the model before fully_shard()"
                )
            if not start <= tensor_idx % self.num_stacked < stop:
                return None
        elif not placement.flat and all(isinstance(item, (RaggedShard, Replicate)) for item in self.placements):
            return source[start:stop].to(device=device, dtype=dtype)
        self.placements = tuple(Replicate() if isinstance(item, RaggedShard) else item for item in before)
        try:
            part = super().shard_tensor(source, tensor_idx, device, dtype)
        finally:
            self.placements = before
        assert part is not None, "the others leave a part of everything"
        if num_dims == self.param_ndim - 1:
            return part
        return part.reshape(-1)[start:stop] if placement.flat else part[start:stop]

"""The loaders of transformers and peft: which shard of a whole tensor this rank gets.

They assume equal chunks, and both ask transformers' class ``DtensorShardOperation`` (checked with transformers 5.23
and 5.24, and peft 0.21). ``fully_shard`` changes its methods, for our placements alone, if the class is imported by
then: what has made the model's layers or adapters has imported it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ..core.ragged import RaggedShard

MODULE, _CLASS = "transformers.distributed.sharding_utils", "DtensorShardOperation"


def extend_transformers_loader() -> None:
    """Make transformers' loader ask our placements, if it is imported and does not yet. Local."""
    # Nothing needs it if it is not imported: what made the model's layers or adapters would have imported it.
    loader = getattr(sys.modules.get(MODULE), _CLASS, None)
    if loader is not None and "_fsdp_compose_extended" not in vars(loader):
        loader._fsdp_compose_extended = True
        _extend(loader)


def _extend(loader: Any) -> None:
    stock_init, stock_shard_tensor = loader.__init__, loader.shard_tensor

    @functools.wraps(stock_init)
    def init(self: Any, param: DTensor) -> None:
        self._fsdp_compose_num_stacked = param.shape[0] if param.ndim else 1
        is_box = param.ndim > 0 and not any(isinstance(item, RaggedShard) and item.flat for item in param.placements)
        self._fsdp_compose_is_empty = False
        if is_box or not _ragged_dims(param.placements):
            stock_init(self, param)
            if _ragged_dims(param.placements) and self._axis0_local_size == 0:
                self._fsdp_compose_is_empty = True
                self._axis0_offset, self._axis0_local_size = 0, 1  # read one, and leave it out
        else:
            self.device_mesh, self.placements, self.param_ndim = param.device_mesh, tuple(param.placements), param.ndim

    @functools.wraps(stock_shard_tensor)
    def shard_tensor(
        self: Any, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """Return this rank's shard of ``source``, a tensor or a slice of a file. With ``tensor_idx``, ``source`` is one
        index of dim 0 of the parameter, and the result is ``None`` if this rank has nothing of it. Of a parameter of
        which this rank has nothing at all it gets one, which ``torch.stack`` leaves out: an empty list has no shape.

        Raises:
            NotImplementedError: ``source`` is one index of a parameter that is sharded between elements.
        """

        def stock() -> torch.Tensor | None:
            result: torch.Tensor | None = stock_shard_tensor(self, source, tensor_idx, device=device, dtype=dtype)
            return result

        found = _ragged_dims(self.placements)
        if not found:
            return stock()
        placement, num_stacked, before = self.placements[found[0]], self._fsdp_compose_num_stacked, self.placements
        start, stop = placement.unit_range(self.device_mesh.get_local_rank(found[0]))
        num_dims = len(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        # transformers reads the experts of a stacked parameter one by one.
        if tensor_idx is not None and num_dims == self.param_ndim - 1:
            if placement.flat:
                raise NotImplementedError(
                    f"{placement!r} shards a parameter of {num_stacked} stacked tensors between elements, but the "
                    "checkpoint stores the tensors one by one: shard it by rows, or load the model before fully_shard()"
                )
            local = stock()
            return local.as_subclass(_LeftOut) if local is not None and self._fsdp_compose_is_empty else local
        if num_dims and not placement.flat and all(isinstance(item, (RaggedShard, Replicate)) for item in before):
            return source[start:stop].to(device=device, dtype=dtype)
        # The stock code cuts what other placements cut; our shard of that is cut below.
        self.placements = tuple(Replicate() if isinstance(item, RaggedShard) else item for item in before)
        try:
            local = stock()
        finally:
            self.placements = before
        assert local is not None, "the others leave some of everything"
        return local[start:stop] if local.dim() and not placement.flat else local.reshape(-1)[start:stop]

    loader.__init__, loader.shard_tensor = init, shard_tensor


class _LeftOut(torch.Tensor):
    """A tensor that gives a stack its shape, and no row."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result.as_subclass(torch.Tensor)[:0] if func is torch.stack else result


def _ragged_dims(placements: Any) -> list[int]:
    return [dim for dim, item in enumerate(placements) if isinstance(item, RaggedShard)]

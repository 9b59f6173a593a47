"""The memory of a flat gradient, and its views: what ``.grad`` of the sharded parameters and of flat views holds.

Owned by the ``ShardedGradient`` of a handle, which decides when gradients are shown. The views are built once and
recycled, unless the user still holds one: then the memory is left to him, and made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import is_
from sys import getrefcount

import torch
import torch.nn as nn

from .._torch import storage_use_count
from .gradient_view import FlatSegment, local_of
from .sharded_param import local_elements, make_gradient

LocalShard = tuple[int, int, tuple[int, ...]]


class GradientBuffer:
    """One flat tensor of a shard's length and device, whose memory comes and goes.

    Args:
        sharded_params: the sharded parameters, in the order of the layout.
        local_shards: for each sharded parameter, (start, stop, shape) of its local shard inside the shard, in elements.
        shard: the shard.
        segments: the flat views over the shard; the list is the handle's own.
        dtype: of the tensor; ``None``: that of the shard.

    Attributes:
        flat: the tensor; ``None`` before its first use, and after it was left to the user.
        views: for each sharded parameter; ``locals`` are their local tensors, as they were made. Empty without
            ``flat``.
        is_allocated: there is memory behind ``flat``.
    """

    def __init__(
        self,
        sharded_params: Sequence[nn.Parameter],
        local_shards: Sequence[LocalShard],
        shard: torch.Tensor,
        segments: list[FlatSegment],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._sharded_params, self._local_shards, self._segments = sharded_params, local_shards, segments
        self.numel, self.dtype, self.device = shard.numel(), dtype or shard.dtype, shard.device
        self._nbytes = self.numel * self.dtype.itemsize
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.locals: list[torch.Tensor] = []
        self.is_allocated = False
        self._objects: list[torch.Tensor] = []  # views and locals; and how often each is referred to
        self._references: list[int] = []
        self._num_others = (0, 0)  # references to the segments' views, and uses of the storage

    def local_shard_of(self, flat: torch.Tensor | None, index: int) -> torch.Tensor:
        """The part of ``flat`` that belongs to a sharded parameter, in its shape."""
        assert flat is not None
        start, stop, shape = self._local_shards[index]
        return flat[start:stop].view(shape)

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The padding: (start, stop) of what belongs to no sharded parameter."""
        ranges = sorted((start, stop) for start, stop, _ in self._local_shards if stop > start)
        starts, stops = [0, *(stop for _, stop in ranges)], [*(start for start, _ in ranges), self.numel]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def zero_gaps(self) -> None:
        """Make the padding zero again, after the flat gradient was scaled or written to as a whole."""
        assert self.flat is not None
        for start, stop in self.gaps:
            self.flat[start:stop].zero_()

    # ---- memory

    def ensure_writable(self) -> None:
        """Have memory, and views of it, that are not held elsewhere."""
        if self.is_allocated and self._is_held_elsewhere():
            self._forget()
        if self.flat is None:
            self._build()
        elif not self.is_allocated:
            self._storage.resize_(self._nbytes)
            self.is_allocated = True

    def release(self) -> None:
        """Free the memory, or leave it where it is held elsewhere."""
        if self._is_held_elsewhere():
            self._forget()
            return
        try:
            self._storage.resize_(0)
        except RuntimeError:  # it was shown to NumPy: torch never changes its size again
            self._forget()
        else:
            self.is_allocated = False

    def attach(self, segment: FlatSegment) -> None:
        """Give a segment, the last of the list, its view."""
        if self.flat is None:
            return
        if not self.is_allocated:
            self._forget()
            return
        before = self._count_others()
        self._view_for(segment)
        after, known = self._count_others(), self._num_others
        self._num_others = (known[0] + after[0] - before[0], known[1] + after[1] - before[1])

    def _build(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            flat = self.flat = self._empty()
            self.locals = [self.local_shard_of(flat, i) for i in range(len(self._sharded_params))]
            self.views = [make_gradient(*item) for item in zip(self.locals, self._sharded_params, strict=True)]
        for segment in self._segments:
            self._view_for(segment)
        self._storage = flat.untyped_storage()
        self.is_allocated = True
        self._objects = [*self.views, *self.locals]
        self._references, self._num_others = [*map(getrefcount, self._objects)], self._count_others()

    def _empty(self) -> torch.Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def _view_for(self, segment: FlatSegment) -> None:
        assert self.flat is not None
        with torch.inference_mode(False), torch.no_grad():
            segment.have_gradient(self.flat)

    def _forget(self) -> None:
        self.flat, self.views, self.locals, self._objects = None, [], [], []
        for segment in self._segments:
            segment.have_gradient(None)
        del self._storage
        self.is_allocated = False

    def _is_held_elsewhere(self) -> bool:
        return (
            [*map(getrefcount, self._objects)] != self._references
            or self._count_others() != self._num_others
            or not self.is_in_place()
        )

    def _count_others(self) -> tuple[int, int]:
        count = 0
        for segment in self._segments:
            if segment.gradient is not None:
                count += getrefcount(segment.gradient) + getrefcount(local_of(segment.gradient))
        return count, storage_use_count(self._storage)

    # ---- what the user may have done to the views

    def is_in_place(self) -> bool:
        """Whether the sharded parameters' views have their memory (their ``.data`` was not assigned to)."""
        return all(map(is_, map(local_elements, self.views), self.locals))

    def holds(self, segment: FlatSegment) -> bool:
        """Whether a segment's view has its memory."""
        assert self.flat is not None and segment.gradient is not None
        return segment.is_at(self.flat, segment.gradient)

    def take_in(self, segment: FlatSegment, given: torch.Tensor) -> None:
        """Copy a gradient that the user gave to a segment."""
        if segment.gradient is given:  # its .data was assigned to
            self._view_for(segment)
        assert segment.gradient is not None
        segment.gradient.copy_(given)
        self.zero_gaps()

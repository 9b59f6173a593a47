"""Different parameters, or a parameter and a buffer, in the same memory: refused, since sharding would break them up.

``nn.Parameter(embedding.weight.data)`` is a parameter of its own, which changes with every step of the other one. A
shard is a copy, so that this would end without a word; nor are they tied weights, which have one gradient and one
optimizer state. Views of one storage that do not overlap (loaded checkpoints, flattened buffers) are in order.

A group's own tensors are compared by ``fully_shard``. Those of different groups are compared at the first forward, by
what each group has noted of the memory that its parameters had. Tensors on the meta device have no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._torch import is_wrapper


@dataclass(frozen=True)
class Region:
    """The memory of a tensor. ``storage`` stays unique, and comparable, when the storage is freed.

    Attributes:
        name: of the tensor.
        is_sharded: it is a parameter of a group.
        storage: weak.
        start, stop: the bytes of the storage between which all elements are.
        shape, strides: with the bytes of an element as the last dimension; in bytes.
    """

    name: str
    is_sharded: bool
    storage: StorageWeakRef
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_dense(self) -> bool:
        """Whether every byte between start and stop belongs to it."""
        return self.stop - self.start == torch.Size(self.shape).numel()


def region_of(name: str, tensor: torch.Tensor, is_sharded: bool) -> Region | None:
    """Where a tensor is; ``None`` if it has no memory that could be shared."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or is_wrapper(tensor):
        return None
    if not tensor.numel():
        return None
    size = tensor.element_size()
    shape, strides = (*tensor.shape, size), (*[stride * size for stride in tensor.stride()], 1)
    start = int(tensor.storage_offset()) * size
    stop = start + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return Region(name, is_sharded, StorageWeakRef(tensor.untyped_storage()), start, stop, shape, strides, tensor.dtype)


def regions_of(tensors: Iterable[tuple[str, torch.Tensor]], are_sharded: bool) -> list[Region]:
    """The regions of tensors that have one."""
    found = [region_of(name, tensor, are_sharded) for name, tensor in tensors]
    return [region for region in found if region is not None]


def refuse_shared_memory(regions: Sequence[Region]) -> None:
    """Raise if a sharded parameter overlaps with another region, or with itself.

    Raises:
        ValueError: it does.
    """
    last: Region | None = None
    active: list[tuple[int, Region]] = []
    overlaps: list[tuple[int, int]] = []
    # In the order of memory, which may differ between ranks; reported is the first overlap in the order of the regions.
    for index, region in sorted(enumerate(regions), key=lambda item: (item[1].storage.cdata, item[1].start)):
        if last is None or region.storage.cdata != last.storage.cdata:
            active = []
        active = [item for item in active if item[1].stop > region.start]
        if region.is_sharded and region.stop - region.start < torch.Size(region.shape).numel():
            overlaps.append((index, index))
        for other_index, other in active:
            if (region.is_sharded or other.is_sharded) and _overlap(other, region):
                overlaps.append((min(index, other_index), max(index, other_index)))
        active.append((index, region))
        last = region
    if overlaps:
        first, second = min(overlaps)
        raise ValueError(_message(regions[first], regions[second]))


def _overlap(a: Region, b: Region) -> bool:
    """Whether two regions of one storage, whose ends overlap, have a byte in common."""
    if a.is_dense and b.is_dense:
        return True
    start = min(a.start, b.start)
    bytes_of_a = torch.zeros(max(a.stop, b.stop) - start, dtype=torch.bool)
    bytes_of_a.as_strided(a.shape, a.strides, a.start - start).fill_(True)
    return bool(bytes_of_a.as_strided(b.shape, b.strides, b.start - start).any())


def _message(a: Region, b: Region) -> str:
    if a is b:
        return (
            f"fully_shard(): elements of the parameter {a.name} share memory with each other (an expanded tensor), and "
            "would be separated by sharding: give it memory of its own, .clone()"
        )
    if not a.is_sharded:
        a, b = b, a
    is_same = (a.start, a.shape, a.strides, a.dtype) == (b.start, b.shape, b.strides, b.dtype)
    other = "the parameter" if b.is_sharded else "the buffer, or parameter that is not sharded,"
    tie = f"make them one parameter ({b.name} = {a.name}, tied weights), or " if is_same and b.is_sharded else ""
    return (
        f"fully_shard(): the parameter {a.name} and {other} {b.name} are different tensors in the same memory, so that "
        "a change of one changes the other. Sharding would give each memory of its own, without a word: "
        f"{tie}give one of them memory of its own before fully_shard(), .clone()"
    )

"""Some elements of a long tensor, of which each rank has its own, gathered: their positions and values.

What one rank sends is one block of bytes, in the form that takes fewer for all ranks together::

    | values | positions, 4 or 8 bytes each | padding |        few elements
    | values | one bit for each element of the range | padding |    from about one in 32 on

Positions are counted from the start of the rank's own range; so 4 bytes are enough but for the longest of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..comm import Label, Transport
from .gathering import Range

_ALIGNMENT = 16  # bytes, of blocks and of what they consist of: the largest element


@dataclass(frozen=True)
class Elements:
    """Some elements of a 1-D tensor.

    Attributes:
        positions: int64, ascending.
        values: as many.
    """

    positions: torch.Tensor
    values: torch.Tensor


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers: equal where their bits are, also of NaN, and of zeros with signs. Those of 16 bytes are
    two integers each, in a last dim."""
    size = tensor.element_size()
    if size == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def changed_elements(old: torch.Tensor, new: torch.Tensor) -> Elements:
    """The elements of ``new`` whose bits are not those of ``old``; both 1-D, of one dtype."""
    differs = as_bits(new) != as_bits(old)
    if differs.ndim == 2:
        differs = differs.any(1)
    positions = differs.nonzero().view(-1)
    return Elements(positions, new[positions])


@dataclass(frozen=True)
class Form:
    """How blocks are laid out: alike on all ranks, which know all counts.

    Attributes:
        dtype: of the values.
        index: of positions; ``None``: one bit for each element.
        counts: how many elements each rank has.
        ranges: of each rank in the whole tensor.
    """

    dtype: torch.dtype
    index: torch.dtype | None
    counts: Sequence[int]
    ranges: Sequence[Range]

    @staticmethod
    def shortest(dtype: torch.dtype, counts: Sequence[int], ranges: Sequence[Range]) -> Form:
        longest = max(stop - start for start, stop in ranges)
        listed = Form(dtype, torch.int32 if longest < 1 << 31 else torch.int64, counts, ranges)
        return min(listed, Form(dtype, None, counts, ranges), key=lambda form: form.nbytes)

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return self.blocks()[-1][1]

    def blocks(self) -> list[Range]:
        """Where the block of each rank is, in bytes."""
        stops = [*accumulate(self._num_bytes(rank) for rank in range(len(self.counts)))]
        return [*zip([0, *stops], stops, strict=False)]

    def _num_bytes(self, rank: int) -> int:
        count, (start, stop) = self.counts[rank], self.ranges[rank]
        if not count:
            return 0
        places = -(-(stop - start) // 8) if self.index is None else count * self.index.itemsize
        return -(-(self._places_at(count) + places) // _ALIGNMENT) * _ALIGNMENT

    def _places_at(self, count: int) -> int:
        return -(-count * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def write(self, block: torch.Tensor, own: Elements, rank: int) -> None:
        """Write the elements of ``rank`` into its block."""
        count, (start, stop) = self.counts[rank], self.ranges[rank]
        if not count:
            return
        block[: count * self.dtype.itemsize].view(self.dtype).copy_(own.values)
        places = block[self._places_at(count) :]
        if self.index is not None:
            places[: count * self.index.itemsize].view(self.index).copy_(own.positions)
            return
        num = -(-(stop - start) // 8)
        flags = torch.zeros(8 * num, dtype=torch.uint8, device=block.device)
        flags[own.positions] = 1
        torch.sum(flags.view(num, 8) << _bits(block.device), 1, dtype=torch.uint8, out=places[:num])

    def read(self, block: torch.Tensor, rank: int) -> Elements:
        """The elements of ``rank``, in the whole tensor."""
        count, (start, stop) = self.counts[rank], self.ranges[rank]
        values = block[: count * self.dtype.itemsize].view(self.dtype)
        places = block[self._places_at(count) :]
        if not count:
            positions = torch.empty(0, dtype=torch.int64, device=block.device)
        elif self.index is not None:
            positions = places[: count * self.index.itemsize].view(self.index).to(torch.int64) + start
        else:
            flags = (places[: -(-(stop - start) // 8), None] >> _bits(block.device)) & 1
            positions = flags.view(-1).nonzero().view(-1) + start
        return Elements(positions, values)


def _bits(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def gather_counts(transport: Transport, count: int, device: torch.device, label: Label) -> list[int]:
    """How many elements each rank of the transport's process group has. Ranks: all of it."""
    size, rank = transport.group.size(), transport.group.rank()
    counts = torch.zeros(size, dtype=torch.int64, device=device)
    counts[rank] = count
    ranges = [(i, i + 1) for i in range(size)]
    transport.gather(counts, counts[rank : rank + 1], ranges, True, label)
    found: list[int] = counts.tolist()
    return found


def gather_elements(
    transport: Transport, own: Elements, form: Form, is_everywhere: bool, label: Label
) -> Elements | None:
    """The elements of all ranks, in their order; ``None`` where they are not wanted. Ranks: all of the transport's
    process group.

    Args:
        own: this rank's, counted from the start of its range.
        is_everywhere: all ranks want them, else the first one alone.
    """
    rank, blocks = transport.group.rank(), form.blocks()
    is_wanted = is_everywhere or rank == 0
    start, stop = blocks[rank] if is_wanted else (0, blocks[rank][1] - blocks[rank][0])
    memory = torch.zeros(form.nbytes if is_wanted else stop, dtype=torch.uint8, device=own.values.device)
    form.write(memory[start:stop], own, rank)
    transport.gather(memory if is_wanted else None, memory[start:stop], blocks, is_everywhere, label)
    if not is_wanted:
        return None
    parts = [form.read(memory[slice(*block)], i) for i, block in enumerate(blocks)]
    return Elements(torch.cat([part.positions for part in parts]), torch.cat([part.values for part in parts]))

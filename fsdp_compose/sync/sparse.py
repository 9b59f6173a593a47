"""A few elements of a long tensor, of which each rank has some, gathered: their positions and values.

What one rank sends is one block of bytes::

    | positions, 4 or 8 bytes each | values | padding to 8 bytes |

Positions are counted from the start of the rank's own range; so 4 bytes are enough but for the longest of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..comm import Label, Transport
from .gathering import Range

_ALIGNMENT = 8


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


def num_bytes(count: int, longest: int, dtype: torch.dtype) -> int:
    """Of the block of a rank that sends ``count`` elements, of ranges of at most ``longest``."""
    size = count * (_position_dtype(longest).itemsize + dtype.itemsize)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


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
    transport: Transport,
    own: Elements,
    counts: Sequence[int],
    ranges: Sequence[Range],
    is_everywhere: bool,
    label: Label,
) -> Elements | None:
    """The elements of all ranks, in their order; ``None`` where they are not wanted. Ranks: all of the transport's
    process group.

    Args:
        own: this rank's, counted from the start of its range.
        counts: of each rank.
        ranges: in the whole tensor.
        is_everywhere: all ranks want them, else the first one alone.
    """
    rank, dtype = transport.group.rank(), own.values.dtype
    longest = max(stop - start for start, stop in ranges)
    stops = [*accumulate(num_bytes(count, longest, dtype) for count in counts)]
    blocks = [*zip([0, *stops], stops, strict=False)]
    is_wanted = is_everywhere or rank == 0
    num = stops[-1] if is_wanted else stops[rank] - blocks[rank][0]
    memory = torch.empty(num, dtype=torch.uint8, device=own.values.device)
    mine = memory[slice(*blocks[rank])] if is_wanted else memory
    positions, values = _parts(mine, counts[rank], longest, dtype)
    positions.copy_(own.positions)
    values.copy_(own.values)
    transport.gather(memory if is_wanted else None, mine, blocks, is_everywhere, label)
    if not is_wanted:
        return None
    parts = [_parts(memory[a:b], count, longest, dtype) for (a, b), count in zip(blocks, counts, strict=True)]
    starts = [start for start, _ in ranges]
    return Elements(
        torch.cat([positions + start for (positions, _), start in zip(parts, starts, strict=True)]),
        torch.cat([values for _, values in parts]),
    )


def _parts(block: torch.Tensor, count: int, longest: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a block has its positions, and its values."""
    kind = _position_dtype(longest)
    end = count * kind.itemsize
    return block[:end].view(kind), block[end : end + count * dtype.itemsize].view(dtype)


def _position_dtype(longest: int) -> torch.dtype:
    return torch.int32 if longest < 1 << 31 else torch.int64

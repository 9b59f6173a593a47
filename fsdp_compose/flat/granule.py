"""Granules: the pieces of parameters that no shard boundary divides; from what the user writes to a number of elements.

Pure functions of shapes.
"""

import math
from typing import Literal, TypeAlias

Granule: TypeAlias = Literal["elements", "rows", "whole"] | int | tuple[int, ...]
"""The unit that no shard boundary splits: an element (`"elements"`), an index of dim 0 (`"rows"`), the parameter
(`"whole"`), N consecutive elements (an int), or a block of this shape, aligned to the parameter's trailing dims (a
tuple)."""


def row_numel(shape: tuple[int, ...]) -> int:
    """Elements of one index of dim 0, but at least 1: so that it can divide."""
    return max(1, math.prod(shape[1:]))


def expected_granule(granule: Granule | None, ndim: int) -> str:
    """A description of the legal granules of a parameter of so many dimensions; empty if the given one is legal."""
    if granule is None or granule in ("elements", "rows", "whole"):
        return ""
    sizes = granule if isinstance(granule, tuple) else (granule,)
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        return "'elements', 'rows', 'whole', a positive int or a tuple of positive ints"
    return f"a block of at most {ndim} dims" if isinstance(granule, tuple) and len(granule) > ndim else ""


def granule_numel(granule: Granule, shape: tuple[int, ...]) -> int:
    """The distance between neighbouring legal shard boundaries, counted from the parameter's start."""
    numel = math.prod(shape)
    if isinstance(granule, tuple):
        wanted = _block_stride(granule, shape)
    elif isinstance(granule, int):
        wanted = granule
    else:
        wanted = {"elements": 1, "rows": row_numel(shape), "whole": numel}[granule]
    return max(1, min(wanted, numel))


def _block_stride(block: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The contiguous elements at whose multiples no block is split.

    Blocks side by side share their rows, so only the block's outermost size above 1 counts: a boundary is legal after
    that many whole indices of its dim. Blocks start anew at every index of the dims before it; if they do not fill the
    dim evenly, their starts are not multiples of one number, and the boundary moves out by one dim.

        block (2, 3) in (4, 6): 2 rows = 12        block (3,) in (4, 6): 3         block (4,) in (4, 6): a row = 6
    """
    dim = next((d for d, size in enumerate(block, len(shape) - len(block)) if size > 1), len(shape))
    if dim == len(shape):
        return 1
    size, inner = block[dim - len(shape)], math.prod(shape[dim + 1 :])
    return size * inner if dim == 0 or shape[dim] % size == 0 else shape[dim] * inner

"""Optimizers that quantize their state in blocks, and a granularity that leaves the matrices of stacks whole.

An 8-bit optimizer keeps one scale for each block of, say, 256 elements. Blocks are counted from the start of a
parameter, so if no shard boundary divides one, every rank has the blocks that one process would have, and computes the
same bits without communication. A boundary inside a block would make others: precision would depend on the number of
ranks. So optimizers that are declared block-wise refuse to step then."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ..._arguments import checked
from ...errors import MisuseError
from ..flat import Granule, handle_of, handle_of_segment, local_of
from ..ragged import RaggedDTensor, RaggedShard, RunLengths

declared: dict[type[Optimizer], int] = {}
"""The classes that were declared block-wise, with their block sizes."""


def block_of(optimizer: Optimizer) -> int | None:
    """The block size of an optimizer whose class, or a base of it, was declared block-wise."""
    if not declared:
        return None
    return next((declared[cls] for cls in type(optimizer).__mro__ if cls in declared), None)


def num_blocks(numel: int, block: int) -> int:
    return -(-numel // block)


@checked()
def zeros_per_block(param: torch.Tensor, block: int = 256, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros for the state of a block-wise optimizer: one number for each block of a parameter, sharded like the
    parameter, so that checkpoints have it for any number of ranks.

    Ranks: no communication.

    Args:
        param: a parameter or a flat view: sharded, replicated or plain.
        block: elements of a block, counted from the start of the parameter.
        dtype: of the result.

    Returns:
        A 1-D tensor: of a sharded parameter a ``RaggedDTensor``, whose local tensor has the numbers of this rank's
        blocks.

    Raises:
        ValueError: tensor parallelism has cut the parameter, or a shard boundary lies inside a block.
    """
    local = torch.zeros(num_blocks(local_of(param).numel(), block), dtype=dtype, device=local_of(param).device)
    if not isinstance(param, DTensor):
        return local
    if isinstance(param, RaggedDTensor):
        refuse_divided_blocks(param, block, "zeros_per_block()")
        spec = param._spec
        if not spec.is_only_ragged:
            raise MisuseError(
                f"zeros_per_block(): {_name(param)} is cut by tensor parallelism, or not between rows, placed "
                f"{list(param.placements)}: its blocks have no order"
            )
        per_rank = spec.ragged.counts.times(spec.ragged.unit_numel(tuple(spec.inner_shape)))
        blocks = RunLengths([(num_blocks(count, block), num_ranks) for count, num_ranks in per_rank.pieces])
        placements = param._spec.with_ragged(RaggedShard(blocks))
        return RaggedDTensor._from_elements(local, param.device_mesh, placements, (blocks.total,))
    # A whole flat view has equally many elements on each rank.
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    numel = local.numel() * prod([size for placement, size in sizes if placement.is_shard()])
    placed: torch.Tensor = DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=torch.Size((numel,)), stride=(1,)
    )
    return placed


def refuse_divided_blocks(param: torch.Tensor, block: int, what: str) -> None:
    """Raise ValueError if blocks of a parameter, counted from its start, are not those of this rank's shard."""
    handle = handle_of_segment(param)
    if handle is None:
        _refuse_divided(param, block, what)
        return
    layout, numel = handle.layout, handle.layout.shard_numel
    segment = next(item for item in handle.segments if item.parameter is param)
    begin = 0 if segment.is_whole else layout.params[segment.sharded_params[0]].offset
    for index in segment.sharded_params:
        offset = layout.params[index].offset
        if layout.in_chunks:  # each rank has a chunk of each
            position = (offset - begin) // layout.world_size
        else:
            position = offset - max(begin, offset // max(1, numel) * numel)  # on the rank that has its start
        if position % block:
            raise MisuseError(
                f"{what}: in the flat view of a rank, {handle.name_of(index)} begins at element {position}, which "
                f"divides a block of {block}: give the optimizer the sharded parameters themselves, model.parameters()"
            )
        _refuse_divided(handle.sharded_params[index], block, what)


def _refuse_divided(param: torch.Tensor, block: int, what: str) -> None:
    if not isinstance(param, RaggedDTensor):
        return
    spec = param._spec
    if spec.even_dim:
        raise MisuseError(
            f"{what}: {_name(param)} is placed {list(param.placements)}, so blocks of its elements lie on several "
            "ranks: shard it between rows"
        )
    unit, position, first = spec.ragged.unit_numel(tuple(spec.inner_shape)), 0, 0
    for count, num_ranks in spec.ragged.counts.pieces:
        numel = count * unit
        for i in range(min(num_ranks, 2) if numel else 0):  # if the first two ranks of a run begin at blocks, all do
            start = position + i * numel
            if start % block:
                raise MisuseError(
                    f"{what}: rank {first + i} has the elements {start} to {start + numel} of {_name(param)}, which "
                    f"divides a block of {block}: shard with fully_shard(..., granularity=lambda fqn, param: {block})"
                )
        position, first = position + numel * num_ranks, first + num_ranks


def _name(param: torch.Tensor) -> str:
    place = handle_of(param)
    return f"a parameter of shape {tuple(param.shape)}" if place is None else place[0].name_of(place[1])


@checked(budget="a number (is it called, as in granularity=whole_matrices()?)")
def whole_matrices(budget: float = 0.05, num_ranks: int | None = None) -> Callable[[str, nn.Parameter], Granule | None]:
    """Return a ``granularity`` that leaves each matrix of a stack (experts, say) whole on one rank, where that costs
    little padding; ``Muon`` and ``Matrixwise`` then move nothing of them.

    Each rank's shard is padded by less than one matrix. So stacks of at least ``num_ranks / budget`` matrices stay
    within the budget, and only those are left whole.

    Ranks: no communication.

    Args:
        budget: the padding that it may cost, relative to the size of the parameter.
        num_ranks: the ranks that share the shards; default: all.

    Raises:
        ValueError: ``budget`` is not above 0, or ``num_ranks`` is below 1.

    Example::

        fully_shard(block, granularity=whole_matrices())
    """
    if not budget > 0 or (num_ranks is not None and num_ranks < 1):
        raise MisuseError(
            f"whole_matrices(budget={budget}, num_ranks={num_ranks}): expected a budget above 0, and at least one rank"
        )

    def granularity(_fqn: str, param: nn.Parameter) -> Granule | None:
        ranks = num_ranks or (dist.get_world_size() if dist.is_initialized() else 1)
        is_cheap = param.dim() > 2 and prod(param.shape[:-2]) * budget >= ranks
        return tuple(param.shape[-2:]) if is_cheap else None

    return granularity

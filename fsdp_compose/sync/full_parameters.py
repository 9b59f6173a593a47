"""``full_parameters``: whole parameters, a bucket at a time, for programs that load weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from ..checkpoint import ModelNames, agree, group_of, is_first
from .buckets import Bucket, plan_buckets
from .gathering import gather_run, named
from .sources import Source, names_of, sources_of, versions_of, why_unreadable
from .steps import Steps, T

BUCKET_BYTES = 256 << 20


@contextmanager
def full_parameters(
    model: nn.Module,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    rank0_only: bool = False,
    include_buffers: bool = False,
) -> Iterator[Steps[tuple[str, torch.Tensor]]]:
    """Whole parameters, gathered a bucket at a time, for what loads weights (inference engines of RL, exports)::

        with full_parameters(model, dtype=torch.bfloat16) as buckets:
            for bucket in buckets:            # a list of (FQN, tensor)
                engine.load_weights(bucket)

    Every parameter comes once under each of its canonical FQNs (those of an unsharded, unwrapped model; names of a tied
    one come together, with the same tensor): sharded ones, whatever the meshes, frozen and ignored ones. Values are
    those that the sharded parameters have now. They are cast before they travel, by one collective for each flat
    parameter, or part of one.

    Tensors have memory of their own, which is never used again: what is kept stays valid. The list is emptied when the
    next is asked for. So a loop holds one bucket, and what it keeps; a tensor that is kept keeps what came with it from
    its flat parameter. In a flattened loop (``(pair for bucket in buckets for pair in bucket)``) the last tensor of a
    bucket is still there while the next one is gathered.

    Ranks: all ranks of the model; they meet, in bounded time (``FSDP_COMPOSE_TIMEOUT``), at the start, before each
    bucket and at the end. Every rank must take all buckets, also one that does nothing with them. If one leaves the
    loop early, or raises, all raise, at their next step; if all leave it at the same place, none does.

    Args:
        model: any kind of model, as for ``get_model_state_dict``; or a part of one.
        bucket_bytes: of the tensors of one bucket; a larger parameter is a bucket of its own.
        dtype: of parameters of floating point; ``None``: each its own. Others, and buffers, stay as they are.
        rank0_only: the other ranks get empty lists, and hold no more than their shards.
        include_buffers: persistent buffers come too, as this rank has them.

    Raises:
        RuntimeError: on every rank: a rank did not come, or not with the same arguments; a forward or backward is
            running; parameters were written to between two buckets; or a rank left the loop while others went on.
        ValueError: ``bucket_bytes`` is not positive.
        TypeError: ``dtype`` is no dtype of floating point.
    """
    check_arguments("full_parameters", bucket_bytes, dtype)
    names = names_of(model)
    sources = sources_of(names, dtype, include_buffers)
    is_here = is_first(group_of(names))

    def gather(bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        return [item for run in bucket for item in named(run, gather_run(run, rank0_only, is_here))]

    options = f"bucket_bytes={bucket_bytes}, rank0_only={rank0_only}"
    with in_step("full_parameters()", names, sources, bucket_bytes, options, gather) as steps:
        yield steps


@contextmanager
def in_step(
    call: str,
    names: ModelNames,
    sources: list[Source],
    bucket_bytes: int,
    options: str,
    gather: Callable[[Bucket], list[T]],
    problem: str = "",
) -> Iterator[Steps[T]]:
    """A loop over buckets of ``sources``, which all ranks begin, go through and end together. ``problem``: why this
    rank cannot begin."""
    group: dist.ProcessGroup | None = group_of(names)
    agree(group, call, [options, *(source.fact for source in sources)], problem or why_unreadable(sources))
    before = versions_of(sources)

    def present_problem() -> str:
        if versions_of(sources) != before:
            return (
                "parameters were written to, or moved, since the loop began (optimizer.step()?), so that buckets would "
                "not be of one model: leave the loop first"
            )
        return why_unreadable(sources)

    steps = Steps(call, group, plan_buckets(sources, bucket_bytes), gather, present_problem)
    try:
        yield steps
    except BaseException as error:
        steps.leave(error)
        raise
    steps.leave(None)


def check_arguments(call: str, bucket_bytes: int, dtype: torch.dtype | None) -> None:
    """Raise if these are not what they should be."""
    if bucket_bytes <= 0:
        raise ValueError(f"{call}(bucket_bytes=...): expected a positive number of bytes, got {bucket_bytes}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{call}(dtype=...): expected a dtype of floating point, or None, got {dtype!r}")

"""Operations that no other module knows: done on gathered tensors, with a warning, or, if they write, refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate

from ..ragged import RaggedDTensor, cut_whole, gathered
from .operands import replicated
from .schema import Args, Kwargs, map_tensors, written


def gather_all(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if any(isinstance(item, RaggedDTensor) for item in written(func, args, kwargs)):
        raise NotImplementedError(
            f"{func} would write to a sharded tensor, in a way that is not supported: write to it as a whole, to "
            "slices of its dim 0, or to its to_local()"
        )
    gather = gathered_with_warning(func)
    return func(*map_tensors(RaggedDTensor, gather, args), **map_tensors(RaggedDTensor, gather, kwargs))


def gathered_with_warning(func: Any) -> Callable[[RaggedDTensor], DTensor]:
    def gather(tensor: RaggedDTensor) -> DTensor:
        warn_gathers(func)
        plain = gathered(tensor)
        # Complete, also where another placement cuts the tensor: stock rules cover that best.
        return plain.redistribute(placements=[Replicate()] * plain.device_mesh.ndim)

    return gather


_warned: set[Any] = set()


def warn_gathers(func: Any) -> None:
    if func not in _warned:
        _warned.add(func)
        warnings.warn(
            f"{func} all-gathers sharded tensors (this is said once per operator). If it runs in every step, use "
            "to_local() or operations that work on shards",
            stacklevel=3,
        )


def write_through(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``p[mask] = value``: done on the gathered tensor, of which this rank's run is taken back."""
    target = args[0]
    if not isinstance(target, RaggedDTensor):
        return write_elsewhere(func, target, args, kwargs)
    warn_gathers(func)
    whole = target.full_tensor()
    full = [map_tensors(DTensor, lambda item: item.full_tensor(), item) for item in args[1:]]
    func(whole, *full, **kwargs)
    target._local_tensor.copy_(cut_whole(whole, target._spec))
    increment_version(target._local_tensor)
    return target


def write_elsewhere(func: Any, target: torch.Tensor, args: Args, kwargs: Kwargs) -> Any:
    """A write to a tensor that is not ragged, computed with one that is."""
    if not isinstance(target, DTensor):
        raise RuntimeError(
            f"{func} cannot write a sharded tensor to a torch.Tensor: use .full_tensor() or .to_local() of the sharded "
            "one"
        )
    return func(
        *map_tensors(RaggedDTensor, lambda item: gathered(item), args),
        **map_tensors(RaggedDTensor, lambda item: gathered(item), kwargs),
    )


def index(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``p[indices]``: indices that are plain tensors are the same on every rank."""
    tensor, indices = args
    spec = next(item for item in (tensor, *indices) if isinstance(item, RaggedDTensor))._spec

    def replicate(item: torch.Tensor) -> torch.Tensor:
        return item if isinstance(item, DTensor) else replicated(item, spec)

    return gather_all(func, (tensor, map_tensors(torch.Tensor, replicate, list(indices))), kwargs)


def item(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(gathered(args[0]).full_tensor())

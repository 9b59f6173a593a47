"""Collectives as operations of graphs.

Where a process group's own collectives carry the training these are torch's functional ones, which compilers know.
Where another transport does (messages, on gloo), they are operations of ours that call it; ``wait_tensor`` waits for
them too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache

import torch

from .._torch import (
    WorkOfGraph,
    define_operations,
    foreach_copy_,
    functional_collectives,
    group_name_of,
    lower_as_collective,
    register_work,
)
from ..comm import Label, Transport, Work

_Tensor = torch.Tensor
_OURS = "by "  # begins the routes of our operations
_routes: weakref.WeakValueDictionary[str, Transport] = weakref.WeakValueDictionary()
_labels: dict[str, Label] = {}


def route_of(transport: Transport, label: Label) -> str:
    """By which the operations here find the ranks, and how tensors move between them; the same on every rank of the
    process group, and in every run of a program."""
    if type(transport) is Transport:
        return group_name_of(transport.group)
    route = f"{_OURS}{transport.name} of {group_name_of(transport.group)}: {label.text}"
    _routes[route], _labels[route] = transport, label
    return route


def all_gather(shard: _Tensor, world_size: int, route: str) -> _Tensor:
    stock = functional_collectives()
    if route.startswith(_OURS):
        return stock.wait_tensor(torch.ops.fsdp_compose.all_gather(shard, world_size, route))
    return stock.wait_tensor(stock.all_gather_into_tensor(shard, world_size, route))


def reduce_scatter(flat: _Tensor, is_average: bool, world_size: int, route: str) -> _Tensor:
    stock = functional_collectives()
    if route.startswith(_OURS):
        return stock.wait_tensor(torch.ops.fsdp_compose.reduce_scatter(flat, is_average, world_size, route))
    return stock.wait_tensor(stock.reduce_scatter_tensor(flat, "avg" if is_average else "sum", world_size, route))


def all_reduce(flat: _Tensor, is_average: bool, route: str) -> _Tensor:
    stock = functional_collectives()
    if route.startswith(_OURS):
        return stock.wait_tensor(torch.ops.fsdp_compose.all_reduce(flat, is_average, route))
    return stock.wait_tensor(stock.all_reduce(flat, "avg" if is_average else "sum", route))


def flatten(grads: Sequence[_Tensor], places: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> _Tensor:
    """One tensor of pieces of ``sizes`` elements: ``grads`` at these ``places``, zeros in the others.

    An operation of its own, not a concatenation: into one of those Inductor fuses what makes the gradients, across
    groups, so that the whole gradients of all groups come to lie in memory at the same time.
    """
    result: _Tensor = torch.ops.fsdp_compose.flatten(grads, places, sizes, dtype)
    return result


# ---- our operations


def _flatten(grads: Sequence[_Tensor], places: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> _Tensor:
    flat = grads[0].new_empty(sum(sizes), dtype=dtype)
    pieces = flat.split([*sizes])
    foreach_copy_([pieces[place].view(grad.shape) for grad, place in zip(grads, places, strict=True)], [*grads])
    for place in {*range(len(sizes))}.difference(places):
        pieces[place].zero_()
    return flat


def _fake_flatten(grads: Sequence[_Tensor], places: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> _Tensor:
    return grads[0].new_empty(sum(sizes), dtype=dtype)


def _all_gather(shard: _Tensor, world_size: int, route: str) -> _Tensor:
    shard = shard.contiguous()
    whole = shard.new_empty(world_size * shard.numel())
    return _issued(whole, _routes[route].all_gather(whole, shard, _labels[route]), shard)


def _reduce_scatter(flat: _Tensor, is_average: bool, world_size: int, route: str) -> _Tensor:
    flat = flat.contiguous()
    shard = flat.new_empty(flat.numel() // world_size)
    return _issued(shard, _routes[route].reduce_scatter(shard, flat, is_average, _labels[route]), flat)


def _all_reduce(flat: _Tensor, is_average: bool, route: str) -> _Tensor:
    result = flat.clone()
    return _issued(result, _routes[route].all_reduce(result, is_average, _labels[route]), result)


def _issued(result: _Tensor, work: Work, source: _Tensor) -> _Tensor:
    """``result``, for which ``wait_tensor`` is to wait; ``source`` is read until then."""
    register_work(result, WorkOfGraph(lambda: work.wait(), source))
    return result


def _fake_all_gather(shard: _Tensor, world_size: int, route: str) -> _Tensor:
    _teach_compiler()
    return shard.new_empty(world_size * shard.numel())


def _fake_reduce_scatter(flat: _Tensor, is_average: bool, world_size: int, route: str) -> _Tensor:
    _teach_compiler()
    return flat.new_empty(flat.numel() // world_size)


def _fake_all_reduce(flat: _Tensor, is_average: bool, route: str) -> _Tensor:
    _teach_compiler()
    return torch.empty_like(flat)


_OPERATIONS: dict[str, tuple[Callable[..., _Tensor], Callable[..., _Tensor]]] = {
    "all_gather(Tensor shard, int world_size, str route) -> Tensor": (_all_gather, _fake_all_gather),
    "reduce_scatter(Tensor flat, bool is_average, int world_size, str route) -> Tensor": (
        _reduce_scatter,
        _fake_reduce_scatter,
    ),
    "all_reduce(Tensor flat, bool is_average, str route) -> Tensor": (_all_reduce, _fake_all_reduce),
    "flatten(Tensor[] grads, int[] places, int[] sizes, ScalarType dtype) -> Tensor": (_flatten, _fake_flatten),
}


@cache
def define() -> None:
    """Let the operations exist, also for a graph that was not captured but found in a cache on disk."""
    define_operations("fsdp_compose", _OPERATIONS)


def _teach_compiler() -> None:
    """Inductor, if it is there, is not to reuse memory that a collective reads."""
    if "torch._inductor.lowering" in sys.modules:
        _lower()


@cache
def _lower() -> None:
    ours = torch.ops.fsdp_compose
    lower_as_collective([ours.all_gather.default, ours.reduce_scatter.default, ours.all_reduce.default])

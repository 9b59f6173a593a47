"""Whole tensors from sharded ones: one collective for each flat parameter, whose memory is the only extra."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._torch import dtensor_spec, local_tensor, make_dtensor
from ..flat_param import FlatParamHandle
from ..ragged import RaggedDTensor
from ..segments import local_of
from ..summon import gather_flat
from .names import Place

Key = tuple[str, str]
"""(FQN, name of the optimizer's state; empty for the parameter itself)"""


@dataclass
class _Bundle:
    """Tensors cut like parameters of one flat parameter, gathered together."""

    handle: FlatParamHandle
    locals: dict[int, torch.Tensor] = field(default_factory=dict)  # by index of the parameter
    keys: dict[Key, int] = field(default_factory=dict)


def gather_values(
    values: Mapping[Key, Any], places: Mapping[Key, Place | None], *, to_cpu: bool, rank0_only: bool, is_first: bool
) -> dict[Key, Any]:
    """``values`` with whole tensors in the place of DTensors.

    Ranks: all ranks of the meshes.

    Args:
        values: tensors and others.
        places: for a tensor that is cut like a sharded parameter, where that is.
        to_cpu: copy every tensor to the CPU.
        rank0_only: the ranks that are not ``is_first`` get an empty dict, and hold no more than their shards.
    """
    is_wanted = is_first or not rank0_only
    bundles = _bundle(values, places)
    result: dict[Key, Any] = dict.fromkeys(values)
    seen: set[int] = set()
    for key, value in values.items():
        bundle = bundles.get(key)
        if bundle is not None:
            if id(bundle) not in seen:
                seen.add(id(bundle))
                result.update(_gather_bundle(bundle, to_cpu, rank0_only))
            continue
        if isinstance(value, DTensor):
            value = full_tensor(value)
        if is_wanted:
            result[key] = copy_to_cpu(value) if to_cpu and isinstance(value, torch.Tensor) else value
    return result if is_wanted else {}


def full_tensor(value: DTensor) -> torch.Tensor:
    """The whole of ``value``, outside autograd. Ranks: all ranks of its mesh."""
    with torch.no_grad():
        whole: torch.Tensor = value.full_tensor()
    return whole.detach()


def _bundle(values: Mapping[Key, Any], places: Mapping[Key, Place | None]) -> dict[Key, _Bundle]:
    """One bundle for each flat parameter, name of state, and dtype."""
    bundles: dict[Any, _Bundle] = {}
    found: dict[Key, _Bundle] = {}
    for key, value in values.items():
        place = places.get(key)
        if place is None or not is_cut_like(value, place):
            continue
        handle, index = place
        bundle = bundles.setdefault((handle, key[1], value.dtype), _Bundle(handle))
        bundle.locals[index] = local_tensor(value)
        bundle.keys[key] = index
        found[key] = bundle
    return found


def is_cut_like(value: Any, place: Place) -> bool:
    """Whether ``value`` has its elements where the parameter at ``place`` has them."""
    face = place[0].faces[place[1]]
    return (
        isinstance(value, RaggedDTensor)
        and value.shape == face.shape
        and isinstance(face, RaggedDTensor)
        and value._spec.cuts_like(face._spec)
    )


def _gather_bundle(bundle: _Bundle, to_cpu: bool, rank0_only: bool) -> dict[Key, torch.Tensor]:
    handle = bundle.handle
    flat = gather_flat(handle, _as_shard(handle, bundle.locals), rank0_only, to_cpu)
    if flat is None:
        return {}
    views = handle.full_views_of(flat)
    # Copies: a view would keep, and torch.save() write, the whole flat parameter for each of its tensors.
    wholes = {index: views[index].clone() for index in bundle.locals}
    return {key: wholes[index] for key, index in bundle.keys.items()}


def _as_shard(handle: FlatParamHandle, locals_: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The local tensors at their places in a shard: the shard itself, if they are views of it."""
    own = handle.shard.detach()
    runs = {index: own[start:stop] for index, (start, stop, _) in enumerate(handle.runs)}
    if all(shares_memory(local, runs[index]) for index, local in locals_.items()):
        return own
    first = next(iter(locals_.values()))
    shard = first.new_zeros(handle.layout.shard_numel)
    for index, local in locals_.items():
        start, stop, shape = handle.runs[index]
        shard[start:stop].view(shape).copy_(local)
    return shard


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous local tensors are the same elements."""
    return a.numel() == b.numel() and a.dtype == b.dtype and (not a.numel() or a.data_ptr() == b.data_ptr())


def same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one layout share their memory."""
    return a.shape == b.shape and shares_memory(local_of(a), local_of(b))


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, cut in the same way."""
    return _with_local(tensor, lambda local: local.to("cpu", copy=True))


def empty_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like this one, without values, on another device."""
    return _with_local(tensor, lambda local: torch.empty_like(local, device=device))


def _with_local(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if isinstance(tensor, RaggedDTensor):
        return RaggedDTensor(function(local_tensor(tensor).detach()), tensor._spec)
    if isinstance(tensor, DTensor):
        made: torch.Tensor = make_dtensor(DTensor, function(local_tensor(tensor).detach()), dtensor_spec(tensor))
        return made
    return function(tensor.detach())

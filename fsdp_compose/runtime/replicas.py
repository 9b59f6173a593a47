"""Whether ranks that must have the same have it: compared at the first forward or, of groups that ``replicate`` has
made, taken from the first rank.

Ranks that hold the same elements of a parameter: replicas, and tensor-parallel ranks, of what tensor parallelism has
not cut. They get the same gradients, so what is different at the start stays different: each trains another model, and
the one that is saved is none of them. And the batches of tensor-parallel ranks, which compute one forward together.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from .._torch import in_transform
from ..comm import DataParallelMesh, as_transferable, meet
from ..flat import FlatParamHandle
from ..group import Root, _FSDPState, group_modules

_CHUNK = 1 << 20  # elements that are looked at together: what is made for it stays small
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_DIGEST_LENGTH = 32  # characters
_PERIOD = 65_521  # of the weights of elements: their order counts


def compare_replicas(mesh: DataParallelMesh, states: Sequence[_FSDPState]) -> None:
    """Ranks: all peers of ``mesh``, with equal groups.

    Raises:
        RuntimeError: on every rank, replicas differ; names the first parameter that does, and the ranks.
    """
    compared = [state for state in states if state.options.bucket_bytes is None]
    parts = [*_parts_with_replicas(compared)]
    if not parts:
        return
    sums: dict[str, list[list[int]]] = {}
    for place, handle, ranges, _ in parts:
        sums.setdefault(place, []).extend(_checksum(handle.shard[start:stop]) for start, stop in ranges)
    purpose = "first forward: comparing replicas"
    digests = [(place, _digest(found)) for place, found in sums.items()]
    difference = meet(mesh.peers, purpose, json.dumps(digests), _first_difference)
    if not difference:
        return
    where, *differing = json.loads(difference)
    each = {}
    for place, handle, _, indices in parts if mesh.rank in differing else ():
        views = handle.views_of(handle.shard)
        for i in indices if place == where else ():
            each[handle.name_of(i)] = _checksum(views[i])
    difference = meet(mesh.peers, purpose, json.dumps([*each.items()]), _first_difference)
    name, first, other = json.loads(difference)
    raise RuntimeError(
        f"first forward: {name} has different elements on ranks {first} and {other}, which hold "
        "replicas of it: they would train different models. Start from equal parameters: seed all ranks alike, load a "
        "checkpoint, or call broadcast_replicas(model) after fully_shard()"
    )


def broadcast_first_replica(states: Sequence[_FSDPState]) -> None:
    """Give all ranks the first rank's parameters and buffers of the groups that ``replicate`` has made.

    Ranks: all peers, with equal groups.
    """
    for state in states:
        group = state.mesh.replicate_group
        if state.options.bucket_bytes is None or group is None or state.mesh.is_simulated:
            continue
        for handle in state._handles:
            with torch.no_grad():
                dist.broadcast(as_transferable(handle.shard), group=group, group_src=0)
        for buffer in _buffers(state):
            dist.broadcast(as_transferable(buffer), group=group, group_src=0)


def _buffers(state: _FSDPState) -> Iterator[torch.Tensor]:
    """The buffers of a group's modules, each as contiguous memory; what is taken is written back."""
    for module in group_modules(state.live_modules()):
        for buffer in module._buffers.values():
            if buffer is None or isinstance(buffer, DTensor) or buffer.layout != torch.strided or not buffer.numel():
                continue
            memory = buffer.detach().contiguous()
            yield memory
            if memory.data_ptr() != buffer.data_ptr():
                with torch.no_grad():
                    buffer.copy_(memory)


_Part = tuple[str, FlatParamHandle, list[tuple[int, int]], list[int]]
"""Parameters that lie on the same ranks: what names their place alike on ranks that must hold the same, and only there;
the ranges of the shard that they are in; and their indices."""


def _digest(numbers: object) -> str:
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:_DIGEST_LENGTH]


def _parts_with_replicas(states: Sequence[_FSDPState]) -> Iterator[_Part]:
    """Those of groups, which are the same on all ranks. Places on one mesh have one number in front."""
    numbers: dict[DeviceMesh, int] = {}
    for state in states:
        for handle in state._handles:
            number = numbers.setdefault(handle.mesh.mesh, len(numbers))
            for place, of, ranges, indices in _parts_of(handle):
                yield f"{number} {place}", of, ranges, indices


def _parts_of(handle: FlatParamHandle) -> Iterator[_Part]:
    mesh, own = handle.mesh, handle.tensor_parallel
    if handle.shard.device.type == "meta":
        return
    if own is None:
        if mesh.peers.size() > mesh.shard_world_size:
            everything = [(0, handle.shard.numel())]
            yield f"{mesh.shard_rank}", handle, everything, [*range(len(handle.fqns))]
        return
    by_place: dict[str, list[int]] = {}
    for i in range(len(handle.fqns)):
        by_place.setdefault(own.place(i), []).append(i)
    for place, indices in by_place.items():
        sharded = prod(device_mesh.size(dim) for device_mesh, dim in own.sharded_dims(indices[0]))
        if mesh.peers.size() > mesh.shard_world_size * sharded:
            ranges = [handle.local_shards[i][:2] for i in indices]
            yield f"{mesh.shard_rank} {place}", handle, ranges, indices


def warn_of_different_inputs(root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say, on every rank, if ranks that run one forward together (tensor parallelism) were given different tensors.

    Ranks: all peers of the root, at its first forward.
    """
    mesh = root.data_mesh
    if not mesh.has_peers or mesh.peers.size() == mesh.data_world_size or in_transform():
        return
    given = [
        _checksum(leaf)
        for leaf in tree_leaves((args, kwargs))
        if type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_meta
    ]
    payload = json.dumps([(f"{mesh.data_rank}", _digest(given))])
    difference = meet(mesh.peers, "first forward: comparing inputs", payload, _first_difference)
    if difference:
        _, first, other = json.loads(difference)
        warnings.warn(
            f"first forward: ranks {first} and {other} were given different inputs. They are tensor-parallel ranks "
            "of one data-parallel rank, which compute one forward together: give all of them the same batch (that "
            "of the data-parallel rank, mesh['dp'].get_local_rank()), unless the model was made for parts of one "
            "(sequence or context parallelism)",
            stacklevel=2,
        )


def _first_difference(payloads: list[str]) -> str:
    """What two ranks have at the same place that differs, with the ranks; empty if there is nothing."""
    seen: dict[str, tuple[int, object]] = {}
    for rank, payload in enumerate(payloads):
        for place, value in json.loads(payload):
            first, expected = seen.setdefault(place, (rank, value))
            if value != expected:
                return json.dumps([place, first, rank])
    return ""


def _checksum(elements: torch.Tensor) -> list[int]:
    """Two sums over the bits of ``elements``, one of which weighs them by their places."""
    total, weighed = 0, 0
    with torch.no_grad():
        for chunk in _integers(elements):
            total += int(chunk.sum())
            weights = torch.ones_like(chunk).cumsum_(0).remainder_(_PERIOD)
            weighed = weighed * 31 + int(weights.mul_(chunk).sum())
    mask = (1 << 64) - 1
    return [total & mask, weighed & mask]


def _integers(elements: torch.Tensor) -> Iterator[torch.Tensor]:
    bits = elements.detach().reshape(-1).view(_INTEGERS[elements.element_size()])
    for chunk in bits.split(_CHUNK):
        yield chunk.long()

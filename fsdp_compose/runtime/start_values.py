"""Did all ranks start from the same values? ``fully_shard`` keeps each rank's own, so other seeds train a mixture.

At ``fully_shard`` every rank still has whole parameters and keeps a few elements of each. The first forward compares
these samples within each shard group, and then forgets them. (``lazy_init`` compares replicas, element by element.)"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..comm import DataParallelMesh, forget_for, kept_for, known_for, meet
from ..errors import RanksDifferError
from ..flat import CompositeExtension, FlatParamHandle, ManagedParameter, plain_tensor
from ..group import _FSDPState, name_ranks

CHECK_ENV = "FSDP_COMPOSE_COMPARE_STARTS"
_NUM_SPREAD, _NUM_LAST = 32, 32  # the last ones, because rows that were added to a vocabulary are at the end
_DIGEST_LENGTH = 16


class _Sample(NamedTuple):
    """Some elements of each whole parameter of a flat parameter, how many of each, and the shard's version then."""

    elements: torch.Tensor
    sizes: list[int]
    version: int


def sample_start(managed: Sequence[ManagedParameter], handle: FlatParamHandle) -> None:
    """Keep a sample of the parameters that ``handle`` has just been made from. Local, and without waiting for a device.

    Parameters without values yet (meta), and those whose ranks hold different parts (DTensors), have none."""
    mesh, shard = handle.mesh, handle.shard
    if mesh.shard_world_size == 1 or mesh.is_simulated or shard.is_meta or os.environ.get(CHECK_ENV) == "0":
        return
    if isinstance(handle.kind.extension, CompositeExtension):
        return
    parts: list[torch.Tensor] = []
    sizes: list[int] = []
    with torch.no_grad():
        for item in managed:
            before = len(parts)
            if not isinstance(item.parameter, DTensor):
                parts += _some(plain_tensor(item.parameter).detach().reshape(-1))
            sizes.append(sum([part.numel() for part in parts[before:]]))
        if parts:
            sample = _Sample(torch.cat(parts), sizes, shard._version)
            kept_for(handle, _Sample, lambda: sample)


def _some(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    num_elements = flat.numel()
    if num_elements <= _NUM_SPREAD + _NUM_LAST:
        return (flat,)
    return flat[:: num_elements // _NUM_SPREAD | 1], flat[-_NUM_LAST:]  # odd: not always the same column


def digest_of(whole: torch.Tensor) -> str:
    """A digest of some elements of a whole parameter; empty if ranks may start from different values."""
    if os.environ.get(CHECK_ENV) == "0":
        return ""
    elements = torch.cat(_some(whole.reshape(-1))).cpu()
    return hashlib.sha256(elements.view(torch.uint8).numpy().tobytes()).hexdigest()[:_DIGEST_LENGTH]


def compare_starts(mesh: DataParallelMesh, states: Sequence[_FSDPState], replaced: Set[nn.Parameter]) -> None:
    """Check that the ranks of each shard group started from equal parameters. Parameters that have been written to
    since ``fully_shard``, on any rank, are not compared: a checkpoint was loaded, or they were initialized there. Nor
    are those that were ``replaced``.

    Ranks: all peers of ``mesh``, with equal groups.

    Raises:
        RuntimeError: on every rank, if they did not; the message names the parameters and the ranks.
    """
    handles = [handle for state in states for handle in state._handles if handle.mesh.shard_world_size > 1]
    if not handles or mesh.is_simulated:
        return
    purpose, compares = "first forward: comparing the values that ranks start from", os.environ.get(CHECK_ENV) != "0"
    found = [item for handle in handles for item in _digests(handle, replaced)] if compares else []
    digest = hashlib.sha256(json.dumps([each for _, _, each in found]).encode()).hexdigest()
    if meet(mesh.peers, purpose, digest, lambda payloads: "differ" if len({*payloads}) > 1 else ""):
        verdict = meet(mesh.peers, purpose, json.dumps(found), _judge)
        if verdict:
            raise RanksDifferError(verdict)
    for handle in handles:
        forget_for(handle, _Sample)


def _digests(handle: FlatParamHandle, replaced: Set[nn.Parameter]) -> Iterator[tuple[str, str, str]]:
    """For each parameter the ranks that share it, its name, and a digest of its start; empty if there is none now."""
    place = str(min(dist.get_process_group_ranks(handle.mesh.shard_group)))
    sample = known_for(handle, _Sample)
    if sample is None or sample.version != handle.shard._version or handle.was_moved():
        yield from ((place, name, "") for name in handle.names)
        return
    memory = sample.elements.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    size, start = sample.elements.element_size(), 0
    for name, sharded, num_elements in zip(handle.names, handle.sharded_params, sample.sizes, strict=True):
        end = start + num_elements * size
        is_compared = end > start and sharded not in replaced
        yield place, name, hashlib.sha256(memory[start:end]).hexdigest()[:_DIGEST_LENGTH] if is_compared else ""
        start = end


def _judge(payloads: list[str]) -> str:
    ranks: dict[tuple[str, str], dict[str, list[int]]] = {}
    for rank, payload in enumerate(payloads):
        for place, name, digest in json.loads(payload):
            ranks.setdefault((place, name), {}).setdefault(digest, []).append(rank)
    differing = {name: list(by_value.values()) for (_, name), by_value in ranks.items() if _differs(by_value)}
    if not differing:
        return ""
    name, (first, *others) = next(iter(differing.items()))
    rest = sorted(rank for ranks_of_value in others for rank in ranks_of_value)
    more = f" ({len(differing)} parameters differ in all)" if len(differing) > 1 else ""
    return (
        f"first forward: when fully_shard() was called, {name} had other values on {name_ranks(rest)} than "
        f"on {name_ranks(first)}{more}. Each rank has kept its own part, so the ranks would train a mixture of several "
        "models. Build the model with the same seed on all ranks, load a checkpoint, or call "
        "broadcast_replicas(model) before fully_shard(), which gives every rank the first rank's values. If you want "
        f"the mixture, set {CHECK_ENV}=0 on all ranks"
    )


def _differs(by_value: dict[str, list[int]]) -> bool:
    return len(by_value) > 1 and "" not in by_value

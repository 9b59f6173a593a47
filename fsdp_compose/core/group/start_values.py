"""Did all ranks start from the same values? ``fully_shard`` keeps each rank's own, so other seeds train a mixture.

At ``fully_shard`` every rank still has whole parameters and keeps a few elements of each. The first forward compares
these samples within each shard group, and then forgets them. (``lazy_init`` compares replicas, element by element.)

``load_state_dict()`` of whole tensors writes each rank's shard of them, without communication. So it is a start too:
the same few elements of what it is given are compared, at the first forward, or, if that is over, in the next exchange.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ...errors import RanksDifferError
from ..comm import DataParallelMesh, forget_for, kept_for, known_for, meet
from ..flat import FlatParamHandle, ManagedParameter, handle_of, plain_tensor
from .collective_order import Group, Kind

LOAD_REMEDY = (
    "Each rank has kept its own part of what it was given, so the model is a mixture: load it again, with the same "
    "tensors on every rank, or, if only the first rank has them, with fsdp_compose.checkpoint.set_model_state_dict("
    "model, state_dict, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)) on all ranks"
)
CHECK_ENV = "FSDP_COMPOSE_COMPARE_STARTS"
_NUM_SPREAD, _NUM_LAST = 32, 32  # the last ones, because rows that were added to a vocabulary are at the end
_DIGEST_LENGTH = 16


class _Sample(NamedTuple):
    """Some elements of each whole parameter of a flat parameter, how many of each, and the shard's version then."""

    elements: torch.Tensor
    sizes: list[int]
    version: int


@dataclass(slots=True)
class _Load:
    """Digests of the whole tensors that parameters of a flat parameter were last loaded from, by index, and the shard's
    version after that."""

    digests: dict[int, str] = field(default_factory=dict)
    version: int = -1


def sample_start(managed: Sequence[ManagedParameter], handle: FlatParamHandle) -> None:
    """Keep a sample of the parameters that ``handle`` was just made from. Local, without waiting for a device."""
    mesh, shard = handle.mesh, handle.shard
    if mesh.shard_world_size == 1 or mesh.is_simulated or shard.is_meta or os.environ.get(CHECK_ENV) == "0":
        return
    if handle.kind.codec.is_composite:
        return
    samples: list[torch.Tensor] = []
    sizes: list[int] = []
    with torch.no_grad():
        for item in managed:
            before = len(samples)
            # The ranks of a DTensor hold different shards of it.
            if not isinstance(item.parameter, DTensor):
                samples += _some(plain_tensor(item.parameter).detach().reshape(-1))
            sizes.append(sum([elements.numel() for elements in samples[before:]]))
        if samples:
            sample = _Sample(torch.cat(samples), sizes, shard._version)
            kept_for(handle, _Sample, lambda: sample)


def _some(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    num_elements = flat.numel()
    if num_elements <= _NUM_SPREAD + _NUM_LAST:
        return (flat,)
    return flat[:: num_elements // _NUM_SPREAD | 1], flat[-_NUM_LAST:]  # odd: not always the same column


def digest_of(whole: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """A digest of some elements of a whole parameter, in ``dtype`` if given; empty if ranks may start differently."""
    if os.environ.get(CHECK_ENV) == "0":
        return ""
    elements = torch.cat(_some(whole.reshape(-1))).to(dtype or whole.dtype).cpu()
    return hashlib.sha256(elements.view(torch.uint8).numpy().tobytes()).hexdigest()[:_DIGEST_LENGTH]


def notice_load(given: Iterable[tuple[nn.Parameter, Any]]) -> None:
    """Called when ``load_state_dict()`` is about to write each value to a sharded parameter."""
    by_handle: dict[FlatParamHandle, dict[int, str]] = {}
    for sharded, value in given:
        place = handle_of(sharded)
        if place is None or place[0].mesh.peers.size() == 1 or place[0].mesh.is_simulated:
            continue
        handle, index = place
        # What a composite parameter is given is read by its own class, so there are no elements to compare.
        if _is_whole(value, sharded) and not handle.kind.codec.is_composite:
            by_handle.setdefault(handle, {})[index] = digest_of(plain_tensor(value).detach(), sharded.dtype)
        elif (load := known_for(handle, _Load)) is not None:
            load.digests.pop(index, None)
    for handle, digests in by_handle.items():
        state = cast("Group | None", handle.owner and handle.owner())
        if state is None or state.root is None:
            kept_for(handle, _Load).digests.update(digests)
        elif any(digests.values()):
            text = " ".join(f"{handle.name_of(i)}:{digest}" for i, digest in digests.items())
            state.root.order.entries.append(state.log.note(Kind.LOADED, text))


def notice_loaded(params: Iterable[nn.Parameter]) -> None:
    """Called when all of a module's sharded parameters are loaded."""
    for sharded in params:
        place = handle_of(sharded)
        load = None if place is None else known_for(place[0], _Load)
        if place is not None and load is not None:
            load.version = place[0].shard._version


def _is_whole(value: Any, sharded: nn.Parameter) -> bool:
    """Whether ``value`` is all of the parameter, with values."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and not value.is_meta
        and value.numel() == sharded.numel()
    )


def compare_starts(mesh: DataParallelMesh, states: Sequence[Group], replaced: Set[nn.Parameter]) -> None:
    """Check that the ranks of each shard group started from equal parameters, or have loaded equal ones. Parameters
    that have been written to otherwise since ``fully_shard``, on any rank, are not compared, nor are those that were
    ``replaced``.

    Ranks: all peers of ``mesh``, with equal groups.

    Raises:
        RuntimeError: on every rank, if they did not; the message names the parameters and the ranks.
    """
    handles = [handle for state in states for handle in state._handles if handle.mesh.shard_world_size > 1]
    if not handles or mesh.is_simulated:
        return
    purpose, compares = "first forward: comparing the values that ranks start from", os.environ.get(CHECK_ENV) != "0"
    found = [item for handle in handles for item in _digests(handle, replaced)] if compares else []
    # Usually all are equal, which one hash tells. Only otherwise each rank sends a digest of every parameter.
    digest = hashlib.sha256(json.dumps([each for _, _, *each in found]).encode()).hexdigest()
    if meet(mesh.peers, purpose, digest, lambda payloads: "differ" if len({*payloads}) > 1 else ""):
        verdict = meet(mesh.peers, purpose, json.dumps(found), _judge)
        if verdict:
            raise RanksDifferError(verdict)
    for handle in handles:
        forget_for(handle, _Sample)
        forget_for(handle, _Load)


def _digests(handle: FlatParamHandle, replaced: Set[nn.Parameter]) -> Iterator[tuple[str, str, str, bool]]:
    """For each parameter the ranks that share it, its name, a digest of its start, empty if there is none now, and
    whether it was loaded from a whole tensor."""
    load = known_for(handle, _Load)
    for i, (place, name, digest) in enumerate(_digests_at_start(handle, replaced)):
        if load is not None and i in load.digests:
            is_last = load.version == handle.shard._version and handle.sharded_params[i] not in replaced
            yield place, name, load.digests[i] if is_last else "", True
        else:
            yield place, name, digest, False


def _digests_at_start(handle: FlatParamHandle, replaced: Set[nn.Parameter]) -> Iterator[tuple[str, str, str]]:
    place = str(min(dist.get_process_group_ranks(handle.mesh.shard_group)))
    sample = known_for(handle, _Sample)
    # Written to since: a sharded checkpoint was loaded, or the parameters were initialized after fully_shard().
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
    starts: dict[tuple[str, str], dict[str, list[int]]] = {}
    loaded: dict[tuple[str, str], set[str]] = {}  # digests of loads
    for rank, payload in enumerate(payloads):
        for place, name, digest, is_loaded in json.loads(payload):
            starts.setdefault((place, name), {}).setdefault(
                _ELSEWHERE if is_loaded and not digest else digest, []
            ).append(rank)
            if is_loaded:
                loaded.setdefault((place, name), set()).add(digest)
    differing = [key for key, by_value in starts.items() if _differs(by_value, loaded.get(key, set()))]
    if not differing:
        return ""
    name = differing[0][1]
    first, *others = starts[differing[0]].values()
    rest = sorted(rank for ranks_of_value in others for rank in ranks_of_value)
    num = len({name for _, name in differing})
    more = f" ({num} parameters differ in all)" if num > 1 else ""
    if differing[0] in loaded:
        return (
            f"first forward: load_state_dict() gave {name} other values on {name_ranks(rest)} than on "
            f"{name_ranks(first)}, or loaded it on some ranks only{more}. {LOAD_REMEDY}. If you want the mixture, set "
            f"{CHECK_ENV}=0 on all ranks"
        )
    return (
        f"first forward: when fully_shard() was called, {name} had other values on {name_ranks(rest)} than "
        f"on {name_ranks(first)}{more}. Each rank has kept its own part, so the ranks would train a mixture of several "
        "models. Build the model with the same seed on all ranks, load a checkpoint, or call "
        "broadcast_replicas(model) before fully_shard(), which gives every rank the first rank's values. If you want "
        f"the mixture, set {CHECK_ENV}=0 on all ranks"
    )


_ELSEWHERE = "-"  # loaded, but written to since


def _differs(by_value: dict[str, list[int]], loaded: set[str]) -> bool:
    """Whether ranks have different digests."""
    if _ELSEWHERE in by_value:
        return False
    # A rank without a digest may have been written to in a way that is right, but not if others have just loaded whole
    # tensors, and it has not.
    return len(by_value) > 1 and ("" not in by_value or bool(loaded - {""}))


def name_ranks(ranks: list[int], most: int = 8) -> str:
    """A list of ranks as errors show it."""
    listed = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"

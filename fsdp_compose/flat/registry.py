"""Which flat parameter a tensor belongs to, and what is remembered on the tensors themselves."""

from __future__ import annotations

import torch
import torch.nn as nn

from ..ragged import OWNER_ATTRIBUTE, note_write_of_all_ranks
from .flat_param import FlatParamHandle, Owners, segment_owners, sharded_param_owners


def handle_of(param: torch.Tensor) -> tuple[FlatParamHandle, int] | None:
    """The handle that holds a sharded parameter, and which of its parameters it is."""
    return find(sharded_param_owners, param)


def handle_of_segment(param: torch.Tensor) -> FlatParamHandle | None:
    """The handle that a flat view belongs to."""
    found = find(segment_owners, param)
    return None if found is None else found[0]


def find(owners: Owners, param: torch.Tensor) -> tuple[FlatParamHandle, int] | None:
    owner = owners.get(id(param))
    handle = owner[0]() if owner is not None else None
    return None if owner is None or handle is None else (handle, owner[1])


def note_write(sharded: nn.Parameter) -> None:
    """Let a backward whose forward came before know that ``sharded`` has got other elements, in memory of their own."""
    place = handle_of(sharded)
    if place is not None:
        note_write_of_all_ranks(place[0].shard)


def mark_owner(parameter: nn.Parameter, group: str, fqn: str) -> None:
    """Remember on ``parameter`` which fully_shard call owns it, to recognise it elsewhere in the model."""
    setattr(parameter, OWNER_ATTRIBUTE, (group, fqn))


def owner_of(parameter: nn.Parameter) -> tuple[str, str] | None:
    return getattr(parameter, OWNER_ATTRIBUTE, None)

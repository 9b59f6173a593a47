"""State of an optimizer's flat views, from that of the parameters in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .nested import Path, leaves_of, map_leaves
from .trained import Trained, TrainedGroup


def conflict_of(group: TrainedGroup, state: Mapping[str, Mapping[str, Any]], *, is_strict: bool) -> list[str]:
    """Why flat views cannot hold the state that is planned for the parameters of a parameter group: one without state
    next to one that has some (refused if strict, else zero), or different numbers where there is one for all."""
    problems = []
    by_number: dict[int, list[Trained]] = {}
    for param in group.params:
        if param.flat is not None:
            by_number.setdefault(param.number, []).append(param)
    for params in by_number.values():
        having = [param for param in params if param.fqn in state]
        lacking = [param for param in params if param.fqn not in state]
        if having and lacking and is_strict:
            problems.append(
                f"{lacking[0].fqn} has no state and {having[0].fqn} has some, but the optimizer holds both in one flat "
                "view: give it model.parameters(), or let missing state be zero with "
                "StateDictOptions(strict=False)"
            )
        problems += _different_scalars(having, state) or _different_nesting(having, state)
    return problems


def _different_scalars(params: Sequence[Trained], state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not params:
        return []
    first = params[0]
    for param in params[1:]:
        for key, value in state[param.fqn].items():
            other = state[first.fqn].get(key)
            if _is_scalar(value) and _is_scalar(other) and not bool(torch.as_tensor(value == other)):
                return [
                    f"{key} of {first.fqn} is {_number(other)} and that of {param.fqn} {_number(value)}, but the "
                    "optimizer holds both in one flat view: give it model.parameters()"
                ]
    return []


def _different_nesting(params: Sequence[Trained], state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    for param in params[1:]:
        ours, theirs = dict(state[params[0].fqn]), dict(state[param.fqn])
        if dict(leaves_of(ours)).keys() != dict(leaves_of(theirs)).keys():
            return [
                f"the state of {params[0].fqn} has {[*ours]} and that of {param.fqn} {[*theirs]}, or lists of other "
                "lengths, but the optimizer holds both in one flat view: give it model.parameters()"
            ]
    return []


def pack_flat(params: Sequence[Trained], state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state of one flat view from that of its parameters."""
    having = {param.fqn: param for param in params if param.fqn in state}
    if not having:
        return {}
    flat = params[0].flat
    assert flat is not None
    leaves = {fqn: dict(leaves_of(dict(state[fqn]))) for fqn in having}

    def join(path: Path, value: Any) -> Any:
        parts = {param.place[1]: leaves[fqn][path] for fqn, param in having.items() if param.place is not None}
        if isinstance(value, torch.Tensor) and not _is_number(path, parts):
            return flat.join(parts)
        return value.clone() if isinstance(value, torch.Tensor) else value

    packed: dict[str, Any] = map_leaves(join, dict(state[next(iter(having))]))
    return packed


def _is_number(path: Path, parts: Mapping[int, Any]) -> bool:
    """Whether there is one number for all elements: 0-dim also where the parameter is not."""
    return path == ("step",) or not any(isinstance(part, DTensor) for part in parts.values())


def _is_scalar(value: Any) -> bool:
    return (isinstance(value, torch.Tensor) and not value.dim() and not isinstance(value, DTensor)) or isinstance(
        value, (int, float)
    )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value

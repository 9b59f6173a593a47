"""Optimizer dicts in other forms: with one level of keys, or with numbers in the place of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """``{"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn], key: value}]}`` with one level of keys:
    ``state.<fqn>.<key>`` and ``param_groups.<fqn>.<key>``. A group without parameters has no key."""
    result: dict[str, Any] = {}
    for fqn, entries in state[STATE].items():
        _flatten_into(result, f"{STATE}.{fqn}", entries)
    for group in state[GROUPS]:
        for fqn in group[PARAMS]:
            result.update({f"{GROUPS}.{fqn}.{key}": value for key, value in group.items() if key != PARAMS})
    return result


def _flatten_into(result: dict[str, Any], prefix: str, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        if isinstance(value, Mapping):
            _flatten_into(result, f"{prefix}.{key}", value)
        else:
            result[f"{prefix}.{key}"] = value


def unflatten(flat: Mapping[str, Any], fqns: Iterable[str]) -> dict[str, Any]:
    """The inverse of ``flatten``, with one group for each parameter; ``fqns`` are the names that keys may hold.

    Raises:
        ValueError: keys that hold none of them.
    """
    known = set(fqns)
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    strange = []
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        fqn = longest_prefix(rest, known)
        if kind not in (STATE, GROUPS) or fqn is None:
            strange.append(key)
        elif kind == GROUPS:
            groups.setdefault(fqn, {PARAMS: [fqn]})[rest[len(fqn) + 1 :]] = value
        else:
            *path, last = rest[len(fqn) + 1 :].split(".")
            entries = state.setdefault(fqn, {})
            for name in path:
                entries = entries.setdefault(name, {})
            entries[last] = value
    if strange:
        raise ValueError(f"no parameter of the model is in {', '.join(strange[:5])}")
    return {STATE: state, GROUPS: [*groups.values()]}


def longest_prefix(text: str, known: set[str]) -> str | None:
    end = len(text)
    while (end := text.rfind(".", 0, end)) >= 0:
        if text[:end] in known:
            return text[:end]
    return None


def is_flattened(state: Mapping[str, Any]) -> bool:
    return GROUPS not in state and any(key.startswith((f"{STATE}.", f"{GROUPS}.")) for key in state)


def is_numbered(state: Mapping[str, Any]) -> bool:
    """Whether this is what an optimizer's own ``state_dict()`` gives."""
    return any(isinstance(param, int) for group in state.get(GROUPS, ()) for param in group[PARAMS])


def name(state: Mapping[str, Any], fqns: Sequence[str]) -> dict[str, Any]:
    """An optimizer's own ``state_dict()`` with FQNs in the place of numbers; ``fqns`` are in the order of its groups.

    Raises:
        ValueError: it is of another number of parameters.
    """
    numbers = [number for group in state[GROUPS] for number in group[PARAMS]]
    if len(numbers) != len(fqns):
        raise ValueError(f"it numbers {len(numbers)} parameters, where the optimizer has {len(fqns)}")
    names = dict(zip(numbers, fqns, strict=True))
    return {
        STATE: {names[number]: entries for number, entries in state[STATE].items()},
        GROUPS: [{**group, PARAMS: [names[number] for number in group[PARAMS]]} for group in state[GROUPS]],
    }

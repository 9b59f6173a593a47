"""Optimizer dicts in other forms: with one level of keys, or with numbers in the place of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """``{"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn], key: value}]}`` with one level of keys:
    ``state.<fqn>.<key>`` and ``param_groups.<fqn>.<key>``. A parameter group without parameters has no key."""
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


def unflatten(flat: Mapping[str, Any], fqns: Iterable[str], *, strict: bool) -> dict[str, Any]:
    """The inverse of ``flatten``, with one parameter group for each parameter; ``fqns`` are the names that keys may
    hold. Keys that hold none of them are left out.

    Raises:
        ValueError: if ``strict``: there are such keys.
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
    if strange and strict:
        raise ValueError(f"unexpected: no parameter of the model is in {', '.join(strange[:5])}")
    return {STATE: state, GROUPS: [*groups.values()]}


def longest_prefix(text: str, known: set[str]) -> str | None:
    end = len(text)
    while (end := text.rfind(".", 0, end)) >= 0:
        if text[:end] in known:
            return text[:end]
    return None


def is_flattened(state: Mapping[str, Any]) -> bool:
    return GROUPS not in state and any(str(key).startswith((f"{STATE}.", f"{GROUPS}.")) for key in state)


def is_numbered(state: Mapping[str, Any]) -> bool:
    """Whether this is what an optimizer's own ``state_dict()`` gives."""
    return any(isinstance(param, int) for group in state.get(GROUPS, ()) for param in group.get(PARAMS, ()))


def name(state: Mapping[str, Any], fqns: Sequence[str], shared_name: str) -> dict[str, Any]:
    """An optimizer's own ``state_dict()`` with FQNs in the place of numbers; ``fqns`` are in the order of its groups.

    Args:
        shared_name: stands for an FQN in the place of keys that are no numbers.

    Raises:
        ValueError: it is of another number of parameters, or has state for numbers that are in no group.
    """
    numbers = [number for group in state[GROUPS] for number in group[PARAMS]]
    if len(numbers) != len(fqns):
        raise ValueError(f"it numbers {len(numbers)} parameters, where the optimizer has {len(fqns)}")
    names = dict(zip(numbers, fqns, strict=True))
    stray = [number for number in state[STATE] if isinstance(number, int) and number not in names]
    if stray:
        raise ValueError(f"it has state for the parameters {stray[:5]}, which are in none of its groups")
    named = {names[number]: entries for number, entries in state[STATE].items() if isinstance(number, int)}
    shared = {key: value for key, value in state[STATE].items() if not isinstance(key, int)}
    return {
        STATE: {**named, shared_name: shared} if shared else named,
        GROUPS: [{**group, PARAMS: [names[number] for number in group[PARAMS]]} for group in state[GROUPS]],
    }


def require_form(state: Mapping[str, Any]) -> None:
    """Raises ValueError if this is no optimizer dict by name."""
    if not {STATE, GROUPS} <= state.keys():
        raise ValueError(
            f"expected an optimizer dict with {STATE!r} and {GROUPS!r}, or a flattened one; found the keys "
            f"{[*state][:5]}"
        )
    for fqn, entries in state[STATE].items():
        if not isinstance(entries, Mapping):
            raise ValueError(f"expected a dict as the state of {fqn}; found a {type(entries).__name__}")
    for group in state[GROUPS]:
        if PARAMS not in group:
            raise ValueError(f"expected {PARAMS!r} in each parameter group; found one with the keys {[*group][:5]}")

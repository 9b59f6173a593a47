"""The state dicts of optimizers: ``{"state": {FQN: {...}}, "param_groups": [{"params": [FQN, ...], ...}]}``.

Getters read: they never step, and look at no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..moving.agreement import group_of, is_first
from ..moving.gathering import Copies, Key, copy_to_cpu, gather_values
from ..moving.names import ModelNames
from .flattened import GROUPS, PARAMS, STATE, flatten
from .nested import map_leaves
from .options import StateDictOptions
from .pending import is_pending, pending_state
from .templates import Templates
from .trained import TrainedBy


@dataclass
class OptimizerEntries:
    """The entries of a state dict of optimizers; live values."""

    values: dict[Key, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


def choose_optimizer_entries(trained: Sequence[TrainedBy], options: StateDictOptions) -> OptimizerEntries:
    """The state of all optimizers; a sharded dict has places for what there is not yet. Local."""
    entries = OptimizerEntries()
    for by in trained:
        templates = Templates(by.optimizer)
        for group in by.groups:
            entries.groups.append({**by.hyperparameters(group.number), PARAMS: group.fqns})
            for param in group.params:
                state: Mapping[str, Any] = by.state_of(param)
                if not state and not options.full_state_dict:
                    state = pending_state(param.tensor, templates.of(group.number, param.tensor))
                entries.values.update({(param.fqn, key): value for key, value in state.items()})
        entries.values.update({(by.shared_name, key): value for key, value in by.shared.items()})
    return entries


def get_optimizer_state(names: ModelNames, entries: OptimizerEntries, options: StateDictOptions) -> dict[str, Any]:
    """The state dict. Ranks: with ``full_state_dict`` all ranks of the model, which have met."""
    values, groups, is_here = entries.values, entries.groups, is_first(group_of(names))
    if options.full_state_dict:
        places = {key: names.place(key[0]) for key in values}
        to_cpu, rank0_only = options.cpu_offload, options.is_rank0_only
        values = gather_values(values, places, to_cpu=to_cpu, rank0_only=rank0_only, is_first=is_here)
    elif options.cpu_offload:
        values = {key: map_leaves(_to_cpu, value) for key, value in values.items()}
    if options.is_rank0_only and not is_here:
        return {}
    if options.full_state_dict or options.cpu_offload:
        copies = Copies(options.cpu_offload)
        groups = [map_leaves(lambda _, value: copies.of(value), group) for group in groups]
    state: dict[str, dict[str, Any]] = {}
    for (fqn, name), value in values.items():
        state.setdefault(fqn, {})[name] = value
    result = {STATE: state, GROUPS: groups}
    return flatten(result) if options.flatten_optimizer_state_dict else result


def _to_cpu(_: Any, value: Any) -> Any:
    return copy_to_cpu(value) if isinstance(value, torch.Tensor) and not is_pending(value) else value

"""The state dicts of optimizers: ``{"state": {FQN: {...}}, "param_groups": [{"params": [FQN, ...], ...}]}``.

Getters read: they never step, and look at no gradient. Loading is planned for all optimizers before one is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from .agreement import group_of, is_first, list_problems
from .flattened import GROUPS, PARAMS, STATE, flatten
from .gathering import Key, copy_to_cpu, gather_values, same_elements
from .layouts import Described, Target, from_first_rank, in_layout
from .names import ModelNames, own_method
from .options import StateDictOptions
from .pending import is_pending, pending_state
from .segments_state import conflict_of, pack_flat
from .templates import Template, Templates
from .trained import Trained, TrainedBy, TrainedGroup

__all__ = ["OptimizerPlan", "commit_optimizers", "fetch_optimizers", "get_optimizer_state", "plan_optimizers"]


def get_optimizer_state(names: ModelNames, trained: Sequence[TrainedBy], options: StateDictOptions) -> dict[str, Any]:
    """The state of all optimizers. Ranks: with ``full_state_dict`` all ranks of the model, which have met."""
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for by in trained:
        templates = Templates(by.optimizer)
        for group in by.groups:
            groups.append({**by.hyperparameters(group.number), PARAMS: group.fqns})
            for param in group.params:
                entries = by.state_of(param)
                if not entries and not options.full_state_dict:
                    entries = pending_state(param.tensor, templates.of(group.number, param.tensor))
                if entries:
                    state[param.fqn] = entries
    if options.full_state_dict:
        state = _gather(names, state, options)
    elif options.cpu_offload:
        state = {fqn: {key: _to_cpu(value) for key, value in entries.items()} for fqn, entries in state.items()}
    if options.is_rank0_only and not is_first(group_of(names)):
        return {}
    result = {STATE: state, GROUPS: groups}
    return flatten(result) if options.flatten_optimizer_state_dict else result


def _gather(
    names: ModelNames, state: Mapping[str, Mapping[str, Any]], options: StateDictOptions
) -> dict[str, dict[str, Any]]:
    values: dict[Key, Any] = {(fqn, key): value for fqn, entries in state.items() for key, value in entries.items()}
    wholes = gather_values(
        values,
        {key: names.place(key[0]) for key in values},
        to_cpu=options.cpu_offload,
        rank0_only=options.is_rank0_only,
        is_first=is_first(group_of(names)),
    )
    result: dict[str, dict[str, Any]] = {}
    for (fqn, key), value in wholes.items():
        result.setdefault(fqn, {})[key] = value
    return result


def _to_cpu(value: Any) -> Any:
    return copy_to_cpu(value) if isinstance(value, torch.Tensor) and not is_pending(value) else value


# ---- loading


@dataclass(frozen=True)
class _GroupPlan:
    group: TrainedGroup
    hyperparameters: dict[str, Any]


@dataclass
class OptimizerPlan:
    """What loading will do to optimizers, decided before anything is changed.

    Attributes:
        state: what each parameter gets, by its FQN; parameters without an entry have no state afterwards.
        targets: where the tensors among it go.
        problem: why it cannot be done; empty if it can.
    """

    trained: Sequence[TrainedBy]
    groups: list[list[_GroupPlan]] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    targets: dict[Key, Target] = field(default_factory=dict)
    problem: str = ""

    @property
    def facts(self) -> list[str]:
        """What must be the same on every rank."""
        return [
            f"{key} of {fqn}, of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"{key} of {fqn}"
            for fqn, entries in self.state.items()
            for key, value in entries.items()
        ]


def plan_optimizers(
    names: ModelNames, trained: Sequence[TrainedBy], given: Mapping[str, Any], options: StateDictOptions
) -> OptimizerPlan:
    """Compare an optimizer dict with optimizers. Local; changes nothing.

    Args:
        given: keyed by FQN, without pending state; tensors of any layout, or descriptions of tensors that the first
            rank has.
    """
    plan, saved = OptimizerPlan(trained), _Saved(names, given)
    problems: list[str] = []
    if options.strict:
        known = {*names.parameters, *(fqn for by in trained for group in by.groups for fqn in group.fqns)}
        strange = [fqn for fqn in dict.fromkeys([*saved.groups, *saved.state]) if fqn not in known]
        problems += [f"unexpected: {fqn}, which the model does not have" for fqn in strange]
    for by in trained:
        templates, without_params = Templates(by.optimizer), iter(saved.without_params)
        plan.groups.append([])
        for group in by.groups:
            matching = saved.groups_of(group) if group.params else [*islice(without_params, 1)]
            hyperparameters, conflicts = _merge(by.hyperparameters(group.number), matching)
            plan.groups[-1].append(_GroupPlan(group, hyperparameters))
            problems += conflicts
            for param in group.params:
                problems += _plan_param(plan, by, param, saved, templates.of(group.number, param.tensor), options)
            problems += conflict_of(group, plan.state, is_strict=options.strict)
    plan.problem = list_problems("the optimizer dict does not fit", problems, _REMEDY)
    return plan


_REMEDY = (
    "If the dict was loaded by torch.distributed.checkpoint from an optimizer with other groups, load it with "
    "fsdp_compose.checkpoint.load(), which takes the groups as they were saved. StateDictOptions(strict=False) accepts "
    "missing and unexpected names"
)


class _Saved:
    """An optimizer dict by FQN.

    Attributes:
        state: as in the dict.
        groups: the group that each parameter was saved in; ``without_params``: those without any.
    """

    def __init__(self, names: ModelNames, given: Mapping[str, Any]) -> None:
        self._names = names
        self.state: Mapping[str, Mapping[str, Any]] = given[STATE]
        self.groups: dict[str, Mapping[str, Any]] = {fqn: group for group in given[GROUPS] for fqn in group[PARAMS]}
        self.without_params = [group for group in given[GROUPS] if not group[PARAMS]]

    def name_of(self, param: Trained) -> str | None:
        """The name under which a parameter was saved: that of a tied one may be another."""
        aliases = (param.fqn, *self._names.aliases(param.fqn))
        return next((fqn for fqn in aliases if fqn in self.groups or fqn in self.state), None)

    def groups_of(self, group: TrainedGroup) -> list[Mapping[str, Any]]:
        fqns = [self.name_of(param) for param in group.params]
        return [self.groups[fqn] for fqn in fqns if fqn is not None and fqn in self.groups]


def _merge(own: dict[str, Any], saved: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The hyperparameters of a group from the groups that its parameters were saved in."""
    merged, conflicts = dict(own), []
    source: dict[str, Mapping[str, Any]] = {}
    for group in {id(group): group for group in saved}.values():
        for key, value in group.items():
            if key in (PARAMS, "param_names"):
                continue
            if key in source and not _is_equal(source[key][key], value):
                conflicts.append(
                    f"{key} of one parameter group is {source[key][key]!r} for {source[key][PARAMS][0]}, and {value!r} "
                    f"for {group[PARAMS][0]}: put them into groups of their own"
                )
            merged[key] = value
            source.setdefault(key, group)
    return merged, conflicts


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def _plan_param(
    plan: OptimizerPlan,
    by: TrainedBy,
    param: Trained,
    saved: _Saved,
    template: Template,
    options: StateDictOptions,
) -> list[str]:
    """Plan the state of one parameter; what is wrong with it."""
    fqn = saved.name_of(param)
    if fqn is None:
        missing = f"missing: {param.fqn}, which the optimizer trains, is in no group of the dict"
        return [missing] if options.strict else []
    entries = saved.state.get(fqn, {})
    if not entries:
        return []
    plan.state[param.fqn] = dict(entries)
    present = by.state_of(param)
    problems = []
    for key, value in entries.items():
        if not isinstance(value, (torch.Tensor, Described)):
            continue
        expected = _expected_shape(param, key, present, template)
        if expected is not None and tuple(value.shape) != expected:
            problems.append(
                f"{key} of {param.fqn}: expected shape {expected}; found shape {tuple(value.shape)}, {value.dtype}"
            )
        plan.targets[param.fqn, key] = _target(param, key, value, present, template)
    return problems


def _expected_shape(param: Trained, key: str, present: Mapping[str, Any], template: Template) -> tuple[int, ...] | None:
    if key in template:
        return template[key].shape(param.tensor.shape)
    known = present.get(key)
    return tuple(known.shape) if isinstance(known, torch.Tensor) else None


def _target(param: Trained, key: str, value: Any, present: Mapping[str, Any], template: Template) -> Target:
    known = present.get(key)
    kind = template.get(key)
    is_like = kind.is_like_parameter if kind is not None else tuple(value.shape) == tuple(param.tensor.shape)
    if isinstance(known, torch.Tensor):
        return Target(known, param.place if is_like else None)
    if is_like and key != "step":  # of a 0-dim parameter
        return param.target
    if kind is not None:
        return Target(pending_state(param.tensor, {key: kind})[key])
    return Target(torch.empty(value.shape, dtype=value.dtype, device="cpu" if not value.shape else param.target.device))


def fetch_optimizers(
    plan: OptimizerPlan, sender: tuple[dist.ProcessGroup, torch.device] | None
) -> list[dict[str, Any]]:
    """What each optimizer is to load: its own kind of state dict, with memory of its own. Changes nothing.

    Ranks: all ranks of the model; ``sender`` as in ``fetch_model``.
    """
    tensors = {key: (plan.state[key[0]][key[1]], target) for key, target in plan.targets.items()}
    with torch.no_grad():
        if sender is not None:
            moved = from_first_rank(tensors, *sender)
        else:
            moved = {key: in_layout(value, target) for key, (value, target) in tensors.items()}
        state: dict[str, dict[str, Any]] = {}
        for fqn, entries in plan.state.items():
            state[fqn] = {key: _own(value, moved.get((fqn, key), value)) for key, value in entries.items()}
        return [_pack(by, groups, state) for by, groups in zip(plan.trained, plan.groups, strict=True)]


def _pack(by: TrainedBy, groups: Sequence[_GroupPlan], state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    packed: dict[Any, Any] = {}
    by_number: dict[int, list[Trained]] = {}
    for item in groups:
        for param in item.group.params:
            by_number.setdefault(param.number, []).append(param)
    for number, params in by_number.items():
        if params[0].flat is not None:
            plain = {param.fqn: _unwrap(state[param.fqn]) for param in params if param.fqn in state}
            entries = pack_flat(params, plain)
        else:
            present = by.packed["state"].get(number) or {}
            given = state.get(params[0].fqn, {})
            entries = {key: _copy(value, present.get(key)) for key, value in given.items()}
        if entries:
            packed[number] = entries
    return {STATE: packed, GROUPS: [{**item.hyperparameters, PARAMS: item.group.numbers} for item in groups]}


class _Ours:
    """A tensor that nobody else refers to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # without what marks it as pending


def _own(given: Any, moved: Any) -> Any:
    """Mark what was made to be loaded into: it need not be copied."""
    return _Ours(moved) if is_pending(given) else moved


def _unwrap(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tensor if isinstance(value, _Ours) else value for key, value in entries.items()}


def _copy(value: Any, present: Any) -> Any:
    """``value`` with memory of its own; the optimizer's present memory is."""
    if isinstance(value, _Ours):
        return value.tensor
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)  # dicts and lists of some optimizers
    if type(value) is type(present) and same_elements(value, present):
        return present
    return value.detach().clone()


def commit_optimizers(plan: OptimizerPlan, packed: Sequence[dict[str, Any]]) -> None:
    """Load state dicts that fit."""
    for by, state in zip(plan.trained, packed, strict=True):
        own_method(by.optimizer, "load_state_dict")(state)

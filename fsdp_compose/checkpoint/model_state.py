"""The state dict of a model: made without communication or gathered, planned before anything is changed, loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._torch import IncompatibleKeys
from .agreement import group_of, is_first, list_problems
from .gathering import copy_to_cpu, gather_values, same_elements
from .layouts import Described, Target, from_first_rank, in_layout
from .names import ModelNames, own_method
from .options import StateDictOptions

_EXTRA_STATE = "_extra_state"  # what nn.Module calls the result of get_extra_state()


def entries_of(names: ModelNames) -> dict[str, tuple[str, Any]]:
    """The key in ``model.state_dict()`` and the (detached, live) value of everything in it, by canonical FQN."""
    found: dict[str, tuple[str, Any]] = {}
    for key, value in own_method(names.model, "state_dict")().items():
        fqn = names.canonical(key)
        if fqn in found:
            raise RuntimeError(
                f"{key} and {found[fqn][0]} of this {type(names.model).__name__} have one canonical name, {fqn}: "
                "rename one of the submodules"
            )
        found[fqn] = (key, value)
    return found


def get_model_state(
    names: ModelNames, options: StateDictOptions, submodules: set[nn.Module] | None = None
) -> dict[str, Any]:
    """The state dict by canonical FQN. Ranks: with ``full_state_dict`` all ranks of the model, which have met."""
    state = {fqn: value for fqn, (_, value) in entries_of(names).items()}
    if options.ignore_frozen_params:
        state = {fqn: value for fqn, value in state.items() if not _is_frozen(names, fqn)}
    prefixes = names.prefixes_of(submodules) if submodules else [""]
    chosen = [fqn for fqn in state if any(fqn.startswith(prefix) for prefix in prefixes)]
    if options.full_state_dict:
        state = _gather(names, {fqn: state[fqn] for fqn in chosen}, options)
    elif options.cpu_offload:
        state = {fqn: _to_cpu(state[fqn]) for fqn in chosen}
    if options.keep_submodule_prefixes:
        return {fqn: state[fqn] for fqn in chosen if fqn in state}
    shortened = {fqn: next(p for p in prefixes if fqn.startswith(p)) for fqn in chosen}
    return {fqn[len(prefix) :]: state[fqn] for fqn, prefix in shortened.items() if fqn in state}


def _gather(names: ModelNames, state: Mapping[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """Whole tensors; names of one tensor have one whole tensor."""
    first = {fqn: next(name for name in (*names.aliases(fqn), fqn) if name in state) for fqn in state}
    values = {(fqn, ""): value for fqn, value in state.items() if first[fqn] == fqn}
    places = {key: names.place(key[0]) for key in values}
    wholes = gather_values(
        values,
        places,
        to_cpu=options.cpu_offload,
        rank0_only=options.is_rank0_only,
        is_first=is_first(group_of(names)),
    )
    return {fqn: wholes[first[fqn], ""] for fqn in state if (first[fqn], "") in wholes}


def _to_cpu(value: Any) -> Any:
    return copy_to_cpu(value) if isinstance(value, torch.Tensor) else value


def _is_frozen(names: ModelNames, fqn: str) -> bool:
    param = names.parameters.get(fqn)
    return param is not None and not param.requires_grad


# ---- loading


@dataclass
class ModelPlan:
    """What loading a state dict into a model will do, decided before anything is changed.

    Attributes:
        given: what is loaded, by FQN (one name of tied parameters); ``Described`` where only the first rank has it.
        targets: where the tensors among it go.
        keys: the keys in ``model.state_dict()``.
        missing, unexpected: as ``nn.Module.load_state_dict`` returns them.
        problem: why it cannot be done; empty if it can.
    """

    names: ModelNames
    given: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def facts(self) -> list[str]:
        """What must be the same on every rank."""
        return [
            f"{fqn} of shape {tuple(value.shape)}, {value.dtype}"
            if isinstance(value, (torch.Tensor, Described))
            else fqn
            for fqn, value in self.given.items()
        ]


def plan_model(names: ModelNames, state: Mapping[str, Any], options: StateDictOptions) -> ModelPlan:
    """Compare a state dict with the model. Local; changes nothing.

    Args:
        state: by canonical FQN: tensors of any layout, descriptions of tensors that the first rank has, or others.
    """
    plan = ModelPlan(names)
    entries = entries_of(names)
    problems: list[str] = []
    for fqn, (key, value) in entries.items():
        if fqn not in state:
            continue
        plan.given[fqn], plan.keys[fqn] = state[fqn], key
        if isinstance(value, torch.Tensor) and fqn.rpartition(".")[2] != _EXTRA_STATE:  # that can have any shape
            problems += _mismatch(fqn, value, state[fqn])
            plan.targets[fqn] = Target(value, names.place(fqn))
    plan.missing = [
        fqn
        for fqn in entries
        if fqn not in state
        and not any(name in state for name in names.aliases(fqn))
        and not (options.ignore_frozen_params and _is_frozen(names, fqn))
    ]
    plan.unexpected = [fqn for fqn in state if fqn not in entries]
    if options.strict:
        problems = [
            *(f"missing: {fqn}{_expected(entries[fqn][1])}" for fqn in plan.missing),
            *(f"unexpected: {fqn}, which the model does not have" for fqn in plan.unexpected),
            *problems,
        ]
    plan.problem = list_problems(
        f"the state dict does not fit this {type(names.model).__name__}",
        problems,
        "Build the model as it was when the state dict was made, or load what fits with StateDictOptions(strict=False)",
    )
    return plan


def _mismatch(fqn: str, expected: torch.Tensor, found: Any) -> list[str]:
    if isinstance(found, (torch.Tensor, Described)):
        if tuple(found.shape) == tuple(expected.shape):
            return []
        got = f"a tensor of shape {tuple(found.shape)}, {found.dtype}"
    else:
        got = f"a {type(found).__name__}"
    return [f"{fqn}: expected shape {tuple(expected.shape)}, {expected.dtype}{_layout(expected)}; found {got}"]


def _expected(value: Any) -> str:
    return f" of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else ""


def _layout(tensor: torch.Tensor) -> str:
    return f", placed {list(tensor.placements)}" if isinstance(tensor, DTensor) else ""


def fetch_model(plan: ModelPlan, sender: tuple[dist.ProcessGroup, torch.device] | None) -> dict[str, Any]:
    """The given values in the model's layout. Changes nothing.

    Ranks: all ranks of the model.

    Args:
        sender: the group whose first rank sends its tensors, and the device of messages; ``None``: every rank has its
            own.
    """
    values = {fqn: value for fqn, value in plan.given.items() if fqn not in plan.targets}
    tensors = {(fqn, ""): (plan.given[fqn], target) for fqn, target in plan.targets.items()}
    with torch.no_grad():
        if sender is not None:
            moved = from_first_rank(tensors, *sender)
        else:
            moved = {key: in_layout(value, target) for key, (value, target) in tensors.items()}
    return values | {fqn: tensor for (fqn, _), tensor in moved.items()}


def commit_model(plan: ModelPlan, values: Mapping[str, Any]) -> Any:
    """Load values that fit. Parameters on the meta device get memory; their identity stays."""
    names, load = plan.names, own_method(plan.names.model, "load_state_dict")
    is_meta = {fqn: fqn in plan.targets and plan.targets[fqn].like.is_meta for fqn in values}
    moved = [fqn for fqn, value in values.items() if not is_meta[fqn] and not _is_there(value, plan.targets.get(fqn))]
    load({plan.keys[fqn]: values[fqn] for fqn in moved}, strict=False)
    if any(is_meta.values()):
        fresh = {fqn: _own_memory(value, plan.targets[fqn]) for fqn, value in values.items() if is_meta[fqn]}
        ties = [tied for tied in _ties(names) if any(is_meta.get(fqn) for fqn in tied)]
        load({plan.keys[fqn]: value for fqn, value in fresh.items()}, strict=False, assign=True)
        _keep_objects(names, [fqn for fqn, meta in is_meta.items() if meta])
        _tie_again(names.model, plan, ties)
    _warn_of_meta(names)
    return IncompatibleKeys(plan.missing, plan.unexpected)


def _is_there(value: Any, target: Target | None) -> bool:
    """Whether ``value`` is the model's own memory: what torch.distributed.checkpoint has loaded into already."""
    return target is not None and type(value) is type(target.like) and same_elements(value, target.like)


def _own_memory(value: torch.Tensor, target: Target) -> torch.Tensor:
    return value.detach().to(target.like.dtype, copy=True)


def _ties(names: ModelNames) -> list[list[str]]:
    groups = {tuple(names.aliases(fqn)): None for fqn in names.parameters}
    return [list(group) for group in groups if len(group) > 1]


def _slots(names: ModelNames) -> dict[str, tuple[nn.Module, str]]:
    """Where parameters stand: (module, attribute), by FQN."""
    return {
        names.canonical(f"{prefix}.{name}" if prefix else name): (module, name)
        for prefix, module in names.model.named_modules(remove_duplicate=False)
        for name in module._parameters
    }


def _keep_objects(names: ModelNames, fqns: Sequence[str]) -> None:
    """Assignment has put new parameters into the slots: let those that stood there, which optimizers hold, become
    them."""
    slots = _slots(names)
    for fqn in fqns:
        before = names.parameters.get(fqn)
        if before is None or fqn not in slots:
            continue  # a buffer
        module, name = slots[fqn]
        loaded = module._parameters[name]
        if loaded is not before and loaded is not None and names.place(fqn) is None:
            torch.utils.swap_tensors(before, loaded)
            module._parameters[name] = before  # type: ignore[assignment]


def _tie_again(model: nn.Module, plan: ModelPlan, ties: Sequence[Sequence[str]]) -> None:
    """Assignment gives each slot a parameter of its own: put the loaded one into every slot of a tie."""
    slots = _slots(plan.names)
    for tied in ties:
        loaded = next((fqn for fqn in tied if fqn in plan.given), None)
        if loaded is None:
            continue
        source, source_name = slots[loaded]
        for fqn in tied:
            module, name = slots[fqn]
            module._parameters[name] = source._parameters[source_name]


def _warn_of_meta(names: ModelNames) -> None:
    """Say what loading has left without values: what no state dict holds."""
    tensors: dict[str, torch.Tensor] = {**names.parameters}
    for name, buffer in names.model.named_buffers(remove_duplicate=False):
        tensors[names.canonical(name)] = buffer
    present = ModelNames(names.model).parameters
    left = [fqn for fqn, tensor in tensors.items() if present.get(fqn, tensor).is_meta]
    if left:
        persistent = entries_of(names)
        buffers = [fqn for fqn in left if fqn not in persistent]
        extra = f" ({', '.join(buffers)}: non-persistent, in no state dict)" if buffers else ""
        warnings.warn(
            f"loading has left {', '.join(left)} on the meta device, without values{extra}: compute them before the "
            "first forward"
        )

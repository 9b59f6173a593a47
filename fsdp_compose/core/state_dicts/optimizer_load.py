"""Load optimizers: plan for all of them before changing one.

``state_dict`` calls this. The plan says where each tensor of an optimizer's state goes, even inside lists and dicts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import Optimizer

from ..._nested import GROUPS, PARAMS, STATE, Path, leaves_of, map_leaves
from ..._torch import is_wrapper, loads_as_torch
from ...errors import list_problems
from ..flat import local_of
from ..optimizers import block_of
from ..ragged import RaggedDTensor
from .fqns import ModelNames, own_method
from .gathering import Key, same_elements
from .model_state import StateDictOptions
from .optimizer_init import (
    PlaceState,
    StateKind,
    Template,
    is_pending,
    pending_state,
    placed_by,
    state_after_step,
    take,
    templates_of,
)
from .optimizer_state import Trained, TrainedBy, TrainedGroup, conflict_of, pack_flat, trained_by
from .resharding import Described, Sender, Target, fact_of, fetch

# ---- Targets: where each tensor of an optimizer's state goes, even inside lists and dicts.


def _as_kept(
    by: TrainedBy, param: Trained, template: Template, path: Path, known: Any, value: torch.Tensor | Described
) -> tuple[tuple[int, ...] | None, torch.dtype, Target]:
    """Return the shape required for a part of one parameter's state (``None``: any), the dtype in which the optimizer
    keeps it, and its target.

    Args:
        template: the state that the optimizer will keep for the parameter, if known.
        path: its name, and its path in lists and dicts.
        known: what the optimizer has there now.
        value: what is to be loaded.
    """
    is_blockwise = block_of(by.optimizer) is not None
    # A kind may be nested there (bitsandbytes saves it so).
    kind = template.get(path[-1]) if len(path) == 1 or is_blockwise else None
    shape, dtype = None, value.dtype
    if kind is not None:
        shape, dtype = kind.shape(param.tensor.shape), kind.dtype
    elif isinstance(known, torch.Tensor):
        shape, dtype = tuple(known.shape) if len(path) == 1 else None, known.dtype
    if is_blockwise:
        dtype = value.dtype  # the optimizer quantizes it or not, by the size of what a rank has
    return shape, dtype, _target_of(by, param, kind, path, known, value)


def _target_of(
    by: TrainedBy, param: Trained, kind: StateKind | None, path: Path, known: Any, value: torch.Tensor | Described
) -> Target:
    is_like = kind.is_like_parameter if kind is not None else tuple(value.shape) == tuple(param.tensor.shape)
    if isinstance(known, torch.Tensor) and tuple(known.shape) == tuple(value.shape):
        return Target(known, param.place if is_like else None)
    placed = placed_by(by.optimizer, param.tensor, path, value.shape, value.dtype)
    if placed is not None:
        return Target(placed)
    if is_like and path[-1] != "step":  # of a 0-dim parameter
        return param.target
    if kind is not None:
        return Target(pending_state(param.tensor, {path[-1]: kind})[path[-1]])
    mesh = param.tensor.device_mesh if isinstance(param.tensor, DTensor) else None
    if isinstance(value, DTensor) and value.device_mesh == mesh:
        return Target(value)
    if mesh is not None and tuple(value.shape) == (by.numel,):
        # A vector over all parameters (LBFGS), as torch.cat() makes it from sharded ones.
        like = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return Target(DTensor.from_local(like, mesh, [Replicate()] * mesh.ndim, run_check=False))
    return plain_target(value, param.target.device)


def state_placer(model: nn.Module, optimizers: Sequence[Optimizer]) -> PlaceState:
    """Return a function that asks the optimizer of a parameter how state lies that it does not have yet."""
    trained = trained_by(optimizers, ModelNames(model), keep_foreign=True)
    params = {
        param.fqn: (by.optimizer, param.tensor) for by in trained for group in by.groups for param in group.params
    }

    def place(fqn: str, path: Sequence[Any], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        return None if fqn not in params else placed_by(*params[fqn], path, shape, dtype)

    return place


def plain_target(value: torch.Tensor | Described, device: torch.device) -> Target:
    """Return the target of a whole tensor; numbers stay on the CPU."""
    return Target(torch.empty(value.shape, dtype=value.dtype, device=device if len(value.shape) else "cpu"))


# ---- The plan


@dataclass
class OptimizerPlan:
    """A plan to load optimizers, made before anything is changed.

    Attributes:
        groups: of each optimizer, its parameter groups with the hyperparameters to load.
        state: the state of each parameter, by FQN; parameters without an entry have no state afterwards. State that
            belongs to no parameter is under its optimizer's ``shared_name``.
        targets: where the tensors among it go, and ``dtypes``: their dtypes there.
        problem: why it cannot be loaded; empty if it can.
        sender: sends the first rank's tensors; ``None``: every rank has its own.
    """

    trained: Sequence[TrainedBy]
    groups: list[list[tuple[TrainedGroup, dict[str, Any]]]] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    targets: dict[Key, Target] = field(default_factory=dict)
    dtypes: dict[Key, torch.dtype] = field(default_factory=dict)
    problem: str = ""
    sender: Sender | None = None

    @property
    def leaves(self) -> dict[Key, Any]:
        """Everything in ``state``, also inside lists and dicts."""
        return dict(leaves_of(self.state))

    @property
    def facts(self) -> list[str]:
        """Facts that must be equal on every rank."""
        return [fact_of(key, leaf, self.targets.get(key), self.sender) for key, leaf in self.leaves.items()]


def plan_optimizers(
    names: ModelNames,
    trained: Sequence[TrainedBy],
    given: Mapping[str, Any],
    options: StateDictOptions,
    sender: Sender | None = None,
) -> OptimizerPlan:
    """Compare an optimizer dict with optimizers. Local; changes nothing.

    Args:
        given: state by FQN, without pending tensors: tensors of any layout, or descriptions of the first rank's
            tensors.
        sender: as in ``OptimizerPlan``.
    """
    plan, saved = OptimizerPlan(trained, sender=sender), _Saved(names, given)
    problems: list[str] = []
    if options.strict:
        known = {*names.parameters, *(fqn for by in trained for fqn in (*by.fqns, by.shared_name))}
        strange = [fqn for fqn in dict.fromkeys([*saved.groups, *saved.state]) if fqn not in known]
        problems += [f"unexpected: {fqn}, which the model does not have" for fqn in strange]
    without_params = iter(saved.without_params)  # in their order, over all optimizers
    for by in trained:
        plan.groups.append([])
        _plan_shared(plan, by, saved)
        for group in by.groups:
            matching = saved.groups_of(group) if group.params else [*islice(without_params, 1)]
            hyperparameters, conflicts = _merge(by.hyperparameters(group.number), matching)
            plan.groups[-1].append((group, hyperparameters))
            problems += conflicts
            live = by.optimizer.param_groups[group.number]
            template_of = templates_of(by.optimizer, {**live, **hyperparameters})
            for param in group.params:
                problems += _plan_param(plan, by, param, saved, template_of(param.tensor), options)
            problems += conflict_of(group, plan.state, is_strict=options.strict)
    plan.problem = list_problems("the optimizer dict does not fit", problems, _REMEDY)
    return plan


_REMEDY = (
    "If torch.distributed.checkpoint loaded the dict and the saved optimizer had other parameter groups, load it with "
    "fsdp_compose.checkpoint.load(), which keeps the saved groups. StateDictOptions(strict=False) accepts missing and "
    "unexpected names (instead of resume(): load(), then set_state_dict())"
)


class _Saved:
    """An optimizer dict, by FQN.

    Attributes:
        state: as in the dict.
        groups: the saved parameter group of each parameter; ``without_params``: groups without parameters.
    """

    def __init__(self, names: ModelNames, given: Mapping[str, Any]) -> None:
        self._names = names
        self.state: Mapping[str, Mapping[str, Any]] = given[STATE]
        self.groups: dict[str, Mapping[str, Any]] = {fqn: group for group in given[GROUPS] for fqn in group[PARAMS]}
        self.without_params = [group for group in given[GROUPS] if not group[PARAMS]]

    def name_of(self, param: Trained) -> str | None:
        """Return the name under which a parameter was saved; for a tied one it may be another of its names."""
        aliases = (param.fqn, *self._names.aliases(param.fqn))
        return next((fqn for fqn in aliases if fqn in self.groups or fqn in self.state), None)

    def groups_of(self, group: TrainedGroup) -> list[Mapping[str, Any]]:
        fqns = [self.name_of(param) for param in group.params]
        return [self.groups[fqn] for fqn in fqns if fqn is not None and fqn in self.groups]


def _merge(own: dict[str, Any], saved: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the hyperparameters of a parameter group from the saved groups of its parameters, and conflicts."""
    merged, conflicts = dict(own), []
    source: dict[str, Mapping[str, Any]] = {}
    for group in {id(group): group for group in saved}.values():
        for key, value in group.items():
            if key in (PARAMS, "param_names"):
                continue
            if key in source and not _is_equal(source[key][key], value):
                conflicts.append(
                    f"in one parameter group, the saved {key} is {source[key][key]!r} for {source[key][PARAMS][0]}, "
                    f"but {value!r} for {group[PARAMS][0]}: put them into separate parameter groups"
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
    """Plan the state of one parameter. Return problems."""
    fqn = saved.name_of(param)
    if fqn is None:
        missing = f"missing: {param.fqn}, which the optimizer trains, is in no parameter group of the dict"
        return [missing] if options.strict else []
    entries = saved.state.get(fqn, {})
    if not entries:
        return []
    plan.state[param.fqn] = dict(entries)
    present, problems = dict(leaves_of(by.state_of(param))), []
    found = [path[-1] for path, _ in leaves_of(dict(entries))] if block_of(by.optimizer) is not None else entries
    lacking = [key for key in template if key not in found]
    if lacking and options.strict:
        problems.append(
            f"state of {param.fqn}: expected {', '.join(template)}, which {type(by.optimizer).__name__} keeps; found "
            f"{', '.join(entries)}"
        )
    for path, value in leaves_of(plan.state[param.fqn]):
        if not isinstance(value, (torch.Tensor, Described)):
            continue
        key = (param.fqn, *path)
        expected, plan.dtypes[key], plan.targets[key] = _as_kept(by, param, template, path, present.get(path), value)
        if expected is not None and tuple(value.shape) != expected:
            problems.append(
                f"{path[0]} of {param.fqn}: expected shape {expected}; found shape {tuple(value.shape)}, {value.dtype}"
            )
    return problems


def _plan_shared(plan: OptimizerPlan, by: TrainedBy, saved: _Saved) -> None:
    """Plan the state that belongs to no parameter."""
    if by.shared_name not in saved.state:
        return
    plan.state[by.shared_name] = dict(saved.state[by.shared_name])
    present = dict(leaves_of(by.shared))
    for path, value in leaves_of(plan.state[by.shared_name]):
        if isinstance(value, (torch.Tensor, Described)):
            key, known = (by.shared_name, *path), present.get(path)
            if isinstance(known, torch.Tensor) and tuple(known.shape) == tuple(value.shape):
                target = Target(known)
            else:
                target = Target(value) if isinstance(value, DTensor) else plain_target(value, by.device)
            plan.targets[key] = target


def fetch_optimizers(plan: OptimizerPlan, sender: Sender | None) -> list[dict[str, Any]]:
    """Return the state dict for each optimizer to load, in its own form and with its own memory. Changes nothing.

    Ranks: all ranks of the model.
    """
    moved, ours = fetch(plan.leaves, plan.targets, sender), set[int]()

    def loaded(path: Path, leaf: Any) -> Any:
        if path not in moved:
            return leaf
        tensor = moved[path].to(plan.dtypes.get(path, moved[path].dtype))
        if is_pending(leaf) and take(leaf):  # memory made for loading: the first optimizer that gets it need not copy
            tensor = tensor.detach()  # drops the mark of pending tensors
            ours.add(id(tensor))
        return tensor

    with torch.no_grad():
        state = map_leaves(loaded, plan.state)
        return [_pack(by, groups, state, ours) for by, groups in zip(plan.trained, plan.groups, strict=True)]


def _pack(
    by: TrainedBy,
    groups: Sequence[tuple[TrainedGroup, dict[str, Any]]],
    state: Mapping[str, Mapping[str, Any]],
    ours: set[int],
) -> dict[str, Any]:
    """Pack one optimizer's state. ``ours``: the ids of tensors that nothing else refers to."""
    packed: dict[Any, Any] = _copies(state.get(by.shared_name, {}), by.shared, ours)
    for number, params in [pair for group, _ in groups for pair in group.by_number.items()]:
        if params[0].flat is not None:
            entries = pack_flat(params, state)
        else:
            entries = _copies(state.get(params[0].fqn, {}), by.packed["state"].get(number) or {}, ours)
        if entries:
            packed[number] = entries
    return {STATE: packed, GROUPS: [{**others, PARAMS: group.numbers} for group, others in groups]}


def _copies(entries: Mapping[str, Any], present: Mapping[str, Any], ours: set[int]) -> dict[str, Any]:
    """Copy ``entries``, except tensors that are ``ours``, or the optimizer's present memory."""
    known = dict(leaves_of(dict(present)))

    def copied(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        if id(leaf) in ours:
            return leaf
        kept: Any = known.get(path)
        return kept if type(leaf) is type(kept) and same_elements(leaf, kept) else leaf.detach().clone()

    result: dict[str, Any] = map_leaves(copied, dict(entries))
    return result


def commit_optimizers(plan: OptimizerPlan, packed: Sequence[dict[str, Any]]) -> None:
    for by, state in zip(plan.trained, packed, strict=True):
        own_method(by.optimizer, "load_state_dict")(state)
        if loads_as_torch(by.optimizer):
            _keep_dtypes(by.optimizer, state)
        if block_of(by.optimizer) is not None:
            _quantize(by.optimizer)


def _quantize(optimizer: Optimizer) -> None:
    """Give state the classes in which a block-wise optimizer keeps it, such as torchao's, which hold codes and scales.
    Checkpoints have their values, so they are rounded once more."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            entries = optimizer.state.get(param, {})
            exact = [key for key, value in entries.items() if isinstance(value, torch.Tensor) and value.dim()]
            made = state_after_step(optimizer, group, local_of(param)) if exact else {}
            for key in exact:
                kept, value, local = made.get(key), entries[key], local_of(entries[key])
                if kept is not None and is_wrapper(kept) and not is_wrapper(local) and kept.shape == local.shape:
                    kept.copy_(local)
                    entries[key] = RaggedDTensor(kept, value._spec) if isinstance(value, RaggedDTensor) else kept


def _keep_dtypes(optimizer: Optimizer, packed: Mapping[str, Any]) -> None:
    """Undo torch's cast of state to the parameter's dtype (master weights, quantized moments)."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in packed[GROUPS] for number in group[PARAMS]]
    for param, number in zip(params, numbers, strict=True):
        for key, value in packed[STATE].get(number, {}).items():
            planned, loaded = dict(leaves_of(value)), dict(leaves_of(optimizer.state[param][key]))
            tensors = [(loaded[path], leaf) for path, leaf in planned.items() if isinstance(leaf, torch.Tensor)]
            if key != "step" and any(ours.dtype != leaf.dtype for ours, leaf in tensors):
                optimizer.state[param][key] = value

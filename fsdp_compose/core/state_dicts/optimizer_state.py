"""The state dicts of optimizers: ``{"state": {FQN: {...}}, "param_groups": [{"params": [FQN, ...], ...}]}``.

Getters only read: they never step an optimizer or look at gradients. In the order of this file: the parameters that an
optimizer trains, the state of its flat views, dicts in other forms, and the entries of a state dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ..._nested import GROUPS, PARAMS, STATE, Path, leaves_of, longest_prefix, map_leaves
from ...errors import MisuseRuntimeError
from ...plugins.parameter_classes import with_local
from ..flat import FlatParamHandle, FlatSegment, handle_of_segment, local_of
from ..group import rebind_optimizer
from ..optimizers import block_of, num_blocks, zeros_per_block
from ..ragged import RaggedDTensor
from .fqns import ModelNames, Place, own_method
from .gathering import Key
from .model_state import StateDictOptions
from .optimizer_init import pending_state, templates_of
from .resharding import Target

# ---- The parameters that optimizers train, by FQN, even if an optimizer holds flat views.


Optimizers = Optimizer | Iterable[Optimizer]

_NOT_SAVED = ("params", "param_names")
_OPTIMIZERS = "optimizers"


def is_shared_name(name: str) -> bool:
    """Whether this may be the name of an optimizer's shared state, used instead of a parameter's FQN."""
    prefix, _, number = name.rpartition(".")
    return prefix == _OPTIMIZERS and number.isdigit()


@dataclass(frozen=True)
class FlatView:
    """A flat view that an optimizer trains.

    Attributes:
        blocks: of an optimizer that was declared block-wise, by name, the state that has one number for each block of
            so many elements.
    """

    handle: FlatParamHandle
    segment: FlatSegment
    blocks: Mapping[str, int]

    def split(self, name: str, state: torch.Tensor, index: int) -> torch.Tensor:
        """Return the state of one parameter, a view of the flat view's state."""
        start, stop, shape = self.handle.local_shards[index]
        first, last = start - self.segment.start, stop - self.segment.start
        sharded: Any = self.handle.sharded_params[index]
        if name in self.blocks:
            placed: Any = zeros_per_block(sharded, self.blocks[name], state.dtype)
            return with_local(placed, local_of(state.detach())[_blocks(self.blocks[name], first, last)])
        local = local_of(state.detach())[first:last].view(shape)
        return RaggedDTensor(local, sharded._spec.with_dtype(state.dtype))

    def join(self, name: str, states: dict[int, torch.Tensor]) -> torch.Tensor:
        """Build the state of the flat view from that of its parameters; zero where a parameter has none."""
        segment, first = self.segment, next(iter(states.values()))
        if name in self.blocks:
            whole = zeros_per_block(segment.parameter, self.blocks[name], first.dtype)
            for index, state in states.items():
                start, stop, _ = self.handle.local_shards[index]
                blocks = _blocks(self.blocks[name], start - segment.start, stop - segment.start)
                local_of(whole)[blocks].copy_(local_of(state))
            return whole
        local = torch.zeros(segment.stop - segment.start, dtype=first.dtype, device=self.handle.shard.device)
        for index, state in states.items():
            start, stop, shape = self.handle.local_shards[index]
            local[start - segment.start : stop - segment.start].view(shape).copy_(local_of(state))
        return segment.placed(local)


def _blocks(block: int, start: int, stop: int) -> slice:
    return slice(num_blocks(start, block), num_blocks(stop, block))


@dataclass(frozen=True)
class Trained:
    """One parameter of the model that an optimizer trains.

    Attributes:
        fqn: its (first) canonical name.
        number: the number of the optimizer's parameter that it is, or is part of, counted over all groups.
        tensor: the model's parameter.
        place: its place in a flat parameter.
        flat: the optimizer's flat view that contains it, if there is one.
    """

    fqn: str
    number: int
    tensor: torch.Tensor
    place: Place | None
    flat: FlatView | None

    @property
    def target(self) -> Target:
        return Target(self.tensor, self.place)


@dataclass(frozen=True)
class TrainedGroup:
    number: int
    numbers: list[int]  # numbers of the optimizer's own parameters
    params: list[Trained]

    @property
    def fqns(self) -> list[str]:
        return [param.fqn for param in self.params]

    @property
    def by_number(self) -> dict[int, list[Trained]]:
        """The parameters in each of the optimizer's own: several in a flat view, else one."""
        found: dict[int, list[Trained]] = {}
        for param in self.params:
            found.setdefault(param.number, []).append(param)
        return found


class TrainedBy:
    """The parameters that one optimizer trains.

    Attributes:
        groups: its parameter groups.
        packed: its own ``state_dict()``, which numbers parameters.
        foreign: descriptions of parameters that it trains but the model does not have.
        numel: number of elements of all its parameters.
        shared: state that it keeps under keys other than its parameters (``state["global"]``).
        shared_name: the name for that state, used instead of an FQN.
    """

    def __init__(self, optimizer: Optimizer, names: ModelNames, keep_foreign: bool, place: int) -> None:
        rebind_optimizer(optimizer)  # it may have been built before fully_shard
        self.optimizer = optimizer
        self.shared_name = f"{_OPTIMIZERS}.{place}"
        self.packed: dict[str, Any] = own_method(optimizer, "state_dict")()
        self.shared = {key: value for key, value in self.packed["state"].items() if not isinstance(key, int)}
        self.numel = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
        self.groups: list[TrainedGroup] = []
        self.foreign: list[str] = []
        for number, (group, packed) in enumerate(zip(optimizer.param_groups, self.packed["param_groups"], strict=True)):
            params: list[Trained] = []
            for i, (param, index) in enumerate(zip(group["params"], packed["params"], strict=True)):
                found = [*_trained_in(optimizer, group, param, index, names)]
                if not found and keep_foreign:
                    found = [Trained(f"param_groups.{number}.params.{i}", index, param, None, None)]
                if not found:
                    named = f" ({group['param_names'][i]!r})" if "param_names" in group else ""
                    self.foreign.append(
                        f"parameter {i} of parameter group {number} of the {type(optimizer).__name__}{named}, of shape "
                        f"{tuple(param.shape)}"
                    )
                params += found
            self.groups.append(TrainedGroup(number, packed["params"], params))

    @property
    def fqns(self) -> list[str]:
        return [fqn for group in self.groups for fqn in group.fqns]

    @property
    def device(self) -> torch.device:
        """The device of its first parameter."""
        return next((param.target.device for group in self.groups for param in group.params), torch.device("cpu"))

    def keep_only(self, prefixes: Sequence[str]) -> None:
        """Drop parameters whose names begin with none of ``prefixes``, parameter groups that are empty then, and state
        that belongs to no parameter."""
        if "" in prefixes:
            return
        self.shared = {}
        kept = []
        for group in self.groups:
            params = [param for param in group.params if param.fqn.startswith(tuple(prefixes))]
            if params:
                kept.append(TrainedGroup(group.number, group.numbers, params))
        self.groups = kept

    def on_meta(self, flat: bool) -> list[str]:
        """Return the names of parameters on the meta device: those in the optimizer's flat views, or the others."""
        params = [param for group in self.groups for param in group.params]
        return [param.fqn for param in params if param.tensor.is_meta and (param.flat is not None) == flat]

    def hyperparameters(self, group: int) -> dict[str, Any]:
        """Return everything in a parameter group except its parameters."""
        return {key: value for key, value in self.packed["param_groups"][group].items() if key not in _NOT_SAVED}

    def state_of(self, param: Trained) -> dict[str, Any]:
        """Return the optimizer's current state of one parameter: live tensors, but copies of flat views' scalars."""
        state = self.packed["state"].get(param.number) or {}
        if param.flat is None or param.place is None:
            return dict(state)
        flat, index = param.flat, param.place[1]

        def of_param(path: Path, value: Any) -> Any:
            is_elementwise = isinstance(value, torch.Tensor) and value.shape == flat.segment.parameter.shape
            if path[-1] in flat.blocks or (is_elementwise and value.dim() == 1):
                return flat.split(path[-1], value, index)
            return value.clone() if isinstance(value, torch.Tensor) else value

        result: dict[str, Any] = map_leaves(of_param, dict(state))
        return result


def _trained_in(
    optimizer: Optimizer, group: Mapping[str, Any], param: torch.Tensor, number: int, names: ModelNames
) -> Iterator[Trained]:
    """Yield the model's parameters in one of the optimizer's parameters."""
    handle = handle_of_segment(param)
    if handle is None:
        for fqn in names.names_of(param)[:1]:
            yield Trained(fqn, number, param, names.place(fqn), None)
        return
    segment = next(item for item in handle.segments if item.parameter is param)
    template = {} if block_of(optimizer) is None else templates_of(optimizer, group)(param)
    blocks = {name: kind.block for name, kind in template.items() if kind.block is not None}
    for index in segment.sharded_params:
        sharded = handle.sharded_params[index]
        for fqn in names.names_of(sharded)[:1]:
            yield Trained(fqn, number, sharded, (handle, index), FlatView(handle, segment, blocks))


def trained_by(optimizers: Optimizers | None, names: ModelNames, keep_foreign: bool) -> list[TrainedBy]:
    """Return the parameters that each optimizer trains. Raises RuntimeError if their state cannot be named by FQN."""
    several = [] if optimizers is None else listed(optimizers)
    trained = [TrainedBy(optimizer, names, keep_foreign, i) for i, optimizer in enumerate(several)]
    if problem := problem_of(trained, names):
        raise MisuseRuntimeError(problem)
    return trained


def listed(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def problem_of(trained: Sequence[TrainedBy], names: ModelNames) -> str:
    """Return why the optimizers' state cannot be named by FQN; empty if it can."""
    foreign = [item for by in trained for item in by.foreign]
    if foreign:
        return (
            f"the model does not have {'; '.join(foreign)}. Register it in the model, or keep it in the state dict "
            "with StateDictOptions(keep_foreign_params=True)"
        )
    seen: set[str] = set()
    for by in trained:
        if by.shared and by.shared_name in names.parameters:
            return f"the model has a parameter named {by.shared_name}, which is the name of the optimizer's other state"
        strange = [key for key in by.shared if not isinstance(key, str)]
        if strange:
            return (
                f"the {type(by.optimizer).__name__} keeps state under {strange[0]!r}, which is neither one of its "
                "parameters nor a string: use a string as the key"
            )
        for group in by.groups:
            for fqn in group.fqns:
                if fqn in seen:
                    return f"{fqn} is in two optimizers: make a separate state dict for each"
                seen.add(fqn)
    return ""


# ---- The state of an optimizer's flat views, built from that of the parameters in them.


def conflict_of(group: TrainedGroup, state: Mapping[str, Mapping[str, Any]], *, is_strict: bool) -> list[str]:
    """Return why flat views cannot hold the planned state of a parameter group's parameters: only some of them have
    state (if not strict, missing state is zero), or they differ in a number that the flat view keeps once."""
    problems = []
    for params in group.by_number.values():
        if params[0].flat is None:
            continue
        having = [param for param in params if param.fqn in state]
        lacking = [param for param in params if param.fqn not in state]
        if having and lacking and is_strict:
            problems.append(
                f"{lacking[0].fqn} has no state and {having[0].fqn} has some, but the optimizer holds both in one flat "
                "view: build it from model.parameters(), or use zeros for missing state with "
                "StateDictOptions(strict=False)"
            )
        if having:
            problems += _difference(having[0], having[1:], state)
    return problems


def _difference(first: Trained, others: Sequence[Trained], state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    but = "but the optimizer holds both in one flat view: build it from model.parameters()"
    for param in others:
        for key, value in state[param.fqn].items():
            other = state[first.fqn].get(key)
            if _is_scalar(value) and _is_scalar(other) and not bool(torch.as_tensor(value == other)):
                return [f"{key} of {first.fqn} is {_number(other)} and that of {param.fqn} is {_number(value)}, {but}"]
    for param in others:
        ours, theirs = dict(state[first.fqn]), dict(state[param.fqn])
        if dict(leaves_of(ours)).keys() != dict(leaves_of(theirs)).keys():
            return [
                f"the state of {first.fqn} has {[*ours]} and that of {param.fqn} has {[*theirs]}, or lists of other "
                f"lengths, {but}"
            ]
    return []


def pack_flat(params: Sequence[Trained], state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Build the state of one flat view from that of its parameters."""
    having = {param.fqn: param for param in params if param.fqn in state}
    if not having:
        return {}
    flat = params[0].flat
    assert flat is not None
    leaves = {fqn: dict(leaves_of(dict(state[fqn]))) for fqn in having}

    def join(path: Path, value: Any) -> Any:
        states = {param.place[1]: leaves[fqn][path] for fqn, param in having.items() if param.place is not None}
        # One number for all elements is 0-dim even if the parameter is not.
        is_number = path == ("step",) or not any(isinstance(state, DTensor) for state in states.values())
        if path[-1] in flat.blocks or (isinstance(value, torch.Tensor) and not is_number):
            return flat.join(path[-1], states)
        return value.clone() if isinstance(value, torch.Tensor) else value

    packed: dict[str, Any] = map_leaves(join, dict(state[next(iter(having))]))
    return packed


def _is_scalar(value: Any) -> bool:
    return (isinstance(value, torch.Tensor) and not value.dim() and not isinstance(value, DTensor)) or isinstance(
        value, (int, float)
    )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# ---- Optimizer dicts in other forms: with one level of keys, or with numbers instead of names.


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten ``{"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn], key: value}]}`` to one level of keys:
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
    """Undo ``flatten``, with one parameter group for each parameter. ``fqns`` are the names that keys may contain; keys
    without any of them are left out.

    Raises:
        ValueError: there are such keys, and ``strict``.
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
        raise ValueError(f"unexpected: these keys name no parameter of the model: {', '.join(strange[:5])}")
    return {STATE: state, GROUPS: [*groups.values()]}


def is_numbered(state: Mapping[str, Any]) -> bool:
    """Whether this is the result of an optimizer's own ``state_dict()``."""
    return any(isinstance(param, int) for group in state.get(GROUPS, ()) for param in group.get(PARAMS, ()))


def name(state: Mapping[str, Any], fqns: Sequence[str], shared_name: str) -> dict[str, Any]:
    """Replace the numbers in an optimizer's own ``state_dict()`` by FQNs, given in the order of its groups.

    Args:
        shared_name: the name for state under keys that are not numbers.

    Raises:
        ValueError: it has another number of parameters, or state for numbers that are in no group.
    """
    numbers = [number for group in state[GROUPS] for number in group[PARAMS]]
    if len(numbers) != len(fqns):
        raise ValueError(f"it has {len(numbers)} parameters, but the optimizer has {len(fqns)}")
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
    """Raise ValueError unless this is an optimizer dict keyed by name."""
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


# ---- The entries of a state dict


def choose_optimizer_entries(
    trained: Sequence[TrainedBy], options: StateDictOptions
) -> tuple[dict[Key, Any], list[dict[str, Any]]]:
    """Choose the state of all optimizers and their parameter groups, with live values. A sharded dict has placeholders
    for state that does not exist yet. Local."""
    values: dict[Key, Any] = {}
    groups: list[dict[str, Any]] = []
    for by in trained:
        for group in by.groups:
            template_of = templates_of(by.optimizer, by.optimizer.param_groups[group.number])
            groups.append({**by.hyperparameters(group.number), PARAMS: group.fqns})
            for param in group.params:
                state: Mapping[str, Any] = by.state_of(param)
                if not state and not options.full_state_dict:
                    state = pending_state(param.tensor, template_of(param.tensor), by.optimizer)
                values.update({(param.fqn, key): value for key, value in state.items()})
        values.update({(by.shared_name, key): value for key, value in by.shared.items()})
    return values, groups

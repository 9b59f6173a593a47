"""The parameters that optimizers train, in terms of the model: by FQN, also where an optimizer holds flat views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ...flat import FlatParamHandle, FlatSegment, handle_of_segment, local_of
from ...group import rebind_optimizer
from ...ragged import RaggedDTensor
from ..moving.layouts import Target
from ..moving.names import ModelNames, Place, own_method
from .nested import map_leaves

Optimizers = Optimizer | Iterable[Optimizer]

_NOT_SAVED = ("params", "param_names")
_OPTIMIZERS = "optimizers"


def is_shared_name(name: str) -> bool:
    """Whether this may stand for an optimizer, in the place of the FQN of a parameter."""
    prefix, _, number = name.rpartition(".")
    return prefix == _OPTIMIZERS and number.isdigit()


@dataclass(frozen=True)
class FlatView:
    """A flat view that an optimizer trains."""

    handle: FlatParamHandle
    segment: FlatSegment

    def part(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """The state of one parameter, a view of that of the flat view."""
        start, stop, shape = self.handle.local_shards[index]
        local = local_of(state.detach())[start - self.segment.start : stop - self.segment.start].view(shape)
        sharded: Any = self.handle.sharded_params[index]
        return RaggedDTensor(local, sharded._spec.with_dtype(state.dtype))

    def is_elementwise(self, state: Any) -> bool:
        """Whether ``state`` holds one number for each element."""
        return isinstance(state, torch.Tensor) and state.dim() == 1 and state.shape == self.segment.parameter.shape

    def join(self, parts: dict[int, torch.Tensor]) -> torch.Tensor:
        """The state of the flat view from that of its parameters; zero where there is none."""
        segment, first = self.segment, next(iter(parts.values()))
        local = torch.zeros(segment.stop - segment.start, dtype=first.dtype, device=self.handle.shard.device)
        for index, part in parts.items():
            start, stop, shape = self.handle.local_shards[index]
            local[start - segment.start : stop - segment.start].view(shape).copy_(local_of(part))
        return segment.placed(local)


@dataclass(frozen=True)
class Trained:
    """One parameter of the model that an optimizer trains.

    Attributes:
        fqn: its (first) canonical name.
        number: of the optimizer's parameter that it is, or is a part of, counted over all groups.
        tensor: the parameter as the model has it.
        place: the flat parameter that it is in.
        flat: the optimizer's flat view that it is a part of, if it is.
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
    numbers: list[int]  # of the optimizer's own parameters
    params: list[Trained]

    @property
    def fqns(self) -> list[str]:
        return [param.fqn for param in self.params]


class TrainedBy:
    """The parameters that one optimizer trains.

    Attributes:
        groups: its parameter groups.
        packed: its own ``state_dict()``, which numbers parameters.
        foreign: what it trains that the model does not have, as text.
        numel: elements of all its parameters.
        shared: state that it keeps under other keys than its parameters (``state["global"]``).
        shared_name: what stands for an FQN in the place of these keys.
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
                found = [*_parts(param, index, names)]
                if not found and keep_foreign:
                    found = [Trained(f"param_groups.{number}.params.{i}", index, param, None, None)]
                if not found:
                    self.foreign.append(_text_of_foreign(type(optimizer).__name__, number, i, group))
                params += found
            self.groups.append(TrainedGroup(number, packed["params"], params))

    @property
    def fqns(self) -> list[str]:
        return [fqn for group in self.groups for fqn in group.fqns]

    @property
    def device(self) -> torch.device:
        """Of its first parameter."""
        return next((param.target.device for group in self.groups for param in group.params), torch.device("cpu"))

    def keep_only(self, prefixes: Sequence[str]) -> None:
        """Forget the parameters whose names begin with none of ``prefixes``, parameter groups that then have none, and
        state that is of no parameter."""
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
        """Names of parameters without memory: those in flat views of the optimizer, or the others."""
        params = [param for group in self.groups for param in group.params]
        return [param.fqn for param in params if param.tensor.is_meta and (param.flat is not None) == flat]

    def hyperparameters(self, group: int) -> dict[str, Any]:
        """Everything in a parameter group but the parameters."""
        return {key: value for key, value in self.packed["param_groups"][group].items() if key not in _NOT_SAVED}

    def state_of(self, param: Trained) -> dict[str, Any]:
        """The optimizer's present state of one parameter; live tensors, but scalars of flat views are copies."""
        state = self.packed["state"].get(param.number) or {}
        if param.flat is None or param.place is None:
            return dict(state)
        flat, index = param.flat, param.place[1]

        def part(_: Any, value: Any) -> Any:
            if flat.is_elementwise(value):
                return flat.part(value, index)
            return value.clone() if isinstance(value, torch.Tensor) else value

        return {key: map_leaves(part, value) for key, value in state.items()}


def _parts(param: torch.Tensor, number: int, names: ModelNames) -> Iterator[Trained]:
    """The parameters of the model that one of the optimizer's is."""
    handle = handle_of_segment(param)
    if handle is None:
        fqns = names.names_of(param)
        if fqns:
            yield Trained(fqns[0], number, param, names.place(fqns[0]), None)
        return
    segment = next(item for item in handle.segments if item.parameter is param)
    for index in segment.sharded_params:
        sharded = handle.sharded_params[index]
        for fqn in names.names_of(sharded)[:1]:
            yield Trained(fqn, number, sharded, (handle, index), FlatView(handle, segment))


def _text_of_foreign(optimizer: str, group: int, index: int, values: dict[str, Any]) -> str:
    named = f" ({values['param_names'][index]!r})" if "param_names" in values else ""
    return (
        f"parameter {index} of parameter group {group} of the {optimizer}{named}, of shape "
        f"{tuple(values['params'][index].shape)}"
    )


def trained_by(optimizers: Optimizers | None, names: ModelNames, keep_foreign: bool) -> list[TrainedBy]:
    """The parameters that each of the optimizers trains."""
    if optimizers is None:
        return []
    return [TrainedBy(optimizer, names, keep_foreign, i) for i, optimizer in enumerate(listed(optimizers))]


def listed(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def problem_of(trained: Sequence[TrainedBy], names: ModelNames) -> str:
    """Why these optimizers cannot be spoken of by FQN; empty if they can."""
    foreign = [item for by in trained for item in by.foreign]
    if foreign:
        return (
            f"the model does not have {'; '.join(foreign)}. Register it in the model, or keep it next to the model's "
            "with StateDictOptions(keep_foreign_params=True)"
        )
    seen: set[str] = set()
    for by in trained:
        if by.shared and by.shared_name in names.parameters:
            return f"the model has a parameter named {by.shared_name}, which stands for other state of optimizers"
        strange = [key for key in by.shared if not isinstance(key, str)]
        if strange:
            return (
                f"the {type(by.optimizer).__name__} keeps state under {strange[0]!r}, which is neither one of its "
                "parameters nor a string: name it"
            )
        for group in by.groups:
            for fqn in group.fqns:
                if fqn in seen:
                    return f"{fqn} is in two optimizers: make a state dict of each by itself"
                seen.add(fqn)
    return ""

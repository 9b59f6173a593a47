"""What one rank holds of a model and its optimizers, as plain tensors: read on any thread, and loaded in place.

It is for ranks of equal layout, such as those of the groups of an elastic job, of which one that comes back takes over
what another one has. Nothing here communicates, and no module is touched: what is read are the flat shards, the
optimizers' state and the buffers. (State dicts for other layouts are in ``state_dict``.)

A state is a dict of plain tensors. Two of them hold text::

    layout              a line for each flat parameter, other parameter, buffer and parameter group
    hyperparameters     JSON: the numbers of parameter groups and of state, and which tensors there are
    flat.0, flat.1 ...  this rank's shards, with their padding
    parameter.NAME      parameters of no group
    buffer.NAME         persistent buffers
    optimizer.0 ...     tensors in parameter groups and state

Reading waits for a step that is under way, and a step that begins waits for the reading, so a state is that of a step's
boundary. Loading plans everything before it changes anything."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from .._arguments import checked
from .._nested import PARAMS, Path, leaves_of, map_leaves, put_leaf
from ..errors import MisuseError, MisuseRuntimeError, MisuseTypeError
from ..extension import (
    FlatParamHandle,
    ModelNames,
    Optimizers,
    kept_for,
    listed,
    local_elements,
    local_of,
    never_traced,
    note_write_of_all_ranks,
    states_to_run,
)

_LAYOUT, _NUMBERS = "layout", "hyperparameters"

# ---- Steps of an optimizer, and readings of its state, exclude each other


class _Steps:
    """Kept for an optimizer, whose hooks call ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # which is in a step; a step that raised counts until the next one has ended

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Steps:
        def make() -> _Steps:
            steps = cls()
            optimizer.register_step_pre_hook(never_traced(lambda *_: steps.begin()))
            optimizer.register_step_post_hook(never_traced(lambda *_: steps.end()))
            return steps

        return kept_for(optimizer, cls, make)

    def begin(self) -> None:
        if self._thread is None:  # else an earlier step has raised, maybe on another thread
            self._lock.acquire()
        self._thread = threading.get_ident()

    def end(self) -> None:
        if self._thread == threading.get_ident():
            self._thread = None
            self._lock.release()

    @contextmanager
    def excluded(self, timeout: float) -> Iterator[None]:
        if self._thread == threading.get_ident():
            yield  # called inside the step itself
            return
        if not self._lock.acquire(timeout=timeout):
            raise MisuseRuntimeError(
                f"checkpoint.shards(): an optimizer's step has been under way on another thread for {timeout:g} s, or "
                "ended in an exception and may have changed a part of the parameters: read after the next step"
            )
        try:
            yield
        finally:
            self._lock.release()


# ---- Leaves: the tensors and numbers of parameter groups and of state


@dataclass
class _Leaves:
    """The leaves of one value (a parameter group, or one parameter's state)."""

    value: Any
    name: str  # of their tensors in a state
    where: str  # in words
    holder: dict[Any, Any]  # what has the value: the parameter group itself; or all state,
    param: torch.Tensor | None = None  # ... by parameter
    numbers: list[tuple[Path, Any]] = field(default_factory=list)  # what is no tensor, or how a tensor lies
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # local ones

    def __post_init__(self) -> None:
        for path, leaf in leaves_of(self.value):
            if not all([type(item) in (str, int) for item in path]):
                raise MisuseTypeError(f"checkpoint.shards(): {self.where} has a key that is no string: {path!r}")
            if isinstance(leaf, torch.Tensor):
                local = self.tensors[self.key(path)] = local_of(leaf)
                if type(local) not in (torch.Tensor, nn.Parameter):
                    raise self._unknown(path, local)
                self.numbers.append((path, {"sharded": isinstance(leaf, DTensor), "host": local.device.type == "cpu"}))
            elif leaf is None or type(leaf) in (bool, int, float, str):
                self.numbers.append((path, leaf))
            else:
                raise self._unknown(path, leaf)

    def key(self, path: Path) -> str:
        return ".".join([self.name, *map(str, path)])

    def _unknown(self, path: Path, leaf: object) -> MisuseTypeError:
        return MisuseTypeError(
            f"checkpoint.shards(): {'.'.join(map(str, path))} of {self.where} is a {type(leaf).__name__}, not a plain "
            "tensor or number: use get_state_dict() and set_state_dict()"
        )


# ---- The shards of a model


class Shards:
    """What this rank holds of a model and its optimizers; ``shards()`` makes it.

    It refers to the model's groups and to the optimizers, but to no module, and may be used as long as they exist. Not
    an object for ``torch.distributed.checkpoint``, which would take the ranks' tensors for copies of each other.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """See ``shards``."""
        names = ModelNames(model)
        self._states = [state for state, _ in states_to_run(model)]
        managed = {id(param) for handle in self._handles() for param in handle.sharded_params}
        self._names = names
        self._others = {fqn: p for fqn, p in names.parameters.items() if id(p) not in managed}
        self._buffers = [(fqn, module._buffers, name) for fqn, module, name in names.slots("_buffers", persistent=True)]
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise MisuseTypeError(
                    f"checkpoint.shards(): {path or 'the model'} ({type(module).__name__}) has an extra state "
                    "(get_extra_state()), which is not a plain tensor: use get_state_dict() and set_state_dict()"
                )
        self._optimizers = [*optimizers]
        self._steps = [_Steps.of(optimizer) for optimizer in self._optimizers]
        self._known: tuple[object, torch.Tensor] = (None, torch.empty(0))

    def state(self, *, device: torch.device | str | None = "cpu", timeout: float = 60) -> dict[str, torch.Tensor]:
        """Copy everything into a dict of plain tensors.

        May be called on any thread, at any time. Parameters, their optimizer state and hyperparameters are those
        between two steps of the given optimizers, which a forward or backward does not change. Other writes (loading,
        edits of your own) must not happen meanwhile, and buffers are as they are at the call.

        Ranks: any; no communication.

        Args:
            device: of the copies; ``None``: that of each tensor.
            timeout: seconds to wait for a step that is under way. A step that begins meanwhile waits for the copies.

        Raises:
            MisuseRuntimeError: a step did not end in time, or ended in an exception; parameters are on the meta
                device, asleep (``offload_model``), or full (``summon_full_params``).
            MisuseTypeError: an optimizer keeps something that is neither a plain tensor nor a number.
        """
        with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
            for steps in self._steps:
                stack.enter_context(steps.excluded(timeout))
            self._refuse_absent()
            flats, leaves = self._flats(), self._leaves()
            found = {_LAYOUT: self._layout(), **self._tensors(flats)}
            for item in leaves:
                found |= item.tensors
            found[_NUMBERS] = _as_tensor(json.dumps({item.name: item.numbers for item in leaves}))
            for kind in {tensor.device for tensor in found.values()}:  # steps may run on a stream of their own
                if kind.type not in ("cpu", "meta"):
                    torch.get_device_module(kind).synchronize(kind)
            return {key: tensor.detach().to(device or tensor.device, copy=True) for key, tensor in found.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy a ``state()`` into the present tensors. State that an optimizer does not have yet is made.

        Nothing changes unless everything fits: the layout (groups, shapes, dtypes, the number of ranks and this rank's
        place among them, the optimizers' classes and parameters) and every tensor.

        Ranks: all ranks that share the shards, between iterations (also between a backward and the step); no
        communication.

        Raises:
            MisuseRuntimeError: the state has another layout, or does not fit; a forward or backward is running; or as
                for ``state()``.
        """
        with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
            for steps in self._steps:
                stack.enter_context(steps.excluded(60))
            self._refuse_absent()
            for group in self._states:
                if group.is_busy:
                    raise MisuseRuntimeError(
                        f"Shards.load(): a forward or backward of the fully_shard group {group.name} is running (or "
                        "was interrupted): load between iterations. Nothing was changed"
                    )
            _refuse_other_layout(self._layout(), state)
            flats, plan = self._flats(), _Plan(state)
            for key, tensor in self._tensors(flats).items():
                plan.copy(key, tensor)
            saved = plan.numbers()
            for item in self._leaves():
                self._plan_leaves(plan, item, saved.pop(item.name, []))
            plan.finish(saved)
            for handle, flat in zip(self._handles(), flats, strict=True):
                if flat is not handle.shard:
                    for param, view in zip(handle.sharded_params, handle.locals_of(flat), strict=True):
                        local_elements(param).copy_(view)
                note_write_of_all_ranks(handle.shard)

    # ---- What there is

    def _handles(self) -> list[FlatParamHandle]:
        return [handle for state in self._states for handle in state._handles]

    def _refuse_absent(self) -> None:
        for state in self._states:
            state.refuse_sleeping()
        for handle in self._handles():
            if handle.summoned is not None:
                raise MisuseRuntimeError(
                    f"checkpoint.shards(): {handle.names[0]} is full inside summon_full_params(): leave the context "
                    "first"
                )
            if handle.shard.is_meta:
                raise MisuseRuntimeError(
                    f"checkpoint.shards(): {handle.names[0]} is on the meta device: give the parameters memory first"
                )

    def _flats(self) -> list[torch.Tensor]:
        """This rank's shard of each flat parameter; where parameters were given other memory (``p.data = ...``), a copy
        of what is there."""
        flats = []
        for handle in self._handles():
            flat = handle.shard
            if handle.was_moved():
                locals_ = [local_elements(param) for param in handle.sharded_params]
                flat = torch.zeros(handle.shard_numel, dtype=locals_[0].dtype, device=locals_[0].device)
                for view, local in zip(handle.locals_of(flat), locals_, strict=True):
                    view.copy_(local)
            flats.append(flat)
        return flats

    def _tensors(self, flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {f"flat.{i}": flat for i, flat in enumerate(flats)}
        found |= {f"parameter.{fqn}": local_of(param) for fqn, param in self._others.items()}
        for fqn, buffers, name in self._buffers:  # read here: modules may replace them
            buffer = buffers.get(name)
            if buffer is not None:
                found[f"buffer.{fqn}"] = local_of(buffer)
        return found

    def _leaves(self) -> list[_Leaves]:
        found = []
        for i, optimizer in enumerate(self._optimizers):
            called, params = type(optimizer).__name__, []
            for j, group in enumerate(optimizer.param_groups):
                params += group[PARAMS]
                others = {key: value for key, value in group.items() if key != PARAMS}
                found.append(_Leaves(others, f"optimizer.{i}.group.{j}", f"parameter group {j} of the {called}", group))
            for j, param in enumerate(params):
                state = optimizer.state.get(param, {})
                where = f"the state of {self._called(param)} in the {called}"
                found.append(_Leaves(state, f"optimizer.{i}.state.{j}", where, optimizer.state, param))
            known = {*map(id, params)}
            strange = [key for key, value in optimizer.state.items() if value and id(key) not in known]
            if strange:
                raise MisuseTypeError(
                    f"checkpoint.shards(): the {called} keeps state under a key that is none of its parameters (a "
                    f"{type(strange[0]).__name__}): use get_state_dict() and set_state_dict()"
                )
        return found

    def _called(self, param: torch.Tensor) -> str:
        names = self._names.names_of(param)
        return names[0] if names else f"a flat view of {local_of(param).numel()} elements here"

    def _layout(self) -> torch.Tensor:
        handles = self._handles()
        known = (*map(id, handles), *[id(group) for opt in self._optimizers for group in opt.param_groups])
        if self._known[0] != known:
            self._known = known, _as_tensor("\n".join(self._lines(handles)))
        return self._known[1]

    def _lines(self, handles: Sequence[FlatParamHandle]) -> Iterator[str]:
        for handle in handles:
            names, mesh = [*map(self._called, handle.sharded_params)], handle.mesh
            shapes = [tuple(param.shape) for param in handle.sharded_params]
            digest = _digest([names, shapes, handle.local_shards, handle.layout.flat_numel])
            yield (
                f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {handle.shard_numel} x "
                f"{local_elements(handle.sharded_params[0]).dtype} on rank {mesh.shard_rank} of "
                f"{mesh.shard_world_size} ({digest})"
            )
        for fqn, param in self._others.items():
            yield f"{fqn} of no group: {tuple(local_of(param).shape)} x {param.dtype}"
        for fqn, buffers, name in self._buffers:
            buffer = buffers.get(name)
            yield f"buffer {fqn}: {None if buffer is None else (tuple(local_of(buffer).shape), buffer.dtype)}"
        for optimizer in self._optimizers:
            for j, group in enumerate(optimizer.param_groups):
                params = [(self._called(param), tuple(param.shape), str(param.dtype)) for param in group[PARAMS]]
                yield f"{type(optimizer).__name__}, group {j}: {len(params)} parameters ({_digest(params)})"

    # ---- Loading an optimizer

    def _plan_leaves(self, plan: _Plan, item: _Leaves, numbers: list[tuple[Path, Any]]) -> None:
        """Plan what becomes of the leaves of a parameter group, or of one parameter's state, which may have none yet,
        or none any more."""
        saved = {tuple(path): value for path, value in numbers}
        present = dict(leaves_of(item.value))
        if item.param is None and saved.keys() != present.keys():
            strange = [*saved.keys() ^ present.keys()][0]
            plan.problems.append(f"{item.where} has {strange[0]} in one of the two only")
            return
        values: dict[Path, Any] = {}
        for path, value in saved.items():
            if not isinstance(value, dict):
                values[path] = value
                continue
            here, key = present.get(path), item.key(path)
            if isinstance(here, torch.Tensor):
                values[path] = here
                plan.copy(key, local_of(here))
            elif item.param is not None:
                values[path] = plan.make(key, item.param, value)
            else:
                plan.problems.append(f"{item.where} has a tensor {path[0]} in one of the two only")

        def put() -> None:
            if saved.keys() == present.keys():
                new = map_leaves(lambda path, _: values[path], item.value)
            else:
                new = dict[Any, Any]()
                for path, value in values.items():
                    put_leaf(new, path, value)
            if item.param is None:
                item.holder.update(new)
            elif new:
                item.holder[item.param] = new
            else:
                item.holder.pop(item.param, None)

        plan.last.append(put)


def _digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


# ---- Loading: planned first


class _Plan:
    """What loading will do."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state, self._used = state, {_LAYOUT, _NUMBERS}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.problems: list[str] = []
        self.last: list[Callable[[], None]] = []  # called at the end

    def copy(self, key: str, target: torch.Tensor) -> None:
        given = self._take(key)
        if given is None:
            return
        if (given.shape, given.dtype) != (target.shape, target.dtype):
            self.problems.append(
                f"{key} is {tuple(given.shape)} x {given.dtype}, and here {tuple(target.shape)} x {target.dtype}"
            )
        self._copies.append((target, given))

    def make(self, key: str, param: torch.Tensor, how: Mapping[str, bool]) -> torch.Tensor | None:
        """Make state that an optimizer does not have yet, and plan to fill it."""
        given = self._take(key)
        if given is None:
            return None
        if how["sharded"]:
            if given.shape != local_of(param).shape:
                self.problems.append(f"{key} is not shaped like its parameter: let the optimizer step before loading")
                return None
            made = torch.zeros_like(param, dtype=given.dtype, requires_grad=False)
        else:
            device = "cpu" if how["host"] else local_of(param).device
            made = torch.empty(given.shape, dtype=given.dtype, device=device)
        self._copies.append((local_of(made), given))
        return made

    def _take(self, key: str) -> torch.Tensor | None:
        given = self._state.get(key)
        self._used.add(key)
        if not isinstance(given, torch.Tensor):
            self.problems.append(f"{key} is missing")
            return None
        return given

    def numbers(self) -> dict[str, list[tuple[Path, Any]]]:
        given = self._state.get(_NUMBERS)
        if given is None:
            raise MisuseRuntimeError(f"Shards.load(): the state has no {_NUMBERS!r}. Nothing was changed")
        found: dict[str, list[tuple[Path, Any]]] = json.loads(_as_text(given))
        return found

    def finish(self, unknown: Mapping[str, object]) -> None:
        self.problems += [f"{name} is unknown here" for name, numbers in unknown.items() if numbers]
        self.problems += [f"{key} is unknown here" for key in self._state if key not in self._used]
        if self.problems:
            more = f"\n  and {len(self.problems) - 5} more" if len(self.problems) > 5 else ""
            listing = "".join([f"\n  {problem}" for problem in self.problems[:5]])
            raise MisuseRuntimeError(f"Shards.load(): the state does not fit; nothing was changed:{listing}{more}")
        for target, given in self._copies:
            target.copy_(given)
        for put in self.last:
            put()


def _refuse_other_layout(ours: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
    given = state.get(_LAYOUT) if isinstance(state, Mapping) else None
    if not isinstance(given, torch.Tensor):
        raise MisuseTypeError(f"Shards.load(): expected what Shards.state() returns, got {type(state).__name__}")
    if torch.equal(given.cpu(), ours):
        return
    lines = zip_longest(_as_text(given).split("\n"), _as_text(ours).split("\n"), fillvalue="")
    theirs, here = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
    raise MisuseRuntimeError(
        f"Shards.load(): the state was taken from another layout, with\n  {theirs or 'nothing more'}\nwhere this rank "
        f"has\n  {here or 'nothing more'}\nNothing was changed. The two must be sharded, trained and numbered alike; "
        "for others there are get_state_dict() and set_state_dict(), or save() and load()"
    )


def _as_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _as_text(tensor: torch.Tensor) -> str:
    return bytes(tensor.cpu().tolist()).decode()


@checked()
def shards(model: nn.Module, optimizers: Optimizers = ()) -> Shards:
    """Collect what this rank holds of a model and of optimizers, to copy it on any thread and to load it in place.

    For threads that must not disturb training (a server of weights for a replica that comes back, a logger), and for
    ranks of the same layout: equal models, groups and optimizers on equally many ranks. State dicts and checkpoints
    are for all others.

    Ranks: any; no communication.

    Args:
        model: a module with ``fully_shard`` groups. Groups made later are not included.
        optimizers: one, or several, of parameters of the model or flat views of them. They exclude steps from now on
            while a state is copied.

    Returns:
        An object with ``state()`` and ``load(state)``.

    Raises:
        MisuseError: there is no ``fully_shard`` group in ``model``.
        MisuseTypeError: an argument is of a wrong type; or a module has an extra state (``get_extra_state``).

    Example::

        held = checkpoint.shards(model, optimizer)
        state = held.state()     # on any thread; torch.save(), a queue, a socket take it
        held.load(state)         # here, or on the rank of the same number of a replica
    """
    if not isinstance(model, nn.Module):
        raise MisuseTypeError(f"checkpoint.shards(): expected a module, got {type(model).__name__}")
    found = listed(optimizers)
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise MisuseTypeError(f"checkpoint.shards(): expected optimizers, got {type(optimizer).__name__}")
    if not states_to_run(model):
        raise MisuseError(
            f"checkpoint.shards(): no module of this {type(model).__name__} is a fully_shard group: call fully_shard() "
            "first"
        )
    return Shards(model, found)

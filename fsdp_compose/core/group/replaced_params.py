"""Parameters that ``fully_shard`` has replaced. References to the old object act on the new parameter.

A module may also keep its weights elsewhere (in tuples, dicts, objects of its own or closures), a program may keep
lists of parameters, and an optimizer may have been built earlier. If the old object stayed as it was, it would collect
gradients that no optimizer sees. So it becomes a proxy without elements: every operation on it is done on the parameter
that the group's modules show at that moment, unsharded inside the group's forward and sharded outside. If the sharded
parameter lacks an operation, the error names the parameter. If a graph was recorded before ``fully_shard``, its
backward raises when it arrives here. Optimizers find the sharded parameters at their first step."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ..._torch import PlainAttributes, is_wrapper, local_tensor, notice_optimizers, set_leaf_hooks
from ...errors import MisuseError, MisuseRuntimeError
from ..flat import ParamAttribute, handle_of, owner_of, refuse_unreduced, waiting
from ..ragged import OWNER_ATTRIBUTE, RaggedDTensor, distribute_ragged, map_instances, shard_inner
from .optimizer_steps import before_every_step
from .state import state_of

# ---- Optimizers that were built before ``fully_shard``: their first step afterwards finds the sharded parameters.
#
# ``fully_shard`` replaces every parameter object once. An optimizer that holds the old objects would silently train
# parameters that no module uses any more. So every replaced parameter remembers its sharded parameter. The first
# forward looks for replaced parameters in the optimizers that exist by then, and torch's global hook before optimizer
# steps in the others. In both cases the sharded parameters replace the old ones in the optimizer, and its state is
# converted.


_grad = attrgetter("grad")
_SEEN = "_fsdp_compose_generation"

_generation = 0  # counts replaced parameters, so that an optimizer is checked again only if there are new ones
_replaced: list[weakref.ref[nn.Parameter]] = []  # replaced since the last look at live optimizers


class _Optimizers:
    """The optimizers of this process that are alive."""

    def __init__(self) -> None:
        # By id: an optimizer of the user's class may compare and hash by what it does not have yet.
        self._references: dict[int, weakref.ref[Optimizer]] = {}
        self._are_more = notice_optimizers(self._notice)  # some may be older than the import of this package

    def _notice(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        self._references[key] = weakref.ref(optimizer, lambda _: self._references.pop(key, None))

    def alive(self) -> list[Optimizer]:
        if self._are_more:
            self._are_more = False
            # Its time grows with the process: 0.4 s for a million objects.
            for item in gc.get_objects():
                if issubclass(type(item), Optimizer):
                    self._notice(item)
        found = [reference() for reference in [*self._references.values()]]
        return [optimizer for optimizer in found if optimizer is not None]


_optimizers = _Optimizers()


def remember_sharded_param(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """From now on optimizers that hold ``original`` get ``sharded`` at their next step."""
    global _generation
    if _generation == 0:
        before_every_step(_before_step)
    _generation += 1
    original.__dict__[ParamAttribute.SHARDED] = sharded
    _replaced.append(weakref.ref(original))


def _before_step(optimizer: Optimizer) -> None:
    if waiting:
        for param_group in optimizer.param_groups:
            refuse_unreduced(f"{type(optimizer).__name__}.step()", param_group["params"])
    seen = (_generation, sum([len(param_group["params"]) for param_group in optimizer.param_groups]))
    if optimizer.__dict__.get(_SEEN) != seen:
        rebind_optimizer(optimizer)
        optimizer.__dict__[_SEEN] = seen
    for param_group in optimizer.param_groups:
        with PlainAttributes():
            has_plain = torch.Tensor in [*map(type, map(_grad, param_group["params"]))]
        # Those that the user has assigned to sharded parameters are taken to be equal on all ranks.
        for param in param_group["params"] if has_plain else ():
            if isinstance(param, RaggedDTensor) and type(param.grad) is torch.Tensor:
                param.grad = distribute_ragged(param.grad, param.device_mesh, param.placements, src_data_rank=None)


def rebind_live_optimizers() -> None:
    """Rebind all live optimizers, at the first forward after ``fully_shard``."""
    # The hook before steps would find them too, but code may look at an optimizer's parameters before its first step
    # (zero_grad(), GradScaler).
    is_any_alive = any(ref() is not None for ref in _replaced)
    _replaced.clear()
    if not is_any_alive:
        return
    for optimizer in _optimizers.alive():
        if "param_groups" in optimizer.__dict__:
            # If its state cannot be converted, it raises when it steps.
            with contextlib.suppress(UnshardableStateError):
                rebind_optimizer(optimizer)


class UnshardableStateError(MisuseError):
    """The state of an optimizer cannot be sharded like its parameter."""


def rebind_optimizer(optimizer: Optimizer) -> None:
    """Replace parameters in an optimizer by the sharded ones that ``fully_shard`` made from them. No communication.

    State with the shape of its parameter is sharded like the parameter; like the parameters, it is assumed to be the
    same on all ranks. Other state with more than one element cannot be converted.

    Raises:
        UnshardableStateError: there is such state; the optimizer is unchanged.
    """
    # A key with a 0-dim value for some parameter that has dimensions is a counter, not state per element.
    counters = {
        key
        for param, state in optimizer.state.items()
        if isinstance(param, torch.Tensor)  # some optimizers also keep state under other keys
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() == 0 and param.dim() > 0
    } | {"step"}
    sharded_params: dict[torch.Tensor, nn.Parameter] = {}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            sharded = param.__dict__.get(ParamAttribute.SHARDED)
            if sharded is not None:
                sharded_params[param] = sharded
                if param in optimizer.state:
                    states[sharded] = {
                        key: value if key in counters else _sharded(optimizer, param, sharded, key, value)
                        for key, value in optimizer.state[param].items()
                    }
    for param_group in optimizer.param_groups:
        # In place, because some optimizers keep a reference to the list.
        param_group["params"][:] = [sharded_params.get(param, param) for param in param_group["params"]]
    for param, sharded in sharded_params.items():
        optimizer.state.pop(param, None)
        if sharded in states:
            optimizer.state[sharded] = states[sharded]


def _sharded(optimizer: Optimizer, param: torch.Tensor, sharded: RaggedDTensor, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, RaggedDTensor) and value._spec.is_sharded_like(sharded._spec):
        return value
    if value.shape == param.shape and isinstance(value, DTensor) and isinstance(param, DTensor):
        if value.device_mesh == param.device_mesh and value.placements == param.placements:
            spec = sharded._spec.with_dtype(value.dtype)
            return RaggedDTensor(shard_inner(local_tensor(value), spec), spec)
    elif value.shape == param.shape:
        return distribute_ragged(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
    if value.dim() == 0:
        return value
    group, fqn = param.__dict__.get(OWNER_ATTRIBUTE, ("?", "?"))
    raise UnshardableStateError(
        f"the {type(optimizer).__name__} was built, and has stepped, before fully_shard(): its state {key!r} of shape "
        f"{tuple(value.shape)} for the parameter {fqn} of the sharded {group}, which has shape {tuple(param.shape)}, "
        "cannot be sharded. Build the optimizer after fully_shard(), or load its state with set_optimizer_state_dict"
    )


# ---- The proxy


_MRO = RaggedDTensor.__mro__
# Everything that RaggedDTensor and our classes above it define themselves.
_OWN = {name: value for item in reversed(_MRO[: _MRO.index(DTensor)]) for name, value in vars(item).items()}


class ParameterProxy(nn.Parameter):
    """The class of replaced parameters; see the head of this file."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_instances(ParameterProxy, _shown, (args, kwargs or {}))
        if not (args and isinstance(args[0], RaggedDTensor)):
            return func(*args, **kwargs)
        # ``func`` is the method or accessor of torch.Tensor; RaggedDTensor may override it.
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        own = _OWN
        if name in own:
            return getattr(args[0], name)(*args[1:], **kwargs)
        if name in ("__get__", "__set__") and getattr(owner, "__name__", None) in own:
            attribute: Any = own[owner.__name__]  # type: ignore[union-attr]
            return attribute.__get__(args[0]) if name == "__get__" else attribute.__set__(*args)
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes that a sharded parameter has but an ordinary one lacks, such as ``full_tensor``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(_shown(self), name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReplacedParameter, standing for {_shown(self)!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A proxy for the copy of the sharded parameter."""
        twin: nn.Parameter | None = memo.get(id(self))
        if twin is None:
            sharded = copy.deepcopy(self.__dict__[ParamAttribute.SHARDED], memo)
            nothing = _nothing(sharded.dtype, sharded.device).expand(sharded.shape)
            twin = nn.Parameter(nothing, sharded.requires_grad)
            twin.__dict__.update({key: value for key, value in self.__dict__.items() if key not in twin.__dict__})
            memo[id(self)] = twin
            make_proxies([(twin, sharded)])
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__dict__[ParamAttribute.SHARDED].__reduce_ex__(protocol)


def make_proxies(replaced: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Make each original parameter a proxy for the sharded one that has replaced it, and free its memory."""
    nothing: torch.Tensor | None = None
    for original, sharded in replaced:
        remember_sharded_param(original, sharded)
        if original.requires_grad:
            refuse = partial(_refuse_backward, *(owner_of(original) or ("?", "?")))
            set_leaf_hooks(original, refuse, lambda _: None)
        if is_wrapper(original) or not issubclass(type(original), nn.Parameter):
            continue
        if not original.is_inference():
            increment_version(original)  # a graph that saved it must raise instead of computing with the emptied memory
            if nothing is None or (nothing.dtype, nothing.device) != (original.dtype, original.device):
                nothing = _nothing(original.dtype, original.device)
            original.data = nothing.expand(original.shape)
        original.__class__ = ParameterProxy


def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An element, which is NaN if the dtype has it."""
    is_number = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    return torch.full((), torch.nan if is_number else 0, dtype=dtype, device=device)


def _refuse_backward(group: str, fqn: str, _grad: torch.Tensor) -> None:
    raise MisuseRuntimeError(
        f"a backward reached the parameter {fqn}, which fully_shard() of {group} has replaced, through a graph "
        "recorded before that call: its gradient would be lost. Run the forward after fully_shard()"
    )


def _shown(replaced: nn.Parameter) -> torch.Tensor:
    """The tensor that the group's modules show instead of a replaced parameter."""
    sharded: torch.Tensor = replaced.__dict__[ParamAttribute.SHARDED]
    place = handle_of(sharded)
    state = state_of(place[0]) if place is not None else None
    if place is None or state is None or not state.swap or not state.swap.num_shows:
        return sharded
    handle, index = place
    unsharded = handle.unsharded.params[index]
    if state.swap.shown_instead:
        return state.swap.shown_instead.get(id(unsharded), sharded)
    return unsharded if handle.unsharded.is_allocated and handle.unsharded.work is None else sharded

"""Optimizers that were built before ``fully_shard``: their first step afterwards finds the sharded parameters.

``fully_shard`` replaces every parameter object once. An optimizer that holds the old ones would go on to train what no
module uses any more, silently. So every replaced parameter remembers its sharded parameter. The first forward looks for
optimizers that hold replaced parameters, and torch's global hook before optimizer steps for those that it missed: the
sharded parameters take the place of the replaced ones, together with the state that the optimizer already has.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from .._torch import PlainAttributes, local_tensor
from ..flat import SHARDED_PARAM_ATTRIBUTE, refuse_unreduced, waiting
from ..ragged import OWNER_ATTRIBUTE, RaggedDTensor, distribute_ragged, shard_inner
from .step_hooks import before_every_step

_grad = attrgetter("grad")
_SEEN = "_fsdp_compose_generation"

_generation = 0  # counts replaced parameters: an optimizer is looked at once after each
_replaced: list[weakref.ref[nn.Parameter]] = []  # since live optimizers were looked for


def remember_sharded_param(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """From now on optimizers that hold ``original`` get ``sharded`` at their next step."""
    global _generation
    if _generation == 0:
        before_every_step(_before_step)
    _generation += 1
    original.__dict__[SHARDED_PARAM_ATTRIBUTE] = sharded
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
        if has_plain:
            _shard_plain_gradients(param_group["params"])


def _shard_plain_gradients(params: Sequence[torch.Tensor]) -> None:
    """Plain gradients that the user has assigned to sharded parameters: taken to be the same on every rank."""
    for param in params:
        grad = param.grad
        if isinstance(param, RaggedDTensor) and type(grad) is torch.Tensor:
            param.grad = distribute_ragged(grad, param.device_mesh, param.placements, src_data_rank=None)


def rebind_live_optimizers() -> None:
    """Rebind every optimizer there is, at the first forward after ``fully_shard``: what looks at an optimizer's
    parameters before its first step (``zero_grad()``, ``GradScaler``) must find the sharded ones. An optimizer whose
    state cannot be converted raises when it steps. No optimizer is looked for (0.1 s) unless a replaced parameter is
    still alive."""
    is_any_alive = any(ref() is not None for ref in _replaced)
    _replaced.clear()
    if not is_any_alive:
        return
    for item in gc.get_objects():
        if issubclass(type(item), Optimizer) and "param_groups" in item.__dict__:
            with contextlib.suppress(UnshardableStateError):
                rebind_optimizer(item)


class UnshardableStateError(ValueError):
    """An optimizer's state cannot be sharded like the parameter it belongs to."""


def rebind_optimizer(optimizer: Optimizer) -> None:
    """Put sharded parameters in the place of those that ``fully_shard`` has replaced. No communication.

    State that has the shape of its parameter is sharded like it: it is taken to be the same on all ranks, as the
    parameters were. Other state with more than one element cannot be converted.

    Raises:
        UnshardableStateError: there is such state; the optimizer is unchanged.
    """
    # Of parameters with elements to shard, what is one number is no state of an element.
    counters = {
        key
        for param, state in optimizer.state.items()
        if isinstance(param, torch.Tensor)  # some keep state under other keys
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() == 0 and param.dim() > 0
    } | {"step"}
    sharded_params: dict[torch.Tensor, nn.Parameter] = {}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            sharded = param.__dict__.get(SHARDED_PARAM_ATTRIBUTE)
            if sharded is not None:
                sharded_params[param] = sharded
                if param in optimizer.state:
                    states[sharded] = _sharded_state(optimizer, param, sharded, counters)
    for param_group in optimizer.param_groups:
        # In place: some optimizers keep the list itself.
        param_group["params"][:] = [sharded_params.get(param, param) for param in param_group["params"]]
    for param, sharded in sharded_params.items():
        optimizer.state.pop(param, None)
        if sharded in states:
            optimizer.state[sharded] = states[sharded]


def _sharded_state(
    optimizer: Optimizer, param: torch.Tensor, sharded: nn.Parameter, counters: set[str]
) -> dict[str, Any]:
    assert isinstance(sharded, RaggedDTensor)
    return {
        key: value if key in counters else _sharded(optimizer, param, sharded, key, value)
        for key, value in optimizer.state[param].items()
    }


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
        f"{tuple(value.shape)} for the parameter {fqn} of the sharded {group}, of shape {tuple(param.shape)}, cannot "
        "be sharded. Build the optimizer after fully_shard(), or load its state with set_optimizer_state_dict"
    )

"""The state that an optimizer will keep for a parameter that it has not stepped yet, found without touching it.

A stand-in of the optimizer, with its class and hyperparameters, takes one step on tiny tensors of the same number of
dimensions; the sizes of what it then keeps say what is shaped like the parameter::

    parameter (2, 3)  ->  exp_avg (2, 3)  like the parameter      row_var (2, 1)  its rows      step ()  a scalar

Only steps that are known to touch nothing else are tried: those of ``torch.optim`` and of optimizers that were declared
element-wise.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ...optim import elementwise_classes

_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)  # of the dimensions of a stand-in, all different


@dataclass(frozen=True)
class StateKind:
    """How one tensor of an optimizer's state follows from its parameter.

    Attributes:
        dims: for each dimension, whether it is the parameter's; the others have size 1. ``None``: a scalar.
        dtype, device: of the state.
    """

    dims: tuple[bool, ...] | None
    dtype: torch.dtype
    device: torch.device

    @property
    def is_like_parameter(self) -> bool:
        return self.dims is not None and all(self.dims)

    def shape(self, param_shape: torch.Size) -> tuple[int, ...]:
        if self.dims is None:
            return ()
        if not param_shape:  # stood in for by a vector
            return ()
        return tuple(size if is_kept else 1 for size, is_kept in zip(param_shape, self.dims, strict=True))


Template = Mapping[str, StateKind]


class Templates:
    """The templates of one optimizer; empty where they cannot be known.

    Args:
        hyperparameters: by number of the parameter group, what is to replace the optimizer's own.
    """

    def __init__(self, optimizer: Optimizer, hyperparameters: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        self._optimizer, self._hyperparameters = optimizer, hyperparameters or {}
        self._known: dict[Any, Template] = {}
        self._is_known = _step_is_known(optimizer)

    def of(self, group: int, param: torch.Tensor) -> Template:
        """The state that the optimizer will keep for a parameter of its parameter group number ``group``."""
        key = (group, max(param.dim(), 1), param.dtype, param.device)
        if key not in self._known:
            values = {**self._optimizer.param_groups[group], **self._hyperparameters.get(group, {})}
            self._known[key] = _try_step(self._optimizer, values, *key[1:]) if self._is_known else {}
        return self._known[key]


def _same_random_numbers(device: torch.device) -> Any:
    """A context after which random numbers go on as if it had not been."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _step_is_known(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        return False  # the one needs a closure, the other sparse gradients
    definer = next(cls for cls in type(optimizer).__mro__ if "step" in cls.__dict__)
    return f"{definer.__module__}.".startswith("torch.optim.") or definer in elementwise_classes


def _try_step(
    optimizer: Optimizer, group: Mapping[str, Any], ndim: int, dtype: torch.dtype, device: torch.device
) -> Template:
    real = torch.device("cpu") if device.type == "meta" else device
    param = torch.zeros(
        _SIZES[:ndim], dtype=dtype, device=real, requires_grad=dtype.is_floating_point or dtype.is_complex
    )
    if not param.requires_grad:
        return {}
    param.grad = torch.zeros_like(param)
    twin = _stand_in(optimizer, group, param)
    try:
        with torch.inference_mode(False), torch.no_grad(), _same_random_numbers(real):
            unwrap(type(optimizer).step)(twin)
    except Exception as error:
        warnings.warn(
            f"what {type(optimizer).__name__} keeps for parameters that it has not stepped yet is not known: a step "
            f"on a stand-in raised {type(error).__name__}: {error}. Their state is missing in sharded state dicts, so "
            "that torch.distributed.checkpoint.load() does not load it: take a step before loading"
        )
        return {}
    kinds = {key: _kind(value, param) for key, value in twin.state[param].items() if isinstance(value, torch.Tensor)}
    return {key: kind for key, kind in kinds.items() if kind is not None}


def _stand_in(optimizer: Optimizer, group: Mapping[str, Any], param: torch.Tensor) -> Optimizer:
    """An optimizer of the same class with the hyperparameters of ``group`` over ``param``, without hooks. It shares
    nothing that a step could write to, but objects of classes of the user's."""
    twin: Optimizer = object.__new__(type(optimizer))
    for key, value in optimizer.__dict__.items():
        if key not in ("state", "param_groups", "step"):  # schedulers put a wrapper there
            twin.__dict__[key] = type(value)() if key.endswith("_hooks") else _copy(value)
    twin.state = defaultdict(dict)
    hyper = {key: _copy(value) for key, value in group.items() if key not in ("params", "param_names")}
    twin.param_groups = [{**hyper, "params": [param]}]
    return twin


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        copied = value.copy()
        copied.update({key: _copy(item) for key, item in value.items()})
        return copied
    if type(value) in (list, tuple, set):
        return type(value)([_copy(item) for item in value])
    return value


def _kind(value: torch.Tensor, param: torch.Tensor) -> StateKind | None:
    if not value.dim():
        return StateKind(None, value.dtype, value.device)
    if value.dim() != param.dim() or any(a not in (b, 1) for a, b in zip(value.shape, param.shape, strict=True)):
        return None
    return StateKind(tuple([a == b for a, b in zip(value.shape, param.shape, strict=True)]), value.dtype, value.device)

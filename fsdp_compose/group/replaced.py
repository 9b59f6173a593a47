"""Parameters that ``fully_shard`` has replaced: what still refers to one means the parameter that took its place.

A module may keep its weights elsewhere too: in tuples, dicts or objects of its own, in closures; and a program keeps
lists of parameters. Trained through such a reference, the replaced object would take gradients that no optimizer sees.
So it becomes a stand-in without elements: every operation on it is done on the parameter that the group's modules show
at that moment, unsharded inside the group's forward and sharded outside. An operation that the sharded parameter does
not have raises, with its name. A graph that was recorded before ``fully_shard`` raises when its backward arrives here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn as nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from .._torch import is_wrapper, set_leaf_hooks
from ..flat import SHARDED_PARAM_ATTRIBUTE, handle_of, owner_of
from ..ragged import RaggedDTensor
from .rebind import remember_sharded_param
from .state import state_of

_MRO = RaggedDTensor.__mro__
# What RaggedDTensor, and the classes of ours that it is made of, have of their own.
_OWN = {name: value for item in reversed(_MRO[: _MRO.index(DTensor)]) for name, value in vars(item).items()}


class ReplacedParameter(nn.Parameter):
    """The class of replaced parameters; see the module's opening paragraph."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _resolve(args), _resolve(kwargs or {})
        if not (args and isinstance(args[0], RaggedDTensor)):
            return func(*args, **kwargs)
        # ``func`` is the method, or accessor, of torch.Tensor: RaggedDTensor may have one of its own.
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        own = _OWN
        if name in own:
            return getattr(args[0], name)(*args[1:], **kwargs)
        if name in ("__get__", "__set__") and getattr(owner, "__name__", None) in own:
            attribute: Any = own[owner.__name__]  # type: ignore[union-attr]
            return attribute.__get__(args[0]) if name == "__get__" else attribute.__set__(*args)
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes that a sharded parameter has and an ordinary one has not, such as ``full_tensor``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(_shown(self), name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReplacedParameter, standing for {_shown(self)!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A stand-in for the copy of the sharded parameter."""
        twin: nn.Parameter | None = memo.get(id(self))
        if twin is None:
            sharded = copy.deepcopy(self.__dict__[SHARDED_PARAM_ATTRIBUTE], memo)
            twin = nn.Parameter(_nothing(sharded.shape, sharded.dtype, sharded.device), sharded.requires_grad)
            twin.__dict__.update({key: value for key, value in self.__dict__.items() if key not in twin.__dict__})
            memo[id(self)] = twin
            stand_in(twin, sharded)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__dict__[SHARDED_PARAM_ATTRIBUTE].__reduce_ex__(protocol)


def stand_in(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Make ``original`` stand for ``sharded``, which has taken its place; its memory is freed."""
    remember_sharded_param(original, sharded)
    if original.requires_grad:
        set_leaf_hooks(original, _refuse_of(original), lambda _: None)
    if is_wrapper(original) or not issubclass(type(original), nn.Parameter):
        return
    if not original.is_inference():
        increment_version(original)  # a graph that saved it must not compute with what is left
        with torch.no_grad():
            original.data = _nothing(original.shape, original.dtype, original.device)
    original.__class__ = ReplacedParameter


def _nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of one element in memory: NaN, where there is one."""
    is_number = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    return torch.full((), torch.nan if is_number else 0, dtype=dtype, device=device).expand(shape)


def _refuse_of(original: nn.Parameter) -> Any:
    group, fqn = owner_of(original) or ("?", "?")

    def refuse(_grad: torch.Tensor) -> None:
        raise RuntimeError(
            f"a backward reached the parameter {fqn} that fully_shard() of {group} has replaced, through a graph that "
            "was recorded before: its gradient would be lost. Run the forward after fully_shard()"
        )

    return refuse


def _resolve(value: Any) -> Any:
    if isinstance(value, ReplacedParameter):
        return _shown(value)
    if type(value) in (list, tuple):
        return type(value)([_resolve(item) for item in value])
    if type(value) is dict:
        return {key: _resolve(item) for key, item in value.items()}
    return value


def _shown(replaced: nn.Parameter) -> torch.Tensor:
    """The tensor that the group's modules show in the place of a replaced parameter."""
    sharded: torch.Tensor = replaced.__dict__[SHARDED_PARAM_ATTRIBUTE]
    place = handle_of(sharded)
    state = state_of(place[0]) if place is not None else None
    if place is None or state is None or not state.swap or not state.swap.num_shows:
        return sharded
    handle, index = place
    unsharded = handle.unsharded.params[index]
    if state.swap.shown_instead:
        return state.swap.shown_instead.get(id(unsharded), sharded)
    return unsharded if handle.unsharded.is_allocated and handle.unsharded.work is None else sharded

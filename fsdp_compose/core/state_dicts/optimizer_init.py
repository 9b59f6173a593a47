"""Find the state that an optimizer will keep for a parameter that it has not stepped yet, without touching either.

A tiny copy of the optimizer, with its class and hyperparameters, takes one step on tiny tensors with the same number
of dimensions. The shapes of its state then tell which state is shaped like the parameter::

    parameter (2, 3)  ->  exp_avg (2, 3)  like the parameter      row_var (2, 1)  its rows      step ()  a scalar

Only steps that are known to touch nothing else are tried: those of ``torch.optim``, of this package's optimizers, and
of optimizers that were declared element-wise.

A sharded state dict holds such state as a pending tensor: a placeholder to load into (second section)."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from ..._torch import dtensor_spec, group_device_types, local_tensor
from ...errors import MisuseRuntimeError
from ..comm import forget_for, kept_for, known_for, maximum_of_all_ranks
from ..optimizers import MatrixOptimizer, block_of, elementwise_classes, num_blocks, zeros_per_block
from ..ragged import RaggedDTensor
from .gathering import on_local

_NUM_QUANTIZED = 8192  # elements
_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)  # sizes of a tiny tensor's dimensions, all different


@dataclass(frozen=True)
class StateKind:
    """How a tensor of an optimizer's state is derived from its parameter.

    Attributes:
        dims: for each dimension, whether it has the parameter's size; the others have size 1. ``None``: a scalar.
        dtype, device: dtype and device of the state.
        block: it has one number for each block of so many elements, and ``dims`` says nothing.
    """

    dims: tuple[bool, ...] | None
    dtype: torch.dtype
    device: torch.device
    block: int | None = None

    @property
    def is_like_parameter(self) -> bool:
        return self.block is None and self.dims is not None and all(self.dims)

    def shape(self, param_shape: torch.Size) -> tuple[int, ...]:
        if self.block is not None:
            return (num_blocks(param_shape.numel(), self.block),)
        if self.dims is None or not param_shape:  # for a 0-dim parameter the tiny tensor was a vector
            return ()
        return tuple(size if is_kept else 1 for size, is_kept in zip(param_shape, self.dims, strict=True))


Template = Mapping[str, StateKind]


def templates_of(optimizer: Optimizer, hyperparameters: Mapping[str, Any]) -> Callable[[torch.Tensor], Template]:
    """Return a function that returns the state that the optimizer will keep for a parameter of a parameter group with
    these hyperparameters; empty if that cannot be found."""
    is_known = _step_is_known(optimizer)

    @cache
    def of_kind(ndim: int, dtype: torch.dtype, device: torch.device) -> Template:
        return _try_step(optimizer, hyperparameters, ndim, dtype, device) if is_known else {}

    return lambda param: of_kind(max(param.dim(), 1), param.dtype, param.device)


PlaceState = Callable[[str, Sequence[Any], torch.Size, torch.dtype], "torch.Tensor | None"]
"""Returns a tensor that is placed as an optimizer keeps a part of its state, from the FQN of a parameter, the path in
its state, and the shape and dtype of the saved value; ``None``: not known."""


def placed_by(
    optimizer: Optimizer, param: torch.Tensor, path: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor | None:
    """Ask an optimizer how state lies that is not shaped like its parameter: an uninitialized tensor that is placed so,
    or ``None`` if it does not say. ``path``: its name, and its path in lists and dicts."""
    place_state = getattr(optimizer, "place_state", None)
    placed = place_state(param, ".".join(map(str, path)), tuple(shape), dtype) if callable(place_state) else None
    if placed is None:
        return None
    if not isinstance(placed, torch.Tensor) or placed.shape != torch.Size(shape):
        found = f"a tensor of shape {tuple(placed.shape)}" if isinstance(placed, torch.Tensor) else repr(placed)
        raise MisuseRuntimeError(
            f"{type(optimizer).__name__}.place_state() returned {found} for "
            f"{'.'.join(map(str, path))}: expected a tensor of shape {tuple(shape)}, or None"
        )
    return placed.to(dtype) if placed.dtype != dtype else placed


def _step_is_known(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):  # which need a closure, sparse gradients
        return False
    if isinstance(optimizer, MatrixOptimizer) and not optimizer.is_simple:
        return False
    definer = next(cls for cls in type(optimizer).__mro__ if "step" in cls.__dict__)
    is_known = f"{definer.__module__}.".startswith(("torch.optim.", "fsdp_compose.optim."))
    return is_known or definer in elementwise_classes or block_of(optimizer) is not None


def _try_step(
    optimizer: Optimizer, group: Mapping[str, Any], ndim: int, dtype: torch.dtype, device: torch.device
) -> Template:
    real = torch.device("cpu") if device.type == "meta" else device
    block = block_of(optimizer)
    shape = _SIZES[:ndim]
    if block is not None:  # such optimizers quantize only tensors of whole blocks that are large enough
        shape = (*shape[:-1], block * (_NUM_QUANTIZED // block + 1))
    param = torch.zeros(shape, dtype=dtype, device=real, requires_grad=dtype.is_floating_point or dtype.is_complex)
    if not param.requires_grad:
        return {}
    state = state_after_step(optimizer, group, param)
    kinds = {key: _kind(value, param, block) for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {key: kind for key, kind in kinds.items() if kind is not None}


def state_after_step(optimizer: Optimizer, group: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    """Return the state that a copy of the optimizer keeps after a step of a plain parameter like ``like``, with zeros
    as elements and gradient; empty, with a warning, if that raises."""
    param = torch.zeros_like(like, requires_grad=True)
    param.grad = torch.zeros_like(param)
    # A step of the optimizer itself with zero gradients, which is torch's way, would change momenta and counts.
    twin, device = _stand_in(optimizer, group, param), param.device
    same_random_numbers = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
    try:
        eager = torch.compiler.set_stance("force_eager")  # some compile their steps, which takes seconds
        with eager, torch.inference_mode(False), torch.no_grad(), same_random_numbers:
            unwrap(type(optimizer).step)(twin)
    except Exception as error:
        warnings.warn(
            f"cannot tell which state {type(optimizer).__name__} keeps for parameters that it has not stepped yet: a "
            f"step of a tiny copy raised {type(error).__name__}: {error}. Sharded state dicts lack their state, so "
            "torch.distributed.checkpoint.load() does not load it: take a step before loading"
        )
        return {}
    return twin.state[param]


def _stand_in(optimizer: Optimizer, group: Mapping[str, Any], param: torch.Tensor) -> Optimizer:
    """Make an optimizer of the same class with the hyperparameters of ``group`` over ``param``, without hooks. Except
    for objects of the user's classes, it shares nothing that a step could write to."""
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


def _kind(value: torch.Tensor, param: torch.Tensor, block: int | None) -> StateKind | None:
    if block is not None and value.shape == (num_blocks(param.numel(), block),):
        return StateKind((), value.dtype, value.device, block)
    if not value.dim():
        return StateKind(None, value.dtype, value.device)
    if value.dim() != param.dim() or any(a not in (b, 1) for a, b in zip(value.shape, param.shape, strict=True)):
        return None
    return StateKind(tuple([a == b for a, b in zip(value.shape, param.shape, strict=True)]), value.dtype, value.device)


# ---- Pending tensors: placeholders in a sharded state dict for state that an optimizer does not have yet.
#
# ``torch.distributed.checkpoint`` loads into the tensors of a given state dict, so the dict needs tensors even if the
# optimizer has not stepped. Saved, also by ``torch.save``, a pending tensor becomes ``None``; loaded from ``None``, it
# is replaced by ``None``; and if nothing is loaded into it, there is no state.


_MARK = "_fsdp_compose_pending"


class _Loaded:
    """Whether something was loaded into a pending tensor on this rank, and whether an optimizer has its memory now.

    Args:
        optimizer: the optimizer that lacks this state; ``None``: one that is about to get it."""

    is_loaded = False
    is_taken = False

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def arrive(self) -> None:
        optimizer = None if self._optimizer is None or self.is_loaded else self._optimizer()
        self.is_loaded = True
        if optimizer is not None:
            _refuse_steps(optimizer)


class _Refusal(list[RemovableHandle]):
    """The hooks of an optimizer that refuses to step."""


def _refuse_steps(optimizer: Optimizer) -> None:
    """Let the next step of ``optimizer`` raise, until its state is set."""
    # The values that were loaded for it are in the state dict only. It would start from zero without a word.
    if known_for(optimizer, _Refusal) is not None:
        return

    def refuse(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        raise MisuseRuntimeError(
            f"state was loaded for this {type(optimizer).__name__}, but never set, so it would train with new state: "
            "after load(), give the loaded dict to set_state_dict() or set_optimizer_state_dict() (checkpoint.resume() "
            "does both). Nothing was changed"
        )

    def release(optimizer: Optimizer) -> None:
        for hook in kept_for(optimizer, _Refusal):
            hook.remove()
        forget_for(optimizer, _Refusal)

    hooks = [optimizer.register_step_pre_hook(refuse), optimizer.register_load_state_dict_post_hook(release)]
    kept_for(optimizer, _Refusal, lambda: _Refusal(hooks))


def pending_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make a placeholder of the shape and layout of ``tensor``. No communication."""
    return _pending(tensor, StateKind((True,) * tensor.dim(), dtype, tensor.device), None)


def pending_state(
    param: torch.Tensor, template: Template, optimizer: Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """Make placeholders for the state of ``param``, in its layout. No communication.

    Args:
        optimizer: refuses to step between loading into the placeholders and ``load_state_dict()``.
    """
    return {key: _pending(param, kind, optimizer) for key, kind in template.items()}


def _pending(param: torch.Tensor, kind: StateKind, optimizer: Optimizer | None) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():  # an optimizer will write to it
        tensor = _allocate(param, kind)
        twin = on_local(tensor, lambda local: local.view(local.shape))
    loaded = _Loaded(optimizer)
    # torch's protocol for tensors that know how they are saved, and pickle's, on this one tensor. The twin shares its
    # memory; the tensor itself would be a reference cycle.
    tensor.__dict__.update(
        {
            _MARK: loaded,
            "__create_write_items__": _write_nothing,
            "__get_tensor_shard__": partial(_find_shard, twin, loaded),
            "__reduce_ex__": partial(_pickle, twin, loaded),
        }
    )
    return tensor


def _allocate(param: torch.Tensor, kind: StateKind) -> torch.Tensor:
    if kind.block is not None:
        # For a stock DTensor, its state would have another shape on each rank.
        assert isinstance(param, RaggedDTensor) or not isinstance(param, DTensor), "parameters are that, or plain"
        return zeros_per_block(param, kind.block, kind.dtype)
    is_sharded = isinstance(param, DTensor) and kind.is_like_parameter
    shape = local_tensor(param).shape if is_sharded else torch.Size(kind.shape(param.shape))
    memory = torch.zeros(shape, dtype=kind.dtype, device=kind.device)
    if not isinstance(param, DTensor) or kind.dims is None:
        return memory
    if isinstance(param, RaggedDTensor) and is_sharded:
        return RaggedDTensor(memory, param._spec.with_dtype(kind.dtype))
    spec, shape = dtensor_spec(param), torch.Size(kind.shape(param.shape))
    placements = spec.placements if is_sharded else [Replicate()] * spec.mesh.ndim
    return DTensor.from_local(
        memory, spec.mesh, placements, run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
    )


def _write_nothing(fqn: str, _tensor: Any) -> list[WriteItem]:
    return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]


def _find_shard(twin: torch.Tensor, loaded: _Loaded, index: MetadataIndex) -> Any:
    if index.offset is None:  # saving: the marker announced by _write_nothing
        return None
    loaded.arrive()
    return find_tensor_shard(twin, index)


def _pickle(twin: torch.Tensor, loaded: _Loaded, protocol: Any) -> Any:
    return twin.__reduce_ex__(protocol) if loaded.is_loaded else (_nothing, ())


def _nothing() -> None:
    """Return ``None``, as which a pending tensor is unpickled."""


_nothing.__module__ = "fsdp_compose.checkpoint.optimizer_init"  # what pickles name, wherever this file lies


def is_pending(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _MARK in value.__dict__


def take(tensor: torch.Tensor) -> bool:
    """Whether an optimizer may use a pending tensor's memory without a copy: true only for the first call."""
    loaded: _Loaded = tensor.__dict__[_MARK]
    is_free, loaded.is_taken = not loaded.is_taken, True
    return is_free


def pending_keys(state: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (FQN, name) of each pending tensor."""
    return [(fqn, key) for fqn, entries in state.items() for key, value in entries.items() if is_pending(value)]


def without_pending(
    state: Mapping[str, Mapping[str, Any]], group: dist.ProcessGroup | None
) -> dict[str, dict[str, Any]]:
    """Remove pending tensors that were not loaded, and parameters that then have no state.

    Ranks: all ranks of ``group``, with the same ``pending_keys``; ``None``: this one alone.
    """
    waiting = [value for entries in state.values() for value in entries.values() if is_pending(value)]
    flags = torch.tensor([tensor.__dict__[_MARK].is_loaded for tensor in waiting], dtype=torch.uint8)
    if group is not None and group.size() > 1 and waiting:
        # A rank without elements of a tensor cannot see whether it was loaded.
        if "cpu" in group_device_types(group):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        else:
            maximum_of_all_ranks(group, flags)
    arrived = {id(tensor) for tensor, flag in zip(waiting, flags.tolist(), strict=True) if flag}
    result: dict[str, dict[str, Any]] = {}
    for fqn, entries in state.items():
        kept = {key: value for key, value in entries.items() if not is_pending(value) or id(value) in arrived}
        if any(value is not None for value in kept.values()):
            # Nothing is ever loaded into tensors without elements.
            empty = {key: value for key, value in entries.items() if is_pending(value) and not value.numel()}
            result[fqn] = {key: value for key, value in entries.items() if key in kept or key in empty}
    return result

"""State that an optimizer does not have yet, in a sharded state dict: a place to load into, which saves as "none yet".

``torch.distributed.checkpoint`` loads into the tensors that it is given, so a state dict must hold some, also for an
optimizer that has not stepped. A pending tensor is such a place. Saved, also by ``torch.save``, it becomes ``None``;
loaded from ``None``, it is replaced by ``None``; what was never loaded into it is no state either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor, Replicate

from ..._torch import dtensor_spec, group_device_types, local_tensor
from ...comm import maximum_of_all_ranks
from ...ragged import RaggedDTensor, known_as
from .templates import StateKind, Template

_MARK = "_fsdp_compose_pending"


class _Loaded:
    """Whether something was loaded into a pending tensor on this rank, and whether an optimizer has its memory now."""

    is_loaded = False
    is_taken = False


def pending_state(param: torch.Tensor, template: Template) -> dict[str, torch.Tensor]:
    """Places for the state of ``param``, in its layout. No communication."""
    return {key: _pending(param, kind) for key, kind in template.items()}


def _pending(param: torch.Tensor, kind: StateKind) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():  # an optimizer will write to it
        tensor, twin = (_allocate(param, kind, memory) for memory in [_memory(param, kind)] * 2)
    loaded = _Loaded()
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


def _memory(param: torch.Tensor, kind: StateKind) -> torch.Tensor:
    device = kind.device
    if not kind.is_like_parameter:
        return torch.zeros(kind.shape(param.shape), dtype=kind.dtype, device=device)
    local = local_tensor(param) if isinstance(param, DTensor) else param
    return torch.zeros(local.shape, dtype=kind.dtype, device=device)


def _allocate(param: torch.Tensor, kind: StateKind, memory: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor) or kind.dims is None:
        return memory.view(memory.shape)
    if isinstance(param, RaggedDTensor) and kind.is_like_parameter:
        return RaggedDTensor(memory, param._spec.with_dtype(kind.dtype))
    spec = dtensor_spec(param)
    placements = spec.placements if kind.is_like_parameter else [Replicate()] * spec.mesh.ndim
    shape = torch.Size(kind.shape(param.shape))
    return DTensor.from_local(
        memory, spec.mesh, placements, run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
    )


def _write_nothing(fqn: str, _tensor: Any) -> list[WriteItem]:
    return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]


def _find_shard(twin: torch.Tensor, loaded: _Loaded, index: MetadataIndex) -> Any:
    if index.offset is None:  # saving: the marker that _write_nothing has announced
        return None
    loaded.is_loaded = True
    return find_tensor_shard(twin, index)


def _pickle(twin: torch.Tensor, loaded: _Loaded, protocol: Any) -> Any:
    return twin.__reduce_ex__(protocol) if loaded.is_loaded else (_nothing, ())


def _nothing() -> None:
    """The value that a pending tensor is unpickled as."""


torch.serialization.add_safe_globals([_nothing])
known_as(_nothing, "fsdp_compose.checkpoint.pending")


def is_pending(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _MARK in value.__dict__


def take(tensor: torch.Tensor) -> bool:
    """Whether the memory of a pending tensor may become an optimizer's: once, after which it is the optimizer's."""
    loaded: _Loaded = tensor.__dict__[_MARK]
    is_free, loaded.is_taken = not loaded.is_taken, True
    return is_free


def pending_keys(state: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(FQN, name) of what is pending."""
    return [(fqn, key) for fqn, entries in state.items() for key, value in entries.items() if is_pending(value)]


def without_pending(
    state: Mapping[str, Mapping[str, Any]], group: dist.ProcessGroup | None
) -> dict[str, dict[str, Any]]:
    """Optimizer state without what is none: only parameters that have some.

    A rank that holds no elements of a tensor has not seen it being loaded; so the ranks ask each other, if there is
    anything pending.

    Ranks: all ranks of ``group``, with the same ``pending_keys``; ``None``: this one alone.
    """
    waiting = [value for entries in state.values() for value in entries.values() if is_pending(value)]
    arrived = _agree_on_loaded(waiting, group)
    result: dict[str, dict[str, Any]] = {}
    for fqn, entries in state.items():
        kept = {key: value for key, value in entries.items() if not is_pending(value) or id(value) in arrived}
        if any(value is not None for value in kept.values()):
            # Nothing is ever loaded into what has no elements.
            empty = {key: value for key, value in entries.items() if is_pending(value) and not value.numel()}
            result[fqn] = {key: value for key, value in entries.items() if key in kept or key in empty}
    return result


def _agree_on_loaded(waiting: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> set[int]:
    flags = torch.tensor([tensor.__dict__[_MARK].is_loaded for tensor in waiting], dtype=torch.uint8)
    if group is not None and group.size() > 1 and len(waiting):
        if "cpu" in group_device_types(group):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        else:
            maximum_of_all_ranks(group, flags)
    return {id(tensor) for tensor, flag in zip(waiting, flags.tolist(), strict=True) if flag}

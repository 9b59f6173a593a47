"""The tensors that a model has to send, under canonical FQNs; and whether they can be read now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._torch import non_persistent_buffers
from ..checkpoint import ModelNames
from ..flat import FlatParamHandle, handle_of, local_of
from ..group import error_of_sleep, is_asleep, state_of
from ..ragged import CompositeDTensor

Place = tuple[FlatParamHandle, int]


@dataclass(frozen=True, eq=False)
class Source:
    """One tensor of a model.

    Attributes:
        names: its canonical FQNs: of a tied parameter all, the first of which stands for it.
        tensor: live; a sharded parameter, or what is not sharded by ``fully_shard``.
        dtype: what it is sent in.
        place: the flat parameter that it is in, and which of its parameters it is.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    dtype: torch.dtype
    place: Place | None

    @property
    def nbytes(self) -> int:
        """Of the whole tensor, as it is sent."""
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def fact(self) -> str:
        """What must be the same on every rank."""
        where = "not sharded by fully_shard()" if self.place is None else f"one of {self.place[0].label}"
        return f"{', '.join(self.names)} of shape {tuple(self.tensor.shape)}, sent in {self.dtype}, {where}"

    @property
    def is_dtensor(self) -> bool:
        return isinstance(self.tensor, DTensor)

    def local(self) -> torch.Tensor:
        """This rank's elements, live."""
        return local_of(self.tensor.detach())


def sources_of(names: ModelNames, dtype: torch.dtype | None, include_buffers: bool) -> list[Source]:
    """Every parameter, and persistent buffer, once; those of one flat parameter one after the other, in its order.

    Args:
        dtype: of parameters of floating point; ``None``: each its own. Others, and buffers, are sent as they are.
    """
    by_tensor: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for fqn, tensor in names.parameters.items():
        by_tensor.setdefault(id(tensor), (tensor, []))[1].append(fqn)
    together: dict[Any, list[Source]] = {}
    for tensor, fqns in by_tensor.values():
        place = handle_of(tensor)
        sent = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        key = id(tensor) if place is None else place[0]
        together.setdefault(key, []).append(Source(tuple(fqns), tensor, sent, place))
    found = [source for group in together.values() for source in sorted(group, key=_index)]
    return [*found, *(_buffers(names) if include_buffers else ())]


def _index(source: Source) -> int:
    return 0 if source.place is None else source.place[1]


def _buffers(names: ModelNames) -> Iterator[Source]:
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for path, module in names.model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in non_persistent_buffers(module):
                fqn = names.canonical(f"{path}.{name}" if path else name)
                found.setdefault(id(buffer), (buffer, []))[1].append(fqn)
    for buffer, fqns in found.values():
        yield Source(tuple(fqns), buffer, buffer.dtype, None)


def handles_of(sources: Sequence[Source]) -> list[FlatParamHandle]:
    return list(dict.fromkeys(source.place[0] for source in sources if source.place is not None))


def why_unreadable(sources: Sequence[Source]) -> str:
    """Why the tensors cannot be read now; empty if they can."""
    for handle in handles_of(sources):
        state = state_of(handle)
        if state is None:
            return f"the sharded module of {handle.names[0]} is gone"
        if is_asleep(state):
            return error_of_sleep(state.name)
        root = state.root
        is_busy = root is not None and (root.forward.depth or root.backward is not None or root.failed_backward)
        if is_busy or state.progress.entries or state.backward.active_uses:
            return (
                f"a forward or backward of the fully_shard group {state.name} is running (or was interrupted: run a "
                "forward first, which recovers from it)"
            )
        if handle.summoned is not None:
            return (
                f"{handle.names[0]} is a full parameter now, inside summon_full_params(), and may have been edited: "
                "leave that context first"
            )
    for source in sources:
        if isinstance(source.tensor, CompositeDTensor):
            return (
                f"{source.names[0]} is a {source.tensor.composite.name}, kept as several tensors, which are not sent "
                "as one: send .full_tensor() of it by other means, and the trainable parameters by "
                "get_model_state_dict()"
            )
    on_meta = [source.names[0] for source in sources if source.local().is_meta]
    if on_meta:
        return f"{on_meta[0]} is on the meta device: call model.to_empty(device=...) and initialise it first"
    return ""


def versions_of(sources: Sequence[Source]) -> list[tuple[int, int]]:
    """Changes when this rank's elements are written to, or lie in other memory. Local."""
    locals_ = [source.local() for source in sources]
    versions = [(local.data_ptr(), 0 if local.is_inference() else local._version) for local in locals_]
    # A write to a flat view that is a DTensor does not count at the shard.
    return versions + [(0, handle.segment_version()) for handle in handles_of(sources)]


def names_of(model: nn.Module) -> ModelNames:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, got {type(model).__name__}")
    return ModelNames(model)

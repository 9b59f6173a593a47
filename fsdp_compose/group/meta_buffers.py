"""Non-persistent buffers of modules that are sharded on the meta device: what was never written is not computed with.

``to_empty()`` gives them memory, and no state dict holds them, so nothing would ever fill them in: rotary frequencies
are whatever was in that memory, on every rank something else. So ``fully_shard`` puts a ``MetaBuffer`` in the place of
each, which turns into a tensor of poison (NaN, the least integer, or the largest where there is no sign) where an empty
one is asked for; and the first forward refuses poison. A buffer that was written to, or replaced, is the user's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from .._torch import PlainAttributes, non_persistent_buffers

_POISONED = "_fsdp_compose_poison"


class MetaBuffer(torch.Tensor):
    """A tensor on the meta device that remembers that it has no elements."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with PlainAttributes():
            result = function(*args, **(kwargs or {}))
        if function is not torch.empty_like or result.is_meta or result.dtype == torch.bool:
            return result
        result.fill_(_poison(result.dtype))
        setattr(result, _POISONED, 0 if result.is_inference() else result._version)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with PlainAttributes():
            memo[id(self)] = twin = torch.empty_like(self).as_subclass(MetaBuffer)
        return twin


def watch_meta_buffers(modules: Iterable[nn.Module]) -> None:
    """Notice when the non-persistent buffers of these modules that are on the meta device get memory."""
    for module in modules:
        for name, buffer in _non_persistent(module):
            if type(buffer) is torch.Tensor and buffer.is_meta:
                setattr(module, name, buffer.as_subclass(MetaBuffer))


def refuse_unwritten_buffers(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ValueError if a buffer was given memory by ``to_empty()`` and never written to."""
    found = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in modules
        for name, buffer in _non_persistent(module)
        if _is_poison(buffer)
    ]
    if found:
        raise ValueError(
            f"{len(found)} non-persistent buffer(s) were on the meta device and were not written since to_empty(): "
            f"{', '.join(found[:5])}{' ...' if len(found) > 5 else ''}. No state dict holds them: compute them again "
            "(the module's own initialisation), or assign them, before the first forward"
        )


def _non_persistent(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    names = non_persistent_buffers(module)
    return [item for item in module.named_buffers(recurse=False, remove_duplicate=False) if item[0] in names]


def _is_poison(buffer: torch.Tensor) -> bool:
    version = getattr(buffer, _POISONED, None)
    if version is None or not buffer.numel():
        return False
    if not buffer.is_inference() and buffer._version != version:
        return False  # written to since; perhaps with that very value
    poison = _poison(buffer.dtype)
    return bool((buffer.isnan() if poison != poison else buffer == poison).all())


def _poison(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max

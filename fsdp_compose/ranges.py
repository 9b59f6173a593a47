"""Ranges for profilers around what a group communicates: ``fsdp_compose::all_gather layers.0``, ``wait all_gather``,
``reduce_scatter``, ``wait reduce_scatter``, ``publish``. Without a profiler each costs one look at a flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.profiler import record_function

from ._torch import is_profiling
from .flat_param import FlatParamHandle

_F = TypeVar("_F", bound=Callable[..., Any])


def in_range(what: str) -> Callable[[_F], _F]:
    """A decorator for methods whose first argument is a handle."""

    def decorate(method: _F) -> _F:
        def call(self: Any, handle: FlatParamHandle, *args: Any) -> Any:
            if not is_profiling():
                return method(self, handle, *args)
            with record_function(f"fsdp_compose::{what} {_name(handle)}"):
                return method(self, handle, *args)

        return call  # type: ignore[return-value]

    return decorate


def _name(handle: FlatParamHandle) -> str:
    state = handle.group() if handle.group is not None else None
    return handle.prefix.rstrip(".") if state is None else state.name

"""What groups do, as ranges: for a profiler, and for whoever else listens.

Around calls: ``all_gather layers.0``, ``wait all_gather``, ``reshard``, ``reduce_scatter``, ``wait reduce_scatter``,
``all_reduce``, ``wait all_reduce``, ``publish``, ``all_reduce over tensor-parallel ranks of``. From hook to hook (see
``group.computing``): ``forward``, ``recomputation``, ``backward``. In profiles their names begin with
``fsdp_compose::``. Whether a profiler runs is asked once for each iteration, and once for each backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.profiler import record_function

from .._torch import is_profiling
from .listening import End, Group, Handle, begin, listen, stop_listening, watched

_F = TypeVar("_F", bound=Callable[..., Any])


def in_range(what: str, when: Callable[[Any], bool] | None = None) -> Callable[[_F], _F]:
    """A decorator for methods whose first argument is a handle. ``when``: of a handle, whether it does anything."""

    def version(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(communicator: object, handle: Handle, *args: Any) -> Any:
            if when is not None and not when(handle):
                return plain(communicator, handle, *args)
            group = handle.owner() if handle.owner is not None else None
            end = begin(what, group, str(handle.label) if group is None else group.name)
            try:
                return plain(communicator, handle, *args)
            finally:
                end()

        return call

    return watched(version)


class _Profiler:
    """The profiler of torch, as a listener."""

    def begin(self, what: str, group: Group | None, name: str) -> End:
        item = record_function(f"fsdp_compose::{what} {name}")
        item.__enter__()
        return partial(item.__exit__, None, None, None)


_profiler = _Profiler()
_is_listening = False


def follow_profiler() -> None:
    """From now on there are ranges if a profiler runs; asked at the start of iterations and backwards."""
    global _is_listening
    if is_profiling() is not _is_listening:
        _is_listening = not _is_listening
        (listen if _is_listening else stop_listening)(_profiler)

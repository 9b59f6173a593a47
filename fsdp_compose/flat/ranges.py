"""Ranges for profilers around what a group communicates: ``fsdp_compose::all_gather layers.0``, ``wait all_gather``,
``reduce_scatter``, ``wait reduce_scatter``, ``all_reduce``, ``wait all_reduce``, ``publish``. Without a profiler they
cost one look at a flag per iteration, which chooses the methods that all models have from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.profiler import record_function

from .._torch import is_profiling


class Group(Protocol):
    """The group of a handle."""

    @property
    def name(self) -> str: ...


class Handle(Protocol):
    """The part of a ``FlatParamHandle`` that names of ranges need."""

    @property
    def owner(self) -> Callable[[], Group | None] | None: ...  # a weak reference

    @property
    def prefix(self) -> str: ...


_F = TypeVar("_F", bound=Callable[..., Any])


class _Ranged:
    """Stands for a method until its class is made, which then has the method itself."""

    def __init__(self, what: str, method: Callable[..., Any]) -> None:
        self._what, self._plain = what, method

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name
        setattr(owner, name, self._plain)
        _methods.append(self)

    def choose(self, has_range: bool) -> None:
        setattr(self._owner, self._name, self._with_range if has_range else self._plain)

    @property
    def _with_range(self) -> Callable[..., Any]:
        what, plain = self._what, self._plain

        def call(communicator: object, handle: Handle, *args: Any) -> Any:
            with record_function(f"fsdp_compose::{what} {_name(handle)}"):
                return plain(communicator, handle, *args)

        return call


_methods: list[_Ranged] = []
_have_ranges = False


def in_range(what: str) -> Callable[[_F], _F]:
    """A decorator for methods whose first argument is a handle."""

    def decorate(method: _F) -> _F:
        return _Ranged(what, method)  # type: ignore[return-value]

    return decorate


def follow_profiler() -> None:
    """From now on there are ranges if a profiler runs; asked at the start of iterations and backwards."""
    global _have_ranges
    if is_profiling() is not _have_ranges:
        _have_ranges = not _have_ranges
        for method in _methods:
            method.choose(_have_ranges)


def _name(handle: Handle) -> str:
    state = handle.owner() if handle.owner is not None else None
    return handle.prefix.rstrip(".") if state is None else state.name

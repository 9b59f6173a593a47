"""Listeners for what groups do: methods that report events, and the spans that a profiler shows.

While nobody listens, a watched method is just itself. When the first listener arrives, its class gets another version
of it, and when the last one leaves, the original comes back. So watching costs nothing while nobody listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch.profiler import record_function

from ..._torch import is_profiling

if TYPE_CHECKING:
    from .flat_param import FlatParamHandle


class Group(Protocol):
    """What listeners see of a group."""

    @property
    def name(self) -> str: ...


End = Callable[[], None]


class Listener(Protocol):
    """Receives events of groups."""

    def begin(self, what: str, group: Group | None, name: str) -> End:
        """A group begins to do something; it ends when the same thread calls the returned function. ``group``: the
        group, or ``None`` before there is one; ``name``: what it does."""


_F = TypeVar("_F", bound=Callable[..., Any])
_listeners: list[Listener] = []
_methods: list[_Watched] = []


def listen(listener: Listener) -> None:
    """Report to ``listener`` everything that begins from now on, in all models of the process."""
    _listeners.append(listener)
    if len(_listeners) == 1:
        _choose()


def stop_listening(listener: Listener) -> None:
    """Report nothing new to this listener. Ends of what it has seen begin may still arrive."""
    _listeners.remove(listener)
    if not _listeners:
        _choose()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside this context, a listener hears of everything that begins, in all models of the process."""
    listen(listener)
    try:
        yield
    finally:
        stop_listening(listener)


def begin(what: str, group: Group | None, name: str) -> End:
    """Report to all listeners that something begins; call the result at its end."""
    ends = [listener.begin(what, group, name) for listener in _listeners]

    def end() -> None:
        for item in reversed(ends):
            item()

    return end


def watched(version: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[_F], _F]:
    """A decorator for methods. ``version`` makes, from the method, the one that replaces it while anyone listens."""

    def decorate(method: _F) -> _F:
        return _Watched(method, version)  # type: ignore[return-value]

    return decorate


class _Watched:
    """Stands for a method until its class is made; the class then gets the method itself."""

    def __init__(self, method: Callable[..., Any], version: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._plain, self._watched = method, version(method)

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name
        self.choose(bool(_listeners))  # a file may be imported while somebody listens
        _methods.append(self)

    def choose(self, is_watched: bool) -> None:
        setattr(self._owner, self._name, self._watched if is_watched else self._plain)


def _choose() -> None:
    for method in _methods:
        method.choose(bool(_listeners))


# ---- What groups do, as spans: for a profiler and other listeners
#
# Around calls: ``all_gather layers.0``, ``wait all_gather``, ``reshard``, ``reduce_scatter``, ``wait reduce_scatter``,
# ``all_reduce``, ``wait all_reduce``, ``publish``, ``all_reduce over tensor-parallel ranks of``. From hook to hook (see
# ``group/hook_decorators``): ``forward``, ``recomputation``, ``backward``. In profiles, their names begin with
# ``fsdp_compose::``. Whether a profiler runs is checked once per iteration, and once per backward.


def in_range(what: str | Callable[..., str], when: Callable[[Any], bool] | None = None) -> Callable[[_F], _F]:
    """A decorator for methods whose first argument is a handle. ``what``: names the span; if it is a function, it takes
    the other arguments. ``when``: takes the handle; whether the call does anything."""

    def version(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(communicator: object, handle: FlatParamHandle, *args: Any) -> Any:
            if when is not None and not when(handle):
                return plain(communicator, handle, *args)
            group = handle.owner() if handle.owner is not None else None
            name = what if isinstance(what, str) else what(*args)
            end = begin(name, group, str(handle.label) if group is None else group.name)
            try:
                return plain(communicator, handle, *args)
            finally:
                end()

        return call

    return watched(version)


class _Profiler:
    """torch's profiler, as a listener."""

    is_listening = False

    def begin(self, what: str, group: Group | None, name: str) -> End:
        item = record_function(f"fsdp_compose::{what} {name}")
        item.__enter__()
        return partial(item.__exit__, None, None, None)


_profiler = _Profiler()


def follow_profiler() -> None:
    """Report spans from now on if a profiler runs; checked at the start of iterations and backwards."""
    if is_profiling() is not _profiler.is_listening:
        _profiler.is_listening = not _profiler.is_listening
        (listen if _profiler.is_listening else stop_listening)(_profiler)

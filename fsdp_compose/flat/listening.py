"""Those who listen to what groups do, and methods that tell them.

A method that may be watched is, without listeners, itself: it is exchanged in its class for another version when the
first listener comes, and put back when the last one has gone. So to be watched costs nothing while none listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Group(Protocol):
    """What a group is to listeners."""

    @property
    def name(self) -> str: ...


class Handle(Protocol):
    """What a ``FlatParamHandle`` is to listeners."""

    @property
    def owner(self) -> Callable[[], Group | None] | None: ...  # a weak reference

    @property
    def label(self) -> object: ...


End = Callable[[], None]


class Listener(Protocol):
    """Hears what groups do."""

    def begin(self, what: str, group: Group | None, name: str) -> End:
        """A group does something from now on, until what is returned is called, by the same thread. ``group``: unless
        there is none yet; ``name``: its name."""


_F = TypeVar("_F", bound=Callable[..., Any])
_listeners: list[Listener] = []
_methods: list[_Watched] = []


def listen(listener: Listener) -> None:
    """``listener`` hears all that begins from now on, in all models of the process."""
    _listeners.append(listener)
    if len(_listeners) == 1:
        _choose()


def stop_listening(listener: Listener) -> None:
    """It hears no more beginnings. Ends of what it has heard the beginnings of may still come."""
    _listeners.remove(listener)
    if not _listeners:
        _choose()


def begin(what: str, group: Group | None, name: str) -> End:
    """Tell all listeners; call what is returned at the end."""
    ends = [listener.begin(what, group, name) for listener in _listeners]

    def end() -> None:
        for item in reversed(ends):
            item()

    return end


def watched(version: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[_F], _F]:
    """A decorator for methods. ``version`` makes, of the method, the one that stands in its place while any listens."""

    def decorate(method: _F) -> _F:
        return _Watched(method, version)  # type: ignore[return-value]

    return decorate


class _Watched:
    """Stands for a method until its class is made, which then has the method itself."""

    def __init__(self, method: Callable[..., Any], version: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._plain, self._watched = method, version(method)

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name
        setattr(owner, name, self._plain)
        _methods.append(self)

    def choose(self, is_watched: bool) -> None:
        setattr(self._owner, self._name, self._watched if is_watched else self._plain)


def _choose() -> None:
    for method in _methods:
        method.choose(bool(_listeners))

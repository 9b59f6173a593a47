"""What this package keeps for a process group, or for another object that it does not own: all of it in one place, and
no longer than the object exists."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Record = TypeVar("_Record")
# Weak, and by identity: a process group has connections and threads, and torch gives its name to a later one again. By
# class of the record: each file declares what it keeps, and nobody else's record is in its way.
_contexts: weakref.WeakKeyDictionary[object, dict[type, Any]] = weakref.WeakKeyDictionary()


def kept_for(group: object, kind: type[_Record], make: Callable[[], _Record] | None = None) -> _Record:
    """Return the record of class ``kind`` that is kept for ``group`` (a process group, ranks that are about to become
    one, an optimizer, or a ``Root``). The first call makes it, with ``make`` if that is given. A record must not refer
    to its ``group`` strongly."""
    records = _contexts.setdefault(group, {})
    record: _Record | None = records.get(kind)
    if record is None:
        record = records[kind] = kind() if make is None else make()
    return record


def known_for(group: object, kind: type[_Record]) -> _Record | None:
    """Return the record of class ``kind`` that is kept for ``group``, if there is one."""
    return _contexts.get(group, {}).get(kind)


def forget_for(group: object, kind: type) -> None:
    _contexts.get(group, {}).pop(kind, None)


def all_kept(kind: type[_Record]) -> list[tuple[Any, _Record]]:
    """Every process group for which a record of class ``kind`` is kept, with the record."""
    found = []
    for reference in _contexts.keyrefs():  # a list, made at once: another thread may add one
        group = reference()  # gone, if another thread has dropped it meanwhile
        record = None if group is None else known_for(group, kind)
        if record is not None:
            found.append((group, record))
    return found

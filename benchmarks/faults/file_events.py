"""Every file event of a stretch of a program, one by one: something can be done just before each of them.

Opening, renaming, linking, removing, making and removing folders are heard of through Python's audit hooks, also when
torch does it; writes, synchronizations through functions put in their place. An audit hook stays permanently: for
processes that end soon.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_AUDITED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_current: FileEvents | None = None
_is_installed = False


class FileEvents:
    """The events below a folder, while ``counted`` is entered.

    Args:
        on_event: called with the event's number, from 1 on, and its name, before it happens.
    """

    def __init__(self, folder: Path, on_event: Callable[[int, str], None] | None = None) -> None:
        self._folder = os.path.realpath(folder)
        self._on_event = on_event
        self.names: list[str] = []

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        global _current
        _install()
        _current = self
        try:
            yield
        finally:
            _current = None

    def happens(self, name: str, path: Any) -> None:
        if not self._is_below(path):
            return
        self.names.append(f"{name} {os.path.basename(os.fsdecode(path))}")
        if self._on_event is not None:
            self._on_event(len(self.names), self.names[-1])

    def _is_below(self, path: Any) -> bool:
        """A path relative to an open folder counts: nothing else uses those here."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        text = os.fsdecode(path)
        return not os.path.isabs(text) or text.startswith(self._folder)


class _CountedFile(io.FileIO):
    def write(self, data: Any) -> Any:
        if _current is not None:
            _current.happens("write", self.name)
        return super().write(data)


def _install() -> None:
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    sys.addaudithook(_audit)
    builtins.open = io.open = _opening(io.open)  # type: ignore[assignment]
    os.fsync = _on_descriptor("fsync", os.fsync)
    os.write = _on_descriptor("write", os.write)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _current is not None and event in _AUDITED:
        _current.happens(event.removeprefix("os."), arguments[0])


def _opening(real: Callable[..., Any]) -> Callable[..., Any]:
    def opened(file: Any, mode: str = "r", buffering: int = -1, *encoding: Any, **options: Any) -> Any:
        is_written = not set("wax").isdisjoint(mode) and "+" not in mode
        if _current is None or not is_written or buffering != -1 or not isinstance(file, (str, os.PathLike)):
            return real(file, mode, buffering, *encoding, **options)
        stream = io.BufferedWriter(_CountedFile(os.fspath(file), mode.strip("bt")))
        return stream if "b" in mode else io.TextIOWrapper(stream, *encoding, **options)

    return opened


def _on_descriptor(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: Any, *arguments: Any) -> Any:
        if _current is not None:
            link = f"/proc/self/fd/{descriptor}"
            _current.happens(name, os.readlink(link) if os.path.lexists(link) else str(descriptor))
        return real(descriptor, *arguments)

    return call

"""Which checkpoint in a folder is the newest, and which may go.

A manifest says which save it was. Of saves beside each other the number decides; otherwise names (``step-8`` and
``step-10``) and times must agree, and checkpoints that torch or an earlier version wrote have names only."""

from __future__ import annotations

import contextlib
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from .._arguments import checked
from ..errors import MisuseError, text_of
from ..extension import Peers
from .folders import (
    MANIFEST,
    METADATA,
    UNFINISHED,
    Saved,
    bury,
    is_lock_held,
    local_folder,
    partial_of,
    read_lists,
    refuse_damage,
    sweep,
    understood,
)

_PAUSE = 0.1  # seconds between looks


def locks_of_saves(folder: Path) -> Iterator[Path]:
    """Yield the locks that the first rank's writers, or their trainers, hold while they save into ``folder``."""
    return folder.glob("*.partial/meet-*/0.lock")


@checked()
def latest(
    folder: str | Path, *, process_group: dist.ProcessGroup | None = None, wait_for_saves: float = 300.0
) -> Path | None:
    """Return the newest complete checkpoint in ``folder``: the one that was completed last; ``None`` if there is none.

    The manifest says when that was, whatever became of the folder's name and its files' times. Without it (torch wrote
    the checkpoint, or an earlier version) the numbers in names decide. A warning says what was passed over: checkpoints
    that ``load`` could not read or whose files have other sizes (``load`` also compares checksums), and those of which
    nothing proves that they are older. What an interrupted save has left is no checkpoint.

    Ranks: all ranks of ``process_group``, on a shared file system: the first rank looks, so that all get the same.

    Args:
        folder: the parent of the checkpoints' folders, such as ``checkpoints`` for ``checkpoints/step-1000``. It need
            not exist.
        process_group: the ranks; default: all.
        wait_for_saves: seconds to wait for an ``async_save`` into the folder whose trainer may have died, and which its
            writer still completes: else a job that was restarted would begin one checkpoint too early.
    """
    peers, folder = Peers(process_group or dist.group.WORLD, "latest()"), local_folder(folder)

    def look() -> str:
        if not peers.is_first:
            return ""
        ends = time.monotonic() + wait_for_saves
        # While the first rank's writer works on a save, or its trainer is about to ask it to.
        while time.monotonic() < ends and any(map(is_lock_held, locks_of_saves(folder))):
            time.sleep(_PAUSE)
        return _newest(_found(folder, "latest()"))

    found: str = peers.ask("the newest checkpoint", peers.attempt(look), lambda brought: brought[0])
    return Path(found) if found else None


@checked()
def keep(folder: str | Path, last: int = 3) -> list[Path]:
    """Delete all complete checkpoints in ``folder`` but the ``last`` newest. Return what was deleted.

    Only what ``latest`` would count is deleted: a save that is under way, or was interrupted, is no checkpoint, and
    takes nobody's place. So call it at any time, for example when the future of ``async_save`` is done; until the newer
    checkpoint is complete, older ones stay. So do links, copies of those that stay, and checkpoints of which nothing
    proves that they are older: a warning names them. What killed saves and deletions have left is deleted too.

    Ranks: one rank is enough.

    Raises:
        ValueError: ``last`` is below 1.
    """
    if last < 1:
        raise MisuseError(f"keep(): last is {last}, but at least one checkpoint must stay")
    old = _too_old(_found(local_folder(folder), "keep()"), last)
    for path in old:
        partial = partial_of(path)  # where an interrupted deletion leaves no checkpoint that lacks files
        partial.mkdir(exist_ok=True)
        bury(path, partial)
        with contextlib.suppress(OSError):  # a save has begun there
            partial.rmdir()
    sweep(local_folder(folder))
    return old


class _Checkpoint(NamedTuple):
    """A complete checkpoint, and the name that its folder had: text and numbers in turn, so that 9 is below 10."""

    path: Path
    saved: Saved | None
    name: tuple[Any, ...]

    @property
    def save(self) -> Any:
        """What identifies the save: a checkpoint, its copies and links to it have equal ones."""
        return self.saved or self.name

    def is_older(self, other: _Checkpoint) -> bool | None:
        """Whether it was saved before another one; ``None``: nothing proves that, or the opposite."""
        a, b = self.saved, other.saved
        if a and b and a.run == b.run:
            return a.number < b.number
        told = {self.name < other.name} if self.name[::2] == other.name[::2] else set()
        told |= {a.number < b.number} if a and b else set()
        return told.pop() if len(told) == 1 else None


def _newest(found: list[_Checkpoint]) -> str:
    """The path of the newest, or nothing; where nothing proves which that is, by name."""
    last = [one for one in found if not any(map(one.is_older, found))] or found
    if not last:
        return ""
    newest = max(
        last, key=lambda one: (one.name, not one.path.is_symlink(), one.saved and one.saved.name == one.path.name)
    )
    if rivals := sorted(one.path.name for one in last if one.save != newest.save):
        warnings.warn(
            f"latest() chose {newest.path.name} by its name: nothing proves that {', '.join(rivals)} is older. Give "
            "load() the folder that you want, or move the others away"
        )
    return str(newest.path)


def _too_old(found: list[_Checkpoint], last: int) -> list[Path]:
    """The paths of those that at least ``last`` others are newer than, which stay."""

    def newer(one: _Checkpoint, among: list[_Checkpoint], *verdicts: bool | None) -> int:
        return len({other.save for other in among if one.is_older(other) in verdicts})

    stay = [one for one in found if one.path.is_symlink() or newer(one, found, True) < last]
    unproven = sorted(one.path.name for one in stay if newer(one, found, True, None) >= last)
    if unproven:
        warnings.warn(
            f"keep(last={last}) does not delete {', '.join(unproven)}: it is a link, or nothing proves that newer ones "
            "exist. Delete yourself what you do not need"
        )
    return [one.path for one in found if one not in stay and newer(one, stay, True) >= last]


def _found(folder: Path, call: str) -> list[_Checkpoint]:
    """The complete checkpoints in a folder. A warning says what looks like one and is none."""
    found, passed = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            names = [] if path.is_file() else os.listdir(path)
            if UNFINISHED in names or not any(name.endswith((MANIFEST, METADATA, ".distcp")) for name in names):
                continue
            contents = understood(path, read_lists(path), allow_pickle=False)
            refuse_damage(contents, compares_checksums=False)
            texts = re.split(r"(\d+)", contents.saved.name if contents.saved else path.resolve().name)
            name = tuple(int(text) if text.isdecimal() else text for text in texts)
            found.append(_Checkpoint(path, contents.saved, name))
        except (OSError, RuntimeError) as error:
            if os.path.lexists(path):  # else another rank deletes it
                passed.append(text_of(error))
    if passed:
        warnings.warn(f"{call} passed over: " + "; ".join(passed))
    return found

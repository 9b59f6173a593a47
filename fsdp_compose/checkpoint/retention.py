"""Which checkpoint in a folder is the newest, and which may go."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from pathlib import Path

import torch.distributed as dist

from .._arguments import checked
from ..errors import MisuseError
from .agreement import ask_all, attempt_together, has_peers, is_first
from .folders import MANIFEST, METADATA, has_all_files, local_folder, partial_of, read_lists, understood
from .writer import is_being_written

_PAUSE = 0.1  # seconds between looks


@checked()
def latest(
    folder: str | Path, *, process_group: dist.ProcessGroup | None = None, wait_for_saves: float = 300.0
) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, by the time at which it was completed; ``None`` if there is
    none.

    Complete are those whose files have the sizes that their manifest lists; ``load`` also compares checksums. What an
    interrupted save has left is none, and so is a folder of anything else.

    Ranks: all ranks of ``process_group``, on a shared file system: the first rank looks, so that all get the same.

    Args:
        folder: the parent of the checkpoints' folders, such as ``checkpoints`` for ``checkpoints/step-1000``. It need
            not exist.
        process_group: the ranks; default: all.
        wait_for_saves: seconds to wait for an ``async_save`` into the folder whose trainer may have died, and which its
            writer still completes: else a job that was restarted would begin one checkpoint too early.
    """
    group, folder = process_group or dist.group.WORLD, local_folder(folder)

    def look() -> str:
        if not is_first(group):
            return ""
        ends = time.monotonic() + wait_for_saves
        while time.monotonic() < ends and any(map(is_being_written, folder.glob("*.partial/meet-*"))):
            time.sleep(_PAUSE)
        found = _complete(folder)
        return str(found[0]) if found else ""

    found = attempt_together(group, "latest()", look)
    if has_peers(group):
        found = ask_all(group, "latest(): the newest checkpoint", found, lambda brought: brought[0])
    return Path(found) if found else None


@checked()
def keep(folder: str | Path, last: int = 3) -> list[Path]:
    """Delete all complete checkpoints in ``folder`` but the ``last`` newest. Return what was deleted.

    Only what ``latest`` would count is deleted: a save that is under way, or was interrupted, is no checkpoint, and
    takes nobody's place. So call it at any time, for example when the future of ``async_save`` is done; until the newer
    checkpoint is complete, older ones stay.

    Ranks: one rank is enough.

    Raises:
        ValueError: ``last`` is below 1.
    """
    if last < 1:
        raise MisuseError(f"keep(): last is {last}, but at least one checkpoint must stay")
    old = _complete(local_folder(folder))[last:]
    for path in old:
        # Renamed first: a deletion that is interrupted leaves no checkpoint that lacks files.
        partial = partial_of(path)
        dead = partial / f"dead-{uuid.uuid4().hex}"
        partial.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another rank deletes it
            path.rename(dead)
            shutil.rmtree(dead)
        with contextlib.suppress(OSError):  # a save has begun there
            partial.rmdir()
    return old


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, the newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError, RuntimeError):
            if path.is_symlink() or not (path / MANIFEST).is_file():
                continue
            contents = understood(path, read_lists(path), allow_pickle=False)
            if has_all_files(contents):
                found.append(((path / METADATA).stat().st_mtime_ns, path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]

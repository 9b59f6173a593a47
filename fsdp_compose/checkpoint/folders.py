"""Folders of checkpoints: written aside, moved into place whole, verified before they are read.

A folder has its name only when everything in it has been written; until then it is ``<name>.partial``::

    step-100/                 complete, and never written to again
        .metadata  __0_0.distcp  __1_0.distcp  manifest.json
    step-200.partial/         a save that was interrupted; the next one begins anew
        .unfinished  __0_0.distcp
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from .agreement import in_words

MANIFEST = "manifest.json"
METADATA = ".metadata"
_BLOCK = 16 * 2**20
_UNFINISHED = ".unfinished"


def local_folder(folder: str | Path) -> Path:
    """Raises ValueError for what is an address on a network."""
    if "://" in str(folder):
        raise ValueError(
            f"{folder} is no folder of a file system: give torch.distributed.checkpoint.save() and load() a storage "
            "writer and reader for it (FsspecWriter), with planner=SavePlanner() and planner=LoadPlanner()"
        )
    return Path(folder)


def partial_of(folder: Path) -> Path:
    """Where a folder is while it is written."""
    return folder.with_name(folder.name + ".partial")


def begin_folder(folder: Path) -> str:
    """Make an empty folder to write to; why that cannot be, or nothing."""
    if os.path.lexists(folder):
        return f"{folder} exists: save each checkpoint to a folder of its own, so that an interrupted save harms none"
    partial = partial_of(folder)
    if partial.exists():
        if any(partial.iterdir()) and not (partial / _UNFINISHED).exists():
            return (
                f"{partial}, where {folder.name} would be written first, is no save that was interrupted: move it away"
            )
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    (partial / _UNFINISHED).touch()
    return ""


def finish_folder(folder: Path, manifest: Mapping[str, Any] | None = None) -> None:
    """Give a folder its name, when what is in it is on disk.

    Args:
        manifest: ``files``: size and checksum by name; and whatever else is to be known.
    """
    partial = partial_of(folder)
    if manifest is not None:
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        sync(partial / MANIFEST)
    (partial / _UNFINISHED).unlink()
    sync(partial)
    partial.rename(folder)
    sync(folder.parent)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Empty for a checkpoint that torch has written."""
    path = folder / MANIFEST
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def sync(path: Path) -> None:
    """Return when a file, or the list of what is in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- verification


def entries(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Size and checksum of files, by name."""
    return {path.name: [path.stat().st_size, checksum(path)] for path in sorted(paths)}


def checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total


def damage(folder: Path, part: int = 0, num_parts: int = 1) -> str:
    """What is wrong with the checkpoint in ``folder``; empty if nothing is. Of the files, every ``num_parts``-th is
    read, beginning with number ``part``."""
    if not folder.is_dir():
        partial = partial_of(folder)
        interrupted = f"; {partial} is a save that was interrupted, and cannot be loaded" if partial.exists() else ""
        return f"there is no checkpoint at {folder}{interrupted}"
    if not (folder / METADATA).is_file():
        return f"{folder} is no complete checkpoint: it has no {METADATA}, which is written last. Load an earlier one"
    try:
        files = _listed(folder)
    except OSError:
        raise
    except Exception as error:  # whatever damaged JSON and pickles raise
        return f"{folder} is damaged: its list of files cannot be read ({in_words(error)}). Load an earlier checkpoint"
    found = [_damage_of(folder / name, *files[name]) for name in sorted(files)[part::num_parts]]
    return next((text for text in found if text), "")


def _listed(folder: Path) -> dict[str, tuple[int, int | None]]:
    """Size and checksum of every file; of checkpoints that torch wrote, the least size."""
    if (folder / MANIFEST).is_file():
        listed = read_manifest(folder)["files"]
        return {name: (int(size), int(total)) for name, (size, total) in listed.items()}
    ends: dict[str, int] = {}
    for info in FileSystemReader(folder).read_metadata().storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return {name: (size, None) for name, size in ends.items()}


def _damage_of(path: Path, size: int, total: int | None) -> str:
    if not path.is_file():
        return f"{path} is missing: the checkpoint is damaged. Load an earlier one"
    found = path.stat().st_size
    if found < size or (total is not None and found != size):
        return f"{path} has {found} bytes, where {size} were written: the checkpoint is damaged. Load an earlier one"
    if total is not None and checksum(path) != total:
        return f"{path} does not hold what was written (its checksum differs). Load an earlier checkpoint"
    return ""

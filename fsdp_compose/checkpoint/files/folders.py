"""Folders of checkpoints: written aside, moved into place whole, verified before they are read.

A folder has its name only when everything in it has been written; until then its files are in a folder of their own,
which no other save writes to::

    step-100/                       complete, and never written to again
        .metadata  __0_0.distcp  __1_0.distcp  manifest.json
    step-200.partial/               a save that is under way, or was interrupted; the next one begins anew
        save-3f2a.../
            __0_0.distcp

The name of the inner folder is the owner's token. There is one decisive step, the renaming of it to ``step-200``: a
job that dies before it has left nothing but what the next save throws away, one that dies after it has left a
checkpoint. Of two jobs that save to one path the later one takes the place of the earlier one, as it would of a dead
one's, and the earlier one finds its folder gone, or the name taken.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import uuid
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..moving.agreement import problem_text
from .contents import (
    MANIFEST,
    METADATA,
    Contents,
    Lists,
    UnknownFormat,
    WouldRunCode,
    as_text,
    contents_of,
    lists_of,
    writer_of,
)

_BLOCK = 16 * 2**20
_UNFINISHED = ".unfinished"  # in the partial folders of earlier versions, which held the files themselves
_TOKEN = re.compile(r"(save|dead)-[0-9a-f]{32}")


def local_folder(folder: str | Path) -> Path:
    """Raises ValueError for what is an address on a network."""
    if "://" in str(folder):
        raise ValueError(
            f"{folder} is no folder of a file system: give torch.distributed.checkpoint.save() and load() a storage "
            "writer and reader for it (FsspecWriter), with planner=SavePlanner() and planner=LoadPlanner()"
        )
    return Path(folder)


def partial_of(folder: Path) -> Path:
    """Where the files of a folder are, in a folder of their own, while they are written."""
    return folder.with_name(folder.name + ".partial")


def new_token() -> str:
    """A name that no other save has."""
    return f"save-{uuid.uuid4().hex}"


def begin_folder(folder: Path, token: str) -> str:
    """Make an empty folder, ``partial_of(folder) / token``, to write to; why that cannot be, or nothing."""
    if os.path.lexists(folder):
        return f"{folder} exists: save each checkpoint to a folder of its own, so that an interrupted save harms none"
    partial = partial_of(folder)
    if partial.exists():
        if not (partial / _UNFINISHED).exists() and not all(map(_is_ours, partial.iterdir())):
            return (
                f"{partial}, where {folder.name} would be written first, is no save that was interrupted: move it away"
            )
        _throw_away(partial)
    (partial / token).mkdir(parents=True)
    return ""


def _is_ours(path: Path) -> bool:
    return _TOKEN.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def _throw_away(partial: Path) -> None:
    """Empty the folder of an interrupted save. A marker of an earlier version goes last: until then the folder can be
    told from a user's."""
    found = sorted(partial.iterdir(), key=lambda path: path.name == _UNFINISHED)
    for path in found:
        if _is_ours(path):
            # Out of the way first: another job may be writing to it, and would go on in what is being deleted.
            dead = partial / f"dead-{uuid.uuid4().hex}"
            with contextlib.suppress(FileNotFoundError):  # finished, or thrown away by a third one
                path.rename(dead)
                shutil.rmtree(dead)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def finish_folder(folder: Path, token: str, manifest: Mapping[str, Any] | None = None) -> str:
    """Give a folder its name, when what is in it is on disk; why that cannot be, or nothing.

    Args:
        manifest: ``files``: size and checksum by name; and whatever else is to be known.
    """
    partial = partial_of(folder)
    mine = partial / token
    if not mine.is_dir():
        return _lost(folder, f"its files in {mine} are gone")
    if manifest is not None:
        (mine / MANIFEST).write_text(as_text(manifest))
        sync(mine / MANIFEST)
    sync(mine)
    try:
        _rename_to_new(mine, folder)
    except FileExistsError:
        return _lost(folder, f"{folder} exists by now, and is left as it is")
    except FileNotFoundError:
        return _lost(folder, f"its files in {mine} are gone")
    sync(folder.parent)
    with contextlib.suppress(OSError):  # another save may have begun there
        partial.rmdir()
    return ""


def _rename_to_new(source: Path, folder: Path) -> None:
    """Raises FileExistsError if there is something of that name, which is left as it is."""
    if os.path.lexists(folder):  # renaming would replace an empty folder
        raise FileExistsError(str(folder))
    try:
        source.rename(folder)
    except OSError:
        if os.path.lexists(folder):  # since: what the system calls it differs (not empty, not a directory)
            raise FileExistsError(str(folder)) from None
        raise


def _lost(folder: Path, found: str) -> str:
    return (
        f"another job saves to {folder} too: {found}. This save is given up; what the other one has written or writes "
        "is not touched. Let each job save to folders of its own"
    )


def abandon_folder(folder: Path, token: str) -> None:
    """Remove what a save that has failed has written so far: a disk that is full does not stay so."""
    shutil.rmtree(partial_of(folder) / token, ignore_errors=True)
    with contextlib.suppress(OSError):
        partial_of(folder).rmdir()


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
    """The damage of the checkpoint in ``folder``, as text; empty if there is none. Of the files, every ``num_parts``-th
    is read, beginning with number ``part``."""
    return inspect(folder, part, num_parts)[1]


def inspect(folder: Path, part: int = 0, num_parts: int = 1, allow_pickle: bool = False) -> tuple[Contents | None, str]:
    """The contents of the checkpoint in ``folder``, and its damage, as ``damage`` gives it."""
    lists, problem = read_lists(folder)
    contents, problem = (None, problem) if problem else understood(folder, lists, allow_pickle)
    return contents, problem if contents is None else damage_of_part(folder, contents, part, num_parts)


def read_lists(folder: Path) -> tuple[Lists, str]:
    """The files in which the checkpoint in ``folder`` says what it holds; or why there are none."""
    if not folder.is_dir():
        partial = partial_of(folder)
        interrupted = f"; {partial} is a save that was interrupted, and cannot be loaded" if partial.exists() else ""
        return {}, f"there is no checkpoint at {folder}{interrupted}"
    if not (folder / METADATA).is_file():
        return (
            {},
            f"{folder} is no complete checkpoint: it has no {METADATA}, which is written last. Load an earlier one",
        )
    try:
        return lists_of(folder), ""
    except ValueError as error:
        return {}, _damaged(folder, error)


def understood(folder: Path, lists: Lists, allow_pickle: bool) -> tuple[Contents | None, str]:
    """What the checkpoint in ``folder`` says that it holds; or why it does not."""
    try:
        contents = contents_of(folder, lists, allow_pickle)
    except WouldRunCode as error:
        return None, f"{folder} is not loaded: {error}. Load checkpoints of people you trust alone"
    except UnknownFormat as error:
        return None, _of_another_version(folder, lists, error)
    except Exception as error:  # whatever damaged JSON and pickles raise
        return None, _damaged(folder, error)
    return contents, ""


def _of_another_version(folder: Path, lists: Lists, error: Exception) -> str:
    written = writer_of(lists[METADATA])
    by = f"torch {written} wrote it" if written else "another version of torch wrote it"
    or_damage = "" if MANIFEST in lists else ", or it is damaged: it has no checksums"
    return (
        f"{folder} is in a format that torch {torch.__version__}, which runs here, does not have ({error}): {by}"
        f"{or_damage}. Load it with {f'torch {written}' if written else 'the torch that saved it'}, or a newer one"
    )


def _damaged(folder: Path, error: Exception) -> str:
    reason = str(error) if type(error) in (ValueError, pickle.UnpicklingError) else problem_text(error)
    return f"{folder} is damaged: its list of files cannot be read ({reason}). Load an earlier checkpoint"


def damage_of_part(folder: Path, contents: Contents, part: int, num_parts: int) -> str:
    """The damage of every ``num_parts``-th file, beginning with number ``part``; empty if there is none."""
    names = sorted(contents.files)[part::num_parts]
    found = (_damage_of(folder / name, *contents.files[name]) for name in names)
    return next((text for text in found if text), "")


def _damage_of(path: Path, size: int, total: int | None) -> str:
    if not path.is_file():
        return f"{path} is missing: the checkpoint is damaged. Load an earlier one"
    found = path.stat().st_size
    if found < size or (total is not None and found != size):
        return f"{path} has {found} bytes, where {size} were written: the checkpoint is damaged. Load an earlier one"
    if total is not None and checksum(path) != total:
        return f"{path} does not hold what was written (its checksum differs). Load an earlier checkpoint"
    return ""

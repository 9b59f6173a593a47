"""Checkpoint folders: written under a temporary name, renamed into place when complete, verified before loading.

``storage`` calls this. The first half of this file reads a folder's manifest and metadata without running code.

A folder gets its name only when all its files are on disk; until then they are in a folder that no other save writes
to::

    step-100/                       complete, and never written to again
        .metadata  __0_0.distcp  __1_0.distcp  manifest.json
    step-200.partial/               a save that is under way, or was interrupted; the next save starts over
        save-3f2a.../
            __0_0.distcp
        meet-3f2a.../               where the processes of an ``async_save`` meet (``writer``)

The inner folder is named by its owner's token. The decisive step is renaming it to ``step-200``. A job that dies before
that leaves only files that the next save deletes; a job that dies afterwards leaves a checkpoint. If two jobs save to
one path, the later one replaces the earlier one as it would replace a dead one, and the earlier one finds its folder
gone or the name taken."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import pickle
import re
import shutil
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import add, le
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import Buffer

from .._torch import StorageInfo
from ..errors import CheckpointDamagedError, MisuseError, MisuseRuntimeError, text_of

try:
    from isal.isal_zlib import crc32  # the same checksum, faster
except ImportError:
    from zlib import crc32

# ---- Reading a folder's manifest and metadata without running code, even if an attacker wrote them.
#
# ``.metadata`` is a pickle. The few classes that ``torch.distributed.checkpoint`` needs are replaced by stand-ins made
# for each reading; every other name is refused. The result is checked before use: files must lie in the folder, also
# after following links, and numbers must be plausible.
#
# Other versions of torch write the same classes with more fields (2.15: the strides of tensors). These are skipped:
# nothing that the pickle can make runs code, whatever its fields are. A class, dtype or layout that this torch does not
# have raises ``UnknownFormat``: another version wrote the checkpoint, and it is not damaged.


MANIFEST = "manifest.json"
METADATA = ".metadata"
NUMBERS = "integer_keys"
"""Key in the manifest: the paths of dicts with integer keys."""
SAVED = "saved"
"""Key in the manifest: which save it was, a ``Saved``."""

_CHECKSUM = "checksum"  # key in the manifest: its own checksum
_MARK = "fsdp_compose-"  # prefix of the save id in the metadata of our checkpoints
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)  # indexed by torch's numbers
_TORCHS = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "torch.distributed.tensor.")
_LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}


class Saved(NamedTuple):
    """Which save made a checkpoint, also if it is copied or renamed: a text that checkpoints have in common which were
    saved beside each other, a number above theirs (the time in ns, if that is more), and the folder's name."""

    run: str
    number: int
    name: str


@dataclass(frozen=True)
class Contents:
    """The contents of a complete checkpoint, according to its manifest and metadata.

    Attributes:
        files: size and checksum by name; for checkpoints that torch wrote, the minimum size and no checksum.
        numbers: paths of dicts with integer keys.
        is_verifiable: whether there is a manifest.
        saved: ``None``: torch wrote it, or an earlier version.
    """

    folder: Path
    metadata: Metadata
    files: dict[str, tuple[int, int | None]]
    numbers: frozenset[tuple[Any, ...]] = field(default_factory=frozenset)
    is_verifiable: bool = True
    saved: Saved | None = None


class WouldRunCode(ValueError):
    """The list of files is refused because reading it would run code; as far as known, it is not damaged."""


class UnknownFormat(ValueError):
    """The list of files uses a format that this version of torch does not have; as far as known, it is not damaged."""


def mark(save_id: str | None) -> str:
    """Return the save id of a checkpoint of ours, which also names the torch that wrote it."""
    return f"{_MARK}{save_id}-torch-{torch.__version__}"


Lists = dict[str, bytes]
"""The files that list a checkpoint's contents, by name: the metadata, and the manifest if there is one."""


def contents_of(folder: Path, lists: Lists, allow_pickle: bool = False) -> Contents:
    """Return the contents of a checkpoint, from its manifest and its metadata.

    Args:
        allow_pickle: also unpickle metadata with other classes, which can run any code.

    Raises:
        WouldRunCode: the metadata refer to something that a list of tensors does not need.
        UnknownFormat: they use a format that this version of torch does not have.
        ValueError: they are invalid, or refer to files outside of the folder.
    """
    manifest = _read_manifest(lists[MANIFEST]) if MANIFEST in lists else None
    listed, numbers, saved = manifest or ({}, frozenset(), None)
    metadata = _read_metadata(lists[METADATA], listed.get(METADATA), allow_pickle)
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        _require(isinstance(info.relative_path, str), f"{info.relative_path!r} is not a file name")
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    files: dict[str, tuple[int, int | None]] = {**listed}
    if manifest is None:
        # The save id tells a checkpoint of ours, whose manifest was lost, from one that torch wrote without any.
        if str(getattr(metadata.storage_meta, "save_id", "")).startswith(_MARK):
            raise ValueError(f"it was saved with a {MANIFEST}, which is missing, so nothing can be verified")
        files = {name: (size, None) for name, size in needed.items()}
    unlisted = sorted(needed.keys() - files.keys())
    if unlisted:
        raise ValueError(f"{METADATA} refers to {unlisted[0]}, which {MANIFEST} does not list")
    for name, size in needed.items():
        _require(size <= files[name][0], f"{METADATA} refers to data beyond the end of {name}")
    for name in (*files, METADATA):
        _require_inside(folder, name)
    return Contents(folder, metadata, files, numbers, manifest is not None, saved)


# ---- the manifest


def as_text(manifest: Mapping[str, Any]) -> str:
    return json.dumps({**manifest, _CHECKSUM: _checksum_of(manifest)}, indent=1)


def _checksum_of(manifest: Mapping[str, Any]) -> int:
    rest = {key: value for key, value in manifest.items() if key != _CHECKSUM}
    return crc32(json.dumps(rest, sort_keys=True).encode())


def _read_manifest(content: bytes) -> tuple[dict[str, tuple[int, int]], frozenset[tuple[Any, ...]], Saved | None]:
    """Return size and checksum of the files, the paths of dicts with integer keys, and which save it was."""
    try:
        listed = json.loads(content.decode())
        # Manifests of earlier versions have no checksum. (A damaged key "checksum" fails the first check.)
        _require(listed.keys() <= {"files", NUMBERS, SAVED, _CHECKSUM}, "it has unknown keys")
        _require(listed.get(_CHECKSUM, _checksum_of(listed)) == _checksum_of(listed), "its checksum differs")
        files = {str(name): (int(size), int(total)) for name, (size, total) in listed["files"].items()}
        saved = Saved(*listed[SAVED]) if SAVED in listed else None
        _require(saved is None or [*map(type, saved)] == [str, int, str], f"{saved} is no save")
        paths = listed.get(NUMBERS, ())
        for path in paths:
            is_path = isinstance(path, list) and all(isinstance(step, (str, int)) for step in path)
            _require(is_path, f"{path!r} is not a path")
        return files, frozenset(map(tuple, paths)), saved
    except Exception as error:  # damaged JSON may raise anything
        raise ValueError(f"{MANIFEST} is not as it was written: {text_of(error)}") from error


def next_save(folder: Path) -> Saved:
    """Return which save the one to ``folder`` is: it comes after all that are beside it."""
    newest = Saved(uuid.uuid4().hex, 0, "")
    for path in folder.parent.glob(f"*/{MANIFEST}"):
        with contextlib.suppress(OSError, ValueError):
            newest = max(newest, _read_manifest(path.read_bytes())[2] or newest, key=lambda saved: saved.number)
    return Saved(newest.run, max(newest.number + 1, time.time_ns()), folder.name)


def _require_inside(folder: Path, name: Any) -> None:
    """Raise ValueError unless ``name`` lies in ``folder``, also after following links."""
    if isinstance(name, str) and name and "\0" not in name:
        is_relative = not Path(name).is_absolute() and ".." not in name.split("/")
        if is_relative and (folder / name).resolve().is_relative_to(folder.resolve()):
            return
    raise ValueError(f"it refers to the file {name!r}, which is not in the folder")


# ---- the metadata


def _read_metadata(content: bytes, listed: tuple[int, int] | None, allow_pickle: bool) -> Metadata:
    """``listed``: size and checksum, if they are known."""
    if listed not in (None, (len(content), crc32(content))):
        raise ValueError(f"{METADATA} is not as it was written: its size or its checksum differs")
    try:
        return _checked(_Unpickler(io.BytesIO(content)).load())
    except OSError:
        raise
    except Exception:  # a malformed pickle may raise anything
        if not allow_pickle:
            raise
    return _checked(pickle.loads(content))


class _Unpickler(pickle.Unpickler):
    """Unpickles only the objects of a list of tensors, as stand-in classes."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # New classes for each reading, which no other code uses: a pickle can set attributes of classes.
        self._known = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) in self._known:
            return self._known[module, name]
        # A name of torch's own that this torch lacks (a dtype, a memory format) may be another version's: refusing it
        # hides no attack.
        is_of_torch = module == "torch" or module.startswith(_TORCHS)
        if is_of_torch and not hasattr(sys.modules.get(module), name):
            raise UnknownFormat(f"it refers to {module}.{name}")
        raise WouldRunCode(
            f"it refers to {module}.{name}, which a list of tensors does not need, and which could run any code"
        )


def _stand_ins() -> dict[tuple[str, str], Callable[..., Any]]:
    classes = (Metadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorStorageMetadata)
    known: dict[tuple[str, str], Callable[..., Any]] = {
        (cls.__module__, cls.__qualname__): type(cls.__name__, (cls,), {}) for cls in (*classes, StorageInfo)
    }
    properties = type("TensorProperties", (TensorProperties,), {"__setstate__": _set_properties})
    for module in (TensorProperties.__module__, "torch.distributed._shard.sharded_tensor.metadata"):  # torch < 2.2
        known[module, "TensorProperties"] = properties
        for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"):
            known[module, name] = lambda number: number
    known["torch", "Size"] = lambda sizes=(): torch.Size(sizes)
    known["torch.serialization", "_get_layout"] = _layout
    known["collections", "OrderedDict"] = lambda items=(): OrderedDict(items)
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"):
            known[module, name] = lambda *names: "/".join(map(str, names))
    return known


def _layout(name: Any) -> torch.layout:
    if name not in _LAYOUTS:
        raise UnknownFormat(f"it refers to the layout {name}")
    return _LAYOUTS[name]


def _set_properties(self: Any, state: Any) -> None:
    """Set the five fields that loading needs; newer versions append more."""
    _require(isinstance(state, tuple) and len(state) >= 5, "a tensor has no properties")
    self.dtype, self.layout, self.requires_grad, number, self.pin_memory = state[:5]
    number = int(getattr(number, "value", number))
    if number not in range(len(_FORMATS)):
        raise UnknownFormat(f"it refers to the memory format number {number}")
    self.memory_format = _FORMATS[number]


def _checked(metadata: Any) -> Metadata:
    """Check that the metadata are such as torch writes. Raises ValueError if not."""
    _require(isinstance(metadata, Metadata), "it is not a list of tensors")
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    _require(isinstance(entries, Mapping) and isinstance(places, Mapping), "it is not a list of tensors")
    for key, entry in entries.items():
        _require(isinstance(key, str), f"{key!r} is not a name")
        if isinstance(entry, TensorStorageMetadata):
            _require(isinstance(getattr(entry.properties, "dtype", None), torch.dtype), f"{key} has no dtype")
            has_size = _are_sizes(entry.size) and all(
                isinstance(chunk, ChunkStorageMetadata) and _are_sizes(chunk.offsets) and _are_sizes(chunk.sizes)
                for chunk in entry.chunks
            )
            _require(has_size, f"{key} has no size")
            _require_whole(key, entry)
        else:
            _require(isinstance(entry, BytesStorageMetadata), f"{key} is neither a tensor nor a value")
    for key, path in dict(metadata.planner_data or {}).items():
        is_path = isinstance(path, (tuple, list)) and all(
            # a key, or an index of a list that fits into a checkpoint of so many values
            isinstance(step, str) or (type(step) is int and 0 <= step < len(entries))
            for step in path
        )
        _require(is_path, f"{path!r} is not a path of {key!r}")
    metadata.storage_data = {}
    for index, info in places.items():
        _require(isinstance(index, MetadataIndex) and isinstance(index.fqn, str), f"{index!r} is not a name")
        _require(isinstance(info, StorageInfo) and _are_sizes((info.offset, info.length)), f"{index.fqn} is in no file")
        # A key that equals torch's own.
        metadata.storage_data[MetadataIndex(index.fqn, index.offset, index.index)] = info
    return metadata


def _require_whole(key: str, entry: TensorStorageMetadata) -> None:
    """Raise ValueError unless the pieces of a tensor add up to it: a rank that saves alone writes only its own."""
    size, saved, needed = tuple(entry.size), 0, math.prod(entry.size)
    for offsets, sizes in {(chunk.offsets, chunk.sizes) for chunk in entry.chunks}:
        fits = len(offsets) == len(sizes) == len(size) and all(map(le, map(add, offsets, sizes), size))
        _require(fits, f"a part of {key} is not in the tensor of shape {size}")
        saved += math.prod(sizes)
    # torch refuses to save pieces that overlap, so comparing numbers of elements is enough.
    _require(saved == needed, f"{saved} of the {needed} elements of {key} were saved")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _are_sizes(sizes: Iterable[Any]) -> bool:
    return all(type(size) is int and size >= 0 for size in sizes)


# ---- Writing a folder, and renaming it into place


_BLOCK = 16 * 2**20
UNFINISHED = ".unfinished"  # in the partial folders of earlier versions, which held the files themselves
_TOKEN = re.compile(r"(save|meet|dead)-[0-9a-f]{32}")


def local_folder(folder: str | Path) -> Path:
    """Return ``folder`` as a path. Raises ValueError for a network address."""
    if "://" in str(folder):
        raise MisuseError(
            f"{folder} is not a folder of a file system: give torch.distributed.checkpoint.save() and load() a storage "
            "writer and reader for it (FsspecWriter), with planner=SavePlanner() and planner=LoadPlanner()"
        )
    return Path(folder)


def partial_of(folder: Path) -> Path:
    """Return the folder that contains the files, in a subfolder, while they are written."""
    return folder.with_name(folder.name + ".partial")


def new_token() -> str:
    return f"save-{uuid.uuid4().hex}"


def meeting_of(folder: Path, token: str) -> Path:
    """Return the folder where the processes of an asynchronous save meet. It outlives the renaming."""
    return partial_of(folder) / token.replace("save-", "meet-")


def begin_folder(folder: Path, token: str) -> None:
    """Make an empty folder ``partial_of(folder) / token`` to write to. Raises RuntimeError if there is another one."""
    if os.path.lexists(folder):
        raise MisuseRuntimeError(
            f"{folder} exists: save each checkpoint to its own folder, so an interrupted save cannot damage another"
        )
    partial = partial_of(folder)
    if partial.exists():
        if not (partial / UNFINISHED).exists() and not all(map(_is_ours, partial.iterdir())):
            raise MisuseRuntimeError(
                f"{partial}, where {folder.name} is written first, exists and is not an interrupted save: move it away"
            )
        # The marker of earlier versions comes last: until then it distinguishes the folder from a user's.
        for path in sorted(partial.iterdir(), key=lambda path: path.name == UNFINISHED):
            if _is_ours(path):
                bury(path, partial)  # another job may be writing to it, and would keep writing while it is deleted
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    (partial / token).mkdir(parents=True)


def _is_ours(path: Path) -> bool:
    return _TOKEN.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def sweep(folder: Path) -> None:
    """Delete what saves and deletions below ``folder`` have left that were killed: nobody can be writing there."""
    for partial in folder.glob("*.partial"):
        with contextlib.suppress(OSError):  # another rank sweeps too
            found = [path for path in partial.iterdir() if _is_ours(path)]
            # All ranks that wrote have ended if nobody holds their locks.
            locks = {path.name[-32:]: path.glob("*.lock") for path in found if path.name.startswith("meet-")}
            ended = {name for name, of_save in locks.items() if {*map(is_lock_held, of_save)} == {False}}
            for path in sorted(found, reverse=True):  # the files before the locks, which tell that their save has ended
                if path.name.startswith("dead-") or path.name[-32:] in ended:
                    shutil.rmtree(path, ignore_errors=True)
            if found:  # else a save may be about to begin
                partial.rmdir()


def hold_lock(path: Path) -> int:
    """Make a file and lock it. Return its descriptor: the lock is held until all processes that have it are gone, or
    have closed it."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for those that look whether it is held
    return descriptor


def is_held(descriptor: int) -> bool | None:
    """Whether somebody holds the lock of a file, opened anew; ``None`` on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def is_lock_held(path: Path) -> bool | None:
    """Whether some process holds the lock file at ``path``; ``None`` if there is no such file."""
    try:
        with path.open("rb") as lock:
            return is_held(lock.fileno())
    except OSError:
        return None


def bury(path: Path, partial: Path) -> None:
    """Delete a folder that others may use: renamed first, so that they find it whole or not at all."""
    dead = partial / f"dead-{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):  # finished, or deleted by another job or rank
        path.rename(dead)
        shutil.rmtree(dead)


def finish_folder(folder: Path, token: str, manifest: Mapping[str, Any] | None = None) -> None:
    """Sync the files to disk and rename the folder into place.

    Args:
        manifest: ``files`` (size and checksum by name), and other entries to write.

    Raises:
        RuntimeError: another job saves to ``folder`` too.
    """
    partial = partial_of(folder)
    mine = partial / token
    if not mine.is_dir():
        raise lost_to_another(folder, mine)
    if manifest is not None:
        (mine / MANIFEST).write_text(as_text(manifest))
        sync(mine / MANIFEST)
    sync(mine)
    if os.path.lexists(folder):  # renaming would replace an empty folder
        raise lost_to_another(folder, None)
    try:
        mine.rename(folder)
    except OSError as error:
        # Created since: systems report that differently (not empty, no directory), and it may be gone again.
        if isinstance(error, FileExistsError) or os.path.lexists(folder):
            raise lost_to_another(folder, None) from None
        if isinstance(error, FileNotFoundError):
            raise lost_to_another(folder, mine) from None
        raise
    sync(folder.parent)
    with contextlib.suppress(OSError):  # another save may have begun there
        partial.rmdir()


def lost_to_another(folder: Path, mine: Path | None) -> MisuseRuntimeError:
    """The error of a save when another job saves to the same folder: that has deleted the files in ``mine``, or
    (``None``) was the first to finish."""
    found = f"{folder} exists now, and was not touched" if mine is None else f"its files in {mine} are gone"
    return MisuseRuntimeError(
        f"another job saves to {folder} too: {found}. This save stops and does not touch the other job's files. Let "
        "each job save to its own folders"
    )


def abandon_folder(folder: Path, token: str) -> None:
    """Delete the files of a failed save, which may have filled the disk."""
    shutil.rmtree(partial_of(folder) / token, ignore_errors=True)
    end_meeting(folder, token)


def end_meeting(folder: Path, token: str) -> None:
    """Delete what the processes of an asynchronous save left each other."""
    shutil.rmtree(meeting_of(folder, token), ignore_errors=True)
    with contextlib.suppress(OSError):
        partial_of(folder).rmdir()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of entries, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Verification


def entries(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Return size and checksum of files, by name."""
    return {path.name: [path.stat().st_size, checksum(path)] for path in sorted(paths)}


def checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = crc32(block, total)
    return total


class SummedFile(io.BufferedWriter):
    """A new file whose size and checksum (``entry``) are computed while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.entry = [0, 0]

    def write(self, data: Buffer, /) -> int:
        self.entry[0] += memoryview(data).nbytes
        self.entry[1] = crc32(data, self.entry[1])
        return super().write(data)


_OTHER_LOADERS = (
    "Load a folder of safetensors files with load_hf(model, folder), and a file of torch.save() with torch.load() and "
    "set_model_state_dict()"
)


def read_lists(folder: Path) -> Lists:
    """Read the files that list the checkpoint in ``folder``. Raises RuntimeError if they are missing or damaged."""
    if folder.is_file():
        raise MisuseRuntimeError(f"{folder} is a file, but a checkpoint of save() is a folder. {_OTHER_LOADERS}")
    if not folder.is_dir():
        partial = partial_of(folder)
        interrupted = f"; {partial} is an interrupted save, which cannot be loaded" if partial.exists() else ""
        raise MisuseRuntimeError(f"there is no checkpoint at {folder}{interrupted}")
    if not (folder / METADATA).is_file():
        if any(folder.glob("*.safetensors")):
            raise MisuseRuntimeError(f"{folder} holds safetensors files, which save() does not write. {_OTHER_LOADERS}")
        raise CheckpointDamagedError(
            f"{folder} is not a complete checkpoint: it has no {METADATA}, which is written last. Load an earlier one"
        )
    found = [name for name in (MANIFEST, METADATA) if (folder / name).is_file()]
    try:
        for name in found:
            _require_inside(folder, name)
        return {name: (folder / name).read_bytes() for name in found}
    except ValueError as error:
        raise _damaged(folder, error) from None


def understood(folder: Path, lists: Lists, allow_pickle: bool) -> Contents:
    """Return the contents of the checkpoint in ``folder``. Raises RuntimeError if they cannot be read."""
    try:
        return contents_of(folder, lists, allow_pickle)
    except WouldRunCode as error:
        text = f"{folder} was not loaded: {error}. Load only checkpoints from people you trust"
    except UnknownFormat as error:
        text = _of_another_version(folder, lists, error)
    except Exception as error:  # damaged JSON and pickles may raise anything
        raise _damaged(folder, error) from None
    raise MisuseRuntimeError(text)


def _of_another_version(folder: Path, lists: Lists, error: Exception) -> str:
    # Ours name the torch that wrote them (``mark``), except from before 0.3.0.
    found = re.search(rb"fsdp_compose-[\w-]+-torch-([\w.+]+)", lists[METADATA])
    written = f"torch {found.group(1).decode()}" if found else ""
    or_damage = "" if MANIFEST in lists else ", or it is damaged: it has no checksums"
    return (
        f"{folder} is in a format that this torch, {torch.__version__}, does not have ({error}): "
        f"{written or 'another version of torch'} wrote it{or_damage}. Load it with "
        f"{written or 'the torch that saved it'}, or a newer one"
    )


def _damaged(folder: Path, error: Exception) -> CheckpointDamagedError:
    reason = str(error) if type(error) in (ValueError, pickle.UnpicklingError) else text_of(error)
    return CheckpointDamagedError(
        f"{folder} is damaged: its list of files cannot be read ({reason}). Load an earlier checkpoint"
    )


def refuse_damage(contents: Contents, first: int = 0, step: int = 1, compares_checksums: bool = True) -> None:
    """Raise CheckpointDamagedError if every ``step``-th file, starting with number ``first``, is damaged: missing, or
    not of the size or with the checksum with which it was written."""
    for name in sorted(contents.files)[first::step]:
        path, (size, total) = contents.folder / name, contents.files[name]
        if not path.is_file():
            raise CheckpointDamagedError(f"{path} is missing: the checkpoint is damaged. Load an earlier one")
        found = path.stat().st_size
        if found < size or (total is not None and found != size):
            raise CheckpointDamagedError(
                f"{path} has {found} bytes, but {size} were written: the checkpoint is damaged. Load an earlier one"
            )
        if compares_checksums and total is not None and checksum(path) != total:
            raise CheckpointDamagedError(
                f"{path} is not as it was written (its checksum differs). Load an earlier checkpoint"
            )

"""Folders of checkpoints: written aside, moved into place whole, verified before they are read.

``storage`` calls this. Reading a folder's own account of itself (manifest and metadata) runs no code: that is the first
half of this file.

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
one's, and the earlier one finds its folder gone, or the name taken."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import sys
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

from .._torch import StorageInfo
from .agreement import problem_text

# ---- The contents of a folder, by its own account, read without running anything: writing to a file system, or sending
# a checkpoint, is not enough to run code here.
#
# ``.metadata`` is a pickle. It is read with classes of its own, which exist for that reading only, in the place of the
# few that ``torch.distributed.checkpoint`` needs; every other name in it is refused. What comes out is checked before
# it is used: files lie in the folder, also where links lead, and numbers make sense.
#
# Other versions of torch write the same classes with more fields (2.15: the strides of tensors). These are skipped:
# nothing that the pickle can make runs code, whatever its fields are. A class, dtype or layout that this torch does not
# have raises ``UnknownFormat``, which is not damage: another version wrote it.


MANIFEST = "manifest.json"
METADATA = ".metadata"
NUMBERS = "integer_keys"
"""in the manifest: where dicts are whose keys are integers"""

_CHECKSUM = "checksum"  # in the manifest: its own
_MARK = "fsdp_compose-"  # begins the identity that a save of ours has in the metadata
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)  # by torch's numbers for them
_TORCHS = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "torch.distributed.tensor.")
_LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}


@dataclass(frozen=True)
class Contents:
    """The contents of a complete checkpoint, by its own account.

    Attributes:
        files: size and checksum by name; of checkpoints that torch wrote, the least size and no checksum.
        numbers: paths of dicts with integers for keys.
        is_verifiable: whether there is a manifest.
    """

    folder: Path
    metadata: Metadata
    files: dict[str, tuple[int, int | None]]
    numbers: frozenset[tuple[Any, ...]] = field(default_factory=frozenset)
    is_verifiable: bool = True


class WouldRunCode(ValueError):
    """The list of files is whole, as far as that can be known, and is not taken: it would run code."""


class UnknownFormat(ValueError):
    """The list of files is whole, as far as that can be known, and holds what this version of torch does not have."""


def mark(save_id: str | None) -> str:
    """The identity of a save of ours, by which its checkpoint is known if its manifest is lost, and the torch that
    wrote it."""
    return f"{_MARK}{save_id}-torch-{torch.__version__}"


def writer_of(metadata: bytes) -> str:
    """The torch that wrote a checkpoint of ours, from its metadata as bytes; "" for others, and before 0.3.0."""
    found = re.search(rb"fsdp_compose-[\w-]+-torch-([\w.+]+)", metadata)
    return "" if found is None else found.group(1).decode()


Lists = dict[str, bytes]
"""The files that say what a checkpoint holds, by name: the metadata, and the manifest if there is one."""


def lists_of(folder: Path) -> Lists:
    """Raises ValueError if one of them is a link out of the folder."""
    found = [name for name in (MANIFEST, METADATA) if (folder / name).is_file()]
    for name in found:
        _require_inside(folder, name)
    return {name: (folder / name).read_bytes() for name in found}


def contents_of(folder: Path, lists: Lists, allow_pickle: bool = False) -> Contents:
    """The contents of a checkpoint, from its manifest and its metadata.

    Args:
        allow_pickle: unpickle metadata of other classes too, which can run any code.

    Raises:
        WouldRunCode: they ask for more than a list of tensors needs.
        UnknownFormat: they are in a format that this version of torch does not have.
        ValueError: they make no sense, or lead out of the folder.
    """
    manifest = _read_manifest(lists.get(MANIFEST))
    metadata = _read_metadata(lists[METADATA], None if manifest is None else manifest.files.get(METADATA), allow_pickle)
    needed = _least_sizes(metadata)
    if manifest is None:
        if str(getattr(metadata.storage_meta, "save_id", "")).startswith(_MARK):
            raise ValueError(f"its {MANIFEST}, with which it was saved, is lost, so that nothing can be verified")
        files: dict[str, tuple[int, int | None]] = {name: (size, None) for name, size in needed.items()}
        contents = Contents(folder, metadata, files, is_verifiable=False)
    else:
        unlisted = sorted(needed.keys() - manifest.files.keys())
        if unlisted:
            raise ValueError(f"{METADATA} refers to {unlisted[0]}, which {MANIFEST} does not list")
        for name, size in needed.items():
            _require(size <= manifest.files[name][0], f"{METADATA} refers to what is beyond the end of {name}")
        contents = Contents(folder, metadata, dict(manifest.files), manifest.numbers)
    for name in (*contents.files, METADATA):
        _require_inside(folder, name)
    return contents


# ---- the manifest


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, tuple[int, int]]
    numbers: frozenset[tuple[Any, ...]]


def as_text(manifest: Mapping[str, Any]) -> str:
    """A manifest as it is written: with a checksum of itself."""
    return json.dumps({**manifest, _CHECKSUM: _checksum_of(manifest)}, indent=1)


def _checksum_of(manifest: Mapping[str, Any]) -> int:
    """Of all that is in it but the checksum."""
    rest = {key: value for key, value in manifest.items() if key != _CHECKSUM}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _read_manifest(content: bytes | None) -> _Manifest | None:
    if content is None:
        return None
    try:
        listed = json.loads(content.decode())
        # Without a checksum: of an earlier version, unless it is the word that is damaged.
        _require(listed.keys() <= {"files", NUMBERS, _CHECKSUM}, "it holds what no save writes there")
        _require(listed.get(_CHECKSUM, _checksum_of(listed)) == _checksum_of(listed), "its checksum differs")
        files = {str(name): (int(size), int(total)) for name, (size, total) in listed["files"].items()}
        return _Manifest(files, frozenset(_path(path) for path in listed.get(NUMBERS, ())))
    except Exception as error:  # whatever damaged JSON raises
        raise ValueError(f"{MANIFEST} does not hold what was written: {problem_text(error)}") from error


def _path(path: Any) -> tuple[Any, ...]:
    if not isinstance(path, list) or not all(isinstance(part, (str, int)) for part in path):
        raise ValueError(f"{path!r} is no path")
    return tuple(path)


def _require_inside(folder: Path, name: Any) -> None:
    """Raises ValueError unless ``name`` is that of something in ``folder``, also if links are followed."""
    if (
        isinstance(name, str)
        and name
        and "\0" not in name
        and not Path(name).is_absolute()
        and ".." not in name.split("/")
    ):
        if (folder / name).resolve().is_relative_to(folder.resolve()):
            return
    raise ValueError(f"it refers to the file {name!r}, which is not in the folder")


# ---- the metadata


def _read_metadata(content: bytes, listed: tuple[int, int] | None, allow_pickle: bool) -> Metadata:
    """``listed``: size and checksum, if they are known."""
    if listed not in (None, (len(content), zlib.crc32(content))):
        raise ValueError(f"{METADATA} does not hold what was written: its size or its checksum differs")
    try:
        return _checked(_Unpickler(io.BytesIO(content)).load())
    except OSError:
        raise
    except Exception:  # whatever a strange pickle raises
        if not allow_pickle:
            raise
    return _checked(pickle.loads(content))


class _Unpickler(pickle.Unpickler):
    """Makes what a list of tensors needs, of classes that no other code uses: pickles can set attributes of classes."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._known = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) in self._known:
            return self._known[module, name]
        if _may_be_newer(module, name):
            raise UnknownFormat(f"it refers to {module}.{name}")
        raise WouldRunCode(
            f"it refers to {module}.{name}, which a list of tensors does not need, and which could run any code"
        )


def _may_be_newer(module: str, name: str) -> bool:
    """Whether this may be a name of another version's lists of tensors: one that this torch does not have, neither
    here nor anywhere, so that it cannot be an attack on this one."""
    if module == "torch":  # dtypes, memory formats
        return not hasattr(torch, name)
    return module.startswith(_TORCHS) and not hasattr(sys.modules.get(module), name)


def _stand_ins() -> dict[tuple[str, str], Callable[..., Any]]:
    """New classes and functions for the names that torch's metadata refer to."""
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
            known[module, name] = lambda *parts: "/".join(map(str, parts))
    return known


def _layout(name: Any) -> torch.layout:
    if name not in _LAYOUTS:
        raise UnknownFormat(f"it refers to the layout {name}")
    return _LAYOUTS[name]


def _set_properties(self: Any, state: Any) -> None:
    """From five fields, and those that newer versions have behind them, which no loading needs."""
    _require(isinstance(state, tuple) and len(state) >= 5, "a tensor has no properties")
    self.dtype, self.layout, self.requires_grad, number, self.pin_memory = state[:5]
    number = int(getattr(number, "value", number))
    if number not in range(len(_FORMATS)):
        raise UnknownFormat(f"it refers to the memory format number {number}")
    self.memory_format = _FORMATS[number]


def _checked(metadata: Any) -> Metadata:
    """Raises ValueError if something in it is not what torch writes there."""
    _require(isinstance(metadata, Metadata), "it is no list of tensors")
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    _require(isinstance(entries, Mapping) and isinstance(places, Mapping), "it is no list of tensors")
    for key, entry in entries.items():
        _require(isinstance(key, str), f"{key!r} is no name")
        if isinstance(entry, TensorStorageMetadata):
            _require(isinstance(getattr(entry.properties, "dtype", None), torch.dtype), f"{key} has no dtype")
            _require(_are_sizes(entry.size) and all(_is_chunk(chunk) for chunk in entry.chunks), f"{key} has no size")
        else:
            _require(isinstance(entry, BytesStorageMetadata), f"{key} is neither a tensor nor a value")
    for key, path in dict(metadata.planner_data or {}).items():
        _require(
            isinstance(path, (tuple, list)) and all(_is_step(step, len(entries)) for step in path),
            f"{path!r} is no place of {key!r}",
        )
    metadata.storage_data = {}
    for index, info in places.items():
        _require(isinstance(index, MetadataIndex) and isinstance(index.fqn, str), f"{index!r} is no name")
        _require(isinstance(info, StorageInfo) and _are_sizes((info.offset, info.length)), f"{index.fqn} is in no file")
        # A key that equals torch's own.
        metadata.storage_data[MetadataIndex(index.fqn, index.offset, index.index)] = info
    return metadata


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _are_sizes(sizes: Iterable[Any]) -> bool:
    return all(type(size) is int and size >= 0 for size in sizes)


def _is_chunk(chunk: Any) -> bool:
    return isinstance(chunk, ChunkStorageMetadata) and _are_sizes(chunk.offsets) and _are_sizes(chunk.sizes)


def _is_step(step: Any, limit: int) -> bool:
    """Whether this is a key, or an index in a list that can be in a checkpoint of so many values."""
    return isinstance(step, str) or (type(step) is int and 0 <= step < limit)


def _least_sizes(metadata: Metadata) -> dict[str, int]:
    """How long each file is at least."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        _require(isinstance(info.relative_path, str), f"{info.relative_path!r} is no name of a file")
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return ends


# ---- Writing a folder, and moving it into place


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

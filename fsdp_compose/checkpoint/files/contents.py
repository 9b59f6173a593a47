"""The contents of a folder, by its own account, read without running anything: writing to a file system, or sending a
checkpoint, is not enough to run code here.

``.metadata`` is a pickle. It is read with classes of its own, which exist for that reading only, in the place of the
few that ``torch.distributed.checkpoint`` needs; every other name in it is refused. What comes out is checked before it
is used: files lie in the folder, also where links lead, and numbers make sense.

Other versions of torch write the same classes with more fields (2.15: the strides of tensors). These are skipped:
nothing that the pickle can make runs code, whatever its fields are. A class, dtype or layout that this torch does not
have raises ``UnknownFormat``, which is not damage: another version wrote it.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
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

from ..._torch import StorageInfo
from ..moving.agreement import problem_text

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

"""Checkpoints in folders, by ``torch.distributed.checkpoint``: written aside, moved into place whole, verified first.

A folder has its name only when everything in it has been written; until then it is ``<name>.partial``::

    step-100/                 complete, and never written to again
        .metadata  __0_0.distcp  __1_0.distcp  manifest.json
    step-200.partial/         a save that was interrupted; the next one begins anew
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from .agreement import agree, has_peers
from .planner import LoadPlanner

MANIFEST = "manifest.json"
_METADATA = ".metadata"
_BLOCK = 16 * 2**20


def save(state_dict: Mapping[str, Any], folder: str | Path, *, process_group: dist.ProcessGroup | None = None) -> None:
    """Save a checkpoint: sharded state dicts, and whatever else ``torch.distributed.checkpoint.save`` takes.

    The folder appears when everything in it has been written and noted in ``manifest.json`` with its size and checksum.
    A save that is interrupted leaves ``<folder>.partial``, and earlier checkpoints as they are.

    Ranks: all ranks of ``process_group``, which see the same file system.

    Args:
        state_dict: for example ``{"model": get_model_state_dict(model), "optimizer": ..., "step": step}``.
        folder: must not exist.
        process_group: the ranks; default: all.

    Raises:
        RuntimeError: on every rank: the folder exists, or a rank did not come or could not write.
    """
    group, folder = _group(process_group), Path(folder)
    partial, problem = partial_of(folder), ""
    if _is_first(group):
        problem = or_problem(begin_folder, folder)
    agree(group, "save()", [str(folder), *state_dict], problem)
    writer = FileSystemWriter(partial, sync_files=True)
    dcp.save(dict(state_dict), storage_writer=writer, process_group=process_group, no_dist=group is None)
    rank = 0 if group is None else group.rank()
    entries: dict[str, list[int]] = {}

    def look() -> str:
        entries.update(_entries([path for path in partial.iterdir() if path.name.startswith(f"__{rank}_")]))
        return ""

    parts: list[Any] = [(entries, or_problem(look))]
    if has_peers(group):
        assert group is not None
        mine, parts = parts[0], [None] * group.size()
        dist.all_gather_object(parts, mine, group=group)
    problem = next((text for _, text in parts if text), "")
    if rank == 0 and not problem:
        files = {name: entry for part, _ in parts for name, entry in part.items()}
        problem = or_problem(_finish, folder, files)
    agree(group, "save()", [str(folder)], problem)


def _finish(folder: Path, files: Mapping[str, list[int]]) -> str:
    partial = partial_of(folder)
    for name, (size, _) in files.items():
        if not (partial / name).is_file() or (partial / name).stat().st_size != size:
            return (
                f"{partial / name} is not what its rank has written: all ranks must see the same file system. The "
                f"checkpoint is not complete, and {folder} does not exist"
            )
    finish_folder(folder, dict(files) | _entries([partial / _METADATA]))
    return ""


def or_problem(function: Callable[..., str], *arguments: Any) -> str:
    """What ``function`` returns, or what the operating system has said: a problem that the other ranks are told of."""
    try:
        return function(*arguments)
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def load(
    state_dict: dict[str, Any],
    folder: str | Path,
    *,
    process_group: dist.ProcessGroup | None = None,
    planner: dcp.LoadPlanner | None = None,
) -> None:
    """Load a checkpoint that ``save``, or ``torch.distributed.checkpoint.save``, has written, at any number of ranks.

    Everything is verified before a tensor is written to: that the save was completed, sizes, and (if ``save`` wrote it)
    checksums. Values arrive in ``state_dict``, in whose sharded tensors they are loaded: give them to
    ``set_state_dict`` then, for what is in no tensor (parameter groups, step counts).

    Ranks: all ranks of ``process_group``, which see the same file system.

    Args:
        state_dict: what ``save`` was given, from the model and the optimizer to load into. Keys that it lacks are not
            loaded.
        folder: of the checkpoint.
        process_group: the ranks; default: all.
        planner: default: ``LoadPlanner()``.

    Raises:
        RuntimeError: on every rank: the checkpoint is incomplete or damaged, naming the file; or a rank did not come.
            Nothing was changed.
        Exception: torch's ``CheckpointException``: the checkpoint does not have what ``state_dict`` asks for.
    """
    group, folder = _group(process_group), Path(folder)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    agree(group, "load()", [str(folder), *state_dict], or_problem(damage, folder, rank, size))
    reader = FileSystemReader(folder)
    dcp.load(
        state_dict,
        storage_reader=reader,
        planner=planner or LoadPlanner(),
        process_group=process_group,
        no_dist=group is None,
    )


def _group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return process_group or (dist.group.WORLD if dist.is_initialized() else None)


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return group is None or group.rank() == 0


def partial_of(folder: Path) -> Path:
    """Where a folder is while it is written."""
    return folder.with_name(folder.name + ".partial")


def begin_folder(folder: Path) -> str:
    """Make an empty folder to write to; why that cannot be, or nothing."""
    if folder.exists():
        return f"{folder} exists: save each checkpoint to a folder of its own, so that an interrupted save harms none"
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return ""


def finish_folder(folder: Path, files: Mapping[str, list[int]]) -> None:
    """Note what has been written, and give the folder its name."""
    partial = partial_of(folder)
    with (partial / MANIFEST).open("w") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder)
    directory = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# ---- verification


def _entries(paths: list[Path]) -> dict[str, list[int]]:
    return {path.name: [path.stat().st_size, _checksum(path)] for path in sorted(paths)}


def _checksum(path: Path) -> int:
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
    if not (folder / _METADATA).is_file():
        return f"{folder} is no complete checkpoint: it has no {_METADATA}, which is written last. Load an earlier one"
    if (folder / MANIFEST).is_file():
        files = json.loads((folder / MANIFEST).read_text())["files"]
        chosen = sorted(files)[part::num_parts]
        found = [_damage_of(folder / name, *files[name]) for name in chosen]
    else:
        found = [_damage_of(folder / name, size, None) for name, size in _sizes(folder)]
    return next((text for text in found if text), "")


def _damage_of(path: Path, size: int, checksum: int | None) -> str:
    if not path.is_file():
        return f"{path} is missing: the checkpoint is damaged. Load an earlier one"
    found = path.stat().st_size
    if found < size or (checksum is not None and found != size):
        return f"{path} has {found} bytes, where {size} were written: the checkpoint is damaged. Load an earlier one"
    if checksum is not None and _checksum(path) != checksum:
        return f"{path} does not hold what was written (its checksum differs). Load an earlier checkpoint"
    return ""


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """The files of a checkpoint that torch wrote, and the least size that each must have."""
    ends: dict[str, int] = {}
    for info in FileSystemReader(folder).read_metadata().storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    yield from ends.items()

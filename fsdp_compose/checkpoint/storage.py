"""``save`` and ``load``: ``torch.distributed.checkpoint`` with folders that are either complete or absent, and errors
that all ranks raise.

Loading reads values before tensors, and no value can run code. ``folders`` defines the layout of a folder.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as AnyLoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config as serialization

from .._arguments import checked
from .._import_checks import is_untested
from ..errors import FSDPComposeError, MisuseRuntimeError, MisuseTypeError, RankLostError, class_of, name_of, text_of
from ..extension import (
    Optimizers,
    Peers,
    StateDictOptions,
    Target,
    get_model_state_dict,
    get_state_dict,
    listed,
    load_into,
    noticing_loss,
    set_model_state_dict,
    set_state_dict,
    state_placer,
)
from .folders import (
    MANIFEST,
    METADATA,
    NUMBERS,
    SAVED,
    Contents,
    Lists,
    SummedFile,
    abandon_folder,
    as_text,
    begin_folder,
    end_meeting,
    entries,
    finish_folder,
    hold_lock,
    local_folder,
    mark,
    meeting_of,
    new_token,
    next_save,
    partial_of,
    read_lists,
    refuse_damage,
    understood,
)
from .planner import (
    LoadPlanner,
    SavePlanner,
    flattened,
    give_back,
    keys_of,
    make_places,
    optimizer_digests,
    paths_of_numbers,
    read_cut_otherwise,
    with_string_keys,
    without_place,
)
from .values import for_rank, is_beside, read_value, refuse_unreadable, save_for_each_rank

# ---- Reading the files of a checkpoint for ``torch.distributed.checkpoint``: values before tensors, and never a value
# that could run code.


_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")  # matches torch's error about a value that it refuses to unpickle


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ". Make room on its disk, or save to another one"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), ". Give a folder that this process may write to"),
    errno.ENAMETOOLONG: ". Give the folder a name of at most 240 bytes",
}


class Told(RuntimeError):
    """An error as text, which can always be sent to the other ranks, whatever the type of the original error."""


@contextmanager
def telling() -> Iterator[None]:
    """Inside this context, convert errors to ``Told``."""
    try:
        yield
    except Told:
        raise
    except Exception as error:
        raise Told(_with_reason(error)) from None


def _with_reason(error: Exception) -> str:
    # When a disk is full, the error of torch's writer only has positions in a file; why is in an earlier one.
    text, earlier = text_of(error), cast(BaseException | None, error)
    while earlier is not None and not isinstance(earlier, OSError):
        earlier = earlier.__cause__ or earlier.__context__
    if earlier is None:
        return text
    remedy = _REMEDIES.get(earlier.errno or 0, "")
    return f"{text}{remedy}" if earlier is error else f"{earlier}{remedy} ({text})"


class Reader(FileSystemReader):
    """Reads a checkpoint whose ``contents`` have been checked.

    Attributes:
        refusal: the error that all ranks have before any tensor is written to.
    """

    refusal: RuntimeError | None = None

    def __init__(self, contents: Contents, allow_pickle: bool, peers: Peers) -> None:
        super().__init__(contents.folder)
        self._contents, self._allow_pickle, self._peers = contents, allow_pickle, peers

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        metadata = self._contents.metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: AnyLoadPlanner) -> Any:
        """Read values, check them, then read tensors."""
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        reader: Any = planner if self._allow_pickle else _Checking(planner, self._contents)
        with telling():
            read = super().read_data
            try:
                self._peers.attempt(read, replace(plan, items=values), reader)
                if isinstance(planner, LoadPlanner):
                    planner.check(planner.original_state_dict)
            except RuntimeError as error:
                self.refusal = error
                raise
            rest = read_cut_otherwise(replace(plan, items=tensors), planner, self._contents.metadata, read)
            return read(rest, planner)


class _Checking:
    """Wraps a planner and passes it only values that are safe to unpickle."""

    def __init__(self, planner: AnyLoadPlanner, contents: Contents) -> None:
        self._planner, self._contents = planner, contents
        self._is_careful = type(planner) is LoadPlanner and not planner.allow_pickle

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        try:
            if self._is_careful:
                self._planner.load_bytes(item, value)
                return
            plain = read_value(value)
        except pickle.UnpicklingError as error:
            found = _GLOBAL.search(str(error))
            what = f"refers to {found[1]}" if found else "is not a plain value"
            raise MisuseRuntimeError(
                f"{item.storage_index.fqn} in {self._contents.folder} {what}: unpickling it could run any code. Load "
                "with allow_pickle=True if nobody else could have written there, name it to torch.serialization."
                "add_safe_globals(), or save only tensors, numbers, strings and plain containers of them. Nothing was "
                "changed"
            ) from None
        harmless = io.BytesIO()  # saved anew: two pickle readers may read the same bytes differently
        torch.save(plain, harmless)
        harmless.seek(0)
        self._planner.load_bytes(item, harmless)


# ---- ``save`` and ``load``


@checked()
def save(state_dict: Mapping[str, Any], folder: str | Path, *, process_group: dist.ProcessGroup | None = None) -> None:
    """Save a checkpoint: sharded state dicts, and anything else that ``torch.distributed.checkpoint.save`` accepts.

    The folder is renamed into place only when all files are on disk, and ``manifest.json`` lists their sizes and
    checksums. An interrupted save leaves ``<folder>.partial`` and does not touch earlier checkpoints.

    Ranks: all ranks of ``process_group``, on a shared file system.

    Args:
        state_dict: for example ``{"model": get_model_state_dict(model), "optimizer": ..., "step": step}``. What is
            beside models and optimizers, and not equal on all ranks, is saved for each rank, and loaded by rank.
        folder: must not exist.
        process_group: the ranks; default: all.

    Raises:
        ValueError: ``folder`` is a network address.
        RuntimeError: on every rank: the folder exists, a value could not be loaded again, a plain tensor in an
            optimizer's state differs from rank to rank, or a rank did not arrive or could not write.
    """
    peers, folder = Peers(process_group or dist.group.WORLD, "save()"), local_folder(folder)
    begun = begin_save(peers, state_dict, folder)
    lock = meeting_of(begun.folder, begun.token) / f"save-{peers.rank}.lock"
    with abandoning(peers, begun), closing(FolderWriter(begun.path, lock)) as writer:
        with completing(peers, begun.folder):
            dcp.save(
                begun.state,
                storage_writer=writer,
                planner=SavePlanner(share=begun.share),
                process_group=process_group,
                no_dist=peers.group is None,
            )
        _complete(writer, begun, peers)


@dataclass(frozen=True)
class Begun:
    """A save that all ranks have begun.

    Attributes:
        state: what to save, with strings as keys.
        numbers: the paths of dicts with integer keys.
        folder, token: where the checkpoint will be, and what names the folder that it is written to.
        share: this rank and the number of ranks, if all ranks have the same keys.
    """

    state: dict[str, Any]
    numbers: list[tuple[Any, ...]]
    folder: Path
    token: str
    share: tuple[int, int] | None

    @property
    def path(self) -> Path:
        """The folder that the files are written to."""
        return partial_of(self.folder) / self.token


def begin_save(
    peers: Peers,
    state_dict: Mapping[str, Any],
    folder: Path,
    before: Callable[[], None] = lambda: None,
) -> Begun:
    """Agree on what is saved where, and make the folder to write to. If a rank has a problem, all ranks raise it.

    Args:
        before: called first; its problem is every rank's too.
    """

    def begin() -> tuple[dict[str, Any], list[Any], list[str], dict[str, str]]:
        before()
        plain = plain_state(state_dict)
        state = with_string_keys(plain)
        values, digests = flattened(state), optimizer_digests(state) if peers.several else {}
        peers.refuse_lost(state)
        refuse_unreadable(values)
        keys = keys_of(values)
        if peers.is_first:
            try:
                begin_folder(folder, token)
            except OSError as error:
                raise MisuseRuntimeError(f"{folder} cannot be written: {_with_reason(error)}") from error
        return state, [*paths_of_numbers(plain)], keys, digests

    token = new_token()  # the first rank's, which makes the folder, counts for all: ``told``
    with abandoning(peers, Begun({}, [], folder, token, None)):
        begun = peers.attempt(begin, facts=lambda made: [str(folder), *made[0]])
        state, numbers, keys, digests = begun
        told, is_alike = peers.compare("the owner of the folder", token, keys, digests)
        save_for_each_rank(peers, state)
    share = (peers.rank, peers.size) if is_alike and peers.group is not None else None
    return Begun(state, numbers, folder.absolute(), told, share)  # whatever os.chdir() comes


@contextmanager
def abandoning(peers: Peers, begun: Begun) -> Iterator[None]:
    """Inside this context, an error that all ranks raise makes the first rank delete the folder."""
    try:
        yield
    except RuntimeError:
        if peers.is_first:
            abandon_folder(begun.folder, begun.token)
        raise


@contextmanager
def completing(peers: Peers, folder: Path) -> Iterator[None]:
    """Inside this context, errors of collectives say that the checkpoint was not completed."""
    with _explaining_failures(peers, lambda _: f"{folder} was not completed"), _noticing_loss(peers):
        yield


@contextmanager
def _explaining_failures(peers: Peers, consequence: Callable[[BaseException], str]) -> Iterator[None]:
    """Inside this context, errors of ``torch.distributed.checkpoint`` and of its collectives, whose own errors name no
    rank, become errors that name the call, and what they leave behind."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        text = str(cause) if isinstance(cause, (Told, FSDPComposeError)) else f"{type(cause).__name__}: {cause}"
        text = f"on rank {rank}: {text.rstrip('.')}. {consequence(error)}"
        raise class_of(name_of(cause))(f"{peers.call}: {text}") from error
    except RuntimeError as error:
        if not peers.several:
            raise
        kind = type(error) if isinstance(error, FSDPComposeError) else RankLostError
        text = f"the ranks lost contact: another one has ended, or does not answer ({str(error).rstrip('.')})"
        raise kind(f"{peers.call}: {text}. {consequence(error)}") from error


def _noticing_loss(peers: Peers) -> AbstractContextManager[None]:
    return nullcontext() if peers.group is None else noticing_loss(peers.group, f"a collective of {peers.call}")


def to_first(peers: Peers, begun: Begun, own: Any) -> list[Any]:
    """Return every rank's ``own`` on the first rank."""
    brought: list[Any] = [own]
    if peers.several:
        brought = [None] * peers.size
        with completing(peers, begun.folder):
            dist.gather_object(own, brought if peers.is_first else None, group=peers.group, group_dst=0)
    return brought


def _complete(writer: FolderWriter, begun: Begun, peers: Peers) -> None:
    """Verify the files that all ranks wrote, and rename the folder into place."""
    brought = to_first(peers, begun, (writer.entries, begun.numbers))

    def finish() -> None:
        if peers.is_first:
            files = {name: entry for entries_of_rank, _ in brought for name, entry in entries_of_rank.items()}
            finish_save(writer, begun.folder, begun.token, files, [path for _, paths in brought for path in paths])
            end_meeting(begun.folder, begun.token)

    peers.attempt(finish)


def finish_save(
    writer: FolderWriter, folder: Path, token: str, files: Mapping[str, list[int]], numbers: Iterable[tuple[Any, ...]]
) -> None:
    """Check the files of all ranks, write the manifest, and rename the folder into place. For the first rank.

    Args:
        writer: has written the metadata.
        files: size and checksum by name.
        numbers: the paths of dicts with integer keys.
    """
    for name in {*files, *writer.names}:
        path = writer.folder / name
        if name not in files or not path.is_file() or path.stat().st_size != files[name][0]:
            raise MisuseRuntimeError(
                f"{path} is not what its rank wrote: all ranks must share one file system, and no other job may write "
                "there. The checkpoint was not completed"
            )
    manifest = {
        "files": dict(files) | entries([writer.folder / METADATA]),
        NUMBERS: [*dict.fromkeys(numbers)],
        SAVED: next_save(folder),
    }
    if is_untested(str(torch.__version__)):  # its metadata might be in a format that load() would refuse
        written = {METADATA: (writer.folder / METADATA).read_bytes(), MANIFEST: as_text(manifest).encode()}
        try:
            understood(writer.folder, written, allow_pickle=False)
        except RuntimeError as error:
            raise MisuseRuntimeError(
                f"load() could not read the checkpoint that torch {torch.__version__} just wrote: {error}"
            ) from error
    finish_folder(folder, token, manifest)


@checked()
def load(
    state_dict: dict[str, Any],
    folder: str | Path,
    *,
    process_group: dist.ProcessGroup | None = None,
    planner: dcp.LoadPlanner | None = None,
    allow_pickle: bool = False,
) -> None:
    """Load a checkpoint written by ``save`` or ``torch.distributed.checkpoint.save``, on any number of ranks.

    Before it writes to any tensor, it verifies that the save was completed, file sizes and, if ``save`` wrote it,
    checksums. It runs no code from the checkpoint and reads no file outside of the folder.

    Values are loaded into ``state_dict`` and its sharded tensors. Pass it to ``set_state_dict`` afterwards, for values
    that are in no tensor (parameter groups, step counts).

    Ranks: all ranks of ``process_group``, on a shared file system.

    Args:
        state_dict: a dict like the one given to ``save``, from the model and the optimizer to load into. Names that it
            lacks are not loaded; below those that it has, everything is: dicts and lists grow. Tensors on the meta
            device are replaced by loaded ones.
        folder: the checkpoint's folder.
        process_group: the ranks; default: all.
        planner: default: ``LoadPlanner()``. One of another class decides alone what is loaded.
        allow_pickle: unpickle values other than tensors, numbers, strings and plain containers of them. That can run
            any code: use it only for checkpoints that nobody else could have changed.

    Raises:
        ValueError: ``folder`` is a network address.
        RuntimeError: on every rank: the checkpoint is incomplete or damaged (the error names the file); it lacks a key
            of ``state_dict``, or has a parameter that ``state_dict`` has no place for; another number of ranks saved
            what each had for itself; or a rank did not arrive. Nothing was changed, unless the error says so.
    """
    peers, folder = Peers(process_group or dist.group.WORLD, "load()"), local_folder(folder)

    def begin() -> tuple[dict[str, Any], dict[str, Any], Lists]:
        plain = plain_state(state_dict)
        # torch.distributed.checkpoint changes this one: the user's containers stay untouched until everything is read.
        state = with_string_keys(plain)
        with torch.inference_mode(False):
            _give_memory(state)
        return plain, state, read_lists(folder) if peers.rank == 0 else {}

    plain, state, lists = peers.attempt(begin, facts=lambda made: [str(folder), *made[1]])
    if peers.several:  # thousands of ranks that read one file at once would wait for each other
        told = [lists]
        with _noticing_loss(peers):
            dist.broadcast_object_list(told, group=peers.group, group_src=0)
        lists = told[0]

    def verified() -> Contents:
        contents = understood(folder, lists, allow_pickle)
        refuse_damage(contents, peers.rank, peers.size)
        return contents

    contents = peers.attempt(verified)
    if peers.rank == 0 and not contents.is_verifiable:
        warnings.warn(f"{folder} has no {MANIFEST}: only the sizes of its files were verified, not their contents")
    planner = planner or LoadPlanner(allow_pickle=allow_pickle)
    if isinstance(planner, LoadPlanner):
        contents = _grow(peers, state, contents)
    reader = Reader(contents, allow_pickle, peers)
    try:
        with _explaining_failures(peers, _loaded_so_far):
            dcp.load(
                state, storage_reader=reader, planner=planner, process_group=process_group, no_dist=peers.group is None
            )
    except RuntimeError:
        if reader.refusal is not None:
            raise reader.refusal from None
        raise
    numbers = contents.numbers
    loaded = {key: give_back(value, state[str(key)], numbers, (str(key),)) for key, value in plain.items()}
    peers.attempt(_give_back, state_dict, loaded)


def _grow(peers: Peers, state: dict[str, Any], contents: Contents) -> Contents:
    """Return the contents as this rank sees them, and let ``state`` have places for what is below its names. What
    another rank has a place for belongs to its part of a model."""
    metadata = peers.attempt(for_rank, contents.metadata, peers.rank, peers.size, state.keys())
    found = peers.attempt(without_place, state, metadata)
    keys = [*contents.metadata.state_dict_metadata]
    own = "".join("01"[key in found or key not in metadata.state_dict_metadata] for key in keys)

    def lacked_by_all(brought: list[str]) -> str:
        return f"{reduce(and_, [int(bits or '0', 2) for bits in brought]):0{len(own)}b}"

    bits = dict(zip(keys, peers.ask("places", own, lacked_by_all), strict=False))
    lacking = {key: path for key, path in found.items() if bits.get(key) == "1" or is_beside(path[0], state[path[0]])}
    peers.attempt(make_places, state, metadata, lacking)
    return replace(contents, metadata=metadata)


def _loaded_so_far(error: BaseException) -> str:
    if not isinstance(error, CheckpointException):
        return "The state dict may be partly loaded"
    return "The state dict may be partly loaded: load again" if error.args[0] == "read" else "Nothing was changed"


def plain_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Replace stateful objects in a state dict by their ``state_dict()``."""
    plain = dict(state_dict)
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            try:
                plain[key] = value.state_dict()
            except Exception as error:
                raise RuntimeError(f"state_dict() of {key} raised {text_of(error)}") from error
    return plain


def _give_back(state_dict: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Put loaded values into the user's dict and objects."""
    for key, value in loaded.items():
        before = state_dict.get(key)
        if not isinstance(before, Stateful):
            state_dict[key] = value
            continue
        try:
            before.load_state_dict(value)
        except Exception as error:
            raise RuntimeError(
                f"everything was read, but load_state_dict() of {key} raised {text_of(error)}"
            ) from error


def _give_memory(state: dict[str, Any]) -> None:
    """Replace tensors on the meta device by tensors with memory."""
    for key, value in state.items():
        if isinstance(value, dict):
            _give_memory(value)
        elif isinstance(value, torch.Tensor) and value.is_meta:
            state[key] = Target(value).empty()


class FolderWriter(FileSystemWriter):
    """Writes a rank's files.

    Args:
        lock: a file to make and lock from the first byte written on, until ``close``.

    Attributes:
        entries: size and checksum by name of the files for data that this rank wrote.
        names: names of the files that all ranks report; set at the end, on the first rank.
    """

    names: frozenset[str] = frozenset()

    def __init__(self, folder: Path, lock: Path | None = None) -> None:
        super().__init__(folder, sync_files=True)
        self.fs.create_stream = self._create_stream  # type: ignore[assignment,method-assign]
        self.entries: dict[str, list[int]] = {}
        self.folder, self._lock, self._held = folder, lock, -1

    def close(self) -> None:
        if self._held >= 0:
            os.close(self._held)

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        # Without torch's checksums, which torch never compares.
        with telling(), serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            if self._lock is not None:
                self._held = hold_lock(self._lock)
            return super().write_data(*arguments, **options)

    @contextmanager
    def _create_stream(self, path: Path, mode: str) -> Iterator[SummedFile]:
        with SummedFile(path) as file:
            yield file
        self.entries[path.name] = file.entry

    def storage_meta(self) -> StorageMeta | None:
        meta = super().storage_meta()
        assert meta is not None
        meta.save_id = mark(meta.save_id)
        return meta

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with_data = {**self.entries}
        super().finish(metadata, results)
        self.entries = with_data
        self.names = frozenset(info.relative_path for info in metadata.storage_data.values())


# ---- Getting, loading and setting in one call


@checked()
def resume(
    folder: str | Path,
    model: nn.Module,
    optimizers: Optimizers | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizers, on any number of ranks, and return what else it has.

    The checkpoint was saved as ``save({"model": ..., "optimizer": ..., **others}, folder)``, with the state dicts of
    ``get_state_dict``. This is ``load`` between the getters and the setters, which many programs forget: without a
    setter, parameter groups and the state of a new optimizer are not loaded.

    Ranks: all ranks of ``process_group``, on a shared file system.

    Args:
        folder: the checkpoint's folder.
        model, optimizers: what to load into; without optimizers, theirs stays unread.
        process_group: the ranks; default: all.
        others: values to load under their names, for example ``step=0``. An object that has ``load_state_dict()``
            (a scheduler, a data loader) is loaded in place.

    Returns:
        ``others`` with the loaded values.

    Raises:
        TypeError: a name in ``others`` is ``optimizer``.
        RuntimeError, ValueError: as for ``load`` and the setters. Nothing was changed, unless the error says so.

    Example::

        step = resume("step-1000", model, optimizer, step=0)["step"]
    """
    if "optimizer" in others:
        raise MisuseTypeError("resume(): pass the optimizer by position: resume(folder, model, optimizer)")
    trained = [] if optimizers is None else listed(optimizers)

    def check(loaded: dict[str, Any]) -> None:
        given = None if optimizers is None else trained
        load_into(
            "resume()", model, given, loaded["model"], loaded.get("optimizer"), StateDictOptions(), only_check=True
        )

    planner = LoadPlanner(allow_pickle=False, place_state=state_placer(model, trained), check=check)
    if optimizers is None:
        state = {"model": get_model_state_dict(model), **others}
        load(state, folder, process_group=process_group, planner=planner)
        set_model_state_dict(model, state.pop("model"))
        return state
    of_model, of_optimizers = get_state_dict(model, trained)
    state = {"model": of_model, "optimizer": of_optimizers, **others}
    load(state, folder, process_group=process_group, planner=planner)
    set_state_dict(model, trained, model_state_dict=state.pop("model"), optim_state_dict=state.pop("optimizer"))
    return state

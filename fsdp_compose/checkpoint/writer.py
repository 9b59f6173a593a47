"""The process that writes a rank's part of a checkpoint while training goes on (``background`` starts it), and how the
writers of all ranks agree whether the checkpoint is complete.

A writer has no process group, and sends nothing over those of training. Writers meet in the folder that they write::

    step-200.partial/
        save-3f2a.../
            __0_0.distcp  __1_0.distcp
        meet-3f2a.../
            0.lock  1.lock    held by the writers; the kernel lets go of the lock of one that dies
            0.told  1.told    a rank's report: what it wrote, or why it could not
            verdict           the first rank's reason why the checkpoint was not completed
            1.heard           left by rank 1 when it has read the verdict

The first rank's writer waits until each rank has reported or has died. If all is there, it renames the folder into
place. Otherwise it leaves a verdict, and deletes everything when all ranks have read that. The other writers wait for
the renaming or the verdict. So the folder decides the outcome, not the fate of a process: a writer that dies after its
report leaves a complete checkpoint.

Where a file system of several machines has no locks, only timeouts tell that a writer has died.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .._torch import StorageInfo
from ..errors import RankLostError, class_of, name_of, text_of
from .folders import abandon_folder, end_meeting, is_held, is_lock_held, lost_to_another, meeting_of, partial_of, sync
from .planner import with_own_storage
from .storage import FolderWriter, finish_save

CALL = "async_save()"

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 1.0  # seconds between looks; thousands of ranks may look at one file system
_HEARING = 5.0  # seconds within which a rank that waits for a verdict reads it
_PATIENCE = 30.0  # seconds beyond the timeout, in which ranks name the one that was late


# ---- What is sent to a writer


@dataclass(frozen=True)
class Place:
    """Where a tensor is in the staging memory."""

    start: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """What a rank writes, the same for every save of states with the same names, shapes and placements.

    Attributes:
        plan: the items.
        places: the place of each item in the staging memory; ``None`` for an item that is sent serialized.
        metadata: that of the checkpoint, on the first rank.
    """

    plan: SavePlan
    places: list[Place | None]
    metadata: Metadata | None


@dataclass(frozen=True)
class Request:
    """One save.

    Attributes:
        folder, token: as in ``folders``.
        layout: ``None`` if it is that of the last request.
        values: the serialized items, by number.
        numbers: the paths of dicts with integer keys.
        nbytes: the size of the staging memory.
        timeout: how long this rank waits for the others, in seconds.
    """

    folder: Path
    token: str
    rank: int
    size: int
    layout: Layout | None
    values: dict[int, bytes]
    numbers: list[tuple[Any, ...]]
    nbytes: int
    timeout: float


Outcome = tuple[str, str]
"""Class of an error by ``errors.name_of`` and its text; two empty texts if the checkpoint is complete."""

COMPLETE: Outcome = ("", "")
Answer = Callable[[Outcome], None]
_HEADER = struct.Struct("<QB")


def send(channel: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message, with open files (at most two)."""
    content = pickle.dumps(message)
    header = _HEADER.pack(len(content), len(descriptors))
    if descriptors:
        socket.send_fds(channel, [header], [*descriptors])
    else:
        channel.sendall(header)
    channel.sendall(content)


def receive(channel: socket.socket) -> tuple[Any, list[int]] | None:
    """Wait for a message, and return it with its open files; ``None`` if the other process has ended."""
    try:
        header, descriptors, *_ = socket.recv_fds(channel, _HEADER.size, 2)
        if len(header) < _HEADER.size:
            return None
        content = bytearray()
        nbytes, _ = _HEADER.unpack(header)
        while len(content) < nbytes:
            if not (received := channel.recv(min(nbytes - len(content), 2**20))):
                return None
            content += received
        return pickle.loads(content), descriptors
    except ConnectionError:
        return None


# ---- How the ranks meet


class Meeting:
    """The folder where the ranks of a save meet, as one rank's writer sees it, or its trainer if the writer has died.

    Args:
        timeout: in seconds.
    """

    def __init__(self, folder: Path, token: str, rank: int, size: int, timeout: float) -> None:
        self.folder, self.token, self.rank, self.size = folder, token, rank, size
        self.path = partial_of(folder) / token
        self._meeting, self._timeout = meeting_of(folder, token), timeout
        self._ends = time.monotonic() + timeout
        try:
            self._identity = self.path.stat()
            self._first_lock = (self._meeting / "0.lock").open("rb")
        except FileNotFoundError:
            end_meeting(folder, token)
            raise lost_to_another(folder, self.path) from None

    def close(self) -> None:
        self._first_lock.close()

    def tell(self, told: dict[str, Any]) -> None:
        """Leave this rank's report for the first rank: what it wrote, or its problem."""
        self._leave(f"{self.rank}.told", json.dumps(told))

    def judge(self, finish: Callable[[list[dict[str, Any]]], None], answer: Answer) -> None:
        """On the first rank: wait for all reports. Complete the checkpoint with ``finish``, or refuse it."""
        try:
            outcome, told = self._hear_all()
            if outcome == COMPLETE:
                finish(told)
        except Exception as error:
            outcome = outcome_of(error)
        if outcome == COMPLETE:
            # Not earlier: ``latest`` takes a save for dead if it finds neither a lock nor the checkpoint.
            end_meeting(self.folder, self.token)
            answer(COMPLETE)
        else:
            self.refuse(outcome, answer)

    def refuse(self, outcome: Outcome, answer: Answer) -> None:
        """On the first rank: leave a verdict, and delete everything once the others have read it."""
        _delete_data(self.path, "")  # it may have filled the disk, and the verdict needs room
        with contextlib.suppress(OSError):
            self._meeting.mkdir(exist_ok=True)
            self._leave("verdict", json.dumps(outcome))
        is_heard = self._wait_for_readers(_HEARING)
        if not is_heard:  # some rank still writes
            answer(outcome)
            self._wait_for_readers(max(_HEARING, self._ends + _PATIENCE - time.monotonic()))
        abandon_folder(self.folder, self.token)
        if is_heard:
            answer(outcome)

    def await_verdict(self) -> Outcome:
        """On another rank than the first: wait until the folder has its name, or there is a verdict."""
        ended: float | None = None
        for pause in _pauses():
            now = time.monotonic()
            if ended is None and is_held(self._first_lock.fileno()) is False:
                ended = now
            is_gone = not self.path.is_dir()  # asked first: the first rank leaves its verdict before it deletes
            if self.is_complete():
                return COMPLETE
            verdict = self._verdict()
            if verdict is not None:
                with contextlib.suppress(OSError):
                    self._leave(f"{self.rank}.heard", "")
                return verdict
            if is_gone:
                return outcome_of(lost_to_another(self.folder, self.path))
            if ended is not None and now > ended + _HEARING:  # the trainer, which would leave a verdict, is dead too
                return self._lost(0, is_late=False)
            if now > self._ends + _PATIENCE:
                return self._lost(0, is_late=True)
            time.sleep(pause)
        raise AssertionError

    def go_on_without_writer(self, is_late: bool, answer: Answer) -> None:
        """Find the outcome of the save, for a trainer whose writer has died or was too late."""
        if self.rank:
            answer(self.await_verdict())
        elif self.is_complete():
            end_meeting(self.folder, self.token)
            answer(COMPLETE)
        else:
            self.refuse(self._verdict() or self._lost(0, is_late), answer)

    def _verdict(self) -> Outcome | None:
        try:
            kind, text = json.loads((self._meeting / "verdict").read_bytes())
        except (OSError, ValueError):
            return None
        return kind, text

    def is_complete(self) -> bool:
        try:
            return os.path.samestat(self.folder.stat(), self._identity)
        except OSError:
            return False

    def _lost(self, rank: int, is_late: bool) -> Outcome:
        """The outcome if a rank's writer has died, or is too late."""
        why = f"has not ended in {self._timeout:.0f} s" if is_late else "is gone, or that rank's call was interrupted"
        left = f"{self.folder} was not completed; earlier checkpoints are unchanged"
        return outcome_of(RankLostError(f"the process that saves for rank {rank} {why}. {left}"))

    def _hear_all(self) -> tuple[Outcome, list[dict[str, Any]]]:
        told: dict[int, dict[str, Any]] = {}
        dead: set[int] = set()
        for pause in _pauses():
            for rank in sorted({*range(self.size)} - told.keys() - dead):
                has_ended = not self._is_alive(rank)  # asked first: a writer may report and end in between
                path = self._meeting / f"{rank}.told"
                if path.exists():
                    told[rank] = json.loads(path.read_bytes())
                elif has_ended:
                    dead.add(rank)
            if len(told) + len(dead) == self.size or time.monotonic() > self._ends:
                break
            if not self.path.is_dir():
                raise lost_to_another(self.folder, self.path)
            time.sleep(pause)
        for rank in range(self.size):
            if rank not in told:
                return self._lost(rank, is_late=rank not in dead), []
            if problem := told[rank].get("problem"):
                kind, text = problem
                told_by = "" if self.size == 1 else f"on rank {rank}: "
                return (kind, f"{told_by}{text}. {self.folder} was not completed"), []
        return COMPLETE, [told[rank] for rank in range(self.size)]

    def _is_alive(self, rank: int) -> bool:
        # ``None``, no lock file, means that the folder is gone: ``_hear_all`` raises for that.
        return rank == self.rank or is_lock_held(self._meeting / f"{rank}.lock") is not False

    def _wait_for_readers(self, limit: float) -> bool:
        """Wait until all other ranks have read the verdict, or are dead."""
        begun = time.monotonic()
        for pause in _pauses():
            silent = [rank for rank in range(1, self.size) if not (self._meeting / f"{rank}.heard").exists()]
            waited = time.monotonic() - begun
            # If a writer has died, its trainer takes a moment to read the verdict in its place.
            if not silent or (waited >= _HEARING and not any(map(self._is_alive, silent))):
                return True
            if waited >= limit:
                return False
            time.sleep(pause)
        raise AssertionError

    def _leave(self, name: str, text: str) -> None:
        """Write a file that others find whole or not at all."""
        unfinished = self._meeting / f"{name}.{self.rank}.new"
        unfinished.write_text(text)
        sync(unfinished)
        unfinished.rename(self._meeting / name)


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(1.5 * pause, _LONGEST_PAUSE)


def outcome_of(error: Exception) -> Outcome:
    return name_of(error), text_of(error).rstrip(".")


def error_of(outcome: Outcome) -> RuntimeError | None:
    """The error that every rank raises for an outcome."""
    kind, text = outcome
    return None if outcome == COMPLETE else class_of(kind)(f"{CALL}: {text}")


# ---- Writing


class _Staged:
    """Takes the place of a planner: finds an item's data in the staging memory, or among the serialized ones."""

    def __init__(self, layout: Layout, values: dict[int, bytes], memory: torch.Tensor) -> None:
        self._data: dict[int, Any] = {}  # by the id of an item, which ``plan`` keeps alive
        items = [*layout.plan.items]
        for i, place in enumerate(layout.places):
            if place is None:
                items[i] = replace(items[i], type=WriteItemType.BYTE_IO)
                self._data[id(items[i])] = io.BytesIO(values[i])
            else:
                self._data[id(items[i])] = with_own_storage(view_of(memory, place))
        self.plan = replace(layout.plan, items=items)

    def resolve_data(self, item: WriteItem) -> Any:
        return self._data[id(item)]


def view_of(memory: torch.Tensor, place: Place) -> torch.Tensor:
    return memory[place.start : place.start + place.nbytes].view(place.dtype).view(place.shape)


def map_memory(descriptor: int, nbytes: int) -> torch.Tensor:
    """Map shared memory, all of it at once where the system can, as bytes."""
    populate = getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | populate), dtype=torch.uint8)


class _Writer:
    """What a writer keeps from one save to the next."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def save(self, request: Request, descriptors: list[int], answer: Answer) -> None:
        with contextlib.ExitStack() as lock:
            lock.callback(os.close, descriptors[0])
            for memory in descriptors[1:]:
                self._memory = map_memory(memory, request.nbytes)
                os.close(memory)
            self._layout = request.layout or self._layout
            assert self._layout is not None
            meeting = Meeting(request.folder, request.token, request.rank, request.size, request.timeout)
            with contextlib.closing(meeting):
                self._save(meeting, request, self._layout, lock.close, answer)

    def _save(
        self, meeting: Meeting, request: Request, layout: Layout, let_go: Callable[[], None], answer: Answer
    ) -> None:
        writer = FolderWriter(meeting.path)
        writer.set_up_storage_writer(request.rank == 0)
        try:
            staged = _Staged(layout, request.values, self._memory)
            results = [_as_plain(result) for result in writer.write_data(staged.plan, staged).wait()]
            told = {"results": results, "files": writer.entries, "numbers": request.numbers}
        except Exception as error:
            _delete_data(meeting.path, f"__{request.rank}_")  # which may have filled the disk
            told = {"problem": outcome_of(error)}
        try:
            meeting.tell(told)
        except OSError as error:
            let_go()  # without its lock, the first rank takes this one for dead, and need not wait
            if not request.rank:
                meeting.refuse(outcome_of(error), answer)
                return
        if request.rank:
            answer(meeting.await_verdict())
            return

        def finish(told: list[dict[str, Any]]) -> None:
            assert layout.metadata is not None
            writer.finish(layout.metadata, [[_result(*item) for item in report["results"]] for report in told])
            files = {name: entry for report in told for name, entry in report["files"].items()}
            numbers = [tuple(path) for report in told for path in report["numbers"]]
            finish_save(writer, request.folder, request.token, files, numbers)

        meeting.judge(finish, answer)


def _delete_data(path: Path, prefix: str) -> None:
    for found in path.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found.unlink()


def _as_plain(result: WriteResult) -> list[Any]:
    index, info = result.index, result.storage_data
    return [
        *(index.fqn, index.offset and list(index.offset), index.index, result.size_in_bytes),
        *(info.relative_path, info.offset, info.length),
    ]


def _result(fqn: str, offset: Any, index: Any, nbytes: int, path: str, start: int, length: int) -> WriteResult:
    place = MetadataIndex(fqn, offset if offset is None else torch.Size(offset), index)
    return WriteResult(place, nbytes, StorageInfo(path, start, length))


def main(descriptor: int) -> None:
    """Write what is requested until the trainer has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole job; a writer ends only after its trainer
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    channel, writer = socket.socket(fileno=descriptor), _Writer()

    def answer(outcome: Outcome) -> None:
        with contextlib.suppress(OSError):  # the trainer has ended
            send(channel, outcome)

    while (message := receive(channel)) is not None:
        request, descriptors = message
        try:
            writer.save(request, descriptors, answer)
        except Exception as error:  # a report was impossible too; the lock is free now, so the others see an end
            print(f"{CALL}, rank {request.rank}: {text_of(error)}", file=sys.stderr, flush=True)
            answer(outcome_of(error))

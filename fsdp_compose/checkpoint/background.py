"""``async_save``: a checkpoint that is written while training goes on.

Ranks plan and agree as in ``save``. Each copies its shards into memory that it shares with a process of its own, the
writer (``writer.py``), and returns. Writers keep all promises of ``save`` about the folder, without a collective.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from .._arguments import checked
from ..errors import MisuseRuntimeError
from ..extension import Peers, kept_for, says_what_it_holds
from .folders import hold_lock, local_folder, meeting_of
from .planner import SavePlanner, with_string_keys
from .storage import Begun, FolderWriter, abandoning, begin_save, completing, plain_state, to_first
from .writer import (
    CALL,
    Layout,
    Meeting,
    Outcome,
    Place,
    Request,
    error_of,
    map_memory,
    outcome_of,
    receive,
    send,
    view_of,
)

_ALIGNMENT = 64  # bytes
_MARGIN = 10.0  # seconds beyond the timeout, in which a writer reports that it, or another one, was too late


class SaveFuture(Future[Path]):
    """The result is the checkpoint's folder. ``result()`` and ``exception()`` of a failed save give an error with the
    same text on every rank."""

    is_heard = False
    """Whether a caller has seen the outcome. Otherwise the next save, or the end of the process, raises the error."""

    def result(self, timeout: float | None = None) -> Path:
        self.is_heard |= self.done()
        try:
            return super().result(timeout)
        finally:
            self.is_heard |= self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.is_heard = True
        return found


@checked()
class Saver:
    """Saves checkpoints while training goes on, one at a time. Usable as a context manager.

    Making it starts the process that writes and, with ``state_dict``, reserves the memory for the copy, so that the
    first save need not.

    Ranks: ``save`` all ranks of ``process_group``, on a shared file system; everything else is local.

    Args:
        state_dict: a state like those to save.
        process_group: the ranks; default: all.
        staging: a folder for the copy, on a fast disk. Default: memory, as much as this rank's part of the state.
        timeout: how long a save may take. When it is over, the save is an error on every rank.

    Raises:
        MisuseRuntimeError: there is no room for the copy.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        staging: str | Path | None = None,
        timeout: timedelta = timedelta(hours=1),
    ) -> None:
        self._group, self._timeout = process_group, timeout.total_seconds()
        self._staging, self._underway = _Staging(staging), _Underway()
        # The plan of the last save, with the places of its copy, is used again while what it depends on stays the same.
        self._signature: list[Any] | None = None
        self._layout: Layout | None = None
        weakref.finalize(self, self._underway.end)  # also at exit, which so waits for a save under way
        self._underway.running()
        if state_dict is not None:
            planner = _Planner()
            planner.set_up_planner(with_string_keys(plain_state(state_dict)))
            plan = planner.create_local_plan()
            self._staging.reserve(*_placed([planner.resolve_data(item) for item in plan.items])[1:])

    def save(self, state_dict: Mapping[str, Any], folder: str | Path, *, wait: bool = True) -> SaveFuture:
        """Begin a save, and return when this rank's part of the state is copied: training may change it then. Arguments
        and promises are those of ``checkpoint.save``.

        The save goes on if the trainer dies afterwards. A failed save is the same error on every rank. The future
        raises it; if no caller asks the future, the next call raises it and saves nothing, or the end of the process.

        Args:
            state_dict, folder: as for ``checkpoint.save``.
            wait: wait until the last save has ended, else raise if it has not.

        Raises:
            RuntimeError: on every rank: as for ``checkpoint.save``; the last save has failed, or not ended in time;
                or there is no room for the copy.
        """
        return self._save(Peers(self._group or dist.group.WORLD, CALL), state_dict, local_folder(folder), wait)

    @property
    def pid(self) -> int:
        """The number of the process that writes, which is started if there is none."""
        return self._underway.running().pid

    @property
    def staged_bytes(self) -> int:
        """The size of the memory for the copy."""
        return self._staging.nbytes

    def close(self) -> None:
        """Wait for the save that is under way, and end the process. Raise the save's error if no caller has seen it."""
        self._underway.end()
        self._staging, self._signature, self._layout = _Staging(self._staging.folder), None, None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _save(self, peers: Peers, state_dict: Mapping[str, Any], folder: Path, wait: bool) -> SaveFuture:
        if self._underway.pid != os.getpid():  # in a fork: the parent's writer reads this memory
            staging, timeout = self._staging.folder, timedelta(seconds=self._timeout)
            Saver.__init__(self, process_group=self._group, staging=staging, timeout=timeout)
        with torch.no_grad(), torch.inference_mode(False), contextlib.ExitStack() as waiting:
            begun = begin_save(peers, state_dict, folder, before=partial(self._finish_last, wait))
            with abandoning(peers, begun):
                planner = _Planner(share=begun.share)
                planner.set_up_planner(begun.state, is_coordinator=peers.is_first)
                signature = _signature(planner)
                is_kept = signature is not None and signature == self._signature
                if not peers.ask("kept plan", is_kept, all):
                    self._signature, self._layout = signature, _plan_together(peers, planner, begun)
                copied = peers.attempt(self._copy, planner, begun, peers, waiting)
            copied.future.set_running_or_notify_cancel()
            self._underway.future = copied.future
            copied.go.put(copied)
            copied.is_sent.wait()
            return copied.future

    def _finish_last(self, wait: bool) -> None:
        try:
            self._underway.finish(wait)
        except RuntimeError as error:  # which gets the name of the call again
            raise type(error)(str(error).removeprefix(f"{CALL}: ")) from error

    def _copy(self, planner: SavePlanner, begun: Begun, peers: Peers, waiting: contextlib.ExitStack) -> _Copied:
        """Copy this rank's part of the state, take the lock that the writer will hold, and start the thread that sends
        the part to the writer when all ranks have copied theirs."""
        assert self._layout is not None
        data = [planner.resolve_data(item) for item in self._layout.plan.items]
        places, nbytes, on_cuda = _placed(data)
        self._staging.reserve(nbytes, on_cuda)
        values = self._staging.copy(data, places)
        if self._layout.places != places:
            self._layout = replace(self._layout, places=places)
        about = (values, begun.numbers, self._staging.nbytes, self._timeout)
        request = Request(begun.folder, begun.token, peers.rank, peers.size, self._layout, *about)
        lock = os.fdopen(hold_lock(meeting_of(begun.folder, begun.token) / f"{peers.rank}.lock"), "wb", buffering=0)
        copied = _Copied(request, self._underway.running(), lock)
        # On a thread, because Ctrl-C and handlers of signals interrupt the main thread alone. If none can be started,
        # all ranks raise.
        waiting.callback(copied.go.put, None)
        threading.Thread(target=self._write, args=(copied,), daemon=True).start()
        return copied

    def _write(self, copied: _Copied) -> None:
        """Send this rank's part to the writer, once all ranks have copied theirs, and wait for the outcome."""
        # The thread refers to this object, so that its memory lives as long as the writer reads it.
        request, future = copied.request, copied.future

        def answer(outcome: Outcome) -> None:
            error = error_of(outcome)
            if error is None:
                future.set_result(request.folder)
            else:
                future.set_exception(error)

        try:
            with copied.lock:  # held here until the writer holds it
                if copied.go.get() is None:
                    raise MisuseRuntimeError(f"the call that should save {request.folder} was interrupted: save again")
                meeting = Meeting(request.folder, request.token, request.rank, request.size, request.timeout)
                copied.writer.submit(request, copied.lock.fileno(), self._staging)
            copied.is_sent.set()
            with contextlib.closing(meeting):
                outcome, is_late = copied.writer.outcome(self._timeout + _MARGIN)
                if outcome is None:
                    meeting.go_on_without_writer(is_late, answer)
                else:
                    answer(outcome)
        except Exception as error:  # for example, another job has replaced this save
            answer(outcome_of(error))
        finally:
            copied.is_sent.set()


@checked()
def async_save(
    state_dict: Mapping[str, Any],
    folder: str | Path,
    *,
    process_group: dist.ProcessGroup | None = None,
    wait: bool = True,
) -> SaveFuture:
    """Save a checkpoint while training goes on: ``Saver.save`` of a saver that is kept for the process group.

    The first call starts the process that writes, and takes longer than the later ones; make a ``Saver`` to choose
    when, where the copy is, and how long a save may take.

    Ranks: all ranks of ``process_group``, on a shared file system.

    Args:
        state_dict, folder, process_group: as for ``save``.
        wait: wait until the last save has ended, else raise if it has not.

    Returns:
        A future whose ``result()`` is the folder, or raises the error of the save, the same on every rank.

    Raises:
        RuntimeError: on every rank: as for ``save``; the last save has failed, and no caller has asked its future; or
            there is no room for the copy.

    Example::

        saving = async_save({"model": get_model_state_dict(model)}, "step-1000")
        ...  # train on
        saving.result()
    """
    group, folder = process_group or dist.group.WORLD, local_folder(folder)
    # Where there is no process group, the saver is kept for this function.
    return kept_for(group or async_save, Saver)._save(Peers(group, CALL), state_dict, folder, wait)


# ---- Planning


class _Planner(SavePlanner):
    """Leaves tensors what they are: they are copied at once."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return DefaultSavePlanner.transform_object(self, write_item, object)


@dataclass(frozen=True)
class _Copied:
    """A rank's part of a state, copied. The thread that sends it waits for ``go``; at the end of an interrupted call it
    gets ``None``. The call waits for ``is_sent``."""

    request: Request
    writer: _Process
    lock: BinaryIO
    future: SaveFuture = field(default_factory=SaveFuture)
    go: SimpleQueue[_Copied | None] = field(default_factory=SimpleQueue)
    is_sent: threading.Event = field(default_factory=threading.Event)


def _signature(planner: SavePlanner) -> list[Any] | None:
    """Return what the plan for a state depends on; ``None`` if a value makes its own."""
    found: list[Any] = [planner.share, planner.mappings]
    for key, value in planner.state_dict.items():
        # What stands for the state of a parameter that no optimizer has stepped yet is saved in another way.
        is_pending = isinstance(value, torch.Tensor) and "__create_write_items__" in value.__dict__
        if isinstance(value, DTensor):
            found.append((key, type(value), value.shape, value.dtype, value.device_mesh, value.placements, is_pending))
        elif isinstance(value, torch.Tensor):
            found.append((key, type(value), value.shape, value.dtype, is_pending))
            if says_what_it_holds(value):
                return None
        elif hasattr(value, "__create_write_items__"):
            return None
        else:
            found.append(key)
    return found


def _plan_together(peers: Peers, planner: SavePlanner, begun: Begun) -> Layout:
    """Make the plans of all ranks one: the first rank compares them, and says who writes what several have."""
    plans = to_first(peers, begun, peers.attempt(planner.create_local_plan))

    def compare() -> tuple[list[SavePlan], Metadata] | None:
        if not peers.is_first:
            return None
        made, metadata = planner.create_global_plan(plans)
        return FolderWriter(begun.path).prepare_global_plan(made), metadata

    made = peers.attempt(compare)
    final, metadata = made or (None, None)
    mine: list[Any] = [None] if final is None else [final[0]]
    if peers.several:
        with completing(peers, begun.folder):
            dist.scatter_object_list(mine, final, group=peers.group, group_src=0)
    return Layout(planner.finish_plan(mine[0]), [], metadata)


def _placed(data: list[Any]) -> tuple[list[Place | None], int, bool]:
    """Return a place in the staging memory for each plain tensor, the bytes of all, and whether one is on CUDA."""
    places: list[Place | None] = []
    end, on_cuda = 0, False
    for item in data:
        place = None
        # A tensor to which there is nothing but its elements.
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.layout == torch.strided:
            if not (item.is_quantized or item.is_meta):
                place = Place(end, item.dtype, item.shape)
                end += -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
                on_cuda |= item.is_cuda
        places.append(place)
    return places, end, on_cuda


# ---- The memory for the copy


class _Staging:
    """Memory that this process and its writer share. It has no name: the system frees it when both have ended.

    Args:
        folder: of a file on a disk; ``None``: memory.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder, self.nbytes, self.descriptor = folder, 0, -1
        self.number = 0  # counts memories: a larger state needs another one
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then modules are gone, and the system frees all memory
            self._release()

    def reserve(self, nbytes: int, pinned: bool) -> None:
        if nbytes <= self.nbytes and pinned <= self._is_pinned:
            return
        self._release()  # before there is another: one copy of the state, not two
        if self.folder is None and hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("fsdp_compose.async_save")
        else:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                self.descriptor = os.dup(file.fileno())
        try:
            available = None if self.folder is not None else _available_memory()
            if available is not None and nbytes > available:
                raise self._no_room(nbytes, f"{available / 2**20:.0f} MiB are available")
            os.ftruncate(self.descriptor, nbytes)
            if nbytes and hasattr(os, "posix_fallocate"):  # otherwise a lack of room would crash the copy
                os.posix_fallocate(self.descriptor, 0, nbytes)
            self.memory = map_memory(self.descriptor, nbytes)
        except OSError as error:
            self._release()
            raise self._no_room(nbytes, str(error)) from error
        self.nbytes, self.number = nbytes, self.number + 1  # last: an interrupted call must not count as room
        if pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), nbytes, 0))
            self._is_pinned = True

    def copy(self, data: list[Any], places: list[Place | None]) -> dict[int, bytes]:
        """Copy tensors to their places. Return the other values, serialized, by number."""
        values: dict[int, bytes] = {}
        devices = set[torch.device]()
        for i, (item, place) in enumerate(zip(data, places, strict=True)):
            if place is not None:
                view_of(self.memory, place).copy_(item, non_blocking=self._is_pinned)
                devices.add(item.device)
            elif isinstance(item, torch.Tensor):
                stream = io.BytesIO()
                torch.save(item.detach().cpu(), stream)
                values[i] = stream.getvalue()
            else:
                values[i] = item.getvalue()
        for device in devices - {torch.device("cpu")}:
            torch.accelerator.current_stream(device).synchronize()
        return values

    def _no_room(self, nbytes: int, found: str) -> MisuseRuntimeError:
        where = f"in {self.folder}" if self.folder is not None else "in this host's memory"
        return MisuseRuntimeError(
            f"there is no room {where} for a copy of this rank's part of the state, {nbytes / 2**20:.0f} MiB ({found})"
            ". Give Saver(staging=...) a folder on a disk with room, or use save()"
        )

    def _release(self) -> None:
        if self._is_pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr()))
            self._is_pinned = False
        self.memory = torch.empty(0, dtype=torch.uint8)
        descriptor, self.descriptor, self.nbytes = self.descriptor, -1, 0
        if descriptor >= 0:
            os.close(descriptor)


def _available_memory() -> int | None:
    """Bytes that this process may still take, as the system and its control group (of a container) tell; ``None``:
    unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = Path("/sys/fs/cgroup")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        limit, used = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        found.append(int(limit) - int(used) + int(stat["inactive_file"]))
    return min(found, default=None)


# ---- The process that writes


def start_writer(channel: socket.socket) -> subprocess.Popen[bytes]:
    """Start a writer that has the other end of a socket."""
    paths = [path for path in sys.path if isinstance(path, str)]  # Python imports from nothing else
    code = f"import sys; sys.path[:] = {paths!r}; from {__package__}.writer import main; main({channel.fileno()})"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # which the writer inherits
    try:
        # In a session of its own: what ends the trainer, by its group or by Ctrl-C, leaves the writer to its work.
        return subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[channel.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Process:
    """A writer, as the trainer sees it.

    Attributes:
        layout: that it was sent last; a later request need not send it again.
        memory: the number of the memory that it was sent last.
    """

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            self._process = start_writer(theirs)
        self.layout: Layout | None = None
        self.memory = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def submit(self, request: Request, lock: int, staging: _Staging) -> None:
        """Send a request, with the layout and the memory if the writer has others."""
        told = replace(request, layout=None) if self.layout is request.layout else request
        memory = [staging.descriptor] if staging.number != self.memory else []
        with contextlib.suppress(ConnectionError):  # it has died: ``outcome`` reports that
            send(self.channel, told, [lock, *memory])
        self.layout, self.memory = request.layout, staging.number

    def outcome(self, timeout: float) -> tuple[Outcome | None, bool]:
        """Wait for the writer's answer. Return it, or ``None`` if the writer has died or was too late, which ends it;
        and whether it was too late."""
        self.channel.settimeout(timeout)
        answer, is_late = None, False
        try:
            answer = receive(self.channel)
        except TimeoutError:
            is_late = True
        self.channel.settimeout(None)
        if answer is None:
            self._process.kill()
            self._process.wait()
            return None, is_late
        return answer[0], False

    def end(self) -> None:
        """Let the writer end. What it may still have to do is to delete the leftovers of a save."""
        self.channel.close()
        try:
            self._process.wait(_MARGIN)
        except subprocess.TimeoutExpired:  # a signal has stopped it
            self._process.kill()
            self._process.wait()


class _Underway:
    """The writer of a ``Saver``, and its last save. Holds no reference to the saver, whose end ends the writer."""

    def __init__(self) -> None:
        self.writer: _Process | None = None
        self.future: SaveFuture | None = None
        self.pid = os.getpid()

    def running(self) -> _Process:
        if self.writer is None or not self.writer.is_alive:
            self.writer = _Process()
        return self.writer

    def finish(self, wait: bool) -> None:
        """Wait until the last save has ended. Raise its error if no caller has seen it."""
        future = self.future
        if future is None:
            return
        if not wait and not future.done():
            raise MisuseRuntimeError("the last save is still under way. Call it with wait=True, or later")
        error = Future.exception(future)
        was_heard, self.future = future.is_heard, None
        if error is not None and not was_heard:
            raise error

    def end(self) -> None:
        if os.getpid() != self.pid:  # in a fork
            return
        try:
            self.finish(wait=True)
        finally:
            if self.writer is not None:
                self.writer.end()
                self.writer = None

"""A disk that is full in the middle of a save: a file system of a few megabytes, in a mount namespace of its own.

A ballast file leaves so many bytes, from none to almost enough, so that the save fails at other places each time. Every
rank raises an error that says why, the earlier checkpoint loads, training goes on, and when there is room the same save
succeeds. Then the same with a limit on the size of one rank's files, which needs no mount.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .fault import Fault, Settings, Verdict, verdict
from .jobs import LONG, as_text, run, values
from .systems import System
from .training import Trainer, path_of

DISK = 8 * 2**20
_CLONE_NEWNS, _CLONE_NEWUSER, _MS_NODEV = 0x00020000, 0x10000000, 4
NO_SPACE, TOO_LARGE = os.strerror(errno.ENOSPC), os.strerror(errno.EFBIG)


def enter_small_disk(folder: Path, num_bytes: int, rank: int) -> None:
    """Mount it on ``folder``, for rank 0 and the ranks that join it, nowhere else; it goes when they end. Raises
    OSError where that is not allowed. A process that has threads cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    host = folder.with_suffix(".pid")
    if rank != 0:
        while not host.exists():
            time.sleep(0.01)
        for kind in ("user", "mnt"):
            with open(f"/proc/{host.read_text()}/ns/{kind}") as namespace:
                _check(libc.setns(namespace.fileno(), 0))
        return
    user, group = os.geteuid(), os.getegid()
    _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    options = f"size={num_bytes}".encode()
    _check(libc.mount(b"none", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(_MS_NODEV), options))
    host.with_suffix(".new").write_text(str(os.getpid()))
    host.with_suffix(".new").rename(host)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def nothing() -> None:
    """A program."""


@contextlib.contextmanager
def ballast(folder: Path, room: int) -> Iterator[None]:
    """Leave ``room`` bytes of the disk."""
    path = folder / "ballast"
    if dist.get_rank() == 0:
        disk = os.statvfs(folder)
        with path.open("wb") as file:
            file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - room)))
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            path.unlink()
        dist.barrier()


@contextlib.contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Rank 1 writes no longer files."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def fill_and_save(system: System, folder: Path, limits: list[float], on_small_disk: bool) -> list[list[Any]]:
    """A program: for each limit, a fraction of what a save needs: what save() raised, what was lost, what failed when
    there was room again."""
    trainer = Trainer(system)
    trainer.train(1)
    trainer.save(path_of(folder, 1))
    sizes = [path.stat().st_size for path in path_of(folder, 1).iterdir()]
    found = []
    for fraction in limits:
        trainer.train(trainer.step + 1)
        target = path_of(folder, trainer.step)
        scarce = (
            ballast(folder, int(fraction * sum(sizes))) if on_small_disk else file_limit(int(fraction * max(sizes)))
        )
        with scarce:
            found.append([fraction, _attempt(trainer.save, target), _is_loaded(trainer, target), "", ""])
        old = path_of(folder, trainer.step - 1)
        found[-1][3] = _attempt(Trainer(system).load, old)
        found[-1][4] = _attempt(trainer.save, target) or _differs(trainer, target)
        if dist.get_rank() == 0:
            for path in old.iterdir():
                path.unlink()
            old.rmdir()
        dist.barrier()
    return found


def _attempt(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except BaseException as error:  # DCP's own error is no Exception
        return as_text(error)
    return ""


def _is_loaded(trainer: Trainer, path: Path) -> bool:
    """Whether what a save that raised has left is taken for a checkpoint, and is none."""
    other = Trainer(trainer.system)
    return path.exists() and not _attempt(other.load, path) and other.digest() != trainer.digest()


def _differs(trainer: Trainer, path: Path) -> str:
    other = Trainer(trainer.system)
    other.load(path)
    return "" if other.digest() == trainer.digest() else "other bits"


def judge(per_rank: list[list[list[Any]]], reason: str) -> tuple[int, list[str]]:
    problems = []
    for cases in zip(*per_rank, strict=True):
        where = f"{reason}, room for {cases[0][0]:.0%}"
        errors = [error for _, error, *_ in cases]
        if not all(errors):
            problems.append(f"{where}: no error on rank(s) {[rank for rank, error in enumerate(errors) if not error]}")
        elif not all(reason in error for error in errors):
            problems.append(f"{where}: the error does not say so: {next(e for e in errors if reason not in e)[:150]}")
        for _, _, is_loaded, old, again in cases:
            problems += [f"{where}: what was left loads as other bits"] if is_loaded else []
            problems += [f"{where}: the earlier one does not load: {old[:150]}"] if old else []
            problems += [f"{where}: the save with room again: {again[:150]}"] if again else []
    return len(per_rank[0]), problems


def disk_full(system: System, settings: Settings) -> Verdict:
    disk, limited, trial = (settings.folder / name for name in ("disk", "limited", "trial"))
    for folder in (disk, limited, trial):
        folder.mkdir()
    problems = []
    (attempt,) = run(nothing, world_size=1, before=partial(enter_small_disk, trial, DISK))
    done = f"no small disk can be mounted here ({attempt.error})"
    if attempt.kind == "returned":
        rooms = [0, 0.5, 0.97] if settings.quick else [0, 0.02, 0.05, *(i / 20 for i in range(2, 20)), 0.97, 0.985]
        results = run(
            fill_and_save, system, disk, rooms, True, limit=LONG, before=partial(enter_small_disk, disk, DISK)
        )
        num_cases, problems = judge(values(results), NO_SPACE)
        done = f"{num_cases} full disks"
    rooms = [0.1, 0.9] if settings.quick else [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97]
    num_limited, more = judge(values(run(fill_and_save, system, limited, rooms, False, limit=LONG)), TOO_LARGE)
    return verdict(f"{done}, {num_limited} limits on one rank's files", problems + more)


FAULTS = [Fault("the disk is full during a save", disk_full)]

"""Damage to each file of a checkpoint: bits that flip, bytes that are lost, files that are missing or changed places.

Each is noticed by load() on every rank, with the file named, and changes no bit of the model or the optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .fault import Fault, Settings, Verdict, verdict
from .jobs import LONG, as_text, run, values
from .systems import System
from .training import Trainer, path_of

_Damage = tuple[str, str, Callable[[], None]]  # the file, what is done to it, and the doing


def flips(path: Path, count: int, draw: random.Random) -> Iterator[_Damage]:
    content = path.read_bytes()
    places = [0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(count))]
    for place in places:
        bit = draw.randrange(8)
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        yield path.name, f"bit {bit} of byte {place} of {len(content)}", lambda data=damaged: _write(path, data)


def losses(path: Path) -> Iterator[_Damage]:
    content = path.read_bytes()
    yield path.name, "its last byte is lost", lambda: _write(path, content[:-1])
    yield path.name, "a byte too many", lambda: _write(path, content + b"\0")
    yield path.name, "empty", lambda: _write(path, b"")
    yield path.name, "zeros", lambda: _write(path, bytes(len(content)))
    yield path.name, "missing", path.unlink


def exchanged(folder: Path) -> Iterator[_Damage]:
    data = sorted(folder.glob("*.distcp"))
    contents = [path.read_bytes() for path in data]
    yield "distcp", "changed places", lambda: [_write(*pair) for pair in zip(data, reversed(contents), strict=True)]


def _write(path: Path, content: bytes) -> int:
    return path.write_bytes(content)


def damage_and_load(system: System, folder: Path, count: int, seed: int) -> list[list[Any]]:
    """A program: of each damage the file, the damage, what load() raised, and whether a bit has changed."""
    Trainer(system).train(1)
    saved = Trainer(system)
    saved.train(2)
    saved.save(path_of(folder, 2))
    other = Trainer(system, seed=1)  # which loads: it keeps what it has
    other.train(1)
    before, draw, found = other.digest(), random.Random(seed), []
    files = sorted(path for path in path_of(folder, 2).iterdir())
    whole = {path: path.read_bytes() for path in files}
    for file, what, do in [
        *(damage for path in files for damage in (*flips(path, count, draw), *losses(path))),
        *exchanged(path_of(folder, 2)),
    ]:
        dist.barrier()
        if dist.get_rank() == 0:
            do()
        dist.barrier()
        error = ""
        try:
            other.load(path_of(folder, 2))
        except BaseException as problem:  # DCP's own error is no Exception
            error = as_text(problem)
        found.append([file, what, error, other.digest() != before])
        is_spoilt = torch.tensor(int(not error or found[-1][3]))
        dist.all_reduce(is_spoilt, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            for path, content in whole.items():
                _write(path, content)
        dist.barrier()
        if is_spoilt:
            other = Trainer(system, seed=1)
            other.train(1)
    dist.barrier()
    other.load(path_of(folder, 2))
    return [*found, ["", "nothing", "", other.digest() != saved.digest()]]


def bit_flips(system: System, settings: Settings) -> Verdict:
    count = 2 if settings.quick else 24
    per_rank = values(run(damage_and_load, system, settings.folder, count, settings.seed, limit=LONG))
    problems = [] if not any(found[-1][3] for found in per_rank) else ["the whole checkpoint loads other bits"]
    silent = 0
    for cases in zip(*(found[:-1] for found in per_rank), strict=True):
        file, what = cases[0][:2]
        errors = [error for _, _, error, _ in cases]
        if not all(errors):
            silent += 1
            problems.append(
                f"{file}, {what}: loads without a word on rank(s) {[r for r, e in enumerate(errors) if not e]}"
            )
        elif not all(file in error for error in errors):
            problems.append(f"{file}, {what}: the error does not name it: {errors[0][:150]}")
        elif any(changed for *_, changed in cases):
            problems.append(f"{file}, {what}: raised, and has changed the model")
    num = len(per_rank[0]) - 1
    return verdict(f"{num - silent} of {num} damages noticed", problems)


FAULTS = [Fault("bit flips and losses in each file of a checkpoint", bit_flips)]

"""Random kills in training, with restarts: a real ``torchrun --max-restarts``.

A trainer saves a checkpoint every few steps and, when it begins, resumes from the newest that loads. While it trains,
and saves, and resumes, a rank drawn at random is killed at a random time, several times. The bits at the end are those
of a run that nothing disturbed.

Run by torchrun, this file is the trainer: restarts.py SYSTEM FOLDER STEPS.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from benchmarks.faults.fault import Fault, Settings, Verdict, verdict
from benchmarks.faults.jobs import run, values
from benchmarks.faults.systems import SYSTEMS, System
from benchmarks.faults.training import Trainer, digests, newest_first, path_of

SAVE_EVERY = 3
LIMIT = 1800.0  # seconds; most of those that it takes go to starting Python


def train(system: System, folder: Path, steps: int) -> None:
    """On every rank of torchrun."""
    rank = int(os.environ["RANK"])
    forget_keys_of_torch(rank)
    dist.init_process_group("gloo")
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    trainer = Trainer(system)
    for path in newest_first(folder):
        if (path / ".metadata").exists():  # DCP writes it last, so that one that was interrupted has none
            trainer.load(path)
            break
    begun = trainer.step
    while trainer.step < steps:
        trainer.train(trainer.step + 1)
        (folder / f"progress-{rank}").write_text(f"{os.getpid()} {trainer.step - begun}")
        if trainer.step % SAVE_EVERY == 0:
            trainer.save(path_of(folder, trainer.step))
    (folder / f"digest-{rank}").write_text(trainer.digest())
    dist.barrier()
    dist.destroy_process_group()


def forget_keys_of_torch(rank: int) -> None:
    """The store outlives an attempt, and torch's own process group (2.13, gloo) takes addresses of the dead for those
    of the living: restarts of any system may fail, or hang, in ``init_process_group``. What others have left stays."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    mark = f"fsdp_compose_faults/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    if rank == 0:
        for key in store.list_keys():
            if "fsdp_compose" not in key:
                store.delete_key(key.removeprefix("/"))
        store.set(mark, "")
    store.wait([mark])


@contextlib.contextmanager
def torchrun(arguments: list[str], output: Path, max_restarts: int) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun, with two ranks, until it ends or is ended."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc_per_node=2",
        "--local-addr=127.0.0.1",
    ]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--max-restarts={max_restarts}"]
    launcher += ["--monitor-interval=0.1", str(Path(__file__).resolve()), *arguments]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    with output.open("wb") as file:
        process = subprocess.Popen(launcher, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        process.terminate()  # its workers, which are in sessions of their own, are for it to end
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def pids(folder: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in sorted(folder.glob("pid-*"))]


def steps_of(folder: Path, pid: int, rank: int) -> int:
    """How many steps this process has taken."""
    path = folder / f"progress-{rank}"
    found = path.read_text().split() if path.exists() else []
    return int(found[1]) if len(found) == 2 and int(found[0]) == pid else 0


def random_kills(system: System, settings: Settings) -> Verdict:
    num_kills, steps = (1, 12) if settings.quick else (4, 60)
    expected = [found[-1] for found in values(run(digests, system, steps))]
    draw, output, folder = random.Random(settings.seed), settings.folder / "output", settings.folder / "run"
    folder.mkdir()
    num_done, last, deadline = 0, [0], time.monotonic() + LIMIT
    num_steps = [0, *(draw.randrange(1, 8) for _ in range(num_kills - 1))]  # before each kill; the first in the first
    with torchrun([system.name, str(folder), str(steps)], output, max_restarts=num_kills + 2) as process:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
            found = pids(folder)
            if num_done == num_kills or len(found) < 2 or {0, *last} & set(found):
                continue
            if steps_of(folder, found[0], 0) < num_steps[num_done]:
                continue
            time.sleep(draw.random() * 0.1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(found), signal.SIGKILL)
                num_done, last = num_done + 1, found
        code = process.poll()
    done = f"{num_done} kills, {steps} steps, a checkpoint every {SAVE_EVERY}"
    if code is None:
        return verdict(
            done, [f"no end within {LIMIT:g} s; ranks at steps {[p.read_text() for p in folder.glob('progress-*')]}"]
        )
    if code:
        return verdict(done, [f"torchrun gave up: {output.read_text(errors='replace')[-600:]}"])
    ended = [(folder / f"digest-{rank}").read_text() for rank in range(2)]
    return verdict(done, [] if ended == expected else ["the bits at the end are others"])


FAULTS = [Fault("random kills in training, torchrun --max-restarts", random_kills)]

if __name__ == "__main__":
    torch.set_num_threads(1)
    train(SYSTEMS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))

"""One program of another package's, run with FSDP2 and with ``fsdp_compose.drop_in``, in processes of their own."""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import fsdp

from fsdp_compose import drop_in
from tests.harness import preload, run_distributed

SYSTEMS = ("FSDP2", "drop_in")
Program = Callable[..., dict[str, Any]]


def results_of(program: Program, folder: Path, world_size: int = 2, timeout: float = 240) -> dict[str, dict[str, Any]]:
    """What the first rank returns of ``program(folder)``, for each system; ``folder`` is one that all ranks share.

    A program with an argument ``fully_shard`` gets that of the system: it comes in by its framework's own door. Nothing
    is installed, and all names of ``torch.distributed`` must mean at the end what they have meant before."""
    preload(program.__module__)
    found = {}
    for system in SYSTEMS:
        shared = folder / system
        shared.mkdir()
        arguments = {"module": program.__module__, "name": program.__name__, "system": system, "folder": str(shared)}
        run_distributed(_run, world_size, arguments, timeout=timeout, fresh=True)
        found[system] = json.loads((shared / "result.json").read_text())
    return found


def pin_no_memory() -> None:
    """FSDP2 cannot on a machine without an accelerator, and the policy says it should."""
    fsdp.CPUOffloadPolicy.__init__.__defaults__ = (False,)


def _run(module: str, name: str, system: str, folder: str) -> None:
    import importlib

    warnings.simplefilter("ignore")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())  # as torchrun says it
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "CCL_WORKER_COUNT": "0"}  # there is a process group
    program: Program = getattr(importlib.import_module(module), name)
    if "fully_shard" in inspect.signature(program).parameters:
        before = names_of_torch()
        result = program(Path(folder), fully_shard={"FSDP2": fsdp, "drop_in": drop_in}[system].fully_shard)
        now = names_of_torch()
        assert not [name for name, value in before.items() if now[name] is not value]
    else:
        if system == "drop_in":
            drop_in.install()
        result = program(Path(folder))
    if dist.get_rank() == 0:
        Path(folder, "result.json").write_text(json.dumps(result))


def names_of_torch() -> dict[str, Any]:
    """What the functions and classes of ``torch.distributed`` are, under all their names in torch's own modules."""
    return {
        f"{path}.{name}": value
        for path, module in [*sys.modules.items()]
        if path.partition(".")[0] == "torch"
        for name, value in [*vars(module).items()]
        if str(getattr(value, "__module__", "")).startswith("torch.distributed") and callable(value)
    }


def assert_same(results: dict[str, dict[str, Any]], tolerance: float = 1e-5) -> None:
    """Both systems have given the same numbers."""
    theirs, ours = (results[system] for system in SYSTEMS)
    assert theirs.keys() == ours.keys()
    for key, expected in theirs.items():
        got = ours[key]
        if isinstance(expected, list) and expected and isinstance(expected[0], float):
            assert len(got) == len(expected), key
            for i, (a, b) in enumerate(zip(got, expected, strict=True)):
                assert abs(a - b) <= tolerance * max(1.0, abs(b)), f"{key}[{i}]: {a}, FSDP2 has {b}"
        else:
            assert got == expected, f"{key}: {got!r}, FSDP2 has {expected!r}"

"""Run torch's own tests of FSDP2 on CPUs: ``python -m tests.tools.torch_tests fsdp2 PATH/test_fully_shard_init.py``.

The first argument says what shards: ``torch`` (FSDP2 itself), ``flat`` or ``fsdp2`` (this package, by
``drop_in.install(layout=...)``). Names, or parts of them, choose tests of the file. torch's files belong to a checkout
of torch; nothing of them is here. Each test runs in forked processes with gloo, fewer than eight unless its mesh needs
them. What gloo and CPUs lack is replaced: averages, sleeping, fused attention.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.testing._internal.common_distributed as common_distributed
import torch.testing._internal.common_fsdp as common_fsdp
import torch.testing._internal.common_utils as common_utils
from torch.distributed.tensor import DTensor

from fsdp_compose import drop_in

LIMIT = int(os.environ.get("SECONDS_PER_TEST", "75"))
MANY = (8, ("test_3d_mlp", "tp_ep")), (4, ("2d", "2D", "ND", "HSDP", "hsdp", "tp"))  # ranks of tests that ask for 8
PASSED, FAILED, SKIPPED = 0, 1, 3


class Base(common_utils.TestCase):
    """In place of torch's classes, which need GPUs or threads."""

    rank = 0

    @property
    def world_size(self) -> int:
        return 4

    @property
    def process_group(self) -> Any:
        return dist.group.WORLD

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def device_type(self) -> str:
        return "cpu"

    def run_subtests(self, *args: Any, **kwargs: Any) -> None:
        common_distributed.run_subtests(self, *args, **kwargs)

    def perThreadSetUp(self) -> None:
        torch._dynamo.reset()


def unchanged(*_: Any, **__: Any) -> Any:
    return lambda item: item


def attention(q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, **_: Any) -> Any:
    if isinstance(q, DTensor):
        local = attention(*[item.to_local() for item in (q, k, v)], mask, dropout, is_causal)
        return DTensor.from_local(local, q.device_mesh, q.placements, run_check=False)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
    return torch.dropout(scores.softmax(-1), dropout, dropout > 0) @ v


def be_without_gpus() -> None:
    common_fsdp.FSDPTest = common_fsdp.FSDPTestMultiThread = Base  # type: ignore[misc, assignment]
    common_distributed.MultiProcContinuousTest = Base  # type: ignore[misc, assignment]
    for name in ("skip_if_lt_x_gpu", "skip_if_rocm_arch_multiprocess", "skipIfRocm", "skipIfTorchInductor"):
        for module in (common_distributed, common_utils):
            if hasattr(module, name):
                setattr(module, name, unchanged)
    unittest.skipIf = unchanged  # type: ignore[assignment]
    common_utils.device_sleep = lambda *_, **__: None
    common_utils.get_cycles_per_ms = lambda *_: 1.0
    torch.cpu.device_count = lambda: 8
    torch.nn.functional.scaled_dot_product_attention = attention
    all_reduce = dist.all_reduce

    def reduced(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG:
            return all_reduce(tensor, op, group, async_op)
        all_reduce(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group))
        return None

    dist.all_reduce = reduced


def run_rank(test: type[Base], name: str, rank: int, size: int, folder: Path) -> int:
    signal.alarm(LIMIT)
    said = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        store, wait = dist.FileStore(str(folder / "store"), size), datetime.timedelta(seconds=LIMIT - 10)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
        case = test(name)
        case.rank = rank
        common_utils.set_rng_seed(0)
        case.setUp()
        case.perThreadSetUp()
        getattr(case, name)()
        dist.barrier()
    except unittest.SkipTest:
        return SKIPPED
    except BaseException:
        traceback.print_exc()
        return FAILED
    return PASSED


def run_test(test: type[Base], name: str, size: int) -> str:
    folder, pids = Path(tempfile.mkdtemp()), set[int]()
    for rank in range(size):
        pid = os.fork()
        if not pid:
            code = run_rank(test, name, rank, size, folder)
            sys.stdout.flush()
            os._exit(code)
        pids.add(pid)
    codes = []
    while pids:
        pid, status = os.waitpid(-1, 0)
        pids.discard(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] not in (PASSED, SKIPPED):
            time.sleep(2)  # the others may fail by themselves
            for other in pids:
                os.kill(other, signal.SIGKILL)
    if set(codes) <= {PASSED, SKIPPED}:
        return "skipped" if SKIPPED in codes else "passed"
    lines = (folder / "rank0").read_text().splitlines()
    return "FAILED " + next((line[:200] for line in reversed(lines) if "Error: " in line), "") + f" ({folder}/rank0)"


def main(system: str, file: str, *names: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    be_without_gpus()
    if system != "torch":
        drop_in.install(layout=system)
    spec = importlib.util.spec_from_file_location("torch_test", file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules["torch_test"] = importlib.util.module_from_spec(spec)
    accelerator, torch.accelerator.current_accelerator = (
        torch.accelerator.current_accelerator,
        lambda: torch.device("cpu"),
    )
    spec.loader.exec_module(module)  # files look there for the device to use, and optimizers later for graphs
    torch.accelerator.current_accelerator = accelerator
    found = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, Base)]
    for test in [item for item in found if item.__module__ == "torch_test"]:
        wanted = test("run_subtests").world_size
        for name in [item for item in dir(test) if item.startswith("test")]:
            full = f"{test.__name__}.{name}"
            if names and not any(item in full for item in names):
                continue
            fewer = next((number for number, words in MANY if any(item in full for item in words)), 2)
            size = wanted if wanted <= 4 else fewer
            test.world_size = property(lambda _, size=size: size)  # type: ignore[assignment, misc]
            print(full, run_test(test, name, size), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

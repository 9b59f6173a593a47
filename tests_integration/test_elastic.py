"""examples/elastic.py with torchft: real groups, real kills, and parameters that equal an unsharded run over the
batches of those that took part."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torchft.coordination import LighthouseServer

from benchmarks.faults import elastic_groups
from benchmarks.faults.fault import Settings
from benchmarks.faults.systems import OURS, SYSTEMS
from tests.harness import ROOT

EXAMPLE = ROOT / "examples/elastic.py"
PATIENCE = 150  # seconds


class Jobs:
    """Replica groups of two processes, whose logs are in ``folder``."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.processes = folder, steps, list[subprocess.Popen[bytes]]()
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=1000
        )
        self._environment = {
            **os.environ,
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.lighthouse.address().rpartition(':')[2]}",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }

    def _start(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        options = [f"--steps={self.steps}", "--seconds=0.25", f"--out={self.folder}"]
        with open(self.folder / f"{name}.said", "ab") as said:
            process = subprocess.Popen(
                [sys.executable, *command, *options],
                env=self._environment | environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )
        self.processes.append(process)
        return process

    def torchrun(self, group: int) -> subprocess.Popen[bytes]:
        command = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=2"]
        return self._start(f"group-{group}", [*command, "--max-restarts=3", str(EXAMPLE), f"--group={group}"])

    def by_hand(self, group: int) -> list[subprocess.Popen[bytes]]:
        """Without a launcher that would end the others when one dies."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        command = [str(EXAMPLE), f"--group={group}"]
        return [self._start(f"group-{group}-rank-{r}", command, RANK=str(r), **common) for r in range(2)]

    def log(self, group: int, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"group-{group}-rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                said = "\n".join([path.read_text()[-3000:] for path in self.folder.glob("*.said")])
                pytest.fail(f"{what} did not happen in {PATIENCE} s\n{said}")
            time.sleep(0.05)

    def has_trained_together(self, group: int, num_steps: int, since: int = 0) -> bool:
        """Whether a group has made so many steps with the other one; ``since``: after this line of its log."""
        return sum(line.get("groups") == 2 and line["takes_part"] for line in self.log(group, 0)[since:]) >= num_steps

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()  # torchrun ends its processes
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self.lighthouse.shutdown()

    def took_part(self) -> list[set[int]]:
        """Who took part in each step, by the logs, which must agree."""
        found: list[set[int]] = [set() for _ in range(self.steps)]
        counts: list[set[int]] = [set() for _ in range(self.steps)]
        for group in range(2):
            for rank in range(2):
                for line in self.log(group, rank):
                    if "step" in line:
                        counts[line["step"]].add(line["groups"])
                        if line["takes_part"]:
                            found[line["step"]].add(group)
        for step, groups in enumerate(found):
            (count,) = counts[step]
            if count == 2:  # one may have been killed before it wrote that down
                groups |= {0, 1}
            assert len(groups) == count, (step, groups, count)
        return found


@pytest.fixture
def jobs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path, request.param)
    yield jobs
    jobs.end()


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unsharded(took_part: list[set[int]]) -> dict[str, torch.Tensor]:
    elastic = example()
    torch.manual_seed(0)
    model = elastic.Model().double()
    optimizer = elastic.optimizer_of(model)
    for step, groups in enumerate(took_part):
        optimizer.zero_grad()
        for group in groups:
            for rank in range(2):
                (elastic.loss_of(model, elastic.batch_of(step, group, rank)) / (2 * len(groups))).backward()
        for item in optimizer.param_groups:
            item["lr"] = elastic.learning_rate(step)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("jobs", [300], indirect=True, ids=["300 steps"])  # enough for a group to come back
def test_a_killed_group_comes_back_and_all_equals_an_unsharded_run(jobs: Jobs):
    launchers = [jobs.torchrun(group) for group in range(2)]
    jobs.wait(lambda: jobs.has_trained_together(1, 10), "training together")
    since = len(jobs.log(1, 0))
    for rank in range(2):
        pid = [line["pid"] for line in jobs.log(1, rank) if "pid" in line][-1]
        os.kill(pid, signal.SIGKILL)
    killed = jobs.log(0, 0)[-1].get("step", 0)
    jobs.wait(lambda: jobs.log(0, 0)[-1].get("step", 0) > killed + 2, "a step of the group that is left")
    jobs.wait(lambda: jobs.has_trained_together(1, 10, since), "the return of the group that was killed")
    jobs.wait(lambda: all(item.poll() is not None for item in launchers), "the end")
    assert [item.returncode for item in launchers] == [0, 0]
    took_part = jobs.took_part()
    assert {0} in took_part and took_part[-1] == {0, 1}
    found = [torch.load(jobs.folder / f"group-{group}.pt") for group in range(2)]
    assert_equal(found[1], found[0], 0)
    assert_equal(found[0], unsharded(took_part), 1e-12)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("jobs", [200], indirect=True, ids=["200 steps"])
def test_one_killed_rank_ends_its_group_in_seconds_and_the_other_goes_on(jobs: Jobs):
    launcher, ranks = jobs.torchrun(0), jobs.by_hand(1)
    jobs.wait(lambda: jobs.has_trained_together(1, 5), "training together")
    ranks[1].kill()
    began = time.monotonic()
    assert ranks[0].wait(30) != 0
    assert time.monotonic() - began < 15
    assert "RankLostError" in (jobs.folder / "group-1-rank-0.said").read_text()
    jobs.wait(lambda: launcher.poll() is not None, "the end of the group that is left")
    assert launcher.returncode == 0
    took_part = jobs.took_part()
    assert took_part[-1] == {0}
    assert_equal(torch.load(jobs.folder / "group-0.pt"), unsharded(took_part), 1e-12)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("run", [elastic_groups.groups_die, elastic_groups.ranks_die])
def test_of_three_groups_two_go_on_when_the_third_dies_at_a_collective(run: Callable[..., Any], tmp_path: Path):
    verdict = run(SYSTEMS[OURS], Settings(quick=True, steps=0, seed=0, folder=tmp_path), torchft=True)
    assert verdict.is_kept, verdict.text
    assert re.search(r"after (\d) of \1 kills the others went on", verdict.text), verdict.text

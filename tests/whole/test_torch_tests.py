"""``tests/tools/torch_tests.py``, which runs torch's own tests of FSDP2, on a file in their manner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.harness import ROOT

FILE = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest


class TestShards(FSDPTest):
    @property
    def world_size(self):
        return min(8, torch.get_device_module("cpu").device_count())

    @skip_if_lt_x_gpu(2)
    def test_ours(self):
        self.assertEqual(type(fully_shard(torch.nn.Linear(4, 4)).weight).__name__, "RaggedDTensor")

    def test_placement(self):
        self.assertIs(type(fully_shard(torch.nn.Linear(4, 4)).weight.placements[0]), Shard)

    def test_ranks_with_mesh_2d(self):
        mean = torch.tensor(float(self.rank))
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        self.assertEqual((self.world_size, mean), (4, torch.tensor(1.5)))
"""


@pytest.mark.parametrize(("system", "ours", "placement"), [("torch", False, True), ("fsdp2", True, True)])
def test_tests_in_the_manner_of_torchs_run_on_cpus(system, ours, placement, tmp_path):
    file = tmp_path / "test_file.py"
    file.write_text(dedent(FILE))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.tools.torch_tests", system, str(file)]
    run = subprocess.run(command, cwd=Path(tmp_path), env=environment, capture_output=True, text=True, timeout=120)
    found = {line.split()[0].rpartition(".")[2]: "passed" in line for line in run.stdout.splitlines()}
    assert found == {"test_ours": ours, "test_placement": placement, "test_ranks_with_mesh_2d": True}, run

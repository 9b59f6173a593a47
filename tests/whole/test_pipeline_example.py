"""examples/pipeline.py trains as one process does."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import harness
from tests.harness import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch) -> Any:
    """The example as a module; what forked processes import is found as well."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("pipeline_example", EXAMPLES / "pipeline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("train_gpt", None)


def losses_of_one_process(module: Any, steps: int) -> list[float]:
    with mock.patch.object(sys, "argv", ["pipeline.py"]):
        args = module.parse_args()
    torch.manual_seed(args.seed)
    model = module.GPT(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(1, steps + 1):
        text, targets = module.batch_of(step, args, 0, 1)
        loss = module.loss_of(model(text), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("processes", "schedule"), [(2, "GPipe"), (4, "1F1B"), (4, "InterleavedZeroBubble")])
def test_a_pipeline_trains_as_one_process(tmp_path: Path, example: Any, processes: int, schedule: str):
    command = ["--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={processes}"]
    command += ["--run-path", "--start-method=fork", str(EXAMPLES / "pipeline.py"), "--steps=3", "--max-norm=0"]
    command += [f"--schedule={schedule}"]
    code, said = harness.run_torchrun(tmp_path, *command, timeout=250, PYTHONPATH=f"{ROOT}:{EXAMPLES}")
    assert code == 0, said[-3000:]
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", said)]
    assert losses == pytest.approx(losses_of_one_process(example, 3), abs=1e-3)

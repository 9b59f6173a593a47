"""The example saves, and resumes as if it had never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT

SMALL = (
    "--steps=8 --save-every=4 --log-every=1 --val-every=8 --val-batches=1 --batch=4 --seq-len=16 --dim=16 --layers=2 "
)
SMALL += "--heads=2 --sample-bytes=4"


def run(out: Path, processes: int, *arguments: str) -> list[dict[str, Any]]:
    """The log of a run of the example."""
    text = out.parent / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 50)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    example = [f"--nproc_per_node={processes}", str(ROOT / "examples" / "train_gpt.py")]
    command = [*launcher, *example, *SMALL.split(), f"--data={text}", f"--out={out}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "log.json").read_text())["log"]


@pytest.mark.timeout(300)
def test_a_resumed_run_continues_the_loss_curve_also_with_another_number_of_processes(tmp_path):
    out = tmp_path / "whole"
    whole = run(out, 2)
    assert [entry["step"] for entry in whole] == list(range(1, 9))
    assert sorted(path.name for path in out.glob("step-*")) == ["step-4", "step-8"]
    (out / "step-8").rename(tmp_path / "aside")
    same = run(out, 2, "--resume")
    assert [entry["loss"] for entry in same] == [entry["loss"] for entry in whole], "to the bit"
    assert same[-1]["val_loss"] == whole[-1]["val_loss"]
    other = run(tmp_path / "other", 1, f"--resume={out / 'step-4'}")
    assert [entry["loss"] for entry in other] == pytest.approx([entry["loss"] for entry in whole], abs=1e-5)
    assert other[-1]["val_loss"] == pytest.approx(whole[-1]["val_loss"], abs=1e-5)

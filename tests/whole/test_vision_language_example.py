"""examples/vision_language.py, with images on some ranks only, trains as one process does; FSDP2 does not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.harness import ROOT, fake_process_group

EXAMPLE = ROOT / "examples" / "vision_language.py"
STEPS = 8


@pytest.fixture
def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("vision_language_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder: Path, processes: int, *arguments: str) -> tuple[int | None, str]:
    command = ["--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={processes}"]
    command += ["--run-path", "--start-method=fork", str(EXAMPLE), f"--steps={STEPS}", *arguments]
    return harness.run_torchrun(folder, *command, timeout=250, PYTHONPATH=str(ROOT))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [2, 3])
def test_images_on_some_ranks_only_train_as_in_one_process(tmp_path: Path, example: Any, processes: int):
    code, said = run(tmp_path, processes)
    assert code == 0, said[-3000:]
    found = re.findall(r"loss ([\d.]+), images on (\d) of", said)
    losses, ranks = [float(loss) for loss, _ in found], {int(number) for _, number in found}
    args = example.parse_args([f"--steps={STEPS}"])
    with fake_process_group(world_size=1):
        alone = example.train(example.build_model(args), args)
    assert losses == pytest.approx(alone, abs=1e-3) and losses[-1] < losses[0]
    assert {0, 1} <= ranks and max(ranks) < processes


@pytest.mark.timeout(600)
def test_fsdp2_does_not_come_through(tmp_path: Path):
    """If this fails, the example and docs/optional.md say something about FSDP2 that is no longer true."""
    code, said = run(tmp_path, 2, "--system=fsdp2", "--timeout=10")
    assert code != 0
    assert "step 1: loss" in said and f"step {STEPS}: loss" not in said, said[-3000:]

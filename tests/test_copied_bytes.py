"""How many bytes a training step copies: the figure that ``benchmarks/copied_bytes.py`` reports."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_a_step_copies_little_more_than_the_model(monkeypatch):
    """Shard copies and gradient copy-in included, at 8 ranks; FSDP2 copies more than three times the model."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    measure = runpy.run_path(str(BENCHMARKS / "copied_bytes.py"))["measure"]
    ours, theirs = measure("fsdp_compose"), measure("FSDP2")
    print(f"bytes copied / model bytes: {ours:.3f}, FSDP2 {theirs:.3f}")
    assert 0.9 <= ours <= 1.3 and theirs > 3

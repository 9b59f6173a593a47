"""Every block of code in docs/seeing.md runs, by itself, and prints what is below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.harness import ROOT

PAGE = ROOT / "docs" / "seeing.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE.read_text())


def printed_by(code: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
    return output.getvalue()


@pytest.mark.parametrize("code, text", BLOCKS)
def test_a_block_prints_what_is_below_it(code: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert printed_by(code) == text


def test_no_block_is_left_out():
    assert len(BLOCKS) == PAGE.read_text().count("```python\n") == 4

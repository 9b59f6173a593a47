"""Runs another module as a program, ``untouched.py MODULE ...``, after which torch's names must be what they were."""

from __future__ import annotations

import runpy
import sys

import torch

from tests_integration.side_by_side import names_of_torch

if __name__ == "__main__":
    torch.accelerator.synchronize = lambda *_: None  # LlamaFactory waits for one, and there is none
    before = names_of_torch()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    now = names_of_torch()
    changed = [name for name, value in before.items() if now[name] is not value]
    assert not changed, changed

"""Which torch the package can be imported with."""

from __future__ import annotations

import logging
import os
import re
import sys

import pytest
import torch

from fsdp_compose._import_checks import (
    TESTED_TORCH,
    check_torch,
    hint,
    note_untested,
    refuse_if_untested,
)
from tests.harness import ROOT, run_forked


@pytest.mark.parametrize("version", ["2.11.0", "2.10.1+cpu", "1.13", "unknown"])
def test_older_torch_is_refused(version):
    with pytest.raises(ImportError, match="needs torch 2.12"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.12.0", "2.13.0+cu130", "2.15.0a0+git123", "3.0"])
def test_newer_torch_is_accepted(version):
    check_torch(version)


@pytest.mark.parametrize(("version", "rank", "is_told"), [
    ("2.15.0", None, False), ("2.15.7+cu132", "0", False), ("2.16.0", None, True), ("3.0.0a0", "0", True),
    ("3.0", "1", False),
])  # fmt: skip
def test_an_untested_torch_is_logged_once(monkeypatch, caplog, version, rank, is_told):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.WARNING, logger="fsdp_compose"):
        note_untested(version)
    assert [
        record.getMessage().startswith(f"torch {version} is newer than every version") for record in caplog.records
    ] == ([True] if is_told else [])


def import_where_a_private_name_is_gone(_rank: int) -> None:
    """On a torch that says it is newer, and on a tested one."""
    del torch._C._current_graph_task_id
    for version in ("99.0.0", TESTED_TORCH[-1]):
        for name in [name for name in sys.modules if name.partition(".")[0] == "fsdp_compose"]:
            del sys.modules[name]
        torch.__version__ = version
        try:
            import fsdp_compose

            fsdp_compose.fully_shard  # noqa: B018
        except Exception as error:
            print(f"{version}: {type(error).__name__}: {error}", flush=True)
    os._exit(0)


def test_an_import_that_a_newer_torch_breaks_says_which_torch_works(tmp_path):
    ((code, said),) = run_forked(1, tmp_path, import_where_a_private_name_is_gone)
    assert code == 0, said
    newer, tested = (line for line in said.splitlines() if "_current_graph_task_id" in line)
    assert newer.startswith("99.0.0: ImportError: fsdp_compose does not work with torch 99.0.0, which lacks")
    assert newer.endswith(f"pip install 'torch<={TESTED_TORCH[-1]}'")
    assert tested.startswith(f"{TESTED_TORCH[-1]}: AttributeError: ")
    error = AttributeError("x")
    refuse_if_untested(TESTED_TORCH[0], error)  # which the caller raises then


def test_docs_makefile_and_ci_say_which_torch_is_tested():
    oldest, pinned, *_, newest = TESTED_TORCH
    assert f"torch=={pinned}\n" in (ROOT / "constraints.txt").read_text()
    in_ci = re.findall(r"tests? test-torch VERSION=(\S+)", (ROOT / ".ci" / "run").read_text())
    assert [*dict.fromkeys(in_ci)] == [newest, oldest]
    assert f"VERSION={newest}" in (ROOT / "Makefile").read_text()
    listed = ", ".join(TESTED_TORCH[:-1]) + f" and {newest}"
    assert f"tested with torch {listed}" in " ".join((ROOT / "docs/project/design.md").read_text().split())


def test_restarted_process_is_told_of_the_store_it_shares_with_the_dead():
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in hint(restarted)
    assert not hint(restarted | {"TORCHELASTIC_RESTART_COUNT": "0"}), "the first attempt finds nothing old"
    assert not hint(restarted | {"TORCHELASTIC_USE_AGENT_STORE": "False"}), "a store of its own"
    assert not hint({}), "not under torchrun"

"""Which torch the package can be imported with."""

from __future__ import annotations

import copy
import logging
import os
import re
import sys

import pytest
import torch
import torch.distributed as dist

from fsdp_compose._import_checks import (
    ALLOW_2_11_ENV,
    TESTED_TORCH,
    check_torch,
    hint,
    note_untested,
    refuse_if_untested,
)
from tests.harness import ROOT, run_forked


def train_on_2_11(rank: int, port: int) -> None:
    """One of two ranks trains a sharded model and its plain copy, on a torch that says it is 2.11 to a package that is
    imported anew."""
    os.environ[ALLOW_2_11_ENV] = "1"
    torch.__version__ = "2.11.0"
    for name in [name for name in sys.modules if name.partition(".")[0] == "fsdp_compose"]:
        del sys.modules[name]
    with pytest.warns(UserWarning, match="for measurements only"):
        from fsdp_compose import clip_grad_norm_, fully_shard

    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, 2, False), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))
    plain = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for param in model.parameters():
        assert type(param) is torch.nn.Parameter
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1, momentum=0.9) for item in (model, plain)]
    for step in range(4):
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(data.chunk(2)[rank]).square().mean().backward()
        plain(data).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert torch.allclose(model(data), plain(data), atol=1e-6)
    with pytest.raises(RuntimeError, match="2.12"):  # it would clip by the norm of one rank
        clip_grad_norm_(model.parameters(), 1.0)
    loss = model(data).sum()
    torch._foreach_add_([p.detach() for p in model.parameters()], 1.0)
    with pytest.raises(RuntimeError, match="between a forward and its backward"):  # a step there is noticed
        loss.backward()
    dist.barrier()
    print("trained", flush=True)
    os._exit(0)


@pytest.mark.parametrize("version", ["2.11.0", "2.10.1+cpu", "1.13", "unknown"])
def test_older_torch_is_refused(monkeypatch, version):
    monkeypatch.delenv(ALLOW_2_11_ENV, raising=False)
    with pytest.raises(ImportError, match="needs torch 2.12"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.12.0", "2.13.0+cu130", "2.15.0a0+git123", "3.0"])
def test_newer_torch_is_accepted(version):
    assert check_torch(version) is False


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
            import fsdp_compose  # noqa: F401
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
    in_ci = re.findall(r"make test-torch VERSION=(\S+)", (ROOT / ".ci" / "run").read_text())
    assert [*dict.fromkeys(in_ci)] == [newest, oldest]
    assert f"VERSION={newest}" in (ROOT / "Makefile").read_text()
    listed = ", ".join(TESTED_TORCH[:-1]) + f" and {newest}"
    assert f"tested with torch {listed}" in " ".join((ROOT / "docs/project/design.md").read_text().split())


def test_the_variable_admits_2_11_and_nothing_older(monkeypatch):
    monkeypatch.setenv(ALLOW_2_11_ENV, "1")
    with pytest.warns(UserWarning, match="for measurements only"):
        assert check_torch("2.11.0+cu130") is True
    with pytest.raises(ImportError):
        check_torch("2.10.0")
    assert check_torch("2.13.0") is False, "a torch that can have DTensors as sharded parameters has them"


def test_plain_sharded_parameters_train_like_unsharded_ones(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_forked(2, tmp_path, train_on_2_11, store.port, timeout=100)
    assert [code for code, _ in ranks] == [0, 0], ranks
    assert all("trained" in text for _, text in ranks), ranks
    assert torch.__version__ != "2.11.0"


def test_restarted_process_is_told_of_the_store_it_shares_with_the_dead():
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in hint(restarted)
    assert not hint(restarted | {"TORCHELASTIC_RESTART_COUNT": "0"}), "the first attempt finds nothing old"
    assert not hint(restarted | {"TORCHELASTIC_USE_AGENT_STORE": "False"}), "a store of its own"
    assert not hint({}), "not under torchrun"

"""The example saves, resumes as if it had never stopped, and goes on by itself when torchrun restarts it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_compose.checkpoint import save
from tests import harness
from tests.harness import ROOT, fake_process_group

EXAMPLE = ROOT / "examples" / "train_gpt.py"
SMALL = (
    "--steps=8 --save-every=4 --log-every=1 --val-every=8 --val-batches=1 --batch=4 --seq-len=16 --dim=16 --layers=2 "
)
SMALL += "--heads=2 --sample-bytes=4"

Log = list[dict[str, Any]]
for module in ("tqdm", "matplotlib.pyplot"):
    harness.preload(module)


def run(out: Path, processes: int, *arguments: str, restarts: int = 0, **environment: str) -> tuple[Log, str]:
    """The log of a run of the example by torchrun, and what was said. Without restarts its processes are forked, and
    have imported torch; with restarts each is a Python interpreter that begins, as for a user."""
    text = out.parent / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 50)
    command = ["--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={processes}", f"--max-restarts={restarts}"]
    if not restarts:
        command += ["--run-path", "--start-method=fork"]
    command += [str(EXAMPLE), *SMALL.split(), f"--data={text}", f"--out={out}", *arguments]
    settings = {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | environment
    code, said = harness.run_torchrun(out.parent, *command, timeout=250, **settings)
    assert code == 0, said[-3000:]
    return json.loads((out / "log.json").read_text())["log"], said


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Log]:
    """A run that nothing disturbs, and its log. With --resume=auto it begins: there is nothing yet."""
    out = tmp_path_factory.mktemp("example") / "whole"
    return out, run(out, 2, "--resume=auto")[0]


def assert_same_run(found: Log, expected: Log) -> None:
    assert [entry["loss"] for entry in found] == [entry["loss"] for entry in expected], "to the bit"
    assert found[-1]["val_loss"] == expected[-1]["val_loss"]


@pytest.mark.timeout(600)
def test_a_run_resumed_with_another_number_of_processes_continues_the_loss_curve(whole, tmp_path):
    out, log = whole
    assert [entry["step"] for entry in log] == list(range(1, 9))
    assert sorted(path.name for path in out.glob("step-*")) == ["step-4", "step-8"]
    other, _ = run(tmp_path / "other", 1, f"--resume={out / 'step-4'}")
    assert [entry["loss"] for entry in other] == pytest.approx([entry["loss"] for entry in log], abs=1e-5)
    assert other[-1]["val_loss"] == pytest.approx(log[-1]["val_loss"], abs=1e-5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ("hybrid", "hfsdp", "ddp"))
def test_a_run_resumed_with_another_strategy_continues_the_loss_curve(whole, tmp_path, strategy):
    out, log = whole
    mesh = [] if strategy == "ddp" else ["--mesh=2x2"]
    other, _ = run(tmp_path / "other", 4, f"--resume={out / 'step-4'}", f"--strategy={strategy}", *mesh)
    assert [entry["loss"] for entry in other] == pytest.approx([entry["loss"] for entry in log], abs=1e-5)


@pytest.mark.timeout(600)
def test_tensor_parallelism_trains_as_one_process(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))  # the example imports the other one
    losses = []
    for processes, mesh in ((1, "1x1"), (4, "2x2")):
        command = ["--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={processes}"]
        command += ["--run-path", "--start-method=fork", str(EXAMPLE.with_name("tensor_parallel.py"))]
        command += [f"--mesh={mesh}", "--steps=4"]
        (tmp_path / mesh).mkdir()
        code, said = harness.run_torchrun(tmp_path / mesh, *command, timeout=250, PYTHONPATH=str(ROOT))
        assert code == 0, said[-3000:]
        losses.append([float(number) for number in re.findall(r"(?:loss|norm) ([\d.]+)", said)])
    assert len(losses[0]) == 8 and losses[1] == pytest.approx(losses[0], abs=2e-3)


# Imported by every Python that starts: the second worker of the first attempt kills itself when it sees a checkpoint.
KILL_ONCE = """
import os, signal, threading, time

def watch(path):
    while not os.path.exists(path):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    threading.Thread(target=watch, args=(os.environ["KILL_AT"],), daemon=True).start()
"""


@pytest.mark.parametrize("how", ["", "--save-async"])
@pytest.mark.timeout(600)
def test_one_command_goes_on_by_itself_after_a_crash(whole, tmp_path, how):
    out, site = tmp_path / "crashed", tmp_path / "site"
    for name in ("step-best", "step-99.partial", "step-0100", "step-7", "other"):  # others' folders
        (out / name).mkdir(parents=True)
        (out / name / "notes").touch()
    site.mkdir()
    (site / "sitecustomize.py").write_text(KILL_ONCE)
    paths = os.pathsep.join([str(site), str(ROOT)])
    options = ["--resume=auto", *([how] if how else [])]
    found, said = run(out, 2, *options, restarts=2, PYTHONPATH=paths, KILL_AT=str(out / "step-4"))
    assert_same_run(found, whole[1])
    assert "exitcode: -9" in said, said[-2000:]
    assert (out / "step-7" / "notes").exists()


def test_resume_finds_the_latest_checkpoint(tmp_path):
    example = imported_example()

    def found(resume: str | None) -> Path | None:
        return example.checkpoint_to_resume(argparse.Namespace(out=tmp_path, resume=resume, save_every=4))

    with fake_process_group(world_size=1):
        assert found(None) is None and found("auto") is None
        with pytest.raises(SystemExit, match="there is no checkpoint"):
            found("latest")
        for name in ("step-8", "step-4", "step-12"):
            save({"x": 1}, tmp_path / name)
        for name in ("step-99.partial", "step-16"):  # it was not finished
            (tmp_path / name).mkdir()
            (tmp_path / name / ".metadata").touch()
        assert found("latest") == found("auto") == tmp_path / "step-12"
        assert found("elsewhere/step-2") == Path("elsewhere/step-2")
        with pytest.raises(SystemExit, match="--resume it"):
            found(None)


def imported_example() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_restarts_on_one_store_are_refused_with_the_remedy(monkeypatch):
    example = imported_example()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(SystemExit, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        example.refuse_restarts_on_one_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    example.refuse_restarts_on_one_store()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    example.refuse_restarts_on_one_store()
